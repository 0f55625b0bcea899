// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `weight_plan` chooses the tensors of a weight file that are factorized. A file holds no description of the
/// network, so the choice follows from names, dtypes, shapes and a policy. factorize.hpp executes the plan.

#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <pufferfish/io/tensor_info.hpp>
#include <pufferfish/lowrank/rank.hpp>
#include <pufferfish/lowrank/selection.hpp>
#include <pufferfish/weights/policy.hpp>
#include <pufferfish/weights/tensor_names.hpp>

PUFFERFISH_NAMESPACE_BEGIN

namespace detail {

/// Returns the rank policy of one weight for a policy without a budget.
inline const rank_policy& rank_policy_of(const weight_policy& policy, const weight_decision& decision) {
  return decision.embedding && policy.embedding_rank ? *policy.embedding_rank : policy.rank;
}

/// Makes the plan of one list of tensors; operator() is called once. Each tensor first gets a reason to stay
/// dense for its own sake, or its matrices; then `select` applies the rules for layers; last, biases are
/// assigned to their weights. The tensors and the policy must outlive the object.
class weight_planner {
 public:
  /// `tensors` and `policy` must outlive the object.
  weight_planner(std::span<const weight_tensor> tensors, const weight_policy& policy)
      : tensors_(tensors), policy_(policy), decisions_(tensors.size()) {
    for (std::size_t i = 0; i < tensors.size(); ++i) by_name_.emplace(tensors[i].name, i);
  }

  /// Decides for each tensor, in the order of the list, whether and how it is factorized.
  std::vector<weight_decision> operator()() {
    for (std::size_t i = 0; i < tensors_.size(); ++i) decisions_[i].reason = look_at(i);
    apply_selection();
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const weight_decision& d = decisions_[i];
      if (d.factorize && !d.embedding && is_weight_name(tensors_[i].name)) claim_bias(i);
    }
    return std::move(decisions_);
  }

 private:
  // The tensor of this name, or nullptr.
  const weight_tensor* find(const std::string& name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : &tensors_[found->second];
  }
  bool includes(const std::string& name) const { return policy_.include && policy_.include(name); }

  // Whether a weight is an embedding, by its name or by the policy.
  bool is_embedding(const std::string& name) const {
    return looks_like_embedding(stem_of(name)) || (policy_.embedding && policy_.embedding(name));
  }
  // Whether the file has a tensor with the name of one of the factors already.
  bool names_taken(const std::string& name) const {
    return find(factor_name(name, "down")) != nullptr || find(factor_name(name, "up")) != nullptr;
  }

  /// Returns the reason why tensor i stays dense whatever its layer and rank are. Returns "" for a
  /// weight matrix; then rows, cols and parts of its decision are set.
  std::string look_at(std::size_t i) {
    const weight_tensor& tensor = tensors_[i];
    weight_decision& d = decisions_[i];
    const std::string_view stem = stem_of(tensor.name);
    const std::string_view last = last_of(tensor.name);
    const auto [side, layer] = recurrent_name(last);
    const std::size_t rank = tensor.shape.size();
    if (!is_floating(tensor.dtype)) return "dtype " + std::string(to_string(tensor.dtype));
    if (rank < 2) return std::to_string(rank) + (rank == 1 ? " dimension" : " dimensions");
    if (!side.empty()) return look_at_gates(d, tensor, stem, layer);
    if (last == packed_projections) return look_at_projections(d, tensor);
    if (!is_weight_name(tensor.name)) return "not a weight";
    if (rank != 2 && rank != 4) return std::to_string(rank) + " dimensions";
    if (is_factor(tensor.name)) return "a factor already";
    d.embedding = rank == 2 && is_embedding(tensor.name);
    if (d.embedding && policy_.embeddings_dense && !includes(tensor.name)) return "an embedding";
    if (rank == 4) d.parts = groups_of(tensor);
    if (rank == 4 && tensor.shape[1] == 1) return "depthwise, or of one channel";
    if (names_taken(tensor.name)) return "its factors' names are taken";
    d.rows = tensor.shape[0] / d.parts;
    d.cols = 1;
    for (std::size_t k = 1; k < rank; ++k) d.cols *= tensor.shape[k];
    return "";
  }

