// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: convolutions with more than one group (conv_shape::groups), forward and both gradients.
/// Depthwise shapes have kernels of their own (depthwise_conv.hpp). A shape with one input channel and
/// several output channels per group is a depthwise convolution of an input whose channels are repeated. All
/// other shapes are cut into blocks of adjacent groups. The channels of each block are copied to a contiguous
/// tensor, and each block is one ordinary convolution. Pointwise shapes need no copies.
///
/// A block has one group, or as many narrow groups as fit in a vector of 16 channels. The weight of a block
/// of several groups is block diagonal, and products with its zeros use lanes that would otherwise be empty.
/// As a consequence, a value that is not finite makes the results of other groups in its block NaN.
///
/// Scratch memory holds the weights of all blocks and, unless the convolution is pointwise, copies of the
/// input and of the output.
///
/// Weights are stored [kernel height][kernel width][in / groups][out]; each group has out / groups
/// consecutive columns.

#include <algorithm>

#include <pufferfish/ops/conv/depthwise_conv.hpp>
#include <pufferfish/ops/linear/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// The cut of a convolution into blocks of groups.
struct group_blocks {
  index_t groups;    ///< groups in a block
  index_t count;     ///< number of blocks
  conv_shape shape;  ///< the ordinary convolution that a block computes

  /// Chooses the largest number of groups per block that divides the number of all groups and keeps inputs
  /// and outputs of a block within 16 channels, or one group.
  explicit group_blocks(const conv_shape& whole) : groups(1), count(whole.groups), shape(whole) {
    constexpr index_t vector = 16;
    const index_t widest = std::max(whole.group_inputs(), whole.group_outputs());
    for (index_t more = 2; more * widest <= vector; ++more) {
      if (whole.groups % more == 0) groups = more;
    }
    count = whole.groups / groups;
    shape.in_channels = groups * whole.group_inputs();
    shape.out_channels = groups * whole.group_outputs();
    shape.groups = 1;
  }
};

/// to[i] = from[i] for 0 <= i < width. Pieces of 16 elements have a constant size, so that the compiler
/// copies them by vectors.
template <class T>
void copy_channels(const T* from, T* to, index_t width) {
  constexpr index_t piece = 16;
  index_t i = 0;
  for (; i + piece <= width; i += piece) std::copy_n(from + i, piece, to + i);
  for (; i < width; ++i) to[i] = from[i];
}

/// A copy, in scratch memory, of `rows` pixels whose channels are cut into `blocks` parts of `width`
/// channels. Each part is a dense matrix [rows][width]; the parts are stored one after another. The copy is
/// valid until the scratch frame ends.
template <class T>
struct group_copy {
  index_t rows, blocks, width;  ///< pixels; number of parts; channels of a part
  T* data;

  group_copy(scratch_frame& frame, index_t row_count, index_t block_count, index_t channels)
      : rows(row_count),
        blocks(block_count),
        width(channels / block_count),
        data(frame.take<T>(row_count * channels)) {}

  /// Fills the parts from `from`, dense pixels with all channels.
  void split(context<device::cpu>& ctx, const T* from) const {
    for_row_chunks(ctx, rows, blocks * width, [&](index_t begin, index_t end) {
      for (index_t block = 0; block < blocks; ++block) {
        for (index_t row = begin; row < end; ++row) {
          copy_channels(from + (row * blocks + block) * width, data + (block * rows + row) * width, width);
        }
      }
    });
  }
  /// Writes the parts to `to`, dense pixels with all channels: the reverse of split().
  void join(context<device::cpu>& ctx, T* to) const {
    for_row_chunks(ctx, rows, blocks * width, [&](index_t begin, index_t end) {
      for (index_t block = 0; block < blocks; ++block) {
        for (index_t row = begin; row < end; ++row) {
          copy_channels(data + (block * rows + row) * width, to + (row * blocks + block) * width, width);
        }
      }
    });
  }
  /// Part number `block` as NHWC images with the extents `shape`, whose channels are replaced by `width`.
  tensor_view<T, 4> images(index_t block, extents<4> shape) const {
    shape[3] = width;
    return {data + block * rows * width, shape};
  }
};

