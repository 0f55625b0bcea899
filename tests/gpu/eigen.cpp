// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The eigensolvers of symmetric matrices on a device, against the host's.
#include "support.hpp"

#include <functional>

#include <pufferfish/gpu/cusolver.hpp>
#include <pufferfish/gpu/kernels/linalg/eigen_functors.hpp>
#include <pufferfish/gpu/linalg/eigen.hpp>
#include <pufferfish/linalg/svd/symmetric_eigen.hpp>

using namespace gpu_test;
using pf::gpu::eigenvalues;

namespace {

std::size_t at(index_t n, index_t i, index_t j) { return static_cast<std::size_t>(i * n + j); }

// A A^T of a random matrix n x m whose row i is multiplied by decay^i.
std::vector<double> gram_matrix(index_t n, index_t m, double decay, std::uint64_t stream) {
  std::vector<double> a(static_cast<std::size_t>(n * m)), g(static_cast<std::size_t>(n * n));
  pf::fill_uniform(std::span<double>(a), -1.0, 1.0, pf::random_stream(11, stream));
  for (index_t i = 0; i < n; ++i) {
    for (index_t k = 0; k < m; ++k) a[at(m, i, k)] *= std::pow(decay, static_cast<double>(i));
  }
  for (index_t i = 0; i < n; ++i) {
    for (index_t j = 0; j <= i; ++j) {
      double sum = 0.0;
      for (index_t k = 0; k < m; ++k) sum += a[at(m, i, k)] * a[at(m, j, k)];
      g[at(n, i, j)] = g[at(n, j, i)] = sum;
    }
  }
  return g;
}

std::vector<double> diagonal_matrix(const std::vector<double>& values) {
  const auto n = static_cast<index_t>(values.size());
  std::vector<double> g(static_cast<std::size_t>(n * n));
  for (index_t i = 0; i < n; ++i) g[at(n, i, i)] = values[static_cast<std::size_t>(i)];
  return g;
}

template <class T>
struct solution {
  std::vector<T> values, vectors;
};

template <class T>
solution<T> solve(pf::gpu::eigensolver& solver, const std::vector<double>& matrix, index_t n,
                  eigenvalues wanted = eigenvalues::large) {
  twin<T> a(std::vector<T>(matrix.begin(), matrix.end())), vectors(n * n, NAN), values(n, NAN);
  solver.solve(gpu_context(), n, a.device_data(), vectors.device_data(), values.device_data(), wanted);
  return {values.fetched(), vectors.fetched()};
}

struct errors {
  double values = 0.0, residual = 0.0, orthogonality = 0.0;
};

// Beside the largest eigenvalue.
template <class T>
errors errors_of(const solution<T>& s, const std::vector<double>& matrix, index_t n) {
  const pf::symmetric_eigen expected(pf::tensor_view<const double, 2>(matrix.data(), {n, n}));
  double scale = 1e-300;
  for (const double value : expected.values()) scale = std::max(scale, std::abs(value));
  const std::vector<double> x(s.vectors.begin(), s.vectors.end());
  errors e;
  for (index_t i = 0; i < n; ++i) {
    for (index_t j = 0; j < n; ++j) {
      double product = i == j ? -1.0 : 0.0, row = 0.0;
      for (index_t k = 0; k < n; ++k) {
        product += x[at(n, i, k)] * x[at(n, j, k)];
        row += matrix[at(n, j, k)] * x[at(n, i, k)];
      }
      const double wanted = static_cast<double>(s.values[static_cast<std::size_t>(i)]) * x[at(n, i, j)];
      e.orthogonality = std::max(e.orthogonality, std::abs(product));
      e.residual = std::max(e.residual, std::abs(row - wanted) / scale);
    }
  }
  std::vector<double> found(s.values.begin(), s.values.end());
  std::sort(found.begin(), found.end(), std::greater<>());
  for (std::size_t i = 0; i < found.size(); ++i) {
    e.values = std::max(e.values, std::abs(found[i] - expected.values()[i]) / scale);
  }
  return e;
}

template <class T>
void check_solution(pf::gpu::eigensolver& solver, const std::vector<double>& matrix, index_t n,
                    eigenvalues wanted = eigenvalues::large) {
  const double unit = static_cast<double>(std::numeric_limits<T>::epsilon());
  const errors e = errors_of(solve<T>(solver, matrix, n, wanted), matrix, n);
  CAPTURE(n);
  CAPTURE(sizeof(T));
  const double limit = unit * (50.0 + 8.0 * static_cast<double>(n));
  CHECK(e.values < limit);
  CHECK(e.residual < limit);
  CHECK(e.orthogonality < limit);
}

}  // namespace

TEST_CASE("gpu eigen: in a tournament everybody meets everybody once") {
  for (const int players : {2, 4, 6, 32, 64}) {
    std::vector<int> met(static_cast<std::size_t>(players * players));
    for (int round = 0; round < players - 1; ++round) {
      std::vector<int> busy(static_cast<std::size_t>(players));
      for (int i = 0; i < players / 2; ++i) {
        const auto [first, second] = pf::gpu::kernels::pairing_of(players, round, i);
        REQUIRE(first >= 0);
        REQUIRE(first < second);
        REQUIRE(second < players);
        ++busy[static_cast<std::size_t>(first)];
        ++busy[static_cast<std::size_t>(second)];
        ++met[static_cast<std::size_t>(first * players + second)];
      }
      CHECK(std::all_of(busy.begin(), busy.end(), [](int n) { return n == 1; }));
    }
    CHECK(std::count(met.begin(), met.end(), 1) == players * (players - 1) / 2);
  }
}

