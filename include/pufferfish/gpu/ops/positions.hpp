// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Operations on whole rows on a device: device versions of ops/copy/rows.hpp, ops/attention/token_runs.hpp,
/// ops/embedding/positions.hpp and ops/copy/upload.hpp.
///
/// Formulas and shapes: those headers. Matrices have dense rows with any distance between them, in memory of
/// the context's device, as are the arrays of row numbers, lengths and runs. Functions put one kernel into
/// the context's stream and return; those that throw shape_error do so before. A failed launch throws
/// backend_error. Row numbers are not checked.

#include <pufferfish/gpu/kernels/elementwise/elementwise.hpp>
#include <pufferfish/gpu/kernels/embedding/positions.hpp>
#include <pufferfish/gpu/kernels/step.hpp>
#include <pufferfish/gpu/ops/arguments.hpp>
#include <pufferfish/ops/attention/token_runs.hpp>
#include <pufferfish/ops/copy/rows.hpp>
#include <pufferfish/ops/copy/upload.hpp>
#include <pufferfish/ops/embedding/positions.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// to = from. Throws shape_error if the shapes differ. The matrices are the same or do not overlap.
template <class T>
void copy_rows(context<device::gpu>& ctx, const tensor_view<const T, 2>& from, const tensor_view<T, 2>& to) {
  detail::check_rows("copy_rows", from.shape(), to.shape());
  gpu::kernels::gather_rows<T>(ctx.stream(), gpu::detail::rows_of(from), nullptr, to.extent(0), to.extent(1),
                               gpu::detail::rows_of(to));
}

/// x = 0.
template <class T>
void clear_rows(context<device::gpu>& ctx, const tensor_view<T, 2>& x) {
  gpu::kernels::fill_rows<T>(ctx.stream(), nullptr, x.data(), x.extent(0), x.extent(1), x.stride(0));
}

/// Clears exactly the rows that belong to no run, unless runs.total says that there are none. Each row
/// compares its number with all runs.
template <class T>
void clear_rows_outside(context<device::gpu>& ctx, const token_runs& runs, const tensor_view<T, 2>& x) {
  if (runs.total == x.extent(0)) return;
  gpu::kernels::clear_rows_outside<T>(ctx.stream(), gpu::detail::arrays_of(runs), gpu::detail::rows_of(x),
                                      x.extent(0), x.extent(1));
}

/// to_m = from_(places[m]) for each row m of `to`; no overlap. places: one row number of `from` for each row
/// of `to`, in device memory. Throws shape_error if the widths differ.
template <class T>
void gather_rows(context<device::gpu>& ctx, const tensor_view<const T, 2>& from, const index_t* places,
                 const tensor_view<T, 2>& to) {
  detail::check_rows("gather_rows", {to.extent(0), from.extent(1)}, to.shape());
  gpu::kernels::gather_rows<T>(ctx.stream(), gpu::detail::rows_of(from), places, to.extent(0), to.extent(1),
                               gpu::detail::rows_of(to));
}

/// to_(places[m]) = from_m for each row m of `from`; the places are distinct row numbers of `to`. Otherwise
/// as gather_rows.
template <class T>
void scatter_rows(context<device::gpu>& ctx, const tensor_view<const T, 2>& from, const index_t* places,
                  const tensor_view<T, 2>& to) {
  detail::check_rows("scatter_rows", from.shape(), {from.extent(0), to.extent(1)});
  gpu::kernels::scatter_rows<T>(ctx.stream(), gpu::detail::rows_of(from), places, from.extent(0),
                                to.extent(1), gpu::detail::rows_of(to));
}

/// x_n += the sinusoids of position places[n] (ops::sinusoid), computed in double and rounded once. The table
/// is not read, so it may be a null view. The shapes are not checked.
template <class T>
void add_positions(context<device::gpu>& ctx, const tensor_view<const T, 2>&, const std::int32_t* places,
                   const tensor_view<T, 2>& x) {
  gpu::kernels::add_positions<T>(ctx.stream(), places, 1, gpu::detail::rows_of(x), gpu::detail::rows_of(x),
                                 x.extent(0), x.extent(1));
}

/// y_n = x_n + the sinusoids of position n % length; y may be x. The table is not read. Throws shape_error if
/// x and y differ in shape.
template <class T>
void add_positions_in_turn(context<device::gpu>& ctx, const tensor_view<const T, 2>&, index_t length,
                           const tensor_view<const T, 2>& x, const tensor_view<T, 2>& y) {
  detail::check_rows("add_positions_in_turn", x.shape(), y.shape());
  gpu::kernels::add_positions<T>(ctx.stream(), nullptr, length, gpu::detail::rows_of(x),
                                 gpu::detail::rows_of(y), y.extent(0), y.extent(1));
}

/// y = factor x, rounded once; y may be x. Unequal lengths fail an assertion.
template <class T>
void scale(context<device::gpu>& ctx, parameter_t<T> factor, std::span<const T> x, std::span<T> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "scale: lengths differ");
  gpu::kernels::scale<T>(ctx.stream(), factor, x.data(), y.data(), static_cast<index_t>(y.size()));
}

/// first[s] = s length, and count[s] = lengths[s], or `length` if `lengths` is nullptr. The arrays have
/// `sequences` elements each, in device memory, and must outlive the use of the result. With lengths the
/// total is unknown (-1), since the host does not read them.
inline token_runs make_runs(context<device::gpu>& ctx, index_t sequences, index_t length,
                            const index_t* lengths, index_t* first, index_t* count) {
  gpu::kernels::make_runs(ctx.stream(), sequences, length, lengths, first, count);
  return {sequences, first, count, lengths == nullptr ? sequences * length : -1};
}

/// place = written. `written` is pageable memory of the host: CUDA has read it when the call returns, so it
/// may change then. Must not be captured into a graph: each replay would copy from the same address. Throws
/// backend_error.
template <class V>
void upload(context<device::gpu>& ctx, const V* written, V* place, index_t count) {
  if (count == 0) return;
  gpu::check(cudaMemcpyAsync(place, written, static_cast<std::size_t>(count) * sizeof(V),
                             cudaMemcpyHostToDevice, ctx.stream()),
             "cudaMemcpyAsync of notes to the device");
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
