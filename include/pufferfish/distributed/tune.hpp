// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `tune`: measures the network between the ranks and makes an exchange plan from the results.

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/distributed/exchange/measured_plan.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of tune, the same on all ranks. Valid: largest_bytes at least 1024, repeats at least 1, seconds
/// and latency_share above 0.
struct tune_options {
  index_t largest_bytes = index_t{16} << 20;  ///< largest measured message: 16 MiB
  int repeats = 5;              ///< measured runs of each length and algorithm, after one that is not counted
  double seconds = 3.0;         ///< no run starts that is expected to end later; see tune for slow links
  double latency_share = 0.05;  ///< largest share of the latency in the transfer of a bucket
};

namespace detail {

/// Throws value_error, with the numbers, unless the options are valid (tune_options).
inline void check_tune_options(const tune_options& options) {
  if (options.largest_bytes < 1024 || options.repeats < 1 || !(options.seconds > 0.0) ||
      !(options.latency_share > 0.0)) {
    detail::throw_error<value_error>({"tune: at least 1024 bytes (got ", options.largest_bytes,
                                      "), one repeat (got ", options.repeats,
                                      "), positive seconds and share"});
  }
}

/// Lines of the options, which the ranks compare.
inline std::string option_lines(const tune_options& options) {
  return message({"largest message ", options.largest_bytes, "\nrepeats ", options.repeats, "\nseconds "}) +
         shortest_number(options.seconds) + "\nlatency share " + shortest_number(options.latency_share) +
         "\n";
}

/// The measurements of tune. Length number k is 1024 2^k bytes. After every run one all-reduce of two
/// integers gives all ranks the largest time of the run and the largest time since the start. It is also the
/// barrier before the next run. All decisions about what is measured next are computed from these integers in
/// integers, so all ranks make the same calls. Clock: std::chrono::steady_clock, or a simulated one in tests.
/// At least two lengths: largest_bytes >= 2048.
template <class Clock, class Comm>
class all_reduce_times {
 public:
  all_reduce_times(Comm& comm, const tune_options& options)
      : comm_(comm), options_(options), keeper_(comm, memory_), start_(Clock::now()) {
    // 1 TiB, so that no number below can overflow.
    constexpr std::size_t most = 31;
    index_t bytes = 1024;
    for (; bytes <= options.largest_bytes && lengths_.size() < most; bytes *= 2) lengths_.emplace_back();
    agree(0);
  }

  void measure() {
    find_rate();
    compare();
  }

  /// Medians of the measured lengths. The first run of each length and algorithm is counted only if there was
  /// no other.
  std::vector<tuned_length> medians() const {
    std::vector<tuned_length> result;
    for (std::size_t k = 0; k < lengths_.size(); ++k) {
      if (!measured(k)) continue;
      tuned_length& one = result.emplace_back();
      one.bytes = bytes_of(k);
      for (std::size_t a = 0; a < tuned_algorithms.size(); ++a) {
        const std::vector<std::int64_t>& runs = lengths_[k].runs[a];
        one.seconds[a] =
            runs.empty() ? std::numeric_limits<double>::infinity() : static_cast<double>(median(runs)) * 1e-9;
      }
    }
    return result;
  }

 private:
  /// Times in nanoseconds, equal on all ranks.
  struct length_times {
    std::array<std::vector<std::int64_t>, 3> runs;
    std::array<std::int64_t, 3> cost{};  ///< of the last run of each algorithm with its agreement; 0: no run
  };

  static constexpr std::int64_t longest_time = 1'000'000'000'000'000;  ///< nanoseconds: 1e6 s

  static index_t bytes_of(std::size_t k) { return index_t{1024} << k; }
  static std::int64_t kib_of(std::size_t k) { return std::int64_t{1} << k; }

  static std::int64_t median(const std::vector<std::int64_t>& runs) {
    std::vector<std::int64_t> sorted(runs.begin() + (runs.size() > 1 ? 1 : 0), runs.end());
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    return *middle;
  }

  /// Two runs by recursive doubling of 1 KiB, then of lengths up to 32 times as long each, until one takes
  /// twice as long as 1 KiB: its time has a slope from which a rate can be determined. Ends before a length
  /// that is expected to end after half of the whole time.
  void find_rate() {
    const auto time_of = [&](std::size_t k) { return median(lengths_[k].runs[tuned_doubling]); };
    const std::int64_t first = measure_once(0, tuned_doubling), second = measure_once(0, tuned_doubling);
    const double nanoseconds = std::min(options_.seconds * 1e9, static_cast<double>(longest_time));
    limit_ = std::max(static_cast<std::int64_t>(nanoseconds), 60 * std::min(first, second));
    std::size_t k = 0;
    for (std::size_t next = std::min(k + 5, lengths_.size() - 1); next != k;) {
      k = next;
      for (int run = 0; run < 2; ++run) measure_once(k, tuned_doubling);
      if (time_of(k) >= 2 * time_of(0)) return;
      next = std::min(k + 5, lengths_.size() - 1);
      while (next > k && 2 * expected(next) > limit_ / 2 - elapsed_) --next;
    }
  }

