// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: normalizes the input of a convolution by warp groups, tile by tile in shared memory.

#include <pufferfish/gpu/kernels/conv/halo_plan.hpp>
#include <pufferfish/gpu/kernels/conv/halo_tiles.cuh>
#include <pufferfish/gpu/kernels/norm/norm_numbers.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Kernel argument for a norm_request.
template <class T>
struct halo_norm_input {
  norm_statistics<T> statistics;
  const accumulate_t<T>* bias;
  norm_tail<T> tail;
  T* y;

  static halo_norm_input of(const norm_request<T>& norm) {
    return {norm_statistics<T>::of(norm.m, norm.batch), norm.bias, norm.tail, norm.y};
  }
};

/// Keeps the compiler from moving loads ahead of this point, for which there are no registers.
__device__ inline void keep_order() {
#if !defined(PUFFERFISH_EMULATED_DEVICE)
  asm volatile("" ::: "memory");
#endif
}

/// Normalizes tiles of images that Tiles (pixel_tiles) has copied, `depth` channels. Each thread normalizes
/// the elements that it has copied itself, so that no barrier is needed between copy and normalization.
/// Pixels outside of the image remain zeros.
template <class T, class Tiles>
class halo_norm {
 public:
  /// `memory`: plans::halo_norm_bytes(depth) bytes of shared memory; `addends`: a tile for the addend. Both
  /// are aligned to 16 bytes. `writes`: whether this thread block stores y and the mask.
  __device__ halo_norm(unsigned char* memory, unsigned char* addends, const halo_norm_input<T>& norm,
                       int depth, bool writes)
      : numbers_(reinterpret_cast<float*>(memory)),
        addends_(addends),
        norm_(norm),
        depth_(depth),
        writes_(writes) {}

  /// Stores the numbers of all channels in shared memory, by all `threads` threads of the block, of which the
  /// calling thread is number `thread`. A barrier must follow. `first`: whether the thread block is the one
  /// that stores the statistics.
  __device__ void load(int thread, int threads, bool first) const {
    for (int c = thread; c < depth_; c += threads) {
      numbers_[c] = norm_.statistics.mean(c);
      numbers_[depth_ + c] = norm_.statistics.inv_std(c) * norm_.statistics.m.weight[c];
      numbers_[2 * depth_ + c] = norm_.bias[c];
      if (first) norm_.statistics.finish(c);
    }
  }

  /// Starts the copies of the addend, if there is one, for the tile whose copies `tiles` has started last:
  /// the channels from `channel` on. The tile before must have been normalized.
  __device__ void copy_addend(const Tiles& tiles, int channel) const {
    if (sums()) tiles.copy_other(norm_.tail.addend, addends_, channel);
  }

  /// Normalizes a tile whose copies, and those of the addend, have arrived: the channels from `channel` on of
  /// the pixels from `first` on, as in pixel_tiles::find. If `writes`, also stores y and the mask of the
  /// tile's Side x Side pixels without the border of one pixel around them.
  template <int Side>
  __device__ void apply(const Tiles& tiles, unsigned char* tile, const block_pixel& first,
                        int channel) const {
    const int c = channel + tiles.own_plane() * 8;
    const index_t start = tiles.place_of(first) + c;
    tiles.for_each([&](const block_pixel& at, int place) {
      keep_order();
      if (!tiles.is_inside(first, at)) return;
      T* const in_tile = reinterpret_cast<T*>(tile + place);
      vector<T> run = load_vector(in_tile);
      lanes<float, 8> values;
#pragma unroll
      for (int k = 0; k < 8; k += 4) {
        const float* const numbers = numbers_ + c + k;
        const vector<float> mean = load_vector(numbers), scale = load_vector(numbers + depth_),
                            shift = load_vector(numbers + 2 * depth_);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          values[k + j] = normalized(static_cast<float>(run[k + j]), mean[j], scale[j], shift[j]);
        }
      }
      if (sums()) {
        const vector<T> other = load_vector(reinterpret_cast<const T*>(addends_ + place));
#pragma unroll
        for (int k = 0; k < 8; ++k) values[k] += static_cast<float>(other[k]);
      }
      std::uint32_t bits = 0;
      if (norm_.tail.relu) bits = rectify(values);
#pragma unroll
      for (int k = 0; k < 8; ++k) run[k] = static_cast<T>(values[k]);
      store_vector(in_tile, run);
      const bool is_own = static_cast<unsigned>(at.y - 1) < Side && static_cast<unsigned>(at.x - 1) < Side;
      if (!writes_ || !is_own) return;
      const index_t element = start + tiles.offset(at);
      store_global(norm_.y + element, run);
      if (norm_.tail.mask != nullptr) {
        reinterpret_cast<std::uint8_t*>(norm_.tail.mask)[element / 8] = static_cast<std::uint8_t>(bits);
      }
    });
  }

 private:
  __device__ bool sums() const { return norm_.tail.addend != nullptr; }

  float* numbers_;  // mean, scale and shift of each channel
  unsigned char* addends_;
  const halo_norm_input<T>& norm_;
  int depth_;
  bool writes_;
};

PUFFERFISH_KERNELS_END
