// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers that move or clear single elements of an array, as masks of pruned weights need. All arrays are
/// in device memory; T is float or double. Each launcher throws backend_error if its launch fails.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNELS_BEGIN

/// Sets x_i to +0 where bit (first + i) % 64 of words[(first + i) / 64] is clear, also where x_i is NaN.
/// Other elements keep their bits. i < size.
template <class T>
void keep_marked(cudaStream_t stream, const std::uint64_t* words, index_t first, T* x, index_t size);

/// to_i = from[places_i] for i < size. No arrays overlap.
template <class T>
void gather_elements(cudaStream_t stream, const T* from, const std::int32_t* places, T* to, index_t size);

/// to[places_i] = from_i for i < size. Other elements of `to` keep their bits. No place may occur twice, and
/// no arrays overlap.
template <class T>
void scatter_elements(cudaStream_t stream, const T* from, const std::int32_t* places, T* to, index_t size);

PUFFERFISH_KERNELS_END
