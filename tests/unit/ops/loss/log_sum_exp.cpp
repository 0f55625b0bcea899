// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <cmath>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/core/random.hpp>
#include <pufferfish/ops/loss/log_sum_exp.hpp>

using namespace pufferfish;

namespace {

template <class T>
void check(index_t rows, index_t count, double scale, double shift, int threads, double tolerance) {
  std::vector<T> z(static_cast<std::size_t>(rows * count));
  const random_stream random(static_cast<std::uint64_t>(rows * 1000 + count), 1);
  for (std::size_t i = 0; i < z.size(); ++i) z[i] = static_cast<T>(scale * random.normal(i) + shift);
  const tensor_view<const T, 2> view(z.data(), {rows, count});
  std::vector<double> expected(static_cast<std::size_t>(rows)), result(expected);
  ops::reference::log_sum_exp<T>(view, expected);
  cpu_context ctx({.threads = threads});
  ops::log_sum_exp<T>(ctx, view, result);
  for (std::size_t m = 0; m < result.size(); ++m) {
    CHECK(result[m] == doctest::Approx(expected[m]).epsilon(tolerance));
  }
}

}  // namespace

TEST_CASE_TEMPLATE("the fast form is the reference's", T, float, double) {
  const double tolerance = std::is_same_v<T, float> ? 2e-7 : 1e-14;
  for (const index_t rows : {0, 1, 3, 70}) {
    for (const index_t count : {1, 2, 7, 64, 1001}) {
      check<T>(rows, count, 3.0, 0.0, 1, tolerance);
      check<T>(rows, count, 30.0, 500.0, 2, tolerance);
    }
  }
}

TEST_CASE_TEMPLATE("infinities and NaNs", T, float, double) {
  constexpr T infinity = std::numeric_limits<T>::infinity();
  const T nan = std::numeric_limits<T>::quiet_NaN();
  cpu_context ctx;
  for (const index_t count : {1, 5, 40}) {
    std::vector<T> z(static_cast<std::size_t>(count), -infinity);
    double result[1];
    const auto run = [&] {
      ops::log_sum_exp<T>(ctx, {z.data(), {1, count}}, result);
      return result[0];
    };
    CHECK(run() == -std::numeric_limits<double>::infinity());
    for (const std::size_t place : {std::size_t{0}, z.size() / 2, z.size() - 1}) {
      z[place] = T{2};
      CHECK(run() == doctest::Approx(2.0));
      z[place] = infinity;
      CHECK(std::isnan(run()));
      z[place] = nan;
      CHECK(std::isnan(run()));
      z[place] = -infinity;
    }
  }
  double result[1] = {0.0};
  ops::log_sum_exp<T>(ctx, {nullptr, {1, 0}}, result);
  CHECK(result[0] == -std::numeric_limits<double>::infinity());
  CHECK_THROWS_AS(ops::log_sum_exp<T>(ctx, {nullptr, {2, 0}}, result), shape_error);
}
