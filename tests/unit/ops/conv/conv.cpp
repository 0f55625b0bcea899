// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/ops/conv/conv.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

conv_shape random_conv(picker& pick, index_t channels) {
  return {pick(1, channels),        pick(1, channels),        {pick(1, 4), pick(1, 4)},
          {pick(1, 3), pick(1, 3)}, {pick(0, 4), pick(0, 4)}, {pick(1, 2), pick(1, 2)}};
}

/// The OIHW view of a weight stored HWIO.
template <class T>
tensor_view<T, 4> oihw(const tensor_view<T, 4>& stored) {
  return stored.permute({3, 2, 0, 1});
}

template <class T>
void check_against_reference(cpu_context& ctx, const conv_shape& shape, const extents<4>& input,
                             const extents<4>& output, std::uint64_t round) {
  CAPTURE(shape.describe());
  CAPTURE(to_string<4>(input));
  tensor<T, 4> x(input), dy(output),
      w({shape.kernel.height, shape.kernel.width, shape.in_channels, shape.out_channels});
  tensor<T, 1> bias({shape.out_channels});
  fill_normal<T>(x.flat(), 1.0, {1, round});
  fill_normal<T>(dy.flat(), 1.0, {2, round});
  fill_normal<T>(w.flat(), 1.0, {3, round});
  fill_normal<T>(bias.flat(), 1.0, {4, round});
  const T* b = round % 2 == 0 ? bias.data() : nullptr;
  const bool accumulate = round % 3 == 0;
  const tensor_view<const T, 4> weight = oihw(std::as_const(w).view());
  const double depth =
      static_cast<double>(shape.patch() + shape.out_channels + output[0] * output[1] * output[2]);
  const double tolerance = (sizeof(T) == 4 ? 3e-6 : 1e-14) * std::sqrt(depth);

  tensor<T, 4> y(output), y2(output), dx(input), dx2(input), dw(w.shape()), dw2(w.shape());
  ops::conv_forward<T>(ctx, shape, x, w.data(), b, y);
  ops::reference::conv_forward<T>(shape, x, weight, b, y2);
  CHECK(largest_error(y, y2) < tolerance);

  fill_normal<T>(dx.flat(), 1.0, {5, round});  // must be overwritten
  ops::conv_backward_input<T>(ctx, shape, dy, w.data(), dx);
  ops::reference::conv_backward_input<T>(shape, dy, weight, dx2);
  CHECK(largest_error(dx, dx2) < tolerance);

  fill_normal<T>(dw.flat(), 1.0, {6, round});
  copy(dw.view(), dw2.view());
  ops::conv_backward_weight<T>(ctx, shape, x, dy, dw.data(), accumulate);
  ops::reference::conv_backward_weight<T>(shape, x, dy, oihw(dw2.view()), accumulate);
  CHECK(largest_error(dw, dw2) < tolerance);
}

TEST_CASE_TEMPLATE("convolution: fast against reference over random shapes", T, float, double) {
  cpu_context ctx({2, 0});
  picker pick(1);
  int done = 0, empty = 0;
  for (std::uint64_t round = 0; round < 250; ++round) {
    const conv_shape shape = random_conv(pick, 18);
    const extents<4> input{pick(0, 3), pick(1, 10), pick(1, 10), shape.in_channels};
    extents<4> output{};
    try {
      output = shape.output(input, "test");
    } catch (const shape_error&) {
      continue;
    }
    ++done;
    empty += input[0] == 0 ? 1 : 0;
    check_against_reference<T>(ctx, shape, input, output, round);
  }
  CHECK(done > 120);
  CHECK(empty > 10);
}

TEST_CASE("convolution: the usual ones, at sizes of several tiles") {
  cpu_context ctx({2, 0});
  std::uint64_t round = 0;
  for (const conv_shape& shape :
       {conv_shape::square(16, 24, 3, 1, 1), conv_shape::square(16, 24, 3, 2, 1),
        conv_shape::square(3, 8, 7, 2, 3), conv_shape::square(33, 17, 1), conv_shape::square(12, 20, 1, 2),
        conv_shape::square(8, 8, 3, 1, 2, 2), conv_shape{6, 5, {1, 7}, {1, 1}, {0, 3}, {1, 1}},
        conv_shape{6, 5, {5, 1}, {2, 1}, {2, 0}, {1, 1}}}) {
    const extents<4> input{2, 19, 23, shape.in_channels};
    check_against_reference<float>(ctx, shape, input, shape.output(input, "test"), round++);
  }
}

