// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Times of several candidates that run in turns, with the processor's peak measured between them.

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bandwidth.hpp"

namespace bench {

/// Statistics of a non-empty list.
struct spread {
  double median = 0, least = 0, most = 0;
};

inline spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  const double median = values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
  return {median, values.front(), values.back()};
}

/// One time, and the peak (GFLOP/s): the larger of those measured right before and right after, so that a
/// disturbed peak measurement does not raise a percentage.
struct sample {
  double seconds = 0;
  double peak = 0;
};

inline std::vector<double> seconds_of(const std::vector<sample>& samples) {
  std::vector<double> result;
  for (const sample& s : samples) result.push_back(s.seconds);
  return result;
}

/// Candidates run in turns: in each round, each runs once (repeated as often as makes the sample long enough
/// to time), and the peak is measured between any two.
class turns {
 public:
  explicit turns(int threads, double least_seconds = 2e-3) : threads_(threads), least_(least_seconds) {}

  /// `prepare` runs before each `work` and is not timed. Returns the candidate's index.
  std::size_t add(std::function<void()> work, std::function<void()> prepare = {}) {
    candidates_.push_back({std::move(work), std::move(prepare), 1, {}});
    return candidates_.size() - 1;
  }

  /// First runs every candidate untimed, at least twice, so that its allocations are not timed.
  void run(int rounds) {
    for (candidate& c : candidates_) warm_up(c);
    double before = measure_peak(threads_);
    for (int round = 0; round < rounds; ++round) {
      for (candidate& c : candidates_) {
        const double seconds = time(c, c.repeats);
        const double after = measure_peak(threads_);
        c.samples.push_back({seconds, std::max(before, after)});
        before = after;
      }
    }
  }

  const std::vector<sample>& samples(std::size_t number) const { return candidates_[number].samples; }

 private:
  struct candidate {
    std::function<void()> work, prepare;
    int repeats;
    std::vector<sample> samples;
  };

  static double time(candidate& c, int repeats) {
    double seconds = 0;
    for (int r = 0; r < repeats; ++r) {
      if (c.prepare) c.prepare();
      const auto start = clock::now();
      c.work();
      seconds += seconds_since(start);
    }
    return seconds / repeats;
  }

  void warm_up(candidate& c) const {
    time(c, 2);
    const double once = std::max(time(c, 1), 1e-8);
    c.repeats = std::clamp(static_cast<int>(least_ / once) + 1, 1, 10000);
    if (c.repeats > 2) time(c, c.repeats);
  }

  int threads_;
  double least_;
  std::vector<candidate> candidates_;
};

}  // namespace bench
