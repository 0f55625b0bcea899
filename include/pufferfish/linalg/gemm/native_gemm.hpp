// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The library's matrix product, designed for the shapes that factorization creates: a tall left operand,
/// which is read in place without packing, and a small right operand, which is packed once (or used in place)
/// and reused for every tile of rows. The kernels are compiled for AVX-512, AVX2 and the base instruction
/// set; the widest set that the processor supports is used.

#include <algorithm>
#include <cstddef>
#include <limits>

#include <pufferfish/core/arena.hpp>
#include <pufferfish/core/separate.hpp>
#include <pufferfish/linalg/gemm/gemm.hpp>
#include <pufferfish/linalg/gemm/micro_kernels.hpp>

PUFFERFISH_NAMESPACE_BEGIN
/// The right operand of many products, packed for the micro-kernels in panels of a few vectors' width. If the
/// operand's rows are contiguous and consist of whole vectors, it is used in place; otherwise `prepare`
/// copies it, padded with zeros. The object refers to b or to `storage` and owns neither. multiply is const:
/// several threads may multiply disjoint rows of c by one operand.
///
/// \code
/// scratch_frame frame(ctx.scratch());
/// float* const storage = frame.take<float>(gemm_operand<float>::storage_size(depth, columns));
/// const auto operand = gemm_operand<float>::prepare(b, storage, rows);
/// operand.multiply(a, c, false);  // c = a b
/// \endcode
template <class T>
class gemm_operand {
 public:
  /// Number of elements of storage that `prepare` may need for an operand of depth x columns. `target`: the
  /// instruction set passed to `prepare`.
  static index_t storage_size(index_t depth, index_t columns, isa target = widest_isa()) {
    const detail::kernel_table<T>& kernels = detail::kernels_for<T>(target);
    const index_t vectors = (columns + kernels.lanes - 1) / kernels.lanes;
    return depth * (vectors + widest(kernels)) * kernels.lanes;
  }

  /// Prepares b (K x N, any strides) for products with about `rows` rows. `storage` must have room for
  /// storage_size(K, N) elements and must not overlap b. `storage` and b must outlive the operand, and b must
  /// not change, because it may be used in place. `target` must satisfy isa_available().
  static gemm_operand prepare(const tensor_view<const T, 2>& b, T* storage,
                              index_t rows = std::numeric_limits<index_t>::max(), isa target = widest_isa()) {
    gemm_operand result;
    result.kernels_ = &detail::kernels_for<T>(target);
    result.depth_ = b.extent(0);
    result.columns_ = b.extent(1);
    const index_t lanes = result.kernels_->lanes;
    const index_t vectors = (result.columns_ + lanes - 1) / lanes;
    const index_t panels =
        std::max<index_t>(1, (vectors + widest(*result.kernels_) - 1) / widest(*result.kernels_));
    result.panel_columns_ = std::max<index_t>(1, (vectors + panels - 1) / panels) * lanes;
    // Rows with a large stride map to few cache sets, so they are copied if they are read many times.
    constexpr index_t close = 512 / static_cast<index_t>(sizeof(T)), few_rows = 32;
    if (b.stride(1) == 1 && result.columns_ % lanes == 0 && (b.stride(0) <= close || rows <= few_rows)) {
      result.data_ = b.data();
      result.row_stride_ = b.stride(0);
      result.panel_stride_ = result.panel_columns_;
    } else {
      result.data_ = storage;
      result.row_stride_ = result.panel_columns_;
      result.panel_stride_ = result.panel_columns_ * result.depth_;
      result.copy_panels(b, storage);
    }
    return result;
  }

  /// Number of rows of the operand.
  index_t depth() const { return depth_; }
  /// Number of columns of the operand.
  index_t columns() const { return columns_; }

  /// c = a b, or c += a b with `accumulate`, where b is this operand. a: M x K, any strides (the product is
  /// fast if one of them is small); c: M x N with dense rows, not overlapping a or b. Throws shape_error if
  /// the shapes do not fit.
  void multiply(const tensor_view<const T, 2>& a, const tensor_view<T, 2>& c, bool accumulate) const {
    const index_t rows = a.extent(0);
    if (a.extent(1) != depth_ || c.extent(0) != rows || c.extent(1) != columns_) {
      detail::throw_error<shape_error>({"gemm: ", a.shape(), " times ", extents<2>{depth_, columns_},
                                        " does not fit the result ", c.shape()});
    }
    if (c.empty()) return;
    PUFFERFISH_ASSERT(c.stride(1) == 1 || columns_ == 1, "gemm: result rows must be dense");
    if (depth_ == 0) {
      if (!accumulate) {
        for (index_t i = 0; i < rows; ++i) std::fill_n(c.data() + i * c.stride(0), columns_, T{});
      }
      return;
    }
    for (index_t k = 0; k < depth_; k += depth_block) {
      const index_t steps = std::min(depth_block, depth_ - k);
      const tensor_view<const T, 2> a_block = a.slice(1, k, steps);
      for (index_t column = 0, panel = 0; column < columns_; column += panel_columns_, ++panel) {
        multiply_panel(a_block, data_ + panel * panel_stride_ + k * row_stride_, c.data() + column,
                       c.stride(0), std::min(panel_columns_, columns_ - column), accumulate || k > 0);
      }
    }
  }

