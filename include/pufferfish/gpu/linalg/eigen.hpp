// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Eigenvalues and eigenvectors of symmetric matrices on a device: the interface `gpu::eigensolver`.
/// gpu/cusolver.hpp implements it by cuSOLVER.

#include <span>

#include <pufferfish/gpu/runtime/context.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace detail {

/// Copies to.size() numbers from the device after all earlier work of the context's stream, and waits for the
/// stream. Nothing happens for an empty span. Throws backend_error, and failures of the context. Must not be
/// captured.
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

/// Copies from.size() numbers to the device after all earlier work of the context's stream, and waits for the
/// stream, so that the caller may free `from`. Nothing happens for an empty span. Throws backend_error, and
/// failures of the context. Must not be captured.
template <class T>
void send(context<device::gpu>& ctx, std::span<const T> from, T* to) {
  if (from.empty()) return;
  check(cudaMemcpyAsync(to, from.data(), from.size_bytes(), cudaMemcpyHostToDevice, ctx.stream()),
        "cudaMemcpyAsync to the device");
  ctx.synchronize();
}

}  // namespace detail

/// Decomposes symmetric matrices, A = sum_i values[i] x_i x_i^T. An object may keep state from one matrix to
/// the next, on the device of the context; one thread uses it at a time.
///
///     gpu::cusolver_eigensolver solver;
///     solver.solve(ctx, n, matrix.data(), vectors.data(), values.data());
class eigensolver {
 public:
  virtual ~eigensolver() = default;

  /// matrix: order x order, order > 0, dense, both triangles, finite, no eigenvalue negative except by
  /// rounding; may be overwritten. vectors: order x order, dense; row i becomes the eigenvector of length one
  /// for values[i]. The order of eigenvalues and the signs of vectors are not specified. Errors of values and
  /// residuals are of the order of the rounding of the largest eigenvalue. The three arrays are on the device
  /// and do not overlap. The solver reads `matrix` after all earlier work of the context's stream; later work
  /// of this stream sees the results. May wait for the stream, so it must not be captured. Throws
  /// backend_error, and error if the iteration does not converge. Deterministic in a deterministic context.
  virtual void solve(context<device::gpu>& ctx, index_t order, double* matrix, double* vectors,
                     double* values) = 0;
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
