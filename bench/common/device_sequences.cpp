// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "device_layers.hpp"
#include "device_steps.hpp"

#include <pufferfish/core/random.hpp>
#include <pufferfish/gpu.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/transformer.hpp>
#include <pufferfish/nn/factorize.hpp>

namespace bench {
namespace {

namespace pf = pufferfish;
using pf::device::gpu;

std::vector<std::int32_t> random_tokens(index_t count, std::int32_t first, index_t vocabulary,
                                        std::uint64_t stream) {
  const pf::random_stream random(5, stream);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] =
        first + static_cast<std::int32_t>(random.below(i, static_cast<std::uint64_t>(vocabulary - first)));
  }
  return tokens;
}

template <class Root>
pf::model<Root, gpu> made(Root root, const std::string& mode, const pf::factorize_policy& policy) {
  pf::model<Root, gpu> net(std::move(root));
  net.initialize(1);
  if (mode == "hybrid") static_cast<void>(pf::factorize(net, policy));
  return net;
}

/// Times the layers of a model one by one; input_of(layer): the layer's input.
template <class T, class Model, class InputOf>
std::vector<layer_time> layers_of(pf::gpu_context& ctx, Model& net, const layer_timing& how,
                                  InputOf&& input_of) {
  layer_finder<T> finder;
  net.modify([&](auto& root) { root.visit_layers(finder); });
  std::vector<layer_time> result;
  for (const auto& [name, layer] : finder.layers) {
    result.push_back(time_layer<T>(ctx, *layer, summary_of<T>(name, *layer, input_of(*layer)), false, how));
  }
  return result;
}

/// Steps over 35 tokens of each sequence, with gradient clipping and SGD.
template <class T>
class lstm_step final : public device_step {
 public:
  explicit lstm_step(const device_case& which)
      : device_step(which),
        net_(made(pf::lstm_lm<T, gpu>(options(which.tiny)), which.mode, pf::lstm_lm_policy())),
        shape_{which.tiny ? 4 : 35, which.batch},
        tokens_(pf::gpu::device_memory(), pf::volume<2>(shape_)),
        targets_(pf::gpu::device_memory(), pf::volume<2>(shape_)),
        state_(net_.root().make_state(which.batch)),
        results_(pf::gpu::device_memory(), 2),
        facts_(pf::gpu::device_memory(), 1),
        optimizer_(pf::make_optimizer_target(net_.store()), {}) {
    const index_t vocabulary = net_.root().options().vocabulary;
    tokens_.from_host(random_tokens(tokens_.size(), 0, vocabulary, 1));
    targets_.from_host(random_tokens(targets_.size(), 0, vocabulary, 2));
    optimizer_.set_control({nullptr, &facts_.data()->scale});
  }

  index_t parameters() const override { return net_.parameter_count(); }
  std::string items() const override {
    return std::to_string(shape_[1]) + " sequences of " + std::to_string(shape_[0]) + " tokens";
  }
  double macs() const override {
    return static_cast<double>(net_.root().cost(pf::volume<2>(shape_)).total().macs);
  }
  std::vector<layer_time> layers(int repeats, int samples) override {
    const index_t width = net_.root().options().width;
    return layers_of<T>(ctx_, net_, {repeats, samples, captured()}, [&](const auto&) {
      return pf::extents<4>{shape_[1], shape_[0], 1, width};
    });
  }

 private:
  static pf::lstm_lm_options options(bool tiny) {
    pf::lstm_lm_options o;
    if (tiny) {
      o.vocabulary = 50;
      o.width = 16;
    }
    return o;
  }
  void prepare() override { optimizer_.begin_step(ctx_, 0.1); }
  void work() override {
    const pf::tensor_view<const std::int32_t, 2> tokens(tokens_.data(), shape_),
        targets(targets_.data(), shape_);
    net_.root().loss(ctx_, tokens, targets, state_, results_.data());
    net_.root().backward(ctx_, static_cast<double>(tokens.size()));
    pf::gpu::gradient_norm(ctx_, net_.store().gradients(), 0.25, facts_.data());
    optimizer_.step_range(ctx_, 0, net_.parameter_count());
  }

