// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Two-dimensional convolution with its gradients: the plain reference and the fast CPU form.
///
/// Activations are NHWC and dense. Weights are stored [kernel height][kernel width][in / groups][out]: the
/// matrix of conv_shape::patch() rows and out_channels columns that multiplies the patches of the input. With
/// groups, each group has out / groups consecutive columns, which multiply patches of its own input channels.
///
/// The shape must be valid (conv_shape::validate); the operations check only that the extents fit.
/// Algorithms: 1x1 kernels of stride 1 without padding are matrix products (ops/linear/linear.hpp). Float
/// convolutions with 3x3 kernels and stride 1 use Winograd's algorithm where it is less work, unless
/// context_options::winograd is false; its rounding error is about twice as large. Others are direct sums
/// without a matrix of patches.
///
/// \code
/// const conv_shape shape = conv_shape::square(24, 40, 3, 1, 1);
/// const extents<4> input{9, 6, 33, 24}, output = shape.output(input, "conv1");
/// tensor<float, 4> x(input), y(output), dx(input), w({3, 3, 24, 40}), dw(w.shape());
/// ops::conv_forward<float>(ctx, shape, x, w.data(), nullptr, y);
/// ops::conv_backward_input<float>(ctx, shape, dy, w.data(), dx);
/// ops::conv_backward_weight<float>(ctx, shape, x, dy, dw.data(), false);
/// // OIHW, as in PyTorch, is a view of the same memory: w.view().permute({3, 2, 0, 1}).
/// // Depthwise: in_channels = out_channels = groups; the weight is {3, 3, 1, groups}.
/// \endcode

#include <algorithm>

#include <pufferfish/core/separate.hpp>
#include <pufferfish/ops/conv/grouped_conv.hpp>
#include <pufferfish/ops/conv/winograd_weight.hpp>
#include <pufferfish/ops/linear/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace reference {

/// Calls f(output row, output column, kernel row, kernel column, input row, input column) for every tap that
/// touches a real pixel of an input of the given height and width.
template <class F>
void for_each_tap(const conv_shape& shape, const extents<4>& input, const extents<4>& output, F&& f) {
  for (index_t oy = 0; oy < output[1]; ++oy) {
    for (index_t ox = 0; ox < output[2]; ++ox) {
      for (index_t ky = 0; ky < shape.kernel.height; ++ky) {
        const index_t iy = oy * shape.stride.height - shape.padding.height + ky * shape.dilation.height;
        if (iy < 0 || iy >= input[1]) continue;
        for (index_t kx = 0; kx < shape.kernel.width; ++kx) {
          const index_t ix = ox * shape.stride.width - shape.padding.width + kx * shape.dilation.width;
          if (ix >= 0 && ix < input[2]) f(oy, ox, ky, kx, iy, ix);
        }
      }
    }
  }
}

/// The first input channel of the group that output channel `o` belongs to: 0 for one group, o for a
/// depthwise convolution.
inline index_t first_input(const conv_shape& shape, index_t o) {
  return o / shape.group_outputs() * shape.group_inputs();
}

/// y[n,oy,ox,o] = b[o] + sum over taps and i of x[n,iy,ix,first(o)+i] w[o,i,ky,kx], with iy = oy stride -
/// padding + ky dilation; first(o) is the first input channel of the group of o (0 for one group), and i
/// counts the in / groups channels of that group. Padded taps count as zero. w: OIHW view [out][in /
/// groups][height] [width], any strides; bias: out_channels elements or nullptr.
template <class T>
void conv_forward(const conv_shape& shape, const tensor_view<const T, 4>& x, const tensor_view<const T, 4>& w,
                  const T* bias, const tensor_view<T, 4>& y) {
  for (index_t n = 0; n < y.extent(0); ++n) {
    for (index_t oy = 0; oy < y.extent(1); ++oy) {
      for (index_t ox = 0; ox < y.extent(2); ++ox) {
        for (index_t o = 0; o < y.extent(3); ++o) y(n, oy, ox, o) = bias == nullptr ? T{} : bias[o];
      }
    }
    for_each_tap(shape, x.shape(), y.shape(), [&](auto oy, auto ox, auto ky, auto kx, auto iy, auto ix) {
      for (index_t o = 0; o < y.extent(3); ++o) {
        const index_t first = first_input(shape, o);
        for (index_t i = 0; i < shape.group_inputs(); ++i) {
          y(n, oy, ox, o) += x(n, iy, ix, first + i) * w(o, i, ky, kx);
        }
      }
    });
  }
}

