// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Moments of the channels of a convolution's result, which its kernel collects for the batch norm after it.
#include "conv_cases.hpp"

#include <cstring>
#include <limits>

#include <pufferfish/gpu.hpp>
#include <pufferfish/gpu/kernels/conv/halo_conv.hpp>
#include <pufferfish/gpu/runtime/graph.hpp>
#include <pufferfish/nn.hpp>

using namespace gpu_test;
namespace kernels = pf::gpu::kernels;

namespace {

using kernels::conv_tile;

/// Memory for the moments of rows x columns numbers.
struct moments_case {
  index_t rows, columns;
  twin<double> result;
  twin<float> parts;

  moments_case(index_t r, index_t c)
      : rows(r), columns(c), result(2 * c, -7.0), parts(kernels::moment_scratch(r, c)) {
    REQUIRE(kernels::moments_fit(r, c));
  }
  kernels::moment_workspace workspace() {
    return {result.device_data(), parts.device_data(), gpu_context().counters()};
  }

  /// Compares with sums in double over the numbers as they are stored. The errors are relative to the
  /// standard deviation and to the variance, whatever the mean is.
  template <class T>
  void check(const std::vector<T>& y) const {
    const std::vector<double> found = result.fetched();
    const auto count = static_cast<double>(rows);
    for (index_t c = 0; c < columns; ++c) {
      const auto value = [&](index_t row) {
        return static_cast<double>(static_cast<float>(y[static_cast<std::size_t>(row * columns + c)]));
      };
      double mean = 0.0, squares = 0.0;
      for (index_t row = 0; row < rows; ++row) mean += value(row) / count;
      for (index_t row = 0; row < rows; ++row) squares += (value(row) - mean) * (value(row) - mean);
      const double spread = std::sqrt(squares / count);
      CAPTURE(c);
      REQUIRE(std::abs(found[static_cast<std::size_t>(c)] - mean) <= 1e-6 * spread + 1e-12 * std::abs(mean));
      REQUIRE(std::abs(found[static_cast<std::size_t>(columns + c)] - squares) <=
              1e-5 * squares + 1e-12 * count * mean * mean);
    }
  }
};

/// Calls compute(workspace) twice, which overwrites y: the moments must be those of y, with equal bits.
template <class T, class Compute>
void check_moments(index_t rows, index_t columns, twin<T>& y, Compute compute) {
  moments_case m(rows, columns);
  compute(m.workspace());
  m.check(y.fetched());
  const std::vector<double> first = m.result.fetched();
  compute(m.workspace());
  CHECK(std::memcmp(first.data(), m.result.fetched().data(), first.size() * sizeof(double)) == 0);
}

/// A bias that is large where the channel is even.
template <class T>
twin<T> bias_of(index_t channels) {
  std::vector<T> values;
  for (index_t c = 0; c < channels; ++c) values.push_back(static_cast<T>(c % 2 == 0 ? 300.0F : 0.25F));
  return twin<T>(std::move(values));
}

template <class T>
void check_conv(const conv_case& c, const kernels::conv_plan& plan, index_t shift = 0) {
  CAPTURE(c.shape.describe());
  CAPTURE(static_cast<int>(plan.tile));
  stored<T> x(c.x_size(), 1), w(c.w_size() + shift, 2);
  auto bias = bias_of<T>(c.shape.out_channels);
  twin<T> y(c.y_size());
  check_moments(c.y_size() / c.shape.out_channels, c.shape.out_channels, y, [&](const auto& to) {
    kernels::conv_forward<T>(gpu_context().stream(), c.geometry(), plan, x.narrow.device_data(),
                             w.narrow.device_data() + shift, bias.device_data(), y.device_data(), nullptr,
                             to);
  });
}

template <class T>
void check_low_rank(const conv_case& c, index_t out, const kernels::low_rank_plan& plan) {
  CAPTURE(c.shape.describe());
  CAPTURE(out);
  const index_t pixels = c.y_size() / c.shape.out_channels;
  stored<T> x(c.x_size(), 1), down(c.w_size(), 2), up(c.shape.out_channels * out, 3);
  auto bias = bias_of<T>(out);
  twin<T> y(pixels * out), t(c.y_size());
  check_moments(pixels, out, y, [&](const auto& to) {
    kernels::low_rank_conv_forward<T>(gpu_context().stream(), c.geometry(), plan, x.narrow.device_data(),
                                      down.narrow.device_data(), up.narrow.device_data(),
                                      static_cast<int>(out), bias.device_data(), t.device_data(),
                                      y.device_data(), to);
  });
}

/// `out` 0: a dense convolution.
template <class T>
void check_halo(index_t in, index_t columns, index_t out, const pf::extents<3>& images, index_t stride = 1,
                index_t kernel = 3) {
  const conv_case c = conv_case::of(pf::conv_shape::square(in, columns, kernel, stride, kernel / 2), images);
  CAPTURE(c.shape.describe());
  CAPTURE(images[1]);
  CAPTURE(images[2]);
  const kernels::halo_plan plan = out == 0 ? kernels::plan_halo_forward(c.geometry())
                                           : kernels::plan_halo_low_rank(c.geometry(), static_cast<int>(out));
  REQUIRE(plan.fits);
  REQUIRE(kernels::halo_moments_fit(plan, out == 0 ? plan.columns : out));
  const index_t channels = out == 0 ? columns : out, pixels = c.y_size() / columns;
  stored<T> x(c.x_size(), 1), w(c.w_size(), 2), up(columns * std::max<index_t>(out, 1), 3);
  auto bias = bias_of<T>(channels);
  twin<T> y(pixels * channels), t(c.y_size());
  check_moments(pixels, channels, y, [&](const auto& to) {
    if (out == 0) {
      kernels::halo_forward<T>(gpu_context().stream(), c.geometry(), plan, x.narrow.device_data(),
                               w.narrow.device_data(), bias.device_data(), y.device_data(), to);
    } else {
      kernels::halo_low_rank_forward<T>(gpu_context().stream(), c.geometry(), plan, x.narrow.device_data(),
                                        w.narrow.device_data(), up.narrow.device_data(),
                                        static_cast<int>(out), bias.device_data(), t.device_data(),
                                        y.device_data(), to);
    }
  });
}

}  // namespace

