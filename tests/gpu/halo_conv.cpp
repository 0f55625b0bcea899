// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <array>

#include <pufferfish/gpu/kernels/conv/conv.hpp>
#include <pufferfish/gpu/kernels/conv/halo_conv.hpp>

#include "conv_cases.hpp"

using namespace gpu_test;
namespace kernels = pf::gpu::kernels;

namespace {

constexpr double tolerance = 8e-3;  // rounding of results of 16 bits
constexpr index_t guard = 64;       // elements before and after each result that must keep their values

/// The part of a twin between its guards, as references see it.
template <std::size_t N>
pf::tensor_view<float, N> inside(twin<float>& all, const pf::extents<N>& shape) {
  return {all.host_data() + guard, shape};
}

bool no_warp_groups() {
  if (kernels::halo_available()) return false;
  MESSAGE("skipped: the device or the compiled kernels have no warp groups (-Dgpu_arch=sm_90a)");
  return true;
}

/// Compares a result, without its guards, with that of another kernel.
template <class T>
void check_same(const twin<T>& result, const twin<T>& other) {
  std::vector<float> a, b;
  for (const T value : result.fetched()) a.push_back(static_cast<float>(value));
  for (const T value : other.fetched()) b.push_back(static_cast<float>(value));
  CHECK(difference({a.begin() + guard, a.end() - guard}, b) < tolerance);
}

/// Outputs begin as random numbers, all of which must be overwritten, and none of the guards. With
/// `compared`, the kernels that gather patches must compute the same.
template <class T>
void check_forward(const conv_case& c, bool compared = false) {
  const kernels::halo_plan plan = kernels::plan_halo_forward(c.geometry());
  REQUIRE(plan.fits);
  stored<T> x(c.x_size(), 1), w(c.w_size(), 2), bias(c.shape.out_channels, 3), y(c.y_size() + 2 * guard, 4);
  for (const bool biased : {true, false}) {
    pf::ops::reference::conv_forward<float>(c.shape, x.wide.host_view(c.x()), c.oihw(w.wide.host_data()),
                                            biased ? bias.wide.host_data() : nullptr, inside(y.wide, c.y()));
    kernels::halo_forward<T>(gpu_context().stream(), c.geometry(), plan, x.narrow.device_data(),
                             w.narrow.device_data(), biased ? bias.narrow.device_data() : nullptr,
                             y.narrow.device_data() + guard);
    CHECK(y.error() < tolerance);
  }
  if (!compared) return;
  const kernels::conv_plan older = kernels::plan_conv_forward(c.geometry(), true, 8);
  twin<float> partials(older.scratch);
  twin<T> z(c.y_size());
  kernels::conv_forward<T>(gpu_context().stream(), c.geometry(), older, x.narrow.device_data(),
                           w.narrow.device_data(), nullptr, z.device_data(), partials.device_data());
  check_same(y.narrow, z);
}

template <class T>
void check_backward_input(const conv_case& c, bool add, bool compared = false) {
  const kernels::halo_plan plan = kernels::plan_halo_backward_input(c.geometry());
  REQUIRE(plan.fits);
  stored<T> w(c.w_size(), 2), dx(c.x_size() + 2 * guard, 5), dy(c.y_size(), 7);
  std::vector<float>& wide = dx.wide.host();
  const std::vector<float> before = wide;
  twin<T> z(std::vector<T>(dx.narrow.host().begin() + guard, dx.narrow.host().end() - guard));
  pf::ops::reference::conv_backward_input<float>(c.shape, dy.wide.host_view(c.y()),
                                                 c.oihw(w.wide.host_data()), inside(dx.wide, c.x()));
  for (std::size_t i = guard; i + guard < wide.size() && add; ++i) wide[i] += before[i];
  kernels::halo_backward_input<T>(gpu_context().stream(), c.geometry(), plan, dy.narrow.device_data(),
                                  w.narrow.device_data(), dx.narrow.device_data() + guard, add);
  CHECK(dx.error() < tolerance);
  if (!compared) return;
  const kernels::conv_plan older = kernels::plan_conv_backward_input(c.geometry(), true, 8);
  twin<float> partials(older.scratch);
  kernels::conv_backward_input<T>(gpu_context().stream(), c.geometry(), older, dy.narrow.device_data(),
                                  w.narrow.device_data(), z.device_data(), add, partials.device_data());
  check_same(dx.narrow, z);
}

/// With each number of columns that divides the output channels, whatever the plan prefers.
template <class T>
void check_backward_weight(const conv_case& c, int columns, int slices, bool accumulate,
                           bool compared = false) {
  kernels::halo_plan plan = kernels::plan_halo_backward_weight(c.geometry());
  REQUIRE(plan.fits);
  plan.columns = columns;
  plan.shared_bytes = kernels::plans::halo_weight_bytes(plan.shape, columns);
  plan.slices = slices;
  stored<T> x(c.x_size(), 1), dy(c.y_size(), 7);
  stored<float> dw(c.w_size() + 2 * guard, 6);
  twin<float> z(std::vector<float>(dw.narrow.host().begin() + guard, dw.narrow.host().end() - guard));
  twin<float> partials(slices * c.w_size());
  pf::ops::reference::conv_backward_weight<float>(c.shape, x.wide.host_view(c.x()), dy.wide.host_view(c.y()),
                                                  c.oihw(dw.wide.host_data() + guard), accumulate);
  kernels::halo_backward_weight<T>(gpu_context().stream(), c.geometry(), plan, x.narrow.device_data(),
                                   dy.narrow.device_data(), dw.narrow.device_data() + guard, accumulate,
                                   partials.device_data());
  CHECK(dw.error() < 1e-4);  // sums of exact products, in float
  if (!compared) return;
  const kernels::conv_plan older = kernels::plan_conv_backward_weight(c.geometry(), true, 8);
  twin<float> scratch(older.scratch);
  kernels::conv_backward_weight<T>(gpu_context().stream(), c.geometry(), older, x.narrow.device_data(),
                                   dy.narrow.device_data(), z.device_data(), accumulate,
                                   scratch.device_data());
  check_same(dw.narrow, z);
}

template <class T>
void check_low_rank(const conv_case& c, index_t out, bool kept) {
  const index_t rank = c.shape.out_channels, pixels = c.y_size() / rank;
  const kernels::halo_plan plan = kernels::plan_halo_low_rank(c.geometry(), static_cast<int>(out));
  REQUIRE(plan.fits);
  const pf::extents<2> inner{pixels, rank}, outer{pixels, out}, factor{rank, out};
  stored<T> x(c.x_size(), 1), down(c.w_size(), 2), up(rank * out, 3), t(c.y_size() + 2 * guard, 4),
      y(pixels * out + 2 * guard, 5), bias(out, 6);
  pf::ops::reference::conv_forward<float>(c.shape, x.wide.host_view(c.x()), c.oihw(down.wide.host_data()),
                                          nullptr, inside(t.wide, c.y()));
  pf::reference_gemm{}.multiply<float>(inside(t.wide, inner), up.wide.host_view(factor),
                                       inside(y.wide, outer));
  for (index_t i = 0; i < pixels * out; ++i) {
    y.wide.host_data()[guard + i] += bias.wide.host_data()[i % out];
  }
  kernels::halo_low_rank_forward<T>(
      gpu_context().stream(), c.geometry(), plan, x.narrow.device_data(), down.narrow.device_data(),
      up.narrow.device_data(), static_cast<int>(out), bias.narrow.device_data(),
      kept ? t.narrow.device_data() + guard : nullptr, y.narrow.device_data() + guard);
  if (kept) CHECK(t.error() < tolerance);
  CHECK(y.error() < tolerance);
}

conv_case case_of(index_t in, index_t out, index_t padding, const pf::extents<3>& images, index_t stride = 1,
                  index_t kernel = 3) {
  return conv_case::of(pf::conv_shape::square(in, out, kernel, stride, padding), images);
}

}  // namespace

