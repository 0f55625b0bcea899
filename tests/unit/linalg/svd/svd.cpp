// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/linalg/svd/svd.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace pf = pufferfish;
using pf::index_t;
using pf::svd_method;
using matrix = pf::tensor<double, 2>;

namespace {

template <class T = double>
pf::tensor<T, 2> random_matrix(index_t rows, index_t columns, std::uint64_t seed) {
  pf::tensor<T, 2> a({rows, columns});
  pf::detail::start_values random(seed);
  for (T& value : a.flat()) value = static_cast<T>(random.next());
  return a;
}

/// Orthonormal columns that the code under test had no part in: Gram-Schmidt, three times.
matrix random_orthonormal(index_t rows, index_t columns, std::uint64_t seed) {
  matrix q = random_matrix(rows, columns, seed);
  for (index_t k = 0; k < columns; ++k) {
    for (int pass = 0; pass < 3; ++pass) {
      for (index_t l = 0; l < k; ++l) {
        double product = 0;
        for (index_t i = 0; i < rows; ++i) product += q(i, k) * q(i, l);
        for (index_t i = 0; i < rows; ++i) q(i, k) -= product * q(i, l);
      }
      double norm = 0;
      for (index_t i = 0; i < rows; ++i) norm += q(i, k) * q(i, k);
      for (index_t i = 0; i < rows; ++i) q(i, k) /= std::sqrt(norm);
    }
  }
  return q;
}

matrix with_spectrum(index_t rows, index_t columns, const std::vector<double>& values, std::uint64_t seed) {
  const auto count = static_cast<index_t>(values.size());
  const matrix u = random_orthonormal(rows, count, seed);
  const matrix v = random_orthonormal(columns, count, seed + 1);
  matrix a({rows, columns});
  for (index_t i = 0; i < rows; ++i) {
    for (index_t j = 0; j < columns; ++j) {
      for (index_t k = 0; k < count; ++k) a(i, j) += u(i, k) * values[static_cast<std::size_t>(k)] * v(j, k);
    }
  }
  return a;
}

double orthonormality_defect(const matrix& q) {
  double defect = 0;
  for (index_t k = 0; k < q.extent(1); ++k) {
    for (index_t l = 0; l <= k; ++l) {
      double product = 0;
      for (index_t i = 0; i < q.extent(0); ++i) product += q(i, k) * q(i, l);
      const double difference = std::abs(product - (k == l ? 1.0 : 0.0));
      if (!(difference <= defect)) defect = difference;
    }
  }
  return defect;
}

/// ||A - U diag(s) V^T||_F^2.
template <class T>
double squared_error(const pf::tensor_view<const T, 2>& a, const pf::svd_result& s) {
  double total = 0;
  for (index_t i = 0; i < a.extent(0); ++i) {
    for (index_t j = 0; j < a.extent(1); ++j) {
      double rest = static_cast<double>(a(i, j));
      for (index_t k = 0; k < s.u.extent(1); ++k) {
        rest -= s.u(i, k) * s.singular_values[static_cast<std::size_t>(k)] * s.v(j, k);
      }
      total += rest * rest;
    }
  }
  return total;
}

/// Everything that holds for every input and method: shapes, order, orthonormality, signs, and (unless
/// randomized) that what is lost is what was discarded.
template <class T>
void check_result(const pf::tensor_view<const T, 2>& a, const pf::svd_result& s, index_t rank) {
  const index_t rows = a.extent(0);
  const index_t columns = a.extent(1);
  CAPTURE(rows);
  CAPTURE(columns);
  CAPTURE(rank);
  REQUIRE(s.u.shape() == pf::extents<2>{rows, rank});
  REQUIRE(s.v.shape() == pf::extents<2>{columns, rank});
  if (s.used != svd_method::randomized) {
    REQUIRE(static_cast<index_t>(s.singular_values.size()) == std::min(rows, columns));
  }
  CHECK(std::is_sorted(s.singular_values.rbegin(), s.singular_values.rend()));
  CHECK(orthonormality_defect(s.u) <= 5e-13);
  CHECK(orthonormality_defect(s.v) <= 5e-13);
  for (index_t k = 0; k < rank; ++k) {
    double largest = 0;
    for (index_t i = 0; i < rows; ++i) {
      if (std::abs(s.u(i, k)) > std::abs(largest)) largest = s.u(i, k);
    }
    CHECK(largest > 0);
  }
  double all = 0;
  double discarded = 0;
  for (std::size_t k = 0; k < s.singular_values.size(); ++k) {
    CHECK(s.singular_values[k] >= 0);
    all += s.singular_values[k] * s.singular_values[k];
    if (static_cast<index_t>(k) >= rank) discarded += s.singular_values[k] * s.singular_values[k];
  }
  double exact = 0;
  for (index_t i = 0; i < rows; ++i) {
    for (index_t j = 0; j < columns; ++j)
      exact += static_cast<double>(a(i, j)) * static_cast<double>(a(i, j));
  }
  CHECK(std::abs(s.squared_norm - exact) <= 1e-13 * exact);
  if (s.used == svd_method::randomized) {
    CHECK(squared_error(a, s) <= exact - (all - discarded) + 1e-12 * exact);
  } else {
    CHECK(std::abs(all - exact) <= 1e-12 * exact);
    CHECK(std::abs(squared_error(a, s) - discarded) <= 1e-12 * exact);
  }
}

template <class T>
pf::tensor_view<const T, 2> view_of(const pf::tensor<T, 2>& a) {
  return a.view();
}

pf::svd_options options_for(svd_method method, index_t rank = 0) {
  pf::svd_options options;
  options.method = method;
  options.max_rank = rank;
  return options;
}

constexpr svd_method exact_methods[] = {svd_method::automatic, svd_method::gram, svd_method::jacobi};

bool same_bits(const pf::svd_result& x, const pf::svd_result& y) {
  return x.singular_values == y.singular_values &&
         std::equal(x.u.flat().begin(), x.u.flat().end(), y.u.flat().begin(), y.u.flat().end()) &&
         std::equal(x.v.flat().begin(), x.v.flat().end(), y.v.flat().begin(), y.v.flat().end());
}

}  // namespace

