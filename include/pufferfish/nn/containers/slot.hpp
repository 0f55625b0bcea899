// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: slots, which hold replaceable layers, for blocks that arrange their layers themselves.

#include <span>
#include <string>
#include <type_traits>
#include <utility>

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

  /// y = layer(x) for the rows of x.
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

  /// The backward pass for y = relu(layer(x)) from dy, the gradient of y, which is overwritten. Otherwise the
  /// contract of backward.
  template <class U>
  static void backward_after_relu(context<Device>& ctx, const slot_type& slot,
                                  const tensor_view<const U, 2>& y, const tensor_view<U, 2>& dy,
                                  const tensor_view<U, 2>& dx, bool add) {
    if constexpr (!ops::is_cpu<Device>) {
      const auto by_layer = [&](const auto* layer) {
        if (layer != nullptr) layer->backward_after_relu(ctx, y, dy, dx, add);
        return layer != nullptr;
      };
      if (by_layer(slot.template target<Linear<T>>())) return;
      if (by_layer(slot.template target<LowRankLinear<T>>())) return;
    }
    ops::relu_backward<U>(ctx, y.flat(), std::as_const(dy).flat(), dy.flat());
    backward<U>(ctx, slot, dy, dx, add);
  }

  /// Passes of slots that all hold the library's dense layer, or all its low-rank layer (projection_group).
  /// Return false, and compute nothing, for other layers.
  template <class U>
  static bool forward_group(context<Device>& ctx, layer_group<slot_type> slots,
                            const tensor_view<const U, 2>& x, std::span<const tensor_view<U, 2>> ys) {
    return with_group(slots, [&]<class L>(layer_group<L> layers) { L::forward_group(ctx, layers, x, ys); });
  }
  template <class U>
  static bool backward_group(context<Device>& ctx, layer_group<slot_type> slots,
                             std::span<const tensor_view<const U, 2>> dys,
                             std::span<const group_gradient<U>> to) {
    return with_group(slots,
                      [&]<class L>(layer_group<L> layers) { L::backward_group(ctx, layers, dys, to); });
  }

 private:
  // Calls f with the layers in the slots if all of them are dense, or all are low-rank. Returns whether it
  // did.
  template <class F>
  static bool with_group(layer_group<slot_type> slots, F&& f) {
    return with_layers<Linear<T>, Linear<T>>(slots, f) ||
           with_layers<LowRankLinear<T>, low_rank_linear<T>>(slots, f);
  }
  template <class Held, class L, class F>
  static bool with_layers(layer_group<slot_type> slots, F&& f) {
    group_array<const L*> layers;
    for (const slot_type* slot : slots) {
      const auto* layer = slot->template target<Held>();
      if (layer == nullptr) return false;
      layers.push(layer);
    }
    f(layer_group<L>(layers.all()));
    return true;
  }
};

/// The visits and the initialization of a layer that consists of named parts. `Layer`, which derives from
/// this class, lists the parts in execution order in one member:
///
///     template <class F>
///     void parts(F&& f) {
///       f("first", first_);  // a slot: an any_layer, which factorize may replace
///       f("norm", norm_);    // a layer that stays as it is, or a parameter
///     }
template <class Layer, class T, class Device>
class layer_of_parts {
 public:
  /// Shows `visitor` the parameters and buffers of the parts, each under the name of its part.
  void visit_state(state_visitor<parameter_t<T>>& visitor, const std::string& prefix = {}) {
    self().parts([&](const std::string& name, auto& part) {
      visit_state_of<parameter_t<T>>(part, visitor, join_name(prefix, name));
    });
  }
  /// Shows `visitor` the slots, each followed by the layers inside it, and the slots inside other parts.
  void visit_layers(layer_visitor<T, Device>& visitor, const std::string& prefix = {}) {
    self().parts([&]<class Part>(const std::string& name, Part& part) {
      const std::string full = join_name(prefix, name);
      if constexpr (std::is_same_v<Part, any_layer<T, Device>>) {
        part.tokens() != nullptr ? visitor.on_embedding(full, part) : visitor.on_layer(full, part);
      }
      if constexpr (requires { part.visit_layers(visitor, full); }) part.visit_layers(visitor, full);
    });
  }
  /// Initializes all parts. Each part draws from the child of `random` with the part's name.
  void initialize(random_stream random) {
    self().parts([&](const std::string& name, auto& part) { part.initialize(random.child(name)); });
  }

 private:
  Layer& self() { return static_cast<Layer&>(*this); }
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
