// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// layer_traits of libtorch's Linear, Conv2d, LSTM and MultiheadAttention: what svd_factorize and svd_factors
/// need to make pufferfish's own layers, or plain factors, of them.
///
///     torch::nn::Conv2d conv(torch::nn::Conv2dOptions(64, 128, 3).padding(1));
///     auto low_rank = pufferfish::svd_factorize<16>(*conv);                       // of float
///     auto doubles = pufferfish::svd_factorize<16>(host_torch::of<double>(*conv));
///     auto second = pufferfish::svd_factorize<32>(host_torch::of<float>(*lstm, 1));  // layer 1 of an LSTM
///
/// A libtorch module does not know its scalar before run time, ours do when they are compiled: a bare module
/// is read as float, `of<T>` says another one. Views lie on the module's memory, on the CPU. What cannot be
/// read throws value_error with the layer's description: another scalar or device, groups, padding that is
/// not zeros, an LSTM with two directions or a projection.

#include <array>
#include <string>
#include <vector>

#include <pufferfish/adapters/torch/tensor.hpp>
#include <pufferfish/lowrank/attention.hpp>
#include <pufferfish/lowrank/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {

/// A module read as one of scalar T; of an LSTM, one of its layers. Made by `of`.
template <class Module, class T>
struct scalar_view {
  const Module* module;
  std::int64_t layer = 0;
};

/// `module`, or layer `layer` of an LSTM, with weights of type T (float or double).
template <class T, class Module>
scalar_view<Module, T> of(const Module& module, std::int64_t layer = 0) {
  return {&module, layer};
}

namespace detail {

inline std::string describe(const torch::nn::LinearImpl& m) {
  return message({"torch::nn::Linear ", m.options.in_features(), " -> ", m.options.out_features()});
}
inline std::string describe(const torch::nn::Conv2dImpl& m) {
  const auto& kernel = *m.options.kernel_size();
  return message({"torch::nn::Conv2d ", m.options.in_channels(), " -> ", m.options.out_channels(),
                  ", kernel ", kernel[0], "x", kernel[1]});
}
inline std::string describe(const torch::nn::LSTMImpl& m) {
  return message({"torch::nn::LSTM ", m.options.input_size(), " -> ", m.options.hidden_size()});
}
inline std::string describe(const torch::nn::MultiheadAttentionImpl& m) {
  return message(
      {"torch::nn::MultiheadAttention ", m.options.embed_dim(), ", ", m.options.num_heads(), " heads"});
}

template <class Array>
size2 size_of(const Array& height_and_width) {
  return {height_and_width[0], height_and_width[1]};
}

/// The geometry that the options of a convolution say. Throws value_error, naming `layer`, for what
/// conv_shape cannot say.
template <class Options>
conv_shape shape_of(const Options& options, const std::string& layer) {
  if (options.groups() != 1) {
    throw_error<value_error>(
        {layer, ": ", options.groups(), " groups: only convolutions of one group have factors here"});
  }
  if (get_if<torch::enumtype::kZeros>(&options.padding_mode()) == nullptr) {
    throw_error<value_error>({layer, ": pads with something else than zeros"});
  }
  conv_shape shape;
  shape.in_channels = options.in_channels();
  shape.out_channels = options.out_channels();
  shape.kernel = size_of(*options.kernel_size());
  shape.stride = size_of(*options.stride());
  shape.dilation = size_of(*options.dilation());
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

/// The number of tensors that an LSTM has a layer: two weights, and two biases if it has any. Throws
/// value_error for what LowRankLSTM is not.
inline std::size_t tensors_of_layer(const torch::nn::LSTMImpl& m) {
  if (m.options.bidirectional() || m.options.proj_size() != 0) {
    throw_error<value_error>({describe(m), ": has ",
                              m.options.bidirectional() ? "two directions" : "a projection",
                              ": only LSTMs of one direction and without projection have factors here"});
  }
  return m.options.bias() ? 4 : 2;
}

/// Tensor `which` (weight_ih, weight_hh, bias_ih, bias_hh) of a layer of an LSTM.
inline Tensor tensor_of(const torch::nn::LSTMImpl& m, std::int64_t layer, std::size_t which) {
  const std::size_t each = tensors_of_layer(m);
  if (layer < 0 || layer >= m.options.num_layers()) {
    throw_error<value_error>(
        {describe(m), ": has no layer ", layer, ", but ", m.options.num_layers(), " of them"});
  }
  return m.all_weights()[static_cast<std::size_t>(layer) * each + which];
}

/// The weight of an nn::Linear or nn::Conv2d.
template <std::size_t N, class Module, class T>
tensor_view<const T, N> weight_of(const scalar_view<Module, T>& layer) {
  check_kind<T>(describe(*layer.module), "weight", layer.module->weight);
  return view_of<T, N>(layer.module->weight);
}

/// Its bias; empty if it has none.
template <class Module, class T>
tensor_view<const T, 1> bias_of(const scalar_view<Module, T>& layer) {
  if (!layer.module->bias.defined()) return {};
  check_kind<T>(describe(*layer.module), "bias", layer.module->bias);
  return view_of<T, 1>(layer.module->bias);
}

/// Part `part` of the rows of a packed tensor that holds `parts` of equal size.
template <class T, std::size_t N>
tensor_view<const T, N> part_of(const std::string& layer, const char* what, const Tensor& packed,
                                index_t part, index_t parts) {
  check_kind<T>(layer, what, packed);
  const index_t rows = packed.size(0) / parts;
  return view_of<T, N>(packed).slice(0, part * rows, rows);
}

}  // namespace detail
}  // namespace host_torch

