// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `code_route`: how codes travel between ranks.

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// How codes travel.
enum class code_route {
  gather,   ///< all of them to all ranks: gathered_codes
  two_hop,  ///< stripes to their owners, and means back: two_hop_codes
  sparse,   ///< entries, which are added on the way: summed_entries
};

constexpr const char* to_string(code_route route) {
  return route == code_route::gather ? "gather" : route == code_route::two_hop ? "two hops" : "sparse sum";
}

PUFFERFISH_NAMESPACE_END
