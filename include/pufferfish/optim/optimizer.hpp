// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `optimizer`: SGD or Adam, chosen at run time, as one type.

#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <pufferfish/core/number_text.hpp>
#include <pufferfish/optim/adam.hpp>
#include <pufferfish/optim/sgd.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Which optimizer to use, with its options.
using optimizer_options = std::variant<sgd_options, adam_options>;

/// SGD or Adam over the values and gradients of a model; the contract of all members is that of
/// arena_optimizer.
///
/// \code
/// const optimizer_options options = sgd_options{.momentum = 0.9};
/// optimizer<float> opt(make_optimizer_target(net.store()), options);
/// opt.step(ctx, 0.1);
/// for (const auto& [name, values] : opt.states()) save(name, values);  // and opt.steps()
/// \endcode
template <class T, class Device = device::cpu>
class optimizer {
 public:
  /// Makes an SGD or an Adam object; the type of `options` decides. The target's arrays must exist as long as
  /// the optimizer is used. Throws shape_error if gradients or segments do not cover the target's values
  /// exactly, value_error for options out of range.
  optimizer(optimizer_target<T> target, const optimizer_options& options)
      : held_(make(std::move(target), options)) {}

  /// On a device: sets the skip flag and the factor of later steps; see arena_optimizer::set_control.
  void set_control(const typename SGD<T, Device>::control_type& control) requires(
      !std::is_same_v<Device, device::cpu>) {
    std::visit([&](auto& one) { one.set_control(control); }, held_);
  }

  /// One step with the given learning rate; see arena_optimizer::step.
  void step(context<Device>& ctx, double lr) {
    std::visit([&](auto& one) { one.step(ctx, lr); }, held_);
  }

  /// Begins a step that step_range calls complete; see arena_optimizer::begin_step.
  void begin_step(context<Device>& ctx, double lr) {
    std::visit([&](auto& one) { one.begin_step(ctx, lr); }, held_);
  }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // of SGD and Adam, called here
  [[deprecated("pass the context: begin_step(ctx, lr)")]] void begin_step(
      double lr) requires std::is_same_v<Device, device::cpu> {
    std::visit([&](auto& one) { one.begin_step(lr); }, held_);
  }
#pragma GCC diagnostic pop
  /// Updates elements offset .. offset + size - 1 in a step that was begun; see arena_optimizer::step_range.
  void step_range(context<Device>& ctx, index_t offset, index_t size) {
    std::visit([&](auto& one) { one.step_range(ctx, offset, size); }, held_);
  }

  /// Number of steps taken, without skipped ones; see arena_optimizer::steps.
  std::uint64_t steps() const {
    return std::visit([](const auto& one) { return one.steps(); }, held_);
  }
  /// Restores the number of steps from a checkpoint.
  void set_steps(std::uint64_t steps) {
    std::visit([&](auto& one) { one.set_steps(steps); }, held_);
  }

  /// The state for checkpoints, by name, in the memory of the device: SGD's velocity, Adam's two moments.
  /// Each span has the order of the values and is valid as long as the optimizer. The velocity is empty
  /// without momentum.
  std::vector<std::pair<std::string, std::span<T>>> states() {
    if (auto* sgd = std::get_if<SGD<T, Device>>(&held_)) return {{"optimizer.momentum", sgd->velocity()}};
    auto& adam = std::get<Adam<T, Device>>(held_);
    return {{"optimizer.first_moment", adam.first_moment()},
            {"optimizer.second_moment", adam.second_moment()}};
  }

 private:
  using held = std::variant<SGD<T, Device>, Adam<T, Device>>;
  // Makes the optimizer that the type of the options names.
  static held make(optimizer_target<T> target, const optimizer_options& options) {
    if (const auto* sgd = std::get_if<sgd_options>(&options)) {
      return SGD<T, Device>(std::move(target), *sgd);
    }
    return Adam<T, Device>(std::move(target), std::get<adam_options>(options));
  }

  held held_;
};

/// One line of text, for logs and to compare runs: "SGD, momentum 0.5, dampening 0, weight decay 0.0001".
inline std::string describe(const optimizer_options& options) {
  const auto number = detail::exact_number;
  if (const auto* sgd = std::get_if<sgd_options>(&options)) {
    return "SGD, momentum " + number(sgd->momentum) + ", dampening " + number(sgd->dampening) +
           (sgd->nesterov ? ", Nesterov" : "") + ", weight decay " + number(sgd->weight_decay) +
           (sgd->decay_all ? " of everything" : "");
  }
  const auto& adam = std::get<adam_options>(options);
  return "Adam, betas " + number(adam.beta1) + " " + number(adam.beta2) + ", eps " + number(adam.eps) +
         ", weight decay " + number(adam.weight_decay) + (adam.decoupled_decay ? " decoupled" : "") +
         (adam.decay_all ? " of everything" : "");
}

PUFFERFISH_NAMESPACE_END
