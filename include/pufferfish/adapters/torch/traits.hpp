// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// layer_traits of libtorch's Linear, Conv2d, Embedding, LSTM and MultiheadAttention. svd_factorize and
/// svd_factors use them to make low-rank layers of pufferfish, or plain factors, from these modules.
///
///     torch::nn::Conv2d conv(torch::nn::Conv2dOptions(64, 128, 3).padding(1));
///     auto low_rank = pufferfish::svd_factorize<16>(*conv);                       // of float
///     auto doubles = pufferfish::svd_factorize<16>(host_torch::of<double>(*conv));
///     auto second = pufferfish::svd_factorize<32>(host_torch::of<float>(*lstm, 1));  // layer 1 of an LSTM
///
/// The scalar of a libtorch module is known at run time only, that of a pufferfish layer at compile time: a
/// bare module is read as float; `of<T>` chooses another scalar. Views refer to the module's memory on the
/// CPU. A module that has no factors throws value_error with its description: another scalar or device,
/// padding other than zeros, an embedding with max_norm or sparse gradients, an LSTM with two directions or a
/// projection, attention whose keys have a width of their own.

#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/torch/tensor.hpp>
#include <pufferfish/lowrank/factorization/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// Layer number that stands for the only layer of an LSTM that has one layer.
inline constexpr std::int64_t only_layer = -1;

/// Whether a view shows a module's numbers, or only the sizes of its weights, for any scalar and device.
enum class contents { numbers, sizes };

}  // namespace detail

/// A module read as one of scalar T; for an LSTM, one of its layers. Made by `of` or from a bare module.
/// Refers to the module, which must outlive it. `contents::sizes` is for policies that need shapes only.
template <class Module, class T>
struct scalar_view {
  scalar_view(const Module& m, std::int64_t number = detail::only_layer,  // NOLINT: converts
              detail::contents what = detail::contents::numbers)
      : module(&m), layer(number), shown(what) {}

  const Module* module;    ///< not owned
  std::int64_t layer;      ///< number of the layer of an LSTM
  detail::contents shown;  ///< numbers, or sizes only
};

/// Returns a view of `module`, or of layer `layer` of an LSTM, with weights of type T (float or double).
/// Layers are numbered from 0. The module must outlive the view. Nothing is checked until the traits are
/// used.
template <class T, class Module>
scalar_view<Module, T> of(const Module& module, std::int64_t layer = 0) {
  return {module, layer};
}