  pf::model<pf::lstm_lm<T, gpu>, gpu> net_;
  pf::extents<2> shape_;
  pf::memory_block<std::int32_t> tokens_, targets_;
  pf::lstm_lm_state<T, gpu> state_;
  pf::memory_block<double> results_;
  pf::memory_block<pf::gpu::kernels::gradient_facts> facts_;
  pf::SGD<float, pf::device::gpu> optimizer_;
};

/// Steps over pairs of 30 + 30 tokens without padding, with label smoothing and Adam.
template <class T>
class transformer_step final : public device_step {
 public:
  explicit transformer_step(const device_case& which)
      : device_step(which),
        net_(made(pf::transformer<T, gpu>(options(which.tiny)), which.mode, pf::transformer_policy())),
        shape_{which.batch, which.tiny ? 5 : 30},
        packing_({shape_[0], pf::volume<2>(shape_), pf::volume<2>(shape_), true}),
        batch_(pf::gpu::device_memory(), packing_.bytes()),
        results_(pf::gpu::device_memory(), 2),
        optimizer_(pf::make_optimizer_target(net_.store()), adam()) {
    const pf::transformer_options& o = net_.root().options();
    const auto tokens = [&](std::uint64_t stream) {
      return random_tokens(pf::volume<2>(shape_), o.padding + 1, o.vocabulary, stream);
    };
    const auto source = tokens(1), target = tokens(2), next = tokens(3);
    std::vector<std::byte> packed(static_cast<std::size_t>(packing_.bytes()));
    packing_.write(packed.data(), {source.data(), shape_}, {target.data(), shape_}, {next.data(), shape_},
                   o.padding, 0, o.positions);
    batch_.from_host(packed);
  }

  index_t parameters() const override { return net_.parameter_count(); }
  std::string items() const override {
    const std::string length = std::to_string(shape_[1]);
    return std::to_string(shape_[0]) + " pairs of " + length + " + " + length + " tokens";
  }
  double macs() const override {
    return static_cast<double>(shape_[0] * net_.root().cost(shape_[1], shape_[1]).total().macs);
  }
  /// Times the projections and the feed-forward blocks.
  std::vector<layer_time> layers(int repeats, int samples) override {
    return layers_of<T>(ctx_, net_, {repeats, samples, captured()}, [&](const auto& layer) {
      const index_t width = layer.first_matrix().cols;
      return pf::extents<4>{pf::volume<2>(shape_), 1, 1, width};
    });
  }

 private:
  static pf::transformer_options options(bool tiny) {
    pf::transformer_options o;
    if (tiny) {
      o.vocabulary = 40;
      o.width = 16;
      o.hidden = 32;
      o.layers = 2;
      o.heads = 2;
      o.key = o.value = 8;
    }
    return o;
  }
  static pf::adam_options adam() {
    pf::adam_options o;
    o.beta2 = 0.98;
    o.eps = 1e-9;
    return o;
  }
  void prepare() override { optimizer_.begin_step(ctx_, 1e-5); }
  void work() override {
    net_.root().loss(ctx_, packing_.in(batch_.data()), {0.1, pf::smoothing_kind::wrong_classes},
                     results_.data());
    net_.root().backward(ctx_, static_cast<double>(pf::volume<2>(shape_)));
    optimizer_.step_range(ctx_, 0, net_.parameter_count());
  }

  pf::model<pf::transformer<T, gpu>, gpu> net_;
  pf::extents<2> shape_;
  pf::pair_packing packing_;
  pf::memory_block<std::byte> batch_;
  pf::memory_block<double> results_;
  pf::Adam<float, pf::device::gpu> optimizer_;
};

template <class T>
std::unique_ptr<device_step> new_sequence_step(const device_case& which) {
  if (which.network == "lstm") return std::make_unique<lstm_step<T>>(which);
  if (which.network == "transformer") return std::make_unique<transformer_step<T>>(which);
  return nullptr;
}

}  // namespace

std::unique_ptr<device_step> make_device_sequence_step(const device_case& which) {
  return which.precision == "bf16" ? new_sequence_step<pf::gpu::bf16>(which)
                                   : new_sequence_step<float>(which);
}

}  // namespace bench
