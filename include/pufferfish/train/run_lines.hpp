// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the options of a training run as text, to compare ranks, and a checkpoint with who resumes it;
/// and what else it reads and reckons.

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <pufferfish/train/options.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// In lines. The exchange's plan is not among them: a checkpoint keeps its own, and the exchange compares it.
inline std::string option_lines(const run_options& options, bool plateau, std::size_t scalar_bytes) {
  std::string text;
  const auto line = [&text](const char* name, const std::string& value) {
    text += std::string(name) + " " + value + "\n";
  };
  line("mode", to_string(options.mode));
  line("warm-up epochs", std::to_string(options.warmup_epochs));
  line("first factorized layer", std::to_string(options.factorize.first_layer));
  line("learning rate", exact_number(options.learning_rate) + ", " + options.rate_schedule.describe() +
                            (options.restart_schedule_at_switch ? ", again from the switch on" : ""));
  line("learning rate after the switch", "x " + exact_number(options.switch_rate_factor));
  line("plateau", plateau ? "yes" : "no");
  line("optimizer", describe(options.optimizer));
  line("clip norm", exact_number(options.clip_norm));
  line("seed", std::to_string(options.seed));
  line("scalar bytes", std::to_string(scalar_bytes));
  // Left out where it is the default, so that checkpoints from before these lines still resume.
  if (options.compression.index() != 0) line("compression", pufferfish::describe(options.compression));
  if (options.exchange.wire != exchange_wire::same) line("wire", to_string(options.exchange.wire));
  return text;
}

/// The plan that a checkpoint keeps, where it is for as many ranks; `text` is empty where it keeps none.
inline std::optional<exchange_plan> usable_plan(const std::string& text, const std::string& source,
                                                int ranks) {
  if (text.empty()) return std::nullopt;
  exchange_plan plan = plan_from_text(text, source);
  if (plan.ranks != 0 && plan.ranks != ranks) return std::nullopt;
  return plan;
}

/// 0 of nothing.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
