// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `network_statistics`: statistics of the weight matrices of a network, and measured times of its layers.

#include <string>
#include <utility>
#include <vector>

#include <pufferfish/lowrank/statistics/layer_times.hpp>
#include <pufferfish/lowrank/statistics/output_statistics.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Statistics of one layer: one output_statistics per matrix.
struct layer_statistics {
  layer_statistics() = default;
  /// Statistics of a layer with one matrix.
  layer_statistics(output_statistics one) { matrices.push_back(std::move(one)); }
  /// Statistics of a layer with several matrices, in the order of the layer's matrices.
  explicit layer_statistics(std::vector<output_statistics> all) : matrices(std::move(all)) {}

  std::string name;                         ///< name of the layer in its network
  std::vector<output_statistics> matrices;  ///< in the order of the layer's matrices (see kind_traits)
  /// Whether a batch normalization follows the layer. The normalization subtracts the mean of the outputs,
  /// and with it the mean of their errors.
  bool normalized = false;
  /// The factors weight / deviation by which the batch normalization multiplies the outputs, for
  /// truncation::data_aware. Empty: unknown.
  std::vector<double> output_scale;
};

/// Statistics of the layers of a network. Layers that are not factorized may have only row counts, which
/// determine their multiply-adds.
struct network_statistics {
  std::vector<layer_statistics> layers;
  layer_times times;  ///< measured times, for budgets in milliseconds; empty: none

  /// The statistics of the layer called `name`, or nullptr if there are none. Linear search. The pointer is
  /// valid until `layers` changes.
  const layer_statistics* find(const std::string& name) const {
    for (const layer_statistics& layer : layers) {
      if (layer.name == name) return &layer;
    }
    return nullptr;
  }
};

PUFFERFISH_NAMESPACE_END