  /// Measures all algorithms: first at 1 KiB and at the longest length that the time allows, then at lengths
  /// halfway between those measured.
  void compare() {
    const auto fits = [&](std::size_t k) { return 2 * expected_round(k) <= left(); };
    if (!fits(0)) return;
    compare_at(0);
    std::size_t longest = lengths_.size() - 1;
    while (longest > 0 && !fits(longest)) --longest;
    if (longest == 0) return;
    compare_at(longest);
    for (std::size_t gap = std::bit_ceil(longest + 1) / 2; gap > 0; gap /= 2) {
      for (std::size_t k = gap; k < longest; k += 2 * gap) {
        if (fits(k)) compare_at(k);
      }
    }
  }

  /// One run of each algorithm that is not counted if others follow, then up to `repeats` more. Repetitions
  /// end when the length has taken an eighth of the whole time.
  void compare_at(std::size_t k) {
    const std::int64_t begun = elapsed_;
    for (int run = 0; run <= options_.repeats; ++run) {
      const std::int64_t round = expected_round(k);
      if (run > 0 && (elapsed_ - begun + round > limit_ / 8 || round > left())) return;
      for (std::size_t a = 0; a < tuned_algorithms.size(); ++a) measure_once(k, a);
    }
  }

  /// One run and its agreement. Returns the time of both.
  std::int64_t measure_once(std::size_t k, std::size_t algorithm) {
    auto& [values, scratch] = *memory_;
    const std::size_t count = static_cast<std::size_t>(bytes_of(k)) / sizeof(float);
    if (values.size() < count) values.assign(count, 0.0F);
    const std::int64_t begun = elapsed_;
    const typename Clock::time_point before = Clock::now();
    all_reduce_by(tuned_algorithms[algorithm], comm_, std::span<float>(values).first(count), scratch);
    lengths_[k].runs[algorithm].push_back(agree(nanoseconds_since(before)));
    return lengths_[k].cost[algorithm] = std::max<std::int64_t>(1, elapsed_ - begun);
  }

  static std::int64_t nanoseconds_since(typename Clock::time_point start) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
  }

  /// Returns the largest `nanoseconds` of all ranks and sets elapsed_. Returns after all ranks have called
  /// it.
  std::int64_t agree(std::int64_t nanoseconds) {
    std::array<std::int64_t, 2> largest{nanoseconds, nanoseconds_since(start_)};
    comm_.all_reduce_max(std::span<std::int64_t>(largest));
    elapsed_ = largest[1];
    return largest[0];
  }

  std::int64_t left() const { return limit_ - elapsed_; }

  bool measured(std::size_t k) const { return cost_of(k) > 0; }
  std::int64_t cost_of(std::size_t k) const {
    return *std::max_element(lengths_[k].cost.begin(), lengths_[k].cost.end());
  }

