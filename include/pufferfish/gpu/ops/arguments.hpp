// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: converts views and options of operations to arguments of kernel launchers.

#include <limits>

#include <pufferfish/gpu/kernels/conv/conv_plan.hpp>
#include <pufferfish/gpu/kernels/copy/rows.hpp>
#include <pufferfish/gpu/kernels/elementwise/layer_dropout.hpp>
#include <pufferfish/gpu/kernels/reduce/column_parts.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/ops/attention/token_runs.hpp>
#include <pufferfish/ops/conv/conv_shape.hpp>
#include <pufferfish/ops/elementwise/dropout.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// Kernel argument for a matrix with contiguous rows: address and row stride. A null view gives a null
/// pointer. The column stride of the view must be 1, which is not checked.
template <class T>
kernels::row_array<T> rows_of(const tensor_view<T, 2>& view) {
  return {view.data(), view.stride(0)};
}

/// Kernel argument for sums of `quantities` numbers in each column of a matrix of rows x columns. The memory
/// ends with the frame.
inline kernels::column_workspace column_workspace_of(context<device::gpu>& ctx, scratch_frame& frame,
                                                     index_t rows, index_t columns, index_t quantities) {
  return {frame.take<double>(kernels::column_scratch(rows, columns, quantities)), ctx.counters()};
}

/// The sizes and strides of a convolution as kernel arguments. Throws shape_error, beginning with `what`, if
/// a size, a patch or an image has more than 2^31 - 1 elements.
inline kernels::conv_geometry geometry_of(const char* what, const conv_shape& shape, const extents<4>& x,
                                          const extents<4>& y) {
  constexpr index_t most = std::numeric_limits<int>::max();
  const auto narrow = [&](index_t length) {
    if (length > most) {
      pufferfish::detail::throw_error<shape_error>(
          {what, ": ", shape.describe(), " over ", x, " needs numbers of more than 31 bits"});
    }
    return static_cast<int>(length);
  };
  narrow(x[1] * x[2] * x[3]);
  narrow(y[1] * y[2] * y[3]);
  narrow(shape.patch());
  narrow(shape.kernel.height * shape.kernel.width * shape.out_channels);
  return {x[0],
          narrow(x[1]),
          narrow(x[2]),
          narrow(x[3]),
          narrow(y[1]),
          narrow(y[2]),
          narrow(y[3]),
          narrow(shape.kernel.height),
          narrow(shape.kernel.width),
          narrow(shape.stride.height),
          narrow(shape.stride.width),
          narrow(shape.padding.height),
          narrow(shape.padding.width),
          narrow(shape.dilation.height),
          narrow(shape.dilation.width)};
}

/// Largest shared memory of a thread block on the context's device, in bytes. Throws backend_error if CUDA
/// cannot be asked.
inline index_t shared_memory_of(const context<device::gpu>& ctx) {
  int bytes = 0;
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, ctx.device()),
        "cudaDeviceGetAttribute");
  return bytes;
}

/// Number of thread blocks that run at once in a cooperative launch, one on each multiprocessor of the
/// context's device; 0 if the device has no such launches. Throws backend_error if CUDA cannot be asked.
inline int cooperative_blocks_of(const context<device::gpu>& ctx) {
  int together = 0, multiprocessors = 0;
  check(cudaDeviceGetAttribute(&together, cudaDevAttrCooperativeLaunch, ctx.device()),
        "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ctx.device()),
        "cudaDeviceGetAttribute");
  return together != 0 ? multiprocessors : 0;
}

/// Kernel argument for the rows of each sequence's tokens (token_runs): arrays of first rows and of counts,
/// which must be in device memory. `runs.total` is not passed on.
inline kernels::run_arrays arrays_of(const token_runs& runs) {
  return {runs.sequences, runs.first, runs.count};
}

/// Returns the dropout argument of a kernel: the number of the random stream, the threshold and the scale.
/// `random` comes from the context's next_random_stream(). The kernel drops an element if the element's
/// random 32-bit number is below dropout_threshold(probability), and multiplies a kept element by the float
/// nearest to 1 / (1 - probability). A probability of 0 returns an argument that drops nothing. The kernel
/// reads the seed and the step from the context's step_values when it runs, so a captured step draws new
/// numbers at each replay.
inline kernels::layer_dropout dropout_of(const context<device::gpu>& ctx, double probability,
                                         const random_stream& random) {
  if (!(probability > 0.0)) return {nullptr, 0, 0, 1.0F};
  return {ctx.step_values(), random.stream(), ops::dropout_threshold(probability),
          static_cast<float>(1.0 / (1.0 - probability))};
}

}  // namespace gpu::detail
PUFFERFISH_NAMESPACE_END