template <class T>
struct layer_traits<host_torch::scalar_view<::torch::nn::LinearImpl, T>> {
  using layer_type = host_torch::scalar_view<::torch::nn::LinearImpl, T>;
  static constexpr auto kind = layer_kind::linear;
  static auto matrices(const layer_type& layer) {
    return std::array{named_view<const T, 2>{"weight", host_torch::detail::weight_of<2>(layer)}};
  }
  static tensor_view<const T, 1> bias(const layer_type& layer) { return host_torch::detail::bias_of(layer); }
};

template <class T>
struct layer_traits<host_torch::scalar_view<::torch::nn::Conv2dImpl, T>> {
  using layer_type = host_torch::scalar_view<::torch::nn::Conv2dImpl, T>;
  static constexpr auto kind = layer_kind::conv;
  static conv_shape shape(const layer_type& layer) {
    return host_torch::detail::shape_of(layer.module->options, host_torch::detail::describe(*layer.module));
  }
  static auto matrices(const layer_type& layer) {
    return std::array{named_view<const T, 4>{"weight", host_torch::detail::weight_of<4>(layer)}};
  }
  static tensor_view<const T, 1> bias(const layer_type& layer) { return host_torch::detail::bias_of(layer); }
};

/// The gates i, f, g, o lie one below the other in libtorch's tensors. Of the two biases only the sum has a
/// meaning: they are added up, and no way leads back from the sum to the two.
template <class T>
struct layer_traits<host_torch::scalar_view<::torch::nn::LSTMImpl, T>> {
  using layer_type = host_torch::scalar_view<::torch::nn::LSTMImpl, T>;
  static constexpr auto kind = layer_kind::lstm;
  static auto matrices(const layer_type& layer) {
    const auto gate = [&](const char* what, std::size_t which, index_t number) {
      return host_torch::detail::part_of<T, 2>(name(layer), what, tensor(layer, which), number, 4);
    };
    using view = named_view<const T, 2>;
    return std::array{view{"weight_ii", gate("weight_ih", 0, 0)}, view{"weight_if", gate("weight_ih", 0, 1)},
                      view{"weight_ig", gate("weight_ih", 0, 2)}, view{"weight_io", gate("weight_ih", 0, 3)},
                      view{"weight_hi", gate("weight_hh", 1, 0)}, view{"weight_hf", gate("weight_hh", 1, 1)},
                      view{"weight_hg", gate("weight_hh", 1, 2)}, view{"weight_ho", gate("weight_hh", 1, 3)}};
  }
  static auto biases(const layer_type& layer) {
    std::vector<named_view<const T, 1>> found;
    if (!layer.module->options.bias()) return found;
    constexpr std::array names{"bias_ii", "bias_if", "bias_ig", "bias_io",
                               "bias_hi", "bias_hf", "bias_hg", "bias_ho"};
    for (std::size_t i = 0; i < names.size(); ++i) {
      found.push_back(
          {names[i], host_torch::detail::part_of<T, 1>(name(layer), "bias", tensor(layer, i < 4 ? 2 : 3),
                                                       static_cast<index_t>(i % 4), 4)});
    }
    return found;
  }

 private:
  static std::string name(const layer_type& layer) { return host_torch::detail::describe(*layer.module); }
  static ::torch::Tensor tensor(const layer_type& layer, std::size_t which) {
    return host_torch::detail::tensor_of(*layer.module, layer.layer, which);
  }
};

