// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: convolutions of more than one group (conv_shape::groups), forward and both gradients. Depthwise
/// shapes have kernels of their own (depthwise_conv.hpp). Shapes with one input channel per group and several
/// outputs are depthwise convolutions of an input whose channels are repeated. Other shapes are cut into
/// blocks of neighbouring groups; the channels of each block are copied to a contiguous tensor, and each
/// block is one ordinary convolution. 1x1 convolutions need no copies.
///
/// A block has one group, or as many narrow groups as fill a vector of 16 channels: its weight is then block
/// diagonal, and its products with zero use lanes that would be empty otherwise. (A value that is not finite
/// makes other groups of its block NaN.)
///
/// Scratch: the weights of all blocks, and unless the convolution is pointwise copies of the input and of the
/// output.
///
/// Weights are stored [kernel height][kernel width][in / groups][out]. Each group has out / groups
/// consecutive columns.

#include <algorithm>

#include <pufferfish/ops/conv/depthwise_conv.hpp>
#include <pufferfish/ops/linear/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// How a convolution is cut into blocks of groups.
struct group_blocks {
  index_t groups;  ///< groups in a block
  index_t count;
  conv_shape shape;  ///< the convolution of a block, an ordinary one

  /// A block has the largest number of groups that divides all groups and keeps inputs and outputs of a block
  /// within 16 channels, at least one group.
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

/// to[i] = from[i] for i < width, fast for whole vectors.
template <class T>
void copy_channels(const T* from, T* to, index_t width) {
  constexpr index_t piece = 16;
  index_t i = 0;
  for (; i + piece <= width; i += piece) std::copy_n(from + i, piece, to + i);
  for (; i < width; ++i) to[i] = from[i];
}

/// A copy in scratch memory of `rows` pixels whose channels are cut into `blocks` parts of `width` channels.
/// Each part is a dense matrix [rows][width]; the parts are stored one after another.
template <class T>
struct group_copy {
  index_t rows, blocks, width;
  T* data;

  group_copy(scratch_frame& frame, index_t row_count, index_t block_count, index_t channels)
      : rows(row_count),
        blocks(block_count),
        width(channels / block_count),
        data(frame.take<T>(row_count * channels)) {}

  /// Fills the parts from pixels with all channels, and the reverse: writes the parts to pixels with all
  /// channels.
  void split(context<device::cpu>& ctx, const T* from) const {
    for_row_chunks(ctx, rows, blocks * width, [&](index_t begin, index_t end) {
      for (index_t block = 0; block < blocks; ++block) {
        for (index_t row = begin; row < end; ++row) {
          copy_channels(from + (row * blocks + block) * width, data + (block * rows + row) * width, width);
        }
      }
    });
  }
  void join(context<device::cpu>& ctx, T* to) const {
    for_row_chunks(ctx, rows, blocks * width, [&](index_t begin, index_t end) {
      for (index_t block = 0; block < blocks; ++block) {
        for (index_t row = begin; row < end; ++row) {
          copy_channels(data + (block * rows + row) * width, to + (row * blocks + block) * width, width);
        }
      }
    });
  }
  /// Part number `block`, viewed as images with the extents `shape`, but with the `width` channels of a part.
  tensor_view<T, 4> images(index_t block, extents<4> shape) const {
    shape[3] = width;
    return {data + block * rows * width, shape};
  }
};

/// The weights of all blocks, [blocks][kernel height][kernel width][in of a block][out of a block].
template <class T>
struct group_weights {
  const group_blocks& blocks;
  index_t cells, in, out;  ///< elements of the kernel; channels of a group
  T* data;

  group_weights(scratch_frame& frame, const conv_shape& whole, const group_blocks& cut)
      : blocks(cut),
        cells(whole.kernel.height * whole.kernel.width),
        in(whole.group_inputs()),
        out(whole.group_outputs()),
        data(frame.take<T>(cut.count * size())) {}

  index_t size() const { return cells * blocks.shape.in_channels * blocks.shape.out_channels; }
  /// The weight of a block, size() elements, as an array and as a matrix.
  T* operator[](index_t block) const { return data + block * size(); }
  tensor_view<T, 2> matrix(index_t block) const {
    return {(*this)[block], {cells * blocks.shape.in_channels, blocks.shape.out_channels}};
  }

  /// Fills the blocks from a stored weight; zeros between different groups.
  void spread(const T* w) const {
    if (blocks.groups > 1) std::fill_n(data, blocks.count * size(), T{});
    for_each_row([&](index_t stored, index_t own) { copy_channels(w + stored, data + own, out); });
  }
  /// dw (+)= the elements of the blocks that correspond to stored weights.
  void collect(T* dw, bool accumulate) const {
    for_each_row([&](index_t stored, index_t own) {
      for (index_t o = 0; o < out; ++o) {
        dw[stored + o] = data[own + o] + (accumulate ? dw[stored + o] : T{});
      }
    });
  }

 private:
  /// f(offset in the stored weight, offset in `data`) for each row of `out` elements.
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

inline index_t pixel_count(const extents<4>& shape) { return shape[0] * shape[1] * shape[2]; }

/// The depthwise convolution with one input channel for each output channel of a shape with one input channel
/// per group.
inline conv_shape repeated_channels(conv_shape shape) {
  shape.groups = shape.in_channels = shape.out_channels;
  return shape;
}

/// to = x with each channel repeated `times` times.
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

/// The channels of one block, as columns of the matrix of pixels.
template <class T>
tensor_view<T, 2> block_columns(const tensor_view<T, 4>& view, const group_blocks& blocks, index_t block) {
  const index_t width = view.extent(3) / blocks.count;
  const tensor_view<T, 2> rows = view.reshape(extents<2>{pixel_count(view.shape()), view.extent(3)});
  return rows.slice(1, block * width, width);
}

/// Moments in a separate pass, for results that are final only after all groups: call start_moments()
/// before taking scratch, add_moments() when y is complete. The cut into parts depends on shapes alone.
template <class T>
index_t moment_rows(const tensor_view<T, 4>& y) {
  return std::max<index_t>(1, 16384 / y.extent(3));
}
template <class T>
void start_moments(const tensor_view<T, 4>& y, moment_parts<T>* moments) {
  if (moments == nullptr) return;
  const index_t rows = moment_rows(y);
  moments->start((pixel_count(y.shape()) + rows - 1) / rows, y.extent(3));
}
template <class T>
void add_moments(context<device::cpu>& ctx, const tensor_view<T, 4>& y, moment_parts<T>* moments) {
  if (moments == nullptr) return;
  const index_t rows = moment_rows(y), channels = y.extent(3), pixels = pixel_count(y.shape());
  ctx.parallel_for(moments->parts(), [&](index_t part, int) {
    const index_t first = part * rows;
    moments->add(part, y.data() + first * channels, std::min(rows, pixels - first), channels);
  });
}

/// conv_forward for more than one group; y is not empty. one_block(shape, x, w, bias, y) computes an ordinary
/// convolution.
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

/// conv_backward_input for more than one group; dx is not empty. one_block(shape, dy, w,
/// dx) computes the input gradient of an ordinary convolution; with `add`, it adds to dx.
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
                       static_cast<const T*>(nullptr), block_columns(dx, blocks, block), nullptr, add);
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

/// conv_backward_weight for more than one group. one_block(shape, x, dy, dw) computes the weight gradient of
/// an ordinary convolution.
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
