// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: how the rows of a weight gradient are split into parts that are summed separately, and the
/// addition of these sums.

#include <algorithm>

#include <pufferfish/core/context.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

/// Number of parts into which the rows of a product x^T dy are split: 1 to 16, of at least 256 rows each if
/// there are several, and no more than 4 if the product (`elements` elements) has 1 MiB or more. The number
/// depends on shapes alone, so that results do not depend on the number of threads.
template <class T>
index_t weight_splits(index_t rows, index_t elements) {
  constexpr index_t partial_bytes = index_t{4} << 20;
  const index_t bytes = std::max<index_t>(1, elements * static_cast<index_t>(sizeof(T)));
  return std::clamp<index_t>(std::clamp<index_t>(partial_bytes / bytes, 4, 16), 1,
                             std::max<index_t>(1, rows / 256));
}

/// Adds `count` arrays of `elements` elements each to `target`, element by element. The arrays are stored one
/// after another in `sums`, and are added in this order, so the result does not depend on the number of
/// threads.
template <class T>
void add_in_order(context<device::cpu>& ctx, const T* sums, index_t count, T* target, index_t elements) {
  constexpr index_t chunk = 4096;
  ctx.parallel_for(count > 0 ? (elements + chunk - 1) / chunk : 0, [&](index_t task, int) {
    const index_t begin = task * chunk, end = std::min(begin + chunk, elements);
    for (index_t part = 0; part < count; ++part) {
      const T* from = sums + part * elements;
      for (index_t i = begin; i < end; ++i) target[i] += from[i];
    }
  });
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END
