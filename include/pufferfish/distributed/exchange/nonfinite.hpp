// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `nonfinite_policy`: what the gradient exchange does about a NaN or an infinity.

#include <algorithm>
#include <cmath>
#include <span>
#include <string>

#include <pufferfish/nn/parameter_store.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// What gradient_exchange does about gradients that are not finite. Its check reads every gradient before the
/// exchange and, for several ranks or a compressor, again after the exchange. The ranks agree by an
/// all_gather of 8 bytes per rank in each step. With skip or stop no bucket's parameters are updated before
/// all buckets have been exchanged.
enum class nonfinite_policy {
  ignore,  ///< gradients are not checked; a NaN reaches every rank's parameters
  skip,    ///< the step is reported and left out, on all ranks alike
  stop,    ///< all ranks throw value_error
};

/// Name of the policy, as in the options of a run: "ignore", "skip" or "stop".
constexpr const char* to_string(nonfinite_policy policy) {
  return policy == nonfinite_policy::ignore ? "ignore" : policy == nonfinite_policy::skip ? "skip" : "stop";
}

/// A gradient element that is a NaN or an infinity: the first of the arena on the first rank that has one.
struct nonfinite_gradient {
  std::string parameter;  ///< empty: unknown, as a loss scale was too large
  index_t element = 0;    ///< index in the parameter, as stored
  /// -1 if every rank's gradient is finite and the exchanged one is not: it overflowed in the exchange.
  int rank = 0;
};

/// Text for messages, such as "the gradient of conv1.weight is not finite at element 7 on rank 2".
inline std::string to_string(const nonfinite_gradient& found) {
  if (found.parameter.empty()) return "gradients overflowed under the loss scale, which is halved";
  return "the gradient of " + found.parameter + " is not finite at element " + std::to_string(found.element) +
         (found.rank < 0 ? " once exchanged, though every rank's is"
                         : " on rank " + std::to_string(found.rank));
}

namespace detail {

/// Position of the first element that is not finite, or -1. Sums of squares of pieces of 16384 elements are
/// computed with vector instructions; only a piece whose sum is not finite is searched element by element.
template <class T>
index_t find_nonfinite(std::span<const T> values) {
  constexpr index_t piece = 16384;
  const auto size = static_cast<index_t>(values.size());
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, sum_of_squares<T>);
  for (index_t begin = 0; begin < size; begin += piece) {
    const index_t end = std::min(size, begin + piece);
    // Squares of doubles may overflow though they are finite: the loop below decides.
    if (std::isfinite(kernel(values.data() + begin, end - begin))) continue;
    for (index_t i = begin; i < end; ++i) {
      if (!std::isfinite(values[static_cast<std::size_t>(i)])) return i;
    }
  }
  return -1;
}

/// Finds the parameter that element `offset` of the arena belongs to, and the number of the element in it.
/// `rank` is copied to the result. The name is empty for an offset after the last parameter.
template <class T>
nonfinite_gradient name_nonfinite(const parameter_store<T>& store, index_t offset, int rank) {
  for (const auto& entry : store.parameters()) {
    if (offset < entry.offset + entry.thing->size()) return {entry.name, offset - entry.offset, rank};
  }
  return {"", offset, rank};
}

}  // namespace detail

PUFFERFISH_NAMESPACE_END
