// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `dgc_options`: the options of deep gradient compression, and its share of sent entries in each epoch.

#include <algorithm>
#include <cmath>
#include <string>

#include <pufferfish/compress/codes/code_route.hpp>
#include <pufferfish/compress/sparse/entry_lists.hpp>
#include <pufferfish/core/number_text.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of dgc. They replace the optimizer's momentum, and its weight decay if weight_decay is above 0:
/// the optimizer must then be SGD without them.
struct dgc_options {
  static constexpr bool brings_momentum = true;  ///< replaces the optimizer's momentum
  double ratio = 0.001;    ///< share of a matrix's entries that is sent; above 0, at most 1
  double momentum = 0.9;   ///< factor of the momentum, 0 <= momentum < 1
  bool nesterov = false;   ///< whether the momentum is Nesterov's
  double clip_norm = 0.0;  ///< tau: a rank's gradients are clipped to the norm tau / sqrt(p); 0: not clipped
  bool factor_masking = true;  ///< whether the momentum of sent entries is set to zero
  int warmup_epochs = 0;       ///< W: epochs 0 .. W - 1 send more; see dgc_ratio
  double weight_decay = 0.0;   ///< has its own momentum; replaces the optimizer's weight decay
  bool decay_all = false;      ///< whether biases and parameters of normalizations decay as well
  bool half_values = false;    ///< whether values are sent as float16
  bool sampled = false;  ///< approximately the largest entries, as in the published program: sampled_selector
  code_route route = code_route::gather;  ///< route of the entries of matrices: gather or sparse

  /// Whether the compressor replaces the optimizer's weight decay.
  constexpr bool brings_weight_decay() const { return weight_decay > 0.0; }

  /// Throws value_error, naming the option and its value, for an option out of its range, for the route
  /// `two_hop`, and for half_values together with the route `sparse`.
  void validate() const {
    const auto refuse_unless = [](bool valid, const char* option, double value, const char* range) {
      if (!valid) detail::throw_error<value_error>({"dgc: ", option, " ", value, " is not ", range});
    };
    detail::check_entry_ratio("dgc", ratio);
    refuse_unless(momentum >= 0.0 && momentum < 1.0, "momentum", momentum, "in 0 .. 1 and below 1");
    refuse_unless(clip_norm >= 0.0, "clip_norm", clip_norm, "at least 0");
    refuse_unless(warmup_epochs >= 0, "warmup_epochs", warmup_epochs, "at least 0");
    refuse_unless(weight_decay >= 0.0 && std::isfinite(weight_decay), "weight_decay", weight_decay,
                  "finite and at least 0");
    if (route == code_route::two_hop || (route == code_route::sparse && half_values)) {
      detail::throw_error<value_error>(
          {"dgc: entries ", half_values ? "of half values " : "", "cannot travel by ", to_string(route)});
    }
  }
};

/// Text of the options for messages: "DGC, ratio 0.001, momentum 0.9, factor masking", then the options that
/// are not at their defaults.
inline std::string describe(const dgc_options& options) {
  std::string text = detail::message({"DGC, ratio ", options.ratio, ", ", options.nesterov ? "Nesterov " : "",
                                      "momentum ", options.momentum,
                                      options.factor_masking ? ", factor masking" : ", no factor masking"});
  if (options.clip_norm > 0.0) text += detail::message({", clipped to norm ", options.clip_norm});
  if (options.warmup_epochs > 0) text += detail::message({", warm-up of ", options.warmup_epochs, " epochs"});
  if (options.weight_decay > 0.0) {
    text += detail::message({", weight decay ", options.weight_decay, options.decay_all ? " of all" : ""});
  }
  if (options.half_values) text += ", half values";
  if (options.sampled) text += ", sampled threshold";
  if (options.route != code_route::gather) text += std::string(", ") + to_string(options.route);
  return text;
}

/// Share of the entries that is sent in epoch e = 0, 1, ...: max(rho, c^(e + 1)) with c = rho^(1 / (W + 1))
/// while e < W, then rho. W is options.warmup_epochs, rho options.ratio. W = 4, rho = 0.001: .2512, .0631,
/// .0158, .0040, .001. The options must be valid and the epoch at least 0. ceil(share n) of the n elements of
/// a matrix are sent.
///
/// \code
/// dgc_ratio({.ratio = 0.001, .warmup_epochs = 4}, 0);  // 0.2512
/// \endcode
inline double dgc_ratio(const dgc_options& options, index_t epoch) {
  if (epoch >= options.warmup_epochs) return options.ratio;
  const auto done = static_cast<double>(epoch + 1) / static_cast<double>(options.warmup_epochs + 1);
  return std::max(options.ratio, std::pow(options.ratio, done));
}

PUFFERFISH_NAMESPACE_END
