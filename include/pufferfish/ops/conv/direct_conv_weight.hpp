// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the gradient of a convolution's weight, directly from the images. For a kernel element (ky, kx)
/// the gradient is the matrix product X^T dY over all output pixels where that element is not on padding: dY
/// are the gradients of these pixels [pixels x out], X the input pixels that the element multiplies [pixels x
/// in].
///
/// Bfloat16 is multiplied in pairs of adjacent pixels (bf16_pair in linalg/gemm/micro_kernels.hpp).
///
/// A task computes the contribution of some images or lines to the gradient of some input channels. The task
/// packs the input and the gradient of one chunk of output pixels after another into slabs (slabs.hpp); the
/// products of all kernel elements read the same slabs. Tasks sum in T (pairs: in float). Sums of tasks that
/// share elements of the weight are added in order.

#include <algorithm>

#include <pufferfish/ops/conv/conv_blocks.hpp>
#include <pufferfish/ops/conv/conv_shape.hpp>
#include <pufferfish/ops/conv/slabs.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// The weight gradient as products over chunks of output pixels. Rows of a micro-kernel's block are input
/// channels, its vectors output channels. If there are too few output channels for full vectors, the two are
/// exchanged (`swapped`), and the sum is stored [cells][out][in] instead of [cells][in][out].
template <class T>
struct weight_gradient {
  using element = slab_element_t<T>;  // type of the elements of x and dy
  using result_type = product_result_t<T>;

  conv_shape shape;
  tap_axis rows, columns;
  const element* input;     ///< x, dense NHWC
  const element* gradient;  ///< dy, dense NHWC
  const kernel_table<T>* kernels;
  bool swapped;                ///< output channels are the rows of blocks, input channels the vectors
  const range* valid_rows;     ///< for each row tap, the output lines where the tap is not on padding
  const range* valid_columns;  ///< for each column tap, the output columns where the tap is not on padding

  static constexpr index_t size = static_cast<index_t>(sizeof(T));
  static constexpr index_t element_size = static_cast<index_t>(sizeof(element));
  // Channels in a slab of the operand that provides rows: a multiple of the rows of every important kernel.
  static constexpr index_t block = 24;
  // Output pixels of a chunk, which are packed together, and of a part of a chunk. The products of a part are
  // computed while a slab of each operand is in the first-level cache.
  static constexpr index_t chunk = 128;
  static constexpr index_t chunk_part = 128;

  weight_gradient(const conv_shape& of, const tensor_view<const element, 4>& x,
                  const tensor_view<const element, 4>& dy, scratch_frame& frame)
      : shape(of),
        rows(forward_axis(x.extent(1), dy.extent(1), of.kernel.height, of.stride.height, of.padding.height,
                          of.dilation.height)),
        columns(forward_axis(x.extent(2), dy.extent(2), of.kernel.width, of.stride.width, of.padding.width,
                             of.dilation.width)),
        input(x.data()),
        gradient(dy.data()),
        kernels(&conv_kernels<T>()),
        swapped(of.out_channels <= kernels->lanes && of.in_channels > of.out_channels),
        valid_rows(ranges_of(rows, frame)),
        valid_columns(ranges_of(columns, frame)) {}

  index_t cells() const { return rows.taps * columns.taps; }

  /// Elements of `scratch` and entries of `taps` that run() needs for at most `channels` input channels.
  index_t scratch_size(index_t channels) const {
    return slabs<T>::size(chunk_inputs(), channels, input_width(channels)) +
           slabs<T>::size(chunk_outputs(), shape.out_channels, output_width());
  }
  index_t scratch_taps() const {
    return cells() * std::max(part_lines(rows.outputs), part_images(rows.outputs) * rows.outputs);
  }

  /// sum += the products over the given images and output lines, for the given input channels.
  void run(const range& images, const range& lines, const range& channels, result_type* sum, T* scratch,
           block_tap<T>* taps) const {
    const slabs<T> inputs{scratch, chunk_inputs(), input_width(channels.length()), columns.inputs,
                          columns.in_step};
    const slabs<T> outputs{scratch + slabs<T>::size(inputs.rows, channels.length(), inputs.width),
                           chunk_outputs(), output_width(), columns.outputs, 1};
    for (index_t image = images.begin; image < images.end; image += chunk_images()) {
      for (index_t line = lines.begin; line < lines.end; line += band()) {
        over_chunk({image, std::min(images.end, image + chunk_images())},
                   {line, std::min(lines.end, line + band())}, channels, inputs, outputs, sum, taps);
      }
    }
  }

