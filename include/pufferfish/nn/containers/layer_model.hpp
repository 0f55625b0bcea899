// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the virtual functions of any_layer, and their implementation for a layer type.

#include <algorithm>
#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/nn/containers/layer_concepts.hpp>
#include <pufferfish/nn/containers/layer_visitors.hpp>
#include <pufferfish/nn/layers/dense_layers.hpp>
#include <pufferfish/nn/layers/token_layer.hpp>
#include <pufferfish/ops/elementwise/sum.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A layer type L that a network can replace by the low-rank layer of its kind: L has layer_traits,
/// and a network can run that low-rank layer.
template <class T, class L, class Device>
concept replaceable_layer = factorizable<L> && std::same_as<weight_scalar_t<L>, parameter_t<T>> &&
    (network_layer<T, typename kind_of<L>::template core<T>, Device> ||
     takes_tokens<T, typename kind_of<L>::template core<T>, Device>);

/// The convolution that computes a layer of kind Kind without its bias; nullopt for other kinds.
template <class Kind>
std::optional<conv_shape> geometry_of(const typename Kind::shape_type& shape) {
  if constexpr (requires { Kind::geometry(shape); }) return Kind::geometry(shape);
  return std::nullopt;
}

/// Makes a layer of kind Kind with the settings of `like` and all parameters zero: low-rank, or
/// dense if `ranks` is empty.
template <class Any, class Kind, class Layer>
Any make_twin(const Layer& like, const typename Kind::shape_type& shape, const rank_list& ranks, bool bias) {
  using T = typename Any::value_type;
  if (ranks.empty()) return Kind::template make<typename Kind::template dense<T>>(shape, bias);
  auto made =
      make_low_rank<typename Kind::template low_rank<T, dynamic_rank, device::cpu>>(shape, ranks, bias);
  if constexpr (requires { made.set_recompute(like.recompute()); }) made.set_recompute(like.recompute());
  return made;
}

/// The virtual functions of any_layer; their contracts are those of the members of any_layer with the same
/// names.
template <class T, class Device>
struct layer_interface {
  virtual ~layer_interface() = default;
  // A copy of the layer, with its parameters.
  virtual std::unique_ptr<layer_interface> clone() const = 0;
  // Address of the layer if its type is the one that `tag` identifies (see type_tag), else nullptr.
  virtual void* target(const char* tag) = 0;
  virtual std::string describe() const = 0;
  virtual extents<4> output_shape(const extents<4>& input) const = 0;
  virtual void forward(context<Device>&, const tensor_view<const T, 4>&, const tensor_view<T, 4>&) const = 0;
  virtual void backward(context<Device>&, const tensor_view<const T, 4>&, const tensor_view<T, 4>&) const = 0;
  virtual layer_abilities abilities() const = 0;
  virtual void forward_fused(context<Device>&, const tensor_view<const T, 4>&, const tensor_view<T, 4>&,
                             const forward_fusion<T>&, ops::moment_parts<T>*) const = 0;
  virtual void backward_fused(context<Device>&, const tensor_view<const T, 4>&, const tensor_view<T, 4>&,
                              const backward_fusion<T>&) const = 0;
  virtual void recompute(context<Device>&, const forward_record<T>&, const tensor_view<T, 4>&) const = 0;
  virtual void visit_state(state_visitor<parameter_t<T>>&, const std::string&) = 0;
  virtual void visit_layers(layer_visitor<T, Device>&, const std::string&) = 0;
  virtual void trace(const any_layer<T, Device>&, layer_tracer<T, Device>&, const extents<4>&,
                     const std::string&) const = 0;
  virtual index_t macs(const extents<4>&) const = 0;
  virtual void initialize(random_stream) = 0;
  virtual layer_weights<parameter_t<T>> weights(const std::string&) const = 0;
  virtual low_rank_parts<parameter_t<T>> low_rank() = 0;
  virtual std::optional<conv_shape> geometry() const = 0;
  virtual any_layer<T, Device> twin(const rank_list&, std::optional<bool>) const = 0;
  virtual const token_layer<T, Device>* tokens() const = 0;
  virtual const recurrent_layer<T>* recurrent() const = 0;
  virtual void forward_sequence(context<Device>&, const tensor_view<const T, 3>&,
                                const recurrent_state<const T>&, const tensor_view<T, 3>&,
                                const recurrent_state<T>&) const = 0;
  virtual void backward_sequence(context<Device>&, const tensor_view<const T, 3>&, const tensor_view<T, 3>&,
                                 const recurrent_state<const T>&, const recurrent_state<T>&) const = 0;
};

