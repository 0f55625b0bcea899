// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `host_torch::onnx_exporter` turns modules of libtorch into nodes of an ONNX graph; `export_form_of` says
/// how a module of a program's own is written. onnx_layers.hpp has the forms of libtorch's modules.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <pufferfish/adapters/onnx/graph.hpp>
#include <pufferfish/adapters/torch/module_places.hpp>
#include <pufferfish/nn/containers/layer_visitors.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {

/// An extent of a tensor: a number, or the name of an axis whose length is free.
using onnx_axis = onnx_graph<float>::axis;

/// A value in the graph. Images are [batch][channels][height][width], as in libtorch.
struct onnx_tensor {
  std::string name;
  std::vector<onnx_axis> shape;
  bool tokens = false;  ///< elements are INT64, else FLOAT
};

class onnx_exporter;

/// Writes a module called `path` with input x if its type is the one that the function is made for; returns
/// its output, or nullopt for another type.
using export_form = std::function<std::optional<onnx_tensor>(
    onnx_exporter& to, const std::string& path, const torch::nn::Module& module, const onnx_tensor& x)>;

/// Returns an export form: the function that onnx_exporter uses for modules whose exact type is Module.
/// write(to, path, module, x) adds the ONNX nodes of the module's forward function for the input x and
/// returns the output. `path` is the module's name in its root. For other types the form returns nullopt.
///
/// \code
/// // forward(x): x + relu(fc->forward(x))
/// const auto block = host_torch::export_form_of<BlockImpl>(
///     [](host_torch::onnx_exporter& to, const std::string& path, const BlockImpl& m,
///        const host_torch::onnx_tensor& x) {
///       const auto y = to.node("Relu", path + ".relu", to.write(path + ".fc", *m.fc, x));
///       return host_torch::onnx_tensor{to.graph().node("Add", path + ".add", {x.name, y.name}), x.shape};
///     });
/// \endcode
template <class Module, class Write>
export_form export_form_of(Write write) {
  return [write](onnx_exporter& to, const std::string& path, const torch::nn::Module& module,
                 const onnx_tensor& x) -> std::optional<onnx_tensor> {
    const Module* const own = detail::exactly<Module>(module);
    if (own == nullptr) return std::nullopt;
    return write(to, path, *own, x);
  };
}

/// Adds the nodes of modules to a graph. Nodes have the paths of modules as names, and weights those of
/// parameters and buffers, as in named_parameters() of the root. The modules must keep their tensors as long
/// as the graph is used.
class onnx_exporter {
 public:
  /// Makes an exporter with an empty graph. `forms` are tried in order; they must outlive the object.
  explicit onnx_exporter(const std::vector<export_form>& forms) : forms_(forms) {}

  onnx_graph<float>& graph() { return graph_; }

  /// Adds the nodes of a module called `path` (empty: the root) with input x. Throws value_error, with path
  /// and type of the module, for a module without a form or with options that ONNX's operators do not have,
  /// and shape_error if x does not fit.
  onnx_tensor write(const std::string& path, const torch::nn::Module& module, const onnx_tensor& x) {
    if (const auto* slot = dynamic_cast<const detail::slot_base*>(&module)) {
      return write(path, *slot->held(), x);
    }
    for (const export_form& one : forms_) {
      if (std::optional<onnx_tensor> y = one(*this, path, module, x)) return std::move(*y);
    }
    refuse(path, module, "has no form in ONNX; onnx_export_options::forms may define one");
  }

  /// Adds a node `op` with the single input x and returns its output, which has the shape of x. Throws
  /// shape_error if x.tokens is true, that is if x holds integer token numbers.
  onnx_tensor node(const std::string& op, const std::string& name, const onnx_tensor& x,
                   const std::vector<onnx_attribute>& attributes = {}) {
    if (x.tokens) {
      detail::throw_error<shape_error>({"export_onnx: node ", pufferfish::detail::quote_name(name), " (", op,
                                        ") has ", shape_text(x), " as input"});
    }
    return {graph_.node(op, name, {x.name}, attributes), x.shape};
  }

