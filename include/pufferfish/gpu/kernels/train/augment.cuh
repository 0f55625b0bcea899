// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernel of augment.hpp.
///
/// One launch starts `count` blocks of 256 threads. Random numbers depend on the sample, not on the position
/// of the sample in the batch.

#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/kernels/random.hpp>
#include <pufferfish/gpu/kernels/train/augment.hpp>

PUFFERFISH_KERNELS_BEGIN

/// How one sample is cut and mirrored: its window starts at (top, left) of the unpadded image.
struct image_window {
  index_t top, left;
  bool flipped;
};

/// Draws the window of a sample, from the random numbers 3 sample, 3 sample + 1 and 3 sample + 2 of the
/// stream, as train/loader.hpp does.
__device__ inline image_window draw_window(const image_source& source, const random_key& key,
                                           std::uint32_t sample) {
  const std::uint64_t number = std::uint64_t{3} * sample;
  const auto positions = static_cast<std::uint64_t>(2 * source.pad_crop + 1);
  return {static_cast<index_t>(random_below(key, number, positions)) - source.pad_crop,
          static_cast<index_t>(random_below(key, number + 1, positions)) - source.pad_crop,
          source.flip && random_below(key, number + 2, 2) == 1};
}

/// Position in the image of position p of the padded image, or -1 for a zero pixel.
__device__ inline index_t shown_position(index_t p, index_t length, bool reflect) {
  if (p >= 0 && p < length) return p;
  if (!reflect) return -1;
  return p < 0 ? -p : 2 * (length - 1) - p;
}

/// Grid: block b of 256 threads makes image b of the batch. Element i of the image is channel i % channels of
/// pixel (i / channels / width, i / channels % width).
template <class T>
static __global__ void augment_kernel(grid_dependency earlier, image_source source,
                                      const std::uint32_t* samples, random_key key, T* images,
                                      std::int32_t* labels) {
  earlier.wait();
  __shared__ image_window cut;
  const std::uint32_t sample = samples[blockIdx.x];
  if (threadIdx.x == 0) {
    cut = draw_window(source, key, sample);
    labels[blockIdx.x] = source.labels[sample];
  }
  __syncthreads();
  const index_t height = source.height, width = source.width, channels = source.channels;
  const index_t size = height * width * channels;
  const std::uint8_t* const from = source.pixels + static_cast<index_t>(sample) * size;
  T* const to = images + static_cast<index_t>(blockIdx.x) * size;
  for (index_t i = threadIdx.x; i < size; i += blockDim.x) {
    const index_t pixel = i / channels, c = i % channels, y = pixel / width, x = pixel % width;
    const index_t from_y = shown_position(cut.top + y, height, source.reflect);
    const index_t from_x =
        shown_position(cut.left + (cut.flipped ? width - 1 - x : x), width, source.reflect);
    const index_t value = from_y < 0 || from_x < 0 ? 0 : from[(from_y * width + from_x) * channels + c];
    to[i] = static_cast<T>(source.table[256 * c + value]);
  }
}

template <class T>
void augment_images(cudaStream_t stream, const image_source& source, const std::uint32_t* samples,
                    index_t count, std::uint64_t random_seed, std::uint64_t random_stream, T* images,
                    std::int32_t* labels) {
  launch(stream, {static_cast<unsigned>(count), 256}, augment_kernel<T>, source, samples,
         random_key{random_seed, random_stream}, images, labels);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                   \
  template void augment_images<T>(cudaStream_t, const image_source&, const std::uint32_t*, index_t, \
                                  std::uint64_t, std::uint64_t, T*, std::int32_t*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
