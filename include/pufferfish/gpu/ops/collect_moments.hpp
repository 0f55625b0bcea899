// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: decides whether a convolution on a device collects the moments of its result, or sums over its
/// gradient of the input.

#include <cstdint>

#include <pufferfish/gpu/kernels/norm/batch_norm.hpp>
#include <pufferfish/gpu/kernels/reduce/moment_parts.hpp>
#include <pufferfish/gpu/ops/elementwise.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/ops/norm/gradient_sums.hpp>
#include <pufferfish/ops/norm/moments.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// Calls compute(workspace), which computes a tensor of this shape. If `possible` is true and the tensor has
/// more rows than a batch norm normalizes in one launch, and so would need a pass of its own for its sums,
/// the workspace is not empty and receives two numbers for each channel, at the address result(rows,
/// channels).
template <class T, class Result, class Compute>
void collect_numbers(context<device::gpu>& ctx, const extents<4>& shape, bool possible, Result result,
                     Compute compute) {
  const index_t channels = shape[3], rows = shape[0] * shape[1] * shape[2];
  kernels::moment_workspace work;
  const bool wanted =
      possible && rows > kernels::most_block_norm_rows<T> && kernels::moments_fit(rows, channels);
  // The result outlives the frame, so its memory is taken first.
  if (wanted) work.moments = result(rows, channels);
  scratch_frame frame(ctx.scratch());
  if (wanted) {
    work.parts = frame.take<float>(kernels::moment_scratch(rows, channels));
    work.counters = ctx.counters();
  }
  compute(std::as_const(work));
}

/// Calls compute(workspace), which computes y and the moments of its channels, which are collected for
/// `moments` unless nullptr. `possible`: see collect_numbers.
template <class T, class Compute>
void collect_moments(context<device::gpu>& ctx, const tensor_view<T, 4>& y, ops::moment_parts<T>* moments,
                     bool possible, Compute compute) {
  collect_numbers<T>(
      ctx, y.shape(), possible && moments != nullptr,
      [&](index_t rows, index_t channels) { return moments->start_merged(rows, channels); }, compute);
}

/// Calls compute(workspace, norm), which computes dx and the sums of its channels, which are collected for
/// `sums` unless nullptr, if the norm's x is at a multiple of 16 bytes. `possible`: see collect_numbers.
template <class T, class Compute>
void collect_gradient_sums(context<device::gpu>& ctx, const tensor_view<T, 4>& dx,
                           ops::gradient_sums<T>* sums, bool possible, Compute compute) {
  kernels::gradient_sum_input<T> norm;
  const auto result = [&](index_t rows, index_t channels) {
    PUFFERFISH_ASSERT(sums->x().shape() == (extents<2>{rows, channels}),
                      "gradient_sums: x has another shape");
    norm = {sums->x().flat().data(), sums->mean(), mask_words(sums->mask())};
    return sums->collect();
  };
  const bool aligned = sums != nullptr && reinterpret_cast<std::uintptr_t>(sums->x().flat().data()) % 16 == 0;
  collect_numbers<T>(ctx, dx.shape(), possible && aligned, result,
                     [&](const auto& work) { compute(work, std::as_const(norm)); });
}

}  // namespace gpu::detail
PUFFERFISH_NAMESPACE_END