TEST_CASE_TEMPLATE("gpu moments of a convolution: every block", T, float, pf::gpu::bf16, pf::gpu::fp16) {
  for (const conv_tile tile :
       {conv_tile::t128x128, conv_tile::t128x64, conv_tile::t64x64, conv_tile::t128x32, conv_tile::t256x16}) {
    for (const bool tensor : {false, true}) {
      if (sizeof(T) == 2 && !tensor) continue;
      CAPTURE(tensor);
      const kernels::conv_plan plan{tile, tensor, 1, 0};
      check_conv<T>(conv_case::of(pf::conv_shape::square(8, 72, 1, 1, 0), {2, 17, 9}), plan);
      check_conv<T>(conv_case::of(pf::conv_shape::square(3, 65, 3, 2, 1), {1, 9, 10}), plan, 1);
      check_conv<T>(conv_case::of(pf::conv_shape::square(2, 1, 2, 1, 0), {1, 2, 3}), plan);
      // More than one group of parts, the last one with one part of a few rows.
      check_conv<T>(conv_case::of(pf::conv_shape::square(8, 8, 1, 1, 0), {17, 11, 23}), plan);
    }
  }
}

TEST_CASE_TEMPLATE("gpu moments of a convolution: low rank", T, float, pf::gpu::bf16, pf::gpu::fp16) {
  for (const index_t rank : {1, 16, 20, 64}) {
    for (const int rows : {64, 128}) {
      CAPTURE(rows);
      kernels::low_rank_plan plan;
      plan.rows = rows;
      plan.tensor = sizeof(T) == 2 || rank % 16 == 0;
      const bool odd = rank % 16 != 0;
      check_low_rank<T>(
          conv_case::of(pf::conv_shape::square(odd ? 3 : 8, rank, 3, 1, 1), {2, 9, odd ? 10 : 8}),
          odd ? 65 : 136, plan);
      check_low_rank<T>(conv_case::of(pf::conv_shape::square(8, rank, 1, 1, 0), {19, 9, 15}), 8, plan);
    }
  }
}

TEST_CASE("gpu moments of a convolution: random shapes, as plans have them") {
  picker pick(9);
  constexpr index_t channels[] = {1, 3, 8, 16, 33, 64};
  int done = 0;
  for (int round = 0; round < 20; ++round) {
    const pf::conv_shape shape{channels[pick(0, 5)],     pick(1, 64),
                               {pick(1, 3), pick(1, 3)}, {pick(1, 3), pick(1, 3)},
                               {pick(0, 2), pick(0, 2)}, {pick(1, 2), pick(1, 2)}};
    const std::optional<conv_case> made = conv_case::find(shape, {pick(1, 9), pick(1, 15), pick(1, 15)});
    if (!made) continue;
    ++done;
    const bool tensor = round % 3 == 2;
    kernels::conv_plan plan = kernels::plan_conv_forward(made->geometry(), tensor, 4);
    plan.slices = 1;
    check_conv<float>(*made, plan, round % 2);
    check_low_rank<float>(*made, pick(1, 130), kernels::plan_low_rank_forward(made->geometry(), tensor));
  }
  CHECK(done > 10);
}

