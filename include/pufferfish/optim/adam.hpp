// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `Adam`: Adam and AdamW over whole arenas.

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/number_text.hpp>
#include <pufferfish/core/separate.hpp>
#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/nn/unwritten_gradients.hpp>
#include <pufferfish/optim/optimizer_target.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of Adam; the defaults are those of torch.optim.AdamW except weight_decay and decay_all.
struct adam_options {
  double beta1 = 0.9;         ///< decay rate of the mean of gradients
  double beta2 = 0.999;       ///< decay rate of the mean of squared gradients
  double eps = 1e-8;          ///< added to the root of the second moment
  double weight_decay = 0.0;  ///< lambda; see decoupled_decay
  /// True (AdamW): value *= 1 - lr weight_decay. False (Adam): weight_decay value is added to the gradient.
  bool decoupled_decay = true;
  bool decay_all = false;  ///< also biases and normalisation parameters, as PyTorch does by default

  /// Throws value_error unless both betas are in [0, 1), eps is positive, weight_decay is not negative, and
  /// all are finite.
  void validate() const {
    const auto is_beta = [](double beta) { return beta >= 0.0 && beta < 1.0; };
    const bool valid = is_beta(beta1) && is_beta(beta2) && eps > 0.0 && std::isfinite(eps) &&
                       weight_decay >= 0.0 && std::isfinite(weight_decay);
    if (!valid) {
      pufferfish::detail::throw_error<value_error>(
          {"Adam: betas ", beta1, " and ", beta2, " must be in [0, 1), eps ", eps, " positive, weight decay ",
           weight_decay, " not negative, all finite"});
    }
  }
};

namespace ops::reference {

/// The update of one element in step number `step` (1, 2, ...), as PyTorch defines it; see Adam. `decay` is
/// 0 if weight decay is off.
template <class T>
void adam_element(T& value, T gradient, T& first, T& second, double lr, const adam_options& options,
                  double decay, std::uint64_t step) {
  const double old = static_cast<double>(value);
  const double g = static_cast<double>(gradient) + (options.decoupled_decay ? 0.0 : decay * old);
  const double mean = options.beta1 * static_cast<double>(first) + (1.0 - options.beta1) * g;
  const double square = options.beta2 * static_cast<double>(second) + (1.0 - options.beta2) * g * g;
  first = static_cast<T>(mean);
  second = static_cast<T>(square);
  const auto t = static_cast<double>(step);
  const double unbiased_mean = mean / (1.0 - std::pow(options.beta1, t));
  const double unbiased_square = square / (1.0 - std::pow(options.beta2, t));
  const double kept = options.decoupled_decay ? old * (1.0 - lr * decay) : old;
  value = static_cast<T>(kept - lr * unbiased_mean / (std::sqrt(unbiased_square) + options.eps));
}

}  // namespace ops::reference

namespace detail {

/// Constants of one step, with the bias corrections included.
template <class T>
struct adam_numbers {
  T rate, shrink, decay, keep_first, take_first, keep_second, take_second, deviation_scale, eps;
};

#define PUFFERFISH_KERNELS adam_passes
#define PUFFERFISH_KERNEL_FILE <pufferfish/optim/adam.inc>
#include <pufferfish/linalg/for_each_target.inc>

}  // namespace detail

/// In step t = 1, 2, ..., with gradient g (Kingma, Ba: "Adam", ICLR 2015):
///     m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
///     value -= lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
/// With weight decay, either value *= 1 - lr weight_decay before the update (Loshchilov, Hutter: "Decoupled
/// weight decay regularization", ICLR 2019), or g = gradient + weight_decay value: PyTorch's AdamW and Adam.
///
/// Weight decay applies to parameters of role weight only, unless decay_all is set, and to no exempt segment
/// (see arena_segment). Memory: two moments per value. Results do not depend on the number of threads.
/// Gradients that layers have stopped writing count as zero (see parameter). One thread at a time may call an
/// optimizer.
///
/// \code
/// Adam<float> optimizer(make_optimizer_target(net.store()), {.beta2 = 0.98, .eps = 1e-9});
/// const noam_rate rate{512.0, 4000.0, 1.0};
/// for (std::uint64_t step = 1; step <= steps; ++step) {
///   ...  // forward and backward pass
///   optimizer.step(ctx, rate(static_cast<double>(step)));
/// }
/// \endcode
template <class T>
class Adam {
 public:
  using value_type = T;

