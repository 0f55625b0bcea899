// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::factorize`: the layers of a tree of libtorch modules from dense to low rank, in place.

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include <pufferfish/adapters/torch/from_dense.hpp>
#include <pufferfish/adapters/torch/slot.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {

/// A layer that stayed dense though the policy wanted it, and why.
struct kept_layer {
  std::string name;
  std::string reason;
};

/// What factorize did to a module.
struct factorization : pufferfish::factorization {
  /// Every layer that the policy wanted and that stayed dense; `kept_dense` names those that would have
  /// grown.
  std::vector<kept_layer> kept;
  /// The module's parameters as they are now, for a new optimizer: an old one holds tensors that are gone.
  std::vector<Tensor> parameters;
};

namespace detail {

/// The matrices of a layer by rank group, from its options alone: nothing of it is read.
inline std::vector<matrix_group> groups_of(const torch::nn::LinearImpl& m) {
  return {{{m.options.out_features(), m.options.in_features()}, 1}};
}
inline std::vector<matrix_group> groups_of(const torch::nn::Conv2dImpl& m) {
  const conv_shape shape = shape_of(m.options, describe(m));
  return {{{shape.out_channels, shape.patch()}, 1}};
}
inline std::vector<matrix_group> groups_of(const torch::nn::LSTMImpl& m) {
  std::vector<matrix_group> all;
  for (std::int64_t l = 0; l < m.options.num_layers(); ++l) {
    const std::int64_t in = l == 0 ? m.options.input_size() : m.options.hidden_size();
    all.push_back({{m.options.hidden_size(), in}, 4});
    all.push_back({{m.options.hidden_size(), m.options.hidden_size()}, 4});
  }
  return all;
}

/// A place in a tree where a layer is, and how another comes there.
struct layer_place {
  std::string name;
  std::shared_ptr<torch::nn::Module> layer;  ///< a dense or a low-rank one
  std::function<void(const std::shared_ptr<torch::nn::Module>&)> put;
  std::string obstacle;  ///< why nothing else can be put there; empty: it can
};

/// Exactly this type: a class derived from libtorch's layer may compute something else.
template <class Module>
const Module* exactly(const torch::nn::Module& m) {
  return typeid(m) == typeid(Module) ? dynamic_cast<const Module*>(&m) : nullptr;
}
inline bool is_dense_layer(const torch::nn::Module& m) {
  return exactly<torch::nn::LinearImpl>(m) != nullptr || exactly<torch::nn::Conv2dImpl>(m) != nullptr ||
         exactly<torch::nn::LSTMImpl>(m) != nullptr;
}
inline bool is_low_rank_layer(const torch::nn::Module& m) {
  return exactly<LowRankLinearImpl>(m) != nullptr || exactly<LowRankConv2dImpl>(m) != nullptr ||
         exactly<LowRankLSTMImpl>(m) != nullptr;
}

/// call(layer) with the layer's own type.
template <class F>
auto with_dense_layer(const torch::nn::Module& m, F&& call) {
  if (const auto* linear = exactly<torch::nn::LinearImpl>(m)) return call(*linear);
  if (const auto* conv = exactly<torch::nn::Conv2dImpl>(m)) return call(*conv);
  return call(dynamic_cast<const torch::nn::LSTMImpl&>(m));
}

inline torch::nn::AnyModule any_module(const std::shared_ptr<torch::nn::Module>& m) {
  if (auto linear = std::dynamic_pointer_cast<LowRankLinearImpl>(m)) return torch::nn::AnyModule(linear);
  if (auto conv = std::dynamic_pointer_cast<LowRankConv2dImpl>(m)) return torch::nn::AnyModule(conv);
  return torch::nn::AnyModule(std::dynamic_pointer_cast<LowRankLSTMImpl>(m));
}

/// Collects the places of a tree in the order of registration, which is that of execution in most programs.
class place_finder {
 public:
  explicit place_finder(torch::nn::Module& root) {
    // Without the root, which need not be in a shared_ptr. A slot's tensors are its layer's.
    std::set<const torch::nn::Module*> seen{&root};
    count_owner(root);
    for (const auto& module : root.modules(/*include_self=*/false)) {
      if (seen.insert(module.get()).second) count_owner(*module);
    }
    walk(root, "");
  }

  std::vector<layer_place> places;

 private:
  void count_owner(const torch::nn::Module& module) {
    for (const Tensor& t : module.parameters(false)) ++owners_[t.unsafeGetTensorImpl()];
  }

