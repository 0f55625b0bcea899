// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Predicted time of a training step whose ranks exchange gradients, from counts and the rate of a link.

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

namespace examples {

/// A range of gradients that is exchanged at once.
struct bucket {
  double bytes;
  double done;  ///< part of the backward pass's multiply-adds after which its gradients are complete
};

/// Times of messages. With latency a, rate R and p ranks, a message of m bytes takes a + m / R; a sum of n
/// bytes the least of 2 (p - 1) messages of n / p bytes and log2 p messages of n bytes (two more if p is no
/// power of two); a sum of n bytes of bf16 the former; a gather p - 1 messages. bench/scaling_model.py has
/// the same formulas, and more: delays, hosts that lose time for each byte, hierarchies.
///
///     step_seconds(work, "none", link_times(50e-6, 125e6, 64))  // 64 ranks, 1 Gbit/s
class link_times {
 public:
  link_times(double latency, double rate, int ranks) : latency_(latency), rate_(rate), ranks_(ranks) {}

  int ranks() const { return ranks_; }
  double narrow_sum(double bytes) const { return 2.0 * (ranks_ - 1) * message(bytes / ranks_); }
  double sum(double bytes) const {
    int steps = 0;
    while ((2 << steps) <= ranks_) ++steps;
    if (ranks_ != 1 << steps) steps += 2;
    return std::min(narrow_sum(bytes), steps * message(bytes));
  }
  double gather(double bytes) const { return (ranks_ - 1) * message(bytes); }

 private:
  double message(double bytes) const { return ranks_ > 1 ? latency_ + bytes / rate_ : 0.0; }
  double latency_, rate_;
  int ranks_;
};

/// What a rank does in a step.
struct step_work {
  double parameters = 0.0;
  double compute = 0.0;  ///< seconds of forward and backward pass
  double pace = 1.0;     ///< seconds of a rank per second of the core that the constants were measured on
  std::vector<bucket> buckets;       ///< in the order of the backward pass
  std::array<double, 2> powersgd{};  ///< bytes of the two sums of PowerSGD
};

/// Bytes that a rank passes to the exchange in a step.
inline double payload(const step_work& work, const std::string& compressor) {
  if (compressor == "bf16") return 2.0 * work.parameters;
  if (compressor == "powersgd") return work.powersgd[0] + work.powersgd[1];
  if (compressor == "signum") return 4.0 * std::ceil(work.parameters / 32.0);
  return 4.0 * work.parameters;
}

/// Seconds of a step. `compressor`: "none", "bf16", "powersgd" or "signum". The buckets of the first two are
/// summed while the backward pass, two thirds of the step's multiply-adds, still runs; the others begin after
/// it. Seconds a parameter takes in updates and compressors are those of the ResNet-18 of
/// docs/results/scaling.md, on a core that computes 70e9 multiply-adds a second.
inline double step_seconds(const step_work& work, const std::string& compressor, const link_times& to) {
  constexpr double update = 1.0e-9, low_rank = 3.5e-9, signs = 0.85e-9, signs_of_rank = 0.082e-9;
  const double elements = work.parameters * work.pace;
  double clock = work.compute;
  if (compressor == "powersgd") {
    clock += low_rank * elements + to.sum(work.powersgd[0]) + to.sum(work.powersgd[1]);
  } else if (compressor == "signum") {
    clock += (signs + signs_of_rank * to.ranks()) * elements + to.gather(payload(work, compressor));
  } else if (to.ranks() > 1) {
    double end = 0.0;
    for (const bucket& each : work.buckets) {
      end = std::max(end, work.compute * (1.0 + 2.0 * each.done) / 3.0);
      end += compressor == "bf16" ? to.narrow_sum(each.bytes / 2.0) : to.sum(each.bytes);
    }
    clock = std::max(clock, end);
  }
  return clock + update * elements;
}

}  // namespace examples
