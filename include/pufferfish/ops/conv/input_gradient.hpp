// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the gradient of a convolution's input, for one group. Winograd tiles are used where they are
/// less work. Otherwise direct sums compute one phase after the other. A phase consists of the input pixels
/// with the same row modulo the stride and the same column modulo the stride, which read the same kernel
/// elements.

#include <algorithm>
#include <initializer_list>
#include <vector>

#include <pufferfish/ops/conv/run_conv.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// The correlation that computes the gradients dx of one phase, given by row_phase and column_phase (row and
/// column modulo the stride). The caller sets its weight.
template <class T>
correlation<T> backward_correlation(const conv_shape& shape, const tensor_view<const T, 4>& dy,
                                    const tensor_view<product_result_t<T>, 4>& dx, index_t row_phase,
                                    index_t column_phase, const kernel_table<T>& kernels) {
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

/// The convolution that computes dx from dy (with a flipped kernel) for a convolution with a 3x3 kernel and
/// stride 1: in_channels and out_channels exchanged, padding 2 - padding.
inline conv_shape turned(const conv_shape& shape) {
  return {shape.out_channels,
          shape.in_channels,
          shape.kernel,
          shape.stride,
          {2 - shape.padding.height, 2 - shape.padding.width},
          shape.dilation,
          shape.groups};
}

/// Prepares the correlations that compute dx by direct sums, one phase after the other, and calls run(work)
/// for each. Phases share the packed weight and the pixel-major copy of dy where these have the same layout.
/// For pairs of bfloat16, dy and w hold pairs of output channels, and only the extents of dx are used.
template <class T, class Run>
void for_each_phase(context<device::cpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& dy,
                    const T* w, const tensor_view<product_result_t<T>, 4>& dx, Run&& run) {
  const auto& kernels = conv_kernels<T>();
  const index_t cells = shape.kernel.height * shape.kernel.width, in = shape.in_channels,
                depth = dy.extent(3);
  scratch_frame frame(ctx.scratch());
  T* storage = frame.take<T>(packed_weight_size(cells, depth, in, kernels));
  index_t panels = 0, block = 0;
  T* gradients = nullptr;
  for (index_t row = 0; row < std::min(shape.stride.height, dx.extent(1)); ++row) {
    for (index_t column = 0; column < std::min(shape.stride.width, dx.extent(2)); ++column) {
      auto work = backward_correlation<T>(shape, dy, dx, row, column, kernels);
      // A phase with fewer pixels may be cut into other panels than the previous phase and then needs the
      // weight repacked.
      if (row + column == 0 || work.panels.panels != panels) {
        panels = work.panels.panels;
        pack_weight<T>(ctx, w, cells, in, depth, true, work.panels, kernels, storage);
      }
      work.weight = {storage, depth, in, 0, cells, kernels.lanes};
      if (work.by_images) {
        // Phases that read the copy of dy in blocks of the same depth share it.
        if (gradients == nullptr || work.block_depth() != block) {
          block = work.block_depth();
          gradients = frame.take<T>(pixel_major_size(work, dy.shape()));
          use_pixel_major(ctx, work, dy.shape(), gradients);
        } else {
          point_to_pixel_major(work, dy.shape(), gradients);
        }
      }
      run(work);
    }
  }
}

/// dx = the gradient of the input, or dx += the gradient with `add`, by Winograd tiles, for a convolution for
/// whose turned() form winograd_fits() is true.
template <class T>
void tiled_backward_input(context<device::cpu>& ctx, const conv_shape& shape,
                          const tensor_view<const T, 4>& dy, const T* w, const tensor_view<T, 4>& dx,
                          bool add) {
  const image_tasks tasks = tasks_of(winograd_tiles(dx.extent(0), dx.extent(1), dx.extent(2)));
  run_by_tiles<T>(ctx, turned(shape).padding, dy, w, true, dx, add, tasks);
}

/// Computes a gradient of the input by the algorithm that it chooses (choose_conv) and reports: Winograd
/// tiles, if they fit, or one of `others`, of which the first is the rule's choice where Winograd tiles do
/// not pay. run(algorithm, dx, add) computes it; measuring calls run with scratch memory and without `add`.
template <class T>
void choose_backward_input(context<device::cpu>& ctx, const conv_shape& shape, const extents<4>& dy,
                           const tensor_view<T, 4>& dx, bool add,
                           std::initializer_list<kernel_algorithm> others,
                           function_ref<void(kernel_algorithm, const tensor_view<T, 4>&, bool)> run) {
  const conv_shape correlated = turned(shape);
  const bool tiles_pay = winograd_pays<T>(ctx, correlated, dy, dx.shape());
  const kernel_algorithm algorithm = choose_conv<T>(
      ctx, "conv_backward_input", shape, dx.shape(), false, nullptr,
      tiles_pay ? kernel_algorithm::winograd : *others.begin(),
      [&] {
        std::vector<kernel_algorithm> list(others);
        if (winograd_fits<T>(ctx, correlated)) list.push_back(kernel_algorithm::winograd);
        return list;
      },
      [&](kernel_algorithm candidate) {
        scratch_frame frame(ctx.scratch());
        run(candidate, frame.take<T, 4>(dx.shape()), false);
      });
  run(algorithm, dx, add);
}

/// dx = the gradient of the input, or dx += the gradient with `add` (formula:
/// reference::conv_backward_input), for one group. dx must not be empty and must not overlap dy or w.
template <class T>
void run_backward_input(context<device::cpu>& ctx, const conv_shape& shape, const tensor_view<const T, 4>& dy,
                        const T* w, const tensor_view<T, 4>& dx, bool add) {
  choose_backward_input<T>(ctx, shape, dy.shape(), dx, add, {kernel_algorithm::direct},
                           [&](kernel_algorithm algorithm, const tensor_view<T, 4>& to, bool adds) {
                             if constexpr (has_winograd<T>) {
                               if (algorithm == kernel_algorithm::winograd) {
                                 return tiled_backward_input<T>(ctx, shape, dy, w, to, adds);
                               }
                             }
                             for_each_phase<T>(ctx, shape, dy, w, to, [&](correlation<T>& work) {
                               work.add = adds;
                               run_correlation(ctx, work, tasks_of(work, to.extent(0)));
                             });
                           });
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
