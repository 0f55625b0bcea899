// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `statistics_collector`: collects the statistics of a network's layers during training steps.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/lowrank/statistics/network_statistics.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/fold_batch_norm.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of statistics_collector.
struct statistics_options {
  /// Number of rows that one step samples of each layer, evenly spaced over the layer's batch of rows. At
  /// least half of the width of a row is sampled, even if this number is smaller. 0 samples all rows, and a
  /// batch with fewer rows than this number is used completely.
  index_t rows_of_step = 512;
};

namespace detail {

/// Some rows of a matrix: `rows` rows at row numbers first, first + step, first + 2 step, ...
struct row_slice {
  index_t first = 0, step = 1, rows = 0;
};

/// The rows that step number `turn` samples of a matrix of `count` rows by `columns` numbers; `most` is
/// statistics_options::rows_of_step. Row numbers grow by a step that has no common divisor with `count`, so
/// that a sample favours no column of a batch of images. Each turn continues cyclically after the last row of
/// the turn before it. Every row is therefore sampled equally often, and means over sampled rows are
/// unbiased. The second slice holds the rows after the end of the matrix was reached; it may be empty.
inline std::array<row_slice, 2> sample_rows(index_t count, index_t columns, index_t most,
                                            std::uint64_t turn) {
  const index_t limit = most == 0 ? count : std::max(most, columns / 2);
  if (count <= limit) return {{{0, 1, count}, {}}};
  index_t step = count / limit;
  while (std::gcd(step, count) > 1) --step;
  const auto all = static_cast<std::uint64_t>(count), of_turn = static_cast<std::uint64_t>(limit * step);
  const auto first = static_cast<index_t>(turn % all * of_turn % all);
  const index_t rows = std::min(limit, (count - first + step - 1) / step);
  return {{{first, step, rows}, {first + rows * step - count, step, limit - rows}}};
}

/// Gives access in host memory to the rows that a layer passes to a row_observer. On the CPU these are the
/// layer's own rows; 16-bit elements are copied and widened to float. The specialization for a device
/// (<pufferfish/gpu.hpp>) copies the rows to the host.
template <class T, class Device>
class host_rows {
 public:
  using value_type = parameter_t<T>;
  /// The rows of a matrix of T [shape[0]][shape[1]] at `data`, whose rows are `stride` elements apart. The
  /// view is valid until the next call.
  tensor_view<const value_type, 2> operator()(const void* data, const extents<2>& shape, index_t stride) {
    const auto* const first = static_cast<const T*>(data);
    if constexpr (std::is_same_v<T, value_type>) {
      return {first, shape, {stride, 1}};
    } else {
      values_.clear();
      for (index_t m = 0; m < shape[0]; ++m) {
        values_.insert(values_.end(), first + m * stride, first + m * stride + shape[1]);
      }
      return {values_.data(), shape};
    }
  }
  /// The `count` tokens at `data`.
  std::span<const std::int32_t> tokens(const void* data, index_t count) const {
    return {static_cast<const std::int32_t*>(data), static_cast<std::size_t>(count)};
  }

 private:
  std::vector<value_type> values_;  // the copy of 16-bit rows, widened to float
};

/// Finds the batch normalisation that reads the outputs of each layer of a network.
template <class T, class Device>
class following_norms final : public layer_visitor<T, Device> {
 public:
  void on_layer(const std::string&, any_layer<T, Device>&) override {}
  void on_sequence(const std::string&, Sequential<T, Device>& layers) override {
    for (std::size_t i = 0; i + 1 < layers.size(); ++i) {
      if (auto* norm = layers[i + 1].template target<BatchNorm<T>>()) {
        found_.emplace_back(&layers[i], norm);
      }
    }
  }

  /// The batch norm directly after a layer in its Sequential, or nullptr.
  BatchNorm<T>* after(const any_layer<T, Device>* slot) const {
    for (const auto& [layer, norm] : found_) {
      if (layer == slot) return norm;
    }
    return nullptr;
  }

 private:
  std::vector<std::pair<const any_layer<T, Device>*, BatchNorm<T>*>> found_;
};

}  // namespace detail

