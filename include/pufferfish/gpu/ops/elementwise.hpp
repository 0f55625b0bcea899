// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Elementwise operations on a device: activations, sums, masks, dropout, copies, conversions.
///
/// Spans, views and pointers are of memory of the context's device. Functions put one kernel into the
/// context's stream and return; all may be captured into a graph. They compute in float for 16-bit elements
/// and round each result once. Arrays that are aligned to 16 bytes are read and written 16 bytes at a time.
/// Unequal lengths fail an assertion (core/assert.hpp). A failed launch throws backend_error that names the
/// launcher.

#include <pufferfish/core/scalar.hpp>
#include <pufferfish/gpu/kernels/elementwise/elementwise.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/ops/elementwise/activation.hpp>
#include <pufferfish/ops/elementwise/relu.hpp>
#include <pufferfish/ops/elementwise/relu_mask.hpp>
#include <pufferfish/ops/elementwise/sequence_dropout.hpp>
#include <pufferfish/ops/elementwise/sum.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace detail {

/// The words of a mask, in the type that kernels expect.
template <class T>
std::uint32_t* mask_words(const ops::relu_mask<T>& mask) {
  return reinterpret_cast<std::uint32_t*>(mask.words);
}

template <activation_kind Kind>
inline constexpr auto kernel_activation =
    Kind == activation_kind::gelu        ? kernels::activation::gelu
    : Kind == activation_kind::gelu_tanh ? kernels::activation::gelu_tanh
    : Kind == activation_kind::tanh      ? kernels::activation::tanh
                                         : kernels::activation::sigmoid;

/// Factor of elements that dropout keeps: 1 / (1 - probability).
template <class T>
T kept_scale(double probability) {
  return static_cast<T>(1.0 / (1.0 - probability));
}

}  // namespace detail

/// y_i = x_i in another format: between float and bfloat16 or float16, rounded to nearest. Both spans are in
/// device memory, have one length and do not overlap. Ties are rounded to even; a NaN stays a NaN.
inline void convert(context<device::gpu>& ctx, std::span<const float> x, std::span<bfloat16> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "gpu::convert: lengths differ");
  kernels::to_bfloat16(ctx.stream(), x.data(), reinterpret_cast<std::uint16_t*>(y.data()),
                       static_cast<index_t>(x.size()));
}
inline void convert(context<device::gpu>& ctx, std::span<const float> x, std::span<float16> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "gpu::convert: lengths differ");
  kernels::to_float16(ctx.stream(), x.data(), reinterpret_cast<std::uint16_t*>(y.data()),
                      static_cast<index_t>(x.size()));
}
inline void convert(context<device::gpu>& ctx, std::span<const bfloat16> x, std::span<float> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "gpu::convert: lengths differ");
  kernels::from_bfloat16(ctx.stream(), reinterpret_cast<const std::uint16_t*>(x.data()), y.data(),
                         static_cast<index_t>(x.size()));
}
inline void convert(context<device::gpu>& ctx, std::span<const float16> x, std::span<float> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "gpu::convert: lengths differ");
  kernels::from_float16(ctx.stream(), reinterpret_cast<const std::uint16_t*>(x.data()), y.data(),
                        static_cast<index_t>(x.size()));
}

}  // namespace gpu

namespace ops {

/// to_i = from_i for `size` elements; the arrays do not overlap. Throws backend_error.
template <class T>
void copy_elements(context<device::gpu>& ctx, const T* from, T* to, index_t size) {
  if (size == 0) return;
  gpu::check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(size) * sizeof(T), cudaMemcpyDeviceToDevice,
                             ctx.stream()),
             "cudaMemcpyAsync on the device");
}

/// y_i = value.
template <class T>
void fill(context<device::gpu>& ctx, std::span<T> y, T value) {
  gpu::kernels::fill<T>(ctx.stream(), y.data(), static_cast<index_t>(y.size()), value);
}

/// The operations of ops/elementwise/.
template <>
struct elementwise_ops<device::gpu> {
  template <class T>
  static void relu_forward(context<device::gpu>& ctx, std::span<const T> x, std::span<T> y) {
    gpu::kernels::relu_forward<T>(ctx.stream(), x.data(), y.data(), static_cast<index_t>(y.size()));
  }

  template <class T>
  static void relu_backward(context<device::gpu>& ctx, std::span<const T> y, std::span<const T> dy,
                            std::span<T> dx) {
    gpu::kernels::relu_backward<T>(ctx.stream(), y.data(), dy.data(), dx.data(),
                                   static_cast<index_t>(dx.size()));
  }
};

/// y_i = f(x_i), f as `Kind` says (ops/elementwise/activation.hpp). y may be x.
template <activation_kind Kind, class T>
void activation_forward(context<device::gpu>& ctx, std::span<const T> x, std::span<T> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "activation_forward: lengths differ");
  gpu::kernels::activation_forward<T>(ctx.stream(), gpu::detail::kernel_activation<Kind>, x.data(), y.data(),
                                      static_cast<index_t>(y.size()));
}

