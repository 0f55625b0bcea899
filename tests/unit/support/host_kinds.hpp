// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Dense layers of every kind in the memory order of a foreign framework, for tests: strided weights whose
/// gaps are NaN, biases that may be missing or doubled.

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/lowrank/traits.hpp>

namespace host {

using pufferfish::index_t;
using pufferfish::layer_kind;

/// One weight, column by column, with a gap after each element and each column.
template <std::size_t N>
struct Strided {
  pufferfish::extents<N> shape{}, strides{};
  std::vector<double> memory;

  explicit Strided(const pufferfish::extents<N>& of) : shape(of) {
    index_t stride = 2;
    for (std::size_t d = 0; d < N; ++d) {
      strides[d] = stride;
      stride = stride * of[d] + 1;
    }
    memory.assign(static_cast<std::size_t>(stride), std::numeric_limits<double>::quiet_NaN());
  }
  pufferfish::tensor_view<double, N> view() { return {memory.data(), shape, strides}; }
  pufferfish::tensor_view<const double, N> view() const { return {memory.data(), shape, strides}; }
};

/// A dense layer of kind `Kind`. `matrices` are the matrices that are to be factorized, as rows x columns;
/// `weights` hold the same numbers in the framework's shapes.
template <layer_kind Kind>
struct Layer {
  static constexpr auto kind = Kind;
  static constexpr std::size_t dimensions = Kind == layer_kind::conv ? 4 : 2;

  std::vector<pufferfish::tensor<double, 2>> matrices;
  std::vector<std::string> names;  ///< what reports append to the layer's name; one matrix: nothing
  std::vector<Strided<dimensions>> weights;
  std::vector<std::size_t> groups;          ///< the rank group of each matrix
  std::vector<index_t> outputs;             ///< the lengths of the biases
  std::vector<std::vector<double>> biases;  ///< an empty vector: a null view
  bool by_token = false;                    ///< the inputs are tokens, and the weight is the transpose
  bool always_biased = false;               ///< the low-rank layer has biases even if this one has none
  pufferfish::conv_shape shape;
  index_t heads = 1;
  std::int32_t padding = pufferfish::no_token;
};

inline pufferfish::tensor<double, 2> random_matrix(index_t rows, index_t cols, std::uint64_t stream) {
  pufferfish::tensor<double, 2> matrix({rows, cols});
  pufferfish::fill_normal<double>(matrix.flat(), 1.0, {21, stream});
  return matrix;
}

/// Writes `matrices` to `weights`.
template <layer_kind Kind>
void store(Layer<Kind>& layer) {
  layer.weights.clear();
  if constexpr (Kind == layer_kind::conv) {
    const pufferfish::conv_shape& s = layer.shape;
    const index_t inputs = s.in_channels / s.groups, outputs = s.out_channels / s.groups;
    const auto weight =
        layer.weights
            .emplace_back(pufferfish::extents<4>{s.out_channels, inputs, s.kernel.height, s.kernel.width})
            .view();
    for (index_t o = 0; o < s.out_channels; ++o) {
      for (index_t i = 0; i < inputs; ++i) {
        for (index_t y = 0; y < s.kernel.height; ++y) {
          for (index_t x = 0; x < s.kernel.width; ++x) {
            weight(o, i, y, x) = layer.matrices[static_cast<std::size_t>(o / outputs)](
                o % outputs, (i * s.kernel.height + y) * s.kernel.width + x);
          }
        }
      }
    }
  } else {
    for (const pufferfish::tensor<double, 2>& matrix : layer.matrices) {
      const bool turned = layer.by_token;
      const index_t rows = matrix.extent(turned ? 1 : 0), cols = matrix.extent(turned ? 0 : 1);
      const auto weight = layer.weights.emplace_back(pufferfish::extents<2>{rows, cols}).view();
      for (index_t r = 0; r < rows; ++r) {
        for (index_t c = 0; c < cols; ++c) weight(r, c) = turned ? matrix(c, r) : matrix(r, c);
      }
    }
  }
}

template <layer_kind Kind>
Layer<Kind> with_matrices(std::vector<std::string> names, const std::vector<pufferfish::extents<2>>& sizes) {
  Layer<Kind> layer;
  layer.names = std::move(names);
  layer.groups.assign(sizes.size(), 0);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    layer.matrices.push_back(random_matrix(sizes[i][0], sizes[i][1], i));
  }
  return layer;
}

