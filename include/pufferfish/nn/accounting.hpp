// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Cost of a network: parameters, buffers and multiply-accumulates (MACs), layer by layer and in total.
///
/// \code
/// const model_cost cost = cost_of(net, {1, 32, 32, 3});
/// for (const layer_cost& layer : cost.layers) {
///   std::printf("%s: %td parameters, %td MACs\n", layer.name.c_str(), layer.parameters, layer.macs);
/// }
/// std::printf("total: %td parameters\n", cost.total().parameters);
/// \endcode

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/nn/containers/residual.hpp>
#include <pufferfish/nn/layers/low_rank_norm_conv.hpp>
#include <pufferfish/nn/layers/pooling.hpp>
#include <pufferfish/nn/network.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Cost of one layer that is not a container, in one forward pass. `macs` counts convolutions and matrix
/// products only. `macs_paper` follows the counter in the published code of Wang et al. (Pufferfish, MLSys
/// 2021), which adds 2 per element that a batch norm normalises, 1 per element that a ReLU or pooling reads,
/// and nothing for biases.
struct layer_cost {
  std::string name;         ///< of the layer in the network
  std::string description;  ///< describe() of the layer
  index_t parameters = 0;   ///< elements that are trained
  index_t buffers = 0;      ///< elements that are kept and not trained: running statistics and their counters
  index_t macs = 0;         ///< multiply-accumulates of convolutions and products
  index_t macs_paper = 0;   ///< by the published counter
  index_t rank = 0;         ///< rank of a low-rank layer; 0 for others
};

/// Cost of a model, layer by layer in execution order. lstm_lm and transformer, whose input is not one
/// tensor, return it from their member cost(). A tensor shared by two layers is counted in one of them.
struct model_cost {
  std::vector<layer_cost> layers;

  /// Sums over the layers; name, description and rank stay empty.
  layer_cost total() const {
    layer_cost sum;
    for (const layer_cost& layer : layers) {
      sum.parameters += layer.parameters;
      sum.buffers += layer.buffers;
      sum.macs += layer.macs;
      sum.macs_paper += layer.macs_paper;
    }
    return sum;
  }
};

/// The ReLU and pooling layers that the counter in the published code of Wang et al. (Pufferfish, MLSys 2021)
/// includes. It hooks into PyTorch modules and misses layers called as functions, so that a published number
/// depends on how its network is written.
struct paper_counter {
  /// Called with the name of each ReLU and pooling layer, and of each residual block with a ReLU
  /// after its sum; empty: all are included.
  std::function<bool(const std::string& name)> sees;
};

namespace detail {

/// State visitor that counts the elements of parameters and of buffers.
template <class T>
struct state_counter final : state_visitor<T> {
  void on_parameter(const std::string&, parameter<T>& p) override { parameters += p.size(); }
  void on_buffer(const std::string&, state_buffer<T>& b) override { buffers += b.size(); }
  index_t parameters = 0, buffers = 0;
};

/// Cost of one computing layer (no container) for an input. `seen`: whether paper_counter includes it.
template <class T, class Device>
layer_cost cost_of_layer(const std::string& name, const any_layer<T, Device>& layer, const extents<4>& input,
                         bool seen) {
  state_counter<parameter_t<T>> count;
  // visit_state needs a mutable layer; the state is only counted here.
  const_cast<any_layer<T, Device>&>(layer).visit_state(count);
  layer_cost cost{name, layer.describe(), count.parameters, count.buffers, layer.macs(input), 0, 0};
  const rank_list ranks = layer.ranks();
  cost.rank = ranks.empty() ? 0 : ranks.front();
  const bool pools = layer.template target<MaxPool<T>>() != nullptr ||
                     layer.template target<AvgPool<T>>() != nullptr ||
                     layer.template target<GlobalAvgPool<T>>() != nullptr;
  cost.macs_paper = cost.macs;
  if (layer.template target<BatchNorm<T>>() != nullptr) cost.macs_paper += 2 * volume<4>(input);
  if ((pools || layer.abilities().is_relu) && seen) cost.macs_paper += volume<4>(input);
  return cost;
}

/// Iterator to the last of the layers whose names are below `container`, or the end.
template <class Layers>
auto last_below(Layers& layers, const std::string& container) {
  const std::string prefix = container.empty() ? "" : container + ".";
  const auto below = [&](const auto& l) { return l.first.name.compare(0, prefix.size(), prefix) == 0; };
  const auto found = std::find_if(layers.rbegin(), layers.rend(), below);
  return found == layers.rend() ? layers.end() : std::prev(found.base());
}

}  // namespace detail

/// Cost of a network for an NHWC input (one image: {1, height, width, channels}), one row per layer. The ReLU
/// after a residual block's sum is a row of its own under the block's name. macs: multiply-accumulates;
/// macs_paper: operations as `counter` counts them (see paper_counter). Both are proportional to the number
/// of images. Reads shapes only: nothing is computed, and a network on a device is not copied. Throws
/// shape_error if a layer does not fit the input.
template <class T, class Device>
model_cost cost_of(const network<T, Device>& net, const extents<4>& input,
                   const paper_counter& counter = {}) {
  using rows = std::vector<std::pair<layer_cost, extents<4>>>;  // each with its output shape
  const auto sees = [&](const std::string& name) { return !counter.sees || counter.sees(name); };
  struct tracer final : layer_tracer<T, Device> {
    explicit tracer(const decltype(sees)& s) : seen(s) {}
    void on_trace(const std::string& name, const any_layer<T, Device>& layer, const extents<4>& in,
                  const extents<4>& out) override {
      result.emplace_back(detail::cost_of_layer(name, layer, in, seen(name)), out);
    }
    const decltype(sees)& seen;
    rows result;
  } trace(sees);
  net.root().trace(trace, input);
  rows& layers = trace.result;

  const auto look_at_container = [&](const std::string& name, const any_layer<T, Device>& layer) {
    if (const auto* factors = layer.template target<LowRankNormConv<T, Device>>()) {
      for (auto& [cost, out] : layers) {
        if (cost.name == name + ".down" || cost.name == name + ".up") cost.rank = factors->rank();
      }
    }
    const auto* block = layer.template target<Residual<T, Device>>();
    if (block == nullptr || !block->relu()) return;
    const auto last = detail::last_below(layers, name);
    if (last == layers.end()) return;
    layer_cost cost{name, block->describe(), 0, 0, 0, 0, 0};
    if (sees(name)) cost.macs_paper = volume<4>(last->second);
    const extents<4> out = last->second;
    layers.insert(std::next(last), {std::move(cost), out});
  };
  look_at_container("", net.root());
  net.for_each_layer(look_at_container);

  model_cost cost;
  for (auto& [layer, out] : layers) cost.layers.push_back(std::move(layer));
  return cost;
}

PUFFERFISH_NAMESPACE_END
