// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Convolutions on a device, dense and of low rank. cuBLAS computes convolutions that are matrix products
/// (1x1 kernels). Other convolutions of one group are computed by the context's convolution library, if there
/// is one that supports them, else by kernels of this library, which gather patches while they multiply. The
/// kernels for several groups are simple (gpu/kernels/conv/grouped_conv.hpp).
///
/// Operands are in memory of the context's device. Functions enqueue their work in the context's stream and
/// return before it has finished; they may be captured into graphs. Which built-in kernel computes a
/// convolution depends on its shape, its addresses and on whether the device has warp groups (compute
/// capability 9.0), so results of two kinds of devices may differ by rounding; its tile sizes depend on
/// shapes alone. Scratch memory is that of the context.

#include <algorithm>

#include <pufferfish/gpu/kernels/conv/conv.hpp>
#include <pufferfish/gpu/kernels/conv/grouped_conv.hpp>
#include <pufferfish/gpu/kernels/conv/low_rank_conv.hpp>
#include <pufferfish/gpu/ops/arguments.hpp>
#include <pufferfish/gpu/ops/collect_moments.hpp>
#include <pufferfish/gpu/ops/conv_by_groups.hpp>
#include <pufferfish/gpu/ops/conv_library.hpp>
#include <pufferfish/gpu/ops/norm.hpp>  // a pending norm may be computed by its own operation
#include <pufferfish/gpu/ops/pending_norm.hpp>
#include <pufferfish/gpu/ops/products.hpp>
#include <pufferfish/ops/conv/low_rank_conv.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Device implementation of the functions of ops/conv/, where shapes and errors are described.
template <>
struct conv_ops<device::gpu> {
  /// y = x * w + bias, by the library or kernel that the top of this file tells. Kernels for one group,
  /// without slices, collect moments (collect_moments). A pending `norm` is computed (request_norm).
  template <class T>
  static void conv_forward(context<device::gpu>& ctx, const conv_shape& shape,
                           const tensor_view<const T, 4>& x, const T* w, const T* bias,
                           const tensor_view<T, 4>& y, moment_parts<T>* moments = nullptr,
                           pending_norm<T>* norm = nullptr) {
    if (shape.is_pointwise()) {
      gpu::detail::compute_pending(ctx, norm);
      return gpu::multiply<T>(ctx, detail::as_rows(x), detail::as_matrix(shape, w), detail::as_rows(y), false,
                              bias);
    }
    const auto geometry = gpu::detail::geometry_of("conv_forward", shape, x.shape(), y.shape());
    if (shape.groups > 1 || ctx.conv_library() != nullptr) gpu::detail::compute_pending(ctx, norm);
    if (shape.groups > 1) {
      return gpu::kernels::grouped_conv_forward<T>(ctx.stream(), geometry, static_cast<int>(shape.groups),
                                                   x.data(), w, bias, y.data());
    }
    if (gpu::detail::done_by_library<T>(ctx, geometry, [&](auto& library, const auto& asked) {
          return library.forward(ctx, asked, x.data(), w, bias, y.data());
        })) {
      return;
    }
    if (gpu::detail::done_by_warp_groups<T>(
            gpu::kernels::plan_halo_forward(geometry),
            [&](const auto& plan) {
              gpu::detail::compute_halo<T>(
                  ctx, geometry, plan, 0, y, moments, norm, [&](const auto& to, const auto& request) {
                    gpu::kernels::halo_forward<T>(ctx.stream(), geometry, plan, x.data(), w, bias, y.data(),
                                                  to, request);
                  });
            },
            x.data(), w, y.data())) {
      return;
    }
    gpu::detail::compute_pending(ctx, norm);
    const auto plan = gpu::kernels::plan_conv_forward(geometry, gpu::detail::by_tensor_cores<T>(ctx),
                                                      gpu::detail::vector_of<T>);
    gpu::detail::collect_moments<T>(ctx, y, moments, plan.slices == 1, [&](const auto& to) {
      scratch_frame frame(ctx.scratch());
      gpu::kernels::conv_forward<T>(ctx.stream(), geometry, plan, x.data(), w, bias, y.data(),
                                    frame.take<float>(plan.scratch), to);
    });
  }

