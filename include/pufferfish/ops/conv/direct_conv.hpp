// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: direct convolution, without an im2col matrix. The forward pass and the gradient of the input are
/// both correlations: on each axis, output pixel j reads for each tap the input pixel j * in_step + offset of
/// the tap. Taps that fall on padding are left out, not multiplied by zero.
///
/// A micro-kernel computes a block of output pixels (rows) and output channels (columns). The rows of a block
/// are usually the pixels of a line: in segments under three adjacent taps where segments_fit(), otherwise
/// one column tap at a time. Where lines are short, the rows are one pixel of many images. Input channels are
/// cut into blocks and panels of output channels into groups, so that the current weights stay in the
/// second-level cache.

#include <algorithm>

#include <pufferfish/linalg/gemm/loops.hpp>
#include <pufferfish/ops/conv/conv_blocks.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// The weight of a correlation in the form that the micro-kernels read: for each panel of output channels and
/// each kernel element a matrix [depth][panel]. The weight may also be read from HWIO storage in place; see
/// pack_weight.
template <class T>
struct correlation_weight {
  const T* data;
  index_t depth, columns;  ///< channels to sum over, channels of results
  index_t row;             ///< row stride if the weight is read in place, in elements; 0: packed in panels
  index_t cells;           ///< kernel elements
  index_t lanes;           ///< elements of a vector

  /// Row stride of the matrices of a panel, in elements. A panel is given by its range of vectors.
  index_t panel_row(const range& panel) const { return row > 0 ? row : panel.length() * lanes; }
  /// Elements from the matrix of one kernel element to that of the next.
  index_t cell(const range& panel) const { return depth * panel_row(panel); }
  /// The matrix of a panel for kernel element 0.
  const T* at(const range& panel) const { return data + panel.begin * lanes * (row > 0 ? 1 : depth * cells); }
};

/// Strides of a batch of images, in elements: from image to image, line to line and pixel to pixel.
struct image_steps {
  index_t image, line, pixel;
};

/// The strides of a dense NHWC batch with the given extents.
inline image_steps dense_steps(const extents<4>& shape) {
  return {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3]};
}

/// A correlation over a batch of images. The input may have any strides but contiguous channels; `out` has
/// the strides of the output. For each image and output pixel, output[o] (+)= the sum over taps and input
/// channels i of input[i] * weight[kernel element of the tap][i][o], as tap_axis describes for each axis.
template <class T>
struct correlation {
  using result_type = product_result_t<T>;
  static_assert(sizeof(T) == sizeof(result_type), "one size is used for steps of both");

  tap_axis rows, columns;  ///< the vertical and the horizontal axis
  index_t kernel_width;    ///< kernel elements in a row of the kernel
  const T* input;
  index_t in_channels;
  image_steps in;  ///< strides of the input
  result_type* output;
  index_t out_channels;
  image_steps out;  ///< strides of the output
  const kernel_table<T>* kernels;
  bool in_segments;  ///< segment kernels compute the pixels that whole segments cover
  bool by_images;    ///< the rows of a block are one pixel of many images, not the pixels of a line
  bool add;          ///< add to the output instead of overwriting it
  index_t in_block;  ///< with by_images: stride between blocks of input channels, in elements
  panel_cut panels;  ///< cut of the output channels into panels of vectors
  correlation_weight<T> weight;

  static constexpr index_t size = static_cast<index_t>(sizeof(T));

  /// Computes output lines `lines` of images `images`, all output channels. `taps`: scratch memory for
  /// rows.taps * columns.taps entries. Different threads may compute different lines at the same time.
  void run(const range& images, const range& lines, block_tap<T>* taps) const {
    const index_t depth_block = block_depth(), group = panel_group();
    for (index_t panel = 0; panel < panels.panels; panel += group) {
      const range some{panel, std::min(panels.panels, panel + group)};
      for (index_t depth = 0; depth < in_channels; depth += depth_block) {
        run_block(images, lines, some, {depth, std::min(in_channels, depth + depth_block)}, taps);
      }
    }
  }

  // Number of panels that are computed together, before the next group of panels: so few that their weights
  // for a block of many input channels fit in the second-level cache.
  index_t panel_group() const {
    constexpr index_t cache = index_t{512} << 10, fewest_channels = 96;
    const index_t panel_bytes = weight.cells * panels[0].length() * kernels->lanes * size;
    return std::clamp<index_t>(cache / (panel_bytes * std::min(fewest_channels, in_channels)), 1,
                               panels.panels);
  }