/// Row observer that collects, from training steps of the caller, the statistics of all layers that a policy
/// would factorize. For all other layers it counts the rows of their batches.
///
///     statistics_collector<float> collector(net, policy);
///     for (...) {
///       {
///         const observed_scope watching(ctx, collector);
///         ...                                            // forward and backward pass in training mode
///       }
///       collector.end_step(samples);
///     }
///     factorize(net, policy, &seen);                     // network_statistics seen = collector.statistics()
///
/// While the collector is used, the network must not be moved and must not be modified (by factorize() or
/// merge(), for example), because the collector identifies weights by their addresses. Sums are taken in a
/// fixed order, so that they do not depend on the number of threads. On a device every layer waits until its
/// rows are copied to the host, which sums them; such steps cannot be captured into a graph.
///
/// Not safe for concurrent calls: passes, end_step and statistics() must run in one thread. In a distributed
/// run each rank collects the statistics of its own samples; sum_over_ranks (distributed/sum_statistics.hpp)
/// adds the results of statistics() over the ranks.
template <class T, class Device = device::cpu>
class statistics_collector final : public row_observer {
 public:
  /// Prepares the collection for the layers of `net` that `policy` would factorize. Keeps the addresses of
  /// the network's parameters and batch norms, but no reference to `policy`. Throws value_error or rank_error
  /// for a policy that does not fit the network (see select(), lowrank/selection.hpp). Throws state_error for
  /// an adapter of a layer of another library whose weight matrix is stored in none of the adapter's
  /// parameters.
  template <class Root>
  statistics_collector(const model<Root, Device>& net, const factorize_policy& policy,
                       const statistics_options& options = {})
      : options_(options) {
    const auto found = detail::find_slots(net);
    detail::following_norms<T, Device> norms;
    net.visit_layers(norms);
    const std::vector<layer_choice> choices = select(found.layers, policy);
    for (std::size_t i = 0; i < choices.size(); ++i) {
      if (found.layers[i].groups.empty()) continue;
      watch(found.layers[i].name, *found.slots[i], norms.after(found.slots[i]), choices[i].factorize());
    }
  }

  /// Adds the rows that a layer reports in a pass to the sums of the current step. `weight` is the address of
  /// the layer's weight parameter; rows of weights that the collector does not watch are ignored.
  void on_rows(const void* weight, row_kind kind, const shown_rows& rows) override {
    const auto at = std::find_if(weights_.begin(), weights_.end(),
                                 [=](const watched_weight& one) { return one.weight == weight; });
    if (at == weights_.end()) return;
    if (kind == row_kind::output_gradient) at->rows += static_cast<double>(rows.rows);
    if (kind == row_kind::tied_input) at->tied += static_cast<double>(rows.rows);
    if (!at->moments) return;
    if (kind == row_kind::token) return add_tokens(*at, rows);
    for (const detail::row_slice& part :
         detail::sample_rows(rows.rows, rows.columns, options_.rows_of_step, steps_)) {
      if (part.rows == 0) continue;
      add_rows(*at, kind,
               fetch_(static_cast<const T*>(rows.data) + part.first * rows.stride, {part.rows, rows.columns},
                      part.step * rows.stride));
    }
  }

  /// Ends a step whose loss was the mean over `samples` samples: adds the sums of the step to the statistics.
  /// With usable = false the sums of the step are discarded, as for a step whose gradients were not finite.
  void end_step(double samples, bool usable = true) {
    for (watched_weight& weight : weights_) {
      for (watched_matrix& one : weight.matrices) {
        if (usable) {
          one.pending.add_batch(weight.rows, samples, weight.tied);
          one.seen.merge(one.pending, samples);
        }
        one.pending.clear();
      }
      weight.rows = weight.tied = 0.0;
    }
    if (usable) ++steps_;
  }

  /// Number of usable steps so far.
  std::uint64_t steps() const { return steps_; }
  /// Restores the number of steps from a checkpoint. The number selects the rows that the next step samples.
  void set_steps(std::uint64_t steps) { steps_ = steps; }

  /// Statistics collected so far, layer by layer in execution order. On a device, the call must be made
  /// within read_on_host() of the network, since it reads parameters of batch norms.
  network_statistics statistics() const {
    network_statistics all;
    for (const watched_layer& layer : layers_) {
      layer_statistics& one = all.layers.emplace_back();
      one.name = layer.name;
      one.normalized = layer.norm != nullptr;
      if (layer.norm != nullptr) one.output_scale = detail::channel_affine(*layer.norm).scale;
      for (const auto& [weight, matrix] : layer.places) {
        const std::vector<watched_matrix>& matrices = weights_[weight].matrices;
        one.matrices.push_back(matrices[matrix].seen);
        if (matrix > 0) one.matrices.back().take_inputs(matrices.front().seen);
      }
    }
    return all;
  }

