// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `find_slots`, `numbered_layers`, `low_rank_layers`: the layers of a network that have weights or factors:
/// their slots, numbers and ranks.

#include <string>
#include <utility>
#include <vector>

#include <pufferfish/lowrank/selection.hpp>
#include <pufferfish/nn/containers/any_layer.hpp>
#include <pufferfish/nn/model.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Layer visitor that collects the layers of a network that have weights or factors, in execution order, and
/// their slots. layers[i] describes the layer in *slots[i]. The slots are valid until the network is
/// modified.
template <class T, class Device>
class slot_finder final : public layer_visitor<T, Device> {
 public:
  void on_layer(const std::string& name, any_layer<T, Device>& slot) override {
    add(name, slot, shortcuts_ > 0 ? layer_place::shortcut : layer_place::path);
  }
  void on_embedding(const std::string& name, any_layer<T, Device>& slot) override {
    add(name, slot, layer_place::embedding);
  }
  void enter_shortcut() override { ++shortcuts_; }
  void leave_shortcut() override { --shortcuts_; }

  /// Name, matrix groups and place of each layer: on the main path, on a shortcut, or an embedding.
  std::vector<layer_info> layers;
  std::vector<any_layer<T, Device>*> slots;  ///< not owned

 private:
  // Adds a layer, if it has weights or factors.
  void add(const std::string& name, any_layer<T, Device>& slot, layer_place place) {
    const layer_weights<parameter_t<T>> weights = slot.weights(name);
    std::vector<matrix_group> groups = groups_of(weights);
    if (groups.empty() && slot.ranks().empty()) return;
    layers.push_back({name, std::move(groups), place, weights.convolution});
    slots.push_back(&slot);
  }

  int shortcuts_ = 0;
};

/// Returns the slot_finder after its visit of `net`: the layers that have weights or factors.
template <class Net>
auto find_slots(Net& net) {
  slot_finder<typename Net::value_type, typename Net::device_type> found;
  net.visit_layers(found);
  return found;
}

}  // namespace detail

/// Number of a layer, as counted by factorize_policy::first_layer.
struct layer_number {
  std::string name;    ///< name of the layer in the network
  index_t number = 0;  ///< 1, 2, ... in execution order; 0 for a shortcut or an embedding
  friend bool operator==(const layer_number&, const layer_number&) = default;
};

/// The layers that have a weight matrix, or the factors of one, in execution order, with the numbers to which
/// factorize_policy::first_layer refers.
template <class Root, class Device>
std::vector<layer_number> numbered_layers(const model<Root, Device>& net) {
  const auto found = detail::find_slots(net);
  const std::vector<index_t> numbers = number_layers(found.layers);
  std::vector<layer_number> result;
  for (std::size_t i = 0; i < numbers.size(); ++i) result.push_back({found.layers[i].name, numbers[i]});
  return result;
}

/// The low-rank layers that a network has now, with their ranks (one for each rank group), in execution
/// order.
template <class Root, class Device>
std::vector<layer_rank> low_rank_layers(const model<Root, Device>& net) {
  const auto found = detail::find_slots(net);
  std::vector<layer_rank> result;
  for (std::size_t i = 0; i < found.slots.size(); ++i) {
    rank_list ranks = found.slots[i]->ranks();
    if (!ranks.empty()) result.push_back({found.layers[i].name, std::move(ranks)});
  }
  return result;
}

PUFFERFISH_NAMESPACE_END
