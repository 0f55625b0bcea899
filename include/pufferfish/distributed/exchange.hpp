// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gradient_exchange`: averages the gradient arena over all ranks, bucket by bucket, while the backward pass
/// still runs; or through a compressor, after it.

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/distributed/exchange/bucket_counter.hpp>
#include <pufferfish/distributed/exchange/exchange_driver.hpp>
#include <pufferfish/distributed/exchange/exchange_failure.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Averages the gradients of a store over all ranks, in place. The gradients are sent in buckets (ranges of
/// the store's gradient array). The exchange of a bucket starts as soon as all of its gradients are written;
/// the order of the buckets is the same on every rank. Nothing is packed: messages are sent from the gradient
/// array.
///
///     gradient_exchange<float, mpi::communicator> exchange(net.store(), comm);
///     exchange.begin(ctx);          // at any time before the backward pass (of the last micro-batch)
///     ... forward, backward ...
///     exchange.finish(ctx);         // every gradient is the mean over the ranks
///
/// Layers of other networks, and layers that belong to none, may run between begin and finish: their
/// gradients are ignored. A second backward pass through one of the exchange's own parameters throws
/// state_error unless micro_batches (distributed/micro_batches.hpp) has announced it.
///
/// After a failed step (an exception from begin to finish that came from the exchange, a compressor or the
/// communicator) begin throws state_error: the ranks' collectives may no longer fit together. Make a new
/// exchange on all ranks. A step that nonfinite_policy::stop ends has not failed in this sense.
///
/// begin and finish are collective. One thread at a time calls the members. Between begin and finish no other
/// code may use the communicator, and report() must not be read. The mean is the sum times 1 / p, rounded.
/// The all-reduce algorithm determines the order of the sum: the same plan (exchange_plan) on the same number
/// of ranks gives the same bits again. All ranks end with the same bits.
///
/// With a compressor the exchange starts in finish, since the compressor needs all gradients and its work
/// would compete with the backward pass for cores. With exchange_options::compress_by_bucket it starts bucket
/// by bucket during the backward pass. After finish the gradients are the compressor's result.
///
/// Gradients on a device are staged in host memory (unless exchange_memory says otherwise): a bucket is
/// copied to the host while the backward pass still runs, exchanged there, and copied back. Work put into the
/// context's stream after finish sees the result. Compressors work on the host, too. gpu::nccl (gpu/nccl.hpp)
/// exchanges without the host.
///
/// In a step that is captured into a graph (gpu::step_graph), begin and finish are called as in a direct
/// step. Each replay then exchanges its own gradients: the graph notifies the exchange's thread when a bucket
/// is on the host, and waits for the thread before it copies the bucket back; the calling thread only
/// launches the graph. The exchange's thread therefore calls the communicator, which must allow calls from
/// other threads (else state_error), and no other code may use it until the context has been synchronized.
/// Replays have no return values; instead:
/// - The optimizer's kernels read from skip() whether the step counts. finish returns true.
/// - An error is thrown by a later call (see context::failures), and its step is skipped.
/// - steps(), report() and nonfinite() are those of completed replays. Read them while none is under way,
///   after context::synchronize.
/// A graph that has captured an exchange must not be launched after the exchange's destruction.
template <class T, class Comm, class Device = device::cpu>
class gradient_exchange {
  using driver = typename detail::exchange_driver<T, Comm, Device>::type;

 public:
  /// The store and the communicator must outlive the object. Collective: throws state_error on all ranks if
  /// their parameters, buckets, options or compressors differ, naming the first difference; value_error on
  /// all ranks for invalid options or an invalid plan, naming the rank that has them; backend_error on all
  /// ranks if MPI does not support exchange_memory::device, naming the ranks.
  gradient_exchange(parameter_store<T>& store, Comm& comm, const exchange_options& options = {},
                    std::optional<any_compressor<T>> compressor = {})
      : gradient_exchange(store, comm, options, [&] { return std::move(compressor); }) {}
  /// Makes an exchange whose compressor new_compressor(store, compressor options) constructs. Errors are
  /// those of the other constructor; those of new_compressor are thrown on all ranks.
  template <compressor_options<T> Options>
  gradient_exchange(parameter_store<T>& store, Comm& comm, const exchange_options& options,
                    const Options& compressor)
      : gradient_exchange(store, comm, options, [&]() -> std::optional<any_compressor<T>> {
          return new_compressor(store, compressor);
        }) {}
  gradient_exchange(const gradient_exchange&) = delete;
  gradient_exchange& operator=(const gradient_exchange&) = delete;

