// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: depthwise convolution (one input and one output channel per group, in = out = groups), forward
/// and both gradients: y[n,oy,ox,c] = b[c] + sum over kernel elements of x[n,iy,ix,c] w[ky,kx,c]. The
/// operation has only kernel height * kernel width multiply-adds per element, so memory limits its speed.
/// Kernels are vectorised over channels.
///
/// A 3x3 kernel with stride 1 or 2 and without dilation is computed in tiles of 2 x 4 results, so that an
/// input element is loaded once per tile (4 x 6 pixels for stride 1, 5 x 9 for stride 2). Other kernels are
/// computed pixel by pixel. A tile at the edge of an image reads a row of zeros in place of padding and
/// writes results outside the image to an unused row.

#include <algorithm>
#include <cstddef>

#include <pufferfish/core/context.hpp>
#include <pufferfish/ops/conv/conv_shape.hpp>
#include <pufferfish/ops/conv/depthwise_tiles.hpp>
#include <pufferfish/ops/conv/image_tasks.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>
#include <pufferfish/ops/norm/moments.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// True if the convolution is computed in tiles (depthwise_tiles.hpp): a 3x3 kernel, stride 1 or 2 in both
/// directions, no dilation.
inline bool depthwise_in_tiles(const conv_shape& shape) {
  return shape.kernel == size2{3, 3} && shape.dilation == size2{1, 1} &&
         (shape.stride == size2{1, 1} || shape.stride == size2{2, 2});
}

/// True for a depthwise convolution: one input and one output channel per group.
inline bool is_depthwise(const conv_shape& shape) {
  return shape.groups == shape.in_channels && shape.groups == shape.out_channels;
}

/// Computes `results` from `pixels` (both NHWC, dense) by tiles: the forward pass, or the gradient of the
/// input with dy as `pixels` and dx as `results`. `rows`, `columns`: the tiles on each axis; `weight`:
/// [9][channels]; `bias`: channels elements or nullptr. Results are overwritten or, with `add`, added to;
/// with `stream` complete tiles are written past the caches. Each task then calls after(task, first, count)
/// for result pixels first .. first + count - 1, numbered through the batch, which it has computed.
template <class Taps, class T>
void run_depthwise_tiles(context<device::cpu>& ctx, const depthwise_axis& rows, const depthwise_axis& columns,
                         const tensor_view<const T, 4>& pixels, const T* weight, const T* bias,
                         const tensor_view<T, 4>& results, bool add, bool stream, const image_tasks& tasks,
                         task_end after = nothing_after) {
  const index_t channels = pixels.extent(3);
  scratch_frame frame(ctx.scratch());
  T* const zeros = frame.take<T>(channels);
  std::fill_n(zeros, channels, T{});
  T* const unused = frame.take<T>(channels * ctx.threads());
  std::fill_n(unused, channels * ctx.threads(), T{});
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), depthwise_kernels, depthwise_results<Taps, T>);
  const auto flush = PUFFERFISH_KERNEL(widest_isa(), depthwise_kernels, flush_streams);
  ctx.parallel_for(tasks.count(), [&](index_t task, int worker) {
    const range images = tasks.image_range(task), lines = tasks.line_range(task);
    T* const spare = unused + worker * channels;
    const T* from[static_cast<std::size_t>(Taps::pixels)];
    T* to[static_cast<std::size_t>(Taps::results)];
    depthwise_tile<T> tile{from, weight, bias, to, channels, add, stream, {}};
    for (index_t image = images.begin; image < images.end; ++image) {
      for (index_t line = lines.begin; line < lines.end; ++line) {
        for (index_t column = 0; column < columns.tiles; ++column) {
          point_at_block<const T>(pixels.data(), pixels.shape(), image, rows.pixel(line),
                                  columns.pixel(column), Taps::pixel_rows, Taps::pixel_columns, zeros, from);
          point_at_block<T>(results.data(), results.shape(), image, rows.result(line), columns.result(column),
                            Taps::result_rows, Taps::result_columns, spare, to);
          tile.stream = stream && std::find(to, to + Taps::results, spare) == to + Taps::results;
          tile.fetch = fetch_below(pixels, image, rows.pixel(line) + Taps::pixel_rows,
                                   columns.pixel(column) + Taps::pixel_columns - Taps::next_columns);
          kernel(tile);
        }
      }
    }
    if (stream) flush();
    const index_t height = results.extent(1), width = results.extent(2);
    const index_t first = rows.results_before(lines.begin, height),
                  end = rows.results_before(lines.end, height);
    after(task, (images.begin * height + first) * width, images.length() * (end - first) * width);
  });
}

