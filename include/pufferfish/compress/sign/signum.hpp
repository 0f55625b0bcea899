// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `signum`: a compressor that replaces gradients by the majority of the signs of all ranks' momentum, at one
/// bit per value.

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include <pufferfish/core/number_text.hpp>
#include <pufferfish/distributed/compressor.hpp>
#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/nn/parameter_store.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of signum.
struct signum_options {
  double momentum = 0.9;                         ///< factor of the momentum, 0 <= momentum < 1
  static constexpr bool brings_momentum = true;  ///< replaces the optimizer's momentum
};

/// Text of the options for messages, such as "Signum, momentum 0.9".
inline std::string describe(const signum_options& options) {
  return "Signum, momentum " + detail::exact_number(options.momentum);
}

namespace detail {

/// Number of values whose signs share a word.
inline constexpr index_t signs_a_word = 32;

/// Packs signs into a word: bit i is set if values[i] < 0, or, with negative_zero, if values[i] <= 0. NaN
/// counts as positive. `count` is at most signs_a_word. Scalar reference for the kernel momentum_signs.
template <class T>
std::uint32_t pack_signs(const T* values, index_t count, bool negative_zero = false) {
  std::uint32_t word = 0;
  for (index_t i = 0; i < count; ++i) {
    word |= static_cast<std::uint32_t>(negative_zero ? values[i] <= T(0) : values[i] < T(0)) << i;
  }
  return word;
}

/// An unsigned integer type of the size of T.
template <class T>
using bits_like = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
/// The numbers 1 << i for the bits i of a word.
template <class Word>
inline constexpr auto single_bits = [] {
  std::array<Word, static_cast<std::size_t>(signs_a_word)> bits{};
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = Word{1} << i;
  return bits;
}();

/// Number of bits that count the votes of the largest number of ranks.
inline constexpr index_t most_vote_planes = 31;

/// The kernels of signum.inc.
///   momentum_signs(keep, take, negative_zero, gradient, kept, words, count)
///       kept = keep kept + take gradient; packs the signs of `kept` as pack_signs does
///   majority(votes, words, ranks, stride, negative, ties)
///       count_votes for `words` words; those of rank r start at votes + r stride
///   spread_signs(negative, ties, to, count)
///       up to 32 values of a word: 0 for a tie, else -1 or 1
#define PUFFERFISH_KERNELS sign_passes
#define PUFFERFISH_KERNEL_FILE <pufferfish/compress/sign/signum.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// Result of a vote about 32 values. Bit i of `negative` is set if most votes for value i are negative, bit i
/// of `tie` if as many votes are negative as positive.
struct sign_vote {
  std::uint32_t negative = 0;
  std::uint32_t tie = 0;
};

/// Counts the votes of all ranks for 32 values, one value after the other: `words` words, at multiples of
/// `stride` in `votes`. Scalar reference for `majority`.
inline sign_vote count_votes(const std::uint32_t* votes, index_t words, index_t stride) {
  sign_vote vote;
  for (index_t i = 0; i < signs_a_word; ++i) {
    index_t negative = 0;
    for (index_t r = 0; r < words; ++r) negative += static_cast<index_t>(votes[r * stride] >> i & 1U);
    vote.negative |= static_cast<std::uint32_t>(2 * negative > words) << i;
    vote.tie |= static_cast<std::uint32_t>(2 * negative == words) << i;
  }
  return vote;
}

}  // namespace detail

/// Compressor that replaces gradients by a majority vote over signs. On each rank m = momentum m +
/// (1 - momentum) g, at the first step m = g. The result is, element by element, the sign of m on most ranks:
/// -1 or 1, and 0 if the votes are equal. Bernstein, Wang, Azizzadenesheli and Anandkumar, signSGD with
/// majority vote (ICML 2018; ICLR 2019), the form with momentum.
///
/// A sign is one bit, which has no room for zero. A rank whose m is exactly zero votes for 1 in even steps
/// and for -1 in odd ones (the exchange's steps, the same on all ranks). An element whose gradient is zero on
/// all ranks, such as a row of an embedding that no batch has touched, then moves by the learning rate and
/// back every two steps instead of drifting. A NaN votes for 1, so the result does not show that a gradient
/// is not finite.
///
/// The signs are gathered on all ranks, 32 to a word. The optimizer uses the result as the gradient: use SGD
/// without momentum (weight decay is added after the vote) and a learning rate for signs, such as 1e-4.
///
/// \code
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, signum_options{});
/// SGD<float> sgd(make_optimizer_target(net.store()), {.momentum = 0.0});
/// // in each step: exchange.begin(ctx), forward and backward pass, exchange.finish(ctx), sgd.step(ctx, 1e-4)
/// \endcode
template <class T>
class signum {
 public:
  using value_type = T;

