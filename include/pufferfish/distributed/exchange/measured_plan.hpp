// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: makes an exchange plan from the measured times of all-reduces. See tune (distributed/tune.hpp).

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include <pufferfish/distributed/exchange/exchange_plan.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

inline constexpr std::array<all_reduce_algorithm, 3> tuned_algorithms = {
    all_reduce_algorithm::library, all_reduce_algorithm::ring, all_reduce_algorithm::recursive_doubling};
/// Index of recursive doubling in tuned_algorithms.
inline constexpr std::size_t tuned_doubling = 2;

/// Median time of each algorithm for one length, in seconds; infinity if the algorithm was not measured.
struct tuned_length {
  index_t bytes = 0;
  std::array<double, 3> seconds{};

  /// Index of the fastest algorithm.
  std::size_t best() const {
    return static_cast<std::size_t>(std::min_element(seconds.begin(), seconds.end()) - seconds.begin());
  }
  /// Whether all algorithms were measured.
  bool compared() const {
    return std::all_of(seconds.begin(), seconds.end(), [](double t) { return std::isfinite(t); });
  }
};

/// Time of a message of n bytes: latency + n seconds_a_byte.
struct transfer_line {
  double latency = 0.0;
  double seconds_a_byte = 0.0;
};

/// Adds one measurement after the other, in the order of their lengths, and fits a transfer_line by least
/// squares of relative errors (weights 1 / t^2).
class line_fit {
 public:
  void add(double bytes, double seconds) {
    const double t = std::max(1e-9, seconds), weight = 1.0 / (t * t);
    w_ += weight, wn_ += weight * bytes, wnn_ += weight * bytes * bytes;
    wt_ += weight * t, wnt_ += weight * bytes * t;
    least_slope_ = t / (20.0 * bytes);
  }
  /// The slope is at least 1/20 of the last time divided by the last length: a smaller slope is less than the
  /// noise of the times. The rate is then a lower bound. At least one measurement; its length is not 0.
  transfer_line line() const {
    const double determinant = w_ * wnn_ - wn_ * wn_;
    const double slope = determinant > 0.0 ? (w_ * wnt_ - wn_ * wt_) / determinant : 0.0;
    const double seconds_a_byte = std::max(slope, least_slope_);
    return {std::max(0.0, (wt_ - seconds_a_byte * wn_) / w_), seconds_a_byte};
  }

 private:
  double w_ = 0.0, wn_ = 0.0, wnn_ = 0.0, wt_ = 0.0, wnt_ = 0.0, least_slope_ = 0.0;
};

/// Number of messages, one after the other, of a sum over `ranks` ranks by recursive doubling.
inline int doubling_messages(int ranks) {
  int messages = 0, power = 1;
  for (; 2 * power <= ranks; power *= 2) ++messages;
  return power < ranks ? messages + 2 : messages;
}

/// Length in bytes above which the ring is faster than recursive doubling; infinity: at no length. `doubling`
/// is the line of recursive doubling, r messages of the whole length. With latency a and b seconds a byte of
/// one message, its time is r (a + b n), and that of the ring 2 (p - 1) a + 2 (p - 1) / p b n.
inline double ring_above(const transfer_line& doubling, int ranks) {
  const double messages = doubling_messages(ranks), ring_messages = 2.0 * (ranks - 1);
  const double fewer_lengths = messages - ring_messages / ranks;
  if (!(fewer_lengths > 0.0)) return std::numeric_limits<double>::infinity();
  return (ring_messages - messages) * doubling.latency / (fewer_lengths * doubling.seconds_a_byte);
}

/// Appends a rule, or extends the last one if the algorithm is the same. Does nothing if `up_to` is not above
/// the length of the last rule.
inline void add_rule(std::vector<exchange_rule>& rules, double up_to, all_reduce_algorithm algorithm) {
  constexpr index_t no_end = std::numeric_limits<index_t>::max();
  const index_t bytes = up_to < 9e18 ? static_cast<index_t>(up_to) : no_end;
  if (bytes <= (rules.empty() ? index_t{0} : rules.back().up_to_bytes)) return;
  if (!rules.empty() && rules.back().algorithm == algorithm) {
    rules.back().up_to_bytes = bytes;
  } else {
    rules.push_back({bytes, algorithm});
  }
}

/// Rules from the measured lengths; tune states the formulas. `all` is the line of the fastest times,
/// `doubling` that of recursive doubling.
inline std::vector<exchange_rule> rules_from(const std::vector<tuned_length>& lengths, int ranks,
                                             const transfer_line& all, const transfer_line& doubling) {
  using enum all_reduce_algorithm;
  constexpr double no_end = std::numeric_limits<double>::infinity();
  std::vector<exchange_rule> rules;
  const tuned_length* last = nullptr;
  for (const tuned_length& length : lengths) {
    if (!length.compared()) continue;
    if (last != nullptr) {
      // 1.5 times the shorter length if the next one is twice as long.
      const double ratio = static_cast<double>(length.bytes) / static_cast<double>(last->bytes);
      const double middle = 1.5 * static_cast<double>(last->bytes) * std::sqrt(ratio / 2.0);
      add_rule(rules, middle, tuned_algorithms[last->best()]);
    }
    last = &length;
  }
  const double crossing = ring_above(doubling, ranks);
  if (last != nullptr) {
    const double longest = static_cast<double>(last->bytes);
    const std::size_t best = last->best();
    const bool in_transfer = last->seconds[best] >= 2.0 * all.latency;
    if (best == tuned_doubling ? crossing <= longest : in_transfer) {
      add_rule(rules, no_end, tuned_algorithms[best]);
    } else {
      add_rule(rules, 1.5 * longest, tuned_algorithms[best]);
    }
  }
  add_rule(rules, crossing, recursive_doubling);
  add_rule(rules, no_end, ring);
  return rules;
}

/// Makes the plan from the measured times, in the order of the lengths; see tune for the formulas. With fewer
/// than two lengths, no rate can be determined, and the plan is default_plan(ranks).
inline exchange_plan plan_from(const std::vector<tuned_length>& lengths, int ranks, double latency_share) {
  exchange_plan plan = default_plan(ranks);
  if (lengths.size() < 2) return plan;
  line_fit fastest, doubling;
  for (const tuned_length& length : lengths) {
    const double bytes = static_cast<double>(length.bytes);
    fastest.add(bytes, length.seconds[length.best()]);
    if (std::isfinite(length.seconds[tuned_doubling])) doubling.add(bytes, length.seconds[tuned_doubling]);
  }
  const transfer_line line = fastest.line();
  plan.rules = rules_from(lengths, ranks, line, doubling.line());
  plan.latency = line.latency;
  plan.bytes_per_second = 1.0 / line.seconds_a_byte;
  constexpr double least = 256.0 * 1024.0, most = 16.0 * 1024.0 * 1024.0;
  const double bytes = std::clamp(plan.latency * plan.bytes_per_second / latency_share, least, most);
  plan.buckets.bytes = static_cast<index_t>(bytes);
  plan.buckets.first_bytes = std::min(bucket_limits{}.first_bytes, plan.buckets.bytes);
  return plan;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