TEST_CASE_TEMPLATE("gpu moments of a convolution by warp groups", T, pf::gpu::bf16, pf::gpu::fp16) {
  if (!kernels::halo_available()) {
    MESSAGE("skipped: the device or the compiled kernels have no warp groups (-Dgpu_arch=sm_90a)");
    return;
  }
  for (const index_t columns : {16, 32, 64, 48, 128}) check_halo<T>(16, columns, 0, {2, 8, 16});
  check_halo<T>(32, 32, 0, {3, 7, 7});  // a line and a column of each block do not exist
  check_halo<T>(16, 64, 0, {1, 15, 16});
  check_halo<T>(64, 16, 0, {1, 7, 8});  // one block, in one of 16 warps half as many values
  // Blocks of four images, of which one or three exist; blocks of a convolution of stride 2.
  check_halo<T>(16, 48, 0, {5, 4, 4});
  check_halo<T>(16, 32, 0, {7, 4, 3});
  check_halo<T>(16, 32, 0, {1, 7, 8}, 2);
  check_halo<T>(16, 64, 0, {2, 15, 16}, 2);
  check_halo<T>(16, 64, 128, {2, 15, 16}, 2);
  check_halo<T>(64, 128, 0, {2, 15, 16}, 2, 1);
  for (const index_t rank : {16, 32, 64}) {
    check_halo<T>(32, rank, 64, {2, 8, 8});
    check_halo<T>(16, rank, 192, {1, 7, 15});
  }
  if (std::is_same_v<T, pf::gpu::fp16>) return;
  // More blocks of pixels than groups of warps on the device, and more than one group of parts.
  check_halo<T>(16, 16, 0, {150, 16, 16});
  check_halo<T>(16, 16, 64, {140, 16, 16});
}

TEST_CASE("gpu moments of a convolution: a far value, a constant channel and a NaN") {
  // One channel of x. One 1 x 1 weight copies it, the other one ignores it.
  const conv_case c = conv_case::of(pf::conv_shape::square(1, 2, 1, 1, 0), {40, 8, 8});
  auto x = c.input(1);
  x.host_data()[0] = 1e4F;
  x.host_data()[700] = -1e4F;
  twin<float> w(std::vector<float>{1.0F, 0.0F}), bias(std::vector<float>{0.0F, 1.1F}), y(c.y_size());
  const kernels::conv_plan plan{conv_tile::t64x64, false, 1, 0};
  const auto compute = [&](twin<float>& from, const kernels::moment_workspace& to) {
    kernels::conv_forward<float>(gpu_context().stream(), c.geometry(), plan, from.device_data(),
                                 w.device_data(), bias.device_data(), y.device_data(), nullptr, to);
  };
  moments_case m(c.y_size() / 2, 2);
  twin<float> far(x.host());
  compute(far, m.workspace());
  m.check(y.fetched());
  CHECK(m.result.fetched()[3] == 0.0);
  x.host_data()[900] = std::numeric_limits<float>::quiet_NaN();
  twin<float> with_nan(x.host());
  compute(with_nan, m.workspace());
  const std::vector<double> found = m.result.fetched();
  CHECK(std::isnan(found[0]));
  CHECK(std::isnan(found[2]));
}

