// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// A form of a network, dense or with factors, and what a training step costs with it.

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <vector>

#include <pufferfish/distributed/exchange/bucket.hpp>
#include <pufferfish/nn/accounting.hpp>

#include "step_prediction.hpp"

namespace examples {

using pufferfish::index_t;

inline constexpr double not_counted = std::numeric_limits<double>::quiet_NaN();

/// How a rank computes a step.
struct step_options {
  index_t batch = 32;         ///< samples
  double gmacs = 70.0;        ///< billions of multiply-adds a second
  index_t compress_rank = 4;  ///< of PowerSGD
};

/// A form of the network.
struct form {
  std::string name;
  index_t parameters = 0, macs = 0;  ///< multiply-adds of one sample's forward pass
  double memory = not_counted;       ///< bytes
  double predicted_loss = not_counted;
  double kept = not_counted;  ///< smallest share of the energy of a weight's outputs that its factors keep
  step_work work;
};

/// Rows and columns of the gradients as matrices, in the order of the arena; one column: a vector.
using gradient_sizes = std::vector<std::array<index_t, 2>>;

inline gradient_sizes::value_type as_matrix(index_t rows, index_t size) {
  return {rows, rows > 0 ? size / rows : 0};
}

/// The cost of a network for one sample, and the elements of all layers' outputs; NaN: not counted.
struct sample_cost {
  pufferfish::model_cost layers;
  double outputs = not_counted;
};

/// The sizes of the gradients of a network.
template <class Store>
gradient_sizes sizes_of(const Store& store) {
  gradient_sizes sizes;
  for (const auto& entry : store.parameters()) {
    const pufferfish::logical_layout& layout = entry.thing->layout();
    sizes.push_back(as_matrix(layout.shape[0], layout.size()));
  }
  return sizes;
}

/// Bytes of both sums of PowerSGD: out x r factors with the tensors that factors would not make smaller, and
/// in x r factors.
inline std::array<double, 2> powersgd_bytes(const gradient_sizes& sizes, index_t rank) {
  std::array<double, 2> bytes{};
  for (const auto& [rows, cols] : sizes) {
    const index_t r = std::min({rank, rows, cols});
    const bool smaller = r * (rows + cols) < rows * cols;
    bytes[0] += 4.0 * static_cast<double>(smaller ? r * rows : rows * cols);
    bytes[1] += smaller ? 4.0 * static_cast<double>(r * cols) : 0.0;
  }
  return bytes;
}

/// The buckets of the exchange. The arena of gradients has the order of the backward pass, so its first n
/// elements are complete when the layers at the end that have n parameters are.
inline std::vector<bucket> buckets_of(const gradient_sizes& gradients, const pufferfish::model_cost& cost) {
  const double all = std::max(1.0, static_cast<double>(cost.total().macs));
  std::vector<index_t> sizes;
  for (const auto& [rows, cols] : gradients) sizes.push_back(rows * cols);
  std::vector<bucket> buckets;
  auto layer = cost.layers.rbegin();
  index_t ready = 0;
  double macs = 0.0;
  for (const pufferfish::gradient_bucket& each : pufferfish::cut_buckets(sizes, sizeof(float))) {
    for (; ready < each.offset + each.size && layer != cost.layers.rend(); ++layer) {
      ready += layer->parameters;
      macs += static_cast<double>(layer->macs);
    }
    buckets.push_back({4.0 * static_cast<double>(each.size), macs / all});
  }
  return buckets;
}

/// Memory of a step: values, gradients and momentum of all parameters, and the outputs of all layers.
inline form form_of(const step_options& o, const std::string& name, const gradient_sizes& gradients,
                    const sample_cost& cost) {
  const pufferfish::layer_cost total = cost.layers.total();
  const auto parameters = static_cast<double>(total.parameters), batch = static_cast<double>(o.batch);
  form made{name,        total.parameters, total.macs, 4.0 * (3.0 * parameters + batch * cost.outputs),
            not_counted, not_counted,      {}};
  made.work = {parameters, 3.0 * static_cast<double>(total.macs) * batch / (1e9 * o.gmacs), 70.0 / o.gmacs,
               buckets_of(gradients, cost.layers), powersgd_bytes(gradients, o.compress_rank)};
  return made;
}

/// The dense form, then the others by falling size.
inline std::vector<form> in_order(std::vector<form> forms) {
  std::stable_sort(forms.begin() + 1, forms.end(),
                   [](const form& a, const form& b) { return a.parameters > b.parameters; });
  return forms;
}

}  // namespace examples
