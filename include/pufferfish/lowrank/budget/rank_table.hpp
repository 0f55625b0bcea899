// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `rank_table`: a text table of a network's layers with their ranks, costs, predicted losses and reasons.
/// The rows are made from the results of budgets (`allocate`) or of policies for single layers (`select`).

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/core/number_text.hpp>
#include <pufferfish/lowrank/budget/budget_layer.hpp>
#include <pufferfish/lowrank/factorization/factors.hpp>
#include <pufferfish/lowrank/selection.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// One rank group of a layer in a rank_table. A number that is NaN is unknown.
struct rank_row {
  std::string name;            ///< name of the layer; for the second group of `rnn`: "rnn, rank 2"
  matrix_size size;            ///< of each matrix; empty: the layer is low-rank already
  index_t count = 1;           ///< number of matrices
  index_t rank = 0;            ///< 0: dense, or a low rank that depends on the decomposition
  bool dense = true;           ///< whether the matrices stay dense
  network_cost before, after;  ///< as dense matrices, and as chosen. The layer's time is in its first row
  network_cost at_rank_0, per_rank;  ///< costs of the factors: extrapolated to rank 0, and of each rank
  double weighted_energy = std::numeric_limits<double>::quiet_NaN();  ///< kept share of the weighted energy
  double predicted_loss = std::numeric_limits<double>::quiet_NaN();   ///< predicted increase of the loss
  std::string why;  ///< reason for the rank, or for staying dense

  /// The largest rank that the matrices can have.
  index_t full_rank() const { return std::min(size.rows, size.cols); }
};

/// The reason as text, for example "dense: the last layer".
constexpr const char* to_string(dense_because reason) {
  switch (reason) {
    case dense_because::nothing:
      return "low rank";
    case dense_because::first_layers:
      return "dense: among the first layers";
    case dense_because::last_layer:
      return "dense: the last layer";
    case dense_because::shortcut:
      return "dense: a shortcut";
    case dense_because::embedding:
      return "dense: an embedding";
    case dense_because::caller:
      return "dense: left out by the caller";
    case dense_because::growth:
      return "dense: factors not smaller";
    case dense_because::low_rank:
      return "low rank already";
    case dense_because::budget:
      return "dense: worth it";
  }
  return "";
}

namespace detail {

/// Value of a number that is unknown.
inline constexpr double unknown_number = std::numeric_limits<double>::quiet_NaN();

/// Makes a row low-rank with this rank, and computes its costs as at_rank_0 + rank per_rank.
inline void set_rank(rank_row& row, index_t rank) {
  const auto r = static_cast<double>(rank);
  row.rank = rank;
  row.dense = false;
  row.after = row.at_rank_0 +
              network_cost{r * row.per_rank.parameters, r * row.per_rank.macs, r * row.per_rank.milliseconds};
}

/// Appends the rows of a layer with these ranks, one row per group. If `dense` is false and `ranks` is empty,
/// the ranks are unknown.
inline void add_rank_rows(std::vector<rank_row>& rows, const budget_layer& layer, const rank_list& ranks,
                          bool dense, const std::string& why) {
  for (std::size_t g = 0; g < layer.groups.size(); ++g) {
    const budget_group& group = layer.groups[g];
    rank_row& row = rows.emplace_back();
    row.name = g == 0 ? layer.name : message({layer.name, ", rank ", g + 1});
    row.size = group.size;
    row.count = group.count;
    row.dense = dense;
    row.why = why;
    row.before = cost_as_dense(group);
    row.per_rank = cost_per_rank(group);
    if (g == 0) {
      row.before.milliseconds = layer.dense_ms;
      row.at_rank_0.milliseconds = layer.low_rank_ms;
    }
    row.after = row.before;
    if (dense) {
      row.weighted_energy = 1.0;
      row.predicted_loss = 0.0;
    } else if (ranks.empty()) {
      row.after = {unknown_number, unknown_number, unknown_number};
    } else {
      set_rank(row, ranks[g]);
      if (group.gains.empty()) continue;
      double kept = 0.0, dropped = 0.0;
      for (auto i = std::min(group.gains.size(), static_cast<std::size_t>(row.full_rank())); i-- > 0;) {
        (i < static_cast<std::size_t>(row.rank) ? kept : dropped) += group.gains[i];
      }
      row.predicted_loss = dropped;
      row.weighted_energy = kept + dropped > 0.0 ? kept / (kept + dropped) : 1.0;
    }
  }
}

/// Throws value_error unless there is one choice per layer.
inline void check_row_count(std::size_t layers, std::size_t choices) {
  if (layers == choices) return;
  throw_error<value_error>({"rank_rows: ", choices, " choices for ", layers, " layers"});
}

/// A number rounded to a whole one, with a comma before every three digits: "1,234,567". "-" if the number is
/// not finite.
inline std::string grouped_number(double value) {
  if (!std::isfinite(value)) return "-";
  const std::string digits = fixed_number(value, 0);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}
/// A number with three significant digits, or "-" if the number is not finite.
inline std::string short_number(double value) {
  if (!std::isfinite(value)) return "-";
  char text[40];
  return {text, std::to_chars(text, text + sizeof text, value, std::chars_format::general, 3).ptr};
}

/// The size of a row's matrices: "64 x 576", or "4 of 64 x 576" for four matrices. "-" if the size is
/// unknown.
inline std::string matrix_text(const rank_row& row) {
  if (row.size.empty()) return "-";
  const std::string size = message({row.size.rows, " x ", row.size.cols});
  return row.count == 1 ? size : message({row.count, " of ", size});
}

/// Formats cells as lines of aligned columns. The first and the last column are left-aligned, the others
/// right-aligned. cells[i] is line i; all lines have the same number of cells.
inline std::string aligned_cells(const std::vector<std::vector<std::string>>& cells) {
  std::vector<std::size_t> widths(cells.front().size(), 0);
  for (const auto& row : cells) {
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (const auto& row : cells) {
    const std::size_t begin = text.size();
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string fill(widths[c] - row[c].size(), ' ');
      if (c > 0) text += "  ";
      text += c == 0 || c + 1 == row.size() ? row[c] + fill : fill + row[c];
    }
    while (text.size() > begin && text.back() == ' ') text.pop_back();
    text += '\n';
  }
  return text;
}

}  // namespace detail

