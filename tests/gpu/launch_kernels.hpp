// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of the kernels that test what all kernels share (launch.cpp).

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNELS_BEGIN

/// y = factor x, with vectors if both addresses are aligned for them.
void test_scale(cudaStream_t stream, const float* x, float* y, index_t size, float factor);
/// y += *x, by one thread: reads what it adds from the device.
void test_add_scalar(cudaStream_t stream, const float* x, float* y);

/// How a kernel is ordered after the work before it in its stream: by the stream, or by a grid_dependency.
enum class start_order { by_stream, by_itself };
/// Threads of a block of test_rotate. Each block also reserves 100 KB of shared memory, so that two fit a
/// multiprocessor of an H100.
inline constexpr index_t rotate_threads = 256;
/// y_i = x_j + 1 with j = (i + by) mod size; x is not y. One element a thread. Some blocks of the device are
/// slow.
void test_rotate(cudaStream_t stream, start_order order, const float* x, float* y, index_t size, index_t by);
/// y_i = (a_i + b_i) / 2, by a kernel with a grid_dependency.
void test_mean(cudaStream_t stream, const float* a, const float* b, float* y, index_t size);

/// Sum and maximum of each row, by one block each.
template <class T>
void test_row_sums(cudaStream_t stream, const T* x, T* sums, T* maxima, index_t rows, index_t columns,
                   int threads);

/// Blocks of `threads` elements reversed, through shared memory of at least `shared_bytes`.
void test_reverse(cudaStream_t stream, const float* x, float* y, int blocks, int threads,
                  index_t shared_bytes);

/// y of 8 * 32 ints: what the lanes of a warp receive from shuffles and votes.
void test_warp(cudaStream_t stream, int* y);
/// counts[0]: threads of a grid, by integer atomics; counts[1 ..]: votes of a block of `threads`.
void test_counts(cudaStream_t stream, int* counts, int blocks, int threads);
/// y_i = i in a grid of three dimensions: blocks of 4 x 3 x 2 threads, 2 x 3 x 4 of them.
void test_indices(cudaStream_t stream, int* y);

/// Tiles of 4 * 64 elements, y = x where mask is not zero and 0 elsewhere, through a ring of copies in the
/// background.
void test_async_copies(cudaStream_t stream, const float* x, const int* mask, float* y, int tiles);

/// c += a b for matrices of 16 x K (rows), K x 8 (columns) and 16 x 8 (rows), K = 32 bytes: by fragments as
/// mma.cuh describes them, or through load_matrices. Kinds: 0 float, 1 bfloat16, 2 half.
void test_mma(cudaStream_t stream, int kind, bool by_load_matrices, const void* a, const void* b, float* c);
/// What load_matrices<true> gives the lanes (4 words each) of 4 blocks of 8 rows of 8 numbers.
void test_transposed(cudaStream_t stream, const std::uint16_t* x, std::uint32_t* y);

PUFFERFISH_KERNELS_END
