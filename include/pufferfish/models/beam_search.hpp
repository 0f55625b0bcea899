// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Beam search, batched over sentences, for a model that computes the logits of the next token.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/ops/loss/log_sum_exp.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Condition that ends the search of a sentence; it also ends if no hypothesis can be extended. Unfinished
/// hypotheses are returned only if no hypothesis of the sentence has ended.
enum class beam_stop {
  enough,  ///< `beam` hypotheses have ended, or the condition of `exact` holds
  exact    ///< no unfinished hypothesis can still score better than the best ended ones
};

/// Options of beam_search, which throws value_error unless beam, max_length and results are at least 1, begin
/// and end are tokens of the vocabulary, end is not forbidden, and length_penalty is finite.
struct beam_options {
  index_t beam = 5;             ///< hypotheses kept at each length; 1: greedy
  index_t max_length = 100;     ///< most tokens with the end token, the only one allowed at that position
  double length_penalty = 0.7;  ///< alpha; 0: none. See beam_length_penalty
  beam_stop stop = beam_stop::enough;
  std::int32_t begin = 2;                 ///< first token of every hypothesis; not part of results
  std::int32_t end = 3;                   ///< last token of a finished hypothesis
  std::vector<std::int32_t> forbidden{};  ///< tokens never chosen, like padding
  index_t results = 1;                    ///< largest number of results per sentence, best first
};

/// Divisor that turns the log probability of a sequence of `length` tokens (the end token included)
/// into its score: ((5 + length) / 6)^alpha. Source: Wu et al., "Google's neural machine
/// translation system", 2016, equation 14. It is 1 for alpha = 0; a larger alpha favors longer sequences.
inline double beam_length_penalty(index_t length, double alpha) {
  return std::pow((5.0 + static_cast<double>(length)) / 6.0, alpha);
}

/// One result of beam_search: a sequence with its probability and score.
struct hypothesis {
  std::vector<std::int32_t> tokens;  ///< without the begin token; the last is the end token if `ended`
  double log_probability = 0.0;      ///< the sum over the tokens
  double score = 0.0;                ///< log_probability / beam_length_penalty
  bool ended = false;                ///< false only if no hypothesis of the sentence could end
};

/// Rows of a step: one for each live hypothesis, ordered by sentence. A cache of the previous step
/// is reordered by new[i] = old[parents[i]]. In the first step there is one row per sentence, and
/// parents[i] is the index of that sentence.
/// The spans refer to memory of beam_search and are valid during the call of step. All have one element per
/// row.
struct beam_rows {
  index_t position = 0;                     ///< length of every hypothesis so far, without the begin token
  std::span<const std::int32_t> tokens;     ///< last token of each hypothesis
  std::span<const std::int32_t> parents;    ///< row of the previous step that the hypothesis extends
  std::span<const std::int32_t> sentences;  ///< index of the sentence of the hypothesis
};

namespace detail {

/// A token that may extend the hypothesis of a row.
struct beam_candidate {
  double log_probability;  // log probability of the hypothesis extended by this token
  std::int32_t row;        // row of the step
  std::int32_t token;      // the next token

  /// Orders candidates by falling log probability; ties by the lower row, then by the lower token.
  bool operator<(const beam_candidate& other) const {
    if (log_probability != other.log_probability) return log_probability > other.log_probability;
    return row != other.row ? row < other.row : token < other.token;
  }
};

/// Finds the `most` largest of z[0 .. count - 1], without forbidden tokens and -infinity, as
/// candidates of one row, best first. The log probability of a candidate is before + (z - shift).
template <class T>
void best_of_row(const T* z, index_t count, double shift, double before, std::int32_t row, std::size_t most,
                 std::span<const std::int32_t> forbidden, std::vector<beam_candidate>& best) {
  best.clear();
  auto least = -std::numeric_limits<parameter_t<T>>::infinity();  // threshold that a logit must exceed
  for (index_t k = 0; k < count; ++k) {
    if (!(z[k] > least)) continue;
    const auto token = static_cast<std::int32_t>(k);
    if (std::find(forbidden.begin(), forbidden.end(), token) != forbidden.end()) continue;
    if (best.size() == most) best.pop_back();
    best.push_back({before + (static_cast<double>(z[k]) - shift), row, token});
    // Among equals the earlier token stays in front.
    for (std::size_t i = best.size() - 1; i > 0 && z[best[i].token] > z[best[i - 1].token]; --i) {
      std::swap(best[i], best[i - 1]);
    }
    if (best.size() == most) least = z[best.back().token];
  }
}

/// The hypotheses of one sentence during its search: those that are extended, and those that have ended.
class beam_of_sentence {
 public:
  /// An unfinished hypothesis: its tokens so far, and the row from which it was extended.
  struct member {
    std::vector<std::int32_t> tokens;
    double log_probability = 0.0;
    std::int32_t parent = 0;  // row of the hypothesis that this one extends
  };

  /// Unfinished hypotheses, the most likely first; empty: the search has stopped.
  const std::vector<member>& living() const { return living_; }

