// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Rows of matrices as wholes: copied, cleared, gathered and scattered by number, rows of a table added to
/// them; and the runs of sequences that lie one behind the other.

#include <algorithm>
#include <cstdint>
#include <span>

#include <pufferfish/ops/attention.hpp>
#include <pufferfish/ops/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace detail {

inline void check_rows(const char* what, const extents<2>& from, const extents<2>& to) {
  if (from != to) pufferfish::detail::throw_error<shape_error>({what, ": ", from, " does not fit ", to});
}

}  // namespace detail

/// to = from. Rows dense, any distance apart; the same matrix, or no overlap. Throws shape_error.
template <class T>
void copy_rows(context<device::cpu>& ctx, const tensor_view<const T, 2>& from, const tensor_view<T, 2>& to) {
  detail::check_rows("copy_rows", from.shape(), to.shape());
  for_row_chunks(ctx, to.extent(0), to.extent(1), [&](index_t begin, index_t end) {
    for (index_t m = begin; m < end; ++m) {
      std::copy_n(from.data() + m * from.stride(0), to.extent(1), to.data() + m * to.stride(0));
    }
  });
}
/// The device's form: <pufferfish/gpu.hpp>.
template <class T>
void copy_rows(context<device::gpu>& ctx, const tensor_view<const T, 2>& from, const tensor_view<T, 2>& to);

/// Zeros. Rows dense, any distance apart.
template <class T>
void clear_rows(context<device::cpu>& ctx, const tensor_view<T, 2>& x) {
  for_row_chunks(ctx, x.extent(0), x.extent(1), [&](index_t begin, index_t end) {
    for (index_t m = begin; m < end; ++m) std::fill_n(x.data() + m * x.stride(0), x.extent(1), T{});
  });
}
/// The device's form: <pufferfish/gpu.hpp>.
template <class T>
void clear_rows(context<device::gpu>& ctx, const tensor_view<T, 2>& x);

/// Zeros in the rows of no run: in front of an operation that leaves those alone. What runs have may be
/// cleared, too.
template <class T>
void clear_rows_outside(context<device::cpu>& ctx, const token_runs& runs, const tensor_view<T, 2>& x) {
  index_t sum = 0;
  for (index_t s = 0; s < runs.sequences; ++s) sum += runs.count[s];
  if (sum != x.extent(0)) clear_rows(ctx, x);
}
/// The device's form: <pufferfish/gpu.hpp>. Costs nothing where runs.total says that every row has one.
template <class T>
void clear_rows_outside(context<device::gpu>& ctx, const token_runs& runs, const tensor_view<T, 2>& x);

/// to_m = from_(places[m]) for each row m of `to`. Rows dense; no overlap; places: of rows of `from`. Throws
/// shape_error if the widths differ.
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
/// The device's form: <pufferfish/gpu.hpp>.
template <class T>
void gather_rows(context<device::gpu>& ctx, const tensor_view<const T, 2>& from, const index_t* places,
                 const tensor_view<T, 2>& to);

/// to_(places[m]) = from_m for each row m of `from`; places all different, of rows of `to`. Else as
/// gather_rows.
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
/// The device's form: <pufferfish/gpu.hpp>.
template <class T>
void scatter_rows(context<device::gpu>& ctx, const tensor_view<const T, 2>& from, const index_t* places,
                  const tensor_view<T, 2>& to);

/// x_m += row places[m] of the table, each in 0 .. table.extent(0) - 1. Rows dense, of one width.
template <class T>
void add_table_rows(context<device::cpu>& ctx, const tensor_view<const T, 2>& table,
                    const std::int32_t* places, const tensor_view<T, 2>& x) {
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, add<T>);
  for_row_chunks(ctx, x.extent(0), x.extent(1), [&](index_t begin, index_t end) {
    for (index_t n = begin; n < end; ++n) {
      kernel(table.data() + places[n] * table.stride(0), x.data() + n * x.stride(0), x.extent(1));
    }
  });
}
/// The device's form: <pufferfish/gpu.hpp>. A place outside the table gives a row of NaNs.
template <class T>
void add_table_rows(context<device::gpu>& ctx, const tensor_view<const T, 2>& table,
                    const std::int32_t* places, const tensor_view<T, 2>& x);

/// y_m = x_m + row m % period of the table, which has at least so many. Rows dense, of one shape; y may be x.
template <class T>
void add_repeated_rows(context<device::cpu>& ctx, const tensor_view<const T, 2>& table, index_t period,
                       const tensor_view<const T, 2>& x, const tensor_view<T, 2>& y) {
  detail::check_rows("add_repeated_rows", x.shape(), y.shape());
  const index_t width = y.extent(1);
  for_row_chunks(ctx, y.extent(0), width, [&](index_t begin, index_t end) {
    for (index_t n = begin; n < end; ++n) {
      const T *from = x.data() + n * x.stride(0), *row = table.data() + n % period * table.stride(0);
      T* const to = y.data() + n * y.stride(0);
      for (index_t j = 0; j < width; ++j) to[j] = from[j] + row[j];
    }
  });
}
/// The device's form: <pufferfish/gpu.hpp>.
template <class T>
void add_repeated_rows(context<device::gpu>& ctx, const tensor_view<const T, 2>& table, index_t period,
                       const tensor_view<const T, 2>& x, const tensor_view<T, 2>& y);

/// y = factor x; dense arrays of one length, y may be x.
template <class T>
void scale(context<device::cpu>& ctx, T factor, std::span<const T> x, std::span<T> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "scale: lengths differ");
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, scale<T>);
  for_chunks(ctx, static_cast<index_t>(y.size()), [&](index_t begin, index_t end) {
    kernel(factor, x.data() + begin, y.data() + begin, end - begin);
  });
}
/// The device's form: <pufferfish/gpu.hpp>.
template <class T>
void scale(context<device::gpu>& ctx, T factor, std::span<const T> x, std::span<T> y);

/// Runs of sequences of one length, one behind the other: first[s] = s length, and count[s] = lengths[s], or
/// `length` where `lengths` is nullptr. Arrays in the memory of the context's device.
inline token_runs make_runs(context<device::cpu>&, index_t sequences, index_t length, const index_t* lengths,
                            index_t* first, index_t* count) {
  for (index_t s = 0; s < sequences; ++s) {
    first[s] = s * length;
    count[s] = lengths == nullptr ? length : lengths[s];
  }
  return {sequences, first, count, lengths == nullptr ? sequences * length : -1};
}
/// The device's form: <pufferfish/gpu.hpp>.
token_runs make_runs(context<device::gpu>& ctx, index_t sequences, index_t length, const index_t* lengths,
                     index_t* first, index_t* count);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
