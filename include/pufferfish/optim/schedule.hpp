// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Learning-rate schedules: pure functions of the position in training, which have no state to save; and
/// `plateau`, which follows the validation loss and has state.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numbers>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <pufferfish/core/error.hpp>
#include <pufferfish/core/number_text.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Factor of the base learning rate as a function of `epoch`, the number of epochs done as a real number:
/// epoch + step / steps per epoch. A value type: copies share no mutable state.
///
/// \code
/// const schedule rate = linear_warmup(5.0, 0.1, multi_step({150.0, 250.0}));
/// for (index_t step = 0; step < steps_per_epoch; ++step) {
///   const double at = static_cast<double>(epoch) + static_cast<double>(step) / steps_per_epoch;
///   optimizer.step(ctx, 0.1 * rate(at));
/// }
/// \endcode
class schedule {
 public:
  /// A schedule whose factor is always 1.
  schedule() : schedule([](double) { return 1.0; }, "constant") {}
  /// Any function of the epoch, with a name for logs.
  schedule(std::function<double(double)> factor, std::string description)
      : factor_(std::move(factor)), description_(std::move(description)) {}

  /// The factor of the learning rate at `epoch`, a number of epochs with fraction.
  double operator()(double epoch) const { return factor_(epoch); }
  const std::string& describe() const { return description_; }

 private:
  std::function<double(double)> factor_;
  std::string description_;
};

namespace detail {

/// Throws value_error with this text unless `valid`.
inline void require_schedule(bool valid, const std::string& text) {
  if (!valid) PUFFERFISH_THROW(value_error("schedule: " + text));
}

}  // namespace detail

/// Returns a schedule whose factor is always 1 and whose description is "constant".
inline schedule constant_schedule() { return {}; }

/// gamma^(number of milestones reached): at epoch == milestone the new factor applies. Throws value_error
/// unless milestones ascend strictly and gamma > 0.
inline schedule multi_step(std::vector<double> milestones, double gamma = 0.1) {
  std::string text = "x" + detail::shortest_number(gamma) + " at epoch";
  for (std::size_t i = 0; i < milestones.size(); ++i) {
    detail::require_schedule(
        std::isfinite(milestones[i]) && (i == 0 || milestones[i - 1] < milestones[i]),
        "milestone " + detail::shortest_number(milestones[i]) +
            (i == 0 ? " is not finite" : " does not follow " + detail::shortest_number(milestones[i - 1])));
    text += (i ? ", " : " ") + detail::shortest_number(milestones[i]);
  }
  detail::require_schedule(gamma > 0.0 && std::isfinite(gamma),
                           "gamma " + detail::shortest_number(gamma) + " is not a positive number");
  if (milestones.empty()) return {};
  return {[milestones = std::move(milestones), gamma](double epoch) {
            const auto reached = std::upper_bound(milestones.begin(), milestones.end(), epoch);
            return std::pow(gamma, static_cast<double>(reached - milestones.begin()));
          },
          text};
}

/// Half a cosine from 1 at epoch 0 to `final` at epoch `epochs` and after (Loshchilov, Hutter: "SGDR", ICLR
/// 2017, without restarts). Throws value_error unless epochs > 0 and final >= 0.
/// In between: final + (1 - final) (1 + cos(pi epoch / epochs)) / 2. Both must be finite.
inline schedule cosine(double epochs, double final = 0.0) {
  detail::require_schedule(
      epochs > 0.0 && std::isfinite(epochs) && final >= 0.0 && std::isfinite(final),
      "cosine over " + detail::shortest_number(epochs) + " epochs to " + detail::shortest_number(final));
  return {[epochs, final](double epoch) {
            const double done = std::clamp(epoch / epochs, 0.0, 1.0);
            return final + (1.0 - final) * 0.5 * (1.0 + std::cos(std::numbers::pi * done));
          },
          "cosine over " + detail::shortest_number(epochs) + " epochs to " + detail::shortest_number(final)};
}

