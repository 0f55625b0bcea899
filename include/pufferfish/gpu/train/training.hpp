// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Device versions of the parts of a training_run (train/training_run.hpp) that differ between devices:
/// train/device_parts.hpp and train/run/steps.hpp.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/core/record_line.hpp>
#include <pufferfish/gpu/comm/staging.hpp>
#include <pufferfish/gpu/lowrank/factorize.hpp>
#include <pufferfish/gpu/ops/copy.hpp>
#include <pufferfish/gpu/ops/products.hpp>
#include <pufferfish/gpu/optim/loss_scaler.hpp>
#include <pufferfish/gpu/optim/optimizer.hpp>
#include <pufferfish/gpu/runtime/graph.hpp>
#include <pufferfish/gpu/train/augment.hpp>
#include <pufferfish/gpu/train/byte_stage.hpp>
#include <pufferfish/gpu/train/host_rows.hpp>
#include <pufferfish/gpu/train/input_place.hpp>
#include <pufferfish/gpu/train/step_results.hpp>
#include <pufferfish/train/run/steps.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Specialization of device_parts for NVIDIA devices: the types and functions of a training run that differ
/// between devices. The members are explained at device_parts<device::cpu> (train/device_parts.hpp).
template <>
struct device_parts<device::gpu> {
  using machine_options = gpu::context_options;
  using image_source = gpu::image_loader;
  using input_place = gpu::input_place;
  using byte_stage = gpu::byte_stage;

  /// Throws state_error if `parameters` is not an address in memory of the context's device.
  static void check_place(const context<device::gpu>& ctx, const void* parameters) {
    const int place = parameters == nullptr ? ctx.device() : gpu::device_of(parameters);
    if (place == ctx.device()) return;
    throw_error<state_error>({"training_run: the network is on device ", place,
                              ", the run is to be on device ", ctx.device(), "; call gpu::use_device(",
                              ctx.device(), ") before network and task are made"});
  }

  /// Number of threads for work on the host between steps: as many as the machine runs at once.
  static int host_threads(const context<device::gpu>&) {
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }

  /// Factorizes a network. policy.threads is replaced by host_threads(), for decompositions on the host.
  template <class Root>
  static factorization factorize(model<Root, device::gpu>& net, const factorize_policy& policy,
                                 context<device::gpu>& ctx, const network_statistics* statistics) {
    factorize_policy with_threads = policy;
    with_threads.threads = host_threads(ctx);
    return pufferfish::factorize(net, with_threads, ctx, {}, statistics);
  }

  /// Rounds `tokens` up to a multiple of a power of two between a 32nd and a 16th of the tokens, at least 8.
  /// Steps of similar size then have the same number of rows, and can share a graph.
  static index_t rows_of_tokens(index_t tokens) {
    index_t step = 8;
    while (32 * step < tokens) step *= 2;
    return (tokens + step - 1) / step * step;
  }
};

/// Runs the steps of a training run on a device. The whole step is one graph, including the gradient
/// exchange. Only the passes are captured if processes may be lost (the host must then know of each step
/// whether its gradients were exchanged), or if the exchange cannot be captured.
template <class Task, class Comm>
class run_steps<Task, Comm, device::gpu> {
  using parts = run_parts<Task, Comm>;
  using T = typename parts::value_type;

 public:
  /// Throws value_error for compressed gradients of a network that computes in fp16.
  explicit run_steps(const run_options& options)
      : captures_(options.captured_steps),
        clip_norm_(options.clip_norm),
        results_(gpu::device_memory(), 2),
        facts_(gpu::device_memory(), 1) {
    if (!scales_loss) return;
    if (options.compression) {
      throw_error<value_error>(
          {"training_run: fp16 needs a loss scale, which compressors do not take; bf16 needs none"});
    }
    scaler_.emplace();
  }
  run_steps(const run_steps&) = delete;
  run_steps& operator=(const run_steps&) = delete;
  ~run_steps() { stop(); }