/// Makes the rows of rank_table for layers with the choices of `allocate`: one row per rank group, in the
/// order of the layers. Throws value_error unless there is one choice per layer.
inline std::vector<rank_row> rank_rows(std::span<const budget_layer> layers,
                                       std::span<const budget_choice> choices) {
  detail::check_row_count(layers.size(), choices.size());
  std::vector<rank_row> rows;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    detail::add_rank_rows(rows, layers[i], choices[i].ranks, choices[i].dense(),
                          to_string(choices[i].reason));
  }
  return rows;
}

/// Makes the rows of rank_table for layers with the choices of `select`. Predicted losses are unknown for
/// groups without gains, and ranks that depend on a decomposition are unknown; add_reports adds both
/// afterwards. A layer without groups is low-rank already. Throws value_error unless there is one choice per
/// layer.
inline std::vector<rank_row> rank_rows(std::span<const budget_layer> layers,
                                       std::span<const layer_choice> choices) {
  detail::check_row_count(layers.size(), choices.size());
  std::vector<rank_row> rows;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const layer_choice& choice = choices[i];
    const std::string why = choice.factorize() ? describe(choice.rank) : to_string(choice.reason);
    if (layers[i].groups.empty()) {
      rank_row& row = rows.emplace_back();
      row.name = layers[i].name;
      row.dense = false;
      row.before = row.after = {detail::unknown_number, detail::unknown_number, detail::unknown_number};
      row.why = why;
      continue;
    }
    detail::add_rank_rows(rows, layers[i], choice.factorize() ? choice.ranks : rank_list{},
                          !choice.factorize(), why);
  }
  return rows;
}
/// Makes the rows of rank_table for layers of which only the sizes are known; their multiply-adds are
/// unknown. Throws value_error unless there is one choice per layer.
inline std::vector<rank_row> rank_rows(std::span<const layer_info> layers,
                                       std::span<const layer_choice> choices) {
  std::vector<budget_layer> known;
  for (const layer_info& layer : layers) {
    budget_layer& one = known.emplace_back();
    one.name = layer.name;
    for (const matrix_group& group : layer.groups) {
      budget_group& made = one.groups.emplace_back();
      made.size = group.size;
      made.count = group.count;
      made.products = detail::unknown_number;
    }
  }
  return rank_rows(known, choices);
}

