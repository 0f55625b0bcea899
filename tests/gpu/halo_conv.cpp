// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/gpu/kernels/conv/halo_conv.hpp>

#include "conv_cases.hpp"

using namespace gpu_test;
namespace kernels = pf::gpu::kernels;

namespace {

constexpr double tolerance = 8e-3;  // rounding of results of 16 bits

bool no_warp_groups() {
  if (kernels::halo_available()) return false;
  MESSAGE("skipped: the device or the compiled kernels have no warp groups (-Dgpu_arch=sm_90a)");
  return true;
}

/// Outputs begin as random numbers, all of which must be overwritten.
template <class T>
void check_forward(const conv_case& c) {
  const kernels::halo_plan plan = kernels::plan_halo_forward(c.geometry());
  REQUIRE(plan.fits);
  stored<T> x(c.x_size(), 1), w(c.w_size(), 2), bias(c.shape.out_channels, 3), y(c.y_size(), 4);
  for (const bool biased : {true, false}) {
    pf::ops::reference::conv_forward<float>(c.shape, x.wide.host_view(c.x()), c.oihw(w.wide.host_data()),
                                            biased ? bias.wide.host_data() : nullptr,
                                            y.wide.host_view(c.y()));
    kernels::halo_forward<T>(gpu_context().stream(), c.geometry(), plan, x.narrow.device_data(),
                             w.narrow.device_data(), biased ? bias.narrow.device_data() : nullptr,
                             y.narrow.device_data());
    CHECK(y.error() < tolerance);
  }
}

template <class T>
void check_backward_input(const conv_case& c, bool add) {
  const kernels::halo_plan plan = kernels::plan_halo_backward_input(c.geometry());
  REQUIRE(plan.fits);
  stored<T> w(c.w_size(), 2), dx(c.x_size(), 5), dy(c.y_size(), 7);
  const std::vector<float> before = dx.wide.host();
  pf::ops::reference::conv_backward_input<float>(c.shape, dy.wide.host_view(c.y()),
                                                 c.oihw(w.wide.host_data()), dx.wide.host_view(c.x()));
  for (std::size_t i = 0; i < before.size() && add; ++i) dx.wide.host()[i] += before[i];
  kernels::halo_backward_input<T>(gpu_context().stream(), c.geometry(), plan, dy.narrow.device_data(),
                                  w.narrow.device_data(), dx.narrow.device_data(), add);
  CHECK(dx.error() < tolerance);
}

/// With each number of columns that divides the output channels, whatever the plan prefers.
template <class T>
void check_backward_weight(const conv_case& c, int columns, int slices, bool accumulate) {
  kernels::halo_plan plan = kernels::plan_halo_backward_weight(c.geometry());
  REQUIRE(plan.fits);
  plan.columns = columns;
  plan.shared_bytes =
      kernels::plans::halo_weight_slots * kernels::plans::halo_weight_blocks *
      (kernels::plans::halo_tile_bytes(plan.chunk) + kernels::plans::block_tile_bytes(columns));
  plan.slices = slices;
  stored<T> x(c.x_size(), 1), dy(c.y_size(), 7);
  stored<float> dw(c.w_size(), 6);
  twin<float> partials(slices * c.w_size());
  pf::ops::reference::conv_backward_weight<float>(c.shape, x.wide.host_view(c.x()), dy.wide.host_view(c.y()),
                                                  c.oihw(dw.wide.host_data()), accumulate);
  kernels::halo_backward_weight<T>(gpu_context().stream(), c.geometry(), plan, x.narrow.device_data(),
                                   dy.narrow.device_data(), dw.narrow.device_data(), accumulate,
                                   partials.device_data());
  CHECK(dw.error() < tolerance);
}

template <class T>
void check_low_rank(const conv_case& c, index_t out, bool kept) {
  const index_t rank = c.shape.out_channels, pixels = c.y_size() / rank;
  const kernels::halo_plan plan = kernels::plan_halo_low_rank(c.geometry(), static_cast<int>(out));
  REQUIRE(plan.fits);
  const pf::extents<2> inner{pixels, rank}, outer{pixels, out}, factor{rank, out};
  stored<T> x(c.x_size(), 1), down(c.w_size(), 2), up(rank * out, 3), t(c.y_size(), 4), y(pixels * out, 5),
      bias(out, 6);
  pf::ops::reference::conv_forward<float>(c.shape, x.wide.host_view(c.x()), c.oihw(down.wide.host_data()),
                                          nullptr, t.wide.host_view(c.y()));
  pf::reference_gemm{}.multiply<float>(t.wide.host_view(inner), up.wide.host_view(factor),
                                       y.wide.host_view(outer));
  for (index_t i = 0; i < pixels * out; ++i) y.wide.host_data()[i] += bias.wide.host_data()[i % out];
  kernels::halo_low_rank_forward<T>(gpu_context().stream(), c.geometry(), plan, x.narrow.device_data(),
                                    down.narrow.device_data(), up.narrow.device_data(), static_cast<int>(out),
                                    bias.narrow.device_data(), kept ? t.narrow.device_data() : nullptr,
                                    y.narrow.device_data());
  if (kept) CHECK(t.error() < tolerance);
  CHECK(y.error() < tolerance);
}

conv_case case_of(index_t in, index_t out, index_t padding, const pf::extents<3>& images) {
  return conv_case::of(pf::conv_shape::square(in, out, 3, 1, padding), images);
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
  }
}

TEST_CASE("gpu convolution by warp groups: plans") {
  const auto geometry = [](index_t in, index_t out, index_t stride, index_t padding, index_t side) {
    return conv_case::of(pf::conv_shape::square(in, out, 3, stride, padding), {1, side, side}).geometry();
  };
  // What does not consist of blocks of pixels, or of whole steps of channels.
  CHECK_FALSE(kernels::plan_halo_forward(geometry(64, 64, 2, 1, 16)).fits);
  CHECK_FALSE(kernels::plan_halo_forward(geometry(64, 64, 1, 1, 4)).fits);
  CHECK_FALSE(kernels::plan_halo_forward(geometry(24, 64, 1, 1, 8)).fits);
  CHECK_FALSE(kernels::plan_halo_forward(geometry(64, 24, 1, 1, 8)).fits);
  CHECK_FALSE(kernels::plan_halo_backward_weight(geometry(32, 64, 1, 1, 8)).fits);
  CHECK_FALSE(kernels::plan_halo_low_rank(geometry(64, 16, 1, 1, 8), 96).fits);
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
