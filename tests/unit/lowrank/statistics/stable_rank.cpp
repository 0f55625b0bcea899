// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// stable_rank against svd, and largest_eigenvalue against all eigenvalues.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/lowrank/statistics/stable_rank.hpp>

namespace {

using namespace pufferfish;

template <class T = double>
tensor<T, 2> random_matrix(index_t rows, index_t columns, std::uint64_t seed) {
  tensor<T, 2> a({rows, columns});
  detail::start_values random(seed);
  for (T& value : a.flat()) value = static_cast<T>(random.next());
  return a;
}

/// By the definition, from all singular values.
template <class T>
double reference(const tensor_view<const T, 2>& a) {
  const svd_result all = svd(a, {.method = svd_method::jacobi}, [](auto, double) { return index_t{0}; });
  if (all.singular_values.empty() || all.singular_values.front() == 0.0) return 0.0;
  const double first = all.singular_values.front();
  double sum = 0.0;
  for (const double sigma : all.singular_values) sum += (sigma / first) * (sigma / first);
  return sum;
}

/// The documented bounds, with some rounding.
void check_close(double s, double exact) {
  CHECK(s >= exact * (1.0 - 1e-12));
  CHECK(s <= exact * (1.0 + 1e-6 + 1e-12));
}

template <class T>
void check_matrix(const tensor_view<const T, 2>& a) {
  CAPTURE(a.extent(0));
  CAPTURE(a.extent(1));
  const double s = stable_rank(a), exact = reference(a);
  check_close(s, exact);
  CHECK(s <= static_cast<double>(std::min(a.extent(0), a.extent(1))));
  CHECK(stable_rank(a) == s);
  check_close(stable_rank(transpose(a)), exact);
  // Floored: below an integer by rounding in neither direction.
  if (std::abs(exact - std::round(exact)) > 1e-4) {
    CHECK(stable_rank(a, {.floored = true}) == std::floor(exact));
  }
}

TEST_CASE_TEMPLATE("stable rank: as the singular values say, over random shapes and strides", T, float,
                   double) {
  const random_stream shapes(3, 1);
  for (std::uint64_t trial = 0; trial < 60; ++trial) {
    const auto rows = static_cast<index_t>(1 + shapes.below(2 * trial, trial % 4 == 0 ? 120 : 40));
    const auto columns = static_cast<index_t>(1 + shapes.below(2 * trial + 1, trial % 3 == 0 ? 150 : 40));
    const tensor<T, 2> all = random_matrix<T>(2 * rows, 3 * columns, trial);
    check_matrix<T>(tensor_view<const T, 2>(all).slice(0, 0, rows).slice(1, 0, columns));
    // Every second element of every second row, from the second element on.
    check_matrix<T>(tensor_view<const T, 2>(all.data() + 1, {rows, columns}, {6 * columns, 2}));
  }
  for (const auto& [rows, columns] :
       {std::pair<index_t, index_t>{1, 1}, {1, 200}, {200, 1}, {33, 33}, {64, 64}}) {
    const tensor<T, 2> a = random_matrix<T>(rows, columns, 9);
    check_matrix<T>(a);
  }
}

TEST_CASE("stable rank: zeros, nothing, one element, one direction, all directions") {
  CHECK(stable_rank<float>(tensor<float, 2>({40, 30})) == 0.0);
  CHECK(stable_rank<double>(tensor<double, 2>({0, 30})) == 0.0);
  CHECK(stable_rank<double>(tensor<double, 2>({30, 0})) == 0.0);
  CHECK(stable_rank<double>(tensor<double, 2>({0, 0})) == 0.0);
  for (const double value : {1.0, -3.0, 1e-300, -1e300, 5e-324}) {
    tensor<double, 2> one({1, 1});
    one(0, 0) = value;
    CHECK(stable_rank<double>(one) == 1.0);
  }
  for (const index_t n : {2, 31, 50, 70}) {
    CAPTURE(n);
    tensor<double, 2> outer({n, 2 * n}), identity({n, n});
    for (index_t i = 0; i < n; ++i) {
      identity(i, i) = -7.5;
      for (index_t j = 0; j < 2 * n; ++j) {
        outer(i, j) = std::sin(static_cast<double>(i + 1)) * std::cos(static_cast<double>(3 * j));
      }
    }
    CHECK(stable_rank<double>(outer) == doctest::Approx(1.0).epsilon(2e-6));
    CHECK(stable_rank<double>(outer, {.floored = true}) == 1.0);
    CHECK(stable_rank<double>(identity) == doctest::Approx(static_cast<double>(n)).epsilon(1e-12));
    CHECK(stable_rank<double>(identity, {.floored = true}) == static_cast<double>(n));
  }
}

TEST_CASE("stable rank: the range of double, and elements that are not finite") {
  const tensor<double, 2> a = random_matrix(45, 60, 5);
  const double expected = stable_rank<double>(a);
  for (const double scale : {1e-300, 1e-170, 1e-90, 1e90, 1e170, 1e300}) {
    CAPTURE(scale);
    tensor<double, 2> scaled(a.view());
    for (double& value : scaled.flat()) value *= scale;
    CHECK(stable_rank<double>(scaled) == doctest::Approx(expected).epsilon(2e-6));
  }
  tensor<float, 2> tiny = random_matrix<float>(40, 50, 6);
  const double of_tiny = stable_rank<float>(tiny);
  for (float& value : tiny.flat()) value *= 1e-30F;
  CHECK(stable_rank<float>(tiny) == doctest::Approx(of_tiny).epsilon(2e-6));

  for (const double bad : {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
                           std::numeric_limits<double>::quiet_NaN()}) {
    tensor<double, 2> broken(a.view());
    broken(3, 7) = bad;
    CHECK_THROWS_WITH_AS(stable_rank<double>(broken, {}, "layer2.conv1"),
                         doctest::Contains("element (3, 7) of layer2.conv1 [45 x 60] is"), value_error);
  }
  CHECK_THROWS_WITH_AS(stable_rank<double>(a, {.tolerance = 0.0}), doctest::Contains("tolerance 0"),
                       value_error);
}

TEST_CASE("largest eigenvalue: within the tolerance for every spectrum, and exact where no iteration helps") {
  const index_t n = 80;
  const auto check = [&](const tensor<double, 2>& a, double tolerance) {
    const double exact = symmetric_eigen(tensor_view<const double, 2>(a)).values().front();
    const double found = largest_eigenvalue(tensor_view<const double, 2>(a), tolerance);
    CHECK(found <= exact * (1.0 + 1e-12));
    CHECK(found * (1.0 + tolerance) >= exact * (1.0 - 1e-12));
  };
  for (const double decay : {1.0, 0.999999, 0.999, 0.9, 0.1}) {
    CAPTURE(decay);
    // Q diag Q for the reflection Q = I - 2 v v^T of a vector v.
    const tensor<double, 2> v = random_matrix(1, n, 2);
    const double square = detail::dot(v.data(), v.data(), n);
    tensor<double, 2> q({n, n}), a({n, n});
    for (index_t i = 0; i < n; ++i) {
      for (index_t j = 0; j < n; ++j) q(i, j) = (i == j ? 1.0 : 0.0) - 2.0 * v(0, i) * v(0, j) / square;
    }
    for (index_t i = 0; i < n; ++i) {
      for (index_t j = 0; j < n; ++j) {
        for (index_t k = 0; k < n; ++k)
          a(i, j) += q(i, k) * std::pow(decay, static_cast<double>(k)) * q(k, j);
      }
    }
    for (const double tolerance : {1e-2, 1e-6, 1e-9, 1e-16}) check(a, tolerance);
  }

  // The direction of the largest value is orthogonal to the start, which an iteration alone cannot notice.
  detail::start_values random(0x706f776572U);
  std::vector<double> start(static_cast<std::size_t>(n));
  for (double& value : start) value = random.next();
  tensor<double, 2> hidden({n, n});
  for (index_t i = 2; i < n; ++i) hidden(i, i) = 0.5;
  const double length = start[0] * start[0] + start[1] * start[1];
  const double u0 = start[1], u1 = -start[0];
  hidden(0, 0) = u0 * u0 / length;
  hidden(0, 1) = hidden(1, 0) = u0 * u1 / length;
  hidden(1, 1) = u1 * u1 / length;
  check(hidden, 1e-6);
  CHECK(largest_eigenvalue(tensor_view<const double, 2>(hidden)) == doctest::Approx(1.0));

  CHECK(largest_eigenvalue(tensor_view<const double, 2>(tensor<double, 2>({n, n}))) == 0.0);
  CHECK(largest_eigenvalue(tensor_view<const double, 2>(tensor<double, 2>({0, 0}))) == 0.0);
  CHECK_THROWS_AS(largest_eigenvalue(tensor_view<const double, 2>(tensor<double, 2>({3, 2}))), shape_error);
  CHECK_THROWS_AS(largest_eigenvalue(tensor_view<const double, 2>(hidden), -1.0), value_error);
  hidden(70, 3) = std::numeric_limits<double>::quiet_NaN();
  CHECK_THROWS_AS(largest_eigenvalue(tensor_view<const double, 2>(hidden)), value_error);
  for (index_t i = 0; i < n; ++i) hidden(i, i) = 0.0;
  CHECK_THROWS_AS(largest_eigenvalue(tensor_view<const double, 2>(hidden)), value_error);
}

/// A view [out][in][height][width] of HWIO, of OIHW and of every second element.
TEST_CASE("stable rank: weights of convolutions as they are stored, and rank groups") {
  tensor<float, 4> stored({3, 2, 5, 12});
  detail::start_values random(4);
  for (float& value : stored.flat()) value = static_cast<float>(random.next());
  const auto hwio = tensor_view<const float, 4>(stored).permute({3, 2, 0, 1});
  tensor<float, 4> oihw(hwio.shape());
  copy(hwio, oihw.view());
  const double expected = reference<float>(tensor_view<const float, 2>(oihw.data(), {12, 30}));

  tensor<float, 2> memory;
  CHECK(detail::any_order_matrix<float>(hwio, memory).data() == stored.data());
  CHECK(detail::any_order_matrix<float>(oihw, memory).data() == oihw.data());
  CHECK(memory.size() == 0);
  const auto part = hwio.slice(1, 1, 3);
  const float* const copied = detail::any_order_matrix<float>(part, memory).data();
  CHECK(copied == memory.data());
  CHECK(
      detail::any_order_matrix<float>(tensor_view<const float, 4>(oihw).slice(0, 3, 1).slice(2, 1, 1), memory)
          .shape() == extents<2>{1, 10});

  layer_weights<float> weights;
  weights.name = "block";
  weights.matrices = {{"a", 0, hwio}, {"b", 1, part}, {"c", 0, oihw}, {"d", 1, hwio}};
  const std::vector<double> ranks = stable_ranks(weights);
  REQUIRE(ranks.size() == 2);
  check_close(ranks[0], expected);
  check_close(ranks[1], std::max(expected, reference(detail::any_order_matrix<float>(part, memory))));
  CHECK(stable_ranks(layer_weights<float>{}).empty());

  stored(1, 1, 2, 7) = std::numeric_limits<float>::infinity();
  CHECK_THROWS_WITH_AS(stable_ranks(weights), doctest::Contains("of block.a [12 x 30] is infinite"),
                       value_error);
}

/// Weights of sizes that a ResNet-18 and a Transformer of full width have.
TEST_CASE("stable rank: uniform initial values, as the theory of random matrices has them") {
  struct expectation {
    index_t rows, columns;
    double s;
  };
  for (const expectation& e : {expectation{64, 576, 37.6}, {512, 4608, 290.6}, {512, 512, 128.1}}) {
    CAPTURE(e.rows);
    CAPTURE(e.columns);
    const auto rows = static_cast<double>(e.rows), columns = static_cast<double>(e.columns);
    const double by_theory = rows * columns / std::pow(std::sqrt(rows) + std::sqrt(columns), 2);
    CHECK(by_theory == doctest::Approx(e.s).epsilon(0.05));
    const tensor<float, 2> a = random_matrix<float>(e.rows, e.columns, 7);
    CHECK(stable_rank<float>(a) == doctest::Approx(e.s).epsilon(0.05));
  }
}

}  // namespace
