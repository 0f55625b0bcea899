// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the transforms of Winograd's convolution F(4x4, 3x3), compiled for every instruction set.
/// winograd.hpp describes the algorithm; winograd.inc contains the code of the transforms.
///
/// With the points a and b of winograd_points and the abbreviations s = a^2 + b^2, p = 1 / (2 a^2 (a^2 -
/// b^2)) and q = 1 / (2 b^2 (b^2 - a^2)), the matrices are
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
/// In one dimension, the correlation of six pixels d with three weights g has four results y = A^T ((G g) o
/// (B^T d)), where o multiplies element by element. In two dimensions each transform is applied to the
/// columns and then to the rows.

#include <cstddef>
#include <cstdint>
#include <utility>

#include <pufferfish/core/view.hpp>
#include <pufferfish/linalg/isa.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// The points 0, a, -a, b, -b and infinity, at which Winograd's algorithm evaluates polynomials whose
/// coefficients are the pixels and the weights. With a = 3/4 and b = 3/2 all factors in the transforms of
/// pixels and results are exact, and the rounding error in float is about twice that of direct sums. With the
/// usual points 1 and 2 the error is about four times that of direct sums.
template <class T>
struct winograd_points {
  static constexpr T a = T(0.75), b = T(1.5);
  static constexpr T aa = a * a, bb = b * b, aaa = aa * a, bbb = bb * b;
  static constexpr T aabb = aa * bb, sum = aa + bb;
  /// Factors in the transform of weights: for each point, the inverse of the product of its differences from
  /// the other points.
  static constexpr T per_0 = 1 / aabb, per_a = 1 / (2 * aa * (aa - bb)), per_b = 1 / (2 * bb * (bb - aa));
};

#define PUFFERFISH_KERNELS winograd_kernels
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/conv/winograd.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// The transforms, as functions for one instruction set. T: type of pixels and weights. If T has 16 bits, the
/// 36 products and the gradients of weights are float. A tile has 36 rows, one for each point, with row
/// stride `step` in elements.
template <class T>
struct winograd_transforms {
  using C = parameter_t<T>;

  /// B^T d B: transforms 6 x 6 pixels d to 36 rows of `channels` elements. pixels[6 y + x] points to the
  /// contiguous channels of a pixel; nullptr: padding, which counts as zeros.
  void (*input)(const T* const* pixels, index_t channels, C* to, index_t step);
  /// A^T m A: transforms 36 rows m to 4 x 4 pixels, overwritten or, with `add`, added to. pixels[4 y + x]
  /// points to the channels of a pixel; nullptr: the pixel is not written.
  void (*output)(const C* from, index_t step, index_t channels, T* const* pixels, bool add);
  /// A dy A^T: transforms the gradients of 4 x 4 pixels to those of 36 products. pixels[4 y + x] points to
  /// the channels of a gradient; nullptr: zeros.
  void (*gradient)(const T* const* pixels, index_t channels, C* to, index_t step);
  /// G g G^T: transforms nine rows of `count` weights, row stride `from_step`, to 36 rows.
  void (*weight)(const T* from, index_t from_step, index_t count, C* to, index_t step);
  /// G^T du G: transforms 36 rows of gradients of transformed weights to nine rows of weight gradients, row
  /// stride `to_step`, overwritten or, with `add`, added to.
  void (*weight_gradient)(const C* from, index_t step, index_t count, C* to, index_t to_step, bool add);

  /// The transforms for the widest instruction set of this machine, chosen at the first call.
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