  /// Starts with zero moments at step 0, for example for a network that has just been factorized. Throws
  /// shape_error if the target's parts do not fit each other, value_error for options out of range.
  /// The target's arenas must exist as long as the optimizer is used.
  Adam(optimizer_target<T> target, const adam_options& options)
      : target_(std::move(target)), options_(options), tasks_(target_.segments, options.decay_all) {
    options_.validate();
    target_.require_covered("Adam");
    const auto size = static_cast<index_t>(target_.values.size());
    first_ = aligned_buffer<T>(size);
    second_ = aligned_buffer<T>(size);
  }

  const adam_options& options() const { return options_; }
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
    target_.require_current("Adam");
    if (!std::isfinite(lr)) {
      PUFFERFISH_THROW(value_error("Adam: learning rate " + detail::shortest_number(lr) + " is not finite"));
    }
    ++steps_;
    unwritten_.begin();
    decaying_ = numbers_for(lr, options_.weight_decay);
    others_ = numbers_for(lr, 0.0);
  }
  void step_range(context<device::cpu>& ctx, index_t offset, index_t size) {
    unwritten_.use(target_.store, offset, size, [this](index_t first, index_t count) {
      std::fill_n(target_.store->gradients().data() + first, count, T{});
    });
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::adam_passes, adam<T>);
    tasks_.run(ctx, "Adam", offset, size, [&](const arena_segment& range) {
      kernel(range.decay ? decaying_ : others_, target_.gradients.data() + range.offset,
             first_.data() + range.offset, second_.data() + range.offset,
             target_.values.data() + range.offset, range.size);
    });
  }

  /// The state, for checkpoints: the two moments (arranged as the values) and the number of steps taken.
  /// The bias corrections depend on the number of steps, so a checkpoint restores all three.
  std::span<T> first_moment() { return first_.span(); }
  std::span<const T> first_moment() const { return first_.span(); }
  std::span<T> second_moment() { return second_.span(); }
  std::span<const T> second_moment() const { return second_.span(); }
  std::uint64_t steps() const { return steps_; }
  void set_steps(std::uint64_t steps) { steps_ = steps; }

 private:
  // sqrt(v / c) + eps = sqrt(v) / sqrt(c) + eps, so the bias corrections are constants of the step.
  detail::adam_numbers<T> numbers_for(double lr, double decay) const {
    const auto t = static_cast<double>(steps_);
    return {static_cast<T>(lr / (1.0 - std::pow(options_.beta1, t))),
            static_cast<T>(options_.decoupled_decay ? 1.0 - lr * decay : 1.0),
            static_cast<T>(options_.decoupled_decay ? 0.0 : decay),
            static_cast<T>(options_.beta1),
            static_cast<T>(1.0 - options_.beta1),
            static_cast<T>(options_.beta2),
            static_cast<T>(1.0 - options_.beta2),
            static_cast<T>(1.0 / std::sqrt(1.0 - std::pow(options_.beta2, t))),
            static_cast<T>(options_.eps)};
  }

  optimizer_target<T> target_;
  adam_options options_;
  pufferfish::detail::arena_tasks tasks_;
  detail::adam_numbers<T> decaying_{}, others_{};  // constants of the current step
  aligned_buffer<T> first_, second_;
  std::uint64_t steps_ = 0;
  detail::zero_before_step unwritten_;
};
PUFFERFISH_SEPARATE_CLASS(train, Adam);

PUFFERFISH_NAMESPACE_END