/// Adds the results of a factorization to the rows of its layers: ranks, parameters, kept energy and
/// predicted losses. `reports`: the reports of each layer's matrices in order, named LAYER or LAYER.MATRIX. A
/// low-rank row without a report becomes dense, because its factors would not have been smaller. Throws
/// value_error for a report of a layer that has no row, or of more matrices than the layer's rows have.
///
/// \code
/// std::vector<rank_row> rows = rank_rows(layers, choices);
/// add_reports(rows, reports);  // reports: std::vector<factor_report>
/// std::fputs(rank_table(rows).c_str(), stdout);
/// \endcode
PUFFERFISH_COLD inline void add_reports(std::vector<rank_row>& rows, std::span<const factor_report> reports) {
  struct sums {
    index_t matrices = 0;
    double kept = 0.0, norm = 0.0;
  };
  std::vector<sums> done(rows.size());
  const auto of_layer = [](const rank_row& row, std::string_view layer) {
    const std::string_view name = row.name;
    return name == layer ||
           (name.substr(0, layer.size()) == layer && name.substr(layer.size()).substr(0, 7) == ", rank ");
  };
  const auto row_of = [&](std::string_view layer) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (of_layer(rows[i], layer) && done[i].matrices < rows[i].count && !rows[i].size.empty()) return i;
    }
    return rows.size();
  };
  for (const factor_report& report : reports) {
    const std::string_view name = report.name;
    std::size_t at = row_of(name);
    if (at == rows.size()) at = row_of(name.substr(0, std::min(name.size(), name.rfind('.'))));
    if (at == rows.size()) {
      detail::throw_error<value_error>({"add_reports: no row for the matrix ", report.name});
    }
    rank_row& row = rows[at];
    sums& sum = done[at];
    if (sum.matrices++ == 0) {
      detail::set_rank(row, report.rank);
      row.predicted_loss = 0.0;
    }
    row.predicted_loss += report.predicted_loss;
    sum.kept += report.squared_norm * report.weighted_energy;
    sum.norm += report.squared_norm;
    row.weighted_energy = sum.norm > 0.0 ? std::min(1.0, sum.kept / sum.norm) : 1.0;
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].dense || rows[i].size.empty() || done[i].matrices > 0) continue;
    rows[i].dense = true;
    rows[i].rank = 0;
    rows[i].after = rows[i].before;
    rows[i].weighted_energy = 1.0;
    rows[i].predicted_loss = 0.0;
    rows[i].why = to_string(dense_because::growth);
  }
}

/// Formats the rows as lines of text, followed by a line for the whole network. `rest`: costs of the layers
/// that have no row; the last line adds them to the sums of the rows. Columns: layer, matrix, full rank,
/// rank, parameters and multiply-adds per sample before and after factorization, milliseconds if any are
/// known, kept share of the weighted energy (sum of squared singular values, after weighting by the
/// statistics used), predicted increase of the loss, and the reason. "-": unknown.
///
/// \code
/// const auto choices = allocate(layers, rest, budget);
/// std::fputs(rank_table(rank_rows(layers, choices), rest).c_str(), stdout);
/// \endcode
PUFFERFISH_COLD inline std::string rank_table(std::span<const rank_row> rows, const network_cost& rest = {}) {
  const bool timed = std::any_of(rows.begin(), rows.end(),
                                 [](const rank_row& row) { return row.before.milliseconds > 0.0; });
  std::vector<std::vector<std::string>> cells;
  const auto add = [&](std::vector<std::string> head, const std::pair<network_cost, network_cost>& costs,
                       std::vector<std::string> tail) {
    const auto& [before, after] = costs;
    for (const auto of : {&network_cost::parameters, &network_cost::macs}) {
      head.push_back(detail::grouped_number(before.*of));
      head.push_back(detail::grouped_number(after.*of));
    }
    if (timed) {
      head.push_back(detail::short_number(before.milliseconds));
      head.push_back(detail::short_number(after.milliseconds));
    }
    for (std::string& cell : tail) head.push_back(std::move(cell));
    cells.push_back(std::move(head));
  };
  cells.push_back({"layer", "matrix", "full", "rank", "parameters", "after", "multiply-adds", "after"});
  if (timed) cells.back().insert(cells.back().end(), {"ms", "after"});
  cells.back().insert(cells.back().end(), {"kept", "loss", "why"});
  network_cost before = rest, after = rest;
  double loss = 0.0;
  for (const rank_row& row : rows) {
    add({row.name, detail::matrix_text(row), row.size.empty() ? "-" : std::to_string(row.full_rank()),
         row.dense       ? "dense"
         : row.rank == 0 ? "-"
                         : std::to_string(row.rank)},
        {row.before, row.after},
        {std::isfinite(row.weighted_energy) ? detail::fixed_number(row.weighted_energy, 4) : "-",
         detail::short_number(row.predicted_loss), row.why});
    before = before + row.before;
    after = after + row.after;
    loss += row.predicted_loss;
  }
  if (!(rest == network_cost{})) add({"everything else", "", "", ""}, {rest, rest}, {"", "", ""});
  add({"whole network", "", "", ""}, {before, after}, {"", detail::short_number(loss), ""});
  return detail::aligned_cells(cells);
}

PUFFERFISH_NAMESPACE_END
