// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "device_layers.hpp"
#include "device_steps.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>

#include <pufferfish/core/random.hpp>
#include <pufferfish/gpu.hpp>
#include <pufferfish/models/imagenet_resnet.hpp>
#include <pufferfish/models/resnet.hpp>
#include <pufferfish/models/vgg.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/loss.hpp>

namespace bench {
namespace {

namespace pf = pufferfish;
using pf::extents;
template <class T>
using net_type = pf::network<T, pf::device::gpu>;

template <class T>
struct image_network {
  net_type<T> net;
  pf::factorize_policy policy;
  extents<4> input;
  index_t classes;
};

/// A published network, complete or with a few of its channels.
template <class T>
std::optional<image_network<T>> network_called(const device_case& which) {
  const index_t width = which.tiny ? 8 : 64;
  if (which.network == "resnet18") {
    pf::resnet18_options options;
    options.width = width;
    const index_t side = which.tiny ? 16 : 32;
    return image_network<T>{pf::resnet18<T, pf::device::gpu>(options),
                            pf::resnet18_policy(),
                            {which.batch, side, side, 3},
                            options.classes};
  }
  if (which.network == "vgg19") {
    pf::vgg_options options;
    options.width = width;
    return image_network<T>{pf::vgg19<T, pf::device::gpu>(options),
                            pf::vgg19_policy(),
                            {which.batch, 32, 32, 3},
                            options.classes};
  }
  if (which.network == "resnet50") {
    pf::imagenet_resnet_options options;
    options.width = width;
    if (which.tiny) options.classes = 10;
    const index_t side = which.tiny ? 32 : 224;
    return image_network<T>{pf::resnet50<T, pf::device::gpu>(options),
                            pf::resnet50_policy(),
                            {which.batch, side, side, 3},
                            options.classes};
  }
  return std::nullopt;
}

template <class T>
class image_step final : public device_step {
 public:
  image_step(const device_case& which, image_network<T> network)
      : device_step(which),
        net_(made(std::move(network.net), which.mode, network.policy)),
        input_(network.input),
        output_{which.batch, 1, 1, network.classes},
        x_(pf::gpu::device_memory(), pf::volume<4>(input_)),
        y_(pf::gpu::device_memory(), pf::volume<4>(output_)),
        dy_(pf::gpu::device_memory(), pf::volume<4>(output_)),
        labels_(pf::gpu::device_memory(), which.batch),
        results_(pf::gpu::device_memory(), 2),
        optimizer_(pf::make_optimizer_target(net_.store()), options()) {
    fill_device(x_.span(), 1);
    std::vector<std::int32_t> labels(static_cast<std::size_t>(which.batch));
    for (std::size_t i = 0; i < labels.size(); ++i) {
      labels[i] = static_cast<std::int32_t>(i % static_cast<std::size_t>(network.classes));
    }
    labels_.from_host(labels);
    if (which.cudnn) library_ = make_cudnn(ctx_);
    ctx_.use(library_.get());
  }

  index_t parameters() const override { return net_.parameter_count(); }
  std::string items() const override { return std::to_string(input_[0]) + " images"; }
  double macs() const override { return static_cast<double>(net_.macs(input_)); }

  std::vector<layer_time> layers(int repeats, int samples) override {
    layer_finder<T> finder;
    net_.modify([&](auto& root) { root.visit_layers(finder); });
    std::map<std::string, pf::any_layer<T, pf::device::gpu>*> slots;
    for (const auto& [name, layer] : finder.layers) slots[name] = layer;
    std::vector<layer_time> result;
    for (const pf::layer_summary& layer : net_.summary(input_)) {
      const auto slot = slots.find(layer.name);
      if (slot == slots.end()) continue;
      result.push_back(
          time_layer<T>(ctx_, *slot->second, layer, result.empty(), {repeats, samples, captured()}));
    }
    return result;
  }

 private:
  static net_type<T> made(net_type<T> net, const std::string& mode, const pf::factorize_policy& policy) {
    net.initialize(1);
    if (mode == "hybrid") static_cast<void>(pf::factorize(net, policy));
    return net;
  }
  static pf::sgd_options options() {
    pf::sgd_options o;
    o.momentum = 0.9;
    o.weight_decay = 1e-4;
    o.decay_all = true;
    return o;
  }

  void prepare() override { optimizer_.begin_step(ctx_, 0.01); }
  void work() override {
    const pf::tensor_view<T, 4> y(y_.data(), output_), dy(dy_.data(), output_);
    net_.forward(ctx_, {x_.data(), input_}, y);
    loss_(ctx_, y, labels_.span(), static_cast<double>(input_[0]), dy, results_.data());
    net_.backward(ctx_, dy);
    optimizer_.step_range(ctx_, 0, net_.parameter_count());
  }

  net_type<T> net_;
  extents<4> input_, output_;
  pf::memory_block<T> x_, y_, dy_;
  pf::memory_block<std::int32_t> labels_;
  pf::memory_block<double> results_;
  pf::SoftmaxCrossEntropy<T> loss_;
  pf::SGD<float, pf::device::gpu> optimizer_;
  std::unique_ptr<pf::gpu::conv_library> library_;
};

template <class T>
std::unique_ptr<device_step> new_image_step(const device_case& which) {
  std::optional<image_network<T>> network = network_called<T>(which);
  if (!network) return nullptr;
  return std::make_unique<image_step<T>>(which, std::move(*network));
}

}  // namespace

std::unique_ptr<device_step> make_device_image_step(const device_case& which) {
  return which.precision == "bf16" ? new_image_step<pf::gpu::bf16>(which) : new_image_step<float>(which);
}

}  // namespace bench
