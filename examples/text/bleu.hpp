// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Corpus BLEU (Papineni et al., "BLEU: a method for automatic evaluation of machine translation", ACL 2002)
/// of outputs with one reference each, with the defaults of sacreBLEU 2.6: its tokenisation 13a, n-grams up
/// to n = 4, and its smoothing "exp". Scores are equal to those of sacreBLEU.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <pufferfish/core/number_text.hpp>

#include "library.hpp"
#include "tokenizer_13a.hpp"

namespace examples {

struct bleu_options {
  bool lower_case = false;  ///< compare outputs and references in lower case
};

/// A score and its components; element n - 1 of an array belongs to the n-grams.
/// With p_n the precisions as shares, c = output_length and r = reference_length:
///
///     score = 100 BP exp((log p_1 + ... + log p_4) / 4),   BP = 1 if c >= r, else exp(1 - r / c)
///
/// A precision of 0 is replaced by 1 / (2^k total) for the k-th such n (B. Chen and C. Cherry, "A systematic
/// comparison of smoothing techniques for sentence-level BLEU", WMT 2014). score is 0 if no n-gram matches or
/// there is none for an n.
struct bleu_score {
  static constexpr std::size_t max_order = 4;

  double score = 0.0;                             ///< 0 .. 100
  std::array<double, max_order> precisions{};     ///< percent, smoothed
  std::array<std::int64_t, max_order> matches{};  ///< n-grams found in the reference
  std::array<std::int64_t, max_order> totals{};   ///< n-grams of the output
  double brevity_penalty = 1.0;
  std::int64_t output_length = 0;     ///< tokens
  std::int64_t reference_length = 0;  ///< tokens

  /// "27.43 60.1/34.0/21.2/13.3 (BP = 0.995 ratio = 0.995 hyp_len = 12345 ref_len = 12407)".
  std::string text() const {
    using pufferfish::detail::fixed_number;
    std::string result = fixed_number(score, 2) + " ";
    for (std::size_t n = 0; n < max_order; ++n) {
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
    std::size_t order = 0;
    std::int64_t in_output = 0;
    std::int64_t in_reference = 0;
  };

  void clear() {
    words_.clear();
    numbers_.clear();
    entries_.clear();
  }

  /// Calls f(entry&) for every n-gram of a segment, n = 1 .. max_order.
  template <class F>
  void visit(std::span<const std::string_view> tokens, std::size_t max_order, F&& f) {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      std::uint32_t before = 0;
      for (std::size_t n = 1; n <= max_order && i + n <= tokens.size(); ++n) {
        const std::string_view word = tokens[i + n - 1];
        const auto last =
            words_.emplace(std::string(word), static_cast<std::uint32_t>(words_.size())).first->second;
        const std::uint64_t key = std::uint64_t{before} << 32 | last;
        // Number 0 means "no words yet"; entry i has number i + 1.
        const auto place = numbers_.emplace(key, static_cast<std::uint32_t>(entries_.size() + 1));
        if (place.second) entries_.push_back({n, 0, 0});
        before = place.first->second;
        f(entries_[before - 1]);
      }
    }
  }

  const std::vector<entry>& entries() const { return entries_; }

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
///   for (std::size_t i = 0; i < outputs.size(); ++i) counter.add(outputs[i], references[i]);
///   comm.all_reduce_sum(counter.counts());  // over the ranks
///   std::printf("%s\n", counter.score().text().c_str());
/// \endcode
class bleu {
 public:
  explicit bleu(const bleu_options& options = {}) : options_(options) {}

  /// Adds a segment and its reference. An n-gram matches min(count in the output, count in the reference)
  /// times. Throws value_error, with lower_case, if a text is not UTF-8.
  void add(std::string_view output, std::string_view reference) {
    ngrams_.clear();
    const std::string out = prepare(output), wanted = prepare(reference);
    const std::vector<std::string_view> tokens = detail::split_blank(out),
                                        words = detail::split_blank(wanted);
    ngrams_.visit(tokens, max_order, [](auto& entry) { ++entry.in_output; });
    ngrams_.visit(words, max_order, [](auto& entry) { ++entry.in_reference; });
    counts_[0] += static_cast<std::int64_t>(tokens.size());
    counts_[1] += static_cast<std::int64_t>(words.size());
    for (const auto& entry : ngrams_.entries()) {
      counts_[1 + entry.order] += std::min(entry.in_output, entry.in_reference);
      counts_[1 + max_order + entry.order] += entry.in_output;
    }
  }

  /// Output length, reference length, matches of each n, totals of each n. They may be overwritten by their
  /// sums over ranks.
  std::span<std::int64_t> counts() { return counts_; }

  /// Score of all segments added so far; 0 if there are none.
  bleu_score score() const {
    bleu_score result;
    result.output_length = counts_[0];
    result.reference_length = counts_[1];
    std::copy_n(counts_.begin() + 2, max_order, result.matches.begin());
    std::copy_n(counts_.begin() + 2 + max_order, max_order, result.totals.begin());
    if (counts_[0] < counts_[1]) {
      const double ratio = static_cast<double>(counts_[1]) / static_cast<double>(counts_[0]);
      result.brevity_penalty = counts_[0] > 0 ? std::exp(1.0 - ratio) : 0.0;
    }
    if (std::any_of(result.matches.begin(), result.matches.end(), [](auto m) { return m > 0; })) {
      combine(result);
    }
    return result;
  }

  /// "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp", as sacreBLEU writes it, without a version.
  std::string signature() const {
    return std::string("nrefs:1|case:") + (options_.lower_case ? "lc" : "mixed") +
           "|eff:no|tok:13a|smooth:exp";
  }

 private:
  static constexpr std::size_t max_order = bleu_score::max_order;

  // The text of which words are counted: in lower case if wanted, without blanks at its end, tokenized.
  std::string prepare(std::string_view segment) const {
    std::string lower;
    if (options_.lower_case) {
      lower = to_lower(segment);
      segment = lower;
    }
    return tokenize_13a(detail::without_end_blanks(segment));
  }

  /// Computes the smoothed precisions and their geometric mean.
  static void combine(bleu_score& result) {
    double halvings = 1.0, sum = 0.0;
    for (std::size_t n = 0; n < max_order && result.totals[n] > 0; ++n) {
      const auto matches = static_cast<double>(result.matches[n]),
                 total = static_cast<double>(result.totals[n]);
      if (matches == 0.0) halvings *= 2.0;
      result.precisions[n] = matches > 0.0 ? 100.0 * matches / total : 100.0 / (halvings * total);
    }
    for (const double precision : result.precisions) {
      if (precision == 0.0) return;  // the geometric mean is 0
      sum += std::log(precision);
    }
    result.score = result.brevity_penalty * std::exp(sum / static_cast<double>(max_order));
  }

  bleu_options options_;
  std::array<std::int64_t, 2 + 2 * max_order> counts_{};
  detail::ngram_numbers ngrams_;
};

}  // namespace examples
