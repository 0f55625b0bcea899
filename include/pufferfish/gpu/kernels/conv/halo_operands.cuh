// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the arguments of the kernel of halo_conv.cuh, its weight in shared memory, and the choice of
/// kernels by plans.

#include <pufferfish/gpu/kernels/conv/halo_norm.cuh>
#include <pufferfish/gpu/kernels/conv/halo_plan.hpp>
#include <pufferfish/gpu/kernels/conv/halo_tiles.cuh>
#include <pufferfish/gpu/kernels/reduce/moment_parts.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Arguments of `correlate_halo`: a correlation of `in`, whose images have in_height x in_width pixels of
/// `depth` channels, with results of out_height x out_width pixels of `columns` channels. The kernel's
/// halo_shape says which taps a result has. The first tap of result (0, 0), or of the first results of all
/// phases, reads the input (-top, -left). Inputs outside of the image count as zeros. `weight`: see
/// halo_weight.
///
/// With `up` (columns x up_columns, dense), `inner` receives the results, unless it is null, and `out`
/// receives the product of the results and `up`. Without `up`, `out` receives the results, which are added to
/// its old values if `add` is set. `bias` (one element for each channel of `out`) may be null.
template <class T>
struct halo_correlation {
  const T* in;
  const T* weight;
  const T* up;
  const T* bias;
  T* inner;
  T* out;
  block_grid blocks;  ///< blocks of pixels of the result, or of each of its phases
  int in_height, in_width, depth;
  int out_height, out_width, columns, up_columns;
  int top, left;
  bool add;
  gradient_sum_input<T> norm = {};  ///< backward only
  moment_store moments = {};        ///< moments of `out`, or backward the sums for `norm`
  halo_norm_input<T> input = {};    ///< normalization of `in`, for kernels that normalize
};

/// The weight in shared memory, as the right operand of products: `Columns` columns from column `first` on,
/// for all taps.
///
/// Forward: the weight in device memory is [tap][depth][columns], and planes of 8 columns in shared memory
/// hold its rows [tap][depth], 16 bytes each. Backward: the weight in device memory is [tap][columns][depth],
/// and planes of 8 elements of the depth hold its rows [tap][column], with the taps in reverse order. 16
/// bytes of padding follow each plane.
template <class T, int Columns, halo_shape Shape>
class halo_weight {
  static constexpr int taps = Shape.taps();
  static constexpr bool backward = Shape.backward;

 public:
  /// `memory`: bytes() bytes of shared memory, aligned to 16 bytes.
  __device__ halo_weight(unsigned char* memory, const halo_correlation<T>& work)
      : memory_(memory), depth_(work.depth), plane_(taps * (backward ? Columns : work.depth) * 16 + 16) {}

  /// Number of bytes of shared memory that the weight occupies, with its padding.
  __device__ int bytes() const { return plane_ * (backward ? depth_ : Columns) / 8; }

  /// Starts the copies (copy_async) of the columns first .. first + Columns - 1, by all `threads` threads of
  /// the block, of which the calling thread is number `thread`.
  __device__ void copy(const halo_correlation<T>& work, int first, int thread, int threads) const {
    const int runs = (backward ? depth_ : Columns) / 8, rows = taps * (backward ? Columns : depth_);
    for (int at = thread; at < rows * runs; at += threads) {
      const int row = at / runs, run = at - row * runs;
      const T* from = nullptr;
      if constexpr (backward) {
        const int tap = row / Columns, column = row - tap * Columns;
        from = work.weight + (static_cast<index_t>(taps - 1 - tap) * work.columns + first + column) * depth_ +
               run * 8;
      } else {
        from = work.weight + static_cast<index_t>(row) * work.columns + first + run * 8;
      }
      copy_async<16, true>(memory_ + run * plane_ + row * 16, from);
    }
  }

  /// Whether the 8 numbers in a row of the operand's blocks are consecutive along or across the depth.
  static constexpr dense layout = backward ? dense::depth : dense::width;
  /// The operand of the first tap and the first 16 elements of the depth.
  __device__ block_matrix first() const {
    return backward ? block_matrix(memory_, 128, plane_) : block_matrix(memory_, plane_, 128);
  }
  /// Number of bytes from first() to the operand of a tap and the depth elements k .. k + 15; k is a multiple
  /// of 16.
  __device__ int place(int tap, int k) const {
    return backward ? tap * Columns * 16 + k / 8 * plane_ : (tap * depth_ + k) * 16;
  }

 private:
  unsigned char* memory_;
  int depth_, plane_;
};

/// A halo_shape as a type. (nvcc 13 does not compile kernels with template arguments of class type.)
template <int Side, int Stride, bool Backward, int Kernel>
struct halo_kind {
  static constexpr halo_shape shape{Side, Stride, Backward, Kernel};
};

/// Calls f(kind, columns) with the halo_kind of the plan's shape, whose `backward` is Backward, and with
/// plan.columns as an integral constant.
template <bool Backward, class F>
inline void with_halo_kind(const halo_plan& plan, F f) {
  const auto by_columns = [&](auto kind) {
    if (plan.columns == 16) return f(kind, std::integral_constant<int, 16>());
    if (plan.columns == 32) return f(kind, std::integral_constant<int, 32>());
    f(kind, std::integral_constant<int, 64>());
  };
  const auto by_side = [&](auto stride, auto kernel) {
    if (plan.shape.side == 4) return by_columns(halo_kind<4, stride, Backward, kernel>());
    by_columns(halo_kind<8, stride, Backward, kernel>());
  };
  using one = std::integral_constant<int, 1>;
  using two = std::integral_constant<int, 2>;
  using three = std::integral_constant<int, 3>;
  if (plan.shape.kernel == 1) return by_side(two(), one());
  if (plan.shape.stride == 2) return by_side(two(), three());
  by_side(one(), three());
}

PUFFERFISH_KERNELS_END
