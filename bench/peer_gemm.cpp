// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Competitors in bench/compare: matrix products by Eigen and by OpenBLAS, and the SVD of LAPACK
// (gesdd of OpenBLAS), each called as its users call it. Compiled with -march=native and
// optimization, which Eigen needs.

#ifdef PUFFERFISH_BENCH_EIGEN
#include <Eigen/Core>
#endif
#ifdef PUFFERFISH_BENCH_BLAS
#include <cblas.h>

extern "C" void sgesdd_(const char* job, const int* m, const int* n, float* a, const int* lda, float* s,
                        float* u, const int* ldu, float* vt, const int* ldvt, float* work, const int* lwork,
                        int* iwork, int* info);
#endif

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <random>

#include "../examples/common/session.hpp"
#include "common/line_server.hpp"

namespace {

using namespace bench;

std::vector<float> random_values(std::ptrdiff_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = uniform(engine);
  return values;
}

/// The operands of a product, and memory for the result.
struct operands {
  explicit operands(const product& p)
      : a(random_values(p.m * p.k, 1)),
        b(random_values(p.k * p.n, 2)),
        c(static_cast<std::size_t>(p.m * p.n)) {}
  std::vector<float> a, b, c;
};

#ifdef PUFFERFISH_BENCH_EIGEN
answer eigen_gemm(const request& asked) {
  using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const product p(asked);
  operands o(p);
  const Eigen::Map<const matrix> a(o.a.data(), p.transposed ? p.k : p.m, p.transposed ? p.m : p.k);
  const Eigen::Map<const matrix> b(o.b.data(), p.k, p.n);
  Eigen::Map<matrix> c(o.c.data(), p.m, p.n);
  return timed(asked, [&] {
    if (p.transposed) {
      c.noalias() = a.transpose() * b;
    } else {
      c.noalias() = a * b;
    }
  });
}
#endif

#ifdef PUFFERFISH_BENCH_BLAS
answer blas_gemm(const request& asked) {
  const product p(asked);
  operands o(p);
  const int m = static_cast<int>(p.m), n = static_cast<int>(p.n), k = static_cast<int>(p.k);
  return timed(asked, [&] {
    cblas_sgemm(CblasRowMajor, p.transposed ? CblasTrans : CblasNoTrans, CblasNoTrans, m, n, k, 1.0f,
                o.a.data(), p.transposed ? m : k, o.b.data(), n, 0.0f, o.c.data(), n);
  });
}

struct matrix_file_entry {
  int rows, columns;
  std::vector<float> values;
};

/// Reads a file written by bench_serve's dump_svd.
std::vector<matrix_file_entry> read_matrices(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::vector<matrix_file_entry> result;
  std::int32_t header[3];
  while (file.read(reinterpret_cast<char*>(header), sizeof header)) {
    matrix_file_entry entry{header[0], header[1], {}};
    entry.values.resize(static_cast<std::size_t>(header[0]) * static_cast<std::size_t>(header[1]));
    file.read(reinterpret_cast<char*>(entry.values.data()),
              static_cast<std::streamsize>(entry.values.size() * sizeof(float)));
    if (!file) throw std::runtime_error(path + " ends within a matrix");
    result.push_back(std::move(entry));
  }
  return result;
}

/// A thin SVD. Column-major LAPACK sees the transpose of each matrix: columns x rows.
void gesdd(matrix_file_entry a, std::vector<float>& work) {
  const int m = a.columns, n = a.rows, least = std::min(m, n);
  std::vector<float> s(static_cast<std::size_t>(least)), u(static_cast<std::size_t>(m) * s.size()),
      vt(s.size() * static_cast<std::size_t>(n));
  std::vector<int> integers(8 * s.size());
  int info = 0, size = -1;
  float best = 0;
  sgesdd_("S", &m, &n, a.values.data(), &m, s.data(), u.data(), &m, vt.data(), &least, &best, &size,
          integers.data(), &info);
  size = static_cast<int>(best);
  work.resize(std::max(work.size(), static_cast<std::size_t>(size)));
  sgesdd_("S", &m, &n, a.values.data(), &m, s.data(), u.data(), &m, vt.data(), &least, work.data(), &size,
          integers.data(), &info);
  if (info != 0) throw std::runtime_error("sgesdd failed");
}

answer lapack_svd(const request& asked) {
  const std::vector<matrix_file_entry> matrices = read_matrices(asked.at("path"));
  std::vector<float> work;
  return timed(asked, [&] {
    for (const matrix_file_entry& matrix : matrices) gesdd(matrix, work);
  });
}
#endif

answer gemm(const request& asked) {
  const std::string library = asked.at("library");
#ifdef PUFFERFISH_BENCH_EIGEN
  if (library == "Eigen") return eigen_gemm(asked);
#endif
#ifdef PUFFERFISH_BENCH_BLAS
  if (library == "OpenBLAS") return blas_gemm(asked);
#endif
  throw std::runtime_error("built without " + library);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Matrix products of Eigen and OpenBLAS for bench/compare; threads: OMP_NUM_THREADS",
               "peer_gemm"};
  return examples::run_on_first(app, argc, argv, [&] {
    std::map<std::string, service> services{{"gemm", &gemm}};
#ifdef PUFFERFISH_BENCH_BLAS
    services["svd"] = &lapack_svd;
#endif
    serve(services);
  });
}