TEST_CASE_TEMPLATE("gpu moments of a convolution: a sequential saves the pass of a batch norm", T, float,
                   pf::gpu::bf16, pf::gpu::fp16) {
  pf::gpu_context& ctx = gpu_context();
  const pf::mode_scope<pf::device::gpu> training(ctx, pf::run_mode::training);
  const auto pass = [&](auto conv_layer, const pf::extents<4>& input, bool saves) {
    CAPTURE(conv_layer.describe());
    conv_layer.initialize({3, 1});
    using layer = pf::any_layer<T, pf::device::gpu>;
    const pf::extents<4> output = conv_layer.output_shape(input);
    const auto make = [&](bool together) {
      pf::Sequential<T, pf::device::gpu> inner, outer;
      inner.add("conv", layer(conv_layer));
      (together ? inner : outer)
          .add("bn", layer(pf::BatchNorm<T>(output[3])))
          .add("relu", layer(pf::ReLU<T>()));
      if (together) return pf::network<T, pf::device::gpu>{layer(std::move(inner))};
      pf::Sequential<T, pf::device::gpu> both;
      both.add("0", layer(std::move(inner))).add("1", layer(std::move(outer)));
      return pf::network<T, pf::device::gpu>{layer(std::move(both))};
    };
    stored<T> x(pf::volume<4>(input), 1), dy(pf::volume<4>(output), 2);
    std::vector<std::vector<float>> outputs, gradients, buffers;
    std::vector<std::size_t> operations;
    for (const bool together : {false, true}) {
      auto net = make(together);
      twin<T> y(dy.narrow.size()), dx(x.narrow.size());
      const auto step = [&] {
        net.forward(ctx, x.narrow.device_view(input), y.device_view(output));
        net.backward(ctx, dy.narrow.device_view(output), dx.device_view(input));
      };
      ctx.begin_step(1);
      step();
      std::vector<float> wide;
      for (const T value : y.fetched()) wide.push_back(static_cast<float>(value));
      outputs.push_back(wide);
      wide.clear();
      for (const T value : dx.fetched()) wide.push_back(static_cast<float>(value));
      gradients.push_back(wide);
      net.read_on_host([&](const auto&) {
        std::vector<float> all;
        for (const auto& entry : net.store().buffer_entries()) {
          all.insert(all.end(), entry.thing->values().begin(), entry.thing->values().end());
        }
        buffers.push_back(all);
      });
      ctx.begin_step(2);
      pf::gpu::detail::stream_capture capture(ctx.stream());
      step();
      operations.push_back(capture.finish().operations());
    }
    const double rounding = sizeof(T) == 2 ? 2 * unit<T> : 1e-5;
    CHECK(difference(outputs[1], outputs[0], 1.0) < rounding);
    CHECK(difference(gradients[1], gradients[0]) < rounding);
    CHECK(difference(buffers[1], buffers[0]) < 1e-6);
    CHECK(operations[0] - operations[1] == (saves ? 1 : 0));
  };
  const auto square = [](index_t in, index_t out, index_t kernel, index_t stride) {
    return pf::conv_shape::square(in, out, kernel, stride, kernel / 2);
  };
  // Float: more than 4,096 rows; 16 bits: more than 8,192.
  const index_t images = sizeof(T) == 2 ? 9 : 5;
  pass(pf::Conv<T>(square(16, 32, 3, 1)), {images, 32, 32, 16}, true);
  pass(pf::Conv<T>(square(3, 7, 3, 1), true), {images, 32, 32, 3}, true);
  pass(pf::LowRankConv<T>(square(16, 64, 3, 1), 16), {images, 32, 32, 16}, true);
  pass(pf::LowRankConv<T>(square(8, 24, 3, 2), 5), {images, 64, 64, 8}, true);
  // By cuBLAS, by groups, and with few rows.
  pass(pf::Conv<T>(square(16, 32, 1, 1)), {images, 32, 32, 16}, false);
  pf::conv_shape grouped = square(16, 32, 3, 1);
  grouped.groups = 2;
  pass(pf::Conv<T>(grouped), {images, 32, 32, 16}, false);
  pass(pf::Conv<T>(square(16, 32, 3, 1)), {images - 1, 32, 32, 16}, false);
}

TEST_CASE("gpu moments of a convolution: a batch norm takes those of its input only") {
  pf::gpu_context& ctx = gpu_context();
  const pf::mode_scope<pf::device::gpu> training(ctx, pf::run_mode::training);
  const pf::extents<4> shape{5, 32, 32, 8};
  auto x = random_twin<float>(pf::volume<4>(shape), 1), y = random_twin<float>(x.size(), 2);
  pf::network<float, pf::device::gpu> net{pf::any_layer<float, pf::device::gpu>(pf::BatchNorm<float>(8))};
  for (const auto& [rows, channels] : {std::pair<index_t, index_t>(5119, 8), {5120, 7}}) {
    pf::scratch_frame frame(ctx.scratch());
    pf::ops::moment_parts<float> moments(frame);
    pf::forward_fusion<float> fusion;
    fusion.moments = &moments;
    moments.start_merged(rows, channels);
    ctx.begin_step(1);
    CHECK_THROWS_AS(
        pf::BatchNorm<float>(8).forward_fused(ctx, x.device_view(shape), y.device_view(shape), fusion),
        pf::shape_error);
    ctx.tape().clear();
  }
}
