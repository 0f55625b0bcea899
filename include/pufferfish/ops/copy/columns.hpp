// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Gathers columns of a matrix, and scatters them back; the plain reference and the fast form. All matrices
/// have contiguous rows and any row stride. Column numbers are floating-point, so that they can be stored in
/// a buffer of a layer; each one is rounded to the nearest whole number. They are in the memory of the
/// context's device.
///
/// \code
/// const std::vector<float> columns{0, 2};
/// tensor<float, 2> x({8, 3}), y({8, 2}), dx({8, 3});
/// ops::gather_columns<float>(ctx, x, columns.data(), y);          // y(m, j) = x(m, columns[j])
/// ops::scatter_columns<float>(ctx, y, columns.data(), dx, false);  // dx(m, 1) = 0, others as in y
/// \endcode

#include <algorithm>

#include <pufferfish/core/message.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace reference {

/// Reference of gather_columns: to(m, j) = from(m, columns[j]). from: M x C, to: M x J, any strides;
/// `columns`: J column numbers of `from`. Throws value_error for a column out of range.
template <class T>
void gather_columns(const tensor_view<const T, 2>& from, const parameter_t<T>* columns,
                    const tensor_view<T, 2>& to) {
  for (index_t m = 0; m < to.extent(0); ++m) {
    for (index_t j = 0; j < to.extent(1); ++j) to(m, j) = from(m, static_cast<index_t>(columns[j]));
  }
}

/// Reference of scatter_columns: sets `to` to 0 unless `add` is set, then to(m, columns[j]) += from(m, j).
/// from: M x J, to: M x C, any strides; columns: J column numbers of `to`.
template <class T>
void scatter_columns(const tensor_view<const T, 2>& from, const parameter_t<T>* columns,
                     const tensor_view<T, 2>& to, bool add) {
  for (index_t m = 0; m < to.extent(0); ++m) {
    for (index_t c = 0; c < to.extent(1) && !add; ++c) to(m, c) = T{};
    for (index_t j = 0; j < from.extent(1); ++j) to(m, static_cast<index_t>(columns[j])) += from(m, j);
  }
}

}  // namespace reference

namespace detail {

/// Returns columns[j] rounded to the nearest whole number. Throws value_error unless it is in 0 .. width - 1.
template <class P>
index_t column_number(const char* what, const P* columns, index_t j, index_t width) {
  const auto number = static_cast<double>(columns[j]) + 0.5;
  if (!(number >= 0.0 && number < static_cast<double>(width))) {
    pufferfish::detail::throw_error<value_error>({what, ": entry ", j, " of the list of columns is ",
                                                  static_cast<double>(columns[j]), ", not in 0 .. ",
                                                  width - 1});
  }
  return static_cast<index_t>(number);
}

/// Copies `count` column numbers to scratch memory of `frame`. Throws value_error for a number outside 0 ..
/// width - 1.
template <class P>
const index_t* column_numbers(scratch_frame& frame, const char* what, const P* columns, index_t count,
                              index_t width) {
  auto* const numbers = frame.take<index_t>(count);
  for (index_t j = 0; j < count; ++j) numbers[j] = column_number(what, columns, j, width);
  return numbers;
}

/// Throws shape_error unless both matrices have the same number of rows. `what`: name of the function in
/// errors.
inline void check_row_counts(const char* what, const extents<2>& from, const extents<2>& to) {
  if (from[0] == to[0]) return;
  pufferfish::detail::throw_error<shape_error>({what, ": the rows of ", from, " do not fit ", to});
}

}  // namespace detail

/// to(m, j) = from(m, columns[j]). from: M x C, to: M x J; `columns`: J column numbers of `from`, of which
/// several may be equal. No overlap. Throws shape_error if the numbers of rows differ, value_error for a
/// column out of range, before anything is written. On a device, a column out of range gives NaNs.
template <class T, class Device>
void gather_columns(context<Device>& ctx, const tensor_view<const T, 2>& from, const parameter_t<T>* columns,
                    const tensor_view<T, 2>& to) {
  detail::check_row_counts("gather_columns", from.shape(), to.shape());
  if (to.empty()) return;
  if constexpr (!is_cpu<Device>) {
    copy_ops<Device>::gather_columns(ctx, from, columns, to);
  } else {
    scratch_frame frame(ctx.scratch());
    const index_t count = to.extent(1);
    const index_t* const numbers =
        detail::column_numbers(frame, "gather_columns", columns, count, from.extent(1));
    for_row_chunks(ctx, to.extent(0), count, [&](index_t begin, index_t end) {
      for (index_t m = begin; m < end; ++m) {
        const T* const row = from.data() + m * from.stride(0);
        T* const out = to.data() + m * to.stride(0);
        for (index_t j = 0; j < count; ++j) out[j] = row[numbers[j]];
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, gather_columns);

/// The gradient of gather_columns. Without `add`: to = 0, then to(m, columns[j]) = from(m, j). With `add`:
/// to(m, columns[j]) += from(m, j), and other columns are not touched. from: M x J, to: M x C; `columns`: J
/// distinct column numbers of `to`. No overlap. Throws shape_error if the numbers of rows differ, value_error
/// on the CPU for a column out of range, before anything is written. A device ignores columns out of range.
template <class T, class Device>
void scatter_columns(context<Device>& ctx, const tensor_view<const T, 2>& from, const parameter_t<T>* columns,
                     const tensor_view<T, 2>& to, bool add) {
  detail::check_row_counts("scatter_columns", from.shape(), to.shape());
  if (to.empty()) return;
  if constexpr (!is_cpu<Device>) {
    copy_ops<Device>::scatter_columns(ctx, from, columns, to, add);
  } else {
    scratch_frame frame(ctx.scratch());
    const index_t count = from.extent(1), width = to.extent(1);
    const index_t* const numbers = detail::column_numbers(frame, "scatter_columns", columns, count, width);
    for_row_chunks(ctx, to.extent(0), width, [&](index_t begin, index_t end) {
      for (index_t m = begin; m < end; ++m) {
        const T* const row = from.data() + m * from.stride(0);
        T* const out = to.data() + m * to.stride(0);
        if (!add) std::fill_n(out, width, T{});
        for (index_t j = 0; j < count; ++j) {
          T& place = out[numbers[j]];
          place = static_cast<T>(add ? place + row[j] : row[j]);
        }
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, scatter_columns);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
