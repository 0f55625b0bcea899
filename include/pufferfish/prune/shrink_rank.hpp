// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `rank_shrinker`: removes rank components that contribute little, while low-rank training goes on.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/core/record_line.hpp>
#include <pufferfish/lowrank/statistics/network_statistics.hpp>
#include <pufferfish/prune/slice/slice_ranks.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Contributions of the rank components of a low-rank layer to its output; formula: see contributions(). `of`
/// has one list for each matrix of the layer, with one number for each component.
struct component_contributions {
  std::string layer;                ///< name of the layer
  std::vector<std::size_t> groups;  ///< number of the rank group of each matrix
  /// of[m][i]: contribution of component i of matrix m, not negative.
  std::vector<std::vector<double>> of;
};

/// Options of a rank_shrinker.
struct shrink_rank_options {
  /// A component is small while its contribution is below this share, between 0 and 1, of the largest one of
  /// its matrix.
  double threshold = 0.05;
  index_t patience = 2;  ///< consecutive observations in which a component is small before it is removed
  index_t least = 1;     ///< smallest number of components that every matrix keeps
};

/// Text of the options, one line without its end, to compare ranks and checkpoints.
inline std::string describe(const shrink_rank_options& options) {
  return "below " + detail::exact_number(options.threshold) +
         detail::message({" ", options.patience, " times, at least ", options.least});
}

namespace detail {

/// Computes sqrt(v^T M v) for column (or row) v of a factor. M is `moment` [size][size], or diagonal with
/// `squares` if that tensor is empty, or the identity if both are. v has the elements element(k), k = 0 ..
/// size - 1. Rounding below 0 counts as 0.
template <class Element>
double weighted_norm(index_t size, const tensor<double, 2>& moment, const std::vector<double>& squares,
                     const Element& element) {
  double sum = 0.0;
  for (index_t k = 0; k < size; ++k) {
    if (moment.size() == 0) {
      sum += element(k) * element(k) * (squares.empty() ? 1.0 : squares[static_cast<std::size_t>(k)]);
      continue;
    }
    double product = 0.0;
    for (index_t j = 0; j < size; ++j) product += moment(k, j) * element(j);
    sum += element(k) * product;
  }
  return std::sqrt(std::max(0.0, sum));
}

/// The contributions of the components of one matrix: up [out][rank][1][1], down [rank][in][h][w]. `seen`:
/// statistics of the matrix, of which those are used whose sizes fit; nullptr: Frobenius norms.
template <class T>
std::vector<double> contributions_of(const tensor_view<T, 4>& up, const tensor_view<T, 4>& down,
                                     const output_statistics* seen) {
  const index_t inputs = down.extent(1) * down.extent(2) * down.extent(3);
  tensor<double, 2> outputs_by, inputs_by;
  std::vector<double> squares;
  if (seen != nullptr && seen->outputs() == up.extent(0)) {
    if (seen->has_gradients()) outputs_by = seen->gradient_moment();
    if (outputs_by.size() == 0) squares = seen->gradient_squares();
    if (seen->inputs() == inputs && seen->has_inputs() && !seen->has_tokens())
      inputs_by = seen->input_moment();
  }
  std::vector<double> result;
  std::vector<double> row(static_cast<std::size_t>(inputs));
  for (index_t i = 0; i < up.extent(1); ++i) {
    std::size_t at = 0;
    for (index_t c = 0; c < down.extent(1); ++c) {
      for (index_t y = 0; y < down.extent(2); ++y) {
        for (index_t x = 0; x < down.extent(3); ++x) row[at++] = static_cast<double>(down(i, c, y, x));
      }
    }
    const auto of_up = [&](index_t k) { return static_cast<double>(up(k, i, 0, 0)); };
    const auto of_row = [&](index_t k) { return row[static_cast<std::size_t>(k)]; };
    result.push_back(weighted_norm(up.extent(0), outputs_by, squares, of_up) *
                     weighted_norm(inputs, inputs_by, {}, of_row));
  }
  return result;
}

/// Contributions of the components of a LowRankNormConv: ||column of up|| * |weight of the batch norm|,
/// because the batch norm fixes the scale of the rows of down.
template <class T, class Device>
std::vector<double> contributions_of(LowRankNormConv<T, Device>& layer) {
  auto* const norm = layer[1].template target<BatchNorm<T>>();
  if (norm == nullptr) return std::vector<double>(static_cast<std::size_t>(layer.rank()), 1.0);
  const norm_buffers<parameter_t<T>> of(*norm);
  const auto up = std::as_const(layer[2]).template target<Conv<T>>()->weight();
  std::vector<double> result;
  for (index_t i = 0; i < layer.rank(); ++i) {
    const auto of_up = [&](index_t k) { return static_cast<double>(up(k, i, 0, 0)); };
    result.push_back(weighted_norm(up.extent(0), {}, {}, of_up) *
                     std::abs(static_cast<double>(of.weight[i])));
  }
  return result;
}

}  // namespace detail

