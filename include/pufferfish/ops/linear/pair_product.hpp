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

using pufferfish::detail::bf16_pair;
using pufferfish::detail::has_pairs;

/// Whether products of rows of T are computed in pairs: the machine has the kernels (has_pairs), and the
/// depth is even, so that no pair contains elements of two rows.
template <class T>
bool multiplies_pairs(index_t depth) {
  return depth > 0 && depth % 2 == 0 && has_pairs<T>();
}

/// View of the elements of x as pairs along the last axis. The extent of the last axis and the strides of the
/// other axes must be even, and the last axis contiguous (not checked).
template <class T, std::size_t N>
tensor_view<const bf16_pair, N> as_pairs(const tensor_view<const T, N>& x) {
  extents<N> shape = x.shape(), strides{};
  shape[N - 1] /= 2;
  for (std::size_t i = 0; i + 1 < N; ++i) strides[i] = x.stride(i) / 2;
  strides[N - 1] = 1;
  return {reinterpret_cast<const bf16_pair*>(x.data()), shape, strides};
}

/// Interleaves each two adjacent rows to a row of pairs, in the calling thread: to[i][j] = {from[2 i][j],
/// from[2 i + 1][j]}. If the number of rows is odd, a row of zeros is added. `to`: (rows + 1) / 2 rows of
/// `columns` pairs, row stride `to_stride`. Strides are in elements.
template <class T>
void pair_up_rows(const T* from, index_t row_stride, index_t rows, index_t columns, bf16_pair* to,
                  index_t to_stride) {
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), passes, interleave<T>);
  for (index_t row = 0; row < rows; row += 2, from += 2 * row_stride, to += to_stride) {
    kernel(from, row + 1 < rows ? from + row_stride : nullptr, to, columns);
  }
}

/// Interleaves adjacent rows of w (dense, `rows` x `columns` elements, an even number of rows) as
/// pair_up_rows does, in parallel. Returns the pairs, [rows / 2][columns], in memory of `frame`.
template <class T>
bf16_pair* paired_rows(context<device::cpu>& ctx, scratch_frame& frame, const T* w, index_t rows,
                       index_t columns) {
  auto* const pairs = frame.take<bf16_pair>(rows / 2 * columns);
  for_row_chunks(ctx, rows / 2, columns, [&](index_t begin, index_t end) {
    pair_up_rows(w + 2 * begin * columns, columns, 2 * (end - begin), columns, pairs + begin * columns,
                 columns);
  });
  return pairs;
}

/// y = sums + bias, or with `add` y += sums + bias; each result is computed in float and rounded once. sums:
/// `rows` x `columns`, dense; bias: `columns` elements or nullptr; y: contiguous rows, row stride `y_stride`.
/// Runs in the calling thread.
template <class T>
void round_rows(const float* sums, index_t rows, index_t columns, const float* bias, bool add, T* y,
                index_t y_stride) {
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), passes, round_sums<T>);
  for (index_t row = 0; row < rows; ++row) {
    kernel(sums + row * columns, bias, add, y + row * y_stride, columns);
  }
}

/// Packs columns first .. first + width() - 1 of w (K x N, contiguous rows or contiguous columns) into one
/// panel of pairs of vertically adjacent elements, [(K + 1) / 2][width()]; zeros after the last column and,
/// if K is odd, for the row after the last one. Contiguous columns must have an even K and an even stride.
template <class T>
void copy_pair_panel(const panel_kernels<bf16_pair>& kernels, const tensor_view<const T, 2>& w, index_t first,
                     bf16_pair* to) {
  if (w.stride(1) != 1) return kernels.copy_right(transpose(as_pairs(transpose(w))), first, to);
  const index_t width = kernels.width(), columns = std::min(width, w.extent(1) - first);
  pair_up_rows(w.data() + first, w.stride(0), w.extent(0), columns, to, width);
  for (index_t k = 0; 2 * k < w.extent(0) && columns < width; ++k) {
    std::fill(to + k * width + columns, to + (k + 1) * width, bf16_pair{});
  }
}

/// Right operand of products of pairs: a K x N matrix that has been packed into panels of pairs of vertically
/// adjacent elements, [panel][K / 2][width of a panel].
template <class T>
class pair_operand {
 public:
  /// Packs w (K x N, K even, contiguous rows or contiguous columns of an even stride) into memory of `frame`,
  /// in parallel. The frame must outlive this object.
  pair_operand(context<device::cpu>& ctx, scratch_frame& frame, const tensor_view<const T, 2>& w)
      : depth_(w.extent(0) / 2),
        columns_(w.extent(1)),
        panels_(kernels_.right_panels(columns_)),
        data_(frame.take<bf16_pair>(panels_ * panel_size())) {
    ctx.parallel_for(panels_, [&](index_t panel, int) {
      copy_pair_panel(kernels_, w, panel * kernels_.width(), data_ + panel * panel_size());
    });
  }