/// dx[n,iy,ix,first(o)+i] = sum over taps and o of dy[n,oy,ox,o] w[o,i,ky,kx], with names as in conv_forward.
/// dx: dense, overwritten; w: OIHW view, any strides.
template <class T>
void conv_backward_input(const conv_shape& shape, const tensor_view<const T, 4>& dy,
                         const tensor_view<const T, 4>& w, const tensor_view<T, 4>& dx) {
  for (T& value : dx.flat()) value = T{};
  for (index_t n = 0; n < dx.extent(0); ++n) {
    for_each_tap(shape, dx.shape(), dy.shape(), [&](auto oy, auto ox, auto ky, auto kx, auto iy, auto ix) {
      for (index_t o = 0; o < dy.extent(3); ++o) {
        const index_t first = first_input(shape, o);
        for (index_t i = 0; i < shape.group_inputs(); ++i) {
          dx(n, iy, ix, first + i) += dy(n, oy, ox, o) * w(o, i, ky, kx);
        }
      }
    });
  }
}

/// dw[o,i,ky,kx] (+)= sum over n and taps of dy[n,oy,ox,o] x[n,iy,ix,first(o)+i], with names as in
/// conv_forward. dw: OIHW view, any strides.
template <class T>
void conv_backward_weight(const conv_shape& shape, const tensor_view<const T, 4>& x,
                          const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dw, bool accumulate) {
  tensor<T, 4> sum(dw.shape());
  for (index_t n = 0; n < x.extent(0); ++n) {
    for_each_tap(shape, x.shape(), dy.shape(), [&](auto oy, auto ox, auto ky, auto kx, auto iy, auto ix) {
      for (index_t o = 0; o < dy.extent(3); ++o) {
        const index_t first = first_input(shape, o);
        for (index_t i = 0; i < shape.group_inputs(); ++i) {
          sum(o, i, ky, kx) += dy(n, oy, ox, o) * x(n, iy, ix, first + i);
        }
      }
    });
  }
  for (index_t o = 0; o < dw.extent(0); ++o) {
    for (index_t i = 0; i < dw.extent(1); ++i) {
      for (index_t ky = 0; ky < dw.extent(2); ++ky) {
        for (index_t kx = 0; kx < dw.extent(3); ++kx) {
          dw(o, i, ky, kx) = sum(o, i, ky, kx) + (accumulate ? dw(o, i, ky, kx) : T{});
        }
      }
    }
  }
}

}  // namespace reference

