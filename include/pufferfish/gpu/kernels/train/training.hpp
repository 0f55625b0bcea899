// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of the sums that a training run keeps on a device.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Sums over the steps of an epoch.
struct epoch_sums {
  double loss;           ///< sum of the steps' losses
  std::int64_t hits;     ///< number of right predictions
  std::int64_t count;    ///< number of predictions
  std::int64_t skipped;  ///< number of skipped steps
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Adds the results of a step to *sums: the loss results[0], and results[1] hits of `samples` samples. If
/// `samples` is 0, results[1] is added to the count instead. If *skip is not 0, only the number of skipped
/// steps grows. A null `skip`: the step is not skipped. Throws backend_error if the launch fails.
void add_step(cudaStream_t stream, const double* results, std::int64_t samples, const int* skip,
              epoch_sums* sums);

/// *to = sums, in the order of the stream. The sums are an argument of the kernel, so the caller may change
/// them after the call.
void set_sums(cudaStream_t stream, const epoch_sums& sums, epoch_sums* to);

PUFFERFISH_KERNELS_END