namespace detail {

/// An array of height and width, as libtorch's options have it, as a size2.
template <class Array>
size2 size_of(const Array& height_and_width) {
  return {height_and_width[0], height_and_width[1]};
}

/// Returns the geometry that the options of a convolution describe. Padding `same` becomes the number of
/// pixels on each side, and `valid` 0. Throws value_error, naming `layer`, for padding other than zeros, and
/// for padding `same` whose two sides would differ.
template <class Options>
conv_shape shape_of(const Options& options, const std::string& layer) {
  if (get_if<torch::enumtype::kZeros>(&options.padding_mode()) == nullptr) {
    throw_error<value_error>({layer, ": pads with something else than zeros"});
  }
  conv_shape shape;
  shape.in_channels = options.in_channels();
  shape.out_channels = options.out_channels();
  shape.kernel = size_of(*options.kernel_size());
  shape.stride = size_of(*options.stride());
  shape.dilation = size_of(*options.dilation());
  shape.groups = options.groups();
  if (const auto* padding = get_if<torch::ExpandingArray<2>>(&options.padding())) {
    shape.padding = size_of(**padding);
  } else if (get_if<torch::enumtype::kSame>(&options.padding()) != nullptr) {
    const index_t height = shape.dilation.height * (shape.kernel.height - 1);
    const index_t width = shape.dilation.width * (shape.kernel.width - 1);
    if (height % 2 != 0 || width % 2 != 0) {
      throw_error<value_error>({layer, ": padding `same` is not the same on both sides here"});
    }
    shape.padding = {height / 2, width / 2};
  }
  return shape;
}

/// A weight or a bias of a module, or a part of a stacked one; undefined if the module has none.
struct named_tensor {
  const char* name;
  Tensor values;
};
using named_tensors = std::vector<named_tensor>;

/// Appends the equal parts of a tensor that stacks them in the first dimension. The parts are detached views
/// of `packed`; an undefined `packed` gives undefined parts.
inline void append_parts(named_tensors& to, const Tensor& packed, std::initializer_list<const char*> names) {
  std::size_t part = 0;
  for (const char* name : names) {
    const auto count = static_cast<std::int64_t>(names.size());
    to.push_back({name, packed.defined() ? packed.detach().tensor_split(count)[part] : packed});
    ++part;
  }
}

/// Describes a libtorch module for layer_traits; there is no general definition. `kind`; the module's
/// description; the number of `layers`, which are factorized one by one; weights and biases of one layer, in
/// the order of layer_traits. `weights` throws value_error for a module that cannot be factorized. Some kinds
/// have `shape`, `heads` or `padding`, as in layer_traits.
template <class Module>
struct module_traits;

/// The weight of torch::nn::Linear is one matrix [out][in].
template <>
struct module_traits<torch::nn::LinearImpl> {
  using module = torch::nn::LinearImpl;
  static constexpr auto kind = layer_kind::linear;
  static std::string describe(const module& m) {
    return message({"torch::nn::Linear ", m.options.in_features(), " -> ", m.options.out_features()});
  }
  static std::int64_t layers(const module&) { return 1; }
  static named_tensors weights(const module& m, std::int64_t) { return {{"weight", m.weight}}; }
  static named_tensors biases(const module& m, std::int64_t) { return {{"bias", m.bias}}; }
};

/// The weight [out][in / groups][height][width] of torch::nn::Conv2d is one matrix per group. padding `same`
/// is a number only if it is equal on both sides.
template <>
struct module_traits<torch::nn::Conv2dImpl> {
  using module = torch::nn::Conv2dImpl;
  static constexpr auto kind = layer_kind::conv;
  static std::string describe(const module& m) {
    const auto& kernel = *m.options.kernel_size();
    return message({"torch::nn::Conv2d ", m.options.in_channels(), " -> ", m.options.out_channels(),
                    ", kernel ", kernel[0], "x", kernel[1]});
  }
  static conv_shape shape(const module& m) { return shape_of(m.options, describe(m)); }
  static std::int64_t layers(const module&) { return 1; }
  static named_tensors weights(const module& m, std::int64_t) { return {{"weight", m.weight}}; }
  static named_tensors biases(const module& m, std::int64_t) { return {{"bias", m.bias}}; }
};

/// The weight of torch::nn::Embedding is one table [num_embeddings][embedding_dim], without bias.
template <>
struct module_traits<torch::nn::EmbeddingImpl> {
  using module = torch::nn::EmbeddingImpl;
  static constexpr auto kind = layer_kind::embedding;
  static std::string describe(const module& m) {
    return message({"torch::nn::Embedding ", m.options.num_embeddings(), " x ", m.options.embedding_dim()});
  }
  /// The padding index; no_token without one. Throws value_error for an index above 2^31 - 1.
  static std::int32_t padding(const module& m) {
    const auto index = m.options.padding_idx();
    if (index && *index > std::numeric_limits<std::int32_t>::max()) {
      throw_error<value_error>({describe(m), ": padding_idx ", *index, " does not fit 32 bits"});
    }
    return index ? static_cast<std::int32_t>(*index) : no_token;
  }
  static std::int64_t layers(const module&) { return 1; }
  static named_tensors weights(const module& m, std::int64_t) {
    const char* option = m.options.sparse()               ? "sparse gradients"
                         : m.options.max_norm()           ? "max_norm"
                         : m.options.scale_grad_by_freq() ? "scale_grad_by_freq"
                                                          : nullptr;
    if (option != nullptr) {
      throw_error<value_error>({describe(m), ": has ", option, ", which a low-rank embedding does not have"});
    }
    return {{"weight", m.weight}};
  }
  static named_tensors biases(const module&, std::int64_t) { return {}; }
};

/// libtorch stacks the gates i, f, g, o in the first dimension. The layer depends only on the sum of its two
/// biases, so factorization adds them up; the two summands cannot be recovered.
template <>
struct module_traits<torch::nn::LSTMImpl> {
  using module = torch::nn::LSTMImpl;
  static constexpr auto kind = layer_kind::lstm;
  static std::string describe(const module& m) {
    return message({"torch::nn::LSTM ", m.options.input_size(), " -> ", m.options.hidden_size()});
  }
  static std::int64_t layers(const module& m) { return m.options.num_layers(); }
  static named_tensors weights(const module& m, std::int64_t layer) {
    named_tensors all;
    append_parts(all, tensor(m, layer, 0), {"weight_ii", "weight_if", "weight_ig", "weight_io"});
    append_parts(all, tensor(m, layer, 1), {"weight_hi", "weight_hf", "weight_hg", "weight_ho"});
    return all;
  }
  static named_tensors biases(const module& m, std::int64_t layer) {
    named_tensors all;
    if (!m.options.bias()) return all;
    append_parts(all, tensor(m, layer, 2), {"bias_ii", "bias_if", "bias_ig", "bias_io"});
    append_parts(all, tensor(m, layer, 3), {"bias_hi", "bias_hf", "bias_hg", "bias_ho"});
    return all;
  }

