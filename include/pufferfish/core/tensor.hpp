// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Owning arrays: `aligned_buffer<T>`, and `tensor<T, N>` on top of it.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Alignment in bytes of all allocations: one cache line, and the widest vector register.
inline constexpr std::size_t memory_alignment = 64;

/// Tag that requests memory that is not zeroed, for buffers that are written before they are read.
struct uninitialized_t {};
inline constexpr uninitialized_t uninitialized{};

namespace detail {

/// Asks the system to back large blocks with huge pages. Kernels that stride through activations and weights
/// otherwise spend much time on address translation. Results do not depend on it.
inline void prefer_large_pages([[maybe_unused]] void* memory, [[maybe_unused]] std::size_t bytes) {
#if defined(__linux__)
  // The largest page of any processor: aarch64 may have 64 KiB.
  constexpr std::size_t page = 65536, worthwhile = std::size_t{4} << 20;
  if (bytes < worthwhile) return;
  // Advice is given for whole pages of the block only.
  const auto at = reinterpret_cast<std::uintptr_t>(memory);
  const std::size_t skip = (page - at % page) % page;
  static_cast<void>(
      ::madvise(static_cast<std::byte*>(memory) + skip, (bytes - skip) / page * page, MADV_HUGEPAGE));
#endif
}

/// Returns freed memory to the system. For use after work that once needs much memory and leaves it in pieces
/// that the allocator would cache (glibc caches up to the size of the largest block ever freed).
inline void return_free_memory() {
#if defined(__GLIBC__)
  ::malloc_trim(0);
#endif
}

}  // namespace detail

/// A fixed number of trivially copyable elements, 64-byte aligned, initially zero. Copies are deep; a
/// moved-from buffer is empty. Elements never move while the buffer exists, so pointers and spans stay valid
/// until it is destroyed, assigned to, or moved from (then they refer to the new owner's elements).
template <class T>
class aligned_buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  /// Makes an empty buffer: no memory, size() == 0.
  aligned_buffer() = default;
  /// Allocates `count` elements, all zero. Throws shape_error for a negative count and for more bytes than
  /// index_t counts, std::bad_alloc if the memory is not available.
  PUFFERFISH_NOINLINE explicit aligned_buffer(index_t count) : aligned_buffer(count, uninitialized) {
    std::fill_n(data_, count, T{});
  }
  /// Allocates `count` elements without writing them: their values are indeterminate. Throws the errors of
  /// aligned_buffer(count).
  PUFFERFISH_NOINLINE aligned_buffer(index_t count, uninitialized_t) : size_(count) {
    const std::size_t bytes = detail::byte_count<T>(count);
    if (bytes == 0) return;
    data_ = static_cast<T*>(::operator new (bytes, std::align_val_t{memory_alignment}));
    detail::prefer_large_pages(data_, bytes);
  }
  PUFFERFISH_NOINLINE aligned_buffer(const aligned_buffer& other)
      : aligned_buffer(other.size_, uninitialized) {
    std::copy_n(other.data_, size_, data_);
  }
  aligned_buffer(aligned_buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  aligned_buffer& operator=(aligned_buffer other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~aligned_buffer() { ::operator delete (data_, std::align_val_t{memory_alignment}); }

  /// Address of element 0; nullptr if the buffer is empty.
  T* data() { return data_; }
  const T* data() const { return data_; }
  index_t size() const { return size_; }
  std::span<T> span() { return {data_, static_cast<std::size_t>(size_)}; }
  std::span<const T> span() const { return {data_, static_cast<std::size_t>(size_)}; }

 private:
  T* data_ = nullptr;
  index_t size_ = 0;
};

/// An owning dense array of N dimensions, last index fastest, initially zero. Copies are deep. T is trivially
/// copyable. Views and pointers are valid until the tensor is destroyed, assigned to, or moved from. A
/// moved-from tensor has no elements but keeps its extents; assign a new value before any other use.
///
/// \code
/// tensor<float, 4> images({32, 28, 28, 1});                  // NHWC, zeros
/// images(0, 3, 4, 0) = 0.5F;
/// tensor<double, 4> wide(images.view());     // a converted copy
/// \endcode
template <class T, std::size_t N>
class tensor {
 public:
  using value_type = T;

  /// Makes a tensor without elements: all extents are 0.
  tensor() = default;
  /// Makes a tensor of zeros. Throws shape_error for a negative extent and for more bytes than index_t
  /// counts, std::bad_alloc if the memory is not available.
  explicit tensor(const extents<N>& shape) : buffer_(volume<N>(shape)), extents_(shape) {}

  /// Makes a dense copy of any view, with conversion of the scalar (static_cast). Throws the errors of
  /// tensor(shape).
  template <class U>
  explicit tensor(const tensor_view<U, N>& source) : tensor(source.shape()) {
    copy(source, view());
  }

  /// Views of all elements. The conversions are implicit, so that a tensor can be passed where a function
  /// takes a view; function templates that deduce T or N need view().
  tensor_view<T, N> view() { return {buffer_.data(), extents_}; }
  tensor_view<const T, N> view() const { return {buffer_.data(), extents_}; }
  operator tensor_view<T, N>() { return view(); }
  operator tensor_view<const T, N>() const { return view(); }

  /// Address of element (0, ..., 0); nullptr if there are no elements.
  T* data() { return buffer_.data(); }
  const T* data() const { return buffer_.data(); }
  /// Extents, and number of elements.
  const extents<N>& shape() const { return extents_; }
  index_t extent(std::size_t i) const { return extents_[i]; }
  index_t size() const { return buffer_.size(); }
  /// All elements in row-major order.
  std::span<T> flat() { return buffer_.span(); }
  std::span<const T> flat() const { return buffer_.span(); }

  /// Element (i...). Indices are checked at assertion level 2 only (PUFFERFISH_ASSERT_LEVEL).
  template <class... I>
  T& operator()(I... i) {
    return view()(i...);
  }
  template <class... I>
  const T& operator()(I... i) const {
    return view()(i...);
  }

 private:
  aligned_buffer<T> buffer_;
  extents<N> extents_{};
};

PUFFERFISH_NAMESPACE_END