/// The weights of all blocks in scratch memory: [blocks][kernel height][kernel width][in of a block][out of a
/// block].
template <class T>
struct group_weights {
  const group_blocks& blocks;  ///< must outlive this object
  index_t cells, in, out;      ///< number of kernel elements; input and output channels of a group
  T* data;

  group_weights(scratch_frame& frame, const conv_shape& whole, const group_blocks& cut)
      : blocks(cut),
        cells(whole.kernel.height * whole.kernel.width),
        in(whole.group_inputs()),
        out(whole.group_outputs()),
        data(frame.take<T>(cut.count * size())) {}

  /// Number of elements in the weight of a block.
  index_t size() const { return cells * blocks.shape.in_channels * blocks.shape.out_channels; }
  /// The weight of a block: size() elements.
  T* operator[](index_t block) const { return data + block * size(); }
  /// The weight of a block as a matrix of patch() rows and out_channels columns of the block.
  tensor_view<T, 2> matrix(index_t block) const {
    return {(*this)[block], {cells * blocks.shape.in_channels, blocks.shape.out_channels}};
  }

  /// Fills the blocks from a weight in HWIO storage; elements between different groups become zero.
  void spread(const T* w) const {
    if (blocks.groups > 1) std::fill_n(data, blocks.count * size(), T{});
    for_each_row([&](index_t stored, index_t own) { copy_channels(w + stored, data + own, out); });
  }
  /// Writes the elements of the blocks that correspond to elements of the stored weight to dw, which is
  /// overwritten or, with `accumulate`, added to.
  void collect(T* dw, bool accumulate) const {
    for_each_row([&](index_t stored, index_t own) {
      for (index_t o = 0; o < out; ++o) {
        dw[stored + o] = data[own + o] + (accumulate ? dw[stored + o] : T{});
      }
    });
  }

 private:
  /// Calls f(offset in the stored weight, offset in `data`) for each row of `out` elements of a group.
  template <class F>
  void for_each_row(F&& f) const {
    const index_t all = blocks.count * blocks.groups;
    for (index_t cell = 0; cell < cells; ++cell) {
      for (index_t i = 0; i < in; ++i) {
        for (index_t group = 0; group < all; ++group) {
          const index_t at = group % blocks.groups, row = cell * blocks.shape.in_channels + at * in + i;
          f(((cell * in + i) * all + group) * out,
            group / blocks.groups * size() + row * blocks.shape.out_channels + at * out);
        }
      }
    }
  }
};

/// Number of pixels of an NHWC batch.
inline index_t pixel_count(const extents<4>& shape) { return shape[0] * shape[1] * shape[2]; }

/// For a shape with one input channel per group: the depthwise convolution of the input whose channels are
/// repeated (repeat_channels), with one input channel for each output channel.
inline conv_shape repeated_channels(conv_shape shape) {
  shape.groups = shape.in_channels = shape.out_channels;
  return shape;
}

/// to = x with each channel repeated `times` times: channel c of x becomes channels c times ... c times +
/// times - 1 of `to`. `to`: x.size() * times elements.
template <class T>
void repeat_channels(context<device::cpu>& ctx, const tensor_view<const T, 4>& x, index_t times, T* to) {
  const index_t channels = x.extent(3);
  for_row_chunks(ctx, pixel_count(x.shape()), channels * times, [&](index_t begin, index_t end) {
    T* target = to + begin * channels * times;
    for (index_t i = begin * channels; i < end * channels; ++i, target += times) {
      std::fill_n(target, times, x.data()[i]);
    }
  });
}

/// The channels of one block: a view of the matrix [pixels][channels of `view`] restricted to the columns of
/// the block.
template <class T>
tensor_view<T, 2> block_columns(const tensor_view<T, 4>& view, const group_blocks& blocks, index_t block) {
  const index_t width = view.extent(3) / blocks.count;
  const tensor_view<T, 2> rows = view.reshape(extents<2>{pixel_count(view.shape()), view.extent(3)});
  return rows.slice(1, block * width, width);
}

