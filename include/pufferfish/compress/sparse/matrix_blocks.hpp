// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: cuts tensors into small rectangles of their storage, for codecs that code each rectangle by
/// itself.

#include <algorithm>
#include <cstddef>
#include <vector>

#include <pufferfish/compress/codec.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A rectangle of rows x columns values of a tensor. Counted row by row, value i of the rectangle is stored
/// at position `place(i)` of all coded values.
struct matrix_block {
  std::size_t tensor = 0;
  index_t first = 0;   ///< number of its first value, among all coded values
  index_t stride = 0;  ///< elements from the first value of a row to that of the next row
  index_t rows = 0, columns = 0;

  /// Number of values.
  index_t size() const { return rows * columns; }
  /// Position of value i among all coded values.
  index_t place(index_t i) const { return first + i / columns * stride + i % columns; }
};

/// Length of a row of a tensor's storage: the extent of its innermost axis (outputs of a matrix, of a
/// kernel). A vector, and a part of a tensor, is one row.
inline index_t storage_columns(const coded_tensor& tensor) {
  const logical_layout& layout = tensor.layout;
  if (layout.dims < 2 || tensor.size != layout.size()) return tensor.size;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(layout.dims); ++axis) {
    if (layout.strides[axis] == 1 && layout.shape[axis] > 1) return layout.shape[axis];
  }
  return 1;
}

/// Cuts tensors into blocks of side x side values, tensor by tensor and row by row; blocks at lower and right
/// edges may be smaller. If a matrix has fewer than `side` rows or columns, its blocks are longer in the
/// other direction, up to side^2 values, so that a thin factor is not cut into many small blocks. A
/// vector is cut into runs of side^2 values.
inline std::vector<matrix_block> matrix_blocks(const std::vector<coded_tensor>& tensors, index_t side) {
  std::vector<matrix_block> blocks;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const index_t columns = storage_columns(tensors[t]), rows = tensors[t].size / columns;
    index_t width = std::min(columns, side), height = std::min(rows, side);
    if (width < side) height = std::min(rows, side * side / width);
    if (height < side) width = std::min(columns, side * side / height);
    for (index_t row = 0; row < rows; row += height) {
      for (index_t column = 0; column < columns; column += width) {
        blocks.push_back({t, tensors[t].offset + row * columns + column, columns,
                          std::min(height, rows - row), std::min(width, columns - column)});
      }
    }
  }
  return blocks;
}

/// Two levels that replace many magnitudes: `high` replaces those from `least_high` on, `low` the others.
template <class T>
struct magnitude_levels {
  T low = 0, high = 0, least_high = 0;
};

/// Finds the two levels with the least sum of squared errors. All cuts of the magnitudes, which are in
/// ascending order, into a lower and an upper group are tried. A level is its group's mean, summed in double
/// and rounded to T. Of equal sums the lower cut is taken. If all magnitudes are equal, both levels are their
/// mean, and all belong to `high`. There must be at least one magnitude.
template <class T>
magnitude_levels<T> best_levels(const std::vector<T>& ascending) {
  double all = 0.0, below = 0.0;
  for (const T x : ascending) all += static_cast<double>(x);
  const auto count = static_cast<double>(ascending.size());
  // The sum of squared errors is the sum of squares minus `gain`.
  double gain = all * all / count, lower_sum = 0.0;
  std::size_t cut = 0;
  for (std::size_t i = 1; i < ascending.size(); ++i) {
    below += static_cast<double>(ascending[i - 1]);
    if (ascending[i - 1] == ascending[i]) continue;
    const auto lower = static_cast<double>(i);
    const double here = below * below / lower + (all - below) * (all - below) / (count - lower);
    if (!(here > gain)) continue;
    gain = here;
    cut = i;
    lower_sum = below;
  }
  const auto lower = static_cast<double>(cut);
  const T high = static_cast<T>((all - lower_sum) / (count - lower));
  return {cut == 0 ? high : static_cast<T>(lower_sum / lower), high, ascending[cut]};
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
