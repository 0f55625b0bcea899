// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The ReLU y = max(x, 0) with its gradient. The gradient reads the output y, so a layer need not keep its
/// input. relu_mask.hpp has passes that store one bit for each element instead of y.
///
/// \code
/// ops::relu_forward<float>(ctx, x.flat(), y.flat());
/// ops::relu_backward<float>(ctx, y.flat(), dy.flat(), dx.flat());
/// \endcode

#include <span>

#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace reference {

/// y_i = x_i where x_i >= 0, else 0. A NaN stays a NaN, so that errors remain visible.
template <class T>
void relu_forward(std::span<const T> x, std::span<T> y) {
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] < T{} ? T{} : x[i];
}

/// dx_i = 0 where y_i is 0 (as in PyTorch) or negative, else dy_i.
template <class T>
void relu_backward(std::span<const T> y, std::span<const T> dy, std::span<T> dx) {
  for (std::size_t i = 0; i < y.size(); ++i) dx[i] = y[i] <= T{} ? T{} : dy[i];
}

}  // namespace reference

/// y_i = x_i where x_i >= 0, else 0; a NaN stays a NaN. Spans of one length, else the assertion fails; y may
/// be x.
template <class T, class Device>
void relu_forward(context<Device>& ctx, std::span<const T> x, std::span<T> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "relu_forward: lengths differ");
  if constexpr (!is_cpu<Device>) {
    elementwise_ops<Device>::relu_forward(ctx, x, y);
  } else {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, relu<T>);
    for_chunks(ctx, static_cast<index_t>(y.size()),
               [=](index_t begin, index_t end) { kernel(x.data() + begin, y.data() + begin, end - begin); });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, relu_forward);

/// dx_i = 0 where y_i is 0 or negative, else dy_i (also where y_i is a NaN); overwritten. Spans of one
/// length, else the assertion fails; dx may be dy or y.
template <class T, class Device>
void relu_backward(context<Device>& ctx, std::span<const T> y, std::span<const T> dy, std::span<T> dx) {
  PUFFERFISH_ASSERT(y.size() == dy.size() && dy.size() == dx.size(), "relu_backward: lengths differ");
  if constexpr (!is_cpu<Device>) {
    elementwise_ops<Device>::relu_backward(ctx, y, dy, dx);
  } else {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, relu_gradient<T>);
    for_chunks(ctx, static_cast<index_t>(dx.size()), [=](index_t begin, index_t end) {
      kernel(y.data() + begin, dy.data() + begin, dx.data() + begin, end - begin);
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, relu_backward);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
