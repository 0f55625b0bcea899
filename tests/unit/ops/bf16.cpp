// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Operations on bfloat16: results of the same operations on floats with the same values, rounded once.
#include "../support/narrow_checks.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/ops/conv/low_rank_conv.hpp>
#include <pufferfish/ops/elementwise/dropout.hpp>
#include <pufferfish/ops/elementwise/relu.hpp>
#include <pufferfish/ops/elementwise/sum.hpp>
#include <pufferfish/ops/loss/softmax_cross_entropy.hpp>
#include <pufferfish/ops/norm/batch_norm.hpp>
#include <pufferfish/ops/pooling/global_average.hpp>
#include <pufferfish/ops/pooling/pooling.hpp>

namespace {
using namespace test;

void compare_conv(const conv_shape& shape, const extents<4>& input) {
  CAPTURE(shape.describe());
  CAPTURE(input[0]);
  const extents<4> output = shape.output(input, "conv");
  const index_t weights = shape.patch() * shape.out_channels;
  compare([&](auto type, cpu_context& ctx) {
    using T = decltype(type);
    const std::vector<T> x = numbers<T>(volume<4>(input), 1), w = numbers<T>(weights, 2),
                         bias = numbers<T>(shape.out_channels, 3), dy = numbers<T>(volume<4>(output), 4);
    std::vector<T> y(dy.size()), dx(x.size()), sum = numbers<T>(volume<4>(input), 5);
    std::vector<float> dw(w.size()), added = numbers<float>(weights, 6);
    ops::conv_forward<T>(ctx, shape, view_of(x, input), w.data(), bias.data(), view_of(y, output));
    ops::conv_backward_input<T>(ctx, shape, view_of(dy, output), w.data(), view_of(dx, input));
    ops::conv_backward_input<T>(ctx, shape, view_of(dy, output), w.data(), view_of(sum, input), true);
    ops::conv_backward_weight<T>(ctx, shape, view_of(x, input), view_of(dy, output), dw.data(), false);
    ops::conv_backward_weight<T>(ctx, shape, view_of(x, input), view_of(dy, output), added.data(), true);
    return results<T>{{y, dx, sum}, {dw, added}};
  });
}

TEST_CASE("bf16: loads and stores of kernels round as the class does") {
  cpu_context ctx;
  std::vector<float> values = numbers<float>(1003, 1);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] += static_cast<float>(i) * 0x1p-12F;
  const float special[] = {0.0F,
                           -0.0F,
                           1.00390625F,
                           1.01171875F,
                           0x1p-133F,
                           0x1.ffp127F,
                           3.4e38F,
                           -3.4e38F,
                           std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::quiet_NaN(),
                           -std::numeric_limits<float>::signaling_NaN()};
  std::copy(std::begin(special), std::end(special), values.begin());
  std::copy(std::begin(special), std::end(special), values.end() - 11);
  std::vector<bfloat16> rounded(values.size());
  std::vector<float> back(values.size());
  ops::detail::convert(ctx, values.data(), rounded.data(), 1003);
  ops::detail::convert(ctx, rounded.data(), back.data(), 1003);
  for (std::size_t i = 0; i < values.size(); ++i) {
    CAPTURE(values[i]);
    CHECK(rounded[i].bits() == bfloat16(values[i]).bits());
    CHECK((back[i] == static_cast<float>(rounded[i]) || back[i] != back[i]));
  }
}

TEST_CASE("bf16: element by element") {
  for (const index_t size : {0, 1, 15, 1003}) {
    compare([&](auto type, cpu_context& ctx) {
      using T = decltype(type);
      using in = std::span<const T>;
      const std::vector<T> x = numbers<T>(size, 1), dy = numbers<T>(size, 2);
      std::vector<T> y(x.size()), dx(x.size()), sum = dy, rectified = dy, dropped(x.size());
      ops::relu_forward<T>(ctx, in(x), std::span<T>(y));
      ops::relu_backward<T>(ctx, in(y), in(dy), std::span<T>(dx));
      ops::add<T>(ctx, in(x), std::span<T>(sum));
      ops::add_relu<T>(ctx, in(x), std::span<T>(rectified));
      ops::dropout<T>(ctx, in(x), std::span<T>(dropped), 0.3, random_stream(1, 2), 5);
      return results<T>{{y, dx, sum, rectified, dropped}, {}};
    });
  }
}

