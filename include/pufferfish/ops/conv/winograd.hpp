// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: convolution with 3x3 kernels and stride 1 by Winograd's minimal filtering F(4x4, 3x3) (Lavin,
/// Gray, Fast algorithms for convolutional neural networks, CVPR 2016, equation 8). A tile of 4 x 4 outputs y
/// depends on a tile of 6 x 6 inputs d and takes 36 multiplications for each pair of channels instead of 144.
/// With the kernel g and the matrices A, B and G of winograd_transforms.hpp,
///   y = A^T ((G g G^T) o (B^T d B)) A,
/// where o multiplies element by element. Summed over the input channels, the products in the middle are 36
/// matrix products [tiles x in] [in x out], one for each of the 36 elements, which are called points. The
/// work of the transforms is proportional to the numbers of channels, that of the products to the product of
/// these numbers, so the algorithm is less work if neither number is small.

#include <algorithm>
#include <type_traits>

#include <pufferfish/ops/conv/conv_blocks.hpp>
#include <pufferfish/ops/conv/conv_shape.hpp>
#include <pufferfish/ops/conv/image_tasks.hpp>
#include <pufferfish/ops/conv/winograd_tiles.hpp>
#include <pufferfish/ops/conv/winograd_transforms.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

using pufferfish::detail::sized_kernel;

/// True for element types that use Winograd tiles: float, and 16-bit types, whose pixels are widened when
/// they are transformed and whose results are rounded once when they are written. Double does not, since it
/// is chosen for its small rounding errors.
template <class T>
inline constexpr bool has_winograd = std::is_same_v<parameter_t<T>, float>;

/// One matrix [rows][columns] for each of the 36 points, stored one after another. A gap of a cache line
/// between matrices avoids strides of whole pages, at which rows with the same number would evict each other
/// from the cache.
template <class T>
struct winograd_matrices {
  T* data;
  index_t columns, step;  ///< columns of a matrix; elements from one matrix to the next

  static constexpr index_t gap = 64 / static_cast<index_t>(sizeof(T));

  /// Elements from one matrix of rows x width to the next.
  static index_t step_for(index_t rows, index_t width) { return rows * width + gap; }
  /// Elements of storage for the 36 matrices.
  static index_t size(index_t rows, index_t width) { return winograd_tiles::points * step_for(rows, width); }
  winograd_matrices(T* storage, index_t rows, index_t width)
      : data(storage), columns(width), step(step_for(rows, width)) {}
  /// Row `number` of the matrix of a point.
  T* row(index_t point, index_t number) const { return data + point * step + number * columns; }
};

/// Computes `rows` rows like run_rows, but every call of a kernel prefetches, from the address where the
/// prefetch of the previous call ended.
template <class T>
void run_rows_ahead(const kernel_list<T>& kernels, block_arguments<T>& block, index_t rows) {
  for (const sized_kernel<T>* kernel = kernels.by_rows; rows > 0; ++kernel) {
    for (; rows >= kernel->rows; rows -= kernel->rows) {
      kernel->run(block);
      block.prefetch = static_cast<const std::byte*>(block.prefetch) + block.depth * block.prefetch_step;
      block.left_shift += kernel->rows * block.row_step;
      block.result = moved(block.result, kernel->rows * block.result_step);
    }
  }
}

/// The transformed weight of a correlation for some of its output columns (channels): 36 matrices
/// [block][panel] for each panel of these columns and each block of the depth (input channels).
template <class T>
struct winograd_weight {
  static constexpr index_t block = 64;          // input channels of a block, at most
  static constexpr index_t most_columns = 128;  // largest number of output columns

  T* data;
  index_t depth;     ///< input channels
  range columns;     ///< the output columns
  panel_cut panels;  ///< cut of the columns into panels
  index_t lanes;     ///< elements of a vector

  /// `of_depth`: input channels; `some`: the output columns; `storage`: size() elements.
  winograd_weight(index_t of_depth, const range& some, const kernel_table<T>& kernels, T* storage)
      : data(storage),
        depth(of_depth),
        columns(some),
        panels((some.length() + kernels.lanes - 1) / kernels.lanes, kernels.widest_strided),
        lanes(kernels.lanes) {}

