// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Cuttlefish: criterion for the epoch at which a network is factorized, and for the rank of each layer, from
/// the stable ranks of its weights (Wang, Agarwal, U-chupala, Tanaka, Xing, Papailiopoulos: "Cuttlefish:
/// Low-Rank Model Training without All the Tuning", MLSys 2023).

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/record_line.hpp>
#include <pufferfish/lowrank/statistics/stable_rank.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Rule for the rank of a matrix of stable rank s. s(0) is the stable rank of its random initial values, full
/// = min(rows, columns).
enum class cuttlefish_rank {
  scaled,  ///< min(full, ceil(xi s)) with xi = full / s(0): a random matrix counts as one of full rank
  vanilla  ///< floor(s)
};

/// Options of cuttlefish_tracker. The defaults are those of the paper's code for CIFAR-10 and CIFAR-100.
struct cuttlefish_options {
  index_t window = 15;     ///< N: the exponential average has weight 2 / (N + 1), tests begin at epoch N
  index_t mean_of = 11;    ///< M: number of derivatives that are averaged
  double tolerance = 0.1;  ///< eps: a layer has settled when their mean is at most eps
  index_t few = 2;         ///< with this many layers left or fewer, the limit is 2.5 eps
  index_t very_few = 1;    ///< with this many layers left or fewer, the limit is 5 eps
  cuttlefish_rank rank = cuttlefish_rank::scaled;
  double least_share = 0.0;  ///< beta: no rank is below floor(beta full)

  /// Options for CIFAR-10 and CIFAR-100: the defaults.
  static cuttlefish_options cifar() { return {}; }
  /// Options for ResNet-50 and WideResNet-50-2 on ImageNet.
  static cuttlefish_options resnet50() { return {5, 5, 0.33, 6, 3, cuttlefish_rank::scaled, 0.2}; }
  /// Options for DeiT and ResMLP on ImageNet.
  static cuttlefish_options deit() { return {5, 5, 0.411, 9, 4, cuttlefish_rank::scaled, 0.5}; }
};

/// Throws value_error, with the number, unless window >= 1, 1 <= mean_of <= window + 1, tolerance is above 0
/// and finite, 0 <= very_few <= few, and 0 <= least_share <= 1.
PUFFERFISH_COLD inline void check_cuttlefish(const cuttlefish_options& o) {
  if (o.window < 1 || o.mean_of < 1 || o.mean_of > o.window + 1) {
    detail::throw_error<value_error>(
        {"cuttlefish: a window of ", o.window, " and a mean of ", o.mean_of,
         " derivatives: both must be at least 1, the mean at most over window + 1"});
  }
  if (!(o.tolerance > 0.0) || !std::isfinite(o.tolerance)) {
    detail::throw_error<value_error>({"cuttlefish: tolerance ", o.tolerance, " is not a positive number"});
  }
  if (o.very_few < 0 || o.few < o.very_few) {
    detail::throw_error<value_error>(
        {"cuttlefish: ", o.few, " layers left count as few, ", o.very_few,
         " as very few: the first number must be at least the second, neither negative"});
  }
  if (!(o.least_share >= 0.0 && o.least_share <= 1.0)) {
    detail::throw_error<value_error>(
        {"cuttlefish: least share ", o.least_share, " of the full rank is not in [0, 1]"});
  }
}

/// The options in words, with exact numbers.
PUFFERFISH_COLD inline std::string describe(const cuttlefish_options& o) {
  return detail::message({"Cuttlefish, window ", o.window, ", mean of ", o.mean_of, ", tolerance ",
                          o.tolerance, " (x 2.5 with ", o.few, " layers left, x 5 with ", o.very_few, "), ",
                          o.rank == cuttlefish_rank::scaled ? "scaled" : "vanilla", " ranks of at least ",
                          o.least_share, " of the full rank"});
}