TEST_CASE("bf16: batch norm, its statistics and masks") {
  for (const extents<2>& shape : {extents<2>{2, 1}, extents<2>{33, 16}, extents<2>{300, 64},
                                  extents<2>{1000, 20}, extents<2>{50, 1032}, extents<2>{40000, 64}}) {
    CAPTURE(shape[0]);
    CAPTURE(shape[1]);
    const index_t size = shape[0] * shape[1], channels = shape[1];
    std::vector<ops::relu_mask<float>::word> passes;  // both take the float's mask
    compare([&](auto type, cpu_context& ctx) {
      using T = decltype(type);
      const std::vector<T> x = numbers<T>(size, 1), addend = numbers<T>(size, 2), dy = numbers<T>(size, 3);
      std::vector<T> y(x.size()), dx(x.size()), plain(x.size()), masked(x.size());
      std::vector<float> statistics(2 * static_cast<std::size_t>(channels)), mean(statistics.size() / 2),
          variance(mean.size()), batches(1), dweight(mean.size()), dbias(mean.size()), sums(mean.size());
      const std::vector<float> weight = numbers<float>(channels, 4), bias = numbers<float>(channels, 5);
      ops::batch_norm_use_batch<T>(ctx, view_of(x, shape), 1e-5, 0.1, statistics.data(), mean.data(),
                                   variance.data(), batches.data());
      std::vector<typename ops::relu_mask<T>::word> words(
          static_cast<std::size_t>(ops::relu_mask<T>::size(shape)));
      ops::norm_epilogue<T> epilogue{view_of(addend, shape), true, {words.data()}};
      const float* inverse = statistics.data() + channels;
      ops::batch_norm_apply<T>(ctx, view_of(x, shape), statistics.data(), inverse, weight.data(), bias.data(),
                               view_of(y, shape), epilogue);
      for (index_t m = 0; m < shape[0]; m += 1 + shape[0] / 7) {
        const bool positive = static_cast<float>(y[static_cast<std::size_t>(m * channels)]) > 0.0F;
        CHECK(epilogue.mask.passes(shape, m, 0) == positive);
      }
      ops::batch_norm_apply<T>(ctx, view_of(x, shape), statistics.data(), inverse, weight.data(), bias.data(),
                               view_of(plain, shape));
      ops::batch_norm_backward<T>(ctx, view_of(x, shape), view_of(dy, shape), statistics.data(), inverse,
                                  weight.data(), {dweight.data(), false}, {dbias.data(), false},
                                  view_of(dx, shape));
      ops::masked_copy<T>(ctx, view_of(dy, shape), epilogue.mask, view_of(masked, shape));
      ops::column_sums<T>(ctx, view_of(dy, shape), sums.data(), true);
      return results<T>{{y, plain, dx, masked}, {statistics, mean, variance, dweight, dbias, sums}};
    });
  }
}

TEST_CASE("bf16: pooling") {
  for (const index_t channels : {3, 16}) {
    const extents<4> input{2, 9, 6, channels}, output{2, 5, 3, channels}, one{2, 1, 1, channels};
    const auto shape = pool_shape::square(3, 2, 1);
    compare([&](auto type, cpu_context& ctx) {
      using T = decltype(type);
      const std::vector<T> x = numbers<T>(volume<4>(input), 1), dy = numbers<T>(volume<4>(output), 2),
                           dall = numbers<T>(volume<4>(one), 3);
      std::vector<T> y(dy.size()), dx(x.size()), average(dy.size()), daverage(x.size()), all(dall.size()),
          spread(x.size());
      ops::max_pool_forward<T>(ctx, shape, view_of(x, input), view_of(y, output));
      ops::max_pool_backward<T>(ctx, shape, view_of(x, input), view_of(std::as_const(y), output),
                                view_of(dy, output), view_of(dx, input));
      ops::average_pool_forward<T>(ctx, shape, true, view_of(x, input), view_of(average, output));
      ops::average_pool_backward<T>(ctx, shape, true, view_of(dy, output), view_of(daverage, input));
      ops::global_average_forward<T>(ctx, view_of(x, input), view_of(all, one));
      ops::global_average_backward<T>(ctx, view_of(dall, one), view_of(spread, input));
      return results<T>{{y, dx, average, daverage, all, spread}, {}};
    });
  }
}