  // Number of input channels in a block: so few that the weights of the block stay in the second-level cache.
  // With by_images its input pixels stay there, too, since each weight is applied to the pixels of many
  // images.
  index_t block_depth() const {
    constexpr index_t cache = index_t{600} << 10, outputs = 512;
    const index_t inputs =
        outputs * rows.inputs * columns.inputs / std::max<index_t>(1, rows.outputs * columns.outputs);
    const index_t columns_out = std::min(out_channels, panel_group() * panels[0].length() * kernels->lanes);
    const index_t bytes = (weight.cells * columns_out + (by_images ? inputs : 0)) * size;
    const index_t most = std::max<index_t>(16, cache / bytes / 16 * 16);
    const index_t blocks = (in_channels + most - 1) / most;
    return std::min(in_channels, ((in_channels + blocks - 1) / blocks + 15) / 16 * 16);
  }

 private:
  // Adds the contribution of the input channels `channels` to the output channels of panels `some`, for the
  // given images and lines. The first block of channels overwrites the output unless `add` is set.
  void run_block(const range& images, const range& lines, const range& some, const range& channels,
                 block_tap<T>* taps) const {
    if (by_images) {
      for (index_t line = lines.begin; line < lines.end; ++line)
        over_images(images, line, some, channels, taps);
      return;
    }
    for (index_t image = images.begin; image < images.end; ++image) {
      for (index_t line = lines.begin; line < lines.end; ++line) over_line(image, line, some, channels, taps);
    }
  }

  // Number of leading pixels of a line that whole segments cover, for panels of every width.
  index_t segment_pixels() const {
    const index_t longest = std::max(kernels->segments[panels[0].length() - 1].rows,
                                     kernels->segments[panels[panels.panels - 1].length() - 1].rows);
    return columns.outputs / longest * longest;
  }

  // Address of channel 0 of output pixel `column` in output line `line`.
  result_type* pixel(index_t image, index_t line, index_t column) const {
    return output + image * out.image + (rows.out_first + line * rows.out_step) * out.line +
           (columns.out_first + column * columns.out_step) * out.pixel;
  }
  // Bytes from one output pixel of a line to the next.
  index_t pixel_step() const { return columns.out_step * out_channels * size; }

  // Address of channel 0 of the input pixel that a row tap and a column tap read for an output pixel. The
  // address is not dereferenced if the pixel is on padding.
  const T* source(index_t image, index_t line, index_t row_tap, index_t column, index_t column_tap) const {
    return input + image * in.image + (line * rows.in_step + rows.tap_offset(row_tap)) * in.line +
           (column * columns.in_step + columns.tap_offset(column_tap)) * in.pixel;
  }

  // Number of the kernel element of a row tap and a column tap.
  index_t kernel_cell(index_t row_tap, index_t column_tap) const {
    return rows.tap_kernel(row_tap) * kernel_width + columns.tap_kernel(column_tap);
  }

  // The row taps that read a line of the image, not padding, for output line `line`. These taps are
  // consecutive, since offsets ascend.
  range valid_rows(index_t line) const {
    range result{0, 0};
    for (index_t tap = 0; tap < rows.taps; ++tap) {
      if (!rows.meets(tap, line)) continue;
      if (result.end == 0) result.begin = tap;
      result.end = tap + 1;
    }
    return result;
  }

  // Calls run(block, count) to compute `count` rows of a block for one panel. If the output channels end
  // before the last vector of the last panel, the block is clipped (run_clipped).
  template <class Run>
  void run_panel(block_arguments<T>& block, const range& panel, index_t count, Run&& run) const {
    run_clipped(block, std::min(panel.length() * kernels->lanes, out_channels - panel.begin * kernels->lanes),
                panel.length() * kernels->lanes, count, run);
  }

  // True if a block of input channels overwrites the output; false if it adds to the output.
  bool overwrites(const range& channels) const { return channels.begin == 0 && !add; }

  // Sets all channels of `count` output pixels, `step` bytes apart, to zero.
  void zero(result_type* first, index_t count, index_t step) const {
    for (index_t i = 0; i < count; ++i) std::fill_n(moved(first, i * step), out_channels, result_type{});
  }

