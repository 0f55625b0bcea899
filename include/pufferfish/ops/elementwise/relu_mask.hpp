// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `relu_mask`: one bit for each element of a ReLU's input, set if the element was positive, so that the
/// backward pass need not read an activation. `wide_rows`: the order of the bits, chosen so that passes write
/// them in vectors.
///
/// \code
/// using mask = ops::relu_mask<float>;
/// std::vector<mask::word> words(static_cast<std::size_t>(mask::size(y.shape())));
/// ops::batch_norm_apply<float>(ctx, x, mean, inv_std, weight, bias, y, {addend, true, {words.data()}});
/// ops::masked_copy<float>(ctx, dy, {words.data()}, daddend);  // the gradient of the addend
/// \endcode

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>

#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace detail {

/// View of a dense matrix of rows x channels as wide rows of `width` elements. If the number of channels is
/// small or not a multiple of a vector, a wide row joins several rows of the matrix, so that it consists of
/// whole vectors; per-channel values are repeated to that width. `unit_rows` wide rows, as many as a mask
/// word has bits, form a unit. A unit has `width` words: bit i of word j belongs to column j of wide row i.
///
/// Example: 24 channels of float have wide rows of 96 elements, that is 4 rows each (6 vectors of 16), and a
/// unit is 32 wide rows or 128 rows.
template <class T>
struct wide_rows {
  static constexpr index_t vector =
      64 / static_cast<index_t>(sizeof(parameter_t<T>));  // elements of the widest vector
  static constexpr index_t unit_rows = 8 * static_cast<index_t>(sizeof(parameter_t<T>));

  index_t channels, size, width;

  /// The wide rows of a matrix of the given shape (rows x channels).
  explicit wide_rows(const extents<2>& shape)
      : channels(shape[1]), size(shape[0] * shape[1]), width(width_for(shape[1])) {}

  /// Number of elements of a unit.
  index_t unit() const { return unit_rows * width; }
  /// Number of units that cover the matrix.
  index_t units() const { return channels == 0 ? 0 : (size + unit() - 1) / unit(); }
  /// Number of rows of the matrix in a wide row.
  index_t repeats() const { return width / std::max<index_t>(channels, 1); }

  /// Index of the first element of unit number `at`, or of the end of the matrix if it has no such unit.
  index_t start_of(index_t at) const { return std::min(at * unit(), size); }

  /// Completes per-channel values to the width of a wide row: repeats the first `channels` elements of
  /// `values` until all `width` elements are filled.
  void repeat(parameter_t<T>* values) const {
    for (index_t i = channels; i < width; ++i) values[i] = values[i - channels];
  }

  /// Width of a wide row: a multiple of `channels` that is whole vectors and at least four of them, or
  /// `channels` itself if that is more than 16 vectors.
  static index_t width_for(index_t channels) {
    if (channels == 0) return 0;
    // Beyond 16 vectors, the cost of a row's last elements, which fill no vector, does not matter.
    const index_t least = channels > 16 * vector ? channels : std::lcm(channels, vector);
    return least >= 4 * vector ? least : least * ((4 * vector + least - 1) / least);
  }
};

/// Calls f(begin, end), in parallel, for consecutive ranges of elements. Each range consists of whole units
/// and has about 16384 elements, but at least one unit.
template <class T, class F>
void for_unit_chunks(context<device::cpu>& ctx, const wide_rows<T>& rows, F&& f) {
  const index_t units = rows.units(), count = units == 0 ? 1 : std::max<index_t>(1, 16384 / rows.unit());
  ctx.parallel_for((units + count - 1) / count, [&](index_t task, int) {
    f(rows.start_of(task * count), rows.start_of(std::min(units, (task + 1) * count)));
  });
}

}  // namespace detail

