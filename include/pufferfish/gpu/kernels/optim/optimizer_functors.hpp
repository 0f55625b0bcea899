// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// One element of an optimizer's step, as function objects for the host and the device, and the numbers that
/// belong to a step. Formulas: optim/sgd.hpp and optim/adam.hpp.

#include <cmath>

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Options of SGD that do not change from step to step.
struct sgd_constants {
  double momentum, dampening, weight_decay;
  bool nesterov;
};
/// Options of Adam that do not change from step to step.
struct adam_constants {
  double beta1, beta2, eps, weight_decay;
  bool decoupled_decay;
};

/// The numbers of a step of SGD, in device memory: velocity = keep velocity + take g, value -= lr (own g +
/// ahead velocity), with g = gradient + decay value.
struct sgd_numbers {
  std::uint64_t steps;  ///< number of steps, this one included
  float lr, decay, keep, take, own, ahead;
};
/// The numbers of a step of Adam, with bias corrections. `shrink`: factor of values that decay. With g =
/// gradient + decay value: first = keep_first first + take_first g, second = keep_second second + take_second
/// g^2, value = shrink value - rate first / (sqrt(second) deviation_scale + eps).
struct adam_numbers {
  std::uint64_t steps;
  float rate, shrink, decay, keep_first, take_first, keep_second, take_second, deviation_scale, eps;
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// The numbers of step `steps` (1 for the first one) at learning rate lr.
PUFFERFISH_HOST_DEVICE inline sgd_numbers sgd_numbers_of(const sgd_constants& c, std::uint64_t steps,
                                                         double lr) {
  const auto momentum = static_cast<float>(c.momentum);
  const bool first = steps == 1;  // the velocity is zero: weights of 0 and 1 make it g
  return {steps,
          static_cast<float>(lr),
          static_cast<float>(c.weight_decay),
          first ? 0.0F : momentum,
          first ? 1.0F : static_cast<float>(1.0 - c.dampening),
          c.nesterov ? 1.0F : 0.0F,
          c.nesterov ? momentum : 1.0F};
}

/// The numbers of step `steps` at learning rate lr. `steps` must be at least 1: with 0 the rate would not be
/// finite.
PUFFERFISH_HOST_DEVICE inline adam_numbers adam_numbers_of(const adam_constants& c, std::uint64_t steps,
                                                           double lr) {
  const auto t = static_cast<double>(steps);
  return {steps,
          static_cast<float>(lr / (1.0 - std::pow(c.beta1, t))),
          static_cast<float>(c.decoupled_decay ? 1.0 - lr * c.weight_decay : 1.0),
          static_cast<float>(c.decoupled_decay ? 0.0 : c.weight_decay),
          static_cast<float>(c.beta1),
          static_cast<float>(1.0 - c.beta1),
          static_cast<float>(c.beta2),
          static_cast<float>(1.0 - c.beta2),
          static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(c.beta2, t))),
          static_cast<float>(c.eps)};
}

/// Applies a step of SGD to one element. Without momentum the velocity is not read.
struct sgd_element {
  sgd_numbers n;
  bool momentum;

  PUFFERFISH_HOST_DEVICE void operator()(float& value, float& velocity, float gradient, bool decays) const {
    const float g = decays ? gradient + n.decay * value : gradient;
    float direction = g;
    if (momentum) {
      velocity = n.keep * velocity + n.take * g;
      direction = n.own * g + n.ahead * velocity;
    }
    value -= n.lr * direction;
  }
};

/// Applies a step of Adam to one element.
struct adam_element {
  adam_numbers n;

  PUFFERFISH_HOST_DEVICE void operator()(float& value, float& first, float& second, float gradient,
                                         bool decays) const {
    const float g = decays ? gradient + n.decay * value : gradient;
    first = n.keep_first * first + n.take_first * g;
    second = n.keep_second * second + n.take_second * (g * g);
    const float deviation = std::sqrt(second) * n.deviation_scale + n.eps;
    value = (decays ? n.shrink : 1.0F) * value - n.rate * (first / deviation);
  }
};

PUFFERFISH_KERNELS_END
