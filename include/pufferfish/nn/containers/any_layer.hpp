// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `any_layer<T>` is one type for layers of any type. Networks are therefore values, and a program
/// need not compile a type for each network. The price is one virtual call per layer.
///
/// Interface of a layer that can be stored (ExampleLayer is documentation, no such class exists):
///
///     class ExampleLayer {
///      public:
///       using value_type = T;
///       using view = tensor_view<T, 4>;                            // all NHWC
///       using const_view = tensor_view<const T, 4>;
///       std::string describe() const;                              // "Conv 3 -> 16, kernel 3x3"
///       extents<4> output_shape(const extents<4>& input) const;    // throws shape_error
///       void forward(context<Device>&, const const_view& x, const view& y) const;
///       void backward(context<Device>&, const const_view& dy, const view& dx) const;
///
///       // Optional:
///       template <class F> void visit(F&& f);    // f("weight", parameter) or f("mean", state_buffer)
///       void initialize(random_stream);          // random parameters
///       index_t macs(const extents<4>&) const;   // multiply-accumulates of convolutions and products
///
///       // To save passes over memory (see layer_abilities; a layer of rows takes views of rows):
///       void forward_with_epilogue(context<Device>&, const const_view& x, const view& y,
///                                  const ops::output_epilogue<T>&) const;
///       void forward_fused(context<Device>&, const const_view& x, const view& y,
///                          const forward_fusion<T>&) const;
///       void backward_masked(context<Device>&, const const_view& dy, const view& dx,
///                            const ops::relu_mask<T>&) const;    // required with forward_fused
///       // ... or with a fifth argument, const view& addend_gradient: receives dy under the mask, may be dy
///       void backward_add(context<Device>&, const const_view& dy, const view& dx) const;
///       void backward_summing(context<Device>&, const const_view& dy, const view& dx, bool add,
///                             ops::gradient_sums<T>&) const;
///       void recompute(context<Device>&, const forward_record<T>&, const view& y) const;
///       static constexpr bool is_relu, takes_moments, output_in_place, gradient_in_place;
///       static constexpr bool gives_pending_norm, takes_pending_norm, gradient_over_input, input_may_move;
///       static constexpr bool reads_input, reads_output;         // true for a layer without them
///
///       // For a wrapper of a low-rank layer, with the meaning of any_layer's members of these names:
///       low_rank_parts<parameter_t<T>> low_rank();
///       any_layer<T, Device> twin(const rank_list& ranks, std::optional<bool> bias) const;
///     };
///
/// A container has layer_abilities abilities() const instead of these constants. If it fuses, adds gradients
/// or passes gradient sums on, it has forward_fused and backward_fused(context, dy, dx, backward_fusion).
/// forward_with_epilogue must call moments->start() before it takes scratch; on a device it need not. With
/// takes_pending_norm, it must compute epilogue.norm_of_x (ops::pending_norm) before it reads x.
///
/// Activations are NHWC and dense, otherwise any_layer throws; a vector is N x 1 x 1 x C. In training, x must
/// not change until the layer's backward pass if the layer has reads_input, nor y if it has reads_output. dx
/// may be a null view. A layer of rows (in_features(), out_features()) works on the last dimension.
///
/// A forward pass keeps data for the backward pass on the tape: blocks first, then push_value(*this, value),
/// which only pop_value(*this) of the same object returns. For layers of tokens see
/// nn/layers/token_layer.hpp.

#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include <pufferfish/lowrank/selection.hpp>
#include <pufferfish/nn/containers/layer_model.hpp>

PUFFERFISH_NAMESPACE_BEGIN
/// A layer of any type, held by value: copies are deep.
///
/// Unless stated otherwise, a member calls the function of the same name of the layer inside and throws what
/// that function throws. Passes check that views are dense (shape_error). One thread at a time may run
/// training passes of a layer, which write gradients, counters and buffers; inference passes may run in
/// several threads at once, each with a context of its own.
///
/// \code
/// any_layer<float> layer = Linear<float>(8, 5);
/// layer.initialize({1, 1});
/// const tensor<float, 4> x({3, 1, 1, 8});
/// tensor<float, 4> y(layer.output_shape(x.shape()));
/// layer.forward(ctx, x.view(), y.view());
/// if (auto* linear = layer.target<Linear<float>>()) linear->bias()(0) = 1.0F;
/// \endcode
template <class T, class Device>
class any_layer {
  static_assert((!std::is_same_v<T, bfloat16> ||
                 std::is_same_v<Device, device::cpu>)&&!std::is_same_v<T, float16>,
                "pufferfish: networks compute in float, double or bfloat16; on a device in float, double, "
                "gpu::bf16 and gpu::fp16");