/// The speed at which a series of stable ranks s(0), ..., s(t) still changes. It is the mean of the last
/// `mean_of` absolute derivatives (of all, if there are fewer) of the exponential average e of the series:
///     e(0) = s(0), e(i) = w s(i) + (1 - w) e(i - 1), w = 2 / (window + 1);
///     derivative(i) = (e(i + 1) - e(i - 1)) / 2, one-sided at both ends.
/// The result is 0 for fewer than two values. window and mean_of are at least 1.
PUFFERFISH_COLD inline double cuttlefish_slope(std::span<const double> series, index_t window,
                                               index_t mean_of) {
  const std::size_t count = series.size();
  if (count < 2) return 0.0;
  const double weight = 2.0 / (static_cast<double>(window) + 1.0);
  std::vector<double> average(series.begin(), series.end());
  for (std::size_t i = 1; i < count; ++i) {
    average[i] = weight * series[i] + (1.0 - weight) * average[i - 1];
  }
  const std::size_t used = std::min(count, static_cast<std::size_t>(mean_of));
  double sum = 0.0;
  for (std::size_t i = count - used; i < count; ++i) {
    const std::size_t before = i == 0 ? 0 : i - 1, after = std::min(i + 1, count - 1);
    sum += std::abs(average[after] - average[before]) / static_cast<double>(after - before);
  }
  return sum / static_cast<double>(used);
}

/// Follows the stable ranks of the layers that may be factorized. They are measured at the start of each
/// epoch of dense training, from epoch 0 on.
///
///     cuttlefish_tracker tracker(cuttlefish_options::cifar());
///     // At the start of each epoch, until observe() returns true:
///     if (tracker.observe(epoch, stable_ranks(net, policy))) apply_ranks(net, tracker.ranks());
///
/// Each rank group of a layer has a series of stable ranks. From epoch N on, a series is latched, for good,
/// once its cuttlefish_slope is at most the tolerance. A layer counts as left until all of its series are
/// latched. The number of layers left, which decides on the tolerance, is counted once before each
/// measurement. When the last layer is latched at epoch t, epoch t still trains dense; the switch is due at
/// the start of epoch t + 1, with the ranks measured there.
///
/// Copies are independent of each other. In a distributed run one rank observes; the others set its state().
class cuttlefish_tracker {
 public:
  /// Throws value_error for an option outside of its range.
  explicit cuttlefish_tracker(const cuttlefish_options& options = {}) : options_(options) {
    check_cuttlefish(options);
  }

  const cuttlefish_options& options() const { return options_; }