TEST_CASE_TEMPLATE("gpu convolution by warp groups: all widths, chunks and borders", T, pf::gpu::bf16,
                   pf::gpu::fp16) {
  if (no_warp_groups()) return;
  constexpr bool thorough = std::is_same_v<T, pf::gpu::bf16>;  // the other type differs in one instruction
  for (const index_t in : {16, 32, 48, 128}) {
    for (const index_t out : {16, 32, 64}) {
      if (!thorough && in + out != 80) continue;
      CAPTURE(in);
      CAPTURE(out);
      check_forward<T>(case_of(in, out, 1, {2, 8, 8}));
      check_backward_input<T>(case_of(out, in, 1, {2, 8, 8}), in == 32);
    }
  }
  for (const index_t padding : {0, 1, 2}) {
    CAPTURE(padding);
    check_forward<T>(case_of(64, 64, padding, {1, 18 - 2 * padding, 10 - 2 * padding}));
    check_backward_input<T>(case_of(32, 16, padding, {1, 15, 16}), true);
  }
  check_forward<T>(case_of(16, 96, 1, {3, 7, 7}));
  // Stride 2 in blocks of 8 x 8 pixels and in whole images, and these with stride 1. The input has an even or
  // odd number of lines and columns; the last four images are not all there.
  for (const index_t out : {16, 32, 64}) {
    if (thorough == (out == 32)) continue;
    CAPTURE(out);
    for (const pf::extents<3>& images : {pf::extents<3>{1, 16, 15}, {5, 8, 7}, {1, 7, 8}}) {
      CAPTURE(images[0]);
      check_forward<T>(case_of(32, out, 1, images, 2));
      check_backward_input<T>(case_of(out, 32, 1, images, 2), out != 16);
    }
    for (const pf::extents<3>& images : {pf::extents<3>{9, 4, 4}, {2, 3, 4}}) {
      CAPTURE(images[0]);
      check_forward<T>(case_of(48, out, 1, images));
      check_backward_input<T>(case_of(out, 48, 1, images), out != 16);
    }
  }
  for (const index_t padding : {0, 2})
    check_forward<T>(case_of(16, 16, padding, {1, 17 - 2 * padding, 16 - 2 * padding}, 2));
  // One tap and stride 2: three quarters of the gradient of the input are zeros.
  for (const pf::extents<3>& images : {pf::extents<3>{1, 16, 15}, {5, 8, 7}, {2, 7, 8}}) {
    check_forward<T>(case_of(128, 64, 0, images, 2, 1));
    for (const bool add : {false, true}) {
      check_backward_input<T>(case_of(64, thorough ? 128 : 64, 0, images, 2, 1), add);
    }
  }
  if (!thorough) return;
  // More blocks of pixels than groups of warps on the device.
  check_forward<T>(case_of(16, 16, 1, {150, 16, 16}));
}

