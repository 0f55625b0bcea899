// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Convolutions of several groups on a device, against the formula.
#include <pufferfish/gpu.hpp>

#include "conv_cases.hpp"

using namespace gpu_test;
namespace kernels = pf::gpu::kernels;

namespace {

/// One unit of rounding of the result, and rounding of the sums.
template <class T>
constexpr double tolerance = sizeof(T) == 2 ? 8e-3 : 2e-5;

/// The case of channels, groups and one kernel size, stride and padding.
conv_case grouped(index_t in, index_t out, index_t groups, index_t kernel, index_t stride, index_t padding,
                  const pf::extents<3>& images) {
  pf::conv_shape shape = pf::conv_shape::square(in, out, kernel, stride, padding);
  shape.groups = groups;
  return conv_case::of(shape, images);
}

/// The operations in all three directions. `add`: to what dx and dw have, and without a bias. `shift`:
/// elements by which the weight and the bias are moved from where vectors may begin.
template <class T>
void check_operations(const conv_case& c, bool add, index_t shift = 0) {
  CAPTURE(c.shape.describe());
  CAPTURE(c.images);
  CAPTURE(c.height);
  CAPTURE(c.width);
  CAPTURE(add);
  CAPTURE(shift);
  pf::gpu_context& ctx = gpu_context();
  stored<T> x(c.x_size(), 1), w(c.w_size() + shift, 2), bias(c.shape.out_channels + shift, 3),
      y(c.y_size(), 4), dx(c.x_size(), 5), dy(c.y_size(), 6);
  stored<float> dw(c.w_size() + shift, 7);
  const float* const host_bias = add ? nullptr : bias.wide.host_data() + shift;
  const T* const device_bias = add ? nullptr : bias.narrow.device_data() + shift;
  const auto weight = c.oihw(w.wide.host_data() + shift);

  pf::ops::reference::conv_forward<float>(c.shape, x.wide.host_view(c.x()), weight, host_bias,
                                          y.wide.host_view(c.y()));
  pf::ops::conv_forward<T>(ctx, c.shape, x.narrow.device_view(c.x()), w.narrow.device_data() + shift,
                           device_bias, y.narrow.device_view(c.y()));
  CHECK(y.error() < tolerance<T>);

  const std::vector<float> before = dx.wide.host();
  pf::ops::reference::conv_backward_input<float>(c.shape, dy.wide.host_view(c.y()), weight,
                                                 dx.wide.host_view(c.x()));
  for (std::size_t i = 0; add && i < before.size(); ++i) dx.wide.host()[i] += before[i];
  pf::ops::conv_backward_input<T>(ctx, c.shape, dy.narrow.device_view(c.y()), w.narrow.device_data() + shift,
                                  dx.narrow.device_view(c.x()), add);
  CHECK(dx.error() < tolerance<T>);

  pf::ops::reference::conv_backward_weight<float>(c.shape, x.wide.host_view(c.x()), dy.wide.host_view(c.y()),
                                                  c.oihw(dw.wide.host_data() + shift), add);
  pf::ops::conv_backward_weight<T>(ctx, c.shape, x.narrow.device_view(c.x()), dy.narrow.device_view(c.y()),
                                   dw.narrow.device_data() + shift, add);
  CHECK(dw.error() < tolerance<float>);
}

/// The gradient of every parameter of a layer on the device is the one of the same layer on the CPU.
template <class Layer, class HostLayer>
void check_gradients(Layer& layer, HostLayer& expected, double most) {
  std::vector<float> gradients(layer.store().gradients().size());
  pf::gpu::device_memory().to_host(gradients.data(), layer.store().gradients().data(),
                                   gradients.size() * sizeof(float));
  for (const auto& entry : layer.store().parameters()) {  // in the order of the arena
    CAPTURE(entry.name);
    const std::span<const float> got(gradients.data() + entry.offset,
                                     static_cast<std::size_t>(entry.thing->size()));
    expected.visit([&](const std::string& name, const auto& parameter) {
      if (name == entry.name) CHECK(difference<float>(got, parameter.gradient(), 1.0) < most);
    });
  }
}

}  // namespace

