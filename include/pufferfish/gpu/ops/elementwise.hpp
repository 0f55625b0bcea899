// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The operations of ops/elementwise/ on a device, and conversions between number formats. Each operation is
/// one kernel. Arrays that are aligned to 16 bytes are read and written 16 bytes at a time. A failed launch
/// throws backend_error.

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

/// The words of a mask, in the 32-bit type that kernels expect.
template <class T>
std::uint32_t* mask_words(const ops::relu_mask<T>& mask) {
  return reinterpret_cast<std::uint32_t*>(mask.words);
}

/// The kernels' constant for an activation.
template <activation_kind Kind>
inline constexpr auto kernel_activation =
    Kind == activation_kind::gelu        ? kernels::activation::gelu
    : Kind == activation_kind::gelu_tanh ? kernels::activation::gelu_tanh
    : Kind == activation_kind::tanh      ? kernels::activation::tanh
                                         : kernels::activation::sigmoid;

}  // namespace detail

/// y_i = x_i, rounded to bfloat16: to nearest, ties to even; a NaN stays a NaN. Both spans are in device
/// memory, have the same length (else the assertion fails) and do not overlap. The call may return before the
/// work has finished. Throws backend_error if the launch fails.
inline void convert(context<device::gpu>& ctx, std::span<const float> x, std::span<bfloat16> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "gpu::convert: lengths differ");
  kernels::to_bfloat16(ctx.stream(), x.data(), reinterpret_cast<std::uint16_t*>(y.data()),
                       static_cast<index_t>(x.size()));
}
/// y_i = x_i, rounded to float16. Memory, rounding and errors are those of the conversion to bfloat16.
inline void convert(context<device::gpu>& ctx, std::span<const float> x, std::span<float16> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "gpu::convert: lengths differ");
  kernels::to_float16(ctx.stream(), x.data(), reinterpret_cast<std::uint16_t*>(y.data()),
                      static_cast<index_t>(x.size()));
}
/// y_i = x_i, exactly. Both spans are in device memory, have the same length (else the assertion fails) and
/// do not overlap. Throws backend_error if the launch fails.
inline void convert(context<device::gpu>& ctx, std::span<const bfloat16> x, std::span<float> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "gpu::convert: lengths differ");
  kernels::from_bfloat16(ctx.stream(), reinterpret_cast<const std::uint16_t*>(x.data()), y.data(),
                         static_cast<index_t>(x.size()));
}
/// y_i = x_i, exactly. Both spans are in device memory, have the same length (else the assertion fails) and
/// do not overlap. Throws backend_error if the launch fails.
inline void convert(context<device::gpu>& ctx, std::span<const float16> x, std::span<float> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "gpu::convert: lengths differ");
  kernels::from_float16(ctx.stream(), reinterpret_cast<const std::uint16_t*>(x.data()), y.data(),
                        static_cast<index_t>(x.size()));
}

}  // namespace gpu

namespace ops {

/// Device implementation of the functions of ops/elementwise/, where formulas and aliasing are described.
template <>
struct elementwise_ops<device::gpu> {
  /// to_i = from_i for i < size. Throws backend_error if the copy fails.
  template <class T>
  static void copy_elements(context<device::gpu>& ctx, const T* from, T* to, index_t size) {
    gpu::check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(size) * sizeof(T), cudaMemcpyDeviceToDevice,
                               ctx.stream()),
               "cudaMemcpyAsync on the device");
  }

  /// y_i = value.
  template <class T>
  static void fill(context<device::gpu>& ctx, std::span<T> y, T value) {
    gpu::kernels::fill<T>(ctx.stream(), y.data(), static_cast<index_t>(y.size()), value);
  }

  /// y_i = max(x_i, 0); NaN for a NaN. y may be x.
  template <class T>
  static void relu_forward(context<device::gpu>& ctx, std::span<const T> x, std::span<T> y) {
    gpu::kernels::relu_forward<T>(ctx.stream(), x.data(), y.data(), static_cast<index_t>(y.size()));
  }

  /// dx_i = dy_i where y_i > 0 or y_i is NaN, else 0. dx may be dy or y.
  template <class T>
  static void relu_backward(context<device::gpu>& ctx, std::span<const T> y, std::span<const T> dy,
                            std::span<T> dx) {
    gpu::kernels::relu_backward<T>(ctx.stream(), y.data(), dy.data(), dx.data(),
                                   static_cast<index_t>(dx.size()));
  }

  /// y_i = f(x_i) for the activation f. y may be x.
  template <activation_kind Kind, class T>
  static void activation_forward(context<device::gpu>& ctx, std::span<const T> x, std::span<T> y) {
    gpu::kernels::activation_forward<T>(ctx.stream(), gpu::detail::kernel_activation<Kind>, x.data(),
                                        y.data(), static_cast<index_t>(y.size()));
  }

  /// dx_i = f'(x_i) dy_i, from the kept output or input (keeps_output). dx may be dy or `kept`.
  template <activation_kind Kind, class T>
  static void activation_backward(context<device::gpu>& ctx, std::span<const T> kept, std::span<const T> dy,
                                  std::span<T> dx) {
    gpu::kernels::activation_backward<T>(ctx.stream(), gpu::detail::kernel_activation<Kind>, kept.data(),
                                         dy.data(), dx.data(), static_cast<index_t>(dx.size()));
  }

  /// y_i += x_i.
  template <class T>
  static void add(context<device::gpu>& ctx, std::span<const T> x, std::span<T> y) {
    gpu::kernels::add<T>(ctx.stream(), x.data(), y.data(), static_cast<index_t>(y.size()), false);
  }

  /// y_i = max(y_i + x_i, 0); NaN for a NaN.
  template <class T>
  static void add_relu(context<device::gpu>& ctx, std::span<const T> x, std::span<T> y) {
    gpu::kernels::add<T>(ctx.stream(), x.data(), y.data(), static_cast<index_t>(y.size()), true);
  }

  /// y_i = x_i where the mask's bit is set, else 0; with `add`, this value is added to y_i. The order of the
  /// bits is that of device kernels (gpu/kernels/elementwise/relu_mask.hpp), which differs from the CPU's.
  template <class T>
  static void masked_pass(context<device::gpu>& ctx, const T* x, const relu_mask<T>& mask, T* y, index_t size,
                          bool add) {
    gpu::kernels::masked<T>(ctx.stream(), x, gpu::detail::mask_words(mask), y, size, add);
  }

  /// y_i = 0 where stream position first + i is dropped, else x_i scale. Only the stream of `random` is used:
  /// the kernel reads seed and step from the context when it runs.
  template <class T>
  static void dropout(context<device::gpu>& ctx, std::span<const T> x, std::span<T> y, parameter_t<T> scale,
                      std::uint32_t threshold, const random_stream& random, std::uint64_t first) {
    gpu::kernels::dropout<T>(ctx.stream(), x.data(), y.data(), scale,
                             {1, 1, static_cast<index_t>(x.size()), first, threshold, random.stream()},
                             ctx.step_values());
  }

  /// Dropout of the rows of sequences, at the positions of `mask`. Only the stream of mask.random is used, as
  /// in dropout().
  template <class T>
  static void sequence_dropout(context<device::gpu>& ctx, const T* x, const sequence_mask& mask,
                               index_t width, parameter_t<T> scale, std::uint32_t threshold, T* y) {
    gpu::kernels::dropout<T>(
        ctx.stream(), x, y, scale,
        {mask.steps, mask.batch, width, mask.position(0, 0, width), threshold, mask.random.stream()},
        ctx.step_values());
  }
};

}  // namespace ops
PUFFERFISH_NAMESPACE_END
