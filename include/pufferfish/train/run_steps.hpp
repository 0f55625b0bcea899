// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: one step of a training run, from the batch to the parameters, and what is known of it
/// afterwards. The CPU's here: a step is over when it returns. A device's comes with <pufferfish/gpu.hpp>.

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/dist/exchange.hpp>
#include <pufferfish/optim/clip.hpp>
#include <pufferfish/optim/frobenius_decay.hpp>
#include <pufferfish/train/device_parts.hpp>
#include <pufferfish/train/host_mirror.hpp>
#include <pufferfish/train/progress_record.hpp>
#include <pufferfish/train/step_position.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// What the steps of a run work with.
template <class Task, class Comm>
struct run_parts {
  using model_type = typename Task::model_type;
  using device_type = typename model_type::device_type;
  using value_type = stored_t<model_type>;
  using parts = device_parts<device_type>;
  using optimizer_type = typename parts::template optimizer_type<value_type>;
  using exchange_type = gradient_exchange<value_type, Comm, device_type>;

  context<device_type>& ctx;
  Task& task;
  model_type& net;
  Comm& comm;
  const run_options& options;
  optimizer_type& optimizer;
  exchange_type& exchange;
  frobenius_decay<value_type, device_type>* decay = nullptr;  ///< of the factors; nullptr: none
};

template <class Task, class Comm, class Device>
class run_steps;

template <class Task, class Comm>
class run_steps<Task, Comm, device::cpu> {
  using parts = run_parts<Task, Comm>;
  using T = typename parts::value_type;

 public:
  explicit run_steps(const run_options&) {}

  /// Begins with these parts, at what the record says; nothing else may be known of steps before.
  void start(const parts&, const training_record&) {}
  /// Forgets the parts, which may go then.
  void stop() {}

  /// Takes a step and records what it has seen, or what earlier ones have; position and number of steps are
  /// the caller's. Returns how many steps have turned out to be skipped.
  int take(const parts& run, const step_position& at, double rate, training_record& record) {
    const double exposed = run.exchange.report().exposed_ms;
    // A forward pass changes batch-norm statistics: they must be whole steps' too when ranks are lost.
    const std::span<T> buffers = run.net.store().buffers();
    if (may_lose_ranks(run.comm)) buffers_before_.assign(buffers.begin(), buffers.end());
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

  /// What else a checkpoint keeps: a line, or nothing.
  std::string state() const { return {}; }
  void set_state(const std::string&, const std::string&) {}

  /// How many steps were replays of a graph.
  std::uint64_t replays() const { return 0; }

  /// Waits for all steps and records what they have seen; returns as take.
  int settle(const parts&, training_record&) { return 0; }
  /// The same where ranks have been lost: throws nothing for that.
  int settle_alone(const parts&, training_record&) { return 0; }

 private:
  // False if the step was left out. Parameters change only here, when no pass reads them any more.
  static bool exchange_and_update(const parts& run, double rate) {
    const bool clips = run.options.clip_norm > 0.0;
    if (!clips && run.exchange.arrives_early() && !may_lose_ranks(run.comm)) {
      begin_update(run, rate);
      return run.exchange.finish(run.ctx, [&run](const gradient_bucket& bucket) {
        if (run.decay != nullptr) run.decay->add(run.ctx, bucket.offset, bucket.size);
        run.optimizer.step_range(run.ctx, bucket.offset, bucket.size);
      });
    }
    if (!run.exchange.finish(run.ctx)) return false;
    const std::span<T> gradients = run.net.store().gradients();
    if (clips) clip_gradient_norm<T>(run.ctx, gradients, run.options.clip_norm);
    begin_update(run, rate);
    const auto size = static_cast<index_t>(gradients.size());
    if (run.decay != nullptr) run.decay->add(run.ctx, 0, size);
    run.optimizer.step_range(run.ctx, 0, size);
    return true;
  }

  static void begin_update(const parts& run, double rate) {
    run.optimizer.begin_step(rate);
    if (run.decay != nullptr) run.decay->begin_step(run.ctx, rate);
  }

  std::vector<T> buffers_before_;  // of this step, where ranks may be lost
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
