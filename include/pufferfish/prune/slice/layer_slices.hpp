// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: functions that make single layers with fewer channels, inputs or rank components.

#include <algorithm>
#include <string>
#include <vector>

#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/layers/dense_layers.hpp>
#include <pufferfish/nn/switch/factor_norms.hpp>
#include <pufferfish/prune/slice/channel_groups.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Indices of the elements that remain, ascending; nullptr: all elements remain.
using kept_list = const std::vector<index_t>*;

/// Number of elements that remain of `all`.
inline index_t kept_of(kept_list list, index_t all) {
  return list == nullptr ? all : static_cast<index_t>(list->size());
}
/// Old index of the i-th element that remains.
inline index_t kept_at(kept_list list, index_t i) {
  return list == nullptr ? i : (*list)[static_cast<std::size_t>(i)];
}

/// The indices of the set marks; with `pixels`, p channels + c for p = 0 .. pixels - 1 and each set mark c:
/// the columns of a linear layer after a Flatten of [pixels][channels]. marked({true, false, true}, 2) is
/// {0, 2, 3, 5}.
inline std::vector<index_t> marked(const std::vector<bool>& keep, index_t pixels = 1) {
  std::vector<index_t> list;
  const auto channels = static_cast<index_t>(keep.size());
  for (index_t p = 0; p < pixels; ++p) {
    for (index_t c = 0; c < channels; ++c) {
      if (keep[static_cast<std::size_t>(c)]) list.push_back(p * channels + c);
    }
  }
  return list;
}

/// Copies rows and columns: to(r, c, y, x) = from(rows[r], columns[c], y, x), for all elements of `to`. A
/// list that is nullptr stands for 0, 1, 2, ... The views may have any strides and must not overlap.
template <class T>
void gather_matrix(const tensor_view<const T, 4>& from, kept_list rows, kept_list columns,
                   const tensor_view<T, 4>& to) {
  for (index_t r = 0; r < to.extent(0); ++r) {
    for (index_t c = 0; c < to.extent(1); ++c) {
      for (index_t y = 0; y < to.extent(2); ++y) {
        for (index_t x = 0; x < to.extent(3); ++x) {
          to(r, c, y, x) = from(kept_at(rows, r), kept_at(columns, c), y, x);
        }
      }
    }
  }
}
/// Copies entries: to(i) = from(entries[i]) for all i. Does nothing if `to` is a null view.
template <class T>
void gather_vector(const tensor_view<const T, 1>& from, kept_list entries, const tensor_view<T, 1>& to) {
  for (index_t i = 0; !to.is_null() && i < to.extent(0); ++i) to(i) = from(kept_at(entries, i));
}

/// Makes a batch norm with the settings of `norm` and `channels` channels. Weight, bias, running mean and
/// variance are copied from the channels that `entries` lists, or from the first channels if it is nullptr.
/// The number of batches is copied, too. If `norm` has fewer channels, the others keep the initial values of
/// a BatchNorm.
template <class T>
BatchNorm<T> sliced_norm(BatchNorm<T>& norm, index_t channels, kept_list entries) {
  using P = parameter_t<T>;
  BatchNorm<T> result(channels, norm.eps(), norm.momentum());
  const norm_buffers<P> from(norm), to(result);
  const index_t count = std::min(channels, norm.channels());
  for (index_t i = 0; i < count; ++i) {
    const index_t c = kept_at(entries, i);
    to.weight[i] = from.weight[c];
    to.bias[i] = from.bias[c];
    to.mean[i] = from.mean[c];
    to.variance[i] = from.variance[c];
  }
  *to.batches = *from.batches;
  return result;
}

/// The geometry of a layer that product_of accepts, as a convolution; a linear layer is a 1x1 one.
template <class T, class Device>
conv_shape shape_as_conv(const any_layer<T, Device>& layer) {
  if (const auto* conv = layer.template target<LowRankNormConv<T, Device>>()) return conv->shape();
  return *layer.geometry();
}

/// Whether a layer that product_of accepts has a bias.
template <class T, class Device>
bool has_bias(any_layer<T, Device>& layer) {
  if (const auto* conv = layer.template target<LowRankNormConv<T, Device>>()) return conv->has_bias();
  const auto parts = layer.low_rank();
  if (parts.is_low_rank()) return !parts.biases.empty() && !parts.biases[0].is_null();
  return has_any(layer.weights({}).biases);
}

