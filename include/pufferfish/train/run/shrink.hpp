// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the ranks of a training run that shrink while it goes on (run_options::shrink_rank).

#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/prune/slice/slice_channels.hpp>
#include <pufferfish/train/options.hpp>
#include <pufferfish/train/progress_record.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The rank_shrinker of a run. Without run_options::shrink_rank there is none, and all calls do nothing.
class run_shrink {
 public:
  static constexpr const char* fact = "training.shrink";  ///< name of the counters in a checkpoint

  /// Makes the shrinker that the options ask for. Throws the value_error of rank_shrinker for invalid
  /// options.
  explicit run_shrink(const run_options& options) {
    if (options.shrink_rank) shrinker_.emplace(*options.shrink_rank);
  }

  /// To be called at the end of an epoch, with equal parameters on all ranks. While the network is low-rank,
  /// observes the contributions of the components and removes those that are due: from the factors, whose
  /// arenas move, and from the optimizer's states. rebind() makes optimizer and exchange for the new arenas.
  /// Throws value_error on a device.
  template <class Arenas, class Net, class Rebind>
  void run([[maybe_unused]] Arenas& bound, [[maybe_unused]] Net& net, const training_record& at,
           [[maybe_unused]] Rebind&& rebind) {
    if (!shrinker_ || !at.low_rank) return;
    if constexpr (std::is_same_v<typename Net::device_type, device::cpu>) {
      using T = typename Arenas::T;
      const std::vector<kept_components> kept = shrinker_->observe(contributions(net));
      if (kept.empty()) return;
      const auto slice = [&kept](auto& of) { slice_ranks(of, kept); };
      // The states are arranged like the arenas, so they are sliced while the network still has the old ones.
      std::vector<std::vector<T>> states;
      for (const auto& [name, values] : bound.optimizer->states()) {
        states.push_back(values.empty() ? std::vector<T>()
                                        : sliced_values<T>(net, std::span<const T>(values), slice));
      }
      const std::uint64_t steps = bound.optimizer->steps();
      slice(net);
      rebind();
      auto spans = bound.optimizer->states();
      for (std::size_t s = 0; s < spans.size(); ++s) std::ranges::copy(states[s], spans[s].second.begin());
      bound.optimizer->set_steps(steps);
      bound.exchange->set_steps(steps);
    } else {
      PUFFERFISH_THROW(value_error("training_run: ranks do not shrink on a device; train on a CPU"));
    }
  }

  /// Counters of the shrinker for a checkpoint; an empty text without one.
  std::string state() const { return shrinker_ ? shrinker_->to_text() : std::string(); }
  /// Restores the counters of a checkpoint `path` from state()'s text. Does nothing without a shrinker.
  void restore(const std::string& text, const std::string& path) {
    if (shrinker_) shrinker_->restore(text, path);
  }

 private:
  std::optional<rank_shrinker> shrinker_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