/// The implementation of layer_interface for the layer type L, which the object holds. Members that L lacks
/// have the defaults that any_layer describes: macs() is 0, weights() and low_rank() are empty,
/// visit_layers() visits nothing. Passes of images are given to layers of rows as views of two dimensions.
template <class T, class Device, class L>
struct layer_model final : layer_interface<T, Device> {
  using any = any_layer<T, Device>;

  explicit layer_model(const L& l) : layer(l) {}
  explicit layer_model(L&& l) : layer(std::move(l)) {}

  static constexpr bool is_replaceable = replaceable_layer<T, L, Device>;
  static constexpr bool is_token_layer = takes_tokens<T, L, Device>;

  std::unique_ptr<layer_interface<T, Device>> clone() const override {
    return std::make_unique<layer_model>(layer);
  }
  // Types are told apart by the address of a variable, so that the library needs no RTTI.
  void* target(const char* tag) override { return tag == &type_tag<L> ? &layer : nullptr; }
  std::string describe() const override { return layer.describe(); }

  // A layer of rows keeps N, H and W; a token layer has no output shape.
  extents<4> output_shape(const extents<4>& input) const override {
    if constexpr (row_layer<L>) {
      if (input[3] != layer.in_features()) {
        throw_error<shape_error>(
            {layer.describe(), ": input ", input, " has ", input[3], " features, not ", layer.in_features()});
      }
      return {input[0], input[1], input[2], layer.out_features()};
    } else if constexpr (is_token_layer) {
      needs_tokens(layer.describe());
    } else {
      return layer.output_shape(input);
    }
  }

  // Passes of a layer of tokens throw state_error: its input is no image.
  void forward([[maybe_unused]] context<Device>& ctx, [[maybe_unused]] const tensor_view<const T, 4>& x,
               [[maybe_unused]] const tensor_view<T, 4>& y) const override {
    if constexpr (is_token_layer) needs_tokens(layer.describe());
    if constexpr (!is_token_layer) layer.forward(ctx, view("x", x), view("y", y));
  }
  void backward([[maybe_unused]] context<Device>& ctx, [[maybe_unused]] const tensor_view<const T, 4>& dy,
                [[maybe_unused]] const tensor_view<T, 4>& dx) const override {
    if constexpr (is_token_layer) needs_tokens(layer.describe());
    if constexpr (!is_token_layer) layer.backward(ctx, view("dy", dy), gradient(dx));
  }

