// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Eigen's BDCSVD for bench_svd, called as its users call it: a row-major map of the weights, thin vectors.

#include <Eigen/SVD>

#include "bench_svd.hpp"

namespace pf = pufferfish;
using pf::index_t;

namespace {

template <class Scalar>
pf::svd_result eigen_svd(const pf::tensor_view<const float, 2>& a, index_t rank) {
  using matrix = Eigen::Matrix<Scalar, Eigen::Dynamic, Eigen::Dynamic>;
  using row_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::Map<const row_major> weights(a.data(), a.extent(0), a.extent(1));
  const matrix converted = weights.template cast<Scalar>();
  const Eigen::BDCSVD<matrix> decomposition(converted, Eigen::ComputeThinU | Eigen::ComputeThinV);
  pf::svd_result result;
  result.used = pf::svd_method::external;
  result.u = pf::tensor<double, 2>({a.extent(0), rank});
  result.v = pf::tensor<double, 2>({a.extent(1), rank});
  for (index_t k = 0; k < decomposition.singularValues().size(); ++k) {
    result.singular_values.push_back(static_cast<double>(decomposition.singularValues()(k)));
  }
  for (index_t k = 0; k < rank; ++k) {
    for (index_t i = 0; i < a.extent(0); ++i)
      result.u(i, k) = static_cast<double>(decomposition.matrixU()(i, k));
    for (index_t j = 0; j < a.extent(1); ++j)
      result.v(j, k) = static_cast<double>(decomposition.matrixV()(j, k));
  }
  return result;
}

}  // namespace

pf::svd_result eigen_svd_double(const pf::tensor_view<const float, 2>& a, index_t rank) {
  return eigen_svd<double>(a, rank);
}

pf::svd_result eigen_svd_float(const pf::tensor_view<const float, 2>& a, index_t rank) {
  return eigen_svd<float>(a, rank);
}