  const std::vector<gradient_bucket>& buckets() const { return driver_.buckets(); }
  const exchange_plan& plan() const { return driver_.plan(); }
  bool with_thread() const { return driver_.with_thread(); }
  const exchange_report& report() const { return driver_.counts().report(); }
  void clear_report() { driver_.counts().report() = {}; }

  /// Bytes that one rank passes to the collectives of a step.
  index_t payload_bytes() const { return driver_.payload_bytes(); }

  /// States of the compressor; empty without one.
  std::vector<compressor_state<T>> states() { return driver_.states(); }
  /// Number of exchanges, skipped steps excluded. A checkpoint stores it with the states.
  std::uint64_t steps() const { return driver_.counts().steps(); }
  /// Sets steps(), for a resumed run. All ranks must call it if one does: the next begin compares the
  /// numbers.
  void set_steps(std::uint64_t steps) {
    driver_.counts().set_steps(steps);
    steps_agreed_ = false;
  }
  /// Sets the epoch and its learning rate for compressors; to be called between steps. Local.
  void set_epoch(index_t epoch, double learning_rate) { driver_.set_epoch(epoch, learning_rate); }
  /// Sets the learning rate of the next steps for compressors. Waits for replays that use the present one.
  void set_rate(context<Device>& ctx, double learning_rate) { driver_.set_rate(ctx, learning_rate); }
  /// The last non-finite element that nonfinite_policy::skip or stop has found; the same on all ranks.
  const std::optional<nonfinite_gradient>& nonfinite() const { return driver_.counts().nonfinite(); }

  /// Address, on the device, of a flag that is not 0 if the step does not count. Valid in stream order after
  /// finish.
  const int* skip() const requires(driver::on_device) { return driver_.skip(); }

  /// Starts a step: gradients that become ready are exchanged from now on. Forgets the writes of an abandoned
  /// step. Throws state_error if the network has changed its arenas, the last begin had no finish, an earlier
  /// step has failed, or parameters are at different passes of micro_batches; and on all ranks, naming the
  /// first difference, if their numbers of steps differ, or before the first step the values of their
  /// parameters (compared on the CPU only, and not with exchange_options::local). The first begin, and the
  /// first after set_steps, compares.
  void begin(context<Device>& ctx) {
    layout_.require_unchanged("gradient_exchange");
    failure_.require_none();
    // A step that was captured only in part has called no collectives, so it need not be finished.
    if (running_ && !captured_) PUFFERFISH_THROW(state_error("gradient_exchange: begin without finish"));
    const bool captured = driver_.is_captured(ctx);
    driver_.prepare(ctx, captured);
    if (!steps_agreed_) {
      agree_on_lines(*comm_, "gradient exchange", state_lines());
      steps_agreed_ = true;
    }
    // restart() may throw. The driver must be unchanged then.
    ready_.restart();
    driver_.begin(ctx, captured);
    captured_ = captured;
    running_ = true;
    ctx_ = &ctx;
    released_ = 0;
    listener_ = ctx.on_gradient_ready(&gradient_exchange::on_ready, this);
  }

  /// Waits until every gradient is the mean over all ranks. A gradient that no layer of this rank has written
  /// since the last exchange or optimizer step counts as zero on this rank: see parameter.
  /// Returns true if the step may be taken; false, on all ranks, if nonfinite_policy::skip has found an
  /// element that is not finite (gradients are then undefined, a compressor's state is unchanged). Throws
  /// value_error on all ranks for nonfinite_policy::stop, and if a compressor's result is not finite though
  /// all gradients are; the compressor's state is then unusable. Rethrows exceptions of the exchange since
  /// begin. Throws state_error if the network has changed its arenas or a call since begin has failed.
  bool finish(context<Device>& ctx) {
    return finish(ctx, [](const gradient_bucket&) {});
  }

  /// Waits like finish(ctx), and calls arrived(bucket) for every gradient_bucket, in order, on this thread,
  /// as soon as its gradients may be used: while later buckets are still under way if arrives_early(), else
  /// when the whole exchange has succeeded. After an error it may have been called for some buckets. An
  /// exception from `arrived` is rethrown when all buckets have been exchanged, so that the ranks stay in
  /// step.
  template <class Arrived>
  bool finish(context<Device>& ctx, Arrived&& arrived) {
    layout_.require_unchanged("gradient_exchange");
    failure_.require_none();
    if (!running_) PUFFERFISH_THROW(state_error("gradient_exchange: finish without begin"));
    check_capture(ctx);
    running_ = false;
    listener_.stop();
    guarded([&] {
      driver_.zero_unwritten(ctx);
      release(buckets().size());
    });
    const auto start = clock::now();
    double updating = 0.0;
    std::exception_ptr thrown;  // by `arrived`; the remaining buckets are exchanged nevertheless
    const auto take = [&](std::size_t bucket) {
      if (thrown) return;
      try {
        driver_.deliver(ctx, bucket);
        const auto given = clock::now();
        arrived(buckets()[bucket]);
        updating += detail::milliseconds_since(given);
      } catch (...) {
        thrown = std::current_exception();
      }
    };
    const bool usable = guarded([&] { return driver_.finish(ctx, take); });
    driver_.count_times(detail::milliseconds_since(start) - updating, updating);
    if (thrown) std::rethrow_exception(thrown);
    return usable;
  }