  /// dx = the gradient of the input, or with `add` dx += this gradient. Kernels for one group and 16 bits,
  /// without slices and phases, collect sums (collect_gradient_sums).
  template <class T>
  static void conv_backward_input(context<device::gpu>& ctx, const conv_shape& shape,
                                  const tensor_view<const T, 4>& dy, const T* w, const tensor_view<T, 4>& dx,
                                  bool add, gradient_sums<T>* sums) {
    if (shape.is_pointwise()) {
      return gpu::multiply<T>(ctx, detail::as_rows(dy), transpose(detail::as_matrix(shape, w)),
                              detail::as_rows(dx), add);
    }
    const auto geometry = gpu::detail::geometry_of("conv_backward_input", shape, dx.shape(), dy.shape());
    if (shape.groups > 1) {
      return gpu::kernels::grouped_conv_backward_input<T>(
          ctx.stream(), geometry, static_cast<int>(shape.groups), dy.data(), w, dx.data(), add);
    }
    if (gpu::detail::done_by_library<T>(ctx, geometry, [&](auto& library, const auto& asked) {
          return library.backward_input(ctx, asked, dy.data(), w, dx.data(), add);
        })) {
      return;
    }
    if (gpu::detail::done_by_warp_groups<T>(
            gpu::kernels::plan_halo_backward_input(geometry),
            [&](const auto& plan) {
              const auto compute = [&](const auto& to, const auto& norm) {
                gpu::kernels::halo_backward_input<T>(ctx.stream(), geometry, plan, dy.data(), w, dx.data(),
                                                     add, to, norm);
              };
              gpu::detail::collect_gradient_sums<T>(ctx, dx, sums, gpu::kernels::halo_gradient_sums_fit(plan),
                                                    compute);
            },
            dy.data(), w, dx.data())) {
      return;
    }
    const auto plan = gpu::kernels::plan_conv_backward_input(geometry, gpu::detail::by_tensor_cores<T>(ctx),
                                                             gpu::detail::vector_of<T>);
    const auto compute = [&](const auto& to, const auto& norm) {
      scratch_frame frame(ctx.scratch());
      gpu::kernels::conv_backward_input<T>(ctx.stream(), geometry, plan, dy.data(), w, dx.data(), add,
                                           frame.take<float>(plan.scratch), to, norm);
    };
    gpu::detail::collect_gradient_sums<T>(ctx, dx, sums, gpu::kernels::gradient_sums_fit<T>(geometry, plan),
                                          compute);
  }

  /// Gradient of the weight.
  template <class T>
  static void conv_backward_weight(context<device::gpu>& ctx, const conv_shape& shape,
                                   const tensor_view<const T, 4>& x, const tensor_view<const T, 4>& dy,
                                   parameter_t<T>* dw, bool accumulate) {
    scratch_frame frame(ctx.scratch());
    gpu::kernels::slice_sums sums;
    weight_slices<T>(ctx, frame, shape, x, dy, dw, accumulate, sums);
    gpu::kernels::add_weight_slices(ctx.stream(), sums);
  }

