// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the gradient of a convolution's weight for few input channels, such as the three channels of a
/// network's first layer. A separate product for each kernel element would have as many rows as there are
/// input channels, and three rows fill an eighth of a micro-kernel's block. One product is therefore computed
/// whose rows are the channels of all kernel elements: 27 rows for a 3x3 kernel and three channels.
///
/// For each line of output pixels, the input lines under the kernel are copied so that the channels of all
/// kernel rows in one column are contiguous: [column][kernel row][channel], with zeros for padding. The patch
/// of an output pixel is then a contiguous part of the copy, and the patches of adjacent output pixels
/// overlap. The copy has kernel height * channels elements for each input column, a third of an im2col matrix
/// for a 3x3 kernel.

#include <algorithm>

#include <pufferfish/ops/conv/conv_blocks.hpp>
#include <pufferfish/ops/conv/conv_shape.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// True if thin_backward_weight applies and is faster than slabs (direct_conv_weight.hpp): at most 4 input
/// channels, and a kernel more than one column wide without horizontal dilation.
inline bool is_thin(const conv_shape& shape) {
  constexpr index_t most_channels = 4;
  return shape.in_channels <= most_channels && shape.kernel.width > 1 && shape.dilation.width == 1;
}

/// Computes the weight gradient of a shape with is_thin(), one band of output lines after another (algorithm:
/// see the top of the file).
template <class T>
struct thin_gradient {
  conv_shape shape;
  tensor_view<const T, 4> x, dy;
  const kernel_table<T>* kernels;

  static constexpr index_t size = static_cast<index_t>(sizeof(T));

  /// Number of elements in one column of the copy.
  index_t column_size() const { return shape.kernel.height * shape.in_channels; }
  /// Number of columns in the copy for one output line.
  index_t line_columns() const { return (dy.extent(2) - 1) * shape.stride.width + shape.kernel.width; }
  /// Number of elements in the copy for one output line, with space for reading past the last row of a block.
  index_t line_size() const { return (line_columns() * column_size() + row_step - 1 + 15) / 16 * 16; }
  /// Number of rows of the sum, [kernel column][kernel row][channel], rounded up to a multiple of row_step.
  index_t rows() const { return (shape.patch() + row_step - 1) / row_step * row_step; }
  /// Number of columns of the sum: the output channels, rounded up to whole vectors.
  index_t columns() const {
    return (shape.out_channels + kernels->lanes - 1) / kernels->lanes * kernels->lanes;
  }
  /// True if gradients are copied because the output channels are not whole vectors.
  bool copies_gradient() const { return columns() != shape.out_channels; }

  /// Number of output lines in a band: about 128 pixels, so that the cost of reading and writing the sum is
  /// small.
  index_t band() const { return std::clamp<index_t>(128 / dy.extent(2), 1, 16); }
  /// Elements of `scratch` that run() needs.
  index_t scratch_size() const {
    return band() * (line_size() + (copies_gradient() ? dy.extent(2) * columns() : 0));
  }

  /// sum += the contribution of output lines `lines`, which are numbered through all images. `sum`: rows() x
  /// columns(); `taps`: scratch memory for band() entries.
  void run(const range& lines, T* sum, T* scratch, block_tap<T>* taps) const {
    const index_t pixels = dy.extent(2);
    T* const gradients = scratch + band() * line_size();
    for (index_t first = lines.begin; first < lines.end; first += band()) {
      const index_t count = std::min(band(), lines.end - first);
      for (index_t i = 0; i < count; ++i) {
        const T* gradient = dy.data() + (first + i) * pixels * shape.out_channels;
        T* const line = scratch + i * line_size();
        copy_line(first + i, line);
        if (copies_gradient()) {
          gradient = copy_gradient(gradient, gradients + i * pixels * columns());
        }
        taps[i] = {line, gradient};
      }
      multiply(taps, count, sum);
    }
  }

 private:
  // The rows of the sum are rounded up to a multiple of this number, so that blocks of rows come out even.
  static constexpr index_t row_step = 4;

  // sum += the products of `count` lines: the copies in `taps` times the gradients in `taps`.
  void multiply(const block_tap<T>* taps, index_t count, T* sum) const {
    const panel_cut panels(columns() / kernels->lanes, kernels->widest_adjacent);
    const index_t right_columns = copies_gradient() ? columns() : shape.out_channels;
    for (index_t panel = 0; panel < panels.panels; ++panel) {
      const index_t column = panels[panel].begin * kernels->lanes;
      block_arguments<T> block{};
      block.taps = taps;
      block.taps_end = taps + count;
      block.depth = dy.extent(2);
      block.row_step = size;
      block.depth_step = shape.stride.width * column_size() * size;
      block.right_step = right_columns * size;
      block.right_shift = column * size;
      block.result = sum + column;
      block.result_step = columns() * size;
      block.accumulate = 1;
      run_rows(kernels->adjacent[panels[panel].length() - 1], block, rows());
    }
  }

