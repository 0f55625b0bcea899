// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Singular value decomposition of a matrix on a device. The factors stay in device memory. The singular
/// values are copied to the host; the eigensolver may copy further data.

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/gpu/kernels/linalg/factors.hpp>
#include <pufferfish/gpu/linalg/eigen.hpp>
#include <pufferfish/gpu/ops/products.hpp>
#include <pufferfish/linalg/svd/svd.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// Options of a factorization on a device (factorize in gpu/lowrank/factorize.hpp).
///
///     gpu::cusolver_eigensolver solver;                        // must exist during the factorization
///     factorize(net, policy, ctx, {.solver = &solver});
struct svd_settings {
  /// Eigensolver that decomposes the Gram matrices on the device. nullptr: all weights are copied to the
  /// host, which decomposes them as factorize() for networks on the CPU does. The caller owns the solver,
  /// which must exist until factorize() has returned.
  eigensolver* solver = nullptr;
};

namespace detail {

/// View of a layer's weights in device memory as a matrix: address and layout (strides). The memory is not
/// owned and must outlive the view.
template <class T>
struct device_matrix {
  const T* data = nullptr;
  kernels::matrix_layout layout{};

  device_matrix() = default;
  /// View of the weights [out][in][height][width] as a matrix of `out` rows and in height width columns.
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

/// c = a b. Elements are neither read nor summed in a narrower type than C, even if the context's math_mode
/// allows TF32. a: M x K, b: K x N, c: M x N, in device memory; c overlaps no operand. Throws shape_error,
/// backend_error.
template <class C>
void multiply_exactly(context<device::gpu>& ctx, const tensor_view<const C, 2>& a,
                      const tensor_view<const C, 2>& b, const tensor_view<C, 2>& c) {
  blas_product p = product_of<C>(ctx, a, b, c, false);
  p.compute = element<C>::compute;
  ctx.blas().multiply(p);
}

/// The decomposition of one matrix A [rows x columns] in double, with all its singular values. B [n x m] is A
/// or its transpose, n <= m. The elements of A are floats, so that the square of an element cannot overflow a
/// double. The caller calls one of the two decompositions:
///
/// - by_gram: the left singular vectors of B are the rows x_i of X, eigenvectors of B B^T; row i of X B is
///   sigma_i times the right singular vector. With X_r for the first r rows of X, the product of the factors
///   of rank r is X_r^T X_r B: the projection of B up to rounding, even where sigma is inaccurate. The
///   eigenvalues of B B^T are squares of singular values, so singular values below 1e-8 of the first are
///   noise. Costs two products of n x n x m, two of order n and one eigendecomposition of order n.
/// - by_host: B is copied to the host, and the CPU's svd_method::jacobi decomposes it in the calling thread.
///   This method is accurate for small singular values as well; is_doubtful() tells whether it is needed.
///   Copies n m doubles to the host and n (n + m + 1) doubles to the device.
///
/// Memory on the device: n (n + 2 m) doubles, allocated from `memory` in the order of the stream, and scratch
/// for about two matrices n x n. The decompositions wait for the stream; constructor and store() do not. An
/// object is not thread-safe and must not outlive the context.
class device_svd {
 public:
  /// Copies A. The caller has checked by `moments` that all elements are finite. A must not change before the
  /// stream has read it. Throws backend_error.
  device_svd(context<device::gpu>& ctx, memory_source& memory, const device_matrix<float>& a,
             const kernels::matrix_moments& moments)
      : ctx_(&ctx),
        transposed_(a.rows() > a.columns()),
        n_(std::min(a.rows(), a.columns())),
        m_(std::max(a.rows(), a.columns())),
        b_(memory, n_ * m_, uninitialized),
        x_(memory, n_ * n_, uninitialized),
        xb_(memory, n_ * m_, uninitialized),
        norms_(memory, n_, uninitialized),
        order_(memory, n_, uninitialized) {
    spectrum_.squared_norm = moments.sum_of_squares;
    kernels::load_matrix<float>(ctx.stream(), a.data, a.layout, transposed_, b_.data());
  }

  /// Decomposes by the Gram matrix; `solver` computes its eigenvectors. Throws backend_error, and what the
  /// solver throws.
  void by_gram(eigensolver& solver) {
    exact_ = false;
    {
      scratch_frame frame(ctx_->scratch());
      double* gram = frame.take<double>(n_ * n_);
      const auto wide = view(std::as_const(b_).data(), n_, m_);
      multiply_exactly<double>(*ctx_, wide, transpose(wide), tensor_view<double, 2>(gram, {n_, n_}));
      kernels::mirror_lower(ctx_->stream(), gram, n_);
      // The eigenvalues are not used: project() measures the singular values as row norms.
      solver.solve(*ctx_, n_, gram, x_.data(), frame.take<double>(n_));
    }
    project();
  }

