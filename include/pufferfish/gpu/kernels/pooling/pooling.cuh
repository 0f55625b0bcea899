// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of pooling.hpp. A thread computes a few channels of one pixel: of the output in the forward pass,
/// of the input in the backward pass. In the backward pass the thread visits all windows that contain the
/// pixel, so no sums are shared between threads.
///
/// A thread's channels are 16 bytes of neighbours if the channels are whole vectors and all arrays are
/// aligned, else one channel. The order of every sum follows from the shape and from the number of a thread's
/// channels.

#include <pufferfish/gpu/kernels/pixel_tasks.cuh>
#include <pufferfish/gpu/kernels/pooling/pooling.hpp>
#include <pufferfish/gpu/kernels/reduce/columns.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Positions begin .. end - 1 along one axis.
struct axis_range {
  index_t begin, end;
};

/// The pixels of window `o` along one axis that are inside of the image.
__device__ inline axis_range window_pixels(index_t o, index_t stride, index_t pad, index_t kernel,
                                           index_t length) {
  const index_t first = o * stride - pad, last = first + kernel;
  return {first > 0 ? first : 0, last < length ? last : length};
}

/// The windows along one axis that contain pixel `i`.
__device__ inline axis_range windows_of(index_t i, index_t stride, index_t pad, index_t kernel,
                                        index_t windows) {
  const index_t from = i + pad - kernel + 1, last = (i + pad) / stride + 1;
  return {from > 0 ? (from + stride - 1) / stride : 0, last < windows ? last : windows};
}

/// The pixels of a window that are inside of the image.
struct window_range {
  axis_range y, x;
  /// Number of pixels.
  __device__ index_t pixels() const { return (y.end - y.begin) * (x.end - x.begin); }
};

/// The pixels of the window of output pixel (oy, ox).
__device__ inline window_range window_at(const pool_windows& w, index_t oy, index_t ox) {
  return {window_pixels(oy, w.stride_height, w.pad_height, w.kernel_height, w.height),
          window_pixels(ox, w.stride_width, w.pad_width, w.kernel_width, w.width)};
}

/// Offsets of elements in the dense NHWC input and output.
template <class T, int Width>
struct pool_images {
  static constexpr int width = Width;
  using A = accumulate_t<T>;

  pool_windows windows;

  /// Offset of an element of the input.
  __device__ index_t input_at(index_t n, index_t y, index_t x, index_t channel) const {
    return ((n * windows.height + y) * windows.width + x) * windows.channels + channel;
  }
  /// Offset of an element of the output.
  __device__ index_t output_at(index_t n, index_t y, index_t x, index_t channel) const {
    return ((n * windows.out_height + y) * windows.out_width + x) * windows.channels + channel;
  }
  /// Calls f(offset in the input) for each pixel of a window of image n, row by row.
  template <class F>
  __device__ void for_each_pixel(const window_range& window, index_t n, index_t channel, F f) const {
    for (index_t y = window.y.begin; y < window.y.end; ++y) {
      for (index_t x = window.x.begin; x < window.x.end; ++x) f(input_at(n, y, x, channel));
    }
  }
  /// Calls f(offset in the output, window) for each window that contains a pixel of the input, in order.
  template <class F>
  __device__ void for_each_window(const pixel_place& at, F f) const {
    const pool_windows& w = windows;
    const axis_range ys = windows_of(at.y, w.stride_height, w.pad_height, w.kernel_height, w.out_height);
    const axis_range xs = windows_of(at.x, w.stride_width, w.pad_width, w.kernel_width, w.out_width);
    for (index_t y = ys.begin; y < ys.end; ++y) {
      for (index_t x = xs.begin; x < xs.end; ++x) f(output_at(at.n, y, x, at.channel), window_at(w, y, x));
    }
  }
  /// The factor by which an average multiplies the sum over the window.
  __device__ A share(const window_range& window, bool count_padding) const {
    return A(1) /
           static_cast<A>(count_padding ? windows.kernel_height * windows.kernel_width : window.pixels());
  }
};

// ---------------------------------------------------------------------------------------------------------
// Maxima

/// A task over output pixels: the largest element of the window for each of Width channels.
template <class T, int Width>
struct max_pool_task : pool_images<T, Width> {
  using A = accumulate_t<T>;
  const T* x;
  T* y;

  /// at: pixel of the output.
  __device__ void run(const pixel_place& at) const {
    const window_range window = window_at(this->windows, at.y, at.x);
    auto best = load_row<Width>(x + this->input_at(at.n, window.y.begin, window.x.begin, at.channel));
    this->for_each_pixel(window, at.n, at.channel, [&](index_t i) {
      const auto values = load_row<Width>(x + i);
      // A NaN is treated as the largest number, so that the result shows the NaN.
      for (int k = 0; k < Width; ++k) {
        if (values[k] > best[k] || values[k] != values[k]) best[k] = values[k];
      }
    });
    store_row(y + this->output_at(at.n, at.y, at.x, at.channel), best);
  }
};

