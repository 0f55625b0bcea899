// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers for gradients that are exchanged without the host. All arrays are in device memory; T is float
/// or double.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// The narrow formats in which gradients travel: those of core/scalar.hpp, rounded to nearest, ties to even;
/// a NaN stays one.
enum class wire_format : int { bf16, fp16 };

/// More than any place of an element.
inline constexpr std::uint64_t all_finite = ~std::uint64_t{0};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// x *= factor.
template <class T>
void multiply(cudaStream_t stream, T* x, index_t size, T factor);

/// to = from, every element rounded to the narrow format by way of float.
template <class T>
void narrow(cudaStream_t stream, wire_format wire, const T* from, std::uint16_t* to, index_t size);

/// to = from * factor.
template <class T>
void widen(cudaStream_t stream, wire_format wire, const std::uint16_t* from, T* to, index_t size, T factor);

/// own + what `count` others have sent, `step` elements apart, added in their order; `sum` is that, rounded
/// to the narrow format, and own = sum * factor.
template <class T>
void add_narrow(cudaStream_t stream, wire_format wire, const std::uint16_t* others, int count, index_t step,
                T* own, std::uint16_t* sum, index_t size, T factor);

/// *first = the smaller of it and the place of the first element of x that is not finite, x beginning at
/// place `begin`.
template <class T>
void find_nonfinite(cudaStream_t stream, const T* x, index_t size, std::uint64_t begin, std::uint64_t* first);

/// *skip = 1 unless all `count` numbers are all_finite, else 0.
void decide_skip(cudaStream_t stream, const std::uint64_t* found, int count, int* skip);

/// *flag = 1 if *other is not 0, else it stays as it was.
void join_flag(cudaStream_t stream, const int* other, int* flag);

/// *to = *from, with `rank` above the place (40 bits), unless it is all_finite.
void tag_with_rank(cudaStream_t stream, const std::uint64_t* from, std::uint64_t rank, std::uint64_t* to);

PUFFERFISH_KERNELS_END
