// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Products of matrices that may be columns of larger matrices, such as the gates of an LSTM, for all types
/// in which a network computes: wide_product, and its form for bfloat16 on the CPU.

#include <pufferfish/ops/copy/rows.hpp>
#include <pufferfish/ops/linear/column_blocks.hpp>
#include <pufferfish/ops/linear/narrow_product.hpp>
#include <pufferfish/ops/linear/pair_product.hpp>
#include <pufferfish/ops/linear/wide_product.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// c = a b + bias, or with `add` c += a b + bias. a: M x K, contiguous rows; b: K x N, contiguous rows or
/// contiguous columns; bias: N elements or nullptr; c: M x N, contiguous rows, overlaps no operand. Throws
/// shape_error if the shapes do not fit. For float and double this is wide_product. Sums of bfloat16 are in
/// float, and each result is rounded once.
///
/// \code
/// ops::strided_product<T>(ctx, x, w.slice(1, 0, n), z.slice(1, 0, n));  // the first n columns
/// \endcode
template <class T, class Device>
void strided_product(context<Device>& ctx, const tensor_view<const T, 2>& a, const tensor_view<const T, 2>& b,
                     const tensor_view<T, 2>& c, bool add = false, const T* bias = nullptr) {
  if constexpr (!is_cpu<Device> || !detail::is_narrow<T>) {
    wide_product<T>(ctx, a, b, c, add, bias);
  } else {
    pufferfish::detail::check_product(a, b, c);
    if (c.empty()) return;
    const bool even = a.stride(0) % 2 == 0 && (b.stride(1) == 1 || b.stride(1) % 2 == 0);
    if (even && detail::multiplies_pairs<T>(a.extent(1))) {
      return detail::pair_rows<T>(ctx, a, b, bias, c, nullptr, add);
    }
    detail::narrow_rows<T>(
        ctx, a, b, bias, c, nullptr, add,
        [&](const auto& x, const auto& w, const float* wide_bias, const tensor_view<float, 2>& y) {
          wide_product<float>(ctx, x, w, y, add, wide_bias);
        });
  }
}

/// dw = x^T dy, or with `accumulate` dw += x^T dy. x: M x K, dy: M x N, dw: K x N, contiguous rows; dw
/// overlaps no input. M = 0 is an empty sum. Throws shape_error if the shapes do not fit. For float and
/// double this is wide_backward_weight. Scratch for bfloat16: that of linear_backward_weight, and a copy of
/// dw if its rows are not adjacent in memory.
template <class T, class Device>
void strided_weight_gradient(context<Device>& ctx, const tensor_view<const T, 2>& x,
                             const tensor_view<const T, 2>& dy, const tensor_view<parameter_t<T>, 2>& dw,
                             bool accumulate) {
  if constexpr (!is_cpu<Device> || !detail::is_narrow<T>) {
    wide_backward_weight<T>(ctx, x, dy, dw, accumulate);
  } else {
    if (x.extent(0) != dy.extent(0) || dw.shape() != extents<2>{x.extent(1), dy.extent(1)}) {
      pufferfish::detail::throw_error<shape_error>({"strided_weight_gradient: rows ", x.shape(), " and ",
                                                    dy.shape(), " do not fit a gradient ", dw.shape()});
    }
    if (dw.empty()) return;
    if (!detail::has_pairs<T>()) {
      return detail::narrow_weight_gradient(ctx, x, dy, [&](const auto& a, const auto& b, bool first) {
        wide_backward_weight<float>(ctx, a, b, dw, accumulate || !first);
      });
    }
    if (dw.stride(0) == dw.extent(1)) return detail::pair_weight_gradient(ctx, x, dy, dw, accumulate);
    scratch_frame frame(ctx.scratch());
    const tensor_view<float, 2> sums = frame.take<float>(dw.shape());
    if (accumulate) copy_rows<float>(ctx, dw, sums);
    detail::pair_weight_gradient(ctx, x, dy, sums, accumulate);
    copy_rows<float>(ctx, sums, dw);
  }
}

/// Computes strided_product for each of `groups` groups: c_g = a_g b_g + bias_g. bias: N elements for each
/// group, one group after the other, or nullptr. No c_g overlaps another one or an operand. A device computes
/// all products in one launch. Throws shape_error if the shapes do not fit.
template <class T, class Device>
void strided_products(context<Device>& ctx, index_t groups, const column_blocks<const T>& a,
                      const column_blocks<const T>& b, const column_blocks<T>& c, const T* bias = nullptr) {
  if constexpr (!is_cpu<Device>) {
    linear_ops<Device>::products(ctx, groups, a, b, c, bias);
  } else {
    const index_t columns = c.first.extent(1);
    for (index_t g = 0; g < groups; ++g) {
      strided_product<T>(ctx, a[g], b[g], c[g], false, bias == nullptr ? nullptr : bias + g * columns);
    }
  }
}

/// Computes strided_weight_gradient for each of `groups` groups: dw_g = x_g^T dy_g, or with `accumulate`
/// dw_g += x_g^T dy_g. No dw_g overlaps another one. A device computes all products in one launch. Throws
/// shape_error if the shapes do not fit.
template <class T, class Device>
void strided_weight_gradients(context<Device>& ctx, index_t groups, const column_blocks<const T>& x,
                              const column_blocks<const T>& dy, const column_blocks<parameter_t<T>>& dw,
                              bool accumulate) {
  if constexpr (!is_cpu<Device>) {
    linear_ops<Device>::weight_gradients(ctx, groups, x, dy, dw, accumulate);
  } else {
    for (index_t g = 0; g < groups; ++g) strided_weight_gradient<T>(ctx, x[g], dy[g], dw[g], accumulate);
  }
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