  /// Rows stored for each block.
  index_t rows() const { return std::min(depth, block); }
  /// Number of blocks of the depth.
  index_t blocks() const { return (depth + block - 1) / block; }
  /// Number of columns, rounded up to whole vectors.
  index_t width() const { return panels.vectors * lanes; }
  /// Number of elements of storage.
  index_t size() const {
    return blocks() * winograd_tiles::points * (rows() * width() + panels.panels * winograd_matrices<T>::gap);
  }
  /// The 36 matrices of a panel for block `number` of the depth. Each has rows() rows, of which the last
  /// block may use fewer.
  winograd_matrices<T> at(index_t panel, index_t number) const {
    const range vectors = panels[panel];
    const index_t before = rows() * vectors.begin * lanes + panel * winograd_matrices<T>::gap;
    const index_t columns_here = vectors.length() * lanes;
    const index_t step = winograd_matrices<T>::step_for(rows(), columns_here);
    return {data + winograd_tiles::points * (blocks() * before + number * step), rows(), columns_here};
  }
};

/// A correlation by Winograd tiles, for the output columns of its weight. Tiles are computed in blocks whose
/// transformed pixels and products stay in the second-level cache. For each block of tiles, one block of
/// input channels after another is transformed (B^T d B) and multiplied by the weight, and the products are
/// summed in 36 matrices. These sums are then transformed to the output once.
template <class T>
struct winograd_correlation {
  using C = parameter_t<T>;                   // type of transformed pixels and products
  static constexpr index_t block_tiles = 48;  // a multiple of the rows of the largest kernel of each width
  static constexpr index_t size = static_cast<index_t>(sizeof(C));

  winograd_tiles tiles;  ///< tiles of the output
  size2 padding;         ///< zeros above and to the left of the input
  const T* input;
  extents<4> in;  ///< NHWC extents of the dense input
  T* output;
  extents<4> out;  ///< NHWC extents of the dense output
  bool add;        ///< add to the output instead of overwriting it
  const kernel_table<C>* kernels;
  winograd_weight<C> weight;

  /// Elements of scratch memory that a thread needs: transformed pixels and products of a block of tiles.
  index_t scratch_size() const {
    return winograd_matrices<C>::size(block_tiles, weight.rows()) +
           winograd_matrices<C>::size(block_tiles, weight.width());
  }

  /// Computes the outputs of the tiles `some`. `scratch`: scratch_size() elements.
  void run(const range& some, C* scratch) const {
    const winograd_matrices<C> products(scratch + winograd_matrices<C>::size(block_tiles, weight.rows()),
                                        block_tiles, weight.width());
    for (index_t tile = some.begin; tile < some.end; tile += block_tiles) {
      const range block{tile, std::min(some.end, tile + block_tiles)};
      for (index_t number = 0; number < weight.blocks(); ++number) {
        const winograd_matrices<C> pixels(scratch, block_tiles, channels(number).length());
        transform(block, number, pixels);
        multiply(block.length(), number, pixels, products);
      }
      finish(block, products);
    }
  }

 private:
  // Input channels of block `number` of the depth.
  range channels(index_t number) const {
    return {number * weight.block, std::min(in[3], (number + 1) * weight.block)};
  }

  // Transforms the pixels of block `number` of the input channels, B^T d B, for the tiles of a block.
  void transform(const range& block, index_t number, const winograd_matrices<C>& pixels) const {
    const T* squares[winograd_tiles::points];
    const range some = channels(number);
    for (index_t tile = block.begin; tile < block.end; ++tile) {
      prefetch_pixels(tile, block, number);
      point_at_square<6>(input, in, tiles.inputs(tile, padding), some.begin, squares);
      winograd_transforms<T>::here().input(squares, some.length(), pixels.row(0, tile - block.begin),
                                           pixels.step);
    }
  }

  // Prefetches the pixels that will be transformed `ahead` tiles after `tile`: after the last tile of a block
  // those of the block's first tile and the next block of channels.
  void prefetch_pixels(index_t tile, const range& block, index_t number) const {
    index_t soon = tile + winograd_tiles::ahead;
    if (soon >= block.end) {
      number = (number + 1) % weight.blocks();
      if (number > 0) soon -= block.length();
    }
    if (soon < tiles.count()) prefetch_square<6>(input, in, tiles.inputs(soon, padding), channels(number));
  }

