// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Base classes of objects that visit the layers of a network: their parameters and buffers, the slots
/// (members that hold a replaceable layer), or their shapes.

#include <string>
#include <type_traits>

#include <pufferfish/core/device.hpp>
#include <pufferfish/core/parameter.hpp>

PUFFERFISH_NAMESPACE_BEGIN

template <class T, class Device = device::cpu>
class any_layer;
template <class T, class Device = device::cpu>
class Sequential;

/// Receives the state of a network, name by name. Names are joined by dots, "layer1.0.conv1.weight".
/// References are valid as long as the network keeps its layers.
///
/// \code
/// struct counter final : state_visitor<float> {
///   void on_parameter(const std::string&, parameter<float>& p) override { count += p.size(); }
///   void on_buffer(const std::string&, state_buffer<float>&) override {}
///   index_t count = 0;
/// } visitor;
/// layer.visit_state(visitor);
/// \endcode
template <class T>
class state_visitor {
 public:
  virtual ~state_visitor() = default;
  virtual void on_parameter(const std::string& name, parameter<T>& p) = 0;
  virtual void on_buffer(const std::string& name, state_buffer<T>& b) = 0;
};

/// Receives the layers of a network, name by name; `slot` may be replaced by another layer of the same shape.
/// A visit calls on_sequence for a container, then on_layer for each of its layers, each followed by the
/// visit of the layers inside. Layers may be replaced only in visits of model::modify and model::rearrange; a
/// visit of a const model may not change its slots.
template <class T, class Device>
class layer_visitor {
 public:
  virtual ~layer_visitor() = default;
  virtual void on_layer(const std::string& name, any_layer<T, Device>& slot) = 0;
  /// Receives each Sequential as a whole, before its layers: may replace layers, and take some out.
  virtual void on_sequence(const std::string& /*prefix*/, Sequential<T, Device>& /*layers*/) {}
  /// Receives the slot of a model's embedding (see any_layer::tokens), which may be replaced by
  /// another embedding of the same vocabulary and width. Embeddings are not passed to on_layer, so
  /// that policies do not count them as layers.
  virtual void on_embedding(const std::string& /*name*/, any_layer<T, Device>& /*slot*/) {}
  /// Called before the visit of the shortcut of a residual block.
  virtual void enter_shortcut() {}
  /// Called after the visit of the shortcut of a residual block.
  virtual void leave_shortcut() {}
};

/// Receives the layers that compute (no containers) with their shapes for a given input.
template <class T, class Device>
class layer_tracer {
 public:
  virtual ~layer_tracer() = default;
  virtual void on_trace(const std::string& name, const any_layer<T, Device>& layer, const extents<4>& input,
                        const extents<4>& output) = 0;
};

namespace detail {

/// The address of type_tag<L> identifies L without RTTI. Not const: linkers may merge equal constants.
template <class L>
inline char type_tag = 0;

/// Joins two parts of a name by a dot, unless one is empty: join_name("layer1", "conv") is "layer1.conv".
inline std::string join_name(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : name.empty() ? prefix : prefix + "." + name;
}

/// Passes the state of one layer to a visitor, with names below `prefix`.
template <class T>
struct named_forwarder {
  state_visitor<T>& visitor;
  const std::string& prefix;
  void operator()(const char* name, parameter<T>& p) const {
    visitor.on_parameter(join_name(prefix, name), p);
  }
  void operator()(const char* name, state_buffer<T>& b) const {
    visitor.on_buffer(join_name(prefix, name), b);
  }
};

/// Visits the state of a layer, or a parameter, under the name `name`. A layer is visited by its member
/// visit_state(visitor, name) or visit(f). A layer without both has no state.
template <class T, class Part>
void visit_state_of(Part& part, [[maybe_unused]] state_visitor<T>& visitor,
                    [[maybe_unused]] const std::string& name) {
  if constexpr (std::is_same_v<Part, parameter<T>>) {
    visitor.on_parameter(name, part);
  } else if constexpr (requires { part.visit_state(visitor, name); }) {
    part.visit_state(visitor, name);
  } else if constexpr (requires { part.visit(named_forwarder<T>{visitor, name}); }) {
    part.visit(named_forwarder<T>{visitor, name});
  }
}

/// Calls f(name, parameter) for each parameter of a layer or a model, in execution order.
template <class Layer, class F>
void for_each_parameter(Layer& layer, F&& f) {
  using T = parameter_t<typename Layer::value_type>;
  struct caller final : state_visitor<T> {
    explicit caller(F& function) : call(function) {}
    void on_parameter(const std::string& name, parameter<T>& p) override { call(name, p); }
    void on_buffer(const std::string&, state_buffer<T>&) override {}
    F& call;
  } visitor(f);
  visit_state_of<T>(layer, visitor, {});
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
