// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: one step of a training run, from the batch to the parameters, and its results. This header has
/// the CPU's form: a step is over when take() returns. <pufferfish/gpu.hpp> has the device's form.

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/distributed/exchange.hpp>
#include <pufferfish/optim/clip.hpp>
#include <pufferfish/optim/frobenius_decay.hpp>
#include <pufferfish/optim/optimizer.hpp>
#include <pufferfish/prune/scale_sparsity.hpp>
#include <pufferfish/train/device_parts.hpp>
#include <pufferfish/train/host_mirror.hpp>
#include <pufferfish/train/progress_record.hpp>
#include <pufferfish/train/step_position.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// References to the objects that the steps of a run work with; none is owned.
template <class Task, class Comm>
struct run_parts {
  using model_type = typename Task::model_type;
  using device_type = typename model_type::device_type;
  using value_type = stored_t<model_type>;
  using optimizer_type = pufferfish::optimizer<value_type, device_type>;
  using exchange_type = gradient_exchange<value_type, Comm, device_type>;

  context<device_type>& ctx;
  Task& task;
  model_type& net;
  Comm& comm;
  const run_options& options;
  optimizer_type& optimizer;
  exchange_type& exchange;
  frobenius_decay<value_type, device_type>* decay = nullptr;  ///< decay of the factors; nullptr: none
  scale_sparsity<value_type>* sparsity = nullptr;             ///< term of batch norms' weights; nullptr: none
};

/// Applies decay, sparsity term and optimizer step to elements offset .. offset + size - 1 of the arenas.
template <class Parts>
void update_range(const Parts& run, index_t offset, index_t size) {
  if (run.decay != nullptr) run.decay->add(run.ctx, offset, size);
  if (run.sparsity != nullptr) run.sparsity->add(offset, size);
  run.optimizer.step_range(run.ctx, offset, size);
}
/// Returns update_range for a bucket, as a function that an exchange calls.
template <class Parts>
auto update_bucket(const Parts& run) {
  return [&run](const gradient_bucket& bucket) { update_range(run, bucket.offset, bucket.size); };
}

/// The steps of a run on a device. Specialized for device::cpu below, and for the GPU in
/// <pufferfish/gpu.hpp>.
template <class Task, class Comm, class Device>
class run_steps;

/// Steps of a run on the CPU: forward and backward pass of the task, exchange of the gradients, clipping,
/// update. Without clipping, buckets are updated as they arrive, while others are still exchanged.
template <class Task, class Comm>
class run_steps<Task, Comm, device::cpu> {
  using parts = run_parts<Task, Comm>;
  using T = typename parts::value_type;

 public:
  /// The CPU's form needs none of the options here: each step has them in its parts.
  explicit run_steps(const run_options&) {}

  /// Starts steps with these parts at the record's position. The record must contain all earlier results.
  void start(const parts&, const training_record&) {}
  /// Releases the parts, which may be destroyed afterwards.
  void stop() {}

  /// Takes a step and adds its results to the record; a device adds results of earlier steps instead. The
  /// caller counts position and steps. Returns the number of steps that were newly found to be skipped.
  int take(const parts& run, const step_position& at, double rate, training_record& record) {
    const double exposed = run.exchange.report().exposed_ms;
    // A forward pass changes batch-norm statistics: they are restored if ranks are lost during the step.
    const std::span<T> buffers = run.net.store().buffers();
    if (may_lose_ranks(run.comm)) buffers_before_.assign(buffers.begin(), buffers.end());
    run.exchange.set_rate(run.ctx, rate);
    run.exchange.begin(run.ctx);
    const evaluation seen = run.task.step(run.ctx, run.net, at);
    record.note_loss(seen, at.total + 1);
    bool usable = true;
    try {
      usable = exchange_and_update(run, rate);
    } catch (const timeout_error&) {
      std::copy(buffers_before_.begin(), buffers_before_.end(), buffers.begin());
      throw;
    }
    record.exchange_ms += run.exchange.report().exposed_ms - exposed;
    if (!usable) {
      ++record.skipped_steps;
      return 1;
    }
    record.seen.loss_sum += seen.loss_sum;
    record.seen.correct += seen.correct;
    record.seen.count += seen.count;
    return 0;
  }

  /// Further state for a checkpoint: a line of text, or an empty text.
  std::string state() const { return {}; }
  /// Restores the text of state(). The arguments are the text and the name of the checkpoint for errors.
  void set_state(const std::string&, const std::string&) {}

  /// Number of steps that were replays of a CUDA graph.
  std::uint64_t replays() const { return 0; }

  /// Waits for all steps and adds their results to the record. Returns the number of steps newly found to be
  /// skipped.
  int settle(const parts&, training_record&) { return 0; }
  /// Waits for all steps and adds their results to the record, like settle(), but does not throw for lost
  /// ranks.
  int settle_alone(const parts&, training_record&) { return 0; }

 private:
  // Exchanges the gradients and updates the parameters. Returns false if the step was left out because
  // gradients are not finite. Parameters change only here, when no pass reads them any more. With a clipping
  // norm, or if ranks may be lost, no parameter changes before all gradients have arrived.
  static bool exchange_and_update(const parts& run, double rate) {
    const bool clips = run.options.clip_norm > 0.0;
    if (!clips && run.exchange.arrives_early() && !may_lose_ranks(run.comm)) {
      begin_update(run, rate);
      return run.exchange.finish(run.ctx, update_bucket(run));
    }
    if (!run.exchange.finish(run.ctx)) return false;
    const std::span<T> gradients = run.net.store().gradients();
    if (clips) clip_gradient_norm<T>(run.ctx, gradients, run.options.clip_norm);
    begin_update(run, rate);
    update_range(run, 0, static_cast<index_t>(gradients.size()));
    return true;
  }

  // Begins the step of the optimizer and of the decay with this learning rate.
  static void begin_update(const parts& run, double rate) {
    run.optimizer.begin_step(run.ctx, rate);
    if (run.decay != nullptr) run.decay->begin_step(run.ctx, rate);
  }

  std::vector<T> buffers_before_;  // buffers before this step; used only if ranks may be lost
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
