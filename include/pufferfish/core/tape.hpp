// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The tape: what forward passes keep for their backward passes. A stack: layers push on the way forward and
/// pop the same things in opposite order on the way back, so one layer can run twice in a step.
///
/// Every value names the object that pushed it, its owner, and only that object can pop it. Two layers whose
/// entries look alike therefore cannot be run backward in the wrong order. A layer pushes its blocks of
/// memory first and a value last, and pops that value first.

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

  /// A small value (views, shapes, numbers) of `owner`, a layer or a model, as one note.
  template <class V, class Owner>
  void push_value(const Owner& owner, const V& value) {
    std::memcpy(push_bytes(notes_, sizeof(V), &owner), &value, sizeof(V));
  }
  /// Takes the value on top off. Throws state_error, naming `owner`, and leaves the tape as it is, unless the
  /// top entry is a value of this size that the object `owner` pushed. An object that was moved or copied
  /// since is another one.
  template <class V, class Owner>
  V pop_value(const Owner& owner) {
    const V value = top_value<V>(owner);
    pop_bytes(sizeof(V));
    return value;
  }

  /// The value on top, left where it is. Throws as pop_value does.
  template <class V, class Owner>
  V top_value(const Owner& owner) const {
    if (!is_on_top(&owner, sizeof(V))) {
      if constexpr (requires { owner.describe(); }) {
        fail_to_pop_value(owner.describe());
      } else {
        fail_to_pop_value("a layer");
      }
    }
    return value_at<V>(entries_.back().block);
  }

  /// Overwrites the value on top, whose owner stays: for a container that moves what a view in it refers to.
  /// Throws state_error unless the top entry has the size of a V.
  template <class V>
  void replace_value(const V& value) {
    if (entries_.empty() || entries_.back().bytes != sizeof(V)) fail_to_pop(sizeof(V));
    std::memcpy(entries_.back().block, &value, sizeof(V));
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
  PUFFERFISH_NOINLINE std::byte* push_bytes(stack_arena& arena, std::size_t bytes,
                                            const void* owner = nullptr) {
    const stack_arena::mark below = arena.top();
    std::byte* block = arena.allocate(bytes);
    entries_.push_back({below, &arena == &notes_, block, bytes, owner});
    return block;
  }

  bool is_on_top(const void* owner, std::size_t bytes) const {
    return !entries_.empty() && entries_.back().owner == owner && entries_.back().bytes == bytes;
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

  [[noreturn]] PUFFERFISH_COLD void fail_to_pop_value(const std::string& owner) const {
    detail::throw_error<state_error>(
        {owner, ": backward without its forward pass: the tape ",
         entries_.empty() ? "is empty" : "ends with the entry of another layer or pass",
         ". Run forward in training mode first, then each backward pass once, in the opposite order of the "
         "forward passes of the same context; no layer may be moved in between"});
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
    const void* owner;  // of a value; nullptr: a block of memory
  };

  stack_arena arena_, notes_;
  std::vector<entry> entries_;
};

PUFFERFISH_NAMESPACE_END
