// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "device_convolutions.hpp"

#include <string_view>

#include <pufferfish/gpu.hpp>
#include <pufferfish/gpu/kernels/conv/halo_conv.hpp>
#include <pufferfish/gpu/kernels/copy/transpose.hpp>

#include "device_arrays.hpp"

namespace bench {
namespace {

namespace pf = pufferfish;
namespace kernels = pf::gpu::kernels;
using T = pf::gpu::bf16;
using pf::index_t;

struct layer {
  int side, in, out, up;  ///< side: of the input; up: channels after the second factor, 0: a dense layer
  int stride = 1, kernel = 3;
};

class layer_timer {
 public:
  layer_timer(pf::gpu_context& ctx, const layer& of, int batch, int samples)
      : ctx_(ctx),
        layer_(of),
        g_{batch,         of.side,   of.side,   of.in,     of.side / of.stride, of.side / of.stride,
           of.out,        of.kernel, of.kernel, of.stride, of.stride,           of.kernel / 2,
           of.kernel / 2, 1,         1},
        samples_(samples),
        x_(g_.in_pixels() * of.in, 1),
        w_(weights(), 2),
        dy_(g_.out_pixels() * of.out, 3) {}

  void time(answer& rows) {
    forward(rows);
    backward_input(rows);
    backward_weight(rows);
    if (layer_.up > 0) low_rank(rows);
  }

 private:
  index_t weights() const { return static_cast<index_t>(g_.patch()) * g_.out_channels; }

  template <class U>
  void measure(answer& rows, const char* pass, device_array<U>& one, device_array<U>& other,
               const std::function<void()>& gathered, bool fits, const std::function<void()>& groups) {
    const bool both = pass == std::string_view("low-rank forward");
    const index_t factors = weights() + (both ? static_cast<index_t>(layer_.out) * layer_.up : 0);
    const double flops = 2.0 * static_cast<double>(g_.out_pixels()) * static_cast<double>(factors);
    answer row{{"side", layer_.side},
               {"in", layer_.in},
               {"out", layer_.out},
               {"up", layer_.up},
               {"stride", layer_.stride},
               {"kernel", layer_.kernel},
               {"pass", pass},
               {"gflop", flops * 1e-9},
               {"gathered_us", microseconds(ctx_, samples_, gathered)},
               {"groups_us", 0.0}};
    if (fits && kernels::halo_available()) {
      row["groups_us"] = microseconds(ctx_, samples_, groups);
      row["difference"] = difference(one, other);
    }
    rows.push_back(row);
  }

  void forward(answer& rows) {
    const auto plan = kernels::plan_conv_forward(g_, true, 8);
    const auto halo = kernels::plan_halo_forward(g_);
    device_array<T> y(g_.out_pixels() * layer_.out), z(g_.out_pixels() * layer_.out);
    device_array<float> partials(plan.scratch);
    measure(
        rows, "forward", y, z,
        [&] {
          kernels::conv_forward<T>(ctx_.stream(), g_, plan, x_.data(), w_.data(), nullptr, y.data(),
                                   partials.data());
        },
        halo.fits,
        [&] { kernels::halo_forward<T>(ctx_.stream(), g_, halo, x_.data(), w_.data(), nullptr, z.data()); });
  }

  void backward_input(answer& rows) {
    const auto plan = kernels::plan_conv_backward_input(g_, true, 8);
    const auto halo = kernels::plan_halo_backward_input(g_);
    device_array<T> dx(g_.in_pixels() * layer_.in), other(g_.in_pixels() * layer_.in);
    device_array<float> partials(plan.scratch);
    measure(
        rows, "gradient of the input", dx, other,
        [&] {
          kernels::conv_backward_input<T>(ctx_.stream(), g_, plan, dy_.data(), w_.data(), dx.data(), false,
                                          partials.data());
        },
        halo.fits,
        [&] {
          kernels::halo_backward_input<T>(ctx_.stream(), g_, halo, dy_.data(), w_.data(), other.data(),
                                          false);
        });
  }