TEST_CASE_TEMPLATE("svd: random matrices of many shapes, every method and rank", T, float, double) {
  const std::vector<pf::extents<2>> shapes = {{1, 1},   {1, 9},    {9, 1},   {2, 2},  {3, 2},
                                              {2, 3},   {7, 7},    {8, 16},  {17, 5}, {33, 40},
                                              {64, 64}, {100, 37}, {40, 150}};
  for (const pf::extents<2>& shape : shapes) {
    const auto a =
        random_matrix<T>(shape[0], shape[1], static_cast<std::uint64_t>(shape[0] * 100 + shape[1]));
    const index_t all = std::min(shape[0], shape[1]);
    for (svd_method method : exact_methods) {
      for (index_t rank : {index_t{1}, (all + 3) / 4, all}) {
        check_result(view_of(a), pf::svd(view_of(a), options_for(method, rank)), rank);
      }
      check_result(view_of(a), pf::svd(view_of(a), options_for(method)), all);
    }
    check_result(view_of(a), pf::svd(view_of(a), options_for(svd_method::randomized, (all + 3) / 4)),
                 (all + 3) / 4);
    check_result(view_of(a), pf::svd(view_of(a), options_for(svd_method::randomized)), all);
  }
}

TEST_CASE("svd: a matrix without elements") {
  for (const pf::extents<2>& shape : {pf::extents<2>{0, 0}, pf::extents<2>{0, 5}, pf::extents<2>{5, 0}}) {
    const matrix a(shape);
    for (svd_method method : exact_methods) {
      const pf::svd_result s = pf::svd(view_of(a), options_for(method));
      CHECK(s.singular_values.empty());
      CHECK(s.u.shape() == pf::extents<2>{shape[0], 0});
      CHECK(s.v.shape() == pf::extents<2>{shape[1], 0});
      CHECK(s.squared_norm == 0);
    }
  }
}

