// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `masked_tensor`: a tensor of a weight_mask. `is_prunable`: the default choice of tensors that have bits.

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

#include <pufferfish/compress/codec.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Callback that decides whether the weights of a tensor may be pruned. The constructor of weight_mask calls
/// it once for each tensor; the mask does not keep a copy of the callback.
using prunable_choice = std::function<bool(const coded_tensor&)>;

/// The default choice: tensors of 2 or more logical dimensions whose output index is innermost in storage.
/// These are the weights of convolutions, linear layers, attention and LSTM layers, and their low-rank
/// factors. Biases and normalization parameters are vectors. Embedding tables, low-rank or not, are stored
/// row by row; a table of width 1 has the same layout as a matrix, so it needs a choice of the caller's own.
inline bool is_prunable(const coded_tensor& tensor) {
  return tensor.layout.dims >= 2 && tensor.layout.strides[0] == 1;
}

/// A tensor of a network, with the place of its bits in a weight_mask.
struct masked_tensor : coded_tensor {
  bool prunable = false;       ///< whether the mask has a bit for each element
  std::size_t first_word = 0;  ///< its first word of bits; it has ceil(size / 64) words if prunable, else 0
  index_t kept = 0;            ///< number of remaining elements; all if the tensor is not prunable
};

namespace detail {

/// Number of bits in a word of a mask.
inline constexpr index_t mask_word_bits = 64;

/// Number of words for the bits of `size` elements.
inline std::size_t words_for(index_t size) {
  return static_cast<std::size_t>((size + mask_word_bits - 1) / mask_word_bits);
}
/// Index of the word with the bit of an element of a tensor.
inline std::size_t word_of(const masked_tensor& tensor, index_t element) {
  return tensor.first_word + static_cast<std::size_t>(element / mask_word_bits);
}

/// Work of one task: `size` elements of a tensor, from element `offset` of the arena and word `word` on.
struct mask_piece {
  std::size_t tensor, word;
  index_t offset, size;
};

/// Addresses of the values of all tensors that have elements, in arena order. The values are in the store's
/// arena or in the memory of a host framework.
template <class T>
std::vector<const T*> places_of(const parameter_store<T>& store) {
  std::vector<const T*> places;
  for (const auto& entry : store.parameters()) {
    if (entry.thing->size() > 0) places.push_back(entry.thing->data());
  }
  return places;
}

/// The prunable tensors, cut into pieces of whole words, at most 16384 elements each, as tasks of threads.
/// The cuts depend on sizes alone, so that results do not depend on the number of threads.
class mask_pieces {
 public:
  mask_pieces() = default;
  /// Cuts the prunable tensors of the list.
  explicit mask_pieces(const std::vector<masked_tensor>& tensors) {
    constexpr index_t most = 16384;
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      const masked_tensor& tensor = tensors[t];
      for (index_t at = 0; tensor.prunable && at < tensor.size; at += most) {
        pieces_.push_back({t, word_of(tensor, at), tensor.offset + at, std::min(most, tensor.size - at)});
      }
      ends_.push_back(pieces_.size());
    }
  }

  /// Calls f(piece) for all pieces of the tensors first .. last - 1, on all threads.
  template <class F>
  void for_each(context<device::cpu>& ctx, std::size_t first, std::size_t last, F&& f) const {
    const std::size_t from = ends_[first], count = ends_[last] - from;
    ctx.parallel_for(static_cast<index_t>(count),
                     [&](index_t task, int) { f(pieces_[from + static_cast<std::size_t>(task)]); });
  }

 private:
  std::vector<mask_piece> pieces_;
  std::vector<std::size_t> ends_{0};  // ends_[t]: number of pieces of the tensors before t
};

}  // namespace detail

PUFFERFISH_NAMESPACE_END
