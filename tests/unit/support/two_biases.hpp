// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <array>
#include <concepts>
#include <string>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/parameter.hpp>
#include <pufferfish/lowrank/layers/layer_storage.hpp>
#include <pufferfish/lowrank/traits.hpp>

namespace test {

using namespace pufferfish;

/// Rows to rows by a weight and the sum of two biases: a layer of another framework.
class TwoBiases {
 public:
  TwoBiases(index_t in, index_t out)
      : weight(logical_layout::matrix(out, in), parameter_role::weight),
        first(logical_layout::vector(out), parameter_role::bias),
        second(logical_layout::vector(out), parameter_role::bias) {}
  std::string describe() const { return "TwoBiases"; }
  index_t in_features() const { return weight.layout().shape[1]; }
  index_t out_features() const { return weight.layout().shape[0]; }
  void forward(cpu_context&, const tensor_view<const double, 2>&, const tensor_view<double, 2>&) const {}
  void backward(cpu_context&, const tensor_view<const double, 2>&, const tensor_view<double, 2>&) const {}
  template <class F>
  void visit(F&& f) {
    f("weight", weight);
    f("bias", first);
    f("more_bias", second);
  }
  parameter<double> weight, first, second;
};

/// The same layer, whose weight is no parameter of the network.
class Outside : public TwoBiases {
 public:
  using TwoBiases::TwoBiases;
  template <class F>
  void visit(F&& f) {
    f("bias", first);
  }
};

}  // namespace test

template <std::derived_from<test::TwoBiases> Layer>
struct pufferfish::layer_traits<Layer> {
  static constexpr auto kind = layer_kind::linear;
  static auto matrices(const Layer& layer) {
    return std::array{named_view<const double, 2>{"weight", detail::logical_matrix(layer.weight)}};
  }
  static auto biases(const Layer& layer) {
    using view = tensor_view<const double, 1>;
    const index_t out = layer.out_features();
    return std::array{named_view<const double, 1>{"first", view(layer.first.data(), {out})},
                      named_view<const double, 1>{"second", view(layer.second.data(), {out})}};
  }
};
