// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// SGD and Adam over arenas in device memory, the norm of a gradient and clipping by it, dynamic loss
/// scaling. Only functions that read or write state on the host wait for the device.

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/gpu/kernels/comm/exchange.hpp>
#include <pufferfish/gpu/kernels/optim/optimizer.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/nn/unwritten_gradients.hpp>
#include <pufferfish/optim/optimizer.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace detail {

/// A target's arenas cut into pieces, one per thread block; the list of pieces is on the device.
class arena_pieces {
 public:
  /// Pieces have up to 8192 elements, and none crosses the end of a segment. Throws backend_error.
  arena_pieces(const std::vector<arena_segment>& segments, bool decay_all)
      : tasks_(segments, decay_all, 8192),
        pieces_(device_memory(), static_cast<index_t>(tasks_.tasks().size()), uninitialized) {
    std::vector<kernels::arena_piece> pieces;
    for (const arena_segment& task : tasks_.tasks()) {
      pieces.push_back({task.offset, static_cast<std::int32_t>(task.size), task.decay ? 1 : 0, task.rounded});
    }
    pieces_.from_host(pieces);
  }

  struct range {
    const kernels::arena_piece* first;
    index_t count;
  };
  /// The pieces of the elements offset .. offset + size - 1. Throws the errors of arena_tasks.
  range of(const char* who, index_t offset, index_t size) const {
    const auto tasks = tasks_.tasks_of(who, offset, size);
    return {pieces_.data() + tasks.first, tasks.count};
  }

 private:
  pufferfish::detail::arena_tasks tasks_;
  memory_block<kernels::arena_piece> pieces_;
};

/// Zeros, one element per value, aligned as the values are: a step reads vectors of both.
inline memory_block<float> state_of(const optimizer_target<float>& target) {
  const auto address = reinterpret_cast<std::uintptr_t>(target.values.data());
  return {device_memory(), static_cast<index_t>(target.values.size()),
          static_cast<index_t>(address % memory_alignment / sizeof(float))};
}

/// The 16-bit copies of values that a step must update.
inline kernels::rounded_values rounded_of(const optimizer_target<float>& target) {
  return {target.rounded, target.rounded_as == rounded_format::bf16};
}

/// Throws value_error, naming `who`, unless the learning rate is finite.
inline void require_rate(const char* who, double lr) {
  if (!std::isfinite(lr)) {
    pufferfish::detail::throw_error<value_error>({who, ": learning rate ", lr, " is not finite"});
  }
}

/// Sets to zero, in the order of the context's stream, the gradients that layers no longer write.
inline void zero_unwritten(gpu_context& ctx, const optimizer_target<float>& target,
                           pufferfish::detail::zero_before_step& unwritten, index_t offset, index_t size) {
  unwritten.use(target.store, offset, size, [&](index_t first, index_t count) {
    check(cudaMemsetAsync(target.store->gradients().data() + first, 0,
                          static_cast<std::size_t>(count) * sizeof(float), ctx.stream()),
          "cudaMemsetAsync of gradients");
  });
}

/// The skip flag of an optimizer's last step. Flags outlive optimizers: before the first step of an optimizer
/// its flag may still tell that a step of another optimizer was skipped. Such a flag must not be read.
class last_step {
 public:
  /// Starts a step with this flag. Returns the flag of the step before; nullptr if there was none.
  const int* begin(const int* skip) { return std::exchange(skip_, skip); }
  /// Forgets the step, because it has been replaced by a number of steps, or its flag may be destroyed.
  void forget() { skip_ = nullptr; }
  /// Waits for the device.
  bool skipped() const {
    int value = 0;
    if (skip_ != nullptr) device_memory().to_host(&value, skip_, sizeof value);
    return value != 0;
  }

 private:
  const int* skip_ = nullptr;
};

/// Access to the member `steps` of a struct in device memory: without the last step if that was skipped;
/// set_steps_of sets all other members to zero.
template <class Numbers>
std::uint64_t steps_of(const memory_block<Numbers>& numbers, const last_step& last) {
  Numbers values{};
  numbers.to_host({&values, 1});
  return values.steps - (last.skipped() ? 1U : 0U);
}
template <class Numbers>
void set_steps_of(memory_block<Numbers>& numbers, std::uint64_t steps) {
  Numbers values{};
  values.steps = steps;
  numbers.from_host({&values, 1});
}

}  // namespace detail