/// A task over input pixels: adds dy of every window that contains the pixel and whose largest element it is.
template <class T, int Width>
struct max_pool_gradient_task : pool_images<T, Width> {
  using A = accumulate_t<T>;
  using row = row_values<T, Width>;
  const T *x, *y, *dy;
  T* dx;

  /// Whether x at `at` is the first of its window, row by row, that equals the largest; for each channel.
  __device__ lanes<bool, Width> winners_of(const pixel_place& at, const window_range& window, const row& own,
                                           const row& largest) const {
    lanes<bool, Width> wins;
    bool any = false;
    for (int k = 0; k < Width; ++k) any |= wins[k] = own[k] == largest[k];
    for (index_t iy = window.y.begin; any && iy <= at.y; ++iy) {
      const index_t end = iy < at.y ? window.x.end : at.x;
      for (index_t ix = window.x.begin; ix < end; ++ix) {
        const row before = load_row<Width>(x + this->input_at(at.n, iy, ix, at.channel));
        for (int k = 0; k < Width; ++k) wins[k] = wins[k] && !(before[k] == largest[k]);
      }
    }
    return wins;
  }

  /// at: pixel of the input. A window's winner is the first of its pixels, row by row, that equals y.
  __device__ void run(const pixel_place& at) const {
    const index_t place = this->input_at(at.n, at.y, at.x, at.channel);
    const row own = load_row<Width>(x + place);
    lanes<A, Width> sum{};
    this->for_each_window(at, [&](index_t out, const window_range& window) {
      const row largest = load_row<Width>(y + out), gradient = load_row<Width>(dy + out);
      const lanes<bool, Width> wins = winners_of(at, window, own, largest);
      for (int k = 0; k < Width; ++k) sum[k] += wins[k] ? gradient[k] : A{};
    });
    store_row(dx + place, sum);
  }
};

template <class T>
void max_pool_forward(cudaStream_t stream, const pool_windows& w, const T* x, T* y) {
  const launch_site site(stream, "max_pool_forward");
  with_width<T>(whole_vectors<T>(w.channels, x, y), [&](auto width) {
    run_pixel_tasks(site, max_pool_task<T, width>{{w}, x, y}, w.images, w.out_height, w.out_width,
                    w.channels);
  });
}

template <class T>
void max_pool_backward(cudaStream_t stream, const pool_windows& w, const T* x, const T* y, const T* dy,
                       T* dx) {
  const launch_site site(stream, "max_pool_backward");
  with_width<T>(whole_vectors<T>(w.channels, x, y, dy, dx), [&](auto width) {
    run_pixel_tasks(site, max_pool_gradient_task<T, width>{{w}, x, y, dy, dx}, w.images, w.height, w.width,
                    w.channels);
  });
}

// ---------------------------------------------------------------------------------------------------------
// Averages over windows

/// A task over output pixels: the sum over the window, in float, times share().
template <class T, int Width>
struct average_pool_task : pool_images<T, Width> {
  using A = accumulate_t<T>;
  bool count_padding;
  const T* x;
  T* y;

  /// at: pixel of the output. Rows and columns of the window in order.
  __device__ void run(const pixel_place& at) const {
    const window_range window = window_at(this->windows, at.y, at.x);
    lanes<A, Width> sum{};
    this->for_each_pixel(window, at.n, at.channel, [&](index_t i) {
      const auto values = load_row<Width>(x + i);
      for (int k = 0; k < Width; ++k) sum[k] += values[k];
    });
    const A share = this->share(window, count_padding);
    for (int k = 0; k < Width; ++k) sum[k] *= share;
    store_row(y + this->output_at(at.n, at.y, at.x, at.channel), sum);
  }
};

/// A task over input pixels: adds dy share() of every window that contains the pixel.
template <class T, int Width>
struct average_pool_gradient_task : pool_images<T, Width> {
  using A = accumulate_t<T>;
  bool count_padding;
  const T* dy;
  T* dx;

  /// at: pixel of the input. Windows in order.
  __device__ void run(const pixel_place& at) const {
    lanes<A, Width> sum{};
    this->for_each_window(at, [&](index_t out, const window_range& window) {
      const auto gradient = load_row<Width>(dy + out);
      const A share = this->share(window, count_padding);
      for (int k = 0; k < Width; ++k) sum[k] += gradient[k] * share;
    });
    store_row(dx + this->input_at(at.n, at.y, at.x, at.channel), sum);
  }
};

