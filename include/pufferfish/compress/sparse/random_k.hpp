// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `random_k`: averages some entries of each tensor, at random positions that are the same on all ranks.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include <pufferfish/compress/codes/gathered_codes.hpp>
#include <pufferfish/compress/sparse/entry_lists.hpp>
#include <pufferfish/core/number_text.hpp>
#include <pufferfish/ops/elementwise/dropout.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of random_k.
struct random_k_options {
  /// Share of the entries of each tensor that is sent; above 0, at most 1. Not used if `rank` is above 0.
  double ratio = 0.01;
  /// If above 0, the number of entries follows from this rank instead of the ratio: as many entries of a
  /// matrix of rows x columns (outputs x everything else) as PowerSGD of this rank sends values, min(rows
  /// columns, rank (rows + columns)), and all entries of a vector.
  index_t rank = 0;
  /// Whether one run of consecutive entries is selected in each tensor, instead of independent entries.
  bool block = false;
  code_memory memory = code_memory::error_feedback;
  /// Whether the k sent entries of a tensor of n elements are multiplied by n / k, so that the expected
  /// result is the mean of the gradients. value_error in combination with a memory.
  bool unbiased = false;
  std::uint64_t seed = 1;  ///< seed of the positions, the same on all ranks
};

/// Text of the options for messages, such as "random-k, ratio 0.01, error feedback, seed 1" or "random block,
/// budget of rank 2, no memory, unbiased, seed 1".
inline std::string describe(const random_k_options& options) {
  const std::string budget = options.rank > 0 ? detail::message({"budget of rank ", options.rank})
                                              : "ratio " + detail::shortest_number(options.ratio);
  return detail::message({options.block ? "random block, " : "random-k, ", budget, ", ",
                          to_string(options.memory), options.unbiased ? ", unbiased" : "", ", seed ",
                          options.seed});
}

namespace detail {

/// Generates uniform numbers from the words of a random stream, in order.
class bounded_draws {
 public:
  /// Starts at position 0 of the stream.
  explicit bounded_draws(const random_stream& random) : random_(random) {}

  /// Returns the next number, uniform in 0 .. bound - 1, 1 <= bound < 2^32, without bias: the high word of
  /// bound times a random word, which is drawn again if the low word is below 2^32 mod bound (Lemire, "Fast
  /// random integer generation in an interval", ACM TOMACS 29, 2019).
  std::uint32_t below(std::uint32_t bound) {
    std::uint64_t product = next() * bound;
    if (static_cast<std::uint32_t>(product) < bound) {
      const std::uint32_t least = (0U - bound) % bound;
      while (static_cast<std::uint32_t>(product) < least) product = next() * bound;
    }
    return static_cast<std::uint32_t>(product >> 32);
  }

 private:
  static constexpr index_t run = 256;

  // The next word of the stream.
  std::uint64_t next() {
    if (used_ == run) {
      const auto words = PUFFERFISH_KERNEL(widest_isa(), ops::detail::dropouts, random_words);
      words(random_.seed(), random_.stream(), position_, run, words_);
      position_ += static_cast<std::uint64_t>(run);
      used_ = 0;
    }
    return words_[used_++];
  }

  random_stream random_;
  std::uint64_t position_ = 0;  // position in the stream of the word after words_
  index_t used_ = run;
  std::uint32_t words_[run];
};

/// Writes k of the numbers 0 .. n - 1, ascending, every subset with the same probability; 0 <= k <= n < 2^31.
/// Floyd's algorithm (Bentley and Floyd, "A sample of brilliance", CACM 30, 1987): for j = n - k .. n - 1 a
/// number r is drawn from 0 .. j and taken, or j if r is taken already.
inline void draw_subset(const random_stream& random, index_t n, index_t k, std::int32_t* to) {
  constexpr index_t bits = 64;
  std::vector<std::uint64_t> taken(static_cast<std::size_t>((n + bits - 1) / bits));
  bounded_draws draws(random);
  for (index_t j = n - k; j < n; ++j) {
    const index_t r = draws.below(static_cast<std::uint32_t>(j) + 1);
    const std::uint64_t bit = std::uint64_t{1} << r % bits;
    std::uint64_t& word = taken[static_cast<std::size_t>(r / bits)];
    if ((word & bit) != 0) {
      taken[static_cast<std::size_t>(j / bits)] |= std::uint64_t{1} << j % bits;
    } else {
      word |= bit;
    }
  }
  for (std::size_t i = 0; i < taken.size(); ++i) {
    for (std::uint64_t word = taken[i]; word != 0; word &= word - 1) {
      *to++ = static_cast<std::int32_t>(static_cast<index_t>(i) * bits + __builtin_ctzll(word));
    }
  }
}

/// Writes k consecutive numbers of 0 .. n - 1 from a uniform start, 0 following n - 1; 1 <= k <= n < 2^31.
inline void draw_block(const random_stream& random, index_t n, index_t k, std::int32_t* to) {
  const auto start = static_cast<index_t>(bounded_draws(random).below(static_cast<std::uint32_t>(n)));
  const index_t before_end = std::min(k, n - start);
  std::iota(to, to + before_end, static_cast<std::int32_t>(start));
  std::iota(to + before_end, to + k, 0);
}

}  // namespace detail

