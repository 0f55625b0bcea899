// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the elements of a convolution's patches: the taps of the kernel, which of them are inside of an
/// image, and the element that a thread copies in each step of the sum.

#include <pufferfish/gpu/kernels/conv/conv_axis.hpp>
#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// The patches of a correlation: its input, the axes of this block's outputs, and the elements of its sum,
/// which are numbered (tap row, tap column, channel). Element k of the sum has the channel k % channels of
/// tap k / channels; tap t has the tap row t / columns.taps and the tap column t % columns.taps.
template <class T>
struct gathering {
  const T* in;
  conv_axis rows, columns;
  int channels, depth;
  divider by_channels;

  /// The sum has row taps x column taps x channels elements.
  __device__ gathering(const T* input, const conv_axis& row_axis, const conv_axis& column_axis,
                       int channel_count, const divider& by_channel_count)
      : in(input),
        rows(row_axis),
        columns(column_axis),
        channels(channel_count),
        depth(row_axis.taps * column_axis.taps * channel_count),
        by_channels(by_channel_count) {}

  /// Whether pixel (y, x) is inside of the input image.
  __device__ bool inside(int y, int x) const {
    return static_cast<unsigned>(y) < static_cast<unsigned>(rows.inputs) &&
           static_cast<unsigned>(x) < static_cast<unsigned>(columns.inputs);
  }

  /// The number of neighbouring channels that all taps use before any tap uses another channel; see
  /// step_begin.
  __device__ int span() const {
    constexpr int line = static_cast<int>(128 / sizeof(T));
    return channels > line && channels % line == 0 ? line : channels;
  }

  /// The first element of the sum in a step of `Depth` elements, which is half a cache line of channels. If a
  /// pixel has several lines, all taps use one line before the next one. The pixels of one tap are also
  /// neighbours of other taps, so the L1 cache then has most of them already.
  template <int Depth>
  __device__ int step_begin(int step) const {
    constexpr int line = static_cast<int>(128 / sizeof(T));
    static_assert(line == 2 * Depth);
    if (span() == channels) return step * Depth;
    const int steps = 2 * max(rows.taps * columns.taps, 1), number = step / steps, inside = step % steps;
    return inside / 2 * channels + number * line + inside % 2 * Depth;
  }

  /// An element of the sum: its position relative to the output's first tap.
  struct element {
    int y, x;    ///< in pixels of the input, relative to the output's first tap
    int offset;  ///< in elements of the input, relative to the output's first tap
    int tap_row, tap_column, channel;
  };
  /// Position of element k of the sum.
  __device__ element at(int k) const {
    const int tap = by_channels.quotient(k), channel = by_channels.remainder(k, tap);
    const int tap_row = tap / max(columns.taps, 1), tap_column = tap - tap_row * columns.taps;
    const int y = tap_row * rows.offset_step, x = tap_column * columns.offset_step;
    return {y, x, (y * columns.inputs + x) * channels + channel, tap_row, tap_column, channel};
  }
};

/// Largest number of taps of a kernel, in each direction, whose rows and columns have bits: bit i stands for
/// tap row i, bit most_bit_taps + j for tap column j. Larger kernels are gathered element by element.
inline constexpr int most_bit_taps = 15;
/// Bit of elements after the end of the sum.
inline constexpr unsigned beyond_bit = 1U << (2 * most_bit_taps);

/// Whether the patches of a convolution are copied in vectors of `channels` channels. Requires aligned
/// vectors, a kernel whose taps have bits, and fewer than 2^31 elements of the weight.
template <class T>
inline bool patches_in_vectors(const conv_geometry& g, int channels, const T* in) {
  return whole_vectors<T>(channels, in) && g.kernel_height <= most_bit_taps &&
         g.kernel_width <= most_bit_taps &&
         static_cast<index_t>(g.patch()) * g.out_channels < (index_t{1} << 31);
}

/// The bits of the tap rows and tap columns that are outside of the image for an output whose first tap is at
/// (y, x), together with beyond_bit. A tap is outside if one of its bits is set in the result.
template <class T>
__device__ inline unsigned taps_outside(const gathering<T>& g, int y, int x) {
  unsigned bits = beyond_bit;
#pragma unroll 1
  for (int i = 0; i < g.rows.taps; ++i) {
    if (static_cast<unsigned>(y + i * g.rows.offset_step) >= static_cast<unsigned>(g.rows.inputs)) {
      bits |= 1U << i;
    }
  }
#pragma unroll 1
  for (int i = 0; i < g.columns.taps; ++i) {
    if (static_cast<unsigned>(x + i * g.columns.offset_step) >= static_cast<unsigned>(g.columns.inputs)) {
      bits |= 1U << (most_bit_taps + i);
    }
  }
  return bits;
}

