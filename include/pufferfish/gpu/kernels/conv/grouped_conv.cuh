// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of grouped_conv.hpp. For the result and for the gradient of the input, a thread computes one
/// element, or 16 bytes of elements of a depthwise convolution. Neighbouring threads have neighbouring
/// channels. For the gradient of the weight, 8 threads share the pixels of an element.
///
/// No kernel uses dynamic shared memory or atomics.

#include <pufferfish/gpu/kernels/conv/grouped_conv.hpp>
#include <pufferfish/gpu/kernels/conv/slice_sum.cuh>
#include <pufferfish/gpu/kernels/pixel_tasks.cuh>
#include <pufferfish/gpu/kernels/reduce/columns.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Calls f(input pixel of the image, tap of the kernel) for every tap of output (row, column) that reads a
/// pixel inside of the image.
template <class F>
__device__ inline void for_each_tap(const conv_axis& rows, const conv_axis& columns, int row, int column,
                                    int kernel_width, F f) {
  for (int i = 0; i < rows.taps; ++i) {
    const int y = row * rows.in_step + rows.offset + i * rows.offset_step;
    if (y < 0 || y >= rows.inputs) continue;
    const int first = (rows.kernel + i * rows.kernel_step) * kernel_width + columns.kernel;
    for (int j = 0; j < columns.taps; ++j) {
      const int x = column * columns.in_step + columns.offset + j * columns.offset_step;
      if (x < 0 || x >= columns.inputs) continue;
      f(static_cast<index_t>(y) * columns.inputs + x, first + j * columns.kernel_step);
    }
  }
}

/// A task of run_pixel_tasks over the output: computes y in Width neighbouring channels of one pixel. Sums
/// run over taps, then over the inputs of the group, in float. Width > 1 requires a depthwise convolution
/// with as many outputs as inputs.
template <class T, int Width>
struct grouped_forward_task {
  static constexpr int width = Width;

  conv_geometry g;
  int groups;
  const T *x, *w, *bias;
  T* y;

  /// Channel c of the output belongs to group c / outputs, whose first input channel is (c / outputs) inputs.
  __device__ void run(const pixel_place& at) const {
    const int inputs = g.in_channels / groups, outputs = g.out_channels / groups;
    const int channel = static_cast<int>(at.channel);
    const T* const own_x = x + at.n * g.in_height * g.in_width * g.in_channels +
                           static_cast<index_t>(channel / outputs) * inputs;
    const T* const own_w = w + channel;
    row_values<T, Width> sum{};
    for_each_tap(forward_rows(g), forward_columns(g), static_cast<int>(at.y), static_cast<int>(at.x),
                 g.kernel_width, [&](index_t pixel, int tap) {
                   const T* const from = own_x + pixel * g.in_channels;
                   const T* const by = own_w + static_cast<index_t>(tap) * inputs * g.out_channels;
                   const int steps = Width > 1 ? 1 : inputs;
                   for (int i = 0; i < steps; ++i) {
                     const auto a = load_row<Width>(from + i);
                     const auto b = load_row<Width>(by + static_cast<index_t>(i) * g.out_channels);
                     for (int k = 0; k < Width; ++k) sum[k] += a[k] * b[k];
                   }
                 });
    if (bias != nullptr) {
      const auto values = load_row<Width>(bias + channel);
      for (int k = 0; k < Width; ++k) sum[k] += values[k];
    }
    store_row(y + ((at.n * g.out_height + at.y) * g.out_width + at.x) * g.out_channels + channel, sum);
  }
};

/// A task of run_pixel_tasks over the input: computes dx in Width neighbouring channels of one pixel. Sums
/// run over taps, then over the outputs of the group, in float. Width > 1 has the condition of
/// grouped_forward_task.
template <class T, int Width>
struct grouped_input_task {
  static constexpr int width = Width;

  conv_geometry g;
  int groups;
  const T *dy, *w;
  T* dx;
  bool add;

