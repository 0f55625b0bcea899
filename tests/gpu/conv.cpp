// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/gpu/kernels/copy/transpose.hpp>
#include <pufferfish/gpu/ops/conv.hpp>

#include "conv_cases.hpp"

using namespace gpu_test;
namespace kernels = pf::gpu::kernels;

namespace {

using kernels::conv_tile;

/// Checks all three directions of a convolution by plans that the test chooses. `shift`: elements by which
/// the weight is moved from where vectors may begin.
struct conv_check {
  conv_case c;
  index_t shift = 0;
  double tolerance = 1e-5;

  void forward(const kernels::conv_plan& plan, bool with_bias) const {
    auto x = c.input(1), w = c.weight(2, shift), bias = random_twin<float>(c.shape.out_channels, 3),
         y = c.output(4);
    const float* no_bias = nullptr;
    pf::ops::reference::conv_forward<float>(c.shape, x.host_view(c.x()), c.oihw(w.host_data() + shift),
                                            with_bias ? bias.host_data() : no_bias, y.host_view(c.y()));
    twin<float> partials(plan.scratch);
    kernels::conv_forward<float>(gpu_context().stream(), c.geometry(), plan, x.device_data(),
                                 w.device_data() + shift, with_bias ? bias.device_data() : no_bias,
                                 y.device_data(), partials.device_data());
    CHECK(difference(y) < tolerance);
  }

  void backward_input(const kernels::conv_plan& plan, bool add) const {
    auto dy = c.output(5), w = c.weight(6, shift), dx = c.input(7);
    const std::vector<float> before = dx.host();
    pf::ops::reference::conv_backward_input<float>(c.shape, dy.host_view(c.y()),
                                                   c.oihw(w.host_data() + shift), dx.host_view(c.x()));
    for (std::size_t i = 0; add && i < before.size(); ++i) dx.host()[i] += before[i];
    twin<float> partials(plan.scratch);
    kernels::conv_backward_input<float>(gpu_context().stream(), c.geometry(), plan, dy.device_data(),
                                        w.device_data() + shift, dx.device_data(), add,
                                        partials.device_data());
    CHECK(difference(dx, 1.0) < tolerance);
  }

  void backward_weight(const kernels::conv_plan& plan, bool accumulate) const {
    auto x = c.input(8), dy = c.output(9), dw = c.weight(10, shift);
    pf::ops::reference::conv_backward_weight<float>(c.shape, x.host_view(c.x()), dy.host_view(c.y()),
                                                    c.oihw(dw.host_data() + shift), accumulate);
    twin<float> partials(plan.scratch);
    kernels::conv_backward_weight<float>(gpu_context().stream(), c.geometry(), plan, x.device_data(),
                                         dy.device_data(), dw.device_data() + shift, accumulate,
                                         partials.device_data());
    CHECK(difference(dw, 1.0) < tolerance);
  }
};

kernels::conv_plan plan_of(conv_tile tile, bool tensor, int slices, index_t elements) {
  return {tile, tensor, slices, slices > 1 ? slices * elements : 0};
}

}  // namespace

TEST_CASE("gpu convolution: every tile, by float units and tensor cores, whole and in slices") {
  // A tile and something more in both directions; channels in vectors and not.
  struct tile_case {
    conv_tile tile;
    index_t columns;
  };
  for (const auto& [tile, columns] : {tile_case{conv_tile::t128x128, 132},
                                      {conv_tile::t128x64, 68},
                                      {conv_tile::t64x64, 65},
                                      {conv_tile::t128x32, 32},
                                      {conv_tile::t256x16, 17},
                                      {conv_tile::t128x16, 16}}) {
    for (const bool tensor : {false, true}) {
      for (const int slices : {1, 3}) {
        CAPTURE(static_cast<int>(tile));
        CAPTURE(tensor);
        CAPTURE(slices);
        const double tolerance = tensor ? 2e-3 : 1e-5;
        const index_t other = slices == 1 ? 4 : 3;
        const conv_check forward{conv_case::of(pf::conv_shape::square(other, columns, 3, 1, 1), {2, 13, 11}),
                                 0, tolerance};
        forward.forward(plan_of(tile, tensor, slices, forward.c.y_size()), slices == 1);
        forward.backward_weight(plan_of(tile, tensor, slices, forward.c.w_size()), slices == 1);
        const conv_check backward{conv_case::of(pf::conv_shape::square(columns, other, 3, 2, 1), {2, 13, 23}),
                                  0, tolerance};
        backward.backward_input(plan_of(tile, tensor, slices, backward.c.x_size()), slices == 1);
      }
    }
  }
}

