// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// c = a b for many rows of activations and a weight. The left operand is read in place: a tile of its rows
/// stays in the second-level cache while all panels of the right operand are read.
///
/// \code
/// ops::row_product<float>(ctx, x, w, y, false, bias.data());  // y = x w + b
/// ops::row_product<float>(ctx, dy, transpose(w), dx, true);   // dx += dy w^T, where w is a view
/// \endcode

#include <pufferfish/core/message.hpp>
#include <pufferfish/linalg/kernel_report.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/linear/output_epilogue.hpp>
#include <pufferfish/ops/linear/wide_product.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace detail {

/// How a row_product is cut into tasks. A task multiplies a tile of rows by a group of panels. The cut
/// depends on shapes alone, so that results do not depend on the number of threads.
struct row_cut {
  index_t tile;           ///< number of rows of a tile, few enough for the second-level cache
  index_t tiles, groups;  ///< number of tiles of rows, and of groups of panels

  /// The cut for a left operand of rows x depth elements and a right operand of depth x columns elements in
  /// panels of `shape`. There are several groups only if there are at most 8 tiles.
  /// Tiles of more than 96 rows are used only if there are at least 16 of them, or if the depth is shallow.
  template <class T>
  row_cut(index_t rows, index_t depth, index_t columns, const panel_shape<T>& shape)
      : tile(std::min(
            pufferfish::detail::row_tile<T>(depth, columns),
            depth < pufferfish::detail::shallow_depth ? 4096 : std::max<index_t>(96, rows / 16 / 24 * 24))),
        tiles((rows + tile - 1) / tile),
        groups(std::clamp<index_t>(16 / std::max<index_t>(1, tiles), 1,
                                   std::max<index_t>(1, shape.right_panels(columns)))) {}
};

/// Calls run(begin, count, first, last, worker, task) for each task of a cut: rows begin .. begin + count - 1
/// of `rows` rows, panels first .. last - 1 of `panels`.
template <class Run>
void for_row_tiles(context<device::cpu>& ctx, const row_cut& cut, index_t rows, index_t panels, Run&& run) {
  ctx.parallel_for(cut.tiles * cut.groups, [&](index_t task, int worker) {
    const index_t begin = task / cut.groups * cut.tile, group = task % cut.groups;
    run(begin, std::min(cut.tile, rows - begin), panels * group / cut.groups,
        panels * (group + 1) / cut.groups, worker, task);
  });
}

/// Reports that a product of matrices of extents a and b uses the named algorithm, if reports are enabled
/// (linalg/kernel_report.hpp).
template <class T>
void report_product(const char* algorithm, const extents<2>& a, const extents<2>& b) {
  pufferfish::detail::report_kernel<T>("product", algorithm, [&] {
    return pufferfish::detail::message({a, " times ", b});
  });
}

/// y = x w + bias, or with `add` y += x w + bias, with an epilogue: row_product with shapes that must fit. y
/// is dense if the epilogue changes it.
template <class T>
void multiply_rows(context<device::cpu>& ctx, const tensor_view<const T, 2>& x,
                   const tensor_view<const T, 2>& w, const T* bias, const tensor_view<T, 2>& y,
                   const output_epilogue<T>& epilogue = {}, bool add = false) {
  const index_t depth = w.extent(0), columns = w.extent(1), rows = y.extent(0);
  const panel_shape<T> shape(columns);
  row_cut cut(rows, depth, columns, shape);
  if (epilogue.moments != nullptr) {
    cut.groups = 1;  // one task computes whole rows, since moments are collected by rows
    epilogue.moments->start(cut.tiles, columns);
  }
  if (y.empty()) return;
  const bool packs = rows >= 96 && depth >= 32;
  const bool panels = packs || ctx.packed(w.data()) != nullptr;
  report_product<T>(panels ? "rows in place, weight in panels" : "rows in place", x.shape(), w.shape());
  scratch_frame frame(ctx.scratch());
  const auto right =
      packs ? packed_b<T>::pack(ctx, frame, shape, w) : packed_b<T>::prepare(ctx, frame, shape, w, rows);
  const output_finish<T> finish(y, bias, epilogue, !add && depth < pufferfish::detail::shallow_depth);
  for_row_tiles(ctx, cut, rows, right.panels(),
                [&](index_t begin, index_t count, index_t first, index_t last, int, index_t task) {
                  const index_t column = right.first_column(first), width = right.first_column(last) - column;
                  finish.compute(task, begin, count, column, width,
                                 [&](index_t row, index_t here, const tensor_view<T, 2>& result) {
                                   pufferfish::detail::multiply_rows(right, x.slice(0, row, here), first,
                                                                     last, result, add);
                                 });
                });
}

}  // namespace detail

/// c = a b + bias, or with `add` c += a b + bias. a: M x K, contiguous rows, any row stride; b: K x N, any
/// strides; bias: N elements or nullptr; c: M x N, contiguous rows, overlaps no operand. K = 0 is an empty
/// sum. Throws shape_error if the shapes do not fit.
///
/// The CPU packs b into panels, in scratch memory of about the size of b, if there are at least 96 rows and
/// the depth is at least 32. Otherwise b is used in place if its rows are contiguous whole vectors that are
/// close together or read few times (packed_b::prepare). If the context keeps packed forms of b, these are
/// used (context::packed). Sums are in T. A device computes the product as wide_product.
template <class T, class Device>
void row_product(context<Device>& ctx, const tensor_view<const T, 2>& a, const tensor_view<const T, 2>& b,
                 const tensor_view<T, 2>& c, bool add = false, const T* bias = nullptr) {
  pufferfish::detail::check_product(a, b, c);
  if (c.empty()) return;
  if constexpr (!is_cpu<Device>) {
    linear_ops<Device>::product(ctx, a, b, c, add, bias);
  } else {
    detail::multiply_rows<T>(ctx, a, b, bias, c, {}, add);
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, row_product);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
