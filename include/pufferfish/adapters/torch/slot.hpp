// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::Linear`, `Conv2d` and `LSTM`: drop-in replacements for libtorch's that factorize() can switch
/// to low rank where a class holds them as typed members.
///
/// A member `torch::nn::Linear fc` is a pointer to one type of layer: nobody outside can make it point to
/// another, and a low-rank layer registered in its place would be trained while forward() goes on using the
/// dense one. So the member's type must say that it may change:
///
///     struct Net : torch::nn::Module {
///       pufferfish::host_torch::Linear fc{nullptr};           // was: torch::nn::Linear fc{nullptr}
///       Net() { fc = register_module("fc", pufferfish::host_torch::Linear(784, 10)); }
///       torch::Tensor forward(torch::Tensor x) { return fc->forward(x); }
///     };
///
/// Layers in a torch::nn::Sequential, ModuleList or ModuleDict need no such thing.

#include <memory>
#include <ostream>
#include <string>
#include <tuple>

#include <pufferfish/adapters/torch/conv.hpp>
#include <pufferfish/adapters/torch/lstm.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// What factorize() sees of a slot.
class slot_base {
 public:
  slot_base() = default;
  slot_base(const slot_base&) = default;
  slot_base& operator=(const slot_base&) = default;
  virtual ~slot_base() = default;
  /// The layer that is in it now.
  virtual std::shared_ptr<torch::nn::Module> held() const = 0;
  /// Puts another one in: a dense or a low-rank one of the slot's types.
  virtual void put(const std::shared_ptr<torch::nn::Module>& layer) = 0;
};

/// Holds a dense or a low-rank layer, and shows that layer's parameters as its own, under their names: what
/// was "fc.weight" stays "fc.weight", and becomes "fc.down" and "fc.up".
template <class Derived, class Dense, class LowRank>
class slot : public torch::nn::Module, public slot_base {
 public:
  /// The layer in it; nullptr if it is of the other type.
  std::shared_ptr<Dense> dense() const { return dense_; }
  std::shared_ptr<LowRank> low_rank() const { return low_rank_; }

  std::shared_ptr<torch::nn::Module> held() const override {
    if (low_rank_) return low_rank_;
    return dense_;
  }
  void put(const std::shared_ptr<torch::nn::Module>& layer) override {
    dense_ = std::dynamic_pointer_cast<Dense>(layer);
    low_rank_ = std::dynamic_pointer_cast<LowRank>(layer);
    parameters_.clear();
    for (const auto& p : layer->named_parameters(false)) {
      register_parameter(p.key(), p.value(), p.value().requires_grad());
    }
  }

  void train(bool on = true) override {
    torch::nn::Module::train(on);
    held()->train(on);
  }
  void load(torch::serialize::InputArchive& archive) override { held()->load(archive); }
  void pretty_print(std::ostream& stream) const override { held()->pretty_print(stream); }

  std::shared_ptr<torch::nn::Module> clone(
      const torch::optional<torch::Device>& device = torch::nullopt) const override {
    auto copy = std::make_shared<Derived>(static_cast<const Derived&>(*this));
    copy->put(held()->clone(device));
    return copy;
  }

 protected:
  explicit slot(std::shared_ptr<Dense> layer) { put(layer); }

 private:
  // Called for the children of a module that is cloned; `other` is the original.
  void clone_(torch::nn::Module& other, const torch::optional<torch::Device>& device) override {
    put(dynamic_cast<Derived&>(other).held()->clone(device));
  }

  std::shared_ptr<Dense> dense_;
  std::shared_ptr<LowRank> low_rank_;
};

}  // namespace detail

/// torch::nn::Linear, until factorize() makes it a LowRankLinear.
class LinearImpl : public detail::slot<LinearImpl, torch::nn::LinearImpl, LowRankLinearImpl> {
 public:
  LinearImpl(std::int64_t in_features, std::int64_t out_features)
      : LinearImpl(torch::nn::LinearOptions(in_features, out_features)) {}
  explicit LinearImpl(const torch::nn::LinearOptions& options)
      : slot(std::make_shared<torch::nn::LinearImpl>(options)) {}

  Tensor forward(const Tensor& x) { return low_rank() ? low_rank()->forward(x) : dense()->forward(x); }
};
TORCH_MODULE(Linear);

/// torch::nn::Conv2d, until factorize() makes it a LowRankConv2d.
class Conv2dImpl : public detail::slot<Conv2dImpl, torch::nn::Conv2dImpl, LowRankConv2dImpl> {
 public:
  Conv2dImpl(std::int64_t in_channels, std::int64_t out_channels, torch::ExpandingArray<2> kernel_size)
      : Conv2dImpl(torch::nn::Conv2dOptions(in_channels, out_channels, kernel_size)) {}
  explicit Conv2dImpl(const torch::nn::Conv2dOptions& options)
      : slot(std::make_shared<torch::nn::Conv2dImpl>(options)) {}

  Tensor forward(const Tensor& x) { return low_rank() ? low_rank()->forward(x) : dense()->forward(x); }
};
TORCH_MODULE(Conv2d);

/// torch::nn::LSTM, until factorize() makes it a LowRankLSTM.
class LSTMImpl : public detail::slot<LSTMImpl, torch::nn::LSTMImpl, LowRankLSTMImpl> {
  using state = std::tuple<Tensor, Tensor>;

 public:
  LSTMImpl(std::int64_t input_size, std::int64_t hidden_size)
      : LSTMImpl(torch::nn::LSTMOptions(input_size, hidden_size)) {}
  explicit LSTMImpl(const torch::nn::LSTMOptions& options)
      : slot(std::make_shared<torch::nn::LSTMImpl>(options)) {}

  std::tuple<Tensor, state> forward(const Tensor& x, torch::optional<state> before = {}) {
    return low_rank() ? low_rank()->forward(x, before) : dense()->forward(x, before);
  }

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(torch::optional<std::tuple<Tensor, Tensor>>())})
};
TORCH_MODULE(LSTM);

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