/// Computes the contribution of component i of each matrix up down of the low-rank layers, in the order of
/// low_rank_layers, with u column i of up and v row i of down:
///
///     sqrt(u^T D u) sqrt(v X v^T)
///
/// D: second moment of the gradients of the outputs, X: that of the inputs, from statistics of the layer's
/// matrix W in training (collect_statistics); without them the identity, so ||u|| ||v||, the Frobenius norm
/// of the component. Of a LowRankNormConv (of one group): ||u|| |weight of component i in its batch norm|.
/// Layers with a residual (annealing.hpp) are left out.
template <class Root, class Device>
std::vector<component_contributions> contributions(const model<Root, Device>& net,
                                                   const network_statistics* statistics = nullptr) {
  using T = typename Root::value_type;
  std::vector<component_contributions> result;
  net.read_on_host([&](const Root& root) {
    for (const auto& [name, slot] : detail::low_rank_slots<T, Device>(const_cast<Root&>(root))) {
      if (slot->template target<AnnealedLayer<T, Device>>() != nullptr) continue;
      component_contributions one{name, {}, {}};
      if (auto* conv = slot->template target<LowRankNormConv<T, Device>>()) {
        if (conv->shape().groups > 1) continue;
        one.groups.push_back(0);
        one.of.push_back(detail::contributions_of(*conv));
      }
      const auto parts = slot->low_rank();
      const layer_statistics* seen = statistics != nullptr ? statistics->find(name) : nullptr;
      for (std::size_t m = 0; m < parts.factors.size(); ++m) {
        const bool known = seen != nullptr && seen->matrices.size() == parts.factors.size();
        one.groups.push_back(parts.factors[m].group);
        one.of.push_back(detail::contributions_of(parts.factors[m].up, parts.factors[m].down,
                                                  known ? &seen->matrices[m] : nullptr));
      }
      result.push_back(std::move(one));
    }
  });
  return result;
}

/// Watches the contributions of rank components from epoch to epoch, and lists those that remain once others
/// have been small for options.patience observations in a row. The ranks, and with them the bytes of the
/// exchange and the multiply-adds of a step, fall while training goes on. Matrices of one rank group keep as
/// many components as the one that needs most. Equal networks give equal lists, so ranks of a distributed run
/// need no communication.
///
/// \code
/// rank_shrinker shrinker({.threshold = 0.05});
/// for (index_t epoch = 0; epoch < epochs; ++epoch) {
///   train_an_epoch(net, optimizer);
///   if (const auto kept = shrinker.observe(contributions(net)); !kept.empty()) {
///     slice_ranks(net, kept);             // new arenas: make a new optimizer (see sliced_values)
///   }
/// }
/// \endcode
class rank_shrinker {
 public:
  /// Throws value_error for a threshold outside 0 .. 1, a patience or `least` below 1.
  explicit rank_shrinker(const shrink_rank_options& options = {}) : options_(options) {
    if (!(options.threshold >= 0.0 && options.threshold <= 1.0) || options.patience < 1 ||
        options.least < 1) {
      detail::throw_error<value_error>({"shrinking ranks: threshold ", options.threshold, ", patience ",
                                        options.patience, ", least ", options.least,
                                        "; they must be in 0 .. 1 and at least 1"});
    }
  }

  /// The options given to the constructor.
  const shrink_rank_options& options() const { return options_; }

  /// Counts one observation, usually one for each epoch. Returns the layers that lose components now, with
  /// those that remain; the caller must then call slice_ranks with the list. Contributions need not be of the
  /// same scale from observation to observation: only shares of the largest one count.
  std::vector<kept_components> observe(const std::vector<component_contributions>& all) {
    std::vector<kept_components> result;
    for (const component_contributions& layer : all) {
      counters& seen = counters_of(layer);
      for (std::size_t m = 0; m < layer.of.size(); ++m) count(layer.of[m], seen.small[m]);
      std::vector<std::vector<index_t>> kept = choose(layer, seen);
      bool fewer = false;
      for (std::size_t m = 0; m < kept.size(); ++m) fewer = fewer || kept[m].size() < layer.of[m].size();
      if (!fewer) continue;
      for (std::size_t m = 0; m < kept.size(); ++m) {
        std::vector<index_t> left;
        for (const index_t i : kept[m]) left.push_back(seen.small[m][static_cast<std::size_t>(i)]);
        seen.small[m] = std::move(left);
      }
      result.push_back({layer.layer, std::move(kept)});
    }
    return result;
  }