/// Linear warm-up from `start` at epoch 0 to 1 at epoch `epochs` (Goyal et al.: "Accurate, large minibatch
/// SGD", 2017), multiplied by `then` at the same epoch: milestones of `then` count from the start of
/// training. Throws value_error unless epochs >= 0 and start >= 0.
/// The ramp is start + (1 - start) epoch / epochs. A start above 1 lets the rate fall to 1.
inline schedule linear_warmup(double epochs, double start, schedule then = {}) {
  detail::require_schedule(
      epochs >= 0.0 && std::isfinite(epochs) && start >= 0.0 && std::isfinite(start),
      "warm-up over " + detail::shortest_number(epochs) + " epochs from " + detail::shortest_number(start));
  const std::string text = "warm-up over " + detail::shortest_number(epochs) + " epochs from " +
                           detail::shortest_number(start) + ", " + then.describe();
  return {[epochs, start, then = std::move(then)](double epoch) {
            const double ramp = epoch >= epochs ? 1.0 : start + (1.0 - start) * std::max(epoch, 0.0) / epochs;
            return ramp * then(epoch);
          },
          text};
}

/// The learning rate of the Transformer (Vaswani et al.: "Attention is all you need", NIPS 2017, section
/// 5.3): factor d_model^-0.5 min(s^-0.5, s warmup^-1.5) in step s = 1, 2, ... It rises linearly until step
/// `warmup` and then falls with the inverse square root of the step.
struct noam_rate {
  double d_model = 512.0;  ///< width of the model
  double warmup = 4000.0;  ///< step with the largest rate
  double factor = 1.0;     ///< of the whole rate

  /// The learning rate in step s; 0 for s <= 0.
  double operator()(double s) const {
    if (!(s > 0.0)) return 0.0;
    return factor / std::sqrt(d_model) * std::min(1.0 / std::sqrt(s), s / (warmup * std::sqrt(warmup)));
  }
};

/// Makes a schedule of the learning rate noam_rate, for a base learning rate of 1: step s of training is at
/// epoch (s - 1) / steps_per_epoch. Steps count from epoch 0. To restart the warm-up at the switch, as the
/// paper's code does, pass epochs since the switch. Throws value_error unless all numbers are positive.
inline schedule noam(const noam_rate& rate, double steps_per_epoch) {
  const auto positive = [](double value) { return value > 0.0 && std::isfinite(value); };
  const std::string text = "Noam, width " + detail::shortest_number(rate.d_model) + ", warm-up " +
                           detail::shortest_number(rate.warmup) + " steps, factor " +
                           detail::shortest_number(rate.factor);
  detail::require_schedule(
      positive(rate.d_model) && positive(rate.warmup) && positive(rate.factor) && positive(steps_per_epoch),
      text + ", " + detail::shortest_number(steps_per_epoch) + " steps an epoch: all must be positive");
  return {[rate, steps_per_epoch](double epoch) { return rate(epoch * steps_per_epoch + 1.0); }, text};
}

/// A ramp of the learning rate after the switch: the factor rises linearly from `start` to 1 over `steps`
/// steps and then stays 1. It is multiplied with the schedule's factor, which continues by epoch.
/// Pufferfish's runs with PowerSGD and Cuttlefish use {5 epochs of steps, 0.1}.
struct switch_ramp {
  index_t steps = 0;   ///< n; 0: no ramp
  double start = 0.0;  ///< in [0, 1]

  /// Throws value_error for a negative number of steps and a start outside [0, 1].
  void validate() const {
    detail::require_schedule(steps >= 0 && start >= 0.0 && start <= 1.0,
                             "ramp over " + std::to_string(steps) + " steps from " +
                                 detail::shortest_number(start) + ": no steps below 0, a start in [0, 1]");
  }

  /// Factor in step k = 0, 1, ... after the switch: start + (1 - start) min(1, (k + 1) / n). The first step's
  /// factor is above `start`, so that a ramp from 0 wastes no step.
  double operator()(std::uint64_t k) const {
    const auto n = static_cast<std::uint64_t>(std::max<index_t>(steps, 0));
    if (k + 1 >= n) return 1.0;
    return start + (1.0 - start) * static_cast<double>(k + 1) / static_cast<double>(n);
  }