  /// Number of groups of a convolution, by the policy. Throws value_error, naming the tensor, unless it is at
  /// least 1 and divides the output channels.
  index_t groups_of(const weight_tensor& tensor) const {
    const index_t groups = policy_.groups ? policy_.groups(tensor.name) : 1;
    if (groups < 1 || tensor.shape[0] % groups != 0) {
      throw_error<value_error>({"weight_plan: ", tensor.name, ": ", tensor.shape[0],
                                " output channels cannot be divided into ", groups, " groups"});
    }
    return groups;
  }

  /// Does the work of look_at for the packed weights of query, key and value, [model][model] each.
  std::string look_at_projections(weight_decision& d, const weight_tensor& tensor) const {
    if (policy_.projections_dense) return "packed projections";
    if (tensor.shape.size() != 2 || tensor.shape[0] != 3 * tensor.shape[1]) {
      return "packed projections of an unknown kind";
    }
    if (names_taken(tensor.name)) return "its factors' names are taken";
    d.parts = 3;
    d.rows = d.cols = tensor.shape[1];
    return "";
  }

  /// Does the work of look_at for a packed recurrent weight. The number of gates follows from the hidden
  /// side, [gates * h][h].
  std::string look_at_gates(weight_decision& d, const weight_tensor& tensor, std::string_view stem,
                            std::string_view layer) const {
    const weight_tensor* hidden = find(joined(stem, "weight_hh" + std::string(layer)));
    if (tensor.shape.size() != 2 || hidden == nullptr || hidden->shape.size() != 2) {
      return "a recurrent weight without its other side";
    }
    const index_t rows = hidden->shape[0], cols = hidden->shape[1];
    // A projection hides the ratio rows / cols, but only LSTMs, which have 4 gates, have projections.
    const bool projected = find(joined(stem, "weight_hr" + std::string(layer))) != nullptr;
    const index_t gates = projected ? 4 : cols > 0 && rows % cols == 0 ? rows / cols : 0;
    if ((gates != 1 && gates != 3 && gates != 4) || tensor.shape[0] != rows || rows % gates != 0) {
      return "a recurrent weight of an unknown kind";
    }
    d.parts = gates;
    d.rows = rows / gates;
    d.cols = tensor.shape[1];
    return "";
  }

  /// True for one of the two factors X.down.weight and X.up.weight of a layer X if the file has both. Such
  /// factors are copied unchanged, so that the output of factorize_weights may be its input again.
  bool is_factor(const std::string& name) const {
    const std::string_view stem = stem_of(name);
    const bool down = stem == "down" || stem.ends_with(".down"), up = stem == "up" || stem.ends_with(".up");
    if (!down && !up) return false;
    const std::string_view outer = stem_of(stem);
    return find(joined(joined(outer, down ? "up" : "down"), "weight")) != nullptr;
  }

  /// Key of the layer that a weight belongs to: its name without the last component. Both sides of a
  /// recurrent layer are one layer.
  static std::string layer_key(const std::string& name) {
    const std::string_view stem = stem_of(name);
    const std::string_view last = last_of(name);
    if (last == packed_projections) return joined(stem, "in_proj");
    const auto [side, layer] = recurrent_name(last);
    return side.empty() ? std::string(stem) : joined(stem, "rnn" + std::string(layer));
  }

