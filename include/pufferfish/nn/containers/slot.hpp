// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: replaceable layers of rows, for blocks that arrange their layers themselves.

#include <string>

#include <pufferfish/lowrank/layers/attention_core.hpp>
#include <pufferfish/nn/containers/any_layer.hpp>
#include <pufferfish/ops/elementwise/sum.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Views rows as the images that layers of a network take: N x 1 x 1 x C.
template <class T>
tensor_view<T, 4> images_of(const tensor_view<T, 2>& rows) {
  return tensor_view<T, 4>(rows.data(), {rows.extent(0), 1, 1, rows.extent(1)});
}

/// Calls a slot that holds a layer of rows: the specialization that attention_core uses in a network.
template <class T, class Device>
struct projection<any_layer<T, Device>> {
  using slot_type = any_layer<T, Device>;

  template <class U>
  static void forward(context<Device>& ctx, const slot_type& slot, const tensor_view<const U, 2>& x,
                      const tensor_view<U, 2>& y) {
    slot.forward(ctx, images_of(x), images_of(y));
  }
  /// dx = or, with `add`, dx += the gradient of the layer's input. Without `add`, dx may be a null view.
  template <class U>
  static void backward(context<Device>& ctx, const slot_type& slot, const tensor_view<const U, 2>& dy,
                       const tensor_view<U, 2>& dx, bool add) {
    if (!add) return slot.backward(ctx, images_of(dy), images_of(dx));
    if (slot.abilities().adds_gradient) {
      return slot.backward_fused(ctx, images_of(dy), images_of(dx), {{}, true});
    }
    scratch_frame frame(ctx.scratch());
    const tensor_view<U, 2> own = frame.template take<U>(dx.shape());
    slot.backward(ctx, images_of(dy), images_of(own));
    ops::add<U>(ctx, std::as_const(own).flat(), dx.flat());
  }
};

/// Visits a slot under its name, then the layers in it.
template <class T, class Device>
void visit_slot(layer_visitor<T, Device>& visitor, const std::string& prefix, const char* name,
                any_layer<T, Device>& slot) {
  const std::string full = join_name(prefix, name);
  visitor.on_layer(full, slot);
  slot.visit_layers(visitor, full);
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
