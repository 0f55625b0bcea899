// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::Linear`, `Conv2d`, `Embedding`, `LSTM` and `MultiheadAttention`: drop-in replacements for
/// libtorch's modules that factorize() can switch to low rank where a class holds them as typed members.
///
/// A member `torch::nn::Linear fc` is a pointer to one type of layer, so code outside the class cannot make
/// it point to a layer of another type. A low-rank layer registered under the member's name would be trained
/// while forward() still used the dense one. A slot is a type of member that may hold either:
///
///     struct Net : torch::nn::Module {
///       pufferfish::host_torch::Linear fc{nullptr};           // was: torch::nn::Linear fc{nullptr}
///       Net() { fc = register_module("fc", pufferfish::host_torch::Linear(784, 10)); }
///       torch::Tensor forward(torch::Tensor x) { return fc->forward(x); }
///     };
///
/// Layers in a torch::nn::Sequential, ModuleList or ModuleDict need no slots.

#include <memory>
#include <ostream>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include <pufferfish/adapters/torch/from_dense.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// The interface of a slot that factorize() uses. put() must not be called with a layer of another type.
class slot_base {
 public:
  slot_base() = default;
  slot_base(const slot_base&) = default;
  slot_base& operator=(const slot_base&) = default;
  virtual ~slot_base() = default;
  /// The layer in the slot.
  virtual std::shared_ptr<torch::nn::Module> held() const = 0;
  /// Replaces the layer by another one of the slot's types, dense or low-rank.
  virtual void put(const std::shared_ptr<torch::nn::Module>& layer) = 0;
};

/// Holds a dense or a low-rank layer, whose parameters and submodules are registered in the slot under their
/// own names: "fc.weight" before factorize(), "fc.down" and "fc.up" after. Exactly one of dense() and
/// low_rank() is not null.
template <class Derived, class Dense, class LowRank>
class slot : public torch::nn::Module, public slot_base {
 public:
  /// `args`: the arguments of the dense layer's constructor. The slot starts with a dense layer, initialized
  /// by libtorch.
  template <class... Args>
  requires std::is_constructible_v<Dense, Args...>
  explicit slot(Args&&... args) { put(std::make_shared<Dense>(std::forward<Args>(args)...)); }

  /// The dense layer in the slot; nullptr after factorize() has replaced it.
  std::shared_ptr<Dense> dense() const { return dense_; }
  /// The low-rank layer in the slot; nullptr if the slot holds a dense layer.
  std::shared_ptr<LowRank> low_rank() const { return low_rank_; }

  std::shared_ptr<torch::nn::Module> held() const override {
    if (low_rank_) return low_rank_;
    return dense_;
  }
  void put(const std::shared_ptr<torch::nn::Module>& layer) override {
    dense_ = std::dynamic_pointer_cast<Dense>(layer);
    low_rank_ = std::dynamic_pointer_cast<LowRank>(layer);
    parameters_.clear();
    for (const auto& child : named_children()) unregister_module(child.key());
    for (const auto& child : layer->named_children()) register_module(child.key(), child.value());
    for (const auto& p : layer->named_parameters(false)) {
      register_parameter(p.key(), p.value(), p.value().requires_grad());
    }
  }

  /// Sets the mode of the slot and of its layer.
  void train(bool on = true) override {
    torch::nn::Module::train(on);
    held()->train(on);
  }
  /// Reads the parameters of the layer that the slot holds now.
  void load(torch::serialize::InputArchive& archive) override { held()->load(archive); }
  void pretty_print(std::ostream& stream) const override { held()->pretty_print(stream); }

  /// Makes a deep copy of the slot, with a layer of the same type.
  std::shared_ptr<torch::nn::Module> clone(
      const torch::optional<torch::Device>& device = torch::nullopt) const override {
    auto copy = std::make_shared<Derived>(static_cast<const Derived&>(*this));
    copy->put(held()->clone(device));
    return copy;
  }

