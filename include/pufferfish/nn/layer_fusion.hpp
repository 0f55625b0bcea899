// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// What layers may offer to the containers that hold them, so that a network makes fewer passes over memory
/// than it has layers. All of it is optional: any_layer.hpp lists the members that a layer offers it by.

#include <pufferfish/ops/moments.hpp>
#include <pufferfish/ops/relu_mask.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// What a layer can do beside forward and backward.
struct layer_abilities {
  /// It is a ReLU and nothing else: a layer before it that `fuses` does its work, and it is skipped.
  bool is_relu = false;
  /// forward_fused and backward_masked: adds something to its output and cuts it off at zero on the way.
  bool fuses = false;
  /// forward_with_moments: collects mean and variance of its output's channels while it has them in the
  /// cache.
  bool gives_moments = false;
  /// Its forward_fused in training takes the moments of its input from the layer before.
  bool takes_moments = false;
  /// backward_add: adds the gradient to dx instead of overwriting it.
  bool adds_gradient = false;
  /// dx may be dy in its backward pass.
  bool gradient_in_place = false;
};

/// What a layer that `fuses` does in its forward pass: y = relu(layer(x) + addend), each where wanted.
template <class T>
struct forward_fusion {
  tensor_view<const T, 4> addend;  ///< shaped as y, which overlaps it not at all; a null view: none
  bool relu = false;
  ops::relu_mask<T> mask;  ///< gets what passes the ReLU, for the backward pass; null: not wanted
  const ops::moment_parts<T>* moments = nullptr;  ///< of x, if the layer before gave them
};

/// What a layer does in its backward pass beside its own gradient.
template <class T>
struct backward_fusion {
  ops::relu_mask<T> mask;  ///< the one of the forward pass: dy counts as 0 where it does not pass (`fuses`)
  bool add = false;        ///< dx += instead of dx = (`adds_gradient`)
};

PUFFERFISH_NAMESPACE_END
