// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `context<device::cpu>`: what a pass through layers needs besides the layers: threads, scratch memory, the
/// tape, random numbers, and whether it trains or infers.

#include <cstdint>
#include <optional>

#include <pufferfish/core/arena.hpp>
#include <pufferfish/core/device.hpp>
#include <pufferfish/core/gradient_hook.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/core/parallel.hpp>
#include <pufferfish/core/parameter.hpp>
#include <pufferfish/core/random.hpp>
#include <pufferfish/core/row_observer.hpp>
#include <pufferfish/core/tape.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// In training, forward passes keep what backward passes need, dropout drops, batch norm uses the batch.
enum class run_mode { inference, training };

struct context_options {
  int threads = 1;
  std::uint64_t seed = 0;
  /// Convolutions with 3x3 kernels and stride 1 in float may go by Winograd's algorithm (ops/winograd.hpp):
  /// less work, about twice the rounding error. False: all of them are direct sums.
  bool winograd = true;
};

/// A place in the sequence of random streams that layers draw: the step, its first sample and the number of
/// streams drawn in it. See context::random_place.
struct random_place {
  std::uint64_t step = 0;
  index_t first_sample = 0;
  std::uint64_t streams_used = 0;
  friend bool operator==(const random_place&, const random_place&) = default;
};

namespace detail {

/// `momentum`, if it is empty or in 0 .. 1; else throws value_error.
inline std::optional<double> checked_norm_momentum(std::optional<double> momentum) {
  if (momentum && !(*momentum >= 0.0 && *momentum <= 1.0)) {
    throw_error<value_error>({"context: a momentum of batch norms of ", *momentum, "; it must be in 0 .. 1"});
  }
  return momentum;
}

}  // namespace detail

/// The CPU's. One context serves one thread of control at a time; layers are shared freely between contexts.
template <>
class context<device::cpu> {
 public:
  using device_type = device::cpu;

  explicit context(const context_options& options = {})
      : threads_(options.threads), seed_(options.seed), winograd_(options.winograd) {}

  run_mode mode() const { return mode_; }
  bool training() const { return mode_ == run_mode::training; }
  void set_mode(run_mode mode) { mode_ = mode; }

  /// The momentum that batch norms use in training in place of their own; empty, the default: each its own.
  /// norm_estimation sets it. Throws value_error unless it is in 0 .. 1.
  std::optional<double> norm_momentum() const { return norm_momentum_; }
  void set_norm_momentum(std::optional<double> momentum) {
    norm_momentum_ = detail::checked_norm_momentum(momentum);
  }

  int threads() const { return threads_.size(); }

  /// Calls body(task, worker) for every task; see thread_pool::run. Cut tasks from shapes alone, never from
  /// `threads()`, or results depend on the number of threads.
  template <class Body>
  void parallel_for(index_t tasks, Body&& body) {
    threads_.run(tasks, body);
  }

  /// Temporary memory; take it through a scratch_frame.
  stack_arena& scratch() { return scratch_; }
  /// The same for what the host notes about tensors, in memory that it reads and writes on every device.
  stack_arena& host_scratch() { return scratch_; }
  pufferfish::tape& tape() { return tape_; }

  /// Starts training step `step`: clears the tape, and makes the random numbers of this step's passes a
  /// function of (seed, step). `first_sample` is the position of this rank's first sample in the global
  /// batch, so that dropout masks do not depend on how a batch is split over ranks.
  void begin_step(std::uint64_t step, index_t first_sample = 0) {
    tape_.clear();
    step_ = step;
    first_sample_ = first_sample;
    streams_used_ = 0;
  }

  bool winograd() const { return winograd_; }

  std::uint64_t seed() const { return seed_; }
  std::uint64_t step() const { return step_; }
  index_t first_sample() const { return first_sample_; }

  /// A random stream of its own for the next layer of this step that asks: layers ask in execution order.
  random_stream next_random_stream() {
    return {seed_, substream(substream(stream_id("layer"), step_), streams_used_++)};
  }

  /// Where the context is among the random streams. return_to() makes the following layers draw the streams
  /// that they would have drawn at `place`; it leaves the tape alone.
  pufferfish::random_place random_place() const { return {step_, first_sample_, streams_used_}; }
  void return_to(const pufferfish::random_place& place) noexcept {
    step_ = place.step;
    first_sample_ = place.first_sample;
    streams_used_ = place.streams_used;
  }

  /// Called by layers when a parameter's gradient is complete for this step.
  template <class T>
  void gradient_written(const parameter<T>& p) {
    if (p.written()) ready_(&p, p.id());
  }

  /// `call(object, parameter, id)` is called during backward passes for each parameter whose gradient is
  /// complete, of all layers that run in this context, as long as the returned object exists. A later
  /// registration replaces it. See gradient_hook.
  gradient_listener on_gradient_ready(gradient_hook::call_type call, void* object) {
    return {ready_, call, object};
  }

  /// Called by layers with the rows that their weights meet in training passes; see row_observer.
  const observed_rows& rows() const { return rows_; }
  observed_rows& rows() { return rows_; }

  /// Most memory that tape and scratch have held at once, each, in bytes.
  std::size_t peak_bytes() const {
    return scratch_.peak_bytes() + tape_.memory().peak_bytes() + tape_.notes().peak_bytes();
  }
  /// How often they asked the system for memory; constant from the second step on.
  std::size_t system_allocations() const {
    return scratch_.system_allocations() + tape_.memory().system_allocations() +
           tape_.notes().system_allocations();
  }

 private:
  thread_pool threads_;
  stack_arena scratch_;
  pufferfish::tape tape_;
  run_mode mode_ = run_mode::inference;
  std::optional<double> norm_momentum_;
  std::uint64_t seed_;
  bool winograd_;
  std::uint64_t step_ = 0;
  index_t first_sample_ = 0;
  std::uint64_t streams_used_ = 0;
  gradient_hook ready_;
  observed_rows rows_;
};

/// Sets a context's mode, and puts the one before back at its end, after an exception too.
template <class Device>
class mode_scope {
 public:
  mode_scope(context<Device>& ctx, run_mode mode) : ctx_(ctx), before_(ctx.mode()) { ctx.set_mode(mode); }
  ~mode_scope() { ctx_.set_mode(before_); }
  mode_scope(const mode_scope&) = delete;
  mode_scope& operator=(const mode_scope&) = delete;

 private:
  context<Device>& ctx_;
  run_mode before_;
};

using cpu_context = context<device::cpu>;

PUFFERFISH_NAMESPACE_END