TEST_CASE_TEMPLATE("gpu gradients of weights by warp groups", T, pf::gpu::bf16, pf::gpu::fp16) {
  if (no_warp_groups()) return;
  for (const index_t out : {16, 32, 64, 48}) {
    for (const int columns : {16, 32, 64}) {
      if (out % columns != 0) continue;
      CAPTURE(out);
      CAPTURE(columns);
      check_backward_weight<T>(case_of(64, out, 1, {2, 8, 16}), columns, 1, out == 16);
      check_backward_weight<T>(case_of(64, out, 1, {2, 8, 8}), columns, 2, out == 32);
    }
  }
  for (const int columns : {16, 32, 64}) {
    if (std::is_same_v<T, pf::gpu::fp16> && columns != 32) continue;
    CAPTURE(columns);
    check_backward_weight<T>(case_of(64, 64, 1, {9, 4, 4}), columns, 2, true);
    check_backward_weight<T>(case_of(64, 64, 1, {2, 16, 15}, 2), columns, 1, true);
    check_backward_weight<T>(case_of(64, 64, 1, {5, 8, 7}, 2), columns, 2, false);
    check_backward_weight<T>(case_of(64, 64, 0, {3, 16, 15}, 2, 1), columns, 2, true);
    check_backward_weight<T>(case_of(64, 64, 0, {5, 8, 7}, 2, 1), columns, 1, false);
  }
  if (std::is_same_v<T, pf::gpu::fp16>) return;
  for (const index_t padding : {0, 1, 2}) {
    check_backward_weight<T>(case_of(128, 32, padding, {3, 17 - 2 * padding, 18 - 2 * padding}),
                             padding == 1 ? 32 : 16, 5, false);
  }
}

