// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: fast algorithms for bfloat16 convolutions with one group. Convolutions without a fast algorithm
/// widen blocks of images to float (narrow_conv.hpp).
///
/// - Winograd tiles (winograd.hpp): pixels are widened when they are
///   transformed, and results are rounded when they are written. The machine needs no kernels for pairs.
/// - Direct sums of pairs (direct_conv.hpp, ops/linear/pair_product.hpp). Pixels are read in place, as pairs
///   of adjacent channels. Each task computes float sums in scratch memory and rounds each sum once.

#include <algorithm>

#include <pufferfish/ops/conv/input_gradient.hpp>
#include <pufferfish/ops/conv/run_conv.hpp>
#include <pufferfish/ops/linear/pair_product.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// True if the convolution has one group and its sums over `channels` channels are computed from pairs of
/// adjacent channels (multiplies_pairs of ops/linear/pair_product.hpp).
template <class T>
bool multiplies_pairs(const conv_shape& shape, index_t channels) {
  return shape.groups == 1 && multiplies_pairs<T>(channels);
}

/// True if the weight gradient of a convolution with output extents y (NHWC) is computed from pairs of
/// adjacent pixels of a line. This requires kernels for pairs (has_pairs), one group, a shape that is not
/// thin (is_thin), at least one output line, and at least two pixels in an output line.
template <class T>
bool pairs_pixels(const conv_shape& shape, const extents<4>& y) {
  return has_pairs<T>() && shape.groups == 1 && !is_thin(shape) && y[0] * y[1] > 0 && y[2] > 1;
}

/// Runs a correlation of bfloat16 pairs over a batch. The caller has set the weight of `work`; the output
/// pointer of `work` is not used. Each task computes its float sums in scratch memory and then calls
/// after(task, images, lines, sums). `sums` is dense, [image][line][pixel][channel], and valid during the
/// call.
template <class After>
void run_pair_correlation(context<device::cpu>& ctx, const correlation<bf16_pair>& work,
                          const image_tasks& tasks, After&& after) {
  scratch_frame frame(ctx.scratch());
  const index_t line_size = work.columns.outputs * work.out_channels;
  const index_t most_taps = std::max<index_t>(1, work.rows.taps * work.columns.taps);
  const index_t most_sums = tasks.group * tasks.band * line_size;
  auto* const taps = frame.take<block_tap<bf16_pair>>(most_taps * ctx.threads());
  float* const storage = frame.take<float>(most_sums * ctx.threads());
  ctx.parallel_for(tasks.count(), [&](index_t task, int worker) {
    const range images = tasks.image_range(task), lines = tasks.line_range(task);
    float* const sums = storage + worker * most_sums;
    correlation<bf16_pair> part = work;
    part.input += images.begin * work.in.image;
    part.output = sums;
    part.out = {lines.length() * line_size, line_size, work.out_channels};
    part.rows.out_first = -lines.begin;
    part.rows.out_step = 1;
    part.columns.out_first = 0;
    part.columns.out_step = 1;
    part.run({0, images.length()}, lines, taps + worker * most_taps);
    after(task, images, lines, static_cast<const float*>(sums));
  });
}

