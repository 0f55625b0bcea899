// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Copies, clears, gathers and scatters whole rows of matrices.

#include <algorithm>
#include <cstdint>
#include <span>

#include <pufferfish/core/message.hpp>
#include <pufferfish/ops/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace detail {

inline void check_rows(const char* what, const extents<2>& from, const extents<2>& to) {
  if (from != to) pufferfish::detail::throw_error<shape_error>({what, ": ", from, " does not fit ", to});
}

}  // namespace detail

/// to = from. Rows contiguous, any row stride; the same matrix, or no overlap. Throws shape_error.
template <class T>
void copy_rows(context<device::cpu>& ctx, const tensor_view<const T, 2>& from, const tensor_view<T, 2>& to) {
  detail::check_rows("copy_rows", from.shape(), to.shape());
  for_row_chunks(ctx, to.extent(0), to.extent(1), [&](index_t begin, index_t end) {
    for (index_t m = begin; m < end; ++m) {
      std::copy_n(from.data() + m * from.stride(0), to.extent(1), to.data() + m * to.stride(0));
    }
  });
}
/// GPU overload: <pufferfish/gpu.hpp>.
template <class T>
void copy_rows(context<device::gpu>& ctx, const tensor_view<const T, 2>& from, const tensor_view<T, 2>& to);

/// x = 0. Rows contiguous, any row stride.
template <class T>
void clear_rows(context<device::cpu>& ctx, const tensor_view<T, 2>& x) {
  for_row_chunks(ctx, x.extent(0), x.extent(1), [&](index_t begin, index_t end) {
    for (index_t m = begin; m < end; ++m) std::fill_n(x.data() + m * x.stride(0), x.extent(1), T{});
  });
}
/// GPU overload: <pufferfish/gpu.hpp>.
template <class T>
void clear_rows(context<device::gpu>& ctx, const tensor_view<T, 2>& x);

/// to_m = from_(places[m]) for each row m of `to`. Rows contiguous; no overlap;
/// places[m]: a row number of `from`. Throws shape_error if the widths differ.
template <class T>
void gather_rows(context<device::cpu>& ctx, const tensor_view<const T, 2>& from, const index_t* places,
                 const tensor_view<T, 2>& to) {
  detail::check_rows("gather_rows", {to.extent(0), from.extent(1)}, to.shape());
  for_row_chunks(ctx, to.extent(0), to.extent(1), [&](index_t begin, index_t end) {
    for (index_t m = begin; m < end; ++m) {
      std::copy_n(from.data() + places[m] * from.stride(0), to.extent(1), to.data() + m * to.stride(0));
    }
  });
}
/// GPU overload: <pufferfish/gpu.hpp>.
template <class T>
void gather_rows(context<device::gpu>& ctx, const tensor_view<const T, 2>& from, const index_t* places,
                 const tensor_view<T, 2>& to);

/// to_(places[m]) = from_m for each row m of `from`; the places
/// are distinct row numbers of `to`. Otherwise as gather_rows.
template <class T>
void scatter_rows(context<device::cpu>& ctx, const tensor_view<const T, 2>& from, const index_t* places,
                  const tensor_view<T, 2>& to) {
  detail::check_rows("scatter_rows", from.shape(), {from.extent(0), to.extent(1)});
  for_row_chunks(ctx, from.extent(0), to.extent(1), [&](index_t begin, index_t end) {
    for (index_t m = begin; m < end; ++m) {
      std::copy_n(from.data() + m * from.stride(0), to.extent(1), to.data() + places[m] * to.stride(0));
    }
  });
}
/// GPU overload: <pufferfish/gpu.hpp>.
template <class T>
void scatter_rows(context<device::gpu>& ctx, const tensor_view<const T, 2>& from, const index_t* places,
                  const tensor_view<T, 2>& to);

/// y = factor x; dense arrays of one length, y may be x.
template <class T>
void scale(context<device::cpu>& ctx, T factor, std::span<const T> x, std::span<T> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "scale: lengths differ");
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, scale<T>);
  for_chunks(ctx, static_cast<index_t>(y.size()), [&](index_t begin, index_t end) {
    kernel(factor, x.data() + begin, y.data() + begin, end - begin);
  });
}
/// GPU overload: <pufferfish/gpu.hpp>.
template <class T>
void scale(context<device::gpu>& ctx, parameter_t<T> factor, std::span<const T> x, std::span<T> y);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
