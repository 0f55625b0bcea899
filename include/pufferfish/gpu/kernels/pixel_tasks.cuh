// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: kernels in which each thread computes a few neighbouring channels of one pixel of NHWC images.

#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// The part of the result that one thread computes: channels of pixel (y, x) of image n, from `channel` on.
struct pixel_place {
  index_t n, y, x, channel;
};

/// The place of task i over images of `height` x `width` pixels, with `columns` tasks of `task_width`
/// channels for each pixel. I is std::uint32_t if that type can count the tasks, because the divisions take
/// most of the time for small windows.
template <class I>
__device__ inline pixel_place pixel_place_of(index_t i, index_t height, index_t width, index_t columns,
                                             int task_width) {
  const I task = static_cast<I>(i), pixel = task / static_cast<I>(columns);
  const I row = pixel / static_cast<I>(width), image = row / static_cast<I>(height);
  return {static_cast<index_t>(image), static_cast<index_t>(row - image * static_cast<I>(height)),
          static_cast<index_t>(pixel - row * static_cast<I>(width)),
          static_cast<index_t>(task - pixel * static_cast<I>(columns)) * task_width};
}

/// Grid: one-dimensional, 128 threads, one task per thread and step. Neighbouring threads have neighbouring
/// channels. `columns`: number of tasks of a pixel.
template <class I, class Task>
static __global__ void pixel_kernel(grid_dependency earlier, Task task, index_t tasks, index_t height,
                                    index_t width, index_t columns) {
  earlier.wait();
  for (index_t i = grid_thread(); i < tasks; i += grid_threads()) {
    task.run(pixel_place_of<I>(i, height, width, columns, Task::width));
  }
}

/// Calls task.run(place) on the device for each pixel of the images and for each group of Task::width
/// channels of the pixel. Task::width must divide `channels`. Throws backend_error if the launch fails.
///
///     struct clear_task {
///       static constexpr int width = 1;
///       float* y;
///       index_t height, columns, channels;
///       __device__ void run(const pixel_place& at) const {
///         y[((at.n * height + at.y) * columns + at.x) * channels + at.channel] = 0.0F;
///       }
///     };
///     run_pixel_tasks(stream, clear_task{y, height, width, channels}, images, height, width, channels);
template <class Task>
void run_pixel_tasks(const launch_site& site, const Task& task, index_t images, index_t height, index_t width,
                     index_t channels) {
  const index_t columns = channels / Task::width, tasks = images * height * width * columns;
  const bool narrow = tasks <= (index_t{1} << 31);
  launch(site, {blocks_for(tasks, 128), 128},
         narrow ? pixel_kernel<std::uint32_t, Task> : pixel_kernel<std::uint64_t, Task>, task, tasks, height,
         width, columns);
}

PUFFERFISH_KERNELS_END
