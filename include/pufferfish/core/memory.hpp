// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `memory_source`: allocates host or device memory for arenas and copies between the host and that memory.
/// `memory_block`: an owning array of elements in such memory.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <span>
#include <type_traits>
#include <utility>

#include <pufferfish/core/device.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/core/scalar.hpp>
#include <pufferfish/core/tensor.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Memory of one kind. Allocated blocks start at a multiple of `memory_alignment` and are not zeroed.
/// A source outlives all blocks allocated from it. The host's source may be used by several threads at once.
class memory_source {
 public:
  memory_source() = default;
  memory_source(const memory_source&) = delete;
  memory_source& operator=(const memory_source&) = delete;
  virtual ~memory_source() = default;

  /// Allocates `bytes` > 0 bytes, which the caller owns until deallocate. Throws std::bad_alloc, or
  /// backend_error with the sizes involved.
  virtual void* allocate(std::size_t bytes) = 0;
  /// Frees a result of allocate of the same source; `bytes` must be the number that was allocated.
  virtual void deallocate(void* memory, std::size_t bytes) noexcept = 0;

  /// Copies `bytes` bytes from host memory to this memory, synchronously; the ranges must not overlap. Throws
  /// backend_error if a copy fails; the host's source never throws.
  virtual void from_host(void* to, const void* from, std::size_t bytes) = 0;
  /// Copies `bytes` bytes from this memory to host memory, with the rules of from_host.
  virtual void to_host(void* to, const void* from, std::size_t bytes) = 0;
  /// Sets `bytes` bytes of this memory to zero.
  virtual void fill_zero(void* memory, std::size_t bytes) = 0;
  /// Copies `bytes` bytes within this memory, synchronously. The two ranges must not overlap.
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;
  /// Rounds `count` floats of this memory to a 16-bit format (to nearest, ties to even): to[i] =
  /// format(from[i]). `to` is in this memory, too, and must not overlap `from`. Synchronous. `format` must
  /// not be none.
  virtual void round(rounded_format format, const float* from, void* to, index_t count) = 0;

  /// Whether host code may read and write this memory.
  virtual bool on_host() const = 0;
};

namespace detail {

/// Rounds `count` floats to a 16-bit format as memory_source::round does, for memory on the host.
inline void round_on_host(rounded_format format, const float* from, void* to, index_t count) {
  const auto write = [&](auto* numbers) {
    std::transform(from, from + count, numbers,
                   [](float x) { return std::remove_pointer_t<decltype(numbers)>(x); });
  };
  format == rounded_format::bf16 ? write(static_cast<bfloat16*>(to)) : write(static_cast<float16*>(to));
}

/// The host's memory, aligned to memory_alignment bytes; large blocks ask for large pages.
class host_memory_source final : public memory_source {
 public:
  void* allocate(std::size_t bytes) override {
    void* memory = ::operator new (bytes, std::align_val_t{memory_alignment});
    prefer_large_pages(memory, bytes);
    return memory;
  }
  void deallocate(void* memory, std::size_t) noexcept override {
    ::operator delete (memory, std::align_val_t{memory_alignment});
  }
  void from_host(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void to_host(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void fill_zero(void* memory, std::size_t bytes) override { std::memset(memory, 0, bytes); }
  void copy(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void round(rounded_format format, const float* from, void* to, index_t count) override {
    round_on_host(format, from, to, count);
  }
  bool on_host() const override { return true; }
};

}  // namespace detail

/// The host's memory. One object for the whole program. It is never destroyed, because networks and contexts
/// with static storage duration may free memory after other static objects have been destroyed.
inline memory_source& host_memory() {
  static memory_source* const source = new detail::host_memory_source;
  return *source;
}

/// memory_of<Device>::source() is the memory source of a device. Other devices specialise this template.
template <class Device>
struct memory_of;
template <>
struct memory_of<device::cpu> {
  static memory_source& source() { return host_memory(); }
};

/// A fixed number of trivially copyable elements in the memory of a source. The source must outlive the
/// block. Movable, not copyable.
/// Move construction leaves an empty block; move assignment exchanges the contents.
///
/// \code
/// memory_block<float> block(host_memory(), 1024);  // zeros
/// block.from_host(values);                         // values: std::span<const float> of 1024 elements
/// \endcode
template <class T>
class memory_block {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  memory_block() = default;

  /// Allocates `count` elements, not initialised, from `source`, which must outlive the block. Element 0 is
  /// stored `lead` elements after a multiple of memory_alignment. Throws shape_error for a negative count and
  /// for more bytes than index_t counts, and the errors of memory_source::allocate.
  memory_block(memory_source& source, index_t count, uninitialized_t, index_t lead = 0)
      : source_(&source), size_(count), lead_(lead) {
    static_cast<void>(detail::byte_count<T>(count) + detail::byte_count<T>(lead));
    if (count > 0) data_ = static_cast<T*>(source.allocate(allocated())) + lead;
  }
  /// Allocates `count` elements with all bits zero, from `source`, which must outlive the block.
  memory_block(memory_source& source, index_t count, index_t lead = 0)
      : memory_block(source, count, uninitialized, lead) {
    if (count > 0) source.fill_zero(data_, bytes());
  }
  memory_block(memory_block&& other) noexcept
      : source_(std::exchange(other.source_, nullptr)),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        lead_(std::exchange(other.lead_, 0)) {}
  memory_block& operator=(memory_block&& other) noexcept {
    std::swap(source_, other.source_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(lead_, other.lead_);
    return *this;
  }
  memory_block(const memory_block&) = delete;
  memory_block& operator=(const memory_block&) = delete;
  ~memory_block() {
    if (data_ != nullptr) source_->deallocate(data_ - lead_, allocated());
  }

  /// Address in the source's memory, nullptr for a block without elements. The host may access the elements
  /// only if source.on_host().
  T* data() { return data_; }
  const T* data() const { return data_; }
  index_t size() const { return size_; }
  std::span<T> span() { return {data_, static_cast<std::size_t>(size_)}; }
  std::span<const T> span() const { return {data_, static_cast<std::size_t>(size_)}; }

  /// Overwrites all elements with `values` on the host, synchronously. Throws shape_error unless the span has
  /// size() elements, and the errors of memory_source::from_host.
  void from_host(std::span<const T> values) {
    check(values.size());
    if (size_ > 0) source_->from_host(data_, values.data(), bytes());
  }
  /// Copies all elements to `values` on the host, synchronously. Throws shape_error unless the span has
  /// size() elements, and the errors of memory_source::to_host.
  void to_host(std::span<T> values) const {
    check(values.size());
    if (size_ > 0) source_->to_host(values.data(), data_, bytes());
  }

 private:
  // Bytes of the elements; allocated() adds the `lead` elements before them.
  std::size_t bytes() const { return static_cast<std::size_t>(size_) * sizeof(T); }
  std::size_t allocated() const { return bytes() + static_cast<std::size_t>(lead_) * sizeof(T); }
  // Throws shape_error for another number of elements than the block's.
  void check(std::size_t elements) const {
    if (elements != static_cast<std::size_t>(size_)) {
      detail::throw_error<shape_error>({"memory_block: ", elements, " elements for ", size_});
    }
  }

  memory_source* source_ = nullptr;
  T* data_ = nullptr;
  index_t size_ = 0, lead_ = 0;
};

PUFFERFISH_NAMESPACE_END
