// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Estimated times of matrix products of 16-bit elements on a device, from which it is decided whether
/// operands are copied to aligned rows before a product.

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// Speeds of a device for products of 16-bit elements. cuBLAS's fast kernels read 16 bytes at a time, which
/// needs rows that begin at multiples of 16 bytes. Other products are computed by slower kernels.
///
/// The values are those of an H100 (docs/results/device): products of 0.8 to 3.2 GFLOP of a language model
/// ran at 29 to 48 TFLOP/s with rows at multiples of 2 bytes, at 48 to 100 TFLOP/s with rows at multiples of
/// 4 or 8 bytes; the device copies 3.0 TB/s (read and written). `aligned_rate` and `launch` are estimates
/// that have not been measured.
struct product_costs {
  double launch = 2.5;         ///< microseconds that a further kernel adds to a captured step
  double bandwidth = 2.5e6;    ///< bytes per microsecond that a copy reads and writes
  double aligned_rate = 3e8;   ///< operations per microsecond if all rows begin at multiples of 16 bytes
  double middle_rate = 1.2e8;  ///< the same for multiples of 4 or 8 bytes
  double narrow_rate = 4e7;    ///< the same for multiples of 2 bytes
  /// Fewest time steps of an LSTM that are computed in one launch. A step of two launches takes about 17 us
  /// at width 1500 and batch 20; loading the weights to shared memory is estimated at 20 us a launch.
  int fewest_steps = 4;

  /// Microseconds of a product with `operations` multiplications and additions whose rows begin at multiples
  /// of `alignment` bytes.
  double product(double operations, int alignment) const {
    return operations / (alignment >= 16 ? aligned_rate : alignment >= 4 ? middle_rate : narrow_rate);
  }
  /// Microseconds of one kernel that copies `bytes` bytes.
  double copy(double bytes) const { return launch + 2 * bytes / bandwidth; }
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
