// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launcher that makes batches of normalized, augmented images from an image set in device memory. The
/// results are those of train/loader.hpp.

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// A set of images with their labels, and the augmentation. Pointers are to device memory.
struct image_source {
  const std::uint8_t* pixels;       ///< NHWC, values 0..255
  const std::int32_t* labels;       ///< class of each image
  const float* table;               ///< normalized value of pixel value v of channel c, at 256 c + v
  index_t height, width, channels;  ///< extents of an image
  index_t pad_crop;  ///< pixels of padding on each side, before a random window of the old size is cut out
  bool reflect;      ///< pad with the mirror image instead of zero pixels
  bool flip;         ///< mirror left and right with probability 1/2
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Makes the images and labels of the samples samples[0 .. count - 1], which are positions in the set, in
/// device memory. The augmentation of a sample depends only on the stream of random numbers (seed, stream)
/// and on its position in the set. images: count x height x width x channels, dense; labels: count numbers.
/// One block per image. Throws backend_error if the launch fails.
template <class T>
void augment_images(cudaStream_t stream, const image_source& source, const std::uint32_t* samples,
                    index_t count, std::uint64_t random_seed, std::uint64_t random_stream, T* images,
                    std::int32_t* labels);

PUFFERFISH_KERNELS_END