/// Number of rows of y in a part of its moments. For results that are final only after all groups, moments
/// are computed in a separate pass: the caller calls start_moments() before taking scratch memory and
/// add_moments() when y is complete. The cut into parts depends on shapes alone.
template <class T>
index_t moment_rows(const tensor_view<T, 4>& y) {
  return std::max<index_t>(1, 16384 / y.extent(3));
}
/// Starts `moments`, unless nullptr, with parts of moment_rows() rows of y.
template <class T>
void start_moments(const tensor_view<T, 4>& y, moment_parts<T>* moments) {
  if (moments == nullptr) return;
  const index_t rows = moment_rows(y);
  moments->start((pixel_count(y.shape()) + rows - 1) / rows, y.extent(3));
}
/// Adds the moments of the complete y to `moments`, unless nullptr, which start_moments() has started.
template <class T>
void add_moments(context<device::cpu>& ctx, const tensor_view<T, 4>& y, moment_parts<T>* moments) {
  if (moments == nullptr) return;
  const index_t rows = moment_rows(y), channels = y.extent(3), pixels = pixel_count(y.shape());
  ctx.parallel_for(moments->parts(), [&](index_t part, int) {
    const index_t first = part * rows;
    moments->add(part, y.data() + first * channels, std::min(rows, pixels - first), channels);
  });
}

/// conv_forward for more than one group; y must not be empty. one_block(shape, x, w, bias, y) computes the
/// ordinary convolution of a block.
template <class T, class OneBlock>
void grouped_forward(context<device::cpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                     const T* w, const T* bias, const tensor_view<T, 4>& y, moment_parts<T>* moments,
                     OneBlock&& one_block) {
  if (is_depthwise(shape)) return depthwise_forward<T>(ctx, shape, x, w, bias, y, moments);
  start_moments(y, moments);
  scratch_frame frame(ctx.scratch());
  if (shape.group_inputs() == 1) {
    const extents<4> repeated_shape{x.extent(0), x.extent(1), x.extent(2), shape.out_channels};
    const tensor_view<T, 4> repeated = frame.take<T>(repeated_shape);
    repeat_channels<T>(ctx, x, shape.group_outputs(), repeated.data());
    depthwise_forward<T>(ctx, repeated_channels(shape), repeated, w, bias, y, nullptr);
    return add_moments(ctx, y, moments);
  }
  const group_blocks blocks(shape);
  const group_weights<T> weights(frame, shape, blocks);
  weights.spread(w);
  const auto bias_of = [&](index_t block) {
    return bias == nullptr ? nullptr : bias + block * blocks.shape.out_channels;
  };
  if (blocks.shape.is_pointwise()) {
    for (index_t block = 0; block < blocks.count; ++block) {
      multiply_rows<T>(ctx, block_columns(x, blocks, block), weights.matrix(block), bias_of(block),
                       block_columns(y, blocks, block));
    }
  } else {
    const group_copy<T> inputs(frame, pixel_count(x.shape()), blocks.count, shape.in_channels);
    const group_copy<T> outputs(frame, pixel_count(y.shape()), blocks.count, shape.out_channels);
    inputs.split(ctx, x.data());
    for (index_t block = 0; block < blocks.count; ++block) {
      one_block(blocks.shape, tensor_view<const T, 4>(inputs.images(block, x.shape())), weights[block],
                bias_of(block), outputs.images(block, y.shape()));
    }
    outputs.join(ctx, y.data());
  }
  add_moments(ctx, y, moments);
}