/// Lists the taps (pixel address and weight address) of one result pixel that do not fall on padding, for
/// kernels of any size. The result pixel is at position (row, column) of the axes' outputs in image `image`.
/// Writes at most rows.taps * columns.taps entries to `taps` and returns their number.
template <class T>
index_t depthwise_taps(const tap_axis& rows, const tap_axis& columns, index_t kernel_width,
                       const tensor_view<const T, 4>& pixels, const T* weight, index_t image, index_t row,
                       index_t column, depthwise_tap<T>* taps) {
  const index_t channels = pixels.extent(3);
  index_t count = 0;
  for (index_t ky = 0; ky < rows.taps; ++ky) {
    if (!rows.meets(ky, row)) continue;
    const index_t iy = row * rows.in_step + rows.tap_offset(ky);
    for (index_t kx = 0; kx < columns.taps; ++kx) {
      if (!columns.meets(kx, column)) continue;
      const index_t ix = column * columns.in_step + columns.tap_offset(kx);
      const index_t cell = rows.tap_kernel(ky) * kernel_width + columns.tap_kernel(kx);
      taps[count++] = {pixels.data() + ((image * pixels.extent(1) + iy) * pixels.extent(2) + ix) * channels,
                       weight + cell * channels};
    }
  }
  return count;
}

/// Computes `results` from `pixels` pixel by pixel, for kernels of any size: the forward pass, or one phase
/// of the gradient of the input (result pixels with the same row and column modulo the stride). Arguments and
/// after() as in run_depthwise_tiles; `weight`: [kernel height][kernel_width][channels]. Rows given to
/// after() are meaningful for the forward pass only, whose axes cover all result pixels.
template <class T>
void run_depthwise_pixels(context<device::cpu>& ctx, const tap_axis& rows, const tap_axis& columns,
                          index_t kernel_width, const tensor_view<const T, 4>& pixels, const T* weight,
                          const T* bias, const tensor_view<T, 4>& results, bool add, const image_tasks& tasks,
                          task_end after = nothing_after) {
  scratch_frame frame(ctx.scratch());
  const index_t most = std::max<index_t>(1, rows.taps * columns.taps);
  auto* const storage = frame.take<depthwise_tap<T>>(most * ctx.threads());
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), depthwise_kernels, depthwise_pixel<T>);
  ctx.parallel_for(tasks.count(), [&](index_t task, int worker) {
    const range images = tasks.image_range(task), lines = tasks.line_range(task);
    depthwise_tap<T>* const taps = storage + worker * most;
    for (index_t image = images.begin; image < images.end; ++image) {
      for (index_t line = lines.begin; line < lines.end; ++line) {
        for (index_t column = 0; column < columns.outputs; ++column) {
          const index_t count =
              depthwise_taps<T>(rows, columns, kernel_width, pixels, weight, image, line, column, taps);
          T* const result = &results(image, rows.out_first + line * rows.out_step,
                                     columns.out_first + column * columns.out_step, 0);
          kernel(taps, count, bias, result, pixels.extent(3), add);
        }
      }
    }
    after(task, (images.begin * tasks.lines + lines.begin) * columns.outputs,
          images.length() * lines.length() * columns.outputs);
  });
}