  /// Number of elements of the array `left` that multiply_packed needs.
  index_t left_storage_size() const { return left_rows * std::min(packed_depth, depth_); }
  /// Whether multiply_packed is faster than multiply for `rows` rows of a. The right operand must be wide
  /// enough to make up for the cost of packing the left one.
  bool pays_to_pack(index_t rows) const {
    return rows >= 64 && depth_ >= 64 && columns_ >= 4 * panel_columns_ && columns_ >= 128;
  }

  /// Computes the same product as multiply, for operands that are large in every dimension. Tiles of a are
  /// first packed into `left`, in panels in the order in which the kernels read them, and stay in the L2
  /// cache while all panels of b are used (Goto, van de Geijn: "Anatomy of high-performance matrix
  /// multiplication", ACM TOMS 2008). `left` has left_storage_size() elements, is overwritten and overlaps
  /// nothing; each thread needs its own. Throws the errors of multiply.
  void multiply_packed(const tensor_view<const T, 2>& a, const tensor_view<T, 2>& c, bool accumulate,
                       T* left) const {
    detail::check_product(a, tensor_view<const T, 2>(nullptr, {depth_, columns_}), c);
    if (c.empty() || depth_ == 0) return multiply(a, c, accumulate);
    for (index_t k = 0; k < depth_; k += packed_depth) {
      const index_t steps = std::min(packed_depth, depth_ - k);
      for (index_t row = 0; row < a.extent(0); row += left_rows) {
        const index_t rows = std::min(left_rows, a.extent(0) - row);
        pack_left(a.slice(0, row, rows).slice(1, k, steps), left);
        for (index_t column = 0, panel = 0; column < columns_; column += panel_columns_, ++panel) {
          const T* b = data_ + panel * panel_stride_ + k * row_stride_;
          const index_t width = std::min(panel_columns_, columns_ - column);
          for (index_t first = 0; first < rows; first += packed_rows) {
            const index_t count = std::min(packed_rows, rows - first);
            const tensor_view<const T, 2> part(left + first * steps, {count, steps}, {1, packed_rows});
            multiply_panel(part, b, c.data() + (row + first) * c.stride(0) + column, c.stride(0), width,
                           accumulate || k > 0);
          }
        }
      }
    }
  }

 private:
  // Rows of a packed panel of the left operand, and of a tile of such panels that stays in the cache.
  static constexpr index_t packed_rows = 24, left_rows = 96;
  // Depth of these panels: a larger depth reads and writes the result less often.
  static constexpr index_t packed_depth = 768;

  // Packs rows of a into panels of packed_rows rows, each stored as [steps][packed_rows].
  static void pack_left(const tensor_view<const T, 2>& a, T* to) {
    const index_t rows = a.extent(0), steps = a.extent(1);
    for (index_t first = 0; first < rows; first += packed_rows, to += packed_rows * steps) {
      const index_t count = std::min(packed_rows, rows - first);
      for (index_t k0 = 0; k0 < steps; k0 += 16) {
        const index_t k1 = std::min(steps, k0 + 16);
        for (index_t i = 0; i < count; ++i) {
          const T* from = a.data() + (first + i) * a.stride(0);
          for (index_t k = k0; k < k1; ++k) to[k * packed_rows + i] = from[k * a.stride(1)];
        }
      }
    }
  }

  // Depth of a block: its panel (three AVX-512 vectors wide) has 72 KiB, a
  // quarter of a small L2 cache.
  static constexpr index_t depth_block = 384;

  // Copies b into `storage`, in panels padded with zeros.
  void copy_panels(const tensor_view<const T, 2>& b, T* storage) const {
    for (index_t column = 0; column < columns_; column += panel_columns_) {
      const index_t width = std::min(panel_columns_, columns_ - column);
      for (index_t k = 0; k < depth_; ++k) {
        const T* from = b.data() + k * b.stride(0) + column * b.stride(1);
        for (index_t j = 0; j < width; ++j) storage[j] = from[j * b.stride(1)];
        std::fill(storage + width, storage + panel_columns_, T{});
        storage += panel_columns_;
      }
    }
  }

