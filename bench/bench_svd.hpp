// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <pufferfish/linalg/svd/svd.hpp>

/// Thin SVD of a by Eigen's BDCSVD in double, truncated to `rank`. In bench_svd_eigen.cpp: it takes long to
/// compile.
pufferfish::svd_result eigen_svd_double(const pufferfish::tensor_view<const float, 2>& a,
                                        pufferfish::index_t rank);

/// The same in float throughout, as a program that never leaves float would do it.
pufferfish::svd_result eigen_svd_float(const pufferfish::tensor_view<const float, 2>& a,
                                       pufferfish::index_t rank);
