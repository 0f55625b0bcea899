// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Corpus BLEU (Papineni et al., "BLEU: a method for automatic evaluation of machine translation", ACL 2002),
/// with the tokenisation and smoothing of sacreBLEU 2.6. Scores are equal to those of sacreBLEU.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/number_text.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/io/tokenizer_13a.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// How segments become tokens: `none` splits at white space, for text that is tokenised already.
enum class bleu_tokens { mteval_13a, none };

/// Replacement for a precision of 0 (B. Chen and C. Cherry, "A systematic comparison of smoothing techniques
/// for sentence-level BLEU", WMT 2014). `exponential`: 1 / (2^k total) for the k-th such order; `floor`:
/// value / total; `add_k`: value added to matches and totals of orders above 1.
enum class bleu_smoothing { exponential, none, floor, add_k };

/// Options of bleu; the defaults are those of sacreBLEU.
struct bleu_options {
  bleu_tokens tokens = bleu_tokens::mteval_13a;
  bleu_smoothing smoothing = bleu_smoothing::exponential;
  std::optional<double> smoothing_value = std::nullopt;  ///< for floor (default 0.1) and add_k (default 1)
  bool lower_case = false;
  /// Leaves out orders for which the output has no n-gram; for single sentences.
  bool effective_order = false;
  int max_order = 4;
};

/// A score and its components; vectors have one element for each order 1 .. max_order.
/// With p_n the precisions as shares, c = output_length and r = reference_length:
///
///     score = 100 BP exp((log p_1 + ... + log p_N) / N),   BP = 1 if c >= r, else exp(1 - r / c)
///
/// where N is max_order, or with effective_order the largest order that the output has. score is 0 if no
/// n-gram matches or a p_n is 0.
struct bleu_score {
  double score = 0.0;              ///< 0 .. 100
  std::vector<double> precisions;  ///< percent, smoothed
  std::vector<double> matches;     ///< n-grams found in a reference; with add_k's value added
  std::vector<double> totals;      ///< n-grams of the output; likewise
  double brevity_penalty = 1.0;
  std::int64_t output_length = 0;     ///< tokens
  std::int64_t reference_length = 0;  ///< tokens of the reference closest in length, summed

  /// "27.43 60.1/34.0/21.2/13.3 (BP = 0.995 ratio = 0.995 hyp_len = 12345 ref_len = 12407)".
  std::string text() const {
    using detail::fixed_number;
    std::string result = fixed_number(score, 2) + " ";
    for (std::size_t n = 0; n < precisions.size(); ++n) {
      result.append(n == 0 ? "" : "/").append(fixed_number(precisions[n], 1));
    }
    const double ratio =
        reference_length > 0 ? static_cast<double>(output_length) / static_cast<double>(reference_length) : 0;
    return result + " (BP = " + fixed_number(brevity_penalty, 3) + " ratio = " + fixed_number(ratio, 3) +
           " hyp_len = " + std::to_string(output_length) + " ref_len = " + std::to_string(reference_length) +
           ")";
  }
};

namespace detail {

/// Numbers the n-grams of one segment. The key of an n-gram is the number of its first n - 1 words and its
/// last word, so equal numbers mean equal words, for every n. Numbers are valid within one object only.
class ngram_numbers {
 public:
  struct entry {
    int order = 0;
    std::int64_t in_output = 0;
    std::int64_t in_reference = 0;  // largest count in any one reference
    std::int64_t seen = 0;          // count in the current reference
  };

  void clear() {
    words_.clear();
    numbers_.clear();
    entries_.clear();
  }

  /// Calls f(entry&) for every n-gram of a segment, n = 1 .. max_order.
  template <class F>
  void visit(std::span<const std::string_view> tokens, int max_order, F&& f) {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      std::uint32_t before = 0;
      for (int n = 1; n <= max_order && i + static_cast<std::size_t>(n) <= tokens.size(); ++n) {
        const std::string_view word = tokens[i + static_cast<std::size_t>(n) - 1];
        const auto last =
            words_.emplace(std::string(word), static_cast<std::uint32_t>(words_.size())).first->second;
        const std::uint64_t key = std::uint64_t{before} << 32 | last;
        // Number 0 means "no words yet"; entry i has number i + 1.
        const auto place = numbers_.emplace(key, static_cast<std::uint32_t>(entries_.size() + 1));
        if (place.second) entries_.push_back({n, 0, 0, 0});
        before = place.first->second;
        f(entries_[before - 1]);
      }
    }
  }