namespace detail {

/// Throws shape_error, naming the operation `what`, unless `shape` maps an input of extents x to an output of
/// extents y.
inline void check_conv(const char* what, const conv_shape& shape, const extents<4>& x, const extents<4>& y) {
  const extents<4> expected = shape.output(x, what);
  if (expected != y) {
    pufferfish::detail::throw_error<shape_error>(
        {what, ": input ", x, " gives output ", expected, ", not ", y});
  }
}

/// NHWC images as a matrix of pixels x channels. Throws shape_error if the view is not dense.
template <class T>
tensor_view<T, 2> as_rows(const tensor_view<T, 4>& view) {
  return view.reshape(extents<2>{view.extent(0) * view.extent(1) * view.extent(2), view.extent(3)});
}

template <class T>
tensor_view<const T, 2> as_matrix(const conv_shape& shape, const T* w) {
  return {w, {shape.patch(), shape.out_channels}};
}

/// The cut of `columns` output channels into panels, as wide as the kernels for segments or for rows allow.
template <class T>
panel_cut cut_panels(index_t columns, bool segments, const kernel_table<T>& kernels) {
  return {(columns + kernels.lanes - 1) / kernels.lanes,
          segments ? kernels.widest_segment : kernels.widest_adjacent};
}

/// The forward correlation of a convolution; the caller sets its weight.
template <class T>
correlation<T> forward_correlation(const conv_shape& shape, const tensor_view<const T, 4>& x,
                                   const tensor_view<T, 4>& y, const kernel_table<T>& kernels) {
  const tap_axis rows = forward_axis(x.extent(1), y.extent(1), shape.kernel.height, shape.stride.height,
                                     shape.padding.height, shape.dilation.height);
  const tap_axis columns = forward_axis(x.extent(2), y.extent(2), shape.kernel.width, shape.stride.width,
                                        shape.padding.width, shape.dilation.width);
  const bool segments = segments_fit(columns);
  const bool by_images = lines_too_short(columns.outputs, y.extent(0));
  return {rows,
          columns,
          shape.kernel.width,
          x.data(),
          x.extent(3),
          dense_steps(x.shape()),
          y.data(),
          y.extent(3),
          dense_steps(y.shape()),
          &kernels,
          segments && !by_images,
          by_images,
          false,
          0,
          cut_panels(y.extent(3), segments && !by_images, kernels),
          {}};
}

/// The correlation that computes the input gradients of one phase (row and column modulo the stride).
template <class T>
correlation<T> backward_correlation(const conv_shape& shape, const tensor_view<const T, 4>& dy,
                                    const tensor_view<T, 4>& dx, index_t row_phase, index_t column_phase,
                                    const kernel_table<T>& kernels) {
  const tap_axis rows = backward_axis(dx.extent(1), dy.extent(1), shape.kernel.height, shape.stride.height,
                                      shape.padding.height, shape.dilation.height, row_phase);
  const tap_axis columns = backward_axis(dx.extent(2), dy.extent(2), shape.kernel.width, shape.stride.width,
                                         shape.padding.width, shape.dilation.width, column_phase);
  const bool segments = segments_fit(columns);
  const bool by_images = lines_too_short(columns.outputs, dx.extent(0));
  return {rows,
          columns,
          shape.kernel.width,
          dy.data(),
          dy.extent(3),
          dense_steps(dy.shape()),
          dx.data(),
          dx.extent(3),
          dense_steps(dx.shape()),
          &kernels,
          segments && !by_images,
          by_images,
          false,
          0,
          cut_panels(dx.extent(3), segments && !by_images, kernels),
          {}};
}

/// Runs a correlation over a batch, in tasks whose number depends on shapes alone. At its end, each task
/// calls after(task, first, count) for the rows of output pixels that it has computed: rows first .. first +
/// count - 1 of the matrix of all pixels.
template <class T, class After>
void run_correlation(context<device::cpu>& ctx, const correlation<T>& work, const image_tasks& tasks,
                     After&& after) {
  scratch_frame frame(ctx.scratch());
  const index_t most_taps = std::max<index_t>(1, work.rows.taps * work.columns.taps);
  auto* taps = frame.take<block_tap<T>>(most_taps * ctx.threads());
  ctx.parallel_for(tasks.count(), [&](index_t task, int worker) {
    const range images = tasks.image_range(task), lines = tasks.line_range(task);
    work.run(images, lines, taps + worker * most_taps);
    after(task, (images.begin * tasks.lines + lines.begin) * work.columns.outputs,
          images.length() * lines.length() * work.columns.outputs);
  });
}

/// The tasks of a forward convolution.
template <class T>
image_tasks forward_tasks(const context<device::cpu>& ctx, const conv_shape& shape, const extents<4>& x,
                          const extents<4>& y) {
  if (winograd_pays<T>(ctx, shape, x, y)) return tasks_of(winograd_tiles(y[0], y[1], y[2]));
  return {y[0], y[1], y[2], shape.patch() * shape.out_channels * static_cast<index_t>(sizeof(T))};
}

template <class T>
image_tasks tasks_of(const correlation<T>& work, index_t images) {
  return {images, work.rows.outputs, work.columns.outputs,
          work.weight.cells * work.in_channels * work.out_channels * work.size};
}

/// The forward correlation of a convolution with its packed weight and, if needed, a pixel-major copy of x.
template <class T>
correlation<T> prepare_forward(context<device::cpu>& ctx, const conv_shape& shape,
                               const tensor_view<const T, 4>& x, const T* w, const tensor_view<T, 4>& y,
                               scratch_frame& frame) {
  const auto& kernels = conv_kernels<T>();
  auto work = forward_correlation<T>(shape, x, y, kernels);
  const index_t cells = shape.kernel.height * shape.kernel.width;
  T* storage = frame.take<T>(packed_weight_size(cells, shape.in_channels, shape.out_channels, kernels));
  const index_t pixels = y.extent(0) * y.extent(1) * y.extent(2);
  work.weight = pack_weight<T>(ctx, w, cells, shape.in_channels, shape.out_channels, false, pixels,
                               work.panels, kernels, storage);
  if (work.by_images) use_pixel_major(ctx, work, x.shape(), frame.take<T>(pixel_major_size(work, x.shape())));
  return work;
}

/// Computes `to` from `from` (NHWC) by Winograd tiles; each task then calls after(task, first, count) for
/// its rows of output pixels. `transposed`: computes the gradient of the input from that of the output.
template <class T, class After>
void run_by_tiles(context<device::cpu>& ctx, const size2& padding, const tensor_view<const T, 4>& from,
                  const T* w, bool transposed, const tensor_view<T, 4>& to, bool add,
                  const image_tasks& tasks, After&& after) {
  const auto& kernels = conv_kernels<T>();
  const index_t in = transposed ? to.extent(3) : from.extent(3),
                out = transposed ? from.extent(3) : to.extent(3);
  scratch_frame frame(ctx.scratch());
  const winograd_tiles tiles(to.extent(0), to.extent(1), to.extent(2));
  constexpr index_t most = winograd_weight<T>::most_columns;
  const auto weight_of = [&](index_t first, T* storage) {
    return winograd_weight<T>(from.extent(3), {first, std::min(first + most, to.extent(3))}, kernels,
                              storage);
  };
  T* const storage = frame.take<T>(weight_of(0, nullptr).size());
  T* scratch = nullptr;
  for (index_t first = 0; first < to.extent(3); first += most) {
    const winograd_correlation<T> work{tiles,        padding,   from.data(),
                                       from.shape(), to.data(), to.shape(),
                                       add,          &kernels,  weight_of(first, storage)};
    transform_weight<T>(ctx, w, in, out, transposed, work.weight);
    if (first == 0) scratch = frame.take<T>(work.scratch_size() * ctx.threads());
    ctx.parallel_for(tasks.count(), [&](index_t task, int worker) {
      const range images = tasks.image_range(task), lines = tasks.line_range(task);
      work.run(tiles_of(tiles, images, lines), scratch + worker * work.scratch_size());
      if (work.weight.columns.end < to.extent(3)) return;
      after(task, (images.begin * tasks.lines + lines.begin) * to.extent(2),
            images.length() * lines.length() * to.extent(2));
    });
  }
}

/// y = x * w, split into `tasks` (see forward_tasks); after(task, first, count) as in run_by_tiles.
template <class T, class After>
void run_forward(context<device::cpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                 const T* w, const tensor_view<T, 4>& y, const image_tasks& tasks, After&& after) {
  if constexpr (has_winograd<T>) {
    if (winograd_pays<T>(ctx, shape, x.shape(), y.shape())) {
      return run_by_tiles<T>(ctx, shape.padding, x, w, false, y, false, tasks, after);
    }
  }
  scratch_frame frame(ctx.scratch());
  const auto work = prepare_forward<T>(ctx, shape, x, w, y, frame);
  run_correlation(ctx, work, tasks, after);
}

/// The convolution that computes dx from dy, for a kernel of 3x3 and stride 1.
inline conv_shape turned(const conv_shape& shape) {
  return {shape.out_channels,
          shape.in_channels,
          shape.kernel,
          shape.stride,
          {2 - shape.padding.height, 2 - shape.padding.width},
          shape.dilation};
}

/// Work on rows of the output while they are in the cache: adds the
/// bias and collects the moments that a following batch norm needs.
template <class T>
struct output_finish {
  tensor_view<T, 2> y;  ///< all rows
  const T* bias;
  const moment_parts<T>* moments;