/// An entry of the table of taps in shared memory.
struct alignas(16) tap_place {
  int offset;     ///< elements of the input from an output's first tap to this one
  unsigned bits;  ///< of its row and its column; beyond_bit: after the last tap
  int weight;     ///< elements from the weight's begin to this tap's matrix
};
/// Number of table entries after the last tap. The last step may have elements after the end of the sum, and
/// threads read the entry of one step more.
inline constexpr int spare_taps = 16;

/// Bytes of the table of taps of a block that copies Run elements at a time. Only vectors use the table.
template <int Run>
inline std::size_t tap_bytes(const conv_geometry& g) {
  const int entries = Run > 1 ? g.kernel_height * g.kernel_width + spare_taps : 0;
  return static_cast<std::size_t>(entries) * sizeof(tap_place);
}

/// Writes the table of taps to shared memory; a barrier must follow. `matrix`: elements of a tap's matrix in
/// the weight.
template <int Threads, class T>
__device__ inline void list_taps(tap_place* taps, const gathering<T>& g, int kernel_width, int matrix,
                                 int thread) {
  const int count = g.rows.taps * g.columns.taps;
#pragma unroll 1
  for (int tap = thread; tap < count + spare_taps; tap += Threads) {
    tap_place place{0, beyond_bit, 0};
    if (tap < count) {
      const int row = tap / g.columns.taps, column = tap - row * g.columns.taps;
      const int cell = (g.rows.kernel + row * g.rows.kernel_step) * kernel_width + g.columns.kernel +
                       column * g.columns.kernel_step;
      place.offset =
          (row * g.rows.offset_step * g.columns.inputs + column * g.columns.offset_step) * g.channels;
      place.bits = 1U << row | 1U << (most_bit_taps + column);
      place.weight = cell * matrix;
    }
    taps[tap] = place;
  }
}

/// The element of the sum that a thread copies in each step, in the order of gathering::step_begin. Only the
/// first step divides; afterwards the element advances by constant numbers of taps and channels. The table's
/// entry is loaded one step ahead.
template <class T, int Depth>
class sum_walk {
 public:
  /// Begins at step `step`, `along` elements after the step's first element. `taps`: see list_taps.
  __device__ sum_walk(const gathering<T>& g, const tap_place* taps, int step, int along)
      : taps_(taps), span_(g.span()), jump_(g.channels - span_), depth_(g.depth) {
    const bool lines = span_ != g.channels;
    end_ = lines ? g.rows.taps * g.columns.taps : 1 << 30;
    tap_step_ = Depth / span_;
    channel_step_ = Depth - tap_step_ * span_;
    k_ = g.template step_begin<Depth>(step);
    tap_ = g.by_channels.quotient(k_ + along);
    inside_ = g.by_channels.remainder(k_ + along, tap_);
    first_ = lines ? inside_ / span_ * span_ : 0;
    inside_ -= first_;
    place_ = taps_[tap_];
  }

  /// First element of the sum in the current step.
  __device__ int k() const { return k_; }
  /// Tap of this thread's element.
  __device__ const tap_place& tap() const { return place_; }
  /// Channel of this thread's element.
  __device__ int channel() const { return first_ + inside_; }

  /// Moves to the next step.
  __device__ void advance() {
    k_ += Depth;
    inside_ += channel_step_;
    tap_ += tap_step_;
    if (inside_ >= span_) {
      inside_ -= span_;
      k_ += jump_;
      ++tap_;
    }
    if (tap_ == end_) {
      tap_ = 0;
      first_ += span_;
      k_ += span_ - depth_;
    }
    place_ = taps_[tap_];
  }

 private:
  const tap_place* taps_;
  int span_, jump_, depth_;
  int end_;  // number of taps; after the last tap of a span of channels, the first tap follows
  int tap_step_, channel_step_;  // of one step, without wrapping channels
  int k_, tap_;
  int inside_, first_;  // the channel in its span, and the span's first channel
  tap_place place_;
};

PUFFERFISH_KERNELS_END
