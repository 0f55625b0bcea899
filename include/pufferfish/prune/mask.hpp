// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `weight_mask`: which weights of a network remain, one bit for each weight that may be pruned.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/prune/mask_passes.hpp>
#include <pufferfish/prune/mask_report.hpp>
#include <pufferfish/prune/masked_tensor.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// One bit for each weight of the prunable tensors of a network; a set bit means that the weight remains. The
/// bit decides, not the value: a remaining weight may be 0. A new mask keeps everything.
///
///     auto mask = std::make_shared<weight_mask>(net.store());
///     prune_by_magnitude(*mask, net.store(), {.share = 0.8});
///     mask_weights(ctx, *mask, net.store());
///     mask_states(ctx, *mask, optimizer);
///
/// In every later step, mask_gradients (prune/apply_mask.hpp) or a compact_sum (prune/compact_sum.hpp) must
/// mask the gradients before the optimizer's step. Bit i % 64 of a tensor's word i / 64 is the tensor's
/// element i in storage order; bits after the last element are clear. A mask is valid for one layout of the
/// arenas: the switch to low rank needs a new mask.
///
/// A mask owns its bits and copies of the tensors' names and layouts; it keeps no pointer to the store. It
/// takes 1 bit per prunable weight. Const members may be called from several threads at once, each with a
/// context of its own. No member is collective: broadcast_mask sends a mask to other ranks.
class weight_mask {
 public:
  /// Number of bits in a word.
  static constexpr index_t word_bits = detail::mask_word_bits;

  /// `tensors`: all tensors of the arena, without gaps, as coded_tensors lists them. `choice` is called once
  /// for each and decides which have bits; all bits are set.
  explicit weight_mask(const std::vector<coded_tensor>& tensors,
                       const prunable_choice& choice = is_prunable) {
    std::size_t words = 0;
    for (const coded_tensor& tensor : tensors) {
      const bool prunable = choice(tensor);
      tensors_.push_back({tensor, prunable, words, tensor.size});
      if (prunable) words += detail::words_for(tensor.size);
      (prunable ? prunable_ : unprunable_) += tensor.size;
    }
    words_.assign(words, ~std::uint64_t{0});
    for (const masked_tensor& tensor : tensors_) {
      const index_t last = tensor.size % word_bits;
      if (tensor.prunable && last != 0) {
        words_[tensor.first_word + detail::words_for(tensor.size) - 1] = (std::uint64_t{1} << last) - 1;
      }
    }
    pieces_ = detail::mask_pieces(tensors_);
  }
  /// Makes a mask for all parameters that have elements. `choice` is called only for parameters of role
  /// weight.
  template <class T>
  explicit weight_mask(const parameter_store<T>& store, const prunable_choice& choice = is_prunable)
      : weight_mask(coded_tensors(store), [&](const coded_tensor& tensor) {
          const auto& all = store.parameters();
          const auto found = std::find_if(all.begin(), all.end(),
                                          [&](const auto& entry) { return entry.name == tensor.name; });
          return found->thing->role() == parameter_role::weight && choice(tensor);
        }) {}

  /// All tensors that have elements, in arena order.
  const std::vector<masked_tensor>& tensors() const { return tensors_; }
  index_t size() const { return prunable_ + unprunable_; }  ///< number of elements of the arena
  index_t prunable() const { return prunable_; }            ///< number of weights that have a bit
  /// Number of set bits.
  index_t kept() const {
    index_t kept = 0;
    for (const masked_tensor& tensor : tensors_) kept += tensor.prunable ? tensor.kept : 0;
    return kept;
  }
  /// Number of elements of the arena that remain: kept() and all elements that are not prunable.
  index_t survivors() const { return kept() + unprunable_; }

  /// Whether an element remains; always true for a tensor that is not prunable. 0 <= element < size of the
  /// tensor, which is not checked.
  bool keeps(std::size_t tensor, index_t element) const {
    const masked_tensor& of = tensors_[tensor];
    return !of.prunable || (words_[detail::word_of(of, element)] >> element % word_bits & 1U) != 0;
  }
  /// Clears the bit of an element of a prunable tensor. Does nothing if it is clear. The tensor must be
  /// prunable, and 0 <= element < its size, which is not checked.
  void remove(std::size_t tensor, index_t element) {
    masked_tensor& of = tensors_[tensor];
    std::uint64_t& word = words_[detail::word_of(of, element)];
    const std::uint64_t bit = std::uint64_t{1} << element % word_bits;
    of.kept -= (word & bit) != 0 ? 1 : 0;
    word &= ~bit;
  }