/// As pufferfish::SGD, over arenas in device memory; float only. A step is begin_step, which must not be
/// captured, then step_range for every parameter, which may be captured into a graph: the numbers of a step
/// are read from device memory. With g = scale gradient + weight_decay value: velocity = g in the first step,
/// else momentum velocity + (1 - dampening) g; value -= lr velocity (Nesterov: value -= lr (g + momentum
/// velocity); without momentum: value -= lr g). The scale is that of set_control, else 1. Computed in float.
/// The 16-bit copies of the values are written in the same pass. Gradients are not changed. One thread at a
/// time uses an object; its state is on the device that was current at construction.
///
///     gpu::SGD optimizer(make_optimizer_target(net.store()), sgd_options{.momentum = 0.9});
///     optimizer.begin_step(ctx, 0.1);                                  // outside of the graph
///     graph.run(ctx, key, [&] {
///       ... forward, loss, backward ...
///       optimizer.step_range(ctx, 0, net.parameter_count());
///     });
class SGD {
 public:
  using value_type = float;

  /// The target's values and gradients are in device memory. Throws as pufferfish::SGD, and backend_error.
  /// value_error for options out of range; shape_error unless segments and gradients cover the values.
  SGD(optimizer_target<float> target, const sgd_options& options)
      : target_(std::move(target)),
        options_(options),
        pieces_(target_.segments, options.decay_all),
        numbers_(device_memory(), 1) {
    options_.validate();
    target_.require_covered("SGD");
    if (options_.momentum != 0.0) {
      velocity_ = detail::state_of(target_);
    }
  }

  const sgd_options& options() const { return options_; }
  const optimizer_target<float>& target() const { return target_; }

  /// Sets a skip flag and a factor for gradients, for all later steps. Both must exist until they are
  /// replaced or no call follows. A step whose flag *skip is not 0 when the stream reaches it changes neither
  /// values nor velocity. The value that the flag has before the first step is not read. If the flag's
  /// address changes, the last step counts even if it was skipped. A captured step keeps the addresses of its
  /// capture.
  void set_control(const kernels::step_control& control) {
    if (control.skip != control_.skip) last_.forget();
    control_ = control;
  }

  /// One step with the given learning rate over all parameters; see pufferfish::SGD::step.
  void step(gpu_context& ctx, double lr) {
    begin_step(ctx, lr);
    step_range(ctx, 0, static_cast<index_t>(target_.values.size()));
  }
  /// Counts the step, except after a skipped step, and sets its learning rate. Throws state_error if the
  /// network has new arenas since the target was made, value_error for a learning rate that is not finite,
  /// backend_error.
  void begin_step(gpu_context& ctx, double lr) {
    target_.require_current("SGD");
    detail::require_rate("SGD", lr);
    unwritten_.begin();
    kernels::begin_sgd(ctx.stream(),
                       {options_.momentum, options_.dampening, options_.weight_decay, options_.nesterov}, lr,
                       last_.begin(control_.skip), numbers_.data());
  }
  /// Updates elements offset .. offset + size - 1, in the order of the context's stream. The calls after one
  /// begin_step must contain each parameter exactly once, in any order. First zeroes gradients that layers
  /// have stopped writing. Throws value_error unless the elements are whole parameters; backend_error.
  void step_range(gpu_context& ctx, index_t offset, index_t size) {
    const auto range = pieces_.of("SGD", offset, size);
    detail::zero_unwritten(ctx, target_, unwritten_, offset, size);
    kernels::sgd(ctx.stream(), numbers_.data(), range.first, range.count, control_, target_.gradients.data(),
                 velocity_.data(), target_.values.data(), detail::rounded_of(target_));
  }

  /// The state, for checkpoints, in device memory: the velocity (empty without momentum). Access to the
  /// number of steps waits for the device.
  std::span<float> velocity() { return velocity_.span(); }
  std::span<const float> velocity() const { return velocity_.span(); }
  /// Number of steps begun, without skipped ones.
  std::uint64_t steps() const { return detail::steps_of(numbers_, last_); }
  /// With 0 steps the next one starts with a new velocity. The next step gets the number steps + 1, whether
  /// the last one was skipped or not.
  void set_steps(std::uint64_t steps) {
    detail::set_steps_of(numbers_, steps);
    last_.forget();
  }

 private:
  optimizer_target<float> target_;
  sgd_options options_;
  detail::arena_pieces pieces_;
  memory_block<kernels::sgd_numbers> numbers_;
  memory_block<float> velocity_;
  kernels::step_control control_{nullptr, nullptr};
  detail::last_step last_;
  pufferfish::detail::zero_before_step unwritten_;
};

