// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the transforms of Winograd's convolution F(4x4, 3x3), compiled for every instruction set. See
/// winograd.hpp for what they are good for and winograd.inc for what they compute.

#include <cstddef>
#include <cstdint>

#include <pufferfish/core/view.hpp>
#include <pufferfish/linalg/isa.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// The points at which polynomials are evaluated: 0, +-a, +-b and infinity. With a = 3/4 and b = 3/2 all
/// factors of the pixels' and results' transforms are exact, and a float's rounding error is twice that of
/// the direct sum; with the usual 1 and 2 it is four times that.
template <class T>
struct winograd_points {
  static constexpr T a = T(0.75), b = T(1.5);
  static constexpr T aa = a * a, bb = b * b, aaa = aa * a, bbb = bb * b;
  static constexpr T aabb = aa * bb, sum = aa + bb;
  /// What the weights' transform divides by: the product of a point's distances to the others.
  static constexpr T per_0 = 1 / aabb, per_a = 1 / (2 * aa * (aa - bb)), per_b = 1 / (2 * bb * (bb - aa));
};

#define PUFFERFISH_KERNELS winograd_kernels
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/winograd.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// The forms that run here.
template <class T>
struct winograd_transforms {
  /// Six times six pixels (pixels[6 y + x], channels side by side; null: padding) to 36 rows of `channels`
  /// elements, `step` apart: B^T d B.
  void (*input)(const T* const* pixels, index_t channels, T* to, index_t step);
  /// 36 rows to four times four pixels (pixels[4 y + x]; null: nobody wants it), or added to them: A^T m A.
  void (*output)(const T* from, index_t step, index_t channels, T* const* pixels, bool add);
  /// The gradients of four times four pixels (null: zero) to those of 36 products: A dy A^T.
  void (*gradient)(const T* const* pixels, index_t channels, T* to, index_t step);
  /// Nine rows of `count` weights, `from_step` apart, to 36: G g G^T.
  void (*weight)(const T* from, index_t from_step, index_t count, T* to, index_t step);
  /// 36 rows of gradients to nine, or added to them: G^T du G.
  void (*weight_gradient)(const T* from, index_t step, index_t count, T* to, index_t to_step, bool add);

  static const winograd_transforms& here() {
    static const winograd_transforms chosen{
        PUFFERFISH_KERNEL(widest_isa(), winograd_kernels, winograd_input<T>),
        PUFFERFISH_KERNEL(widest_isa(), winograd_kernels, winograd_output<T>),
        PUFFERFISH_KERNEL(widest_isa(), winograd_kernels, winograd_gradient<T>),
        PUFFERFISH_KERNEL(widest_isa(), winograd_kernels, winograd_weight<T>),
        PUFFERFISH_KERNEL(widest_isa(), winograd_kernels, winograd_weight_gradient<T>)};
    return chosen;
  }
};

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
