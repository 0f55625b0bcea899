// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/linalg/svd/symmetric_eigen.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace pf = pufferfish;
using pf::index_t;
using matrix = pf::tensor<double, 2>;

namespace {

matrix random_symmetric(index_t n, std::uint64_t seed) {
  matrix a({n, n});
  pf::detail::start_values random(seed);
  for (index_t i = 0; i < n; ++i) {
    for (index_t j = 0; j <= i; ++j) a(i, j) = a(j, i) = random.next();
  }
  return a;
}

double largest_entry(const matrix& a) {
  double largest = 0;
  for (double value : a.flat()) largest = std::max(largest, std::abs(value));
  return largest;
}

/// Largest |A x_i - value_i x_i| and |x_i . x_j - delta_ij|, by plain loops.
void check_vectors(const matrix& a, const pf::symmetric_eigen& eigen, index_t count) {
  const index_t n = a.extent(0);
  const matrix x = eigen.vectors(count);
  REQUIRE(x.shape() == pf::extents<2>{count, n});
  double residual = 0;
  double defect = 0;
  for (index_t k = 0; k < count; ++k) {
    for (index_t i = 0; i < n; ++i) {
      double sum = 0;
      for (index_t j = 0; j < n; ++j) sum += a(i, j) * x(k, j);
      residual = std::max(residual, std::abs(sum - eigen.values()[static_cast<std::size_t>(k)] * x(k, i)));
    }
    for (index_t l = 0; l <= k; ++l) {
      double sum = 0;
      for (index_t i = 0; i < n; ++i) sum += x(k, i) * x(l, i);
      defect = std::max(defect, std::abs(sum - (k == l ? 1.0 : 0.0)));
    }
  }
  CHECK(residual <= 1e-13 * largest_entry(a) * static_cast<double>(n));
  CHECK(defect <= 2e-13);
}

void check_everything(const matrix& a) {
  const index_t n = a.extent(0);
  CAPTURE(n);
  const pf::symmetric_eigen eigen(a.view());
  REQUIRE(static_cast<index_t>(eigen.values().size()) == n);
  double trace = 0;
  double squares = 0;
  double sum = 0;
  double sum_of_squares = 0;
  for (index_t i = 0; i < n; ++i) {
    const double value = eigen.values()[static_cast<std::size_t>(i)];
    if (i > 0) CHECK(value <= eigen.values()[static_cast<std::size_t>(i - 1)]);
    sum += value;
    sum_of_squares += value * value;
    trace += a(i, i);
    for (index_t j = 0; j < n; ++j) squares += a(i, j) * a(i, j);
  }
  const double scale = largest_entry(a) * static_cast<double>(n);
  CHECK(std::abs(sum - trace) <= 1e-13 * scale);
  CHECK(std::abs(sum_of_squares - squares) <= 1e-12 * scale * scale);
  for (index_t count : {index_t{0}, std::min<index_t>(1, n), n / 4, n / 2, n}) check_vectors(a, eigen, count);
}

}  // namespace

TEST_CASE("symmetric_eigen: random matrices of many orders") {
  for (index_t n : {0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 47, 64, 65, 100, 129}) {
    check_everything(random_symmetric(n, static_cast<std::uint64_t>(n)));
  }
}