TEST_CASE("gpu eigen: a rotation makes an element zero and puts the larger value first") {
  const double cases[][3] = {{2, 1, 3}, {3, 1, 2}, {1, -2, 1}, {1e-20, 1e-12, 1}, {0, 1, 0}, {1, 1e-30, 1}};
  for (const auto& [pp, pq, qq] : cases) {
    CAPTURE(pp);
    const auto r = pf::gpu::kernels::diagonalizing_rotation(pp, pq, qq);
    const double size = std::max({pp, std::abs(pq), qq});
    CHECK(std::abs(r.c * r.c + r.s * r.s - 1.0) < 1e-15);
    CHECK(std::abs(r.c * r.s * (pp - qq) + (r.c * r.c - r.s * r.s) * pq) < 1e-15 * size);
    CHECK(std::abs(r.first + r.second - pp - qq) < 1e-15 * size);
    CHECK(r.first >= r.second);
  }
}

TEST_CASE("gpu eigen: Gram matrices of every order, in double and in float") {
  pf::gpu::jacobi_eigensolver solver;
  for (const index_t n : {1, 2, 3, 8, 33, 63, 64, 65, 100}) {
    const std::vector<double> g = gram_matrix(n, n + 20, 1.0, static_cast<std::uint64_t>(n));
    check_solution<double>(solver, g, n);
    check_solution<float>(solver, g, n);
    CHECK(solver.sweeps() < 14);
  }
}

TEST_CASE("gpu eigen: deficient, diagonal and zero matrices, clusters") {
  pf::gpu::jacobi_eigensolver solver;
  for (const auto wanted : {eigenvalues::large, eigenvalues::all}) {
    check_solution<double>(solver, gram_matrix(70, 5, 1.0, 1), 70, wanted);
    check_solution<float>(solver, gram_matrix(40, 1, 1.0, 2), 40, wanted);
    check_solution<double>(solver, diagonal_matrix({0, 0, 0}), 3, wanted);
    check_solution<double>(solver, diagonal_matrix({1, 1, 1, 1, 2, 2, 2}), 7, wanted);
    check_solution<float>(solver, diagonal_matrix({3, 5, 7, 5, 0}), 5, wanted);
    check_solution<double>(solver, gram_matrix(50, 60, 0.5, 3), 50, wanted);
  }
}

TEST_CASE("gpu eigen: small eigenvalues of a graded matrix keep their digits where that is asked for") {
  constexpr index_t n = 12;
  // G = D H D with D from 1 to 1e-16 and H the unit matrix and a little.
  std::vector<double> g(n * n);
  const auto scale = [](index_t i) { return std::pow(10.0, -16.0 * static_cast<double>(i) / (n - 1)); };
  for (index_t i = 0; i < n; ++i) {
    for (index_t j = 0; j < n; ++j) {
      g[at(n, i, j)] =
          scale(i) * scale(j) * (i == j ? 1.0 : 0.1 / (1.0 + static_cast<double>(std::abs(i - j))));
    }
  }
  pf::gpu::jacobi_eigensolver solver;
  std::vector<double> found = solve<double>(solver, g, n, eigenvalues::all).values;
  std::sort(found.begin(), found.end(), std::greater<>());
  // The product of all eigenvalues is the determinant: the product of D^2 times that of H, which Gauss's
  // elimination finds without a loss.
  std::vector<double> h(n * n);
  for (index_t i = 0; i < n; ++i) {
    for (index_t j = 0; j < n; ++j) h[at(n, i, j)] = g[at(n, i, j)] / (scale(i) * scale(j));
  }
  double expected = 0.0, sum = 0.0;
  for (index_t k = 0; k < n; ++k) {
    expected += std::log(h[at(n, k, k)]) + 2.0 * std::log(scale(k));
    for (index_t i = k + 1; i < n; ++i) {
      const double factor = h[at(n, i, k)] / h[at(n, k, k)];
      for (index_t j = k; j < n; ++j) h[at(n, i, j)] -= factor * h[at(n, k, j)];
    }
  }
  for (const double value : found) {
    CHECK(value > 0.0);
    sum += std::log(value);
  }
  CHECK(std::abs(sum - expected) < 1e-12);
  CHECK(found.back() == doctest::Approx(1e-32).epsilon(0.1));
}

TEST_CASE("gpu eigen: equal matrices give equal bits") {
  pf::gpu::jacobi_eigensolver solver;
  const std::vector<double> g = gram_matrix(80, 90, 0.9, 4);
  const solution<double> once = solve<double>(solver, g, 80), again = solve<double>(solver, g, 80);
  CHECK(once.values == again.values);
  CHECK(once.vectors == again.vectors);
}

TEST_CASE("gpu eigen: cuSOLVER's") {
  pf::gpu::cusolver_eigensolver solver;
  for (const index_t n : {1, 2, 17, 70}) {
    const std::vector<double> g = gram_matrix(n, n + 3, 0.95, static_cast<std::uint64_t>(n));
    check_solution<double>(solver, g, n);
    check_solution<float>(solver, g, n);
  }
}
