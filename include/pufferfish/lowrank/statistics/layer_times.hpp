// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `layer_times`: a table of the measured milliseconds of a network's layers, dense and low-rank. Budgets in
/// milliseconds need such a table. The table also shows which layers do not become faster by low rank.
/// nn/measure/measure_layers.hpp measures the times.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/record_line.hpp>
#include <pufferfish/lowrank/selection.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Whether a number can be a measured time: finite and at least 0.
inline bool is_time(double ms) { return ms >= 0.0 && std::isfinite(ms); }

}  // namespace detail

/// Milliseconds of a layer's forward and backward pass over one batch. With ranks r[0], r[1], ..., one per
/// rank group, the time of the low-rank layer is low_rank_ms + ms_per_rank[0] r[0] + ms_per_rank[1] r[1] +
/// ... .
struct layer_time {
  std::string name;                 ///< name of the layer
  double dense_ms = 0.0;            ///< milliseconds of the dense layer
  double low_rank_ms = 0.0;         ///< the part that does not depend on the ranks
  std::vector<double> ms_per_rank;  ///< milliseconds per unit of rank, one number per rank group

  /// The time of the low-rank layer with the given ranks, by the formula of this struct. Throws rank_error,
  /// naming the layer, unless `ranks` has one rank per rank group.
  double milliseconds(const rank_list& ranks) const {
    if (ranks.size() != ms_per_rank.size()) {
      detail::throw_error<rank_error>({name, ": ", detail::counted(ranks.size(), "rank"),
                                       " where times were measured for ", ms_per_rank.size()});
    }
    double sum = low_rank_ms;
    for (std::size_t g = 0; g < ranks.size(); ++g) sum += ms_per_rank[g] * static_cast<double>(ranks[g]);
    return sum;
  }
  friend bool operator==(const layer_time&, const layer_time&) = default;
};

/// One measured time, in milliseconds, of a layer with given ranks, one per rank group.
struct rank_time {
  rank_list ranks;
  double milliseconds = 0.0;
};

/// Fits the linear model of a layer's time to measured points. points[0] is the base; every other point
/// differs from the base in the rank of exactly one rank group. The slope of a group is the slope of the
/// least squares line through the base and the group's points, or 0 if that is negative. The constant is the
/// mean over all points of the time minus the slopes' part, or 0 if that is negative. Throws value_error,
/// naming the layer, for points that do not have this form, and for a time that is negative or not finite.
/// \code
/// auto time = fit_layer_time("conv3", 8.0, {{{16}, 3.0}, {{32}, 5.0}, {{64}, 9.0}});
/// double ms = time.milliseconds({24});  // 1 + 24 / 8 = 4
/// \endcode
PUFFERFISH_COLD inline layer_time fit_layer_time(const std::string& name, double dense_ms,
                                                 const std::vector<rank_time>& points) {
  const auto refuse = [&](const char* what) {
    detail::throw_error<value_error>({"fit_layer_time: ", name, ": ", what});
  };
  if (points.empty() || points.front().ranks.empty()) refuse("no measured times");
  const rank_list& base = points.front().ranks;
  bool times = detail::is_time(dense_ms);
  for (const rank_time& point : points) times = times && detail::is_time(point.milliseconds);
  if (!times) refuse("a time is negative or not finite");
  layer_time result{name, dense_ms, 0.0, std::vector<double>(base.size())};
  // For each point, the group in which its rank differs from the base; base.size() if there is none.
  std::vector<std::size_t> group_of;
  for (const rank_time& point : points) {
    std::size_t group = base.size();
    for (std::size_t g = 0; g < base.size() && point.ranks.size() == base.size(); ++g) {
      if (point.ranks[g] == base[g]) continue;
      if (group != base.size()) refuse("ranks of two groups differ from the base's");
      group = g;
    }
    if (point.ranks.size() != base.size()) refuse("points have different numbers of ranks");
    group_of.push_back(group);
  }
  for (std::size_t g = 0; g < base.size(); ++g) {
    double n = 0.0, r = 0.0, t = 0.0, rr = 0.0, rt = 0.0;
    for (std::size_t i = 0; i < points.size(); ++i) {
      if (i > 0 && group_of[i] != g) continue;
      const auto rank = static_cast<double>(points[i].ranks[g]);
      n += 1.0, r += rank, t += points[i].milliseconds;
      rr += rank * rank, rt += rank * points[i].milliseconds;
    }
    const double determinant = n * rr - r * r;
    if (determinant > 0.0) result.ms_per_rank[g] = std::max(0.0, (n * rt - r * t) / determinant);
  }
  double left = 0.0;
  for (const rank_time& point : points) left += point.milliseconds - result.milliseconds(point.ranks);
  result.low_rank_ms = std::max(0.0, left / static_cast<double>(points.size()));
  return result;
}

/// The times of the layers of a network. Decisions based on times are the same on all ranks and in a
/// resumed run only if the table is the same: rank 0 measures, and to_text() is sent to the other ranks and
/// saved in the run's records.
struct layer_times {
  std::vector<layer_time> layers;

  /// The times of a layer, or nullptr if they were not measured. Linear search. The pointer is valid until
  /// `layers` changes.
  const layer_time* find(const std::string& name) const {
    const auto at =
        std::find_if(layers.begin(), layers.end(), [&](const layer_time& one) { return one.name == name; });
    return at == layers.end() ? nullptr : &*at;
  }
  friend bool operator==(const layer_times&, const layer_times&) = default;
};