  /// Begins with one empty hypothesis, whose parent is the index of the sentence.
  void start(std::int32_t sentence) { living_.assign(1, {{}, 0.0, sentence}); }

  /// Replaces the live hypotheses by the best of the sorted `candidates`; candidates that end with the end
  /// token become results if they are among the `beam` best. Clears the live hypotheses if the search of the
  /// sentence is over. Row `first_row` is living()[0].
  void advance(std::span<const beam_candidate> candidates, std::int32_t first_row, const beam_options& o) {
    std::vector<member> next;
    const auto beam = static_cast<std::size_t>(o.beam);
    for (std::size_t rank = 0; rank < candidates.size() && next.size() < beam; ++rank) {
      const beam_candidate& c = candidates[rank];
      const bool ends = c.token == o.end;
      // An end that is not among the best would crowd out hypotheses that could still become better.
      if (ends && rank >= beam) continue;
      member extended{living_[static_cast<std::size_t>(c.row - first_row)].tokens, c.log_probability, c.row};
      extended.tokens.push_back(c.token);
      if (!ends) {
        next.push_back(std::move(extended));
        continue;
      }
      const double penalty =
          beam_length_penalty(static_cast<index_t>(extended.tokens.size()), o.length_penalty);
      ended_.push_back(
          {std::move(extended.tokens), c.log_probability, c.log_probability / penalty, /*ended=*/true});
    }
    // Unfinished hypotheses become results only if none has ended and none can be extended.
    if (next.empty() && ended_.empty()) give_up(o);
    living_ = std::move(next);
    const bool enough = o.stop == beam_stop::enough && ended_.size() >= beam;
    if (enough || decided(o)) living_.clear();
  }

  /// The best results, best first. May be called once, at the end, because it moves the tokens out.
  std::vector<hypothesis> results(const beam_options& o) {
    std::stable_sort(ended_.begin(), ended_.end(),
                     [](const hypothesis& a, const hypothesis& b) { return a.score > b.score; });
    ended_.resize(std::min(ended_.size(), static_cast<std::size_t>(o.results)));
    return std::move(ended_);
  }

 private:
  /// Turns the unfinished hypotheses into results, with ended = false.
  void give_up(const beam_options& o) {
    for (member& m : living_) {
      const double penalty = beam_length_penalty(static_cast<index_t>(m.tokens.size()), o.length_penalty);
      ended_.push_back({std::move(m.tokens), m.log_probability, m.log_probability / penalty, false});
    }
  }

  /// True if no live hypothesis can displace a result. Log probabilities only fall, and the penalty
  /// is monotone in the length, so that it is largest either at the next or at the greatest length.
  bool decided(const beam_options& o) const {
    if (living_.empty() || ended_.size() < static_cast<std::size_t>(o.results)) return false;
    std::vector<double> scores;
    for (const hypothesis& h : ended_) scores.push_back(h.score);
    const auto last = scores.begin() + static_cast<std::ptrdiff_t>(o.results - 1);
    std::nth_element(scores.begin(), last, scores.end(), std::greater<>());
    const auto length = static_cast<index_t>(living_.front().tokens.size());
    const double penalty = std::max(beam_length_penalty(length + 1, o.length_penalty),
                                    beam_length_penalty(o.max_length, o.length_penalty));
    return living_.front().log_probability / penalty <= *last;  // the first is the most likely
  }

  std::vector<member> living_;     // most likely first
  std::vector<hypothesis> ended_;  // in the order in which they ended
};

/// Throws value_error for sizes and options that beam_search does not accept.
inline void check_beam_options(index_t sentences, index_t vocabulary, const beam_options& o) {
  constexpr index_t most = std::numeric_limits<std::int32_t>::max();
  if (sentences < 0 || vocabulary < 1 || vocabulary > most || o.beam < 1 || o.max_length < 1 ||
      o.results < 1 || sentences > most / o.beam) {
    throw_error<value_error>({"beam_search: ", sentences, " sentences, ", vocabulary, " tokens, a beam of ",
                              o.beam, ", at most ", o.max_length, " tokens long, ", o.results, " results"});
  }
  if (o.begin < 0 || o.begin >= vocabulary || o.end < 0 || o.end >= vocabulary) {
    throw_error<value_error>({"beam_search: tokens ", o.begin, " and ", o.end,
                              " for begin and end are not both in 0 .. ", vocabulary - 1});
  }
  if (std::find(o.forbidden.begin(), o.forbidden.end(), o.end) != o.forbidden.end()) {
    throw_error<value_error>({"beam_search: the end token ", o.end, " is forbidden"});
  }
  if (!std::isfinite(o.length_penalty)) {
    throw_error<value_error>({"beam_search: a length penalty of ", o.length_penalty});
  }
}

}  // namespace detail

