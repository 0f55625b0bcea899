// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `sequential`: named layers, one after the other.

#include <algorithm>
#include <string>
#include <vector>

#include <pufferfish/nn/any_layer.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Layers in a row. It owns the memory between them: in training every layer's output lies on the tape until
/// its backward pass is over; gradients, and outputs in inference, alternate between two blocks of scratch.
///
/// Neighbours share passes over memory where they offer to (layer_abilities): a batch norm takes the moments
/// of its input from the layer before and does the work of the ReLU behind it, whose output is then the only
/// one that is written, and whose backward pass is part of the batch norm's.
template <class T, class Device = device::cpu>
class sequential {
 public:
  using value_type = T;
  using layer_type = any_layer<T, Device>;

  struct child {
    std::string name;
    layer_type layer;
  };

  sequential() = default;

  /// Appends a layer under a name of its own; without one, its number ("0", "1", ...), as PyTorch does.
  sequential& add(std::string name, layer_type layer) {
    children_.push_back({std::move(name), std::move(layer)});
    return *this;
  }
  sequential& add(layer_type layer) { return add(std::to_string(children_.size()), std::move(layer)); }

  std::size_t size() const { return children_.size(); }
  bool empty() const { return children_.empty(); }
  layer_type& operator[](std::size_t i) { return children_[i].layer; }
  const layer_type& operator[](std::size_t i) const { return children_[i].layer; }

  std::string describe() const { return "sequential of " + std::to_string(children_.size()); }

