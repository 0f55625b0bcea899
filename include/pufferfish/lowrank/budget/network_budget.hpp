// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `network_budget`: limits for a whole network, from which `allocate` (budget.hpp) computes the ranks of all
/// layers.

#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Limits for a whole network. If several are set, all of them must hold.
///
///     network_budget budget;
///     budget.fraction = 0.3;      // at most 30 % of the dense network's parameters,
///     budget.mac_fraction = 0.6;  // and at most 60 % of its multiply-adds
/// All numbers count the whole network, including layers that stay dense. Numbers must be positive and
/// finite, fractions at most 1; select and allocate throw value_error for others. A budget in bytes divides
/// by budget_options::bytes_per_parameter.
struct network_budget {
  std::optional<index_t> parameters;   ///< parameters of the network
  std::optional<double> fraction;      ///< share of the dense network's parameters, in (0, 1]
  std::optional<double> macs;          ///< multiply-adds of one sample's forward pass
  std::optional<double> mac_fraction;  ///< share of the dense network's multiply-adds, in (0, 1]
  std::optional<index_t> bytes;        ///< bytes of gradients exchanged in one step
  std::optional<double> milliseconds;  ///< of one training step, by the layers' measured times

  /// Whether no limit is set.
  bool empty() const { return !parameters && !fraction && !macs && !mac_fraction && !bytes && !milliseconds; }
  friend bool operator==(const network_budget&, const network_budget&) = default;
};

/// The costs of a network or of a part of it. The numbers are doubles, because the integer counts of large
/// networks could overflow; whole numbers up to 2^53 are exact.
struct network_cost {
  double parameters = 0.0;
  double macs = 0.0;          ///< multiply-adds of one sample's forward pass
  double milliseconds = 0.0;  ///< of one training step; 0: not measured

  /// The sum of the costs of two parts of a network.
  friend network_cost operator+(const network_cost& a, const network_cost& b) {
    return {a.parameters + b.parameters, a.macs + b.macs, a.milliseconds + b.milliseconds};
  }
  friend bool operator==(const network_cost&, const network_cost&) = default;
};

namespace detail {

/// The quantity that a limit bounds.
enum class budget_resource { parameters, macs, milliseconds };
/// Number of values of budget_resource.
inline constexpr std::size_t budget_resources = 3;

/// A limit that is set, converted to the unit of its resource.
struct budget_limit {
  budget_resource resource = budget_resource::parameters;
  double value = 0.0;     ///< the limit, in units of the resource
  double per_unit = 1.0;  ///< units of the resource per unit of the caller's number
  std::string asked;      ///< the caller's limit as text: "fraction 0.3"

  /// The largest sum that counts as within the limit; the tolerance covers rounding of the sum.
  double most() const { return value * (1.0 + 1e-13); }
};

/// Throws value_error unless the limit is positive and finite, and at most 1 if it is a fraction.
inline void check_limit(const char* name, double value, bool fraction) {
  if (value > 0.0 && std::isfinite(value) && (!fraction || value <= 1.0)) return;
  throw_error<value_error>(
      {"network_budget: ", name, " ", value, fraction ? " is not in (0, 1]" : " is not a positive number"});
}

/// The limits that are set, converted to parameters, multiply-adds and milliseconds. Throws value_error for
/// an invalid number and for a budget without limits.
inline std::vector<budget_limit> limits_of(const network_budget& budget, const network_cost& dense,
                                           double bytes_per_parameter) {
  std::vector<budget_limit> limits;
  const auto add = [&](const char* name, budget_resource resource, const auto& limit, double per_unit,
                       bool fraction) {
    if (!limit) return;
    check_limit(name, static_cast<double>(*limit), fraction);
    limits.push_back(
        {resource, static_cast<double>(*limit) * per_unit, per_unit, message({name, " ", *limit})});
  };
  using resource = budget_resource;
  add("parameters", resource::parameters, budget.parameters, 1.0, false);
  add("fraction", resource::parameters, budget.fraction, dense.parameters, true);
  add("bytes", resource::parameters, budget.bytes, 1.0 / bytes_per_parameter, false);
  add("macs", resource::macs, budget.macs, 1.0, false);
  add("mac_fraction", resource::macs, budget.mac_fraction, dense.macs, true);
  add("milliseconds", resource::milliseconds, budget.milliseconds, 1.0, false);
  if (limits.empty()) PUFFERFISH_THROW(value_error("network_budget: no limit is set"));
  return limits;
}

/// Throws value_error for an invalid number, and for a budget without limits.
inline void check_budget(const network_budget& budget) { limits_of(budget, {1.0, 1.0, 1.0}, 1.0); }

}  // namespace detail

/// The limits as text: "0.3 of the parameters, 0.6 of the multiply-adds"; "no limit" for an empty budget.
PUFFERFISH_COLD inline std::string describe(const network_budget& budget) {
  std::string text;
  const auto add = [&text](const auto& limit, const char* what) {
    if (limit) text += detail::message({text.empty() ? "" : ", ", *limit, what});
  };
  add(budget.parameters, " parameters");
  add(budget.fraction, " of the parameters");
  add(budget.macs, " multiply-adds a sample");
  add(budget.mac_fraction, " of the multiply-adds");
  add(budget.bytes, " bytes of gradients a step");
  add(budget.milliseconds, " ms a step");
  return text.empty() ? "no limit" : text;
}

PUFFERFISH_NAMESPACE_END