/// Milliseconds of a stage's forward and backward pass over one batch. A stage consists of consecutive layers
/// whose outputs have the same number of channels, with the batch norms, activations and sums between them.
struct stage_time {
  std::string first, last;          ///< names of the first and the last of its layers or blocks
  index_t channels = 0;             ///< output channels of the stage's layers
  double dense_ms = 0.0;            ///< milliseconds with all layers dense
  double low_rank_ms = 0.0;         ///< milliseconds with `layers` factorized at the profile's ratio
  std::vector<std::string> layers;  ///< layers that may be factorized, at least one

  /// Speedup by low rank: dense_ms / low_rank_ms; 1 if low_rank_ms is 0.
  double gain() const { return low_rank_ms > 0.0 ? dense_ms / low_rank_ms : 1.0; }
  friend bool operator==(const stage_time&, const stage_time&) = default;
};

/// The layers of all stages with gain() >= least_gain, in the order of the stages: the layers that Cuttlefish
/// factorizes.
inline std::vector<std::string> profitable_layers(const std::vector<stage_time>& stages,
                                                  double least_gain = 1.5) {
  std::vector<std::string> names;
  for (const stage_time& stage : stages) {
    if (stage.gain() >= least_gain) names.insert(names.end(), stage.layers.begin(), stage.layers.end());
  }
  return names;
}

/// Returns the policy `policy`, restricted to the named layers. A layer must also satisfy the former
/// policy.also_if, if that is set. Names of no layer have no effect.
///
/// \code
/// policy = only_layers(policy, profitable_layers(stages));  // the layers that low rank makes faster
/// \endcode
inline factorize_policy only_layers(factorize_policy policy, std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  policy.also_if = [names = std::move(names), before = std::move(policy.also_if)](const std::string& name,
                                                                                  matrix_size size) {
    return std::binary_search(names.begin(), names.end(), name) && (!before || before(name, size));
  };
  return policy;
}

namespace detail {

/// Calls read(line) for each line of a text. Throws io_error, naming `source`, the kind of table (`what`) and
/// the line, if a call returns false.
template <class Read>
void read_times(const std::string& text, const std::string& source, const char* what, Read&& read) {
  index_t number = 0;
  for_each_line(text, [&](std::string_view content) {
    ++number;
    record_line line(content);
    if (read(line)) return;
    throw_error<io_error>(
        {source, ": line ", number, " of the ", what, " is not one: \"", content.substr(0, 80), "\""});
  });
}

}  // namespace detail

/// The table as text, which layer_times_from_text reads back bit for bit. Lines:
///     NAME DENSE_MS LOW_RANK_MS MS_PER_RANK ...
inline std::string to_text(const layer_times& times) {
  std::string text;
  for (const layer_time& layer : times.layers) {
    text += detail::quote_word(layer.name) + " " + detail::shortest_number(layer.dense_ms) + " " +
            detail::shortest_number(layer.low_rank_ms);
    for (const double ms : layer.ms_per_rank) text.append(" ").append(detail::shortest_number(ms));
    text += "\n";
  }
  return text;
}
/// Reads a table that to_text has written. `source`: name of the text in errors. Throws io_error, naming
/// `source` and the line, for any text that to_text does not write.
inline layer_times layer_times_from_text(const std::string& text, const std::string& source) {
  layer_times times;
  detail::read_times(text, source, "layers' times", [&](detail::record_line& line) {
    layer_time layer;
    line.read(layer.name, layer.dense_ms, layer.low_rank_ms).read_rest(layer.ms_per_rank);
    const bool valid = line.complete() && detail::is_time(layer.dense_ms) &&
                       detail::is_time(layer.low_rank_ms) &&
                       std::all_of(layer.ms_per_rank.begin(), layer.ms_per_rank.end(), detail::is_time) &&
                       times.find(layer.name) == nullptr;
    times.layers.push_back(std::move(layer));
    return valid;
  });
  return times;
}

/// The stages as text, which stage_times_from_text reads back bit for bit. Lines:
///     FIRST LAST CHANNELS DENSE_MS LOW_RANK_MS LAYER ...
inline std::string to_text(const std::vector<stage_time>& stages) {
  std::string text;
  for (const stage_time& stage : stages) {
    text += detail::quote_word(stage.first) + " " + detail::quote_word(stage.last) + " " +
            std::to_string(stage.channels) + " " + detail::shortest_number(stage.dense_ms) + " " +
            detail::shortest_number(stage.low_rank_ms);
    for (const std::string& layer : stage.layers) text.append(" ").append(detail::quote_word(layer));
    text += "\n";
  }
  return text;
}
/// Reads stages that to_text has written. `source`: name of the text in errors. Throws io_error, naming
/// `source` and the line, for any text that to_text does not write.
inline std::vector<stage_time> stage_times_from_text(const std::string& text, const std::string& source) {
  std::vector<stage_time> stages;
  detail::read_times(text, source, "stages' times", [&](detail::record_line& line) {
    stage_time& stage = stages.emplace_back();
    line.read(stage.first, stage.last, stage.channels, stage.dense_ms, stage.low_rank_ms)
        .read_rest(stage.layers);
    return line.complete() && stage.channels >= 1 && detail::is_time(stage.dense_ms) &&
           detail::is_time(stage.low_rank_ms);
  });
  return stages;
}

PUFFERFISH_NAMESPACE_END
