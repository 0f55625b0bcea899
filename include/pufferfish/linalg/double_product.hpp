// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: C += A^T B with every sum in double, for the decompositions. Operands of any strides are
/// converted while they are packed, so a float matrix is never copied to double as a whole.

#include <algorithm>
#include <type_traits>
#include <utility>

#include <pufferfish/core/tensor.hpp>
#include <pufferfish/linalg/vector_loops.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Depth of one packed block: a panel of B and a slice of A stay in the first-level cache together.
inline constexpr index_t product_depth = 128;
/// Columns of A packed at once: the block stays in the second-level cache.
inline constexpr index_t product_rows = 512;

/// Packs `count` columns of `depth` rows from `source` as panels of `width` columns: panel by panel, row by
/// row; missing columns are zero.
template <class T>
void pack_columns(const T* source, index_t row_step, index_t column_step, index_t depth, index_t count,
                  index_t width, double* to) {
  for (index_t panel = 0; panel < count; panel += width, to += width * depth) {
    const index_t present = std::min(width, count - panel);
    const T* from = source + panel * column_step;
    if (present < width) std::fill_n(to, width * depth, 0.0);
    if (column_step == 1) {
      for (index_t p = 0; p < depth; ++p) {
        for (index_t q = 0; q < present; ++q) to[p * width + q] = static_cast<double>(from[p * row_step + q]);
      }
    } else {
      for (index_t q = 0; q < present; ++q) {
        for (index_t p = 0; p < depth; ++p) {
          to[p * width + q] = static_cast<double>(from[p * row_step + q * column_step]);
        }
      }
    }
  }
}

/// A matrix of float or double. Known at run time, so that the product is compiled once.
struct product_operand {
  template <class T>
  explicit product_operand(const tensor_view<const T, 2>& a)
      : data(a.data()), is_float(sizeof(T) == 4), extent(a.shape()), stride(a.strides()) {
    static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>);
  }

  void pack(index_t row, index_t depth, index_t column, index_t count, index_t width, double* to) const {
    const index_t offset = row * stride[0] + column * stride[1];
    if (is_float) {
      pack_columns(static_cast<const float*>(data) + offset, stride[0], stride[1], depth, count, width, to);
    } else {
      pack_columns(static_cast<const double*>(data) + offset, stride[0], stride[1], depth, count, width, to);
    }
  }

  /// Rows and columns swapped.
  product_operand transposed() const {
    product_operand result = *this;
    std::swap(result.extent[0], result.extent[1]);
    std::swap(result.stride[0], result.stride[1]);
    return result;
  }

  /// A dense copy.
  tensor<double, 2> copy() const {
    tensor<double, 2> result(extent);
    if (result.size() > 0) pack(0, extent[0], 0, extent[1], extent[1], result.data());
    return result;
  }

  const void* data;
  bool is_float;
  extents<2> extent;
  extents<2> stride;
};

/// A tile at the edge of C, of which only `rows` x `columns` exist.
inline void multiply_edge_tile(index_t depth, const double* a, const double* b, double* c, index_t step,
                               index_t rows, index_t columns) {
  alignas(memory_alignment) double tile[tile_rows * panel_width] = {};
  multiply_tile(depth, a, b, tile, panel_width);
  for (index_t i = 0; i < rows; ++i) {
    for (index_t j = 0; j < columns; ++j) c[i * step + j] += tile[i * panel_width + j];
  }
}

/// Which part of C is wanted. `lower` also writes some entries above the diagonal: they are unspecified.
enum class product_part { full, lower };

/// C += A^T B. a: [depth x M], b: [depth x N], float or double, any strides; c: [M x N] with rows of adjacent
/// elements, no alias of a or b. The order of additions depends on the shapes only.
inline void add_product(const product_operand& a, const product_operand& b, const tensor_view<double, 2>& c,
                        product_part part = product_part::full) {
  const index_t depth = a.extent[0];
  const index_t rows = a.extent[1];
  const index_t columns = b.extent[1];
  PUFFERFISH_ASSERT(b.extent[0] == depth && c.extent(0) == rows && c.extent(1) == columns,
                    "shapes do not fit");
  PUFFERFISH_ASSERT(columns <= 1 || c.stride(1) == 1, "rows of the result must be contiguous");
  const auto round_up = [](index_t value, index_t unit) { return (value + unit - 1) / unit * unit; };
  const index_t block_depth = std::min(depth, product_depth);
  aligned_buffer<double> packed_a(round_up(std::min(rows, product_rows), tile_rows) * block_depth);
  // One panel of B is enough if no second block of A will ask for it again.
  const bool one_block = rows <= product_rows;
  aligned_buffer<double> packed_b(
      round_up(one_block ? std::min(columns, panel_width) : columns, panel_width) * block_depth);
  for (index_t p0 = 0; p0 < depth; p0 += product_depth) {
    const index_t deep = std::min(product_depth, depth - p0);
    for (index_t i0 = 0; i0 < rows; i0 += product_rows) {
      const index_t tall = std::min(product_rows, rows - i0);
      a.pack(p0, deep, i0, tall, tile_rows, packed_a.data());
      for (index_t j = 0; j < columns; j += panel_width) {
        const index_t wide = std::min(panel_width, columns - j);
        double* right = packed_b.data() + (one_block ? 0 : j * deep);
        if (i0 == 0) b.pack(p0, deep, j, wide, panel_width, right);
        for (index_t i = 0; i < tall; i += tile_rows) {
          if (part == product_part::lower && i0 + i + tile_rows <= j) continue;
          const double* left = packed_a.data() + i * deep;
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

/// The same for views.
template <class A, class B>
void add_product_tn(const tensor_view<const A, 2>& a, const tensor_view<const B, 2>& b,
                    const tensor_view<double, 2>& c, product_part part = product_part::full) {
  add_product(product_operand(a), product_operand(b), c, part);
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
