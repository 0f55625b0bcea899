// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Compression of single buckets: during the backward pass, after it and all at once; and together with a
// policy for gradients that are not finite.
#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <pufferfish/compress/compression.hpp>
#include <pufferfish/distributed/exchange.hpp>
#include <pufferfish/prune/compact_sum.hpp>
#include <pufferfish/prune/magnitude.hpp>

#include "../../threads/thread_ranks.hpp"
#include "../support/compress_support.hpp"
#include "../support/compressor_list.hpp"

namespace {

using namespace compress_support;
using thread_ranks::communicator;
using exchange_type = gradient_exchange<float, communicator>;

constexpr std::uint64_t bad_step = 2, all_steps = 5;

exchange_options small_buckets(nonfinite_policy policy, exchange_progress progress) {
  exchange_options options;
  options.plan.emplace().buckets = {100, 1000};
  options.compress_by_bucket = true;
  options.nonfinite = policy;
  options.progress = progress;
  return options;
}

enum class ending { taken, skipped, stopped };

/// What a rank has seen of its steps.
struct course {
  std::vector<std::vector<float>> results;  // of the steps that were taken
  std::vector<ending> endings;
  std::vector<std::string> reasons;  // of the other steps
  std::uint64_t steps = 0;           // the exchange's count
  bool operator==(const course&) const = default;
};

/// Steps of one rank. In bad_step, which is left out if `leaves_out`, the last rank has a NaN.
course steps_of(communicator& comm, const compression_options& compression, const exchange_options& options,
                bool leaves_out) {
  odd_parameters<float> net;
  cpu_context ctx;
  exchange_type exchange(net.store, comm, options, new_compressor(net.store, compression));
  course seen;
  const auto gradients = net.store.gradients();
  const auto one_step = [&](std::uint64_t step) {
    exchange.begin(ctx);
    set_gradients(net.store, comm.rank(), step);
    if (step == bad_step && comm.rank() + 1 == comm.size()) {
      gradients[gradients.size() / 2] = std::numeric_limits<float>::quiet_NaN();
    }
    return exchange.finish(ctx);
  };
  for (std::uint64_t step = 0; step < all_steps; ++step) {
    if (step == bad_step && leaves_out) continue;
    ending how = ending::taken;
    try {
      how = one_step(step) ? ending::taken : ending::skipped;
      if (how == ending::skipped) seen.reasons.push_back(to_string(exchange.nonfinite().value()));
    } catch (const value_error& e) {
      how = ending::stopped;
      seen.reasons.emplace_back(e.what());
    }
    seen.endings.push_back(how);
    if (how == ending::taken) seen.results.emplace_back(gradients.begin(), gradients.end());
  }
  seen.steps = exchange.steps();
  return seen;
}

/// The courses of all ranks, which must be equal.
course course_of(int ranks, const compression_options& compression, const exchange_options& options,
                 bool leaves_out = false) {
  std::vector<course> all(static_cast<std::size_t>(ranks));
  thread_ranks::run(ranks, [&](communicator& comm) {
    all[static_cast<std::size_t>(comm.rank())] = steps_of(comm, compression, options, leaves_out);
  });
  for (const course& one : all) CHECK(one == all[0]);
  return all[0];
}

bool has_states(const compression_options& compression) {
  const odd_parameters<float> net;
  return !new_compressor(net.store, compression).value().states().empty();
}

/// Whether the compressor can be split into buckets.
bool has_parts(const compression_options& compression) {
  const odd_parameters<float> net;
  auto whole = new_compressor(net.store, compression).value();
  try {
    whole.split(cut_buckets(net.store, {100, 1000}));
  } catch (const value_error&) {
    return false;
  }
  return true;
}

void check_policies(const compression_options& compression, int ranks, exchange_progress progress) {
  const auto how = [&](nonfinite_policy policy) { return small_buckets(policy, progress); };
  const course expected = course_of(ranks, compression, how(nonfinite_policy::ignore), true);
  REQUIRE(expected.results.size() == all_steps - 1);
  for (const nonfinite_policy policy : {nonfinite_policy::skip, nonfinite_policy::stop}) {
    const course seen = course_of(ranks, compression, how(policy));
    CHECK(seen.results == expected.results);
    CHECK(seen.steps == expected.steps);
    REQUIRE(seen.endings.size() == all_steps);
    CHECK(seen.endings[bad_step] == (policy == nonfinite_policy::skip ? ending::skipped : ending::stopped));
    REQUIRE(seen.reasons.size() == 1);
    CAPTURE(seen.reasons[0]);
    CHECK(seen.reasons[0].find("rank " + std::to_string(ranks - 1)) != std::string::npos);
  }
}

/// Waits until the exchange's thread has sent a message after the first `before` ones, at most 20 s. Returns
/// whether it has.
bool sends(const communicator& comm, int before) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (comm.sent() == before && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  return comm.sent() > before;
}

/// Results of a rank's steps, whose gradients are written one after the other. `early`: after the gradients
/// of the first bucket the rank waits for a message; it must send none before finish otherwise.
std::vector<std::vector<float>> results_of(communicator& comm, const compression_options& compression,
                                           const exchange_options& options, int threads, bool early) {
  odd_parameters<float> net;
  cpu_context ctx({threads, 0});
  exchange_type exchange(net.store, comm, options, new_compressor(net.store, compression));
  const index_t first = exchange.buckets()[0].size;
  std::vector<std::vector<float>> results;
  for (std::uint64_t step = 0; step < 6; ++step) {
    exchange.set_epoch(static_cast<index_t>(step / 2), step < 4 ? 0.1 : 0.05);
    exchange.begin(ctx);
    const int sent = comm.sent();
    set_gradients(net.store, comm.rank(), step);
    for (const auto& entry : net.store.parameters()) {
      // Gradients of later buckets are written after the first message.
      if (entry.offset == first && entry.thing->size() > 0 && comm.size() > 1) {
        CHECK((early ? sends(comm, sent) : comm.sent() == sent));
      }
      ctx.gradient_written(*entry.thing);
    }
    exchange.finish(ctx);
    results.emplace_back(net.store.gradients().begin(), net.store.gradients().end());
  }
  return results;
}

std::vector<std::vector<std::vector<float>>> results_of_ranks(int ranks,
                                                              const compression_options& compression,
                                                              const exchange_options& options, int threads,
                                                              bool early) {
  std::vector<std::vector<std::vector<float>>> all(static_cast<std::size_t>(ranks));
  thread_ranks::run(ranks, [&](communicator& comm) {
    all[static_cast<std::size_t>(comm.rank())] = results_of(comm, compression, options, threads, early);
  });
  return all;
}

/// Whether buckets are cut into pieces whose codes depend on the buckets: QSGD's runs of values, and parts of
/// tensors in the stripes of several ranks. Sums of signs do not depend on them.
bool depends_on_buckets(const std::string& name, int ranks) {
  if (name.starts_with("QSGD")) return true;
  return ranks > 1 && name.find("two hops") != std::string::npos && !name.starts_with("Signum") &&
         name.find("shared scalers") == std::string::npos;
}

TEST_CASE("compress_by_bucket: sends during the backward pass; the bits are those after it and all at once") {
  int split = 0;
  for (const compression_options& compression : all_compressors()) {
    if (!has_parts(compression)) continue;
    const std::string name = describe(compression);
    CAPTURE(name);
    ++split;
    for (const int ranks : {1, 2, 3}) {
      CAPTURE(ranks);
      const auto with = [&](exchange_progress progress, int threads) {
        return results_of_ranks(ranks, compression, small_buckets(nonfinite_policy::ignore, progress),
                                threads, progress == exchange_progress::thread);
      };
      const auto overlapped = with(exchange_progress::thread, 1);
      CHECK(overlapped == with(exchange_progress::thread, 3));
      CHECK(overlapped == with(exchange_progress::calls, 1));
      for (const auto& one : overlapped) CHECK(one == overlapped[0]);
      if (depends_on_buckets(name, ranks)) continue;
      exchange_options whole;
      whole.algorithm = all_reduce_algorithm::library;
      auto in_buckets = small_buckets(nonfinite_policy::ignore, exchange_progress::thread);
      in_buckets.algorithm = all_reduce_algorithm::library;
      // A sparse sum of three ranks adds in an order that depends on its length.
      if (ranks == 3 && name.find("sparse sum") != std::string::npos) continue;
      CHECK(results_of_ranks(ranks, compression, in_buckets, 1, true) ==
            results_of_ranks(ranks, compression, whole, 2, false));
    }
  }
  CHECK(split == 30);
}

TEST_CASE("compress_by_bucket: codes that depend on all gradients wait for the end of the backward pass") {
  CHECK_FALSE(has_parts(top_k_options{.ratio = 0.1, .scope = top_k_scope::arena}));
  CHECK_FALSE(has_parts(dgc_options{.ratio = 0.1, .clip_norm = 1.0}));
}

TEST_CASE("compress_by_bucket without a state: a step that is not finite leaves no trace") {
  int checked = 0;
  for (const compression_options& compression : all_compressors()) {
    if (has_states(compression) || !has_parts(compression)) continue;
    CAPTURE(describe(compression));
    ++checked;
    for (const int ranks : {1, 2}) {
      CAPTURE(ranks);
      check_policies(compression, ranks, exchange_progress::thread);
      check_policies(compression, ranks, exchange_progress::calls);
    }
  }
  CHECK(checked >= 6);
}

TEST_CASE("compress_by_bucket of a pruned network: a step that is not finite leaves no trace") {
  const odd_parameters<float> net;
  auto mask = std::make_shared<weight_mask>(net.store);
  REQUIRE(prune_by_magnitude(*mask, net.store, {.share = 0.5}) > 0);
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    check_policies(compact_sum_options{mask}, ranks, exchange_progress::thread);
    check_policies(compact_sum_options{mask, tern_grad_options{}}, ranks, exchange_progress::calls);
  }
}

TEST_CASE("compress_by_bucket with a state: only nonfinite_policy::ignore is allowed") {
  int refused = 0;
  for (const compression_options& compression : all_compressors()) {
    if (!has_states(compression) || !has_parts(compression)) continue;
    CAPTURE(describe(compression));
    ++refused;
    for (const nonfinite_policy policy : {nonfinite_policy::skip, nonfinite_policy::stop}) {
      const auto options = small_buckets(policy, exchange_progress::automatic);
      CHECK_THROWS_WITH_AS(course_of(2, compression, options),
                           doctest::Contains("whose state cannot be rolled back"), value_error);
    }
  }
  CHECK(refused >= 6);
}

}  // namespace
