// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the transforms of Winograd's convolution F(4x4, 3x3), compiled for every instruction set.
/// winograd.hpp describes the algorithm, winograd.inc contains the transforms.
///
/// With the points a and b of winograd_points, s = a^2 + b^2, p = 1 / (2 a^2 (a^2 - b^2)) and q = 1 / (2 b^2
/// (b^2 - a^2)), the matrices are
///
/// \code
///       | a^2 b^2     0      -s     0   1  0 |         | 1/(a^2 b^2)   0     0   |
///       |    0     -a b^2   -b^2    a   1  0 |         |     p        p a  p a^2 |
/// B^T = |    0      a b^2   -b^2   -a   1  0 |     G = |     p       -p a  p a^2 |
///       |    0     -a^2 b   -a^2    b   1  0 |         |     q        q b  q b^2 |
///       |    0      a^2 b   -a^2   -b   1  0 |         |     q       -q b  q b^2 |
///       |    0     a^2 b^2    0    -s   0  1 |         |     0         0     1   |
///
///       | 1   1    1    1    1   0 |
/// A^T = | 0   a   -a    b   -b   0 |
///       | 0  a^2  a^2  b^2  b^2  0 |
///       | 0  a^3 -a^3  b^3 -b^3  1 |
/// \endcode
///
/// Correlation of six pixels d with three weights g: y = A^T ((G g) . (B^T d)), four results. In two
/// dimensions each transform is applied to the columns, then to the rows.

#include <cstddef>
#include <cstdint>

#include <pufferfish/core/view.hpp>
#include <pufferfish/linalg/isa.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// The points at which polynomials are evaluated: 0, +-a, +-b and infinity. With a = 3/4 and
/// b = 3/2 all factors of the transforms of pixels and results are exact, and the rounding error
/// of float is twice that of the direct sum; with the usual points 1 and 2 it is four times that.
template <class T>
struct winograd_points {
  static constexpr T a = T(0.75), b = T(1.5);
  static constexpr T aa = a * a, bb = b * b, aaa = aa * a, bbb = bb * b;
  static constexpr T aabb = aa * bb, sum = aa + bb;
  /// Factors of the weights' transform: the inverse of the product of a point's distances to the others.
  static constexpr T per_0 = 1 / aabb, per_a = 1 / (2 * aa * (aa - bb)), per_b = 1 / (2 * bb * (bb - aa));
};

#define PUFFERFISH_KERNELS winograd_kernels
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/conv/winograd.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// The transforms for the instruction set of this machine. T: the type of pixels and weights; if it is
/// bfloat16, the 36 products and the gradients of weights are float.
template <class T>
struct winograd_transforms {
  using C = parameter_t<T>;

  /// B^T d B: 6 x 6 pixels (pixels[6 y + x], contiguous channels; null:
  /// padding) to 36 rows of `channels` elements, row stride `step`.
  void (*input)(const T* const* pixels, index_t channels, C* to, index_t step);
  /// A^T m A: 36 rows to 4 x 4 pixels (pixels[4 y + x]; null: not needed), overwritten or added to.
  void (*output)(const C* from, index_t step, index_t channels, T* const* pixels, bool add);
  /// A dy A^T: the gradients of 4 x 4 pixels (null: zero) to those of 36 products.
  void (*gradient)(const T* const* pixels, index_t channels, C* to, index_t step);
  /// G g G^T: nine rows of `count` weights, row stride `from_step`, to 36 rows.
  void (*weight)(const T* from, index_t from_step, index_t count, C* to, index_t step);
  /// G^T du G: 36 rows of gradients to nine rows, overwritten or added to.
  void (*weight_gradient)(const C* from, index_t step, index_t count, C* to, index_t to_step, bool add);

  /// The transforms for the widest instruction set of this machine, chosen once.
  static const winograd_transforms& here() {
    static const winograd_transforms chosen{
        PUFFERFISH_KERNEL(widest_isa(), winograd_kernels, winograd_input<T>),
        PUFFERFISH_KERNEL(widest_isa(), winograd_kernels, winograd_output<T>),
        PUFFERFISH_KERNEL(widest_isa(), winograd_kernels, winograd_gradient<T>),
        PUFFERFISH_KERNEL(widest_isa(), winograd_kernels, winograd_weight<T>),
        PUFFERFISH_KERNEL(widest_isa(), winograd_kernels, winograd_weight_gradient<C>)};
    return chosen;
  }
};

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