  /// True if finish calls `arrived` before all buckets have come: buckets are exchanged one by one (several
  /// ranks without a compressor, or compress_by_bucket), and nonfinite_policy is ignore.
  bool arrives_early() const { return driver_.arrives_early(); }

  /// Whether a step with begin and finish can be captured into a graph. For devices only.
  bool can_be_captured() const requires(driver::on_device) { return driver_.can_be_captured(); }

 private:
  using clock = std::chrono::steady_clock;

  // Every constructor calls the same collectives, so that ranks with different arguments get an error.
  template <std::invocable Make>
  gradient_exchange(parameter_store<T>& store, Comm& comm, const exchange_options& options, Make&& make)
      : store_(&store),
        comm_(&comm),
        layout_(store.shared_generation()),
        local_(options.local),
        driver_(store, comm, options, detail::all_or_none(comm, "gradient_exchange", make), failure_),
        ready_(store, driver_.buckets()) {
    agree_on_lines(comm, "gradient exchange", layout_lines() + driver_.option_lines());
    driver_.start();
  }

  // A line for each parameter, with its shape.
  std::string layout_lines() const {
    std::string lines;
    for (const auto& entry : store_->parameters()) {
      lines += "parameter " + entry.name + " " + to_string(entry.thing->layout()) + "\n";
    }
    return lines;
  }

  // The number of steps and, before the first step, for gradients on the CPU, a digest of the values of each
  // parameter. Ranks that start from different values would never agree again. Local steps make them differ;
  // and an exchange that replaces another one during training leaves differences to the program.
  std::string state_lines() const {
    std::string lines = "steps done: " + std::to_string(steps()) + "\n";
    if (!std::is_same_v<Device, device::cpu> || steps() > 0 || local_ || comm_->size() == 1) return lines;
    for (const auto& entry : store_->parameters()) {
      if (entry.thing->is_moved_from()) continue;  // gradients without values
      const std::span<const T> all(entry.thing->data(), static_cast<std::size_t>(entry.thing->size()));
      lines += "values of " + entry.name + ": digest " + detail::hexadecimal(digest(all)) + "\n";
    }
    return lines;
  }

  // Throws state_error if only a part of a step is captured into a graph.
  void check_capture(const context<Device>& ctx) const {
    if (driver_.is_captured(ctx) != captured_) detail::refuse_half_capture();
  }

  // Called by the context for each complete gradient: releases the buckets that are complete.
  static void on_ready(void* object, const void* parameter, int id) {
    auto& self = *static_cast<gradient_exchange*>(object);
    if (self.layout_.changed()) return;  // finish throws
    std::size_t count = 0;
    self.guarded([&] { count = self.ready_.written(parameter, id); });
    if (!self.driver_.listens()) return;
    if (count > self.released_) self.check_capture(*self.ctx_);
    self.guarded([&] { self.release(count); });
  }

  // Starts the exchange of this step's buckets below `count`, which are complete.
  void release(std::size_t count) {
    if (!driver_.listens()) return;
    for (; released_ < count; ++released_) driver_.release(released_);
    driver_.progress(released_);
  }

  // Does a part of the step. If the part throws, the step has failed: its collectives may be incomplete. Not
  // so while capturing, which calls none, nor after nonfinite_policy::stop, which stops all ranks alike.
  template <class Part>
  decltype(auto) guarded(Part&& part) {
    try {
      return part();
    } catch (...) {
      if (!captured_ && !driver_.counts().stopped()) failure_.keep(std::current_exception());
      if (!captured_) running_ = false;
      listener_.stop();
      throw;
    }
  }

  parameter_store<T>* store_;
  Comm* comm_;
  detail::layout_watch layout_;
  bool local_;
  detail::exchange_failure failure_;
  driver driver_;
  detail::bucket_counter<T> ready_;
  context<Device>* ctx_ = nullptr;  // context of this step
  std::size_t released_ = 0;        // number of this step's buckets whose exchange was released
  bool running_ = false, captured_ = false;
  bool steps_agreed_ = false;
  gradient_listener listener_;  // from begin to finish; the first member that is destroyed
};

PUFFERFISH_NAMESPACE_END