/// As pufferfish::Adam, over arenas in device memory; float only. See gpu::SGD. In step t, with g = scale
/// gradient (plus weight_decay value unless options.decoupled_decay): m = beta1 m + (1 - beta1) g, v = beta2
/// v + (1 - beta2) g^2, value -= lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps). With a decoupled
/// decay the value is multiplied by 1 - lr weight_decay. Calls, errors and control as gpu::SGD.
class Adam {
 public:
  using value_type = float;

  /// The target's values and gradients are in device memory. Throws as pufferfish::Adam, and backend_error.
  Adam(optimizer_target<float> target, const adam_options& options)
      : target_(std::move(target)),
        options_(options),
        pieces_(target_.segments, options.decay_all),
        numbers_(device_memory(), 1) {
    options_.validate();
    target_.require_covered("Adam");
    first_ = detail::state_of(target_);
    second_ = detail::state_of(target_);
  }

  const adam_options& options() const { return options_; }
  const optimizer_target<float>& target() const { return target_; }
  /// As gpu::SGD.
  void set_control(const kernels::step_control& control) {
    if (control.skip != control_.skip) last_.forget();
    control_ = control;
  }

  void step(gpu_context& ctx, double lr) {
    begin_step(ctx, lr);
    step_range(ctx, 0, static_cast<index_t>(target_.values.size()));
  }
  void begin_step(gpu_context& ctx, double lr) {
    target_.require_current("Adam");
    detail::require_rate("Adam", lr);
    unwritten_.begin();
    kernels::begin_adam(
        ctx.stream(),
        {options_.beta1, options_.beta2, options_.eps, options_.weight_decay, options_.decoupled_decay}, lr,
        last_.begin(control_.skip), numbers_.data());
  }
  void step_range(gpu_context& ctx, index_t offset, index_t size) {
    const auto range = pieces_.of("Adam", offset, size);
    detail::zero_unwritten(ctx, target_, unwritten_, offset, size);
    kernels::adam(ctx.stream(), numbers_.data(), range.first, range.count, control_, target_.gradients.data(),
                  first_.data(), second_.data(), target_.values.data(), detail::rounded_of(target_));
  }

  std::span<float> first_moment() { return first_.span(); }
  std::span<const float> first_moment() const { return first_.span(); }
  std::span<float> second_moment() { return second_.span(); }
  std::span<const float> second_moment() const { return second_.span(); }
  std::uint64_t steps() const { return detail::steps_of(numbers_, last_); }
  void set_steps(std::uint64_t steps) {
    detail::set_steps_of(numbers_, steps);
    last_.forget();
  }

 private:
  optimizer_target<float> target_;
  adam_options options_;
  detail::arena_pieces pieces_;
  memory_block<kernels::adam_numbers> numbers_;
  memory_block<float> first_, second_;
  kernels::step_control control_{nullptr, nullptr};
  detail::last_step last_;
  pufferfish::detail::zero_before_step unwritten_;
};

/// Writes the norm of a gradient to *facts, on the device; multiplication by facts->scale clips to max_norm
/// (not above 0: no clipping). A step with this scale in its step_control needs no pass for clipping.
/// `inverse_scale`: reciprocal of the loss scale that the gradient still contains, or nullptr for 1.
///
/// facts->norm is the norm before clipping, without the loss scale. facts->scale is *inverse_scale, times
/// max_norm / norm if max_norm > 0 and norm > max_norm; it is 1 if the norm is not finite. facts->not_finite
/// is 1 if the norm is not finite, else 0. The sum is in double, in an order that depends on the size and the
/// address modulo 16. `gradients`, `facts` and `inverse_scale` are in device memory. Does not wait. Throws
/// backend_error.
inline void gradient_norm(gpu_context& ctx, std::span<const float> gradients, double max_norm,
                          kernels::gradient_facts* facts, const float* inverse_scale = nullptr) {
  const auto size = static_cast<index_t>(gradients.size());
  scratch_frame frame(ctx.scratch());
  double* scratch = frame.take<double>(kernels::norm_parts(size));
  kernels::gradient_norm(ctx.stream(), gradients.data(), size, inverse_scale, max_norm, scratch, facts);
}