  // Multiplies all rows of a by one panel of b.
  void multiply_panel(const tensor_view<const T, 2>& a, const T* b, T* c, index_t c_stride, index_t width,
                      bool accumulate) const {
    constexpr index_t size = static_cast<index_t>(sizeof(T));
    const index_t rows = a.extent(0), lanes = kernels_->lanes;
    const index_t vectors = (width + lanes - 1) / lanes;
    const auto& list = a.stride(0) == 1 && vectors <= kernels_->widest_adjacent
                           ? kernels_->adjacent[vectors - 1]
                           : kernels_->strided[vectors - 1];
    const detail::block_tap<T> tap{a.data(), b};
    detail::block_arguments<T> block{
        &tap, &tap + 1, a.extent(1),     a.stride(0) * size, a.stride(1) * size, row_stride_ * size,
        0,    c,        c_stride * size, accumulate};
    if (width % lanes == 0) return detail::run_rows(list, block, rows);
    // Edge tile, wider than the result: computed into a temporary block, then copied to the result.
    constexpr index_t most_rows = 24, most_columns = 4 * 64 / size;
    alignas(64) T beside[static_cast<std::size_t>(most_rows * most_columns)];
    block.result_step = most_columns * size;
    block.accumulate = 0;
    for (index_t row = 0; row < rows; row += most_rows) {
      const index_t count = std::min(most_rows, rows - row);
      block.left_shift = row * block.row_step;
      block.result = beside;
      detail::run_rows(list, block, count);
      merge(beside, most_columns, c + row * c_stride, c_stride, count, width, accumulate);
    }
  }

  // Maximum width of a panel, in vectors; wider panels would reuse each right element too rarely.
  static index_t widest(const detail::kernel_table<T>& kernels) { return kernels.widest_adjacent; }

  // Copies or adds the valid part of a temporary block to the result.
  static void merge(const T* from, index_t from_stride, T* to, index_t to_stride, index_t rows, index_t width,
                    bool accumulate) {
    for (index_t i = 0; i < rows; ++i, from += from_stride, to += to_stride) {
      for (index_t j = 0; j < width; ++j) to[j] = accumulate ? to[j] + from[j] : from[j];
    }
  }

  const detail::kernel_table<T>* kernels_ = nullptr;
  const T* data_ = nullptr;
  index_t depth_ = 0;
  index_t columns_ = 0;
  index_t panel_columns_ = 0;
  index_t row_stride_ = 0;
  index_t panel_stride_ = 0;
};
PUFFERFISH_SEPARATE_CLASS(linalg, gemm_operand);

/// The library's product as a gemm_engine for float and double. Products run in the calling thread and pack
/// into memory of the given arena, which must outlive the object. The memory is released when multiply
/// returns. An arena may be used by one thread at a time.
///
/// \code
/// stack_arena scratch;
/// native_gemm(scratch).multiply<float>(a, b, c);  // c = a b
/// \endcode
class native_gemm {
 public:
  /// `target`: an instruction set for which isa_available() is true.
  explicit native_gemm(stack_arena& scratch, isa target = widest_isa())
      : scratch_(&scratch), target_(target) {}

  /// c = a b, or c += a b with `accumulate`, for any strides. a: M x K, b: K x N, c: M x N; c must not
  /// overlap a or b. Throws shape_error if the shapes do not fit.
  template <class T>
  void multiply(const tensor_view<const T, 2>& a, const tensor_view<const T, 2>& b,
                const tensor_view<T, 2>& c, bool accumulate = false) const {
    detail::check_product(a, b, c);
    if (c.empty()) return;
    if (c.stride(1) != 1 && c.extent(1) > 1) {
      if (c.stride(0) == 1) return multiply(transpose(b), transpose(a), transpose(c), accumulate);
      return through_copy(a, b, c, accumulate);
    }
    scratch_frame frame(*scratch_);
    T* storage = frame.take<T>(gemm_operand<T>::storage_size(b.extent(0), b.extent(1), target_));
    const auto operand = gemm_operand<T>::prepare(b, storage, a.extent(0), target_);
    if (operand.pays_to_pack(a.extent(0))) {
      return operand.multiply_packed(a, c, accumulate, frame.take<T>(operand.left_storage_size()));
    }
    if (a.stride(1) == 1 || a.stride(0) == 1 || a.extent(1) <= 1) return operand.multiply(a, c, accumulate);
    const tensor_view<T, 2> dense = frame.take<T>(a.shape());
    copy(a, dense);
    operand.multiply(dense, c, accumulate);
  }

 private:
  // Multiplies into a dense copy of c, for a result without contiguous rows or columns.
  template <class T>
  void through_copy(const tensor_view<const T, 2>& a, const tensor_view<const T, 2>& b,
                    const tensor_view<T, 2>& c, bool accumulate) const {
    scratch_frame frame(*scratch_);
    const tensor_view<T, 2> dense = frame.take<T>(c.shape());
    if (accumulate) copy(c, dense);
    multiply(a, b, dense, accumulate);
    copy(dense, c);
  }

  stack_arena* scratch_;
  isa target_;
};

PUFFERFISH_NAMESPACE_END
