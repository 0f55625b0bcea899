// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Our own matrix product, made for the shapes that factorizing creates: a tall left operand that is read
/// where it lies and never packed, and a small right operand that is laid out once (or not at all) and reused
/// for every tile of rows. Compiled for AVX-512, AVX2 and the base instruction set; the widest one present
/// runs.

#include <algorithm>
#include <cstddef>
#include <utility>

#include <pufferfish/core/arena.hpp>
#include <pufferfish/linalg/gemm.hpp>
#include <pufferfish/linalg/isa.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// c (+)= a b for a register block and `depth` steps, a with any strides.
template <class T>
using gemm_micro_kernel = void (*)(index_t depth, const T* a, index_t row_stride, index_t depth_stride,
                                   const T* b, index_t b_stride, T* c, index_t c_stride, bool accumulate);

/// The micro-kernels of one instruction set, by width in vectors (minus one).
template <class T>
struct gemm_kernels {
  static constexpr int widest = 3;
  index_t lanes = 0;
  int max_vectors = 0;
  int rows[widest] = {};
  gemm_micro_kernel<T> full[widest] = {};
  gemm_micro_kernel<T> single[widest] = {};
};

#if PUFFERFISH_KERNELS_PORTABLE
#define PUFFERFISH_TARGET kernels_portable
#define PUFFERFISH_VECTOR_BYTES 16
#include <pufferfish/linalg/gemm_kernel.inc>
#undef PUFFERFISH_TARGET
#undef PUFFERFISH_VECTOR_BYTES
#endif

#if PUFFERFISH_KERNELS_AVX2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define PUFFERFISH_TARGET kernels_avx2
#define PUFFERFISH_VECTOR_BYTES 32
#include <pufferfish/linalg/gemm_kernel.inc>
#undef PUFFERFISH_TARGET
#undef PUFFERFISH_VECTOR_BYTES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#if PUFFERFISH_KERNELS_AVX512
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,fma"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,fma")
#endif
#define PUFFERFISH_TARGET kernels_avx512
#define PUFFERFISH_VECTOR_BYTES 64
#include <pufferfish/linalg/gemm_kernel.inc>
#undef PUFFERFISH_TARGET
#undef PUFFERFISH_VECTOR_BYTES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

/// The kernel table of an instruction set that isa_available() says yes to.
template <class T>
const gemm_kernels<T>& kernels_for([[maybe_unused]] isa target) {
#if PUFFERFISH_KERNELS_PORTABLE
  static constexpr gemm_kernels<T> portable = kernels_portable::kernels<T>();
  if (target == isa::portable) return portable;
#endif
#if PUFFERFISH_KERNELS_AVX2
  static constexpr gemm_kernels<T> avx2 = kernels_avx2::kernels<T>();
  if (target == isa::avx2) return avx2;
#endif
#if PUFFERFISH_KERNELS_AVX512
  static constexpr gemm_kernels<T> avx512 = kernels_avx512::kernels<T>();
  return avx512;
#else
  return portable;
#endif
}

}  // namespace detail

/// The right operand of many products, laid out for the micro-kernels: panels of a few vectors' width. It is
/// used where it lies if its rows are dense and whole vectors; otherwise `prepare` copies it, padded with
/// zeros.
template <class T>
class gemm_operand {
 public:
  /// Elements of storage that `prepare` may need for a K x N operand.
  static index_t storage_size(index_t depth, index_t columns, isa target = widest_isa()) {
    const detail::gemm_kernels<T>& kernels = detail::kernels_for<T>(target);
    const index_t vectors = (columns + kernels.lanes - 1) / kernels.lanes;
    return depth * (vectors + kernels.max_vectors) * kernels.lanes;
  }

