// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: packing of the operands of matrix products, for float, double and pairs of bfloat16 (bf16_pair).
///
/// The right operand is packed into panels that are a few vectors wide, each stored as [K][width]: row k of a
/// panel holds elements k of `width` consecutive columns. The left operand is packed into panels of a few
/// rows, each stored as [K][rows]: row k of a panel holds elements k of `rows` consecutive rows. Columns and
/// rows beyond the end of an operand are zeros. A micro-kernel reads both panels from beginning to end.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <pufferfish/core/context.hpp>
#include <pufferfish/linalg/gemm/micro_kernels.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

#define PUFFERFISH_KERNELS packing
#define PUFFERFISH_KERNEL_FILE <pufferfish/linalg/gemm/pack.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// The kernel that packs one panel: kernel(from, step, lane_step, depth, count, to, width) computes to[k][j]
/// = from[k step + j lane_step] for k < depth, j < count, and 0 for count <= j < width, in rows of `width`
/// elements. `width` is a multiple of 16 bytes.
template <class T>
auto panel_copier(isa target = widest_isa()) {
  return PUFFERFISH_KERNEL(target, packing, copy_panel<T>);
}

/// The kernel kernel(first, second, to, count) with to[i] = {first[i], second[i]} for bfloat16 elements;
/// second = nullptr stands for zeros.
template <class T>
auto interleave_kernel() {
  return PUFFERFISH_KERNEL(widest_isa(), packing, interleave<T>);
}

