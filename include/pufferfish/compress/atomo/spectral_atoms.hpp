// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: views gradients as tall matrices, whose singular vectors are ATOMO's atoms.

#include <algorithm>
#include <vector>

#include <pufferfish/compress/codec.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The matrix A [rows x columns] of a tensor:
///     linear weights and 1 x 1 convolutions  the weight matrix; columns are its smaller side
///     other kernels                          2 kh kw columns; a row is a pair of neighbouring (out, in)
///     vectors, and parts of tensors          2 columns; a row is a pair of neighbouring elements
/// An odd plane or element is paired with zeros. Rows are in the order in which storage is read fastest; the
/// singular values and the atoms do not depend on the order.
class spectral_form {
 public:
  /// Finds the form of a tensor.
  explicit spectral_form(const coded_tensor& tensor) {
    const logical_layout& layout = tensor.layout;
    const bool whole = tensor.size == layout.size() && layout.dims >= 2;
    index_t taps = 1;
    for (index_t axis = 2; whole && axis < layout.dims; ++axis) taps *= shape(layout, axis);
    if (!whole) {
      planes_ = tensor.size;
      set_pairs({0}, 1, 0);
    } else if (taps == 1) {
      set_matrix(layout);
    } else {
      set_kernel(layout);
    }
  }

  /// Number of rows of A.
  index_t rows() const { return rows_; }
  /// Number of columns of A.
  index_t columns() const { return columns_; }
  /// Largest possible number of singular triplets.
  index_t atoms() const { return std::min(rows_, columns_); }

  /// block [columns x count] = rows first .. first + count - 1 of A, transposed. `from`: the stored tensor.
  /// Padding becomes 0.
  template <class T>
  void load(const T* from, index_t first, index_t count, T* block) const {
    for_each_run(first, count, [&](index_t column, index_t row, index_t length, index_t offset) {
      T* to = block + column * count + row - first;
      if (offset < 0) {
        std::fill_n(to, length, T(0));
      } else if (row_step_ == 1) {
        std::copy_n(from + offset, length, to);
      } else {
        for (index_t i = 0; i < length; ++i) to[i] = from[offset + i * row_step_];
      }
    });
  }

  /// The inverse of load: stores the elements of a block in the tensor, or adds or subtracts them. Elements
  /// that are padding are ignored. Calls for disjoint rows write disjoint elements.
  template <class T>
  void store(decode_as as, const T* block, index_t first, index_t count, T* to) const {
    switch (as) {
      case decode_as::values:
        return store_as<decode_as::values>(block, first, count, to);
      case decode_as::addition:
        return store_as<decode_as::addition>(block, first, count, to);
      case decode_as::subtraction:
        return store_as<decode_as::subtraction>(block, first, count, to);
    }
  }

 private:
  // Extent of an axis of a parameter.
  static index_t shape(const logical_layout& layout, index_t axis) {
    return layout.shape[static_cast<std::size_t>(axis)];
  }
  // Stride of an axis of a parameter in storage, in elements.
  static index_t stride(const logical_layout& layout, index_t axis) {
    return layout.strides[static_cast<std::size_t>(axis)];
  }

  // A linear layer or 1 x 1 convolution: the larger side of the matrix becomes the rows.
  void set_matrix(const logical_layout& layout) {
    const index_t tall = shape(layout, 0) >= shape(layout, 1) ? 0 : 1;
    rows_ = row_run_ = shape(layout, tall);
    columns_ = shape(layout, 1 - tall);
    row_step_ = stride(layout, tall);
    for (index_t c = 0; c < columns_; ++c) column_offsets_.push_back(c * stride(layout, 1 - tall));
  }

