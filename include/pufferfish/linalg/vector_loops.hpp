// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the loops over contiguous doubles that the decompositions are made of, compiled for AVX-512,
/// AVX2 and the base instruction set; the widest one present runs. Orders of summation depend on lengths and
/// instruction set only.

#include <pufferfish/core/view.hpp>
#include <pufferfish/linalg/isa.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Columns that lie together in packed operands and in the accumulated eigenvectors: two of the widest
/// vectors.
inline constexpr index_t panel_width = 16;
/// Rows of a tile of a product.
inline constexpr index_t tile_rows = 8;

/// One plane rotation of columns `at` and `at + 1`.
struct plane_rotation {
  index_t at;
  double c;
  double s;
};

/// The loops of one instruction set.
struct vector_kernels {
  double (*dot)(const double* x, const double* y, index_t count);
  void (*add_scaled)(double factor, const double* x, double* y, index_t count);
  void (*rotate)(double c, double s, double* x, double* y, index_t count);
  void (*multiply_tile)(index_t depth, const double* a, const double* b, double* c, index_t step);
  void (*rotate_panel)(const plane_rotation* rotations, index_t count, double* columns);
  void (*update_and_multiply)(double* a, index_t step, index_t n, const double* v, const double* w,
                              const double* x, double* y);
};

#define PUFFERFISH_KERNELS vector_loops
#define PUFFERFISH_KERNEL_FILE <pufferfish/linalg/vector_loops.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// The loops of an instruction set that isa_available() says yes to.
inline const vector_kernels& vector_kernels_for([[maybe_unused]] isa target) {
  return *PUFFERFISH_KERNEL(target, vector_loops, kernels);
}

/// The loops of the widest instruction set of this machine.
inline const vector_kernels& widest_vector_kernels() {
  static const vector_kernels& chosen = vector_kernels_for(widest_isa());
  return chosen;
}

/// sum of x[i] * y[i].
inline double dot(const double* x, const double* y, index_t count) {
  return widest_vector_kernels().dot(x, y, count);
}

/// y += factor * x.
inline void add_scaled(double factor, const double* x, double* y, index_t count) {
  widest_vector_kernels().add_scaled(factor, x, y, count);
}

/// (x, y) := (c x - s y, s x + c y).
inline void rotate(double c, double s, double* x, double* y, index_t count) {
  widest_vector_kernels().rotate(c, s, x, y, count);
}

/// C [tile_rows x panel_width, rows `step` apart] += A^T B for tile_rows columns of a packed A and for a
/// packed B; rows of both are panel_width apart.
inline void multiply_tile(index_t depth, const double* a, const double* b, double* c, index_t step) {
  widest_vector_kernels().multiply_tile(depth, a, b, c, step);
}

/// Rotates columns of a panel [columns x panel_width] (a column's panel_width entries lie together):
/// (column at, column at + 1) := (c x - s y, s x + c y). Cheapest where each rotation follows one of the
/// column to its right: the column that both touch stays in registers.
inline void rotate_panel(const plane_rotation* rotations, index_t count, double* columns) {
  widest_vector_kernels().rotate_panel(rotations, count, columns);
}

/// Lower triangle of the leading n rows of a: a -= v w^T + w v^T; at the same time y := a x with the new
/// symmetric a. One pass over memory for both: this is where the reduction to tridiagonal form spends its
/// time.
inline void update_and_multiply(double* a, index_t step, index_t n, const double* v, const double* w,
                                const double* x, double* y) {
  widest_vector_kernels().update_and_multiply(a, step, n, v, w, x, y);
}

/// x *= factor.
inline void scale_by(double factor, double* x, index_t count) {
  for (index_t i = 0; i < count; ++i) x[i] *= factor;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
