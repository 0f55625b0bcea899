// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of <pufferfish/gpu/kernels/linalg/factors.hpp>.
///
/// Grids have one dimension and 256 threads a block. Sums are in double, in an order that depends on the
/// shape alone.

#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/kernels/linalg/factors.hpp>

PUFFERFISH_KERNELS_BEGIN

inline constexpr int factor_threads = 256;

/// Combines the moments of all threads' shares. All threads of the block must call this function.
__device__ inline matrix_moments block_moments(double sum, double largest) {
  return {block_sum(sum), block_max(largest, 0.0)};
}

/// Grid: up to most_moment_parts blocks of 256 threads, one element per thread and step. Block b writes
/// parts[b].
template <class T>
static __global__ void measure_matrix_kernel(grid_dependency earlier, const T* matrix, matrix_layout layout,
                                             matrix_moments* parts) {
  earlier.wait();
  const index_t columns = columns_of(layout), size = layout.rows * columns;
  double sum = 0, largest = 0;
  for (index_t i = grid_thread(); i < size; i += grid_threads()) {
    const auto value = static_cast<double>(matrix[offset_of(layout, i / columns, i % columns)]);
    sum += value * value;
    largest = maximum()(fabs(value), largest);
  }
  const matrix_moments all = block_moments(sum, largest);
  if (threadIdx.x == 0) parts[blockIdx.x] = all;
}

/// Grid: one block of most_moment_parts threads; `count` must not be larger.
static __global__ void join_moments_kernel(grid_dependency earlier, const matrix_moments* parts, int count,
                                           matrix_moments* result) {
  earlier.wait();
  const bool mine = static_cast<int>(threadIdx.x) < count;
  const matrix_moments part = mine ? parts[threadIdx.x] : matrix_moments{0, 0};
  const matrix_moments all = block_moments(part.sum_of_squares, part.largest);
  if (threadIdx.x == 0) *result = all;
}

/// Grid: factor_grid. A thread has one element (i, j) = (at / columns, at % columns) per step.
template <class T>
static __global__ void load_matrix_kernel(grid_dependency earlier, const T* matrix, matrix_layout layout,
                                          bool transposed, double* to) {
  earlier.wait();
  const index_t columns = columns_of(layout), rows = layout.rows;
  for (index_t at = grid_thread(); at < rows * columns; at += grid_threads()) {
    const index_t i = at / columns, j = at % columns;
    to[transposed ? j * rows + i : at] = static_cast<double>(matrix[offset_of(layout, i, j)]);
  }
}

/// Grid: factor_grid over order x order elements. Threads read the lower and write the upper triangle.
static __global__ void mirror_lower_kernel(grid_dependency earlier, double* matrix, index_t order) {
  earlier.wait();
  for (index_t at = grid_thread(); at < order * order; at += grid_threads()) {
    const index_t i = at / order, j = at % order;
    if (i < j) matrix[at] = matrix[j * order + i];
  }
}

/// Grid: factor_grid over order x order elements.
static __global__ void orthogonality_correction_kernel(grid_dependency earlier, double* e, index_t order) {
  earlier.wait();
  for (index_t at = grid_thread(); at < order * order; at += grid_threads()) {
    e[at] = (at / order == at % order ? 1.5 : 0.0) - 0.5 * e[at];
  }
}

/// Grid: one block of 256 threads per row.
static __global__ void row_norms_kernel(grid_dependency earlier, const double* rows, index_t length,
                                        double* norms) {
  earlier.wait();
  const double* row = rows + static_cast<index_t>(blockIdx.x) * length;
  double sum = 0;
  for (index_t i = threadIdx.x; i < length; i += blockDim.x) {
    sum += row[i] * row[i];
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) norms[blockIdx.x] = sqrt(sum);
}

/// The smaller of two numbers.
struct minimum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};

/// Grid: block b of 256 threads has row of.order[b]. A thread keeps the first of its largest elements; the
/// block then takes the smallest position among those that equal the largest of all.
static __global__ void row_signs_kernel(grid_dependency earlier, singular_rows of, double* signs) {
  earlier.wait();
  const double* row = of.rows + static_cast<index_t>(of.order[blockIdx.x]) * of.length;
  double mine = 0;
  index_t first = of.length;
  for (index_t i = threadIdx.x; i < of.length; i += blockDim.x) {
    if (const double size = fabs(row[i]); size > mine) {
      mine = size;
      first = i;
    }
  }
  const double largest = block_max(mine, 0.0);
  const index_t at = block_reduce(mine == largest ? first : of.length, of.length, minimum());
  if (threadIdx.x == 0) signs[blockIdx.x] = at < of.length && row[at] < 0.0 ? -1.0 : 1.0;
}

