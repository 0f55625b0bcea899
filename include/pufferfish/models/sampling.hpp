// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Draws tokens from the logits of a language model: one token, or a text token by token.
///
/// \code
/// auto state = net.root().make_state(1);
/// tensor<float, 2> row({1, vocabulary});
/// const auto step = [&](std::int32_t token, std::span<float> logits) {
///   net.root().next(ctx, {&token, 1}, state, row.view());
///   std::copy(row.flat().begin(), row.flat().end(), logits.begin());
/// };
/// const std::vector<std::int32_t> text =
///     sample_tokens<float>(prompt, 100, vocabulary, {.temperature = 0.8, .top_k = 50}, {1, 2}, step);
/// \endcode

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/random.hpp>
#include <pufferfish/core/scalar.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of sample_token, which checks them.
struct sampling_options {
  double temperature = 1.0;               ///< divides the logits; 0: always draw the largest
  index_t top_k = 0;                      ///< number of largest logits to draw from; 0: all
  std::vector<std::int32_t> forbidden{};  ///< tokens never drawn
};

/// Draws a token with probability softmax(logits / temperature) among the tokens that `options` allow. The
/// random number `uniform` determines the token, so equal arguments give equal tokens; the tokens are ordered
/// by falling logits, then by number. Throws value_error for a temperature that is negative or not finite, a
/// negative top_k, a `uniform` outside [0, 1), a NaN or +infinity among the logits, or no token allowed.
/// A token with a logit of -infinity is never drawn. Takes time proportional to the number of tokens times
/// that of forbidden tokens, and n log n for the n tokens that are drawn from.
template <class T>
std::int32_t sample_token(std::span<const T> logits, const sampling_options& options, double uniform) {
  if (!(options.temperature >= 0.0) || !std::isfinite(options.temperature) || options.top_k < 0 ||
      !(uniform >= 0.0 && uniform < 1.0)) {
    detail::throw_error<value_error>({"sample_token: temperature ", options.temperature, ", the best ",
                                      options.top_k, " tokens, random number ", uniform});
  }
  std::vector<std::int32_t> tokens;
  for (std::size_t k = 0; k < logits.size(); ++k) {
    const auto token = static_cast<std::int32_t>(k);
    if (std::isnan(logits[k]) || logits[k] == std::numeric_limits<parameter_t<T>>::infinity()) {
      detail::throw_error<value_error>({"sample_token: the logit of token ", token, " is no number"});
    }
    const bool forbidden =
        std::find(options.forbidden.begin(), options.forbidden.end(), token) != options.forbidden.end();
    if (!forbidden && logits[k] != -std::numeric_limits<parameter_t<T>>::infinity()) tokens.push_back(token);
  }
  if (tokens.empty()) {
    detail::throw_error<value_error>({"sample_token: none of ", logits.size(), " tokens may be drawn"});
  }
  const auto logit = [&](std::int32_t token) { return logits[static_cast<std::size_t>(token)]; };
  const auto better = [&](std::int32_t a, std::int32_t b) {
    return logit(a) != logit(b) ? logit(a) > logit(b) : a < b;
  };
  if (options.temperature == 0.0) return *std::min_element(tokens.begin(), tokens.end(), better);
  const auto all = static_cast<index_t>(tokens.size());
  const index_t kept = options.top_k == 0 ? all : std::min(options.top_k, all);
  if (kept < all) {
    std::nth_element(tokens.begin(), tokens.begin() + (kept - 1), tokens.end(), better);
    tokens.resize(static_cast<std::size_t>(kept));
  }
  std::sort(tokens.begin(), tokens.end(), better);
  const auto largest = static_cast<double>(logit(tokens.front()));
  std::vector<double> sums;  // cumulative weights; the first token's weight is 1
  double sum = 0.0;
  for (const std::int32_t token : tokens) {
    sum += std::exp((static_cast<double>(logit(token)) - largest) / options.temperature);
    sums.push_back(sum);
  }
  const auto place = std::upper_bound(sums.begin(), sums.end(), uniform * sum);
  return tokens[std::min(static_cast<std::size_t>(place - sums.begin()), tokens.size() - 1)];
}

/// Runs the model over `prompt`, then draws and returns `count` tokens. `step(token, logits)` advances
/// the model by one token and writes the logits of the next token (`vocabulary` values of T); the state
/// of the model is owned by `step`. Token i is drawn with random.uniform(i). Throws value_error for an
/// empty prompt or one with tokens outside 0 .. vocabulary - 1 and for a negative count, and the errors of
/// sample_token.
/// With count 0 it returns nothing and does not call `step`. step is called prompt.size() + count - 1 times.
/// Exceptions of step pass through.
template <class T, class Step>
std::vector<std::int32_t> sample_tokens(std::span<const std::int32_t> prompt, index_t count,
                                        index_t vocabulary, const sampling_options& options,
                                        random_stream random, Step&& step) {
  if (prompt.empty() || count < 0 || vocabulary < 1) {
    detail::throw_error<value_error>(
        {"sample_tokens: a prompt of ", prompt.size(), " tokens, ", count, " to draw out of ", vocabulary});
  }
  std::vector<T> logits(static_cast<std::size_t>(vocabulary));
  for (const std::int32_t token : prompt) {
    if (token < 0 || token >= vocabulary) {
      detail::throw_error<value_error>(
          {"sample_tokens: token ", token, " of the prompt is not in 0 .. ", vocabulary - 1});
    }
  }
  std::vector<std::int32_t> drawn;
  if (count == 0) return drawn;
  for (const std::int32_t token : prompt) step(token, std::span<T>(logits));
  while (static_cast<index_t>(drawn.size()) < count) {
    const double uniform = random.uniform(drawn.size());
    drawn.push_back(sample_token<T>(logits, options, uniform));
    if (static_cast<index_t>(drawn.size()) < count) step(drawn.back(), std::span<T>(logits));
  }
  return drawn;
}

PUFFERFISH_NAMESPACE_END
