// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Options of a `transformer`.

#include <cmath>
#include <cstdint>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/tokens.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Sizes of a transformer; the defaults are the network for Multi30k of Wang et al. (Pufferfish, MLSys 2021).
///
///     auto net = make_transformer<float>({.vocabulary = 8000, .width = 256, .hidden = 1024, .layers = 3});
struct transformer_options {
  index_t vocabulary = 9521;  ///< words of both languages together; default: those of Multi30k
  index_t width = 512;        ///< features of a token
  index_t hidden = 2048;      ///< hidden features of the feed-forward blocks
  index_t layers = 6;         ///< layers of the encoder; the decoder has as many
  index_t heads = 8;          ///< heads of each attention block
  index_t key = 64;           ///< width of a head's queries and keys
  index_t value = 64;         ///< width of a head's values
  index_t positions = 200;    ///< longest sentence
  double dropout = 0.1;       ///< dropout probability of embeddings, block outputs and attention weights
  /// Standard deviation of the table's initial values; 0: Xavier's, as in the paper's code. Xavier's makes
  /// word embeddings fifty times smaller than positional encodings, which takes many epochs to make up.
  double embedding_deviation = 0.0;
  std::int32_t padding = 1;  ///< token that pads sentences; no_token: none
};

namespace detail {

/// Returns the options. Throws value_error, with their values, if one of them is out of its range.
inline transformer_options checked(const transformer_options& o) {
  const bool sizes = o.vocabulary > 0 && o.width > 0 && o.hidden > 0 && o.layers > 0 && o.heads > 0 &&
                     o.key > 0 && o.value > 0 && o.positions > 0;
  const bool padding = o.padding == no_token || (o.padding >= 0 && o.padding < o.vocabulary);
  const bool numbers = o.dropout >= 0.0 && o.dropout < 1.0 && std::isfinite(o.embedding_deviation) &&
                       o.embedding_deviation >= 0.0;
  if (sizes && padding && numbers) return o;
  throw_error<value_error>(
      {message({"transformer: ", o.layers, " layers of width ", o.width, " and ", o.hidden, ", ", o.heads,
                " heads of ", o.key, " and ", o.value, ", ", o.positions, " positions, "}),
       message({o.vocabulary, " tokens, padding ", o.padding, ", dropout ", o.dropout,
                ", embedding deviation ", o.embedding_deviation}),
       "; sizes must be positive, the padding a token, dropout in [0, 1), the deviation not negative"});
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