TEST_CASE("gpu convolution: random shapes, as plans have them") {
  picker pick(11);
  constexpr index_t channels[] = {1, 3, 4, 5, 8, 16, 33, 64};
  int done = 0;
  for (int round = 0; round < 60; ++round) {
    const pf::conv_shape shape{channels[pick(0, 7)],     channels[pick(0, 7)],     {pick(1, 7), pick(1, 7)},
                               {pick(1, 3), pick(1, 3)}, {pick(0, 3), pick(0, 3)}, {pick(1, 2), pick(1, 2)}};
    const std::optional<conv_case> made = conv_case::find(shape, {pick(1, 3), pick(1, 13), pick(1, 13)});
    if (!made) continue;
    ++done;
    CAPTURE(round);
    CAPTURE(shape.describe());
    CAPTURE(made->images);
    CAPTURE(made->height);
    CAPTURE(made->width);
    const bool tensor = round % 4 == 3;
    const conv_check check{*made, round % 3 == 0 ? 1 : 0, tensor ? 2e-3 : 1e-5};
    check.forward(kernels::plan_conv_forward(made->geometry(), tensor), round % 2 == 0);
    check.backward_input(kernels::plan_conv_backward_input(made->geometry(), tensor), round % 2 == 0);
    check.backward_weight(kernels::plan_conv_backward_weight(made->geometry(), tensor), round % 2 == 1);
  }
  CHECK(done > 35);
}

TEST_CASE("gpu convolution: all relations of channels and steps, and kernels beyond the bits of their taps") {
  picker pick(12);
  constexpr index_t channels[] = {4, 8, 12, 20, 24, 36, 64, 96};
  constexpr conv_tile tiles[] = {conv_tile::t128x128, conv_tile::t128x64, conv_tile::t64x64,
                                 conv_tile::t128x32,  conv_tile::t256x16, conv_tile::t128x16};
  std::vector<conv_case> cases{conv_case::of({8, 4, {15, 2}, {1, 1}, {7, 0}, {1, 1}}, {2, 9, 6}),
                               conv_case::of({4, 8, {3, 15}, {2, 1}, {1, 20}, {1, 2}}, {1, 6, 9}),
                               conv_case::of({8, 12, {16, 1}, {1, 2}, {8, 0}, {1, 1}}, {1, 9, 6}),
                               conv_case::of({4, 8, {1, 17}, {1, 1}, {0, 8}, {1, 1}}, {2, 3, 9})};
  while (cases.size() < 40) {
    const pf::conv_shape shape{channels[pick(0, 7)],     channels[pick(0, 7)],     {pick(1, 5), pick(1, 5)},
                               {pick(1, 3), pick(1, 3)}, {pick(0, 4), pick(0, 4)}, {pick(1, 3), pick(1, 3)}};
    const std::optional<conv_case> made = conv_case::find(shape, {pick(1, 3), pick(1, 11), pick(1, 11)});
    if (made) cases.push_back(*made);
  }
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const conv_case& c = cases[i];
    CAPTURE(c.shape.describe());
    CAPTURE(c.images);
    CAPTURE(c.height);
    CAPTURE(c.width);
    const conv_tile tile = tiles[pick(0, 5)];
    const bool tensor = i % 2 == 1;
    const int slices = static_cast<int>(pick(1, 3));
    const conv_check check{c, i % 5 == 4 ? 1 : 0, tensor ? 2e-3 : 1e-5};
    check.forward(plan_of(tile, tensor, slices, c.y_size()), i % 3 == 0);
    check.backward_input(plan_of(tile, tensor, slices, c.x_size()), i % 3 == 1);
    check.backward_weight(plan_of(tile, tensor, slices, c.w_size()), i % 3 == 2);
  }
}

