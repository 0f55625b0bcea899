// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the product C += A^T B with every sum in double, for decompositions. Operands may have any
/// strides. They are converted while they are packed, so a float matrix is never copied to double as a whole.
///
/// This product does not use the panels of pack.hpp: both operands are packed into panels of one width, so
/// that one packed copy serves as both operands of a Gram matrix, and only the tiles of its lower triangle
/// are computed.

#include <algorithm>
#include <type_traits>
#include <utility>

#include <pufferfish/core/tensor.hpp>
#include <pufferfish/linalg/vector_loops.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Depth of one packed block, such that a panel of B and a slice of A fit into the L1 cache together.
inline constexpr index_t product_depth = 128;
/// Number of columns of A that are packed at once, such that the packed block fits into the L2 cache.
inline constexpr index_t product_rows = 512;

/// Packs `count` columns of `depth` rows, from the element `from` on, into one panel [depth][panel_width];
/// missing columns are zero.
template <class T>
void pack_panel(const T* from, index_t row_step, index_t column_step, index_t depth, index_t count,
                double* to) {
  if (count < panel_width) std::fill_n(to, panel_width * depth, 0.0);
  if (column_step == 1 && count == panel_width) {  // a constant count: the conversion is vectorized
    for (index_t p = 0; p < depth; ++p, from += row_step, to += panel_width) {
      for (index_t q = 0; q < panel_width; ++q) to[q] = static_cast<double>(from[q]);
    }
    return;
  }
  for (index_t q = 0; q < count; ++q) {
    for (index_t p = 0; p < depth; ++p) {
      to[p * panel_width + q] = static_cast<double>(from[p * row_step + q * column_step]);
    }
  }
}

/// A view of a matrix of float or double. The scalar type is a runtime value, so that the product is compiled
/// once. The viewed matrix must outlive the operand.
struct product_operand {
  /// A view of a matrix of float or double with any strides.
  template <class T>
  product_operand(const tensor_view<T, 2>& a)
      : data(a.data()), is_float(sizeof(T) == 4), extent(a.shape()), stride(a.strides()) {
    static_assert(std::is_same_v<const T, const float> || std::is_same_v<const T, const double>);
  }
  product_operand(const tensor<double, 2>& a) : product_operand(a.view()) {}

  /// Packs `count` columns from `column` on and `depth` rows from `row` on into panels of panel_width
  /// columns, one after another. `to` has room for whole panels.
  PUFFERFISH_NOINLINE void pack(index_t row, index_t depth, index_t column, index_t count, double* to) const {
    for (index_t end = column + count; column < end; column += panel_width, to += panel_width * depth) {
      const index_t offset = row * stride[0] + column * stride[1];
      const index_t present = std::min(panel_width, end - column);
      if (is_float) {
        pack_panel(static_cast<const float*>(data) + offset, stride[0], stride[1], depth, present, to);
      } else {
        pack_panel(static_cast<const double*>(data) + offset, stride[0], stride[1], depth, present, to);
      }
    }
  }

  /// The transposed matrix, as a view of the same memory.
  product_operand transposed() const {
    product_operand result = *this;
    std::swap(result.extent[0], result.extent[1]);
    std::swap(result.stride[0], result.stride[1]);
    return result;
  }

  /// A dense copy in double.
  PUFFERFISH_COLD tensor<double, 2> copy() const {
    tensor<double, 2> result(extent);
    double* to = result.data();
    for (index_t i = 0; i < extent[0]; ++i) {
      for (index_t j = 0; j < extent[1]; ++j) {
        const index_t at = i * stride[0] + j * stride[1];
        *to++ = is_float ? static_cast<double>(static_cast<const float*>(data)[at])
                         : static_cast<const double*>(data)[at];
      }
    }
    return result;
  }

  const void* data;
  bool is_float;
  extents<2> extent;
  extents<2> stride;
};

/// Whether two operands view the same elements.
inline bool operator==(const product_operand& a, const product_operand& b) {
  return a.data == b.data && a.extent == b.extent && a.stride == b.stride;
}

/// Adds the product of a panel of A and a panel of B to a tile at the edge of C, which has only `rows` x
/// `columns` elements. `step`: row stride of c.
PUFFERFISH_NOINLINE inline void multiply_edge_tile(index_t depth, const double* a, const double* b, double* c,
                                                   index_t step, index_t rows, index_t columns) {
  alignas(memory_alignment) double tile[tile_rows * panel_width] = {};
  multiply_tile(depth, a, b, tile, panel_width);
  for (index_t i = 0; i < rows; ++i) {
    for (index_t j = 0; j < columns; ++j) c[i * step + j] += tile[i * panel_width + j];
  }
}

/// Part of C that is computed. `lower`: the lower triangle; some elements above the diagonal are written as
/// well, with unspecified values.
enum class product_part { full, lower };

/// c += a^T b. a: [depth x M], b: [depth x N], float or double, any strides; c: [M x N] with contiguous rows,
/// not aliasing a or b. Shapes that do not fit fail an assertion. The order of additions depends only on the
/// shapes. Allocates the packed blocks on each call; runs in the calling thread.
PUFFERFISH_NOINLINE inline void add_product_tn(const product_operand& a, const product_operand& b,
                                               const tensor_view<double, 2>& c,
                                               product_part part = product_part::full) {
  const index_t depth = a.extent[0];
  const index_t rows = a.extent[1];
  const index_t columns = b.extent[1];
  PUFFERFISH_ASSERT(b.extent[0] == depth && c.extent(0) == rows && c.extent(1) == columns,
                    "shapes do not fit");
  PUFFERFISH_ASSERT(columns <= 1 || c.stride(1) == 1, "rows of the result must be contiguous");
  const auto panels = [](index_t count) { return (count + panel_width - 1) / panel_width * panel_width; };
  const index_t block_depth = std::min(depth, product_depth);
  // For a Gram matrix, one packed copy serves as both operands.
  const bool one_block = rows <= product_rows;
  const bool same = one_block && a == b;
  aligned_buffer<double> packed_a(panels(std::min(rows, product_rows)) * block_depth, uninitialized);
  // Unless a second block of A needs B again, memory for a single panel of B is enough.
  aligned_buffer<double> packed_b(
      same ? 0 : panels(one_block ? std::min(columns, panel_width) : columns) * block_depth, uninitialized);
  for (index_t p0 = 0; p0 < depth; p0 += product_depth) {
    const index_t deep = std::min(product_depth, depth - p0);
    for (index_t i0 = 0; i0 < rows; i0 += product_rows) {
      const index_t tall = std::min(product_rows, rows - i0);
      a.pack(p0, deep, i0, tall, packed_a.data());
      for (index_t j = 0; j < columns; j += panel_width) {
        const index_t wide = std::min(panel_width, columns - j);
        double* right = same ? packed_a.data() + j * deep : packed_b.data() + (one_block ? 0 : j * deep);
        if (i0 == 0 && !same) b.pack(p0, deep, j, wide, right);
        for (index_t i = 0; i < tall; i += tile_rows) {
          if (part == product_part::lower && i0 + i + tile_rows <= j) continue;
          const index_t within = i % panel_width;
          const double* left = packed_a.data() + (i - within) * deep + within;
          double* to = c.data() + (i0 + i) * c.stride(0) + j;
          const index_t high = std::min(tile_rows, tall - i);
          if (high == tile_rows && wide == panel_width) {
            multiply_tile(deep, left, right, to, c.stride(0));
          } else {
            multiply_edge_tile(deep, left, right, to, c.stride(0), high, wide);
          }
        }
      }
    }
  }
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
