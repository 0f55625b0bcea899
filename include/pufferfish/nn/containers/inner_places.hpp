// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `inner_places`: addresses of the tensors that are passed from one child of a container to the next.

#include <algorithm>
#include <cstddef>

#include <pufferfish/core/arena.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Assigns an address to each of the tensors 0 .. count of a chain, in which each tensor is computed from its
/// neighbour: in memory of the caller, or in one of two blocks of scratch. Call put, next or stay for each
/// tensor along the chain, from either end, then take_blocks().
///
///     inner_places<float> places(frame, notes, 2);
///     places.put(2, y);            // the last output
///     places.next(1, elements);    // in a block
///     places.take_blocks();
///     float* const middle = places[1];
template <class T>
class inner_places {
 public:
  /// `frame`: scratch for the blocks; `notes`: host scratch for the list of places.
  inner_places(scratch_frame& frame, scratch_frame& notes, std::size_t count)
      : frame_(frame), places_(notes.take<place>(static_cast<index_t>(count) + 1)) {}

  /// Tensor i is stored in `memory`, which the caller owns.
  void put(std::size_t i, T* memory) { last_ = places_[i] = {memory, none}; }

  /// Tensor i is stored in the block that does not hold the tensor placed before it.
  void next(std::size_t i, index_t elements) { add(i, {nullptr, last_.block == 0 ? 1 : 0}, elements); }

  /// Tensor i is stored in the place of the tensor placed before it.
  void stay(std::size_t i, index_t elements) { add(i, last_, elements); }

  /// Allocates the blocks, each as large as the largest tensor in it.
  void take_blocks() {
    for (int b = 0; b < none; ++b) blocks_[b] = frame_.take<T>(largest_[b]);
  }

  /// Address of tensor i, after take_blocks().
  T* operator[](std::size_t i) const {
    return places_[i].block == none ? places_[i].memory : blocks_[places_[i].block];
  }

 private:
  static constexpr int none = 2;
  // Memory of the caller, or a block (0 or 1).
  struct place {
    T* memory;
    int block;
  };

  // Notes the place of a tensor and the size that its block needs.
  void add(std::size_t i, const place& at, index_t elements) {
    last_ = places_[i] = at;
    if (at.block != none) largest_[at.block] = std::max(largest_[at.block], elements);
  }

  scratch_frame& frame_;
  place* places_;
  place last_{nullptr, none};
  index_t largest_[none] = {};
  T* blocks_[none] = {};
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
