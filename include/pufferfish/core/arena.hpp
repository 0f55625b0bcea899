// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `stack_arena`: memory allocated and released in last-in-first-out order. It grows during the first step
/// and then keeps its size, so that later steps get the same addresses.

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <vector>

#include <pufferfish/core/memory.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A stack of memory blocks, each 64-byte aligned. Blocks never move. Their memory is not zeroed.
/// One thread at a time may use an arena. Memory is returned to the source by the destructor only, or when
/// the chunks of an empty stack are joined. With the host's memory, an allocation that the system refuses
/// throws std::bad_alloc.
class stack_arena {
 public:
  /// A height of the stack: the position of its top (chunk, bytes used in it) and the number of bytes below.
  struct mark {
    std::size_t chunk = 0;
    std::size_t used = 0;
    std::size_t depth = 0;
  };

  stack_arena() : stack_arena(host_memory()) {}
  /// Makes an empty arena with memory from `source`, which must outlive the arena.
  explicit stack_arena(memory_source& source) : source_(&source), red_zones_(red_zones()) {}

  /// For tests: arenas constructed after `red_zones() = true` allocate every block separately from their
  /// source. An access past the end of a block is then outside of an allocation, which AddressSanitizer,
  /// compute-sanitizer and the emulated device report; without red zones it reads or writes the next block. A
  /// block still has the same address in every step. An arena with red zones holds several times the memory.
  /// Must be set before any thread constructs an arena.
  static bool& red_zones() {
    static bool on = false;
    return on;
  }

  /// Pushes a block of `bytes` bytes and returns its address (for zero bytes a valid address, too). The
  /// chunks of an empty stack are first joined into one. Throws shape_error for more bytes than index_t
  /// counts, and the errors of memory_source::allocate.
  PUFFERFISH_NOINLINE std::byte* allocate(std::size_t bytes) {
    static_cast<void>(detail::byte_count<std::byte>(static_cast<index_t>(bytes)));
    if (red_zones_) return allocate_apart(bytes);
    if (top_.depth == 0 && chunks_.size() > 1) join_chunks();
    const std::size_t need =
        (std::max<std::size_t>(bytes, 1) + memory_alignment - 1) / memory_alignment * memory_alignment;
    while (top_.chunk < chunks_.size() && top_.used + need > capacity(top_.chunk)) {
      ++top_.chunk;
      top_.used = 0;
    }
    if (top_.chunk == chunks_.size()) add_chunk(std::max(need, held_bytes()));
    std::byte* block = chunks_[top_.chunk].data() + top_.used;
    top_.used += need;
    top_.depth += need;
    peak_ = std::max(peak_, top_.depth);
    return block;
  }

  /// The present end of the allocated memory, for release().
  mark top() const { return top_; }

  /// Releases everything allocated since the top was `height`. The released contents stay readable
  /// until the next allocate().
  /// `height` is a former result of top(), not above the present top (an assertion).
  void release(const mark& height) noexcept {
    PUFFERFISH_ASSERT(height.depth <= top_.depth, "stack_arena: release above the top");
    top_ = height;
  }

  /// Number of bytes in use now.
  std::size_t in_use() const { return top_.depth; }
  /// Largest number of bytes in use so far.
  std::size_t peak_bytes() const { return peak_; }
  /// Number of bytes that are allocated from the source.
  std::size_t held_bytes() const {
    std::size_t total = 0;
    for (std::size_t i = 0; i < chunks_.size(); ++i) total += capacity(i);
    return total;
  }
  /// Number of allocations from the source. It stays constant once the first step has grown the arena and the
  /// next step has joined the chunks.
  std::size_t system_allocations() const { return system_allocations_; }

 private:
  // Chunks above 1 MiB have at least 128 MiB: pages never written cost nothing if the system maps memory on
  // demand, and allocators return blocks of this size to the system instead of caching them.
  static constexpr std::size_t smallest_chunk = std::size_t{1} << 16;
  static constexpr std::size_t small_chunk = std::size_t{1} << 20;
  static constexpr std::size_t large_chunk = std::size_t{1} << 27;

  std::size_t capacity(std::size_t chunk) const { return static_cast<std::size_t>(chunks_[chunk].size()); }

  // Replaces several chunks by one of the peak's size, so that later steps allocate from one.
  void join_chunks() {
    chunks_.clear();
    top_ = {};
    add_chunk(peak_);
  }

  /// With red zones, each block is a chunk of its exact size, identified by its size and the height of the
  /// stack below it. Chunks are kept, so that captured graphs use the same addresses in every step.
  PUFFERFISH_COLD std::byte* allocate_apart(std::size_t bytes) {
    const std::size_t size = std::max<std::size_t>(bytes, 1);
    std::size_t i = 0;
    while (i < chunks_.size() && (heights_[i] != top_.depth || capacity(i) != size)) ++i;
    if (i == chunks_.size()) {
      chunks_.emplace_back(*source_, static_cast<index_t>(size), uninitialized);
      heights_.push_back(top_.depth);
      ++system_allocations_;
    }
    top_.depth += (size + memory_alignment - 1) / memory_alignment * memory_alignment;
    peak_ = std::max(peak_, top_.depth);
    return chunks_[i].data();
  }

  // Allocates a chunk of at least `bytes` bytes.
  void add_chunk(std::size_t bytes) {
    bytes = std::max(bytes, bytes > small_chunk ? large_chunk : smallest_chunk);
    chunks_.emplace_back(*source_, static_cast<index_t>(bytes), uninitialized);
    ++system_allocations_;
  }

  memory_source* source_;
  bool red_zones_;
  std::vector<memory_block<std::byte>> chunks_;
  std::vector<std::size_t> heights_;  // with red zones: height of the stack below each chunk
  mark top_;
  std::size_t peak_ = 0;
  std::size_t system_allocations_ = 0;
};

/// Scratch memory of one scope: blocks allocated through a frame are released by the frame's destructor.
/// Frames of one arena must end in the opposite order of their construction; the arena must outlive the
/// frame.
///
/// \code
/// scratch_frame frame(ctx.scratch());
/// const auto sums = frame.take<float>(extents<2>{rows, columns});  // until the end of the scope
/// \endcode
class scratch_frame {
 public:
  explicit scratch_frame(stack_arena& arena) : arena_(arena), start_(arena.top()) {}
  scratch_frame(const scratch_frame&) = delete;
  scratch_frame& operator=(const scratch_frame&) = delete;
  ~scratch_frame() { arena_.release(start_); }

  /// Allocates `count` elements, not initialised, valid until the frame ends. Throws the errors of
  /// stack_arena::allocate.
  template <class T>
  T* take(index_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    return reinterpret_cast<T*>(arena_.allocate(detail::byte_count<T>(count)));
  }

  /// Allocates a dense view of uninitialised elements, valid until the frame ends. Throws shape_error as
  /// volume does, and the errors of stack_arena::allocate.
  template <class T, std::size_t N>
  tensor_view<T, N> take(const extents<N>& shape) {
    return {take<T>(volume<N>(shape)), shape};
  }

 private:
  stack_arena& arena_;
  stack_arena::mark start_;
};

PUFFERFISH_NAMESPACE_END
