// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Convolutions of several groups: fast forms against the reference, the reference against finite differences.
#include <cmath>

#include <pufferfish/ops/conv/conv.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

/// The OIHW view of a weight stored HWIO.
template <class T>
tensor_view<T, 4> oihw(const tensor_view<T, 4>& stored) {
  return stored.permute({3, 2, 0, 1});
}

/// Everything that one convolution reads.
template <class T>
struct operands {
  tensor<T, 4> x, dy, w;
  tensor<T, 1> bias;

  operands(const conv_shape& shape, const extents<4>& input, std::uint64_t round)
      : x(input),
        dy(shape.output(input, "test")),
        w({shape.kernel.height, shape.kernel.width, shape.group_inputs(), shape.out_channels}),
        bias({shape.out_channels}) {
    fill_normal<T>(x.flat(), 1.0, {1, round});
    fill_normal<T>(dy.flat(), 1.0, {2, round});
    fill_normal<T>(w.flat(), 1.0, {3, round});
    fill_normal<T>(bias.flat(), 1.0, {4, round});
  }
};

/// Forward with and without moments, and both gradients, overwritten and added to.
template <class T>
void check_against_reference(cpu_context& ctx, const conv_shape& shape, const extents<4>& input,
                             std::uint64_t round) {
  CAPTURE(shape.describe());
  CAPTURE(to_string<4>(input));
  const operands<T> o(shape, input, round);
  const T* b = round % 2 == 0 ? o.bias.data() : nullptr;
  const tensor_view<const T, 4> weight = oihw(o.w.view());
  const index_t pixels = o.dy.extent(0) * o.dy.extent(1) * o.dy.extent(2);
  const double depth = static_cast<double>(shape.patch() + shape.group_outputs() + pixels);
  const double tolerance = (sizeof(T) == 4 ? 3e-6 : 1e-14) * std::sqrt(depth);

  tensor<T, 4> y(o.dy.shape()), y2(o.dy.shape());
  fill_normal<T>(y.flat(), 1.0, {5, round});  // must be overwritten
  ops::conv_forward<T>(ctx, shape, o.x, o.w.data(), b, y);
  ops::reference::conv_forward<T>(shape, o.x, weight, b, y2);
  CHECK(largest_error(y, y2) < tolerance);

  scratch_frame frame(ctx.scratch());
  ops::moment_parts<T> moments(frame);
  ops::conv_forward<T>(ctx, shape, o.x, o.w.data(), b, y, &moments);
  CHECK(largest_error(y, y2) < tolerance);
  std::vector<double> mean(static_cast<std::size_t>(shape.out_channels)), variance(mean);
  REQUIRE(moments.merge(mean.data(), variance.data()) == pixels);
  for (index_t c = 0; c < shape.out_channels && pixels > 0; ++c) {
    double sum = 0.0, squares = 0.0;
    for (index_t p = 0; p < pixels; ++p) sum += static_cast<double>(y2.data()[p * shape.out_channels + c]);
    sum /= static_cast<double>(pixels);
    for (index_t p = 0; p < pixels; ++p) {
      squares += std::pow(static_cast<double>(y2.data()[p * shape.out_channels + c]) - sum, 2.0);
    }
    const auto i = static_cast<std::size_t>(c);
    CHECK(std::abs(mean[i] - sum) < tolerance);
    CHECK(std::abs(variance[i] - squares / static_cast<double>(pixels)) < 10 * tolerance * (1 + squares));
  }

  for (const bool add : {false, true}) {
    tensor<T, 4> dx(input), dx2(input), dw(o.w.shape()), dw2(o.w.shape());
    fill_normal<T>(dx.flat(), 1.0, {6, round});
    const tensor<T, 4> before(dx.view());
    ops::conv_backward_input<T>(ctx, shape, o.dy, o.w.data(), dx, add);
    ops::reference::conv_backward_input<T>(shape, o.dy, weight, dx2);
    for (index_t i = 0; add && i < dx2.size(); ++i) dx2.data()[i] += before.data()[i];
    CHECK(largest_error(dx, dx2) < tolerance);

    fill_normal<T>(dw.flat(), 1.0, {7, round});
    copy(dw.view(), dw2.view());
    ops::conv_backward_weight<T>(ctx, shape, o.x, o.dy, dw.data(), add);
    ops::reference::conv_backward_weight<T>(shape, o.x, o.dy, oihw(dw2.view()), add);
    CHECK(largest_error(dw, dw2) < tolerance);
  }
}

bool fits(const conv_shape& shape, const extents<4>& input) {
  const auto length = [](index_t in, index_t kernel, index_t stride, index_t padding, index_t dilation) {
    return conv_shape::output_length(in, kernel, stride, padding, dilation);
  };
  return length(input[1], shape.kernel.height, shape.stride.height, shape.padding.height,
                shape.dilation.height) > 0 &&
         length(input[2], shape.kernel.width, shape.stride.width, shape.padding.width, shape.dilation.width) >
             0;
}

