// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `code_route`: how codes are sent between ranks.

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// How codes are sent between ranks.
enum class code_route {
  gather,   ///< all codes are gathered on all ranks: gathered_codes
  two_hop,  ///< codes of stripes are sent to their owners, codes of the means back: two_hop_codes
  sparse,   ///< entries are added by a sparse all-reduce: summed_entries
};

constexpr const char* to_string(code_route route) {
  return route == code_route::gather ? "gather" : route == code_route::two_hop ? "two hops" : "sparse sum";
}

PUFFERFISH_NAMESPACE_END