TEST_CASE_TEMPLATE("gpu low-rank convolution by warp groups", T, pf::gpu::bf16, pf::gpu::fp16) {
  if (no_warp_groups()) return;
  for (const index_t rank : {16, 32, 64}) {
    CAPTURE(rank);
    check_low_rank<T>(case_of(32, rank, 1, {2, 8, 8}), 64, true);
    check_low_rank<T>(case_of(48, rank, 1, {1, 7, 15}), 128, rank == 32);
    check_low_rank<T>(case_of(32, rank, 1, {2, 15, 16}, 2), 64, rank != 32);
  }
}

TEST_CASE_TEMPLATE("gpu convolution by warp groups: random shapes", T, pf::gpu::bf16, pf::gpu::fp16) {
  if (no_warp_groups()) return;
  const int wanted = std::is_same_v<T, pf::gpu::bf16> ? 2 : 1;
  picker pick(static_cast<std::uint64_t>(20 + wanted));
  std::array<int, 3> found[3][2] = {};  // by stride or one tap, by whether a block is a whole image, by pass
  for (int round = 0; round < 5000; ++round) {
    const index_t stride = pick(1, 2), side = pick(0, 2) == 0 ? 24 : 4 * stride, images = pick(1, 6);
    const index_t kernel = stride == 2 && pick(0, 1) == 0 ? 1 : 3, unit = kernel == 1 ? 64 : 16;
    const index_t in = pick(1, kernel == 1 ? 2 : 4) * unit, out = pick(1, kernel == 1 ? 2 : 5) * unit;
    const index_t padding = kernel == 1 ? 0 : pick(0, 5) == 0 ? 2 : 1;
    const auto made = conv_case::find(pf::conv_shape::square(in, out, kernel, stride, padding),
                                      {images, pick(1, side), pick(1, side)});
    if (!made) continue;
    CAPTURE(made->shape.describe());
    CAPTURE(images);
    CAPTURE(made->height);
    CAPTURE(made->width);
    const auto count = [&](const kernels::halo_plan& plan, std::size_t pass) {
      return plan.fits && ++found[kernel == 1 ? 2 : stride - 1][plan.shape.side == 4 ? 1 : 0][pass] <= wanted;
    };
    if (count(kernels::plan_halo_forward(made->geometry()), 0)) check_forward<T>(*made, true);
    if (count(kernels::plan_halo_backward_input(made->geometry()), 1)) {
      check_backward_input<T>(*made, round % 2 == 0, true);
    }
    const kernels::halo_plan weight = kernels::plan_halo_backward_weight(made->geometry());
    if (count(weight, 2))
      check_backward_weight<T>(*made, weight.columns, weight.slices, round % 2 == 0, true);
  }
  for (const auto& kinds : found) {
    for (const auto& sides : kinds) {
      for (const int times : sides) CHECK(times >= wanted);
    }
  }
}

