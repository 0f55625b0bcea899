// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The definition of layer normalization and its gradients in plain loops, for tests.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <pufferfish/core/tensor.hpp>
#include <pufferfish/ops/elementwise/dropout.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::reference {

/// y = n weight + bias with n = (s - mean) / sqrt(variance + eps), the mean and the biased variance of each
/// row, and s = dropout(x) + residual (a null view: no residual).
template <class T>
void layer_norm_forward(const tensor_view<const T, 2>& x, const tensor_view<const T, 2>& residual,
                        const row_dropout& dropout, const T* weight, const T* bias, double eps,
                        const tensor_view<T, 2>& y) {
  const index_t columns = x.extent(1);
  const auto threshold = dropout_threshold(dropout.probability);
  for (index_t m = 0; m < x.extent(0); ++m) {
    const auto value = [&](index_t c) {
      const std::uint64_t position =
          dropout.number(m) * static_cast<std::uint64_t>(columns) + static_cast<std::uint64_t>(c);
      const bool off = dropout.drops() && dropped(dropout.random, position, threshold);
      const double kept = off ? 0.0 : static_cast<double>(x(m, c)) * dropout.scale();
      return kept + (residual.is_null() ? 0.0 : static_cast<double>(residual(m, c)));
    };
    double mean = 0.0, variance = 0.0;
    for (index_t c = 0; c < columns; ++c) mean += value(c) / static_cast<double>(columns);
    for (index_t c = 0; c < columns; ++c) {
      variance += (value(c) - mean) * (value(c) - mean) / static_cast<double>(columns);
    }
    for (index_t c = 0; c < columns; ++c) {
      const double n = (value(c) - mean) / std::sqrt(variance + eps);
      y(m, c) = static_cast<T>(n * static_cast<double>(weight[c]) + static_cast<double>(bias[c]));
    }
  }
}

/// With g = dy weight and the normalized rows n: dsum = (g - mean(g) - n mean(g n)) inverse_deviation, with
/// means over the row; dweight = sum of dy n over rows; dbias = sum of dy over rows. The gradient of x is
/// dropout(dsum) with the mask of the forward pass.
template <class T>
void layer_norm_backward(const tensor_view<const T, 2>& normalised, const T* inverse_deviation,
                         const T* weight, const tensor_view<const T, 2>& dy, double* dweight, double* dbias,
                         const tensor_view<T, 2>& dsum) {
  const index_t columns = dy.extent(1);
  std::fill_n(dweight, columns, 0.0);
  std::fill_n(dbias, columns, 0.0);
  for (index_t m = 0; m < dy.extent(0); ++m) {
    const auto n = [&](index_t c) { return static_cast<double>(normalised(m, c)); };
    const auto g = [&](index_t c) { return static_cast<double>(dy(m, c)) * static_cast<double>(weight[c]); };
    double shift = 0.0, slope = 0.0;
    for (index_t c = 0; c < columns; ++c) {
      shift += g(c) / static_cast<double>(columns);
      slope += g(c) * n(c) / static_cast<double>(columns);
      dweight[c] += static_cast<double>(dy(m, c)) * n(c);
      dbias[c] += static_cast<double>(dy(m, c));
    }
    for (index_t c = 0; c < columns; ++c) {
      dsum(m, c) = static_cast<T>((g(c) - shift - n(c) * slope) * static_cast<double>(inverse_deviation[m]));
    }
  }
}

}  // namespace ops::reference
PUFFERFISH_NAMESPACE_END