/// Compressor that sends entries at random positions. In each step all ranks draw the same k of the n
/// positions of every tensor. No communication is needed for this: the draw is a function of the seed, the
/// step and the tensor's name. With gradient g_w and memory e_w on rank w of p (zero at the start):
///
///     D_w = g_w + e_w;  result_i = (1 / p) (D_0,i + ... + D_p-1,i) at positions i drawn, else 0;
///     e_w = D_w with 0 at positions drawn
///
/// Without memory e stays zero. With `unbiased` the result is multiplied by n / k. Only the values are sent,
/// in one all-reduced sum. k = max(1, floor(ratio n)), or follows from `rank`. With `block` the positions are
/// k consecutive ones in storage order, continuing at the first position after the last.
/// Konecny and Richtarik, "Randomized distributed mean estimation", 2016; Stich, Cordonnier and Jaggi,
/// NeurIPS 2018; random block: Vogels, Karimireddy and Jaggi, NeurIPS 2019.
///
/// The positions are not stored in checkpoints: a resumed run draws them again from the step. A subset of a
/// tensor is drawn with n / 8 bytes of workspace, in a time of n / 64 + k operations.
///
/// \code
/// const random_k_options options{.ratio = 0.1};
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, options);
/// \endcode
template <class T>
class random_k {
 public:
  using value_type = T;

  /// Makes the compressor for some tensors. Throws value_error for options out of range (see new_compressor)
  /// and, naming the tensor, for a tensor of 2^31 elements or more.
  random_k(std::vector<coded_tensor> tensors, const random_k_options& options)
      : options_(options),
        tensors_(std::move(tensors)),
        lists_(counts_of(tensors_, options)),
        rate_(options.memory == code_memory::rescaled_error_feedback) {
    if (options.memory != code_memory::none) memory_ = aligned_buffer<T>(coded_size(tensors_));
    sum_ = aligned_buffer<T>(lists_.size());
    positions_.resize(static_cast<std::size_t>(lists_.size()));
  }
  /// Makes the compressor for all parameters of a store. The store is not changed and need not outlive the
  /// object. Throws value_error for options out of range and for a tensor of 2^31 elements or more.
  random_k(const parameter_store<T>& store, const random_k_options& options)
      : random_k(coded_tensors(store), options) {}

  /// Makes a compressor of elements [begin, end) of the arena with a memory of zeros. It draws the positions
  /// that this object draws for these elements' tensors, since draws depend on names.
  random_k part(index_t begin, index_t end) const { return {coded_parts(tensors_, begin, end), options_}; }

  /// Number of rounds of messages in a step.
  int rounds() const { return 1; }

  /// Draws the positions of place.step, sends the values there as `sum` and sets the memory to 0 there.
  /// `gradients` is not changed.
  compressor_message<T> encode(context<device::cpu>& ctx, const exchange_place& place, int,
                               std::span<T> gradients) {
    draw(ctx, place.step);
    const bool has_memory = memory_.size() > 0;
    rate_.rescale(ctx, place.learning_rate, {memory_.span()});
    if (has_memory) detail::add_gradients<T>(ctx, gradients, memory_.span());
    T* const values = has_memory ? memory_.data() : gradients.data();
    lists_.for_each(ctx, [&](std::size_t t, index_t begin, index_t end) {
      const T factor = options_.unbiased ? scale_of(t) : T(1);
      T* const from = values + tensors_[t].offset;
      const std::int32_t* const position = positions_.data();
      T* const to = sum_.data();
      for (index_t i = begin; i < end; ++i) to[i] = from[position[i]] * factor;
      if (!has_memory) return;
      for (index_t i = begin; i < end; ++i) from[position[i]] = T(0);
    });
    compressor_message<T> message;
    message.sum = sum_.span();
    return message;
  }

