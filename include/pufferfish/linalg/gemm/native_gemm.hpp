// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The library's matrix product, designed for the shapes that factorization creates: a tall left operand,
/// which is read in place without packing, and a small right operand, which is packed once (or used in place)
/// and reused for every tile of rows. The kernels are compiled for AVX-512, AVX2 and the base instruction
/// set; the widest set that the processor supports is used.

#include <algorithm>
#include <limits>

#include <pufferfish/core/arena.hpp>
#include <pufferfish/core/separate.hpp>
#include <pufferfish/linalg/gemm/gemm.hpp>
#include <pufferfish/linalg/gemm/loops.hpp>

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
    return detail::packed_b<T>::storage_size(detail::panel_shape<T>(columns, target), depth, columns);
  }

  /// Prepares b (K x N, any strides) for products with about `rows` rows. `storage` must have room for
  /// storage_size(K, N) elements and must not overlap b. `storage` and b must outlive the operand, and b must
  /// not change, because it may be used in place. `target` must satisfy isa_available().
  static gemm_operand prepare(const tensor_view<const T, 2>& b, T* storage,
                              index_t rows = std::numeric_limits<index_t>::max(), isa target = widest_isa()) {
    return gemm_operand(
        detail::packed_b<T>::prepare(detail::panel_shape<T>(b.extent(1), target), b, storage, rows));
  }

  /// Number of rows of the operand.
  index_t depth() const { return b_.depth; }
  /// Number of columns of the operand.
  index_t columns() const { return b_.columns; }

  /// c = a b, or c += a b with `accumulate`, where b is this operand. a: M x K, any strides (the product is
  /// fast if one of them is small); c: M x N with dense rows, not overlapping a or b. Throws shape_error if
  /// the shapes do not fit.
  void multiply(const tensor_view<const T, 2>& a, const tensor_view<T, 2>& c, bool accumulate) const {
    detail::check_product(a, tensor_view<const T, 2>(nullptr, {depth(), columns()}), c);
    PUFFERFISH_ASSERT(c.empty() || c.stride(1) == 1 || columns() == 1, "gemm: result rows must be dense");
    if (!c.empty()) detail::multiply_rows(b_, a, c, accumulate);
  }

 private:
  explicit gemm_operand(const detail::packed_b<T>& b) : b_(b) {}

  detail::packed_b<T> b_;
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