  /// Channel c of the input belongs to group c / inputs, and is row c % inputs of the group's weight.
  __device__ void run(const pixel_place& at) const {
    const int inputs = g.in_channels / groups, outputs = g.out_channels / groups;
    const int channel = static_cast<int>(at.channel), group = channel / inputs;
    const int row = static_cast<int>(at.y), column = static_cast<int>(at.x);
    const T* const own_dy =
        dy + at.n * g.out_height * g.out_width * g.out_channels + static_cast<index_t>(group) * outputs;
    const T* const own_w = w + static_cast<index_t>(channel - group * inputs) * g.out_channels +
                           static_cast<index_t>(group) * outputs;
    row_values<T, Width> sum{};
    for_each_tap(backward_rows(g, row % g.stride_height), backward_columns(g, column % g.stride_width),
                 row / g.stride_height, column / g.stride_width, g.kernel_width, [&](index_t pixel, int tap) {
                   const T* const from = own_dy + pixel * g.out_channels;
                   const T* const by = own_w + static_cast<index_t>(tap) * inputs * g.out_channels;
                   const int steps = Width > 1 ? 1 : outputs;
                   for (int o = 0; o < steps; ++o) {
                     const auto a = load_row<Width>(from + o), b = load_row<Width>(by + o);
                     for (int k = 0; k < Width; ++k) sum[k] += a[k] * b[k];
                   }
                 });
    T* const to = dx + ((at.n * g.in_height + at.y) * g.in_width + at.x) * g.in_channels + channel;
    if (add) {
      const auto before = load_row<Width>(to);
      for (int k = 0; k < Width; ++k) sum[k] += before[k];
    }
    store_row(to, sum);
  }
};

/// Whether threads may compute 16 bytes of channels each. This requires one input and one output channel per
/// group, and arrays whose channels are aligned vectors.
template <class T, class... P>
inline bool in_channel_vectors(const conv_geometry& g, int groups, const P*... pointers) {
  return g.in_channels == groups && g.out_channels == groups && whole_vectors<T>(groups, pointers...);
}

template <class T>
void grouped_conv_forward(cudaStream_t stream, const conv_geometry& g, int groups, const T* x, const T* w,
                          const T* bias, T* y) {
  const launch_site site(stream, "grouped_conv_forward");
  with_width<T>(in_channel_vectors<T>(g, groups, x, w, bias, y), [&](auto width) {
    run_pixel_tasks(site, grouped_forward_task<T, width>{g, groups, x, w, bias, y}, g.images, g.out_height,
                    g.out_width, g.out_channels);
  });
}

template <class T>
void grouped_conv_backward_input(cudaStream_t stream, const conv_geometry& g, int groups, const T* dy,
                                 const T* w, T* dx, bool add) {
  const launch_site site(stream, "grouped_conv_backward_input");
  with_width<T>(in_channel_vectors<T>(g, groups, dy, w, dx), [&](auto width) {
    run_pixel_tasks(site, grouped_input_task<T, width>{g, groups, dy, w, dx, add}, g.images, g.in_height,
                    g.in_width, g.in_channels);
  });
}

// ---------------------------------------------------------------------------------------------------------
// The gradient of the weight

/// A number of pixels in the units images, rows and columns; also the position of a pixel.
struct pixel_steps {
  index_t images;
  int rows, columns;

  /// Converts a number of pixels, for images of height x width.
  static __device__ pixel_steps of(index_t pixels, int height, int width) {
    const index_t lines = pixels / width;
    return {lines / height, static_cast<int>(lines % height), static_cast<int>(pixels % width)};
  }
  /// Moves the position by a number of pixels.
  __device__ void advance(const pixel_steps& by, int height, int width) {
    columns += by.columns;
    const bool next_row = columns >= width;
    if (next_row) columns -= width;
    rows += by.rows + (next_row ? 1 : 0);
    const bool next_image = rows >= height;
    if (next_image) rows -= height;
    images += by.images + (next_image ? 1 : 0);
  }
};

/// Arguments of grouped_weight_kernel.
template <class T>
struct grouped_weight_gradient {
  conv_geometry g;
  int groups, slices;
  index_t elements;  ///< number of elements of the weight
  const T *x, *dy;
  result_target<accumulate_t<T>> result;
};

