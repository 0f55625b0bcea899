// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A product or convolution with an epilogue gives the bits of separate passes.
#include <pufferfish/ops/linear/output_epilogue.hpp>

#include <pufferfish/ops/conv/low_rank_conv.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

template <class T>
std::vector<T> random_values(index_t count, std::uint64_t number) {
  std::vector<float> values(static_cast<std::size_t>(count));
  fill_normal<float>(values, 1.0, {number, 7});
  return {values.begin(), values.end()};
}

/// y = relu(y + addend) by the definition, each optional; sums are rounded to T.
template <class T>
void change(std::span<T> y, const T* addend, bool relu) {
  for (std::size_t i = 0; i < y.size(); ++i) {
    if (addend != nullptr) y[i] = static_cast<T>(y[i] + addend[i]);
    if (relu && y[i] < T{}) y[i] = T{};
  }
}

/// Compares forward(y, epilogue), which computes `shape` elements, with and without each epilogue.
template <class T, std::size_t N, class Forward>
void check_epilogues(cpu_context& ctx, const extents<N>& shape, Forward&& forward) {
  tensor<T, N> plain(shape);
  forward(plain.view(), ops::output_epilogue<T>());
  const std::vector<T> addend = random_values<T>(plain.size(), 1);
  for (const bool adds : {false, true}) {
    for (const bool relu : {false, true}) {
      const T* const summand = adds ? addend.data() : nullptr;
      tensor<T, N> expected = plain, y(shape);
      change<T>(expected.flat(), summand, relu);
      std::fill(y.flat().begin(), y.flat().end(), T(std::nanf("")));
      forward(y.view(), ops::output_epilogue<T>(summand, relu));
      CHECK(std::equal(y.flat().begin(), y.flat().end(), expected.flat().begin()));
    }
  }
  scratch_frame frame(ctx.scratch());
  ops::moment_parts<T> moments(frame);
  tensor<T, N> y(shape);
  forward(y.view(), ops::output_epilogue<T>(&moments));
  CHECK(std::equal(y.flat().begin(), y.flat().end(), plain.flat().begin()));
  const index_t channels = shape[N - 1], rows = channels == 0 ? 0 : y.size() / channels;
  std::vector<double> mean(static_cast<std::size_t>(channels)), variance = mean, sum = mean;
  CHECK(moments.merge(mean.data(), variance.data()) == rows);
  for (index_t i = 0; i < y.size(); ++i) {
    sum[static_cast<std::size_t>(i % channels)] += static_cast<double>(y.data()[i]);
  }
  for (std::size_t c = 0; c < sum.size() && rows > 0; ++c) {
    CHECK(mean[c] == doctest::Approx(sum[c] / static_cast<double>(rows)).epsilon(1e-5).scale(1));
  }
}

template <class T>
void check_linear(cpu_context& ctx, index_t rows, index_t in, index_t out, bool bias) {
  CAPTURE(rows);
  CAPTURE(in);
  CAPTURE(out);
  const std::vector<T> x = random_values<T>(rows * in, 2), w = random_values<T>(in * out, 3),
                       b = random_values<T>(out, 4);
  check_epilogues<T, 2>(ctx, {rows, out}, [&](const tensor_view<T, 2>& y, const auto& epilogue) {
    ops::linear_forward<T>(ctx, tensor_view<const T, 2>(x.data(), {rows, in}),
                           tensor_view<const T, 2>(w.data(), {in, out}), bias ? b.data() : nullptr, y,
                           epilogue);
  });
}

TEST_CASE_TEMPLATE("linear_forward with an epilogue", T, float, double, bfloat16) {
  cpu_context ctx({2, 0});
  picker pick(1);
  for (int round = 0; round < 40; ++round) {
    check_linear<T>(ctx, pick(0, 150), pick(1, 70), pick(1, 140), round % 2 == 0);
  }
}

TEST_CASE_TEMPLATE("linear_forward past the caches: the same bits as in the caches", T, float, double) {
  // 32 MiB in rows of whole vectors, and the first of these rows alone.
  cpu_context ctx({2, 0});
  const index_t out = 64, in = 3, few = 50, rows = (index_t{32} << 20) / (out * index_t{sizeof(T)});
  check_linear<T>(ctx, rows, in, out, true);
  const std::vector<T> x = random_values<T>(rows * in, 2), w = random_values<T>(in * out, 3);
  tensor<T, 2> large({rows, out}), small({few, out});
  for (const auto& y : {large.view(), small.view()}) {
    ops::linear_forward<T>(ctx, tensor_view<const T, 2>(x.data(), {y.extent(0), in}),
                           tensor_view<const T, 2>(w.data(), {in, out}), nullptr, y);
  }
  CHECK(std::equal(small.flat().begin(), small.flat().end(), large.flat().begin()));
}

template <class T>
void check_convs(cpu_context& ctx, const conv_shape& shape, const extents<4>& input, bool bias) {
  CAPTURE(shape.describe());
  CAPTURE(to_string<4>(input));
  const std::vector<T> x = random_values<T>(volume<4>(input), 2),
                       w = random_values<T>(shape.patch() * shape.out_channels, 3),
                       b = random_values<T>(shape.out_channels, 4);
  const tensor_view<const T, 4> images(x.data(), input);
  const extents<4> output = shape.output(input, "test");
  check_epilogues<T, 4>(ctx, output, [&](const tensor_view<T, 4>& y, const auto& epilogue) {
    ops::conv_forward<T>(ctx, shape, images, w.data(), bias ? b.data() : nullptr, y, epilogue);
  });
  // The same as `down`, with and without a place for its result.
  const index_t out = 2 * shape.groups * 7;
  const std::vector<T> up = random_values<T>(shape.out_channels / shape.groups * out, 5),
                       sums = random_values<T>(out, 6);
  extents<4> result = output;
  result[3] = out;
  tensor<T, 4> kept(output);
  for (const tensor_view<T, 4>& t : {tensor_view<T, 4>(), kept.view()}) {
    check_epilogues<T, 4>(ctx, result, [&](const tensor_view<T, 4>& y, const auto& epilogue) {
      const T* const last = bias ? sums.data() : nullptr;
      if (shape.groups > 1) {
        ops::grouped_low_rank_conv_forward<T>(ctx, shape, images, w.data(), up.data(), last, t, y, epilogue);
      } else {
        const tensor_view<const T, 2> matrix(up.data(), {shape.out_channels, out});
        ops::low_rank_conv_forward<T>(ctx, shape, images, w.data(), matrix, last, t, y, epilogue);
      }
    });
  }
}

TEST_CASE_TEMPLATE("convolutions with an epilogue, dense and low-rank", T, float, double, bfloat16) {
  cpu_context ctx({2, 0});
  picker pick(2);
  for (int round = 0; round < 20; ++round) {
    const index_t groups = pick(1, 3) == 3 ? 2 : 1, stride = pick(1, 2), kernel = pick(0, 1) * 2 + 1;
    conv_shape shape =
        conv_shape::square(groups * pick(1, 20), groups * pick(1, 20), kernel, stride, kernel / 2);
    shape.groups = groups;
    check_convs<T>(ctx, shape, {pick(0, 3), pick(1, 13), pick(1, 13), shape.in_channels}, round % 2 == 0);
  }
  check_convs<T>(ctx, conv_shape::square(32, 32, 3, 1, 1), {4, 16, 16, 32}, true);  // Winograd's tiles
  check_convs<T>(ctx, conv_shape::square(24, 40, 3, 1, 1), {1, 2, 2, 24}, false);   // few pixels
}

}  // namespace
