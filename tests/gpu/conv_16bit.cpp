// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "conv_cases.hpp"

using namespace gpu_test;
namespace kernels = pf::gpu::kernels;

namespace {

using kernels::conv_tile;

/// Rounding of a result; and of t, which is stored on the way.
template <class T>
constexpr double tolerance = 8e-3;

template <class T>
void check_conv(const conv_case& c, conv_tile tile, int slices) {
  const kernels::conv_plan plan{tile, true, slices,
                                slices > 1 ? slices * std::max({c.x_size(), c.y_size(), c.w_size()}) : 0};
  stored<T> x(c.x_size(), 1), w(c.w_size(), 2), bias(c.shape.out_channels, 3), y(c.y_size(), 4),
      dx(c.x_size(), 5), dy(c.y_size(), 7);
  stored<float> dw(c.w_size(), 6);
  twin<float> partials(plan.scratch);
  cudaStream_t stream = gpu_context().stream();

  pf::ops::reference::conv_forward<float>(c.shape, x.wide.host_view(c.x()), c.oihw(w.wide.host_data()),
                                          bias.wide.host_data(), y.wide.host_view(c.y()));
  kernels::conv_forward<T>(stream, c.geometry(), plan, x.narrow.device_data(), w.narrow.device_data(),
                           bias.narrow.device_data(), y.narrow.device_data(), partials.device_data());
  CHECK(y.error() < tolerance<T>);

  const std::vector<float> before = dx.wide.host();
  pf::ops::reference::conv_backward_input<float>(c.shape, dy.wide.host_view(c.y()),
                                                 c.oihw(w.wide.host_data()), dx.wide.host_view(c.x()));
  for (std::size_t i = 0; i < before.size(); ++i) dx.wide.host()[i] += before[i];
  kernels::conv_backward_input<T>(stream, c.geometry(), plan, dy.narrow.device_data(), w.narrow.device_data(),
                                  dx.narrow.device_data(), true, partials.device_data());
  CHECK(dx.error() < tolerance<T>);

  pf::ops::reference::conv_backward_weight<float>(c.shape, x.wide.host_view(c.x()), dy.wide.host_view(c.y()),
                                                  c.oihw(dw.wide.host_data()), true);
  kernels::conv_backward_weight<T>(stream, c.geometry(), plan, x.narrow.device_data(),
                                   dy.narrow.device_data(), dw.narrow.device_data(), true,
                                   partials.device_data());
  CHECK(dw.error() < tolerance<T>);
  if (!kernels::is_better_turned(c.geometry(), pf::gpu::detail::vector_of<T>)) return;
  stored<float> again(c.w_size(), 6);
  pf::ops::conv_backward_weight<T>(gpu_context(), c.shape, x.narrow.device_view(c.x()),
                                   dy.narrow.device_view(c.y()), again.narrow.device_data(), true);
  again.wide.host() = dw.wide.host();
  CHECK(again.error() < tolerance<T>);
}

template <class T>
void check_low_rank(const conv_case& c, index_t out, int rows) {
  const index_t rank = c.shape.out_channels, pixels = c.y_size() / rank;
  const pf::extents<2> inner{pixels, rank}, outer{pixels, out}, factor{rank, out};
  stored<T> x(c.x_size(), 1), down(c.w_size(), 2), up(rank * out, 3), t(c.y_size(), 4), y(pixels * out, 5);
  stored<T> dy(pixels * out, 6), dt(c.y_size(), 8);
  stored<float> dup(rank * out, 7);
  cudaStream_t stream = gpu_context().stream();

  kernels::low_rank_plan plan;
  plan.tensor = true;
  plan.rows = rows;
  pf::ops::reference::conv_forward<float>(c.shape, x.wide.host_view(c.x()), c.oihw(down.wide.host_data()),
                                          nullptr, t.wide.host_view(c.y()));
  pf::reference_gemm{}.multiply<float>(t.wide.host_view(inner), up.wide.host_view(factor),
                                       y.wide.host_view(outer));
  kernels::low_rank_conv_forward<T>(stream, c.geometry(), plan, x.narrow.device_data(),
                                    down.narrow.device_data(), up.narrow.device_data(), static_cast<int>(out),
                                    nullptr, t.narrow.device_data(), y.narrow.device_data());
  CHECK(t.error() < tolerance<T>);
  CHECK(y.error() < tolerance<T>);

  plan = kernels::plan_low_rank_backward(pixels, rank, out, true, sizeof(T));
  twin<float> partials(plan.scratch);
  stored<T> kept(c.y_size(), 9);
  pf::reference_gemm{}.multiply<float>(dy.wide.host_view(outer), pf::transpose(up.wide.host_view(factor)),
                                       dt.wide.host_view(inner));
  pf::reference_gemm{}.multiply<float>(pf::transpose(kept.wide.host_view(inner)), dy.wide.host_view(outer),
                                       dup.wide.host_view(factor));
  kernels::low_rank_conv_backward_up<T>(stream, plan, pixels, static_cast<int>(rank), static_cast<int>(out),
                                        kept.narrow.device_data(), dy.narrow.device_data(),
                                        up.narrow.device_data(), dup.narrow.device_data(), false,
                                        dt.narrow.device_data(), partials.device_data());
  CHECK(dt.error() < tolerance<T>);
  CHECK(dup.error() < tolerance<T>);
}

}  // namespace

