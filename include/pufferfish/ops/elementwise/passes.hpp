// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: loops over contiguous elements, compiled for every instruction set, for activations, sums,
/// pooling and optimizers. See passes.inc.
///
/// A kernel runs in the calling thread, takes pointers of any alignment and checks nothing. An operation
/// selects the kernel variant for the instruction set of the machine and calls it for pieces of its arrays:
///
/// \code
/// const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, relu<T>);
/// for_chunks(ctx, size, [=](index_t begin, index_t end) { kernel(x + begin, y + begin, end - begin); });
/// \endcode

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// Coefficients of an SGD step: velocity = keep velocity + take g, value -= lr (own g + ahead velocity), with
/// g = gradient + decay value.
template <class T>
struct sgd_numbers {
  T lr, decay, keep, take, own, ahead;
};

/// Pixels of one window of an image: `rows` x `columns` pixels, row stride `row_stride` elements.
struct window_pixels {
  index_t rows, columns, row_stride, channels;
};

#define PUFFERFISH_KERNELS passes
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/elementwise/passes.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// Whether T is a 16-bit type. Products on the CPU have separate forms for such types, and elementwise
/// kernels compute in float.
template <class T>
inline constexpr bool is_narrow = !std::is_same_v<T, parameter_t<T>>;

/// y = x for bfloat16 and float in either order: exact, or rounded to nearest, ties to even. No overlap.
template <class From, class To>
void convert(context<device::cpu>& ctx, const From* x, To* y, index_t size) {
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), passes, convert<From, To>);
  for_chunks(ctx, size, [=](index_t begin, index_t end) { kernel(x + begin, y + begin, end - begin); });
}

/// Copies `size` elements to scratch memory of `frame` as float, and returns the copy. Returns nullptr if x
/// is nullptr.
template <class T>
float* widened(context<device::cpu>& ctx, scratch_frame& frame, const T* x, index_t size) {
  if (x == nullptr) return nullptr;
  float* const wide = frame.take<float>(size);
  convert(ctx, x, wide, size);
  return wide;
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