  /// Both convolutions run in one kernel: one of warp groups where it has the shape (plan_halo_low_rank),
  /// else, if the rank is at most 64 and there are enough pixels (plan_low_rank_forward), one that gathers
  /// patches. Otherwise, or if warp groups are faster in two passes (is_faster_apart), conv_forward and a
  /// matrix product run one after the other, and only then a convolution library is used. Kernels that
  /// compute both convolutions collect moments. `norm`: as in conv_forward.
  template <class T>
  static void low_rank_conv_forward(context<device::gpu>& ctx, const conv_shape& shape,
                                    const tensor_view<const T, 4>& x, const T* down,
                                    const tensor_view<const T, 2>& up, const T* bias,
                                    const tensor_view<T, 4>& t, const tensor_view<T, 4>& y,
                                    moment_parts<T>* moments, pending_norm<T>* norm) {
    extents<4> inner = y.shape();
    inner[3] = shape.out_channels;
    const auto geometry = gpu::detail::geometry_of("low_rank_conv_forward", shape, x.shape(), inner);
    const int out_channels = static_cast<int>(up.extent(1));
    if (gpu::detail::done_by_warp_groups<T>(
            gpu::kernels::plan_halo_low_rank(geometry, out_channels),
            [&](const auto& plan) {
              gpu::detail::compute_halo<T>(ctx, geometry, plan, out_channels, y, moments, norm,
                                           [&](const auto& to, const auto& request) {
                                             gpu::kernels::halo_low_rank_forward<T>(
                                                 ctx.stream(), geometry, plan, x.data(), down, up.data(),
                                                 out_channels, bias, t.data(), y.data(), to, request);
                                           });
            },
            x.data(), down, up.data(), t.data(), y.data())) {
      return;
    }
    const auto plan = gpu::kernels::plan_low_rank_forward(geometry, gpu::detail::by_tensor_cores<T>(ctx));
    if (plan.fused && !gpu::detail::is_faster_apart<T>(ctx, geometry, x.data(), down, t.data())) {
      gpu::detail::compute_pending(ctx, norm);
      return gpu::detail::collect_moments<T>(ctx, y, moments, true, [&](const auto& to) {
        gpu::kernels::low_rank_conv_forward<T>(ctx.stream(), geometry, plan, x.data(), down, up.data(),
                                               out_channels, bias, t.data(), y.data(), to);
      });
    }
    scratch_frame frame(ctx.scratch());
    const tensor_view<T, 4> kept = t.is_null() ? frame.take<T>(inner) : t;
    conv_forward<T>(ctx, shape, x, down, nullptr, kept, nullptr, norm);
    gpu::multiply<T>(ctx, detail::as_rows(kept), up, detail::as_rows(y), false, bias);
  }

  /// Gradients dup and dt of the 1x1 convolution by `up`. t, dt: pixels x rank; dy: pixels x out_channels.
  template <class T>
  static void low_rank_conv_backward_up(context<device::gpu>& ctx, const tensor_view<const T, 2>& t,
                                        const tensor_view<const T, 2>& dy, const tensor_view<const T, 2>& up,
                                        const tensor_view<parameter_t<T>, 2>& dup, bool accumulate,
                                        const tensor_view<T, 2>& dt) {
    scratch_frame frame(ctx.scratch());
    gpu::kernels::slice_sums sums;
    up_slices<T>(ctx, frame, t, dy, up, dup, accumulate, dt, sums);
    gpu::kernels::add_weight_slices(ctx.stream(), sums);
  }

  /// low_rank_conv_backward_up, then conv_backward_weight with dt. One launch completes both gradients, in
  /// the function that `then` is called with.
  template <class T, class Then>
  static void low_rank_conv_backward_weights(
      context<device::gpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
      const tensor_view<const T, 4>& t, const tensor_view<const T, 4>& dy, const tensor_view<const T, 2>& up,
      const sum_target<parameter_t<T>>& dup, const tensor_view<T, 4>& dt,
      const sum_target<parameter_t<T>>& ddown, Then&& then) {
    scratch_frame frame(ctx.scratch());
    gpu::kernels::slice_sums sums;
    up_slices<T>(ctx, frame, detail::as_rows(t), detail::as_rows(dy), up, {dup.data, up.shape()}, dup.add,
                 detail::as_rows(dt), sums);
    then([&] {
      scratch_frame own(ctx.scratch());
      weight_slices<T>(ctx, own, shape, x, dt, ddown.data, ddown.add, sums);
      gpu::kernels::add_weight_slices(ctx.stream(), sums);
    });
  }

