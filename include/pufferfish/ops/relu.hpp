// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// y = max(x, 0), with its gradient.

#include <span>

#include <pufferfish/ops/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace reference {

/// y_i = x_i where x_i >= 0, else 0; a NaN stays a NaN, so that it is noticed.
template <class T>
void relu_forward(std::span<const T> x, std::span<T> y) {
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] < T{} ? T{} : x[i];
}

/// dx_i = dy_i where y_i > 0, else 0 (also at y_i = 0, as in PyTorch).
template <class T>
void relu_backward(std::span<const T> y, std::span<const T> dy, std::span<T> dx) {
  for (std::size_t i = 0; i < y.size(); ++i) dx[i] = y[i] <= T{} ? T{} : dy[i];
}

}  // namespace reference

/// y_i = x_i where x_i >= 0, else 0. Spans of one length; y may be x.
template <class T>
void relu_forward(context<device::cpu>& ctx, std::span<const T> x, std::span<T> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "relu_forward: lengths differ");
  const T* from = x.data();
  T* to = y.data();
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, relu<T>);
  for_chunks(ctx, static_cast<index_t>(y.size()),
             [=](index_t begin, index_t end) { kernel(from + begin, to + begin, end - begin); });
}
/// GPU overload: <pufferfish/gpu.hpp>.
template <class T>
void relu_forward(context<device::gpu>& ctx, std::span<const T> x, std::span<T> y);

/// dx_i = dy_i where y_i > 0, else 0. Spans of one length; dx may be dy.
template <class T>
void relu_backward(context<device::cpu>& ctx, std::span<const T> y, std::span<const T> dy, std::span<T> dx) {
  PUFFERFISH_ASSERT(y.size() == dy.size() && dy.size() == dx.size(), "relu_backward: lengths differ");
  const T *output = y.data(), *gradient = dy.data();
  T* to = dx.data();
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, relu_gradient<T>);
  for_chunks(ctx, static_cast<index_t>(dx.size()), [=](index_t begin, index_t end) {
    kernel(output + begin, gradient + begin, to + begin, end - begin);
  });
}
/// GPU overload: <pufferfish/gpu.hpp>.
template <class T>
void relu_backward(context<device::gpu>& ctx, std::span<const T> y, std::span<const T> dy, std::span<T> dx);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