TEST_CASE_TEMPLATE("convolution: every way that the direct kernels go", T, float, double) {
  // Whole segments and what is left of a line; lines too short for blocks, with many images and with few;
  // panels of several vectors, the last one ragged; gradients of weights cut by splits and by channels;
  // strides whose phases have no tap.
  cpu_context ctx({2, 0});
  picker pick(7);
  const index_t channels[] = {1, 3, 8, 16, 17, 31, 48, 65};
  for (std::uint64_t round = 0; round < 90; ++round) {
    const index_t kernel = pick(0, 3) > 0 ? 3 : pick(1, 5);
    const conv_shape shape{channels[pick(0, 7)],     channels[pick(0, 7)],     {kernel, kernel},
                           {pick(1, 2), pick(1, 2)}, {pick(0, 2), pick(0, 2)}, {1, pick(0, 4) > 0 ? 1 : 2}};
    const bool narrow = round % 2 == 0;
    const extents<4> input{narrow ? pick(1, 11) : pick(1, 3), narrow ? pick(1, 5) : pick(1, 9),
                           narrow ? pick(1, 9) : pick(9, 41), shape.in_channels};
    extents<4> output{};
    try {
      output = shape.output(input, "test");
    } catch (const shape_error&) {
      continue;
    }
    check_against_reference<T>(ctx, shape, input, output, round);
  }
}

TEST_CASE_TEMPLATE("convolution: many channels over few pixels, with the weight in place", T, float, double) {
  cpu_context ctx({2, 0});
  std::uint64_t round = 0;
  for (const index_t channels : {80, 96, 128, 130}) {
    for (const extents<4>& image : {extents<4>{1, 1, 1, 70}, {1, 2, 2, 70}, {1, 4, 4, 70}, {3, 2, 3, 70}}) {
      const conv_shape shape = conv_shape::square(70, channels, 3, 1, 1);
      check_against_reference<T>(ctx, shape, image, shape.output(image, "test"), round++);
    }
  }
}

TEST_CASE_TEMPLATE("convolution: few pixels with a large weight, the same bits for any number of threads", T,
                   float, double) {
  cpu_context one({1, 0}), three({3, 0});
  picker pick(11);
  int done = 0;
  for (std::uint64_t round = 0; round < 60; ++round) {
    const index_t kernel = pick(2, 3);
    const conv_shape shape{
        pick(40, 150), 16 * pick(4, 9), {kernel, kernel}, {pick(1, 2), pick(1, 2)}, {pick(0, 1), pick(0, 1)},
        {1, 1}};
    const extents<4> input{pick(1, 3), pick(3, 8), pick(3, 8), shape.in_channels};
    const extents<4> output = shape.output(input, "test");
    const auto& kernels = ops::detail::conv_kernels<T>();
    if (volume<4>(output) == 0 || !ops::detail::few_pixels_pay<T>(shape, output, kernels)) continue;
    ++done;
    check_against_reference<T>(one, shape, input, output, round);
    tensor<T, 4> x(input), y(output), again(output),
        w({kernel, kernel, shape.in_channels, shape.out_channels});
    fill_normal<T>(x.flat(), 1.0, {1, round});
    fill_normal<T>(w.flat(), 1.0, {3, round});
    ops::detail::few_pixels_forward<T>(one, shape, x, w.data(), y, kernels);
    ops::detail::few_pixels_forward<T>(three, shape, x, w.data(), again, kernels);
    CHECK(std::equal(y.data(), y.data() + y.size(), again.data()));
  }
  CHECK(done > 15);
}

