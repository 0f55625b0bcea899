// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `profile_stages`: measures which stages of a network become faster on this machine if their layers are
/// low-rank. Cuttlefish (train/cuttlefish.hpp) chooses the layers to factorize from the result.

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/nn/measure/measure_layers.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of profile_stages.
struct stage_options {
  double ratio = 0.25;    ///< rank ratio at which a stage is measured
  timing_options timing;  ///< how long each stage is timed
};

namespace detail {

/// A part of a stage that is not divided further: a layer or a residual block, with its input and output
/// shape.
template <class T, class Device>
struct stage_unit {
  std::string name;                   ///< in the network; empty for its root
  const any_layer<T, Device>* layer;  ///< in the network; not owned
  extents<4> input, output;           ///< NHWC extents
};

/// Appends the units of `layer` in execution order: a Sequential is divided into its layers, any other layer
/// is one unit.
template <class T, class Device>
void collect_units(const any_layer<T, Device>& layer, const std::string& name, extents<4> shape,
                   std::vector<stage_unit<T, Device>>& units) {
  const auto* const row = layer.template target<Sequential<T, Device>>();
  if (row == nullptr) {
    units.push_back({name, &layer, shape, layer.output_shape(shape)});
    return;
  }
  for (std::size_t i = 0; i < row->size(); ++i) {
    collect_units((*row)[i], join_name(name, row->name(i)), shape, units);
    shape = (*row)[i].output_shape(shape);
  }
}

/// A network of the units with numbers first .. last - 1. Layers keep their names.
template <class T, class Device>
network<T, Device> stage_network(const std::vector<stage_unit<T, Device>>& units, std::size_t first,
                                 std::size_t last) {
  // A root that is not a Sequential is the only unit and has no name.
  if (units[first].name.empty()) return network<T, Device>(*units[first].layer);
  Sequential<T, Device> row;
  for (std::size_t i = first; i < last; ++i) row.add(units[i].name, *units[i].layer);
  return network<T, Device>(any_layer<T, Device>(std::move(row)));
}

/// Returns the entries of `ranks` that name a layer of `net`.
template <class T, class Device>
std::vector<layer_rank> ranks_within(const network<T, Device>& net, const std::vector<layer_rank>& ranks) {
  const auto found = find_slots(net);
  std::vector<layer_rank> within;
  for (const layer_rank& one : ranks) {
    const bool has = std::any_of(found.layers.begin(), found.layers.end(),
                                 [&](const layer_info& layer) { return layer.name == one.name; });
    if (has) within.push_back(one);
  }
  return within;
}

}  // namespace detail

/// Measures the forward and backward passes of the stages of a network for an image batch of NHWC extents
/// `input`, the batch of one rank. A stage consists of consecutive layers and residual blocks whose outputs
/// have the same number of channels; a network whose root is not a Sequential is one stage. Each stage is
/// measured twice, from the last stage to the first: dense, and with low-rank layers of rank ratio
/// options.ratio in place of all layers that `policy` would factorize. Stages without such a layer are left
/// out. The result is in execution order:
///
///     const auto stages = profile_stages(net, {batch, 32, 32, 3}, policy, ctx);
///     policy = only_layers(policy, profitable_layers(stages));  // where dense / low rank >= 1.5
///
/// A stage is measured as a separate network, with its batch norms and activations. The first stage computes
/// no gradient of its input. The requirements on `ctx` and the rules for several ranks and for a device are
/// those of measure_layers. Throws shape_error if a layer does not accept the shape of its input, value_error
/// for fewer than two iterations or a time limit that is not positive, and value_error or rank_error for an
/// invalid policy or ratio (see select()).
template <class T, class Device>
std::vector<stage_time> profile_stages(const network<T, Device>& net, const extents<4>& input,
                                       const factorize_policy& policy, context<Device>& ctx,
                                       const stage_options& options = {}) {
  detail::check_timing("profile_stages", options.timing);
  factorize_policy at_ratio = policy;
  at_ratio.rank = rank_ratio{options.ratio};
  at_ratio.embedding_rank.reset();
  const std::vector<layer_rank> ranks = planned_ranks(net, at_ratio);
  std::vector<stage_time> stages;
  net.read_on_host([&](const any_layer<T, Device>& root) {
    std::vector<detail::stage_unit<T, Device>> units;
    detail::collect_units(root, {}, input, units);
    std::size_t last = units.size();
    while (last > 0) {
      std::size_t first = last - 1;
      const index_t channels = units[first].output[3];
      while (first > 0 && units[first - 1].output[3] == channels) --first;
      network<T, Device> dense = detail::stage_network(units, first, last);
      const std::vector<layer_rank> own = detail::ranks_within(dense, ranks);
      if (!own.empty()) {
        network<T, Device> low_rank(dense);
        apply_ranks(low_rank, own);
        low_rank.initialize(1);
        detail::layer_passes<T, Device> pass(ctx, {"", units[first].input, first > 0, 0},
                                             units[last - 1].output);
        const std::vector<double> times =
            detail::time_passes(ctx, options.timing, {[&] { pass.run(dense); }, [&] { pass.run(low_rank); }});
        stage_time& stage = stages.emplace_back(
            stage_time{units[first].name, units[last - 1].name, channels, times[0], times[1], {}});
        for (const layer_rank& one : own) stage.layers.push_back(one.name);
      }
      last = first;
    }
  });
  std::reverse(stages.begin(), stages.end());
  return stages;
}

PUFFERFISH_NAMESPACE_END