 private:
  // Gradient of the weight. Sums that complete it are added to `sums`, with partial results in `frame`. With
  // few output channels the kernel computes the gradient with x and dy swapped (kernels::turned).
  template <class T>
  static void weight_slices(context<device::gpu>& ctx, scratch_frame& frame, const conv_shape& shape,
                            const tensor_view<const T, 4>& x, const tensor_view<const T, 4>& dy,
                            parameter_t<T>* dw, bool accumulate, gpu::kernels::slice_sums& sums) {
    if (shape.is_pointwise()) {
      const tensor_view<parameter_t<T>, 2> gradient(dw, {shape.patch(), shape.out_channels});
      return gpu::multiply_wide<T>(ctx, transpose(detail::as_rows(x)), detail::as_rows(dy), gradient,
                                   accumulate);
    }
    const auto geometry = gpu::detail::geometry_of("conv_backward_weight", shape, x.shape(), dy.shape());
    if (shape.groups > 1) {
      const int groups = static_cast<int>(shape.groups);
      const auto plan = gpu::kernels::plan_grouped_backward_weight(geometry, groups);
      return gpu::kernels::grouped_conv_backward_weight<T>(ctx.stream(), geometry, groups, plan, x.data(),
                                                           dy.data(), dw, accumulate,
                                                           frame.take<float>(plan.scratch));
    }
    if (gpu::detail::done_by_library<T>(ctx, geometry, [&](auto& library, const auto& asked) {
          return library.backward_weight(ctx, asked, x.data(), dy.data(), dw, accumulate);
        })) {
      return;
    }
    if (gpu::detail::done_by_warp_groups<T>(
            gpu::kernels::plan_halo_backward_weight(geometry),
            [&](const auto& plan) {
              gpu::kernels::halo_backward_weight<T>(ctx.stream(), geometry, plan, x.data(), dy.data(), dw,
                                                    accumulate, frame.take<float>(plan.scratch), &sums);
            },
            x.data(), dy.data())) {
      return;
    }
    const bool turns = gpu::kernels::is_better_turned(geometry, gpu::detail::vector_of<T>);
    const auto how = turns ? gpu::kernels::turned(geometry) : geometry;
    const auto plan = gpu::kernels::plan_conv_backward_weight(how, gpu::detail::by_tensor_cores<T>(ctx),
                                                              gpu::detail::vector_of<T>);
    if (!turns) {
      return gpu::kernels::conv_backward_weight<T>(ctx.stream(), how, plan, x.data(), dy.data(), dw,
                                                   accumulate, frame.take<float>(plan.scratch), &sums);
    }
    const index_t size = shape.patch() * shape.out_channels;
    auto* const found = frame.take<float>(std::max(plan.scratch, size));
    gpu::kernels::slice_sums plain;  // not computed: the sum below also turns the result
    gpu::kernels::conv_backward_weight<T>(ctx.stream(), how, plan, dy.data(), x.data(), found, false, found,
                                          &plain);
    sums.push({dw, found, size, plan.slices, accumulate, how.out_channels, geometry.out_channels});
  }

  // Gradients dup and dt. One kernel that reads dy once computes both if the device has the shared memory
  // that the plan needs; otherwise two matrix products do. `sums` and `frame`: as in weight_slices.
  template <class T>
  static void up_slices(context<device::gpu>& ctx, scratch_frame& frame, const tensor_view<const T, 2>& t,
                        const tensor_view<const T, 2>& dy, const tensor_view<const T, 2>& up,
                        const tensor_view<parameter_t<T>, 2>& dup, bool accumulate,
                        const tensor_view<T, 2>& dt, gpu::kernels::slice_sums& sums) {
    const index_t pixels = t.extent(0), rank = up.extent(0), out = up.extent(1);
    const auto plan = gpu::kernels::plan_low_rank_backward(
        pixels, rank, out, gpu::detail::by_tensor_cores<T>(ctx), static_cast<int>(sizeof(T)));
    if (plan.fused && plan.shared_bytes <= gpu::detail::shared_memory_of(ctx)) {
      return gpu::kernels::low_rank_conv_backward_up<T>(
          ctx.stream(), plan, pixels, static_cast<int>(rank), static_cast<int>(out), t.data(), dy.data(),
          up.data(), dup.data(), accumulate, dt.data(), frame.take<float>(plan.scratch), &sums);
    }
    gpu::multiply<T>(ctx, dy, transpose(up), dt);
    gpu::multiply_wide<T>(ctx, transpose(t), dy, dup, accumulate);
  }
};

}  // namespace ops
PUFFERFISH_NAMESPACE_END