TEST_CASE("symmetric_eigen: spectra that leave no gaps, or nothing to find") {
  constexpr index_t n = 70;
  matrix a({n, n});
  SUBCASE("zero") {}
  SUBCASE("identity") {
    for (index_t i = 0; i < n; ++i) a(i, i) = 1;
  }
  SUBCASE("identity plus noise of rounding size") {
    const matrix noise = random_symmetric(n, 3);
    for (index_t i = 0; i < n; ++i) {
      for (index_t j = 0; j < n; ++j) a(i, j) = (i == j ? 1.0 : 0.0) + 1e-15 * noise(i, j);
    }
  }
  SUBCASE("all entries equal: rank one") {
    for (double& value : a.flat()) value = 0.25;
  }
  SUBCASE("a diagonal in no order") {
    for (index_t i = 0; i < n; ++i) a(i, i) = static_cast<double>((i * 31) % n) - 20;
  }
  SUBCASE("two equal blocks: every value twice") {
    const matrix block = random_symmetric(n / 2, 5);
    for (index_t i = 0; i < n / 2; ++i) {
      for (index_t j = 0; j < n / 2; ++j) a(i, j) = a(n / 2 + i, n / 2 + j) = block(i, j);
    }
  }
  SUBCASE("Wilkinson's: pairs of values that agree to rounding") {
    for (index_t i = 0; i < n; ++i) {
      a(i, i) = std::abs(static_cast<double>(i) - static_cast<double>(n - 1) / 2);
      if (i > 0) a(i, i - 1) = a(i - 1, i) = 1;
    }
  }
  SUBCASE("graded over 300 orders of magnitude") {
    const matrix b = random_symmetric(n, 6);
    for (index_t i = 0; i < n; ++i) {
      for (index_t j = 0; j < n; ++j) a(i, j) = b(i, j) * std::pow(10.0, -2.2 * static_cast<double>(i + j));
    }
  }
  SUBCASE("huge") {
    const matrix b = random_symmetric(n, 7);
    for (index_t i = 0; i < n * n; ++i) a.data()[i] = 1e150 * b.data()[i];
  }
  check_everything(a);
}

TEST_CASE("symmetric_eigen: values known in closed form") {
  // The second difference: 2 - 2 cos(pi k / (n + 1)).
  constexpr index_t n = 50;
  matrix a({n, n});
  for (index_t i = 0; i < n; ++i) {
    a(i, i) = 2;
    if (i > 0) a(i, i - 1) = -1;  // the upper triangle is not read
    for (index_t j = i + 1; j < n; ++j) a(i, j) = std::numeric_limits<double>::quiet_NaN();
  }
  const pf::symmetric_eigen eigen(a.view());
  for (index_t k = 0; k < n; ++k) {
    const double angle = std::acos(-1.0) * static_cast<double>(n - k) / (n + 1);
    CHECK(eigen.values()[static_cast<std::size_t>(k)] ==
          doctest::Approx(2 - 2 * std::cos(angle)).epsilon(1e-13));
  }
}

TEST_CASE("symmetric_eigen: a few vectors are those that all would be") {
  constexpr index_t n = 96;
  const pf::symmetric_eigen eigen(random_symmetric(n, 11).view());
  const matrix few = eigen.vectors(10);
  const matrix all = eigen.vectors(n);
  for (index_t k = 0; k < 10; ++k) {
    double overlap = 0;
    for (index_t i = 0; i < n; ++i) overlap += few(k, i) * all(k, i);
    CHECK(std::abs(overlap) == doctest::Approx(1).epsilon(1e-10));
  }
}

TEST_CASE("symmetric_eigen: strided input, equal bits") {
  const matrix a = random_symmetric(40, 12);
  matrix wide({80, 120});
  for (index_t i = 0; i < 40; ++i) {
    for (index_t j = 0; j < 40; ++j) wide(2 * i, 3 * j) = a(i, j);
  }
  const pf::tensor_view<const double, 2> strided(wide.data(), {40, 40}, {240, 3});
  const pf::symmetric_eigen first(a.view());
  const pf::symmetric_eigen second(strided);
  CHECK(first.values() == second.values());
  const matrix x = first.vectors(12);
  const matrix y = second.vectors(12);
  CHECK(std::equal(x.flat().begin(), x.flat().end(), y.flat().begin()));
}

TEST_CASE("symmetric_eigen: what it refuses") {
  CHECK_THROWS_WITH_AS(pf::symmetric_eigen(matrix({3, 4}).view()),
                       "symmetric_eigen: a matrix [3 x 4] is not square", pf::shape_error);
  matrix a = random_symmetric(5, 1);
  a(4, 2) = std::numeric_limits<double>::infinity();
  CHECK_THROWS_WITH_AS(pf::symmetric_eigen(a.view()),
                       "symmetric_eigen: element (4, 2) of the matrix [5 x 5] is not finite",
                       pf::value_error);
  const pf::symmetric_eigen eigen(random_symmetric(5, 1).view());
  CHECK_THROWS_AS(eigen.vectors(6), pf::rank_error);
  CHECK_THROWS_AS(eigen.vectors(-1), pf::rank_error);
}

