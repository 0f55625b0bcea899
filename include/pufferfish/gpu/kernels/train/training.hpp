// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of the sums that a training run keeps on a device.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Sums over the steps of an epoch.
struct epoch_sums {
  double loss;
  std::int64_t hits;
  std::int64_t count;
  std::int64_t skipped;  ///< skipped steps
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Adds a step: the loss results[0], and results[1] hits of `samples`; if `samples` is 0, results[1] is added
/// to the count. If *skip is not 0, only counts a skipped step. `skip` may be null: the step is not skipped.
void add_step(cudaStream_t stream, const double* results, std::int64_t samples, const int* skip,
              epoch_sums* sums);

/// *to = sums, which are an argument of the kernel.
void set_sums(cudaStream_t stream, const epoch_sums& sums, epoch_sums* to);

PUFFERFISH_KERNELS_END
