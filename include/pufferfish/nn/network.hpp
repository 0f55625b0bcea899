// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `network`: layers with their arenas, as a value.

#include <memory>
#include <string>
#include <vector>

#include <pufferfish/nn/parameter_store.hpp>
#include <pufferfish/nn/sequential.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// One computing layer of a network with the shapes that an input gives it.
struct layer_summary {
  std::string name;
  std::string description;
  extents<4> input{};
  extents<4> output{};
  index_t parameters = 0;
  index_t macs = 0;  ///< of convolutions and matrix products
};

/// A network from one image (or vector) batch to another: a layer, usually a sequential, and the arenas of
/// its parameters, gradients and buffers. Copying copies the arenas and binds the copy's layers to them.
template <class T, class Device = device::cpu>
class network {
 public:
  using value_type = T;
  using layer_type = any_layer<T, Device>;

  explicit network(layer_type root) : state_(std::make_unique<state>(std::move(root))) { pack(); }
  network(const network& other) : state_(std::make_unique<state>(other.state_->root)) { pack(); }
  network(network&&) noexcept = default;
  network& operator=(network other) noexcept {
    state_ = std::move(other.state_);
    return *this;
  }
  ~network() = default;

  /// NHWC extents of the output for an input. Throws shape_error that names the layer.
  extents<4> output_shape(const extents<4>& input) const { return state_->root.output_shape(input); }

  /// x, y: NHWC, dense; y has output_shape(x) and does not overlap x. In training mode x and y stay as they
  /// are until the backward pass.
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    state_->root.forward(ctx, x, y);
  }
  /// The same with a result of its own: convenient, allocates.
  tensor<T, 4> forward(context<Device>& ctx, const tensor_view<const T, 4>& x) const {
    tensor<T, 4> y(output_shape(x.shape()));
    forward(ctx, x, y.view());
    return y;
  }

  /// Writes the gradient arena from dy (shaped as y), and dx (shaped as x) unless it is a null view.
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy,
                const tensor_view<T, 4>& dx = {}) const {
    state_->root.backward(ctx, dy, dx);
  }

  /// Random initial values, a pure function of the seed and each layer's name.
  void initialize(std::uint64_t seed) { state_->root.initialize({seed, stream_id("initialize")}); }

  /// The arenas; see parameter_store.
  parameter_store<T>& store() { return state_->store; }
  const parameter_store<T>& store() const { return state_->store; }
  std::uint64_t generation() const { return state_->store.generation(); }
  index_t parameter_count() const { return static_cast<index_t>(state_->store.values().size()); }

  /// Lets `change(any_layer&)` work on the layers (replace some, add some), then lays out new arenas, keeping
  /// the values of all that stayed. Raises the generation.
  template <class Change>
  void modify(Change&& change) {
    change(state_->root);
    pack();
  }

  /// Calls f(name, any_layer&) for every layer below the root, containers before their contents. Layers may
  /// not be replaced here: see modify.
  template <class F>
  void for_each_layer(F&& f) const {
    struct caller final : layer_visitor<T, Device> {
      explicit caller(F& g) : call(g) {}
      void on_layer(const std::string& name, layer_type& slot) override { call(name, std::as_const(slot)); }
      F& call;
    } visitor(f);
    state_->root.visit_layers(visitor);
  }

  /// The computing layers in execution order, with parameters and multiply-accumulates for this input.
  std::vector<layer_summary> summary(const extents<4>& input) const {
    struct summarizer final : layer_tracer<T, Device> {
      void on_trace(const std::string& name, const layer_type& layer, const extents<4>& in,
                    const extents<4>& out) override {
        counter count;
        const_cast<layer_type&>(layer).visit_state(count);
        result.push_back({name, layer.describe(), in, out, count.parameters, layer.macs(in)});
      }
      std::vector<layer_summary> result;
    } tracer;
    state_->root.trace(tracer, input);
    return std::move(tracer.result);
  }

  /// Multiply-accumulates of convolutions and matrix products in one forward pass.
  index_t macs(const extents<4>& input) const { return state_->root.macs(input); }

  /// The structure in lines, "layer1.0.conv1.weight [16 x 16 x 3 x 3]": all parameters, then all buffers, in
  /// arena order. Ranks whose lines differ do not have the same network.
  std::string structure() const {
    std::string text;
    for (const auto& entry : state_->store.parameters()) {
      text += entry.name + " " + to_string(entry.thing->layout()) + "\n";
    }
    for (const auto& entry : state_->store.buffer_entries()) {
      text += entry.name + " " + to_string(entry.thing->layout()) + "\n";
    }
    return text;
  }

 private:
  // Behind a pointer, so that moving a network moves no layer and no arena.
  struct state {
    explicit state(layer_type r) : root(std::move(r)) {}
    layer_type root;
    parameter_store<T> store;
  };

  struct counter final : state_visitor<T> {
    void on_parameter(const std::string&, parameter<T>& p) override { parameters += p.size(); }
    void on_buffer(const std::string&, state_buffer<T>&) override {}
    index_t parameters = 0;
  };

  void pack() {
    state_->store.pack([this](state_visitor<T>& visitor) { state_->root.visit_state(visitor); });
  }

  std::unique_ptr<state> state_;
};

PUFFERFISH_NAMESPACE_END
