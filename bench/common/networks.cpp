// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "networks.hpp"

#include <pufferfish/models/resnet.hpp>
#include <pufferfish/models/vgg.hpp>
#include <pufferfish/nn/fold_batch_norm.hpp>
#include <pufferfish/nn/frozen_model.hpp>
#include <pufferfish/nn/loss.hpp>
#include <pufferfish/optim/sgd.hpp>

#include <algorithm>
#include <array>
#include <map>
#include <stdexcept>
#include <type_traits>

namespace bench {
namespace {

namespace pf = pufferfish;
using net_type = pf::network<float>;
using bf16_net = pf::network<pf::bfloat16>;

struct image_network {
  const char* name;
  net_type (*make)();
  bf16_net (*make_bf16)();  // nullptr: none
  pf::factorize_policy (*policy)();
  extents<4> image;
  index_t classes;
};

/// Two blocks as in MobileNet (Howard et al., 2017): a depthwise 3x3 convolution, batch norm,
/// ReLU, a 1x1 convolution, batch norm, ReLU; 128 -> 256 channels, then 256 -> 256 with
/// stride 2. Then a classifier.
net_type mobile_blocks() {
  pf::Sequential<float> net;
  const auto add = [&net](const std::string& name, const conv_shape& shape) {
    net.add(name, pf::Conv<float>(shape));
    net.add(name + "_bn", pf::BatchNorm<float>(shape.out_channels)).add(name + "_relu", pf::ReLU<float>());
  };
  const auto depthwise = [](index_t channels, index_t stride) {
    conv_shape shape = conv_shape::square(channels, channels, 3, stride, 1);
    shape.groups = channels;
    return shape;
  };
  add("depthwise1", depthwise(128, 1));
  add("pointwise1", conv_shape::square(128, 256, 1));
  add("depthwise2", depthwise(256, 2));
  add("pointwise2", conv_shape::square(256, 256, 1));
  net.add("pool", pf::GlobalAvgPool<float>()).add("linear", pf::Linear<float>(256, 10));
  return net_type{pf::any_layer<float>(net)};
}

/// Factorizes the 1x1 convolutions, at a quarter of their rank.
pf::factorize_policy mobile_policy() {
  pf::factorize_policy policy;
  policy.also_if = [](const std::string& name, pf::matrix_size) { return name.starts_with("pointwise"); };
  return policy;
}

constexpr std::array<image_network, 3> image_networks{{
    {"resnet18",
     [] { return pf::resnet18<float>(); },
     [] { return pf::resnet18<pf::bfloat16>(); },
     &pf::resnet18_policy,
     {1, 32, 32, 3},
     10},
    {"vgg19",
     [] { return pf::vgg19<float>(); },
     [] { return pf::vgg19<pf::bfloat16>(); },
     &pf::vgg19_policy,
     {1, 32, 32, 3},
     10},
    {"mobile_blocks", &mobile_blocks, nullptr, &mobile_policy, {1, 28, 28, 128}, 10},
}};

const image_network& image_network_called(const std::string& name) {
  for (const image_network& n : image_networks) {
    if (n.name == name) return n;
  }
  throw std::runtime_error("no network is called " + name);
}

/// Calls f(summary, convolution, rank or 0) for every convolution, in execution order.
template <class T, class F>
void for_each_conv(const pf::network<T>& net, const extents<4>& input, F&& f) {
  std::map<std::string, std::pair<conv_shape, index_t>> shapes;
  net.for_each_layer([&](const std::string& name, const pf::any_layer<T>& layer) {
    if (const auto* conv = layer.template target<pf::Conv<T>>()) shapes[name] = {conv->shape(), 0};
    if (const auto* conv = layer.template target<pf::LowRankConv<T>>())
      shapes[name] = {conv->shape(), conv->rank()};
  });
  for (const pf::layer_summary& layer : net.summary(input)) {
    const auto at = shapes.find(layer.name);
    if (at != shapes.end()) f(layer, at->second.first, at->second.second);
  }
}

double sum_of(const std::vector<work>& parts, double peak, const bandwidth& b) {
  double sum = 0;
  for (const work& part : parts) sum += part.least_seconds(peak, b);
  return sum;
}

/// The network `which` with random weights, factorized unless the name of `mode` begins with "dense".
template <class T>
pf::network<T> made(const image_network& which, const std::string& mode) {
  pf::network<T> net = [&] {
    if constexpr (std::is_same_v<T, float>) {
      return which.make();
    } else {
      return which.make_bf16();
    }
  }();
  net.initialize(1);
  if (!mode.starts_with("dense")) pf::factorize(net, which.policy());
  return net;
}

extents<4> with_batch(extents<4> image, index_t batch) {
  image[0] = batch;
  return image;
}

class image_inference final : public inference {
 public:
  image_inference(const image_network& which, const std::string& mode, const std::string& form, index_t batch,
                  int threads)
      : served_(form_of(made<float>(which, mode), form)),
        packs_once_(form == "frozen"),
        ctx_({threads, 1}),
        x_(with_batch(which.image, batch)),
        y_({batch, 1, 1, which.classes}) {
    pf::fill_normal(x_.flat(), 1.0, pf::random_stream(5, 1));
    for_each_conv(served_.get(), x_.shape(), [&](const auto& layer, const conv_shape& shape, index_t rank) {
      parts_.push_back(conv_work(shape, rank, layer.input).forward());
    });
  }