  // products (+)= pixels * block `number` of the weight: for each panel and point a matrix product with
  // `rows` rows (tiles). The first block of input channels overwrites the products.
  void multiply(index_t rows, index_t number, const winograd_matrices<C>& pixels,
                const winograd_matrices<C>& products) const {
    for (index_t panel = 0; panel < weight.panels.panels; ++panel) {
      const range vectors = weight.panels[panel];
      const winograd_matrices<C> factors = weight.at(panel, number);
      for (index_t point = 0; point < winograd_tiles::points; ++point) {
        const block_tap<C> tap{pixels.row(point, 0), factors.row(point, 0)};
        block_arguments<C> block{};
        block.taps = &tap;
        block.taps_end = &tap + 1;
        block.depth = pixels.columns;
        block.row_step = pixels.columns * size;
        block.depth_step = size;
        block.right_step = factors.columns * size;
        block.result = products.row(point, 0) + vectors.begin * kernels->lanes;
        block.result_step = products.columns * size;
        block.accumulate = number > 0 ? 1 : 0;
        // The kernel also prefetches the weights of the next point, one cache line in each step.
        block.prefetch = factors.row(point + 1, 0);
        block.prefetch_step = 64;
        run_rows_ahead(kernels->strided[vectors.length() - 1], block, rows);
      }
    }
  }

  // Transforms the products m of the tiles of a block to the output: A^T m A.
  void finish(const range& block, const winograd_matrices<C>& products) const {
    T* squares[winograd_tiles::edge * winograd_tiles::edge];
    for (index_t tile = block.begin; tile < block.end; ++tile) {
      if (tile + winograd_tiles::ahead < tiles.count()) {
        prefetch_square<winograd_tiles::edge>(output, out, tiles[tile + winograd_tiles::ahead],
                                              weight.columns);
      }
      point_at_square<winograd_tiles::edge>(output, out, tiles[tile], weight.columns.begin, squares);
      winograd_transforms<T>::here().output(products.row(0, tile - block.begin), products.step,
                                            weight.columns.length(), squares, add);
    }
  }
};

/// Transforms a weight in HWIO storage, [9][in][out], for a correlation, G g G^T: for the forward pass or,
/// with `transposed`, flipped and with in and out exchanged, for the gradient of the input. `to` receives the
/// result for its columns; columns after the last one become zero.
template <class T>
void transform_weight(context<device::cpu>& ctx, const T* w, index_t in, index_t out, bool transposed,
                      const winograd_weight<parameter_t<T>>& to) {
  constexpr index_t rows = 8, widest = 4 * 64 / static_cast<index_t>(sizeof(parameter_t<T>)), ahead = 4;
  static_assert(winograd_weight<parameter_t<T>>::block % rows == 0);
  const index_t chunks = (to.depth + rows - 1) / rows;
  const auto& transforms = winograd_transforms<T>::here();
  ctx.parallel_for(to.panels.panels * chunks, [&](index_t task, int) {
    const index_t panel = task / chunks, begin = task % chunks * rows, end = std::min(to.depth, begin + rows);
    const winograd_matrices<parameter_t<T>> matrices = to.at(panel, begin / to.block);
    const index_t first = to.columns.begin + to.panels[panel].begin * to.lanes,
                  filled = std::min(matrices.columns, to.columns.end - first);
    alignas(64) T turned[static_cast<std::size_t>(9 * rows * widest)];
    for (index_t cell = 0; transposed && cell < 9; ++cell) {
      const T* const from = w + (8 - cell) * in * out;
      for (index_t j = 0; j < filled; ++j) {
        for (index_t k = begin; k < end; ++k) {
          turned[(cell * rows + k - begin) * widest + j] = from[(first + j) * out + k];
        }
      }
    }
    for (index_t k = begin; k < end; ++k) {
      parameter_t<T>* const row = matrices.row(0, k % to.block);
      if (transposed) {
        transforms.weight(turned + (k - begin) * widest, rows * widest, filled, row, matrices.step);
      } else {
        const T* const from = w + k * out + first;
        if (k + ahead < to.depth) pufferfish::detail::prefetch_block(from + ahead * out, in * out, 9, filled);
        transforms.weight(from, in * out, filled, row, matrices.step);
      }
      for (index_t point = 0; filled < matrices.columns && point < winograd_tiles::points; ++point) {
        std::fill(row + point * matrices.step + filled, row + point * matrices.step + matrices.columns,
                  parameter_t<T>{});
      }
    }
  });
}