TEST_CASE("bf16: softmax cross entropy") {
  const extents<2> shape{9, 10};
  const std::vector<std::int32_t> labels{0, 1, 2, 3, 4, 5, 6, 7, 8};
  compare([&](auto type, cpu_context& ctx) {
    using T = decltype(type);
    const std::vector<T> logits = numbers<T>(90, 1);
    std::vector<T> gradient(90);
    const loss_result result = ops::softmax_cross_entropy<T>(ctx, view_of(logits, shape), labels, {0.1}, 9.0,
                                                             view_of(gradient, shape));
    return results<T>{{gradient},
                      {{static_cast<float>(result.loss_sum), static_cast<float>(result.correct)}}};
  });
}

TEST_CASE("bf16: products of rows") {
  for (const extents<3>& s :
       {extents<3>{0, 3, 4}, extents<3>{1, 1, 1}, extents<3>{7, 33, 5}, extents<3>{500, 64, 48},
        extents<3>{9000, 40, 600}, extents<3>{5, 4, 0}, extents<3>{5, 0, 4}, extents<3>{300, 64, 1100},
        extents<3>{3, 2, 2}, extents<3>{101, 34, 17}, extents<3>{25, 2100, 130}}) {
    CAPTURE(s[0]);
    const extents<2> in{s[0], s[1]}, matrix{s[1], s[2]}, out{s[0], s[2]};
    compare([&](auto type, cpu_context& ctx) {
      using T = decltype(type);
      const std::vector<T> x = numbers<T>(s[0] * s[1], 1), w = numbers<T>(s[1] * s[2], 2),
                           bias = numbers<T>(s[2], 3), dy = numbers<T>(s[0] * s[2], 4);
      std::vector<T> y(dy.size()), dx(x.size()), sum = x;
      std::vector<float> dw(w.size()), db(bias.size());
      ops::linear_forward<T>(ctx, view_of(x, in), view_of(w, matrix), bias.data(), view_of(y, out));
      ops::linear_backward_input<T>(ctx, view_of(dy, out), view_of(w, matrix), view_of(dx, in));
      ops::linear_backward_input<T>(ctx, view_of(dy, out), view_of(w, matrix), view_of(sum, in), true);
      ops::linear_backward_weight<T>(ctx, view_of(x, in), view_of(dy, out), view_of(dw, matrix), false);
      ops::bias_gradient<T>(ctx, view_of(dy, out), db.data(), false);
      return results<T>{{y, dx, sum}, {dw, db}};
    });
  }
}

TEST_CASE("bf16: convolutions") {
  compare_conv(conv_shape::square(3, 8, 3, 1, 1), {0, 5, 4, 3});
  compare_conv(conv_shape::square(3, 17, 3, 1, 1), {2, 9, 7, 3});
  compare_conv(conv_shape::square(32, 24, 3, 1, 1), {3, 16, 16, 32});
  compare_conv(conv_shape::square(16, 24, 3, 2, 1), {5, 9, 8, 16});
  compare_conv(conv_shape::square(32, 40, 3, 1, 1), {9, 4, 5, 32});    // one pixel of many images
  compare_conv(conv_shape::square(6, 70, 3, 1, 1), {2, 12, 17, 6});    // segments, and panels of two widths
  compare_conv(conv_shape::square(130, 6, 3, 2, 1), {6, 7, 7, 130});   // phases of short lines
  compare_conv(conv_shape::square(8, 10, 3, 1, 1), {1, 70, 40, 8});    // one image, in bands of lines
  compare_conv(conv_shape::square(700, 34, 3, 1, 1), {2, 9, 9, 700});  // blocks of input channels
  compare_conv(conv_shape::square(4, 6, 1, 3), {2, 7, 8, 4});          // phases without taps
  compare_conv(conv_shape::square(16, 9, 1), {3, 8, 8, 16});
  compare_conv(conv_shape::square(16, 24, 1, 2), {3, 8, 8, 16});
  compare_conv({5, 3, {2, 3}, {1, 2}, {1, 2}, {2, 1}}, {2, 9, 8, 5});
  compare_conv({6, 12, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 3}, {2, 6, 7, 6});
  compare_conv({64, 64, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 2}, {8, 16, 16, 64});  // tiles, but for the groups
  compare_conv(conv_shape::square(64, 8, 1), {80, 32, 32, 64});  // more than one block of images
}

