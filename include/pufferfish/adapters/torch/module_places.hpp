// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the places of a tree of libtorch modules that hold a dense or a low-rank layer.

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include <pufferfish/adapters/torch/slot.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// A place in a tree that holds a layer, and the function that puts another layer there.
struct module_place {
  std::string name;                          ///< path in the tree, such as "layer1.0.conv1"
  std::shared_ptr<torch::nn::Module> layer;  ///< dense or low-rank
  /// Replaces the layer by a low-rank one of its kind. Empty for a layer that is low-rank already.
  std::function<void(const std::shared_ptr<torch::nn::Module>&)> put;
  std::string obstacle;  ///< why the layer cannot be replaced; empty: it can
};

/// Returns `m` as a Module if that is its exact type, else nullptr: a class derived from libtorch's may
/// compute another function.
template <class Module>
const Module* exactly(const torch::nn::Module& m) {
  return typeid(m) == typeid(Module) ? dynamic_cast<const Module*>(&m) : nullptr;
}
/// Whether a module is one of the adapter's low-rank layers.
inline bool is_low_rank_layer(const torch::nn::Module& m) {
  return any_kind([&]<class Kind>(Kind) { return exactly<typename Kind::low_rank>(m) != nullptr; });
}

/// Calls call(layer) with the layer's own type if the module is a dense layer. Returns whether it is one.
template <class Call>
bool with_dense_layer(const torch::nn::Module& m, Call&& call) {
  return any_kind([&]<class Kind>(Kind) {
    const auto* layer = exactly<typename Kind::dense>(m);
    if (layer != nullptr) call(*layer);
    return layer != nullptr;
  });
}
/// Whether a module is a layer that can be factorized, of exactly libtorch's type.
inline bool is_dense_layer(const torch::nn::Module& m) {
  return with_dense_layer(m, [](const auto&) {});
}

/// Wraps a low-rank layer as an element of a Sequential.
inline torch::nn::AnyModule any_module(const std::shared_ptr<torch::nn::Module>& m) {
  torch::nn::AnyModule made;
  any_kind([&]<class Kind>(Kind) {
    const auto layer = std::dynamic_pointer_cast<typename Kind::low_rank>(m);
    if (layer) made = torch::nn::AnyModule(layer);
    return layer != nullptr;
  });
  return made;
}

/// Collects the places of a tree in the order of registration, in most programs that of execution. A place is
/// a slot, a dense layer or a low-rank one; the finder does not descend into it. A layer has an obstacle if
/// another module has one of its tensors, or if it is neither in a container nor in a slot and something
/// outside of the tree points to it.
///
///     place_finder found(root);
///     for (module_place& place : found.places) {
///       if (place.obstacle.empty()) place.put(low_rank_twin);  // a new layer in the place of place.layer
///     }
class place_finder {
 public:
  /// Finds the places below `root`, which must outlive the object. The tree must not change meanwhile.
  explicit place_finder(torch::nn::Module& root) {
    // The root is counted separately: it need not be in a shared_ptr. A slot has its layer's parameters.
    std::set<const torch::nn::Module*> seen{&root};
    count_owner(root);
    for (const auto& module : root.modules(/*include_self=*/false)) {
      if (seen.insert(module.get()).second) count_owner(*module);
    }
    walk(root, "");
  }

  std::vector<module_place> places;  ///< the result

 private:
  // Counts the modules that have each tensor as a parameter of their own.
  void count_owner(const torch::nn::Module& module) {
    for (const Tensor& t : module.parameters(false)) ++owners_[t.unsafeGetTensorImpl()];
  }

  // Visits the children of a module.
  void walk(torch::nn::Module& parent, const std::string& prefix) {
    std::size_t index = 0;
    for (const auto& child : parent.named_children()) {
      visit(parent, child.key(), child.value(), prefix + child.key(), index++);
    }
  }

  // Adds a child that is a place, or walks into it.
  void visit(torch::nn::Module& parent, const std::string& key,
             const std::shared_ptr<torch::nn::Module>& child, const std::string& name, std::size_t index) {
    if (auto slot = std::dynamic_pointer_cast<slot_base>(child)) {
      places.push_back({name, slot->held(), [slot](const auto& layer) { slot->put(layer); },
                        shared_obstacle(*slot->held())});
    } else if (is_low_rank_layer(*child)) {
      places.push_back({name, child, {}, "it is low-rank already"});
    } else if (is_dense_layer(*child)) {
      places.push_back(place_in(parent, key, child, name, index));
    } else {
      walk(*child, name + ".");
    }
  }

  // Makes the place of a dense layer that no slot holds: an element of a container, or a child of a module.
  module_place place_in(torch::nn::Module& parent, const std::string& key,
                        const std::shared_ptr<torch::nn::Module>& child, const std::string& name,
                        std::size_t index) const {
    const auto at = static_cast<std::ptrdiff_t>(index);
    module_place place{name, child, {}, shared_obstacle(*child)};
    // A container may have other children than its elements.
    if (auto* sequential = parent.as<torch::nn::SequentialImpl>();
        sequential != nullptr && index < sequential->size() && sequential->ptr(index) == child) {
      place.put = [sequential, key, at](const std::shared_ptr<torch::nn::Module>& layer) {
        *(sequential->begin() + at) = any_module(layer);
        sequential->replace_module(key, layer);
      };
    } else if (auto* list = parent.as<torch::nn::ModuleListImpl>();
               list != nullptr && index < list->size() && list->ptr(index) == child) {
      place.put = [list, key, at](const std::shared_ptr<torch::nn::Module>& layer) {
        *(list->begin() + at) = layer;
        list->replace_module(key, layer);
      };
    } else if (auto* dict = parent.as<torch::nn::ModuleDictImpl>();
               dict != nullptr && dict->contains(key) && (*dict)[key] == child) {
      place.put = [dict, key](const std::shared_ptr<torch::nn::Module>& layer) {
        for (auto& item : *dict) {
          if (item.key() == key) item.value() = layer;
        }
        dict->replace_module(key, layer);
      };
    } else {
      torch::nn::Module* owner = &parent;
      place.put = [owner, key](const std::shared_ptr<torch::nn::Module>& layer) {
        owner->replace_module(key, layer);
      };
      // Three owners are expected: the parent's table, its copy here, and `place`. Any other owner would
      // still use the dense layer.
      if (child.use_count() > 3 && place.obstacle.empty()) place.obstacle = held_elsewhere;
    }
    return place;
  }

  // The obstacle of a layer of which another module has a tensor; else an empty text.
  std::string shared_obstacle(const torch::nn::Module& layer) const {
    for (const Tensor& t : layer.parameters()) {
      const auto found = owners_.find(t.unsafeGetTensorImpl());
      if (found != owners_.end() && found->second > 1) return "another module has one of its tensors, too";
    }
    return {};
  }

 public:
  /// Obstacle of a layer to which a typed member of the program refers.
  static constexpr const char* held_elsewhere =
      "a member of another type than a slot holds it: declare that as pufferfish::host_torch::Linear, "
      "Conv2d, "
      "Embedding, LSTM or MultiheadAttention, or put the layer in a torch::nn::Sequential";

 private:
  std::map<const void*, int> owners_;  // number of modules that have a tensor
};

}  // namespace detail
}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
