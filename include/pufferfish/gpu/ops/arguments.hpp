// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: converts views and options of operations to arguments of kernel launchers.

#include <pufferfish/gpu/kernels/copy/rows.hpp>
#include <pufferfish/gpu/kernels/elementwise/layer_dropout.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/ops/attention/token_runs.hpp>
#include <pufferfish/ops/elementwise/dropout.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// A view with dense rows; a null pointer for a null view. The stride of the columns is not checked: the
/// caller has to pass a view whose column stride is 1.
template <class T>
kernels::row_array<T> rows_of(const tensor_view<T, 2>& view) {
  return {view.data(), view.stride(0)};
}

/// Largest shared memory of a block, in bytes.
inline index_t shared_memory_of(const context<device::gpu>& ctx) {
  int bytes = 0;
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, ctx.device()),
        "cudaDeviceGetAttribute");
  return bytes;
}

/// The arrays of the runs, which must be in device memory. `runs.total` is not passed on.
inline kernels::run_arrays arrays_of(const token_runs& runs) {
  return {runs.sequences, runs.first, runs.count};
}

/// Dropout with a random stream of the context's next_random_stream(). An element is dropped where its random
/// word is below dropout_threshold(probability). A kept element is multiplied by 1 / (1 - probability),
/// rounded to float. A probability of 0 gives an argument that drops nothing. The seed and the step are read
/// from the context's step_values when the kernel runs.
inline kernels::layer_dropout dropout_of(const context<device::gpu>& ctx, double probability,
                                         const random_stream& random) {
  if (!(probability > 0.0)) return {nullptr, 0, 0, 1.0F};
  return {ctx.step_values(), random.stream(), ops::dropout_threshold(probability),
          static_cast<float>(1.0 / (1.0 - probability))};
}

}  // namespace gpu::detail
PUFFERFISH_NAMESPACE_END
