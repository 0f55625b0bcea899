// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <algorithm>
#include <limits>
#include <set>

#include <doctest/doctest.h>

#include <pufferfish/io/pair_batches.hpp>

using namespace pufferfish;

namespace {

using ids = std::vector<std::int32_t>;
constexpr special_tokens special{};

/// Pairs of random lengths; every id tells its pair and side.
sentence_pairs numbered(index_t count, unsigned seed = 1) {
  sentence_pairs set;
  const random_stream random(seed, stream_id("pairs"));
  for (index_t i = 0; i < count; ++i) {
    const auto number = static_cast<std::uint64_t>(i);
    set.source.push_back(ids(random.below(2 * number, 9), static_cast<std::int32_t>(10 + 2 * i)));
    set.target.push_back(ids(random.below(2 * number + 1, 9), static_cast<std::int32_t>(11 + 2 * i)));
  }
  return set;
}

ids part(std::span<const std::int32_t> all, std::span<const index_t> first, std::span<const index_t> count,
         std::size_t i) {
  REQUIRE(static_cast<std::size_t>(first[i] + count[i]) <= all.size());
  const auto run = all.subspan(static_cast<std::size_t>(first[i]), static_cast<std::size_t>(count[i]));
  return {run.begin(), run.end()};
}

ids framed(std::span<const std::int32_t> words, bool begin, bool end, const special_tokens& with = special) {
  ids result;
  if (begin) result.push_back(with.begin);
  result.insert(result.end(), words.begin(), words.end());
  if (end) result.push_back(with.end);
  return result;
}

void check_batch(const sentence_pairs& set, const pair_batch& batch, pair_layout layout) {
  const auto count = static_cast<std::size_t>(batch.count);
  REQUIRE(batch.pairs.size() == count);
  REQUIRE(batch.labels.size() == batch.target.size());
  std::int64_t tokens = 0, sources = 0;
  index_t source_length = 0, target_length = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t pair = batch.pairs[i];
    CHECK(part(batch.source, batch.source_first, batch.source_count, i) ==
          framed(set.source[pair], true, true));
    CHECK(part(batch.target, batch.target_first, batch.target_count, i) ==
          framed(set.target[pair], true, false));
    CHECK(part(batch.labels, batch.target_first, batch.target_count, i) ==
          framed(set.target[pair], false, true));
    const auto number = static_cast<index_t>(i);
    const bool padded = layout == pair_layout::padded;
    CHECK(batch.source_first[i] == (padded ? number * batch.source_length : sources));
    CHECK(batch.target_first[i] == (padded ? number * batch.target_length : tokens));
    tokens += batch.target_count[i];
    sources += batch.source_count[i];
    source_length = std::max(source_length, batch.source_count[i]);
    target_length = std::max(target_length, batch.target_count[i]);
  }
  CHECK(tokens == batch.tokens);
  CHECK(source_length == batch.source_length);
  CHECK(target_length == batch.target_length);
  // All else is padding.
  const auto real = [](std::int32_t token) { return token != special.padding; };
  CHECK(std::count_if(batch.source.begin(), batch.source.end(), real) == sources);
  CHECK(std::count_if(batch.target.begin(), batch.target.end(), real) == tokens);
  CHECK(std::count_if(batch.labels.begin(), batch.labels.end(), real) == tokens);
  const bool packed = layout == pair_layout::packed;
  CHECK(static_cast<std::int64_t>(batch.source.size()) == (packed ? sources : batch.count * source_length));
  CHECK(static_cast<std::int64_t>(batch.labels.size()) == (packed ? tokens : batch.count * target_length));
}

/// The pairs of a whole epoch in the order of the global batches, put together from the ranks' parts.
std::vector<std::uint32_t> epoch_order(const sentence_pairs& set, pair_batch_options options, int ranks,
                                       index_t epoch) {
  std::vector<pair_batches> all;
  options.ranks = ranks;
  for (options.rank = 0; options.rank < ranks; ++options.rank) all.emplace_back(set, options);
  std::vector<std::uint32_t> order;
  for (index_t step = 0; step < all[0].steps_per_epoch(); ++step) {
    std::int64_t tokens = 0, global = 0;
    index_t count = 0, global_count = 0;
    for (pair_batches& of_rank : all) {
      const pair_batch batch = of_rank.load(epoch, step);
      check_batch(set, batch, options.layout);
      CHECK(batch.first == count);
      CHECK(batch.count <= of_rank.max_local_batch());
      CHECK(batch.source_length <= of_rank.max_source_length());
      CHECK(batch.target_length <= of_rank.max_target_length());
      order.insert(order.end(), batch.pairs.begin(), batch.pairs.end());
      tokens += batch.tokens;
      count += batch.count;
      global = batch.global_tokens;
      global_count = batch.global_count;
    }
    CHECK(tokens == global);
    CHECK(count == global_count);
  }
  return order;
}

}  // namespace

