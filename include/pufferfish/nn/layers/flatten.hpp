// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `Flatten`: reshapes images to vectors.

#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Reshapes N x H x W x C to N x 1 x 1 x HWC in the order of NHWC memory: channels vary fastest.
/// (PyTorch flattens NCHW, in which columns vary fastest, so that a following linear layer has its
/// inputs in another order there unless H = W = 1.)
/// Both passes copy; neither keeps x or y. A linear layer that follows takes H W C features.
template <class T>
class Flatten {
 public:
  using value_type = T;
  static constexpr bool reads_input = false;
  static constexpr bool reads_output = false;

  std::string describe() const { return "Flatten"; }
  /// The output shape {N, 1, 1, H W C}; every image shape is valid.
  extents<4> output_shape(const extents<4>& input) const {
    return {input[0], 1, 1, input[1] * input[2] * input[3]};
  }

  /// x, y: dense; y does not overlap x. Throws shape_error.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    detail::check_forward(*this, x, y);
    ops::copy_elements<T>(ctx, x.flat().data(), y.flat().data(), x.size());
    if (ctx.training()) ctx.tape().push_value(*this, x.shape());
  }

  /// Copies dy to dx, which has the shape of x. dx may be a null view; else it is dense and does not overlap
  /// dy. Throws shape_error, and state_error without a forward pass in training mode.
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    const auto input = ctx.tape().template pop_value<extents<4>>(*this);
    detail::check_backward(*this, input, dy, dx);
    if (dx.is_null()) return;
    ops::copy_elements<T>(ctx, dy.flat().data(), dx.flat().data(), dy.size());
  }
};

PUFFERFISH_NAMESPACE_END