/// dx_i = f'(x_i) dy_i. `kept` is y where keeps_output(Kind), else x. dx may be dy or `kept`.
template <activation_kind Kind, class T>
void activation_backward(context<device::gpu>& ctx, std::span<const T> kept, std::span<const T> dy,
                         std::span<T> dx) {
  PUFFERFISH_ASSERT(kept.size() == dy.size() && dy.size() == dx.size(),
                    "activation_backward: lengths differ");
  gpu::kernels::activation_backward<T>(ctx.stream(), gpu::detail::kernel_activation<Kind>, kept.data(),
                                       dy.data(), dx.data(), static_cast<index_t>(dx.size()));
}

/// y_i += x_i.
template <class T>
void add(context<device::gpu>& ctx, std::span<const T> x, std::span<T> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "add: lengths differ");
  gpu::kernels::add<T>(ctx.stream(), x.data(), y.data(), static_cast<index_t>(y.size()), false);
}

/// y_i = max(y_i + x_i, 0); a NaN stays a NaN.
template <class T>
void add_relu(context<device::gpu>& ctx, std::span<const T> x, std::span<T> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "add_relu: lengths differ");
  gpu::kernels::add<T>(ctx.stream(), x.data(), y.data(), static_cast<index_t>(y.size()), true);
}

namespace detail {

/// y = x where the mask's bit is set, else 0; with `add`, y += this. The bits are in the device's order
/// (gpu/kernels/elementwise/relu_mask.hpp).
template <class T>
void masked_pass(context<device::gpu>& ctx, const tensor_view<const T, 2>& x, const relu_mask<T>& mask,
                 const tensor_view<T, 2>& y, bool add) {
  PUFFERFISH_ASSERT(x.shape() == y.shape(), "relu_mask: shapes differ");
  gpu::kernels::masked<T>(ctx.stream(), x.flat().data(), gpu::detail::mask_words(mask), y.flat().data(),
                          x.size(), add);
}

}  // namespace detail

/// y_mc = x_mc where the mask's bit is set, else 0. Dense matrices of the shape of the mask, which
/// batch_norm_apply has written on this device; y may be x.
template <class T>
void masked_copy(context<device::gpu>& ctx, const tensor_view<const T, 2>& x, const relu_mask<T>& mask,
                 const tensor_view<T, 2>& y) {
  detail::masked_pass<T>(ctx, x, mask, y, false);
}

/// y_mc += x_mc where the mask's bit is set. Shapes as masked_copy.
template <class T>
void masked_add(context<device::gpu>& ctx, const tensor_view<const T, 2>& x, const relu_mask<T>& mask,
                const tensor_view<T, 2>& y) {
  detail::masked_pass<T>(ctx, x, mask, y, true);
}

/// y_i = 0 where position first + i of the random stream is dropped, else x_i / (1 - probability), with a
/// probability in [0, 1). The gradient is the same call with dy for x and dx for y. y may be x. `random` must
/// be a result of this context's next_random_stream(): its seed is not used, and the kernel adds seed and
/// step from step_values().
template <class T>
void dropout(context<device::gpu>& ctx, std::span<const T> x, std::span<T> y, double probability,
             const random_stream& random, std::uint64_t first) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "dropout: lengths differ");
  const gpu::kernels::dropout_rows rows{
      1, 1, static_cast<index_t>(x.size()), first, dropout_threshold(probability), random.stream()};
  gpu::kernels::dropout<T>(ctx.stream(), x.data(), y.data(),
                           gpu::detail::kept_scale<parameter_t<T>>(probability), rows, ctx.step_values());
}

/// Row t batch + b of y is the dropout of that row of x; sequence b of the mask has the same random numbers
/// in every batch that contains it. x, y: (steps batch) x width, dense; y may be x. `mask.random` as in
/// dropout.
template <class T>
void sequence_dropout(context<device::gpu>& ctx, const tensor_view<const T, 2>& x, const sequence_mask& mask,
                      const tensor_view<T, 2>& y) {
  PUFFERFISH_ASSERT(x.shape() == y.shape() && x.extent(0) == mask.steps * mask.batch,
                    "sequence_dropout: shapes do not fit");
  const gpu::kernels::dropout_rows rows{mask.steps,
                                        mask.batch,
                                        x.extent(1),
                                        mask.position(0, 0, x.extent(1)),
                                        dropout_threshold(mask.probability),
                                        mask.random.stream()};
  gpu::kernels::dropout<T>(ctx.stream(), x.flat().data(), y.flat().data(),
                           gpu::detail::kept_scale<parameter_t<T>>(mask.probability), rows,
                           ctx.step_values());
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