TEST_CASE("svd: rank-deficient matrices still get orthonormal vectors") {
  for (svd_method method :
       {svd_method::automatic, svd_method::gram, svd_method::jacobi, svd_method::randomized}) {
    CAPTURE(static_cast<int>(method));
    for (const pf::extents<2>& shape : {pf::extents<2>{1, 1}, {1, 6}, {6, 1}, {12, 12}, {20, 45}, {90, 40}}) {
      const matrix zero(shape);
      const index_t all = std::min(shape[0], shape[1]);
      check_result(view_of(zero), pf::svd(view_of(zero), options_for(method)), all);

      matrix ones(shape);
      for (double& value : ones.flat()) value = 0.1;
      const pf::svd_result s = pf::svd(view_of(ones), options_for(method));
      check_result(view_of(ones), s, all);
      CHECK(s.singular_values[0] == doctest::Approx(0.1 * std::sqrt(static_cast<double>(ones.size()))));
    }
    const matrix three = with_spectrum(40, 60, {5, 2, 1}, 3);
    const pf::svd_result s = pf::svd(view_of(three), options_for(method, 10));
    check_result(view_of(three), s, 10);
    CHECK(s.singular_values[2] == doctest::Approx(1));
    CHECK(s.singular_values[3] <= 1e-7);
    if (method == svd_method::automatic) {
      CHECK(s.used == svd_method::jacobi);
      CHECK(s.singular_values[3] <= 1e-14);
      CHECK(pf::svd(view_of(three), options_for(method, 3)).used == svd_method::gram);
    }
  }
  // A zero row and column, and a repeated one.
  matrix a = random_matrix(30, 50, 8);
  for (index_t j = 0; j < 50; ++j) {
    a(4, j) = 0;
    a(9, j) = a(7, j);
  }
  for (index_t i = 0; i < 30; ++i) a(i, 49) = 0;
  for (svd_method method : exact_methods)
    check_result(view_of(a), pf::svd(view_of(a), options_for(method)), 30);
}

TEST_CASE("svd: equal singular values") {
  const matrix q = random_orthonormal(50, 30, 17);
  for (svd_method method : exact_methods) {
    for (index_t rank : {7, 30}) {
      const pf::svd_result s = pf::svd(view_of(q), options_for(method, rank));
      check_result(view_of(q), s, rank);
      CHECK(s.singular_values[0] == doctest::Approx(1).epsilon(1e-13));
      CHECK(s.singular_values[29] == doctest::Approx(1).epsilon(1e-13));
    }
  }
}

TEST_CASE("svd: the methods find the same spectrum and subspace") {
  std::vector<double> values;
  for (int k = 0; k < 40; ++k) values.push_back(std::pow(0.8, k));
  const matrix a = with_spectrum(60, 90, values, 21);
  const pf::svd_result gram = pf::svd(view_of(a), options_for(svd_method::gram, 12));
  pf::svd_options options = options_for(svd_method::randomized, 12);
  options.power_iterations = 12;
  const pf::svd_result randomized = pf::svd(view_of(a), options);
  const pf::svd_result jacobi = pf::svd(view_of(a), options_for(svd_method::jacobi, 12));
  CHECK(gram.used == svd_method::gram);
  CHECK(jacobi.used == svd_method::jacobi);
  CHECK(randomized.used == svd_method::randomized);
  CHECK(randomized.singular_values.size() == 12);
  for (std::size_t k = 0; k < 12; ++k) {
    CHECK(gram.singular_values[k] == doctest::Approx(values[k]).epsilon(1e-12));
    CHECK(jacobi.singular_values[k] == doctest::Approx(values[k]).epsilon(1e-13));
    CHECK(randomized.singular_values[k] == doctest::Approx(values[k]).epsilon(1e-6));
  }
  // The values differ, so vectors agree one by one, signs included.
  for (index_t k = 0; k < 12; ++k) {
    double products[4] = {};
    for (index_t i = 0; i < 60; ++i) products[0] += gram.u(i, k) * jacobi.u(i, k);
    for (index_t i = 0; i < 90; ++i) products[1] += gram.v(i, k) * jacobi.v(i, k);
    for (index_t i = 0; i < 60; ++i) products[2] += gram.u(i, k) * randomized.u(i, k);
    for (index_t i = 0; i < 90; ++i) products[3] += gram.v(i, k) * randomized.v(i, k);
    CHECK(products[0] == doctest::Approx(1).epsilon(1e-12));
    CHECK(products[1] == doctest::Approx(1).epsilon(1e-12));
    CHECK(products[2] == doctest::Approx(1).epsilon(1e-4));
    CHECK(products[3] == doctest::Approx(1).epsilon(1e-4));
  }
}

