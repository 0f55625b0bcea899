// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Runs of tokens on a device: device versions of ops/attention/token_runs.hpp.

#include <pufferfish/gpu/ops/arguments.hpp>
#include <pufferfish/gpu/ops/copy.hpp>
#include <pufferfish/ops/attention/token_runs.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Clears exactly the rows that belong to no run, unless runs.total says that there are none. Each row
/// compares its number with all runs.
template <class T>
void clear_rows_outside(context<device::gpu>& ctx, const token_runs& runs, const tensor_view<T, 2>& x) {
  if (runs.total == x.extent(0)) return;
  gpu::kernels::clear_rows_outside<T>(ctx.stream(), gpu::detail::arrays_of(runs), gpu::detail::rows_of(x),
                                      x.extent(0), x.extent(1));
}

/// first[s] = s length, and count[s] = lengths[s], or `length` if `lengths` is nullptr. The arrays have
/// `sequences` elements each, in device memory, and must outlive the use of the result. With lengths the
/// total is unknown (-1), since the host does not read them.
inline token_runs make_runs(context<device::gpu>& ctx, index_t sequences, index_t length,
                            const index_t* lengths, index_t* first, index_t* count) {
  gpu::kernels::make_runs(ctx.stream(), sequences, length, lengths, first, count);
  return {sequences, first, count, lengths == nullptr ? sequences * length : -1};
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
