// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: products of 16-bit rows on the CPU by the float kernels. Blocks of rows are converted to float
/// in scratch memory and multiplied, and each result is rounded once. The blocks depend on shapes alone, so
/// results do not depend on the number of threads.

#include <algorithm>

#include <pufferfish/core/view.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>
#include <pufferfish/ops/norm/moments.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// Number of rows that are converted to float at once: about 8 MiB of floats, but at least one row.
/// `columns`: number of floats a row needs, input and output together.
inline index_t widened_rows(index_t columns) {
  return std::max<index_t>(1, (index_t{2} << 20) / std::max<index_t>(1, columns));
}

/// Converts the elements of x to the type of y: y_mn = x_mn, rounded if the type of y is narrower. x and y
/// have the same extents, contiguous rows and any row stride, and do not overlap.
template <class From, class To>
void convert_rows(context<device::cpu>& ctx, const tensor_view<From, 2>& x, const tensor_view<To, 2>& y) {
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), passes, convert<std::remove_const_t<From>, To>);
  for_row_chunks(ctx, y.extent(0), y.extent(1), [&](index_t begin, index_t end) {
    for (index_t m = begin; m < end; ++m) {
      kernel(x.data() + m * x.stride(0), y.data() + m * y.stride(0), y.extent(1));
    }
  });
}

/// Number of rows in each part of the moments (column means and variances) of a matrix with `columns`
/// columns: about 32768 elements, but at least moment_block rows.
inline index_t moment_rows(index_t columns) {
  return std::max<index_t>(moment_block, 32768 / std::max<index_t>(1, columns));
}

/// Prepares `moments` (column means and variances, in parts) for a matrix of the shape of y. Must be called
/// before other scratch is taken from the frame that `moments` uses, since the memory of the parts is taken
/// from it.
template <class T>
void start_row_moments(const tensor_view<T, 2>& y, moment_parts<T>& moments) {
  const index_t rows = moment_rows(y.extent(1));
  moments.start((y.extent(0) + rows - 1) / rows, y.extent(1));
}
/// Adds all rows of y (contiguous rows) to `moments`, which start_row_moments has prepared for the same
/// shape.
template <class T>
void add_row_moments(context<device::cpu>& ctx, const tensor_view<T, 2>& y, moment_parts<T>& moments) {
  const index_t rows = moment_rows(y.extent(1));
  ctx.parallel_for(moments.parts(), [&](index_t part, int) {
    const index_t first = part * rows;
    moments.add(part, y.data() + first * y.stride(0), std::min(rows, y.extent(0) - first), y.stride(0));
  });
}

/// y = x w + bias for 16-bit elements, or with `add` y += x w + bias. x: M x K and y: M x N, contiguous rows;
/// w: K x N, contiguous rows or contiguous columns; bias: N elements or nullptr. Sums are in float; each
/// result is rounded once. `moments`, unless nullptr, receives the column moments of the rounded y.
///
/// multiply(x, w, bias, y) computes blocks of rows in float. It must add its result to its y if `add` is set,
/// and overwrite its y otherwise.
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

/// Converts x and dy (16-bit, contiguous rows) to float in blocks of the same rows, and calls
/// product(x_block, dy_block, first) for each pair of blocks, in order. `first` is true in the first call
/// only. If there are no rows, product is called once with empty blocks.
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
