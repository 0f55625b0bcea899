// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Sums of activations, with or without a ReLU after the sum: the plain reference and the fast form.

#include <span>

#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace reference {

/// y_i += x_i. With relu, a negative y_i then becomes 0 (a NaN stays a NaN).
template <class T>
void add(std::span<const T> x, std::span<T> y, bool relu) {
  for (std::size_t i = 0; i < y.size(); ++i) {
    y[i] += x[i];
    if (relu && y[i] < T{}) y[i] = T{};
  }
}

}  // namespace reference

/// y_i += x_i, for example the sum of two branches or of two gradients. Spans of one length, else the
/// assertion fails. They do not overlap.
///
/// \code
/// ops::add<float>(ctx, part.flat(), y.flat());
/// \endcode
template <class T, class Device>
void add(context<Device>& ctx, std::span<const T> x, std::span<T> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "add: lengths differ");
  if constexpr (!is_cpu<Device>) {
    elementwise_ops<Device>::add(ctx, x, y);
  } else {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, add<T>);
    for_chunks(ctx, static_cast<index_t>(y.size()),
               [=](index_t begin, index_t end) { kernel(x.data() + begin, y.data() + begin, end - begin); });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, add);

/// y_i = max(0, y_i + x_i) in one pass; a NaN stays a NaN. The spans have one length, else the assertion
/// fails, and do not overlap. The gradient of both summands is relu_backward with the new y.
template <class T, class Device>
void add_relu(context<Device>& ctx, std::span<const T> x, std::span<T> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "add_relu: lengths differ");
  if constexpr (!is_cpu<Device>) {
    elementwise_ops<Device>::add_relu(ctx, x, y);
  } else {
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, add_relu<T>);
    for_chunks(ctx, static_cast<index_t>(y.size()),
               [=](index_t begin, index_t end) { kernel(x.data() + begin, y.data() + begin, end - begin); });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, add_relu);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
