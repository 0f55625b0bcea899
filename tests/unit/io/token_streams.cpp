// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <limits>
#include <numeric>
#include <type_traits>

#include <doctest/doctest.h>

#include <pufferfish/io/token_streams.hpp>

using namespace pufferfish;

namespace {

using ids = std::vector<std::int32_t>;

ids counted(index_t tokens) {
  ids result(static_cast<std::size_t>(tokens));
  std::iota(result.begin(), result.end(), 0);
  return result;
}

}  // namespace

TEST_CASE("streams run through the text, targets are one token ahead, the last segment is short") {
  const ids text = counted(23);
  token_streams streams(text, {.streams = 2, .segment = 4});
  CHECK(streams.stream_length() == 11);
  CHECK(streams.steps_per_epoch() == 3);
  CHECK(streams.tokens_per_epoch() == 20);
  const token_segment first = streams.load(0);
  CHECK(first.starts);
  CHECK(first.length == 4);
  CHECK(first.streams == 2);
  CHECK(ids(first.inputs.begin(), first.inputs.end()) == ids{0, 11, 1, 12, 2, 13, 3, 14});
  CHECK(ids(first.targets.begin(), first.targets.end()) == ids{1, 12, 2, 13, 3, 14, 4, 15});
  const token_segment last = streams.load(2);
  CHECK_FALSE(last.starts);
  CHECK(last.length == 2);
  CHECK(ids(last.inputs.begin(), last.inputs.end()) == ids{8, 19, 9, 20});
  CHECK(ids(last.targets.begin(), last.targets.end()) == ids{9, 20, 10, 21});
  CHECK_THROWS_WITH_AS(streams.load(3), "token_streams: step 3; steps are 0 .. 2", value_error);
  CHECK_THROWS_AS(streams.load(-1), value_error);
}

TEST_CASE("all shapes, all ranks: every token but a stream's first is predicted once, by the token before") {
  for (const index_t tokens : {2, 3, 7, 20, 41}) {
    const ids text = counted(tokens);
    for (const index_t count : {1, 2, 3, 5}) {
      if (tokens / count < 2) continue;
      for (const index_t segment : {1, 3, 6, 100}) {
        for (const int ranks : {1, 2, 3, 7}) {
          std::vector<int> predicted(text.size(), 0);
          index_t streams_seen = 0;
          for (int rank = 0; rank < ranks; ++rank) {
            token_streams mine(text, {count, segment, rank, ranks});
            streams_seen += mine.local_streams();
            for (index_t step = 0; step < mine.steps_per_epoch(); ++step) {
              const token_segment s = mine.load(step);
              REQUIRE(s.inputs.size() == static_cast<std::size_t>(s.length * s.streams));
              REQUIRE(s.targets.size() == s.inputs.size());
              REQUIRE(s.length >= 1);
              CHECK(s.global_streams == count);
              CHECK(s.streams == mine.local_streams());
              for (std::size_t i = 0; i < s.inputs.size(); ++i) {
                REQUIRE(s.targets[i] == s.inputs[i] + 1);
                ++predicted[static_cast<std::size_t>(s.targets[i])];
              }
            }
          }
          CHECK(streams_seen == count);
          const index_t length = tokens / count;
          for (index_t t = 0; t < tokens; ++t) {
            const bool inside = t < length * count && t % length != 0;
            CHECK(predicted[static_cast<std::size_t>(t)] == (inside ? 1 : 0));
          }
        }
      }
    }
  }
}

TEST_CASE("a rank gets the streams of its share of the global batch") {
  const ids text = counted(200);
  token_streams whole(text, {.streams = 5, .segment = 7});
  for (int rank = 0; rank < 3; ++rank) {
    token_streams part(text, {5, 7, rank, 3});
    const token_segment all = whole.load(2), mine = part.load(2);
    CHECK(mine.first == 5 * rank / 3);
    for (index_t t = 0; t < mine.length; ++t) {
      for (index_t s = 0; s < mine.streams; ++s) {
        CHECK(mine.inputs[static_cast<std::size_t>(t * mine.streams + s)] ==
              all.inputs[static_cast<std::size_t>(t * 5 + mine.first + s)]);
      }
    }
  }
}

TEST_CASE("the published number of steps") {
  const ids text(2088628);
  CHECK(token_streams(text, {}).steps_per_epoch() == 2984);
}

TEST_CASE("a segment longer than every stream is the whole stream") {
  const ids text = counted(41);
  token_streams source(text, {.streams = 4, .segment = std::numeric_limits<index_t>::max()});
  REQUIRE(source.steps_per_epoch() == 1);
  CHECK(source.longest_segment() == 9);
  CHECK(source.load(0).length == 9);
}

TEST_CASE("options out of range, texts that are too short") {
  const ids text = counted(10);
  CHECK_THROWS_AS(token_streams(text, {.streams = 0}), value_error);
  CHECK_THROWS_AS(token_streams(text, {.streams = 2, .segment = 0}), value_error);
  CHECK_THROWS_AS(token_streams(text, {.streams = 2, .rank = 1}), value_error);
  CHECK_THROWS_AS(token_streams(text, {.streams = 2, .rank = -1}), value_error);
  CHECK_THROWS_WITH_AS(token_streams(text, {.streams = 6}),
                       "token_streams: 10 tokens are too few for 6 streams: each needs two", value_error);
  const ids none, one{1}, two{1, 2};
  CHECK_THROWS_AS(token_streams(none, {.streams = 1}), value_error);
  CHECK_THROWS_AS(token_streams(one, {.streams = 1}), value_error);
  token_streams(two, {.streams = 1});
  // The object refers to the text, so a temporary text is refused.
  CHECK_FALSE(std::is_constructible_v<token_streams, ids, stream_options>);
}

TEST_CASE("a token outside the vocabulary is named with its position and both values") {
  const ids text{0, 7, 3, 8, 1}, negative{0, -1};
  const token_streams fits(text, {.streams = 1, .vocabulary = 9});
  CHECK(fits.stream_length() == 5);
  CHECK_THROWS_WITH_AS(token_streams(text, {.streams = 1, .vocabulary = 8}),
                       "token_streams: token 8 at position 3 is not in 0 .. 7 (a vocabulary of 8)",
                       value_error);
  CHECK_THROWS_WITH_AS(token_streams(negative, {.streams = 1, .vocabulary = 8}),
                       doctest::Contains("token -1 at position 1"), value_error);
}
