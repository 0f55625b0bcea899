// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cmath>
#include <pufferfish/core/random.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/linalg/eigen_gemm.hpp>

namespace {

using namespace pufferfish;

TEST_CASE_TEMPLATE("eigen_gemm agrees with the reference: rows, columns, strided, empty, accumulating", T,
                   float, double) {
  static_assert(gemm_engine<eigen_gemm, T>);
  int trial = 0;
  for (index_t m : {0, 1, 7, 33}) {
    for (index_t n : {0, 1, 16, 45}) {
      for (index_t k : {0, 1, 19}) {
        const auto seed = static_cast<std::uint64_t>(++trial);
        tensor<T, 2> a({m, k}), at({k, m}), b({k, n}), c({m, n}), expected({m, n}), wide({2 * m, 2 * n});
        fill_normal(a.flat(), 1.0, {seed, 1});
        fill_normal(b.flat(), 1.0, {seed, 2});
        fill_normal(c.flat(), 1.0, {seed, 3});
        copy(a.view(), transpose(at.view()));
        copy(c.view(), expected.view());
        const tensor_view<T, 2> strided(wide.data(), {m, n}, {4 * n, 2});
        copy(c.view(), strided);
        const bool accumulate = trial % 2 == 0;
        reference_gemm{}.multiply<T>(a, b, expected.view(), accumulate);
        eigen_gemm{}.multiply<T>(a, b, c.view(), accumulate);
        eigen_gemm{}.multiply<T>(transpose(tensor_view<const T, 2>(at)), b, strided, accumulate);
        const double tolerance = sizeof(T) == 4 ? 1e-4 : 1e-12;
        for (index_t i = 0; i < m; ++i) {
          for (index_t j = 0; j < n; ++j) {
            REQUIRE(std::abs(static_cast<double>(c(i, j) - expected(i, j))) <= tolerance);
            REQUIRE(std::abs(static_cast<double>(strided(i, j) - expected(i, j))) <= tolerance);
          }
        }
      }
    }
  }
}

}  // namespace