  // Computes one output line for all given images, pixel by pixel. The rows of a block are the same pixel of
  // the images.
  void over_images(const range& images, index_t line, const range& some, const range& channels,
                   block_tap<T>* taps) const {
    const range row_taps = valid_rows(line);
    for (index_t column = 0; column < columns.outputs; ++column) {
      result_type* result = pixel(images.begin, line, column);
      for (index_t panel = some.begin; panel < some.end; ++panel) {
        const range vectors = panels[panel];
        block_tap<T>* end = taps;
        for (index_t ky = row_taps.begin; ky < row_taps.end; ++ky) {
          for (index_t kx = 0; kx < columns.taps; ++kx) {
            if (!columns.meets(kx, column)) continue;
            *end++ = {source(images.begin, line, ky, column, kx) + channels.begin / block_depth() * in_block,
                      weight_at(vectors, ky, kx, channels)};
          }
        }
        if (end == taps) {
          if (panel == 0 && overwrites(channels)) zero(result, images.length(), out.image * size);
          continue;
        }
        block_arguments<T> block = block_for(taps, end, vectors, channels);
        // During the computation the kernel prefetches the weights of the next block of input channels, those
        // of one kernel element with each pixel.
        const index_t cell = (line * columns.outputs + column) % weight.cells;
        block.prefetch =
            weight.at(vectors) + cell * weight.cell(vectors) + channels.end * weight.panel_row(vectors);
        block.prefetch_step = std::min<index_t>(
            64, channels.length() * block.right_step / ((end - taps) * channels.length()) + 1);
        block.row_step = in.image * size;
        block.result = result + vectors.begin * kernels->lanes;
        block.result_step = out.image * size;
        run_panel(block, vectors, images.length(), [&](block_arguments<T>& b, index_t count) {
          run_rows(kernels->strided[vectors.length() - 1], b, count);
        });
      }
    }
  }

  // Computes one output line of one image. The rows of a block are the pixels of the line.
  void over_line(index_t image, index_t line, const range& some, const range& channels,
                 block_tap<T>* taps) const {
    const range row_taps = valid_rows(line);
    if (row_taps.length() == 0 || columns.taps == 0) {
      if (some.begin == 0 && overwrites(channels)) zero(pixel(image, line, 0), columns.outputs, pixel_step());
      return;
    }
    if (some.begin == 0 && overwrites(channels) && line + 1 < rows.outputs) {
      pufferfish::detail::prefetch_block(pixel(image, line + 1, 0), columns.out_step * out_channels,
                                         columns.outputs, out_channels);
    }
    index_t done = 0;
    if (in_segments) {
      done = segment_pixels();
      if (done > 0) segments(image, line, row_taps, done, some, channels, taps);
    }
    if (done < columns.outputs) {
      by_column_taps(image, line, row_taps, {done, columns.outputs}, some, channels, taps);
    }
  }

  // Computes output pixels 0 .. end - 1 of a line in whole segments. A segment kernel applies three adjacent
  // column taps to all its pixels at once. Its variants leave out a tap that is on padding at the left or the
  // right end of the line.
  void segments(index_t image, index_t line, const range& row_taps, index_t end, const range& some,
                const range& channels, block_tap<T>* taps) const {
    for (index_t panel = some.begin; panel < some.end; ++panel) {
      const range vectors = panels[panel];
      const auto& kernel = kernels->segments[vectors.length() - 1];
      block_tap<T>* last = taps;
      for (index_t ky = row_taps.begin; ky < row_taps.end; ++ky) {
        *last++ = {source(image, line, ky, 0, 1) + channels.begin, weight_at(vectors, ky, 0, channels)};
      }
      block_arguments<T> block = block_for(taps, last, vectors, channels);
      block.row_step = in.pixel * size;
      block.depth_step = -block.row_step;
      block.column_step = columns.kernel_step * weight.cell(vectors) * size;
      block.result_step = pixel_step();
      // During the computation the kernel prefetches data of the next line: with the first panel the last
      // input line of the kernel, with the other panels the output line.
      const index_t pieces = end / kernel.rows, steps = row_taps.length() * channels.length();
      const index_t bytes =
          (panel == 0 ? in.line : out.line / std::max<index_t>(1, panels.panels - 1)) * size;
      const void* next = source(image, line, rows.taps - 1, 0, 0) + in.line;
      if (panel > 0) next = pixel(image, line, 0) + out.line + (panel - 1) * bytes / size;
      block.prefetch_step = bytes / (pieces * steps) + 1;
      for (index_t column = 0; column < end; column += kernel.rows) {
        block.prefetch =
            static_cast<const std::byte*>(next) + column / kernel.rows * steps * block.prefetch_step;
        const bool left = column + columns.offset < 0;
        const bool right = column + kernel.rows - 1 + columns.tap_offset(2) >= columns.inputs;
        block.left_shift = column * in.pixel * size;
        block.result = pixel(image, line, column) + vectors.begin * kernels->lanes;
        run_panel(block, vectors, kernel.rows, [&](const block_arguments<T>& b, index_t) {
          kernel.run[(left ? 1 : 0) + (right ? 2 : 0)](b);
        });
      }
    }
  }

