// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `SGD`: stochastic gradient descent with momentum. A step updates all parameters of a network, which are
/// stored in one array (the arena).

#include <cmath>
#include <utility>

#include <pufferfish/core/number_text.hpp>
#include <pufferfish/core/separate.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>
#include <pufferfish/optim/arena_optimizer.hpp>

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

namespace detail {

/// SGD as a rule of arena_optimizer: one state, the velocity, or none without momentum.
template <>
struct update_rule<sgd_options> {
  static constexpr const char* name = "SGD";
  static std::size_t states(const sgd_options& options) { return options.momentum != 0.0 ? 1 : 0; }

  template <class T>
  using numbers = ops::detail::sgd_numbers<T>;
  template <class T>
  static numbers<T> numbers_of(const sgd_options& options, double decay, std::uint64_t step, double lr) {
    const T momentum = static_cast<T>(options.momentum);
    const bool first = step == 1;  // first step: velocity = 0 velocity + 1 g
    return {static_cast<T>(lr),
            static_cast<T>(decay),
            first ? T{} : momentum,
            first ? T{1} : static_cast<T>(1.0 - options.dampening),
            options.nesterov ? T{1} : T{},
            options.nesterov ? momentum : T{1}};
  }
  template <class T>
  static void update(const numbers<T>& n, const T* gradient, const state_arrays<T>& states, T* value,
                     index_t count) {
    PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, sgd<T>)(n, gradient, states[0], value, count);
  }
};

}  // namespace detail
PUFFERFISH_SEPARATE_CLASS(train, arena_optimizer, sgd_options);

/// With g = gradient + weight_decay value:
///     velocity = g at the first step, else momentum velocity + (1 - dampening) g
///     value -= lr velocity               (Nesterov: value -= lr (g + momentum velocity))
/// which is PyTorch's form (lr outside the velocity). Without momentum: value -= lr g. Memory: one velocity
/// per value, none without momentum. Steps, errors, weight decay and device::gpu: see arena_optimizer.
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
template <class T, class Device = device::cpu>
class SGD : public arena_optimizer<T, sgd_options, Device> {
 public:
  /// Starts at step 0, without a velocity. The target's arrays must exist as long as the optimizer is used.
  /// Throws shape_error if gradients or segments do not cover the target's values exactly, value_error for
  /// options out of range.
  SGD(optimizer_target<T> target, const sgd_options& options)
      : arena_optimizer<T, sgd_options, Device>(std::move(target), options) {}

  /// The state for checkpoints, which also keep steps(): the velocity, in the memory of the device, arranged
  /// as the values; empty without momentum. Valid for the life of this object.
  std::span<T> velocity() { return this->state(0); }
  std::span<const T> velocity() const { return this->state(0); }
};
PUFFERFISH_SEPARATE_CLASS(train, SGD);

PUFFERFISH_NAMESPACE_END
