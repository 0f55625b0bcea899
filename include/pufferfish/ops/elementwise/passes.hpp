// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: loops over contiguous elements, compiled for every instruction set, for activations, sums,
/// pooling and optimizers. See passes.inc.
///
/// A kernel runs in the calling thread, takes pointers of any alignment and checks nothing. Operations select
/// the variant of the machine and call it for pieces of their arrays:
///
/// \code
/// const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, relu<T>);
/// for_chunks(ctx, size, [=](index_t begin, index_t end) { kernel(x + begin, y + begin, end - begin); });
/// \endcode

#include <cstddef>
#include <cstdint>
#include <utility>

#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// Coefficients of an SGD step: velocity = keep velocity + take g,
/// value -= lr (own g + ahead velocity), with g = gradient + decay value.
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

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