TEST_CASE_TEMPLATE("grouped convolution: fast against reference over random shapes", T, float, double) {
  cpu_context ctx({2, 0});
  picker pick(11);
  int done = 0, empty = 0;
  for (std::uint64_t round = 0; round < 260; ++round) {
    const index_t groups = pick(1, 7);
    const conv_shape shape{groups * pick(1, 6),
                           groups * pick(1, 6),
                           {pick(1, 4), pick(1, 4)},
                           {pick(1, 3), pick(1, 3)},
                           {pick(0, 4), pick(0, 4)},
                           {pick(1, 2), pick(1, 2)},
                           groups};
    const extents<4> input{pick(0, 3), pick(1, 10), pick(1, 10), shape.in_channels};
    if (!fits(shape, input)) continue;
    ++done;
    empty += input[0] == 0 ? 1 : 0;
    check_against_reference<T>(ctx, shape, input, round);
  }
  CHECK(done > 120);
  CHECK(empty > 10);
}

TEST_CASE_TEMPLATE("depthwise convolution: fast against reference over random shapes", T, float, double) {
  // Every number of channels leaves another rest of a vector; 3x3 kernels of stride 1 and 2 run in tiles, of
  // which the last ones reach beyond the image; a multiplier gives several outputs for an input.
  cpu_context ctx({3, 0});
  picker pick(12);
  int done = 0, tiles = 0;
  for (std::uint64_t round = 0; round < 320; ++round) {
    const index_t channels = pick(1, 40), multiplier = pick(0, 3) == 0 ? pick(2, 3) : 1;
    const bool usual = pick(0, 3) > 0;
    const index_t stride = pick(1, 2);
    const conv_shape shape{channels,
                           channels * multiplier,
                           usual ? size2{3, 3} : size2{pick(1, 5), pick(1, 5)},
                           usual ? size2{stride, stride} : size2{pick(1, 3), pick(1, 3)},
                           {pick(0, 4), pick(0, 4)},
                           usual ? size2{1, 1} : size2{pick(1, 2), pick(1, 2)},
                           channels};
    const extents<4> input{pick(0, 4), pick(1, 13), pick(1, 13), channels};
    if (!fits(shape, input)) continue;
    ++done;
    tiles += usual && multiplier == 1 ? 1 : 0;
    check_against_reference<T>(ctx, shape, input, round);
  }
  CHECK(done > 200);
  CHECK(tiles > 100);
}

TEST_CASE("grouped convolution: the usual ones, at sizes of several tasks") {
  cpu_context ctx({2, 0});
  std::uint64_t round = 0;
  for (const conv_shape& shape : {conv_shape{32, 32, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 32},
                                  conv_shape{48, 48, {3, 3}, {2, 2}, {1, 1}, {1, 1}, 48},
                                  conv_shape{32, 32, {5, 5}, {1, 1}, {2, 2}, {1, 1}, 32},
                                  conv_shape{32, 64, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 8},
                                  conv_shape{64, 64, {3, 3}, {2, 2}, {1, 1}, {1, 1}, 2},
                                  conv_shape{64, 96, {1, 1}, {1, 1}, {0, 0}, {1, 1}, 2},
                                  conv_shape{12, 12, {1, 1}, {1, 1}, {0, 0}, {1, 1}, 12}}) {
    check_against_reference<float>(ctx, shape, {3, 29, 33, shape.in_channels}, round++);
    check_against_reference<float>(ctx, shape, {40, 1, 1, shape.in_channels}, round++);
  }
}

TEST_CASE("depthwise convolution: results past the caches are those of the caches") {
  // Large enough to be written past the caches, if its moments are not wanted.
  const conv_shape shape{64, 64, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 64};
  const extents<4> input{7, 50, 53, 64};
  const operands<float> o(shape, input, 1);
  cpu_context ctx({2, 0});
  tensor<float, 4> y(input), y2(input), dx(input), dx2(input);
  scratch_frame frame(ctx.scratch());
  ops::moment_parts<float> moments(frame);
  ops::conv_forward<float>(ctx, shape, o.x, o.w.data(), o.bias.data(), y);
  ops::conv_forward<float>(ctx, shape, o.x, o.w.data(), o.bias.data(), y2, &moments);
  CHECK(largest_error(y, y2) == 0.0);
  ops::conv_backward_input<float>(ctx, shape, o.dy, o.w.data(), dx);
  ops::conv_backward_input<float>(ctx, shape, o.dy, o.w.data(), dx2, true);
  CHECK(largest_error(dx, dx2) == 0.0);
}

