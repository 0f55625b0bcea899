// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of <pufferfish/gpu/kernels/train/training.hpp>.

#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/kernels/train/training.hpp>

PUFFERFISH_KERNELS_BEGIN

/// One thread.
static __global__ void add_step_kernel(grid_dependency earlier, const double* results, std::int64_t samples,
                                       const int* skip, epoch_sums* sums) {
  earlier.wait();
  if (skip != nullptr && *skip != 0) {
    ++sums->skipped;
    return;
  }
  sums->loss += results[0];
  const auto second = static_cast<std::int64_t>(results[1]);
  if (samples > 0) sums->hits += second;
  sums->count += samples > 0 ? samples : second;
}

static __global__ void set_sums_kernel(grid_dependency earlier, epoch_sums sums, epoch_sums* to) {
  earlier.wait();
  *to = sums;
}

void add_step(cudaStream_t stream, const double* results, std::int64_t samples, const int* skip,
              epoch_sums* sums) {
  launch(stream, {1, 1}, add_step_kernel, results, samples, skip, sums);
}

void set_sums(cudaStream_t stream, const epoch_sums& sums, epoch_sums* to) {
  launch(stream, {1, 1}, set_sums_kernel, sums, to);
}

PUFFERFISH_KERNELS_END