/// Grid: factor_grid over count x length elements; element (i, j) is made from row of.order[i]. With sigma =
/// norms_i, the factor is signs_i sqrt(sigma), or with `scaled` signs_i / sqrt(sigma), because the row then
/// has length sigma.
template <class T>
static __global__ void store_factor_kernel(grid_dependency earlier, singular_rows of, const double* signs,
                                           bool scaled, T* to, matrix_layout layout) {
  earlier.wait();
  for (index_t at = grid_thread(); at < of.count * of.length; at += grid_threads()) {
    const index_t i = at / of.length, j = at % of.length, row = of.order[i];
    const double sigma = of.norms[row], root = sqrt(sigma);
    double factor = signs[i] * root;
    if (scaled) factor = sigma > 0 ? signs[i] / root : 0.0;
    to[offset_of(layout, i, j)] = static_cast<T>(factor * of.rows[row * of.length + j]);
  }
}

/// Grid: factor_grid.
template <class T>
static __global__ void copy_vector_kernel(grid_dependency earlier, const T* from, index_t step, T* to,
                                          index_t size, bool add) {
  earlier.wait();
  for (index_t i = grid_thread(); i < size; i += grid_threads()) {
    to[i] = add ? to[i] + from[i * step] : from[i * step];
  }
}

/// A grid for kernels that do little work for each of `size` elements.
inline grid factor_grid(index_t size) { return {blocks_for(size, factor_threads, 8192), factor_threads}; }

template <class T>
void measure_matrix(cudaStream_t stream, const T* matrix, const matrix_layout& layout, matrix_moments* parts,
                    matrix_moments* result) {
  const unsigned blocks = blocks_for(layout.rows * columns_of(layout), 4 * factor_threads, most_moment_parts);
  launch(stream, {blocks, factor_threads}, measure_matrix_kernel<T>, matrix, layout, parts);
  launch(stream, {1, most_moment_parts}, join_moments_kernel, parts, static_cast<int>(blocks), result);
}

template <class T>
void load_matrix(cudaStream_t stream, const T* matrix, const matrix_layout& layout, bool transposed,
                 double* to) {
  launch(stream, factor_grid(layout.rows * columns_of(layout)), load_matrix_kernel<T>, matrix, layout,
         transposed, to);
}

void mirror_lower(cudaStream_t stream, double* matrix, index_t order) {
  launch(stream, factor_grid(order * order), mirror_lower_kernel, matrix, order);
}

void orthogonality_correction(cudaStream_t stream, double* e, index_t order) {
  launch(stream, factor_grid(order * order), orthogonality_correction_kernel, e, order);
}

void row_norms(cudaStream_t stream, const double* rows, index_t count, index_t length, double* norms) {
  launch(stream, {static_cast<unsigned>(count), factor_threads}, row_norms_kernel, rows, length, norms);
}

void row_signs(cudaStream_t stream, const singular_rows& of, double* signs) {
  launch(stream, {static_cast<unsigned>(of.count), factor_threads}, row_signs_kernel, of, signs);
}

template <class T>
void store_factor(cudaStream_t stream, const singular_rows& of, const double* signs, bool scaled, T* to,
                  const matrix_layout& layout) {
  launch(stream, factor_grid(of.count * of.length), store_factor_kernel<T>, of, signs, scaled, to, layout);
}

template <class T>
void copy_vector(cudaStream_t stream, const T* from, index_t step, T* to, index_t size, bool add) {
  if (size > 0) launch(stream, factor_grid(size), copy_vector_kernel<T>, from, step, to, size, add);
}

template void measure_matrix<float>(cudaStream_t, const float*, const matrix_layout&, matrix_moments*,
                                    matrix_moments*);
template void load_matrix<float>(cudaStream_t, const float*, const matrix_layout&, bool, double*);
template void store_factor<float>(cudaStream_t, const singular_rows&, const double*, bool, float*,
                                  const matrix_layout&);
template void copy_vector<float>(cudaStream_t, const float*, index_t, float*, index_t, bool);

PUFFERFISH_KERNELS_END