/// y = x * w + bias by direct sums of pairs of input channels, summed in float and rounded once. The shape
/// has an even number of input channels and one group; `bias` may be nullptr. `moments`, unless nullptr,
/// receives the moments of the rounded y.
template <class T>
void pair_conv_forward(context<device::cpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                       const T* w, const T* bias, const tensor_view<T, 4>& y, moment_parts<T>* moments) {
  const index_t cells = shape.kernel.height * shape.kernel.width, in = shape.in_channels / 2,
                out = shape.out_channels, line = y.extent(2), pixels = y.extent(0) * y.extent(1) * line;
  const image_tasks tasks{y.extent(0), y.extent(1), line,
                          shape.patch() * out * static_cast<index_t>(sizeof(T))};
  if (moments != nullptr) moments->start(tasks.count(), out);
  const auto& kernels = conv_kernels<bf16_pair>();
  scratch_frame frame(ctx.scratch());
  const float* const wide_bias = widened(ctx, frame, bias, out);
  const tensor_view<const bf16_pair, 4> pairs = as_pairs(x);
  auto work =
      forward_correlation<bf16_pair>(shape, pairs, tensor_view<float, 4>(nullptr, y.shape()), kernels);
  work.weight = {nullptr, in, out, 0, cells, kernels.lanes};
  if (reads_in_place(out, pixels, ctx.packed(w) != nullptr, kernels)) {
    work.weight.row = out;
    work.weight.data =
        ctx.packed<bf16_pair>(frame, {w, "pairs of rows", {cells, in, out}}, cells * in * out,
                              [&](bf16_pair* to) { pair_up_matrix(ctx, w, shape.patch(), out, to); });
  } else {
    work.weight.data = ctx.packed<bf16_pair>(
        frame, {w, "convolution panels of pairs", {cells, in, out, work.panels.panels}},
        packed_weight_size(cells, in, out, kernels), [&](bf16_pair* to) {
          scratch_frame inner(ctx.scratch());
          auto* const rows = inner.take<bf16_pair>(cells * in * out);
          pair_up_matrix(ctx, w, shape.patch(), out, rows);
          pack_weight<bf16_pair>(ctx, rows, cells, in, out, false, work.panels, kernels, to);
        });
  }
  if (work.by_images) {
    use_pixel_major(ctx, work, pairs.shape(), frame.take<bf16_pair>(pixel_major_size(work, pairs.shape())));
  }
  run_pair_correlation(ctx, work, tasks,
                       [&](index_t task, const range& images, const range& lines, const float* sums) {
                         const index_t first = (images.begin * tasks.lines + lines.begin) * line,
                                       count = images.length() * lines.length() * line;
                         T* const result = y.data() + first * out;
                         round_rows(sums, count, out, wide_bias, false, result, out);
                         if (moments != nullptr) moments->add(task, result, count, out);
                       });
}

/// y = x * w by Winograd tiles (winograd.hpp), computed in float and rounded once. `moments`, unless nullptr,
/// receives the moments of the rounded y.
template <class T>
void tiled_conv_forward(context<device::cpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                        const T* w, const tensor_view<T, 4>& y, moment_parts<T>* moments) {
  const image_tasks tasks = tasks_of(winograd_tiles(y.extent(0), y.extent(1), y.extent(2)));
  const index_t out = y.extent(3);
  if (moments != nullptr) moments->start(tasks.count(), out);
  run_by_tiles<T>(ctx, shape.padding, x, w, false, y, false, tasks,
                  [&](index_t task, index_t first, index_t count) {
                    if (moments != nullptr) moments->add(task, y.data() + first * out, count, out);
                  });
}

/// dx = the gradient of the input, or dx += the gradient with `add`, by direct sums of pairs of output
/// channels. Sums are float and rounded once. The shape has an even number of output channels and one group.
template <class T>
void pair_conv_backward_input(context<device::cpu>& ctx, const conv_shape& shape,
                              const tensor_view<const T, 4>& dy, const T* w, const tensor_view<T, 4>& dx,
                              bool add) {
  const index_t in = shape.in_channels;
  const tensor_view<float, 4> sums_of_dx(nullptr, dx.shape());
  for_each_phase<bf16_pair>(
      ctx, shape, as_pairs(dy), reinterpret_cast<const bf16_pair*>(w), sums_of_dx,
      [&](const correlation<bf16_pair>& work) {
        const tap_axis &rows = work.rows, &columns = work.columns;
        run_pair_correlation(
            ctx, work, tasks_of(work, dx.extent(0)),
            [&](index_t, const range& images, const range& lines, const float* sums) {
              for (index_t image = images.begin; image < images.end; ++image) {
                for (index_t line = lines.begin; line < lines.end; ++line, sums += columns.outputs * in) {
                  const index_t in_line = image * dx.extent(1) + rows.out_first + line * rows.out_step;
                  T* const to = dx.data() + (in_line * dx.extent(2) + columns.out_first) * in;
                  round_rows(sums, columns.outputs, in, nullptr, add, to, columns.out_step * in);
                }
              }
            });
      });
}