TEST_CASE("svd: graded matrices of condition 1e12 keep the digits of their small values") {
  // A matrix that is orthogonal but for its scaling, A = Q D: its singular values are the entries of D.
  constexpr index_t n = 25;
  for (index_t m : {n, index_t{60}}) {
    const matrix q = random_orthonormal(m, n, 31);
    matrix columns({m, n});
    std::vector<double> expected;
    for (index_t k = 0; k < n; ++k) {
      const double size = std::pow(10.0, -12.0 * static_cast<double>(k) / (n - 1));
      expected.push_back(size);
      const index_t to = (k * 7) % n;  // in no order
      for (index_t i = 0; i < m; ++i) columns(i, to) = q(i, k) * size;
    }
    for (const auto& a : {view_of(columns), transpose(view_of(columns))}) {
      for (svd_method method : {svd_method::jacobi, svd_method::automatic}) {
        const pf::svd_result s = pf::svd(a, options_for(method));
        CHECK(s.used == svd_method::jacobi);
        check_result(a, s, n);
        for (std::size_t k = 0; k < n; ++k) {
          CHECK(std::abs(s.singular_values[k] - expected[k]) <= 1e-13 * expected[k]);
        }
        // Small components count too: A v = sigma u column by column, relative to sigma.
        for (index_t k = 0; k < n; ++k) {
          const double sigma = s.singular_values[static_cast<std::size_t>(k)];
          double worst = 0;
          for (index_t i = 0; i < a.extent(0); ++i) {
            double sum = 0;
            for (index_t j = 0; j < a.extent(1); ++j) sum += a(i, j) * s.v(j, k);
            worst = std::max(worst, std::abs(sum - sigma * s.u(i, k)));
          }
          CHECK(worst <= 1e-14 * s.singular_values[0]);
        }
      }
      // As long as only large values are kept, the Gram matrix is trusted.
      const pf::svd_result s = pf::svd(a, options_for(svd_method::automatic, 12));
      CHECK(s.used == svd_method::gram);
      check_result(a, s, 12);
      for (std::size_t k = 0; k < 12; ++k)
        CHECK(std::abs(s.singular_values[k] - expected[k]) <= 1e-3 * expected[k]);
    }
  }

  // Scaled along the other side: rows of a tall matrix. By hand: 2 x 1 blocks keep it diagonal.
  matrix rows({6, 3});
  const double sizes[] = {1, 1e-6, 1e-12};
  for (index_t k = 0; k < 3; ++k) {
    rows(2 * k, 2 - k) = 3 * sizes[k];
    rows(2 * k + 1, 2 - k) = 4 * sizes[k];
  }
  const pf::svd_result s = pf::svd(view_of(rows));
  check_result(view_of(rows), s, 3);
  for (std::size_t k = 0; k < 3; ++k)
    CHECK(s.singular_values[k] == doctest::Approx(5 * sizes[k]).epsilon(1e-14));
}

TEST_CASE("svd: a bad condition that no scaling explains") {
  std::vector<double> values;
  for (int k = 0; k < 30; ++k) values.push_back(std::pow(10.0, -12.0 * k / 29));
  const matrix a = with_spectrum(48, 36, values, 41);
  for (svd_method method : exact_methods) {
    const pf::svd_result s = pf::svd(view_of(a), options_for(method));
    check_result(view_of(a), s, 36);
    const double tolerance = method == svd_method::gram ? 1e-7 : 1e-14;
    for (std::size_t k = 0; k < values.size(); ++k)
      CHECK(std::abs(s.singular_values[k] - values[k]) <= tolerance);
  }
}