/// in_proj holds the projections of query, key and value one below the other. Keys and values must be as wide
/// as queries (libtorch then packs them), and have no additional bias (bias_k, bias_v, add_zero_attn).
template <class T>
struct layer_traits<host_torch::scalar_view<::torch::nn::MultiheadAttentionImpl, T>> {
  using layer_type = host_torch::scalar_view<::torch::nn::MultiheadAttentionImpl, T>;
  static constexpr auto kind = layer_kind::attention;
  static index_t heads(const layer_type& layer) { return layer.module->options.num_heads(); }
  static auto matrices(const layer_type& layer) {
    const auto part = packed(layer);
    const ::torch::Tensor& out = layer.module->out_proj->weight;
    host_torch::detail::check_kind<T>(name(layer), "out_proj.weight", out);
    using view = named_view<const T, 2>;
    return std::array{view{"query", part(0)}, view{"key", part(1)}, view{"value", part(2)},
                      view{"output", host_torch::detail::view_of<T, 2>(out)}};
  }
  static auto biases(const layer_type& layer) {
    using view = named_view<const T, 1>;
    std::array found{view{"query", {}}, view{"key", {}}, view{"value", {}}, view{"output", {}}};
    const ::torch::Tensor &in = layer.module->in_proj_bias, &out = layer.module->out_proj->bias;
    for (std::size_t i = 0; i < 3 && in.defined(); ++i) {
      found[i].view =
          host_torch::detail::part_of<T, 1>(name(layer), "in_proj_bias", in, static_cast<index_t>(i), 3);
    }
    if (out.defined()) {
      host_torch::detail::check_kind<T>(name(layer), "out_proj.bias", out);
      found[3].view = host_torch::detail::view_of<T, 1>(out);
    }
    return found;
  }

 private:
  static std::string name(const layer_type& layer) { return host_torch::detail::describe(*layer.module); }
  static auto packed(const layer_type& layer) {
    const auto& m = *layer.module;
    if (!m._qkv_same_embed_dim || m.bias_k.defined() || m.bias_v.defined() || m.options.add_zero_attn()) {
      host_torch::detail::throw_error<value_error>(
          {name(layer),
           ": has keys or values of a width of their own, bias_k, bias_v or add_zero_attn, "
           "which LowRankAttention does not have"});
    }
    return [&layer](index_t part) {
      return host_torch::detail::part_of<T, 2>(name(layer), "in_proj_weight", layer.module->in_proj_weight,
                                               part, 3);
    };
  }
};

namespace host_torch::detail {

/// A bare module: as one of float.
template <class Module>
struct float_traits {
  using traits = layer_traits<scalar_view<Module, float>>;
  static constexpr auto kind = traits::kind;
  static auto matrices(const Module& m) { return traits::matrices(of<float>(m)); }
};

}  // namespace host_torch::detail

template <>
struct layer_traits<::torch::nn::LinearImpl> : host_torch::detail::float_traits<::torch::nn::LinearImpl> {
  static auto bias(const ::torch::nn::LinearImpl& m) { return traits::bias(host_torch::of<float>(m)); }
};

template <>
struct layer_traits<::torch::nn::Conv2dImpl> : host_torch::detail::float_traits<::torch::nn::Conv2dImpl> {
  static auto bias(const ::torch::nn::Conv2dImpl& m) { return traits::bias(host_torch::of<float>(m)); }
  static auto shape(const ::torch::nn::Conv2dImpl& m) { return traits::shape(host_torch::of<float>(m)); }
};

/// Of an LSTM with one layer; `of<float>(lstm, layer)` says which one of several.
template <>
struct layer_traits<::torch::nn::LSTMImpl> : host_torch::detail::float_traits<::torch::nn::LSTMImpl> {
  static auto matrices(const ::torch::nn::LSTMImpl& m) {
    if (m.options.num_layers() != 1) {
      host_torch::detail::throw_error<value_error>(
          {host_torch::detail::describe(m), ": has ", m.options.num_layers(),
           " layers: say which with pufferfish::host_torch::of<float>(lstm, layer)"});
    }
    return traits::matrices(host_torch::of<float>(m));
  }
  static auto biases(const ::torch::nn::LSTMImpl& m) { return traits::biases(host_torch::of<float>(m)); }
};

template <>
struct layer_traits<::torch::nn::MultiheadAttentionImpl>
    : host_torch::detail::float_traits<::torch::nn::MultiheadAttentionImpl> {
  static auto heads(const ::torch::nn::MultiheadAttentionImpl& m) { return m.options.num_heads(); }
  static auto biases(const ::torch::nn::MultiheadAttentionImpl& m) {
    return traits::biases(host_torch::of<float>(m));
  }
};

PUFFERFISH_NAMESPACE_END
