// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: decides whether a convolution on a device computes the batch norm of its input.

#include <cstdint>

#include <pufferfish/gpu/kernels/conv/halo_plan.hpp>
#include <pufferfish/gpu/kernels/norm/batch_norm.hpp>
#include <pufferfish/gpu/ops/collect_moments.hpp>
#include <pufferfish/gpu/ops/elementwise.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/ops/norm/pending_norm.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// Computes `norm`, unless nullptr, if it is pending.
template <class T>
void compute_pending(context<device::gpu>& ctx, ops::pending_norm<T>* norm) {
  if (norm != nullptr) norm->compute(ctx);
}

/// Kernel argument for an epilogue.
template <class T>
kernels::norm_tail<T> tail_of(const ops::norm_epilogue<T>& epilogue) {
  return {epilogue.addend.is_null() ? nullptr : epilogue.addend.flat().data(), epilogue.relu,
          epilogue.relu ? mask_words(epilogue.mask) : nullptr};
}

/// The request for a kernel that computes the norm if `norm` is pending, fits(whether it has an addend) is
/// true and its operands are at multiples of 16 bytes; the norm is then done. Otherwise computes a pending
/// norm and returns an empty request. `norm` may be nullptr.
template <class T, class Fits>
kernels::norm_request<T> request_norm(context<device::gpu>& ctx, ops::pending_norm<T>* norm, Fits fits) {
  if (norm == nullptr || !norm->is_pending()) return {};
  const auto& c = norm->arguments();
  const index_t channels = c.x.extent(1);
  const kernels::norm_tail<T> tail = tail_of(c.epilogue);
  const kernels::norm_request<T> request{
      {c.x.flat().data(), c.statistics, c.statistics + channels, c.weight, c.x.extent(0), channels},
      c.bias,
      tail,
      c.y.flat().data(),
      {c.moments, {c.eps, c.momentum, c.statistics, c.running_mean, c.running_var, c.batches}}};
  const auto aligned = [](const T* at) { return reinterpret_cast<std::uintptr_t>(at) % 16 == 0; };
  if (aligned(request.m.x) && aligned(request.y) && aligned(tail.addend) && fits(tail.addend != nullptr)) {
    norm->done();
    return request;
  }
  norm->compute(ctx);
  return {};
}

/// Calls compute(workspace, request), which computes the result y of halo_forward (`up_columns`: 0) or
/// halo_low_rank_forward (`up_columns`: channels of y), with moments for `moments` and with `norm` as the
/// norm of the input, unless nullptr.
template <class T, class Compute>
void compute_halo(context<device::gpu>& ctx, const kernels::conv_geometry& geometry,
                  const kernels::halo_plan& plan, int up_columns, const tensor_view<T, 4>& y,
                  ops::moment_parts<T>* moments, ops::pending_norm<T>* norm, Compute compute) {
  const auto request = request_norm<T>(
      ctx, norm, [&](bool sums) { return kernels::halo_norm_fits(geometry, plan, up_columns, sums); });
  const bool collects = kernels::halo_moments_fit(plan, up_columns == 0 ? plan.columns : up_columns);
  collect_moments<T>(ctx, y, moments, collects, [&](const auto& to) { compute(to, request); });
}

}  // namespace gpu::detail
PUFFERFISH_NAMESPACE_END