 private:
  // Called for the children of a module that is cloned; `other` is the original.
  void clone_(torch::nn::Module& other, const torch::optional<torch::Device>& device) override {
    put(dynamic_cast<Derived&>(other).held()->clone(device));
  }

  std::shared_ptr<Dense> dense_;
  std::shared_ptr<LowRank> low_rank_;
};

/// A slot, that is a module member that holds a dense layer until factorize() replaces it by a low-rank one,
/// for layers whose forward takes one tensor. forward(x) calls the layer that the slot holds.
template <class Dense, class LowRank>
class unary_slot final : public slot<unary_slot<Dense, LowRank>, Dense, LowRank> {
 public:
  using slot<unary_slot, Dense, LowRank>::slot;

  /// Calls the layer in the slot; shapes and errors are those of that layer.
  Tensor forward(const Tensor& x) {
    return this->low_rank() ? this->low_rank()->forward(x) : this->dense()->forward(x);
  }
};

}  // namespace detail

/// A slot that holds a torch::nn::Linear until factorize() replaces it by a LowRankLinear.
using LinearImpl = detail::unary_slot<torch::nn::LinearImpl, LowRankLinearImpl>;
TORCH_MODULE(Linear);
/// A slot that holds a torch::nn::Conv2d until factorize() replaces it by a LowRankConv2d.
using Conv2dImpl = detail::unary_slot<torch::nn::Conv2dImpl, LowRankConv2dImpl>;
TORCH_MODULE(Conv2d);
/// A slot that holds a torch::nn::Embedding until factorize() replaces it by a LowRankEmbedding.
using EmbeddingImpl = detail::unary_slot<torch::nn::EmbeddingImpl, LowRankEmbeddingImpl>;
TORCH_MODULE(Embedding);

/// A slot that holds a torch::nn::LSTM until factorize() replaces it by a LowRankLSTM. forward has the
/// arguments of both layers.
class LSTMImpl : public detail::slot<LSTMImpl, torch::nn::LSTMImpl, LowRankLSTMImpl> {
  using state = std::tuple<Tensor, Tensor>;

 public:
  using slot::slot;

  /// Calls the LSTM in the slot. x: [steps][batch][input]; returns y and the state (h, c) after the last
  /// step, as torch::nn::LSTM does.
  std::tuple<Tensor, state> forward(const Tensor& x, torch::optional<state> before = {}) {
    return low_rank() ? low_rank()->forward(x, before) : dense()->forward(x, before);
  }

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(torch::optional<std::tuple<Tensor, Tensor>>())})
};
TORCH_MODULE(LSTM);

/// A slot that holds a torch::nn::MultiheadAttention until factorize() replaces it by a
/// LowRankMultiheadAttention. forward has the arguments of both layers.
class MultiheadAttentionImpl : public detail::slot<MultiheadAttentionImpl, torch::nn::MultiheadAttentionImpl,
                                                   LowRankMultiheadAttentionImpl> {
 public:
  using slot::slot;

  /// Calls the attention in the slot. query, key, value: [steps][batch][embed_dim]; returns the output and
  /// the attention weights, as torch::nn::MultiheadAttention does.
  std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const Tensor& key_padding_mask = {}, bool need_weights = true,
                                     const Tensor& attn_mask = {}, bool average_attn_weights = true) {
    const auto run = [&](auto& layer) {
      return layer.forward(query, key, value, key_padding_mask, need_weights, attn_mask,
                           average_attn_weights);
    };
    return low_rank() ? run(*low_rank()) : run(*dense());
  }

 protected:
  FORWARD_HAS_DEFAULT_ARGS({3, torch::nn::AnyValue(Tensor())}, {4, torch::nn::AnyValue(true)},
                           {5, torch::nn::AnyValue(Tensor())}, {6, torch::nn::AnyValue(true)})
};
TORCH_MODULE(MultiheadAttention);

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
