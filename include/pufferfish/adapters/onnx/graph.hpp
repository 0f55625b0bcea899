// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `onnx_graph`: builds an ONNX graph whose weights are views of the parameters of a network. The same graph
/// is used to write the parameters to a file and to read them from a file.

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <pufferfish/adapters/onnx/tensors.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Name and value of an attribute of an ONNX node: an integer, a float, a list of integers, or text.
///
///     const onnx_attribute axis{"axis", std::int64_t{1}}, eps{"epsilon", 1e-5F};
struct onnx_attribute {
  std::string name;  ///< of the attribute, such as "axis"
  std::variant<std::int64_t, float, std::vector<std::int64_t>, std::string> value;
};

/// Builds the nodes and weights of an ONNX graph for a network of T. All floating-point values are FLOAT,
/// also for a network of double, because ONNX Runtime has no convolutions of DOUBLE.
///
/// \code
/// const std::string w = graph.weight("fc.weight", {out, in}, {view});  // view: [out][in][1][1]
/// const std::string y = graph.node("Gemm", "fc", {x, w}, {{"transB", std::int64_t{1}}});
/// \endcode
template <class T>
class onnx_graph {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>,
                "pufferfish: ONNX models are made of networks of float or double");

 public:
  /// A tensor of the file and the network's memory for it: the elements of `parts`, one after the other, each
  /// in the order of its indices, are those of the tensor.
  struct binding {
    std::string name;                      ///< of the tensor in the file
    std::vector<index_t> shape;            ///< of the tensor in the file
    std::vector<tensor_view<T, 4>> parts;  ///< memory of the network; not owned
  };
  /// Adds a weight of the network and returns its name. `parts`: memory of the network, whose elements one
  /// after the other are those of the tensor of shape `shape`; as many elements in all. A second call with
  /// the same name adds nothing: layers may share a weight. The views must stay valid as long as the graph is
  /// used.
  std::string weight(const std::string& name, std::vector<index_t> shape,
                     std::vector<tensor_view<T, 4>> parts) {
    if (names_.insert(name).second) bindings_.push_back({name, std::move(shape), std::move(parts)});
    return name;
  }
  /// Adds a vector of the network as a tensor of the given shape, which has as many elements.
  std::string vector(const std::string& name, const tensor_view<T, 1>& v, std::vector<index_t> shape = {}) {
    if (shape.empty()) shape = {v.extent(0)};
    return weight(name, std::move(shape),
                  {tensor_view<T, 4>(v.data(), {v.extent(0), 1, 1, 1}, {v.stride(0), 1, 1, 1})});
  }

  /// Adds constant elements, which no network has, under a name that begins with `name`; returns that name.
  /// U: float, or std::int64_t for shapes, axes and indices.
  template <class U>
  std::string constant(const std::string& name, const std::vector<index_t>& shape,
                       const std::vector<U>& values) {
    onnx::TensorProto& tensor = *graph_.add_initializer();
    constexpr bool floating = std::is_same_v<U, float>;
    static_assert(floating || std::is_same_v<U, std::int64_t>);
    detail::describe_tensor(tensor, fresh(name),
                            floating ? onnx::TensorProto::FLOAT : onnx::TensorProto::INT64, shape);
    tensor.set_raw_data(values.data(), values.size() * sizeof(U));
    return tensor.name();
  }
  /// Adds a FLOAT constant without dimensions, rounded from `value`, and returns its name; see constant().
  std::string scalar(const std::string& name, double value) {
    return constant<float>(name, {}, {static_cast<float>(value)});
  }

  /// Adds a node of `outputs` results and returns their names, which are new. The node is called `name`, or
  /// name_1, name_2, ... if that is used already; an empty name stands for that of the operator.
  std::vector<std::string> nodes(const std::string& op, const std::string& name,
                                 const std::vector<std::string>& inputs,
                                 const std::vector<onnx_attribute>& attributes, std::size_t outputs) {
    onnx::NodeProto& node = *graph_.add_node();
    node.set_op_type(op);
    node.set_name(fresh_node(name.empty() ? op : name));
    for (const std::string& input : inputs) node.add_input(input);
    for (const onnx_attribute& one : attributes) add_attribute(node, one);
    std::vector<std::string> names;
    for (std::size_t i = 0; i < outputs; ++i) {
      const std::string suffix = outputs > 1 ? "." + std::to_string(i) : "";
      names.push_back(fresh(node.name() + ".output" + suffix));
      node.add_output(names.back());
    }
    return names;
  }
  /// Adds a node of one result and returns the name of that result.
  std::string node(const std::string& op, const std::string& name, const std::vector<std::string>& inputs,
                   const std::vector<onnx_attribute>& attributes = {}) {
    return nodes(op, name, inputs, attributes, 1).front();
  }

  /// An extent of an input or output: a number, or the name of an axis whose length is free.
  using axis = std::variant<index_t, std::string>;
  /// Declares an input of the graph. `type`: a TensorProto::DataType.
  void input(const std::string& name, std::int32_t type, const std::vector<axis>& shape) {
    names_.insert(name);
    declare(*graph_.add_input(), name, type, shape);
  }
  /// Declares an output of the graph. Adds an Identity node, so that the value `from` gets the name of the
  /// output.
  void output(const std::string& name, const std::string& from, std::int32_t type,
              const std::vector<axis>& shape) {
    onnx::NodeProto& node = *graph_.add_node();
    node.set_op_type("Identity");
    node.set_name(fresh_node(name));
    node.add_input(from);
    node.add_output(name);
    names_.insert(name);
    declare(*graph_.add_output(), name, type, shape);
  }

  /// The last node, to which a caller may add what `nodes` cannot: a subgraph.
  onnx::NodeProto& last_node() { return *graph_.mutable_node(graph_.node_size() - 1); }

  /// The weights of the network that nodes of the graph use, in the order in which they were added.
  const std::vector<binding>& bindings() const { return bindings_; }
  /// The graph without the weights of the network.
  const onnx::GraphProto& proto() const { return graph_; }
  /// The same graph to be changed, such as to name it or to take it as the body of a Scan node.
  onnx::GraphProto& proto() { return graph_; }

 private:
  // Fills the description of an input or output.
  static void declare(onnx::ValueInfoProto& info, const std::string& name, std::int32_t type,
                      const std::vector<axis>& shape) {
    info.set_name(name);
    auto& tensor = *info.mutable_type()->mutable_tensor_type();
    tensor.set_elem_type(type);
    for (const axis& extent : shape) {
      auto& dim = *tensor.mutable_shape()->add_dim();
      if (const auto* length = std::get_if<index_t>(&extent)) dim.set_dim_value(*length);
      if (const auto* free = std::get_if<std::string>(&extent)) dim.set_dim_param(*free);
    }
  }

  // Adds an attribute to a node, with the type that its value has.
  static void add_attribute(onnx::NodeProto& node, const onnx_attribute& one) {
    onnx::AttributeProto& attribute = *node.add_attribute();
    attribute.set_name(one.name);
    if (const auto* i = std::get_if<std::int64_t>(&one.value)) {
      attribute.set_type(onnx::AttributeProto::INT);
      attribute.set_i(*i);
    } else if (const auto* f = std::get_if<float>(&one.value)) {
      attribute.set_type(onnx::AttributeProto::FLOAT);
      attribute.set_f(*f);
    } else if (const auto* s = std::get_if<std::string>(&one.value)) {
      attribute.set_type(onnx::AttributeProto::STRING);
      attribute.set_s(*s);
    } else {
      attribute.set_type(onnx::AttributeProto::INTS);
      for (const std::int64_t n : std::get<std::vector<std::int64_t>>(one.value)) attribute.add_ints(n);
    }
  }

  // `name`, or the first of name_1, name_2, ... that is not used yet.
  static std::string first_free(std::set<std::string>& used, const std::string& name) {
    std::string candidate = name;
    for (int n = 1; !used.insert(candidate).second; ++n) candidate = name + "_" + std::to_string(n);
    return candidate;
  }
  // New names of a value and of a node; the two are separate lists in ONNX.
  std::string fresh(const std::string& name) { return first_free(names_, name); }
  std::string fresh_node(const std::string& name) { return first_free(node_names_, name); }

  onnx::GraphProto graph_;
  std::vector<binding> bindings_;             // weights of the network
  std::set<std::string> names_, node_names_;  // names in use: of values, and of nodes
};

PUFFERFISH_NAMESPACE_END
