// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Switch of overlapping kernel launches (overlap.cuh).

#include <atomic>

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNELS_BEGIN

namespace detail {
inline std::atomic<bool> overlapping_launches{false};
}  // namespace detail

/// Whether later launches of kernels may overlap the end of the kernel before them (grid_dependency in
/// gpu/kernels/overlap.cuh): false at the start, because on an H100 steps of convolutional networks with 128
/// images took 5 to 17 % longer with it, and those of a Transformer 1 % less. Results are the same bits. For
/// all streams and threads of the program or shared object; a captured graph keeps the value of its capture.
/// No effect before compute capability 9.0.
inline void overlap_launches(bool on) { detail::overlapping_launches.store(on, std::memory_order_relaxed); }

PUFFERFISH_KERNELS_END
