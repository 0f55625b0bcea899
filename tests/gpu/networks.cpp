// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Whole networks of images on a device: outputs, gradients of every parameter and statistics as on the CPU.
#include "support.hpp"

#include <string>

#include <pufferfish/gpu.hpp>
#include <pufferfish/models/imagenet_resnet.hpp>
#include <pufferfish/models/mlp.hpp>
#include <pufferfish/models/resnet.hpp>
#include <pufferfish/models/small_vgg.hpp>
#include <pufferfish/nn.hpp>
#include <pufferfish/prune/slice/slice_channels.hpp>

using namespace gpu_test;

namespace {

using gpu_network = pf::network<float, pf::device::gpu>;

// The gradients of a device's model, on the host, arranged as its arena.
std::vector<float> gradients_of(gpu_network& net) {
  const std::span<float> gradients = net.store().gradients();
  std::vector<float> result(gradients.size());
  pf::gpu::device_memory().to_host(result.data(), gradients.data(), result.size() * sizeof(float));
  return result;
}

std::vector<float> buffers_of(gpu_network& net) {
  std::vector<float> result;
  net.read_on_host([&](const auto&) {
    for (const auto& entry : net.store().buffer_entries()) {
      result.insert(result.end(), entry.thing->values().begin(), entry.thing->values().end());
    }
  });
  return result;
}

// One training pass on both: the same output, gradient of each parameter, gradient of the input, statistics.
void check_pass(pf::network<float>& host_net, gpu_network& net, const pf::extents<4>& input) {
  pf::gpu_context& ctx = gpu_context();
  pf::context_options options;
  options.winograd = false;
  pf::cpu_context host(options);
  pf::copy_state(host_net, net);
  host.set_mode(pf::run_mode::training);
  const pf::mode_scope<pf::device::gpu> training(ctx, pf::run_mode::training);
  const pf::extents<4> output = host_net.output_shape(input);
  auto x = random_twin<float>(pf::volume<4>(input), 1);
  auto y = random_twin<float>(pf::volume<4>(output), 2), dy = random_twin<float>(y.size(), 3);
  auto dx = random_twin<float>(x.size(), 4);
  host.begin_step(5);
  host_net.forward(host, x.host_view(input), y.host_view(output));
  host_net.backward(host, dy.host_view(output), dx.host_view(input));
  ctx.begin_step(5);
  net.forward(ctx, x.device_view(input), y.device_view(output));
  net.backward(ctx, dy.device_view(output), dx.device_view(input));
  CHECK(ctx.tape().empty());
  CHECK(difference(y) < 1e-4);
  CHECK(difference(dx) < 1e-4);
  // A shift that the following batch norm removes has a gradient of zero plus rounding: hence a common scale.
  // Batch norms of few rows amplify rounding: 1.1e-4 is seen on an H100.
  const std::vector<float> gradients = gradients_of(net);
  double scale = 0.0;
  for (const float g : host_net.store().gradients())
    scale = std::max(scale, 0.01 * std::abs(static_cast<double>(g)));
  for (const auto& entry : host_net.store().parameters()) {
    CAPTURE(entry.name);
    const auto size = static_cast<std::size_t>(entry.thing->size());
    const std::span<const float> got(gradients.data() + entry.offset, size);
    CHECK(difference(got, std::span<const float>(entry.thing->gradient()), scale) < 2e-4);
  }
  const std::span<const float> buffers = host_net.store().buffers();
  CHECK(difference(std::span<const float>(buffers_of(net)), buffers) < 1e-5);
}

template <class Make>
void check_network(Make&& make, const pf::extents<4>& input) {
  pf::network<float> host_net = make(pf::device::cpu{});
  gpu_network net = make(pf::device::gpu{});
  host_net.initialize(11);
  check_pass(host_net, net, input);
  // The hybrid that it becomes: the structure on both sides, the factors of one.
  pf::factorize_policy policy;
  policy.first_layer = 2;
  const pf::factorization made = pf::factorize(host_net, policy);
  pf::apply_ranks(net, made.ranks());
  check_pass(host_net, net, input);
}

template <class Device>
pf::small_resnet_options small_options(Device) {
  pf::small_resnet_options options;
  options.width = 4;
  options.stages = 2;
  return options;
}

/// Grouped and depthwise convolutions, dense and of low rank, with batch norms after and between them.
template <class Device>
pf::network<float, Device> grouped_network() {
  using namespace pf;
  const auto shape = [](index_t in, index_t out, index_t groups, index_t kernel, index_t stride) {
    conv_shape result = conv_shape::square(in, out, kernel, stride, kernel / 2);
    result.groups = groups;
    return result;
  };
  Sequential<float, Device> layers;
  layers.add("stem", Conv<float>(shape(3, 8, 1, 3, 1), false));
  layers.add("bn1", BatchNorm<float>(8));
  layers.add("relu1", ReLU<float>());
  layers.add("depthwise", Conv<float>(shape(8, 8, 8, 3, 2), false));
  layers.add("bn2", BatchNorm<float>(8));
  layers.add("relu2", ReLU<float>());
  layers.add("grouped", Conv<float>(shape(8, 12, 4, 3, 1), true));
  layers.add("multiplied", Conv<float>(shape(12, 24, 12, 3, 1), false));
  layers.add("bn3", BatchNorm<float>(24));
  layers.add("low_rank", LowRankConv<float>(shape(24, 18, 3, 3, 2), 2, true));
  layers.add("relu3", ReLU<float>());
  layers.add("normed", LowRankNormConv<float, Device>(shape(18, 12, 2, 3, 1), 3));
  layers.add("pool", GlobalAvgPool<float>());
  layers.add("fc", Linear<float>(12, 5));
  return network<float, Device>{any_layer<float, Device>(std::move(layers))};
}

}  // namespace

