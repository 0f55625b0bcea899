// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "support.hpp"

#include <cstdlib>
#include <limits>
#include <cstdio>

#include <pufferfish/gpu/eigen.hpp>
#include <pufferfish/gpu/kernels/eigen_functors.hpp>
#include <pufferfish/linalg/symmetric_eigen.hpp>

using namespace gpu_test;

namespace {

// A A^T of a random matrix n x m, in double; rows scaled by decay^i.
std::vector<double> gram_matrix(index_t n, index_t m, double decay, std::uint64_t stream) {
  std::vector<double> a(static_cast<std::size_t>(n * m)), g(static_cast<std::size_t>(n * n));
  pf::fill_uniform(std::span<double>(a), -1.0, 1.0, pf::random_stream(11, stream));
  for (index_t i = 0; i < n; ++i) {
    for (index_t k = 0; k < m; ++k) a[static_cast<std::size_t>(i * m + k)] *= std::pow(decay, static_cast<double>(i));
  }
  for (index_t i = 0; i < n; ++i) {
    for (index_t j = 0; j <= i; ++j) {
      double sum = 0;
      for (index_t k = 0; k < m; ++k) sum += a[static_cast<std::size_t>(i * m + k)] * a[static_cast<std::size_t>(j * m + k)];
      g[static_cast<std::size_t>(i * n + j)] = g[static_cast<std::size_t>(j * n + i)] = sum;
    }
  }
  return g;
}

struct errors {
  double values, residual, orthogonality;
  int sweeps;
};

template <class T>
errors solve(const std::vector<double>& matrix, index_t n, pf::gpu::eigenvalues wanted) {
  twin<T> a(std::vector<T>(matrix.begin(), matrix.end())), x(n * n), values(n);
  pf::gpu::jacobi_eigensolver solver;
  solver.solve(gpu_context(), n, a.device_data(), x.device_data(), values.device_data(), wanted);
  const std::vector<T> vectors = x.fetched();
  std::vector<T> found = values.fetched();
  const pf::symmetric_eigen expected(pf::tensor_view<const double, 2>(matrix.data(), {n, n}));
  const double scale = std::max(std::abs(expected.values().front()), std::abs(expected.values().back())) + 1e-300;
  errors e{0, 0, 0, solver.sweeps()};
  const auto at = [n](index_t i, index_t j) { return static_cast<std::size_t>(i * n + j); };
  for (index_t i = 0; i < n; ++i) {
    for (index_t j = 0; j < n; ++j) {
      double sum = i == j ? -1.0 : 0.0, row = 0;
      for (index_t k = 0; k < n; ++k) {
        sum += double(vectors[at(i, k)]) * double(vectors[at(j, k)]);
        row += matrix[at(j, k)] * double(vectors[at(i, k)]);
      }
      e.orthogonality = std::max(e.orthogonality, std::abs(sum));
      e.residual = std::max(e.residual, std::abs(row - double(found[static_cast<std::size_t>(i)]) * double(vectors[at(i, j)])) / scale);
    }
  }
  std::sort(found.begin(), found.end(), std::greater<T>());
  for (std::size_t i = 0; i < found.size(); ++i) {
    e.values = std::max(e.values, std::abs(double(found[i]) - expected.values()[i]) / scale);
  }
  return e;
}

}  // namespace

TEST_CASE("x") {
  for (index_t n : {1, 2, 3, 7, 10, 33, 64, 65, 100, 150, 200}) {
    for (double decay : {1.0, 0.9}) {
     for (auto w : {pf::gpu::eigenvalues::large, pf::gpu::eigenvalues::all}) {
      auto g = gram_matrix(n, n + 20, decay, 1);
      auto d = solve<double>(g, n, w);
      auto f = solve<float>(g, n, w);
      std::printf("n %td decay %g all %d: double %.1e %.1e %.1e (%d)  float %.1e %.1e %.1e (%d)\n", n, decay, int(w), d.values, d.residual, d.orthogonality, d.sweeps, f.values, f.residual, f.orthogonality, f.sweeps);
     }
    }
  }
}