  /// Text of the counters, for checkpoints: lines of a layer, its matrix and the number of observations in a
  /// row in which each component was small.
  std::string to_text() const {
    std::string text;
    for (const counters& one : counters_) {
      for (std::size_t m = 0; m < one.small.size(); ++m) {
        text += detail::quote_word(one.layer) + detail::message({" ", m});
        for (const index_t times : one.small[m]) text += detail::message({" ", times});
        text += "\n";
      }
    }
    return text;
  }
  /// Restores what to_text has stored. `source`: the file's name in errors. Throws io_error for other text;
  /// the object is unchanged then.
  void restore(std::string_view text, const std::string& source) {
    std::vector<counters> all;
    detail::for_each_line(text, [&](std::string_view line) {
      std::string layer;
      std::size_t matrix = 0;
      std::vector<index_t> times;
      bool good = detail::record_line(line).read(layer, matrix).read_rest(times).complete();
      if (good && matrix == 0) all.push_back({layer, {}});
      good = good && !all.empty() && all.back().layer == layer && all.back().small.size() == matrix;
      if (!good) detail::throw_error<io_error>({source, ": this is no line of a rank_shrinker: ", line});
      all.back().small.push_back(std::move(times));
    });
    counters_ = std::move(all);
  }

 private:
  // The counters of a layer.
  struct counters {
    std::string layer;
    std::vector<std::vector<index_t>> small;  // number of latest observations in which a component was small
  };

  // The layer's counters; zeros for a layer that is new or has other ranks.
  counters& counters_of(const component_contributions& layer) {
    const auto fits = [&](const counters& one) {
      bool same = one.small.size() == layer.of.size();
      for (std::size_t m = 0; same && m < layer.of.size(); ++m) {
        same = one.small[m].size() == layer.of[m].size();
      }
      return same;
    };
    auto at = std::find_if(counters_.begin(), counters_.end(),
                           [&](const counters& one) { return one.layer == layer.layer; });
    if (at == counters_.end()) at = counters_.insert(at, {layer.layer, {}});
    if (!fits(*at)) {
      at->small.clear();
      for (const auto& one : layer.of) at->small.emplace_back(one.size(), index_t{0});
    }
    return *at;
  }

  // Counts one observation of a matrix: the counter of a small component rises by 1, all others return to 0.
  void count(const std::vector<double>& of, std::vector<index_t>& small) const {
    if (of.empty()) return;
    const double limit = options_.threshold * *std::max_element(of.begin(), of.end());
    for (std::size_t i = 0; i < of.size(); ++i) small[i] = of[i] < limit ? small[i] + 1 : 0;
  }

  // The components that remain. Of those that are due, a matrix keeps the largest ones if it must keep more
  // than are left.
  std::vector<std::vector<index_t>> choose(const component_contributions& layer, const counters& seen) const {
    std::vector<std::size_t> wanted;  // number of components to keep, for each rank group
    const auto due = [&](std::size_t m, std::size_t i) { return seen.small[m][i] >= options_.patience; };
    for (std::size_t m = 0; m < layer.of.size(); ++m) {
      std::size_t left = 0;
      for (std::size_t i = 0; i < layer.of[m].size(); ++i) left += due(m, i) ? 0U : 1U;
      left = std::max(left, std::min(layer.of[m].size(), static_cast<std::size_t>(options_.least)));
      if (wanted.size() <= layer.groups[m]) wanted.resize(layer.groups[m] + 1, 0);
      wanted[layer.groups[m]] = std::max(wanted[layer.groups[m]], left);
    }
    std::vector<std::vector<index_t>> kept;
    for (std::size_t m = 0; m < layer.of.size(); ++m) {
      std::vector<std::size_t> order(layer.of[m].size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return due(m, a) != due(m, b) ? due(m, b) : layer.of[m][a] > layer.of[m][b];
      });
      auto& list = kept.emplace_back();
      for (std::size_t i = 0; i < wanted[layer.groups[m]]; ++i)
        list.push_back(static_cast<index_t>(order[i]));
      std::sort(list.begin(), list.end());
    }
    return kept;
  }

  shrink_rank_options options_;
  std::vector<counters> counters_;
};

PUFFERFISH_NAMESPACE_END