  /// Finishes rows first .. first + count - 1 of y, which task `task` has computed. Tasks may call it at the
  /// same time.
  void operator()(index_t task, index_t first, index_t count) const {
    const tensor_view<T, 2> rows = y.slice(0, first, count);
    add_bias(rows, bias);
    if (moments != nullptr) moments->add(task, rows.data(), count, rows.stride(0));
  }
};

}  // namespace detail

/// y = x * w + b (formula: reference::conv_forward), for any number of groups. x, y: NHWC, dense; w: HWIO
/// storage, patch() * out_channels elements; bias: out_channels elements or nullptr. y is overwritten and
/// overlaps no input. `moments`, unless nullptr, receives the mean and variance of each channel of y; see
/// moment_parts. Throws shape_error, before anything is written, if x does not fit the shape or y is not its
/// output.
template <class T>
void conv_forward(context<device::cpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                  const T* w, const T* bias, const tensor_view<T, 4>& y, moment_parts<T>* moments = nullptr) {
  detail::check_conv("conv_forward", shape, x.shape(), y.shape());
  if (y.empty()) {
    if (moments != nullptr) moments->start(0, y.extent(3));
    return;
  }
  if (shape.groups > 1) {
    return detail::grouped_forward<T>(
        ctx, shape, x, w, bias, y, moments,
        [&](const conv_shape& one, const tensor_view<const T, 4>& from, const T* weight, const T* add,
            const tensor_view<T, 4>& to) { conv_forward<T>(ctx, one, from, weight, add, to); });
  }
  if (shape.is_pointwise()) {
    return linear_forward<T>(ctx, detail::as_rows(x), detail::as_matrix(shape, w), bias, detail::as_rows(y),
                             moments);
  }
  const detail::image_tasks tasks = detail::forward_tasks<T>(ctx, shape, x.shape(), y.shape());
  if (moments != nullptr) moments->start(tasks.count(), y.extent(3));
  const detail::output_finish<T> finish{detail::as_rows(y), bias, moments};
  detail::run_forward<T>(ctx, shape, x, w, y, tasks, finish);
}
PUFFERFISH_SEPARATE_FUNCTION(conv, conv_forward);

