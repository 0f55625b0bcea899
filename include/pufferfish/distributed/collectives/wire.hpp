// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: element-wise kernels of the all-reduces, compiled for every instruction set.

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <pufferfish/core/scalar.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

#define PUFFERFISH_KERNELS wire_passes
#define PUFFERFISH_KERNEL_FILE <pufferfish/distributed/collectives/wire.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// Computes to = (from + to) factor, element by element: the sum is rounded, then the product. The lengths
/// must be equal.
template <class T>
void add_received(std::span<const T> from, std::type_identity_t<std::span<T>> to, T factor = T(1)) {
  const auto count = static_cast<index_t>(to.size());
  if (factor == T(1)) {
    PUFFERFISH_KERNEL(widest_isa(), wire_passes, add_before<T>)(from.data(), to.data(), count);
  } else {
    PUFFERFISH_KERNEL(widest_isa(), wire_passes, add_before_scaled<T>)
    (from.data(), factor, to.data(), count);
  }
}

/// Multiplies all values by `factor`. A factor of 1 changes nothing, not even the bits of NaNs.
template <class T>
void scale_values(std::span<T> values, T factor) {
  if (factor == T(1)) return;
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, scale<T>);
  kernel(factor, values.data(), values.data(), static_cast<index_t>(values.size()));
}

/// Rounds every element to Wire (bfloat16 or float16), by way of float: the bits of the scalar conversion.
template <class Wire, class T>
void to_wire(std::span<const T> from, std::span<Wire> to) {
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), wire_passes, narrow<Wire, T>);
  kernel(from.data(), to.data(), static_cast<index_t>(to.size()));
}
/// Computes to = from factor, element by element, in T.
template <class Wire, class T>
void from_wire(std::span<const Wire> from, std::span<T> to, std::type_identity_t<T> factor) {
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), wire_passes, widen_scaled<Wire, T>);
  kernel(from.data(), factor, to.data(), static_cast<index_t>(to.size()));
}
/// Computes to += from, element by element, in T.
template <class Wire, class T>
void add_wire(std::span<const Wire> from, std::span<T> to) {
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), wire_passes, add_narrow<Wire, T>);
  kernel(from.data(), to.data(), static_cast<index_t>(to.size()));
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