  void run() override {
    if (packs_once_) return served_.forward(ctx_, x_.view(), y_.view());
    served_.get().forward(ctx_, x_.view(), y_.view());
  }
  index_t parameters() const override { return served_.get().parameter_count(); }
  double least_seconds(double peak, const bandwidth& b) const override { return sum_of(parts_, peak, b); }

 private:
  static net_type form_of(net_type net, const std::string& form) {
    if (form != "trained") pf::fold_batch_norm(net);
    return net;
  }

  pf::frozen_model<net_type> served_;
  bool packs_once_;
  pf::cpu_context ctx_;
  pf::tensor<float, 4> x_, y_;
  std::vector<work> parts_;
};

template <class T>
class image_step final : public image_training_step {
 public:
  image_step(const image_network& which, const std::string& mode, index_t batch, int threads)
      : net_(made<T>(which, mode)),
        ctx_({threads, 1, !mode.ends_with("_direct")}),
        optimizer_(pf::make_optimizer_target(net_.store()), options()),
        x_(with_batch(which.image, batch)),
        y_({batch, 1, 1, which.classes}),
        dy_(y_.shape()),
        labels_(static_cast<std::size_t>(batch)) {
    if (mode == "hybrid_recompute") net_.modify(recompute_inner_activations);
    ctx_.set_mode(pf::run_mode::training);
    pf::fill_normal(x_.flat(), 1.0, pf::random_stream(5, 1));
    for (std::size_t i = 0; i < labels_.size(); ++i) {
      labels_[i] = static_cast<std::int32_t>(i % static_cast<std::size_t>(which.classes));
    }
    for_each_conv(net_, x_.shape(), [&](const auto& layer, const conv_shape& shape, index_t rank) {
      const conv_work cost(shape, rank, layer.input);
      parts_.push_back(cost.forward());
      parts_.push_back(cost.grad_weight());
      if (parts_.size() > 2) parts_.push_back(cost.grad_input());
    });
  }

  pf::cpu_context& context() override { return ctx_; }
  pf::parameter_store<float>& store() override { return net_.store(); }
  void forward() override {
    ctx_.begin_step(step_++);
    net_.forward(ctx_, x_.view(), y_.view());
    loss_(ctx_, y_.view(), labels_, static_cast<double>(labels_.size()), dy_.view());
  }
  void backward() override { net_.backward(ctx_, dy_.view()); }
  void begin_update() override { optimizer_.begin_step(ctx_, 0.01); }
  void update(index_t offset, index_t size) override { optimizer_.step_range(ctx_, offset, size); }
  index_t parameters() const override { return net_.parameter_count(); }
  std::string items() const override { return std::to_string(x_.extent(0)) + " images"; }
  index_t tokens() const override { return 0; }
  double least_seconds(double peak, const bandwidth& b) const override { return sum_of(parts_, peak, b); }
  std::size_t working_bytes() const override { return ctx_.peak_bytes(); }
  std::size_t working_allocations() const override { return ctx_.system_allocations(); }