  /// The sums of all matrices, each with a name, for checkpoints and for sums over ranks. Pointers are valid
  /// while the collector exists. A name consists of the layer's name, "#" and the position in the list, so
  /// that names are unique.
  std::vector<std::pair<std::string, output_statistics*>> sums() {
    std::vector<std::pair<std::string, output_statistics*>> all;
    for (const watched_layer& layer : layers_) {
      for (const auto& [weight, matrix] : layer.places) {
        all.emplace_back(detail::message({layer.name, "#", all.size()}),
                         &weights_[weight].matrices[matrix].seen);
      }
    }
    return all;
  }

 private:
  // A matrix of a watched weight: its sums of all usable steps, and those of the current step.
  struct watched_matrix {
    index_t first_output = 0;  // index of the matrix's first column in the weight's output rows
    output_statistics seen, pending;
  };
  // A parameter whose rows are observed. A recurrent layer's weight holds several matrices.
  struct watched_weight {
    const void* weight = nullptr;  // address of the parameter<T>
    std::vector<watched_matrix> matrices;
    bool moments = true;            // false: rows are counted, but not summed
    double rows = 0.0, tied = 0.0;  // number of rows in this step
  };
  // A layer of the result, and the places of its matrices.
  struct watched_layer {
    std::string name;
    BatchNorm<T>* norm = nullptr;
    std::vector<std::pair<std::size_t, std::size_t>> places;  // matrices: index of the weight, in the weight
  };

  // Adds a layer. `moments`: whether its rows are summed, not only counted. In the memory of every weight,
  // outputs are the innermost dimension, so that the offset of a matrix from the start of its parameter is
  // the number of its first output.
  void watch(const std::string& name, any_layer<T, Device>& slot, BatchNorm<T>* norm, bool moments) {
    watched_layer layer{name, norm, {}};
    const layer_weights<parameter_t<T>> shown = slot.weights(name);
    for (const auto& matrix : shown.matrices) {
      const parameter<parameter_t<T>>* const owner = owner_of(slot, matrix.view.data());
      if (owner == nullptr) {
        if (!moments) return;
        detail::throw_error<state_error>({slot.describe(), ": a weight matrix is in none of its parameters"});
      }
      const auto known = std::find_if(weights_.begin(), weights_.end(),
                                      [&](const watched_weight& one) { return one.weight == owner; });
      const auto weight = static_cast<std::size_t>(known - weights_.begin());
      if (known == weights_.end()) weights_.push_back({owner, {}, moments});
      const index_t outputs = matrix.view.extent(0);
      const output_statistics empty(outputs, outputs == 0 ? 0 : matrix.view.size() / outputs);
      layer.places.emplace_back(weight, weights_[weight].matrices.size());
      weights_[weight].matrices.push_back({matrix.view.data() - owner->data(), empty, empty});
    }
    layers_.push_back(std::move(layer));
  }

  // Returns the parameter of the layer in whose memory the element at `at` is stored, or nullptr.
  static const parameter<parameter_t<T>>* owner_of(any_layer<T, Device>& slot, const parameter_t<T>* at) {
    const std::less<> before;
    const parameter<parameter_t<T>>* found = nullptr;
    detail::for_each_parameter(slot, [&](const std::string&, const auto& p) {
      if (!before(at, p.data()) && before(at, p.data() + p.size())) found = &p;
    });
    return found;
  }

  using fetcher = detail::host_rows<T, Device>;

  // Adds the rows of a pass to the sums of the current step.
  void add_tokens(watched_weight& weight, const shown_rows& rows) {
    weight.matrices.front().pending.add_tokens(fetch_.tokens(rows.data, rows.rows));
  }

  void add_rows(watched_weight& weight, row_kind kind,
                const tensor_view<const typename fetcher::value_type, 2>& rows) {
    // All matrices of a weight share its inputs, which are summed once.
    if (kind == row_kind::input) return weight.matrices.front().pending.add_inputs(rows);
    if (kind == row_kind::tied_input) return weight.matrices.front().pending.add_tied_inputs(rows);
    for (watched_matrix& one : weight.matrices) {
      const auto own = rows.slice(1, one.first_output, one.pending.outputs());
      kind == row_kind::output ? one.pending.add_outputs(own) : one.pending.add_gradients(own, 1.0);
    }
  }

  statistics_options options_;
  fetcher fetch_;
  std::vector<watched_weight> weights_;
  std::vector<watched_layer> layers_;
  std::uint64_t steps_ = 0;
};

PUFFERFISH_NAMESPACE_END