  /// Keys of the layers of the main path in the order that the names suggest.
  std::vector<std::string> ordered_layers() const {
    struct key {
      int end;
      std::string name;
    };
    std::vector<key> keys;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      if (!decisions_[i].reason.empty() || decisions_[i].embedding) continue;
      std::string name = layer_key(tensors_[i].name);
      keys.push_back({end_of_network(name), std::move(name)});
    }
    std::sort(keys.begin(), keys.end(), [](const key& a, const key& b) {
      if (a.end != b.end) return a.end < b.end;
      if (natural_less(a.name, b.name) != natural_less(b.name, a.name)) return natural_less(a.name, b.name);
      return a.name < b.name;
    });
    std::vector<std::string> names;
    for (key& k : keys) {
      if (names.empty() || names.back() != k.name) names.push_back(std::move(k.name));
    }
    return names;
  }

  /// Whether `select` can choose a rank for the weight's matrices. An empty matrix has no rank, and
  /// a fixed rank that does not make the matrices smaller may exceed their sizes.
  bool has_choice(const weight_decision& d) const {
    const auto* fixed = policy_.budget == 0 ? std::get_if<fixed_rank>(&rank_policy_of(policy_, d)) : nullptr;
    return d.rows > 0 && d.cols > 0 &&
           (fixed == nullptr || fixed->rank <= largest_shrinking_rank(d.rows, d.cols));
  }

  /// Applies the selection rules that files share with networks. A layer of the file becomes a
  /// layer_info, and each weight of the layer becomes one of its rank groups.
  void apply_selection() {
    std::vector<layer_info> layers;
    std::map<std::string, std::size_t> index;
    for (std::string& name : ordered_layers()) {
      index.emplace(name, layers.size());
      layers.push_back({std::move(name), {}, layer_place::path});
    }
    constexpr std::size_t none = weight_decision::npos;
    std::vector<std::size_t> layer_of(tensors_.size(), none), group_of(tensors_.size(), none);
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const weight_decision& d = decisions_[i];
      if (!d.reason.empty()) continue;
      layer_of[i] = d.embedding ? layers.size() : index.at(layer_key(tensors_[i].name));
      if (d.embedding) layers.push_back({tensors_[i].name, {}, layer_place::embedding});
      if (!has_choice(d)) continue;
      std::vector<matrix_group>& groups = layers[layer_of[i]].groups;
      group_of[i] = groups.size();
      groups.push_back({{d.rows, d.cols}, d.parts});
    }
    factorize_policy rules;
    rules.first_layer = policy_.keep_first + 1;
    rules.last_layer_dense = policy_.keep_last;
    rules.embeddings_dense = false;  // embeddings that stay dense already have a reason
    rules.embedding_rank = policy_.embedding_rank;
    // With a budget, ranks follow from the singular values, as under a policy of energy.
    rules.rank = policy_.budget > 0 ? rank_policy(energy_kept{1.0}) : policy_.rank;
    const std::vector<layer_choice> choices =
        select(layers, rules, "weight_plan with first_layer = keep_first + 1");
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      if (layer_of[i] != none) take_choice(i, choices[layer_of[i]], group_of[i]);
    }
  }

  /// Applies the choice of `select` to weight i. Whether factors are smaller is tested for each weight,
  /// because a recurrent layer may have factors on one side only.
  void take_choice(std::size_t i, const layer_choice& choice, std::size_t group) {
    weight_decision& d = decisions_[i];
    const std::string& name = tensors_[i].name;
    d.layer = choice.number;
    const index_t wanted = group == weight_decision::npos || choice.ranks.empty() ? 1 : choice.ranks[group];
    if (choice.reason == dense_because::first_layers) {
      d.reason = policy_.keep_first == 1 ? "the first layer" : "among the first layers";
    } else if (choice.reason == dense_because::last_layer) {
      d.reason = "the last layer";
    } else if (policy_.exclude && policy_.exclude(name)) {
      d.reason = "excluded";
    } else if (policy_.include && !policy_.include(name)) {
      d.reason = "not included";
    } else if (group == weight_decision::npos || wanted > largest_shrinking_rank(d.rows, d.cols)) {
      d.reason = "factors would not be smaller";
    }
    d.factorize = d.reason.empty();
  }

  /// Assigns NAME.bias to the factorized NAME.weight, so that it can be renamed to NAME.up.bias. The weight
  /// stays dense if the bias has another length or the new name is taken.
  void claim_bias(std::size_t weight) {
    const std::string_view stem = stem_of(tensors_[weight].name);
    const auto bias = by_name_.find(joined(stem, "bias"));
    if (bias == by_name_.end()) return;
    const std::vector<index_t>& shape = tensors_[bias->second].shape;
    const bool fits = shape.size() == 1 && shape[0] == decisions_[weight].parts * decisions_[weight].rows;
    if (fits && find(joined(joined(stem, "up"), "bias")) == nullptr) {
      decisions_[bias->second].bias_of = weight;
      return;
    }
    decisions_[weight].factorize = false;
    decisions_[weight].reason = "its bias does not fit";
  }

  std::span<const weight_tensor> tensors_;
  const weight_policy& policy_;
  std::vector<weight_decision> decisions_;
  std::map<std::string, std::size_t> by_name_;
};

}  // namespace detail