/// As pufferfish::clip_gradient_norm, with the result on the device. Throws value_error unless max_norm > 0.
/// Gradients are multiplied by facts->scale in place.
inline void clip_gradient_norm(gpu_context& ctx, std::span<float> gradients, double max_norm,
                               kernels::gradient_facts* facts) {
  if (!(max_norm > 0.0)) {
    pufferfish::detail::throw_error<value_error>(
        {"clip_gradient_norm: maximal norm ", max_norm, " is not positive"});
  }
  gradient_norm(ctx, gradients, max_norm, facts);
  kernels::scale_by(ctx.stream(), gradients.data(), static_cast<index_t>(gradients.size()), &facts->scale);
}

/// Dynamic loss scaling, for networks that compute in fp16 (Micikevicius et al., Mixed precision training,
/// ICLR 2018, section 3.2). After use(ctx) losses multiply their gradients by scale() before rounding.
/// unscale() divides the gradients of the parameters by it, and a step with a gradient that is not finite is
/// skipped. All of it happens on the device:
///     scaler.use(ctx);  optimizer.set_control(scaler.control());          // once
///     loss, backward;  scaler.unscale(ctx, gradients);                    // each step
///     optimizer.step_range(...);  scaler.update(ctx);
///
/// All ranks must skip the same steps and have the same scale: call unscale after the exchange has finished.
/// A number that is not finite on one rank then makes the mean on all ranks not finite. Steps that the
/// exchange skips (nonfinite_policy::skip) leave different gradients on every rank; skip_if skips them. A
/// compressor keeps unsent values for later steps, so its gradients must not have the scale: call unscale
/// after the backward pass, then exchange with nonfinite_policy::skip.
///     exchange.begin(ctx);  backward;  exchange.finish(ctx);  scaler.unscale(ctx, gradients);
///     scaler.skip_if(ctx, exchange.skip());  optimizer.step_range(...);  scaler.update(ctx);
///
/// One thread at a time uses an object. All functions but scale(), set_scale(), state() and set_state() may
/// be captured into a graph.
class loss_scaler {
 public:
  /// `constants`: growth, backoff, smallest and largest scale, and the number of finite steps between two
  /// growths. The values are not checked. Throws backend_error.
  explicit loss_scaler(float initial = 65536.0F,
                       const kernels::loss_scale_constants& constants = {2.0F, 0.5F, 1.0F, 16777216.0F, 2000})
      : constants_(constants), scale_(device_memory(), 1), not_finite_(device_memory(), 1) {
    set_scale(initial);
  }

  /// The argument of the optimizer's set_control(). Its flag is an address in this object, which must outlive
  /// the optimizer's steps.
  kernels::step_control control() const { return {not_finite_.data(), nullptr}; }

  /// Makes the context's losses multiply their gradients. This object must outlive their use.
  /// context::set_loss_scale(nullptr) ends the use.
  void use(gpu_context& ctx) const { ctx.set_loss_scale(&scale_.data()->value); }
  /// Divides gradients by the scale and records whether all are finite; replaces the record before. Gradients
  /// are overwritten in place. Throws backend_error.
  void unscale(gpu_context& ctx, std::span<float> gradients) {
    check(cudaMemsetAsync(not_finite_.data(), 0, sizeof(int), ctx.stream()), "cudaMemsetAsync");
    kernels::unscale(ctx.stream(), gradients.data(), static_cast<index_t>(gradients.size()),
                     &scale_.data()->inverse, not_finite_.data());
  }
  /// If the flag, on the device, is not 0 when the stream reaches this call, the step is skipped as one with
  /// gradients that are not finite. To be called after unscale, before the optimizer's step.
  void skip_if(gpu_context& ctx, const int* flag) {
    kernels::join_flag(ctx.stream(), flag, not_finite_.data());
  }
  /// Updates the scale by the record of unscale and skip_if. After a step with a gradient that is not finite:
  /// scale = max(smallest, backoff scale). After `interval` finite steps in a row: scale = min(largest,
  /// growth scale). To be called once a step, after the optimizer's step.
  void update(gpu_context& ctx) {
    kernels::update_loss_scale(ctx.stream(), constants_, not_finite_.data(), scale_.data());
  }

  /// This and the following functions wait for the device.
  float scale() const { return state().value; }
  void set_scale(float scale) { set_state({scale, 1.0F / scale, 0}); }

  /// The whole state, for checkpoints.
  kernels::loss_scale state() const {
    kernels::loss_scale values{};
    scale_.to_host({&values, 1});
    return values;
  }
  void set_state(const kernels::loss_scale& values) { scale_.from_host({&values, 1}); }

 private:
  kernels::loss_scale_constants constants_;
  memory_block<kernels::loss_scale> scale_;
  memory_block<int> not_finite_;
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
