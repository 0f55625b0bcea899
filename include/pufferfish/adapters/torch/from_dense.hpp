// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::low_rank`: a low-rank module from a dense one, by its singular value decomposition.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <pufferfish/adapters/torch/conv.hpp>
#include <pufferfish/adapters/torch/lstm.hpp>
#include <pufferfish/nn/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// Puts libtorch's random numbers back where they were: modules draw numbers when they are made, which those
/// that are filled with factors do not need.
class keep_random_state {
 public:
  keep_random_state() : generator_(at::detail::getDefaultCPUGenerator()), state_(generator_.get_state()) {}
  ~keep_random_state() { generator_.set_state(state_); }
  keep_random_state(const keep_random_state&) = delete;
  keep_random_state& operator=(const keep_random_state&) = delete;

 private:
  at::Generator generator_;
  Tensor state_;
};

/// Gives a new module's parameter its values, and kind and requires_grad of the dense one it comes from.
inline void assign(Tensor& parameter, const Tensor& values, const Tensor& like) {
  parameter.set_data(kernel_ordered(values.detach().to(like.options().requires_grad(false))));
  parameter.set_requires_grad(like.requires_grad());
}
template <class T, std::size_t N>
void assign(Tensor& parameter, const tensor_view<const T, N>& values, const Tensor& like) {
  assign(parameter, parameter_from<T, N>(values, torch::TensorOptions(scalar_of<T>())), like);
}

/// The tensor whose kind stands for a layer's.
inline const Tensor& weight_of(const torch::nn::LinearImpl& m) { return m.weight; }
inline const Tensor& weight_of(const torch::nn::Conv2dImpl& m) { return m.weight; }
inline Tensor weight_of(const torch::nn::LSTMImpl& m) { return tensor_of(m, 0, 0); }

/// Whether a layer can have factors at all: throws value_error as layer_traits would.
inline void check_supported(const torch::nn::LinearImpl&) {}
inline void check_supported(const torch::nn::Conv2dImpl& m) { shape_of(m.options, describe(m)); }
inline void check_supported(const torch::nn::LSTMImpl& m) { tensors_of_layer(m); }

/// A dense layer's decomposition: what it says, and how the module is made of it.
struct decomposition {
  std::vector<factor_report> reports;
  std::vector<layer_rank> ranks;  ///< one; of an LSTM, one a layer
  std::function<std::shared_ptr<torch::nn::Module>()> build;
};

template <class T>
decomposition decompose_as(const torch::nn::LinearImpl& source, const torch::nn::LinearImpl& dense,
                           const rank_policy& policy, const factorize_options& options) {
  auto made = std::make_shared<factors<T>>(svd_factors(of<T>(source), policy, options).front());
  made->report.name = options.name;
  const auto build = [made, &dense] {
    LowRankLinear module(dense.options.in_features(), dense.options.out_features(), made->rank(),
                         dense.bias.defined());
    assign<T, 2>(module->down, made->down, dense.weight);
    assign<T, 2>(module->up, made->up, dense.weight);
    if (dense.bias.defined()) assign(module->bias, dense.bias.clone(), dense.bias);
    return module.ptr();
  };
  return {{made->report}, {{options.name, made->rank()}}, build};
}

template <class T>
decomposition decompose_as(const torch::nn::Conv2dImpl& source, const torch::nn::Conv2dImpl& dense,
                           const rank_policy& policy, const factorize_options& options) {
  auto made = std::make_shared<factors<T>>(svd_factors(of<T>(source), policy, options).front());
  made->report.name = options.name;
  const auto build = [made, &dense] {
    LowRankConv2d module(shape_of(dense.options, describe(dense)), made->rank(), dense.bias.defined());
    assign<T, 4>(module->down, made->down_oihw(), dense.weight);
    assign<T, 4>(module->up, made->up_oihw(), dense.weight);
    if (dense.bias.defined()) assign(module->bias, dense.bias.clone(), dense.bias);
    return module.ptr();
  };
  return {{made->report}, {{options.name, made->rank()}}, build};
}

/// The factors of a side's four gates, one below the other.
template <class T>
std::pair<Tensor, Tensor> stacked(const std::vector<factors<T>>& made, std::size_t first) {
  std::vector<Tensor> down, up;
  for (std::size_t i = first; i < first + 4; ++i) {
    down.push_back(parameter_from<T, 2>(made[i].down, torch::TensorOptions(scalar_of<T>())));
    up.push_back(parameter_from<T, 2>(made[i].up, torch::TensorOptions(scalar_of<T>())));
  }
  return {torch::cat(down), torch::cat(up)};
}