  /// Starts steps at the record's position. In fp16 networks, the context uses the loss scale of this object,
  /// and the optimizer reads the skip flag of the loss scaler or of the exchange.
  void start(const parts& run, const training_record& record) {
    ctx_ = &run.ctx;
    if (scaler_) scaler_->use(run.ctx);
    // With a decay of factors gradients are clipped in place, because the decay is added to clipped
    // gradients.
    const bool scales = clips() && run.decay == nullptr;
    run.optimizer.set_control({skip(run), scales ? &facts_.data()->scale : nullptr});
    sums_.set(run.ctx, {record.seen.loss_sum, record.seen.correct, record.seen.count, 0});
    skipped_ = 0;
    exposed_before_ = run.exchange.report().exposed_ms - record.exchange_ms;
    moved_ = false;
  }
  /// Waits for the stream and drops all graphs. Does not throw failures of steps.
  void stop() {
    if (ctx_ != nullptr) {
      static_cast<void>(cudaStreamSynchronize(ctx_->stream()));
      ctx_->set_loss_scale(nullptr);
    }
    graphs_.clear();
  }

  /// Makes one step: loads the batch and sets the learning rate outside of the graph; passes, exchange and
  /// update are inside. The record receives the sums of lagging_sums::lag steps ago. Returns the number of
  /// steps newly found to be skipped. Throws errors of earlier steps.
  int take(const parts& run, const step_position& at, double rate, training_record& record) {
    const bool lossy = may_lose_ranks(run.comm);
    const step_share share = run.task.load(run.ctx, at);
    run.optimizer.begin_step(run.ctx, rate);
    run.exchange.set_rate(run.ctx, rate);
    if (lossy) keep_buffers(run);
    moved_ = true;
    const bool captures = captures_ && share.key != 0 && run.ctx.rows().observer() == nullptr;
    if (!captures) {
      run.exchange.begin(run.ctx);
      run.task.compute(run.ctx, run.net, results_.data());
      finish(run, share, lossy);
    } else {
      const auto key = gpu::step_graph::key(share.key, run.net.generation());
      gpu::step_graph& graph = graphs_.of(key);
      if (!lossy && run.exchange.can_be_captured()) {
        graph.run(run.ctx, key, [&] {
          run.exchange.begin(run.ctx);
          run.task.compute(run.ctx, run.net, results_.data());
          finish(run, share, lossy);
        });
      } else {
        graph.run(run.ctx, key, [&] { run.task.compute(run.ctx, run.net, results_.data()); });
        run.exchange.begin(run.ctx);
        finish(run, share, lossy);
      }
    }
    const auto seen = sums_.after_step(run.ctx);
    return seen ? note(*seen, record) : 0;
  }

  /// Number of steps that were replays of a graph.
  std::uint64_t replays() const { return graphs_.replays(); }

  /// Returns the loss scale as text for a checkpoint, "value good_steps"; empty unless the network computes
  /// in fp16. Waits for the device. Throws backend_error.
  std::string state() const {
    if (!scaler_) return {};
    const gpu::kernels::loss_scale scale = scaler_->state();
    return exact_number(static_cast<double>(scale.value)) + " " + std::to_string(scale.good_steps);
  }
  /// Restores the loss scale from text that state() has returned; does nothing without a loss scale or for an
  /// empty text. Throws io_error, naming `source`, for any other text.
  void set_state(const std::string& text, const std::string& source) {
    if (!scaler_ || text.empty()) return;  // file of a run without a loss scale: start as a new run
    double stored = 0.0;
    int good_steps = 0;
    const bool complete = record_line(text).read(stored, good_steps).complete();
    const auto scale = static_cast<float>(stored);
    if (!complete || !(scale > 0.0F) || !std::isfinite(scale) || good_steps < 0) {
      throw_error<io_error>({source, ": \"", text, "\" is no loss scale"});
    }
    scaler_->set_state({scale, 1.0F / scale, good_steps});
  }

  /// Waits for all steps, adds their results to the record and returns the number of steps newly found to be
  /// skipped. Throws the failures of the steps.
  int settle(const parts& run, training_record& record) {
    if (moved_) run.ctx.synchronize();
    return settle_alone(run, record);
  }
  /// Does the work of settle(), but does not throw the failures of steps.
  int settle_alone(const parts& run, training_record& record) {
    if (!moved_) return 0;
    const int skipped = note(sums_.now(run.ctx), record);
    record.exchange_ms = run.exchange.report().exposed_ms - exposed_before_;
    moved_ = false;
    return skipped;
  }

