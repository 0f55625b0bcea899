// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `svd`: the truncated thin singular value decomposition of a matrix with any strides. No other library is
/// needed.

#include <cmath>
#include <functional>
#include <span>
#include <type_traits>

#include <pufferfish/core/tensor.hpp>
#include <pufferfish/linalg/svd/svd_run.hpp>
#include <pufferfish/linalg/svd/svd_types.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Singular value decomposition of a [rows x columns], T float or double, with any strides (a may be a
/// transposed or sliced view). a is not changed and not referred to afterwards.
///
/// The rank is chosen when the spectrum is known: `choose(std::span<const double> singular_values, double
/// squared_norm)` returns the number of singular vectors to compute, in 0 .. singular_values.size(); at most
/// max_rank are computed. `choose` is called again if the method changes, and not called for a matrix without
/// elements. An exception of `choose` is passed on. The randomized method computes only max_rank values.
/// squared_norm may overflow to infinity or underflow if the squares of a double matrix do; other results do
/// not.
///
/// Throws value_error for the first element that is not finite, with its position, and for an option out of
/// range; rank_error for a negative max_rank or an invalid chosen rank. Deterministic: equal input gives
/// equal bits. Runs in the calling thread. With n = min(rows, columns) and m = max(rows, columns), the Gram
/// method needs about n^2 m / 2 multiplications for the Gram matrix, 2 n^3 / 3 for its tridiagonal form and k
/// n m for k vectors. It does not copy a matrix of float.
///
/// \code
/// svd_options options;
/// options.max_rank = 64;
/// const svd_result all = svd(weight, options);  // weight: tensor_view<const float, 2>
/// const svd_result half = svd(weight, options, [](std::span<const double> sigma, double) {
///   return static_cast<index_t>(sigma.size() / 2);
/// });
/// \endcode
template <class T, class ChooseRank>
svd_result svd(const tensor_view<const T, 2>& a, const svd_options& options, ChooseRank&& choose) {
  static_assert(
      std::is_same_v<T, float> || std::is_same_v<T, double>,
      "pufferfish: svd() takes a tensor_view<const float, 2> or tensor_view<const double, 2>; convert "
      "other scalars first (a bfloat16 network is factorized from its float master weights)");
  detail::check_svd_options(options);
  if (a.empty()) {
    svd_result result;
    result.u = tensor<double, 2>({a.extent(0), 0});
    result.v = tensor<double, 2>({a.extent(1), 0});
    if (options.method != svd_method::automatic) result.used = options.method;
    return result;
  }
  const double squared_norm = detail::sum_of_squares(a);
  if (!std::isfinite(squared_norm)) detail::require_finite(a);
  if constexpr (std::is_same_v<T, double>) {
    // Within these bounds, neither the sum nor a significant part of it has overflowed or underflowed.
    if (!(squared_norm > 1e-200 && squared_norm < 1e200)) {
      return detail::svd_of_scaled(detail::product_operand(a), options, std::ref(choose));
    }
  }
  const detail::svd_run run(detail::product_operand(a), options);
  return run(squared_norm, std::ref(choose));
}

/// Singular value decomposition of a [rows x columns] with options.max_rank singular vectors, or with all
/// min(rows, columns) if max_rank is 0. Throws value_error for the first element that is not finite and for
/// an option out of range, rank_error for a negative max_rank.
template <class T>
svd_result svd(const tensor_view<const T, 2>& a, const svd_options& options = {}) {
  return svd(a, options,
             [](std::span<const double> values, double) { return static_cast<index_t>(values.size()); });
}

PUFFERFISH_NAMESPACE_END