  layer_abilities abilities() const override { return abilities_of<T, L, Device>(layer); }
  // The container asks only for operations that the layer's abilities include: a layer without forward_fused
  // and forward_with_epilogue gets an empty fusion.
  void forward_fused(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y,
                     [[maybe_unused]] const forward_fusion<T>& fusion,
                     [[maybe_unused]] ops::moment_parts<T>* moments) const override {
    if constexpr (fusing_layer<T, L, Device>) {
      layer.forward_fused(ctx, view("x", x), view("y", y), fusion);
    } else if constexpr (epilogue_layer<T, L, Device>) {
      ops::output_epilogue<T> epilogue(fusion.addend.data(), fusion.relu);
      epilogue.moments = moments;
      epilogue.norm_of_x = fusion.norm_of_x;
      layer.forward_with_epilogue(ctx, view("x", x), view("y", y), epilogue);
    } else {
      forward(ctx, x, y);
    }
  }
  // A layer that is not a container applies at most one of the two operations (mask, add) itself. If both are
  // requested, it applies the mask, and the addition is a pass of its own.
  void backward_fused(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx,
                      [[maybe_unused]] const backward_fusion<T>& fusion) const override {
    if constexpr (requires { layer.backward_fused(ctx, dy, dx, fusion); }) {
      return layer.backward_fused(ctx, dy, dx, fusion);
    }
    if constexpr (masking_layer<T, L, Device>) {
      if (!fusion.mask.is_null() || fusion.sums_of_dy != nullptr) {
        if (!fusion.add || dx.is_null()) return masked_backward(ctx, dy, dx, fusion);
        check_dense(layer, "dx", dx);
        scratch_frame frame(ctx.scratch());
        const tensor_view<T, 4> part = frame.template take<T>(dx.shape());
        masked_backward(ctx, dy, part, fusion);
        return ops::add<T>(ctx, std::as_const(part).flat(), dx.flat());
      }
    }
    if constexpr (summing_layer<T, L, Device>) {
      if (fusion.sums_of_dx != nullptr && !dx.is_null()) {
        return layer.backward_summing(ctx, view("dy", dy), gradient(dx), fusion.add, *fusion.sums_of_dx);
      }
    }
    if constexpr (adding_layer<T, L, Device>) {
      if (fusion.add) return layer.backward_add(ctx, view("dy", dy), gradient(dx));
    }
    backward(ctx, dy, dx);
  }
  void recompute([[maybe_unused]] context<Device>& ctx, [[maybe_unused]] const forward_record<T>& record,
                 [[maybe_unused]] const tensor_view<T, 4>& y) const override {
    if constexpr (recomputing_layer<T, L, Device>) layer.recompute(ctx, record, y);
  }

  void visit_state(state_visitor<parameter_t<T>>& visitor, const std::string& prefix) override {
    visit_state_of(layer, visitor, prefix);
  }
  void visit_layers([[maybe_unused]] layer_visitor<T, Device>& visitor,
                    [[maybe_unused]] const std::string& prefix) override {
    if constexpr (requires { layer.visit_layers(visitor, prefix); }) layer.visit_layers(visitor, prefix);
  }
  // A layer without trace() is one entry of the trace; containers trace the layers within.
  void trace(const any& self, layer_tracer<T, Device>& tracer, const extents<4>& input,
             const std::string& prefix) const override {
    if constexpr (requires { layer.trace(tracer, input, prefix); }) {
      layer.trace(tracer, input, prefix);
    } else {
      tracer.on_trace(prefix, self, input, output_shape(input));
    }
  }
  index_t macs(const extents<4>& input) const override {
    if constexpr (requires { layer.macs(input); }) {
      return layer.macs(input);
    } else {
      return 0 * input[0];
    }
  }
  void initialize([[maybe_unused]] random_stream random) override {
    if constexpr (requires { layer.initialize(random); }) layer.initialize(random);
  }

