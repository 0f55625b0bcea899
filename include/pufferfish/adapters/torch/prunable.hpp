// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::prunable_weights`: chooses the weights of a libtorch module's convolutions and linear
/// matrices. Internal: `states_of`, the state that a libtorch optimizer keeps for a parameter.

#include <set>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include <pufferfish/adapters/torch/slot.hpp>
#include <pufferfish/prune/masked_tensor.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// Whether a module is one of these types or derived from one.
template <class... Layers>
bool is_any_of(const torch::nn::Module& m) {
  return ((dynamic_cast<const Layers*>(&m) != nullptr) || ...);
}

/// Whether the parameters with two or more dimensions of this layer are weights of convolutions or linear
/// matrices.
inline bool has_matrices(const torch::nn::Module& m) {
  return is_any_of<torch::nn::LinearImpl, torch::nn::BilinearImpl, torch::nn::Conv1dImpl,
                   torch::nn::Conv2dImpl, torch::nn::Conv3dImpl, torch::nn::ConvTranspose1dImpl,
                   torch::nn::ConvTranspose2dImpl, torch::nn::ConvTranspose3dImpl, torch::nn::RNNImpl,
                   torch::nn::GRUImpl, torch::nn::LSTMImpl, torch::nn::RNNCellImpl, torch::nn::GRUCellImpl,
                   torch::nn::LSTMCellImpl, torch::nn::MultiheadAttentionImpl, LowRankLinearImpl,
                   LowRankConv2dImpl, LowRankLSTMImpl>(m);
}

/// Classifies the tensors of a tree of modules by the kinds of their layers. A tensor is a weight if all
/// modules that have it are layers with matrices (has_matrices), it has two or more dimensions, and its name
/// does not begin with "bias".
class weight_finder {
 public:
  /// Finds the weights below `root`.
  explicit weight_finder(const torch::nn::Module& root) {
    walk(root);
    for (const auto& p : root.named_parameters()) {
      const void* const tensor = p.value().unsafeGetTensorImpl();
      if (matrices_.count(tensor) > 0 && others_.count(tensor) == 0) names.insert(p.key());
    }
  }

  std::set<std::string> names;  ///< of the weights, as in root.named_parameters()

 private:
  // Classifies the tensors of a module and of those below it. A slot stands for its layer.
  void walk(const torch::nn::Module& m) {
    const auto* const slot = dynamic_cast<const slot_base*>(&m);
    const bool has = has_matrices(slot != nullptr ? *slot->held() : m);
    for (const auto& p : m.named_parameters(/*recurse=*/false)) {
      const bool is_matrix = has && p.value().dim() >= 2 && p.key().rfind("bias", 0) != 0;
      (is_matrix ? matrices_ : others_).insert(p.value().unsafeGetTensorImpl());
    }
    for (const auto& child : m.named_children()) walk(*child.value());
  }

  std::set<const void*> matrices_, others_;
};

/// The key of a parameter in an optimizer's state: its address; before libtorch 2, as text.
template <class Key>
Key state_key(const Tensor& parameter) {
  if constexpr (std::is_same_v<Key, std::string>) {
    std::ostringstream text;
    text << parameter.unsafeGetTensorImpl();
    return text.str();
  } else {
    return parameter.unsafeGetTensorImpl();
  }
}

/// Returns an optimizer's tensors for a parameter, of its shape; none before the first step. A tensor that
/// the optimizer's options do not need is undefined. Throws value_error for the state of an optimizer other
/// than SGD, Adam, AdamW, RMSprop and Adagrad.
inline std::vector<Tensor> states_of(torch::optim::Optimizer& optimizer, const Tensor& parameter) {
  using key = std::remove_cvref_t<decltype(optimizer.state().begin()->first)>;
  const auto found = optimizer.state().find(state_key<key>(parameter));
  if (found == optimizer.state().end()) return {};
  const torch::optim::OptimizerParamState* const state = found->second.get();
  if (const auto* s = dynamic_cast<const torch::optim::SGDParamState*>(state)) return {s->momentum_buffer()};
  if (const auto* s = dynamic_cast<const torch::optim::AdamParamState*>(state)) {
    return {s->exp_avg(), s->exp_avg_sq(), s->max_exp_avg_sq()};
  }
  if (const auto* s = dynamic_cast<const torch::optim::AdamWParamState*>(state)) {
    return {s->exp_avg(), s->exp_avg_sq(), s->max_exp_avg_sq()};
  }
  if (const auto* s = dynamic_cast<const torch::optim::RMSpropParamState*>(state)) {
    return {s->square_avg(), s->momentum_buffer(), s->grad_avg()};
  }
  if (const auto* s = dynamic_cast<const torch::optim::AdagradParamState*>(state)) return {s->sum()};
  PUFFERFISH_THROW(
      value_error("host_torch::module_mask: the optimizer's state is of an unknown kind; known are those of "
                  "SGD, Adam, AdamW, RMSprop and Adagrad"));
}

}  // namespace detail

/// Returns the default choice of weights for masks of a module: those of linear, bilinear, (transposed)
/// convolutional, recurrent and attention layers, and the factors of low-rank layers. It excludes embeddings
/// (low-rank or not), normalizations, biases, parameters registered by the user's own classes, and a tensor
/// that is also an embedding's table (tied weights). Another choice by name:
///
///     module_mask pruned(*net, [all = prunable_weights(*net)](const coded_tensor& tensor) {
///       return all(tensor) && tensor.name != "head.weight";
///     });
///
/// The result holds the names of the module's tensors, not the module. Make a new choice after factorize().
inline prunable_choice prunable_weights(const torch::nn::Module& module) {
  return [names = detail::weight_finder(module).names](const coded_tensor& tensor) {
    return names.count(tensor.name) > 0;
  };
}

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