TEST_CASE_TEMPLATE("gpu convolution of 16-bit numbers: every tile", T, pf::gpu::bf16, pf::gpu::fp16) {
  for (const conv_tile tile :
       {conv_tile::t128x128, conv_tile::t128x64, conv_tile::t64x64, conv_tile::t128x32, conv_tile::t256x16}) {
    CAPTURE(static_cast<int>(tile));
    check_conv<T>(conv_case::of(pf::conv_shape::square(8, 24, 3, 1, 1), {2, 9, 8}), tile, 1);
    check_conv<T>(conv_case::of(pf::conv_shape::square(3, 17, 3, 2, 1), {2, 9, 8}), tile, 2);
  }
  check_conv<T>(conv_case::of(pf::conv_shape::square(16, 8, 3, 1, 1), {2, 9, 8}), conv_tile::t256x16, 1);
  // Pixels of several cache lines, forward and backward.
  check_conv<T>(conv_case::of(pf::conv_shape::square(192, 128, 3, 1, 1), {1, 5, 4}), conv_tile::t64x64, 2);
}

TEST_CASE("gpu convolution of 16-bit numbers: all relations of channels and steps") {
  picker pick(13);
  constexpr index_t channels[] = {8, 16, 24, 40, 64, 128};
  constexpr conv_tile tiles[] = {conv_tile::t128x128, conv_tile::t128x64, conv_tile::t64x64,
                                 conv_tile::t128x32,  conv_tile::t256x16, conv_tile::t128x16};
  for (int done = 0; done < 24;) {
    const pf::conv_shape shape{channels[pick(0, 5)],     channels[pick(0, 5)],     {pick(1, 5), pick(1, 5)},
                               {pick(1, 3), pick(1, 3)}, {pick(0, 3), pick(0, 3)}, {pick(1, 3), pick(1, 3)}};
    const std::optional<conv_case> made = conv_case::find(shape, {pick(1, 3), pick(1, 9), pick(1, 9)});
    if (!made) continue;
    ++done;
    CAPTURE(shape.describe());
    CAPTURE(made->images);
    CAPTURE(made->height);
    CAPTURE(made->width);
    check_conv<pf::gpu::bf16>(*made, tiles[pick(0, 5)], static_cast<int>(pick(1, 3)));
    if (shape.out_channels <= 64) check_low_rank<pf::gpu::bf16>(*made, 24, done % 2 == 0 ? 64 : 128);
  }
}

TEST_CASE_TEMPLATE("gpu low-rank convolution of 16-bit numbers: every block", T, pf::gpu::bf16) {
  for (const index_t rank : {5, 16, 32, 40, 64}) {
    for (const int rows : {64, 128}) {
      CAPTURE(rank);
      CAPTURE(rows);
      check_low_rank<T>(conv_case::of(pf::conv_shape::square(8, rank, 3, 1, 1), {2, 9, 8}),
                        rows == 64 ? 72 : 33, rows);
    }
  }
  check_low_rank<T>(conv_case::of(pf::conv_shape::square(128, 16, 3, 1, 1), {1, 5, 4}), 40, 64);
}
