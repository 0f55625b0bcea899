// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the forward pass and the gradient of the weight of a convolution with one group. Each pass
/// chooses its algorithm (conv_choice.hpp): Winograd tiles (winograd.hpp), direct sums (direct_conv.hpp,
/// direct_conv_weight.hpp) or one of the special cases few_pixels.hpp, pixel_subset.hpp and
/// thin_weight_gradient.hpp.

#include <algorithm>

#include <pufferfish/ops/conv/conv_choice.hpp>
#include <pufferfish/ops/conv/correlation_operands.hpp>
#include <pufferfish/ops/conv/few_pixels.hpp>
#include <pufferfish/ops/conv/image_tasks.hpp>
#include <pufferfish/ops/conv/pixel_subset.hpp>
#include <pufferfish/ops/conv/thin_weight_gradient.hpp>
#include <pufferfish/ops/conv/winograd_weight.hpp>
#include <pufferfish/ops/linear/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// Cuts `columns` output channels into panels of the largest width that the micro-kernels allow: the kernels
/// for segments (`segments`) or those for rows.
template <class T>
panel_cut cut_panels(index_t columns, bool segments, const kernel_table<T>& kernels) {
  return {(columns + kernels.lanes - 1) / kernels.lanes,
          segments ? kernels.widest_segment : kernels.widest_adjacent};
}