  // Computes the output pixels `pixels` of a line one column tap at a time, with all row taps of the column
  // at once, over the pixels where the column tap is not on padding. A tap that covers all pixels is computed
  // first, since the first tap overwrites the output.
  void by_column_taps(index_t image, index_t line, const range& row_taps, const range& pixels,
                      const range& some, const range& channels, block_tap<T>* taps) const {
    index_t first = 0;
    while (first < columns.taps && !columns.valid(first).contains(pixels)) ++first;
    const bool none = first == columns.taps;
    if (none) {
      first = 0;
      if (some.begin == 0 && overwrites(channels)) {
        zero(pixel(image, line, pixels.begin), pixels.length(), pixel_step());
      }
    }
    for (index_t panel = some.begin; panel < some.end; ++panel) {
      const range vectors = panels[panel];
      for (index_t i = 0; i < columns.taps; ++i) {
        const index_t kx = (first + i) % columns.taps;
        const range valid = columns.valid(kx);
        const range part{std::max(pixels.begin, valid.begin), std::min(pixels.end, valid.end)};
        if (part.length() <= 0) continue;
        block_tap<T>* last = taps;
        for (index_t ky = row_taps.begin; ky < row_taps.end; ++ky) {
          *last++ = {source(image, line, ky, part.begin, kx) + channels.begin,
                     weight_at(vectors, ky, kx, channels)};
        }
        block_arguments<T> block = block_for(taps, last, vectors, channels);
        block.row_step = columns.in_step * in.pixel * size;
        block.result = pixel(image, line, part.begin) + vectors.begin * kernels->lanes;
        block.result_step = pixel_step();
        block.accumulate = block.accumulate != 0 || i > 0 || none ? 1 : 0;
        // The kernel prefetches a part of the input lines that the next output line needs: one part with each
        // tap and panel.
        const index_t bytes = rows.in_step * in.line * size / (columns.taps * panels.panels);
        block.prefetch =
            moved(source(image, line, rows.taps - 1, 0, 0) + in.line, (panel * columns.taps + i) * bytes);
        block.prefetch_step = std::min<index_t>(64, bytes / (row_taps.length() * channels.length()) + 1);
        run_panel(block, vectors, part.length(), [&](block_arguments<T>& b, index_t count) {
          run_rows(kernels->strided[vectors.length() - 1], b, count);
        });
      }
    }
  }

  // Address of the weights of a panel for a row tap, a column tap and a block of input channels.
  const T* weight_at(const range& vectors, index_t ky, index_t kx, const range& channels) const {
    return weight.at(vectors) + kernel_cell(ky, kx) * weight.cell(vectors) +
           channels.begin * weight.panel_row(vectors);
  }

  // The arguments of a micro-kernel that are equal for all kinds of blocks. The caller sets the strides of
  // rows and the result.
  block_arguments<T> block_for(const block_tap<T>* begin, const block_tap<T>* end, const range& vectors,
                               const range& channels) const {
    block_arguments<T> block{};
    block.taps = begin;
    block.taps_end = end;
    block.depth = channels.length();
    block.depth_step = size;
    block.right_step = weight.panel_row(vectors) * size;
    block.accumulate = overwrites(channels) ? 0 : 1;
    return block;
  }
};

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