TEST_CASE("every pair once an epoch, the same batches on any number of ranks") {
  for (const index_t size : {1, 2, 7, 40}) {
    const sentence_pairs set = numbered(size);
    for (const index_t batch : {1, 3, 8, 100}) {
      for (const index_t bucket : {0, 2, 1000}) {
        for (const bool shuffle : {true, false}) {
          pair_batch_options options{batch, shuffle, bucket, pair_layout::padded, 5, 0, 1, {}};
          const std::vector<std::uint32_t> alone = epoch_order(set, options, 1, 3);
          options.layout = pair_layout::packed;
          CHECK(std::set<std::uint32_t>(alone.begin(), alone.end()).size() == static_cast<std::size_t>(size));
          CHECK(alone.size() == static_cast<std::size_t>(size));
          for (const int ranks : {2, 3, 5}) CHECK(epoch_order(set, options, ranks, 3) == alone);
          if (!shuffle && bucket == 0) CHECK(std::is_sorted(alone.begin(), alone.end()));
        }
      }
    }
  }
}

TEST_CASE("the order depends on seed and epoch, and on nothing else") {
  const sentence_pairs set = numbered(100);
  pair_batch_options options{.batch = 16, .bucket_batches = 3};
  const auto first = epoch_order(set, options, 1, 0);
  CHECK(first == epoch_order(set, options, 1, 0));
  CHECK(first != epoch_order(set, options, 1, 1));
  options.seed = 1;
  CHECK(first != epoch_order(set, options, 1, 0));
  pair_batches jumps(set, options);
  const pair_batch late = jumps.load(5, 2);
  const std::vector<std::uint32_t> pairs(late.pairs.begin(), late.pairs.end());
  jumps.load(0, 0);
  const pair_batch again = jumps.load(5, 2);
  CHECK(std::equal(pairs.begin(), pairs.end(), again.pairs.begin()));
}

TEST_CASE("buckets save padding, and their batches come in random order") {
  const sentence_pairs set = numbered(1000);
  const auto padded = [&](index_t bucket) {
    pair_batches batches(set, {.batch = 20, .bucket_batches = bucket});
    std::int64_t cells = 0, tokens = 0;
    std::vector<index_t> lengths;
    for (index_t step = 0; step < batches.steps_per_epoch(); ++step) {
      const pair_batch batch = batches.load(0, step);
      cells += static_cast<std::int64_t>(batch.labels.size());
      tokens += batch.tokens;
      lengths.push_back(batch.target_length);
    }
    if (bucket > 0) CHECK_FALSE(std::is_sorted(lengths.begin(), lengths.end()));
    return static_cast<double>(cells) / static_cast<double>(tokens);
  };
  CHECK(padded(50) < 1.06);
  CHECK(padded(0) > 1.6);
}

TEST_CASE("special tokens of other tokenizers") {
  // Padding 0, one token for both ends, as in some models of other programs.
  const special_tokens other{.padding = 0, .begin = 5, .end = 5};
  const std::vector<ids> sources{{1, 2, 3}, {4}}, targets{{2}, {3, 1}};
  const sentence_pairs set(sources, targets);
  pair_batches batches(set, {.batch = 2, .shuffle = false, .special = other});
  const pair_batch batch = batches.load(0, 0);
  CHECK(ids(batch.source.begin(), batch.source.end()) == ids{5, 1, 2, 3, 5, 5, 4, 5, 0, 0});
  CHECK(ids(batch.target.begin(), batch.target.end()) == ids{5, 2, 0, 5, 3, 1});
  CHECK(ids(batch.labels.begin(), batch.labels.end()) == ids{2, 5, 0, 3, 1, 5});
  CHECK_THROWS_WITH_AS(
      pair_batches(set, {}),
      "pair_batches: source 0 has the padding token 1 at position 0 of 3; sentences are given without "
      "special tokens",
      value_error);
  CHECK_THROWS_WITH_AS(pair_batches(set, {.special = {.padding = 0, .begin = 6, .end = 3}}),
                       doctest::Contains("source 0 has the end token 3 at position 2 of 3"), value_error);
  CHECK_THROWS_WITH_AS(pair_batches(set, {.special = {.padding = 7, .begin = 7, .end = 8}}),
                       "pair_batches: padding 7, begin 7, end 8: padding must differ from the others",
                       value_error);
}

TEST_CASE("options out of range") {
  const sentence_pairs set = numbered(3), none;
  CHECK_THROWS_AS(pair_batches(none, {}), value_error);
  sentence_pairs uneven = numbered(3);
  uneven.source.push_back(ids{9});
  CHECK_THROWS_WITH_AS(pair_batches(uneven, {}), "pair_batches: 4 sources and 3 targets", value_error);
  CHECK_THROWS_AS(pair_batches(set, {.batch = 0}), value_error);
  CHECK_THROWS_AS(pair_batches(set, {.bucket_batches = -1}), value_error);
  CHECK_THROWS_AS(pair_batches(set, {.rank = 1}), value_error);
  CHECK_THROWS_AS(pair_batches(set, {.rank = -1, .ranks = 2}), value_error);
  CHECK_THROWS_AS(pair_batches(set, {.ranks = 0}), value_error);
  pair_batches batches(set, {.batch = 2});
  CHECK_THROWS_WITH_AS(batches.load(0, 2), "pair_batches: epoch 0, step 2; steps are 0 .. 1", value_error);
  CHECK_THROWS_AS(batches.load(-1, 0), value_error);
  CHECK_THROWS_AS(batches.load(0, -1), value_error);
  pair_batches whole(set, {.batch = std::numeric_limits<index_t>::max(), .bucket_batches = 2});
  CHECK(whole.steps_per_epoch() == 1);
  CHECK(whole.load(0, 0).count == 3);
}