  /// Adds a parameter or buffer of at most four dimensions and returns its name. The file stores FLOAT;
  /// tensors of another scalar type or device are copied. Errors are those of view().
  std::string weight(const std::string& name, const Tensor& values) {
    const tensor_view<float, 4> elements = view(name, values);
    return graph_.weight(name, values.sizes().vec(), {elements});
  }
  /// Adds a parameter or buffer like weight(). For an undefined tensor it adds nothing and returns an empty
  /// name.
  std::string optional_weight(const std::string& name, const Tensor& values) {
    return values.defined() ? weight(name, values) : std::string();
  }
  /// Returns the elements of a tensor as FLOAT on the CPU, valid as long as this object. Throws value_error,
  /// with `name`, for an undefined tensor, and for one that is not dense or not of floating-point numbers.
  tensor_view<float, 4> view(const std::string& name, const Tensor& values) {
    if (!values.defined() || values.layout() != torch::kStrided || !values.is_floating_point() ||
        values.dim() > 4) {
      detail::throw_error<value_error>(
          {"export_onnx: ", pufferfish::detail::quote_name(name), " is ",
           values.defined() ? detail::kind_text(values) : std::string("undefined"),
           ", where a dense tensor of floating-point numbers is wanted"});
    }
    kept_.push_back(values.detach().to(torch::kCPU, torch::kFloat));
    const Tensor& own = kept_.back();
    extents<4> shape{1, 1, 1, 1}, strides{1, 1, 1, 1};
    for (std::int64_t d = 0; d < own.dim(); ++d) {
      shape[static_cast<std::size_t>(d)] = own.size(d);
      strides[static_cast<std::size_t>(d)] = own.stride(d);
    }
    return {own.data_ptr<float>(), shape, strides};
  }

  /// Text about a module for errors, such as "module 'features.0' (torch::nn::Conv2dImpl)".
  static std::string describe(const std::string& path, const torch::nn::Module& module) {
    const std::string place =
        path.empty() ? std::string("the root module") : "module " + pufferfish::detail::quote_name(path);
    return "export_onnx: " + place + " (" + module.name() + ")";
  }
  [[noreturn]] static void refuse(const std::string& path, const torch::nn::Module& module,
                                  const std::string& why) {
    detail::throw_error<value_error>({describe(path, module), " ", why});
  }

  /// Throws shape_error unless x is a tensor of floating-point numbers with `dimensions` dimensions (0: at
  /// least one) whose extent `axis` (negative: counted from the end) is `extent` or free.
  static void check(const std::string& path, const torch::nn::Module& module, const onnx_tensor& x,
                    std::size_t dimensions, std::int64_t axis, index_t extent) {
    const auto size = static_cast<std::int64_t>(x.shape.size());
    const std::int64_t at = axis < 0 ? axis + size : axis;
    bool fits =
        !x.tokens && (dimensions == 0 ? size > 0 : x.shape.size() == dimensions) && at >= 0 && at < size;
    if (fits) {
      const auto* length = std::get_if<index_t>(&x.shape[static_cast<std::size_t>(at)]);
      fits = length == nullptr || *length == extent;
    }
    if (fits) return;
    detail::throw_error<shape_error>({describe(path, module), ": input ", shape_text(x), " where extent ",
                                      axis, dimensions == 0 ? "" : detail::message({" of ", dimensions}),
                                      " is ", extent});
  }
  /// Returns extent `axis` of x as a number. Throws shape_error if the extent is free.
  static index_t extent(const std::string& path, const torch::nn::Module& module, const onnx_tensor& x,
                        std::size_t axis) {
    if (axis < x.shape.size()) {
      if (const auto* length = std::get_if<index_t>(&x.shape[axis])) return *length;
    }
    detail::throw_error<shape_error>(
        {describe(path, module), ": input ", shape_text(x), " where extent ", axis, " is a number"});
  }

  /// Text of the type and shape of x for errors, such as "tokens [batch x 35]".
  static std::string shape_text(const onnx_tensor& x) {
    std::string text = x.tokens ? "tokens [" : "[";
    for (std::size_t d = 0; d < x.shape.size(); ++d) {
      const auto* length = std::get_if<index_t>(&x.shape[d]);
      text += (d > 0 ? " x " : "") +
              (length != nullptr ? std::to_string(*length) : std::get<std::string>(x.shape[d]));
    }
    return text + "]";
  }

 private:
  const std::vector<export_form>& forms_;
  onnx_graph<float> graph_;
  std::vector<Tensor> kept_;
};

/// Returns the form of containers of type Module, derived from torch::nn::SequentialImpl, whose forward
/// function runs the elements in order. libtorch's own Sequential cannot be an element of another Sequential,
/// because its forward function is a template; a class derived from it can. Elements are called by their
/// keys.
///
/// \code
/// struct StackImpl : torch::nn::SequentialImpl {
///   using SequentialImpl::SequentialImpl;
///   torch::Tensor forward(torch::Tensor x) { return SequentialImpl::forward(x); }
/// };
/// const auto form = host_torch::sequence_form<StackImpl>();
/// \endcode
template <class Module>
export_form sequence_form() {
  return export_form_of<Module>(
      [](onnx_exporter& to, const std::string& path, const torch::nn::SequentialImpl& m, onnx_tensor x) {
        const auto children = m.named_children();
        for (std::size_t i = 0; i < m.size(); ++i) {
          // A container may have other children than its elements, but registers its elements first.
          const bool named = i < children.size() && children[i].value() == m.ptr(i);
          const std::string key = named ? children[i].key() : std::to_string(i);
          x = to.write(pufferfish::detail::join_name(path, key), *m.ptr(i), x);
        }
        return x;
      });
}

}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