template <class T>
decomposition decompose_as(const torch::nn::LSTMImpl& source, const torch::nn::LSTMImpl& dense,
                           const rank_policy& policy, const factorize_options& options) {
  decomposition result;
  auto made = std::make_shared<std::vector<std::vector<factors<T>>>>();
  std::vector<lstm_ranks> ranks;
  for (std::int64_t l = 0; l < dense.options.num_layers(); ++l) {
    factorize_options own = options;
    if (dense.options.num_layers() > 1) own.name += ".l" + std::to_string(l);
    made->push_back(svd_factors(of<T>(source, l), policy, own));
    for (const factors<T>& one : made->back()) result.reports.push_back(one.report);
    ranks.push_back({made->back().front().rank(), made->back().back().rank()});
    result.ranks.push_back({own.name, ranks.back().input, ranks.back().hidden});
  }
  result.build = [made, ranks, &dense]() -> std::shared_ptr<torch::nn::Module> {
    LowRankLSTM module(dense.options, ranks);
    auto parameters = module->named_parameters();
    for (std::size_t l = 0; l < ranks.size(); ++l) {
      const auto at = static_cast<std::int64_t>(l);
      const std::string suffix = "_l" + std::to_string(l);
      for (const std::size_t side : {std::size_t{0}, std::size_t{1}}) {
        const std::string name = (side == 0 ? "weight_ih" : "weight_hh") + suffix;
        const auto [down, up] = stacked((*made)[l], 4 * side);
        assign(parameters[name + "_down"], down, tensor_of(dense, at, side));
        assign(parameters[name + "_up"], up, tensor_of(dense, at, side));
      }
      if (dense.options.bias()) {
        const Tensor both = tensor_of(dense, at, 2).detach() + tensor_of(dense, at, 3).detach();
        assign(parameters["bias" + suffix], both, tensor_of(dense, at, 2));
      }
    }
    return module.ptr();
  };
  return result;
}

/// The decomposition of a layer of any kind: in the precision of its weights, in float if we have no such.
/// `dense` must live until the module is built.
template <class Module>
decomposition decompose(const Module& dense, const rank_policy& policy, const factorize_options& options) {
  check_supported(dense);
  const Tensor weight = weight_of(dense);
  if (!is_ours(weight)) {
    const auto copy = std::dynamic_pointer_cast<Module>(dense.clone(torch::Device(torch::kCPU)));
    copy->to(torch::kFloat);
    return decompose_as<float>(*copy, dense, policy, options);
  }
  return weight.scalar_type() == torch::kFloat ? decompose_as<float>(dense, dense, policy, options)
                                               : decompose_as<double>(dense, dense, policy, options);
}

template <class Holder, class Module>
Holder low_rank(const Module& dense, const rank_policy& policy, factorize_options options,
                std::vector<factor_report>* reports) {
  const keep_random_state keep;
  if (options.name == factorize_options{}.name) options.name = describe(dense);
  decomposition made = decompose(dense, policy, options);
  auto module = std::dynamic_pointer_cast<typename Holder::ContainedType>(made.build());
  module->train(dense.is_training());
  if (reports != nullptr) *reports = std::move(made.reports);
  return Holder(std::move(module));
}

}  // namespace detail

/// A low-rank module from a dense one, whose rank `policy` chooses: up down is the best approximation of that
/// rank (factorize_matrix). Kind, device and requires_grad of the parameters and the training mode are the
/// dense module's; the two biases of an LSTM are added up, and no way leads back. `reports`, if given,
/// receives what became of each matrix.
///
///     auto conv = host_torch::low_rank(*dense_conv, rank_ratio{0.25});
///
/// Throws value_error for a layer that has no factors (groups, two directions, ...) or a weight that is not
/// finite, rank_error for an impossible rank or one that does not make the layer smaller (unless
/// options.allow_growth).
inline LowRankLinear low_rank(const torch::nn::LinearImpl& dense, const rank_policy& policy,
                              const factorize_options& options = {},
                              std::vector<factor_report>* reports = nullptr) {
  return detail::low_rank<LowRankLinear>(dense, policy, options, reports);
}
inline LowRankConv2d low_rank(const torch::nn::Conv2dImpl& dense, const rank_policy& policy,
                              const factorize_options& options = {},
                              std::vector<factor_report>* reports = nullptr) {
  return detail::low_rank<LowRankConv2d>(dense, policy, options, reports);
}
inline LowRankLSTM low_rank(const torch::nn::LSTMImpl& dense, const rank_policy& policy,
                            const factorize_options& options = {},
                            std::vector<factor_report>* reports = nullptr) {
  return detail::low_rank<LowRankLSTM>(dense, policy, options, reports);
}

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