/// Forward pass of a convolution with 16-bit elements that is not a matrix product: chooses among Winograd
/// tiles (only without a bias, since the sum is rounded before a bias could be added), direct sums of pairs
/// and widen(y, moments), which computes blocks of images in float. Arguments as in conv_forward.
template <class T, class Widen>
void bf16_conv_forward(context<device::cpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& x,
                       const T* w, const T* bias, const tensor_view<T, 4>& y, moment_parts<T>* moments,
                       const Widen& widen) {
  const bool pairs = multiplies_pairs<T>(shape, shape.in_channels);
  const auto run = [&](kernel_algorithm algorithm, const tensor_view<T, 4>& to, moment_parts<T>* parts) {
    if (algorithm == kernel_algorithm::winograd) {
      return tiled_conv_forward<T>(ctx, shape, x, w, to, parts);
    }
    if (algorithm == kernel_algorithm::pairs) return pair_conv_forward(ctx, shape, x, w, bias, to, parts);
    widen(to, parts);
  };
  const bool tiles_pay = bias == nullptr && winograd_pays<T>(ctx, shape, x.shape(), y.shape());
  const kernel_algorithm algorithm = choose_conv<T>(
      ctx, "conv_forward", shape, x.shape(), bias != nullptr, ctx.packed(w),
      tiles_pay ? kernel_algorithm::winograd
      : pairs   ? kernel_algorithm::pairs
                : kernel_algorithm::widened,
      [&] {
        std::vector<kernel_algorithm> list{kernel_algorithm::widened};
        if (pairs) list.push_back(kernel_algorithm::pairs);
        if (bias == nullptr && winograd_fits<T>(ctx, shape)) list.push_back(kernel_algorithm::winograd);
        return list;
      },
      [&](kernel_algorithm candidate) {
        scratch_frame frame(ctx.scratch());
        run(candidate, frame.take<T>(y.shape()), nullptr);
      });
  run(algorithm, y, moments);
}

/// Gradient of the input with 16-bit elements: chooses among Winograd tiles, direct sums of pairs and
/// widen(dx, add), which computes blocks of images in float. Arguments as in conv_backward_input.
template <class T, class Widen>
void bf16_conv_backward_input(context<device::cpu>& ctx, const conv_shape& shape,
                              const tensor_view<const T, 4>& dy, const T* w, const tensor_view<T, 4>& dx,
                              bool add, const Widen& widen) {
  const auto run = [&](kernel_algorithm algorithm, const tensor_view<T, 4>& to, bool adds) {
    if (algorithm == kernel_algorithm::winograd) {
      return tiled_backward_input<T>(ctx, shape, dy, w, to, adds);
    }
    if (algorithm == kernel_algorithm::pairs) return pair_conv_backward_input(ctx, shape, dy, w, to, adds);
    widen(to, adds);
  };
  if (multiplies_pairs<T>(shape, shape.out_channels)) {
    return choose_backward_input<T>(ctx, shape, dy.shape(), dx, add,
                                    {kernel_algorithm::pairs, kernel_algorithm::widened}, run);
  }
  choose_backward_input<T>(ctx, shape, dy.shape(), dx, add, {kernel_algorithm::widened}, run);
}

/// Gradient of the weight with 16-bit elements: chooses among Winograd tiles, the product of copied pixels,
/// direct sums of pairs of pixels and widen(dw, accumulate), which computes blocks of images in float.
/// Arguments as in conv_backward_weight.
template <class T, class Widen>
void bf16_conv_backward_weight(context<device::cpu>& ctx, const conv_shape& shape,
                               const tensor_view<const T, 4>& x, const tensor_view<const T, 4>& dy, float* dw,
                               bool accumulate, const Widen& widen) {
  const bool pairs = pairs_pixels<T>(shape, dy.shape()), skips = shape.groups == 1 && skips_pixels(shape);
  const kernel_algorithm rule =
      winograd_pays<T>(ctx, shape, x.shape(), dy.shape(), conv_pass::weight_gradient)
          ? kernel_algorithm::winograd
      : !pairs ? kernel_algorithm::widened
      : skips  ? kernel_algorithm::copied_pixels
               : kernel_algorithm::pairs;
  choose_backward_weight<T>(
      ctx, shape, x.shape(), dy.shape(), dw, accumulate, rule,
      [&] {
        std::vector<kernel_algorithm> list{kernel_algorithm::widened};
        if (pairs) list.push_back(kernel_algorithm::pairs);
        if (skips) list.push_back(kernel_algorithm::copied_pixels);
        if (winograd_fits<T>(ctx, shape)) list.push_back(kernel_algorithm::winograd);
        return list;
      },
      [&](kernel_algorithm algorithm, float* to, bool add) {
        if (algorithm == kernel_algorithm::winograd) {
          return winograd_backward_weight<T>(ctx, shape, x, dy, to, add);
        }
        if (algorithm == kernel_algorithm::copied_pixels) {
          return copied_backward_weight<T>(ctx, shape, x, dy, to, add);
        }
        if (algorithm == kernel_algorithm::pairs) {
          return backward_weight<bf16_pair>(ctx, shape, x, dy, to, add);
        }
        widen(to, add);
      });
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
