// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `two_hop_signum`: computes the result of `signum`, and sends fewer bytes on three or more ranks.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <pufferfish/compress/codes/two_hop_codes.hpp>
#include <pufferfish/compress/sign/signum.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of two_hop_signum; the fields have the same meaning as in signum_options.
struct two_hop_signum_options {
  double momentum = 0.9;                         ///< factor of the momentum, 0 <= momentum < 1
  static constexpr bool brings_momentum = true;  ///< replaces the optimizer's momentum
};

/// Text of the options for messages, such as "Signum, momentum 0.9, two hops".
inline std::string describe(const two_hop_signum_options& options) {
  return describe(signum_options{options.momentum}) + ", two hops";
}

/// Compressor with the result of `signum`, whose votes the owners of stripes (stripe_of) count instead of
/// every rank:
///
///     hop 1: the signs of rank w's momentum in stripe r are sent to rank r, 32 signs to a word
///     hop 2: rank r counts them and sends to all ranks one plane of bits, "most are negative"; if the number
///            of ranks is even, also a second plane, "as many are negative as positive"
///
/// The result has the same bits as signum's for every number of ranks. The state is the same too: a
/// checkpoint of one class can be continued with the other. With B bytes of signs, a rank of p sends 2 B (p -
/// 1) / p bytes for odd p and 3 B (p - 1) / p for even p; signum sends B (p - 1). So from p = 3 on this class
/// sends less, and for p = 2 it sends more.
///
/// Each member is local; the exchange must have called start with the place's rank and number of ranks before
/// encode.
///
/// \code
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, two_hop_signum_options{});
/// \endcode
template <class T>
class two_hop_signum {
 public:
  using value_type = T;

  /// Makes the compressor for all parameters of a store, with zero momentum. Throws value_error unless
  /// 0 <= momentum < 1.
  two_hop_signum(const parameter_store<T>& store, const two_hop_signum_options& options) : options_(options) {
    if (!(options.momentum >= 0.0 && options.momentum < 1.0)) {
      detail::throw_error<value_error>({"two_hop_signum: momentum ", options.momentum, " is outside 0 .. 1"});
    }
    index_t size = 0;
    for (const auto& entry : store.parameters()) size += entry.thing->size();
    resize(size);
  }

  /// Makes a compressor of elements [begin, end) of the arena, cut into stripes of their own, whose momentum
  /// is zero. Its votes for these elements are those of this object if both have the same momentum.
  two_hop_signum part(index_t begin, index_t end) const {
    two_hop_signum result(options_);
    result.resize(end - begin);
    return result;
  }

  /// Prepares the object for rank `rank` of `ranks`, 0 <= rank < ranks. Keeps the momentum.
  void start(int rank, int ranks) {
    std::vector<std::size_t> lengths, results;
    planes_ = ranks % 2 == 0 ? 2 : 1;
    stripes_.clear();
    for (int r = 0; r < ranks; ++r) {
      stripes_.push_back(stripe_of(momentum_.size(), r, ranks));
      lengths.push_back(static_cast<std::size_t>(words_of(stripes_.back())) * sizeof(std::uint32_t));
      results.push_back(lengths.back() * static_cast<std::size_t>(planes_));
    }
    own_ = stripes_[static_cast<std::size_t>(rank)];
    out_.resize(lengths);
    in_.resize(std::vector<std::size_t>(lengths.size(), lengths[static_cast<std::size_t>(rank)]));
    results_.resize(results);
  }

  /// Number of rounds of messages in a step.
  int rounds() const { return 2; }

  /// Prepares the message of a round. Round 0 updates the momentum and sends its signs to the owners of the
  /// stripes. Round 1 gathers the results of the votes, which decode of round 0 has computed, as bit planes:
  /// one bit per value that is set for a negative result, and for an even number of ranks a second bit that
  /// is set for a tie. `gradients` is not changed.
  compressor_message<T> encode(context<device::cpu>& ctx, const exchange_place& place, int round,
                               std::span<T> gradients) {
    compressor_message<T> message;
    if (round == 1) {
      message.gathered = &results_;
      return message;
    }
    pack(ctx, place.step, gradients.data());
    message.to_ranks = &out_;
    message.from_ranks = &in_;
    return message;
  }

