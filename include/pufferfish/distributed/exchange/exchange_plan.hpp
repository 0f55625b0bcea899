// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `exchange_plan`: how gradients are cut into messages, and the all-reduce algorithm for each length.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <pufferfish/core/number_text.hpp>
#include <pufferfish/distributed/collectives/all_reduce.hpp>
#include <pufferfish/distributed/exchange/bucket.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A rule of a plan: the algorithm for messages up to a length.
struct exchange_rule {
  index_t up_to_bytes = std::numeric_limits<index_t>::max();       ///< longest message that the rule is for
  all_reduce_algorithm algorithm = all_reduce_algorithm::library;  ///< algorithm for such messages
  friend bool operator==(const exchange_rule&, const exchange_rule&) = default;
};

/// Buckets and all-reduce algorithms, which together with the number of ranks decide the order of every
/// addition. All ranks must have the same plan, and a resumed run must have its old one.
/// Valid: both bucket limits at least 1 byte, `ranks` at least 0, at most 64 rules whose lengths increase
/// from 1, finite measurements of at least 0.
/// \code
///   const exchange_plan plan = tune(comm);        // or default_plan(comm.size())
///   const std::string text = to_text(plan);       // stored with a run
///   exchange_options options;
///   options.plan = plan_from_text(text, "run");   // the resumed run adds in the same order
/// \endcode
struct exchange_plan {
  bucket_limits buckets;  ///< largest sizes of messages
  /// Lengths increase; the last rule is also for longer messages. Never `automatic`. Empty: `library`.
  std::vector<exchange_rule> rules;
  int ranks = 0;  ///< number of ranks that it was made for; 0: any number

  /// Time of an all-reduce of n bytes by the best algorithm for n, fitted as latency + n / bytes_per_second;
  /// both 0 if nothing was measured.
  double latency = 0.0;           ///< in seconds
  double bytes_per_second = 0.0;  ///< of the messages' bytes

  /// The algorithm of the first rule whose length is at least `bytes`, the length of a message. Never
  /// `automatic` if the plan is valid.
  all_reduce_algorithm algorithm_for(std::size_t bytes) const {
    for (const exchange_rule& rule : rules) {
      if (bytes <= static_cast<std::size_t>(rule.up_to_bytes)) return rule.algorithm;
    }
    return rules.empty() ? all_reduce_algorithm::library : rules.back().algorithm;
  }
  friend bool operator==(const exchange_plan&, const exchange_plan&) = default;
};

/// Makes the plan without measurements. Buckets have the default bucket_limits. Messages of up to 16 KiB
/// times the number of ranks use recursive doubling, longer ones the ring:
///     ranks            2       4       8       16      32     64
///     ring above    32 KiB  64 KiB  128 KiB 256 KiB 512 KiB  1 MiB
/// With latency a and b seconds per byte, recursive doubling takes log2 p (a + b n) and the ring
/// 2 (p - 1) a + 2 (p - 1) / p b n. The times are equal where n is 8, 8.8, 12 and 30 a / b for 4, 8, 16 and
/// 64 ranks. a / b is about 6 KiB for Ethernet at 1 Gbit/s and 25 KiB at 10 Gbit/s, so the rule is between
/// the two for up to 16 ranks, and above both for 64; tune() measures what a network needs. Both algorithms
/// wait without keeping a core busy, and their sums do not depend on the MPI library. With one rank there are
/// no rules. `ranks` becomes the plan's.
inline exchange_plan default_plan(int ranks) {
  exchange_plan plan;
  plan.ranks = ranks;
  if (ranks > 1) {
    plan.rules = {{index_t{16384} * ranks, all_reduce_algorithm::recursive_doubling},
                  {std::numeric_limits<index_t>::max(), all_reduce_algorithm::ring}};
  }
  return plan;
}

