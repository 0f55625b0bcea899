// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `context<device::cpu>`: the state of a pass through layers besides the layers themselves: threads, scratch
/// memory, the tape, random numbers, and the mode (training or inference).

#include <cstdint>
#include <optional>
#include <utility>

#include <pufferfish/core/arena.hpp>
#include <pufferfish/core/device.hpp>
#include <pufferfish/core/gradient_hook.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/core/packed_weights.hpp>
#include <pufferfish/core/parallel.hpp>
#include <pufferfish/core/parameter.hpp>
#include <pufferfish/core/random.hpp>
#include <pufferfish/core/row_observer.hpp>
#include <pufferfish/core/tape.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Mode of a pass. In training, layers keep data for the backward pass, dropout is active, and batch norm
/// uses the statistics of the batch.
enum class run_mode { inference, training };

/// Options of a CPU context. `threads`: number of threads of its passes, at least 1, the calling one
/// included. `seed`: determines dropout masks together with the step (begin_step).
struct context_options {
  int threads = 1;
  std::uint64_t seed = 0;
  /// Whether float convolutions with 3x3 kernels and stride 1 may use Winograd's algorithm
  /// (ops/conv/winograd.hpp): less work, about twice the rounding error. False: all convolutions are direct
  /// sums.
  bool winograd = true;
};

/// A position in the sequence of random streams that layers draw: the step, its first sample and the number
/// of streams drawn so far in the step. See context::random_place.
struct random_place {
  std::uint64_t step = 0;
  index_t first_sample = 0;
  std::uint64_t streams_used = 0;
  friend bool operator==(const random_place&, const random_place&) = default;
};

namespace detail {

/// Returns `momentum` if it is empty or in 0 .. 1; throws value_error otherwise.
inline std::optional<double> checked_norm_momentum(std::optional<double> momentum) {
  if (momentum && !(*momentum >= 0.0 && *momentum <= 1.0)) {
    throw_error<value_error>({"context: a momentum of batch norms of ", *momentum, "; it must be in 0 .. 1"});
  }
  return momentum;
}

}  // namespace detail

/// The CPU's context. One thread at a time may use a context; several contexts may share the same layers. It
/// must outlive all views of its scratch memory and tape, and stays at its address: it can be neither copied
/// nor moved.
///
/// \code
/// cpu_context ctx({.threads = 4, .seed = 1});
/// {
///   const mode_scope training(ctx, run_mode::training);
///   ctx.begin_step(step);
///   const auto y = layer.forward(ctx, x);    // keeps data on ctx.tape()
///   const auto dx = layer.backward(ctx, dy);  // in the opposite order of the forward passes
/// }
/// \endcode
template <>
class context<device::cpu> {
 public:
  using device_type = device::cpu;

  /// Makes a context in inference mode, at step 0. Throws value_error for fewer than one thread, and
  /// backend_error if a thread cannot be started.
  explicit context(const context_options& options = {})
      : threads_(options.threads), seed_(options.seed), winograd_(options.winograd) {}

  /// Whether passes are for training, which keep values on the tape, or for inference.
  run_mode mode() const { return mode_; }
  bool training() const { return mode_ == run_mode::training; }
  /// Changes the mode of later passes. Must not change between a forward pass and its backward pass.
  void set_mode(run_mode mode) { mode_ = mode; }

  /// Momentum of all batch norms in training mode. Empty (the default): each layer uses its own momentum.
  std::optional<double> norm_momentum() const { return norm_momentum_; }
  /// Sets norm_momentum(); norm_estimation calls it. Throws value_error unless `momentum` is empty or in
  /// 0 .. 1.
  void set_norm_momentum(std::optional<double> momentum) {
    norm_momentum_ = detail::checked_norm_momentum(momentum);
  }

  /// Number of threads, the calling one included.
  int threads() const { return threads_.size(); }

  /// Calls body(task, worker) for every task; see thread_pool::run. Cut the work into tasks by shapes alone,
  /// never by `threads()`; otherwise results depend on the number of threads.
  /// The first exception of a task is rethrown. Throws state_error if a task calls it on the same context, if
  /// two threads use the context at once, and in a process that was forked after the threads were started.
  template <class Body>
  void parallel_for(index_t tasks, Body&& body) {
    threads_.run(tasks, body);
  }

