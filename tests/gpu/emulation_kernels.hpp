// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNELS_BEGIN

void test_scale(cudaStream_t stream, const float* x, float* y, index_t size, float factor);

template <class T>
void test_row_sums(cudaStream_t stream, const T* x, T* sums, index_t rows, index_t columns, unsigned threads);

void test_reverse(cudaStream_t stream, const float* x, float* y, int blocks, int threads, index_t shared_bytes);

PUFFERFISH_KERNELS_END
