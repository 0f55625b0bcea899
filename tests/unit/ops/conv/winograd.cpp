// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/ops/conv/low_rank_conv.hpp>

#include <limits>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

using matrix = std::vector<std::vector<double>>;

/// left x right^T of a square of values, as every transform is.
matrix both_sides(const matrix& left, const matrix& x, const matrix& right) {
  matrix y(left.size(), std::vector<double>(right.size(), 0.0));
  for (std::size_t i = 0; i < y.size(); ++i) {
    for (std::size_t j = 0; j < y[i].size(); ++j) {
      for (std::size_t k = 0; k < x.size(); ++k) {
        for (std::size_t l = 0; l < x[k].size(); ++l) y[i][j] += left[i][k] * x[k][l] * right[j][l];
      }
    }
  }
  return y;
}
matrix transposed(const matrix& a) {
  matrix b(a[0].size(), std::vector<double>(a.size()));
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t j = 0; j < a[i].size(); ++j) b[j][i] = a[i][j];
  }
  return b;
}

const std::vector<double> points{0.0, 0.75, -0.75, 1.5, -1.5};

/// Row i: the coefficients of the product of all (x - point) but the i-th; the last row: of all of them.
matrix pixels_matrix() {
  matrix rows;
  for (std::size_t left_out = 0; left_out <= points.size(); ++left_out) {
    std::vector<double> product{1.0};
    for (std::size_t p = 0; p < points.size(); ++p) {
      if (p == left_out) continue;
      std::vector<double> next(product.size() + 1, 0.0);
      for (std::size_t k = 0; k < product.size(); ++k) {
        next[k + 1] += product[k];
        next[k] -= points[p] * product[k];
      }
      product = next;
    }
    product.resize(6, 0.0);
    rows.push_back(product);
  }
  return rows;
}
/// Powers of the points, and infinity: `count` columns, each row divided by what `scale` says.
matrix powers(std::size_t count, bool scaled) {
  matrix rows;
  for (double point : points) {
    double distance = 1.0;
    for (double other : points) distance *= scaled && other != point ? point - other : 1.0;
    std::vector<double> row;
    for (std::size_t k = 0; k < count; ++k) row.push_back(std::pow(point, k) / distance);
    rows.push_back(row);
  }
  rows.emplace_back(count, 0.0);
  rows.back().back() = 1.0;
  return rows;
}

/// Holds a transform of squares of `from` x `from` values against its definition, for any number of channels:
/// run(input, channels, output) with the values of a channel at input[i * channels], output[i * step].
template <class Run>
void check_transform(const matrix& definition, Run&& run) {
  const std::size_t from = definition[0].size(), to = definition.size();
  for (const index_t channels : {1, 5, 16, 37}) {
    const index_t step = channels + 3;
    std::vector<float> in(from * from * static_cast<std::size_t>(channels)),
        out(to * to * static_cast<std::size_t>(step), 7.0F);
    fill_normal<float>(in, 1.0, {9, static_cast<std::uint64_t>(channels)});
    run(in.data(), channels, out.data(), step);
    for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c) {
      matrix x(from, std::vector<double>(from));
      for (std::size_t i = 0; i < from * from; ++i) {
        x[i / from][i % from] = static_cast<double>(in[i * static_cast<std::size_t>(channels) + c]);
      }
      const matrix y = both_sides(definition, x, definition);
      for (std::size_t i = 0; i < to * to; ++i) {
        CHECK(out[i * static_cast<std::size_t>(step) + c] ==
              doctest::Approx(y[i / to][i % to]).epsilon(1e-4));
      }
    }
    CHECK(out[static_cast<std::size_t>(channels)] == 7.0F);  // beside the result
  }
}