  /// The ramp in words, for logs: "from 0.1 over 500 steps", or "none".
  std::string describe() const {
    return steps <= 0
               ? "none"
               : "from " + detail::shortest_number(start) + " over " + std::to_string(steps) + " steps";
  }

  friend bool operator==(const switch_ramp&, const switch_ramp&) = default;
};

/// Divides the learning rate when the validation loss stops improving. Call observe() with each validation
/// loss and multiply the base learning rate by factor().
///
/// \code
/// plateau annealing(4.0);
/// for (...) {
///   train_epoch(base_rate * annealing.factor());
///   if (annealing.observe(validation_loss())) save();  // the best loss so far
/// }
/// \endcode
class plateau {
 public:
  /// Divides by `divisor` after `patience` consecutive losses that were no better than the best one. Throws
  /// value_error unless divisor > 1 and patience >= 1.
  explicit plateau(double divisor = 4.0, int patience = 1) : divisor_(divisor), patience_(patience) {
    detail::require_schedule(divisor > 1.0 && std::isfinite(divisor) && patience >= 1,
                             "plateau: divisor " + detail::shortest_number(divisor) +
                                 " must be above 1, patience " + std::to_string(patience) + " at least 1");
  }

  /// Records a validation loss. Returns true if it is the best so far; a NaN never is.
  bool observe(double loss) {
    if (loss < best_) {
      best_ = loss;
      waited_ = 0;
      return true;
    }
    if (++waited_ >= patience_) {
      factor_ /= divisor_;
      waited_ = 0;
    }
    return false;
  }

  /// "divided by 4 after 1 loss no better than the best".
  std::string describe() const {
    return "divided by " + detail::shortest_number(divisor_) + " after " + std::to_string(patience_) +
           (patience_ == 1 ? " loss" : " losses") + " no better than the best";
  }

  /// Factor by which the caller multiplies the base learning rate.
  double factor() const { return factor_; }
  /// Smallest loss observed since the construction or the last forget_best(); infinity if none was observed.
  double best() const { return best_; }

  /// Forgets the best loss and keeps the factor. For the switch: the low-rank network starts with a higher
  /// loss than the dense network's last one, which must not count as a plateau.
  void forget_best() {
    best_ = std::numeric_limits<double>::infinity();
    waited_ = 0;
  }
  /// Multiplies the factor by `by`: some recipes change the learning rate at the switch.
  void scale(double by) { factor_ *= by; }

  /// The state as text, for a checkpoint.
  std::string state() const {
    char text[96];
    char* const last = text + sizeof text;
    char* end = std::to_chars(text, last, best_).ptr;
    *end++ = ' ';
    end = std::to_chars(end, last, factor_).ptr;
    *end++ = ' ';
    end = std::to_chars(end, last, waited_).ptr;
    return {text, end};
  }
  /// Restores a state bit for bit. Throws value_error for a text that state() did not write.
  void set_state(const std::string& text) {
    double best = 0.0, factor = 0.0;
    int waited = 0;
    const char *at = text.data(), *const last = at + text.size();
    const auto read = [&](auto& number) {
      const auto [end, problem] = std::from_chars(at, last, number);
      at = end != last && *end == ' ' ? end + 1 : end;
      return problem == std::errc();
    };
    const bool valid = read(best) && read(factor) && read(waited) && at == last && factor > 0.0 &&
                       std::isfinite(factor) && waited >= 0 && !std::isnan(best);
    detail::require_schedule(valid, "plateau: this is not a state: " + text);
    best_ = best;
    factor_ = factor;
    waited_ = waited;
  }

 private:
  double divisor_;
  int patience_;
  double best_ = std::numeric_limits<double>::infinity();
  double factor_ = 1.0;
  int waited_ = 0;
};

PUFFERFISH_NAMESPACE_END
