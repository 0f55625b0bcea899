// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The tape: a stack of data that forward passes keep for their backward passes. Layers push in the forward
/// pass and pop the same entries in reverse order in the backward pass, so a layer can run twice in a step.
///
/// Every value records the object that pushed it (its owner), and only its owner can pop it. Layers whose
/// entries have the same sizes therefore cannot run backward in the wrong order. A layer pushes its blocks of
/// memory first and a value last, and pops the value first.
///
/// \code
/// // Forward pass of a layer; x is a view.
/// const auto t = ctx.tape().push<float>(extents<2>{rows, rank});
/// ctx.tape().push_value(*this, x);
/// // Its backward pass.
/// const auto x = ctx.tape().pop_value<tensor_view<const float, 2>>(*this);
/// const auto t = ctx.tape().pop<float>(extents<2>{x.extent(0), rank});
/// \endcode

#include <array>
#include <bit>
#include <cstring>
#include <vector>

#include <pufferfish/core/arena.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A last-in-first-out stack. Entries do not move while they are on it. Tensors are stored in the memory of
/// the context's device, notes (small data of the host about tensors) in host memory.
/// One thread at a time may use a tape. Pushing allocates from the system only until the first step has grown
/// the arenas.
class tape {
 public:
  tape() = default;
  /// Makes an empty tape that stores tensors in memory from `source`, which must outlive the tape.
  explicit tape(memory_source& source) : arena_(source) {}

  /// Pushes memory for `count` elements and returns it. The elements are not initialised; the memory is kept
  /// until the matching pop. Throws shape_error for more bytes than index_t counts.
  template <class T>
  T* push(index_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    return reinterpret_cast<T*>(push_bytes(arena_, detail::byte_count<T>(count)));
  }

  /// Pushes memory for a tensor and returns it as a dense view of the given shape. Throws shape_error as
  /// volume does.
  template <class T, std::size_t N>
  tensor_view<T, N> push(const extents<N>& shape) {
    return {push<T>(volume<N>(shape)), shape};
  }

  /// Removes the top entry. Its elements stay readable until the next push. Throws state_error if the tape is
  /// empty or the top entry is not `count` elements of T. Possible causes: the forward pass did not run in
  /// training mode, or passes ran in the wrong order.
  template <class T>
  T* pop(index_t count) {
    return reinterpret_cast<T*>(pop_bytes(detail::byte_count<T>(count)));
  }

  /// Pops the top entry and returns its elements as a dense view. Only the size in bytes is compared, not the
  /// shape.
  template <class T, std::size_t N>
  tensor_view<T, N> pop(const extents<N>& shape) {
    return {pop<T>(volume<N>(shape)), shape};
  }

  /// Pushes `count` elements in host memory, not initialised, and returns them. They are removed with pop(),
  /// as tensors are.
  template <class V>
  V* push_notes(index_t count) {
    static_assert(std::is_trivially_copyable_v<V>);
    return reinterpret_cast<V*>(push_bytes(notes_, detail::byte_count<V>(count)));
  }

  /// Pushes a small value (views, shapes, numbers) of `owner`, a layer or a model, as one note.
  /// V is trivially copyable. Memory that the value refers to must exist until the value is popped.
  template <class V, class Owner>
  void push_value(const Owner& owner, const V& value) {
    std::memcpy(push_bytes(notes_, sizeof(V), &owner), &value, sizeof(V));
  }
  /// Removes and returns the top value. Throws state_error, naming `owner`, and leaves the tape unchanged,
  /// unless the top entry is a value of this size pushed by the object `owner`. Objects are identified by
  /// address, so a layer must not be moved between push and pop.
  template <class V, class Owner>
  V pop_value(const Owner& owner) {
    const V value = top_value<V>(owner);
    pop_bytes(sizeof(V));
    return value;
  }

  /// Returns the top value without removing it. Throws the errors of pop_value.
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

  /// Overwrites the top value and keeps its owner: for a container that moves the data of a view in the
  /// value. Throws state_error unless the top entry has the size of a V.
  template <class V>
  void replace_value(const V& value) {
    if (entries_.empty() || entries_.back().bytes != sizeof(V)) fail_to_pop(sizeof(V));
    std::memcpy(entries_.back().block, &value, sizeof(V));
  }

  /// Whether the tape has no entries, and their number.
  bool empty() const { return entries_.empty(); }
  std::size_t entries() const { return entries_.size(); }
  /// The memory in which the tape's tensors are stored, for statistics of its use.
  const stack_arena& memory() const { return arena_; }
  /// The host memory in which the tape stores small values (see push_value) of the layers.
  const stack_arena& notes() const { return notes_; }

  /// Removes all entries, for example after a forward pass whose backward pass was abandoned.
  void clear() {
    entries_.clear();
    arena_.release({});
    notes_.release({});
  }

 private:
  // Pushes an entry of `bytes` bytes and returns its address. `owner`: of a value; nullptr for a block of
  // memory.
  PUFFERFISH_NOINLINE std::byte* push_bytes(stack_arena& arena, std::size_t bytes,
                                            const void* owner = nullptr) {
    const stack_arena::mark below = arena.top();
    std::byte* block = arena.allocate(bytes);
    entries_.push_back({below, &arena == &notes_, block, bytes, owner});
    return block;
  }

  // Whether the last entry is a value of this owner and size.
  bool is_on_top(const void* owner, std::size_t bytes) const {
    return !entries_.empty() && entries_.back().owner == owner && entries_.back().bytes == bytes;
  }

  // Pops the last entry and returns its address, whose contents stay until the next push. Throws state_error
  // for another size.
  PUFFERFISH_NOINLINE std::byte* pop_bytes(std::size_t bytes) {
    if (entries_.empty() || entries_.back().bytes != bytes) fail_to_pop(bytes);
    const entry top = entries_.back();
    entries_.pop_back();
    (top.is_note ? notes_ : arena_).release(top.below);
    return top.block;
  }

  // Throws state_error, with the sizes that were expected and found.
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

  // Reads a value from its bytes, so that V needs no default constructor.
  template <class V>
  static V value_at(const std::byte* block) {
    static_assert(std::is_trivially_copyable_v<V>);
    std::array<std::byte, sizeof(V)> bytes;
    std::memcpy(bytes.data(), block, sizeof(V));
    return std::bit_cast<V>(bytes);
  }

  // An entry: its memory, and the end of its arena before it.
  struct entry {
    stack_arena::mark below;
    bool is_note;
    std::byte* block;
    std::size_t bytes;
    const void* owner;  // owner of a value; nullptr for a block of memory
  };

  stack_arena arena_, notes_;
  std::vector<entry> entries_;
};

PUFFERFISH_NAMESPACE_END
