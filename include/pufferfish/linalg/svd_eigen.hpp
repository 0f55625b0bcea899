// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `svd_with_eigen`: the result of `svd` by Eigen's divide-and-conquer SVD. Opt-in, because compiling it
/// takes 15 seconds in every file that calls it. `svd` needs no Eigen, and is faster.

#include <functional>
#include <utility>

#include <Eigen/SVD>

#include <pufferfish/linalg/svd/svd.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Computes svd(a, options, choose) by Eigen::BDCSVD in double. Only options.max_rank is used, and `choose`
/// is called once, but not for a matrix without elements. All singular vectors are computed, even if few are
/// kept. Signs are those of svd(). result.used is svd_method::external. Memory: a copy of a in double and
/// both thin factors with min(rows, columns) vectors. Throws the errors of svd(), and backend_error if Eigen
/// reports a failure.
template <class T, class ChooseRank>
svd_result svd_with_eigen(const tensor_view<const T, 2>& a, const svd_options& options, ChooseRank&& choose) {
  static_assert(
      std::is_same_v<T, float> || std::is_same_v<T, double>,
      "pufferfish: svd_with_eigen() takes a tensor_view<const float, 2> or tensor_view<const double, 2>");
  detail::check_svd_options(options);
  detail::require_finite(a);
  const index_t rows = a.extent(0);
  const index_t columns = a.extent(1);
  svd_result result;
  result.used = svd_method::external;
  result.u = tensor<double, 2>({rows, 0});
  result.v = tensor<double, 2>({columns, 0});
  if (a.empty()) return result;
  Eigen::MatrixXd matrix(rows, columns);
  for (index_t i = 0; i < rows; ++i) {
    for (index_t j = 0; j < columns; ++j) matrix(i, j) = static_cast<double>(a(i, j));
  }
  const Eigen::BDCSVD<Eigen::MatrixXd> decomposition(matrix, Eigen::ComputeThinU | Eigen::ComputeThinV);
  if (decomposition.info() != Eigen::Success) {
    detail::throw_error<backend_error>(
        {"svd_with_eigen: Eigen's BDCSVD failed for a matrix ", to_string<2>(a.shape())});
  }
  result.squared_norm = detail::sum_of_squares(a);
  for (index_t i = 0; i < std::min(rows, columns); ++i) {
    result.singular_values.push_back(decomposition.singularValues()(i));
  }
  const index_t most = options.max_rank == 0 ? std::min(rows, columns) : options.max_rank;
  const index_t rank = detail::chosen_rank(std::ref(choose), result, most);
  detail::vector_rows vectors{tensor<double, 2>({rank, rows}), tensor<double, 2>({rank, columns})};
  for (index_t i = 0; i < rank; ++i) {
    for (index_t j = 0; j < rows; ++j) vectors.left(i, j) = decomposition.matrixU()(j, i);
    for (index_t j = 0; j < columns; ++j) vectors.right(i, j) = decomposition.matrixV()(j, i);
  }
  detail::finish_svd(result, std::move(vectors), false);
  return result;
}

/// Computes options.max_rank singular vectors, or all min(rows, columns) if it is 0, by Eigen. Throws the
/// errors of svd(), and backend_error if Eigen reports a failure.
template <class T>
svd_result svd_with_eigen(const tensor_view<const T, 2>& a, const svd_options& options = {}) {
  return svd_with_eigen(
      a, options, [](std::span<const double> values, double) { return static_cast<index_t>(values.size()); });
}

PUFFERFISH_NAMESPACE_END
