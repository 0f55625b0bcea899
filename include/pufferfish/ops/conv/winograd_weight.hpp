// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the gradient dg of a 3x3 convolution's weight by the tiles of winograd.hpp, with the transposes
/// of the transforms G, B and A of the forward pass:
///   dg = G^T (sum over tiles of (B^T d B) o (A dy A^T)) G,
/// where d is a tile of the input, dy the gradient of the tile's outputs, and o multiplies element by
/// element. The sums are 36 matrix products [tiles x in]^T [tiles x out], one for each point.

#include <pufferfish/ops/conv/direct_conv_weight.hpp>
#include <pufferfish/ops/conv/winograd.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// Computes the gradient of a weight in blocks of up to 64 input and 64 output channels. Reads the images and
/// gradients of a batch, which must outlive the object.
template <class T>
struct winograd_weight_gradient {
  using C = parameter_t<T>;                      // type of transformed values and sums
  static constexpr index_t chunk = 48;           // tiles whose transforms stay in the second-level cache
  static constexpr index_t block_channels = 64;  // input and output channels whose sums stay there, too

  winograd_tiles tiles;  ///< tiles of dy
  size2 padding;         ///< zeros above and to the left of the input
  const T* input;        ///< x, dense
  extents<4> in;         ///< NHWC extents of x
  const T* gradient;     ///< dy, dense
  extents<4> out;        ///< NHWC extents of dy
  const kernel_table<C>* kernels;

  static constexpr index_t size = static_cast<index_t>(sizeof(C));

  /// Number of blocks into which `channels` channels are cut.
  static index_t blocks(index_t channels) { return (channels + block_channels - 1) / block_channels; }
  /// The channels of block `number` of `channels` channels.
  static range block(index_t channels, index_t number) {
    return {number * block_channels, std::min(channels, (number + 1) * block_channels)};
  }
  /// Most input channels of a block.
  index_t in_width() const { return std::min(in[3], block_channels); }
  /// Most output channels of a block, rounded up to whole vectors.
  index_t out_width() const { return whole_vectors(std::min(out[3], block_channels)); }
  /// Elements of scratch memory that a thread needs: the transformed pixels and gradients of a chunk of
  /// tiles, and the 36 sums.
  index_t scratch_size() const {
    return winograd_matrices<C>::size(chunk, in_width()) + winograd_matrices<C>::size(chunk, out_width()) +
           winograd_matrices<C>::size(in_width(), out_width());
  }

  /// Computes the contribution of the tiles `some` to the gradient of the weight for input channels `from`
  /// and output channels `to`, which is 0 if there are no tiles. That block of dw, stored [9][in][out], is
  /// overwritten or, with `add`, added to.
  void run(const range& some, const range& from, const range& to, C* dw, bool add, C* scratch) const {
    const winograd_matrices<C> pixels(scratch, chunk, from.length());
    C* rest = scratch + winograd_matrices<C>::size(chunk, in_width());
    const winograd_matrices<C> gradients(rest, chunk, whole_vectors(to.length()));
    rest += winograd_matrices<C>::size(chunk, out_width());
    const winograd_matrices<C> sums(rest, from.length(), gradients.columns);
    if (gradients.columns > to.length()) {
      std::fill_n(gradients.data, winograd_matrices<C>::size(chunk, gradients.columns), C{});
    }
    if (some.length() == 0)
      std::fill_n(sums.data, winograd_matrices<C>::size(from.length(), sums.columns), C{});
    for (index_t tile = some.begin; tile < some.end; tile += chunk) {
      const range here{tile, std::min(some.end, tile + chunk)};
      transform(here, from, to, pixels, gradients);
      multiply(here.length(), from.length(), tile > some.begin, pixels, gradients, sums);
    }
    for (index_t c = 0; c < from.length(); ++c) {
      winograd_transforms<T>::here().weight_gradient(sums.row(0, c), sums.step, to.length(),
                                                     dw + (from.begin + c) * out[3] + to.begin,
                                                     in[3] * out[3], add);
    }
  }

 private:
  // `channels` rounded up to whole vectors.
  index_t whole_vectors(index_t channels) const {
    return (channels + kernels->lanes - 1) / kernels->lanes * kernels->lanes;
  }

