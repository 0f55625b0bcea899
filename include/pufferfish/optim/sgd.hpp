// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `SGD`: stochastic gradient descent with momentum, over whole arenas.

#include <algorithm>
#include <cmath>
#include <utility>

#include <pufferfish/core/number_text.hpp>
#include <pufferfish/core/separate.hpp>
#include <pufferfish/nn/unwritten_gradients.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>
#include <pufferfish/optim/optimizer_target.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of SGD, with the names and defaults of torch.optim.SGD except decay_all.
struct sgd_options {
  double momentum = 0.0;      ///< factor of the velocity of earlier steps; 0: no velocity is kept
  double dampening = 0.0;     ///< share of the gradient left out of the velocity; may be negative
  bool nesterov = false;      ///< needs momentum and no dampening
  double weight_decay = 0.0;  ///< added to the gradient, times the value
  bool decay_all = false;     ///< also biases and normalisation parameters, as PyTorch does by default

  /// Throws value_error for a momentum or weight decay that is negative, for a number that is not finite, and
  /// for nesterov without momentum or with dampening.
  void validate() const {
    const bool valid = momentum >= 0.0 && std::isfinite(momentum) && std::isfinite(dampening) &&
                       weight_decay >= 0.0 && std::isfinite(weight_decay);
    if (!valid) {
      PUFFERFISH_THROW(value_error("SGD: momentum " + detail::shortest_number(momentum) + ", dampening " +
                                   detail::shortest_number(dampening) + ", weight decay " +
                                   detail::shortest_number(weight_decay) +
                                   ": all must be finite, momentum and weight decay not negative"));
    }
    if (nesterov && (momentum == 0.0 || dampening != 0.0)) {
      PUFFERFISH_THROW(value_error("SGD: Nesterov needs momentum (got " + detail::shortest_number(momentum) +
                                   ") and no dampening (got " + detail::shortest_number(dampening) + ")"));
    }
  }
};

namespace ops::reference {

/// The SGD update of one element, as PyTorch defines it; see SGD. `decay` is 0 if weight decay is off.
template <class T>
void sgd_element(T& value, T gradient, T& velocity, double lr, const sgd_options& options, double decay,
                 bool first_step) {
  const T g = gradient + static_cast<T>(decay) * value;
  T direction = g;
  if (options.momentum != 0.0) {
    const T momentum = static_cast<T>(options.momentum);
    velocity = first_step ? g : momentum * velocity + static_cast<T>(1.0 - options.dampening) * g;
    direction = options.nesterov ? g + momentum * velocity : velocity;
  }
  value -= static_cast<T>(lr) * direction;
}

}  // namespace ops::reference

/// With g = gradient + weight_decay value:
///     velocity = g at the first step, else momentum velocity + (1 - dampening) g
///     value -= lr velocity               (Nesterov: value -= lr (g + momentum velocity))
/// which is PyTorch's form (lr outside the velocity). Without momentum: value -= lr g.
///
/// Weight decay applies to parameters of role weight only, unless decay_all is set, and to no exempt segment
/// (see arena_segment). Memory: one velocity per value, none without momentum. Results do not depend on the
/// number of threads. Gradients that layers have stopped writing count as zero (see parameter). One thread at
/// a time may call an optimizer.
///
/// \code
/// SGD<float> optimizer(make_optimizer_target(net.store()), {.momentum = 0.9, .weight_decay = 1e-4});
/// for (std::uint64_t step = 0; step < steps; ++step) {
///   ctx.begin_step(step);
///   net.forward(ctx, images.view(), logits.view());
///   loss(ctx, logits.view(), labels, batch, dlogits.view());
///   net.backward(ctx, dlogits.view());
///   optimizer.step(ctx, 0.1);
/// }
/// \endcode
template <class T>
class SGD {
 public:
  using value_type = T;

  /// Starts at step 0, without a velocity. Throws shape_error if the target's parts do not fit each other,
  /// value_error for options out of range.
  /// The target's arenas must exist as long as the optimizer is used.
  SGD(optimizer_target<T> target, const sgd_options& options)
      : target_(std::move(target)), options_(options), tasks_(target_.segments, options.decay_all) {
    options_.validate();
    target_.require_covered("SGD");
    if (options_.momentum != 0.0) velocity_ = aligned_buffer<T>(static_cast<index_t>(target_.values.size()));
  }

  const sgd_options& options() const { return options_; }
  const optimizer_target<T>& target() const { return target_; }

  /// One step with the given learning rate over all parameters. Throws state_error if the network has changed
  /// its arenas, value_error for a learning rate that is not finite.
  /// Gradients are read, not changed, except those that must count as zero.
  void step(context<device::cpu>& ctx, double lr) {
    begin_step(lr);
    step_range(ctx, 0, static_cast<index_t>(target_.values.size()));
  }

  /// The same step in parts: begin_step counts the step; the step_range calls after it must contain each
  /// parameter exactly once. Their order and number do not change a bit of the result. Errors as step.
  /// step_range throws value_error unless elements offset .. offset + size are whole parameters.
  void begin_step(double lr) {
    target_.require_current("SGD");
    if (!std::isfinite(lr)) {
      PUFFERFISH_THROW(value_error("SGD: learning rate " + detail::shortest_number(lr) + " is not finite"));
    }
    numbers_ = numbers_for(lr);
    ++steps_;
    unwritten_.begin();
  }
  void step_range(context<device::cpu>& ctx, index_t offset, index_t size) {
    unwritten_.use(target_.store, offset, size, [this](index_t first, index_t count) {
      std::fill_n(target_.store->gradients().data() + first, count, T{});
    });
    T* velocity = options_.momentum != 0.0 ? velocity_.data() : nullptr;
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, sgd<T>);
    tasks_.run(ctx, "SGD", offset, size, [&](const arena_segment& range) {
      ops::detail::sgd_numbers<T> own = numbers_;
      if (!range.decay) own.decay = T{};
      kernel(own, target_.gradients.data() + range.offset,
             velocity == nullptr ? nullptr : velocity + range.offset, target_.values.data() + range.offset,
             range.size);
    });
  }

  /// The state, for checkpoints: the velocity arena (arranged like the values; empty without momentum) and
  /// the number of steps taken.
  /// set_steps(n) with n > 0 declares the velocity valid, as after loading it.
  std::span<T> velocity() { return velocity_.span(); }
  std::span<const T> velocity() const { return velocity_.span(); }
  std::uint64_t steps() const { return steps_; }
  void set_steps(std::uint64_t steps) { steps_ = steps; }

 private:
  ops::detail::sgd_numbers<T> numbers_for(double lr) const {
    const T momentum = static_cast<T>(options_.momentum);
    const bool first = steps_ == 0;  // first step: velocity = 0 velocity + 1 g
    return {static_cast<T>(lr),
            static_cast<T>(options_.weight_decay),
            first ? T{} : momentum,
            first ? T{1} : static_cast<T>(1.0 - options_.dampening),
            options_.nesterov ? T{1} : T{},
            options_.nesterov ? momentum : T{1}};
  }

  optimizer_target<T> target_;
  sgd_options options_;
  detail::arena_tasks tasks_;
  ops::detail::sgd_numbers<T> numbers_{};  // constants of the current step
  aligned_buffer<T> velocity_;
  std::uint64_t steps_ = 0;
  detail::zero_before_step unwritten_;
};
PUFFERFISH_SEPARATE_CLASS(train, SGD);

PUFFERFISH_NAMESPACE_END
