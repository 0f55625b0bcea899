// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gpu::cusolver_eigensolver`: cuSOLVER's symmetric eigensolver, which lets factorize
/// decompose on the device. Optional: a program that includes this header also links cusolver.

#include <cusolverDn.h>

#include <cstddef>
#include <string_view>

#include <pufferfish/gpu/linalg/eigen.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// Throws backend_error with the call's name and cuSOLVER's number of the status unless it is success.
inline void check(cusolverStatus_t status, std::string_view call) {
  if (status == CUSOLVER_STATUS_SUCCESS) return;
  pufferfish::detail::throw_error<backend_error>({call, ": status ", static_cast<int>(status)});
}

/// cusolverDn's divide and conquer (syevd). Works on any stream of the device that was current at
/// construction. In a deterministic context the results are the same at every run.
///
///     gpu::cusolver_eigensolver solver;
///     factorize(net, policy, ctx, {.solver = &solver});
class cusolver_eigensolver final : public eigensolver {
 public:
  /// Throws backend_error.
  cusolver_eigensolver() { check(cusolverDnCreate(&handle_), "cusolverDnCreate"); }
  cusolver_eigensolver(const cusolver_eigensolver&) = delete;
  cusolver_eigensolver& operator=(const cusolver_eigensolver&) = delete;
  ~cusolver_eigensolver() override { static_cast<void>(cusolverDnDestroy(handle_)); }

  /// Computes eigenvalues and eigenvectors, see eigensolver::solve. `matrix` is overwritten; `values` ascend.
  /// Takes its workspace from ctx.scratch(), and waits for the stream to read the status. Throws shape_error
  /// for an order above 2^31 - 1, backend_error, and error if there is no convergence.
  void solve(context<device::gpu>& ctx, index_t order, double* matrix, double* vectors,
             double* values) override {
    if (order > 2147483647) {
      pufferfish::detail::throw_error<shape_error>(
          {"gpu::cusolver_eigensolver: an order of ", order, " is more than cuSOLVER takes"});
    }
    const int n = static_cast<int>(order);
    check(cusolverDnSetStream(handle_, ctx.stream()), "cusolverDnSetStream");
    check(cusolverDnSetDeterministicMode(handle_, ctx.deterministic()
                                                      ? CUSOLVER_DETERMINISTIC_RESULTS
                                                      : CUSOLVER_ALLOW_NON_DETERMINISTIC_RESULTS),
          "cusolverDnSetDeterministicMode");
    // cuSOLVER reads columns. The matrix is symmetric, and its eigenvector i, a column, is row i here.
    constexpr auto mode = CUSOLVER_EIG_MODE_VECTOR;
    constexpr auto side = CUBLAS_FILL_MODE_UPPER;
    int size = 0;
    check(cusolverDnDsyevd_bufferSize(handle_, mode, side, n, matrix, n, values, &size),
          "cusolverDnDsyevd_bufferSize");
    scratch_frame frame(ctx.scratch());
    double* work = frame.take<double>(size);
    int* info = frame.take<int>(1);
    check(cusolverDnDsyevd(handle_, mode, side, n, matrix, n, values, work, size, info), "cusolverDnDsyevd");
    check(cudaMemcpyAsync(vectors, matrix, static_cast<std::size_t>(order * order) * sizeof(double),
                          cudaMemcpyDeviceToDevice, ctx.stream()),
          "cudaMemcpyAsync");
    if (const int failed = detail::fetch<int>(ctx, info); failed != 0) {
      pufferfish::detail::throw_error<error>(
          {"gpu::cusolver_eigensolver: no convergence over a matrix of order ", order, " (info ", failed,
           ")"});
    }
  }

 private:
  cusolverDnHandle_t handle_ = nullptr;
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
