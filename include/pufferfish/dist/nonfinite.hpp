// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `nonfinite_policy`: what the gradient exchange does about a NaN or an infinity.

#include <algorithm>
#include <cmath>
#include <span>
#include <string>

#include <pufferfish/nn/parameter_store.hpp>
#include <pufferfish/ops/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN

enum class nonfinite_policy {
  ignore,  ///< nothing is looked at; a NaN goes to every rank's parameters
  skip,    ///< the step is reported and left out, on all ranks alike
  stop,    ///< all ranks throw value_error
};

constexpr const char* to_string(nonfinite_policy policy) {
  return policy == nonfinite_policy::ignore ? "ignore" : policy == nonfinite_policy::skip ? "skip" : "stop";
}

/// A gradient element that is a NaN or an infinity: the first of the arena on the first rank that has one.
struct nonfinite_gradient {
  std::string parameter;  ///< empty: nobody has looked where; a loss scale was too large
  index_t element = 0;    ///< of the parameter, as stored
  /// -1 where every rank's gradient is finite and the exchanged one is not: it overflowed on its way.
  int rank = 0;
};

inline std::string to_string(const nonfinite_gradient& found) {
  if (found.parameter.empty()) return "gradients overflowed under the loss scale, which is halved";
  return "the gradient of " + found.parameter + " is not finite at element " + std::to_string(found.element) +
         (found.rank < 0 ? " once exchanged, though every rank's is"
                         : " on rank " + std::to_string(found.rank));
}

namespace detail {

/// Position of the first element that is not finite, or -1. At the speed of memory where there is none.
template <class T>
index_t find_nonfinite(std::span<const T> values) {
  constexpr index_t piece = 16384;
  const auto size = static_cast<index_t>(values.size());
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, sum_of_squares<T>);
  for (index_t begin = 0; begin < size; begin += piece) {
    const index_t end = std::min(size, begin + piece);
    // Squares of doubles may overflow though they are finite: then it takes a second look.
    if (std::isfinite(kernel(values.data() + begin, end - begin))) continue;
    for (index_t i = begin; i < end; ++i) {
      if (!std::isfinite(values[static_cast<std::size_t>(i)])) return i;
    }
  }
  return -1;
}

/// Says which parameter element `offset` of the arena belongs to.
template <class T>
nonfinite_gradient name_nonfinite(const parameter_store<T>& store, index_t offset, int rank) {
  for (const auto& entry : store.parameters()) {
    if (offset < entry.offset + entry.thing->size()) return {entry.name, offset - entry.offset, rank};
  }
  return {"", offset, rank};
}

}  // namespace detail

PUFFERFISH_NAMESPACE_END