/// A low-rank convolution to 24 channels, `down` of which reads `input`, and the moments of its output.
void compare_low_rank(const conv_shape& down, const extents<4>& input, bool keeps_inner) {
  CAPTURE(down.describe());
  CAPTURE(keeps_inner);
  const index_t rank = down.out_channels;
  const extents<4> inner = down.output(input, "down");
  extents<4> output = inner;
  output[3] = 24;
  const extents<2> matrix{rank, 24}, rows{volume<4>(output) / 24, 24};
  compare([&](auto type, cpu_context& ctx) {
    using T = decltype(type);
    const std::vector<T> x = numbers<T>(volume<4>(input), 1), w = numbers<T>(down.patch() * rank, 2),
                         up = numbers<T>(rank * 24, 3), dy = numbers<T>(volume<4>(output), 4),
                         bias = numbers<T>(24, 6), between = numbers<T>(volume<4>(inner), 5);
    std::vector<T> t(between.size()), y(dy.size()), product(dy.size()), dt(t.size());
    std::vector<float> dup(up.size());
    std::vector<double> moments(48), mean(24), variance(24);
    scratch_frame frame(ctx.scratch());
    ops::moment_parts<T> parts(frame);
    ops::low_rank_conv_forward<T>(ctx, down, view_of(x, input), w.data(), view_of(up, matrix), bias.data(),
                                  view_of(t, inner), view_of(y, output), &parts);
    ops::batch_norm_statistics<T>(ctx, view_of(std::as_const(y), rows), mean.data(), variance.data());
    CHECK(parts.merge(moments.data(), moments.data() + 24) == rows[0]);
    for (std::size_t c = 0; c < 24; ++c) {
      CHECK(moments[c] == doctest::Approx(mean[c]).epsilon(1e-5));
      CHECK(moments[24 + c] == doctest::Approx(variance[c]).epsilon(1e-5));
    }
    // y is the product of the rounded t, whether t is kept or not.
    ops::linear_forward<T>(ctx, view_of(std::as_const(t), extents<2>{rows[0], rank}), view_of(up, matrix),
                           bias.data(), view_of(product, rows));
    if (!keeps_inner) {
      ops::low_rank_conv_forward<T>(ctx, down, view_of(x, input), w.data(), view_of(up, matrix), bias.data(),
                                    tensor_view<T, 4>(), view_of(y, output));
    }
    for (std::size_t i = 0; i < y.size(); ++i) {
      CHECK(static_cast<float>(y[i]) ==
            doctest::Approx(static_cast<double>(static_cast<float>(product[i]))).epsilon(0.005));
    }
    ops::low_rank_conv_backward_up<T>(ctx, view_of(between, inner), view_of(dy, output), view_of(up, matrix),
                                      view_of(dup, matrix), false, view_of(dt, inner));
    return results<T>{{t, dt}, {dup}};
  });
}

TEST_CASE("bf16: low-rank convolutions and the moments of their output") {
  for (const bool keeps_inner : {true, false}) {
    compare_low_rank(conv_shape::square(16, 6, 3, 2, 1), {4, 9, 8, 16}, keeps_inner);
    compare_low_rank(conv_shape::square(16, 18, 3, 1, 1), {9, 10, 12, 16}, keeps_inner);
    compare_low_rank(conv_shape::square(16, 18, 3, 1, 1), {9, 4, 4, 16}, keeps_inner);
    compare_low_rank(conv_shape::square(16, 5, 3, 1, 1), {3, 6, 6, 16}, keeps_inner);  // an odd rank
  }
}

}  // namespace
