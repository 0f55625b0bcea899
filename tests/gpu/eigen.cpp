// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The eigensolvers of symmetric matrices on a device, against symmetric_eigen.
#include "support.hpp"

#include <functional>
#include <limits>

#include <pufferfish/gpu/cusolver.hpp>
#include <pufferfish/gpu/linalg/eigen.hpp>
#include <pufferfish/linalg/svd/symmetric_eigen.hpp>

using namespace gpu_test;

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

struct solution {
  std::vector<double> values, vectors;
};

solution solve(pf::gpu::eigensolver& solver, const std::vector<double>& matrix, index_t n) {
  twin<double> a(matrix), vectors(n * n, NAN), values(n, NAN);
  solver.solve(gpu_context(), n, a.device_data(), vectors.device_data(), values.device_data());
  return {values.fetched(), vectors.fetched()};
}

struct errors {
  double values = 0.0, residual = 0.0, orthogonality = 0.0;
};

// Relative to the largest eigenvalue.
errors errors_of(const solution& s, const std::vector<double>& matrix, index_t n) {
  const pf::symmetric_eigen expected(pf::tensor_view<const double, 2>(matrix.data(), {n, n}));
  double scale = 1e-300;
  for (const double value : expected.values()) scale = std::max(scale, std::abs(value));
  const std::vector<double>& x = s.vectors;
  errors e;
  for (index_t i = 0; i < n; ++i) {
    for (index_t j = 0; j < n; ++j) {
      double product = i == j ? -1.0 : 0.0, row = 0.0;
      for (index_t k = 0; k < n; ++k) {
        product += x[at(n, i, k)] * x[at(n, j, k)];
        row += matrix[at(n, j, k)] * x[at(n, i, k)];
      }
      const double wanted = s.values[static_cast<std::size_t>(i)] * x[at(n, i, j)];
      e.orthogonality = std::max(e.orthogonality, std::abs(product));
      e.residual = std::max(e.residual, std::abs(row - wanted) / scale);
    }
  }
  std::vector<double> found = s.values;
  std::sort(found.begin(), found.end(), std::greater<>());
  for (std::size_t i = 0; i < found.size(); ++i) {
    e.values = std::max(e.values, std::abs(found[i] - expected.values()[i]) / scale);
  }
  return e;
}

void check_solution(pf::gpu::eigensolver& solver, const std::vector<double>& matrix, index_t n) {
  const errors e = errors_of(solve(solver, matrix, n), matrix, n);
  CAPTURE(n);
  const double limit = std::numeric_limits<double>::epsilon() * (50.0 + 8.0 * static_cast<double>(n));
  CHECK(e.values < limit);
  CHECK(e.residual < limit);
  CHECK(e.orthogonality < limit);
}

template <class Check>
void with_solver(const Check& check) {
  pf::gpu::cusolver_eigensolver solver;
  check(solver);
}

}  // namespace

TEST_CASE("gpu eigen: Gram matrices of many orders") {
  with_solver([](pf::gpu::eigensolver& solver) {
    for (const index_t n : {1, 2, 3, 8, 33, 63, 64, 65, 100}) {
      check_solution(solver, gram_matrix(n, n + 20, 1.0, static_cast<std::uint64_t>(n)), n);
    }
  });
}

TEST_CASE("gpu eigen: deficient, graded, diagonal and zero matrices, clusters") {
  with_solver([](pf::gpu::eigensolver& solver) {
    check_solution(solver, gram_matrix(70, 5, 1.0, 1), 70);
    check_solution(solver, gram_matrix(40, 1, 1.0, 2), 40);
    check_solution(solver, gram_matrix(50, 60, 0.5, 3), 50);
    check_solution(solver, diagonal_matrix({0, 0, 0}), 3);
    check_solution(solver, diagonal_matrix({1, 1, 1, 1, 2, 2, 2}), 7);
    check_solution(solver, diagonal_matrix({3, 5, 7, 5, 0}), 5);
  });
}

TEST_CASE("gpu eigen: equal matrices give equal bits") {
  with_solver([](pf::gpu::eigensolver& solver) {
    const std::vector<double> g = gram_matrix(80, 90, 0.9, 4);
    const solution once = solve(solver, g, 80), again = solve(solver, g, 80);
    CHECK(once.values == again.values);
    CHECK(once.vectors == again.vectors);
  });
}

TEST_CASE("gpu eigen: earlier work of the stream is waited for, later work sees the results") {
  with_solver([](pf::gpu::eigensolver& solver) {
    constexpr index_t n = 20;
    const std::vector<double> g = gram_matrix(n, n + 4, 0.9, 5);
    const solution expected = solve(solver, g, n);
    pf::gpu_context& ctx = gpu_context();
    twin<double> source(g), a(n * n, NAN), vectors(n * n, NAN), values(n, NAN), copy(n * n, NAN);
    const std::size_t bytes = sizeof(double) * n * n;
    pf::gpu::check(
        cudaMemcpyAsync(a.device_data(), source.device_data(), bytes, cudaMemcpyDeviceToDevice, ctx.stream()),
        "cudaMemcpyAsync");
    solver.solve(ctx, n, a.device_data(), vectors.device_data(), values.device_data());
    pf::gpu::check(cudaMemcpyAsync(copy.device_data(), vectors.device_data(), bytes, cudaMemcpyDeviceToDevice,
                                   ctx.stream()),
                   "cudaMemcpyAsync");
    CHECK(copy.fetched() == expected.vectors);
    CHECK(values.fetched() == expected.values);
  });
}