 private:
  static constexpr bool scales_loss =
      rounded_format_of<typename parts::model_type::value_type> == rounded_format::fp16;

  bool clips() const { return clip_norm_ > 0.0; }

  // Address of the flag that tells whether the step is skipped.
  const int* skip(const parts& run) const { return scaler_ ? scaler_->control().skip : run.exchange.skip(); }

  // Launches the work after the passes: exchange, clipping, update, sums.
  void finish(const parts& run, const step_share& share, bool lossy) {
    const std::span<T> gradients = run.net.store().gradients();
    if (!clips() && !lossy && !scaler_ && run.exchange.arrives_early()) {
      if (run.decay != nullptr) run.decay->begin_step(run.ctx, 0.0);
      run.exchange.finish(run.ctx, update_bucket(run));
    } else if (finish_exchange(run) || scaler_) {
      // A step that the exchange skips lowers the loss scale; skip_if makes the update leave it out.
      if (scaler_) {
        scaler_->unscale(run.ctx, gradients);
        if (run.exchange.skip() != nullptr) scaler_->skip_if(run.ctx, run.exchange.skip());
      }
      if (clips() && run.decay != nullptr) {
        gpu::clip_gradient_norm(run.ctx, gradients, clip_norm_, facts_.data());
      } else if (clips()) {
        gpu::gradient_norm(run.ctx, gradients, clip_norm_, facts_.data());
      }
      // 0: the rate of a decoupled decay, which a device does not have
      if (run.decay != nullptr) run.decay->begin_step(run.ctx, 0.0);
      update_range(run, 0, static_cast<index_t>(gradients.size()));
      if (scaler_) scaler_->update(run.ctx);
    }
    sums_.add_step(run.ctx, results_.data(), share, skip(run));
  }

  bool finish_exchange(const parts& run) {
    try {
      return run.exchange.finish(run.ctx);
    } catch (const timeout_error&) {
      if (may_lose_ranks(run.comm)) put_back_buffers(run);
      throw;
    }
  }

  // Copies the batch-norm statistics, which forward passes change: they must be restored if a process and
  // with it a step is lost.
  void keep_buffers(const parts& run) {
    const std::span<T> buffers = run.net.store().buffers();
    if (buffers_before_.size() != static_cast<index_t>(buffers.size())) {
      buffers_before_ =
          memory_block<T>(gpu::device_memory(), static_cast<index_t>(buffers.size()), uninitialized);
    }
    copy_in_stream(run, buffers_before_.data(), buffers.data(), buffers.size_bytes());
  }
  void put_back_buffers(const parts& run) {
    const std::span<T> buffers = run.net.store().buffers();
    copy_in_stream(run, buffers.data(), buffers_before_.data(), buffers.size_bytes());
  }
  static void copy_in_stream(const parts& run, T* to, const T* from, std::size_t bytes) {
    if (bytes == 0) return;
    gpu::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, run.ctx.stream()),
               "cudaMemcpyAsync of buffers");
  }

  // Adds new sums to the record. Returns the number of steps newly found to be skipped.
  int note(const gpu::kernels::epoch_sums& sums, training_record& record) {
    record.seen = {sums.loss, sums.hits, sums.count};
    record.note_loss(record.seen, record.total_steps);
    const auto fresh = static_cast<int>(sums.skipped - skipped_);
    record.skipped_steps += static_cast<std::uint64_t>(fresh);
    skipped_ = sums.skipped;
    // The exchange's thread stores which gradient was not finite, and the caller may read it next.
    if (fresh > 0) gpu::check(cudaStreamSynchronize(ctx_->stream()), "cudaStreamSynchronize");
    return fresh;
  }

  bool captures_;
  double clip_norm_;
  context<device::gpu>* ctx_ = nullptr;
  memory_block<double> results_;
  memory_block<gpu::kernels::gradient_facts> facts_;
  std::optional<gpu::loss_scaler> scaler_;  // if the network computes in fp16
  gpu::detail::lagging_sums sums_;
  memory_block<T> buffers_before_;
  double exposed_before_ = 0.0;  // at start(): the exchange's exposed time minus the record's
  std::int64_t skipped_ = 0;     // skipped steps of this epoch that the record counts
  bool moved_ = false;           // whether a step was made since the last settle
  gpu::detail::graphs_by_key graphs_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
