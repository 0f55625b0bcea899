// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: products of rows of bfloat16 by kernels that multiply pairs of elements (bf16_pair in
/// linalg/gemm/micro_kernels.hpp). An instruction of these kernels computes twice as many products as one of
/// the float kernels. Rows of activations are read in place, as pairs of adjacent elements. The weight is
/// packed into panels whose elements are pairs of vertically adjacent elements of the weight. Sums are in
/// float; each result is rounded once.

#include <algorithm>

#include <pufferfish/ops/linear/narrow_product.hpp>
#include <pufferfish/ops/linear/row_product.hpp>
#include <pufferfish/ops/linear/weight_splits.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

using pufferfish::detail::as_pairs;
using pufferfish::detail::bf16_pair;
using pufferfish::detail::has_pairs;
using pufferfish::detail::pair_up_rows;

/// Whether products of rows of T are computed in pairs: the machine has the kernels (has_pairs), and the
/// depth is even, so that no pair contains elements of two rows.
template <class T>
bool multiplies_pairs(index_t depth) {
  return depth > 0 && depth % 2 == 0 && has_pairs<T>();
}

/// Interleaves adjacent rows of w (dense, `rows` x `columns` elements, an even number of rows) as
/// pair_up_rows does, in parallel. `to`: [rows / 2][columns] pairs.
template <class T>
void pair_up_matrix(context<device::cpu>& ctx, const T* w, index_t rows, index_t columns, bf16_pair* to) {
  for_row_chunks(ctx, rows / 2, columns, [&](index_t begin, index_t end) {
    pair_up_rows(w + 2 * begin * columns, columns, 2 * (end - begin), columns, to + begin * columns, columns);
  });
}

/// y = sums + bias, or with `add` y += sums + bias; each result is computed in float and rounded once. sums:
/// `rows` x `columns`, dense; bias: `columns` elements or nullptr; y: contiguous rows, row stride `y_stride`.
/// Runs in the calling thread.
template <class T>
void round_rows(const float* sums, index_t rows, index_t columns, const float* bias, bool add, T* y,
                index_t y_stride) {
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), passes, round_sums<T>);
  if (bias == nullptr && y_stride == columns) return kernel(sums, bias, add, y, rows * columns);
  for (index_t row = 0; row < rows; ++row) {
    kernel(sums + row * columns, bias, add, y + row * y_stride, columns);
  }
}

/// y = x w + bias for bfloat16, or with `add` y += x w + bias. Shapes are those of linear_forward; w may be a
/// transposed view; multiplies_pairs() must be true for the depth. `moments`, unless nullptr, receives the
/// column moments of the rounded y. Tasks depend on shapes alone, so results do not depend on the number of
/// threads.
template <class T>
void pair_rows(context<device::cpu>& ctx, const tensor_view<const T, 2>& x, const tensor_view<const T, 2>& w,
               const T* bias, const tensor_view<T, 2>& y, moment_parts<T>* moments, bool add) {
  const index_t rows = y.extent(0), columns = y.extent(1);
  const panel_shape<bf16_pair> shape(columns);
  row_cut cut(rows, w.extent(0) / 2, columns, shape);
  const index_t panels = shape.right_panels(columns);
  if (moments != nullptr) {
    cut.groups = 1;  // one task computes whole rows, since moments are collected by rows
    cut.tile = std::min(cut.tile, pufferfish::detail::cached_rows<float>(columns));
    cut.tiles = (rows + cut.tile - 1) / cut.tile;
    moments->start(cut.tiles, columns);
  } else if (columns > 0) {  // the sums of a task stay in the second-level cache
    const index_t cached =
        std::max<index_t>(1, pufferfish::detail::cached_elements<float> / (cut.tile * shape.width()));
    cut.groups = std::clamp((panels + cached - 1) / cached, cut.groups, panels);
  }
  if (y.empty()) return;
  scratch_frame frame(ctx.scratch());
  const float* const wide_bias = widened(ctx, frame, bias, columns);
  const auto right = packed_b<bf16_pair>::pack(ctx, frame, shape, w);
  const index_t sums_size =
      std::min(cut.tile, rows) * ((panels + cut.groups - 1) / cut.groups) * shape.width();
  float* const storage = frame.take<float>(sums_size * ctx.threads());
  for_row_tiles(ctx, cut, rows, right.panels(),
                [&](index_t begin, index_t count, index_t first, index_t last, int worker, index_t task) {
                  const index_t column = right.first_column(first), width = right.first_column(last) - column;
                  float* const sums = storage + worker * sums_size;
                  pufferfish::detail::multiply_rows(right, as_pairs(x.slice(0, begin, count)), first, last,
                                                    {sums, {count, width}}, false);
                  T* const result = y.data() + begin * y.stride(0);
                  round_rows(sums, count, width, wide_bias == nullptr ? nullptr : wide_bias + column, add,
                             result + column, y.stride(0));
                  if (moments != nullptr) moments->add(task, result, count, y.stride(0));
                });
}

