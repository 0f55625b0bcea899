// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// c = a b and c += a b for matrices that are large in every direction. Both operands are packed into panels
/// once, and every element of the result is written once for each block of the depth.
///
/// Source: Goto, van de Geijn: "Anatomy of high-performance matrix multiplication", ACM TOMS 2008. In this
/// implementation, a panel of the right operand stays in the second-level cache while all panels of the left
/// operand are read.

#include <pufferfish/core/message.hpp>
#include <pufferfish/linalg/gemm/gemm.hpp>
#include <pufferfish/linalg/gemm/loops.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace detail {

using pufferfish::detail::depth_blocks;
using pufferfish::detail::packed_a;
using pufferfish::detail::packed_b;
using pufferfish::detail::panel_kernels;
using pufferfish::detail::panel_shape;
using pufferfish::detail::prefetch_block;

}  // namespace detail

/// c = a b + bias, or with `add` c += a b + bias. a: M x K, b: K x N, any strides; bias: N elements or
/// nullptr, added to every row; c: M x N, contiguous rows, overlaps no operand. K = 0 is an empty sum. Throws
/// shape_error if the shapes do not fit.
///
/// On the CPU, sums are in T, and rows of c that are not contiguous fail an assertion. Scratch memory holds a
/// packed copy of a, and a panel of b for each thread. A device computes sums in float (in double for T =
/// double); it throws shape_error unless a and b each have dense rows or dense columns, and c dense rows.
///
/// \code
/// ops::wide_product<float>(ctx, x, w, z, false, bias.data());  // z = x w + b
/// ops::wide_product<float>(ctx, dz, transpose(w), dx);         // dx = dz w^T, where w is a view
/// ops::wide_backward_weight<float>(ctx, x, dz, dw, true);      // dw += x^T dz
/// \endcode
template <class T, class Device>
void wide_product(context<Device>& ctx, const tensor_view<const T, 2>& a, const tensor_view<const T, 2>& b,
                  const tensor_view<T, 2>& c, bool add = false, const T* bias = nullptr) {
  pufferfish::detail::check_product(a, b, c);
  if (c.empty()) return;
  if constexpr (!is_cpu<Device>) {
    linear_ops<Device>::product(ctx, a, b, c, add, bias);
  } else {
    static_assert(std::is_same_v<T, parameter_t<T>>,
                  "pufferfish: wide_product on the CPU multiplies float and double; strided_product also "
                  "multiplies bfloat16");
    PUFFERFISH_ASSERT(c.stride(1) == 1 || c.extent(1) == 1, "wide_product: result rows must be dense");
    const index_t rows = c.extent(0), columns = c.extent(1), depth = a.extent(1);
    const detail::panel_shape<T> shape(columns);
    scratch_frame frame(ctx.scratch());
    T* const packed = frame.take<T>(detail::packed_a<T>::storage_size(shape, rows, depth));
    const detail::packed_a<T> left{shape, packed, rows, detail::depth_blocks(depth)};
    const index_t panels = shape.right_panels(columns), all_left = shape.left_panels(rows);
    for_row_chunks(ctx, all_left, shape.rows() * depth,
                   [&](index_t begin, index_t end) { left.pack(a, begin, end, packed); });
    // If there are few panels of columns, the rows are also cut, so that there are tasks for many threads.
    const index_t cuts = std::clamp<index_t>(24 / panels, 1, std::max<index_t>(1, all_left / 12));
    const index_t right_size = left.blocks.step() * shape.width();
    T* const storage = frame.take<T>(right_size * ctx.threads());
    ctx.parallel_for(panels * cuts, [&](index_t task, int worker) {
      const index_t panel = task / cuts, column = panel * shape.width();
      const index_t first = all_left * (task % cuts) / cuts, last = all_left * (task % cuts + 1) / cuts;
      const tensor_view<T, 2> result = c.slice(1, column, std::min(shape.width(), columns - column));
      T* const right = storage + worker * right_size;
      bool accumulate = add;
      const index_t begin = first * shape.rows(), end = std::min(rows, last * shape.rows());
      if (bias != nullptr || (!add && left.blocks.count() == 0)) {
        for (index_t row = begin; row < end; ++row) {
          T* const to = result.data() + row * result.stride(0);
          for (index_t j = 0; j < result.extent(1); ++j) {
            to[j] = (add ? to[j] : T{}) + (bias == nullptr ? T{} : bias[column + j]);
          }
        }
        accumulate = true;
      }
      for (index_t block = 0; block < left.blocks.count(); ++block) {
        shape.copy_right(b.slice(0, left.blocks.begin(block), left.blocks.size(block)), column, right);
        pufferfish::detail::multiply_panels(left, block, first, last, right, shape.width(), result,
                                            accumulate);
        accumulate = true;
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, wide_product);

/// Gradient of the weight of a wide product: dw = x^T dy, or with `accumulate` dw += x^T dy. x: M x K and dy:
/// M x N, any strides; dw: K x N, contiguous rows, overlaps no input. M = 0 is an empty sum. Throws
/// shape_error if the shapes do not fit. Scratch memory and the strides that a device supports are those of
/// wide_product for x^T and dy.
template <class T, class Device>
void wide_backward_weight(context<Device>& ctx, const tensor_view<const T, 2>& x,
                          const tensor_view<const T, 2>& dy, const tensor_view<parameter_t<T>, 2>& dw,
                          bool accumulate) {
  if constexpr (!is_cpu<Device>) {
    linear_ops<Device>::weight_gradient(ctx, x, dy, dw, accumulate);
  } else {
    wide_product<T>(ctx, transpose(x), dy, dw, accumulate);
  }
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
