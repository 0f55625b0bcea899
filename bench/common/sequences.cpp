// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "networks.hpp"

#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/transformer.hpp>
#include <pufferfish/optim/adam.hpp>
#include <pufferfish/optim/clip.hpp>
#include <pufferfish/optim/sgd.hpp>

#include <span>
#include <stdexcept>
#include <string>

namespace bench {
namespace {

namespace pf = pufferfish;

/// Random tokens in first .. vocabulary - 1.
void fill_tokens(std::span<std::int32_t> tokens, std::int32_t first, index_t vocabulary,
                 std::uint64_t stream) {
  const pf::random_stream random(5, stream);
  std::uint64_t number = 0;
  for (std::int32_t& token : tokens) {
    token = first +
            static_cast<std::int32_t>(random.below(number++, static_cast<std::uint64_t>(vocabulary - first)));
  }
}

/// Common base of the steps of networks with a typed root.
template <class Root>
class sequence_step : public training_step {
 public:
  index_t parameters() const override { return net_.parameter_count(); }
  double least_seconds(double peak, const bandwidth&) const override {
    return 3 * 2 * static_cast<double>(macs()) / (peak * 1e9);
  }
  std::size_t working_bytes() const override { return ctx_.peak_bytes(); }
  std::size_t working_allocations() const override { return ctx_.system_allocations(); }

 protected:
  sequence_step(Root root, const std::string& mode, const pf::factorize_policy& hybrid,
                const pf::factorize_policy& lowrank, int threads)
      : net_(std::move(root)), ctx_({threads, 1}) {
    const std::string form = mode.substr(0, mode.find("_bf16"));
    net_.initialize(1);
    if (form == "hybrid") {
      pf::factorize(net_, hybrid);
    } else if (form == "lowrank") {
      pf::factorize(net_, lowrank);
    } else if (form != "dense") {
      throw std::runtime_error("no mode is called " + mode);
    }
    ctx_.set_mode(pf::run_mode::training);
  }
  /// Multiply-accumulates of a forward pass.
  virtual index_t macs() const = 0;

  pf::model<Root> net_;
  pf::cpu_context ctx_;
  std::uint64_t step_ = 0;
};

/// The language model of WikiText-2: 2 layers of width 1500; the state is kept from step to step.
template <class T>
class lstm_step final : public sequence_step<pf::lstm_lm<T>> {
  using base = sequence_step<pf::lstm_lm<T>>;
  using base::ctx_;
  using base::net_;

 public:
  static constexpr index_t steps = 35;

  lstm_step(const std::string& mode, index_t batch, int threads)
      : base(pf::lstm_lm<T>(pf::lstm_lm_options{}), mode, pf::lstm_lm_policy(), pf::lstm_lm_policy(),
             threads),
        optimizer_(pf::make_optimizer_target(net_.store()), {}),
        state_(net_.root().make_state(batch)),
        tokens_({steps, batch}),
        targets_({steps, batch}) {
    fill_tokens(tokens_.flat(), 0, net_.root().options().vocabulary, 1);
    fill_tokens(targets_.flat(), 0, net_.root().options().vocabulary, 2);
  }

  void run() override {
    ctx_.begin_step(this->step_++);
    const pf::token_loss_result loss = net_.root().loss(ctx_, tokens_, targets_, state_);
    net_.root().backward(ctx_, static_cast<double>(loss.tokens));
    pf::clip_gradient_norm<float>(ctx_, net_.store().gradients(), 0.25);
    optimizer_.step(ctx_, 0.1);
  }
  std::string items() const override {
    return std::to_string(tokens_.extent(1)) + " sequences of " + std::to_string(steps) + " tokens";
  }
  index_t tokens() const override { return tokens_.size(); }

 private:
  index_t macs() const override { return net_.root().cost(tokens_.size()).total().macs; }

  pf::SGD<float> optimizer_;
  pf::lstm_lm_state<T> state_;
  pf::tensor<std::int32_t, 2> tokens_, targets_;
};

/// The translator of Multi30k: 6 + 6 layers of width 512, sentences without padding.
template <class T>
class transformer_step final : public sequence_step<pf::transformer<T>> {
  using base = sequence_step<pf::transformer<T>>;
  using base::ctx_;
  using base::net_;

 public:
  static constexpr index_t length = 30;

  transformer_step(const std::string& mode, index_t batch, int threads)
      : base(pf::transformer<T>(pf::transformer_options{}), mode, pf::transformer_policy(),
             pf::transformer_low_rank_policy(), threads),
        optimizer_(pf::make_optimizer_target(net_.store()), options()),
        source_({batch, length}),
        target_({batch, length}),
        next_({batch, length}) {
    const pf::transformer_options& o = net_.root().options();
    std::uint64_t stream = 1;
    for (auto* sentences : {&source_, &target_, &next_}) {
      fill_tokens(sentences->flat(), o.padding + 1, o.vocabulary, stream++);
    }
  }

  void run() override {
    ctx_.begin_step(this->step_++);
    net_.root().loss(ctx_, source_, target_, next_, {0.1, pf::smoothing_kind::wrong_classes});
    net_.root().backward(ctx_, static_cast<double>(next_.size()));
    optimizer_.step(ctx_, 1e-5);
  }
  std::string items() const override {
    return std::to_string(source_.extent(0)) + " pairs of " + std::to_string(length) + " + " +
           std::to_string(length) + " tokens";
  }
  index_t tokens() const override { return source_.size() + target_.size(); }

 private:
  // Products of masked attention are counted in full: 0.2 % of all.
  index_t macs() const override { return source_.extent(0) * net_.root().cost(length, length).total().macs; }
  static pf::adam_options options() {
    pf::adam_options o;
    o.beta2 = 0.98;
    o.eps = 1e-9;
    return o;
  }

  pf::Adam<float> optimizer_;
  pf::tensor<std::int32_t, 2> source_, target_, next_;
};

template <class T>
std::unique_ptr<training_step> made(const std::string& network, const std::string& mode, index_t batch,
                                    int threads) {
  if (network == "lstm") return std::make_unique<lstm_step<T>>(mode, batch, threads);
  if (network == "transformer") return std::make_unique<transformer_step<T>>(mode, batch, threads);
  return nullptr;
}

}  // namespace

std::unique_ptr<training_step> make_sequence_step(const std::string& network, const std::string& mode,
                                                  index_t batch, int threads) {
  return mode.ends_with("_bf16") ? made<pf::bfloat16>(network, mode, batch, threads)
                                 : made<float>(network, mode, batch, threads);
}

}  // namespace bench