/// dx from dy (formula: reference::conv_backward_input), overwritten or with `add` added to. dy: NHWC of the
/// extents of y, dx: NHWC of the extents of x, both dense; w: HWIO storage; dx overlaps no input. Throws
/// shape_error as conv_forward.
template <class T>
void conv_backward_input(context<device::cpu>& ctx, const conv_shape& shape,
                         const tensor_view<const T, 4>& dy, const T* w, const tensor_view<T, 4>& dx,
                         bool add = false) {
  detail::check_conv("conv_backward_input", shape, dx.shape(), dy.shape());
  if (dx.empty()) return;
  if (shape.groups > 1) {
    return detail::grouped_backward_input<T>(
        ctx, shape, dy, w, dx, add,
        [&](const conv_shape& one, const tensor_view<const T, 4>& from, const T* weight,
            const tensor_view<T, 4>& to) { conv_backward_input<T>(ctx, one, from, weight, to, add); });
  }
  if (shape.is_pointwise()) {
    return linear_backward_input<T>(ctx, detail::as_rows(dy), detail::as_matrix(shape, w),
                                    detail::as_rows(dx), add);
  }
  if constexpr (detail::has_winograd<T>) {
    const conv_shape turned = detail::turned(shape);
    if (detail::winograd_pays<T>(ctx, turned, dy.shape(), dx.shape())) {
      const auto tasks = detail::tasks_of(detail::winograd_tiles(dx.extent(0), dx.extent(1), dx.extent(2)));
      return detail::run_by_tiles<T>(ctx, turned.padding, dy, w, true, dx, add, tasks,
                                     [](index_t, index_t, index_t) {});
    }
  }
  const auto& kernels = detail::conv_kernels<T>();
  const index_t cells = shape.kernel.height * shape.kernel.width;
  scratch_frame frame(ctx.scratch());
  T* storage =
      frame.take<T>(detail::packed_weight_size(cells, shape.out_channels, shape.in_channels, kernels));
  index_t panels = 0, block = 0;
  T* gradients = nullptr;
  for (index_t row = 0; row < std::min(shape.stride.height, dx.extent(1)); ++row) {
    for (index_t column = 0; column < std::min(shape.stride.width, dx.extent(2)); ++column) {
      auto work = detail::backward_correlation<T>(shape, dy, dx, row, column, kernels);
      // A phase with fewer pixels may be cut into other panels than the previous phase: repack the weight.
      if (row + column == 0 || work.panels.panels != panels) {
        panels = work.panels.panels;
        detail::pack_weight<T>(ctx, w, cells, shape.in_channels, shape.out_channels, true, 0, work.panels,
                               kernels, storage);
      }
      work.weight = {storage, shape.out_channels, shape.in_channels, 0, cells, kernels.lanes};
      work.add = add;
      if (work.by_images) {
        // All phases that read the copy in blocks of the same depth share it.
        if (gradients == nullptr || work.block_depth() != block) {
          block = work.block_depth();
          gradients = frame.take<T>(detail::pixel_major_size(work, dy.shape()));
          detail::use_pixel_major(ctx, work, dy.shape(), gradients);
        } else {
          detail::point_to_pixel_major(work, dy.shape(), gradients);
        }
      }
      detail::run_correlation(ctx, work, detail::tasks_of(work, dx.extent(0)),
                              [](index_t, index_t, index_t) {});
    }
  }
}
PUFFERFISH_SEPARATE_FUNCTION(conv, conv_backward_input);

