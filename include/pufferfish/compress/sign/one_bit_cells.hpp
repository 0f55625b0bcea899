// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the cells of one_bit_codec, whose values share two means, and the tasks of its parallel loops.

#include <algorithm>
#include <span>
#include <vector>

#include <pufferfish/compress/codes/tensor_chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The values of a tensor that form a cell, that is, share the two means of a one-bit code.
enum class one_bit_cell {
  output_unit,  ///< values of one output unit: index 0 of a matrix or a kernel; all values of a vector
  tensor        ///< all values of the tensor
};

/// Text for messages: "a cell per output unit" or "a cell per tensor".
constexpr const char* to_string(one_bit_cell cell) {
  return cell == one_bit_cell::output_unit ? "a cell per output unit" : "a cell per tensor";
}

namespace detail {

/// Divides the elements of a tensor, or of a part of a tensor, into cells: the groups of elements that share
/// two means, one cell per output unit. In storage, the output unit changes after every run of strides[0]
/// elements and repeats after shape[0] runs. A run has one element for kernels and linear layers, one row for
/// embeddings. Cells of a part are numbered in the order in which the part's elements touch them; a whole
/// tensor's cell c is output unit c.
class tensor_cells {
 public:
  /// Finds the cells of the elements tensor.first .. tensor.first + tensor.size - 1 of the parameter's
  /// storage.
  tensor_cells(const coded_tensor& tensor, one_bit_cell cell) : size_(tensor.size) {
    const index_t units = tensor.layout.dims < 2 ? 1 : tensor.layout.shape[0];
    if (cell == one_bit_cell::tensor || units <= 1) {
      run_ = size_;
      return;
    }
    run_ = std::max<index_t>(1, tensor.layout.strides[0]);
    units_ = units;
    skipped_ = tensor.first % run_;
    runs_ = (skipped_ + size_ + run_ - 1) / run_;
  }

  /// Number of cells.
  index_t count() const { return std::min(runs_, units_); }
  /// Number of consecutive elements in storage that belong to one cell. 1: neighbours are in different cells.
  index_t run() const { return run_; }
  /// Number of runs after which the cells repeat; at least count().
  index_t units() const { return units_; }
  /// Number of the run that contains element i of the part.
  index_t run_of(index_t i) const { return (skipped_ + i) / run_; }
  /// Number of the cell that contains element i of the part.
  index_t cell_of(index_t i) const { return run_of(i) % units_; }
  /// Number of elements of a cell.
  index_t size_of(index_t cell) const {
    index_t elements = (runs_ - cell + units_ - 1) / units_ * run_;
    if (cell == 0) elements -= skipped_;
    if (cell == (runs_ - 1) % units_) elements -= runs_ * run_ - skipped_ - size_;
    return elements;
  }

  /// Covers elements [begin, end) of the part, in order, by calls of the two arguments. If run() is 1, calls
  /// only rows(at, rows, columns, cell): a block of rows x columns elements, whose column j belongs to cell
  /// `cell` + j. Otherwise calls only run(at, length, cell): consecutive elements of one cell. `at` is the
  /// position of the first element in the part.
  template <class Rows, class Run>
  void for_each(index_t begin, index_t end, const Rows& rows, const Run& run) const {
    while (begin < end) {
      const index_t cell = cell_of(begin);
      if (run_ > 1) {
        const index_t next = std::min(end, begin + run_ - (skipped_ + begin) % run_);
        run(begin, next - begin, cell);
        begin = next;
        continue;
      }
      const index_t columns = std::min(end - begin, units_ - cell);
      const index_t whole = cell == 0 ? std::max<index_t>(1, (end - begin) / units_) : 1;
      rows(begin, whole, columns, cell);
      begin += whole * columns;
    }
  }

 private:
  index_t size_ = 0;
  index_t run_ = 1;
  index_t units_ = 1;
  index_t runs_ = 1;     // number of runs that the part overlaps
  index_t skipped_ = 0;  // elements of the first run before the part
};

/// The elements of one tensor in one task. Its sums are the entries first_sum .. first_sum + sums - 1 of an
/// array for all parts; entry first_sum + i belongs to cell (first_cell + i) % units of the tensor.
struct one_bit_part : tensor_part {
  index_t first_cell = 0;
  index_t first_sum = 0;
  index_t sums = 0;
};

/// The coded values cut into tasks that are whole words of bits. A task has at least 64 rows of its last
/// tensor's cells: with fewer, the sums of cells would take more memory than the values.
class one_bit_tasks {
 public:
  one_bit_tasks() = default;
  /// Cuts the values of all tensors; cells[t] are the cells of tensor t. The cuts depend on shapes alone, so
  /// that sums do not depend on the number of threads.
  one_bit_tasks(const std::vector<coded_tensor>& tensors, const std::vector<tensor_cells>& cells) : cuts_{0} {
    constexpr index_t word = 32, rows = 64;
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      const index_t wanted = cells[t].run() > 1 ? 0 : (rows * cells[t].count() + word - 1) / word * word;
      const index_t length = std::max(tensor_chunks::chunk_size, wanted);
      while (tensors[t].offset + tensors[t].size - cuts_.back() > length) {
        cuts_.push_back(cuts_.back() + length);
      }
    }
    const index_t size = coded_size(tensors);
    if (cuts_.back() < size) cuts_.push_back(size);
    std::size_t t = 0;
    for (std::size_t i = 0; i + 1 < cuts_.size(); ++i) {
      firsts_.push_back(parts_.size());
      for (; t < tensors.size() && tensors[t].offset < cuts_[i + 1]; ++t) {
        const index_t end = tensors[t].offset + tensors[t].size;
        one_bit_part& part = parts_.emplace_back();
        part.tensor = t;
        part.begin = std::max(tensors[t].offset, cuts_[i]);
        part.end = std::min(end, cuts_[i + 1]);
        part.first_sum = sums_;
        set_sums(cells[t], part.begin - tensors[t].offset, part.end - tensors[t].offset, part);
        sums_ += part.sums;
        if (end > cuts_[i + 1]) break;
      }
    }
    firsts_.push_back(parts_.size());
  }

  /// The parts of all tasks, in the order of the values.
  std::span<const one_bit_part> parts() const { return parts_; }
  /// Number of cells of all parts together.
  index_t sums() const { return sums_; }

  /// Calls f(begin, end, parts) for every task: its range of values, its parts. Tasks run on all threads.
  template <class F>
  void for_each(context<device::cpu>& ctx, F&& f) const {
    ctx.parallel_for(static_cast<index_t>(cuts_.size()) - 1, [&](index_t task, int) {
      const auto i = static_cast<std::size_t>(task);
      f(cuts_[i], cuts_[i + 1], std::span(parts_).subspan(firsts_[i], firsts_[i + 1] - firsts_[i]));
    });
  }

 private:
  // For elements [begin, end) of a tensor's part. If neighbours are in different cells, all cells have sums.
  static void set_sums(const tensor_cells& cells, index_t begin, index_t end, one_bit_part& part) {
    const index_t first = cells.run_of(begin);
    part.sums = cells.run() == 1 ? cells.count() : std::min(cells.units(), cells.run_of(end - 1) - first + 1);
    part.first_cell = cells.run() == 1 ? 0 : first % cells.units();
  }

  std::vector<index_t> cuts_{0};
  std::vector<one_bit_part> parts_;
  std::vector<std::size_t> firsts_;  // the number of each task's first part
  index_t sums_ = 0;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
