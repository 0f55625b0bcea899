// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Optional abilities that layers offer to their containers, so that a network makes fewer passes
/// over memory than it has layers, and a training step keeps less than all outputs. any_layer.hpp
/// lists the members by which a layer offers them.

#include <pufferfish/ops/elementwise/relu_mask.hpp>
#include <pufferfish/ops/norm/gradient_sums.hpp>
#include <pufferfish/ops/norm/moments.hpp>
#include <pufferfish/ops/norm/pending_norm.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Abilities of a layer besides forward and backward.
/// A container reads them before each pass and may then call any_layer::forward_fused, backward_fused and
/// recompute. The defaults are those of a layer without optional members.
struct layer_abilities {
  /// Whether the layer is only a ReLU. A container skips it if the layer before it fuses, i.e. applies the
  /// ReLU.
  bool is_relu = false;
  /// Whether the layer has forward_fused and backward_masked: its forward pass can add a tensor to y and
  /// apply a ReLU while y is in the cache.
  bool fuses = false;
  /// Whether the layer's forward pass in inference can do the same: it fuses, or has forward_with_epilogue.
  bool fuses_in_inference = false;
  /// Whether the layer has forward_with_epilogue, which also computes mean and variance of y's channels while
  /// y is in the cache.
  bool gives_moments = false;
  /// Whether forward_fused in training uses the moments of x that the layer before has computed.
  bool takes_moments = false;
  /// Whether the layer has backward_add, which adds the gradient of x to dx instead of overwriting dx.
  bool adds_gradient = false;
  /// Whether the layer has backward_summing, which can also collect sums over dx for a batch norm before it.
  bool gives_gradient_sums = false;
  /// Whether the layer's backward_masked uses sums over dy that the layer after it has collected, and its
  /// forward_fused fills the record that this needs.
  bool takes_gradient_sums = false;
  /// Whether forward_fused in training may leave y to the layer after it, which takes pending norms.
  bool gives_pending_norm = false;
  /// Whether the layer's forward pass in training computes a pending norm whose output is x.
  bool takes_pending_norm = false;
  /// Whether y may be x in the layer's forward pass, provided that no pass reads x later.
  bool output_in_place = false;
  /// Whether dx may be dy in the layer's backward pass.
  bool gradient_in_place = false;
  /// Whether dx in the layer's backward pass may be the x of its forward pass.
  bool gradient_over_input = false;
  /// Whether the layer's backward pass reads x, the input of the forward pass. A tensor that no backward pass
  /// reads is not kept.
  bool reads_input = true;
  /// Whether the layer's backward pass reads y, the output of the forward pass.
  bool reads_output = true;
  /// Whether the layer's forward pass leaves a view of x on top of the tape, by which its backward pass finds
  /// x, and dx may be that x. A container may therefore move x between the passes and change the view.
  bool input_may_move = false;
  /// Whether the layer has recompute(), which writes the output of a forward pass a second time, so that it
  /// need not be kept until the backward pass.
  bool recomputes = false;

  /// Whether the layer fuses in a pass of this mode (context::training).
  bool fuses_when(bool training) const { return training ? fuses : fuses_in_inference; }
};

/// Data of a forward pass in training that recompute() or gradient sums need. Valid until the backward pass
/// of the layer. `statistics` points to the tape (mean and inverse deviation of each channel in a batch
/// norm); `x` is the input of that pass, `relu` whether a ReLU followed in the same pass, and `mask` its
/// mask.
template <class T>
struct forward_record {
  tensor_view<const T, 4> x;
  const parameter_t<T>* statistics = nullptr;
  bool relu = false;
  ops::relu_mask<T> mask;
};

/// Operations added to the forward pass of a layer that fuses: y = relu(layer(x) + addend), each optional.
template <class T>
struct forward_fusion {
  tensor_view<const T, 4> addend;  ///< shaped as y, does not overlap y; a null view: none
  bool relu = false;
  ops::relu_mask<T> mask;  ///< receives which elements pass the ReLU, for the backward pass; null: not wanted
  const ops::moment_parts<T>* moments = nullptr;  ///< moments of x; nullptr: the layer computes them
  /// Receives data for recompute() or gradient sums; nullptr: not wanted (`recomputes`,
  /// `takes_gradient_sums`).
  forward_record<T>* record = nullptr;
  /// Receives the layer's batch norm if y is left to the next layer (`gives_pending_norm`); nullptr: y is
  /// computed.
  ops::pending_norm<T>* pending = nullptr;
  /// The batch norm whose output is x and may be pending; nullptr: none (`takes_pending_norm`).
  ops::pending_norm<T>* norm_of_x = nullptr;

  /// Of the operations that a container is asked for, those of one of its layers: norm_of_x of the first
  /// layer, the others of the last one.
  forward_fusion of_layer(bool first, bool last) const {
    forward_fusion own;
    if (last) own = *this;
    own.norm_of_x = first ? norm_of_x : nullptr;
    return own;
  }
};

/// Operations added to the backward pass of a layer.
template <class T>
struct backward_fusion {
  ops::relu_mask<T> mask;  ///< mask of the forward pass: dy counts as 0 where it blocks (needs `fuses`)
  bool add = false;        ///< dx += gradient instead of dx = gradient (needs `adds_gradient`)
  /// Receives dy under `mask`, the gradient of the addend of forward_fusion (needs `fuses`). It may be dy,
  /// and overlaps nothing else that the layer reads or writes. A null view: not wanted. Needs a mask.
  tensor_view<T, 4> addend_gradient = {};
  /// May receive sums over dx for the batch norm whose output is x; nullptr: not wanted (needs
  /// `gives_gradient_sums`).
  ops::gradient_sums<T>* sums_of_dx = nullptr;
  /// Sums over dy under `mask` (gradient_sums::collected()); nullptr: the layer computes them.
  const double* sums_of_dy = nullptr;

  /// Of the operations that a container is asked for, those of one of its layers: `add` and sums_of_dx of the
  /// first layer, the others of the last one.
  backward_fusion of_layer(bool first, bool last) const {
    backward_fusion own;
    if (last) own = {mask, false, addend_gradient, nullptr, sums_of_dy};
    if (first) own.add = add;
    if (first) own.sums_of_dx = sums_of_dx;
    return own;
  }
};

PUFFERFISH_NAMESPACE_END
