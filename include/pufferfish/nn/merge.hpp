// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `merge`: makes a network dense again by multiplying out the factors of its low-rank layers.

#include <cstddef>

#include <pufferfish/linalg/gemm/native_gemm.hpp>
#include <pufferfish/lowrank/factorization/layer_truncation.hpp>
#include <pufferfish/nn/slot_finder.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The dense layer with the same function as a low-rank layer: W = up down for each matrix, and the same
/// biases. The low-rank layer is not changed.
template <class T, class Device>
any_layer<T, Device> merged(any_layer<T, Device>& low_rank) {
  using P = parameter_t<T>;
  const low_rank_parts<P> parts = low_rank.low_rank();
  any_layer<T, Device> dense = low_rank.twin({});
  const layer_weights<P> weights = dense.weights({});
  stack_arena scratch;
  for (std::size_t i = 0; i < parts.factors.size(); ++i) {
    const factor_views<P>& one = parts.factors[i];
    const tensor<P, 2> down = unroll(one.down), up = unroll(one.up);
    tensor<P, 2> product({up.extent(0), down.extent(1)});
    native_gemm(scratch).multiply<P>(up, down, product.view());
    const tensor_view<P, 4> to = writable(weights.matrices[i].view);
    copy(tensor_view<const P, 4>(product.data(), to.shape()), to);
  }
  for (std::size_t i = 0; i < parts.biases.size(); ++i) {
    if (parts.biases[i].is_null()) continue;
    copy(tensor_view<const P, 1>(parts.biases[i]), writable(weights.biases[i].view));
  }
  return dense;
}

}  // namespace detail

/// Multiplies out the factors of every low-rank layer. The result is a dense network of the same function up
/// to rounding, for programs that support dense layers only. The network gets new arenas and a new generation
/// (model::generation): optimizers and exchanges of the old one throw state_error.
///
///     factorize(net, policy);
///     merge(net);                     // dense again, with matrices of low rank
template <class Root, class Device>
void merge(model<Root, Device>& net) {
  using T = typename Root::value_type;
  net.modify([](Root& root) {
    detail::slot_finder<T, Device> found;
    root.visit_layers(found);
    for (any_layer<T, Device>* slot : found.slots) {
      if (!slot->ranks().empty()) *slot = detail::merged(*slot);
    }
  });
}

/// The device's form: <pufferfish/gpu.hpp>.
template <class Root>
void merge(model<Root, device::gpu>& net);

PUFFERFISH_NAMESPACE_END