/// y = x * w + b by tiles, for a shape with depthwise_in_tiles(). Each task adds the moments of its rows
/// right after it has computed them. Large results are written past the caches if no moments are collected.
template <class Taps, class T>
void depthwise_forward_tiles(context<device::cpu>& ctx, const conv_shape& shape,
                             const tensor_view<const T, 4>& x, const T* w, const T* bias,
                             const tensor_view<T, 4>& y, moment_parts<T>* moments) {
  const auto rows = depthwise_forward_axis(y.extent(1), Taps::result_rows, shape.stride.height,
                                           shape.padding.height),
             columns = depthwise_forward_axis(y.extent(2), Taps::result_columns, shape.stride.width,
                                              shape.padding.width);
  const image_tasks tasks(y.extent(0), rows.tiles, Taps::result_rows * y.extent(2), 0);
  if (moments != nullptr) moments->start(tasks.count(), y.extent(3));
  const bool stream = moments == nullptr && streams_past_cache(y.data(), y.size(), y.extent(3));
  run_depthwise_tiles<Taps, T>(ctx, rows, columns, x, w, bias, y, false, stream, tasks,
                               [&](index_t task, index_t first, index_t count) {
                                 if (moments == nullptr) return;
                                 const index_t channels = y.extent(3);
                                 moments->add(task, y.data() + first * channels, count, channels);
                               });
}

/// y = x * w + b for a depthwise shape (formula: reference::conv_forward). y must not be empty. `bias` and
/// `moments` may be nullptr.
template <class T>
void depthwise_forward(context<device::cpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                       const T* w, const T* bias, const tensor_view<T, 4>& y, moment_parts<T>* moments) {
  if (depthwise_in_tiles(shape)) {
    return shape.stride.height == 1
               ? depthwise_forward_tiles<depthwise_forward_taps<1>, T>(ctx, shape, x, w, bias, y, moments)
               : depthwise_forward_tiles<depthwise_forward_taps<2>, T>(ctx, shape, x, w, bias, y, moments);
  }
  const tap_axis rows = forward_axis(x.extent(1), y.extent(1), shape.kernel.height, shape.stride.height,
                                     shape.padding.height, shape.dilation.height);
  const tap_axis columns = forward_axis(x.extent(2), y.extent(2), shape.kernel.width, shape.stride.width,
                                        shape.padding.width, shape.dilation.width);
  const image_tasks tasks(y.extent(0), y.extent(1), y.extent(2), 0);
  if (moments != nullptr) moments->start(tasks.count(), y.extent(3));
  run_depthwise_pixels<T>(ctx, rows, columns, shape.kernel.width, x, w, bias, y, false, tasks,
                          [&](index_t task, index_t first, index_t count) {
                            if (moments == nullptr) return;
                            const index_t channels = y.extent(3);
                            moments->add(task, y.data() + first * channels, count, channels);
                          });
}

/// dx = the gradient of the input, or dx += the gradient with `add`, by tiles, for a shape with
/// depthwise_in_tiles(). With stride 1 this is a forward pass over dy, for which the caller passes the kernel
/// turned by 180 degrees as `w`.
template <class Taps, class T>
void depthwise_backward_tiles(context<device::cpu>& ctx, const conv_shape& shape,
                              const tensor_view<const T, 4>& dy, const T* w, const tensor_view<T, 4>& dx,
                              bool add) {
  const auto rows = depthwise_backward_axis(dx.extent(1), Taps::result_rows, shape.stride.height,
                                            shape.padding.height),
             columns = depthwise_backward_axis(dx.extent(2), Taps::result_columns, shape.stride.width,
                                               shape.padding.width);
  const image_tasks tasks(dx.extent(0), rows.tiles, Taps::result_rows * dx.extent(2), 0);
  const bool stream = !add && streams_past_cache(dx.data(), dx.size(), dx.extent(3));
  run_depthwise_tiles<Taps, T>(ctx, rows, columns, dy, w, static_cast<const T*>(nullptr), dx, add, stream,
                               tasks);
}