TEST_CASE("gpu convolution: the usual ones, many channels over few pixels, few over many") {
  for (const conv_case& c : {conv_case::of(pf::conv_shape::square(3, 64, 7, 2, 3), {2, 33, 35}),
                             conv_case::of(pf::conv_shape::square(64, 130, 3, 1, 1), {1, 4, 4}),
                             conv_case::of(pf::conv_shape::square(64, 128, 1, 2), {2, 9, 9}),
                             conv_case::of(pf::conv_shape::square(96, 64, 3, 2, 1), {2, 9, 8}),
                             conv_case::of(pf::conv_shape::square(16, 32, 3, 2, 1), {1, 15, 16}),
                             conv_case::of(pf::conv_shape::square(1, 1, 3, 1, 1), {5, 31, 33})}) {
    CAPTURE(c.shape.describe());
    const conv_check check{c};
    check.forward(kernels::plan_conv_forward(c.geometry(), false), true);
    check.backward_input(kernels::plan_conv_backward_input(c.geometry(), false), false);
    check.backward_weight(kernels::plan_conv_backward_weight(c.geometry(), false), true);
  }
}

TEST_CASE("gpu convolution: stride beyond the kernel, padding beyond the image, stride beyond the image") {
  for (const conv_case& c : {conv_case::of({5, 7, {2, 1}, {4, 3}, {0, 0}, {1, 1}}, {3, 6, 5}),
                             conv_case::of({5, 18, {3, 3}, {1, 1}, {5, 6}, {1, 1}}, {2, 6, 5}),
                             conv_case::of({8, 12, {3, 3}, {3, 5}, {2, 2}, {2, 3}}, {2, 9, 21}),
                             conv_case::of({4, 4, {1, 1}, {9, 9}, {0, 0}, {1, 1}}, {2, 3, 4})}) {
    CAPTURE(c.shape.describe());
    const conv_check check{c};
    for (const bool add : {false, true}) {
      check.forward(kernels::plan_conv_forward(c.geometry(), false), add);
      check.backward_input(kernels::plan_conv_backward_input(c.geometry(), false), add);
      check.backward_weight(kernels::plan_conv_backward_weight(c.geometry(), false), add);
    }
  }
}

