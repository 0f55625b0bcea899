// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `mask_tracker`: for networks that another framework prunes with masks of its own. Detects when all ranks
/// have the same zero weights, so that the exchange may leave out the gradients of these weights.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/distributed/communicator.hpp>
#include <pufferfish/prune/mask.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of mask_tracker; equal on all ranks.
struct mask_tracker_options {
  /// Number of updates for which the pattern of zeros must not have changed. 1 is enough if the framework has
  /// a mask of its own, so that pruned weights stay 0.
  std::uint64_t steps = 5;
};

/// Counts since the tracker was made.
struct mask_tracker_counters {
  std::uint64_t compact = 0;  ///< steps whose exchange may leave out zero weights
  std::uint64_t full = 0;     ///< steps whose exchange sends all gradients
  std::uint64_t resets = 0;   ///< steps in which all ranks were ready, but with different patterns
};

/// Observes the pattern of zero weights and decides, on all ranks alike, whether the next exchange may leave
/// out their gradients. The pattern is the weight_mask of the weights that are not 0. It is never derived
/// from gradients: dead units have zero gradients, at different places on each rank.
///
///     mask_tracker tracker{weight_mask(store)};
///     // in each step: forward and backward pass; an exchange, which sends only the
///     // survivors of tracker.mask() if tracker.compact(); the update; then
///     tracker.observe(ctx, store);
///     tracker.agree(comm);  // on all ranks
///
/// A rank is ready once `steps` updates in a row have not changed the pattern. The word of a ready rank is
/// the digest of its pattern (never 0); the word of any other rank is 0. The next exchange is compact if the
/// smallest and the largest word of all ranks are equal and not 0. If all ranks are ready and words differ,
/// every rank restarts its count. All ranks decide alike: none leaves out what another one sends.
///
/// The counts are not saved in checkpoints: a resumed run begins with `steps` + 1 full exchanges.
///
/// Members are called by one thread at a time. Only agree is collective. observe reads every weight once and
/// takes 1 bit of workspace per weight.
class mask_tracker {
 public:
  /// `pattern`: the tensors to watch; its bits are ignored. Throws value_error for 0 steps.
  explicit mask_tracker(weight_mask pattern, const mask_tracker_options& options = {})
      : options_(options), pattern_(std::move(pattern)) {
    if (options.steps == 0) PUFFERFISH_THROW(value_error("mask_tracker: 0 steps; at least 1"));
  }

  /// Compares the weights after an update with the last pattern. `values`: a span of all values in storage
  /// order, in host memory, or a store, whose values may be in the memory of a host framework. Not
  /// collective. Throws value_error for a span of another length, state_error for a store of other parameters
  /// or on a device.
  template <class Values>
  void observe(context<device::cpu>& ctx, const Values& values) {
    const std::vector<std::uint64_t> before(pattern_.words().begin(), pattern_.words().end());
    pattern_.set_nonzero(ctx, values);
    changed(!seen_ || !std::ranges::equal(before, pattern_.words()));
  }
  /// Compares a pattern that the caller has computed, a mask whose bits are set for the weights that are not
  /// 0, with the last pattern. Not collective. Throws state_error for a mask of tensors that have other
  /// names, layouts or offsets.
  void observe(const weight_mask& pattern) {
    pattern_.check_tensors({pattern.tensors().begin(), pattern.tensors().end()});
    const bool differs = !seen_ || !(pattern == pattern_);
    if (differs) pattern_.set_words(pattern.words());
    changed(differs);
  }

  /// The word that this rank contributes to the decision: the pattern's digest if the rank is ready, else 0.
  std::uint64_t word() const { return steady_ >= options_.steps ? word_ : 0; }

  /// Decides about the next exchange. Call it once a step, after observe, on all ranks. Collective: one
  /// minimum over the ranks of two numbers, 16 bytes. Throws the errors of the communicator.
  template <class Comm>
  void agree(Comm& comm) {
    detail::check_communicator<Comm>();
    // The largest word is the complement of the smallest complement.
    std::array<std::uint64_t, 2> words{word(), ~word()};
    comm.all_reduce_min(std::span<std::uint64_t>(words));
    decide(words[0], ~words[1]);
  }
  /// Decides about the next exchange, like agree(), from the smallest and the largest word() of all ranks,
  /// which the caller has computed. Not collective; the arguments must be equal on all ranks.
  void decide(std::uint64_t least, std::uint64_t largest) {
    compact_ = least != 0 && least == largest;
    ++(compact_ ? counters_.compact : counters_.full);
    if (compact_ || least == 0) return;
    ++counters_.resets;
    steady_ = 0;
  }

  /// Whether the next exchange may leave out the weights that the mask prunes: the last decision; false
  /// before the first.
  bool compact() const { return compact_; }
  /// The pattern as a mask. The pointer changes if and only if the pattern has changed. Objects made from the
  /// mask (a compact_sum) must be made anew when the pointer differs.
  const std::shared_ptr<const weight_mask>& mask() {
    if (!mask_) mask_ = std::make_shared<const weight_mask>(pattern_);
    return mask_;
  }

  const mask_tracker_counters& counters() const { return counters_; }

 private:
  // Counts a step whose zeros are, or are not, those of the step before.
  void changed(bool differs) {
    steady_ = differs ? 0 : steady_ + 1;
    seen_ = true;
    if (!differs) return;
    mask_.reset();
    word_ = std::max<std::uint64_t>(1, pattern_.digest());
  }

  mask_tracker_options options_;
  weight_mask pattern_;
  std::shared_ptr<const weight_mask> mask_;  // a copy of the pattern, made when first requested
  std::uint64_t word_ = 0;                   // digest of the pattern
  std::uint64_t steady_ = 0;                 // number of updates since the pattern changed
  bool seen_ = false, compact_ = false;
  mask_tracker_counters counters_;
};

PUFFERFISH_NAMESPACE_END