  /// Adds the stable ranks at the start of `epoch`. Returns whether the switch is due at the start of this
  /// epoch. The layers of epoch 0 are the tracker's layers from then on. Throws state_error unless epochs
  /// come as 0, 1, 2, ... without a gap and every call has the same layers, at least one. Throws value_error,
  /// naming the layer, for a stable rank that is negative or not finite, and for one of zero at epoch 0 where
  /// ranks are scaled. The tracker is unchanged if anything is thrown.
  bool observe(index_t epoch, const std::vector<layer_stable_rank>& measured) {
    check(epoch, measured);
    if (epoch == 0) {
      layers_.clear();
      for (const layer_stable_rank& layer : measured) {
        layers_.push_back({layer.name, layer.groups, std::vector<one_series>(layer.values.size())});
      }
    }
    const double most = tolerance();
    const bool due = epoch > 0 && left() == 0;
    ++measurements_;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      for (std::size_t g = 0; g < layers_[i].series.size(); ++g) {
        one_series& series = layers_[i].series[g];
        series.values.push_back(measured[i].values[g]);
        if (series.latched < 0 && epoch >= options_.window && slope(series) <= most) series.latched = epoch;
      }
    }
    return due;
  }

  /// Number of epochs that have been observed.
  index_t measurements() const { return measurements_; }
  /// The layers of epoch 0; empty before it.
  std::vector<std::string> layer_names() const {
    std::vector<std::string> names;
    for (const one_layer& layer : layers_) names.push_back(layer.name);
    return names;
  }
  /// Number of layers that are not latched.
  index_t left() const {
    return static_cast<index_t>(std::count_if(layers_.begin(), layers_.end(), [](const one_layer& layer) {
      return std::any_of(layer.series.begin(), layer.series.end(),
                         [](const one_series& s) { return s.latched < 0; });
    }));
  }
  /// The largest slope that latches a series at the next measurement.
  double tolerance() const {
    if (measurements_ == 0) return options_.tolerance;
    const index_t layers = left();
    return options_.tolerance * (layers <= options_.very_few ? 5.0 : layers <= options_.few ? 2.5 : 1.0);
  }

  /// The ranks by the latest measurement, of latched layers and others. Layers that these ranks do not make
  /// smaller are left out. Throws state_error before the first measurement.
  std::vector<layer_rank> ranks() const {
    if (measurements_ == 0) PUFFERFISH_THROW(state_error("cuttlefish: no stable ranks have been measured"));
    std::vector<layer_rank> result;
    for (const one_layer& layer : layers_) {
      rank_list ranks;
      for (std::size_t g = 0; g < layer.series.size(); ++g) {
        ranks.push_back(rank_of(layer.groups[g].size, layer.series[g].values));
      }
      const layer_info info{layer.name, layer.groups};
      if (detail::parameters_as_factors(info, ranks) < detail::parameters_as_dense(info)) {
        result.emplace_back(layer.name, std::move(ranks));
      }
    }
    return result;
  }

  /// The state of one series, for reports.
  struct report {
    std::string name;
    std::size_t group = 0;
    double stable_rank = 0.0;  ///< stable rank at the latest measurement
    double scale = 0.0;        ///< xi: full / s(0)
    double slope = 0.0;        ///< cuttlefish_slope of the series
    index_t latched = -1;      ///< the epoch that latched the series; -1: none
    index_t rank = 0;          ///< rank that follows from the latest measurement
  };
  /// One report for each rank group of each layer, in the order of the layers and of their groups.
  std::vector<report> reports() const {
    std::vector<report> all;
    for (const one_layer& layer : layers_) {
      for (std::size_t g = 0; g < layer.series.size(); ++g) {
        const one_series& series = layer.series[g];
        all.push_back({layer.name, g, series.values.back(),
                       full(layer.groups[g].size) / series.values.front(), slope(series), series.latched,
                       rank_of(layer.groups[g].size, series.values)});
      }
    }
    return all;
  }

  /// The state as text, for checkpoints and other ranks. set_state() of the text restores the state bit for
  /// bit. Lines:
  ///     series NAME GROUP ROWS COLUMNS MATRICES LATCHED S(0) S(1) ...
  std::string state() const {
    std::string text;
    for (const one_layer& layer : layers_) {
      for (std::size_t g = 0; g < layer.series.size(); ++g) {
        const auto& [size, count] = layer.groups[g];
        detail::add_line(text, "series", layer.name, g, size.rows, size.cols, count, layer.series[g].latched,
                         layer.series[g].values);
      }
    }
    return text;
  }
  /// Replaces the state. An empty text is the state before the first measurement. Throws io_error, naming
  /// `source` and the line, for a text that state() does not write; the tracker is unchanged then.
  void set_state(const std::string& text, const std::string& source) {
    cuttlefish_tracker read(options_);
    index_t number = 0;
    detail::for_each_line(text, [&](std::string_view content) {
      ++number;
      if (!read.read_series(content)) {
        detail::throw_error<io_error>({source, ": line ", number, " of Cuttlefish's state is not one: \"",
                                       content.substr(0, 80), "\""});
      }
    });
    *this = std::move(read);
  }

 private:
  struct one_series {
    std::vector<double> values;  // s(0), s(1), ...
    index_t latched = -1;
  };
  struct one_layer {
    std::string name;
    std::vector<matrix_group> groups;
    std::vector<one_series> series;  // by rank group
  };

  static double full(const matrix_size& size) { return static_cast<double>(std::min(size.rows, size.cols)); }

  double slope(const one_series& series) const {
    return cuttlefish_slope(series.values, options_.window, options_.mean_of);
  }

  // The rank for the latest stable rank: as cuttlefish_rank says, at least 1 and floor(beta full), at most
  // full.
  index_t rank_of(const matrix_size& size, const std::vector<double>& values) const {
    const double most = full(size), s = values.back();
    // The quotient is exactly 1 where s = s(0).
    const double wanted =
        options_.rank == cuttlefish_rank::scaled ? std::ceil(most * (s / values.front())) : std::floor(s);
    const double least = std::max(1.0, std::floor(options_.least_share * most));
    return static_cast<index_t>(std::min(most, std::max(wanted, least)));
  }

  // Throws the errors of observe().
  void check(index_t epoch, const std::vector<layer_stable_rank>& measured) const {
    if (epoch != measurements_) {
      detail::throw_error<state_error>(
          {"cuttlefish: stable ranks of epoch ", epoch, " where those of epoch ", measurements_, " are due"});
    }
    if (measured.empty())
      PUFFERFISH_THROW(state_error("cuttlefish: there is no layer that may be factorized"));
    if (epoch > 0 && measured.size() != layers_.size()) {
      detail::throw_error<state_error>({"cuttlefish: stable ranks of ", measured.size(), " layers at epoch ",
                                        epoch, ", of ", layers_.size(), " before"});
    }
    for (std::size_t i = 0; i < measured.size(); ++i) check_layer(epoch, i, measured[i]);
  }
  void check_layer(index_t epoch, std::size_t i, const layer_stable_rank& layer) const {
    if (layer.values.empty() || layer.values.size() != layer.groups.size()) {
      detail::throw_error<state_error>({"cuttlefish: ", layer.name, " has ",
                                        detail::counted(layer.values.size(), "stable rank"), " for ",
                                        detail::counted(layer.groups.size(), "rank group")});
    }
    if (epoch > 0 && (layers_[i].name != layer.name || layers_[i].groups != layer.groups)) {
      detail::throw_error<state_error>({"cuttlefish: layer ", i, " is ", layer.name, " at epoch ", epoch,
                                        ", was ", layers_[i].name, ", or has matrices of other sizes"});
    }
    for (const double s : layer.values) {
      const bool zero = s == 0.0 && epoch == 0 && options_.rank == cuttlefish_rank::scaled;
      if (s >= 0.0 && std::isfinite(s) && !zero) continue;
      detail::throw_error<value_error>({"cuttlefish: the stable rank of ", layer.name, " at epoch ", epoch,
                                        " is ", s,
                                        zero ? ": ranks scaled by initial values need initial values other "
                                               "than zero (keep the layer dense, "
                                               "or use vanilla ranks)"
                                             : ""});
    }
  }

  // Whether the sizes are valid: the numbers of parameters of the matrices, and of their factors, must fit in
  // index_t.
  static bool is_possible(const matrix_group& matrices) {
    const auto rows = static_cast<double>(matrices.size.rows), cols = static_cast<double>(matrices.size.cols);
    const double sides = (rows + cols) * std::min(rows, cols);
    return matrices.size.rows >= 1 && matrices.size.cols >= 1 && matrices.count >= 1 &&
           std::max(rows * cols, sides) * static_cast<double>(matrices.count) <
               0.5 * static_cast<double>(std::numeric_limits<index_t>::max());
  }

  // Adds a line of state(). Returns false for any other line.
  bool read_series(std::string_view content) {
    detail::record_line line(content);
    std::string kind, name;
    std::size_t group = 0;
    matrix_group matrices;
    one_series series;
    line.read(kind, name, group, matrices.size.rows, matrices.size.cols, matrices.count, series.latched);
    if (!line.read_rest(series.values).complete() || kind != "series") return false;
    const auto count = static_cast<index_t>(series.values.size());
    if (!is_possible(matrices) || series.latched < -1 || series.latched >= count ||
        (measurements_ > 0 && count != measurements_) ||
        !std::all_of(series.values.begin(), series.values.end(),
                     [](double s) { return s >= 0.0 && std::isfinite(s); }) ||
        (options_.rank == cuttlefish_rank::scaled && series.values.front() == 0.0)) {
      return false;
    }
    measurements_ = count;
    if (group == 0) layers_.push_back({name, {}, {}});
    if (layers_.empty() || layers_.back().name != name || layers_.back().series.size() != group) return false;
    layers_.back().groups.push_back(matrices);
    layers_.back().series.push_back(std::move(series));
    return true;
  }

  cuttlefish_options options_;
  std::vector<one_layer> layers_;
  index_t measurements_ = 0;
};

PUFFERFISH_NAMESPACE_END
