// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `mask_tracker`: finds out, for networks whose masks belong to another framework, when all ranks have the
/// same zeros, so that gradients may be exchanged without them.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/dist/communicator.hpp>
#include <pufferfish/prune/mask.hpp>

PUFFERFISH_NAMESPACE_BEGIN

struct mask_tracker_options {
  /// Updates for which the pattern of zeros must have been the same. 1 where the framework has a mask of its
  /// own, whose zeros never come back to life.
  std::uint64_t steps = 5;
};

/// What a tracker has counted since it was made.
struct mask_tracker_counters {
  std::uint64_t compact = 0;  ///< steps whose exchange may leave zeros out
  std::uint64_t full = 0;     ///< steps whose exchange must not
  std::uint64_t resets = 0;   ///< steps in which ranks that were ready had different patterns
};

/// The pattern is the weight_mask of the weights that are not 0. It is never taken from gradients: dead units
/// have zeros in them, at other places on every rank.
///
///     mask_tracker tracker{weight_mask(store)};
///     // in each step: forward and backward pass, then an exchange, of the
///     // survivors of tracker.mask() if tracker.compact(), then the update, then
///     tracker.observe(ctx, store);
///     tracker.agree(comm);  // on all ranks
///
/// A rank is ready when `steps` updates have left the pattern as it was. Its word is then the digest of the
/// pattern, never 0, and else 0. The next exchange is compact if the least and the largest word of all ranks
/// are equal and not 0. If all ranks are ready and the words differ, every rank starts to count anew. All
/// ranks decide alike in every step, so that none leaves out what another one sends.
///
/// The counts are not in checkpoints: a resumed run begins with `steps` full exchanges.
class mask_tracker {
 public:
  /// `pattern`: which tensors are watched; its bits have no meaning. Throws value_error for 0 steps.
  explicit mask_tracker(weight_mask pattern, const mask_tracker_options& options = {})
      : options_(options), pattern_(std::move(pattern)) {
    if (options.steps == 0) PUFFERFISH_THROW(value_error("mask_tracker: 0 steps; at least 1"));
  }

  /// Looks at the weights after an update: a span of values that are arranged as the arena, or a store, also
  /// of parameters whose values are in the memory of a host framework. Local. Errors as
  /// weight_mask::set_nonzero.
  template <class Values>
  void observe(context<device::cpu>& ctx, const Values& values) {
    const std::vector<std::uint64_t> before(pattern_.words().begin(), pattern_.words().end());
    pattern_.set_nonzero(ctx, values);
    changed(!seen_ || !std::ranges::equal(before, pattern_.words()));
  }
  /// The same with a pattern that the caller has made: bits for the weights that are not 0. Throws
  /// state_error for a pattern of other tensors.
  void observe(const weight_mask& pattern) {
    pattern_.check_tensors({pattern.tensors().begin(), pattern.tensors().end()});
    const bool differs = !seen_ || !(pattern == pattern_);
    if (differs) pattern_.set_words(pattern.words());
    changed(differs);
  }

  /// What this rank tells the others.
  std::uint64_t word() const { return steady_ >= options_.steps ? word_ : 0; }

  /// Decides about the next exchange: once a step, after observe. Collective: 16 bytes.
  template <class Comm>
  void agree(Comm& comm) {
    detail::check_communicator<Comm>();
    // The largest word is the complement of the least complement.
    std::array<std::uint64_t, 2> words{word(), ~word()};
    comm.all_reduce_min(std::span<std::uint64_t>(words));
    decide(words[0], ~words[1]);
  }
  /// The same for a caller that has found the least and the largest word of all ranks.
  void decide(std::uint64_t least, std::uint64_t largest) {
    compact_ = least != 0 && least == largest;
    ++(compact_ ? counters_.compact : counters_.full);
    if (compact_ || least == 0) return;
    ++counters_.resets;
    steady_ = 0;
  }

  /// Whether the next exchange may leave out what the mask prunes.
  bool compact() const { return compact_; }
  /// The pattern. The pointer changes when the pattern has changed, and only then: what was made for the mask
  /// (a compact_sum) is made anew if the pointer differs.
  const std::shared_ptr<const weight_mask>& mask() {
    if (!mask_) mask_ = std::make_shared<const weight_mask>(pattern_);
    return mask_;
  }

  const mask_tracker_counters& counters() const { return counters_; }

 private:
  void changed(bool differs) {
    steady_ = differs ? 0 : steady_ + 1;
    seen_ = true;
    if (!differs) return;
    mask_.reset();
    word_ = std::max<std::uint64_t>(1, pattern_.digest());
  }

  mask_tracker_options options_;
  weight_mask pattern_;
  std::shared_ptr<const weight_mask> mask_;  // a copy of the pattern, if it was asked for
  std::uint64_t word_ = 0;                   // digest of the pattern
  std::uint64_t steady_ = 0;                 // updates since the pattern changed
  bool seen_ = false, compact_ = false;
  mask_tracker_counters counters_;
};

PUFFERFISH_NAMESPACE_END