TEST_CASE("Winograd: the transforms of every instruction set are what they are defined to be") {
  using namespace ops::detail;
  for (const isa target : all_isas) {
    if (!isa_available(target)) continue;
    CAPTURE(to_string(target));
    const auto square = [](auto* data, index_t edge, index_t step) {
      std::vector<decltype(data)> pixels;
      for (index_t i = 0; i < edge * edge; ++i) pixels.push_back(data + i * step);
      return pixels;
    };
    check_transform(pixels_matrix(), [&](const float* in, index_t channels, float* out, index_t step) {
      PUFFERFISH_KERNEL(target, winograd_kernels, winograd_input<float>)
      (square(in, 6, channels).data(), channels, out, step);
    });
    check_transform(transposed(powers(4, false)),
                    [&](const float* in, index_t channels, float* out, index_t step) {
                      PUFFERFISH_KERNEL(target, winograd_kernels, winograd_output<float>)
                      (in, channels, channels, square(out, 4, step).data(), false);
                    });
    check_transform(powers(4, false), [&](const float* in, index_t channels, float* out, index_t step) {
      PUFFERFISH_KERNEL(target, winograd_kernels, winograd_gradient<float>)
      (square(in, 4, channels).data(), channels, out, step);
    });
    check_transform(powers(3, true), [&](const float* in, index_t channels, float* out, index_t step) {
      PUFFERFISH_KERNEL(target, winograd_kernels, winograd_weight<float>)(in, channels, channels, out, step);
    });
    check_transform(transposed(powers(3, true)),
                    [&](const float* in, index_t channels, float* out, index_t step) {
                      PUFFERFISH_KERNEL(target, winograd_kernels, winograd_weight_gradient<float>)
                      (in, channels, channels, out, step, false);
                    });
  }
}

/// A 3x3 convolution with everything that its three directions read.
struct instance {
  conv_shape shape;
  extents<4> input, output;
  tensor<float, 4> x, dy, w;

  instance(const conv_shape& of, const extents<4>& in, std::uint64_t round)
      : shape(of),
        input(in),
        output(of.output(in, "test")),
        x(in),
        dy(output),
        w({3, 3, of.in_channels, of.out_channels}) {
    fill_normal<float>(x.flat(), 1.0, {1, round});
    fill_normal<float>(dy.flat(), 1.0, {2, round});
    fill_normal<float>(w.flat(), 1.0, {3, round});
  }
  tensor_view<const float, 4> oihw() const { return w.view().permute({3, 2, 0, 1}); }
  double tolerance(index_t terms) const { return 6e-6 * std::sqrt(static_cast<double>(terms + 9)); }
};

/// Fills the scratch memory that the next operation uses with NaN, so that a value read before it is written
/// shows in the result.
void spoil_scratch(cpu_context& ctx) {
  constexpr index_t count = index_t{1} << 20;
  scratch_frame frame(ctx.scratch());
  std::fill_n(frame.take<float>(count), count, std::numeric_limits<float>::quiet_NaN());
}

instance random_instance(picker& pick, std::uint64_t round) {
  // More than a block of the depth, and, now and then, more columns than are transformed at once.
  const index_t channels[] = {1, 3, 8, 16, 17, 33, 48, 65, 80, 130};
  const bool large = round % 8 == 0;
  conv_shape shape =
      conv_shape::square(channels[pick(0, large ? 9 : 7)], channels[pick(0, large ? 9 : 7)], 3);
  shape.padding = {pick(0, 2), pick(0, 2)};
  const index_t size = large ? 6 : round % 3 == 0 ? 18 : 9;
  const auto extent = [&](index_t padding) { return pick(std::max<index_t>(1, 3 - 2 * padding), size); };
  const index_t images = round % 9 == 0 ? 0 : pick(1, 4), height = extent(shape.padding.height),
                width = extent(shape.padding.width);
  return {shape, {images, height, width, shape.in_channels}, round};
}