  void walk(torch::nn::Module& parent, const std::string& prefix) {
    std::size_t index = 0;
    for (const auto& child : parent.named_children()) {
      visit(parent, child.key(), child.value(), prefix + child.key(), index++);
    }
  }

  void visit(torch::nn::Module& parent, const std::string& key,
             const std::shared_ptr<torch::nn::Module>& child, const std::string& name, std::size_t index) {
    if (auto slot = std::dynamic_pointer_cast<slot_base>(child)) {
      places.push_back({name, slot->held(), [slot](const auto& layer) { slot->put(layer); },
                        shared_obstacle(*slot->held())});
    } else if (is_low_rank_layer(*child)) {
      places.push_back({name, child, {}, "it is low-rank already"});
    } else if (is_dense_layer(*child)) {
      places.push_back(place_in(parent, key, child, name, index));
    } else if (child->as<torch::nn::MultiheadAttentionImpl>() != nullptr) {
      places.push_back({name,
                        child,
                        {},
                        "torch::nn::MultiheadAttention reads its matrices itself: factors of them come from "
                        "svd_factorize"});
    } else {
      walk(*child, name + ".");
    }
  }

  layer_place place_in(torch::nn::Module& parent, const std::string& key,
                       const std::shared_ptr<torch::nn::Module>& child, const std::string& name,
                       std::size_t index) const {
    const auto at = static_cast<std::ptrdiff_t>(index);
    layer_place place{name, child, {}, shared_obstacle(*child)};
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
      // The parent's table, our copy of that, and the place; whoever else holds it will go on using the dense
      // layer.
      if (child.use_count() > 3 && place.obstacle.empty()) place.obstacle = held_elsewhere;
    }
    return place;
  }

  std::string shared_obstacle(const torch::nn::Module& layer) const {
    for (const Tensor& t : layer.parameters(false)) {
      const auto found = owners_.find(t.unsafeGetTensorImpl());
      if (found != owners_.end() && found->second > 1) return "another module has one of its tensors, too";
    }
    return {};
  }

 public:
  static constexpr const char* held_elsewhere =
      "a member of another type than a slot holds it: declare that as pufferfish::host_torch::Linear, Conv2d "
      "or LSTM, or put the layer in a torch::nn::Sequential";

 private:
  std::map<const void*, int> owners_;
};

/// A chosen place, and what becomes of it: nothing if it would grow.
struct place_factorization {
  layer_place* place;
  decomposition made;
  bool grows = false;

  void run(const factorize_policy& policy) {
    with_dense_layer(*place->layer, [&](const auto& dense) {
      const auto groups = groups_of(dense);
      // A layer whose largest matrix cannot shrink does not.
      const bool hopeless = std::all_of(groups.begin(), groups.end(), [](const matrix_group& group) {
        return largest_shrinking_rank(group.size.rows, group.size.cols) < 1;
      });
      grows = policy.keep_dense_if_larger && hopeless;
      if (grows) return;
      factorize_options options;
      options.name = place->name;
      options.method = policy.method;
      options.seed = policy.seed;
      options.allow_growth = policy.keep_dense_if_larger;
      made = decompose(dense, policy.rank, options);
      index_t before = 0, after = 0;
      for (const factor_report& report : made.reports) {
        before += report.parameters_before;
        after += report.parameters_after;
      }
      grows = policy.keep_dense_if_larger && after >= before;
    });
  }
};

/// The places that the policy wants factorized; what has an obstacle goes to `kept`.
inline std::vector<place_factorization> chosen_places(std::vector<layer_place>& places,
                                                      const factorize_policy& policy,
                                                      std::vector<kept_layer>& kept) {
  std::vector<place_factorization> work;
  const auto last = static_cast<index_t>(places.size());
  pufferfish::detail::check_first_layer("host_torch::factorize: first_layer", policy.first_layer, last);
  for (index_t number = 1; number <= last; ++number) {
    layer_place& place = places[static_cast<std::size_t>(number - 1)];
    if (number < policy.first_layer || (policy.last_layer_dense && number == last)) continue;
    if (is_low_rank_layer(*place.layer)) continue;
    if (is_dense_layer(*place.layer)) {
      try {
        const auto groups = with_dense_layer(*place.layer, [](const auto& dense) {
          check_supported(dense);
          return groups_of(dense);
        });
        if (policy.also_if && !policy.also_if(place.name, groups.front().size)) continue;
      } catch (const value_error& e) {
        place.obstacle = e.what();
      }
    }
    if (!place.obstacle.empty()) {
      kept.push_back({place.name, place.obstacle});
    } else {
      work.push_back({&place, {}});
    }
  }
  return work;
}

