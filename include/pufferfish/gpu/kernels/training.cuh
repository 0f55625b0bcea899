// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of <pufferfish/gpu/kernels/training.hpp>.

#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/kernels/training.hpp>

PUFFERFISH_KERNELS_BEGIN

static __global__ void add_step_kernel(const double* results, std::int64_t count, bool counts_hits,
                                       const int* skip, epoch_sums* sums) {
  if (*skip != 0) {
    ++sums->skipped;
    return;
  }
  sums->loss += results[0];
  if (counts_hits) sums->hits += static_cast<std::int64_t>(results[1]);
  sums->count += count;
}

static __global__ void set_sums_kernel(epoch_sums sums, epoch_sums* to) { *to = sums; }

void add_step(cudaStream_t stream, const double* results, std::int64_t count, bool counts_hits,
              const int* skip, epoch_sums* sums) {
  launch(stream, {1, 1}, add_step_kernel, results, count, counts_hits, skip, sums);
}

void set_sums(cudaStream_t stream, const epoch_sums& sums, epoch_sums* to) {
  launch(stream, {1, 1}, set_sums_kernel, sums, to);
}

PUFFERFISH_KERNELS_END