  /// Expected time of one run of the slowest algorithm and its agreement: a straight line through the nearest
  /// measured lengths on both sides, or else through the two nearest below, and not less than any measured
  /// shorter length. Length 0 has been measured.
  std::int64_t expected(std::size_t k) const {
    std::int64_t least = 0, at_below = 0;
    std::size_t below = 0, before = 0;  // the two longest measured lengths up to k
    for (std::size_t j = 0; j <= k; ++j) {
      if (!measured(j)) continue;
      before = below;
      below = j;
      at_below = cost_of(j);
      least = std::max(least, at_below);
    }
    std::size_t above = k;
    while (above < lengths_.size() && !measured(above)) ++above;
    const bool inside = above < lengths_.size();
    if (above == k || (!inside && below == before)) return least;
    const std::size_t from = inside ? below : before, to = inside ? above : below;
    // The clamps keep the products in 64 bits: 1 s a KiB, 1e6 s in total.
    const std::int64_t a_kib = (cost_of(to) - cost_of(from)) / (kib_of(to) - kib_of(from));
    const std::int64_t more = std::clamp<std::int64_t>(a_kib, 0, 1'000'000'000) * (kib_of(k) - kib_of(below));
    return std::clamp<std::int64_t>(at_below + more, least, std::max<std::int64_t>(least, longest_time));
  }

  /// Expected time of one run of each algorithm. While the ring has not been measured, its time is estimated
  /// by its number of messages.
  std::int64_t expected_round(std::size_t k) const {
    const std::int64_t others = 2, messages = doubling_messages(comm_.size());
    const bool ring_measured = !lengths_[0].runs[1].empty();
    const std::int64_t ring = ring_measured ? 1 : (2 * (comm_.size() - 1) + messages - 1) / messages;
    return expected(k) * (others + ring);
  }

  Comm& comm_;
  tune_options options_;
  std::shared_ptr<std::array<std::vector<float>, 2>> memory_ =
      std::make_shared<std::array<std::vector<float>, 2>>();
  kept_after_timeout<Comm> keeper_;
  typename Clock::time_point start_;
  std::vector<length_times> lengths_;
  std::int64_t elapsed_ = 0;  ///< nanoseconds from the start to the end of the last run
  std::int64_t limit_ = 0;    ///< nanoseconds
};

/// tune with the clock as a parameter.
template <class Clock, class Comm>
exchange_plan tune_by_clock(Comm& comm, const tune_options& options) {
  check_communicator<Comm>();
  all_or_none(comm, "tune", [&] { check_tune_options(options); });
  agree_on_lines(comm, "tune's options", option_lines(options));
  if (comm.size() == 1 || options.largest_bytes < 2048) return default_plan(comm.size());
  all_reduce_times<Clock, Comm> times(comm, options);
  times.measure();
  const std::string text = to_text(plan_from(times.medians(), comm.size(), options.latency_share));
  return plan_from_text(broadcast_text(comm, text, 0), "tune");
}

}  // namespace detail

/// Measures the communicator's all-reduce, the library's ring and its recursive doubling on all ranks
/// together, with messages of 1, 2, 4, ... KiB up to largest_bytes, and makes a plan from the times. All
/// ranks get rank 0's plan, bit for bit. Collective; no other code may use the communicator meanwhile.
///
/// A time is that of the slowest rank. The time of a length and algorithm is the median over up to `repeats`
/// runs after the first, or the first if there was no other.
/// 1. Recursive doubling of 1 KiB, 32 KiB, 1 MiB, ..., each twice, until a length takes twice as long as
///    1 KiB, or for half of the whole time. 1 KiB and 32 KiB (or largest_bytes) are always measured.
/// 2. All algorithms at 1 KiB and at the longest length that the time allows, then at lengths halfway between
///    these. A length is measured if one run of each algorithm is expected to take at most half of the time
///    that is left. Repetitions end when the length has taken an eighth of the whole time.
///
/// The whole time is `seconds`, but at least 60 times that of one all-reduce of 1 KiB with the agreement of
/// the ranks after it: 12 s for two ranks and 100 ms of delay. tune may exceed it if a length takes longer
/// than the shorter lengths let expect.
///
/// The plan has
///     bytes of a bucket = latency bytes_per_second / latency_share, in 256 KiB .. 16 MiB,
///     bytes of the first bucket = the smaller of this number and 1 MiB,
/// where latency + n / bytes_per_second is fitted to the fastest times (least squares of relative errors). If
/// the times hardly increase with the length, bytes_per_second is a lower bound: 20 times the longest
/// measured length divided by its time. Buckets are then long, since latency dominates.
///
/// A message gets the algorithm that was fastest at the nearest length at which all were measured. Lengths
/// above 1.5 times the longest such length L get the algorithm that was fastest at L if the latency is at
/// most half of the time there. Otherwise, and without such an L, they get recursive doubling up to the
/// length n where the ring's time is equal, and the ring above. With the fitted time r (a + b n) of recursive
/// doubling over p ranks in r messages, n is given by
///     2 (p - 1) a + 2 (p - 1) / p b n = r (a + b n),
/// and is infinite for two ranks. If recursive doubling was fastest at L, then n > L decides in either case.
///
/// With one rank, or largest_bytes below 2048, nothing is measured, and the plan is default_plan(ranks).
/// Throws on all ranks: value_error if options are invalid on one of them, state_error if their options
/// differ. Throws the errors of the communicator, too.
/// Memory: largest_bytes, and the scratch of ring_all_reduce.
/// \code
///   exchange_options options;
///   options.plan = tune(comm, {.largest_bytes = 1 << 22, .seconds = 1.0});
///   gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, options);
/// \endcode
template <class Comm>
exchange_plan tune(Comm& comm, const tune_options& options = {}) {
  return detail::tune_by_clock<std::chrono::steady_clock>(comm, options);
}

PUFFERFISH_NAMESPACE_END
