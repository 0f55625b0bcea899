// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include <pufferfish/distributed/self.hpp>
#include <pufferfish/prune/apply_mask.hpp>
#include <pufferfish/prune/compact_sum.hpp>
#include <pufferfish/prune/mask_tracker.hpp>

#include "../../threads/thread_ranks.hpp"
#include "../support/prune_support.hpp"

namespace {

using namespace prune_support;

mask_tracker tracker_for(const parameter_store<float>& store, std::uint64_t steps) {
  return mask_tracker(weight_mask(store), {steps});
}

TEST_CASE("mask_tracker: ready when the pattern has been the same for a number of updates") {
  cpu_context ctx;
  small_store<float> net;
  self comm;
  mask_tracker tracker = tracker_for(net.store, 5);
  const std::span<float> values = net.store.values();
  CHECK(tracker.word() == 0);
  CHECK_FALSE(tracker.compact());
  const auto update = [&] {
    tracker.observe(ctx, std::span<const float>(values));
    tracker.agree(comm);
    return tracker.compact();
  };
  for (int i = 0; i < 5; ++i) CHECK_FALSE(update());
  CHECK(update());
  const std::uint64_t word = tracker.word();
  CHECK(word != 0);
  // Values change, the pattern does not.
  for (float& value : values) value *= 2;
  CHECK(update());
  CHECK(tracker.word() == word);
  values[40] = 0;  // of fc.weight
  for (int i = 0; i < 5; ++i) {
    CHECK_FALSE(update());
    CHECK(tracker.word() == 0);
  }
  CHECK(update());
  CHECK(tracker.word() != word);
  CHECK(tracker.mask()->kept() == tracker.mask()->prunable() - 1);
  // Vectors have no pattern.
  values[0] = 0;
  CHECK(update());
  // A weight comes back to life.
  values[40] = 1;
  CHECK_FALSE(update());
  CHECK(tracker.counters().compact == 4);
  CHECK(tracker.counters().full == 11);
  CHECK(tracker.counters().resets == 0);
}

TEST_CASE("mask_tracker: one step for masks that the framework keeps") {
  cpu_context ctx;
  small_store<float> net;
  self comm;
  mask_tracker tracker = tracker_for(net.store, 1);
  const std::span<const float> values = net.store.values();
  tracker.observe(ctx, values);
  tracker.agree(comm);
  CHECK_FALSE(tracker.compact());
  tracker.observe(ctx, values);
  tracker.agree(comm);
  CHECK(tracker.compact());
  CHECK_THROWS_AS(tracker_for(net.store, 0), value_error);
}

TEST_CASE("mask_tracker: the mask's pointer changes with the pattern only") {
  cpu_context ctx;
  small_store<float> net;
  mask_tracker tracker = tracker_for(net.store, 2);
  const std::span<float> values = net.store.values();
  tracker.observe(ctx, std::span<const float>(values));
  const std::shared_ptr<const weight_mask> before = tracker.mask();
  for (float& value : values) value += value;
  tracker.observe(ctx, std::span<const float>(values));
  CHECK(tracker.mask() == before);
  values[45] = 0;
  tracker.observe(ctx, std::span<const float>(values));
  CHECK(tracker.mask() != before);
  CHECK(tracker.mask()->kept() + 1 == before->kept());
  CHECK(before->kept() == before->prunable());
}

TEST_CASE("mask_tracker: patterns that the caller has made") {
  cpu_context ctx;
  small_store<float> net;
  one_matrix<float> other({1, 2});
  mask_tracker by_values = tracker_for(net.store, 2), by_pattern = tracker_for(net.store, 2);
  weight_mask pattern(net.store);
  for (int i = 0; i < 8; ++i) {
    if (i == 4) net.store.values()[41] = 0;
    if (i == 4) pattern.remove(1, 34);
    by_values.observe(ctx, std::span<const float>(net.store.values()));
    by_pattern.observe(pattern);
    CHECK(by_values.word() == by_pattern.word());
    CHECK((by_values.word() != 0) == (i == 2 || i == 3 || i >= 6));
  }
  CHECK_THROWS_AS(by_pattern.observe(weight_mask(other.store)), state_error);
}

TEST_CASE("mask_tracker: weights in the memory of a host framework") {
  cpu_context ctx;
  small_store<float> net;
  // The host's weights, each in its own place.
  std::vector<std::vector<float>> memory;
  std::vector<parameter<float>> seen;
  for (const auto& one : net.all) {
    memory.emplace_back(one.values().begin(), one.values().end());
    seen.emplace_back(one.layout(), one.role(), memory.back().data());
  }
  parameter_store<float> host;
  host.pack_gradients([&](state_visitor<float>& visitor) {
    for (std::size_t i = 0; i < seen.size(); ++i) {
      std::string name = "p";
      visitor.on_parameter(name += std::to_string(i), seen[i]);
    }
  });
  REQUIRE(host.values().empty());
  weight_mask mask(host), wanted(net.store);
  CHECK(prune_by_magnitude(mask, host, {.share = 0.5}) ==
        prune_by_magnitude(wanted, net.store, {.share = 0.5}));
  CHECK(kept_elements(mask) == kept_elements(wanted));
  mask_tracker tracker = tracker_for(host, 1);
  for (int i = 0; i < 2; ++i) tracker.observe(ctx, host);
  CHECK(tracker.mask()->kept() == mask.prunable());
  mask_weights(ctx, mask, host);
  for (int i = 0; i < 2; ++i) tracker.observe(ctx, host);
  CHECK(*tracker.mask() == mask);
  CHECK(tracker.word() != 0);
  CHECK(std::ranges::count(memory[4], 0.0F) > 9000);  // large.weight
  CHECK(std::ranges::count(memory[3], 0.0F) == 0);    // table.weight
  CHECK_THROWS_AS(tracker.observe(ctx, net.store), state_error);
}

TEST_CASE("mask_tracker: the least and the largest word decide") {
  small_store<float> net;
  mask_tracker tracker = tracker_for(net.store, 1);
  const weight_mask pattern(net.store);
  tracker.observe(pattern);
  tracker.observe(pattern);
  const std::uint64_t mine = tracker.word();
  REQUIRE(mine != 0);
  tracker.decide(0, mine);  // another rank is not ready
  CHECK_FALSE(tracker.compact());
  CHECK(tracker.word() == mine);
  tracker.decide(mine, mine);
  CHECK(tracker.compact());
  tracker.decide(mine - 1, mine);  // another rank has another pattern
  CHECK_FALSE(tracker.compact());
  CHECK(tracker.word() == 0);
  tracker.decide(0, 0);  // no rank is ready
  CHECK_FALSE(tracker.compact());
  CHECK(tracker.counters().compact == 1);
  CHECK(tracker.counters().full == 3);
  CHECK(tracker.counters().resets == 1);
}

/// What a rank has seen.
struct history {
  std::vector<bool> compact;
  std::vector<std::vector<float>> results;
  mask_tracker_counters counters;
};

TEST_CASE("mask_tracker: a pattern that one rank alone has leads to full exchanges on all, which recover") {
  for (const int count : {2, 3, 4}) {
    std::vector<history> all(static_cast<std::size_t>(count));
    std::mutex writing;
    thread_ranks::run(count, [&](thread_ranks::communicator& comm) {
      cpu_context ctx;
      small_store<float> net;  // equal weights on all ranks
      for (index_t i = 200; i < 300; ++i) net.store.values()[static_cast<std::size_t>(i)] = 0;
      mask_tracker tracker = tracker_for(net.store, 3);
      std::shared_ptr<const weight_mask> mask;
      std::optional<compact_sum<float>> compact;
      history mine;
      for (std::uint64_t step = 0; step < 24; ++step) {
        const std::span<float> gradients = net.store.gradients();
        fill_normal(gradients, 1.0, random_stream(step, static_cast<std::uint64_t>(comm.rank())));
        const exchange_place place{comm.rank(), comm.size(), step};
        if (tracker.compact()) {
          if (mask != tracker.mask()) {
            mask = tracker.mask();
            compact.emplace(compact_sum_options{mask});
          }
          comm.all_reduce_sum(compact->encode(ctx, place, 0, gradients).sum);
          compact->decode(ctx, place, 0, gradients);
        } else {
          mean(comm, gradients);
        }
        // The framework's own mask: nothing moves where a weight is 0.
        for (std::size_t i = 0; i < gradients.size(); ++i) {
          if (net.store.values()[i] == 0.0F) gradients[i] = 0.0F;
        }
        mine.compact.push_back(tracker.compact());
        mine.results.emplace_back(gradients.begin(), gradients.end());
        // Rank 1 alone has a weight that is 0 for some steps.
        if (step == 8 && comm.rank() == 1) net.store.values()[400] = 0;
        if (step == 13) net.store.values()[400] = 1;
        tracker.observe(ctx, std::span<const float>(net.store.values()));
        tracker.agree(comm);
      }
      mine.counters = tracker.counters();
      const std::lock_guard hold(writing);
      all[static_cast<std::size_t>(comm.rank())] = std::move(mine);
    });
    for (const history& one : all) {
      CHECK(one.compact == all[0].compact);
      CHECK(one.counters.resets == 1);
      CHECK(one.counters.compact + one.counters.full == 24);
      for (std::size_t step = 0; step < 24; ++step) {
        // Before step 9 and after step 13 all ranks have the same zeros, and the same gradients.
        if (step <= 8 || step > 13) CHECK(same_bits<float>(one.results[step], all[0].results[step]));
      }
    }
    // Steps 0 - 3 full, 4 - 8 compact; the change of rank 1 after step 8 makes steps 9 .. full; the ranks are
    // ready with different patterns after step 11, which resets; after step 13 rank 1 has the pattern of the
    // others again.
    const std::vector<bool>& compact = all[0].compact;
    for (std::size_t step = 0; step < compact.size(); ++step) {
      CHECK(compact[step] == ((step >= 4 && step <= 8) || step >= 17));
    }
  }
}

}  // namespace