  std::vector<entry>& entries() { return entries_; }

 private:
  std::unordered_map<std::string, std::uint32_t> words_;
  std::unordered_map<std::uint64_t, std::uint32_t> numbers_;
  std::vector<entry> entries_;
};

}  // namespace detail

/// Accumulates the counts of segments and computes their score. The counts are integers, so the sum over
/// several ranks does not depend on its order: all_reduce_sum over counts().
/// \code
///   bleu counter;
///   for (std::size_t i = 0; i < outputs.size(); ++i) counter.add(outputs[i], references.subspan(i, 1));
///   comm.all_reduce_sum(counter.counts());  // over the ranks
///   std::printf("%s\n", counter.score().text().c_str());
/// \endcode
class bleu {
 public:
  /// Throws value_error for a max_order outside 1 .. 16 and a smoothing value that is negative or not finite.
  explicit bleu(const bleu_options& options = {}) : options_(options) {
    if (options.max_order < 1 || options.max_order > 16) {
      detail::throw_error<value_error>({"bleu: n-grams up to n = ", options.max_order});
    }
    if (options.smoothing_value &&
        !(std::isfinite(*options.smoothing_value) && *options.smoothing_value >= 0.0)) {
      detail::throw_error<value_error>({"bleu: a smoothing value of ", *options.smoothing_value});
    }
    counts_.resize(2 + 2 * order());
  }

  const bleu_options& options() const { return options_; }

  /// Adds a segment and its references. An n-gram matches min(count in the output, largest count in one
  /// reference) times; the reference length is that of the reference closest to the output's. Throws
  /// value_error if there is no reference, and, with lower_case, if a text is not UTF-8.
  void add(std::string_view output, std::span<const std::string> references) {
    if (references.empty()) detail::throw_error<value_error>({"bleu: a segment without a reference"});
    if (references_of_each_ != 0 && references_of_each_ != references.size()) varied_ = true;
    references_of_each_ = references.size();
    ngrams_.clear();
    std::int64_t closest = -1;
    const std::string out = prepare(output);
    const std::vector<std::string_view> tokens = detail::split_blank(out);
    const auto length = static_cast<std::int64_t>(tokens.size());
    ngrams_.visit(tokens, options_.max_order, [](auto& entry) { ++entry.in_output; });
    for (const std::string& reference : references) {
      const std::string text = prepare(reference);
      const std::vector<std::string_view> words = detail::split_blank(text);
      closest = closer(length, closest, static_cast<std::int64_t>(words.size()));
      for (auto& entry : ngrams_.entries()) entry.seen = 0;
      ngrams_.visit(words, options_.max_order,
                    [](auto& entry) { entry.in_reference = std::max(entry.in_reference, ++entry.seen); });
    }
    counts_[0] += length;
    counts_[1] += closest;
    for (const auto& entry : ngrams_.entries()) {
      const auto n = static_cast<std::size_t>(entry.order) - 1;
      counts_[2 + n] += std::min(entry.in_output, entry.in_reference);
      counts_[2 + order() + n] += entry.in_output;
    }
  }

  /// Output length, reference length, matches of each order, totals of each order: 2 + 2 max_order numbers
  /// without smoothing. They may be overwritten by their sums over ranks.
  std::span<std::int64_t> counts() { return counts_; }
  std::span<const std::int64_t> counts() const { return counts_; }

  /// Score of all segments added so far; 0 if there are none.
  bleu_score score() const {
    bleu_score result;
    result.output_length = counts_[0];
    result.reference_length = counts_[1];
    result.matches.assign(counts_.begin() + 2, counts_.begin() + 2 + static_cast<std::ptrdiff_t>(order()));
    result.totals.assign(counts_.begin() + 2 + static_cast<std::ptrdiff_t>(order()), counts_.end());
    result.precisions.assign(order(), 0.0);
    if (counts_[0] < counts_[1]) {
      const double ratio = static_cast<double>(counts_[1]) / static_cast<double>(counts_[0]);
      result.brevity_penalty = counts_[0] > 0 ? std::exp(1.0 - ratio) : 0.0;
    }
    const bool any =
        std::any_of(result.matches.begin(), result.matches.end(), [](double m) { return m > 0; });
    if (any) combine(result);
    return result;
  }