  /// Calls f(tensor, element) for each remaining weight of the prunable tensors first .. last - 1, in arena
  /// order. f may remove the weight that it is called for.
  template <class F>
  void for_each_kept(std::size_t first, std::size_t last, F&& f) const {
    for (std::size_t t = first; t < last; ++t) {
      if (!tensors_[t].prunable) continue;
      for (std::size_t w = 0; w < detail::words_for(tensors_[t].size); ++w) {
        for (std::uint64_t word = words_[tensors_[t].first_word + w]; word != 0; word &= word - 1) {
          f(t, static_cast<index_t>(w) * word_bits + std::countr_zero(word));
        }
      }
    }
  }

  /// Sets pruned values to +0, also those that are NaN, in place, on all threads; other values keep their
  /// bits. `values` are the elements begin .. begin + size - 1 of the arena, in host memory. Throws
  /// value_error, with the values unchanged, unless these are whole tensors.
  template <class T>
  void apply(context<device::cpu>& ctx, std::span<T> values, index_t begin = 0) const {
    const auto [first, last] = tensor_range(begin, begin + static_cast<index_t>(values.size()));
    if (first == last) return;
    const auto keep = PUFFERFISH_KERNEL(widest_isa(), detail::mask_passes, keep_marked<T>);
    T* const to = values.data();
    pieces_.for_each(ctx, first, last, [&, begin](const detail::mask_piece& at) {
      keep(words_.data() + at.word, to + (at.offset - begin), at.size);
    });
  }

  /// Indices of the tensors that make up elements [begin, end) of the arena: the first, and one past the
  /// last. Throws value_error unless `begin` and `end` are boundaries of tensors.
  std::pair<std::size_t, std::size_t> tensor_range(index_t begin, index_t end) const {
    const auto from = [this](index_t element) {
      return std::partition_point(tensors_.begin(), tensors_.end(),
                                  [=](const masked_tensor& tensor) { return tensor.offset < element; });
    };
    const auto is_end = [&](auto at, index_t element) {
      return at == tensors_.end() ? element == size() : element == at->offset;
    };
    const auto first = from(begin), last = from(end);
    if (begin < 0 || end < begin || !is_end(first, begin) || !is_end(last, end)) {
      detail::throw_error<value_error>(
          {"weight_mask: elements ", begin, " .. ", end, " are no whole tensors of ", size(), " elements"});
    }
    return {static_cast<std::size_t>(first - tensors_.begin()),
            static_cast<std::size_t>(last - tensors_.begin())};
  }

  /// The bits of all prunable tensors, for checkpoints and broadcasts. Each tensor starts at a new word and
  /// has ceil(size / 64) of them. The span is valid as long as the mask.
  std::span<const std::uint64_t> words() const { return words_; }
  /// Replaces all bits. Throws value_error, without changing the mask, for a wrong number of words, and for a
  /// set bit whose position in the words of a tensor is at or after the tensor's size; the text names the
  /// tensor.
  void set_words(std::span<const std::uint64_t> words) {
    if (words.size() != words_.size()) {
      detail::throw_error<value_error>(
          {"weight_mask: ", words.size(), " words of bits for a mask of ", words_.size()});
    }
    for (const masked_tensor& tensor : tensors_) {
      const index_t last = tensor.size % word_bits;
      if (tensor.prunable && last != 0 &&
          words[tensor.first_word + detail::words_for(tensor.size) - 1] >> last != 0) {
        detail::throw_error<value_error>({"weight_mask: ", tensor.name, " has ", tensor.size,
                                          " elements, and bits are set after the last one"});
      }
    }
    std::ranges::copy(words, words_.begin());
    count_kept();
  }

