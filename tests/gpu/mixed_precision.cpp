// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Networks that compute in 16 bits, with parameters of 32: passes near those of float, training near that of
// float, loss scaling.
#include "support.hpp"

#include <string>

#include <pufferfish/gpu.hpp>
#include <pufferfish/models/imagenet_resnet.hpp>
#include <pufferfish/models/resnet.hpp>
#include <pufferfish/models/small_vgg.hpp>
#include <pufferfish/nn.hpp>

using namespace gpu_test;

namespace {

template <class T>
using gpu_network = pf::network<T, pf::device::gpu>;

/// The largest error of a value that is rounded to T, relative to it.
template <class T>
constexpr double unit = std::is_same_v<T, pf::gpu::bf16> ? 1.0 / 256 : 1.0 / 2048;

/// Numbers that T has, as T on the device and as float on the host.
template <class T>
struct narrow_twin {
  twin<T> narrow;
  std::vector<float> wide;

  narrow_twin(index_t size, std::uint64_t stream, float scale = 1.0F)
      : narrow(rounded(random_twin<float>(size, stream).host(), scale)), wide(as_float(narrow.host())) {}

  static std::vector<T> rounded(const std::vector<float>& values, float scale) {
    std::vector<T> result;
    for (const float value : values) result.push_back(static_cast<T>(value * scale));
    return result;
  }
  static std::vector<float> as_float(const std::vector<T>& values) {
    return std::vector<float>(values.begin(), values.end());
  }
  std::vector<float> fetched() const { return as_float(narrow.fetched()); }
};

/// |got - expected| / |expected|, Euclidean.
double distance(std::span<const float> got, std::span<const float> expected, double least = 0.0) {
  double error = 0.0, size = least * least;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double e = static_cast<double>(expected[i]), d = static_cast<double>(got[i]) - e;
    error += d * d;
    size += e * e;
  }
  return std::sqrt(error / size);
}

template <class Model>
std::vector<float> gradients_of(Model& net) {
  const std::span<float> gradients = net.store().gradients();
  std::vector<float> result(gradients.size());
  pf::gpu::device_memory().to_host(result.data(), gradients.data(), result.size() * sizeof(float));
  return result;
}

template <class T>
void check_pass(pf::network<float>& host_net, gpu_network<T>& net, const pf::extents<4>& input) {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  pf::copy_state(host_net, net);
  host.set_mode(pf::run_mode::training);
  const pf::mode_scope<pf::device::gpu> training(ctx, pf::run_mode::training);
  const pf::extents<4> output = host_net.output_shape(input);
  narrow_twin<T> x(pf::volume<4>(input), 1), dy(pf::volume<4>(output), 3);
  twin<T> y(pf::volume<4>(output)), dx(pf::volume<4>(input));
  pf::tensor<float, 4> host_y(output), host_dx(input);
  host.begin_step(5);
  host_net.forward(host, pf::tensor_view<const float, 4>(x.wide.data(), input), host_y.view());
  host_net.backward(host, pf::tensor_view<const float, 4>(dy.wide.data(), output), host_dx.view());
  ctx.begin_step(5);
  net.forward(ctx, x.narrow.device_view(input), y.device_view(output));
  net.backward(ctx, dy.narrow.device_view(output), dx.device_view(input));
  CHECK(ctx.tape().empty());
  // Some twenty roundings one after the other, and ReLUs near zero that flip.
  const double tolerance = 24 * unit<T>;
  CHECK(distance(narrow_twin<T>::as_float(y.fetched()), host_y.flat()) < tolerance);
  CHECK(distance(narrow_twin<T>::as_float(dx.fetched()), host_dx.flat()) < tolerance);
  const std::vector<float> gradients = gradients_of(net);
  const double all = std::sqrt(static_cast<double>(gradients.size())) * 1e-6;
  double largest = 0.0;
  for (const float g : host_net.store().gradients())
    largest = std::max(largest, std::abs(static_cast<double>(g)));
  for (const auto& entry : host_net.store().parameters()) {
    CAPTURE(entry.name);
    const auto size = static_cast<std::size_t>(entry.thing->size());
    const std::span<const float> got(gradients.data() + entry.offset, size);
    // What a batch norm behind it takes out again has a gradient of zero plus rounding.
    const double least = 0.02 * largest * std::sqrt(static_cast<double>(size)) + all;
    CHECK(distance(got, entry.thing->gradient(), least) < tolerance);
  }
}

template <class T, class Make>
void check_network(Make&& make, const pf::extents<4>& input) {
  pf::network<float> host_net = make(float{}, pf::device::cpu{});
  gpu_network<T> net = make(T{}, pf::device::gpu{});
  host_net.initialize(11);
  check_pass(host_net, net, input);
  pf::factorize_policy policy;
  policy.first_layer = 2;
  const pf::factorization made = pf::factorize(host_net, policy);
  pf::apply_ranks(net, made.ranks());
  check_pass(host_net, net, input);
}

pf::small_resnet_options small_options() {
  pf::small_resnet_options options;
  options.width = 8;
  options.stages = 2;
  return options;
}

}  // namespace

TEST_CASE_TEMPLATE("gpu mixed precision: networks of images", T, pf::gpu::bf16, pf::gpu::fp16) {
  check_network<T>(
      [](auto type, auto device) {
        return pf::small_resnet<decltype(type), decltype(device)>(small_options());
      },
      {3, 9, 8, 3});
  check_network<T>(
      [](auto type, auto device) {
        pf::small_vgg_options options;
        options.image = {8, 8};
        options.width = 8;
        options.hidden = 24;
        return pf::small_vgg<decltype(type), decltype(device)>(options);
      },
      {3, 8, 8, 3});
}

TEST_CASE("gpu mixed precision: bottlenecks") {
  check_network<pf::gpu::bf16>(
      [](auto type, auto device) {
        pf::imagenet_resnet_options options;
        options.width = 8;
        options.blocks = {1, 1, 1, 1};
        options.classes = 6;
        return pf::resnet50<decltype(type), decltype(device)>(options);
      },
      {2, 33, 33, 3});
}
