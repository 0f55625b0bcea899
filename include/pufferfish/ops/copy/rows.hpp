// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Copies, clears, gathers and scatters whole rows of matrices. All matrices have contiguous rows and any row
/// stride, so that they may be columns or rows of a larger matrix. Row numbers (`places`) are in the memory
/// of the context's device and are not checked.
///
/// \code
/// ops::gather_rows<float>(ctx, rows, places, chosen);   // chosen_m = rows_(places[m])
/// ops::scatter_rows<float>(ctx, chosen, places, rows);  // and back
/// \endcode

#include <algorithm>
#include <cstdint>
#include <span>

#include <pufferfish/core/message.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace detail {

/// Throws shape_error unless both shapes are equal. `what`: name of the function in errors.
inline void check_rows(const char* what, const extents<2>& from, const extents<2>& to) {
  if (from != to) pufferfish::detail::throw_error<shape_error>({what, ": ", from, " does not fit ", to});
}

}  // namespace detail

/// to = from, row by row. `from` and `to` are the same matrix, or do not overlap. Throws shape_error if the
/// shapes differ.
template <class T, class Device>
void copy_rows(context<Device>& ctx, const tensor_view<const T, 2>& from, const tensor_view<T, 2>& to) {
  detail::check_rows("copy_rows", from.shape(), to.shape());
  if constexpr (!is_cpu<Device>) {
    copy_ops<Device>::gather_rows(ctx, from, nullptr, to);
  } else {
    for_row_chunks(ctx, to.extent(0), to.extent(1), [&](index_t begin, index_t end) {
      for (index_t m = begin; m < end; ++m) {
        std::copy_n(from.data() + m * from.stride(0), to.extent(1), to.data() + m * to.stride(0));
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, copy_rows);

/// Sets all elements of x to 0. Elements between the rows (of a row stride larger than the width) are not
/// written.
template <class T, class Device>
void clear_rows(context<Device>& ctx, const tensor_view<T, 2>& x) {
  if constexpr (!is_cpu<Device>) {
    copy_ops<Device>::clear_rows(ctx, x);
  } else {
    for_row_chunks(ctx, x.extent(0), x.extent(1), [&](index_t begin, index_t end) {
      for (index_t m = begin; m < end; ++m) std::fill_n(x.data() + m * x.stride(0), x.extent(1), T{});
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, clear_rows);

/// to_m = from_(places[m]) for each row m of `to`. `places`: one row number of `from` for each row of `to`;
/// rows may occur more than once. No overlap. Throws shape_error if the widths differ.
template <class T, class Device>
void gather_rows(context<Device>& ctx, const tensor_view<const T, 2>& from, const index_t* places,
                 const tensor_view<T, 2>& to) {
  detail::check_rows("gather_rows", {to.extent(0), from.extent(1)}, to.shape());
  if constexpr (!is_cpu<Device>) {
    copy_ops<Device>::gather_rows(ctx, from, places, to);
  } else {
    for_row_chunks(ctx, to.extent(0), to.extent(1), [&](index_t begin, index_t end) {
      for (index_t m = begin; m < end; ++m) {
        std::copy_n(from.data() + places[m] * from.stride(0), to.extent(1), to.data() + m * to.stride(0));
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, gather_rows);

/// to_(places[m]) = from_m for each row m of `from`; other rows of `to` are not written. The places are
/// distinct row numbers of `to`, since rows are written in parallel. No overlap. Throws shape_error if the
/// widths differ.
template <class T, class Device>
void scatter_rows(context<Device>& ctx, const tensor_view<const T, 2>& from, const index_t* places,
                  const tensor_view<T, 2>& to) {
  detail::check_rows("scatter_rows", from.shape(), {from.extent(0), to.extent(1)});
  if constexpr (!is_cpu<Device>) {
    copy_ops<Device>::scatter_rows(ctx, from, places, to);
  } else {
    for_row_chunks(ctx, from.extent(0), to.extent(1), [&](index_t begin, index_t end) {
      for (index_t m = begin; m < end; ++m) {
        std::copy_n(from.data() + m * from.stride(0), to.extent(1), to.data() + places[m] * to.stride(0));
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, scatter_rows);

/// y_i = factor * x_i for all elements. The spans must have one length, else the assertion fails; y may be x.
template <class T, class Device>
void scale(context<Device>& ctx, parameter_t<T> factor, std::span<const T> x, std::span<T> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "scale: lengths differ");
  if constexpr (!is_cpu<Device>) {
    copy_ops<Device>::scale(ctx, factor, x, y);
  } else {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, scale<T>);
    for_chunks(ctx, static_cast<index_t>(y.size()), [&](index_t begin, index_t end) {
      kernel(factor, x.data() + begin, y.data() + begin, end - begin);
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, scale);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