TEST_CASE("tridiagonal vectors: inverse iteration agrees with QL, or says that it failed") {
  pf::detail::tridiagonal t;
  pf::detail::start_values random(4);
  for (int i = 0; i < 120; ++i) {
    t.diagonal.push_back(0.5 * random.next());
    t.off.push_back(i == 119 ? 0.0 : 0.5 * random.next());
  }
  pf::detail::tridiagonal work = t;
  pf::detail::run_ql(work);
  std::vector<double> values;
  for (index_t i : pf::detail::descending_order(work.diagonal)) {
    values.push_back(work.diagonal[static_cast<std::size_t>(i)]);
  }
  matrix x({30, 120});
  matrix y({30, 120});
  REQUIRE(pf::detail::tridiagonal_vectors_by_inverse_iteration(t, values, x.view()));
  pf::detail::tridiagonal_vectors_by_ql(t, y.view());
  for (index_t k = 0; k < 30; ++k) {
    CHECK(std::abs(pf::detail::dot(x.data() + k * 120, y.data() + k * 120, 120)) ==
          doctest::Approx(1).epsilon(1e-9));
  }
  // A wrong eigenvalue has to be noticed.
  values[3] = 0.5 * (values[3] + values[4]);
  CHECK_FALSE(pf::detail::tridiagonal_vectors_by_inverse_iteration(t, values, x.view()));
}

TEST_CASE("vector loops: every instruction set of this machine agrees with plain loops") {
  using pf::isa;
  for (const isa target : pf::all_isas) {
    if (!pf::isa_available(target)) continue;
    CAPTURE(pf::to_string(target));
    const pf::detail::vector_kernels& kernels = pf::detail::vector_kernels_for(target);
    pf::detail::start_values random(9);
    for (index_t n : {0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 70}) {
      CAPTURE(n);
      const auto count = static_cast<std::size_t>(n);
      std::vector<double> x(count), y(count);
      for (double& value : x) value = random.next();
      for (double& value : y) value = random.next();
      double expected = 0;
      for (std::size_t i = 0; i < count; ++i) expected += x[i] * y[i];
      CHECK(std::abs(kernels.dot(x.data(), y.data(), n) - expected) <= 1e-13);
      std::vector<double> sum = y;
      kernels.add_scaled(0.5, x.data(), sum.data(), n);
      std::vector<double> p = x, q = y;
      kernels.rotate(0.6, 0.8, p.data(), q.data(), n);
      for (std::size_t i = 0; i < count; ++i) {
        CHECK(sum[i] == doctest::Approx(y[i] + 0.5 * x[i]));
        CHECK(std::abs(p[i] - (0.6 * x[i] - 0.8 * y[i])) <= 1e-15);
        CHECK(std::abs(q[i] - (0.8 * x[i] + 0.6 * y[i])) <= 1e-15);
      }

      // The reduction's pass: a -= v w^T + w v^T, y = a x.
      std::vector<double> v(count), w(count), a(count * count), full(count * count), product(count);
      for (std::size_t i = 0; i < count; ++i) {
        v[i] = random.next();
        w[i] = random.next();
        for (std::size_t j = 0; j <= i; ++j) a[i * count + j] = random.next();
      }
      for (std::size_t i = 0; i < count; ++i) {
        for (std::size_t j = 0; j < count; ++j) {
          full[i * count + j] = a[std::max(i, j) * count + std::min(i, j)] - v[i] * w[j] - w[i] * v[j];
        }
      }
      kernels.update_and_multiply(a.data(), n, n, v.data(), w.data(), x.data(), product.data());
      for (std::size_t i = 0; i < count; ++i) {
        double entry = 0;
        for (std::size_t j = 0; j < count; ++j) entry += full[i * count + j] * x[j];
        CHECK(std::abs(product[i] - entry) <= 1e-13);
        for (std::size_t j = 0; j <= i; ++j) CHECK(std::abs(a[i * count + j] - full[i * count + j]) <= 1e-15);
      }
    }

    constexpr index_t width = pf::detail::panel_width;
    constexpr index_t rows = pf::detail::tile_rows;
    constexpr index_t depth = 5;
    std::vector<double> a(depth * width), b(depth * width), c(rows * (width + 3), 1.0);
    for (double& value : a) value = random.next();
    for (double& value : b) value = random.next();
    kernels.multiply_tile(depth, a.data(), b.data(), c.data(), width + 3);
    for (index_t i = 0; i < rows; ++i) {
      for (index_t j = 0; j < width + 3; ++j) {
        double expected = 1;
        for (index_t p = 0; p < depth && j < width; ++p) {
          expected += a[static_cast<std::size_t>(p * width + i)] * b[static_cast<std::size_t>(p * width + j)];
        }
        CHECK(std::abs(c[static_cast<std::size_t>(i * (width + 3) + j)] - expected) <= 1e-14);
      }
    }

    std::vector<double> panel(6 * width), plain;
    for (double& value : panel) value = random.next();
    plain = panel;
    const std::vector<pf::detail::plane_rotation> rotations = {{3, 0.6, 0.8}, {2, 0.8, -0.6}, {1, 0.6, 0.8},
                                                               {4, 0.8, 0.6}, {4, 0.6, -0.8}, {0, 0.8, 0.6}};
    kernels.rotate_panel(rotations.data(), static_cast<index_t>(rotations.size()), panel.data());
    for (const auto& r : rotations) {
      for (index_t i = 0; i < width; ++i) {
        double& x = plain[static_cast<std::size_t>(r.at * width + i)];
        double& y = plain[static_cast<std::size_t>((r.at + 1) * width + i)];
        const double old_x = x;
        x = r.c * old_x - r.s * y;
        y = r.s * old_x + r.c * y;
      }
    }
    for (std::size_t i = 0; i < panel.size(); ++i) CHECK(std::abs(panel[i] - plain[i]) <= 1e-14);
  }
}