  // Transforms the pixels of input channels `from`, B^T d B, and the gradients of output channels `to`, A dy
  // A^T, for the tiles `some`.
  void transform(const range& some, const range& from, const range& to, const winograd_matrices<C>& pixels,
                 const winograd_matrices<C>& gradients) const {
    const auto& transforms = winograd_transforms<T>::here();
    const T* squares[winograd_tiles::points];
    for (index_t tile = some.begin; tile < some.end; ++tile) {
      const index_t soon = tile + winograd_tiles::ahead;
      if (soon < tiles.count()) {
        prefetch_square<winograd_tiles::edge>(gradient, out, tiles[soon], to);
        prefetch_square<6>(input, in, tiles.inputs(soon, padding), from);
      }
      point_at_square<winograd_tiles::edge>(gradient, out, tiles[tile], to.begin, squares);
      transforms.gradient(squares, to.length(), gradients.row(0, tile - some.begin), gradients.step);
      point_at_square<6>(input, in, tiles.inputs(tile, padding), from.begin, squares);
      transforms.input(squares, from.length(), pixels.row(0, tile - some.begin), pixels.step);
    }
  }

  // sums = pixels^T gradients or, with `add`, sums += this product: 36 matrix products over `depth` tiles
  // with `rows` input channels.
  void multiply(index_t depth, index_t rows, bool add, const winograd_matrices<C>& pixels,
                const winograd_matrices<C>& gradients, const winograd_matrices<C>& sums) const {
    const panel_cut panels(sums.columns / kernels->lanes, kernels->widest_adjacent);
    for (index_t point = 0; point < winograd_tiles::points; ++point) {
      for (index_t panel = 0; panel < panels.panels; ++panel) {
        const index_t column = panels[panel].begin * kernels->lanes;
        const block_tap<C> tap{pixels.row(point, 0), gradients.row(point, 0) + column};
        block_arguments<C> block{};
        block.taps = &tap;
        block.taps_end = &tap + 1;
        block.depth = depth;
        block.row_step = size;
        block.depth_step = pixels.columns * size;
        block.right_step = gradients.columns * size;
        block.result = sums.row(point, 0) + column;
        block.result_step = sums.columns * size;
        block.accumulate = add ? 1 : 0;
        run_rows(kernels->adjacent[panels[panel].length() - 1], block, rows);
      }
    }
  }
};

/// Gradient of the weight of a convolution for which winograd_fits() is true (formula:
/// reference::conv_backward_weight). dw is overwritten or, with `accumulate`, added to. The channels are cut
/// into blocks; if there are few blocks, the tiles are also cut into splits with one sum each. The cut
/// depends on shapes alone.
template <class T>
void winograd_backward_weight(context<device::cpu>& ctx, const conv_shape& shape,
                              const tensor_view<const T, 4>& x, const tensor_view<const T, 4>& dy,
                              parameter_t<T>* dw, bool accumulate) {
  using C = parameter_t<T>;
  const winograd_weight_gradient<T> work{{dy.extent(0), dy.extent(1), dy.extent(2)},
                                         shape.padding,
                                         x.data(),
                                         x.shape(),
                                         dy.data(),
                                         dy.shape(),
                                         &conv_kernels<C>()};
  const index_t in = shape.in_channels, out = shape.out_channels, dw_size = 9 * in * out;
  const index_t in_blocks = work.blocks(in), blocks = in_blocks * work.blocks(out);
  const index_t splits =
      std::clamp<index_t>(16 / blocks, 1, std::max<index_t>(1, work.tiles.count() / work.chunk));
  scratch_frame frame(ctx.scratch());
  C* const sums = splits == 1 ? dw : frame.take<C>(dw_size * splits);
  C* const scratch = frame.take<C>(work.scratch_size() * ctx.threads());
  const range all{0, work.tiles.count()};
  ctx.parallel_for(splits * blocks, [&](index_t task, int worker) {
    const index_t split = task % splits, block = task / splits;
    work.run(part_of(all, split, splits), work.block(in, block % in_blocks),
             work.block(out, block / in_blocks), sums + split * dw_size, splits == 1 && accumulate,
             scratch + worker * work.scratch_size());
  });
  if (splits > 1) add_sums<C>(ctx, sums, splits, 9, in, out, false, accumulate, dw);
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