TEST_CASE_TEMPLATE("gpu grouped convolution: random shapes", T, float, pf::gpu::bf16, pf::gpu::fp16) {
  picker pick(17);
  constexpr index_t group_counts[] = {2, 3, 4, 8, 16};
  int done = 0;
  for (int round = 0; round < 60; ++round) {
    const index_t groups = group_counts[pick(0, 4)];
    const bool depthwise = round % 3 == 0;
    const index_t inputs = depthwise ? 1 : pick(1, 5), outputs = depthwise ? pick(1, 2) : pick(1, 5);
    const pf::conv_shape shape{groups * inputs,
                               groups * outputs,
                               {pick(1, 5), pick(1, 5)},
                               {pick(1, 3), pick(1, 3)},
                               {pick(0, 3), pick(0, 3)},
                               {pick(1, 2), pick(1, 2)},
                               groups};
    const std::optional<conv_case> made = conv_case::find(shape, {pick(0, 3), pick(1, 9), pick(1, 9)});
    if (!made) continue;
    ++done;
    check_operations<T>(*made, round % 2 == 1, pick(0, 1));
  }
  CHECK(done > 35);
}

TEST_CASE_TEMPLATE("gpu grouped convolution: depthwise in vectors, with a multiplier, pointwise", T, float,
                   pf::gpu::bf16, pf::gpu::fp16) {
  for (const bool add : {false, true}) {
    for (const conv_case& c :
         {grouped(16, 16, 16, 3, 1, 1, {2, 7, 6}), grouped(24, 24, 24, 3, 2, 1, {2, 8, 5}),
          grouped(7, 7, 7, 3, 1, 1, {2, 5, 6}), grouped(8, 16, 8, 3, 1, 1, {1, 5, 6}),
          grouped(5, 15, 5, 3, 2, 1, {3, 6, 5}), grouped(12, 18, 3, 1, 1, 0, {2, 4, 5}),
          grouped(32, 64, 4, 3, 1, 1, {1, 4, 4}), grouped(6, 4, 2, 3, 1, 1, {1, 1, 1}),
          grouped(8, 8, 8, 3, 1, 1, {0, 4, 4}), grouped(6, 9, 3, 3, 1, 1, {0, 4, 4})}) {
      check_operations<T>(c, add);
    }
    // Vectors need aligned weights.
    check_operations<T>(grouped(16, 16, 16, 3, 1, 1, {2, 7, 6}), add, 1);
  }
}

TEST_CASE(
    "gpu grouped convolution: stride beyond the kernel, padding beyond the image, stride beyond the image") {
  for (const bool add : {false, true}) {
    for (const conv_case& c : {conv_case::of({4, 6, {2, 1}, {4, 3}, {0, 0}, {1, 1}, 2}, {3, 6, 5}),
                               conv_case::of({6, 6, {3, 3}, {1, 1}, {5, 6}, {1, 1}, 6}, {2, 6, 5}),
                               conv_case::of({8, 12, {3, 3}, {3, 5}, {2, 2}, {2, 3}, 4}, {2, 9, 21}),
                               conv_case::of({4, 4, {1, 1}, {9, 9}, {0, 0}, {1, 1}, 4}, {2, 3, 4})}) {
      check_operations<float>(c, add);
    }
  }
}

TEST_CASE("gpu grouped convolution: gradients of weights in any number of slices") {
  // Many pixels of few channels: the plan cuts the sums.
  const conv_case many = grouped(2, 2, 2, 3, 1, 1, {1, 65, 64});
  CHECK(kernels::plan_grouped_backward_weight(many.geometry(), 2).slices > 16);
  check_operations<float>(many, true);
  const conv_case c = grouped(6, 12, 3, 3, 2, 1, {3, 7, 9});
  CHECK(kernels::plan_grouped_backward_weight(c.geometry(), 3).slices == 1);
  for (const int slices : {1, 2, 5, 20, 100}) {  // 60 pixels: some of 100 slices are empty
    for (const bool accumulate : {false, true}) {
      CAPTURE(slices);
      auto x = c.input(1), dy = c.output(2), dw = c.weight(3);
      pf::ops::reference::conv_backward_weight<float>(c.shape, x.host_view(c.x()), dy.host_view(c.y()),
                                                      c.oihw(dw.host_data()), accumulate);
      const kernels::grouped_weight_plan plan{slices, slices > 1 ? slices * c.w_size() : 0};
      twin<float> partials(plan.scratch);
      kernels::grouped_conv_backward_weight<float>(gpu_context().stream(), c.geometry(), 3, plan,
                                                   x.device_data(), dy.device_data(), dw.device_data(),
                                                   accumulate, partials.device_data());
      CHECK(difference(dw, 1.0) < 1e-5);
    }
  }
}

