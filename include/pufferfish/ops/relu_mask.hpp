// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `relu_mask`: which elements of a ReLU's input were positive, a bit each, so that a backward pass need not
/// read an activation to know. How passes over a matrix are cut so that the bits can be written in vectors.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>

#include <pufferfish/ops/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace detail {

/// How passes see a dense matrix of rows x channels: as wide rows of `width` elements, several rows side by
/// side where that makes whole vectors of few or odd channels; values a channel are repeated to that width.
/// Wide rows come in units: as many as a word of a mask has bits.
template <class T>
struct wide_rows {
  static constexpr index_t vector = 64 / static_cast<index_t>(sizeof(T));  // elements of the widest
  static constexpr index_t unit_rows = 8 * static_cast<index_t>(sizeof(T));

  index_t channels, size, width;

  explicit wide_rows(const extents<2>& shape)
      : channels(shape[1]), size(shape[0] * shape[1]), width(width_for(shape[1])) {}

  index_t unit() const { return unit_rows * width; }
  index_t units() const { return channels == 0 ? 0 : (size + unit() - 1) / unit(); }
  index_t repeats() const { return width / std::max<index_t>(channels, 1); }

  /// First and one past the last element of units `begin` .. `end` - 1.
  index_t start_of(index_t at) const { return std::min(at * unit(), size); }

  /// Values a channel, side by side until they fill `width`.
  void repeat(T* values) const {
    for (index_t i = channels; i < width; ++i) values[i] = values[i - channels];
  }

  static index_t width_for(index_t channels) {
    if (channels == 0) return 0;
    // Beyond 16 vectors, what a row's last elements cost outside of vectors does not matter.
    const index_t least = channels > 16 * vector ? channels : std::lcm(channels, vector);
    return least >= 4 * vector ? least : least * ((4 * vector + least - 1) / least);
  }
};

/// Calls f(begin, end) for consecutive units that hold about a chunk of elements.
template <class T, class F>
void for_unit_chunks(context<device::cpu>& ctx, const wide_rows<T>& rows, F&& f) {
  const index_t units = rows.units(), count = units == 0 ? 1 : std::max<index_t>(1, 16384 / rows.unit());
  ctx.parallel_for((units + count - 1) / count, [&](index_t task, int) {
    f(rows.start_of(task * count), rows.start_of(std::min(units, (task + 1) * count)));
  });
}

}  // namespace detail

/// One bit for each element of a matrix of rows x channels: whether it passes a ReLU's gradient. A view of
/// words that the caller owns (on the tape, usually). On a device the bits lie in another order:
/// gpu/kernels/relu_mask.hpp.
template <class T>
struct relu_mask {
  using word = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;

  word* words = nullptr;

  bool is_null() const { return words == nullptr; }

  /// How many words the mask of a matrix has.
  static index_t size(const extents<2>& shape) {
    const detail::wide_rows<T> rows(shape);
    return rows.units() * rows.width;
  }

  /// The bit of one element, of words on the CPU.
  bool passes(const extents<2>& shape, index_t row, index_t channel) const {
    const detail::wide_rows<T> rows(shape);
    const index_t at = row * shape[1] + channel, unit = at / rows.unit(), inside = at % rows.unit();
    return (words[unit * rows.width + inside % rows.width] >> (inside / rows.width)) & 1;
  }
};

namespace reference {

/// y_mc = x_mc where the mask has a bit, else 0; with `add`, y_mc += that.
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

template <class T>
void masked_pass(context<device::cpu>& ctx, const tensor_view<const T, 2>& x, const relu_mask<T>& mask,
                 const tensor_view<T, 2>& y, bool add) {
  PUFFERFISH_ASSERT(x.shape() == y.shape(), "relu_mask: shapes differ");
  const wide_rows<T> rows(x.shape());
  const T* from = x.flat().data();
  T* to = y.flat().data();
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), passes, masked<T, typename relu_mask<T>::word>);
  for_unit_chunks(ctx, rows, [&](index_t begin, index_t end) {
    kernel(from + begin, mask.words + begin / rows.unit_rows, to + begin, end - begin, rows.width, add);
  });
}

}  // namespace detail

/// y = x where the mask has a bit, else 0. Dense matrices of one shape, that of the mask; y may be x.
template <class T>
void masked_copy(context<device::cpu>& ctx, const tensor_view<const T, 2>& x, const relu_mask<T>& mask,
                 const tensor_view<T, 2>& y) {
  detail::masked_pass<T>(ctx, x, mask, y, false);
}
/// The device's form: <pufferfish/gpu.hpp>.
template <class T>
void masked_copy(context<device::gpu>& ctx, const tensor_view<const T, 2>& x, const relu_mask<T>& mask,
                 const tensor_view<T, 2>& y);

/// y += x where the mask has a bit. Shapes as masked_copy.
template <class T>
void masked_add(context<device::cpu>& ctx, const tensor_view<const T, 2>& x, const relu_mask<T>& mask,
                const tensor_view<T, 2>& y) {
  detail::masked_pass<T>(ctx, x, mask, y, true);
}
/// The device's form: <pufferfish/gpu.hpp>.
template <class T>
void masked_add(context<device::gpu>& ctx, const tensor_view<const T, 2>& x, const relu_mask<T>& mask,
                const tensor_view<T, 2>& y);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
