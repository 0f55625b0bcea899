// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: copies of the operands of a correlation (direct_conv.hpp) in the order in which the
/// micro-kernels read them: the images pixel by pixel (pixel-major), and the weight in panels.

#include <algorithm>

#include <pufferfish/linalg/gemm/pack.hpp>
#include <pufferfish/ops/conv/direct_conv.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// True if output lines have so few pixels that blocks whose rows are one pixel of many images are faster
/// than blocks whose rows are the pixels of a line.
inline bool lines_too_short(index_t line_pixels, index_t images) { return line_pixels < 8 && images >= 4; }

/// Sets `storage`, a pixel-major copy of a batch with NHWC extents `shape`, as the input of a correlation.
/// Its layout is [block of input channels][pixel][image][channel of the block]. In NHWC the same pixel of
/// successive images is a whole image apart, often a power of two, so that these pixels would evict each
/// other from the cache. `storage`: pixel_major_size() elements.
template <class T>
void point_to_pixel_major(correlation<T>& work, const extents<4>& shape, const T* storage) {
  const index_t row = work.block_depth();
  work.input = storage;
  work.in = {row, shape[2] * shape[0] * row, shape[0] * row};
  work.in_block = shape[0] * shape[1] * shape[2] * row;
}

/// Copies work.input, a dense NHWC batch with extents `shape`, to `storage` in pixel-major order and sets the
/// copy as the input of `work` (see point_to_pixel_major). `storage`: pixel_major_size() elements, which must
/// not overlap the batch.
template <class T>
void use_pixel_major(context<device::cpu>& ctx, correlation<T>& work, const extents<4>& shape, T* storage) {
  const index_t images = shape[0], pixels = shape[1] * shape[2], channels = shape[3],
                row = work.block_depth();
  const T* from = work.input;
  // Each task copies 16 images, so that it writes whole pages.
  constexpr index_t together = 16;
  ctx.parallel_for((images + together - 1) / together, [&](index_t task, int) {
    const range some{task * together, std::min(images, (task + 1) * together)};
    for (index_t pixel = 0; pixel < pixels; ++pixel) {
      for (index_t channel = 0; channel < channels; channel += row) {
        T* to = storage + ((channel / row * pixels + pixel) * images + some.begin) * row;
        const index_t count = std::min(row, channels - channel);
        for (index_t image = some.begin; image < some.end; ++image, to += row) {
          std::copy_n(from + (image * pixels + pixel) * channels + channel, count, to);
        }
      }
    }
  });
  point_to_pixel_major(work, shape, storage);
}

/// Number of elements of storage that use_pixel_major needs. The last block of channels takes the space of a
/// full block.
template <class T>
index_t pixel_major_size(const correlation<T>& work, const extents<4>& shape) {
  const index_t row = work.block_depth();
  return shape[0] * shape[1] * shape[2] * ((shape[3] + row - 1) / row) * row;
}

/// Number of elements of storage that pack_weight needs, for a kernel of `cells` elements with `depth`
/// channels to sum over and `columns` channels of results.
template <class T>
index_t packed_weight_size(index_t cells, index_t depth, index_t columns, const kernel_table<T>& kernels) {
  return cells * depth * ((columns + kernels.lanes - 1) / kernels.lanes * kernels.lanes);
}

/// Whether a forward correlation reads a weight with `columns` output channels in place: its rows are whole
/// vectors, and either rows are short or there are so few output `pixels` that packing the weight for one
/// pass costs more than reading long rows. `kept`: the packed weight serves many passes.
template <class T>
bool reads_in_place(index_t columns, index_t pixels, bool kept, const kernel_table<T>& kernels) {
  constexpr index_t widest_in_place = 256 / static_cast<index_t>(sizeof(T)), few_pixels = 16;
  return columns % kernels.lanes == 0 && (columns <= widest_in_place || (!kept && pixels <= few_pixels));
}

/// Packs the weight of a correlation into panels, from HWIO storage w, [cells][in][out]. For the forward pass
/// the sums are over `in` channels (depth) and the results have `out` channels (columns); with `transposed`,
/// for the gradient of the input, the roles are exchanged. `storage` receives packed_weight_size() elements;
/// columns after the last one are zero. Returns the packed weight.
template <class T>
correlation_weight<T> pack_weight(context<device::cpu>& ctx, const T* w, index_t cells, index_t in,
                                  index_t out, bool transposed, const panel_cut& panels,
                                  const kernel_table<T>& kernels, T* storage) {
  const index_t depth = transposed ? out : in, columns = transposed ? in : out, lanes = kernels.lanes;
  const auto copy = pufferfish::detail::panel_copier<T>();
  ctx.parallel_for(cells * panels.panels, [&](index_t task, int) {
    const range panel = panels[task / cells];
    const index_t cell = task % cells, first = panel.begin * lanes, width = panel.length() * lanes;
    copy(w + cell * in * out + first * (transposed ? out : 1), transposed ? 1 : out, transposed ? out : 1,
         depth, std::min(width, columns - first), storage + first * depth * cells + cell * depth * width,
         width);
  });
  return {storage, depth, columns, 0, cells, lanes};
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