/// Decides for each tensor of a file whether and how it is factorized; results are in the order of `tensors`.
///
/// Weight matrices are tensors of F32, F64, F16 or BF16 with one of these names:
///   NAME.weight [out][in]                        linear layer: one matrix
///   NAME.weight [out][in / g][height][width]     convolution of g groups: g matrices
///   NAME.weight_ih*, NAME.weight_hh*             recurrent layer as PyTorch names it: one matrix per gate
///   NAME.weight [vocabulary][width]              embedding, recognized by its name or policy.embedding
///   NAME.in_proj_weight [3 model][model]         attention: the matrices of query, key and value
/// Embeddings and packed projections are factorized only if the policy says so. All other tensors stay:
/// biases, norms, buffers, depthwise convolutions, and matrices whose factors would not be smaller. A file
/// does not record whether a convolution has groups (policy.groups returns them) or is transposed
/// (policy.exclude must return true for it).
///
/// A file does not record the order of its layers either. Layers are sorted by name, with numbers compared as
/// numbers, except that conv1, stem, patch_embed and similar names come first, and fc, classifier, head,
/// lm_head and similar names last. Embeddings are not counted as layers. A table that is tied to an output
/// layer in the network, but stored under a second name in the file, counts as two weights, which are decided
/// independently.
///
/// Factors of a rows x cols matrix at rank r have r (rows + cols) elements and are smaller if r is at most
/// largest_shrinking_rank(rows, cols). With energy_kept or a budget, ranks need the values of the weights:
/// the plan then only says which weights are candidates, and factorize_weights decides. No values are read
/// here.
///
/// Throws value_error for a negative budget, keep_first or parameters_elsewhere; for a keep_first above 1
/// that is not below the number of layers; for a number of groups that is below 1 or does not divide the
/// output channels; for a budget together with embedding_rank; and the errors of choose_rank for a ratio or
/// fraction outside (0, 1]. Throws rank_error for a fixed rank below 1. Exceptions of the policy's functions
/// are passed on.
///
/// \code
/// std::vector<weight_tensor> tensors{{"conv1.weight", tensor_dtype::f32, {64, 3, 7, 7}},
///                                    {"layer1.conv2.weight", tensor_dtype::f32, {64, 64, 3, 3}},
///                                    {"fc.weight", tensor_dtype::f32, {10, 64}}};
/// const std::vector<weight_decision> plan = weight_plan(tensors, weight_policy{});
/// // plan[1].factorize: one matrix of 64 x 576; the first and the last layer stay dense
/// \endcode
inline std::vector<weight_decision> weight_plan(std::span<const weight_tensor> tensors,
                                                const weight_policy& policy) {
  if (policy.budget < 0 || policy.keep_first < 0) {
    detail::throw_error<value_error>({"weight_plan: budget ", policy.budget, ", keep_first ",
                                      policy.keep_first, "; neither may be negative"});
  }
  if (policy.parameters_elsewhere < 0) {
    detail::throw_error<value_error>(
        {"weight_plan: parameters_elsewhere ", policy.parameters_elsewhere, " is negative"});
  }
  if (policy.budget > 0 && policy.embedding_rank) {
    detail::throw_error<value_error>({"weight_plan: budget ", policy.budget, " and embedding_rank (",
                                      describe(*policy.embedding_rank),
                                      "): the budget chooses the ranks of embeddings, too; set one of both"});
  }
  return detail::weight_planner(tensors, policy)();
}

PUFFERFISH_NAMESPACE_END