 private:
  static const range* ranges_of(const tap_axis& axis, scratch_frame& frame) {
    range* ranges = frame.take<range>(axis.taps);
    for (index_t tap = 0; tap < axis.taps; ++tap) ranges[tap] = axis.valid(tap);
    return ranges;
  }
  // Number of elements in the widest of the panels into which `channels` channels are cut.
  index_t vector_width(index_t channels) const {
    const panel_cut panels((channels + kernels->lanes - 1) / kernels->lanes, kernels->widest_adjacent);
    index_t widest = 0;
    for (index_t i = 0; i < panels.panels; ++i) widest = std::max(widest, panels[i].length());
    return widest * kernels->lanes;
  }
  index_t input_width(index_t channels) const { return swapped ? vector_width(channels) : block; }
  index_t output_width() const { return swapped ? block : vector_width(shape.out_channels); }

  // A chunk consists of whole images or of a band of lines of one image, and so does a part of a chunk.
  index_t band() const { return std::clamp<index_t>(chunk / columns.outputs, 1, rows.outputs); }
  index_t chunk_images() const { return std::max<index_t>(1, chunk / (columns.outputs * rows.outputs)); }
  index_t chunk_outputs() const { return chunk_images() * band() * columns.outputs; }
  // Largest number of input pixels that a chunk depends on: images * lines * pixels of a line.
  index_t chunk_inputs() const {
    const index_t lines = (band() - 1) * rows.in_step + (rows.taps - 1) * rows.offset_step + 1;
    return chunk_images() * std::min(rows.inputs, lines) * columns.inputs;
  }
  // Lines and images of a part of a chunk that has `lines` lines of each image.
  index_t part_lines(index_t lines) const {
    return std::clamp<index_t>(chunk_part / columns.outputs, 1, lines);
  }
  index_t part_images(index_t lines) const {
    return std::max<index_t>(1, chunk_part / (columns.outputs * lines));
  }

  // Prefetches the next chunk while a part is multiplied: each call of a kernel prefetches one cache line of
  // each pixel in the corresponding part of the next chunk.
  struct prefetcher {
    const element* input;
    const element* gradient;
    index_t input_step, gradient_step, input_lines, lines;
    index_t call = 0;

    void use(block_arguments<T>& arguments) {
      constexpr index_t line = 64 / element_size;
      const bool of_input = call < input_lines;
      arguments.prefetch = nullptr;
      if (call < lines)
        arguments.prefetch = of_input ? input + call * line : gradient + (call - input_lines) * line;
      arguments.prefetch_step = call >= lines ? 0 : of_input ? input_step : gradient_step;
      ++call;
    }
  };

  // The prefetcher for part (`images`, `part`) of the chunk (`chunk_images_`, `lines`). Its addresses in the
  // next chunk may be after the last image, since any address may be prefetched.
  prefetcher next_part(const range& images, const range& part, const range& chunk_images_, const range& lines,
                       const range& channels) const {
    const bool banded = lines.length() < rows.outputs;
    const index_t image = chunk_images_.begin + images.begin + (banded ? 0 : chunk_images_.length());
    const index_t line = part.begin + (banded ? lines.length() : 0);
    const index_t in_lines = (channels.length() * element_size + 63) / 64,
                  out_lines = (shape.out_channels * element_size + 63) / 64;
    return {input + (image * rows.inputs + line * rows.in_step) * columns.inputs * shape.in_channels +
                channels.begin,
            gradient + (image * rows.outputs + line) * columns.outputs * shape.out_channels,
            columns.in_step * shape.in_channels * element_size,
            shape.out_channels * element_size,
            in_lines,
            in_lines + out_lines};
  }

  // The input lines that the output lines `lines` depend on.
  range seen(const range& lines) const {
    const index_t last = (lines.end - 1) * rows.in_step + rows.tap_offset(rows.taps - 1);
    return {std::clamp<index_t>(lines.begin * rows.in_step + rows.offset, 0, rows.inputs),
            std::clamp<index_t>(last + 1, 0, rows.inputs)};
  }

  // sum += the products over one chunk: packs the input and the gradient of the chunk into slabs, then
  // multiplies part by part. Lines of padding are not packed.
  void over_chunk(const range& images, const range& lines, const range& channels, const slabs<T>& inputs,
                  const slabs<T>& outputs, result_type* sum, block_tap<T>* taps) const {
    const range in_lines = seen(lines);
    if (in_lines.length() <= 0) return;
    const index_t in_pixels = in_lines.length() * columns.inputs,
                  out_pixels = lines.length() * columns.outputs;
    for (index_t i = 0; i < images.length(); ++i) {
      const index_t image = images.begin + i;
      inputs.fill(i * in_pixels, in_pixels,
                  input + (image * rows.inputs + in_lines.begin) * columns.inputs * shape.in_channels +
                      channels.begin,
                  shape.in_channels, channels.length());
      outputs.fill(i * out_pixels, out_pixels,
                   gradient + (image * rows.outputs + lines.begin) * columns.outputs * shape.out_channels,
                   shape.out_channels, shape.out_channels);
    }
    const index_t step = part_lines(lines.length()), image_step = part_images(lines.length());
    for (index_t image = 0; image < images.length(); image += image_step) {
      for (index_t line = lines.begin; line < lines.end; line += step) {
        const range part_images{image, std::min(images.length(), image + image_step)};
        const range part_lines{line, std::min(lines.end, line + step)};
        prefetcher ahead = next_part(part_images, part_lines, images, lines, channels);
        over_part(part_images, part_lines, lines, in_lines, channels, inputs, outputs, ahead, sum, taps);
      }
    }
  }