  /// Temporary memory, to be allocated through a scratch_frame.
  stack_arena& scratch() { return scratch_; }
  /// Temporary host memory for data that host code reads and writes. On the CPU it is the same arena.
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

  /// Seed, number of the step, and position of this rank's first sample in the global batch. Dropout masks
  /// are a function of these numbers.
  std::uint64_t seed() const { return seed_; }
  std::uint64_t step() const { return step_; }
  index_t first_sample() const { return first_sample_; }

  /// Returns a new random stream for a layer. Streams are numbered within the step, in execution order.
  random_stream next_random_stream() {
    return {seed_, substream(substream(stream_id("layer"), step_), streams_used_++)};
  }

  /// The current position in the sequence of random streams, for return_to().
  pufferfish::random_place random_place() const { return {step_, first_sample_, streams_used_}; }
  /// Returns to a position in the sequence of random streams: layers then draw the streams that they drew
  /// from `place` on. The tape is not changed.
  void return_to(const pufferfish::random_place& place) noexcept {
    step_ = place.step;
    first_sample_ = place.first_sample;
    streams_used_ = place.streams_used;
  }

  /// Calls first(), then second(). Layers compute the gradients of their weights and of their input like
  /// this; a context of a device may compute both at the same time
  /// (gpu::context_options::parallel_gradients).
  template <class First, class Second>
  void in_parallel(First&& first, Second&& second, bool = true) {
    first();
    second();
  }
  static constexpr bool parallel_gradients() { return false; }

  /// Records one write of a parameter's gradient, and notifies the listener if it completes the gradient.
  template <class T>
  void gradient_written(const parameter<T>& p) {
    if (p.written()) ready_(&p, p.id());
  }

  /// While the returned object exists, `call(object, parameter, id)` is called in backward passes for each
  /// parameter whose gradient is complete, for all layers that run in this context. A later registration
  /// replaces it. See gradient_hook.
  gradient_listener on_gradient_ready(gradient_hook::call_type call, void* object) {
    return {ready_, call, object};
  }

  /// The hook that layers call with the rows that they multiply their weights with; see row_observer.
  const observed_rows& rows() const { return rows_; }
  observed_rows& rows() { return rows_; }

  /// The object that keeps packed forms of `weight` from pass to pass (see packed_weights_scope), or nullptr:
  /// in training, without a scope, and for other memory.
  packed_weights* packed(const void* weight) const {
    return packed_ != nullptr && !training() && packed_->contains(weight) ? packed_ : nullptr;
  }
  /// A packed form of a weight, `count` elements, which pack(T* to) writes: kept from an earlier pass if
  /// packed() keeps it, else packed now, into memory of `frame`. Throws the errors of `pack`, and
  /// std::bad_alloc.
  template <class T, class Pack>
  T* packed(scratch_frame& frame, const packed_form& form, index_t count, Pack&& pack) {
    if (packed_weights* const kept = packed(form.weight)) return kept->get<T>(form, count, pack);
    T* const storage = frame.take<T>(count);
    pack(storage);
    return storage;
  }

  /// Peak bytes of scratch and tape: the sum of the peaks of the single arenas.
  std::size_t peak_bytes() const {
    return scratch_.peak_bytes() + tape_.memory().peak_bytes() + tape_.notes().peak_bytes();
  }
  /// Number of memory allocations by scratch and tape; constant from the second step on.
  std::size_t system_allocations() const {
    return scratch_.system_allocations() + tape_.memory().system_allocations() +
           tape_.notes().system_allocations();
  }

 private:
  friend class packed_weights_scope;

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
  packed_weights* packed_ = nullptr;
};

/// While this object exists, inference passes in a context use and complete the packed forms of `packed`
/// instead of packing the weights in each pass. The context and `packed` must outlive it. The weights must
/// not change; see packed_weights. A scope within a scope replaces the outer one until it ends.
class packed_weights_scope {
 public:
  packed_weights_scope(context<device::cpu>& ctx, packed_weights& packed)
      : ctx_(ctx), before_(std::exchange(ctx.packed_, &packed)) {}
  packed_weights_scope(const packed_weights_scope&) = delete;
  packed_weights_scope& operator=(const packed_weights_scope&) = delete;
  ~packed_weights_scope() { ctx_.packed_ = before_; }

 private:
  context<device::cpu>& ctx_;
  packed_weights* before_;
};

/// Sets a context's mode for the lifetime of the scope. The destructor restores the previous mode.
/// The context must outlive the scope.
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
