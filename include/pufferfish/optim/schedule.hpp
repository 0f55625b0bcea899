// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Learning-rate schedules: pure functions of the position in training, so that nothing of them needs saving.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/error.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// What to multiply the base learning rate with at `epoch` (epochs done as a real number: epoch + step /
/// steps per epoch). A value; copies share nothing that changes.
class schedule {
 public:
  /// Always 1.
  schedule() : schedule([](double) { return 1.0; }, "constant") {}
  /// Any function of the epoch, with a name for logs.
  schedule(std::function<double(double)> factor, std::string description)
      : factor_(std::move(factor)), description_(std::move(description)) {}

  double operator()(double epoch) const { return factor_(epoch); }
  const std::string& describe() const { return description_; }

 private:
  std::function<double(double)> factor_;
  std::string description_;
};

namespace detail {

inline std::string short_number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

inline void require_schedule(bool valid, const std::string& text) {
  if (!valid) PUFFERFISH_THROW(value_error("schedule: " + text));
}

}  // namespace detail

inline schedule constant_schedule() { return {}; }

/// gamma^(number of milestones reached): at epoch == milestone the new factor applies. Throws value_error
/// unless milestones rise and gamma > 0.
inline schedule multi_step(std::vector<double> milestones, double gamma = 0.1) {
  std::string text = "x" + detail::short_number(gamma) + " at epoch";
  for (std::size_t i = 0; i < milestones.size(); ++i) {
    detail::require_schedule(
        std::isfinite(milestones[i]) && (i == 0 || milestones[i - 1] < milestones[i]),
        "milestone " + detail::short_number(milestones[i]) +
            (i == 0 ? " is not finite" : " does not follow " + detail::short_number(milestones[i - 1])));
    text += (i ? ", " : " ") + detail::short_number(milestones[i]);
  }
  detail::require_schedule(gamma > 0.0 && std::isfinite(gamma),
                           "gamma " + detail::short_number(gamma) + " is not a positive number");
  if (milestones.empty()) return {};
  return {[milestones = std::move(milestones), gamma](double epoch) {
            const auto reached = std::upper_bound(milestones.begin(), milestones.end(), epoch);
            return std::pow(gamma, static_cast<double>(reached - milestones.begin()));
          },
          text};
}

/// Half a cosine from 1 at epoch 0 to `final` at `epochs` and after (Loshchilov, Hutter: "SGDR", ICLR 2017,
/// without restarts). Throws value_error unless epochs > 0 and final >= 0.
inline schedule cosine(double epochs, double final = 0.0) {
  detail::require_schedule(
      epochs > 0.0 && std::isfinite(epochs) && final >= 0.0 && std::isfinite(final),
      "cosine over " + detail::short_number(epochs) + " epochs to " + detail::short_number(final));
  return {[epochs, final](double epoch) {
            const double done = std::clamp(epoch / epochs, 0.0, 1.0);
            return final + (1.0 - final) * 0.5 * (1.0 + std::cos(std::numbers::pi * done));
          },
          "cosine over " + detail::short_number(epochs) + " epochs to " + detail::short_number(final)};
}

/// Up to `epochs` a straight line from `start` to 1 (Goyal et al.: "Accurate, large minibatch SGD", 2017),
/// times `then` at the same epoch: milestones of `then` count from the start of training. Throws value_error
/// unless epochs >= 0 and start >= 0.
inline schedule linear_warmup(double epochs, double start, schedule then = {}) {
  detail::require_schedule(
      epochs >= 0.0 && std::isfinite(epochs) && start >= 0.0 && std::isfinite(start),
      "warm-up over " + detail::short_number(epochs) + " epochs from " + detail::short_number(start));
  const std::string text = "warm-up over " + detail::short_number(epochs) + " epochs from " +
                           detail::short_number(start) + ", " + then.describe();
  return {[epochs, start, then = std::move(then)](double epoch) {
            const double ramp = epoch >= epochs ? 1.0 : start + (1.0 - start) * std::max(epoch, 0.0) / epochs;
            return ramp * then(epoch);
          },
          text};
}

PUFFERFISH_NAMESPACE_END