TEST_CASE("grouped convolution: gradient of the reference by finite differences") {
  for (const conv_shape& shape : {conv_shape{6, 4, {3, 2}, {2, 1}, {1, 1}, {1, 2}, 2},
                                  conv_shape{3, 6, {2, 3}, {1, 2}, {1, 0}, {1, 1}, 3}}) {
    const extents<4> input{2, 5, 4, shape.in_channels};
    operands<double> o(shape, input, 1);
    tensor<double, 4> y(o.dy.shape()), dx(input), dw(o.w.shape());
    const auto value = [&] {
      ops::reference::conv_forward<double>(shape, o.x, oihw(std::as_const(o.w).view()), nullptr, y);
      double sum = 0.0;
      for (std::size_t i = 0; i < y.flat().size(); ++i) sum += y.flat()[i] * o.dy.flat()[i];
      return sum;
    };
    ops::reference::conv_backward_input<double>(shape, o.dy, oihw(std::as_const(o.w).view()), dx);
    ops::reference::conv_backward_weight<double>(shape, o.x, o.dy, oihw(dw.view()), false);
    const auto check = [&](std::span<double> values, std::span<const double> gradient) {
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double kept = values[i];
        values[i] = kept + 0.5;  // linear in each: any step will do
        const double above = value();
        values[i] = kept - 0.5;
        CHECK(above - value() == doctest::Approx(gradient[i]).epsilon(1e-11));
        values[i] = kept;
      }
    };
    check(o.x.flat(), dx.flat());
    check(o.w.flat(), dw.flat());
  }
}

TEST_CASE("grouped convolution: the outputs of a group see the inputs of that group only") {
  cpu_context ctx;
  for (const conv_shape& shape : {conv_shape{4, 6, {1, 1}, {1, 1}, {0, 0}, {1, 1}, 2},
                                  conv_shape{4, 6, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 2}}) {
    const extents<4> input{1, 3, 3, 4};
    operands<float> o(shape, input, 1);
    tensor<float, 4> y(o.dy.shape()), changed(o.dy.shape());
    ops::conv_forward<float>(ctx, shape, o.x, o.w.data(), nullptr, y);
    for (index_t p = 0; p < 9; ++p) o.x.data()[4 * p + 3] += 1.0F;
    ops::conv_forward<float>(ctx, shape, o.x, o.w.data(), nullptr, changed);
    for (index_t i = 0; i < y.size(); ++i) {
      CHECK((y.data()[i] == changed.data()[i]) == (i % 6 < 3));
    }
  }
}

TEST_CASE("grouped convolution: the same bits for any number of threads") {
  for (const conv_shape& shape : {conv_shape{40, 40, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 40},
                                  conv_shape{40, 40, {3, 3}, {2, 2}, {1, 1}, {1, 1}, 40},
                                  conv_shape{40, 40, {5, 3}, {1, 1}, {1, 1}, {1, 1}, 40},
                                  conv_shape{20, 40, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 20},
                                  conv_shape{40, 24, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 4},
                                  conv_shape{40, 24, {1, 1}, {1, 1}, {0, 0}, {1, 1}, 4}}) {
    const extents<4> input{9, 21, 20, shape.in_channels};
    const operands<float> o(shape, input, 1);
    const auto run = [&](int threads) {
      cpu_context ctx({threads, 0});
      tensor<float, 4> y(o.dy.shape()), dx(input), dw(o.w.shape());
      ops::conv_forward<float>(ctx, shape, o.x, o.w.data(), nullptr, y);
      ops::conv_backward_input<float>(ctx, shape, o.dy, o.w.data(), dx);
      ops::conv_backward_weight<float>(ctx, shape, o.x, o.dy, dw.data(), false);
      std::vector<float> all(y.flat().begin(), y.flat().end());
      for (const auto& part : {dx.flat(), dw.flat()}) all.insert(all.end(), part.begin(), part.end());
      return all;
    };
    const auto one = run(1);
    CHECK(same_bits(one, run(2)));
    CHECK(same_bits(one, run(3)));
  }
}

TEST_CASE("conv_shape: groups must divide both channels") {
  const auto grouped = [](index_t in, index_t out, index_t groups) {
    return conv_shape{in, out, {3, 3}, {1, 1}, {1, 1}, {1, 1}, groups};
  };
  grouped(6, 9, 3).validate("c");
  CHECK_THROWS_AS(grouped(6, 9, 2).validate("c"), shape_error);
  CHECK_THROWS_AS(grouped(6, 9, 9).validate("c"), shape_error);
  CHECK_THROWS_AS(grouped(6, 9, 0).validate("c"), shape_error);
  CHECK(contains(error_text([&] { grouped(6, 9, 2).validate("layer 4"); }), "groups 2"));
  CHECK(grouped(6, 9, 3).patch() == 18);
}

}  // namespace
