// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The definition of batch normalization and its gradients in plain loops, for tests.

#include <pufferfish/ops/elementwise/relu_mask.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::reference {

/// mean_c = sum_m x_mc / M, variance_c = sum_m (x_mc - mean_c)^2 / M. x: M x C with M > 0; mean, variance: C
/// elements, overwritten.
template <class T>
void batch_norm_statistics(const tensor_view<const T, 2>& x, double* mean, double* variance) {
  const auto rows = static_cast<double>(x.extent(0));
  for (index_t c = 0; c < x.extent(1); ++c) {
    double sum = 0.0, squares = 0.0;
    for (index_t m = 0; m < x.extent(0); ++m) sum += static_cast<double>(x(m, c));
    mean[c] = sum / rows;
    for (index_t m = 0; m < x.extent(0); ++m) {
      const double distance = static_cast<double>(x(m, c)) - mean[c];
      squares += distance * distance;
    }
    variance[c] = squares / rows;
  }
}

/// y_mc = (x_mc - mean_c) inv_std_c weight_c + bias_c, plus addend_mc unless that is a null view. Then, with
/// relu, negative values become 0 (a NaN stays). y may be x or the addend.
template <class T>
void batch_norm_apply(const tensor_view<const T, 2>& x, const T* mean, const T* inv_std, const T* weight,
                      const T* bias, const tensor_view<const T, 2>& addend, bool relu,
                      const tensor_view<T, 2>& y) {
  for (index_t m = 0; m < x.extent(0); ++m) {
    for (index_t c = 0; c < x.extent(1); ++c) {
      T value = (x(m, c) - mean[c]) * (inv_std[c] * weight[c]) + bias[c];
      if (!addend.is_null()) value += addend(m, c);
      y(m, c) = relu && value < T{} ? T{} : value;
    }
  }
}

/// With z_mc = (x_mc - mean_c) inv_std_c: dbias_c = sum_m dy_mc, dweight_c = sum_m dy_mc z_mc, dx_mc =
/// weight_c inv_std_c (dy_mc - dbias_c / M - z_mc dweight_c / M), where dy_mc counts as 0 where the mask of a
/// following ReLU (none: a null mask) does not pass it. dx may be a null view, dweight and dbias may not.
template <class T>
void batch_norm_backward(const tensor_view<const T, 2>& x, const tensor_view<const T, 2>& dy, const T* mean,
                         const T* inv_std, const T* weight, const relu_mask<T>& mask, double* dweight,
                         double* dbias, const tensor_view<T, 2>& dx) {
  const auto rows = static_cast<double>(x.extent(0));
  const auto g = [&](index_t m, index_t c) {
    return mask.is_null() || mask.passes(x.shape(), m, c) ? static_cast<double>(dy(m, c)) : 0.0;
  };
  for (index_t c = 0; c < x.extent(1); ++c) {
    const auto z = [&](index_t m) { return static_cast<double>((x(m, c) - mean[c]) * inv_std[c]); };
    dbias[c] = dweight[c] = 0.0;
    for (index_t m = 0; m < x.extent(0); ++m) {
      dbias[c] += g(m, c);
      dweight[c] += g(m, c) * z(m);
    }
    if (dx.is_null()) continue;
    for (index_t m = 0; m < x.extent(0); ++m) {
      dx(m, c) = static_cast<T>(static_cast<double>(weight[c] * inv_std[c]) *
                                (g(m, c) - dbias[c] / rows - z(m) * dweight[c] / rows));
    }
  }
}

}  // namespace ops::reference
PUFFERFISH_NAMESPACE_END
