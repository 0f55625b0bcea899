// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/linalg/svd_eigen.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>

// One instantiation of Eigen's BDCSVD serves the whole file: it costs most of its compile time.

namespace pf = pufferfish;
using pf::index_t;
using pf::svd_method;

TEST_CASE_TEMPLATE("svd_with_eigen: an independent library finds what svd finds", T, float, double) {
  for (const pf::extents<2>& shape :
       {pf::extents<2>{1, 1}, {1, 7}, {7, 1}, {12, 12}, {40, 25}, {64, 144}, {0, 3}, {128, 300}}) {
    CAPTURE(shape[0]);
    CAPTURE(shape[1]);
    pf::tensor<T, 2> a(shape);
    pf::detail::start_values random(static_cast<std::uint64_t>(shape[0]));
    for (T& value : a.flat()) value = static_cast<T>(random.next());
    const pf::tensor_view<const T, 2> view = a;
    pf::svd_options options;
    options.max_rank = std::max<index_t>(1, std::min(shape[0], shape[1]) / 4);
    const pf::svd_result theirs = pf::svd_with_eigen(view, options);
    CHECK(theirs.used == svd_method::external);
    for (svd_method method : {svd_method::gram, svd_method::jacobi}) {
      options.method = method;
      const pf::svd_result ours = pf::svd(view, options);
      REQUIRE(ours.singular_values.size() == theirs.singular_values.size());
      REQUIRE(ours.u.shape() == theirs.u.shape());
      REQUIRE(ours.v.shape() == theirs.v.shape());
      CHECK(ours.squared_norm == theirs.squared_norm);
      for (std::size_t k = 0; k < ours.singular_values.size(); ++k) {
        CHECK(std::abs(ours.singular_values[k] - theirs.singular_values[k]) <=
              1e-10 * theirs.singular_values[0]);
      }
      // The truncated matrices agree, whatever the vectors of close values do.
      double worst = 0;
      for (index_t i = 0; i < shape[0]; ++i) {
        for (index_t j = 0; j < shape[1]; ++j) {
          double difference = 0;
          for (index_t k = 0; k < ours.u.extent(1); ++k) {
            const auto at = static_cast<std::size_t>(k);
            difference += ours.u(i, k) * ours.singular_values[at] * ours.v(j, k) -
                          theirs.u(i, k) * theirs.singular_values[at] * theirs.v(j, k);
          }
          worst = std::max(worst, std::abs(difference));
        }
      }
      CHECK(worst <= 1e-10);
    }
  }
}

TEST_CASE("svd_with_eigen: refuses what svd refuses") {
  pf::tensor<float, 2> a({2, 3});
  a(1, 1) = std::numeric_limits<float>::quiet_NaN();
  CHECK_THROWS_WITH_AS(pf::svd_with_eigen(pf::tensor_view<const float, 2>(a)),
                       "svd: element (1, 1) of the matrix [2 x 3] is not a number", pf::value_error);
}