  /// Prepares b (K x N, any strides). `storage` has room for storage_size(K, N) elements; it and b must live
  /// as long as the operand is used.
  static gemm_operand prepare(const tensor_view<const T, 2>& b, T* storage, isa target = widest_isa()) {
    gemm_operand result;
    result.kernels_ = &detail::kernels_for<T>(target);
    result.depth_ = b.extent(0);
    result.columns_ = b.extent(1);
    const index_t lanes = result.kernels_->lanes;
    const index_t vectors = (result.columns_ + lanes - 1) / lanes;
    const index_t panels =
        std::max<index_t>(1, (vectors + result.kernels_->max_vectors - 1) / result.kernels_->max_vectors);
    result.panel_columns_ = std::max<index_t>(1, (vectors + panels - 1) / panels) * lanes;
    if (b.stride(1) == 1 && result.columns_ % lanes == 0) {
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

  index_t depth() const { return depth_; }
  index_t columns() const { return columns_; }

  /// c = a b, or c += a b, for this b. a: M x K, any strides (fast where one of them is small); c: M x N,
  /// rows dense; c overlaps neither. Throws shape_error if the shapes do not fit.
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

 private:
  // Depth of a block: a panel of it (three AVX-512 vectors wide) is 72 KiB, a quarter of a small second-level
  // cache.
  static constexpr index_t depth_block = 384;

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

  // One panel of b against all rows of a.
  void multiply_panel(const tensor_view<const T, 2>& a, const T* b, T* c, index_t c_stride, index_t width,
                      bool accumulate) const {
    const index_t rows = a.extent(0), steps = a.extent(1), row_stride = a.stride(0),
                  depth_stride = a.stride(1);
    const index_t lanes = kernels_->lanes;
    const std::size_t at = static_cast<std::size_t>((width + lanes - 1) / lanes - 1);
    const index_t block = kernels_->rows[at];
    // A block whose last vector sticks out of the result is computed beside it, then copied.
    const bool whole = width % lanes == 0;
    constexpr std::size_t most_rows = 16, most_columns = 3 * 64 / sizeof(T);
    alignas(64) T beside[most_rows * most_columns];
    constexpr index_t beside_stride = static_cast<index_t>(most_columns);
    detail::gemm_micro_kernel<T> kernel = kernels_->full[at];
    const T* from = a.data();
    for (index_t left = rows, count = block; left > 0; left -= count) {
      if (left < count) {
        kernel = kernels_->single[at];
        count = 1;
      }
      if (whole) {
        kernel(steps, from, row_stride, depth_stride, b, row_stride_, c, c_stride, accumulate);
      } else {
        kernel(steps, from, row_stride, depth_stride, b, row_stride_, beside, beside_stride, false);
        merge(beside, beside_stride, c, c_stride, count, width, accumulate);
      }
      from += count * row_stride;
      c += count * c_stride;
    }
  }

  static void merge(const T* from, index_t from_stride, T* to, index_t to_stride, index_t rows, index_t width,
                    bool accumulate) {
    for (index_t i = 0; i < rows; ++i, from += from_stride, to += to_stride) {
      for (index_t j = 0; j < width; ++j) to[j] = accumulate ? to[j] + from[j] : from[j];
    }
  }

  const detail::gemm_kernels<T>* kernels_ = nullptr;
  const T* data_ = nullptr;
  index_t depth_ = 0;
  index_t columns_ = 0;
  index_t panel_columns_ = 0;
  index_t row_stride_ = 0;
  index_t panel_stride_ = 0;
};

/// Our product as a gemm_engine: one thread, scratch for layouts from the arena that it is given.
class native_gemm {
 public:
  explicit native_gemm(stack_arena& scratch, isa target = widest_isa())
      : scratch_(&scratch), target_(target) {}

  /// c = a b, or c += a b. Any strides; throws shape_error if the shapes do not fit. c may overlap neither a
  /// nor b.
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
    const auto operand = gemm_operand<T>::prepare(b, storage, target_);
    if (a.stride(1) == 1 || a.stride(0) == 1 || a.extent(1) <= 1) return operand.multiply(a, c, accumulate);
    const tensor_view<T, 2> dense = frame.take<T>(a.shape());
    copy(a, dense);
    operand.multiply(dense, c, accumulate);
  }

 private:
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
