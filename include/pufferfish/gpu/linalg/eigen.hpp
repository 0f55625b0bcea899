// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Eigenvalues and eigenvectors of symmetric matrices on a device: `gpu::eigensolver`, and the library's own,
/// `gpu::jacobi_eigensolver`. (gpu/cusolver.hpp has one that calls cuSOLVER.)

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include <pufferfish/gpu/kernels/linalg/eigen.hpp>
#include <pufferfish/gpu/runtime/context.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace detail {

/// Copies a few numbers from the device when everything in the context's stream is done. Throws
/// backend_error, and failures of the context. Must not be captured.
template <class T>
void fetch(context<device::gpu>& ctx, const T* from, std::span<T> to) {
  if (to.empty()) return;
  check(cudaMemcpyAsync(to.data(), from, to.size_bytes(), cudaMemcpyDeviceToHost, ctx.stream()),
        "cudaMemcpyAsync to the host");
  ctx.synchronize();
}
template <class T>
T fetch(context<device::gpu>& ctx, const T* from) {
  T value{};
  fetch<T>(ctx, from, {&value, 1});
  return value;
}

}  // namespace detail

/// The accuracy of eigenvalues. `large`: errors may be a small multiple of the largest eigenvalue's rounding.
/// `all`: if the matrix is positive definite and ill-conditioned by its scaling only, small eigenvalues have
/// small relative errors, too, if the solver can do that.
enum class eigenvalues { large, all };

/// Decomposes symmetric matrices, A = sum_i values[i] x_i x_i^T. An object may keep state from one matrix to
/// the next, on the device of the context; one thread uses it at a time.
///
///     gpu::jacobi_eigensolver solver;
///     solver.solve(ctx, n, matrix.data(), vectors.data(), values.data(), gpu::eigenvalues::all);
class eigensolver {
 public:
  virtual ~eigensolver() = default;

  /// matrix: order x order, order > 0, dense, both triangles, finite, no eigenvalue negative except by
  /// rounding; overwritten. vectors: order x order, dense; row i becomes the eigenvector of length one for
  /// values[i]. The order of eigenvalues and the signs of vectors are not specified. The three arrays are on
  /// the device and do not overlap. May wait for the device. Throws backend_error, and error if there is no
  /// convergence. Deterministic.
  virtual void solve(context<device::gpu>& ctx, index_t order, double* matrix, double* vectors,
                     double* values, eigenvalues wanted) = 0;
  virtual void solve(context<device::gpu>& ctx, index_t order, float* matrix, float* vectors, float* values,
                     eigenvalues wanted) = 0;
};

/// Jacobi's method in blocks (gpu/kernels/linalg/eigen.hpp). Of the methods for dense matrices it has the
/// most arithmetic, 4 n^3 multiplications a sweep in 6 to 12 sweeps (up to 25 for eigenvalues over 16 orders
/// of magnitude). But nearly all of it is in products of 64 x 64 matrices, with n / 32 waits a sweep. A
/// reduction to tridiagonal form waits n times for a product of the matrix with a vector, and its
/// eigenvectors for a chain of n^2 rotations or an orthogonalization. This method finds orthogonal vectors
/// for clusters and zeros without a special case, and can find the small eigenvalues of a graded matrix
/// (Demmel & Veselic, Jacobi's method is more accurate than QR, SIAM J. Matrix Anal. Appl. 13, 1992; blocks:
/// Golub & Van Loan, Matrix Computations, section 8.5). Vectors are orthonormal to about 1e-13 in double,
/// 1e-4 in float, at order 256: rounding of all rotations adds up. Scratch on the device: 64 n numbers and
/// some flags for the products of rotations. Waits for the device once a sweep. Throws error if 60 sweeps are
/// not enough.
class jacobi_eigensolver final : public eigensolver {
 public:
  void solve(context<device::gpu>& ctx, index_t order, double* matrix, double* vectors, double* values,
             eigenvalues wanted) override {
    run(ctx, order, matrix, vectors, values, wanted);
  }
  void solve(context<device::gpu>& ctx, index_t order, float* matrix, float* vectors, float* values,
             eigenvalues wanted) override {
    run(ctx, order, matrix, vectors, values, wanted);
  }

  /// Number of sweeps for the last matrix.
  int sweeps() const { return sweeps_; }

 private:
  static constexpr int most_sweeps = 60;

  // Sweeps until one of them has made no rotation. The host reads the number of rotations after each sweep.
  template <class T>
  void run(context<device::gpu>& ctx, index_t order, T* matrix, T* vectors, T* values, eigenvalues wanted) {
    constexpr T epsilon = std::numeric_limits<T>::epsilon();
    const auto n = static_cast<T>(order);
    kernels::jacobi_work<T> work{};
    work.matrix = matrix;
    work.vectors = vectors;
    work.order = order;
    work.blocks =
        2 * static_cast<int>(std::max<index_t>(1, (order + kernels::jacobi_side - 1) / kernels::jacobi_side));
    work.tolerance = 4 * epsilon * std::sqrt(n);
    // Elements up to this times the trace count as zero: all of them together weigh as much as the rounding
    // of the matrix. If all eigenvalues matter, practically no element is that small.
    work.floor = wanted == eigenvalues::large ? epsilon / n : epsilon * epsilon * epsilon;
    scratch_frame frame(ctx.scratch());
    const index_t pairs = work.blocks / 2;
    work.trace = frame.take<T>(1);
    work.rotations = frame.take<T>(pairs * kernels::jacobi_side * kernels::jacobi_side);
    work.moved = frame.take<int>(pairs);
    work.rotated = frame.take<int>(1);
    kernels::jacobi_begin(ctx.stream(), work);
    // A single pair of blocks does not wait for other pairs: all its sweeps are in one launch.
    const int inner = pairs == 1 ? most_sweeps : 1;
    for (sweeps_ = 1;; ++sweeps_) {
      check(cudaMemsetAsync(work.rotated, 0, sizeof(int), ctx.stream()), "cudaMemsetAsync");
      for (int round = 0; round < work.blocks - 1; ++round) {
        kernels::jacobi_rotate(ctx.stream(), work, round, inner);
        kernels::jacobi_apply(ctx.stream(), work, round);
      }
      if (detail::fetch<int>(ctx, work.rotated) == 0) break;
      if (sweeps_ == most_sweeps) {
        pufferfish::detail::throw_error<error>({"gpu::jacobi_eigensolver: no convergence after ", most_sweeps,
                                                " sweeps over a matrix of order ", order});
      }
    }
    kernels::take_diagonal<T>(ctx.stream(), matrix, values, order);
  }

  int sweeps_ = 0;
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
