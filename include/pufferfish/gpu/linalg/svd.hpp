// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The singular value decomposition of a matrix on a device, whose factors stay on the device. Only the
/// singular values are copied to the host.

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/gpu/kernels/linalg/factors.hpp>
#include <pufferfish/gpu/linalg/eigen.hpp>
#include <pufferfish/gpu/ops/products.hpp>
#include <pufferfish/linalg/svd/svd.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// The floating-point type of a decomposition, sums included.
///
/// The eigenvalues of a Gram matrix are the squares of the singular values. In double the result is as good
/// as the CPU's, and costs little on a device for data centres (half the rate of float). Other devices
/// compute in float 32 to 64 times as fast as in double. In float, singular values below 1e-3 of the first
/// are lost in the Gram matrix; a second decomposition, of the nearly orthogonal rows that the first one
/// leaves, finds them again, down to about 1e-6 of the first.
enum class precision { fp32, fp64 };

/// Options of a factorization on a device (factorize in gpu/lowrank/factorize.hpp).
///
///     gpu::svd_settings settings;
///     settings.compute = gpu::precision::fp32;
///     settings.solver = &my_solver;                            // must exist during the factorization
struct svd_settings {
  precision compute = precision::fp64;
  /// nullptr: the library's own eigensolver. A solver must outlive its use.
  eigensolver* solver = nullptr;
};

namespace detail {

/// A matrix of weights on the device.
template <class T>
struct device_matrix {
  const T* data = nullptr;
  kernels::matrix_layout layout{};

  device_matrix() = default;
  /// [out][in][height][width] as the matrix out x (in height width).
  explicit device_matrix(const tensor_view<const T, 4>& v)
      : data(v.data()),
        layout{v.extent(0),
               v.stride(0),
               {v.extent(1), v.extent(2), v.extent(3)},
               {v.stride(1), v.stride(2), v.stride(3)}} {}
  explicit device_matrix(const tensor_view<const T, 2>& v)
      : data(v.data()), layout{v.extent(0), v.stride(0), {1, 1, v.extent(1)}, {0, 0, v.stride(1)}} {}

  index_t rows() const { return layout.rows; }
  index_t columns() const { return kernels::columns_of(layout); }
};

/// c = a b with factors and sums in C, for every math mode of the context.
template <class C>
void multiply_exactly(context<device::gpu>& ctx, const tensor_view<const C, 2>& a,
                      const tensor_view<const C, 2>& b, const tensor_view<C, 2>& c) {
  blas_product p = product_of<C>(ctx, a, b, c, false);
  p.compute = element<C>::compute;
  ctx.blas().multiply(p);
}

/// The decomposition of one matrix A [rows x columns], with all its singular values. B [n x m] is A or its
/// transpose, n <= m. Its left singular vectors are the rows x_i of X, eigenvectors of B B^T; row i of X B is
/// sigma_i times the right singular vector. The product of factors made of X and X B is X_r^T X_r B, the
/// projection of B, up to rounding, whatever the accuracy of sigma. The buffers are allocated from `memory`,
/// in the order of the stream.
///
/// The eigenvalues of B B^T are squares of singular values, so that those below the root of rounding are
/// noise. refine() starts again from X B, whose rows are orthogonal but for this noise. Scaled to length one,
/// they have a well-conditioned Gram matrix, and Jacobi's method finds its small eigenvalues to their own
/// rounding. The remaining error is the rounding of X B, relative to the first singular value. Costs two
/// products of n x n x m, two of order n and one eigendecomposition of order n; refine() costs about as much
/// again. Memory: n (n + 2 m) numbers of C, and scratch for about two matrices n x n. The constructor and
/// refine() wait for the device; store() does not. An object is not thread-safe and must not outlive the
/// context.
template <class C>
class device_svd {
 public:
  /// Computes the singular values. `solver` must outlive this object. The caller has checked by `moments`
  /// that all elements are finite. A must stay valid only during the call. In float, refine() is part of the
  /// constructor. Throws backend_error, and error if the eigensolver does not converge.
  template <class T>
  device_svd(context<device::gpu>& ctx, memory_source& memory, eigensolver& solver, const device_matrix<T>& a,
             const kernels::matrix_moments& moments)
      : ctx_(&ctx),
        solver_(&solver),
        transposed_(a.rows() > a.columns()),
        n_(std::min(a.rows(), a.columns())),
        m_(std::max(a.rows(), a.columns())),
        scale_(std::is_same_v<C, double> && std::is_same_v<T, float>
                   ? 1.0
                   : pufferfish::detail::unit_scale(moments.largest)),
        b_(memory, n_ * m_, uninitialized),
        x_(memory, n_ * n_, uninitialized),
        xb_(memory, n_ * m_, uninitialized),
        norms_(memory, n_, uninitialized),
        order_(memory, n_, uninitialized) {
    spectrum_.squared_norm = moments.sum_of_squares;
    kernels::load_matrix<T, C>(ctx.stream(), a.data, a.layout, transposed_, scale_, b_.data());
    decompose(b_.data(), x_.data(), eigenvalues::large);
    project();
    if constexpr (std::is_same_v<C, float>) refine();
  }

  /// All singular values, descending, and the sum of the squares of all elements; no vectors.
  const svd_result& spectrum() const { return spectrum_; }

  /// Whether singular value number `rank` is too small for the accuracy of the Gram matrix. 1 <= rank <= n.
  /// False after refine().
  bool is_doubtful(index_t rank) const {
    const double first = spectrum_.singular_values.front();
    return !refined_ && spectrum_.singular_values[static_cast<std::size_t>(rank - 1)] <
                            pufferfish::detail::gram_trusted_ratio * first;
  }

