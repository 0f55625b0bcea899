// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `Sequential`: named layers, one after the other.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/move_mark.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/nn/containers/any_layer.hpp>
#include <pufferfish/nn/containers/sequence_plan.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Layers in a row, with the memory between them. In training, an output that a backward pass reads
/// is kept on the tape until then. An output that its layer can recompute from its own input (that
/// of a batch norm before a convolution) is not kept: the backward pass recomputes it where its own
/// gradient is written afterwards. Outputs that are not kept alternate between two blocks of scratch,
/// and so do gradients, unless they can overwrite an output that has had its last reader.
///
/// Neighbours share passes over memory if their abilities allow it (layer_abilities). A batch norm takes the
/// moments of its input from the layer before and applies the ReLU after it: only the ReLU's output is then
/// written, and the ReLU's backward pass is part of the batch norm's. On a device, the convolution after it
/// may compute it, and sums for its backward pass. In inference, convolutions apply the ReLU after them, too.
///
/// A Sequential is a value: copies are deep. It can be a layer of another container, and the root of a
/// network. Without layers it copies x to y.
///
/// \code
/// Sequential<float> layers;
/// layers.add("conv", Conv<float>(conv_shape::square(3, 16, 3, 1, 1)))
///     .add("bn", BatchNorm<float>(16))
///     .add("relu", ReLU<float>())
///     .add("pool", GlobalAvgPool<float>())
///     .add("fc", Linear<float>(16, 10));
/// network<float> net(std::move(layers));
/// \endcode
template <class T, class Device>
class Sequential {
 public:
  using value_type = T;
  using layer_type = any_layer<T, Device>;
  using child = detail::named_layer<T, Device>;

  Sequential() = default;
  Sequential(const Sequential&) = default;
  Sequential(Sequential&&) noexcept = default;
  Sequential& operator=(const Sequential&) = default;
  Sequential& operator=(Sequential&&) noexcept = default;
  virtual ~Sequential() = default;

  /// Appends a layer with a name, by default its number ("0", "1", ...), as PyTorch does. Throws
  /// value_error if another layer of this Sequential has that name.
  Sequential& add(std::string name, layer_type layer) {
    return insert(size(), std::move(name), std::move(layer));
  }
  Sequential& add(layer_type layer) { return add(std::to_string(children_.size()), std::move(layer)); }

  /// Number of layers, and whether there are none.
  std::size_t size() const { return children_.size(); }
  bool empty() const { return children_.empty(); }
  /// Passes and visits of a moved-from Sequential throw state_error; adding a layer to it begins a new one.
  bool is_moved_from() const { return moved_.is_set(); }
  /// Layer i < size() and its name, in execution order; not checked. Assigning to a layer replaces it.
  layer_type& operator[](std::size_t i) { return children_[i].layer; }
  const layer_type& operator[](std::size_t i) const { return children_[i].layer; }
  const std::string& name(std::size_t i) const { return children_[i].name; }
  /// Inserts a layer before layer `at`, or after all of them for at = size(); at <= size(). Throws
  /// value_error if another layer of this Sequential has that name.
  Sequential& insert(std::size_t at, std::string name, layer_type layer) {
    for (std::size_t i = 0; i < size(); ++i) {
      if (children_[i].name == name) {
        detail::throw_error<value_error>({"sequential: layers ", i, " and ", at, " are both called \"", name,
                                          "\": give each a name of its own, or none for its number"});
      }
    }
    children_.insert(children_.begin() + static_cast<std::ptrdiff_t>(at),
                     child{std::move(name), std::move(layer)});
    moved_.clear();
    return *this;
  }
  /// Removes layer i < size(); the others keep their names.
  void erase(std::size_t i) { children_.erase(children_.begin() + static_cast<std::ptrdiff_t>(i)); }

  /// Text for reports: "sequential of 5".
  virtual std::string describe() const { return "sequential of " + std::to_string(children_.size()); }

  /// Throws shape_error that names the first layer that does not fit.
  extents<4> output_shape(const extents<4>& input) const {
    detail::check_not_moved(*this);
    extents<4> shape = input;
    for (const child& c : children_) shape = shape_after(c, shape);
    return shape;
  }