/// The correlation that computes the forward pass of a convolution. The caller sets its weight.
template <class T>
correlation<T> forward_correlation(const conv_shape& shape, const tensor_view<const T, 4>& x,
                                   const tensor_view<product_result_t<T>, 4>& y,
                                   const kernel_table<T>& kernels) {
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

/// Runs a correlation over a batch in the given tasks. At its end each task calls after(task, first, count)
/// for the output pixels that it has computed: rows first .. first + count - 1 of the matrix [all
/// pixels][channels].
template <class T>
void run_correlation(context<device::cpu>& ctx, const correlation<T>& work, const image_tasks& tasks,
                     task_end after = nothing_after) {
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

/// The images of an NHWC batch as a matrix of pixels x channels. Throws shape_error if the view is not dense.
template <class T>
tensor_view<T, 2> as_rows(const tensor_view<T, 4>& view) {
  return view.reshape(extents<2>{view.extent(0) * view.extent(1) * view.extent(2), view.extent(3)});
}

/// A batch of images viewed as one image: each image becomes one line with all its pixels.
template <class T>
tensor_view<T, 4> images_as_lines(const tensor_view<T, 4>& x) {
  return x.reshape(extents<4>{1, x.extent(0), x.extent(1) * x.extent(2), x.extent(3)});
}

/// How a forward pass is computed: its algorithm and the tasks into which the output is cut.
struct forward_plan {
  kernel_algorithm algorithm;
  image_tasks tasks;
};

/// The plan of a forward pass with a given algorithm. y: extents of the output.
template <class T>
forward_plan plan_with(kernel_algorithm algorithm, const conv_shape& shape, const extents<4>& y) {
  if (algorithm == kernel_algorithm::winograd) return {algorithm, tasks_of(winograd_tiles(y[0], y[1], y[2]))};
  const index_t weight_bytes = shape.patch() * shape.out_channels * static_cast<index_t>(sizeof(T));
  if (algorithm == kernel_algorithm::joined_lines ||
      (algorithm == kernel_algorithm::few_pixels && joins_lines(shape, y))) {
    return {algorithm, {1, y[0], y[1] * y[2], weight_bytes}};
  }
  return {algorithm, {y[0], y[1], y[2], weight_bytes}};
}

/// Cuts a correlation over `images` images into tasks.
template <class T>
image_tasks tasks_of(const correlation<T>& work, index_t images) {
  return {images, work.rows.outputs, work.columns.outputs,
          work.weight.cells * work.in_channels * work.out_channels * work.size};
}

/// The correlation of a forward pass, ready to run: with its packed weight, kept from an earlier pass or in
/// memory of `frame`, and, for short lines, a pixel-major copy of x in memory of `frame`.
template <class T>
correlation<T> prepare_forward(context<device::cpu>& ctx, const conv_shape& shape,
                               const tensor_view<const T, 4>& x, const T* w, const tensor_view<T, 4>& y,
                               scratch_frame& frame) {
  const auto& kernels = conv_kernels<T>();
  auto work = forward_correlation<T>(shape, x, y, kernels);
  const index_t cells = shape.kernel.height * shape.kernel.width;
  const index_t in = shape.in_channels, out = shape.out_channels;
  work.weight = {w, in, out, out, cells, kernels.lanes};
  const index_t pixels = y.extent(0) * y.extent(1) * y.extent(2);
  if (!reads_in_place(out, pixels, ctx.packed(w) != nullptr, kernels)) {
    work.weight.row = 0;
    work.weight.data = ctx.packed<T>(
        frame, {w, "convolution panels", {cells, in, out, work.panels.panels}},
        packed_weight_size(cells, in, out, kernels),
        [&](T* to) { pack_weight<T>(ctx, w, cells, in, out, false, work.panels, kernels, to); });
  }
  if (work.by_images) use_pixel_major(ctx, work, x.shape(), frame.take<T>(pixel_major_size(work, x.shape())));
  return work;
}

/// Computes `to` from `from` (both NHWC) by Winograd tiles: the forward pass or, with `transposed`, the
/// gradient of the input with dy as `from` and dx as `to`. `padding`: zeros around `from`; w: HWIO storage.
/// `to` is overwritten or, with `add`, added to. Each task, once all channels of its output pixels are
/// computed, calls after(task, first, count) for pixels first .. first + count - 1 of the batch.
template <class T>
void run_by_tiles(context<device::cpu>& ctx, const size2& padding, const tensor_view<const T, 4>& from,
                  const T* w, bool transposed, const tensor_view<T, 4>& to, bool add,
                  const image_tasks& tasks, task_end after = nothing_after) {
  using C = parameter_t<T>;
  const auto& kernels = conv_kernels<C>();
  const index_t in = transposed ? to.extent(3) : from.extent(3),
                out = transposed ? from.extent(3) : to.extent(3);
  scratch_frame frame(ctx.scratch());
  const winograd_tiles tiles(to.extent(0), to.extent(1), to.extent(2));
  constexpr index_t most = winograd_weight<C>::most_columns;
  const auto weight_of = [&](index_t first, C* storage) {
    return winograd_weight<C>(from.extent(3), {first, std::min(first + most, to.extent(3))}, kernels,
                              storage);
  };
  const bool kept = ctx.packed(w) != nullptr;
  C* const storage = kept ? nullptr : frame.take<C>(weight_of(0, nullptr).size());
  C* scratch = nullptr;
  for (index_t first = 0; first < to.extent(3); first += most) {
    const auto transformed = [&](C* memory) {
      transform_weight<T>(ctx, w, in, out, transposed, weight_of(first, memory));
      return memory;
    };
    winograd_correlation<T> work{tiles,        padding,   from.data(),
                                 from.shape(), to.data(), to.shape(),
                                 add,          &kernels,  weight_of(first, nullptr)};
    work.weight.data =
        kept ? ctx.packed(w)->template get<C>({w, "Winograd tiles", {in, out, first, transposed}},
                                              work.weight.size(), transformed)
             : transformed(storage);
    if (first == 0) scratch = frame.take<C>(work.scratch_size() * ctx.threads());
    ctx.parallel_for(tasks.count(), [&](index_t task, int worker) {
      const range images = tasks.image_range(task), lines = tasks.line_range(task);
      work.run(tiles_of(tiles, images, lines), scratch + worker * work.scratch_size());
      if (work.weight.columns.end < to.extent(3)) return;
      after(task, (images.begin * tasks.lines + lines.begin) * to.extent(2),
            images.length() * lines.length() * to.extent(2));
    });
  }
}

/// y = x * w (no bias), overwritten, by the given plan. After its pixels are computed, each task calls
/// after(task, first, count) as in run_by_tiles.
template <class T>
void run_forward(context<device::cpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                 const T* w, const tensor_view<T, 4>& y, const forward_plan& plan,
                 task_end after = nothing_after) {
  const image_tasks& tasks = plan.tasks;
  if constexpr (has_winograd<T>) {
    if (plan.algorithm == kernel_algorithm::winograd) {
      return run_by_tiles<T>(ctx, shape.padding, x, w, false, y, false, tasks, after);
    }
  }
  if (plan.algorithm == kernel_algorithm::few_pixels) {
    few_pixels_forward<T>(ctx, shape, x, w, y, conv_kernels<T>());
    const index_t pixels = y.extent(0) * y.extent(1) * y.extent(2) / (tasks.images * tasks.lines);
    for (index_t task = 0; task < tasks.count(); ++task) {
      const range images = tasks.image_range(task), lines = tasks.line_range(task);
      after(task, (images.begin * tasks.lines + lines.begin) * pixels,
            images.length() * lines.length() * pixels);
    }
    return;
  }
  scratch_frame frame(ctx.scratch());
  if (plan.algorithm == kernel_algorithm::joined_lines) {
    tensor_view<const T, 4> pixels = x;
    if (skips_pixels(shape)) {
      const auto copies = frame.take<T>(extents<4>{y.extent(0), y.extent(1), y.extent(2), x.extent(3)});
      read_pixels<T>(ctx, shape, x, copies);
      pixels = copies;
    }
    const auto work = prepare_forward<T>(ctx, conv_shape::square(shape.in_channels, shape.out_channels, 1),
                                         images_as_lines(pixels), w, images_as_lines(y), frame);
    return run_correlation(ctx, work, tasks, after);
  }
  const auto work = prepare_forward<T>(ctx, shape, x, w, y, frame);
  run_correlation(ctx, work, tasks, after);
}

/// Chooses how to compute the forward pass y = x * w (conv_choice.hpp), and reports it. y: extents of the
/// output, which must not be empty. Measuring computes the output into scratch memory.
template <class T>
forward_plan plan_forward(context<device::cpu>& ctx, const conv_shape& shape,
                          const tensor_view<const T, 4>& x, const T* w, const extents<4>& y) {
  const kernel_algorithm algorithm = choose_conv<T>(
      ctx, "conv_forward", shape, x.shape(), false, ctx.packed(w), forward_rule<T>(ctx, shape, x.shape(), y),
      [&] { return forward_candidates<T>(ctx, shape, y); },
      [&](kernel_algorithm candidate) {
        scratch_frame frame(ctx.scratch());
        const tensor_view<T, 4> result = frame.take<T>(y);
        run_forward<T>(ctx, shape, x, w, result, plan_with<T>(candidate, shape, y),
                       output_finish<T>(as_rows(result), nullptr, {}));
      });
  return plan_with<T>(algorithm, shape, y);
}

/// Gradient of the weight of a convolution with skips_pixels(), as the matrix product of a copy of the pixels
/// that the convolution reads, transposed, and dy. dw is overwritten or, with `accumulate`, added to.
template <class T>
void copied_backward_weight(context<device::cpu>& ctx, const conv_shape& shape,
                            const tensor_view<const T, 4>& x, const tensor_view<const T, 4>& dy,
                            parameter_t<T>* dw, bool accumulate) {
  scratch_frame frame(ctx.scratch());
  const auto pixels = frame.take<T>(extents<4>{dy.extent(0), dy.extent(1), dy.extent(2), x.extent(3)});
  read_pixels<T>(ctx, shape, x, pixels);
  const tensor_view<parameter_t<T>, 2> gradient(dw, {shape.in_channels, shape.out_channels});
  linear_backward_weight<T>(ctx, as_rows<const T>(pixels), as_rows(dy), gradient, accumulate);
}

/// Computes a weight gradient by the algorithm that it chooses (choose_conv) and reports. run(algorithm, dw,
/// accumulate) computes it; measuring calls run with scratch memory and without `accumulate`. An empty dy
/// needs no choice: the rule's algorithm is run.
template <class T, class Candidates>
void choose_backward_weight(context<device::cpu>& ctx, const conv_shape& shape, const extents<4>& x,
                            const extents<4>& dy, parameter_t<T>* dw, bool accumulate, kernel_algorithm rule,
                            const Candidates& candidates,
                            function_ref<void(kernel_algorithm, parameter_t<T>*, bool)> run) {
  if (volume<4>(dy) == 0) {
    report_conv<T>("conv_backward_weight", shape, x, rule);
    return run(rule, dw, accumulate);
  }
  const kernel_algorithm algorithm =
      choose_conv<T>(ctx, "conv_backward_weight", shape, x, false, nullptr, rule, candidates,
                     [&](kernel_algorithm candidate) {
                       scratch_frame frame(ctx.scratch());
                       run(candidate, frame.take<parameter_t<T>>(shape.patch() * shape.out_channels), false);
                     });
  run(algorithm, dw, accumulate);
}

/// Gradient of the weight for one group (formula: reference::conv_backward_weight). dw is overwritten or,
/// with `accumulate`, added to.
template <class T>
void run_backward_weight(context<device::cpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                         const tensor_view<const T, 4>& dy, T* dw, bool accumulate) {
  choose_backward_weight<T>(
      ctx, shape, x.shape(), dy.shape(), dw, accumulate,
      backward_weight_rule<T>(ctx, shape, x.shape(), dy.shape()),
      [&] { return backward_weight_candidates<T>(ctx, shape); },
      [&](kernel_algorithm algorithm, T* to, bool add) {
        if constexpr (has_winograd<T>) {
          if (algorithm == kernel_algorithm::winograd) {
            return winograd_backward_weight<T>(ctx, shape, x, dy, to, add);
          }
        }
        if (algorithm == kernel_algorithm::copied_pixels) {
          return copied_backward_weight<T>(ctx, shape, x, dy, to, add);
        }
        if (algorithm == kernel_algorithm::thin) {
          return thin_backward_weight<T>(ctx, shape, x, dy, to, add);
        }
        backward_weight<T>(ctx, shape, x, dy, to, add);
      });
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
