// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: converts the sums of a warp group to 16 bits and stores them as pixels of a dense NHWC tensor.

#include <pufferfish/gpu/kernels/conv/halo_shape.hpp>
#include <pufferfish/gpu/kernels/gemm/warpgroup.cuh>
#include <pufferfish/gpu/kernels/launch.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Transposes a 4 x 4 matrix of words over four adjacent lanes: words[i] of lane q becomes words[q] of lane
/// i. `q`: the calling lane modulo 4. All lanes of a warp must call this function.
__device__ inline void transpose_words(std::uint32_t (&words)[4], int q) {
  const auto exchange = [&](int a, int b, int distance) {
    const bool second = (q & distance) != 0;
    const std::uint32_t sent = second ? words[a] : words[b];
    const std::uint32_t got = __shfl_xor_sync(all_lanes, sent, distance);
    words[a] = second ? got : words[a];
    words[b] = second ? words[b] : got;
  };
  exchange(0, 1, 1);
  exchange(2, 3, 1);
  exchange(0, 2, 2);
  exchange(1, 3, 2);
}

/// Destination of the sums of a warp group: a block of results, with `columns` channels each. Row r of the
/// sums is the result Layout.result(r). Results that do not exist are not stored.
template <class T, block_layout Layout>
struct block_target {
  T* out;                   ///< address of the first channel to store of the block's first result
  const T* bias;            ///< bias of each channel to store, or null
  block_extent extent;      ///< which results exist
  int image, line, column;  ///< stride of images, lines and columns of results, in elements
  bool add;                 ///< whether the sums are added to the old values

  /// Stores sums + bias, or with `add` old values + sums + bias, computed in float and rounded once. Changes
  /// `sums`. All threads of the warp group must call this function; `thread`: index of the calling thread in
  /// the group. `out` and all strides must be multiples of 8 elements.
  template <int Columns>
  __device__ void store(group_sums<T, Columns>& sums, int thread) const {
    const int q = thread % 4;
    if (bias != nullptr) {
#pragma unroll
      for (int j = 0; j < Columns / 8; ++j) {
        for (int i = 0; i < 4; ++i) sums.values[4 * j + i] += static_cast<float>(bias[8 * j + 2 * q + i % 2]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const block_pixel at = Layout.result(group_row(thread, half));
      const bool inside = extent.contains(at);
      T* const to = out + at.image * image + at.y * line + at.x * column;
      if (add && inside) {
#pragma unroll
        for (int j = 0; j < Columns / 8; ++j) {
          element_run<T, 2> old;
          memcpy(&old, to + 8 * j + 2 * q, sizeof(old));
          sums.values[4 * j + 2 * half] += static_cast<float>(old.values[0]);
          sums.values[4 * j + 2 * half + 1] += static_cast<float>(old.values[1]);
        }
      }
      store_row(sums, half, to, inside, q);
    }
  }

 private:
  // Stores one pixel's channels together with the three lanes that hold the others: row g (half 0) or row g +
  // 8 (half 1) of the warp's 16 rows (group_sums). `to`: address of the pixel; `inside`: whether the pixel
  // exists. Lanes first exchange words, so that each lane stores 16 adjacent bytes at a time, or 8 bytes if
  // there are only 16 columns.
  template <int Columns>
  __device__ static void store_row(const group_sums<T, Columns>& sums, int half, T* to, bool inside, int q) {
    const auto word = [&](int j) {
      return packed<T>(sums.values[4 * j + 2 * half], sums.values[4 * j + 2 * half + 1]);
    };
    if constexpr (Columns == 16) {
      const bool second = q % 2 != 0;
      const std::uint32_t first_word = word(0), second_word = word(1);
      const std::uint32_t got = __shfl_xor_sync(all_lanes, second ? first_word : second_word, 1);
      const element_run<std::uint32_t, 2> run{{second ? got : first_word, second ? second_word : got}};
      store_global(to + q % 2 * 8 + q / 2 * 4, run, inside);
    } else {
#pragma unroll
      for (int j = 0; j < Columns / 8; j += 4) {
        std::uint32_t words[4] = {word(j), word(j + 1), word(j + 2), word(j + 3)};
        transpose_words(words, q);
        const element_run<std::uint32_t, 4> run{{words[0], words[1], words[2], words[3]}};
        store_global(to + (j + q) * 8, run, inside);
      }
    }
  }
};

PUFFERFISH_KERNELS_END
