// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// What the programs that factorize files share: names given by expressions, a bar, a table and JSON.

#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <regex>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <pufferfish/io/error_text.hpp>
#include <pufferfish/weights/file_work.hpp>

#include "console.hpp"
#include "text.hpp"

namespace examples {

using pufferfish::index_t;
using pufferfish::weight_report;
using pufferfish::weight_result;

/// What a table of a report shows.
struct table_options {
  bool merge = false;       ///< the report is of merge_weights
  bool statistics = false;  ///< there were statistics
  bool all = false;         ///< all tensors, not only weight matrices
};

/// True for names that contain a match of the pattern. Throws value_error for an invalid pattern.
inline std::function<bool(const std::string&)> matcher(const std::string& option,
                                                       const std::string& pattern) {
  if (pattern.empty()) return {};
  try {
    return [expression = std::regex(pattern)](const std::string& name) {
      return std::regex_search(name, expression);
    };
  } catch (const std::regex_error& e) {
    throw pufferfish::value_error(option + " " + pattern + ": " + e.what());
  }
}

/// A bar that redraws itself on a terminal; elsewhere nothing is shown, because the table follows.
class bar {
 public:
  explicit bar(const console& out) : shown_(out.style() == progress_style::bar) {}
  bar(const bar&) = delete;
  bar& operator=(const bar&) = delete;
  ~bar() {
    if (drawn_) std::fputs("\r\033[K", stderr);
  }

  void operator()(const weight_result& tensor, double share) {
    const auto now = clock::now();
    if (!shown_ || (drawn_ && now - drawn_at_ < std::chrono::milliseconds(100))) return;
    constexpr int width = 24;
    const auto filled = static_cast<std::size_t>(width * std::min(1.0, share));
    const double seconds = std::chrono::duration<double>(now - start_).count();
    std::fprintf(stderr, "\r[%s%s] %3.0f %%, %s left, %s\033[K", std::string(filled, '#').c_str(),
                 std::string(width - filled, '.').c_str(), 100.0 * share,
                 clock_text(share > 0.0 ? seconds * (1.0 - share) / share : 0.0).c_str(),
                 pufferfish::detail::quote_name(tensor.name).c_str());
    std::fflush(stderr);
    drawn_ = true;
    drawn_at_ = now;
  }

 private:
  using clock = std::chrono::steady_clock;
  bool shown_;
  bool drawn_ = false;
  clock::time_point start_ = clock::now();
  clock::time_point drawn_at_;
};

inline std::string shape_of(const weight_result& r) {
  std::string text;
  for (const index_t extent : r.shape) text.append(text.empty() ? "" : "x").append(std::to_string(extent));
  return text;
}

/// A name without quotes, as safe for a terminal as the result of quote_name.
inline std::string shown(const std::string& name) {
  const std::string quoted = pufferfish::detail::quote_name(name);
  return quoted.substr(1, quoted.size() - 2);
}

/// A table of the weight matrices, or of all tensors if the user asks for them.
inline std::string table_of(const table_options& o, const weight_report& report) {
  const std::vector<std::string> merged{"tensor",     "dtype",  "shape",  "rank",
                                        "parameters", "before", "seconds"};
  std::vector<std::string> made{"tensor",      "dtype",          "shape",      "layer",  "rank",
                                "energy kept", "relative error", "parameters", "before", "seconds"};
  if (o.statistics) made.insert(made.begin() + 7, {"weighted energy", "predicted loss"});
  text_table table(o.merge ? merged : made);
  std::size_t others = 0;
  for (const weight_result& r : report.tensors) {
    if (!o.all && !r.factorized && r.layer == 0 && !r.embedding) {
      ++others;
      continue;
    }
    std::vector<std::string> row{shown(r.name), std::string(to_string(r.dtype)), shape_of(r)};
    if (!o.merge) row.push_back(r.embedding ? "embedding" : r.layer > 0 ? std::to_string(r.layer) : "");
    row.push_back(r.factorized ? (r.parts > 1 ? format("%td x ", r.parts) : "") + std::to_string(r.rank)
                               : r.reason);
    if (!o.merge) {
      row.push_back(r.factorized ? format("%.4f", r.kept_energy) : "");
      row.push_back(r.factorized ? format("%.4f", r.relative_error) : "");
    }
    if (o.statistics) {
      row.push_back(r.factorized ? format("%.4f", r.weighted_energy) : "");
      row.push_back(r.factorized && !std::isnan(r.predicted_loss) ? format("%.3g", r.predicted_loss) : "");
    }
    row.push_back(grouped(r.parameters_after));
    row.push_back(grouped(r.parameters_before));
    row.push_back(r.factorized ? format("%.2f", r.seconds) : "");
    table.add(row);
  }
  std::string text = table.str();
  if (others > 0) text += format("and %zu tensors that are no weight matrices (--all shows them)\n", others);
  return text;
}

/// The report as JSON. `in`, `out`: paths of the two files.
inline nlohmann::ordered_json to_json(const table_options& o, const std::string& in, const std::string& out,
                                      const weight_report& report) {
  nlohmann::ordered_json tensors = nlohmann::ordered_json::array();
  for (const weight_result& r : report.tensors) {
    nlohmann::ordered_json row{{"name", r.name},
                               {"dtype", to_string(r.dtype)},
                               {"shape", r.shape},
                               {o.merge ? "merged" : "factorized", r.factorized}};
    if (!o.merge && r.layer > 0) row["layer"] = r.layer;
    if (r.factorized) {
      row["rank"] = r.rank;
      row["matrices"] = r.parts;
      row["embedding"] = r.embedding;
      if (!o.merge) {
        row["energy_kept"] = r.kept_energy;
        row["relative_error"] = r.relative_error;
      }
      if (o.statistics) {
        row["truncation"] = to_string(r.kind);
        row["weighted_energy"] = r.weighted_energy;
        if (!std::isnan(r.predicted_loss)) row["predicted_loss"] = r.predicted_loss;
      }
      row["seconds"] = r.seconds;
    } else if (!o.merge) {
      row["reason"] = r.reason;
    }
    row["parameters_before"] = r.parameters_before;
    row["parameters_after"] = r.parameters_after;
    tensors.push_back(std::move(row));
  }
  return {{"input", in},
          {"output", out},
          {"parameters_before", report.parameters_before},
          {"parameters_after", report.parameters_after},
          {"seconds", report.seconds},
          {"tensors", std::move(tensors)}};
}

}  // namespace examples