  /// Makes the compressor for all parameters of a store, with zero momentum. Throws value_error unless
  /// 0 <= momentum < 1.
  signum(const parameter_store<T>& store, const signum_options& options) : options_(options) {
    if (!(options.momentum >= 0.0 && options.momentum < 1.0)) {
      detail::throw_error<value_error>({"signum: momentum ", options.momentum, " is outside 0 .. 1"});
    }
    index_t size = 0;
    for (const auto& entry : store.parameters()) size += entry.thing->size();
    resize(size);
  }

  /// Makes a compressor of elements [begin, end) of the arena, whose momentum is zero.
  signum part(index_t begin, index_t end) const {
    signum result(options_);
    result.resize(end - begin);
    return result;
  }

  /// Number of rounds of messages in a step.
  int rounds() const { return 1; }

  /// Updates m and writes its signs to the block of this rank; the message gathers the blocks. m = g if
  /// place.step is 0. `gradients` has the length of the arena and is not changed.
  compressor_message<T> encode(context<device::cpu>& ctx, const exchange_place& place, int,
                               std::span<T> gradients) {
    votes_.resize(std::vector<std::size_t>(static_cast<std::size_t>(place.ranks),
                                           static_cast<std::size_t>(payload_bytes())));
    const T keep = place.step == 0 ? T(0) : static_cast<T>(options_.momentum);
    const T take = place.step == 0 ? T(1) : static_cast<T>(1.0 - options_.momentum);
    const bool negative_zero = place.step % 2 != 0;
    const T* from = gradients.data();
    T* kept = momentum_.data();
    std::uint32_t* mine = votes_.words(static_cast<std::size_t>(place.rank)).data();
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::sign_passes, momentum_signs<T>);
    // Chunks are whole words.
    ops::for_chunks(ctx, momentum_.size(), [=](index_t begin, index_t end) {
      kernel(keep, take, negative_zero, from + begin, kept + begin, mine + begin / detail::signs_a_word,
             end - begin);
    });
    compressor_message<T> message;
    message.gathered = &votes_;
    return message;
  }

  /// Counts the gathered signs and overwrites `gradients` with the results of the votes: -1, 0 or 1.
  void decode(context<device::cpu>& ctx, const exchange_place& place, int, std::span<T> gradients) {
    const std::uint32_t* votes = votes_.words(0).data();
    T* to = gradients.data();
    const index_t words = words_;
    const auto count = PUFFERFISH_KERNEL(widest_isa(), detail::sign_passes, majority);
    const auto spread = PUFFERFISH_KERNEL(widest_isa(), detail::sign_passes, spread_signs<T>);
    ops::for_chunks(ctx, momentum_.size(), [=](index_t begin, index_t end) {
      constexpr index_t block = 64;  // words, while their votes are in the cache
      std::uint32_t negative[block], ties[block];
      for (index_t first = begin; first < end; first += block * detail::signs_a_word) {
        const index_t last = std::min(end, first + block * detail::signs_a_word);
        const index_t here = (last - first + detail::signs_a_word - 1) / detail::signs_a_word;
        count(votes + first / detail::signs_a_word, here, place.ranks, words, negative, ties);
        for (index_t w = 0; w < here; ++w) {
          const index_t at = first + w * detail::signs_a_word;
          spread(negative[w], ties[w], to + at, std::min(detail::signs_a_word, last - at));
        }
      }
    });
  }

  /// Bytes that this rank contributes to a step: 4 ceil(N / 32) for N elements.
  index_t payload_bytes() const { return words_ * static_cast<index_t>(sizeof(std::uint32_t)); }

  /// State for checkpoints: "exchange.momentum" is m, one value per element, different on every rank.
  std::vector<compressor_state<T>> states() { return {{"exchange.momentum", momentum_.span(), true}}; }

  /// Text of the options.
  std::string describe() const { return pufferfish::describe(options_); }

 private:
  explicit signum(const signum_options& options) : options_(options) {}
  // Makes the momentum of `size` elements, filled with zeros.
  void resize(index_t size) {
    momentum_ = aligned_buffer<T>(size);
    words_ = (size + detail::signs_a_word - 1) / detail::signs_a_word;
  }

  signum_options options_;
  aligned_buffer<T> momentum_;
  index_t words_ = 0;
  rank_blocks votes_;
};

/// Makes a signum compressor for the gradients of `store`. Throws value_error unless 0 <= momentum < 1.
template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const signum_options& options) {
  return signum<T>(store, options);
}

PUFFERFISH_NAMESPACE_END