TEST_CASE("gpu networks: grouped and depthwise convolutions, dense and of low rank") {
  pf::network<float> host_net = grouped_network<pf::device::cpu>();
  gpu_network net = grouped_network<pf::device::gpu>();
  host_net.initialize(11);
  check_pass(host_net, net, {3, 9, 8, 3});
}

TEST_CASE("gpu networks: a residual network with and without batch norm") {
  for (const bool batch_norm : {true, false}) {
    CAPTURE(batch_norm);
    check_network(
        [&](auto device) {
          pf::small_resnet_options options = small_options(device);
          options.batch_norm = batch_norm;
          return pf::small_resnet<float, decltype(device)>(options);
        },
        {3, 9, 8, 3});
  }
}

TEST_CASE("gpu networks: large batch norms, with moments that convolutions collect") {
  check_network([](auto device) { return pf::small_resnet<float, decltype(device)>(small_options(device)); },
                {20, 18, 17, 3});
}

TEST_CASE("gpu networks: blocks that read a part of the channels, sliced on the device") {
  const auto make = [](auto device) {
    return pf::small_resnet<float, decltype(device)>(small_options(device));
  };
  pf::network<float> host_net = make(pf::device::cpu{});
  gpu_network net = make(pf::device::gpu{});
  host_net.initialize(11);
  pf::copy_state(host_net, net);
  pf::channel_mask mask = pf::whole_mask(pf::channel_groups(net, pf::group_choice::any));
  for (const std::size_t removed : {std::size_t{3}, std::size_t{2}}) {
    for (pf::channel_marks& marks : mask) {
      for (std::size_t c = 0; c < marks.keep.size(); ++c) marks.keep[c] = c % 4 != removed;
    }
    pf::slice_channels(host_net, mask);
    pf::slice_channels(net, mask);
    CHECK(buffers_of(net).size() == host_net.store().buffers().size());
    check_pass(host_net, net, {3, 9, 8, 3});
    mask = pf::whole_mask(pf::channel_groups(net, pf::group_choice::any));
  }
  pf::apply_widths(net, {{"layer1.0.select", 1}});
  pf::apply_widths(host_net, {{"layer1.0.select", 1}});
  host_net.initialize(12);
  check_pass(host_net, net, {3, 9, 8, 3});
}

TEST_CASE("gpu networks: ResNet-18, narrow") {
  check_network(
      [](auto device) {
        pf::resnet18_options options;
        options.width = 4;
        return pf::resnet18<float, decltype(device)>(options);
      },
      {2, 16, 16, 3});
}