  /// Round 0 counts the votes of this rank's stripe; round 1 overwrites `gradients` with -1, 0 or 1.
  void decode(context<device::cpu>& ctx, const exchange_place& place, int round, std::span<T> gradients) {
    if (round == 0) return count(ctx, place);
    for (std::size_t r = 0; r < stripes_.size(); ++r) {
      const std::uint32_t* const negative = results_.words(r).data();
      spread(ctx, negative, planes_ == 2 ? negative + words_of(stripes_[r]) : nullptr,
             gradients.data() + stripes_[r].begin, stripes_[r].size());
    }
  }

  /// Bytes that this rank contributes to a step: all sign words and the planes of its stripe.
  index_t payload_bytes() const {
    return static_cast<index_t>(out_.bytes().size()) +
           planes_ * words_of(own_) * static_cast<index_t>(sizeof(std::uint32_t));
  }

  /// State for checkpoints: "exchange.momentum" is m, one value per element, different on every rank.
  std::vector<compressor_state<T>> states() { return {{"exchange.momentum", momentum_.span(), true}}; }

  /// Text of the options.
  std::string describe() const { return pufferfish::describe(options_); }

 private:
  explicit two_hop_signum(const two_hop_signum_options& options) : options_(options) {}
  void resize(index_t size) {
    momentum_ = aligned_buffer<T>(size);
    start(0, 1);
  }

  // Number of words of the signs of a stripe.
  static index_t words_of(const stripe_range& stripe) {
    return (stripe.size() + detail::signs_a_word - 1) / detail::signs_a_word;
  }

  // Stripes are whole words: their blocks together are the words of the whole arena.
  void pack(context<device::cpu>& ctx, std::uint64_t step, const T* from) {
    const T keep = step == 0 ? T(0) : static_cast<T>(options_.momentum);
    const T take = step == 0 ? T(1) : static_cast<T>(1.0 - options_.momentum);
    const bool negative_zero = step % 2 != 0;
    T* const kept = momentum_.data();
    std::uint32_t* const words = out_.words(0).data();
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::sign_passes, momentum_signs<T>);
    ops::for_chunks(ctx, momentum_.size(), [=](index_t begin, index_t end) {
      kernel(keep, take, negative_zero, from + begin, kept + begin, words + begin / detail::signs_a_word,
             end - begin);
    });
  }

  // Computes the planes of this rank's stripe.
  void count(context<device::cpu>& ctx, const exchange_place& place) {
    const std::uint32_t* const votes = in_.words(0).data();
    std::uint32_t* const negative = results_.words(static_cast<std::size_t>(place.rank)).data();
    const index_t words = words_of(own_), ranks = place.ranks;
    std::uint32_t* const ties = planes_ == 2 ? negative + words : nullptr;
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::sign_passes, majority);
    ops::for_chunks(ctx, words, [=](index_t begin, index_t end) {
      constexpr index_t block = 64;  // words, while their votes are in the cache
      for (index_t first = begin; first < end; first += block) {
        const index_t here = std::min(block, end - first);
        std::uint32_t unused[block];
        kernel(votes + first, here, ranks, words, negative + first, ties == nullptr ? unused : ties + first);
      }
    });
  }

  // Writes `size` values of one stripe from its planes; ties == nullptr: there are no ties.
  static void spread(context<device::cpu>& ctx, const std::uint32_t* negative, const std::uint32_t* ties,
                     T* to, index_t size) {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::sign_passes, spread_signs<T>);
    ops::for_chunks(ctx, size, [=](index_t begin, index_t end) {
      for (index_t at = begin; at < end; at += detail::signs_a_word) {
        const index_t word = at / detail::signs_a_word;
        kernel(negative[word], ties == nullptr ? 0U : ties[word], to + at,
               std::min(detail::signs_a_word, end - at));
      }
    });
  }

  two_hop_signum_options options_;
  aligned_buffer<T> momentum_;
  std::vector<stripe_range> stripes_;
  stripe_range own_;                // this rank's stripe
  index_t planes_ = 1;              // number of planes of bits that an owner sends
  rank_blocks out_, in_, results_;  // signs sent and received, planes of all stripes
};

/// Makes a two_hop_signum compressor for the gradients of `store`. Throws value_error unless
/// 0 <= momentum < 1.
template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const two_hop_signum_options& options) {
  return two_hop_signum<T>(store, options);
}

PUFFERFISH_NAMESPACE_END
