// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Tokens: numbers of words, pieces of words or bytes, 0 .. V - 1 for a vocabulary of V.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

#include <pufferfish/core/error.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Value of an option that names a token, such as a padding token, if there is no such token.
inline constexpr std::int32_t no_token = -1;

namespace detail {

/// Throws value_error for the first token outside 0 .. vocabulary - 1, with its position; the token `allowed`
/// is accepted, too (no_token: no other token). who: the name in the error text, or a function that returns
/// it, so that only errors build text. One pass over the tokens in the calling thread.
///
///     check_tokens("embedding", tokens, 8000, padding);
template <class Who>
void check_tokens(const Who& who, std::span<const std::int32_t> tokens, index_t vocabulary,
                  std::int32_t allowed = no_token) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::int32_t token = tokens[i];
    if ((token < 0 || token >= vocabulary) && (token != allowed || allowed == no_token)) {
      std::string name;
      if constexpr (std::is_invocable_v<const Who&>) {
        name = who();
      } else {
        name = who;
      }
      throw_error<value_error>({name, ": token ", token, " at position ", i, " is not in 0 .. ",
                                vocabulary - 1, " (a vocabulary of ", vocabulary, ")"});
    }
  }
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
