// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers for gradients that are exchanged between devices without the host. All arrays are in device
/// memory; T is float or double. Each launcher throws backend_error if its launch fails.
///
/// Order of use for sums with a narrow wire format: narrow, messages, add_narrow, messages, widen
/// (gpu::detail::nccl_reducer). Order of use for a check of gradients: find_nonfinite, tag_with_rank, a
/// minimum over the ranks, find_nonfinite, decide_skip (gpu::detail::nccl_finite_check).

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// The narrow formats in which gradients are sent: those of core/scalar.hpp, rounded to nearest, ties to
/// even; a NaN remains a NaN.
enum class wire_format : int { bf16, fp16 };

/// Result of a search that found only finite elements. The value is larger than the position of any element.
inline constexpr std::uint64_t all_finite = ~std::uint64_t{0};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// x_i *= factor for i < size. No launch if the factor is 1.
template <class T>
void multiply(cudaStream_t stream, T* x, index_t size, T factor);

/// Converts each element to float, then rounds it to the narrow format. `from` and `to` must not overlap.
template <class T>
void narrow(cudaStream_t stream, wire_format wire, const T* from, std::uint16_t* to, index_t size);

/// to_i = from_i * factor. `from` and `to` must not overlap.
template <class T>
void widen(cudaStream_t stream, wire_format wire, const std::uint16_t* from, T* to, index_t size, T factor);

/// Adds the numbers of `count` other ranks, stored `step` elements apart, to `own`, in the order of the
/// ranks. `sum` receives the result, rounded to the narrow format. `own` receives the rounded sum times
/// factor, so that it has the bits that other ranks compute from `sum`. No arrays overlap.
template <class T>
void add_narrow(cudaStream_t stream, wire_format wire, const std::uint16_t* others, int count, index_t step,
                T* own, std::uint16_t* sum, index_t size, T factor);

/// *first = min(*first, position of the first element of x that is not finite), where x[0] has the position
/// `begin`. The caller initializes *first, to all_finite for a new search.
template <class T>
void find_nonfinite(cudaStream_t stream, const T* x, index_t size, std::uint64_t begin, std::uint64_t* first);

/// *skip = 1 unless all `count` numbers are all_finite, else 0.
void decide_skip(cudaStream_t stream, const std::uint64_t* found, int count, int* skip);

/// *flag = 1 if *other is not 0, else unchanged.
void join_flag(cudaStream_t stream, const int* other, int* flag);

/// *to = *from with `rank` in the bits above the position, which has 40 bits. all_finite is copied unchanged.
void tag_with_rank(cudaStream_t stream, const std::uint64_t* from, std::uint64_t rank, std::uint64_t* to);

PUFFERFISH_KERNELS_END
