// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Sums of activations, with or without a ReLU after them: the plain reference and the fast CPU form.

#include <span>

#include <pufferfish/core/separate.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace reference {

/// y_i += x_i; then, with relu, a negative y_i becomes 0 (a NaN stays a NaN).
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
template <class T>
void add(context<device::cpu>& ctx, std::span<const T> x, std::span<T> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "add: lengths differ");
  const T* from = x.data();
  T* to = y.data();
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, add<T>);
  for_chunks(ctx, static_cast<index_t>(y.size()),
             [=](index_t begin, index_t end) { kernel(from + begin, to + begin, end - begin); });
}
PUFFERFISH_SEPARATE_FUNCTION(dense, add);
/// GPU overload: <pufferfish/gpu.hpp>.
template <class T>
void add(context<device::gpu>& ctx, std::span<const T> x, std::span<T> y);

/// y_i = max(0, y_i + x_i) in one pass; a NaN stays a NaN. Spans of one length, else the assertion fails.
/// They do not overlap. The gradient of both summands is relu_backward with the new y.
template <class T>
void add_relu(context<device::cpu>& ctx, std::span<const T> x, std::span<T> y) {
  PUFFERFISH_ASSERT(x.size() == y.size(), "add_relu: lengths differ");
  const T* from = x.data();
  T* to = y.data();
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::passes, add_relu<T>);
  for_chunks(ctx, static_cast<index_t>(y.size()),
             [=](index_t begin, index_t end) { kernel(from + begin, to + begin, end - begin); });
}
PUFFERFISH_SEPARATE_FUNCTION(dense, add_relu);
/// GPU overload: <pufferfish/gpu.hpp>.
template <class T>
void add_relu(context<device::gpu>& ctx, std::span<const T> x, std::span<T> y);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
