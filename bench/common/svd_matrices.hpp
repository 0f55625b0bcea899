// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The matrices whose truncated SVDs turn a dense ResNet-18 (CIFAR) into a factorized one.

#include <pufferfish/core/random.hpp>
#include <pufferfish/linalg/svd/svd.hpp>

#include <array>
#include <vector>

namespace bench {

namespace pf = pufferfish;
using pf::index_t;

struct svd_layer {
  const char* name;
  index_t rows;
  index_t columns;
  index_t rank;
};

inline constexpr std::array<svd_layer, 14> svd_layers{{{"block1.1.conv1", 64, 576, 16},
                                                       {"block1.1.conv2", 64, 576, 16},
                                                       {"block2.0.conv1", 128, 576, 32},
                                                       {"block2.0.conv2", 128, 1152, 32},
                                                       {"block2.1.conv1", 128, 1152, 32},
                                                       {"block2.1.conv2", 128, 1152, 32},
                                                       {"block3.0.conv1", 256, 1152, 64},
                                                       {"block3.0.conv2", 256, 2304, 64},
                                                       {"block3.1.conv1", 256, 2304, 64},
                                                       {"block3.1.conv2", 256, 2304, 64},
                                                       {"block4.0.conv1", 512, 2304, 128},
                                                       {"block4.0.conv2", 512, 4608, 128},
                                                       {"block4.1.conv1", 512, 4608, 128},
                                                       {"block4.1.conv2", 512, 4608, 128}}};

/// sum(i, j) += sum over k of a(k, i) b(k, j).
inline void add_product(const pf::tensor<double, 2>& a, const pf::tensor<double, 2>& b,
                        pf::tensor<double, 2>& sum) {
  const index_t columns = sum.extent(1);
  for (index_t i = 0; i < sum.extent(0); ++i) {
    double* const row = sum.data() + i * columns;
    for (index_t k = 0; k < a.extent(0); ++k) {
      const double factor = a(k, i);
      const double* const other = b.data() + k * columns;
      for (index_t j = 0; j < columns; ++j) row[j] += factor * other[j];
    }
  }
}

/// A substitute for trained weights: noise added to a decreasing spectrum like that of trained weights.
inline pf::tensor<float, 2> make_weights(const svd_layer& l, std::uint64_t seed) {
  pf::tensor<double, 2> left({l.rank, l.rows}), right({l.rank, l.columns}), sum({l.rows, l.columns});
  pf::fill_normal(left.flat(), 0.5, pf::random_stream(seed, 1));
  pf::fill_normal(right.flat(), 0.5, pf::random_stream(seed, 2));
  pf::fill_normal(sum.flat(), 0.5, pf::random_stream(seed, 3));
  for (index_t k = 0; k < l.rank; ++k) {
    for (index_t i = 0; i < l.rows; ++i) left(k, i) /= 1.0 + 0.1 * static_cast<double>(k);
  }
  add_product(left, right, sum);
  pf::tensor<float, 2> weights({l.rows, l.columns});
  for (index_t i = 0; i < sum.size(); ++i) weights.data()[i] = static_cast<float>(0.02 * sum.data()[i]);
  return weights;
}

/// ||A - U S V^T||_F^2.
inline double squared_error(const pf::tensor<float, 2>& a, const pf::svd_result& s) {
  const index_t rank = s.u.extent(1);
  pf::tensor<double, 2> scaled({rank, a.extent(0)});
  pf::tensor<double, 2> right({rank, a.extent(1)});
  pf::tensor<double, 2> rest({a.extent(0), a.extent(1)});
  for (index_t k = 0; k < rank; ++k) {
    for (index_t i = 0; i < a.extent(0); ++i) {
      scaled(k, i) = -s.u(i, k) * s.singular_values[static_cast<std::size_t>(k)];
    }
    for (index_t j = 0; j < a.extent(1); ++j) right(k, j) = s.v(j, k);
  }
  pf::copy(a.view(), rest.view());
  add_product(scaled, right, rest);
  double total = 0;
  for (double value : rest.flat()) total += value * value;
  return total;
}

/// Floating-point operations of the Gram matrix of the smaller side (half of it: it is symmetric) and of the
/// projection onto the kept vectors: the least that a truncated SVD by this method needs.
inline double svd_operations(const svd_layer& l) {
  const auto rows = static_cast<double>(l.rows), columns = static_cast<double>(l.columns);
  return rows * rows * columns + 2.0 * rows * columns * static_cast<double>(l.rank);
}

/// Least squared truncation error of any matrix of rank l.rank.
inline double least_squared_error(const pf::tensor<float, 2>& weights, const svd_layer& l,
                                  pf::svd_method method) {
  pf::svd_options options;
  options.method = method;
  options.max_rank = 1;
  const std::vector<double> values =
      pf::svd(pf::tensor_view<const float, 2>(weights), options).singular_values;
  double discarded = 0;
  for (std::size_t k = static_cast<std::size_t>(l.rank); k < values.size(); ++k)
    discarded += values[k] * values[k];
  return discarded;
}

}  // namespace bench
