// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: results of steps on a device, and the graphs of a run's steps.

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include <pufferfish/gpu/kernels/train/training.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/gpu/runtime/graph.hpp>
#include <pufferfish/train/step_position.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// Sums over the steps of an epoch (loss, samples, skipped steps), in device memory. The host reads them
/// `lag` steps later, so that it waits for a step only if it is `lag` steps ahead of it. One thread at a time
/// uses an object.
class lagging_sums {
 public:
  static constexpr std::uint64_t lag = 4;

  lagging_sums() : sums_(device_memory(), 1), come_(pinned_memory(), lag) {}

  /// Starts an epoch with these sums, and forgets the results of earlier steps.
  void set(gpu_context& ctx, const kernels::epoch_sums& sums) {
    kernels::set_sums(ctx.stream(), sums, sums_.data());
    steps_ = 0;
  }
  /// Adds a step's results on the device. This is part of a step's work and may be captured.
  void add_step(gpu_context& ctx, const double* results, const step_share& share, const int* skip) {
    kernels::add_step(ctx.stream(), results, share.samples, skip, sums_.data());
  }

  /// Returns the sums as of `lag` steps ago, or nothing in the first `lag` steps of an epoch. Call it after a
  /// step's work; it must not be captured. Throws backend_error.
  std::optional<kernels::epoch_sums> after_step(gpu_context& ctx) {
    const std::uint64_t slot = steps_ % lag;
    std::optional<kernels::epoch_sums> seen;
    if (steps_ >= lag) {
      reached_[slot].synchronize();
      seen = come_.data()[slot];
    }
    check(cudaMemcpyAsync(come_.data() + slot, sums_.data(), sizeof(kernels::epoch_sums),
                          cudaMemcpyDeviceToHost, ctx.stream()),
          "cudaMemcpyAsync of sums to the host");
    reached_[slot].record(ctx.stream());
    ++steps_;
    return seen;
  }
  /// Returns the sums of all steps. Waits for the device. Does not throw the failures that the context has
  /// stored.
  kernels::epoch_sums now(gpu_context& ctx) {
    check(cudaStreamSynchronize(ctx.stream()), "cudaStreamSynchronize");
    kernels::epoch_sums values{};
    sums_.to_host({&values, 1});
    return values;
  }

 private:
  memory_block<kernels::epoch_sums> sums_, come_;
  std::array<event, lag> reached_;
  std::uint64_t steps_ = 0;
};

/// One graph for each combination of shapes in a run: for images, whole batches and the last batch of an
/// epoch; for sentences, one for each number of rows. If there are more than `most` graphs, the least
/// recently used one is dropped.
class graphs_by_key {
 public:
  static constexpr std::size_t most = 64;

  /// Returns the graph of this key. A new key gets an empty graph. The reference is valid until the next
  /// call.
  step_graph& of(step_graph::key_type key) {
    ++time_;
    const auto found =
        std::find_if(graphs_.begin(), graphs_.end(), [&](const auto& e) { return e.key == key; });
    if (found != graphs_.end()) {
      found->used = time_;
      return found->graph;
    }
    if (graphs_.size() < most) return graphs_.emplace_back(entry{key, time_, {}}).graph;
    entry& oldest = *std::min_element(graphs_.begin(), graphs_.end(),
                                      [](const entry& a, const entry& b) { return a.used < b.used; });
    before_ += oldest.graph.replays();
    oldest = {key, time_, {}};
    return oldest.graph;
  }
  /// Drops all graphs, after the end of their last launches. replays() still counts them.
  void clear() {
    before_ = replays();
    graphs_.clear();
  }

  /// Number of replays of all graphs, including dropped ones.
  std::uint64_t replays() const {
    std::uint64_t count = before_;
    for (const entry& e : graphs_) count += e.graph.replays();
    return count;
  }

 private:
  struct entry {
    step_graph::key_type key;
    std::uint64_t used;
    step_graph graph;
  };

  std::uint64_t before_ = 0, time_ = 0;
  std::vector<entry> graphs_;
};

}  // namespace gpu::detail
PUFFERFISH_NAMESPACE_END
