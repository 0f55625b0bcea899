// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Optional abilities that layers offer to their containers, so that a network makes fewer passes
/// over memory than it has layers, and a training step keeps less than all outputs. any_layer.hpp
/// lists the members by which a layer offers them.

#include <pufferfish/ops/elementwise/relu_mask.hpp>
#include <pufferfish/ops/norm/moments.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Abilities of a layer besides forward and backward.
/// A container reads them before each pass and may then call any_layer::forward_fused, backward_fused and
/// recompute. The defaults are those of a layer without optional members.
struct layer_abilities {
  /// A ReLU and nothing else. The layer is skipped if the layer before it `fuses`, i.e. applies the ReLU.
  bool is_relu = false;
  /// forward_fused and backward_masked: adds a tensor to its output and applies a ReLU in the same pass.
  bool fuses = false;
  /// forward_with_moments: collects mean and variance of its output's channels while the output is
  /// in the cache.
  bool gives_moments = false;
  /// Its forward_fused in training uses the moments of its input that the layer before has collected.
  bool takes_moments = false;
  /// backward_add: adds the gradient to dx instead of overwriting it.
  bool adds_gradient = false;
  /// y may be x in its forward pass, provided that no pass reads x later.
  bool output_in_place = false;
  /// dx may be dy in its backward pass.
  bool gradient_in_place = false;
  /// dx may be the x of the forward pass.
  bool gradient_over_input = false;
  /// Whether the layer's backward pass reads x, the input of the forward pass. A tensor that no backward pass
  /// reads is not kept.
  bool reads_input = true;
  /// Whether the layer's backward pass reads y, the output of the forward pass.
  bool reads_output = true;
  /// Its forward pass leaves a view of x on top of the tape, by which its backward pass finds x,
  /// and dx may be that x. A container may therefore move x in between and change the view.
  bool input_may_move = false;
  /// Whether the layer has recompute(), which writes the output of a forward pass a second time, so that it
  /// need not be kept until the backward pass.
  bool recomputes = false;
};

/// Data of a forward pass in training that recompute() needs. Valid until the backward pass of the layer.
/// `statistics` points to the tape (mean and inverse deviation of each channel in a batch norm); `x` is the
/// input of that pass, `relu` whether a ReLU followed in the same pass.
template <class T>
struct forward_record {
  tensor_view<const T, 4> x;
  const parameter_t<T>* statistics = nullptr;
  bool relu = false;
};

/// Operations added to the forward pass of a layer that `fuses`: y = relu(layer(x) + addend), each optional.
template <class T>
struct forward_fusion {
  tensor_view<const T, 4> addend;  ///< shaped as y, does not overlap y; a null view: none
  bool relu = false;
  ops::relu_mask<T> mask;  ///< receives which elements pass the ReLU, for the backward pass; null: not wanted
  const ops::moment_parts<T>* moments = nullptr;  ///< of x, if the layer before collected them
  forward_record<T>* record = nullptr;  ///< receives data for recompute(); nullptr: not wanted (`recomputes`)
};

/// Operations added to the backward pass of a layer.
template <class T>
struct backward_fusion {
  ops::relu_mask<T> mask;  ///< mask of the forward pass: dy is taken as 0 where the mask blocks it (`fuses`)
  bool add = false;        ///< dx += instead of dx = (`adds_gradient`)
};

PUFFERFISH_NAMESPACE_END