  // Copies the input lines under the kernel for output line `line` to `to`, [column][kernel row][channel].
  void copy_line(index_t line, T* to) const {
    const index_t image = line / dy.extent(1), row = line % dy.extent(1);
    std::fill(to + line_columns() * column_size(), to + line_size(), T{});
    for (index_t ky = 0; ky < shape.kernel.height; ++ky, to += shape.in_channels) {
      const index_t in_row = row * shape.stride.height - shape.padding.height + ky * shape.dilation.height;
      const bool inside = in_row >= 0 && in_row < x.extent(1);
      const T* from = x.data() + (image * x.extent(1) + (inside ? in_row : 0)) * x.extent(2) * x.extent(3);
      switch (shape.in_channels) {  // constant numbers of channels are copied without a loop
        case 1:
          copy_row<1>(from, inside, to);
          break;
        case 2:
          copy_row<2>(from, inside, to);
          break;
        case 3:
          copy_row<3>(from, inside, to);
          break;
        default:
          copy_row<4>(from, inside, to);
      }
    }
  }

  // Copies one input line, one kernel row of the copy, column by column. Padding becomes zeros; with inside =
  // false, for a line outside the image, all columns do.
  template <index_t Channels>
  void copy_row(const T* from, bool inside, T* to) const {
    const index_t all = line_columns(), step = column_size(), width = inside ? x.extent(2) : 0;
    const index_t begin = std::min(all, shape.padding.width), end = std::clamp(begin + width, begin, all);
    for (index_t j = 0; j < begin; ++j) std::fill_n(to + j * step, Channels, T{});
    T* at = to + begin * step;
    for (index_t j = begin; j < end; ++j, at += step, from += Channels) {
      for (index_t c = 0; c < Channels; ++c) at[c] = from[c];
    }
    for (index_t j = end; j < all; ++j) std::fill_n(to + j * step, Channels, T{});
  }

  // Copies the gradients of a line to `to`, with zeros after the output channels up to whole vectors. Returns
  // `to`.
  const T* copy_gradient(const T* from, T* to) const {
    T* at = to;
    for (index_t i = 0; i < dy.extent(2); ++i, from += shape.out_channels, at += columns()) {
      std::fill(std::copy_n(from, shape.out_channels, at), at + columns(), T{});
    }
    return to;
  }
};

/// Gradient of the weight of a shape with is_thin() and one group (formula: reference::conv_backward_weight).
/// dw is overwritten or, with `accumulate`, added to. The output lines are cut into up to 16 splits whose
/// sums are added in order; the cut depends on shapes alone.
template <class T>
void thin_backward_weight(context<device::cpu>& ctx, const conv_shape& shape,
                          const tensor_view<const T, 4>& x, const tensor_view<const T, 4>& dy, T* dw,
                          bool accumulate) {
  const thin_gradient<T> work{shape, x, dy, &conv_kernels<T>()};
  const index_t lines = dy.extent(0) * dy.extent(1), sum_size = work.rows() * work.columns();
  const index_t splits = std::clamp<index_t>(lines * dy.extent(2) / 512, 1, 16);
  scratch_frame frame(ctx.scratch());
  T* sums = frame.take<T>(splits * sum_size);
  T* scratch = frame.take<T>(work.scratch_size() * ctx.threads());
  auto* taps = frame.take<block_tap<T>>(work.band() * ctx.threads());
  ctx.parallel_for(splits, [&](index_t split, int worker) {
    T* sum = sums + split * sum_size;
    std::fill_n(sum, sum_size, T{});
    work.run({lines * split / splits, lines * (split + 1) / splits}, sum,
             scratch + worker * work.scratch_size(), taps + worker * work.band());
  });
  const index_t height = shape.kernel.height, width = shape.kernel.width, in = shape.in_channels,
                out = shape.out_channels;
  for (index_t row = 0; row < height * width * in; ++row, dw += out) {
    const index_t ky = row / (width * in), kx = row / in % width, c = row % in;
    const T* from = sums + ((kx * height + ky) * in + c) * work.columns();
    if (!accumulate) std::fill_n(dw, out, T{});
    for (index_t split = 0; split < splits; ++split, from += sum_size) {
      for (index_t o = 0; o < out; ++o) dw[o] += from[o];
    }
  }
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
