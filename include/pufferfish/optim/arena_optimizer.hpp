// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `arena_optimizer`: the base class of SGD and Adam, on every device. An arena is one array with all values,
/// or all gradients, of a network.

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/nn/unwritten_gradients.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>
#include <pufferfish/optim/optimizer_target.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The arrays of an optimizer's state at the same elements; nullptr: the optimizer has no such array.
template <class T>
using state_arrays = std::array<T*, 2>;

/// The formula of an optimizer on the CPU, specialised for its options (sgd.hpp, adam.hpp). Members:
///     static constexpr const char* name;              // the optimizer's name, for errors
///     static std::size_t states(const Options&);      // number of arrays of state
///     template <class T> using numbers = ...;         // constants of a step
///     // The constants of step number `step` (1, 2, ...) with this rate and weight decay.
///     template <class T>
///     static numbers<T> numbers_of(const Options&, double decay, std::uint64_t step, double lr);
///     // The step of `count` elements of all arrays.
///     template <class T>
///     static void update(const numbers<T>&, const T* gradient, const state_arrays<T>&, T* value,
///                        index_t count);
template <class Options>
struct update_rule;

/// The parts of an optimizer that differ between devices: its memory, the constants and number of a step, and
/// the pass over the arenas. This is the CPU's form; <pufferfish/gpu.hpp> has that of device::gpu.
template <class T, class Options, class Device>
class optimizer_pass {
  static_assert(
      std::is_same_v<Device, device::cpu>,
      "pufferfish: optimizers on device::gpu are defined by <pufferfish/gpu.hpp>: include that header "
      "in this file (it needs the CUDA Toolkit, not nvcc)");
  using rule = update_rule<Options>;

 public:
  struct control_type {};           ///< none: the caller of a step on the CPU omits the step instead
  using array = aligned_buffer<T>;  ///< memory of a state
  static constexpr index_t task_size = 32768;  ///< see arena_tasks

  explicit optimizer_pass(const arena_tasks&) {}
  void set_control(const control_type&) {}  // never called; clang 14 instantiates its caller

  /// Makes an array of zeros, one for each value of the target.
  static array zeros(const optimizer_target<T>& target) {
    return array(static_cast<index_t>(target.values.size()));
  }

  /// Counts a step and computes its constants.
  void begin(const context<device::cpu>*, const Options& options, double lr) {
    ++steps_;
    decaying_ = rule::template numbers_of<T>(options, options.weight_decay, steps_, lr);
    others_ = rule::template numbers_of<T>(options, 0.0, steps_, lr);
  }
  /// Updates the elements of the tasks in `range`.
  void run(context<device::cpu>& ctx, const arena_tasks& tasks, const arena_tasks::task_range& range,
           const optimizer_target<T>& target, const state_arrays<T>& states) const {
    ctx.parallel_for(range.count, [&](index_t i, int) {
      const arena_segment& task = tasks.tasks()[static_cast<std::size_t>(range.first + i)];
      state_arrays<T> own{};
      for (std::size_t s = 0; s < own.size(); ++s) {
        if (states[s] != nullptr) own[s] = states[s] + task.offset;
      }
      rule::update(task.decay ? decaying_ : others_, target.gradients.data() + task.offset, own,
                   target.values.data() + task.offset, task.size);
      if constexpr (std::is_same_v<T, float>) {
        if (target.rounded_as == rounded_format::bf16) {
          PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, convert<float, bfloat16>)
          (target.values.data() + task.offset, static_cast<bfloat16*>(target.rounded) + task.rounded,
           task.size);
        }
      }
    });
  }

  /// Number of steps so far, which bias corrections use. set_steps: for a resumed run.
  std::uint64_t steps() const { return steps_; }
  void set_steps(std::uint64_t steps) { steps_ = steps; }

 private:
  typename rule::template numbers<T> decaying_{}, others_{};  // constants of the current step
  std::uint64_t steps_ = 0;
};

}  // namespace detail

/// An optimizer over arenas: one array of all values and one of all gradients of a network. SGD and Adam
/// derive from it. Weight decay applies only to parameters of role `weight`, unless decay_all is set, and
/// never to exempt segments (see arena_segment). Results do not depend on the number of threads. Gradients
/// are read, not changed, except those that layers no longer write: these are set to zero (see parameter).
/// One thread at a time may call an optimizer.
///
/// On device::gpu (<pufferfish/gpu.hpp>) T is float and arenas and states are in the memory of the device
/// that was current at construction. A step also writes the 16-bit copies of the values. The constants of a
/// step are in device memory, so step_range may be captured into a graph; begin_step must not be captured.
/// After the construction only steps() and set_steps() wait for the device. All functions may throw
/// backend_error.
///
/// \code
/// SGD<float, device::gpu> optimizer(make_optimizer_target(net.store()), {.momentum = 0.9});
/// optimizer.begin_step(ctx, 0.1);   // outside of the graph
/// graph.run(ctx, key, [&] {
///   ...                             // forward, loss, backward
///   optimizer.step_range(ctx, 0, net.parameter_count());
/// });
/// \endcode
template <class T, class Options, class Device = device::cpu>
class arena_optimizer {
  using rule = detail::update_rule<Options>;
  using pass = detail::optimizer_pass<T, Options, Device>;

