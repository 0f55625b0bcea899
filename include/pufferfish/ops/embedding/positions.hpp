// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Sinusoidal encodings of token positions, added to rows of tokens. Tables of encodings are filled once:
///
/// \code
/// tensor<float, 2> table({longest, width});
/// for (index_t p = 0; p < longest; ++p) {
///   for (index_t j = 0; j < width; ++j) table(p, j) = static_cast<float>(ops::sinusoid(p, j, width));
/// }
/// ops::add_positions<float>(ctx, table, places, x);  // places: the position of each row of x
/// \endcode

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <pufferfish/ops/copy/rows.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Encoding of a position in column j of `width`: sin for even j, cos for odd j, of position / 10000^p
/// with p = 2 floor(j / 2) / width (Vaswani et al.: "Attention is all you need", NIPS 2017, section 3.5).
inline double sinusoid(index_t position, index_t j, index_t width) {
  const index_t even = j - j % 2;
  const double power = static_cast<double>(even) / static_cast<double>(width);
  const double angle = static_cast<double>(position) / std::pow(10000.0, power);
  return j % 2 == 0 ? std::sin(angle) : std::cos(angle);
}

/// x_n += row places[n] of the table for each row x_n; row p of the table holds sinusoid(p, j, width) in
/// column j. table and x: contiguous rows of one width; places: one row number of the table for each row of
/// x. Neither the widths nor the places are checked. A device computes the sinusoids itself, in double, and
/// does not read the table, which may then be a null view.
template <class T, class Device>
void add_positions(context<Device>& ctx, const tensor_view<const parameter_t<T>, 2>& table,
                   const std::int32_t* places, const tensor_view<T, 2>& x) {
  if constexpr (!is_cpu<Device>) {
    embedding_ops<Device>::add_positions(ctx, places, x);
  } else {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, add<parameter_t<T>, T>);
    for_row_chunks(ctx, x.extent(0), x.extent(1), [&](index_t begin, index_t end) {
      for (index_t n = begin; n < end; ++n) {
        kernel(table.data() + places[n] * table.stride(0), x.data() + n * x.stride(0), x.extent(1));
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(sequence, add_positions);

/// y_n = x_n + row n % length of the table, for sequences of `length` tokens stored one after another; row p
/// of the table holds sinusoid(p, j, width) in column j. x and y: contiguous rows; y may be x. The table has
/// at least `length` > 0 rows of the same width (not checked); a device does not read it. Throws shape_error
/// if x and y differ in shape.
template <class T, class Device>
void add_positions_in_turn(context<Device>& ctx, const tensor_view<const parameter_t<T>, 2>& table,
                           index_t length, const tensor_view<const T, 2>& x, const tensor_view<T, 2>& y) {
  detail::check_rows("add_positions_in_turn", x.shape(), y.shape());
  if constexpr (!is_cpu<Device>) {
    embedding_ops<Device>::add_positions_in_turn(ctx, length, x, y);
  } else {
    const index_t width = y.extent(1);
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, add<parameter_t<T>, T>);
    for_row_chunks(ctx, y.extent(0), width, [&](index_t begin, index_t end) {
      for (index_t n = begin; n < end; ++n) {
        const T* const from = x.data() + n * x.stride(0);
        T* const to = y.data() + n * y.stride(0);
        if (to != from) std::copy_n(from, width, to);
        kernel(table.data() + n % length * table.stride(0), to, width);
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(sequence, add_positions_in_turn);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
