// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The tape: what forward passes keep for their backward passes. A stack: layers push on the way forward and
/// pop the same things in opposite order on the way back, so one layer can run twice in a step.

#include <array>
#include <bit>
#include <cstring>
#include <vector>

#include <pufferfish/core/arena.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Last in, first out. Nothing on it moves while it lies there. Tensors lie in the memory of the context's
/// device, what the host notes about them in the host's.
class tape {
 public:
  tape() = default;
  /// With tensors in memory from a source, which must outlive it.
  explicit tape(memory_source& source) : arena_(source) {}

  /// Memory for `count` elements, not initialised, kept until the matching pop. Throws shape_error for more
  /// bytes than index_t counts.
  template <class T>
  T* push(index_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    return reinterpret_cast<T*>(push_bytes(arena_, detail::byte_count<T>(count)));
  }

  template <class T, std::size_t N>
  tensor_view<T, N> push(const extents<N>& shape) {
    return {push<T>(volume<N>(shape)), shape};
  }

  /// Takes the top entry off. Its elements stay readable until the next push. Throws state_error if the tape
  /// is empty or the top entry is not `count` elements of T: the forward pass that belongs here did not run
  /// in training mode, or passes were mixed up.
  template <class T>
  T* pop(index_t count) {
    return reinterpret_cast<T*>(pop_bytes(detail::byte_count<T>(count)));
  }

  template <class T, std::size_t N>
  tensor_view<T, N> pop(const extents<N>& shape) {
    return {pop<T>(volume<N>(shape)), shape};
  }

  /// `count` notes of the host's, not initialised, in memory that it reads and writes; popped as tensors are.
  template <class V>
  V* push_notes(index_t count) {
    static_assert(std::is_trivially_copyable_v<V>);
    return reinterpret_cast<V*>(push_bytes(notes_, detail::byte_count<V>(count)));
  }

  /// Small values (views, shapes, numbers) as one note each.
  template <class V>
  void push_value(const V& value) {
    std::memcpy(push_bytes(notes_, sizeof(V)), &value, sizeof(V));
  }
  template <class V>
  V pop_value() {
    return value_at<V>(pop_bytes(sizeof(V)));
  }

  /// The value on top, left where it is. Throws as pop does.
  template <class V>
  V top_value() {
    if (entries_.empty() || entries_.back().bytes != sizeof(V)) return pop_value<V>();
    return value_at<V>(entries_.back().block);
  }

  bool empty() const { return entries_.empty(); }
  std::size_t entries() const { return entries_.size(); }
  /// The memory of its tensors, and of the host's notes.
  const stack_arena& memory() const { return arena_; }
  const stack_arena& notes() const { return notes_; }

  /// Drops everything, as after a forward pass whose backward pass was abandoned.
  void clear() {
    entries_.clear();
    arena_.release({});
    notes_.release({});
  }

 private:
  PUFFERFISH_NOINLINE std::byte* push_bytes(stack_arena& arena, std::size_t bytes) {
    const stack_arena::mark below = arena.top();
    std::byte* block = arena.allocate(bytes);
    entries_.push_back({below, &arena == &notes_, block, bytes});
    return block;
  }

  PUFFERFISH_NOINLINE std::byte* pop_bytes(std::size_t bytes) {
    if (entries_.empty() || entries_.back().bytes != bytes) fail_to_pop(bytes);
    const entry top = entries_.back();
    entries_.pop_back();
    (top.is_note ? notes_ : arena_).release(top.below);
    return top.block;
  }

  PUFFERFISH_COLD void fail_to_pop(std::size_t bytes) const {
    const std::string found =
        entries_.empty() ? "is empty" : detail::message({"has one of ", entries_.back().bytes});
    detail::throw_error<state_error>(
        {"tape: backward wants an entry of ", bytes, " bytes, the tape ", found,
         ": run forward in training mode first, and each backward pass once, in opposite order"});
  }

  // By way of bytes, so that V needs no default constructor.
  template <class V>
  static V value_at(const std::byte* block) {
    static_assert(std::is_trivially_copyable_v<V>);
    std::array<std::byte, sizeof(V)> bytes;
    std::memcpy(bytes.data(), block, sizeof(V));
    return std::bit_cast<V>(bytes);
  }

  struct entry {
    stack_arena::mark below;
    bool is_note;
    std::byte* block;
    std::size_t bytes;
  };

  stack_arena arena_, notes_;
  std::vector<entry> entries_;
};

PUFFERFISH_NAMESPACE_END