inline Layer<layer_kind::linear> linear(index_t in, index_t out) {
  auto layer = with_matrices<layer_kind::linear>({"weight"}, {{out, in}});
  layer.outputs = {out};
  store(layer);
  return layer;
}

inline Layer<layer_kind::conv> conv(index_t in, index_t out, const pufferfish::size2& kernel,
                                    index_t groups) {
  const index_t patch = in / groups * kernel.height * kernel.width;
  std::vector<std::string> names;
  for (index_t g = 0; g < groups; ++g) names.push_back("weight[" + std::to_string(g) + "]");
  const std::vector<pufferfish::extents<2>> sizes(names.size(), {out / groups, patch});
  auto layer =
      with_matrices<layer_kind::conv>(groups == 1 ? std::vector<std::string>{"weight"} : names, sizes);
  layer.shape = {in, out, kernel, {1, 1}, {1, 0}, {1, 1}, groups};
  layer.outputs = {out};
  store(layer);
  return layer;
}

inline Layer<layer_kind::lstm> lstm(index_t input, index_t hidden) {
  std::vector<pufferfish::extents<2>> sizes(4, {hidden, input});
  sizes.resize(8, {hidden, hidden});
  auto layer = with_matrices<layer_kind::lstm>({"ii", "if", "ig", "io", "hi", "hf", "hg", "ho"}, sizes);
  layer.groups = {0, 0, 0, 0, 1, 1, 1, 1};
  layer.outputs.assign(4, hidden);
  layer.always_biased = true;
  store(layer);
  return layer;
}

inline Layer<layer_kind::attention> attention(index_t model, index_t heads, index_t key, index_t value) {
  auto layer = with_matrices<layer_kind::attention>(
      {"query", "key", "value", "output"},
      {{heads * key, model}, {heads * key, model}, {heads * value, model}, {model, heads * value}});
  layer.groups = {0, 1, 2, 3};
  layer.outputs = {heads * key, heads * key, heads * value, model};
  layer.heads = heads;
  store(layer);
  return layer;
}

inline Layer<layer_kind::embedding> embedding(index_t vocabulary, index_t width) {
  auto layer = with_matrices<layer_kind::embedding>({"table"}, {{width, vocabulary}});
  layer.by_token = true;
  layer.padding = 1;
  store(layer);
  return layer;
}

/// Calls check(layer) for one layer of each kind, and for convolutions of several groups.
template <class Check>
void for_each_kind(Check&& check) {
  check(linear(17, 14));
  check(linear(9, 23));
  check(conv(5, 16, {3, 2}, 1));
  check(conv(6, 24, {3, 3}, 3));
  check(conv(4, 32, {3, 3}, 4));  // one input and eight outputs a group
  check(lstm(13, 15));
  check(attention(16, 2, 7, 9));
  check(embedding(40, 12));
}

}  // namespace host

template <pufferfish::layer_kind Kind>
struct pufferfish::layer_traits<host::Layer<Kind>> {
  using layer_type = host::Layer<Kind>;
  static constexpr auto kind = Kind;
  static auto matrices(const layer_type& layer) {
    std::vector<named_view<const double, layer_type::dimensions>> all;
    for (std::size_t i = 0; i < layer.weights.size(); ++i) {
      all.push_back({i < layer.names.size() ? layer.names[i].c_str() : "more", layer.weights[i].view()});
    }
    return all;
  }
  static auto biases(const layer_type& layer) {
    std::vector<named_view<const double, 1>> all;
    for (const std::vector<double>& bias : layer.biases) {
      using view = tensor_view<const double, 1>;
      all.push_back({"bias", bias.empty() ? view() : view(bias.data(), {static_cast<index_t>(bias.size())})});
    }
    return all;
  }
  static conv_shape shape(const layer_type& layer) requires(Kind == layer_kind::conv) { return layer.shape; }
  static index_t heads(const layer_type& layer) requires(Kind == layer_kind::attention) {
    return layer.heads;
  }
  static std::int32_t padding(const layer_type& layer) requires(Kind == layer_kind::embedding) {
    return layer.padding;
  }
};