 public:
  using value_type = T;

  /// Holds a copy of `layer`, or the layer itself if it is an rvalue.
  template <class L>
  requires(!std::same_as<std::remove_cvref_t<L>, any_layer>)
      any_layer(L&& layer)  // NOLINT(bugprone-forwarding-reference-overload): the constraint keeps copies out
      : self_(std::make_unique<detail::layer_model<T, Device, std::remove_cvref_t<L>>>(
            std::forward<L>(layer))) {}
  any_layer(const any_layer& other) : self_(other.self().clone()) {}
  any_layer(any_layer&&) noexcept = default;
  any_layer& operator=(any_layer other) noexcept {
    self_ = std::move(other.self_);
    return *this;
  }
  ~any_layer() = default;

  /// In a moved-from layer, every other member but assignment and target() throws state_error.
  bool is_moved_from() const { return self_ == nullptr; }

  /// Kind and sizes of the layer, such as "Conv 3 -> 16, kernel 3x3".
  std::string describe() const { return self().describe(); }
  /// NHWC extents of the output for an input. Throws shape_error.
  extents<4> output_shape(const extents<4>& input) const {
    detail::check_extents(*this, input);
    return self().output_shape(input);
  }
  /// y = layer(x): y has output_shape(x.shape()) and overlaps x only with the ability output_in_place.
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    self().forward(ctx, x, y);
  }
  /// Gradients of the parameters and, unless dx is a null view, of x, for the last forward pass in training.
  /// dx may be dy with the ability gradient_in_place, x with gradient_over_input, and overlaps nothing else.
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    self().backward(ctx, dy, dx);
  }

  /// Abilities of the layer. Each of the three members below may be called only if the abilities include it.
  layer_abilities abilities() const { return self().abilities(); }
  /// Forward pass with the operations of `fusion` applied to y, for layers with the ability `fuses`.
  /// Unless `moments` is nullptr, it receives mean and variance of y's channels (ability `gives_moments`).
  void forward_fused(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y,
                     const forward_fusion<T>& fusion, ops::moment_parts<T>* moments = nullptr) const {
    self().forward_fused(ctx, x, y, fusion, moments);
  }
  /// Backward pass with the operations of `fusion`: dy counts as 0 where its mask blocks it (ability
  /// `fuses`), and is written to `addend_gradient` like this; with `add`, the gradient of x is added to dx
  /// (ability `adds_gradient`). Gradient sums: see backward_fusion. Otherwise the contract of backward.
  void backward_fused(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx,
                      const backward_fusion<T>& fusion) const {
    self().backward_fused(ctx, dy, dx, fusion);
  }
  /// Writes y again, bit for bit, as the forward pass that filled `record` did; to be called before
  /// the backward pass (ability `recomputes`). y overlaps nothing.
  void recompute(context<Device>& ctx, const forward_record<T>& record, const tensor_view<T, 4>& y) const {
    self().recompute(ctx, record, y);
  }

  /// Shows `visitor` all parameters and buffers of the layer, in execution order. Names are joined by dots.
  void visit_state(state_visitor<parameter_t<T>>& visitor, const std::string& prefix = {}) {
    self().visit_state(visitor, prefix);
  }
  /// Shows `visitor` the layers inside this layer (not itself), containers before their contents.
  void visit_layers(layer_visitor<T, Device>& visitor, const std::string& prefix = {}) {
    self().visit_layers(visitor, prefix);
  }
  /// Shows `tracer` the layers that compute (no containers), in execution order, with their input and output
  /// shapes. Throws shape_error if the shapes do not fit.
  void trace(layer_tracer<T, Device>& tracer, const extents<4>& input, const std::string& prefix = {}) const {
    self().trace(*this, tracer, input, prefix);
  }
  /// Multiply-accumulates of convolutions and matrix products in one forward pass; 0 for other layers.
  index_t macs(const extents<4>& input) const {
    detail::check_extents(*this, input);
    return self().macs(input);
  }
  /// Sets all parameters to random initial values. Each layer draws from a random stream of its name.
  void initialize(random_stream random) { self().initialize(random); }

  /// Weights, under the name `name`, of a layer that can be factorized: of any layer with
  /// layer_traits, also from other libraries. For other layers the result has no matrices.
  layer_weights<parameter_t<T>> weights(const std::string& name) const { return self().weights(name); }
  /// Factors and biases of the low-rank layer inside, of any kind and rank; empty for other layers.
  low_rank_parts<parameter_t<T>> low_rank() { return self().low_rank(); }
  /// Ranks of the low-rank layer inside, one per rank group; empty for other layers.
  rank_list ranks() const { return const_cast<interface&>(self()).low_rank().ranks(); }
  /// Rows and columns of the layer's first weight matrix, or of the product of its first factors; zeros for a
  /// layer that has neither.
  matrix_size first_matrix() const {
    const auto groups = detail::groups_of(weights({}));
    if (!groups.empty()) return groups.front().size;
    const auto factors = const_cast<interface&>(self()).low_rank().factors;
    if (factors.empty()) return {};
    return {factors[0].up.extent(0), factors[0].down.size() / factors[0].down.extent(0)};
  }
  /// The convolution that computes the function of a dense or low-rank layer without its bias; a fully
  /// connected layer is a 1x1 convolution. nullopt for other layers.
  std::optional<conv_shape> geometry() const { return self().geometry(); }
  /// A new layer of this layer's kind, shape and settings whose parameters are all zero: low-rank
  /// of the given ranks (one per rank group), or dense if `ranks` is empty. `bias`: whether the new
  /// layer has a bias; empty: as this layer. Throws state_error unless this layer has weights or
  /// factors, rank_error for ranks that the layer's matrices cannot have.
  any_layer twin(const rank_list& ranks, std::optional<bool> bias = {}) const {
    return self().twin(ranks, bias);
  }
  /// The embedding inside, otherwise nullptr. forward and backward of an embedding throw state_error.
  const token_layer<T, Device>* tokens() const { return self().tokens(); }
  /// The recurrent layer inside, dense or low-rank; nullptr for other layers.
  const recurrent_layer<T>* recurrent() const { return self().recurrent(); }
  /// Forward pass of a recurrent layer. x: steps x batch x input; y: steps x batch x hidden; `before`: state
  /// before the first step; `after`: receives the state after the last step. Aliasing and errors are those of
  /// recurrent_layer. Throws state_error for other layers.
  void forward_sequence(context<Device>& ctx, const tensor_view<const T, 3>& x,
                        const recurrent_state<const T>& before, const tensor_view<T, 3>& y,
                        const recurrent_state<T>& after) const {
    self().forward_sequence(ctx, x, before, y, after);
  }
  /// Backward pass of forward_sequence. `from_after`: gradient of the state after the last step (null: zero);
  /// `to_before`: receives the gradient of the state before the first step (null: not computed). Aliasing and
  /// errors are those of recurrent_layer. Throws state_error for other layers.
  void backward_sequence(context<Device>& ctx, const tensor_view<const T, 3>& dy, const tensor_view<T, 3>& dx,
                         const recurrent_state<const T>& from_after = {},
                         const recurrent_state<T>& to_before = {}) const {
    self().backward_sequence(ctx, dy, dx, from_after, to_before);
  }

  /// The layer inside if it is an L, else nullptr.
  template <class L>
  L* target() {
    return static_cast<L*>(held(&detail::type_tag<L>));
  }
  template <class L>
  const L* target() const {
    return static_cast<const L*>(held(&detail::type_tag<L>));
  }

 private:
  using interface = detail::layer_interface<T, Device>;

  // Address of the layer if it has the tag's type, else nullptr.
  void* held(const char* tag) const { return self_ == nullptr ? nullptr : self_->target(tag); }
  const interface& self() const {
    if (self_ == nullptr) detail::moved_from("any_layer");
    return *self_;
  }
  interface& self() {
    return const_cast<interface&>(std::as_const(*this).self());
  }

  std::unique_ptr<interface> self_;  // nullptr: moved from
};

PUFFERFISH_NAMESPACE_END