TEST_CASE("svd: magnitudes whose squares leave the range of double") {
  const matrix a = random_matrix(14, 22, 51);
  const pf::svd_result plain = pf::svd(view_of(a));
  for (int exponent : {-1030, -700, 600, 1020}) {
    CAPTURE(exponent);
    matrix scaled = a;
    for (double& value : scaled.flat()) value = std::ldexp(value, exponent);
    for (svd_method method : exact_methods) {
      const pf::svd_result s = pf::svd(view_of(scaled), options_for(method));
      for (std::size_t k = 0; k < 14; ++k) {
        const double value = std::ldexp(s.singular_values[k], -exponent);
        CHECK(value == doctest::Approx(plain.singular_values[k]).epsilon(1e-12));
      }
      CHECK(orthonormality_defect(s.u) <= 1e-13);
      CHECK(orthonormality_defect(s.v) <= 1e-13);
    }
  }
  pf::tensor<float, 2> largest({3, 4});
  for (float& value : largest.flat()) value = std::numeric_limits<float>::max();
  const pf::svd_result s = pf::svd(view_of(largest));
  CHECK(s.singular_values[0] == doctest::Approx(std::sqrt(12.0) * static_cast<double>(largest(0, 0))));
}

TEST_CASE("svd: any strides, equal bits") {
  const auto a = random_matrix<float>(24, 36, 61);
  pf::tensor<float, 2> turned({36, 24});
  pf::tensor<float, 2> wide({48, 108});
  for (index_t i = 0; i < 24; ++i) {
    for (index_t j = 0; j < 36; ++j) turned(j, i) = wide(2 * i, 3 * j) = a(i, j);
  }
  const pf::tensor_view<const float, 2> strided(wide.data(), {24, 36}, {216, 3});
  const pf::tensor_view<const float, 2> backwards(wide.data() + 23 * 216, {24, 36}, {-216, 3});
  for (svd_method method : {svd_method::gram, svd_method::jacobi, svd_method::randomized}) {
    const pf::svd_options options = options_for(method, 9);
    const pf::svd_result s = pf::svd(view_of(a), options);
    CHECK(same_bits(s, pf::svd(view_of(a), options)));
    CHECK(same_bits(s, pf::svd(transpose(view_of(turned)), options)));
    CHECK(same_bits(s, pf::svd(strided, options)));
    check_result(backwards, pf::svd(backwards, options), 9);
  }
}

TEST_CASE("svd: signs") {
  matrix a({2, 3});
  a(0, 1) = -3;  // alone in its row and column: u = e_0, v = -e_1
  a(1, 2) = 2;
  for (svd_method method : exact_methods) {
    const pf::svd_result s = pf::svd(view_of(a), options_for(method));
    CHECK(s.u(0, 0) == doctest::Approx(1));
    CHECK(s.v(1, 0) == doctest::Approx(-1));
    CHECK(s.u(1, 1) == doctest::Approx(1));
    CHECK(s.v(2, 1) == doctest::Approx(1));
  }
}