 private:
  static void recompute_inner_activations(pf::any_layer<T>& root) {
    struct setter final : pf::layer_visitor<T, pf::device::cpu> {
      void on_layer(const std::string&, pf::any_layer<T>& slot) override {
        if (auto* conv = slot.template target<pf::LowRankConv<T>>()) conv->set_recompute(true);
      }
    } visitor;
    root.visit_layers(visitor);
  }
  static pf::sgd_options options() {
    pf::sgd_options o;
    o.momentum = 0.9;
    o.weight_decay = 1e-4;
    o.decay_all = true;
    return o;
  }

  pf::network<T> net_;
  pf::cpu_context ctx_;
  pf::SoftmaxCrossEntropy<T> loss_;
  pf::SGD<float> optimizer_;
  pf::tensor<T, 4> x_, y_, dy_;
  std::vector<std::int32_t> labels_;
  std::vector<work> parts_;
  std::uint64_t step_ = 0;
};

}  // namespace

std::vector<std::string> image_network_names() {
  std::vector<std::string> names;
  for (const image_network& n : image_networks) names.emplace_back(n.name);
  return names;
}

std::vector<std::string> network_names() {
  std::vector<std::string> names = image_network_names();
  names.insert(names.end(), {"lstm", "transformer"});
  return names;
}

index_t default_batch(const std::string& network) {
  return network == "lstm" ? 20 : network == "transformer" || network == "mobile_blocks" ? 32 : 128;
}

std::vector<std::string> default_modes(const std::string& network) {
  return {"dense", network == "lstm" ? "lowrank" : "hybrid"};
}

std::vector<conv_layer> conv_layers(const std::string& network) {
  const image_network& which = image_network_called(network);
  net_type net = which.make();
  net_type factorized = net;
  factorized.initialize(1);
  std::vector<std::string> chosen;
  for (const auto& layer : pf::factorize(factorized, which.policy()).layers) chosen.push_back(layer.name);

  std::vector<conv_layer> result;
  for_each_conv(net, which.image, [&](const auto& layer, const conv_shape& shape, index_t) {
    auto same = std::find_if(result.begin(), result.end(),
                             [&](const conv_layer& l) { return l.shape == shape && l.input == layer.input; });
    if (same == result.end()) {
      result.push_back({layer.name, shape, layer.input, 0, 0});
      same = result.end() - 1;
    }
    ++same->count;
    same->factorized += std::find(chosen.begin(), chosen.end(), layer.name) != chosen.end() ? 1 : 0;
  });
  return result;
}

std::unique_ptr<training_step> make_training_step(const std::string& network, const std::string& mode,
                                                  index_t batch, int threads) {
  if (auto step = make_sequence_step(network, mode, batch, threads)) return step;
  return make_image_step(network, mode, batch, threads);
}

std::unique_ptr<image_training_step> make_image_step(const std::string& network, const std::string& mode,
                                                     index_t batch, int threads) {
  constexpr std::array known{"dense",         "hybrid",     "hybrid_recompute", "dense_direct",
                             "hybrid_direct", "dense_bf16", "hybrid_bf16"};
  if (std::ranges::find(known, mode) == known.end()) {
    throw std::runtime_error("no mode is called " + mode);
  }
  const image_network& which = image_network_called(network);
  if (!mode.ends_with("_bf16")) return std::make_unique<image_step<float>>(which, mode, batch, threads);
  if (which.make_bf16 == nullptr) throw std::runtime_error(network + " is not measured in bf16");
  return std::make_unique<image_step<pf::bfloat16>>(which, mode, batch, threads);
}

std::unique_ptr<inference> make_inference(const std::string& network, const std::string& mode,
                                          const std::string& form, index_t batch, int threads) {
  return std::make_unique<image_inference>(image_network_called(network), mode, form, batch, threads);
}

double switch_seconds(const std::string& network, int threads) {
  const image_network& which = image_network_called(network);
  net_type net = which.make();
  net.initialize(1);
  pf::factorize_policy policy = which.policy();
  policy.threads = threads;
  const auto start = clock::now();
  pf::factorize(net, policy);
  return seconds_since(start);
}

}  // namespace bench
