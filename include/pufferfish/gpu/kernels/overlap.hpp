// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Switch of overlapping kernel launches (overlap.cuh).

#include <atomic>

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNELS_BEGIN

namespace detail {
inline std::atomic<bool> overlapping_launches{true};
}  // namespace detail

/// Whether later launches of kernels may overlap the end of the kernel before them (grid_dependency in
/// gpu/kernels/overlap.cuh): true at the start, false for measurements and debugging. Results are the same
/// bits. For all streams and threads of the program or shared object; a captured graph keeps the value of its
/// capture. No effect before compute capability 9.0.
inline void overlap_launches(bool on) { detail::overlapping_launches.store(on, std::memory_order_relaxed); }

PUFFERFISH_KERNELS_END
