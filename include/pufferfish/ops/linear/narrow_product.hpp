// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: products of 16-bit rows on the CPU by the float kernels. Blocks of rows are widened to float in
/// scratch, multiplied, and rounded once. The blocks depend on shapes alone, so results are the same bits for
/// any number of threads.

#include <algorithm>

#include <pufferfish/core/view.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>
#include <pufferfish/ops/norm/moments.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// Number of rows that are converted to float at once: about 8 MiB of floats, but at least one row.
inline index_t widened_rows(index_t columns) {
  return std::max<index_t>(1, (index_t{2} << 20) / std::max<index_t>(1, columns));
}

/// y = x for matrices of the same extents whose rows are contiguous.
template <class From, class To>
void convert_rows(context<device::cpu>& ctx, const tensor_view<From, 2>& x, const tensor_view<To, 2>& y) {
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), passes, convert<std::remove_const_t<From>, To>);
  for_row_chunks(ctx, y.extent(0), y.extent(1), [&](index_t begin, index_t end) {
    for (index_t m = begin; m < end; ++m) {
      kernel(x.data() + m * x.stride(0), y.data() + m * y.stride(0), y.extent(1));
    }
  });
}

/// Number of rows in each part of the moments (column means and variances) of a matrix.
inline index_t moment_rows(index_t columns) {
  return std::max<index_t>(moment_block, 32768 / std::max<index_t>(1, columns));
}

/// Prepares `moments` (column means and variances, in parts) for a matrix of the shape of y; add_row_moments
/// fills them later. Call it before other scratch is taken from the frame, since `moments` takes its memory
/// there.
template <class T>
void start_row_moments(const tensor_view<T, 2>& y, moment_parts<T>& moments) {
  const index_t rows = moment_rows(y.extent(1));
  moments.start((y.extent(0) + rows - 1) / rows, y.extent(1));
}
template <class T>
void add_row_moments(context<device::cpu>& ctx, const tensor_view<T, 2>& y, moment_parts<T>& moments) {
  const index_t rows = moment_rows(y.extent(1));
  ctx.parallel_for(moments.parts(), [&](index_t part, int) {
    const index_t first = part * rows;
    moments.add(part, y.data() + first * y.stride(0), std::min(rows, y.extent(0) - first), y.stride(0));
  });
}

/// y = x w + bias for 16-bit elements; with `add`, the result is added to y. Sums are in float and rounded
/// once. w may be a transposed view. `moments`, unless nullptr, receives the column moments of the rounded y.
/// The function multiply(x, w, bias, y) computes blocks of rows in float; with `add`, it must add its result
/// to its y.
template <class T, class Multiply>
void narrow_rows(context<device::cpu>& ctx, const tensor_view<const T, 2>& x,
                 const tensor_view<const T, 2>& w, const T* bias, const tensor_view<T, 2>& y,
                 moment_parts<T>* moments, bool add, Multiply&& multiply) {
  if (moments != nullptr) start_row_moments(y, *moments);
  scratch_frame frame(ctx.scratch());
  const index_t depth = w.extent(0), columns = w.extent(1);
  const bool turned = w.stride(1) != 1;
  const tensor_view<const T, 2> stored = turned ? transpose(w) : w;
  const tensor_view<float, 2> copy = frame.take<float>(stored.shape());
  convert_rows(ctx, stored, copy);
  const tensor_view<const float, 2> weight = turned ? transpose(copy) : copy;
  const float* const wide_bias = widened(ctx, frame, bias, columns);
  const index_t block = std::min(widened_rows(depth + columns), y.extent(0));
  const tensor_view<float, 2> from = frame.take<float>(extents<2>{block, depth}),
                              to = frame.take<float>(extents<2>{block, columns});
  for (index_t first = 0; first < y.extent(0); first += block) {
    const index_t count = std::min(block, y.extent(0) - first);
    const tensor_view<T, 2> result = y.slice(0, first, count);
    const tensor_view<float, 2> sums = to.slice(0, 0, count);
    const tensor_view<float, 2> left = from.slice(0, 0, count);
    convert_rows(ctx, x.slice(0, first, count), left);
    if (add) convert_rows(ctx, result, sums);
    multiply(tensor_view<const float, 2>(left), weight, wide_bias, sums);
    convert_rows(ctx, sums, result);
  }
  if (moments != nullptr) add_row_moments(ctx, y, *moments);
}

/// Calls product(x, dy, first) for blocks of rows of x and dy in float; `first`: the first block. There is at
/// least one call.
template <class T, class Product>
void narrow_weight_gradient(context<device::cpu>& ctx, const tensor_view<const T, 2>& x,
                            const tensor_view<const T, 2>& dy, Product&& product) {
  scratch_frame frame(ctx.scratch());
  const index_t rows = dy.extent(0);
  const index_t block = std::min(widened_rows(x.extent(1) + dy.extent(1)), rows);
  const tensor_view<float, 2> left = frame.take<float>(extents<2>{block, x.extent(1)}),
                              right = frame.take<float>(extents<2>{block, dy.extent(1)});
  for (index_t first = 0; first < rows || first == 0; first += std::max<index_t>(1, block)) {
    const index_t count = std::min(block, rows - first);
    const tensor_view<float, 2> a = left.slice(0, 0, count), b = right.slice(0, 0, count);
    convert_rows(ctx, x.slice(0, first, count), a);
    convert_rows(ctx, dy.slice(0, first, count), b);
    product(tensor_view<const float, 2>(a), tensor_view<const float, 2>(b), first == 0);
  }
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