  void backward_weight(answer& rows) {
    const bool turns = kernels::is_better_turned(g_, 8);
    const auto how = turns ? kernels::turned(g_) : g_;
    const auto plan = kernels::plan_conv_backward_weight(how, true, 8);
    const auto halo = kernels::plan_halo_backward_weight(g_);
    device_array<float> dw(weights()), other(weights()), turned(weights());
    device_array<float> partials(std::max(plan.scratch, halo.scratch));
    measure(
        rows, "gradient of the weight", dw, other,
        [&] {
          if (!turns) {
            return kernels::conv_backward_weight<T>(ctx_.stream(), how, plan, x_.data(), dy_.data(),
                                                    dw.data(), false, partials.data());
          }
          kernels::slice_sums sums;
          kernels::conv_backward_weight<T>(ctx_.stream(), how, plan, dy_.data(), x_.data(), turned.data(),
                                           false, partials.data(), &sums);
          if (sums.count == 0) sums.push({nullptr, turned.data(), weights(), 1, false, layer_.in});
          sums.sums[0].out = dw.data();
          sums.sums[0].turned_rows = layer_.out;
          kernels::add_weight_slices(ctx_.stream(), sums);
        },
        halo.fits,
        [&] {
          kernels::halo_backward_weight<T>(ctx_.stream(), g_, halo, x_.data(), dy_.data(), other.data(),
                                           false, partials.data());
        });
  }

  void low_rank(answer& rows) {
    const auto plan = kernels::plan_low_rank_forward(g_, true);
    // By warp groups in one pass, or else in two (gpu::detail::is_faster_apart).
    const auto halo = kernels::plan_halo_low_rank(g_, layer_.up), apart = kernels::plan_halo_forward(g_);
    if (!plan.fused) return;
    const index_t pixels = g_.out_pixels(), rank = layer_.out, columns = layer_.up;
    device_array<T> up(rank * columns, 4), t(pixels * rank), y(pixels * columns), z(pixels * columns);
    measure(
        rows, "low-rank forward", y, z,
        [&] {
          kernels::low_rank_conv_forward<T>(ctx_.stream(), g_, plan, x_.data(), w_.data(), up.data(),
                                            layer_.up, nullptr, t.data(), y.data());
        },
        halo.fits || apart.fits,
        [&] {
          if (halo.fits) {
            return kernels::halo_low_rank_forward<T>(ctx_.stream(), g_, halo, x_.data(), w_.data(), up.data(),
                                                     layer_.up, nullptr, t.data(), z.data());
          }
          kernels::halo_forward<T>(ctx_.stream(), g_, apart, x_.data(), w_.data(), nullptr, t.data());
          pf::gpu::multiply<T>(ctx_, pf::tensor_view<const T, 2>(t.data(), {pixels, rank}),
                               pf::tensor_view<const T, 2>(up.data(), {rank, columns}),
                               pf::tensor_view<T, 2>(z.data(), {pixels, columns}));
        });
  }

  pf::gpu_context& ctx_;
  layer layer_;
  kernels::conv_geometry g_;
  int samples_;
  device_array<T> x_, w_, dy_;
};

}  // namespace

answer time_convolutions(const request& asked) {
  const bool tiny = asked.value("tiny", false);
  pf::gpu_context ctx;
  answer rows = answer::array();
  const std::vector<layer> layers =
      tiny ? std::vector<layer>{{8, 64, 16, 64},
                                {8, 64, 32, 0},
                                {4, 64, 32, 0},
                                {8, 64, 32, 0, 2},
                                {8, 64, 64, 0, 2, 1}}
           : std::vector<layer>{{32, 64, 64, 0},         {32, 64, 16, 64},      {16, 128, 32, 128},
                                {8, 256, 64, 256},       {16, 128, 128, 0},     {8, 256, 256, 0},
                                {4, 512, 128, 512},      {4, 512, 512, 0},      {32, 64, 32, 128, 2},
                                {16, 128, 64, 256, 2},   {8, 256, 128, 512, 2}, {32, 64, 128, 0, 2},
                                {16, 128, 256, 0, 2},    {8, 256, 512, 0, 2},   {32, 64, 128, 0, 2, 1},
                                {16, 128, 256, 0, 2, 1}, {8, 256, 512, 0, 2, 1}};
  for (const layer& of : layers) layer_timer(ctx, of, asked.at("batch"), tiny ? 1 : 15).time(rows);
  return {{"convolutions", rows}};
}

}  // namespace bench