/// Makes a layer of the same kind and settings with other numbers of inputs and outputs; all parameters are
/// zero. A low-rank layer keeps its rank, and is dense in the result if its matrix cannot have this rank any
/// more. Throws rank_error, naming the layer, for a LowRankNormConv whose matrix cannot.
template <class T, class Device>
any_layer<T, Device> resized(any_layer<T, Device>& layer, const std::string& name, index_t in, index_t out) {
  const bool convolution = product_of(layer)->convolution, bias = has_bias(layer);
  conv_shape shape = shape_as_conv(layer);
  shape.in_channels = in;
  shape.out_channels = out;
  const index_t most = std::min(out, shape.patch());
  if (const auto* conv = layer.template target<LowRankNormConv<T, Device>>()) {
    if (conv->rank() > most) {
      throw_error<rank_error>({name, ": rank ", conv->rank(), " with a batch norm between the factors, for ",
                               in, " inputs and ", out, " outputs: remove components first"});
    }
    return LowRankNormConv<T, Device>(shape, conv->rank(), bias);
  }
  const rank_list ranks = layer.ranks();
  any_layer<T, Device> dense = convolution ? any_layer<T, Device>(Conv<T>(shape, bias))
                                           : any_layer<T, Device>(Linear<T>(in, out, bias));
  if (ranks.empty() || ranks[0] > most) return dense;
  any_layer<T, Device> result = dense.twin(ranks);
  if (auto* conv = result.template target<LowRankConv<T>>()) {
    const any_layer<T, Device> like = std::as_const(layer).twin(ranks);
    if (const auto* old = like.template target<LowRankConv<T>>()) conv->set_recompute(old->recompute());
  }
  return result;
}

/// Makes a layer that has only the inputs and outputs of two lists (nullptr: all); values are copied bit for
/// bit: W'(i, j) = W(out[i], in[j]), bias'(i) = bias(out[i]). A low-rank layer keeps its rank: columns of
/// `down` and rows of `up` are selected. One whose smaller matrix cannot have that rank becomes dense, with
/// the product of its factors. Errors are those of resized.
template <class T, class Device>
any_layer<T, Device> sliced(any_layer<T, Device>& layer, const std::string& name, kept_list in,
                            kept_list out) {
  using P = parameter_t<T>;
  const product_size size = *product_of(layer);
  any_layer<T, Device> result = resized(layer, name, kept_of(in, size.in), kept_of(out, size.out));
  if (auto* from = layer.template target<LowRankNormConv<T, Device>>()) {
    auto& to = *result.template target<LowRankNormConv<T, Device>>();
    to[0] = sliced((*from)[0], name, in, nullptr);
    to[1] = (*from)[1];
    to[2] = sliced((*from)[2], name, nullptr, out);
    return result;
  }
  const low_rank_parts<P> factors = layer.low_rank(), to = result.low_rank();
  if (to.is_low_rank()) {
    const factor_views<P>&a = factors.factors[0], &b = to.factors[0];
    gather_matrix(tensor_view<const P, 4>(a.down), nullptr, in, b.down);
    gather_matrix(tensor_view<const P, 4>(a.up), out, nullptr, b.up);
    gather_vector(tensor_view<const P, 1>(factors.biases[0]), out, to.biases[0]);
    return result;
  }
  any_layer<T, Device> dense = factors.is_low_rank() ? merged(layer) : layer;
  const layer_weights<P> weights = dense.weights({}), wanted = result.weights({});
  gather_matrix(weights.matrices[0].view, out, in, writable(wanted.matrices[0].view));
  const tensor_view<P, 1> bias = writable(wanted.biases[0].view);
  for (index_t i = 0; !bias.is_null() && i < bias.extent(0); ++i) {
    P sum{};
    for (const auto& one : weights.biases) sum += one.view.is_null() ? P{} : one.view(kept_at(out, i));
    bias(i) = sum;
  }
  return result;
}

/// Sets column `c` of the matrix of a layer that product_of accepts (of `down`, in a low-rank layer) to zero.
/// Input c then has no effect on the layer's output.
template <class T, class Device>
void clear_input(any_layer<T, Device>& layer, index_t c) {
  using P = parameter_t<T>;
  if (auto* conv = layer.template target<LowRankNormConv<T, Device>>()) return clear_input((*conv)[0], c);
  const low_rank_parts<P> parts = layer.low_rank();
  const tensor_view<P, 4> matrix =
      parts.is_low_rank() ? parts.factors[0].down : writable(layer.weights({}).matrices[0].view);
  for (index_t o = 0; o < matrix.extent(0); ++o) {
    for (index_t y = 0; y < matrix.extent(2); ++y) {
      for (index_t x = 0; x < matrix.extent(3); ++x) matrix(o, c, y, x) = P{};
    }
  }
}

/// Sets row `c` of the matrix of a layer that product_of accepts (of `up`, in a low-rank layer), and its
/// bias, to zero. Output c of the layer is then 0 for every input.
template <class T, class Device>
void clear_output(any_layer<T, Device>& layer, index_t c) {
  using P = parameter_t<T>;
  if (auto* conv = layer.template target<LowRankNormConv<T, Device>>()) return clear_output((*conv)[2], c);
  const low_rank_parts<P> parts = layer.low_rank();
  const layer_weights<P> weights = layer.weights({});
  const tensor_view<P, 4> rows =
      parts.is_low_rank() ? parts.factors[0].up : writable(weights.matrices[0].view);
  for (index_t i = 0; i < rows.extent(1); ++i) {
    for (index_t y = 0; y < rows.extent(2); ++y) {
      for (index_t x = 0; x < rows.extent(3); ++x) rows(c, i, y, x) = P{};
    }
  }
  for (const tensor_view<P, 1>& bias : parts.biases) {
    if (!bias.is_null()) bias(c) = P{};
  }
  for (const auto& bias : weights.biases) {
    if (!bias.view.is_null()) writable(bias.view)(c) = P{};
  }
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
