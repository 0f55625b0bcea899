// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Number of local steps that ranks take between two exchanges of a rare_exchange: a constant, a function of
/// the learning rate, or a number that follows the measured spread of the ranks.

#include <algorithm>
#include <cmath>
#include <string>

#include <pufferfish/core/error.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/core/number_text.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

namespace detail {

/// Throws value_error, naming `user`, unless 1 <= least <= most.
inline void check_step_limits(const char* user, index_t least, index_t most) {
  if (least >= 1 && least <= most) return;
  throw_error<value_error>({user, ": limits of ", least, " and ", most, " local steps; 1 <= least <= most"});
}

/// Returns `steps` rounded to the nearest whole number (halves away from zero), limited to least .. most.
inline index_t limited_steps(double steps, index_t least, index_t most) {
  if (!(steps > static_cast<double>(least))) return least;
  if (steps >= static_cast<double>(most)) return most;
  return static_cast<index_t>(std::round(steps));
}

}  // namespace detail

/// Number of local steps as a function of the learning rate:
///
///     H = round(base (rate / peak)^power), at least `least` and at most `most`
///
/// power 0: constant. power > 0: exchanges are rare while the rate is high and frequent at the end, when the
/// ranks' averages must be precise. power -2: the quadratic synchronization rule (Gu et al., ICLR 2024), by
/// which exchanges become rarer as the rate falls, since local steps then move the ranks apart less; give it
/// a `most`. Every rank computes the same H if it has the same rate.
/// \code
///   const local_steps_schedule steps{40, 1.0, 2, 60};
///   rare.set_local_steps(steps(rate, peak));  // between rounds, with the rate of the next one
/// \endcode
struct local_steps_schedule {
  index_t base = 50;  ///< H at the peak rate
  double power = 0.0;
  index_t least = 1;
  index_t most = 500;

  /// Throws value_error, naming the option, for limits that are not 1 <= least <= most, a base outside them
  /// or a power that is not finite.
  void validate() const {
    detail::check_step_limits("local_steps_schedule", least, most);
    if (base < least || base > most) {
      detail::throw_error<value_error>(
          {"local_steps_schedule: base ", base, " is outside ", least, " .. ", most});
    }
    if (!std::isfinite(power)) {
      detail::throw_error<value_error>({"local_steps_schedule: power ", power, " is not finite"});
    }
  }

  /// Returns H for the learning rate `rate` >= 0; `peak` > 0 is the highest rate of the run. Throws
  /// value_error for other rates.
  index_t operator()(double rate, double peak) const {
    if (!(rate >= 0.0 && peak > 0.0 && std::isfinite(rate) && std::isfinite(peak))) {
      detail::throw_error<value_error>({"local_steps_schedule: rate ", rate, " of a peak rate ", peak,
                                        ": not a share of a positive number"});
    }
    if (power == 0.0) return base;
    return detail::limited_steps(static_cast<double>(base) * std::pow(rate / peak, power), least, most);
  }
};

/// Text of the schedule for messages, such as "50 local steps times (rate / peak)^1, 1 to 500", or "50 local
/// steps" for power 0.
inline std::string describe(const local_steps_schedule& schedule) {
  if (schedule.power == 0.0) return detail::message({schedule.base, " local steps"});
  return detail::message({schedule.base, " local steps times (rate / peak)^",
                          detail::shortest_number(schedule.power), ", ", schedule.least, " to ",
                          schedule.most});
}

/// Number of local steps that keeps the spread of the ranks near a target. The spread is
///
///     S = (mean over ranks of |x_w|^2 - |mean x_w|^2) / |theta|^2,   x_w = change of rank w's parameters
///
/// right before an exchange (rare_exchange::spread): the variance of the ranks' parameters in units of the
/// squared norm of the parameters. With independent gradient noise on the ranks S grows in proportion to the
/// number of steps, so
///
///     H' = round(H c), c = target / S within 1/2 .. 2, H' within least .. most
///
/// A bound of the variance between models is the criterion of Kamp et al., ECML PKDD 2018, who measure it in
/// every step; here it is measured at exchanges only. The right target depends on the task. S has the same
/// bits on all ranks, and so has H'.
/// \code
///   const local_steps_by_spread rule{1e-4, 2, 300};
///   if (rare.between_rounds()) rare.set_local_steps(rule(rare.local_steps(), rare.spread()));
/// \endcode
struct local_steps_by_spread {
  double target = 1e-4;
  index_t least = 1;
  index_t most = 500;

  /// Throws value_error for limits that are not 1 <= least <= most and a target that is not above 0.
  void validate() const {
    detail::check_step_limits("local_steps_by_spread", least, most);
    if (!(target > 0.0 && std::isfinite(target))) {
      detail::throw_error<value_error>({"local_steps_by_spread: target ", target, " is not above 0"});
    }
  }

  /// Returns H' after exchanges that were H = `steps` local steps apart and have measured the spread S. A
  /// spread that is not finite halves H. A spread of 0 or below doubles H: it was not measured, or the ranks
  /// agree.
  index_t operator()(index_t steps, double spread) const {
    const double wanted = spread > 0.0 ? target / spread : 2.0;
    const double change = std::isfinite(spread) ? std::clamp(wanted, 0.5, 2.0) : 0.5;
    return detail::limited_steps(static_cast<double>(steps) * change, least, most);
  }
};

PUFFERFISH_NAMESPACE_END