/// Gradient of the input of a depthwise shape (formula: reference::conv_backward_input). dx is overwritten
/// or, with `add`, added to, and must not be empty.
template <class T>
void depthwise_backward_input(context<device::cpu>& ctx, const conv_shape& shape,
                              const tensor_view<const T, 4>& dy, const T* w, const tensor_view<T, 4>& dx,
                              bool add) {
  if (depthwise_in_tiles(shape)) {
    if (shape.stride.height == 2) {
      return depthwise_backward_tiles<depthwise_backward2_taps, T>(ctx, shape, dy, w, dx, add);
    }
    const index_t channels = dx.extent(3);
    scratch_frame frame(ctx.scratch());
    T* const turned = frame.take<T>(9 * channels);
    for (index_t cell = 0; cell < 9; ++cell) {
      std::copy_n(w + (8 - cell) * channels, channels, turned + cell * channels);
    }
    return depthwise_backward_tiles<depthwise_forward_taps<1>, T>(ctx, shape, dy, turned, dx, add);
  }
  for (index_t row = 0; row < std::min(shape.stride.height, dx.extent(1)); ++row) {
    for (index_t column = 0; column < std::min(shape.stride.width, dx.extent(2)); ++column) {
      const tap_axis rows =
          backward_axis(dx.extent(1), dy.extent(1), shape.kernel.height, shape.stride.height,
                        shape.padding.height, shape.dilation.height, row);
      const tap_axis columns =
          backward_axis(dx.extent(2), dy.extent(2), shape.kernel.width, shape.stride.width,
                        shape.padding.width, shape.dilation.width, column);
      run_depthwise_pixels<T>(ctx, rows, columns, shape.kernel.width, dy, w, static_cast<const T*>(nullptr),
                              dx, add, image_tasks(dx.extent(0), rows.outputs, columns.outputs, 0));
    }
  }
}

/// Computes a weight gradient dw of `size` elements in tasks. add_task(images, lines, sums, worker) adds the
/// contribution of the given images and lines to `sums`, `size` elements of T that are 0 before. The sums of
/// the tasks are added in double, in a fixed order, in up to 16 parts whose number depends on shapes alone.
/// dw is overwritten or, with `accumulate`, added to.
template <class T, class AddTask>
void depthwise_weight_tasks(context<device::cpu>& ctx, const image_tasks& tasks, index_t size, T* dw,
                            bool accumulate, AddTask&& add_task) {
  const index_t count = tasks.count(), parts = std::clamp<index_t>(count, 1, 16);
  scratch_frame frame(ctx.scratch());
  T* const sums = frame.take<T>(size * ctx.threads());
  auto* const totals = frame.take<double>(size * parts);
  const auto join = PUFFERFISH_KERNEL(widest_isa(), passes, column_sums<T>);
  const auto merge = PUFFERFISH_KERNEL(widest_isa(), passes, column_sums<double>);
  ctx.parallel_for(parts, [&](index_t part, int worker) {
    T* const own = sums + worker * size;
    double* const total = totals + part * size;
    std::fill_n(total, size, 0.0);
    for (index_t task = count * part / parts; task < count * (part + 1) / parts; ++task) {
      std::fill_n(own, size, T{});
      add_task(tasks.image_range(task), tasks.line_range(task), own, worker);
      join(own, 1, size, size, total);
    }
  });
  merge(totals + size, parts - 1, size, size, totals);
  for (index_t i = 0; i < size; ++i) {
    dw[i] = static_cast<T>(totals[i] + (accumulate ? static_cast<double>(dw[i]) : 0.0));
  }
}