/// Grid: x counts blocks of elements of the weight, outputs fastest; y counts slices of the pixels.
template <class T>
static __global__ void __launch_bounds__(grouped_elements* grouped_rows)
    /// 256 threads: thread t of block (bx, by) has element 32 bx + t % 32 and the pixels first + t / 32,
    /// first + t / 32 + 8, ... of slice by. The 8 sums of an element are added in double, in order.
    grouped_weight_kernel(grid_dependency earlier, grouped_weight_gradient<T> work) {
  earlier.wait();
  __shared__ array_of<array_of<float, grouped_elements>, grouped_rows> sums;
  const conv_geometry& g = work.g;
  const int lane = block_thread() % grouped_elements, row = block_thread() / grouped_elements;
  const index_t element = static_cast<index_t>(blockIdx.x) * grouped_elements + lane;
  const index_t pixels = g.out_pixels(), slice = blockIdx.y;
  const index_t first = pixels * slice / work.slices, last = pixels * (slice + 1) / work.slices;
  float sum = 0.0F;
  if (element < work.elements) {
    const int inputs = g.in_channels / work.groups, outputs = g.out_channels / work.groups;
    const int output = static_cast<int>(element % g.out_channels);
    const int patch = static_cast<int>(element / g.out_channels);
    const int tap = patch / inputs, input = output / outputs * inputs + patch % inputs;
    const int top = tap / g.kernel_width * g.dilation_height - g.padding_height;
    const int left = tap % g.kernel_width * g.dilation_width - g.padding_width;
    const auto step = pixel_steps::of(grouped_rows, g.out_height, g.out_width);
    auto at = pixel_steps::of(first + row, g.out_height, g.out_width);
    for (index_t pixel = first + row; pixel < last; pixel += grouped_rows) {
      const int y = at.rows * g.stride_height + top, x = at.columns * g.stride_width + left;
      if (y >= 0 && y < g.in_height && x >= 0 && x < g.in_width) {
        const index_t from = (at.images * g.in_height + y) * g.in_width + x;
        sum += static_cast<float>(work.x[from * g.in_channels + input]) *
               static_cast<float>(work.dy[pixel * g.out_channels + output]);
      }
      at.advance(step, g.out_height, g.out_width);
    }
  }
  sums[row][lane] = sum;
  __syncthreads();
  if (row > 0 || element >= work.elements) return;
  double all = 0.0;
  for (int i = 0; i < grouped_rows; ++i) all += static_cast<double>(sums[i][lane]);
  if (work.result.partials != nullptr) {
    work.result.partials[slice * work.elements + element] = static_cast<float>(all);
  } else {
    store_sum(all, work.result.add, work.result.out[element]);
  }
}

template <class T>
void grouped_conv_backward_weight(cudaStream_t stream, const conv_geometry& g, int groups,
                                  const grouped_weight_plan& plan, const T* x, const T* dy,
                                  accumulate_t<T>* dw, bool accumulate, float* partials) {
  const launch_site site(stream);
  const index_t elements = grouped_weight_elements(g, groups);
  const auto result = target_of<accumulate_t<T>>(dw, nullptr, plan.slices > 1 ? partials : nullptr,
                                                 accumulate, g.out_channels);
  const dim3 blocks(static_cast<unsigned>(ceil_div(elements, grouped_elements)),
                    static_cast<unsigned>(plan.slices));
  launch(site, {blocks, grouped_elements * grouped_rows}, grouped_weight_kernel<T>,
         grouped_weight_gradient<T>{g, groups, plan.slices, elements, x, dy, result});
  if (plan.slices > 1) add_slices(site, plan.slices, elements, result);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                           \
  template void grouped_conv_forward<T>(cudaStream_t, const conv_geometry&, int, const T*, const T*,        \
                                        const T*, T*);                                                      \
  template void grouped_conv_backward_input<T>(cudaStream_t, const conv_geometry&, int, const T*, const T*, \
                                               T*, bool);                                                   \
  template void grouped_conv_backward_weight<T>(cudaStream_t, const conv_geometry&, int,                    \
                                                const grouped_weight_plan&, const T*, const T*,             \
                                                accumulate_t<T>*, bool, float*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