TEST_CASE("Winograd: all directions against the reference, whether it pays or not") {
  cpu_context ctx({2, 0});
  picker pick(3);
  for (std::uint64_t round = 0; round < 48; ++round) {
    const instance a = random_instance(pick, round);
    CAPTURE(a.shape.describe());
    CAPTURE(to_string<4>(a.input));
    spoil_scratch(ctx);
    const index_t pixels = a.output[0] * a.output[1] * a.output[2];
    const bool add = round % 2 == 0;
    const auto nothing = [](index_t, index_t, index_t) {};

    tensor<float, 4> y(a.output), y2(a.output);
    fill_normal<float>(y.flat(), 1.0, {5, round});  // overwritten
    const ops::detail::winograd_tiles outputs(a.output[0], a.output[1], a.output[2]);
    if (!y.flat().empty()) {
      ops::detail::run_by_tiles<float>(ctx, a.shape.padding, a.x, a.w.data(), false, y, false,
                                       tasks_of(outputs), nothing);
    }
    ops::reference::conv_forward<float>(a.shape, a.x, a.oihw(), nullptr, y2);
    CHECK(largest_error(y, y2) < a.tolerance(a.shape.patch()));

    tensor<float, 4> dx(a.input), dx2(a.input), before(a.input);
    fill_normal<float>(dx.flat(), 1.0, {6, round});
    copy(dx.view(), before.view());
    const ops::detail::winograd_tiles inputs(a.input[0], a.input[1], a.input[2]);
    if (!dx.flat().empty()) {
      ops::detail::run_by_tiles<float>(ctx, ops::detail::turned(a.shape).padding, a.dy, a.w.data(), true, dx,
                                       add, tasks_of(inputs), nothing);
    }
    ops::reference::conv_backward_input<float>(a.shape, a.dy, a.oihw(), dx2);
    for (std::size_t i = 0; add && i < dx2.flat().size(); ++i) dx2.flat()[i] += before.flat()[i];
    CHECK(largest_error(dx, dx2) < a.tolerance(9 * a.shape.out_channels));

    tensor<float, 4> dw(a.w.shape()), dw2(a.w.shape());
    fill_normal<float>(dw.flat(), 1.0, {7, round});
    copy(dw.view(), dw2.view());
    ops::detail::winograd_backward_weight<float>(ctx, a.shape, a.x, a.dy, dw.data(), add);
    ops::reference::conv_backward_weight<float>(a.shape, a.x, a.dy, dw2.view().permute({3, 2, 0, 1}), add);
    CHECK(largest_error(dw, dw2) < a.tolerance(pixels));
  }
}

TEST_CASE("Winograd: the weight gradient of no images is 0, or unchanged where it is accumulated") {
  cpu_context ctx({2, 0});
  const instance a(conv_shape::square(20, 17, 3, 1, 1), {0, 6, 5, 20}, 1);
  for (const bool add : {false, true}) {
    tensor<float, 4> dw(a.w.shape()), expected(a.w.shape());
    fill_normal<float>(dw.flat(), 1.0, {7, 0});
    if (add) copy(dw.view(), expected.view());
    spoil_scratch(ctx);
    ops::detail::winograd_backward_weight<float>(ctx, a.shape, a.x, a.dy, dw.data(), add);
    CHECK(std::ranges::equal(dw.flat(), expected.flat()));
  }
}

TEST_CASE("Winograd: every row of the output is told once, whatever the images") {
  cpu_context ctx({2, 0});
  for (const extents<4>& input :
       {extents<4>{3, 64, 61, 16}, extents<4>{70, 4, 4, 16}, extents<4>{5, 33, 8, 16},
        extents<4>{13, 9, 10, 16}, extents<4>{2, 70, 100, 16}}) {
    const instance a(conv_shape::square(16, 16, 3, 1, 1), input, 1);
    tensor<float, 4> y(a.output);
    const auto tasks = tasks_of(ops::detail::winograd_tiles(input[0], input[1], input[2]));
    std::vector<int> told(static_cast<std::size_t>(input[0] * input[1] * input[2]), 0);
    ops::detail::run_by_tiles<float>(ctx, a.shape.padding, a.x, a.w.data(), false, y, false, tasks,
                                     [&](index_t, index_t first, index_t count) {
                                       for (index_t i = first; i < first + count; ++i)
                                         ++told.at(static_cast<std::size_t>(i));
                                     });
    CHECK(std::all_of(told.begin(), told.end(), [](int n) { return n == 1; }));
  }
}

TEST_CASE("Winograd: it runs where it pays, in float, unless the context says no") {
  const conv_shape shape = conv_shape::square(64, 16, 3, 1, 1);
  const extents<4> input{8, 16, 16, 64}, output{8, 16, 16, 16};
  const cpu_context ctx;
  context_options direct;
  direct.winograd = false;
  CHECK(ops::detail::winograd_pays<float>(ctx, shape, input, output));
  CHECK_FALSE(ops::detail::winograd_pays<double>(ctx, shape, input, output));
  CHECK_FALSE(ops::detail::winograd_pays<float>(cpu_context(direct), shape, input, output));
  CHECK_FALSE(
      ops::detail::winograd_pays<float>(ctx, conv_shape::square(64, 16, 3, 2, 1), input, {8, 8, 8, 16}));
  CHECK_FALSE(ops::detail::winograd_pays<float>(ctx, conv_shape::square(64, 16, 3, 1, 2, 2), input, output));
  CHECK_FALSE(ops::detail::winograd_pays<float>(ctx, conv_shape::square(64, 16, 5, 1, 2), input, output));
  CHECK_FALSE(ops::detail::winograd_pays<float>(ctx, conv_shape::square(3, 64, 3, 1, 1), {8, 16, 16, 3},
                                                {8, 16, 16, 64}));
  CHECK_FALSE(
      ops::detail::winograd_pays<float>(ctx, shape, {128, 2, 2, 64}, {128, 2, 2, 16}));      // mostly padding
  CHECK_FALSE(ops::detail::winograd_pays<float>(ctx, shape, {1, 8, 8, 64}, {1, 8, 8, 16}));  // few tiles
}

