// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: new layers on a device, and functions that swap them with the layers of a network.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/memory.hpp>
#include <pufferfish/nn/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace detail {

/// A layer outside of a network, whose parameters are in uninitialized memory of the device.
template <class T>
class placed_layer {
 public:
  using layer_type = any_layer<T, device::gpu>;
  using value_type = parameter_t<T>;

  /// Allocates one block of `memory` for all parameters of the layer, in the order in which the layer visits
  /// them, and binds the parameters to it. The block is uninitialized: values are not copied. Buffers (such
  /// as running statistics) stay in their own memory. Throws the errors of the memory source.
  placed_layer(memory_source& memory, layer_type layer) : layer_(std::move(layer)) {
    index_t size = 0, offset = 0;
    pufferfish::detail::for_each_parameter(layer_, [&](const std::string&, auto& p) { size += p.size(); });
    values_ = memory_block<value_type>(memory, size, uninitialized);
    pufferfish::detail::for_each_parameter(layer_, [&](const std::string&, auto& p) {
      p.relocate(values_.data() + offset, true);
      offset += p.size();
    });
  }

  layer_type& layer() { return layer_; }

 private:
  layer_type layer_;
  memory_block<value_type> values_;
};

/// A layer of a network (`slot`) and the low-rank layer that replaces it. `layer` is empty if the policy does
/// not select the slot, or if factors would have more parameters than the dense layer. `reports`: one per
/// matrix.
template <class T>
struct slot_replacement {
  any_layer<T, device::gpu>* slot;
  std::optional<placed_layer<T>> layer;
  std::vector<factor_report> reports;
};

/// Swaps each new layer with the layer in its slot of the network (entries without a new layer are left out)
/// and makes new arenas. The network is unchanged if memory for the arenas runs out. Each element of
/// `replaced` has a slot and an optional layer.
template <class Root, class Replacements>
void replace_layers(model<Root, device::gpu>& net, Replacements& replaced) {
  const auto swap_all = [&] {
    for (auto& one : replaced) {
      if (one.layer) std::swap(*one.slot, one.layer->layer());
    }
  };
  try {
    net.rearrange([&](Root&) { swap_all(); });
  } catch (...) {
    swap_all();
    throw;
  }
}

}  // namespace detail
}  // namespace gpu
PUFFERFISH_NAMESPACE_END