  /// Decomposes on the host by svd_method::jacobi. Throws backend_error, and error if Jacobi's method does
  /// not converge.
  void by_host() {
    exact_ = true;
    tensor<double, 2> b({n_, m_});
    fetch<double>(*ctx_, b_.data(), b.flat());
    const svd_result host = svd(tensor_view<const double, 2>(b), {.method = svd_method::jacobi});
    tensor<double, 2> x({n_, n_});
    for (index_t i = 0; i < n_; ++i) {
      const double sigma = host.singular_values[static_cast<std::size_t>(i)];
      for (index_t j = 0; j < n_; ++j) x(i, j) = host.u(j, i);
      for (index_t j = 0; j < m_; ++j) b(i, j) = sigma * host.v(j, i);
    }
    send<double>(*ctx_, x.flat(), x_.data());
    send<double>(*ctx_, b.flat(), xb_.data());
    send<double>(*ctx_, host.singular_values, norms_.data());
    sort(host.singular_values);
  }

  /// All singular values, descending, and the sum of the squares of all elements; no vectors.
  const svd_result& spectrum() const { return spectrum_; }

  /// Whether singular value number `rank` is too small for the accuracy of the Gram matrix: below 1e-6 of the
  /// first, as for the CPU's svd_method::automatic. 1 <= rank <= n. False after by_host().
  bool is_doubtful(index_t rank) const {
    const double first = spectrum_.singular_values.front();
    return !exact_ && spectrum_.singular_values[static_cast<std::size_t>(rank - 1)] <
                          pufferfish::detail::gram_trusted_ratio * first;
  }

  /// Writes the factors of the first `rank` singular values: down_ij = sqrt(sigma_i) v_ij, up_ij =
  /// sqrt(sigma_j) u_ij; the signs follow the rule of the CPU's svd(). down: rank x columns; up: its
  /// transpose is written, rank x rows. The layouts give the strides. Both arrays are in device memory. Does
  /// not wait.
  template <class T>
  void store(index_t rank, T* down, const kernels::matrix_layout& down_layout, T* up,
             const kernels::matrix_layout& up_layout) const {
    scratch_frame frame(ctx_->scratch());
    double* signs = frame.take<double>(rank);
    const kernels::singular_rows left{x_.data(), n_, order_.data(), rank, norms_.data()};
    const kernels::singular_rows right{xb_.data(), m_, order_.data(), rank, norms_.data()};
    kernels::row_signs(ctx_->stream(), transposed_ ? right : left, signs);
    kernels::store_factor<T>(ctx_->stream(), transposed_ ? left : right, signs, !transposed_, down,
                             down_layout);
    kernels::store_factor<T>(ctx_->stream(), transposed_ ? right : left, signs, transposed_, up, up_layout);
  }

 private:
  static tensor_view<const double, 2> view(const double* data, index_t rows, index_t columns) {
    return {data, {rows, columns}};
  }

  // Makes X orthonormal up to rounding. Computes X B, the singular values and their order.
  void project() {
    {
      scratch_frame frame(ctx_->scratch());
      double* e = frame.take<double>(n_ * n_);
      double* corrected = frame.take<double>(n_ * n_);
      const auto x = view(std::as_const(x_).data(), n_, n_);
      multiply_exactly<double>(*ctx_, x, transpose(x), tensor_view<double, 2>(e, {n_, n_}));
      kernels::orthogonality_correction(ctx_->stream(), e, n_);
      multiply_exactly<double>(*ctx_, view(e, n_, n_), x, tensor_view<double, 2>(corrected, {n_, n_}));
      check(cudaMemcpyAsync(x_.data(), corrected, static_cast<std::size_t>(n_ * n_) * sizeof(double),
                            cudaMemcpyDeviceToDevice, ctx_->stream()),
            "cudaMemcpyAsync within the device");
    }
    multiply_exactly<double>(*ctx_, view(std::as_const(x_).data(), n_, n_),
                             view(std::as_const(b_).data(), n_, m_),
                             tensor_view<double, 2>(xb_.data(), {n_, m_}));
    kernels::row_norms(ctx_->stream(), xb_.data(), n_, m_, norms_.data());
    std::vector<double> norms(static_cast<std::size_t>(n_));
    fetch<double>(*ctx_, norms_.data(), norms);
    sort(norms);
  }

  // Stores the singular values, which are `norms`, in descending order, and this order on the device.
  void sort(const std::vector<double>& norms) {
    spectrum_.singular_values.clear();
    std::vector<int> rows;
    for (const index_t i : pufferfish::detail::descending_order(norms)) {
      spectrum_.singular_values.push_back(norms[static_cast<std::size_t>(i)]);
      rows.push_back(static_cast<int>(i));
    }
    send<int>(*ctx_, rows, order_.data());
  }

  context<device::gpu>* ctx_;
  bool transposed_;
  bool exact_ = false;  // whether small singular values are right
  index_t n_, m_;
  memory_block<double> b_, x_, xb_;
  memory_block<double> norms_;
  memory_block<int> order_;
  svd_result spectrum_;
};

/// Sum of squares and largest magnitude of a matrix in device memory. Waits for the device. Throws
/// backend_error.
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