/// The tasks of a correlation by Winograd tiles: groups of whole images, or bands of lines of one image. A
/// task has about a block of tiles or more, and half a block if the batch has few tiles.
inline image_tasks tasks_of(const winograd_tiles& tiles) {
  constexpr index_t block = winograd_correlation<float>::block_tiles, fewest_tasks = 8;
  image_tasks tasks(tiles.images, tiles.height, tiles.width, 0);
  const index_t least = tiles.count() < fewest_tasks * block ? block / 2 : block, of_image = tiles.of_image();
  if (of_image > 4 * block) {
    tasks.group = 1;
    tasks.band = (least + tiles.columns - 1) / tiles.columns * winograd_tiles::edge;
    return tasks;
  }
  // Uses the smallest group of at most four blocks of tiles whose tiles fill half-blocks without a remainder,
  // if there is one.
  index_t group = (least + of_image - 1) / of_image;
  for (index_t more = group; more * of_image <= 4 * block; ++more) {
    if (more * of_image % (block / 2) != 0) continue;
    group = more;
    break;
  }
  tasks.group = std::clamp<index_t>(group, 1, std::max<index_t>(1, tiles.images));
  tasks.band = std::max<index_t>(1, tiles.height);
  return tasks;
}

/// The tiles of a task, given by its images and lines. `lines` begins at a multiple of a tile's edge.
inline range tiles_of(const winograd_tiles& tiles, const range& images, const range& lines) {
  const index_t first = images.begin * tiles.of_image() + lines.begin / winograd_tiles::edge * tiles.columns;
  const index_t rows = (lines.length() + winograd_tiles::edge - 1) / winograd_tiles::edge;
  return {first, first + ((images.length() - 1) * tiles.rows + rows) * tiles.columns};
}

/// True if Winograd's algorithm can compute a convolution: float or 16-bit elements, one group, a 3x3 kernel
/// with stride 1, no dilation, padding 0 .. 2, and context_options::winograd. For the gradient of the input,
/// the caller passes the convolution that computes dx from dy.
template <class T>
bool winograd_fits(const context<device::cpu>& ctx, const conv_shape& shape) {
  return has_winograd<T> && ctx.winograd() && shape.groups == 1 && shape.kernel == size2{3, 3} &&
         shape.stride == size2{1, 1} && shape.dilation == size2{1, 1} && shape.padding.height <= 2 &&
         shape.padding.width <= 2 && shape.padding.height >= 0 && shape.padding.width >= 0;
}

/// The kinds of passes whose direct sums differ in speed: correlations, that is the forward pass and the
/// gradient of the input, and the gradient of the weight.
enum class conv_pass { correlation, weight_gradient };

/// True if winograd_fits() and the algorithm takes less time than direct sums for input extents `from` and
/// output extents `to` (NHWC) of at least 12 tiles. For bfloat16 the result depends on whether this machine
/// has kernels for pairs; it never depends on the number of threads.
template <class T>
bool winograd_pays(const context<device::cpu>& ctx, const conv_shape& shape, const extents<4>& from,
                   const extents<4>& to, conv_pass pass = conv_pass::correlation) {
  if (!winograd_fits<T>(ctx, shape)) return false;
  if (winograd_tiles(to[0], to[1], to[2]).count() < 12) return false;
  index_t lines = 0, columns = 0;  // output lines and columns not on padding, summed over the taps
  for (index_t tap = 0; tap < 3; ++tap) {
    lines += forward_axis(from[1], to[1], 3, 1, shape.padding.height, 1).valid(tap).length();
    columns += forward_axis(from[2], to[2], 3, 1, shape.padding.width, 1).valid(tap).length();
  }
  // Costs in multiply-adds of a vector of outputs, fitted to measurements on a Zen 5. Transforming a vector
  // of channels of one tile costs as much as `transform` of them; channels that fill no vector are
  // transformed one by one.
  constexpr index_t lanes = 16, transform = std::is_same_v<T, float> ? 560 : 480;
  const auto vectors = [](index_t channels) { return channels / lanes + channels % lanes; };
  const index_t products = from[3] * ((to[3] + lanes - 1) / lanes);
  const index_t by_tiles =
      winograd_tiles::points * products + transform * (vectors(from[3]) + vectors(to[3]));
  // Direct sums reach 90 % of the speed of the tiles' products, weight gradients, which copy pixels, 65 %.
  // Sums of bfloat16 pairs are nearly twice as fast; products of tiles are float.
  const bool pairs = pufferfish::detail::has_pairs<T>() && from[3] % 2 == 0;
  const index_t direct_percent = (pass == conv_pass::correlation ? 90 : 65) * (pairs ? 19 : 10) / 10;
  return by_tiles * winograd_tiles(1, to[1], to[2]).count() * direct_percent <
         lines * columns * products * 100;
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