namespace detail {

/// Text of the parts of a plan that must be equal on all ranks, in lines: all but `ranks` and measurements.
inline std::string order_lines(const exchange_plan& plan) {
  std::string text = message({"buckets ", plan.buckets.first_bytes, " ", plan.buckets.bytes, "\n"});
  for (const exchange_rule& rule : plan.rules) {
    text += message({"up to ", rule.up_to_bytes, " ", to_string(rule.algorithm), "\n"});
  }
  return text;
}

/// Largest number of rules in a plan.
inline constexpr std::size_t most_rules = 64;
/// Throws value_error unless the plan is valid.
inline void check_plan(const char* who, const exchange_plan& plan) {
  bool valid = plan.buckets.first_bytes >= 1 && plan.buckets.bytes >= 1 && plan.ranks >= 0 &&
               plan.latency >= 0.0 && std::isfinite(plan.latency) && plan.bytes_per_second >= 0.0 &&
               std::isfinite(plan.bytes_per_second) && plan.rules.size() <= most_rules;
  index_t before = 0;
  for (const exchange_rule& rule : plan.rules) {
    valid = valid && rule.up_to_bytes > before && rule.algorithm != all_reduce_algorithm::automatic;
    before = rule.up_to_bytes;
  }
  if (!valid) {
    throw_error<value_error>({who, ": this is no plan (limits from 1, lengths that rise, at most ",
                              most_rules,
                              " of them, finite measurements): ", order_lines(plan).substr(0, 400)});
  }
}

/// Reads the words of a line from left to right. Any unexpected word makes the line invalid.
class plan_line {
 public:
  /// `text` must outlive the object.
  explicit plan_line(std::string_view text) : rest_(text) {}
  /// Whether all words were as expected, and the line has no others.
  bool valid() const { return valid_ && rest_.empty(); }

  /// Reads `word` and returns true if the rest of the line begins with this word; else reads nothing.
  bool starts_with(std::string_view word) {
    if (rest_.substr(0, word.size()) != word) return false;
    rest_.remove_prefix(word.size());
    return true;
  }
  /// Reads a space and a number.
  template <class Number>
  void read(Number& number) {
    valid_ = valid_ && starts_with(" ");
    const char* const last = rest_.data() + rest_.size();
    const auto [end, problem] = std::from_chars(rest_.data(), last, number);
    valid_ = valid_ && problem == std::errc();
    rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
  }
  /// Reads a space and the rest of the line, the name of an algorithm other than `automatic`.
  void read(all_reduce_algorithm& algorithm) {
    using enum all_reduce_algorithm;
    for (const all_reduce_algorithm one : {library, ring, recursive_doubling}) {
      if (rest_ != std::string(" ").append(to_string(one))) continue;
      algorithm = one;
      rest_ = {};
      return;
    }
    valid_ = false;
  }

 private:
  std::string_view rest_;
  bool valid_ = true;
};

}  // namespace detail

/// Text of the plan, in lines, from which plan_from_text makes an equal plan:
///     buckets 1048576 4194304
///     up to 65536 library
///     up to 9223372036854775807 ring
///     ranks 4
///     measured 1.2e-05 1.1e+08
inline std::string to_text(const exchange_plan& plan) {
  return detail::order_lines(plan) + "ranks " + std::to_string(plan.ranks) + "\nmeasured " +
         detail::shortest_number(plan.latency) + " " + detail::shortest_number(plan.bytes_per_second) + "\n";
}

/// Reads a plan from the lines that to_text writes. They may be in any order except those of the rules; each
/// of the other three kinds is there exactly once. Throws io_error, naming `source` and the line, for any
/// other text, and for a text whose plan is invalid (exchange_plan).
inline exchange_plan plan_from_text(const std::string& text, const std::string& source) {
  exchange_plan plan;
  int kinds[4] = {};
  std::size_t number = 0;
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t length = std::min(rest.find('\n'), rest.size());
    const std::string_view content = rest.substr(0, length);
    rest.remove_prefix(std::min(rest.size(), length + 1));
    ++number;
    detail::plan_line line(content);
    if (line.starts_with("buckets")) {
      ++kinds[0];
      line.read(plan.buckets.first_bytes);
      line.read(plan.buckets.bytes);
    } else if (line.starts_with("up to")) {
      line.read(plan.rules.emplace_back().up_to_bytes);
      line.read(plan.rules.back().algorithm);
    } else if (line.starts_with("ranks")) {
      ++kinds[1];
      line.read(plan.ranks);
    } else if (line.starts_with("measured")) {
      ++kinds[2];
      line.read(plan.latency);
      line.read(plan.bytes_per_second);
    } else {
      ++kinds[3];
    }
    if (!line.valid() || kinds[3] > 0 || plan.rules.size() > detail::most_rules) {
      detail::throw_error<io_error>({source, ": line ", number, " of the exchange plan is not one: \"",
                                     std::string(content.substr(0, 80)), "\""});
    }
  }
  try {
    if (kinds[0] != 1 || kinds[1] != 1 || kinds[2] != 1) {
      PUFFERFISH_THROW(value_error("it lacks lines, or has them twice"));
    }
    detail::check_plan("its numbers", plan);
  } catch (const value_error& e) {
    PUFFERFISH_THROW(io_error(source + ": the exchange plan is not valid: " + e.what()));
  }
  return plan;
}

PUFFERFISH_NAMESPACE_END
