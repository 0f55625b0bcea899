// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `tune`: measures the network between the ranks and makes an exchange plan from the results.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <pufferfish/distributed/exchange/exchange_plan.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of tune, the same on all ranks. Valid: largest_bytes at least 1024, repeats at least 1, seconds
/// and latency_share above 0.
struct tune_options {
  index_t largest_bytes = index_t{16} << 20;  ///< largest measured message: 16 MiB
  int repeats = 5;              ///< measured runs of each length and algorithm, after one that is not counted
  double seconds = 3.0;         ///< no length is started that is expected to end later
  double latency_share = 0.05;  ///< largest share of the latency in the transfer of a bucket
};

namespace detail {

/// Median time of each algorithm for one length, in seconds.
struct tuned_length {
  index_t bytes = 0;                ///< length of the message
  std::array<double, 3> seconds{};  ///< in the order of tuned_algorithms
};
/// The algorithms that tune compares.
inline constexpr std::array<all_reduce_algorithm, 3> tuned_algorithms = {
    all_reduce_algorithm::library, all_reduce_algorithm::ring, all_reduce_algorithm::recursive_doubling};

/// Makes the plan from the measured times of all lengths; see tune for the formulas. `lengths` ascend, each
/// twice the one before. Without lengths it is default_plan(ranks).
inline exchange_plan plan_from(const std::vector<tuned_length>& lengths, int ranks,
                               const tune_options& options) {
  exchange_plan plan = default_plan(ranks);
  if (lengths.empty()) return plan;
  plan.rules.clear();
  // Least squares of relative errors: weights 1 / t^2.
  double w = 0.0, wn = 0.0, wnn = 0.0, wt = 0.0, wnt = 0.0;
  for (const tuned_length& length : lengths) {
    const auto best = static_cast<std::size_t>(
        std::min_element(length.seconds.begin(), length.seconds.end()) - length.seconds.begin());
    const all_reduce_algorithm chosen = tuned_algorithms[best];
    // Each length is twice the one before. A length in between uses the rule of the nearer one.
    const index_t up_to = length.bytes + length.bytes / 2;
    if (!plan.rules.empty() && plan.rules.back().algorithm == chosen) {
      plan.rules.back().up_to_bytes = up_to;
    } else {
      plan.rules.push_back({up_to, chosen});
    }
    const double t = std::max(1e-9, length.seconds[best]), n = static_cast<double>(length.bytes);
    const double weight = 1.0 / (t * t);
    w += weight, wn += weight * n, wnn += weight * n * n, wt += weight * t, wnt += weight * n * t;
  }
  plan.rules.back().up_to_bytes = std::numeric_limits<index_t>::max();
  const double determinant = w * wnn - wn * wn;
  double seconds_a_byte = determinant > 0.0 ? (w * wnt - wn * wt) / determinant : 0.0;
  if (!(seconds_a_byte > 0.0)) seconds_a_byte = wnt / wnn;  // no slope: as if there were no latency
  plan.latency = std::max(0.0, (wt - seconds_a_byte * wn) / w);
  plan.bytes_per_second = 1.0 / seconds_a_byte;
  constexpr double least = 256.0 * 1024.0, most = 16.0 * 1024.0 * 1024.0;
  const double bytes = std::clamp(plan.latency * plan.bytes_per_second / options.latency_share, least, most);
  plan.buckets.bytes = static_cast<index_t>(bytes);
  plan.buckets.first_bytes = std::min(bucket_limits{}.first_bytes, plan.buckets.bytes);
  return plan;
}

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

}  // namespace detail

/// Measures the communicator's all-reduce, the library's ring and its recursive doubling on all ranks
/// together, with messages of 1, 2, 4, ... KiB up to largest_bytes. A time is the median over `repeats` of
/// the slowest rank's. Stops before a length that would end after `seconds` if it took twice as long as the
/// last one. The plan has, for each length, the algorithm that was fastest there, and
///     bytes of a bucket = latency bytes_per_second / latency_share, in 256 KiB .. 16 MiB,
///     bytes of the first bucket = the smaller of this number and 1 MiB,
/// where latency + n / bytes_per_second is fitted to the fastest times (least squares of relative errors).
/// With one rank nothing is measured. All ranks get rank 0's plan, bit for bit. Collective; no other code may
/// use the communicator meanwhile. Throws on all ranks: value_error if options are invalid on one of them,
/// state_error if their options differ.
/// Memory: largest_bytes, and the scratch of ring_all_reduce. Throws the errors of the communicator, too.
/// \code
///   exchange_options options;
///   options.plan = tune(comm, {.largest_bytes = 1 << 22, .seconds = 1.0});
///   gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, options);
/// \endcode
template <class Comm>
exchange_plan tune(Comm& comm, const tune_options& options = {}) {
  detail::check_communicator<Comm>();
  detail::all_or_none(comm, "tune", [&] { detail::check_tune_options(options); });
  agree_on_lines(comm, "tune's options", detail::option_lines(options));
  if (comm.size() == 1) return default_plan(1);
  using clock = std::chrono::steady_clock;
  const auto since = [](clock::time_point start) {
    return std::chrono::duration<double>(clock::now() - start).count();
  };
  const clock::time_point start = clock::now();
  std::vector<detail::tuned_length> lengths;
  const auto memory = std::make_shared<std::array<std::vector<float>, 2>>();
  const detail::kept_after_timeout<Comm> keeper{comm, memory};
  auto& [values, scratch] = *memory;
  std::vector<std::int64_t> nanoseconds(detail::tuned_algorithms.size() *
                                        static_cast<std::size_t>(options.repeats));
  double last = 0.0;  // duration of the last length
  for (index_t bytes = 1024; bytes <= options.largest_bytes; bytes *= 2) {
    std::array<std::uint64_t, 1> go_on{since(start) + 2.0 * last <= options.seconds ? 1U : 0U};
    comm.broadcast(std::span<std::uint64_t>(go_on), 0);
    if (go_on[0] == 0) break;
    const clock::time_point begun = clock::now();
    values.assign(static_cast<std::size_t>(bytes) / sizeof(float), 0.0F);
    for (int repeat = -1; repeat < options.repeats; ++repeat) {
      for (std::size_t a = 0; a < detail::tuned_algorithms.size(); ++a) {
        comm.barrier();
        const clock::time_point before = clock::now();
        all_reduce_by(detail::tuned_algorithms[a], comm, std::span<float>(values), scratch);
        const auto took = std::chrono::nanoseconds(clock::now() - before).count();
        if (repeat < 0) continue;
        nanoseconds[a * static_cast<std::size_t>(options.repeats) + static_cast<std::size_t>(repeat)] = took;
      }
    }
    comm.all_reduce_max(std::span<std::int64_t>(nanoseconds));
    detail::tuned_length& length = lengths.emplace_back();
    length.bytes = bytes;
    for (std::size_t a = 0; a < detail::tuned_algorithms.size(); ++a) {
      const auto first = nanoseconds.begin() + static_cast<std::ptrdiff_t>(a) * options.repeats;
      std::nth_element(first, first + options.repeats / 2, first + options.repeats);
      length.seconds[a] = static_cast<double>(first[options.repeats / 2]) * 1e-9;
    }
    last = since(begun);
  }
  const std::string text = to_text(detail::plan_from(lengths, comm.size(), options));
  return plan_from_text(detail::broadcast_text(comm, text, 0), "tune");
}

PUFFERFISH_NAMESPACE_END
