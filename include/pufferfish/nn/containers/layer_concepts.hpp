// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Concepts by which any_layer inspects a layer's type: the views of its passes, and its optional members.

#include <concepts>

#include <pufferfish/core/context.hpp>
#include <pufferfish/lowrank/factorization/factorize.hpp>
#include <pufferfish/nn/containers/layer_fusion.hpp>
#include <pufferfish/ops/linear/output_epilogue.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Views dense images N x H x W x C as N H W rows of C elements.
template <class T>
tensor_view<T, 2> rows_of(const tensor_view<T, 4>& view) {
  return view.reshape(extents<2>{view.extent(0) * view.extent(1) * view.extent(2), view.extent(3)});
}

/// A layer of rows, such as Linear and LowRankLinear: its passes take views of two dimensions.
template <class L>
concept row_layer = requires(const L& layer) {
  layer.in_features();
  layer.out_features();
};

/// The kind of view that the passes of a layer take: of images [N][H][W][C], or for a row_layer of rows [N H
/// W][C].
template <class T, class L>
auto layer_view(const tensor_view<T, 4>& view) {
  if constexpr (row_layer<L>) {
    return rows_of(view);
  } else {
    return view;
  }
}
/// Type of layer_view's result.
template <class T, class L>
using layer_view_t = decltype(layer_view<T, L>(tensor_view<T, 4>()));

/// A layer that applies the operations of an output_epilogue while it writes its output.
template <class T, class L, class Device>
concept epilogue_layer = requires(const L& layer, context<Device>& ctx, const layer_view_t<const T, L>& x,
                                  const layer_view_t<T, L>& y, const ops::output_epilogue<T>& epilogue) {
  layer.forward_with_epilogue(ctx, x, y, epilogue);
};
/// A layer with forward_with_moments, the earlier name of forward_with_epilogue.
template <class T, class L, class Device>
concept has_old_epilogue = requires(const L& layer, context<Device>& ctx, const layer_view_t<const T, L>& x,
                                    const layer_view_t<T, L>& y, ops::moment_parts<T>& moments) {
  layer.forward_with_moments(ctx, x, y, moments);
};
/// A layer whose forward pass applies the operations of a forward_fusion.
template <class T, class L, class Device>
concept fusing_layer = requires(const L& layer, context<Device>& ctx, const layer_view_t<const T, L>& x,
                                const layer_view_t<T, L>& y, const forward_fusion<T>& fusion) {
  layer.forward_fused(ctx, x, y, fusion);
};
/// A layer whose backward pass takes dy as 0 where a mask blocks it; required of a fusing_layer.
template <class T, class L, class Device>
concept masking_layer = requires(const L& layer, context<Device>& ctx, const layer_view_t<const T, L>& dy,
                                 const layer_view_t<T, L>& dx, const ops::relu_mask<T>& mask) {
  layer.backward_masked(ctx, dy, dx, mask);
};
/// A layer whose backward pass can add the gradient of x to dx instead of overwriting dx.
template <class T, class L, class Device>
concept adding_layer = requires(const L& layer, context<Device>& ctx, const layer_view_t<const T, L>& dy,
                                const layer_view_t<T, L>& dx) {
  layer.backward_add(ctx, dy, dx);
};
/// A layer whose backward pass can also collect sums over dx for a batch norm before the layer.
template <class T, class L, class Device>
concept summing_layer = requires(const L& layer, context<Device>& ctx, const layer_view_t<const T, L>& dy,
                                 const layer_view_t<T, L>& dx, ops::gradient_sums<T>& sums) {
  layer.backward_summing(ctx, dy, dx, true, sums);
};
/// A layer that can write the output of a forward pass again, from its record.
template <class T, class L, class Device>
concept recomputing_layer = requires(const L& layer, context<Device>& ctx, const forward_record<T>& record,
                                     const tensor_view<T, 4>& y) {
  layer.recompute(ctx, record, y);
};
/// A layer whose passes any_layer can call.
template <class T, class L, class Device>
concept network_layer = requires(const L& layer, context<Device>& ctx, const layer_view_t<const T, L>& x,
                                 const layer_view_t<T, L>& y) {
  layer.forward(ctx, x, y);
};
/// A container, whose abilities depend on what is in it.
template <class L>
concept container_layer = requires(const L& layer) {
  layer.abilities();
};

/// The abilities of a layer: those that a container reports, else from the members that the type has (fused
/// passes) and its static constants of the same names (reads_input, gradient_in_place, ...). An ability
/// without a constant has the default of layer_abilities, but gradient_over_input has the value of
/// input_may_move.
template <class T, class L, class Device>
layer_abilities abilities_of([[maybe_unused]] const L& layer) {
  if constexpr (container_layer<L>) {
    return layer.abilities();
  } else {
    static_assert(!has_old_epilogue<T, L, Device>,
                  "pufferfish: forward_with_moments(ctx, x, y, moments) of layers is now "
                  "forward_with_epilogue(ctx, x, y, epilogue), where epilogue.moments may be nullptr");
    layer_abilities result;
    result.fuses = fusing_layer<T, L, Device> && masking_layer<T, L, Device>;
    result.gives_moments = epilogue_layer<T, L, Device> && !fusing_layer<T, L, Device>;
    result.fuses_in_inference = result.fuses || epilogue_layer<T, L, Device>;
    result.adds_gradient = adding_layer<T, L, Device>;
    result.gives_gradient_sums = summing_layer<T, L, Device>;
    result.recomputes = recomputing_layer<T, L, Device>;
    if constexpr (requires { L::is_relu; }) result.is_relu = L::is_relu;
    if constexpr (requires { L::takes_moments; }) result.takes_moments = L::takes_moments;
    if constexpr (requires { L::takes_gradient_sums; }) result.takes_gradient_sums = L::takes_gradient_sums;
    if constexpr (requires { L::gives_pending_norm; }) result.gives_pending_norm = L::gives_pending_norm;
    if constexpr (requires { L::takes_pending_norm; }) result.takes_pending_norm = L::takes_pending_norm;
    if constexpr (requires { L::output_in_place; }) result.output_in_place = L::output_in_place;
    if constexpr (requires { L::gradient_in_place; }) result.gradient_in_place = L::gradient_in_place;
    if constexpr (requires { L::reads_input; }) result.reads_input = L::reads_input;
    if constexpr (requires { L::reads_output; }) result.reads_output = L::reads_output;
    if constexpr (requires { L::input_may_move; }) result.input_may_move = L::input_may_move;
    result.gradient_over_input = result.input_may_move;
    if constexpr (requires { L::gradient_over_input; }) result.gradient_over_input = L::gradient_over_input;
    return result;
  }
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