  /// Computes small singular values again, without the loss of squaring.
  void refine() {
    scratch_frame frame(ctx_->scratch());
    C* turned = frame.template take<C>(n_ * n_);
    decompose(xb_.data(), turned, eigenvalues::all);
    turn(turned);
    project();
    refined_ = true;
  }

  /// Writes the factors of the first `rank` singular values: down_ij = sqrt(sigma_i) v_ij, up_ij =
  /// sqrt(sigma_j) u_ij, signs as svd's. down: rank x columns; up: its transpose, rank x rows.
  template <class T>
  void store(index_t rank, T* down, const kernels::matrix_layout& down_layout, T* up,
             const kernels::matrix_layout& up_layout) const {
    scratch_frame frame(ctx_->scratch());
    double* signs = frame.template take<double>(rank);
    const kernels::singular_rows<C> left{x_.data(), n_, order_.data(), rank, norms_.data(), 1.0 / scale_};
    const kernels::singular_rows<C> right{xb_.data(), m_, order_.data(), rank, norms_.data(), 1.0 / scale_};
    kernels::row_signs<C>(ctx_->stream(), transposed_ ? right : left, signs);
    kernels::store_factor<C, T>(ctx_->stream(), transposed_ ? left : right, signs, !transposed_, down,
                                down_layout);
    kernels::store_factor<C, T>(ctx_->stream(), transposed_ ? right : left, signs, transposed_, up,
                                up_layout);
  }

 private:
  static tensor_view<const C, 2> view(const C* data, index_t rows, index_t columns) {
    return {data, {rows, columns}};
  }

  // Writes eigenvectors of a a^T, where a is n x m, to the rows of `vectors`. The eigenvalues themselves are
  // discarded: project() measures the singular values as row norms.
  void decompose(const C* a, C* vectors, eigenvalues wanted) {
    scratch_frame frame(ctx_->scratch());
    C* gram = frame.template take<C>(n_ * n_);
    const auto wide = view(a, n_, m_);
    multiply_exactly<C>(*ctx_, wide, transpose(wide), tensor_view<C, 2>(gram, {n_, n_}));
    kernels::mirror_lower<C>(ctx_->stream(), gram, n_);
    solver_->solve(*ctx_, n_, gram, vectors, frame.template take<C>(n_), wanted);
  }

  // X := by X.
  void turn(const C* by) {
    scratch_frame frame(ctx_->scratch());
    C* product = frame.template take<C>(n_ * n_);
    multiply_exactly<C>(*ctx_, view(by, n_, n_), view(std::as_const(x_).data(), n_, n_),
                        tensor_view<C, 2>(product, {n_, n_}));
    check(cudaMemcpyAsync(x_.data(), product, static_cast<std::size_t>(n_ * n_) * sizeof(C),
                          cudaMemcpyDeviceToDevice, ctx_->stream()),
          "cudaMemcpyAsync within the device");
  }

  // Makes X orthonormal up to rounding. Computes X B, the singular values and their order.
  void project() {
    {
      scratch_frame frame(ctx_->scratch());
      C* e = frame.template take<C>(n_ * n_);
      const auto x = view(std::as_const(x_).data(), n_, n_);
      multiply_exactly<C>(*ctx_, x, transpose(x), tensor_view<C, 2>(e, {n_, n_}));
      kernels::orthogonality_correction<C>(ctx_->stream(), e, n_);
      turn(e);
    }
    multiply_exactly<C>(*ctx_, view(std::as_const(x_).data(), n_, n_), view(std::as_const(b_).data(), n_, m_),
                        tensor_view<C, 2>(xb_.data(), {n_, m_}));
    kernels::row_norms<C>(ctx_->stream(), xb_.data(), n_, m_, norms_.data());
    std::vector<double> norms(static_cast<std::size_t>(n_));
    fetch<double>(*ctx_, norms_.data(), norms);
    const std::vector<index_t> order = pufferfish::detail::descending_order(norms);
    spectrum_.singular_values.clear();
    std::vector<int> rows;
    for (const index_t i : order) {
      spectrum_.singular_values.push_back(norms[static_cast<std::size_t>(i)] / scale_);
      rows.push_back(static_cast<int>(i));
    }
    check(cudaMemcpyAsync(order_.data(), rows.data(), rows.size() * sizeof(int), cudaMemcpyHostToDevice,
                          ctx_->stream()),
          "cudaMemcpyAsync to the device");
    ctx_->synchronize();  // the copy reads `rows`
  }

  context<device::gpu>* ctx_;
  eigensolver* solver_;
  bool transposed_;
  bool refined_ = false;
  index_t n_, m_;
  double scale_;
  memory_block<C> b_, x_, xb_;
  memory_block<double> norms_;
  memory_block<int> order_;
  svd_result spectrum_;
};

/// Sum of squares and largest magnitude of a matrix (matrix_moments). Waits for the device.
template <class T>
kernels::matrix_moments measure(context<device::gpu>& ctx, const device_matrix<T>& a) {
  scratch_frame frame(ctx.scratch());
  auto* parts = frame.take<kernels::matrix_moments>(kernels::most_moment_parts + 1);
  kernels::matrix_moments* result = parts + kernels::most_moment_parts;
  kernels::measure_matrix<T>(ctx.stream(), a.data, a.layout, parts, result);
  return fetch<kernels::matrix_moments>(ctx, result);
}

}  // namespace detail
}  // namespace gpu
PUFFERFISH_NAMESPACE_END
