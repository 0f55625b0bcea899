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
    scratch_frame frame(ctx.scratch());
    const extents<4>* shapes = shapes_for(frame, x.shape());
    check_output(shapes[size()], y.shape());
    T* blocks[2] = {};
    if (!ctx.training()) take_blocks(frame, shapes, blocks);
    tensor_view<const T, 4> input = x;
    for (std::size_t i = 0; i < size(); ++i) {
      const bool last = i + 1 == size();
      const tensor_view<T, 4> output = last             ? y
                                       : ctx.training() ? ctx.tape().template push<T>(shapes[i + 1])
                                                        : tensor_view<T, 4>(blocks[i % 2], shapes[i + 1]);
      children_[i].layer.forward(ctx, input, output);
      input = output;
    }
    if (ctx.training()) ctx.tape().push_value(x.shape());
  }

  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    if (empty()) return dx.is_null() ? void() : copy(dy, dx);
    scratch_frame frame(ctx.scratch());
    const extents<4>* shapes = shapes_for(frame, ctx.tape().template pop_value<extents<4>>());
    check_output(shapes[size()], dy.shape());
    T* blocks[2] = {};
    take_blocks(frame, shapes, blocks);
    tensor_view<const T, 4> gradient = dy;
    for (std::size_t i = size(); i-- > 0;) {
      const tensor_view<T, 4> next = i == 0 ? dx : tensor_view<T, 4>(blocks[(i - 1) % 2], shapes[i]);
      children_[i].layer.backward(ctx, gradient, next);
      if (i + 1 < size()) ctx.tape().template pop<T>(shapes[i + 1]);
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

  // Two blocks that hold, in turn, what flows between the layers.
  void take_blocks(scratch_frame& frame, const extents<4>* shapes, T* (&blocks)[2]) const {
    index_t largest[2] = {0, 0};
    for (std::size_t i = 0; i + 1 < size(); ++i) {
      largest[i % 2] = std::max(largest[i % 2], volume<4>(shapes[i + 1]));
    }
    for (std::size_t b = 0; b < 2; ++b) blocks[b] = frame.template take<T>(largest[b]);
  }

  std::vector<child> children_;
};

PUFFERFISH_NAMESPACE_END