  /// "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp", as sacreBLEU writes it, without a version.
  /// The number of references is that of the segments that this object has been given; "var" if it varies.
  std::string signature() const {
    const std::string references = varied_ ? "var" : std::to_string(references_of_each_);
    std::string value;
    if (options_.smoothing == bleu_smoothing::floor || options_.smoothing == bleu_smoothing::add_k) {
      value = "[" + detail::fixed_number(smoothing_value(), 2) + "]";
    }
    static constexpr const char* names[] = {"exp", "none", "floor", "add-k"};
    return "nrefs:" + references + "|case:" + (options_.lower_case ? "lc" : "mixed") +
           "|eff:" + (options_.effective_order ? "yes" : "no") +
           "|tok:" + (options_.tokens == bleu_tokens::none ? "none" : "13a") +
           "|smooth:" + names[static_cast<int>(options_.smoothing)] + value;
  }

 private:
  std::size_t order() const { return static_cast<std::size_t>(options_.max_order); }

  double smoothing_value() const {
    return options_.smoothing_value.value_or(options_.smoothing == bleu_smoothing::floor ? 0.1 : 1.0);
  }

  // The text of which words are counted: in lower case if wanted, without blanks at its end, tokenized.
  std::string prepare(std::string_view segment) const {
    std::string lower;
    if (options_.lower_case) {
      lower = to_lower(segment);
      segment = lower;
    }
    segment = detail::without_end_blanks(segment);
    return options_.tokens == bleu_tokens::none ? std::string(segment) : tokenize_13a(segment);
  }

  /// The reference length that is closer to the output's; the shorter one if both are equally close.
  static std::int64_t closer(std::int64_t output, std::int64_t best, std::int64_t next) {
    if (best < 0) return next;
    const std::int64_t old_distance = std::abs(output - best), distance = std::abs(output - next);
    return distance < old_distance || (distance == old_distance && next < best) ? next : best;
  }

  /// Computes the smoothed precisions and their geometric mean.
  void combine(bleu_score& result) const {
    const double value = smoothing_value();
    double halvings = 1.0;
    std::size_t used = order();
    for (std::size_t n = 0; n < order(); ++n) {
      if (options_.smoothing == bleu_smoothing::add_k && n > 0) {
        result.matches[n] += value;
        result.totals[n] += value;
      }
      if (result.totals[n] == 0.0) break;
      if (options_.effective_order) used = n + 1;
      if (result.matches[n] > 0.0) {
        result.precisions[n] = 100.0 * result.matches[n] / result.totals[n];
      } else if (options_.smoothing == bleu_smoothing::exponential) {
        halvings *= 2.0;
        result.precisions[n] = 100.0 / (halvings * result.totals[n]);
      } else if (options_.smoothing == bleu_smoothing::floor) {
        result.precisions[n] = 100.0 * value / result.totals[n];
      }
    }
    double sum = 0.0;
    for (std::size_t n = 0; n < used; ++n) {
      if (result.precisions[n] == 0.0) return;  // the geometric mean is 0
      sum += std::log(result.precisions[n]);
    }
    result.score = result.brevity_penalty * std::exp(sum / static_cast<double>(used));
  }

  bleu_options options_;
  std::vector<std::int64_t> counts_;
  std::size_t references_of_each_ = 0;
  bool varied_ = false;
  detail::ngram_numbers ngrams_;
};

/// The score of a corpus with one reference a segment. Throws value_error if the numbers of segments differ.
/// Other errors as bleu.
/// \code
///   const std::vector<std::string> outputs = ..., references = ...;  // equally long
///   std::printf("BLEU %.2f\n", corpus_bleu(outputs, references).score);
/// \endcode
inline bleu_score corpus_bleu(std::span<const std::string> outputs, std::span<const std::string> references,
                              const bleu_options& options = {}) {
  if (outputs.size() != references.size()) {
    detail::throw_error<value_error>(
        {"corpus_bleu: ", outputs.size(), " segments and ", references.size(), " references"});
  }
  bleu counter(options);
  for (std::size_t i = 0; i < outputs.size(); ++i) counter.add(outputs[i], references.subspan(i, 1));
  return counter.score();
}

PUFFERFISH_NAMESPACE_END