TEST_CASE_TEMPLATE("convolution: few input channels, and strides that skip pixels", T, float, double) {
  // Gradients of weights with all elements of the kernel in one product; copies of the pixels that are read.
  cpu_context ctx({2, 0});
  picker pick(11);
  for (std::uint64_t round = 0; round < 80; ++round) {
    const bool thin = round % 2 == 0;
    conv_shape shape{pick(1, thin ? 5 : 70), pick(1, 70), {1, 1}, {pick(1, 3), pick(1, 3)}, {0, 0}, {1, 1}};
    if (thin) {
      shape.kernel = {pick(1, 5), pick(2, 5)};
      shape.padding = {pick(0, 6), pick(0, 6)};
      shape.dilation.height = pick(1, 2);
    }
    const extents<4> input{pick(0, 9), pick(1, 12), pick(1, 40), shape.in_channels};
    extents<4> output{};
    try {
      output = shape.output(input, "test");
    } catch (const shape_error&) {
      continue;
    }
    check_against_reference<T>(ctx, shape, input, output, round);
  }
}

TEST_CASE("convolution: stride beyond the kernel, padding beyond the image") {
  cpu_context ctx({2, 0});
  std::uint64_t round = 0;
  for (const conv_shape& shape :
       {conv_shape{5, 7, {2, 1}, {4, 3}, {0, 0}, {1, 1}}, conv_shape{5, 18, {3, 3}, {1, 1}, {5, 6}, {1, 1}},
        conv_shape{20, 33, {3, 3}, {3, 5}, {2, 2}, {2, 3}}}) {
    for (const extents<4>& input :
         {extents<4>{5, 6, 5, shape.in_channels}, extents<4>{2, 9, 21, shape.in_channels}}) {
      check_against_reference<float>(ctx, shape, input, shape.output(input, "test"), round++);
    }
  }
}

TEST_CASE("convolution: bits do not depend on threads, nor on what else is in the batch") {
  const conv_shape shape = conv_shape::square(24, 40, 3, 1, 1);
  const extents<4> input{9, 6, 33, 24}, output = shape.output(input, "test");
  tensor<float, 4> x(input), dy(output), w({3, 3, 24, 40});
  fill_normal<float>(x.flat(), 1.0, {1, 0});
  fill_normal<float>(dy.flat(), 1.0, {2, 0});
  fill_normal<float>(w.flat(), 1.0, {3, 0});
  tensor<float, 4> y1(output), y3(output), dx1(input), dx3(input), dw1(w.shape()), dw3(w.shape());
  const auto run = [&](int threads, tensor<float, 4>& y, tensor<float, 4>& dx, tensor<float, 4>& dw) {
    cpu_context ctx({threads, 0});
    ops::conv_forward<float>(ctx, shape, x, w.data(), nullptr, y);
    ops::conv_backward_input<float>(ctx, shape, dy, w.data(), dx);
    ops::conv_backward_weight<float>(ctx, shape, x, dy, dw.data(), false);
  };
  run(1, y1, dx1, dw1);
  run(3, y3, dx3, dw3);
  CHECK(largest_error(y1, y3) == 0.0);
  CHECK(largest_error(dx1, dx3) == 0.0);
  CHECK(largest_error(dw1, dw3) == 0.0);
}

TEST_CASE("convolution: gradient of the reference by finite differences") {
  // Ties the reference's three forms to each other, so that agreeing with it means something.
  const conv_shape shape{2, 3, {3, 2}, {2, 1}, {1, 1}, {1, 2}};
  const extents<4> input{2, 5, 4, 2}, output = shape.output(input, "test");
  tensor<double, 4> x(input), w({3, 2, 2, 3}), y(output), dy(output), dx(input), dw(w.shape());
  fill_normal<double>(x.flat(), 1.0, {1, 1});
  fill_normal<double>(w.flat(), 1.0, {1, 2});
  fill_normal<double>(dy.flat(), 1.0, {1, 3});
  const auto value = [&] {
    ops::reference::conv_forward<double>(shape, x, oihw(std::as_const(w).view()), nullptr, y);
    double sum = 0.0;
    for (std::size_t i = 0; i < y.flat().size(); ++i) sum += y.flat()[i] * dy.flat()[i];
    return sum;
  };
  ops::reference::conv_backward_input<double>(shape, dy, oihw(std::as_const(w).view()), dx);
  ops::reference::conv_backward_weight<double>(shape, x, dy, oihw(dw.view()), false);
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
  check(x.flat(), dx.flat());
  check(w.flat(), dw.flat());
}