/// conv_backward_input for more than one group; dx must not be empty. one_block(shape, dy, w, dx) computes
/// the gradient of the input of a block's ordinary convolution; if `add` is set, one_block must add the
/// gradient to its dx.
template <class T, class OneBlock>
void grouped_backward_input(context<device::cpu>& ctx, const conv_shape& shape,
                            const tensor_view<const T, 4>& dy, const T* w, const tensor_view<T, 4>& dx,
                            bool add, OneBlock&& one_block) {
  if (is_depthwise(shape)) return depthwise_backward_input<T>(ctx, shape, dy, w, dx, add);
  scratch_frame frame(ctx.scratch());
  if (shape.group_inputs() == 1) {
    const extents<4> repeated_shape{dx.extent(0), dx.extent(1), dx.extent(2), shape.out_channels};
    const tensor_view<T, 4> repeated = frame.take<T>(repeated_shape);
    depthwise_backward_input<T>(ctx, repeated_channels(shape), dy, w, repeated, false);
    const index_t out = shape.group_outputs();
    return for_chunks(ctx, dx.size(), [&](index_t begin, index_t end) {
      for (index_t i = begin; i < end; ++i) {
        T sum = add ? dx.data()[i] : T{};
        for (index_t o = 0; o < out; ++o) sum += repeated.data()[i * out + o];
        dx.data()[i] = sum;
      }
    });
  }
  const group_blocks blocks(shape);
  const group_weights<T> weights(frame, shape, blocks);
  weights.spread(w);
  if (blocks.shape.is_pointwise()) {
    for (index_t block = 0; block < blocks.count; ++block) {
      multiply_rows<T>(ctx, block_columns(dy, blocks, block),
                       transpose(tensor_view<const T, 2>(weights.matrix(block))),
                       static_cast<const T*>(nullptr), block_columns(dx, blocks, block), {}, add);
    }
    return;
  }
  const group_copy<T> gradients(frame, pixel_count(dy.shape()), blocks.count, shape.out_channels);
  const group_copy<T> results(frame, pixel_count(dx.shape()), blocks.count, shape.in_channels);
  gradients.split(ctx, dy.data());
  if (add) results.split(ctx, dx.data());
  for (index_t block = 0; block < blocks.count; ++block) {
    one_block(blocks.shape, tensor_view<const T, 4>(gradients.images(block, dy.shape())), weights[block],
              results.images(block, dx.shape()));
  }
  results.join(ctx, dx.data());
}

/// conv_backward_weight for more than one group. one_block(shape, x, dy, dw) computes the gradient of the
/// weight of a block's ordinary convolution and overwrites dw.
template <class T, class OneBlock>
void grouped_backward_weight(context<device::cpu>& ctx, const conv_shape& shape,
                             const tensor_view<const T, 4>& x, const tensor_view<const T, 4>& dy, T* dw,
                             bool accumulate, OneBlock&& one_block) {
  if (is_depthwise(shape)) return depthwise_backward_weight<T>(ctx, shape, x, dy, dw, accumulate);
  scratch_frame frame(ctx.scratch());
  if (shape.group_inputs() == 1) {
    const extents<4> repeated_shape{x.extent(0), x.extent(1), x.extent(2), shape.out_channels};
    const tensor_view<T, 4> repeated = frame.take<T>(repeated_shape);
    repeat_channels<T>(ctx, x, shape.group_outputs(), repeated.data());
    return depthwise_backward_weight<T>(ctx, repeated_channels(shape), repeated, dy, dw, accumulate);
  }
  const group_blocks blocks(shape);
  const group_weights<T> weights(frame, shape, blocks);
  if (blocks.shape.is_pointwise()) {
    for (index_t block = 0; block < blocks.count; ++block) {
      linear_backward_weight<T>(ctx, block_columns(x, blocks, block), block_columns(dy, blocks, block),
                                weights.matrix(block), false);
    }
  } else {
    const group_copy<T> inputs(frame, pixel_count(x.shape()), blocks.count, shape.in_channels);
    const group_copy<T> gradients(frame, pixel_count(dy.shape()), blocks.count, shape.out_channels);
    inputs.split(ctx, x.data());
    gradients.split(ctx, dy.data());
    for (index_t block = 0; block < blocks.count; ++block) {
      one_block(blocks.shape, tensor_view<const T, 4>(inputs.images(block, x.shape())),
                tensor_view<const T, 4>(gradients.images(block, dy.shape())), weights[block]);
    }
  }
  weights.collect(dw, accumulate);
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