  /// Sets the bits of all weights that are not 0, clears the others. NaN is not 0, -0 is. `values`: the whole
  /// arena, in host memory. Throws value_error for another length.
  template <class T>
  void set_nonzero(context<device::cpu>& ctx, std::span<const T> values) {
    check_size(static_cast<index_t>(values.size()));
    std::vector<const T*> places;
    for (const masked_tensor& tensor : tensors_) places.push_back(values.data() + tensor.offset);
    mark_nonzero(ctx, places);
  }
  /// Sets the bits of all weights of a store that are not 0 and clears the others. NaN is not 0, -0 is. The
  /// values may be in the memory of a host framework. Throws state_error if they are on a device or the mask
  /// was made for a network of other parameters.
  template <class T>
  void set_nonzero(context<device::cpu>& ctx, const parameter_store<T>& store) {
    if (!store.on_host()) {
      PUFFERFISH_THROW(state_error("weight_mask: the values are on a device: use model::on_host"));
    }
    check_store(store);
    mark_nonzero(ctx, detail::places_of(store));
  }

  /// A hash of names, sizes, prunable flags and all bits. Equal masks have equal digests; different masks
  /// have different digests, except for hash collisions.
  std::uint64_t digest() const {
    hasher all;
    for (const masked_tensor& tensor : tensors_) {
      all.text(tensor.name).number(tensor.size).number(tensor.prunable ? 1 : 0);
    }
    return all.values(words()).digest();
  }
  /// True if bits, names, layouts and prunable flags are equal.
  bool operator==(const weight_mask& other) const {
    return words_ == other.words_ && std::ranges::equal(tensors_, other.tensors_, same_tensor);
  }

  /// Throws state_error, naming the tensor, unless the mask's tensors have these names, layouts and offsets.
  void check_tensors(const std::vector<coded_tensor>& tensors) const {
    for (std::size_t t = 0; t < std::max(tensors.size(), tensors_.size()); ++t) {
      if (t < tensors.size() && t < tensors_.size() && tensors[t].name == tensors_[t].name &&
          tensors[t].layout == tensors_[t].layout && tensors[t].offset == tensors_[t].offset) {
        continue;
      }
      const auto name = [t](const auto& of) { return t < of.size() ? of[t].name : std::string("nothing"); };
      detail::throw_error<state_error>({"weight_mask: made for other arenas: tensor ", t, " is ",
                                        name(tensors_), " in the mask and ", name(tensors),
                                        " in the network, or their shapes differ; make a new mask"});
    }
  }
  /// Throws state_error, naming the tensor, unless the mask's tensors have the names, layouts and offsets of
  /// the parameters of a store that have elements.
  template <class T>
  void check_store(const parameter_store<T>& store) const {
    check_tensors(coded_tensors(store));
  }

  /// Counts of all prunable tensors and of the whole mask.
  mask_report report() const {
    mask_report result;
    result.unprunable = unprunable_;
    for (const masked_tensor& tensor : tensors_) {
      if (!tensor.prunable) continue;
      result.rows.push_back({tensor.name, tensor.kept, tensor.size});
      result.kept += tensor.kept;
      result.total += tensor.size;
    }
    return result;
  }

 private:
  // Whether two tensors have the same name, layout and choice.
  static bool same_tensor(const masked_tensor& a, const masked_tensor& b) {
    return a.name == b.name && a.layout == b.layout && a.prunable == b.prunable;
  }

  // Throws value_error for another number of values than the arena's.
  void check_size(index_t found) const {
    if (found != size())
      detail::throw_error<value_error>({"weight_mask: ", found, " values for a mask of ", size()});
  }
  // Sets the bits of all weights that are not 0. places[t]: address of the first value of tensor t.
  template <class T>
  void mark_nonzero(context<device::cpu>& ctx, const std::vector<const T*>& places) {
    const auto mark = PUFFERFISH_KERNEL(widest_isa(), detail::mask_passes, mark_nonzero<T>);
    pieces_.for_each(ctx, 0, tensors_.size(), [&](const detail::mask_piece& at) {
      mark(places[at.tensor] + (at.offset - tensors_[at.tensor].offset), words_.data() + at.word, at.size);
    });
    count_kept();
  }
  // Counts the set bits of each tensor anew.
  void count_kept() {
    for (masked_tensor& tensor : tensors_) {
      if (!tensor.prunable) continue;
      tensor.kept = 0;
      for (std::size_t w = 0; w < detail::words_for(tensor.size); ++w) {
        tensor.kept += std::popcount(words_[tensor.first_word + w]);
      }
    }
  }

  std::vector<masked_tensor> tensors_;
  std::vector<std::uint64_t> words_;
  detail::mask_pieces pieces_;
  index_t prunable_ = 0, unprunable_ = 0;
};

PUFFERFISH_NAMESPACE_END