TEST_CASE("convolution: the same bits for any number of threads") {
  for (const conv_shape& shape :
       {conv_shape::square(9, 17, 3, 1, 1), conv_shape::square(9, 17, 3, 2, 1), conv_shape::square(9, 17, 1),
        conv_shape::square(9, 17, 1, 3), conv_shape::square(3, 17, 3, 1, 1)}) {
    const extents<4> input{5, 21, 20, shape.in_channels}, output = shape.output(input, "test");
    tensor<float, 4> x(input), dy(output);
    tensor<float, 2> w({shape.patch(), shape.out_channels});
    fill_normal<float>(x.flat(), 1.0, {1, 1});
    fill_normal<float>(dy.flat(), 1.0, {1, 2});
    fill_normal<float>(w.flat(), 1.0, {1, 3});
    const auto run = [&](int threads) {
      cpu_context ctx({threads, 0});
      tensor<float, 4> y(output), dx(input);
      tensor<float, 2> dw(w.shape());
      ops::conv_forward<float>(ctx, shape, x, w.data(), nullptr, y);
      ops::conv_backward_input<float>(ctx, shape, dy, w.data(), dx);
      ops::conv_backward_weight<float>(ctx, shape, x, dy, dw.data(), false);
      std::vector<float> all(y.flat().begin(), y.flat().end());
      for (const auto& part : {dx.flat(), dw.flat()}) all.insert(all.end(), part.begin(), part.end());
      return all;
    };
    const auto one = run(1);
    CHECK(same_bits(one, run(2)));
    CHECK(same_bits(one, run(3)));
  }
}

TEST_CASE("conv_shape: output extents, refusals") {
  CHECK(conv_shape::square(3, 64, 7, 2, 3).output({2, 224, 224, 3}, "stem") == extents<4>{2, 112, 112, 64});
  CHECK(conv_shape::square(3, 4, 3, 1, 0, 2).output({0, 5, 6, 3}, "c") == extents<4>{0, 1, 2, 4});
  const std::string text = error_text([] { conv_shape::square(3, 4, 3).output({1, 2, 8, 3}, "layer 7"); });
  CHECK(contains(text, "layer 7"));
  CHECK(contains(text, "[1 x 2 x 8 x 3]"));
  CHECK(contains(text, "kernel 3x3"));
  CHECK_THROWS_AS(conv_shape::square(3, 4, 3).output({1, 8, 8, 4}, "c"), shape_error);
  CHECK_THROWS_AS(conv_shape::square(0, 4, 3).validate("c"), shape_error);
  CHECK_THROWS_AS(conv_shape::square(3, 4, 3, 0).validate("c"), shape_error);
  CHECK_THROWS_AS(conv_shape::square(3, 4, 3, 1, -1).validate("c"), shape_error);
  constexpr index_t huge = index_t{1} << 62;
  CHECK_THROWS_AS(conv_shape::square(huge, 4, 3).validate("c"), shape_error);
  CHECK_THROWS_AS(conv_shape::square(3, 4, index_t{1} << 32).validate("c"), shape_error);
  CHECK_THROWS_AS(conv_shape::square(3, 4, 3, 1, huge).validate("c"), shape_error);
  CHECK_THROWS_AS(conv_shape::square(3, 4, 3, 1, 0, huge).validate("c"), shape_error);
  CHECK(conv_shape::square(3, 4, 1).is_pointwise());
  CHECK(!conv_shape::square(3, 4, 1, 2).is_pointwise());
}

TEST_CASE("convolution: errors name the operation and the shapes") {
  cpu_context ctx;
  const conv_shape shape = conv_shape::square(3, 4, 3);
  tensor<float, 4> x({1, 8, 8, 3}), y({1, 6, 5, 4}), w({3, 3, 3, 4});
  const auto check = [](const std::string& text, const char* name) {
    CHECK(contains(text, name));
    CHECK(contains(text, "[1 x 8 x 8 x 3]"));
    CHECK(contains(text, "[1 x 6 x 5 x 4]"));
  };
  check(error_text([&] { ops::conv_forward<float>(ctx, shape, x, w.data(), nullptr, y); }), "conv_forward");
  check(error_text([&] { ops::conv_backward_input<float>(ctx, shape, y, w.data(), x); }),
        "conv_backward_input");
  check(error_text([&] { ops::conv_backward_weight<float>(ctx, shape, x, y, w.data(), false); }),
        "conv_backward_weight");
}

}  // namespace
