// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `code_route`: how codes are sent between ranks.

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The way in which codes are sent between ranks. With codes of B bytes, a rank of p ranks sends about (p -
/// 1) B bytes by `gather` and about 2 B (p - 1) / p bytes by `two_hop`. Not every compressor has every route:
/// make_coded_compressor throws value_error for `two_hop` if codes have no fixed length, and for `sparse` if
/// codes are not lists of entries.
enum class code_route {
  gather,   ///< all codes are gathered on all ranks: gathered_codes
  two_hop,  ///< codes of stripes are sent to their owners, codes of the means back: two_hop_codes
  sparse,   ///< entries are added by a sparse all-reduce: summed_entries
};

/// The route as text in describe() of options and compressors: "gather", "two hops" or "sparse sum".
constexpr const char* to_string(code_route route) {
  return route == code_route::gather ? "gather" : route == code_route::two_hop ? "two hops" : "sparse sum";
}

PUFFERFISH_NAMESPACE_END