TEST_CASE("svd: the rank is chosen from the spectrum") {
  const matrix a = with_spectrum(20, 30, {4, 2, 1, 0.5, 0.25, 1e-9}, 71);
  int calls = 0;
  const auto half_of_energy = [&](std::span<const double> values, double total) -> index_t {
    ++calls;
    CHECK(values.size() == 20);
    double kept = 0;
    std::size_t k = 0;
    while (k < values.size() && kept < 0.95 * total) kept += values[k] * values[k], ++k;
    return static_cast<index_t>(k);
  };
  pf::svd_result s = pf::svd(view_of(a), {}, half_of_energy);
  CHECK(s.u.extent(1) == 3);  // 16 + 4 + 1 of 21.3125
  CHECK(calls == 1);
  check_result(view_of(a), s, 3);
  s = pf::svd(view_of(a), options_for(svd_method::automatic, 2), half_of_energy);
  CHECK(s.u.extent(1) == 2);
  s = pf::svd(view_of(a), {}, [](std::span<const double>, double) { return index_t{0}; });
  CHECK(s.v.shape() == pf::extents<2>{30, 0});
  CHECK(s.singular_values.size() == 20);
  s = pf::svd(view_of(a), {}, [](std::span<const double>, double) { return index_t{6}; });
  CHECK(s.used == svd_method::jacobi);
  CHECK(s.singular_values[5] == doctest::Approx(1e-9).epsilon(1e-5));
  CHECK_THROWS_WITH_AS(pf::svd(view_of(a), {}, [](std::span<const double>, double) { return index_t{21}; }),
                       "svd: rank 21 chosen from 20 singular values", pf::rank_error);
}

TEST_CASE("svd: randomized") {
  std::vector<double> values;
  for (int k = 0; k < 60; ++k) values.push_back(1 / (1.0 + k));
  const matrix a = with_spectrum(80, 120, values, 81);
  double best = 0;
  for (std::size_t k = 10; k < values.size(); ++k) best += values[k] * values[k];
  pf::svd_options options = options_for(svd_method::randomized, 10);
  const pf::svd_result s = pf::svd(view_of(a), options);
  check_result(view_of(a), s, 10);
  const double error = squared_error(view_of(a), s);
  CHECK(error >= best * (1 - 1e-12));
  CHECK(error <= best * 1.05);
  CHECK(same_bits(s, pf::svd(view_of(a), options)));
  options.seed = 1;
  CHECK_FALSE(same_bits(s, pf::svd(view_of(a), options)));
  check_result(transpose(view_of(a)), pf::svd(transpose(view_of(a)), options), 10);
}

TEST_CASE("svd: automatic is randomized only where the smaller side is in the thousands and little is kept") {
  // One row and column carry the matrix, so that a few directions are all there is to find.
  pf::tensor<float, 2> a({2048, 2050});
  for (index_t i = 0; i < 2048; ++i) a(i, 3) = 1;
  a(5, 7) = 4;
  pf::svd_options options;
  options.max_rank = 2;
  options.oversampling = 2;
  options.power_iterations = 1;
  const pf::svd_result s = pf::svd(view_of(a), options);
  CHECK(s.used == svd_method::randomized);
  CHECK(s.singular_values.size() == 2);
  CHECK(s.singular_values[0] == doctest::Approx(std::sqrt(2048.0)).epsilon(1e-2));
  const auto small = view_of(a).slice(0, 0, 20);
  CHECK(pf::svd(small, options).used == svd_method::gram);
}

TEST_CASE_TEMPLATE("svd: what it refuses", T, float, double) {
  auto a = random_matrix<T>(4, 9, 91);
  a(3, 7) = std::numeric_limits<T>::quiet_NaN();
  CHECK_THROWS_WITH_AS(pf::svd(view_of(a)), "svd: element (3, 7) of the matrix [4 x 9] is not a number",
                       pf::value_error);
  a(1, 8) = -std::numeric_limits<T>::infinity();
  CHECK_THROWS_WITH_AS(pf::svd(view_of(a)), "svd: element (1, 8) of the matrix [4 x 9] is infinite",
                       pf::value_error);
  CHECK_THROWS_WITH_AS(pf::svd(transpose(view_of(a))),
                       "svd: element (7, 3) of the matrix [9 x 4] is not a number", pf::value_error);
  const auto b = random_matrix<T>(4, 9, 92);
  CHECK_THROWS_AS(pf::svd(view_of(b), options_for(svd_method::automatic, -1)), pf::rank_error);
  CHECK_THROWS_AS(pf::svd(view_of(b), options_for(svd_method::external)), pf::value_error);
  pf::svd_options options;
  options.power_iterations = -1;
  CHECK_THROWS_AS(pf::svd(view_of(b), options), pf::value_error);
}