  /// Overwrites all of `gradients`: the sums times 1 / p at the positions of the last encode, else 0.
  void decode(context<device::cpu>& ctx, const exchange_place& place, int, std::span<T> gradients) {
    ops::fill(ctx, gradients, T(0));
    const T factor = T(1) / static_cast<T>(place.ranks);
    lists_.for_each(ctx, [&](std::size_t t, index_t begin, index_t end) {
      const T* const from = sum_.data();
      const std::int32_t* const position = positions_.data();
      T* const to = gradients.data() + tensors_[t].offset;
      for (index_t i = begin; i < end; ++i) to[position[i]] = from[i] * factor;
    });
  }

  /// Bytes that this rank contributes to a step: sizeof(T) for each of the k positions of every tensor.
  index_t payload_bytes() const { return lists_.size() * static_cast<index_t>(sizeof(T)); }

  /// States for checkpoints; none without memory. With memory: "exchange.error", one value per element,
  /// different on every rank, and "exchange.memory_rate" if the memory is rescaled.
  std::vector<compressor_state<T>> states() {
    if (memory_.size() == 0) return {};
    return rate_.after({{"exchange.error", memory_.span(), true}});
  }

  /// Text of the options. An exchange refuses ranks whose texts differ, and so ranks with other seeds.
  std::string describe() const { return pufferfish::describe(options_); }

 private:
  // Computes the number k of entries of each tensor. Throws value_error for options out of range.
  static std::vector<index_t> counts_of(const std::vector<coded_tensor>& tensors,
                                        const random_k_options& options) {
    if (options.rank < 0) detail::throw_error<value_error>({"random_k: rank ", options.rank, " is negative"});
    if (options.rank == 0) detail::check_entry_ratio("random_k", options.ratio);
    if (options.unbiased && options.memory != code_memory::none) {
      detail::throw_error<value_error>({"random_k: unbiased true with memory ", to_string(options.memory),
                                        "; the unbiased form has no memory"});
    }
    std::vector<index_t> counts;
    for (const coded_tensor& tensor : tensors) {
      detail::check_entry_indices("random_k", tensor.name, tensor.size);
      counts.push_back(options.rank > 0 ? budget_of_rank(tensor, options.rank)
                                        : detail::entries_of_share(options.ratio, tensor.size));
    }
    return counts;
  }

  // Computes min(n, rank (rows + columns)) for a tensor of n elements, without overflow for large ranks.
  static index_t budget_of_rank(const coded_tensor& tensor, index_t rank) {
    if (tensor.layout.dims < 2) return tensor.size;
    const index_t rows = tensor.layout.shape[0], sides = rows + tensor.size / rows;
    return rank <= tensor.size / sides ? rank * sides : tensor.size;
  }

  // The factor n / k of a tensor.
  T scale_of(std::size_t tensor) const {
    return static_cast<T>(static_cast<double>(tensors_[tensor].size) /
                          static_cast<double>(lists_.count(tensor)));
  }

  // Fills positions_, in the layout of lists_. The random stream does not depend on the rank.
  void draw(context<device::cpu>& ctx, std::uint64_t step) {
    ctx.parallel_for(static_cast<index_t>(tensors_.size()), [&](index_t task, int) {
      const auto t = static_cast<std::size_t>(task);
      const index_t size = tensors_[t].size, count = lists_.count(t);
      const random_stream random = detail::code_randoms(options_.seed, "random_k", {0, step, 0}, tensors_[t]);
      std::int32_t* const to = positions_.data() + lists_.first(t);
      if (count == size) {
        std::iota(to, to + count, 0);
      } else if (options_.block) {
        detail::draw_block(random, size, count, to);
      } else {
        detail::draw_subset(random, size, count, to);
      }
    });
  }

  random_k_options options_;
  std::vector<coded_tensor> tensors_;
  detail::entry_lists lists_;            // the entries sent of each tensor
  std::vector<std::int32_t> positions_;  // positions of the last step, local to each tensor
  aligned_buffer<T> memory_;             // the memory e
  detail::memory_rate<T> rate_;
  aligned_buffer<T> sum_;
};

/// Makes a random_k compressor for the gradients of `store`. Throws value_error for a ratio that is not above
/// 0 and at most 1 (if `rank` is 0), for a negative rank, for `unbiased` together with a memory and, naming
/// the tensor, for a tensor of 2^31 elements or more.
template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const random_k_options& options) {
  return random_k<T>(store, options);
}

PUFFERFISH_NAMESPACE_END
