// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: loops over contiguous doubles for the decompositions. Compiled for AVX-512, AVX2 and the base
/// instruction set; the widest one that the processor supports is used. The order of summation depends only
/// on lengths and instruction set.

#include <cstddef>
#include <utility>

#include <pufferfish/core/view.hpp>
#include <pufferfish/linalg/isa.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Columns per panel of packed operands and of the accumulated eigenvectors:
/// two of the widest vectors.
inline constexpr index_t panel_width = 16;
/// Rows of a tile of a product.
inline constexpr index_t tile_rows = 8;

/// One plane rotation of columns `at` and `at + 1`.
struct plane_rotation {
  index_t at;
  double c;
  double s;
};

/// The loops compiled for one instruction set.
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

/// The loops for an instruction set for which isa_available() is true.
inline const vector_kernels& vector_kernels_for([[maybe_unused]] isa target) {
  return *PUFFERFISH_KERNEL(target, vector_loops, kernels);
}

/// The loops for the widest instruction set of this machine.
inline const vector_kernels& widest_vector_kernels() {
  static const vector_kernels& chosen = vector_kernels_for(widest_isa());
  return chosen;
}

/// sum of x[i] * y[i] over `count` elements. x may be y.
inline double dot(const double* x, const double* y, index_t count) {
  return widest_vector_kernels().dot(x, y, count);
}

/// y[i] += factor * x[i]. x and y must not overlap.
inline void add_scaled(double factor, const double* x, double* y, index_t count) {
  widest_vector_kernels().add_scaled(factor, x, y, count);
}

/// (x, y) := (c x - s y, s x + c y).
/// x and y must not overlap.
inline void rotate(double c, double s, double* x, double* y, index_t count) {
  widest_vector_kernels().rotate(c, s, x, y, count);
}

/// C [tile_rows x panel_width, row stride `step`] += A^T B for tile_rows columns of a packed A and for a
/// packed B. Rows of both have stride panel_width.
inline void multiply_tile(index_t depth, const double* a, const double* b, double* c, index_t step) {
  widest_vector_kernels().multiply_tile(depth, a, b, c, step);
}

/// Rotates columns of a panel [columns x panel_width] (each column's panel_width entries are contiguous):
/// (column at, column at + 1) := (c x - s y, s x + c y). Fastest if each rotation follows one of the next
/// column on the right: the column that both rotate then stays in registers.
inline void rotate_panel(const plane_rotation* rotations, index_t count, double* columns) {
  widest_vector_kernels().rotate_panel(rotations, count, columns);
}

/// For the lower triangle of the leading n rows of a: a -= v w^T + w v^T, and y := a x with the
/// updated symmetric a. Both take one pass over memory, in which the reduction to tridiagonal
/// form spends most of its time.
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
