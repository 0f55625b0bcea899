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

#include <pufferfish/lowrank/statistics/output_statistics.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/fold_batch_norm.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of statistics_collector.
struct statistics_options {
  /// Number of rows of a layer that a step samples, evenly spaced, but at least half of the width of a row;
  /// 0: all rows. All rows of smaller batches are used.
  index_t rows_of_step = 512;
};

namespace detail {

/// Some rows of a layer: `rows` of them, from `first` on, `step` apart.
struct row_slice {
  index_t first = 0, step = 1, rows = 0;
};

/// The rows that turn 0, 1, ... samples of `count` rows of `columns` numbers (statistics_options). Their
/// distance has no common divisor with `count`, so that a turn favours no column of a batch of images, and
/// each turn goes on cyclically after the last row of the turn before. So every row is sampled equally often:
/// means over sampled rows are unbiased. The second slice, which may be empty, begins where the first one has
/// reached the end of the rows.
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

/// Access to the rows that a layer shows, in host memory: on the CPU the rows themselves, 16-bit elements
/// widened to float. The device's specialization copies them (<pufferfish/gpu.hpp>).
template <class T, class Device>
class host_rows {
 public:
  using value_type = parameter_t<T>;
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
  std::span<const std::int32_t> tokens(const void* data, index_t count) const {
    return {static_cast<const std::int32_t*>(data), static_cast<std::size_t>(count)};
  }

 private:
  std::vector<value_type> values_;  // of 16-bit rows
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

/// Collects, from training steps of the caller, statistics of the layers that a policy would
/// factorize, and the number of rows of all other layers:
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
/// As long as the collector is used, the network must not be moved and must keep its layers and arenas. Sums
/// are taken in a fixed order, so that they do not depend on the number of threads. On a device every layer
/// waits until its rows are copied to the host, which sums them; such steps cannot be captured into a graph.
///
/// Not safe for concurrent calls: passes, end_step and statistics() belong to one thread. In a distributed
/// run each rank collects the statistics of its own samples; sum_over_ranks (distributed/sum_statistics.hpp)
/// adds what statistics() returns.
template <class T, class Device = device::cpu>
class statistics_collector final : public row_observer {
 public:
  /// Errors as select.
  /// Also throws state_error for a layer of another library whose weight matrix is in none of its parameters.
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

  /// Called by layers; adds the rows to the current step.
  /// Rows of weights that are not watched are ignored.
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

  /// Ends a step whose loss was the mean over `samples` samples. `usable` false: the step's
  /// gradients were not finite, and the step is discarded.
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

  /// Number of usable steps.
  /// set_steps restores the number from a checkpoint; it selects the rows that the next step samples.
  std::uint64_t steps() const { return steps_; }
  void set_steps(std::uint64_t steps) { steps_ = steps; }

  /// Statistics collected so far, layer by layer in execution order. On a device, to be called
  /// within read_on_host of the network.
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

  /// The sums of all layers, each under a name, for checkpoints and for sums over ranks.
  /// Pointers are valid as long as the collector. Names are unique: a layer's name and the matrix's number in
  /// the list.
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
  struct watched_matrix {
    index_t first_output = 0;  // index of the matrix's first column in the weight's output rows
    output_statistics seen, pending;
  };
  struct watched_weight {
    const void* weight = nullptr;  // parameter<T>
    std::vector<watched_matrix> matrices;
    bool moments = true;            // false: only rows are counted
    double rows = 0.0, tied = 0.0;  // of this step
  };
  struct watched_layer {
    std::string name;
    BatchNorm<T>* norm = nullptr;
    std::vector<std::pair<std::size_t, std::size_t>> places;  // of its matrices: weight, matrix in the weight
  };

  // In the memory of every weight, outputs are the innermost dimension. So the offset of a matrix
  // from the start of its parameter is the number of its first output.
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

  // The parameter of the layer in whose memory the element at `at` is stored; nullptr: none.
  static const parameter<parameter_t<T>>* owner_of(any_layer<T, Device>& slot, const parameter_t<T>* at) {
    const std::less<> before;
    const parameter<parameter_t<T>>* found = nullptr;
    detail::for_each_parameter(slot, [&](const std::string&, const auto& p) {
      if (!before(at, p.data()) && before(at, p.data() + p.size())) found = &p;
    });
    return found;
  }

  using fetcher = detail::host_rows<T, Device>;

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