/// dw = the gradient of the weight, or dw += the gradient with `accumulate`, by tiles, for a shape with
/// depthwise_in_tiles(). Pixels and gradients outside the images are read from a row of zeros.
template <class Taps, class T>
void depthwise_weight_tiles(context<device::cpu>& ctx, const conv_shape& shape,
                            const tensor_view<const T, 4>& x, const tensor_view<const T, 4>& dy, T* dw,
                            bool accumulate) {
  const auto rows = depthwise_forward_axis(dy.extent(1), Taps::result_rows, shape.stride.height,
                                           shape.padding.height),
             columns = depthwise_forward_axis(dy.extent(2), Taps::result_columns, shape.stride.width,
                                              shape.padding.width);
  const image_tasks tasks(dy.extent(0), rows.tiles, Taps::result_rows * dy.extent(2), 0);
  const index_t channels = x.extent(3);
  scratch_frame frame(ctx.scratch());
  T* const zeros = frame.take<T>(channels);
  std::fill_n(zeros, channels, T{});
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), depthwise_kernels, depthwise_weight_sums<Taps, T>);
  depthwise_weight_tasks<T>(
      ctx, tasks, 9 * channels, dw, accumulate, [&](const range& images, const range& lines, T* sums, int) {
        const T* pixels[static_cast<std::size_t>(Taps::pixels)];
        const T* gradients[static_cast<std::size_t>(Taps::results)];
        depthwise_gradient_tile<T> tile{pixels, gradients, sums, channels, {}, {}};
        for (index_t image = images.begin; image < images.end; ++image) {
          for (index_t line = lines.begin; line < lines.end; ++line) {
            for (index_t column = 0; column < columns.tiles; ++column) {
              point_at_block<const T>(x.data(), x.shape(), image, rows.pixel(line), columns.pixel(column),
                                      Taps::pixel_rows, Taps::pixel_columns, zeros, pixels);
              point_at_block<const T>(dy.data(), dy.shape(), image, rows.result(line), columns.result(column),
                                      Taps::result_rows, Taps::result_columns, zeros, gradients);
              tile.fetch = fetch_below(x, image, rows.pixel(line) + Taps::pixel_rows,
                                       columns.pixel(column) + Taps::pixel_columns - Taps::next_columns);
              tile.fetch_gradients = fetch_below(dy, image, rows.result(line + 1), columns.result(column));
              kernel(tile);
            }
          }
        }
      });
}

/// Gradient of the weight of a depthwise shape (formula: reference::conv_backward_weight). dw, [kernel
/// height][kernel width][channels], is overwritten or, with `accumulate`, added to.
template <class T>
void depthwise_backward_weight(context<device::cpu>& ctx, const conv_shape& shape,
                               const tensor_view<const T, 4>& x, const tensor_view<const T, 4>& dy, T* dw,
                               bool accumulate) {
  if (depthwise_in_tiles(shape)) {
    return shape.stride.height == 1
               ? depthwise_weight_tiles<depthwise_forward_taps<1>, T>(ctx, shape, x, dy, dw, accumulate)
               : depthwise_weight_tiles<depthwise_forward_taps<2>, T>(ctx, shape, x, dy, dw, accumulate);
  }
  const tap_axis rows = forward_axis(x.extent(1), dy.extent(1), shape.kernel.height, shape.stride.height,
                                     shape.padding.height, shape.dilation.height);
  const tap_axis columns = forward_axis(x.extent(2), dy.extent(2), shape.kernel.width, shape.stride.width,
                                        shape.padding.width, shape.dilation.width);
  const index_t channels = x.extent(3), most = rows.taps * columns.taps;
  scratch_frame frame(ctx.scratch());
  auto* const storage = frame.take<depthwise_tap<T>>(most * ctx.threads());
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), depthwise_kernels, depthwise_pixel_gradient<T>);
  depthwise_weight_tasks<T>(
      ctx, image_tasks(dy.extent(0), dy.extent(1), dy.extent(2), 0), most * channels, dw, accumulate,
      [&](const range& images, const range& lines, T* sums, int worker) {
        depthwise_tap<T>* const taps = storage + worker * most;
        for (index_t image = images.begin; image < images.end; ++image) {
          for (index_t line = lines.begin; line < lines.end; ++line) {
            for (index_t column = 0; column < columns.outputs; ++column) {
              const index_t count =
                  depthwise_taps<T>(rows, columns, shape.kernel.width, x, sums, image, line, column, taps);
              kernel(taps, count, &dy(image, line, column, 0), sums, channels);
            }
          }
        }
      });
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
