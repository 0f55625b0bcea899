// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// A Transformer small enough to be checked element by element, with widths that differ.

#include <pufferfish/models/transformer.hpp>

namespace test {

inline pufferfish::transformer_options small_transformer(double dropout = 0.0) {
  pufferfish::transformer_options options;
  options.vocabulary = 13;
  options.width = 6;
  options.hidden = 10;
  options.layers = 2;
  options.heads = 2;
  options.key = 3;
  options.value = 4;
  options.positions = 9;
  options.dropout = dropout;
  options.padding = 1;
  return options;
}

}  // namespace test