  // sum += the products over one part. `images` are numbered from the first image of the chunk; `lines` and
  // `in_lines` are the output lines and input lines that are packed for each image.
  void over_part(const range& images, const range& part, const range& lines, const range& in_lines,
                 const range& channels, const slabs<T>& inputs, const slabs<T>& outputs, prefetcher& ahead,
                 result_type* sum, block_tap<T>* taps) const {
    const index_t most = images.length() * part.length();
    for (index_t cell = 0; cell < cells(); ++cell) {
      cell_taps(cell, images, part, lines, in_lines, inputs, outputs, taps + cell * most);
    }
    const slabs<T>& left = swapped ? outputs : inputs;
    const slabs<T>& right = swapped ? inputs : outputs;
    const index_t left_channels = swapped ? shape.out_channels : channels.length();
    const index_t right_channels = swapped ? channels.length() : shape.out_channels;
    const index_t left_all = swapped ? shape.out_channels : shape.in_channels;
    const index_t right_all = swapped ? shape.in_channels : shape.out_channels;
    const index_t left_first = swapped ? 0 : channels.begin, right_first = swapped ? channels.begin : 0;
    block_arguments<T> arguments{};
    arguments.row_step = size;
    arguments.depth_step = left.width * left.reach * slab_pixels<T> * size;
    arguments.right_step = right.width * right.reach * slab_pixels<T> * size;
    arguments.result_step = right_all * static_cast<index_t>(sizeof(result_type));
    arguments.accumulate = 1;
    for (index_t row = 0; row < left_channels; row += left.width) {
      for (index_t column = 0; column < right_channels; column += right.width) {
        arguments.right_shift = column * right.rows * size;
        const index_t width = std::min(right.width, right_channels - column);
        const index_t vectors = (width + kernels->lanes - 1) / kernels->lanes;
        const auto& list = kernels->adjacent[vectors - 1];
        for (index_t cell = 0; cell < cells(); ++cell) {
          const index_t count = tap_count(cell, images, part);
          if (count == 0) continue;
          arguments.taps = taps + cell * most;
          arguments.taps_end = arguments.taps + count;
          arguments.depth =
              (valid_columns[cell % columns.taps].length() + slab_pixels<T> - 1) / slab_pixels<T>;
          ahead.use(arguments);
          arguments.left_shift = row * left.rows * size;
          arguments.result = sum + (cell * left_all + left_first + row) * right_all + right_first + column;
          run_clipped(arguments, width, vectors * kernels->lanes, std::min(left.width, left_channels - row),
                      [&](block_arguments<T>& b, index_t n) { run_rows(list, b, n); });
        }
      }
    }
  }

  // Lines of a part where kernel element `cell` is not on padding, and the number of its taps in the part.
  range valid_lines(index_t cell, const range& part) const {
    const range valid = valid_rows[cell / columns.taps];
    return {std::max(part.begin, valid.begin), std::min(part.end, valid.end)};
  }
  index_t tap_count(index_t cell, const range& images, const range& part) const {
    if (valid_columns[cell % columns.taps].length() <= 0) return 0;
    return images.length() * std::max<index_t>(0, valid_lines(cell, part).length());
  }

  // Lists one tap for each image and each line of the part where kernel element `cell` is not on padding.
  void cell_taps(index_t cell, const range& images, const range& part, const range& lines,
                 const range& in_lines, const slabs<T>& inputs, const slabs<T>& outputs,
                 block_tap<T>* taps) const {
    if (tap_count(cell, images, part) == 0) return;
    const range valid = valid_lines(cell, part);
    const index_t ky = cell / columns.taps, kx = cell % columns.taps, begin = valid_columns[kx].begin;
    for (index_t image = images.begin; image < images.end; ++image) {
      for (index_t line = valid.begin; line < valid.end; ++line) {
        const index_t in_line = line * rows.in_step + rows.tap_offset(ky) - in_lines.begin;
        const T* in = inputs.data + ((image * in_lines.length() + in_line) * columns.inputs +
                                     begin * columns.in_step + columns.tap_offset(kx)) *
                                        inputs.width;
        const T* out =
            outputs.data +
            ((image * lines.length() + line - lines.begin) * columns.outputs + begin) * outputs.width;
        *taps++ = swapped ? block_tap<T>{out, in} : block_tap<T>{in, out};
      }
    }
  }
};