/// Returns the best hypotheses of each sentence, best first; see beam_options. Sequences start after the
/// begin token and end with the end token or at the greatest length. At each length the `beam` most likely
/// unfinished hypotheses of a sentence are kept; the results are the ended ones with the best scores.
///
/// `step(const beam_rows&, tensor_view<T, 2> logits)` writes the logits of the token after each row
/// (rows x vocabulary). beam_search normalizes them, so log probabilities are accepted as well;
/// -infinity forbids a token. Results do not depend on the number of threads. If the rows that
/// `step` writes are independent of each other, results do not depend on the batching of sentences
/// either. Throws value_error for options out of range, and for NaN or +infinity among the logits.
///
/// With l the sum over the tokens of log softmax(logits)(token), the score of a sequence of n tokens is l /
/// ((5 + n) / 6)^alpha. Ties go to the lower row, then to the lower token. The context's scratch memory
/// provides sentences * beam * vocabulary elements of T. `step` is called once per position, at most
/// max_length times, with at most sentences * beam rows; its logits are valid during the call. Exceptions of
/// step pass through.
///
/// \code
/// const beam_options options{.beam = 4, .max_length = 50, .begin = 2, .end = 3, .forbidden = {1}};
/// transformer_decoding<float> decoding(ctx, net.root(), source, options.beam, options.max_length);
/// const auto best = beam_search<float>(
///     ctx, source.extent(0), vocabulary, options,
///     [&](const beam_rows& r, const tensor_view<float, 2>& logits) {
///       decoding.step(ctx, r.tokens, r.parents, r.sentences, logits);
///     });
/// const std::vector<std::int32_t>& translation = best[0].front().tokens;
/// \endcode
template <class T, class Step>
std::vector<std::vector<hypothesis>> beam_search(context<device::cpu>& ctx, index_t sentences,
                                                 index_t vocabulary, const beam_options& options,
                                                 Step&& step) {
  detail::check_beam_options(sentences, vocabulary, options);
  std::vector<detail::beam_of_sentence> searches(static_cast<std::size_t>(sentences));
  for (std::size_t s = 0; s < searches.size(); ++s) searches[s].start(static_cast<std::int32_t>(s));
  scratch_frame frame(ctx.scratch());
  const index_t most_rows = sentences * options.beam;
  T* const room = frame.take<T>(most_rows * vocabulary);
  std::vector<std::int32_t> tokens, parents, owners;
  std::vector<double> before, shift(static_cast<std::size_t>(most_rows));
  std::vector<std::vector<detail::beam_candidate>> of_row(static_cast<std::size_t>(most_rows));
  // With 2 * beam candidates per row the beam is filled, however many hypotheses end.
  const auto wanted = static_cast<std::size_t>(std::min(2 * options.beam, vocabulary));

  for (index_t position = 0; position < options.max_length; ++position) {
    tokens.clear();
    parents.clear();
    owners.clear();
    before.clear();
    for (std::size_t s = 0; s < searches.size(); ++s) {
      for (const auto& m : searches[s].living()) {
        tokens.push_back(m.tokens.empty() ? options.begin : m.tokens.back());
        parents.push_back(m.parent);
        owners.push_back(static_cast<std::int32_t>(s));
        before.push_back(m.log_probability);
      }
    }
    if (tokens.empty()) break;
    const auto rows = static_cast<index_t>(tokens.size());
    const tensor_view<T, 2> logits(room, {rows, vocabulary});
    step(beam_rows{position, tokens, parents, owners}, logits);
    ops::log_sum_exp<T>(ctx, logits, std::span(shift).first(tokens.size()));
    for (std::size_t r = 0; r < tokens.size(); ++r) {
      if (std::isnan(shift[r])) {
        detail::throw_error<value_error>(
            {"beam_search: a NaN or an infinity among the logits of row ", r, " at position ", position});
      }
    }
    const bool last = position + 1 == options.max_length;
    ctx.parallel_for(rows, [&](index_t row, int) {
      const auto r = static_cast<std::size_t>(row);
      const T* const z = room + row * vocabulary;
      auto& best = of_row[r];
      const auto number = static_cast<std::int32_t>(row);
      if (!last) {
        detail::best_of_row<T>(z, vocabulary, shift[r], before[r], number, wanted, options.forbidden, best);
        return;
      }
      best.clear();
      const T end = z[options.end];
      if (end == -std::numeric_limits<parameter_t<T>>::infinity()) return;
      best.push_back({before[r] + (static_cast<double>(end) - shift[r]), number, options.end});
    });
    std::size_t row = 0;
    for (std::size_t s = 0; s < searches.size(); ++s) {
      if (searches[s].living().empty()) continue;
      const std::size_t first = row;
      std::vector<detail::beam_candidate> candidates;
      for (; row < owners.size() && owners[row] == static_cast<std::int32_t>(s); ++row) {
        candidates.insert(candidates.end(), of_row[row].begin(), of_row[row].end());
      }
      std::sort(candidates.begin(), candidates.end());
      searches[s].advance(candidates, static_cast<std::int32_t>(first), options);
    }
  }
  std::vector<std::vector<hypothesis>> result;
  for (detail::beam_of_sentence& search : searches) result.push_back(search.results(options));
  return result;
}

PUFFERFISH_NAMESPACE_END
