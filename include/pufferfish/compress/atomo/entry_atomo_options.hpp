// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `entry_atomo_options`: the options of ATOMO with entries as atoms.

#include <cstdint>
#include <string>

#include <pufferfish/compress/codes/code_route.hpp>
#include <pufferfish/compress/codes/gathered_codes.hpp>
#include <pufferfish/core/number_text.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of entry_atomo_codec. Without memory the code is unbiased. With error feedback the error of a step
/// is added to the next gradients; an entry that is kept then leaves D_i - D_i / p_i in the memory.
struct entry_atomo_options {
  double ratio = 0.01;     ///< expected number of entries of n: max(1, ratio n); 0 < ratio <= 1
  std::uint64_t seed = 1;  ///< the draws also depend on step, rank and parameter
  code_memory memory = code_memory::none;  ///< error feedback; without it codes are unbiased
  code_route route = code_route::gather;   ///< gather or sparse; two_hop needs codes of a fixed length
};

/// The options as text: "ATOMO, entries, ratio 0.01, seed 1, no memory", then ", sparse sum" for that route.
inline std::string describe(const entry_atomo_options& options) {
  return detail::message({"ATOMO, entries, ratio ", detail::exact_number(options.ratio), ", seed ",
                          options.seed, ", ", to_string(options.memory),
                          options.route == code_route::gather ? "" : ", ",
                          options.route == code_route::gather ? "" : to_string(options.route)});
}

PUFFERFISH_NAMESPACE_END
