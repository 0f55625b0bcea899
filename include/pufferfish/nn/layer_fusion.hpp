// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// What layers may offer to the containers that hold them, so that a network makes fewer passes over memory
/// than it has layers, and keeps less in a training step than all of their outputs. All of it is optional:
/// any_layer.hpp lists the members that a layer offers it by.

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
  /// y may be x in its forward pass, where no pass reads x later.
  bool output_in_place = false;
  /// dx may be dy in its backward pass.
  bool gradient_in_place = false;
  /// dx may be the x of the forward pass.
  bool gradient_over_input = false;
  /// Its backward pass reads x; y. What no layer reads is not kept.
  bool reads_input = true;
  bool reads_output = true;
  /// Its forward pass leaves a view of x on top of the tape, its backward pass finds x by that, and dx may be
  /// that x: a container may put x elsewhere in between and change the view.
  bool input_may_move = false;
  /// recompute(): writes the output of a forward pass again.
  bool recomputes = false;
};

/// What a layer that `recomputes` remembers of a forward pass in training. Good until its backward pass.
template <class T>
struct forward_record {
  tensor_view<const T, 4> x;
  const parameter_t<T>* statistics = nullptr;
  bool relu = false;
};

/// What a layer that `fuses` does in its forward pass: y = relu(layer(x) + addend), each where wanted.
template <class T>
struct forward_fusion {
  tensor_view<const T, 4> addend;  ///< shaped as y, which overlaps it not at all; a null view: none
  bool relu = false;
  ops::relu_mask<T> mask;  ///< gets what passes the ReLU, for the backward pass; null: not wanted
  const ops::moment_parts<T>* moments = nullptr;  ///< of x, if the layer before gave them
  forward_record<T>* record = nullptr;  ///< gets what recompute() needs; nullptr: not wanted (`recomputes`)
};

/// What a layer does in its backward pass beside its own gradient.
template <class T>
struct backward_fusion {
  ops::relu_mask<T> mask;  ///< the one of the forward pass: dy counts as 0 where it does not pass (`fuses`)
  bool add = false;        ///< dx += instead of dx = (`adds_gradient`)
};

PUFFERFISH_NAMESPACE_END