TEST_CASE("gpu convolution: the operations, pointwise and not, and over no images") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  for (const conv_case& c : {conv_case::of(pf::conv_shape::square(5, 12, 1), {2, 7, 6}),
                             conv_case::of(pf::conv_shape::square(5, 12, 3, 1, 1), {2, 7, 6}),
                             conv_case::of(pf::conv_shape::square(8, 70, 3, 2, 1), {2, 7, 6}),
                             conv_case::of(pf::conv_shape::square(5, 12, 1), {0, 7, 6}),
                             conv_case::of(pf::conv_shape::square(5, 12, 3, 1, 1), {0, 7, 6})}) {
    for (const bool add : {false, true}) {
      CAPTURE(c.shape.describe());
      auto x = c.input(1), w = c.weight(2), y = c.output(3), dy = c.output(4), dx = c.input(5),
           dw = c.weight(6);
      auto bias = random_twin<float>(c.shape.out_channels, 7);
      pf::ops::conv_forward<float>(host, c.shape, x.host_view(c.x()), w.host_data(),
                                   add ? nullptr : bias.host_data(), y.host_view(c.y()));
      pf::ops::conv_forward<float>(ctx, c.shape, x.device_view(c.x()), w.device_data(),
                                   add ? nullptr : bias.device_data(), y.device_view(c.y()));
      CHECK(difference(y, 1.0) < 1e-5);
      pf::ops::conv_backward_input<float>(host, c.shape, dy.host_view(c.y()), w.host_data(),
                                          dx.host_view(c.x()), add);
      pf::ops::conv_backward_input<float>(ctx, c.shape, dy.device_view(c.y()), w.device_data(),
                                          dx.device_view(c.x()), add);
      CHECK(difference(dx, 1.0) < 1e-5);
      pf::ops::conv_backward_weight<float>(host, c.shape, x.host_view(c.x()), dy.host_view(c.y()),
                                           dw.host_data(), add);
      pf::ops::conv_backward_weight<float>(ctx, c.shape, x.device_view(c.x()), dy.device_view(c.y()),
                                           dw.device_data(), add);
      CHECK(difference(dw, 1.0) < 1e-5);
    }
  }
  const conv_case c = conv_case::of(pf::conv_shape::square(5, 12, 3), {2, 7, 6});
  auto x = c.input(1), y = c.output(2);
  CHECK_THROWS_AS(pf::ops::conv_forward<float>(ctx, c.shape, x.device_view(c.x()), y.device_data(), nullptr,
                                               y.device_view<4>({2, 5, 5, 12})),
                  pf::shape_error);
}