/// dw (HWIO storage) from x and dy, overwritten or with `accumulate` added to (formula:
/// reference::conv_backward_weight). x, dy: NHWC, dense; dw overlaps no input. For a batch without images dw
/// becomes 0 (with `accumulate`: unchanged). Parts of the batch have sums of their own in scratch, which are
/// added in order. Throws shape_error as conv_forward.
template <class T>
void conv_backward_weight(context<device::cpu>& ctx, const conv_shape& shape,
                          const tensor_view<const T, 4>& x, const tensor_view<const T, 4>& dy, T* dw,
                          bool accumulate) {
  detail::check_conv("conv_backward_weight", shape, x.shape(), dy.shape());
  if (shape.groups > 1) {
    return detail::grouped_backward_weight<T>(ctx, shape, x, dy, dw, accumulate,
                                              [&](const conv_shape& one, const tensor_view<const T, 4>& from,
                                                  const tensor_view<const T, 4>& gradient, T* to) {
                                                conv_backward_weight<T>(ctx, one, from, gradient, to, false);
                                              });
  }
  const tensor_view<T, 2> gradient(dw, {shape.patch(), shape.out_channels});
  if (shape.is_pointwise()) {
    return linear_backward_weight<T>(ctx, detail::as_rows(x), detail::as_rows(dy), gradient, accumulate);
  }
  if constexpr (detail::has_winograd<T>) {
    if (detail::winograd_pays<T>(ctx, shape, x.shape(), dy.shape())) {
      return detail::winograd_backward_weight<T>(ctx, shape, x, dy, dw, accumulate);
    }
  }
  detail::backward_weight<T>(ctx, shape, x, dy, dw, accumulate);
}
PUFFERFISH_SEPARATE_FUNCTION(conv, conv_backward_weight);

/// GPU overloads: <pufferfish/gpu.hpp>. They collect no moments: pass no_moments = nullptr. Unless the shape
/// is pointwise, they also throw shape_error if an image, a patch or kernel height * kernel width *
/// out_channels has more elements than a 31-bit number can count.
template <class T>
void conv_forward(context<device::gpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                  const T* w, const T* bias, const tensor_view<T, 4>& y,
                  moment_parts<T>* no_moments = nullptr);
template <class T>
void conv_backward_input(context<device::gpu>& ctx, const conv_shape& shape,
                         const tensor_view<const T, 4>& dy, const T* w, const tensor_view<T, 4>& dx,
                         bool add = false);
template <class T>
void conv_backward_weight(context<device::gpu>& ctx, const conv_shape& shape,
                          const tensor_view<const T, 4>& x, const tensor_view<const T, 4>& dy,
                          parameter_t<T>* dw, bool accumulate);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