/// One bit for each element of a matrix of rows x channels, set if a ReLU passes the gradient of the element.
/// The caller owns the words (usually on the tape), size() of them. On a GPU the bits are in another order:
/// gpu/kernels/elementwise/relu_mask.hpp.
template <class T>
struct relu_mask {
  /// a word of the mask
  using word = std::conditional_t<sizeof(parameter_t<T>) == 4, std::int32_t, std::int64_t>;

  word* words = nullptr;

  /// Whether there is no mask.
  bool is_null() const { return words == nullptr; }

  /// Number of words of the mask of a matrix: about 1 / (8 sizeof(T)) of the number of elements, rounded up
  /// to units (see wide_rows). Matrices of few rows have more words than that.
  static index_t size(const extents<2>& shape) {
    const detail::wide_rows<T> rows(shape);
    return rows.units() * rows.width;
  }

  /// The bit of one element, for masks in the CPU's order. `shape`: shape of the matrix for which the mask
  /// was written.
  bool passes(const extents<2>& shape, index_t row, index_t channel) const {
    const detail::wide_rows<T> rows(shape);
    const index_t at = row * shape[1] + channel, unit = at / rows.unit(), inside = at % rows.unit();
    return (words[unit * rows.width + inside % rows.width] >> (inside / rows.width)) & 1;
  }
};

namespace reference {

/// y_mc = x_mc where the mask bit is set, else 0; with `add`, y_mc += this value.
template <class T>
void masked(const tensor_view<const T, 2>& x, const relu_mask<T>& mask, const tensor_view<T, 2>& y,
            bool add) {
  for (index_t m = 0; m < x.extent(0); ++m) {
    for (index_t c = 0; c < x.extent(1); ++c) {
      const T value = mask.passes(x.shape(), m, c) ? x(m, c) : T{};
      y(m, c) = add ? y(m, c) + value : value;
    }
  }
}

}  // namespace reference

namespace detail {

/// y = x, or with `add` y += x, where the mask bit is set; without `add`, y = 0 elsewhere.
template <class T, class Device>
void masked_pass(context<Device>& ctx, const tensor_view<const T, 2>& x, const relu_mask<T>& mask,
                 const tensor_view<T, 2>& y, bool add) {
  PUFFERFISH_ASSERT(x.shape() == y.shape(), "relu_mask: shapes differ");
  const T* from = x.flat().data();
  T* to = y.flat().data();
  if constexpr (!is_cpu<Device>) {
    elementwise_ops<Device>::masked_pass(ctx, from, mask, to, x.size(), add);
  } else {
    const wide_rows<T> rows(x.shape());
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), passes, masked<T, typename relu_mask<T>::word>);
    for_unit_chunks(ctx, rows, [&](index_t begin, index_t end) {
      kernel(from + begin, mask.words + begin / rows.unit_rows, to + begin, end - begin, rows.width, add);
    });
  }
}

}  // namespace detail

/// y = x where the mask bit is set, else 0. x and y: dense, with the shape for which the mask was written, by
/// batch_norm_apply on the same device; y may be x. Different shapes fail an assertion; a view that is not
/// dense throws shape_error.
template <class T, class Device>
void masked_copy(context<Device>& ctx, const tensor_view<const T, 2>& x, const relu_mask<T>& mask,
                 const tensor_view<T, 2>& y) {
  detail::masked_pass<T>(ctx, x, mask, y, false);
}
PUFFERFISH_SEPARATE_OPERATION(dense, masked_copy);

/// y += x where the mask bit is set. x and y: dense, with the shape for which batch_norm_apply wrote the mask
/// on the same device. Different shapes fail an assertion; a view that is not dense throws shape_error.
template <class T, class Device>
void masked_add(context<Device>& ctx, const tensor_view<const T, 2>& x, const relu_mask<T>& mask,
                const tensor_view<T, 2>& y) {
  detail::masked_pass<T>(ctx, x, mask, y, true);
}
PUFFERFISH_SEPARATE_OPERATION(dense, masked_add);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