TEST_CASE("gpu convolution by warp groups: plans") {
  const auto geometry = [](index_t in, index_t out, index_t stride, index_t padding, index_t side,
                           index_t kernel = 3) {
    return case_of(in, out, padding, {1, side, side}, stride, kernel).geometry();
  };
  // What does not consist of blocks of pixels, or of whole steps of channels.
  CHECK_FALSE(kernels::plan_halo_forward(geometry(64, 64, 3, 1, 24)).fits);
  CHECK_FALSE(kernels::plan_halo_forward(geometry(64, 64, 1, 1, 2)).fits);
  CHECK_FALSE(kernels::plan_halo_forward(geometry(64, 64, 1, 1, 5)).fits);
  CHECK_FALSE(kernels::plan_halo_forward(geometry(64, 64, 1, 2, 2)).fits);  // results of 4 x 4 pixels
  CHECK_FALSE(kernels::plan_halo_backward_input(geometry(64, 64, 2, 0, 17)).fits);
  // One tap: with stride 2, in steps of 64 channels, not for pairs.
  CHECK(kernels::plan_halo_forward(geometry(64, 64, 2, 0, 16, 1)).fits);
  CHECK_FALSE(kernels::plan_halo_forward(geometry(64, 64, 1, 0, 8, 1)).fits);
  CHECK_FALSE(kernels::plan_halo_forward(geometry(96, 64, 2, 0, 16, 1)).fits);
  CHECK_FALSE(kernels::plan_halo_backward_input(geometry(96, 64, 2, 0, 16, 1)).fits);
  CHECK_FALSE(kernels::plan_halo_low_rank(geometry(64, 64, 2, 0, 16, 1), 64).fits);
  // All 3 x 3 convolutions of ResNet-18 after the first one, dense or with a quarter of the rank.
  for (const index_t channels : {64, 128, 256, 512}) {
    CAPTURE(channels);
    const index_t side = 32 * 64 / channels;
    for (const index_t stride : {1, 2}) {
      for (const index_t divided : {1, 4}) {
        if (stride == 2 && channels == 512) continue;
        const auto g = geometry(channels, stride * channels / divided, stride, 1, side);
        for (const auto& plan : {kernels::plan_halo_forward(g), kernels::plan_halo_backward_input(g),
                                 kernels::plan_halo_backward_weight(g)}) {
          CHECK(plan.fits);
          CHECK(plan.shared_bytes <= kernels::plans::most_shared);
        }
        const kernels::halo_plan forward = kernels::plan_halo_forward(g);
        if (forward.shape.side == 4 || stride == 2)
          CHECK(kernels::halo_moments_fit(forward, forward.columns));
      }
    }
  }
  CHECK_FALSE(kernels::plan_halo_forward(geometry(24, 64, 1, 1, 8)).fits);
  CHECK_FALSE(kernels::plan_halo_forward(geometry(64, 24, 1, 1, 8)).fits);
  CHECK_FALSE(kernels::plan_halo_backward_weight(geometry(32, 64, 1, 1, 8)).fits);
  CHECK_FALSE(kernels::plan_halo_low_rank(geometry(64, 16, 1, 1, 8), 96).fits);
  for (const index_t channels : {64, 128, 256}) {  // its shortcuts
    const auto g = geometry(channels, 2 * channels, 2, 0, 32 * 64 / channels, 1);
    const kernels::halo_plan forward = kernels::plan_halo_forward(g);
    for (const auto& plan :
         {forward, kernels::plan_halo_backward_input(g), kernels::plan_halo_backward_weight(g)}) {
      CHECK(plan.fits);
      CHECK(plan.shared_bytes <= kernels::plans::most_shared);
    }
    CHECK(kernels::halo_moments_fit(forward, forward.columns));
  }
  // A wide weight is cut into parts of its columns, and a wider one does not fit.
  CHECK(kernels::plan_halo_forward(geometry(64, 64, 1, 1, 8)).columns == 64);
  CHECK(kernels::plan_halo_forward(geometry(128, 128, 1, 1, 8)).columns == 64);
  CHECK(kernels::plan_halo_forward(geometry(256, 64, 1, 1, 8)).columns == 32);
  CHECK_FALSE(kernels::plan_halo_forward(geometry(1024, 64, 1, 1, 8)).fits);
  // Partial results of many slices take no more than 64 MB.
  kernels::conv_geometry large = geometry(512, 512, 1, 1, 24);
  large.images = 4096;
  CHECK(kernels::plan_halo_backward_weight(large).scratch <= kernels::plans::most_partials);
  // Offsets within a block of these lines need more than 31 bits.
  large.in_width = large.out_width = 1 << 22;
  CHECK_FALSE(kernels::plan_halo_forward(large).fits);
  for (const index_t in : {16, 32, 64, 128, 256, 512}) {
    const kernels::halo_plan plan = kernels::plan_halo_forward(geometry(in, 64, 1, 1, 8));
    if (plan.fits) CHECK(plan.shared_bytes <= kernels::plans::most_shared);
  }
}