  layer_weights<parameter_t<T>> weights([[maybe_unused]] const std::string& name) const override {
    if constexpr (is_replaceable) return weights_of(layer, name);
    return {};
  }
  low_rank_parts<parameter_t<T>> low_rank() override {
    if constexpr (requires { layer.low_rank(); }) return layer.low_rank();
    if constexpr (low_rank_layer<L>) return parts_of(layer);
    return {};
  }
  // The geometry of a dense or low-rank layer as a convolution; a linear layer is one with a 1 x 1 kernel.
  std::optional<conv_shape> geometry() const override {
    if constexpr (is_replaceable) {
      using kind = kind_of<L>;
      return geometry_of<kind>(kind::shape(layer, layer.describe()));
    } else if constexpr (low_rank_layer<L>) {
      using kind = low_rank_kind_of<L>;
      return geometry_of<kind>(kind::shape(layer));
    } else {
      return std::nullopt;
    }
  }
  // The source is a dense layer (through layer_traits), a wrapper (through its member twin) or a low-rank
  // layer.
  any twin([[maybe_unused]] const rank_list& ranks,
           [[maybe_unused]] std::optional<bool> bias) const override {
    if constexpr (is_replaceable) {
      using kind = kind_of<L>;
      return make_twin<any, kind>(layer, kind::shape(layer, layer.describe()), ranks,
                                  bias.value_or(has_any(host_biases(layer))));
    } else if constexpr (requires { layer.twin(ranks, bias); }) {
      return layer.twin(ranks, bias);
    } else if constexpr (low_rank_layer<L>) {
      using kind = low_rank_kind_of<L>;
      const auto biases = kind::biases(const_cast<L&>(layer));
      const bool has = std::any_of(biases.begin(), biases.end(), [](const auto& b) { return !b.is_null(); });
      return make_twin<any, kind>(layer, kind::shape(layer), ranks, bias.value_or(has));
    } else {
      no_weights();
    }
  }
  // Throws state_error, naming the layer.
  [[noreturn]] void no_weights() const {
    throw_error<state_error>({layer.describe(), " has no weight matrix to factorize"});
  }
  const token_layer<T, Device>* tokens() const override { return token_view.shown(); }
  const recurrent_layer<T>* recurrent() const override { return base<recurrent_layer<T>>(); }
  void forward_sequence([[maybe_unused]] context<Device>& ctx,
                        [[maybe_unused]] const tensor_view<const T, 3>& x,
                        [[maybe_unused]] const recurrent_state<const T>& before,
                        [[maybe_unused]] const tensor_view<T, 3>& y,
                        [[maybe_unused]] const recurrent_state<T>& after) const override {
    if constexpr (std::is_base_of_v<recurrent_layer<T>, L>) {
      layer.forward(ctx, x, before, y, after);
    } else {
      not_recurrent();
    }
  }
  void backward_sequence([[maybe_unused]] context<Device>& ctx,
                         [[maybe_unused]] const tensor_view<const T, 3>& dy,
                         [[maybe_unused]] const tensor_view<T, 3>& dx,
                         [[maybe_unused]] const recurrent_state<const T>& from_after,
                         [[maybe_unused]] const recurrent_state<T>& to_before) const override {
    if constexpr (std::is_base_of_v<recurrent_layer<T>, L>) {
      layer.backward(ctx, dy, dx, from_after, to_before);
    } else {
      not_recurrent();
    }
  }
  // Throws state_error, naming the layer.
  [[noreturn]] void not_recurrent() const {
    throw_error<state_error>({layer.describe(), " is no recurrent layer"});
  }
  // The layer as an object of a base class, or nullptr if L is not derived from it.
  template <class Base>
  const Base* base() const {
    if constexpr (std::is_base_of_v<Base, L>) {
      return &layer;
    } else {
      return nullptr;
    }
  }

  // backward_masked, and the gradient of the addend if it is wanted: by the layer if it can write it, else by
  // a pass before, since dx may be dy.
  void masked_backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx,
                       const backward_fusion<T>& fusion) const {
    const tensor_view<T, 4>& other = fusion.addend_gradient;
    if constexpr (requires { layer.backward_masked(ctx, dy, dx, fusion.mask, other, fusion.sums_of_dy); }) {
      layer.backward_masked(ctx, dy, dx, fusion.mask, other, fusion.sums_of_dy);
    } else if constexpr (requires { layer.backward_masked(ctx, dy, dx, fusion.mask, other); }) {
      layer.backward_masked(ctx, dy, dx, fusion.mask, other);
    } else {
      if (!other.is_null()) ops::masked_copy<T>(ctx, rows_of(dy), fusion.mask, rows_of(other));
      layer.backward_masked(ctx, view("dy", dy), gradient(dx), fusion.mask);
    }
  }
  // Turns a view of images into the view that the layer's passes expect. The check is for layers
  // of other libraries, which may not check their views.
  template <class U>
  auto view(const char* what, const tensor_view<U, 4>& images) const {
    check_dense(layer, what, images);
    return layer_view<U, L>(images);
  }
  // The same for dx, which may be a null view: the gradient is not wanted.
  auto gradient(const tensor_view<T, 4>& dx) const {
    check_dense_if_wanted(layer, "dx", dx);
    return layer_view<T, L>(dx);
  }

  L layer;
  [[no_unique_address]] token_part<T, L, Device> token_view{layer};
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
