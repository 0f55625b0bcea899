// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: decides whether a convolution on a device collects the moments of its result.

#include <pufferfish/gpu/kernels/norm/batch_norm.hpp>
#include <pufferfish/gpu/kernels/reduce/moment_parts.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/ops/norm/moments.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// Calls compute(workspace), which computes y and, in a workspace that is not empty, the moments of its
/// channels. They are collected for `moments`, unless nullptr, if `possible` is true and y has more rows than
/// a batch norm normalizes in one launch, and so would need a pass of its own for its statistics.
template <class T, class Compute>
void collect_moments(context<device::gpu>& ctx, const tensor_view<T, 4>& y, ops::moment_parts<T>* moments,
                     bool possible, Compute compute) {
  const index_t channels = y.extent(3), rows = y.extent(0) * y.extent(1) * y.extent(2);
  kernels::moment_workspace work;
  const bool wanted = possible && moments != nullptr && rows > kernels::most_block_norm_rows<T> &&
                      kernels::moments_fit(rows, channels);
  // The result outlives the frame, so its memory is taken first.
  if (wanted) work.moments = moments->start_merged(rows, channels);
  scratch_frame frame(ctx.scratch());
  if (wanted) {
    work.parts = frame.take<float>(kernels::moment_scratch(rows, channels));
    work.counters = ctx.counters();
  }
  compute(std::as_const(work));
}

}  // namespace gpu::detail
PUFFERFISH_NAMESPACE_END