/// A module's parameters, those of layers that are in two places once.
inline std::vector<Tensor> parameters_of(const torch::nn::Module& m) {
  std::vector<Tensor> found;
  std::set<const void*> seen;
  for (const Tensor& t : m.parameters()) {
    if (seen.insert(t.unsafeGetTensorImpl()).second) found.push_back(t);
  }
  return found;
}
inline index_t parameter_count(const torch::nn::Module& m) {
  index_t count = 0;
  for (const Tensor& t : parameters_of(m)) count += t.numel();
  return count;
}

}  // namespace detail

/// Replaces the Linear, Conv2d and LSTM layers below `root` that `policy` chooses by low-rank ones, in place:
/// in Sequential, ModuleList and ModuleDict, in slots (slot.hpp), and wherever else only the tree itself
/// holds them. Layers are numbered in the order of registration, those that are low-rank already included;
/// policy rules about shortcuts have no meaning here: libtorch's modules do not say what is one (use
/// also_if).
///
///     auto report = host_torch::factorize(*net);
///     torch::optim::SGD optimizer(report.parameters, 0.1);
///
/// Names, devices, scalars, requires_grad and the training mode stay. What the policy wants and cannot be is
/// in `kept` with its reason: a layer that a typed member holds, one that would grow, that has groups or two
/// directions, that shares a tensor with another module, MultiheadAttention.
///
/// Throws value_error for a weight that is not finite and for a first_layer beyond the last one, rank_error
/// where the policy says so, and state_error if everything that it wants is held by typed members. The module
/// is unchanged if anything is thrown.
inline factorization factorize(torch::nn::Module& root, const factorize_policy& policy = {}) {
  const detail::keep_random_state keep;
  factorization result;
  result.parameters_before = detail::parameter_count(root);
  detail::place_finder finder(root);
  std::vector<detail::place_factorization> work = detail::chosen_places(finder.places, policy, result.kept);
  const auto held = std::find_if(result.kept.begin(), result.kept.end(), [](const kept_layer& k) {
    return k.reason == detail::place_finder::held_elsewhere;
  });
  if (work.empty() && held != result.kept.end()) {
    PUFFERFISH_THROW(
        state_error("host_torch::factorize: no layer can be replaced; " + held->name + ": " + held->reason));
  }
  std::vector<layer_info> chosen;
  for (const detail::place_factorization& one : work) {
    chosen.push_back({one.place->name, detail::with_dense_layer(*one.place->layer, [](const auto& dense) {
                        return detail::groups_of(dense);
                      })});
  }
  const std::vector<std::size_t> order = pufferfish::detail::decomposition_order(chosen);
  thread_pool(policy.threads).run(static_cast<index_t>(order.size()), [&](index_t task, int) {
    work[order[static_cast<std::size_t>(task)]].run(policy);
  });

  // A layer that is in two places is one layer there, too.
  std::map<const torch::nn::Module*, std::shared_ptr<torch::nn::Module>> made;
  for (detail::place_factorization& done : work) {
    const torch::nn::Module* dense = done.place->layer.get();
    if (done.grows) {
      result.kept_dense.push_back(done.place->name);
      result.kept.push_back({done.place->name, "no fewer parameters as factors"});
    } else if (made.find(dense) == made.end()) {
      made[dense] = done.made.build();
      made[dense]->train(dense->is_training());
      for (layer_rank& rank : done.made.ranks) result.low_rank.push_back(std::move(rank));
      for (factor_report& report : done.made.reports) result.layers.push_back(std::move(report));
    }
  }
  for (detail::place_factorization& done : work) {
    if (!done.grows) done.place->put(made[done.place->layer.get()]);
  }
  result.parameters_after = detail::parameter_count(root);
  result.parameters = detail::parameters_of(root);
  return result;
}

/// Gives an optimizer the parameters of a factorized module, and makes it forget what it remembers of the
/// ones before: for those with one group of parameters, whose options stay. Throws value_error for more of
/// them.
inline void renew(torch::optim::Optimizer& optimizer, const factorization& report) {
  if (optimizer.param_groups().size() != 1) {
    detail::throw_error<value_error>({"host_torch::renew: an optimizer of ", optimizer.param_groups().size(),
                                      " groups of parameters; make a new one of what is in the report"});
  }
  optimizer.param_groups()[0].params() = report.parameters;
  optimizer.state().clear();
}

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
