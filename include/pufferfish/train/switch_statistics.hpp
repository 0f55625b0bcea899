// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the statistics that a training run takes from its last dense steps, for the truncation at the
/// switch.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/nn/collect_statistics.hpp>
#include <pufferfish/train/options.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Replaces the sums of every rank by their sum over all ranks, in one all-reduce. Collective.
template <class Comm>
void sum_over_ranks(Comm& comm, const std::vector<std::pair<std::string, output_statistics*>>& sums) {
  if (comm.size() == 1) return;
  // A rank without samples has not made room for any sum yet.
  std::vector<std::int64_t> present;
  for (const auto& [name, one] : sums) {
    for (const auto& part : one->parts()) present.push_back(part.values.empty() ? 0 : 1);
  }
  comm.all_reduce_max(std::span<std::int64_t>(present));
  std::vector<double> all;
  std::size_t at = 0;
  for (const auto& [name, one] : sums) {
    for (const auto& part : one->parts()) {
      if (present[at++] != 0) one->make(part.name);
    }
    for (const auto& part : one->parts()) all.insert(all.end(), part.values.begin(), part.values.end());
  }
  comm.all_reduce_sum(std::span<double>(all));
  auto from = all.begin();
  for (const auto& [name, one] : sums) {
    for (const auto& part : one->parts()) {
      const auto end = from + static_cast<std::ptrdiff_t>(part.values.size());
      std::copy(from, end, part.values.begin());
      from = end;
    }
  }
}

/// Takes the statistics of a run's model during some of its steps.
template <class Model>
class switch_statistics {
  using T = typename Model::value_type;
  using device_type = typename Model::device_type;
  static constexpr bool possible = std::is_same_v<device_type, device::cpu>;

 public:
  /// Throws value_error for a number of steps below 0, or above 0 on a device, where none can be taken.
  explicit switch_statistics(const run_options& options) : options_(options) {
    const index_t steps = options.statistics_steps;
    if (steps < 0) throw_error<value_error>({"statistics_steps: ", steps, " is negative"});
    if (!possible && steps > 0) {
      throw_error<value_error>({"statistics_steps: ", steps, " on a device, which takes no statistics"});
    }
  }

  /// Calls take_step(), watching it if it is one of the last dense steps: step `step` of `steps` of epoch
  /// `epoch`. take_step returns the samples of this rank whose mean is the loss, 0 for a step left out.
  template <class TakeStep>
  void run(context<device_type>& ctx, const Model& net, index_t epoch, index_t step, index_t steps,
           TakeStep&& take_step) {
    const bool last = options_.mode == training_mode::hybrid && epoch + 1 == options_.warmup_epochs &&
                      step + options_.statistics_steps >= steps;
    if constexpr (possible) {
      if (last) {
        if (!collector_) collector_.emplace(net, options_.factorize);
        double samples = 0.0;
        {
          const observed_scope watching(ctx, *collector_);
          samples = take_step();
        }
        return collector_->end_step(samples, samples > 0.0);
      }
    }
    take_step();
  }

  /// What has been seen on all ranks; nothing more is seen afterwards. Empty: nothing was. Collective.
  template <class Comm>
  std::optional<network_statistics> finish(Comm& comm) {
    std::optional<network_statistics> all;
    if constexpr (possible) {
      if (!collector_) return all;
      sum_over_ranks(comm, collector_->sums());
      all = collector_->statistics();
      collector_.reset();
    }
    return all;
  }

  /// Forgets what was seen: the model has other layers or arenas now.
  void forget() { collector_.reset(); }

 private:
  struct no_collector {};
  run_options options_;
  std::optional<std::conditional_t<possible, statistics_collector<T>, no_collector>> collector_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