 public:
  using value_type = T;
  using device_type = Device;
  using control_type = typename pass::control_type;

  const Options& options() const { return options_; }
  const optimizer_target<T>& target() const { return target_; }

  /// On a device: sets a skip flag and a factor for gradients, both in device memory, for all later steps.
  /// Each step reads factor x gradient where the formula has the gradient. A null pointer: no flag, factor 1.
  /// Both must exist until they are replaced or no call follows. A step whose flag is not 0 when the stream
  /// reaches the step changes and counts nothing. The value that the flag has before the first step is not
  /// read. If the flag's address changes, the last step counts even if it was skipped. A captured step keeps
  /// the addresses of its capture.
  void set_control(const control_type& control) requires(!std::is_same_v<Device, device::cpu>) {
    pass_.set_control(control);
  }

  /// Makes one step with learning rate `lr` for all parameters. Throws state_error if the network's
  /// parameters have moved to new memory since the target was made, value_error for a learning rate that is
  /// not finite.
  void step(context<Device>& ctx, double lr) {
    begin_step(ctx, lr);
    step_range(ctx, 0, static_cast<index_t>(target_.values.size()));
  }

  /// Begins a step that is made in parts: counts the step and computes its constants. The step_range calls
  /// after it must contain each parameter exactly once; their order and number do not change a bit of the
  /// result. Throws state_error if the network's parameters have moved to new memory since the target was
  /// made, value_error for a learning rate that is not finite.
  void begin_step(context<Device>& ctx, double lr) { begin(&ctx, lr); }
  [[deprecated("pass the context: begin_step(ctx, lr)")]] void begin_step(
      double lr) requires std::is_same_v<Device, device::cpu> {
    begin(nullptr, lr);
  }
  /// Updates elements offset .. offset + size - 1 in the step that begin_step() began. Throws value_error
  /// unless the elements are whole parameters, and state_error before the first begin_step or if the
  /// network's parameters have moved to new memory.
  void step_range(context<Device>& ctx, index_t offset, index_t size) {
    target_.require_current(rule::name);
    if (!begun_) detail::throw_error<state_error>({rule::name, ": step_range before the first begin_step"});
    const auto range = tasks_.tasks_of(rule::name, offset, size);
    unwritten_.use(target_.store, offset, size, [&](index_t first, index_t count) {
      ops::fill<T>(ctx, {target_.store->gradients().data() + first, static_cast<std::size_t>(count)}, T{});
    });
    pass_.run(ctx, tasks_, range, target_, {states_[0].data(), states_[1].data()});
  }

  /// Number of steps taken, without skipped ones. A checkpoint stores it with the states.
  std::uint64_t steps() const { return pass_.steps(); }
  /// Restores the number of steps from a checkpoint: the next step has number steps + 1, and for steps > 0
  /// the states count as valid.
  void set_steps(std::uint64_t steps) { pass_.set_steps(steps); }

 protected:
  /// Starts with zero states at step 0. The target's arrays must exist as long as the optimizer is used.
  /// Throws shape_error if gradients or segments do not cover the target's values exactly, value_error for
  /// options out of range.
  arena_optimizer(optimizer_target<T> target, const Options& options)
      : target_(std::move(target)),
        options_(options),
        tasks_(target_.segments, options.decay_all, pass::task_size),
        pass_(tasks_) {
    options_.validate();
    target_.require_covered(rule::name);
    for (std::size_t s = 0; s < rule::states(options_); ++s) states_[s] = pass::zeros(target_);
  }

  /// The state array with this number, in the order of the values; empty if the optimizer has no such array.
  std::span<T> state(std::size_t number) { return states_[number].span(); }
  /// Elements of state `number`, arranged like the arena of the values.
  std::span<const T> state(std::size_t number) const { return states_[number].span(); }

 private:
  // Begins a step. Throws state_error if the arenas have moved or a gradient is not complete, value_error
  // unless lr is finite.
  void begin(context<Device>* ctx, double lr) {
    target_.require_current(rule::name);
    if (target_.store != nullptr) detail::require_whole_gradients(rule::name, *target_.store);
    if (!std::isfinite(lr)) {
      detail::throw_error<value_error>({rule::name, ": learning rate ", lr, " is not finite"});
    }
    unwritten_.begin();
    pass_.begin(ctx, options_, lr);
    begun_ = true;
  }

  optimizer_target<T> target_;
  Options options_;
  detail::arena_tasks tasks_;
  pass pass_;
  std::array<typename pass::array, 2> states_;
  detail::zero_before_step unwritten_;
  bool begun_ = false;  // begin_step was called
};

PUFFERFISH_NAMESPACE_END