/// Adds the `count` arrays in `sums` in order. dw, [cells][in][out], is overwritten with their sum or, with
/// `accumulate`, added to. Arrays are stored like dw, or [cells][out][in] if `transposed`.
template <class T>
void add_sums(context<device::cpu>& ctx, const T* sums, index_t count, index_t cells, index_t in, index_t out,
              bool transposed, bool accumulate, T* dw) {
  const index_t size = cells * in * out;
  ctx.parallel_for(cells * in, [&](index_t row, int) {
    const index_t cell = row / in, i = row % in;
    const T* from = sums + (transposed ? cell * in * out + i : row * out);
    const index_t step = transposed ? in : 1;
    T* to = dw + row * out;
    if (!accumulate) std::fill_n(to, out, T{});
    for (index_t part = 0; part < count; ++part, from += size) {
      for (index_t o = 0; o < out; ++o) to[o] += from[o * step];
    }
  });
}

/// Part number `part` when `whole` is cut into `parts` consecutive parts of about equal length.
inline range part_of(const range& whole, index_t part, index_t parts) {
  return {whole.begin + whole.length() * part / parts, whole.begin + whole.length() * (part + 1) / parts};
}

/// Clears the input channels `channels` of an array [cells][in][out], or [cells][out][in] if `transposed`.
template <class T>
void clear(T* sum, index_t cells, index_t in, index_t out, const range& channels, bool transposed) {
  for (index_t cell = 0; cell < cells; ++cell, sum += in * out) {
    if (!transposed) {
      std::fill_n(sum + channels.begin * out, channels.length() * out, T{});
    } else {
      for (index_t o = 0; o < out; ++o) std::fill_n(sum + o * in + channels.begin, channels.length(), T{});
    }
  }
}

/// Gradient of the weight for one group (formula: reference::conv_backward_weight): dw is overwritten or,
/// with `accumulate`, added to. For a small weight the batch is cut into splits with one sum each, for a
/// large weight the input channels are cut into groups. Both numbers depend on shapes alone.
template <class T>
void backward_weight(context<device::cpu>& ctx, const conv_shape& shape,
                     const tensor_view<const slab_element_t<T>, 4>& x,
                     const tensor_view<const slab_element_t<T>, 4>& dy, product_result_t<T>* dw,
                     bool accumulate) {
  using result_type = product_result_t<T>;
  scratch_frame frame(ctx.scratch());
  const weight_gradient<T> work(shape, x, dy, frame);
  const index_t out = shape.out_channels, in = shape.in_channels, cells = work.cells(),
                dw_size = cells * in * out;
  const index_t batch = dy.extent(0), lines = dy.extent(1), pixels = batch * lines * dy.extent(2);
  const index_t dw_bytes = dw_size * static_cast<index_t>(sizeof(result_type));
  // A split is a group of images or, if there are few images, a band of lines of all images.
  const index_t splits = std::clamp<index_t>((index_t{5} << 20) / 2 / std::max<index_t>(1, dw_bytes), 1,
                                             std::clamp<index_t>(pixels / 512, 1, 16));
  const bool by_images = batch >= splits, direct = splits == 1 && !work.swapped;
  const index_t groups = std::clamp<index_t>(16 / splits, 1, std::max<index_t>(1, in / 64));
  const index_t largest_group = (in + groups - 1) / groups;
  result_type* sums = direct ? dw : frame.take<result_type>(dw_size * splits);
  const index_t scratch_size = work.scratch_size(largest_group), most_taps = work.scratch_taps();
  T* scratch = frame.take<T>(scratch_size * ctx.threads());
  auto* taps = frame.take<block_tap<T>>(most_taps * ctx.threads());
  ctx.parallel_for(splits * groups, [&](index_t task, int worker) {
    const index_t split = task % splits, first = task / splits * largest_group;
    const range channels{first, std::min(in, first + largest_group)};
    result_type* sum = sums + split * dw_size;
    if (!direct || !accumulate) clear(sum, cells, in, out, channels, work.swapped);
    const range all_images{0, batch}, all_lines{0, lines};
    work.run(by_images ? part_of(all_images, split, splits) : all_images,
             by_images ? all_lines : part_of(all_lines, split, splits), channels, sum,
             scratch + worker * scratch_size, taps + worker * most_taps);
  });
  if (!direct) add_sums(ctx, sums, splits, cells, in, out, work.swapped, accumulate, dw);
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