TEST_CASE("gpu grouped convolution: the same bits at every call") {
  pf::gpu_context& ctx = gpu_context();
  const conv_case c = grouped(6, 6, 6, 3, 1, 1, {2, 30, 31});
  auto x = c.input(1), dy = c.output(2), dw = c.weight(3);
  std::vector<float> first;
  for (int i = 0; i < 2; ++i) {
    pf::ops::conv_backward_weight<float>(ctx, c.shape, x.device_view(c.x()), dy.device_view(c.y()),
                                         dw.device_data(), false);
    const std::vector<float> now = dw.fetched();
    if (i == 0) first = now;
    CHECK(now == first);
  }
}

TEST_CASE("gpu grouped convolution: no other library is asked, and shapes are checked") {
  struct untouched final : pf::gpu::conv_library {
    using request = pf::gpu::conv_request;
    int asked = 0;
    bool deterministic() const override { return true; }
    bool forward(pf::gpu_context&, const request&, const void*, const void*, const void*, void*) override {
      return ++asked > 0;
    }
    bool backward_input(pf::gpu_context&, const request&, const void*, const void*, void*, bool) override {
      return ++asked > 0;
    }
    bool backward_weight(pf::gpu_context&, const request&, const void*, const void*, float*, bool) override {
      return ++asked > 0;
    }
  };
  pf::gpu_context& ctx = gpu_context();
  untouched library;
  ctx.use(&library);
  const conv_case c = grouped(4, 6, 2, 3, 1, 1, {1, 4, 4});
  check_operations<float>(c, false);
  ctx.use(nullptr);
  CHECK(library.asked == 0);

  auto x = c.input(1), w = c.weight(2), y = c.output(3);
  CHECK_THROWS_AS(pf::ops::conv_forward<float>(ctx, c.shape, x.device_view(c.x()), w.device_data(), nullptr,
                                               y.device_view<4>({1, 3, 4, 8})),
                  pf::shape_error);
  // The fused low-rank form is one group's.
  auto up = random_twin<float>(3 * 6, 4);
  CHECK_THROWS_WITH_AS(
      pf::ops::low_rank_conv_forward<float>(ctx, c.shape, x.device_view(c.x()), w.device_data(),
                                            up.device_view<2>({3, 6}), nullptr, {}, y.device_view(c.y())),
      doctest::Contains("groups 2"), pf::shape_error);
}

TEST_CASE_TEMPLATE("gpu grouped convolution: a low-rank layer that stands alone", T, float, pf::gpu::bf16,
                   pf::gpu::fp16) {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  host.set_mode(pf::run_mode::training);
  const pf::mode_scope<pf::device::gpu> training(ctx, pf::run_mode::training);
  for (const conv_case& c : {grouped(12, 18, 3, 3, 2, 1, {2, 6, 5}), grouped(8, 32, 2, 3, 1, 1, {2, 5, 4}),
                             grouped(5, 15, 5, 3, 1, 1, {2, 5, 4})}) {
    for (const bool recompute : {false, true}) {
      CAPTURE(c.shape.describe());
      CAPTURE(recompute);
      const index_t rank = c.shape.groups == 5 ? 1 : 2;
      pf::LowRankConv<float> expected(c.shape, rank, true);
      pf::LowRankConv<T, pf::dynamic_rank, pf::device::gpu> layer(c.shape, rank, true);
      expected.initialize(pf::random_stream(4, 1));
      layer.initialize(pf::random_stream(4, 1));
      expected.set_recompute(recompute);
      layer.set_recompute(recompute);
      stored<T> x(c.x_size(), 1), dy(c.y_size(), 2), y(c.y_size(), 3), dx(c.x_size(), 4);
      expected.forward(host, x.wide.host_view(c.x()), y.wide.host_view(c.y()));
      expected.backward(host, dy.wide.host_view(c.y()), dx.wide.host_view(c.x()));
      layer.forward(ctx, x.narrow.device_view(c.x()), y.narrow.device_view(c.y()));
      layer.backward(ctx, dy.narrow.device_view(c.y()), dx.narrow.device_view(c.x()));
      CHECK(ctx.tape().empty());
      // Weights and the activation between the factors are rounded, too.
      CHECK(y.error() < 2 * tolerance<T>);
      CHECK(dx.error() < 2 * tolerance<T>);
      check_gradients(layer, expected, 2 * tolerance<T>);
      CHECK(difference<float>(layer.to_dense().flat(), expected.to_dense().flat(), 1.0) < 1e-6);
    }
  }
}