  /// y = layer n - 1 (.. layer 1 (layer 0 (x))). x, y: dense; y has output_shape(x.shape()) and does not
  /// overlap x. In training, x must not change until the backward pass if abilities().reads_input, nor y if
  /// reads_output. Throws state_error for a moved-from Sequential, shape_error that names the layer that does
  /// not fit, and the errors of the layers.
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    forward_fused(ctx, x, y, {});
  }

  /// Gradients of all parameters for the last forward pass in training, layer by layer from the last one, and
  /// of x unless dx is a null view. dx, shaped as x, is overwritten; it may be dy if
  /// abilities().gradient_in_place, x if gradient_over_input, and overlaps nothing else. Throws shape_error,
  /// and state_error without a forward pass in training mode.
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    backward_fused(ctx, dy, dx, {});
  }

  /// The abilities that concern y are those of the last layer, those that concern x are those of the first
  /// layer. gradient_in_place is true if all layers have it.
  layer_abilities abilities() const {
    layer_abilities result;
    if (empty()) return result;
    const plan_type plan(children_, true);
    const layer_abilities first = children_.front().layer.abilities();
    const layer_abilities last = children_.back().layer.abilities();
    result.fuses = last.fuses;
    result.fuses_in_inference = last.fuses_in_inference;
    result.adds_gradient = first.adds_gradient;
    result.gives_gradient_sums = first.gives_gradient_sums;
    result.takes_gradient_sums = last.takes_gradient_sums;
    result.gives_pending_norm = last.gives_pending_norm;
    result.takes_pending_norm = first.takes_pending_norm;
    result.gradient_over_input = first.gradient_over_input;
    result.reads_input = first.reads_input;
    result.reads_output = plan.reads_output(plan.ending_at(size()));
    result.gradient_in_place = true;
    for (group g = plan.starting_at(0); g.begin < size(); g = plan.starting_at(g.end)) {
      result.gradient_in_place = result.gradient_in_place && plan.leader(g).abilities().gradient_in_place;
    }
    return result;
  }

  /// forward with the operations of `fusion` applied by the last layer, for a container around this one.
  /// Needs the ability `fuses`, or in inference fuses_in_inference. Aliasing and errors are those of forward.
  void forward_fused(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y,
                     const forward_fusion<T>& fusion) const {
    detail::check_not_moved(*this);
    detail::check_dense(*this, "x", x);
    detail::check_dense(*this, "y", y);
    detail::check_apart(*this, "y", y, "x", x, false);
    if (empty()) {
      check_output(x.shape(), y.shape());
      return copy_dense(ctx, x, y);
    }
    const plan_type plan(children_, ctx.training());
    scratch_frame frame(ctx.scratch()), notes(ctx.host_scratch());
    const extents<4>* shapes = shapes_for(notes, x.shape());
    check_output(shapes[size()], y.shape());
    output_state* outputs = nullptr;
    if (ctx.training()) {
      outputs = ctx.tape().template push_notes<output_state>(static_cast<index_t>(size()) + 1);
    }
    const detail::inner_places<T> places = plan.place_outputs(ctx, frame, notes, shapes, outputs, y.data());
    const auto output_of = [&](const group& g) { return tensor_view<T, 4>(places[g.end], shapes[g.end]); };
    std::optional<ops::pending_norm<T>> norm, none;  // norm: the one whose output is `input`
    tensor_view<const T, 4> input = x;
    for (group g = plan.starting_at(0); g.begin < size(); g = plan.starting_at(g.end)) {
      const tensor_view<T, 4> output = output_of(g);
      const group next = plan.starting_at(g.end);
      const bool passes = ctx.training() && plan.moments_pass(g, next);
      auto left = plan.pending_after(passes ? next : g, shapes, frame);
      forward_fusion<T> with = plan.fusion_of(next, fusion, none, left, outputs);
      scratch_frame collected(ctx.scratch());
      ops::moment_parts<T> moments(collected, with.pending ? with.pending->moments() : nullptr);
      run(ctx, plan.leader(g), g.relu, input, output,
          plan.fusion_of(g, fusion, norm, passes ? none : left, outputs), passes ? &moments : nullptr);
      input = output;
      if (passes) {
        with.moments = &moments;
        const tensor_view<T, 4> normalised = output_of(next);
        run(ctx, plan.leader(next), next.relu, output, normalised, with, nullptr);
        input = normalised;
        g = next;
      }
      norm = left;
    }
    if (ctx.training()) ctx.tape().push_value(*this, kept{x.shape(), outputs});
  }

  /// backward for a container around this one: the mask of `fusion` is applied by the last layer (ability
  /// `fuses`), which also writes `addend_gradient`; `add` by the first one (ability adds_gradient). Aliasing
  /// and errors are those of backward.
  void backward_fused(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx,
                      const backward_fusion<T>& fusion) const {
    detail::check_not_moved(*this);
    if (empty()) {
      detail::check_dense(*this, "dy", dy);
      check_gradient(dy.shape(), dx);
      return dx.is_null() ? void() : copy_dense(ctx, dy, dx);
    }
    const plan_type plan(children_, true);
    scratch_frame frame(ctx.scratch()), notes(ctx.host_scratch());
    const auto [x_shape, outputs] = ctx.tape().template pop_value<kept>(*this);
    detail::check_dense(*this, "dy", dy);
    check_gradient(x_shape, dx);
    const extents<4>* shapes = shapes_for(notes, x_shape);
    check_output(shapes[size()], dy.shape());
    const bool over_dy = !fusion.add && !dx.is_null() && dx.data() == dy.data();
    const detail::inner_places<T> places = plan.place_gradients(
        frame, notes, shapes, outputs, over_dy ? dx.data() : nullptr, ctx.parallel_gradients());
    tensor_view<const T, 4> gradient = dy;
    std::optional<ops::gradient_sums<T>> sums;  // over `gradient`
    for (group g = plan.ending_at(size()); g.end > 0; g = plan.ending_at(g.begin)) {
      backward_fusion<T> own = fusion.of_layer(g.begin == 0, g.end == size());
      if (g.relu) own.mask = ctx.tape().template pop_value<ops::relu_mask<T>>(*this);
      const tensor_view<T, 4> next = g.begin == 0 ? dx : tensor_view<T, 4>(places[g.begin], shapes[g.begin]);
      if (plan.reads_recomputed(g)) {
        plan.leader(plan.ending_at(g.begin)).recompute(ctx, outputs[g.begin].record, next);
        ctx.tape().replace_value(tensor_view<const T, 4>(next));  // the layer's view of its input is on top
      }
      if (sums) own.sums_of_dy = sums->collected();
      sums = plan.sums_for(g, outputs, frame);
      if (sums) own.sums_of_dx = &*sums;
      plan.leader(g).backward_fused(ctx, gradient, next, own);
      if (g.relu) ctx.tape().template pop<mask_word>(mask_size(shapes[g.end]));
      gradient = next;
    }
    for (std::size_t i = 1; i < size(); ++i) {
      if (outputs[i].kept != nullptr) ctx.tape().template pop<T>(shapes[i]);
    }
    ctx.tape().template pop<output_state>(static_cast<index_t>(size()) + 1);
  }

  /// Shows `visitor` the parameters and buffers of the layers in order. Names: prefix, layer, parameter.
  void visit_state(state_visitor<parameter_t<T>>& visitor, const std::string& prefix) {
    detail::check_not_moved(*this);
    for (child& c : children_) c.layer.visit_state(visitor, detail::join_name(prefix, c.name));
  }
  /// Shows `visitor` this container, then each layer in order, followed by the layers inside it.
  void visit_layers(layer_visitor<T, Device>& visitor, const std::string& prefix) {
    detail::check_not_moved(*this);
    visitor.on_sequence(prefix, *this);
    for (child& c : children_) {
      const std::string name = detail::join_name(prefix, c.name);
      visitor.on_layer(name, c.layer);
      c.layer.visit_layers(visitor, name);
    }
  }
  /// Shows `tracer` the layers that compute, in order. Throws shape_error for a layer that does not fit the
  /// output of the layer before it.
  void trace(layer_tracer<T, Device>& tracer, const extents<4>& input, const std::string& prefix) const {
    detail::check_not_moved(*this);
    extents<4> shape = input;
    for (const child& c : children_) {
      const extents<4> next = shape_after(c, shape);
      c.layer.trace(tracer, shape, detail::join_name(prefix, c.name));
      shape = next;
    }
  }
  /// Initializes all layers. Each one draws from the child of `random` with the layer's name.
  void initialize(random_stream random) {
    detail::check_not_moved(*this);
    for (child& c : children_) c.layer.initialize(random.child(c.name));
  }
  /// Multiply-accumulates of one forward pass, summed over the layers. Throws shape_error if the shapes do
  /// not fit.
  index_t macs(const extents<4>& input) const {
    detail::check_not_moved(*this);
    index_t total = 0;
    extents<4> shape = input;
    for (const child& c : children_) {
      const extents<4> next = shape_after(c, shape);
      total += c.layer.macs(shape);
      shape = next;
    }
    return total;
  }

 private:
  // The output shape of a child. Puts its name before the text of its shape_error.
  static extents<4> shape_after(const child& c, const extents<4>& input) {
    PUFFERFISH_DETAIL_TRY { return c.layer.output_shape(input); }
    PUFFERFISH_DETAIL_CATCH(shape_error, e) { PUFFERFISH_THROW(shape_error(c.name + ": " + e.what())); }
  }

  // The passes of a Sequential without layers.
  static void copy_dense(context<Device>& ctx, const tensor_view<const T, 4>& from,
                         const tensor_view<T, 4>& to) {
    if (from.data() != to.data()) ops::copy_elements<T>(ctx, from.data(), to.data(), to.size());
  }

  // Throw shape_error unless an output, or dx, has the expected shape.
  void check_output(const extents<4>& expected, const extents<4>& given) const {
    if (expected != given) {
      PUFFERFISH_THROW(shape_error(describe() + ": the output is " + to_string<4>(expected) + ", not " +
                                   to_string<4>(given)));
    }
  }

  void check_gradient(const extents<4>& x, const tensor_view<T, 4>& dx) const {
    if (dx.is_null()) return;
    if (dx.shape() != x) {
      detail::throw_error<shape_error>({describe(), ": dx ", dx.shape(), " is not shaped as x ", x});
    }
    detail::check_dense(*this, "dx", dx);
  }

  // The input's shape and each layer's output shape; in scratch, since a step must not allocate.
  const extents<4>* shapes_for(scratch_frame& notes, const extents<4>& input) const {
    auto* shapes = notes.template take<extents<4>>(static_cast<index_t>(size()) + 1);
    shapes[0] = input;
    for (std::size_t i = 0; i < size(); ++i) shapes[i + 1] = shape_after(children_[i], shapes[i]);
    return shapes;
  }

  using mask_word = typename ops::relu_mask<T>::word;
  using plan_type = detail::sequence_plan<T, Device>;
  using group = typename plan_type::group;
  using output_state = typename plan_type::output_state;
  // What the forward pass leaves on the tape.
  struct kept {
    extents<4> x_shape;
    output_state* outputs;  // index: the child that reads the output
  };

  static index_t mask_size(const extents<4>& shape) {
    return ops::relu_mask<T>::size({shape[0] * shape[1] * shape[2], shape[3]});
  }

  // Runs the forward pass of one group. `relu`: whether the layer fuses with the ReLU after it, whose mask is
  // then kept.
  void run(context<Device>& ctx, const layer_type& layer, bool relu, const tensor_view<const T, 4>& x,
           const tensor_view<T, 4>& y, forward_fusion<T> fusion, ops::moment_parts<T>* moments) const {
    if (relu) {
      fusion.relu = true;
      if (ctx.training()) fusion.mask.words = ctx.tape().template push<mask_word>(mask_size(y.shape()));
    }
    layer.forward_fused(ctx, x, y, fusion, moments);
    // The mask is pushed last, to the top of the tape, because the backward pass needs it first.
    if (!fusion.mask.is_null() && relu) ctx.tape().push_value(*this, fusion.mask);
  }

  std::vector<child> children_;
  detail::move_mark moved_;
};

template <class T, class Device = device::cpu>
using sequential [[deprecated("renamed to Sequential")]] = Sequential<T, Device>;

PUFFERFISH_NAMESPACE_END