/// Interleaves each two adjacent rows to a row of pairs, in the calling thread: to[i][j] = {from[2 i][j],
/// from[2 i + 1][j]}. If the number of rows is odd, a row of zeros is added. `to`: (rows + 1) / 2 rows of
/// `columns` pairs, row stride `to_stride`. Strides are in elements.
template <class T>
void pair_up_rows(const T* from, index_t row_stride, index_t rows, index_t columns, bf16_pair* to,
                  index_t to_stride) {
  const auto kernel = interleave_kernel<T>();
  for (index_t row = 0; row < rows; row += 2, from += 2 * row_stride, to += to_stride) {
    kernel(from, row + 1 < rows ? from + row_stride : nullptr, to, columns);
  }
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

/// The sizes of panels for an instruction set, and the packing of one panel. The object is small and
/// immutable, so any number of threads may use it. No member checks its arguments.
template <class T>
class panel_shape {
 public:
  /// The widest panels. `target`: an instruction set for which isa_available() is true. For pairs of
  /// bfloat16, has_pairs() must be true, too.
  explicit panel_shape(isa target = widest_isa())
      : table_(&kernels_for<T>(target)),
        copy_(panel_copier<T>(target)),
        vectors_(table_->widest_adjacent),
        rows_(table_->adjacent[vectors_ - 1].by_rows[0].rows) {}
  /// Panels for a right operand with `columns` columns: as few panels as possible, with widths as equal as
  /// possible.
  explicit panel_shape(index_t columns, isa target = widest_isa()) : panel_shape(target) {
    const index_t all = std::max<index_t>(1, (columns + lanes() - 1) / lanes());
    const index_t panels = (all + vectors_ - 1) / vectors_;
    vectors_ = (all + panels - 1) / panels;
    rows_ = table_->adjacent[vectors_ - 1].by_rows[0].rows;
  }

  /// Number of columns of a panel of the right operand.
  index_t width() const { return vectors_ * table_->lanes; }
  /// Number of rows of a panel of the left operand.
  index_t rows() const { return rows_; }
  /// Number of elements of a vector.
  index_t lanes() const { return table_->lanes; }
  /// The micro-kernels.
  const kernel_table<T>& kernels() const { return *table_; }

  /// Number of panels of a right operand with `columns` columns.
  index_t right_panels(index_t columns) const { return (columns + width() - 1) / width(); }
  /// Number of panels of a left operand with `rows` rows.
  index_t left_panels(index_t rows) const { return (rows + rows_ - 1) / rows_; }

  /// Packs columns first .. first + width() - 1 of b (K x N, any strides) into the panel `to`, [K][width()];
  /// zeros after the last column of b.
  void copy_right(const tensor_view<const T, 2>& b, index_t first, T* to) const {
    if (b.extent(0) == 0) return;
    copy_(b.data() + first * b.stride(1), b.stride(0), b.stride(1), b.extent(0),
          std::min(width(), b.extent(1) - first), to, width());
  }
  /// For panels of pairs: packs a matrix of bfloat16 into [(K + 1) / 2][width()], where a pair holds two
  /// vertically adjacent elements. If K is odd, the last pairs hold zeros. b: dense rows, or dense columns
  /// with an even K.
  void copy_right(const tensor_view<const bfloat16, 2>& b, index_t first, T* to) const {
    if (b.stride(1) != 1) return copy_right(transpose(as_pairs(transpose(b))), first, to);
    const index_t columns = std::min(width(), b.extent(1) - first), depth = (b.extent(0) + 1) / 2;
    pair_up_rows(b.data() + first, b.stride(0), b.extent(0), columns, to, width());
    for (index_t k = 0; k < depth && columns < width(); ++k) {
      std::fill(to + k * width() + columns, to + (k + 1) * width(), T{});
    }
  }
  /// Packs rows first .. first + rows() - 1 of a (M x K, any strides) into the panel `to`, [K][rows()]; zeros
  /// after the last row of a.
  void copy_left(const tensor_view<const T, 2>& a, index_t first, T* to) const {
    copy_(a.data() + first * a.stride(0), a.stride(1), a.stride(0), a.extent(1),
          std::min(rows_, a.extent(0) - first), to, rows_);
  }

 private:
  const kernel_table<T>* table_;
  void (*copy_)(const T*, index_t, index_t, index_t, index_t, T*, index_t);
  index_t vectors_, rows_;
};

/// The right operand of any number of products, in panels: a K x N matrix that is used in place, or a packed
/// copy of it. The object is a view: it refers to the caller's matrix or to the caller's storage, and owns
/// neither. It is built once, and may be used by several threads at the same time and kept between calls of
/// an operation, as long as that memory exists and is unchanged.
///
/// \code
/// const panel_shape<float> shape(weight.extent(1));
/// const auto right = packed_b<float>::pack(ctx, frame, shape, weight);
/// multiply_rows<float>(right, x, y, false);  // loops.hpp: y = x weight
/// \endcode
template <class T>
struct packed_b {
  panel_shape<T> shape;
  const T* data;           ///< first element of the first panel
  index_t depth, columns;  ///< K (for pairs, the number of pairs) and N
  index_t row_step;        ///< elements from row to row of a panel
  index_t panel_step;      ///< elements from panel to panel

  /// Uses b (contiguous rows of whole vectors) in place.
  static packed_b in_place(const panel_shape<T>& shape, const tensor_view<const T, 2>& b) {
    return {shape, b.data(), b.extent(0), b.extent(1), b.stride(0), shape.width()};
  }
  /// Refers to storage_size() elements that hold, or will hold, the packed panels of a depth x columns
  /// matrix.
  static packed_b packed(const panel_shape<T>& shape, index_t depth, index_t columns, const T* storage) {
    return {shape, storage, depth, columns, shape.width(), shape.width() * depth};
  }
  /// Number of elements of the packed panels of a depth x columns matrix.
  static index_t storage_size(const panel_shape<T>& shape, index_t depth, index_t columns) {
    return shape.right_panels(columns) * shape.width() * depth;
  }
  /// Packs b (any strides; for pairs, a matrix of bfloat16 as in panel_shape::copy_right), in parallel over
  /// the panels, into memory of `frame`. If the context keeps packed forms of b (context::packed), returns
  /// the kept one.
  template <class Source>
  static packed_b pack(context<device::cpu>& ctx, scratch_frame& frame, const panel_shape<T>& shape,
                       const tensor_view<const Source, 2>& b) {
    constexpr index_t pair = std::is_same_v<T, Source> ? 1 : 2;  // elements of b in an element of a panel
    packed_b result = packed(shape, (b.extent(0) + pair - 1) / pair, b.extent(1), nullptr);
    result.data = ctx.packed<T>(
        frame, {b.data(), "product panels", {b.extent(0), b.extent(1), b.stride(0), b.stride(1)}},
        storage_size(shape, result.depth, result.columns), [&](T* to) {
          ctx.parallel_for(result.panels(), [&](index_t panel, int) {
            shape.copy_right(b, result.first_column(panel), to + panel * result.panel_step);
          });
        });
    return result;
  }

  /// Prepares b (K x N, any strides) for products with about `rows` rows: in place if the rows of b are
  /// contiguous whole vectors and close together or read few times, else packed into `storage` by the calling
  /// thread. (Rows with a large stride map to few cache sets.)
  static packed_b prepare(const panel_shape<T>& shape, const tensor_view<const T, 2>& b, T* storage,
                          index_t rows) {
    constexpr index_t close = 512 / static_cast<index_t>(sizeof(T)), few_rows = 32;
    if (b.stride(1) == 1 && b.extent(1) % shape.lanes() == 0 && (b.stride(0) <= close || rows <= few_rows)) {
      return in_place(shape, b);
    }
    const packed_b result = packed(shape, b.extent(0), b.extent(1), storage);
    for (index_t panel = 0; panel < result.panels(); ++panel) {
      shape.copy_right(b, result.first_column(panel), storage + panel * result.panel_step);
    }
    return result;
  }

  /// Prepares b as above, packed into memory of `frame`, or packed by pack() if the context keeps packed
  /// forms of b.
  static packed_b prepare(context<device::cpu>& ctx, scratch_frame& frame, const panel_shape<T>& shape,
                          const tensor_view<const T, 2>& b, index_t rows) {
    if (ctx.packed(b.data()) != nullptr) return pack(ctx, frame, shape, b);
    return prepare(shape, b, frame.take<T>(storage_size(shape, b.extent(0), b.extent(1))), rows);
  }

  /// Rows begin .. begin + count - 1 of this operand.
  packed_b rows(index_t begin, index_t count) const {
    return {shape, data + begin * row_step, count, columns, row_step, panel_step};
  }
  /// Number of panels.
  index_t panels() const { return shape.right_panels(columns); }
  /// First column of a panel; number of columns if `panel` is the number of panels.
  index_t first_column(index_t panel) const { return std::min(columns, panel * shape.width()); }
  /// Address of row k of a panel.
  const T* at(index_t panel, index_t k) const { return data + panel * panel_step + k * row_step; }
  /// Whether the rows of a panel follow each other without gaps.
  bool dense() const { return row_step == shape.width(); }
};

/// The depth of a product, cut into the fewest blocks of at most `most` steps. All blocks have the same size,
/// except that the last one may be smaller.
class depth_blocks {
 public:
  explicit depth_blocks(index_t depth, index_t most = 1536)
      : depth_(depth),
        count_((depth + most - 1) / most),
        step_(count_ == 0 ? 0 : (depth + count_ - 1) / count_) {}
  /// Number of blocks; 0 if the depth is 0.
  index_t count() const { return count_; }
  /// Number of steps of the depth in each block but the last.
  index_t step() const { return step_; }
  /// First step of a block.
  index_t begin(index_t block) const { return block * step_; }
  /// Number of steps in a block.
  index_t size(index_t block) const { return std::min(step_, depth_ - begin(block)); }

 private:
  index_t depth_, count_, step_;
};

/// The left operand of a product in panels, by blocks of the depth: [block][panel][step][row of the panel].
/// A view of the caller's storage, like packed_b.
template <class T>
struct packed_a {
  panel_shape<T> shape;
  const T* data;
  index_t rows;
  depth_blocks blocks;

  /// Number of elements of storage for a left operand of rows x depth elements.
  static index_t storage_size(const panel_shape<T>& shape, index_t rows, index_t depth) {
    return shape.left_panels(rows) * shape.rows() * depth;
  }
  /// Packs the panels first .. last - 1 of `a` (any strides) into `storage` (storage_size() elements).
  void pack(const tensor_view<const T, 2>& a, index_t first, index_t last, T* storage) const {
    for (index_t block = 0; block < blocks.count(); ++block) {
      const auto part = a.slice(1, blocks.begin(block), blocks.size(block));
      for (index_t panel = first; panel < last; ++panel) {
        shape.copy_left(part, panel * shape.rows(), storage + (at(block, panel) - data));
      }
    }
  }
  /// Address of a panel's steps in one block of the depth.
  const T* at(index_t block, index_t panel) const {
    return data + shape.rows() * (shape.left_panels(rows) * blocks.begin(block) + panel * blocks.size(block));
  }
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