  /// Throws shape_error that names the first layer that does not fit.
  extents<4> output_shape(const extents<4>& input) const {
    extents<4> shape = input;
    for (const child& c : children_) shape = shape_after(c, shape);
    return shape;
  }

  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    if (empty()) return copy(x, y);
    forward_fused(ctx, x, y, {});
  }

  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    if (empty()) return dx.is_null() ? void() : copy(dy, dx);
    backward_fused(ctx, dy, dx, {});
  }

  /// Those of its last layer for what follows it, of its first layer for what it follows.
  layer_abilities abilities() const {
    layer_abilities result;
    if (empty()) return result;
    result.fuses = children_.back().layer.abilities().fuses;
    result.adds_gradient = children_.front().layer.abilities().adds_gradient;
    return result;
  }

  /// For a container around this one; fusion as the last layer takes it. Not for an empty one.
  void forward_fused(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y,
                     const forward_fusion<T>& fusion) const {
    scratch_frame frame(ctx.scratch());
    const extents<4>* shapes = shapes_for(frame, x.shape());
    check_output(shapes[size()], y.shape());
    const placement inner = ctx.training() ? placement() : place_outputs(frame, shapes);
    tensor_view<const T, 4> input = x;
    const auto output_of = [&](const group& g) {
      return g.end == size()  ? y
             : ctx.training() ? ctx.tape().template push<T>(shapes[g.end])
                              : inner.at(g.end, shapes);
    };
    for (group g = group_from(0); g.begin < size(); g = group_from(g.end)) {
      const tensor_view<T, 4> output = output_of(g);
      const group next = group_from(g.end);
      if (!ctx.training() || !moments_pass(g, next)) {
        run(ctx, g, input, output, fusion, nullptr, nullptr);
        input = output;
        continue;
      }
      scratch_frame collected(ctx.scratch());
      ops::moment_parts<T> moments(collected);
      run(ctx, g, input, output, fusion, nullptr, &moments);
      const tensor_view<T, 4> normalised = output_of(next);
      run(ctx, next, output, normalised, fusion, &moments, nullptr);
      input = normalised;
      g = next;
    }
    if (ctx.training()) ctx.tape().push_value(x.shape());
  }

  /// For a container around this one. Not for an empty one.
  void backward_fused(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx,
                      const backward_fusion<T>& fusion) const {
    scratch_frame frame(ctx.scratch());
    const extents<4>* shapes = shapes_for(frame, ctx.tape().template pop_value<extents<4>>());
    check_output(shapes[size()], dy.shape());
    const placement inner = place_gradients(frame, shapes);
    tensor_view<const T, 4> gradient = dy;
    for (group g = group_to(size()); g.end > 0; g = group_to(g.begin)) {
      backward_fusion<T> own;
      if (g.end == size()) own.mask = fusion.mask;
      if (g.begin == 0) own.add = fusion.add;
      if (g.relu) own.mask = ctx.tape().template pop_value<ops::relu_mask<T>>();
      const tensor_view<T, 4> next = g.begin == 0 ? dx : inner.at(g.begin, shapes);
      children_[g.begin].layer.backward_fused(ctx, gradient, next, own);
      if (g.relu) ctx.tape().template pop<mask_word>(mask_size(shapes[g.end]));
      if (g.end < size()) ctx.tape().template pop<T>(shapes[g.end]);
      gradient = next;
    }
  }

  void visit_state(state_visitor<T>& visitor, const std::string& prefix) {
    for (child& c : children_) c.layer.visit_state(visitor, detail::join_name(prefix, c.name));
  }
  void visit_layers(layer_visitor<T, Device>& visitor, const std::string& prefix) {
    for (child& c : children_) {
      const std::string name = detail::join_name(prefix, c.name);
      visitor.on_layer(name, c.layer);
      c.layer.visit_layers(visitor, name);
    }
  }
  void trace(layer_tracer<T, Device>& tracer, const extents<4>& input, const std::string& prefix) const {
    extents<4> shape = input;
    for (const child& c : children_) {
      c.layer.trace(tracer, shape, detail::join_name(prefix, c.name));
      shape = c.layer.output_shape(shape);
    }
  }
  void initialize(random_stream random) {
    for (child& c : children_) c.layer.initialize(random.child(c.name));
  }
  index_t macs(const extents<4>& input) const {
    index_t total = 0;
    extents<4> shape = input;
    for (const child& c : children_) {
      total += c.layer.macs(shape);
      shape = c.layer.output_shape(shape);
    }
    return total;
  }

 private:
  static extents<4> shape_after(const child& c, const extents<4>& input) {
    try {
      return c.layer.output_shape(input);
    } catch (const shape_error& e) {
      PUFFERFISH_THROW(shape_error(c.name + ": " + e.what()));
    }
  }

  void check_output(const extents<4>& expected, const extents<4>& given) const {
    if (expected != given) {
      PUFFERFISH_THROW(shape_error(describe() + ": the output is " + to_string<4>(expected) + ", not " +
                                   to_string<4>(given)));
    }
  }

  // The input's shape and each layer's output shape; in scratch, since a step must not allocate.
  const extents<4>* shapes_for(scratch_frame& frame, const extents<4>& input) const {
    auto* shapes = frame.template take<extents<4>>(static_cast<index_t>(size()) + 1);
    shapes[0] = input;
    for (std::size_t i = 0; i < size(); ++i) shapes[i + 1] = shape_after(children_[i], shapes[i]);
    return shapes;
  }

  // Children begin .. end - 1 that run as one: a layer, or one that fuses with the ReLU behind it.
  struct group {
    std::size_t begin, end;
    bool relu;
  };
  bool fused_at(std::size_t i) const {
    return i + 1 < size() && children_[i + 1].layer.abilities().is_relu &&
           children_[i].layer.abilities().fuses;
  }
  group group_from(std::size_t begin) const {
    const bool relu = fused_at(begin);
    return {begin, std::min(size(), begin + (relu ? 2 : 1)), relu};
  }
  group group_to(std::size_t end) const {
    const bool relu = end >= 2 && fused_at(end - 2);
    return {end - std::min<std::size_t>(end, relu ? 2 : 1), end, relu};
  }

  using mask_word = typename ops::relu_mask<T>::word;
  static index_t mask_size(const extents<4>& shape) {
    return ops::relu_mask<T>::size({shape[0] * shape[1] * shape[2], shape[3]});
  }

  bool moments_pass(const group& from, const group& to) const {
    return !from.relu && to.begin < size() && children_[from.begin].layer.abilities().gives_moments &&
           children_[to.begin].layer.abilities().takes_moments;
  }

  void run(context<Device>& ctx, const group& g, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y,
           const forward_fusion<T>& outer, const ops::moment_parts<T>* taken,
           ops::moment_parts<T>* given) const {
    forward_fusion<T> own;
    if (g.end == size()) own = outer;
    own.moments = taken;
    if (g.relu) {
      own.relu = true;
      if (ctx.training()) own.mask.words = ctx.tape().template push<mask_word>(mask_size(y.shape()));
    }
    children_[g.begin].layer.forward_fused(ctx, x, y, own, given);
    // On top, where the backward pass needs it first.
    if (!own.mask.is_null() && g.relu) ctx.tape().push_value(own.mask);
  }

  // Which of two blocks of scratch holds what flows between children i - 1 and i.
  struct placement {
    T* blocks[2] = {};
    const unsigned char* which = nullptr;
    tensor_view<T, 4> at(std::size_t i, const extents<4>* shapes) const {
      return {blocks[which[i]], shapes[i]};
    }
  };

  placement take_blocks(scratch_frame& frame, const unsigned char* which, const index_t (&largest)[2]) const {
    placement result;
    result.which = which;
    for (std::size_t b = 0; b < 2; ++b) result.blocks[b] = frame.template take<T>(largest[b]);
    return result;
  }

  // Outputs in inference: the blocks in turn.
  placement place_outputs(scratch_frame& frame, const extents<4>* shapes) const {
    auto* which = frame.template take<unsigned char>(static_cast<index_t>(size()) + 1);
    index_t largest[2] = {0, 0};
    unsigned char block = 0;
    for (group g = group_from(0); g.end < size(); g = group_from(g.end)) {
      which[g.end] = block;
      largest[block] = std::max(largest[block], volume<4>(shapes[g.end]));
      block = block == 0 ? 1 : 0;
    }
    return take_blocks(frame, which, largest);
  }

  // Gradients: in turn, too, but where a layer can, its dx takes the place of its dy: what is only written
  // must be fetched from memory first. The outermost dy is somebody else's.
  placement place_gradients(scratch_frame& frame, const extents<4>* shapes) const {
    auto* which = frame.template take<unsigned char>(static_cast<index_t>(size()) + 1);
    index_t largest[2] = {0, 0};
    unsigned char block = 2;  // none yet
    for (group g = group_to(size()); g.begin > 0; g = group_to(g.begin)) {
      const bool stays = block < 2 && children_[g.begin].layer.abilities().gradient_in_place;
      if (!stays) block = block == 0 ? 1 : 0;
      which[g.begin] = block;
      largest[block] = std::max(largest[block], volume<4>(shapes[g.begin]));
    }
    return take_blocks(frame, which, largest);
  }

  std::vector<child> children_;
};

PUFFERFISH_NAMESPACE_END