  /// Returns tensor `which` (0 to 3: weight_ih, weight_hh, bias_ih, bias_hh) of a layer. Throws value_error
  /// for an LSTM that has no factors, a layer out of range, and only_layer where there are several.
  static Tensor tensor(const module& m, std::int64_t layer, std::int64_t which) {
    if (m.options.bidirectional() || m.options.proj_size() != 0) {
      throw_error<value_error>({describe(m), ": has ",
                                m.options.bidirectional() ? "two directions" : "a projection",
                                ": only LSTMs of one direction and without projection have factors"});
    }
    if (layer == only_layer && layers(m) != 1) {
      throw_error<value_error>({describe(m), ": has ", layers(m),
                                " layers: say which with pufferfish::host_torch::of<float>(lstm, layer)"});
    }
    layer = layer == only_layer ? 0 : layer;
    if (layer < 0 || layer >= layers(m)) {
      throw_error<value_error>({describe(m), ": has no layer ", layer, ", but ", layers(m), " of them"});
    }
    return m.all_weights()[static_cast<std::size_t>(layer * (m.options.bias() ? 4 : 2) + which)];
  }
};

/// in_proj stacks the projections of query, key and value in the first dimension. Keys and values must
/// be as wide as queries (libtorch stacks the projections only then) and have no additional bias
/// (bias_k, bias_v, add_zero_attn).
template <>
struct module_traits<torch::nn::MultiheadAttentionImpl> {
  using module = torch::nn::MultiheadAttentionImpl;
  static constexpr auto kind = layer_kind::attention;
  static std::string describe(const module& m) {
    return message(
        {"torch::nn::MultiheadAttention ", m.options.embed_dim(), ", ", m.options.num_heads(), " heads"});
  }
  /// Number of heads, which share the width embed_dim.
  static index_t heads(const module& m) { return m.options.num_heads(); }
  static std::int64_t layers(const module&) { return 1; }
  /// Three parts of in_proj [3 embed_dim][embed_dim], and the output's weight.
  static named_tensors weights(const module& m, std::int64_t) {
    if (!m._qkv_same_embed_dim || m.bias_k.defined() || m.bias_v.defined() || m.options.add_zero_attn()) {
      throw_error<value_error>({describe(m),
                                ": has keys or values of a width of their own, bias_k, bias_v or "
                                "add_zero_attn, which low-rank attention does not have"});
    }
    named_tensors all;
    append_parts(all, m.in_proj_weight, {"query", "key", "value"});
    all.push_back({"output", m.out_proj->weight});
    return all;
  }
  static named_tensors biases(const module& m, std::int64_t) {
    named_tensors all;
    append_parts(all, m.in_proj_bias, {"query", "key", "value"});
    all.push_back({"output", m.out_proj->bias});
    return all;
  }
};

/// A module type that has module_traits.
template <class Module>
concept dense_module = requires {
  module_traits<Module>::kind;
};

/// Returns N-dimensional views of tensors. If only sizes are shown, elements are 0. With `optional` undefined
/// tensors give null views, else value_error. Throws value_error, naming module and tensor, for a tensor of
/// another scalar or device.
template <std::size_t N, class Module, class T>
std::vector<named_view<const T, N>> views_of(const scalar_view<Module, T>& layer, const named_tensors& all,
                                             bool optional) {
  static const Tensor zero = torch::zeros({}, scalar_of<T>());
  std::vector<named_view<const T, N>> views;
  for (const named_tensor& one : all) {
    tensor_view<const T, N> view;
    if (layer.shown == contents::sizes && one.values.defined()) {
      view = view_of<T, N>(zero.expand(one.values.sizes()));
    } else if (one.values.defined() || !optional) {
      check_kind<T>(module_traits<Module>::describe(*layer.module), one.name, one.values);
      view = view_of<T, N>(one.values);
    }
    views.push_back({one.name, view});
  }
  return views;
}

}  // namespace detail
}  // namespace host_torch

/// layer_traits of a module of libtorch, read as one of scalar T. Views are valid while the module's tensors
/// keep their memory.
template <class Module, class T>
struct layer_traits<host_torch::scalar_view<Module, T>> {
  using layer_type = host_torch::scalar_view<Module, T>;
  using module = host_torch::detail::module_traits<Module>;
  static constexpr auto kind = module::kind;
  /// Views of the layer's matrices. Throws the value_error of module_traits::weights and views_of.
  static auto matrices(const layer_type& layer) {
    return host_torch::detail::views_of<kind_traits<kind>::dimensions>(
        layer, module::weights(*layer.module, layer.layer), false);
  }
  /// Views of the layer's biases, null where it has none.
  static auto biases(const layer_type& layer) {
    return host_torch::detail::views_of<1>(layer, module::biases(*layer.module, layer.layer), true);
  }
  static conv_shape shape(const layer_type& layer) requires(kind == layer_kind::conv) {
    return module::shape(*layer.module);
  }
  static index_t heads(const layer_type& layer) requires(kind == layer_kind::attention) {
    return module::heads(*layer.module);
  }
  static std::int32_t padding(const layer_type& layer) requires(kind == layer_kind::embedding) {
    return module::padding(*layer.module);
  }
};

/// layer_traits of a bare module, which is read as float. An LSTM must have one layer; `of<float>(lstm,
/// layer)` chooses one of several.
template <host_torch::detail::dense_module Module>
struct layer_traits<Module> : layer_traits<host_torch::scalar_view<Module, float>> {};

PUFFERFISH_NAMESPACE_END