TEST_CASE(
    "Winograd: convolutions that use it, fused and not, agree with direct ones; the same bits for any "
    "threads") {
  const instance a(conv_shape::square(48, 16, 3, 1, 1), {9, 14, 15, 48}, 2);
  const index_t out = 40;
  tensor<float, 2> up({16, out});
  fill_normal<float>(up.flat(), 1.0, {8, 0});
  struct results {
    tensor<float, 4> t, y, dx, dw;
  };
  const auto run = [&](int threads, bool winograd) {
    context_options options;
    options.threads = threads;
    options.winograd = winograd;
    cpu_context ctx(options);
    REQUIRE(ops::detail::winograd_pays<float>(ctx, a.shape, a.input, a.output) == winograd);
    results r{tensor<float, 4>(a.output), tensor<float, 4>({9, 14, 15, out}), tensor<float, 4>(a.input),
              tensor<float, 4>(a.w.shape())};
    ops::low_rank_conv_forward<float>(ctx, a.shape, a.x, a.w.data(), up, nullptr, r.t, r.y);
    ops::conv_backward_input<float>(ctx, a.shape, a.dy, a.w.data(), r.dx);
    ops::conv_backward_weight<float>(ctx, a.shape, a.x, a.dy, r.dw.data(), false);
    return r;
  };
  const results one = run(1, true), two = run(2, true), three = run(3, true), direct = run(2, false);
  for (const results* other : {&two, &three}) {
    CHECK(std::ranges::equal(one.t.flat(), other->t.flat()));
    CHECK(std::ranges::equal(one.y.flat(), other->y.flat()));
    CHECK(std::ranges::equal(one.dx.flat(), other->dx.flat()));
    CHECK(std::ranges::equal(one.dw.flat(), other->dw.flat()));
  }
  CHECK_FALSE(std::ranges::equal(one.t.flat(), direct.t.flat()));
  CHECK(largest_error(one.t, direct.t) < a.tolerance(9 * 48));
  CHECK(largest_error(one.y, direct.y) < a.tolerance(9 * 48 * 16));
  CHECK(largest_error(one.dx, direct.dx) < a.tolerance(9 * 16));
  CHECK(largest_error(one.dw, direct.dw) < a.tolerance(9 * 14 * 15));
}

/// Root mean square of the error of y against sums in double, relative to that of the result.
double relative_error(const instance& a, bool winograd) {
  context_options options;
  options.winograd = winograd;
  cpu_context ctx(options);
  tensor<float, 4> y(a.output);
  ops::conv_forward<float>(ctx, a.shape, a.x, a.w.data(), nullptr, y);
  tensor<double, 4> x(a.input), w(a.w.shape()), exact(a.output);
  std::ranges::copy(a.x.flat(), x.flat().begin());
  std::ranges::copy(a.w.flat(), w.flat().begin());
  ops::conv_forward<double>(ctx, a.shape, x, w.data(), nullptr, exact);
  double errors = 0.0, squares = 0.0;
  for (std::size_t i = 0; i < exact.flat().size(); ++i) {
    const double e = static_cast<double>(y.flat()[i]) - exact.flat()[i];
    errors += e * e;
    squares += exact.flat()[i] * exact.flat()[i];
  }
  return std::sqrt(errors / squares);
}

TEST_CASE("Winograd: its rounding error is about twice that of direct sums") {
  for (const index_t channels : {16, 64, 256}) {
    const instance a(conv_shape::square(channels, 32, 3, 1, 1), {2, 12, 12, channels}, 4);
    CHECK(relative_error(a, true) < 4.0 * relative_error(a, false));
    CHECK(relative_error(a, true) < 3e-6);
  }
}

}  // namespace