  /// Number of panels.
  index_t panels() const { return panels_; }
  /// First column of a panel; number of columns if `panel` is the number of panels.
  index_t first_column(index_t panel) const { return std::min(columns_, panel * kernels_.width()); }

  /// sums = a w for the columns of the panels first .. last - 1, in the calling thread. a: rows x K,
  /// contiguous rows, an even row stride; sums: rows x (number of these columns), dense, overwritten.
  void multiply(const tensor_view<const T, 2>& a, index_t first, index_t last, float* sums) const {
    const index_t begin = first_column(first);
    const row_tile<bf16_pair> tile(kernels_, as_pairs(a), {sums, {a.extent(0), first_column(last) - begin}},
                                   false);
    for (index_t panel = first; panel < last; ++panel) {
      tile.multiply(panel * kernels_.width() - begin, data_ + panel * panel_size(), panel == first,
                    panel + 1 == panels_);
    }
  }

 private:
  // Number of pairs in a panel.
  index_t panel_size() const { return depth_ * kernels_.width(); }

  panel_kernels<bf16_pair> kernels_;
  index_t depth_, columns_, panels_;
  bf16_pair* data_;
};

/// y = x w + bias for bfloat16, or with `add` y += x w + bias. Shapes are those of linear_forward; w may be a
/// transposed view; multiplies_pairs() must be true for the depth. `moments`, unless nullptr, receives the
/// column moments of the rounded y. Tasks depend on shapes alone, so results do not depend on the number of
/// threads.
template <class T>
void pair_rows(context<device::cpu>& ctx, const tensor_view<const T, 2>& x, const tensor_view<const T, 2>& w,
               const T* bias, const tensor_view<T, 2>& y, moment_parts<T>* moments, bool add) {
  const index_t rows = y.extent(0), columns = y.extent(1);
  row_cut cut(rows, w.extent(0) / 2, panel_kernels<bf16_pair>().right_panels(columns));
  if (moments != nullptr) {
    cut.groups = 1;  // one task computes whole rows, since moments are collected by rows
    moments->start(cut.tiles, columns);
  }
  if (y.empty()) return;
  scratch_frame frame(ctx.scratch());
  const float* const wide_bias = widened(ctx, frame, bias, columns);
  const pair_operand<T> operand(ctx, frame, w);
  float* const storage = frame.take<float>(cut.tile * columns * ctx.threads());
  ctx.parallel_for(cut.tiles * cut.groups, [&](index_t task, int worker) {
    const index_t begin = task / cut.groups * cut.tile, count = std::min(cut.tile, rows - begin);
    const index_t group = task % cut.groups, first = operand.panels() * group / cut.groups,
                  last = operand.panels() * (group + 1) / cut.groups;
    const index_t column = operand.first_column(first), width = operand.first_column(last) - column;
    float* const sums = storage + worker * cut.tile * columns;
    operand.multiply(x.slice(0, begin, count), first, last, sums);
    T* const result = y.data() + begin * y.stride(0);
    round_rows(sums, count, width, wide_bias == nullptr ? nullptr : wide_bias + column, add, result + column,
               y.stride(0));
    if (moments != nullptr) moments->add(task, result, count, y.stride(0));
  });
}

/// dw = x^T dy for bfloat16, or with `accumulate` dw += x^T dy. x: M x K and dy: M x N, contiguous rows; dw:
/// K x N, float, dense, not empty. has_pairs() must be true. A task interleaves a tile of at most 256 rows
/// of x and of dy at a time into pairs. The rows are split into parts (weight_splits), whose sums are added
/// in order. If there are few parts, the columns of dw are also split into groups, for about 16 tasks in all.
template <class T>
void pair_weight_gradient(context<device::cpu>& ctx, const tensor_view<const T, 2>& x,
                          const tensor_view<const T, 2>& dy, const tensor_view<float, 2>& dw,
                          bool accumulate) {
  constexpr index_t tile = 256, tasks = 16;
  const panel_kernels<bf16_pair> kernels;
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
      const index_t count = std::min(tile, end - first);
      pair_up_rows(x.data() + first * x.stride(0), x.stride(0), count, in, left, in);
      for (index_t column = first_column; column < last_column; column += kernels.width()) {
        const index_t columns = std::min(kernels.width(), last_column - column);
        pair_up_rows(dy.data() + first * dy.stride(0) + column, dy.stride(0), count, columns, right,
                     kernels.width());
        kernels.multiply_rows(left, 1, in, in, right, kernels.width(), (count + 1) / 2, sum + column, out,
                              columns, add);
      }
    }
  });
  add_in_order(ctx, partials, splits - 1, dw.data(), size);
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