  // A kernel with taps: pairs of planes, as two strides if the number of inputs is even.
  void set_kernel(const logical_layout& layout) {
    const index_t out = shape(layout, 0), in = shape(layout, 1);
    std::vector<index_t> taps{0};
    for (index_t axis = 2; axis < layout.dims; ++axis) {
      std::vector<index_t> next;
      for (const index_t offset : taps) {
        for (index_t i = 0; i < shape(layout, axis); ++i) next.push_back(offset + i * stride(layout, axis));
      }
      taps = std::move(next);
    }
    if (in % 2 != 0) {
      planes_ = out * in;
      inputs_ = in;
      return set_pairs(std::move(taps), stride(layout, 0), stride(layout, 1));
    }
    // Row i out + o has the planes (o, 2 i) and (o, 2 i + 1).
    rows_ = out * in / 2;
    row_run_ = out;
    row_step_ = stride(layout, 0);
    run_step_ = 2 * stride(layout, 1);
    for (index_t parity = 0; parity < 2; ++parity) {
      for (const index_t offset : taps) column_offsets_.push_back(parity * stride(layout, 1) + offset);
    }
    columns_ = static_cast<index_t>(column_offsets_.size());
  }

  // Rows are pairs of planes in logical order. Two strides cannot describe this order.
  void set_pairs(std::vector<index_t> taps, index_t out_step, index_t in_step) {
    rows_ = (planes_ + 1) / 2;
    columns_ = 2 * static_cast<index_t>(taps.size());
    column_offsets_ = std::move(taps);
    row_step_ = out_step;
    run_step_ = in_step;
  }
  // Storage offset of the element (row, column); -1 for padding.
  index_t paired_offset(index_t row, index_t column) const {
    const auto taps = static_cast<index_t>(column_offsets_.size());
    const index_t plane = 2 * row + column / taps;
    if (plane >= planes_) return -1;
    return plane / inputs_ * row_step_ + plane % inputs_ * run_step_ +
           column_offsets_[static_cast<std::size_t>(column % taps)];
  }

  // Calls f(column, row, length, offset) for runs of elements of one column, row_step_ apart in storage.
  template <class F>
  void for_each_run(index_t first, index_t count, const F& f) const {
    for (index_t column = 0; column < columns_; ++column) {
      for (index_t row = first; row < first + count;) {
        if (planes_ > 0) {
          f(column, row, index_t{1}, paired_offset(row, column));
          ++row;
          continue;
        }
        const index_t length = std::min(first + count - row, row_run_ - row % row_run_);
        f(column, row, length,
          column_offsets_[static_cast<std::size_t>(column)] + row / row_run_ * run_step_ +
              row % row_run_ * row_step_);
        row += length;
      }
    }
  }

  template <decode_as As, class T>
  void store_as(const T* block, index_t first, index_t count, T* to) const {
    for_each_run(first, count, [&](index_t column, index_t row, index_t length, index_t offset) {
      if (offset < 0) return;
      const T* from = block + column * count + row - first;
      T* run = to + offset;
      if (row_step_ == 1) {
        for (index_t i = 0; i < length; ++i) put_decoded(As, from[i], run[i]);
      } else {
        for (index_t i = 0; i < length; ++i) put_decoded(As, from[i], run[i * row_step_]);
      }
    });
  }

  index_t rows_ = 0, columns_ = 0;
  index_t row_run_ = 1;                  // rows of a run, in which the stride is row_step_
  index_t row_step_ = 1;                 // stride within a run; pairs: between output units
  index_t run_step_ = 0;                 // stride between runs; pairs: stride between inputs
  index_t planes_ = 0;                   // pairs: number of planes or elements; else 0
  index_t inputs_ = 1;                   // pairs: number of planes per output unit
  std::vector<index_t> column_offsets_;  // offset of each column; pairs: of each tap
};

/// Rows [first, first + count) of the matrix of tensor number `tensor`: the work of one task.
struct spectral_task {
  std::size_t tensor = 0;
  index_t first = 0, count = 0;
  index_t gram = 0;  // position of the task's Gram matrix among those of all tasks
};

/// Cuts the rows of all matrices into tasks of about 16384 elements, but of at least 8 rows per column, so
/// that the Gram matrices of all tasks have at most an eighth of the elements of all matrices.
inline std::vector<spectral_task> spectral_tasks(const std::vector<spectral_form>& forms) {
  std::vector<spectral_task> result;
  index_t gram = 0;
  for (std::size_t t = 0; t < forms.size(); ++t) {
    const index_t columns = forms[t].columns();
    const index_t most = std::max({index_t{1}, 16384 / columns, 8 * columns});
    for (index_t first = 0; first < forms[t].rows(); first += most) {
      result.push_back({t, first, std::min(most, forms[t].rows() - first), gram});
      gram += columns * columns;
    }
  }
  return result;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