TEST_CASE("gpu networks: VGG with dropout, perceptron") {
  check_network(
      [](auto device) {
        pf::small_vgg_options options;
        options.image = {8, 8};
        options.width = 4;
        options.hidden = 24;
        return pf::small_vgg<float, decltype(device)>(options);
      },
      {3, 8, 8, 3});
  check_network(
      [](auto device) {
        pf::mlp_options options;
        options.inputs = 17;
        options.classes = 5;
        return pf::mlp<float, decltype(device)>(options);
      },
      {7, 1, 1, 17});
}

TEST_CASE("gpu networks: bottlenecks, and factors with a batch norm between them") {
  const auto options = [](bool factor_bn) {
    pf::imagenet_resnet_options result;
    result.width = 4;
    result.blocks = {1, 1, 1, 1};
    result.classes = 6;
    result.factor_bn = factor_bn;
    return result;
  };
  check_network([&](auto device) { return pf::resnet50<float, decltype(device)>(options(false)); },
                {2, 33, 33, 3});
  pf::network<float> host_net = pf::resnet18_imagenet<float>(options(true));
  gpu_network net = pf::resnet18_imagenet<float, pf::device::gpu>(options(true));
  host_net.initialize(3);
  check_pass(host_net, net, {2, 33, 33, 3});
  const pf::extents<4> image{1, 33, 33, 3};
  const auto of_host = pf::cost_of(host_net, image).layers, of_device = pf::cost_of(net, image).layers;
  REQUIRE(of_device.size() == of_host.size());
  for (std::size_t i = 0; i < of_host.size(); ++i) {
    CAPTURE(of_host[i].name);
    CHECK(of_device[i].rank == of_host[i].rank);
  }
}

TEST_CASE("gpu networks: a sequential without layers copies on the device") {
  const pf::Sequential<float, pf::device::gpu> none;
  pf::gpu_context& ctx = gpu_context();
  const pf::extents<4> shape{2, 5, 4, 3};
  auto x = random_twin<float>(pf::volume<4>(shape), 1);
  auto y = random_twin<float>(x.size(), 2), dx = random_twin<float>(x.size(), 3);
  const pf::tensor_view<const float, 4> from = x.device_view(shape);
  none.forward(ctx, from, y.device_view(shape));
  none.backward(ctx, from, dx.device_view(shape));
  CHECK(y.fetched() == x.fetched());
  CHECK(dx.fetched() == x.fetched());
}

TEST_CASE("gpu networks: models on a device are copied, initialized, factorized and folded as the host's") {
  pf::network<float> host_net = pf::small_resnet<float>(small_options(0));
  gpu_network net = pf::small_resnet<float, pf::device::gpu>(small_options(0));
  host_net.initialize(5);
  net.initialize(5);
  const auto values_of = [](const gpu_network& model) {
    std::vector<float> result;
    model.read_on_host([&](const auto&) {
      for (const auto& entry : model.store().parameters()) {
        result.insert(result.end(), entry.thing->values().begin(), entry.thing->values().end());
      }
    });
    return result;
  };
  const std::span<const float> expected = host_net.store().values();
  CHECK(difference(std::span<const float>(values_of(net)), expected) == 0.0);
  const gpu_network copy = net;
  CHECK(difference(std::span<const float>(values_of(copy)), expected) == 0.0);
  pf::factorize_policy policy;
  policy.first_layer = 2;
  pf::factorize(host_net, policy);
  pf::factorize(net, policy);
  CHECK(net.structure() == host_net.structure());
  CHECK(difference(std::span<const float>(values_of(net)),
                   std::span<const float>(host_net.store().values())) < 1e-6);
  CHECK_THROWS_AS(pf::copy_state(copy, host_net), pf::state_error);
}

TEST_CASE("gpu networks: arenas begin where most parameters are aligned to whole vectors") {
  pf::resnet18_options options;
  options.width = 8;  // the bias of ten classes comes first
  gpu_network net = pf::resnet18<float, pf::device::gpu>(options);
  index_t on_vectors = 0;
  for (const auto& entry : net.store().parameters()) {
    const auto address = reinterpret_cast<std::uintptr_t>(entry.thing->data());
    CHECK(address % 16 == reinterpret_cast<std::uintptr_t>(entry.thing->gradient_data()) % 16);
    if (address % 16 == 0) on_vectors += entry.thing->size();
  }
  CHECK(on_vectors > net.parameter_count() * 95 / 100);
}