template <class T>
void average_pool_forward(cudaStream_t stream, const pool_windows& w, bool count_padding, const T* x, T* y) {
  const launch_site site(stream, "average_pool_forward");
  with_width<T>(whole_vectors<T>(w.channels, x, y), [&](auto width) {
    run_pixel_tasks(site, average_pool_task<T, width>{{w}, count_padding, x, y}, w.images, w.out_height,
                    w.out_width, w.channels);
  });
}

template <class T>
void average_pool_backward(cudaStream_t stream, const pool_windows& w, bool count_padding, const T* dy,
                           T* dx) {
  const launch_site site(stream, "average_pool_backward");
  with_width<T>(whole_vectors<T>(w.channels, dy, dx), [&](auto width) {
    run_pixel_tasks(site, average_pool_gradient_task<T, width>{{w}, count_padding, dy, dx}, w.images,
                    w.height, w.width, w.channels);
  });
}

// ---------------------------------------------------------------------------------------------------------
// Averages over images

/// Grid (images, tiles of columns), block (columns in units of Width, pixels).
template <class T, int Width>
static __global__ void global_average_kernel(grid_dependency earlier, const T* x, index_t pixels,
                                             index_t channels, T* y) {
  earlier.wait();
  const index_t n = blockIdx.x;
  const index_t channel = (static_cast<index_t>(blockIdx.y) * blockDim.x + threadIdx.x) * Width;
  column_sum_state<1, Width> sum;
  sum.clear();
  if (channel < channels) {
    const column_sum_task<T, Width> task{x + n * pixels * channels, channels};
    task.add(channel, threadIdx.y, pixels, blockDim.y, sum);
  }
  __shared__ double memory[merge_doubles<column_sum_state<1, Width>>];
  merge_down(sum, memory, blockDim.x, blockDim.y);
  if (threadIdx.y > 0 || channel >= channels) return;
  row_values<T, Width> average;
  for (int k = 0; k < Width; ++k) {
    average[k] = static_cast<accumulate_t<T>>(sum.sums[0][k] / static_cast<double>(pixels));
  }
  store_row(y + n * channels + channel, average);
}

/// Width divides the channels. A block has up to 256 threads, up to 32 of them along the channels.
template <class T, int Width>
void global_average(const launch_site& stream, const T* x, index_t images, index_t pixels, index_t channels,
                    T* y) {
  const index_t units = channels / Width;
  unsigned across = 1;
  while (across < 32 && across < units) across *= 2;
  unsigned down = 1;  // as many as there are pixels, and no more than a block has room for
  while (across * down < column_threads && down < pixels) down *= 2;
  launch(stream,
         {dim3(static_cast<unsigned>(images), static_cast<unsigned>(ceil_div(units, across))),
          dim3(across, down)},
         global_average_kernel<T, Width>, x, pixels, channels, y);
}

template <class T>
void global_average_forward(cudaStream_t stream, const T* x, index_t images, index_t pixels, index_t channels,
                            T* y) {
  const launch_site site(stream, "global_average_forward");
  with_width<T>(whole_vectors<T>(channels, x, y),
                [&](auto width) { global_average<T, width>(site, x, images, pixels, channels, y); });
}

/// A task over input pixels (y: number of the pixel, x: 0).
template <class T, int Width>
struct spread_task {
  static constexpr int width = Width;
  const T* dy;
  T* dx;
  index_t pixels, channels;
  accumulate_t<T> share;

  __device__ void run(const pixel_place& at) const {
    const auto gradient = load_row<Width>(dy + at.n * channels + at.channel);
    row_values<T, Width> values;
    for (int k = 0; k < Width; ++k) values[k] = gradient[k] * share;
    store_row(dx + (at.n * pixels + at.y) * channels + at.channel, values);
  }
};

template <class T>
void global_average_backward(cudaStream_t stream, const T* dy, index_t images, index_t pixels,
                             index_t channels, T* dx) {
  using A = accumulate_t<T>;
  const launch_site site(stream, "global_average_backward");
  const A share = A(1) / static_cast<A>(pixels);
  with_width<T>(whole_vectors<T>(channels, dy, dx), [&](auto width) {
    run_pixel_tasks(site, spread_task<T, width>{dy, dx, pixels, channels, share}, images, pixels, 1,
                    channels);
  });
}

#define PUFFERFISH_INSTANTIATE(T)                                                                          \
  template void max_pool_forward<T>(cudaStream_t, const pool_windows&, const T*, T*);                      \
  template void max_pool_backward<T>(cudaStream_t, const pool_windows&, const T*, const T*, const T*, T*); \
  template void average_pool_forward<T>(cudaStream_t, const pool_windows&, bool, const T*, T*);            \
  template void average_pool_backward<T>(cudaStream_t, const pool_windows&, bool, const T*, T*);           \
  template void global_average_forward<T>(cudaStream_t, const T*, index_t, index_t, index_t, T*);          \
  template void global_average_backward<T>(cudaStream_t, const T*, index_t, index_t, index_t, T*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