TEST_CASE("gpu convolution: the same bits at every call") {
  pf::gpu_context& ctx = gpu_context();
  const conv_case c = conv_case::of(pf::conv_shape::square(16, 24, 3, 1, 1), {3, 12, 12});
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

TEST_CASE("gpu convolution: gradients of filters with few outputs, which gather the gradient") {
  pf::gpu_context& ctx = gpu_context();
  for (const conv_case& c : {conv_case::of(pf::conv_shape::square(64, 16, 3, 1, 1), {2, 9, 8}),
                             conv_case::of(pf::conv_shape::square(8, 4, 5, 1, 2), {1, 7, 6}),
                             conv_case::of(pf::conv_shape::square(24, 8, 3, 1, 0), {3, 5, 6}),
                             conv_case::of(pf::conv_shape::square(70, 32, 2, 1, 1), {1, 40, 33}),
                             conv_case::of({16, 8, {3, 2}, {1, 1}, {2, 0}, {1, 1}}, {2, 4, 5})}) {
    CAPTURE(c.shape.describe());
    REQUIRE(kernels::is_better_turned(c.geometry()));
    for (const bool accumulate : {false, true}) {
      auto x = c.input(1), dy = c.output(2), dw = c.weight(3);
      pf::ops::reference::conv_backward_weight<float>(c.shape, x.host_view(c.x()), dy.host_view(c.y()),
                                                      c.oihw(dw.host_data()), accumulate);
      pf::ops::conv_backward_weight<float>(ctx, c.shape, x.device_view(c.x()), dy.device_view(c.y()),
                                           dw.device_data(), accumulate);
      CHECK(difference(dw, 1.0) < 1e-5);
    }
  }
  const auto turns = [](const pf::conv_shape& shape) {
    return kernels::is_better_turned(conv_case::of(shape, {1, 8, 8}).geometry());
  };
  CHECK_FALSE(turns(pf::conv_shape::square(64, 16, 3, 2, 1)));
  CHECK_FALSE(turns(pf::conv_shape::square(64, 64, 3, 1, 1)));
  CHECK_FALSE(turns(pf::conv_shape::square(64, 6, 3, 1, 1)));
  CHECK_FALSE(turns(pf::conv_shape::square(64, 16, 1, 1, 1)));
  CHECK_FALSE(turns({16, 8, {3, 3}, {1, 1}, {1, 1}, {2, 2}}));
}

TEST_CASE("gpu convolution: divisions by known numbers") {
  for (const int divisor : {1, 2, 3, 5, 7, 9, 31, 64, 65, 1000, 4608, 65535, 65536, 1 << 30, 2147483647}) {
    const auto by = kernels::divider::by(divisor);
    for (const std::int64_t near : {std::int64_t{0}, std::int64_t{divisor}, std::int64_t{divisor} * 7,
                                    std::int64_t{2147483647} / divisor * divisor, std::int64_t{2147483647}}) {
      for (std::int64_t n = near - 2; n <= near + 2; ++n) {
        if (n < 0 || n > 2147483647) continue;
        CHECK(by.quotient(static_cast<int>(n)) == static_cast<int>(n) / divisor);
      }
    }
  }
}

TEST_CASE("gpu convolution: a context that uses another library asks it first") {
  struct counting final : pf::gpu::conv_library {
    using request = pf::gpu::conv_request;
    int asked = 0;
    bool takes = false;
    bool answer(const request& of) {
      CHECK(of.type == CUDA_R_32F);
      CHECK(of.geometry.out_channels == 6);
      ++asked;
      return takes;
    }
    bool deterministic() const override { return true; }
    bool forward(pf::gpu_context&, const request& of, const void*, const void*, const void*, void*) override {
      return answer(of);
    }
    bool backward_input(pf::gpu_context&, const request& of, const void*, const void*, void*, bool) override {
      return answer(of);
    }
    bool backward_weight(pf::gpu_context&, const request& of, const void*, const void*, float*,
                         bool) override {
      return answer(of);
    }
  };
  pf::gpu_context& ctx = gpu_context();
  counting library;
  ctx.use(&library);
  for (const bool takes : {true, false}) {
    library.takes = takes;
    const conv_case c = conv_case::of(pf::conv_shape::square(4, 6, 3, 1, 1), {1, 4, 4});
    auto x = c.input(1), w = c.weight(2), y = c.output(3), dx = c.input(4), dw = c.weight(5);
    const std::vector<float> before = y.host();
    pf::ops::conv_forward<float>(ctx, c.shape, x.device_view(c.x()), w.device_data(), nullptr,
                                 y.device_view(c.y()));
    pf::ops::conv_backward_input<float>(ctx, c.shape, y.device_view(c.y()), w.device_data(),
                                        dx.device_view(c.x()));
    pf::ops::conv_backward_weight<float>(ctx, c.shape, x.device_view(c.x()), y.device_view(c.y()),
                                         dw.device_data(), false);
    CHECK((y.fetched() == before) == takes);
    CHECK((dx.fetched() == dx.host()) == takes);
    CHECK((dw.fetched() == dw.host()) == takes);
  }
  CHECK(library.asked == 6);
  ctx.use(nullptr);
}

TEST_CASE("gpu transposition") {
  for (const auto& [rows, columns] : {pf::extents<2>{1, 1}, {5, 70}, {64, 33}, {100, 3}, {0, 4}}) {
    auto from = random_twin<float>(rows * columns, 1), to = random_twin<float>(rows * columns, 2),
         sum = random_twin<float>(rows * columns, 3);
    for (index_t i = 0; i < rows; ++i) {
      for (index_t j = 0; j < columns; ++j) {
        to.host_data()[j * rows + i] = from.host_data()[i * columns + j];
        sum.host_data()[j * rows + i] += from.host_data()[i * columns + j];
      }
    }
    const cudaStream_t stream = gpu_context().stream();
    kernels::transpose_wide<float>(stream, from.device_data(), rows, columns, sum.device_data(), true);
    CHECK(sum.fetched() == sum.host());
    for (const bool wide : {false, true}) {
      twin<float> place(rows * columns, 7.0F);
      if (wide) {
        kernels::transpose_wide<float>(stream, from.device_data(), rows, columns, place.device_data(), false);
      } else {
        kernels::transpose<float>(stream, from.device_data(), rows, columns, place.device_data());
      }
      CHECK(place.fetched() == to.host());
    }
  }
}
