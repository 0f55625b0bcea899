// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The backward pass of a ReLU after a linear map, together with the gradient of the map's bias.
///
/// \code
/// ops::relu_bias_gradient<float>(ctx, y, dy, dy, db.data(), false);  // y = relu(x w + b); dy becomes dz
/// ops::linear_backward_weight<float>(ctx, x, dy, dw, false);
/// \endcode

#include <pufferfish/ops/elementwise/relu.hpp>
#include <pufferfish/ops/linear/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Gradients of y = relu(z) with z = x w + b: dz_mn = dy_mn where y_mn > 0 or y_mn is NaN, else 0; and db_n =
/// sum_m dz_mn, or with `accumulate` db_n += that sum. y, dy, dz: M x N, dense; dz may be dy. db: N elements
/// that overlap nothing. The bits are those of relu_backward and bias_gradient; a device needs one launch.
/// Throws shape_error if the shapes differ.
template <class T, class Device>
void relu_bias_gradient(context<Device>& ctx, const tensor_view<const T, 2>& y,
                        const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dz, parameter_t<T>* db,
                        bool accumulate) {
  if (y.shape() != dy.shape() || y.shape() != dz.shape()) {
    pufferfish::detail::throw_error<shape_error>({"relu_bias_gradient: outputs ", y.shape(),
                                                  ", their gradient ", dy.shape(), ", result ", dz.shape()});
  }
  if constexpr (!is_cpu<Device>) {
    linear_ops<Device>::relu_bias_gradient(ctx, y, dy, dz, db, accumulate);
  } else {
    relu_backward<T>(ctx, y.flat(), dy.flat(), dz.flat());
    bias_gradient<T>(ctx, dz, db, accumulate);
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, relu_bias_gradient);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