/// dw = x^T dy for bfloat16, or with `accumulate` dw += x^T dy. x: M x K and dy: M x N, contiguous rows; dw:
/// K x N, float, dense, not empty. has_pairs() must be true. A task interleaves a tile of at most 256 rows
/// of x and of dy at a time into pairs, and prefetches the next tile. The rows are split into parts
/// (weight_splits), whose sums are added in order. If there are few parts, the columns of dw are also split
/// into groups, for about 16 tasks in all.
template <class T>
void pair_weight_gradient(context<device::cpu>& ctx, const tensor_view<const T, 2>& x,
                          const tensor_view<const T, 2>& dy, const tensor_view<float, 2>& dw,
                          bool accumulate) {
  constexpr index_t tile = 256, tasks = 16;
  const panel_kernels<bf16_pair> kernels(dy.extent(1));
  const index_t rows = x.extent(0), in = x.extent(1), out = dy.extent(1), size = in * out;
  const index_t splits = weight_splits<float>(rows, size), panels = kernels.right_panels(out);
  const index_t groups = std::clamp<index_t>(tasks / splits, 1, panels);
  const index_t left_size = tile / 2 * in, right_size = tile / 2 * kernels.width();
  scratch_frame frame(ctx.scratch());
  float* const partials = frame.take<float>(size * (splits - 1));
  auto* const storage = frame.take<bf16_pair>((left_size + right_size) * ctx.threads());
  ctx.parallel_for(splits * groups, [&](index_t task, int worker) {
    const index_t split = task % splits, group = task / splits;
    const index_t begin = rows * split / splits, end = rows * (split + 1) / splits;
    const index_t first_column = panels * group / groups * kernels.width(),
                  last_column = std::min(out, panels * (group + 1) / groups * kernels.width());
    float* const sum = split == 0 ? dw.data() : partials + (split - 1) * size;
    bool add = split == 0 && accumulate;
    for (index_t i = 0; i < in && begin == end && !add; ++i) {
      std::fill(sum + i * out + first_column, sum + i * out + last_column, 0.0F);
    }
    bf16_pair* const left = storage + worker * (left_size + right_size);
    bf16_pair* const right = left + left_size;
    for (index_t first = begin; first < end; first += tile, add = true) {
      const index_t count = std::min(tile, end - first), next = first + count,
                    soon = std::min(tile, end - next);
      pufferfish::detail::prefetch_block(x.data() + next * x.stride(0), x.stride(0), soon, in);
      pufferfish::detail::prefetch_block(dy.data() + next * dy.stride(0) + first_column, dy.stride(0), soon,
                                         last_column - first_column);
      pair_up_rows(x.data() + first * x.stride(0), x.stride(0), count, in, left, in);
      for (index_t column = first_column; column < last_column; column += kernels.width()) {
        const index_t columns = std::min(kernels.width(), last_column - column);
        kernels.copy_right(dy.slice(0, first, count), column, right);
        kernels.multiply_rows(left, 1, in, in, right, kernels.width(), (count + 1) / 2, sum + column, out,
                              columns, add);
      }
    }
  });
  add_in_order(ctx, partials, splits - 1, dw.data(), size);
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
