// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `block_top_k_options`: how block_top_k_codec (compress/sparse/block_top_k.hpp) codes gradients.

#include <string>

#include <pufferfish/compress/codes/two_hop_codes.hpp>
#include <pufferfish/core/number_text.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of block_top_k_codec. The defaults are those of SparseLoCo: 64 of the 4096 values of a block,
/// which take 120 bytes as float. A whole block takes 2 sizeof(T) bytes for its levels, and for each of the
/// `count` values the bits of its index (12 for a side of 64) and 2 bits for sign and level.
///
/// \code
/// block_top_k_options{.side = 64, .count = 64, .decay = 0.95}  // the defaults
/// \endcode
struct block_top_k_options {
  index_t side = 64;    ///< side of a block of side^2 values; 1 to 256
  index_t count = 64;   ///< k: number of values sent per whole block; 1 to side^2
  double decay = 0.95;  ///< factor of the memory in each step; 0 to 1
  code_memory memory = code_memory::error_feedback;
  code_route route = code_route::gather;  ///< gather or two_hop

  /// Throws value_error, naming option and value, if an option is out of its range.
  void validate() const {
    if (side < 1 || side > 256) {
      detail::throw_error<value_error>({"block_top_k: side ", side, " of a block is not 1 to 256"});
    }
    if (count < 1 || count > side * side) {
      detail::throw_error<value_error>(
          {"block_top_k: ", count, " values of a block of ", side, " x ", side, ", not 1 to ", side * side});
    }
    if (!(decay >= 0.0 && decay <= 1.0)) {
      detail::throw_error<value_error>({"block_top_k: memory decay ", decay, " is outside 0 .. 1"});
    }
  }
};

namespace detail {

/// Text of the options on which codes depend, such as "block top-k, 64 of 64 x 64 values, memory decay 0.95".
inline std::string describe_codes(const block_top_k_options& options) {
  return message({"block top-k, ", options.count, " of ", options.side, " x ", options.side,
                  " values, memory decay ", shortest_number(options.decay)});
}

}  // namespace detail

/// Text of all options for messages, such as "block top-k, 64 of 64 x 64 values, memory decay 0.95, error
/// feedback, gather".
inline std::string describe(const block_top_k_options& options) {
  return detail::message(
      {detail::describe_codes(options), ", ", to_string(options.memory), ", ", to_string(options.route)});
}

PUFFERFISH_NAMESPACE_END