TEST_CASE("double product and orthonormal rows: against plain loops, blocks and edges included") {
  pf::detail::start_values random(10);
  for (const auto& [depth, rows, columns] : std::vector<std::array<index_t, 3>>{
           {0, 3, 4}, {1, 1, 1}, {5, 9, 17}, {130, 8, 16}, {300, 530, 33}, {129, 17, 600}}) {
    pf::tensor<float, 2> a({rows, depth});  // used transposed
    matrix b({depth, columns});
    matrix c({rows, columns});
    for (float& value : a.flat()) value = static_cast<float>(random.next());
    for (double& value : b.flat()) value = random.next();
    for (double& value : c.flat()) value = 1;
    const pf::tensor_view<const float, 2> a_view = a;
    pf::detail::add_product_tn(transpose(a_view), pf::tensor_view<const double, 2>(b), c.view());
    double error = 0;
    for (index_t i = 0; i < rows; ++i) {
      for (index_t j = 0; j < columns; ++j) {
        double expected = 1;
        for (index_t p = 0; p < depth; ++p) expected += static_cast<double>(a(i, p)) * b(p, j);
        error = std::max(error, std::abs(c(i, j) - expected));
      }
    }
    CHECK(error <= 1e-12);
  }

  // Rows 0..4 are good; 5 repeats 1, 6 is zero, 7 is almost 2, the rest random: three blocks of them.
  constexpr index_t rows = 70, length = 75;
  matrix z({rows, length});
  for (double& value : z.flat()) value = random.next();
  pf::detail::orthonormalize_rows(z.view().slice(0, 0, 5));
  const matrix before = z;
  for (index_t j = 0; j < length; ++j) {
    z(5, j) = z(1, j);
    z(6, j) = 0;
    z(7, j) = z(2, j) + 1e-9 * z(7, j);
  }
  pf::detail::orthonormalize_rows(z.view());
  for (index_t i = 0; i < rows; ++i) {
    for (index_t k = 0; k <= i; ++k) {
      const double product = pf::detail::dot(z.data() + i * length, z.data() + k * length, length);
      CHECK(std::abs(product - (i == k ? 1.0 : 0.0)) <= 2e-13);
    }
    for (index_t j = 0; j < length && i < 5; ++j) CHECK(std::abs(z(i, j) - before(i, j)) <= 1e-13);
  }
}
