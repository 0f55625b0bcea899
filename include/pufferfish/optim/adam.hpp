// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `Adam`: the optimizers Adam and AdamW. A step updates all parameters of a network, which are stored in one
/// array (the arena).

#include <cmath>
#include <utility>

#include <pufferfish/core/separate.hpp>
#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/optim/arena_optimizer.hpp>

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

/// The Adam update of one element in step number `step` (1, 2, ...), as PyTorch defines it; formula: see
/// Adam. `decay` is options.weight_decay, or 0 if the element does not decay. first and second are its two
/// moments.
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

/// Adam as a rule of arena_optimizer: two states, the first and the second moment.
template <>
struct update_rule<adam_options> {
  static constexpr const char* name = "Adam";
  static std::size_t states(const adam_options&) { return 2; }

  template <class T>
  using numbers = adam_numbers<T>;
  // sqrt(v / c) + eps = sqrt(v) / sqrt(c) + eps, so the bias corrections are constants of the step.
  template <class T>
  static adam_numbers<T> numbers_of(const adam_options& options, double decay, std::uint64_t step,
                                    double lr) {
    const auto t = static_cast<double>(step);
    return {static_cast<T>(lr / (1.0 - std::pow(options.beta1, t))),
            static_cast<T>(options.decoupled_decay ? 1.0 - lr * decay : 1.0),
            static_cast<T>(options.decoupled_decay ? 0.0 : decay),
            static_cast<T>(options.beta1),
            static_cast<T>(1.0 - options.beta1),
            static_cast<T>(options.beta2),
            static_cast<T>(1.0 - options.beta2),
            static_cast<T>(1.0 / std::sqrt(1.0 - std::pow(options.beta2, t))),
            static_cast<T>(options.eps)};
  }
  template <class T>
  static void update(const adam_numbers<T>& n, const T* gradient, const state_arrays<T>& states, T* value,
                     index_t count) {
    PUFFERFISH_KERNEL(widest_isa(), adam_passes, adam<T>)(n, gradient, states[0], states[1], value, count);
  }
};

}  // namespace detail
PUFFERFISH_SEPARATE_CLASS(train, arena_optimizer, adam_options);

/// In step t = 1, 2, ..., with gradient g (Kingma, Ba: "Adam", ICLR 2015):
///     m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
///     value -= lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
/// With weight decay, either value *= 1 - lr weight_decay before the update (Loshchilov, Hutter: "Decoupled
/// weight decay regularization", ICLR 2019), or g = gradient + weight_decay value: PyTorch's AdamW and Adam.
/// Memory: two moments per value. Steps, errors, weight decay and device::gpu: see arena_optimizer.
///
/// \code
/// Adam<float> optimizer(make_optimizer_target(net.store()), {.beta2 = 0.98, .eps = 1e-9});
/// const noam_rate rate{512.0, 4000.0, 1.0};
/// for (std::uint64_t step = 1; step <= steps; ++step) {
///   ...  // forward and backward pass
///   optimizer.step(ctx, rate(static_cast<double>(step)));
/// }
/// \endcode
template <class T, class Device = device::cpu>
class Adam : public arena_optimizer<T, adam_options, Device> {
 public:
  /// Starts with zero moments at step 0, for example for a network that has just been factorized. The
  /// target's arrays must exist as long as the optimizer is used. Throws shape_error if gradients or segments
  /// do not cover the target's values exactly, value_error for options out of range, and for an eps that is 0
  /// in T.
  Adam(optimizer_target<T> target, const adam_options& options)
      : arena_optimizer<T, adam_options, Device>(std::move(target), options) {
    if (static_cast<T>(options.eps) == T{}) {
      detail::throw_error<value_error>({"Adam: eps ", options.eps, " is 0 in the type of the parameters"});
    }
  }

  /// Mean of gradients, for checkpoints: one element for each value, in the memory of the device. The span is
  /// valid for the life of this object. A checkpoint stores both moments and steps(), on which the bias
  /// corrections depend.
  std::span<T> first_moment() { return this->state(0); }
  std::span<const T> first_moment() const { return this->state(0); }
  /// Mean of squared gradients, for checkpoints, in the order and with the lifetime of first_moment().
  std::span<T> second_moment() { return this->state(1); }
  std::span<const T> second_moment() const { return this->state(1); }
};
PUFFERFISH_SEPARATE_CLASS(train, Adam);

PUFFERFISH_NAMESPACE_END
