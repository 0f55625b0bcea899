// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/io/sentence_pairs.hpp>

using namespace pufferfish;

namespace {

using ids = std::vector<std::int32_t>;

ids list(std::span<const std::int32_t> values) { return {values.begin(), values.end()}; }

}  // namespace

TEST_CASE("sentences of vectors, of spans, one by one") {
  const std::vector<ids> sentences{{4, 5}, {}, {6}};
  const std::vector<std::span<const std::int32_t>> views(sentences.begin(), sentences.end());
  id_lists by_hand;
  for (const ids& sentence : sentences) by_hand.push_back(sentence);
  for (const id_lists& lists : {id_lists(sentences), id_lists(views), by_hand}) {
    REQUIRE(lists.size() == 3);
    CHECK(list(lists[0]) == ids{4, 5});
    CHECK(lists[1].empty());
    CHECK(list(lists[2]) == ids{6});
    CHECK(lists.longest() == 2);
  }
  CHECK(id_lists().longest() == 0);
  const sentence_pairs pairs(views, views, {.allow_empty = true});
  CHECK(pairs.size() == 3);
  CHECK(sentence_pairs(pairs.source, pairs.target, {.allow_empty = true}).size() == 3);
  CHECK(sentence_pairs().size() == 0);
  CHECK(sentence_pairs({{4, 5}}, {{6}}).size() == 1);
}

TEST_CASE("what the limits refuse is named with side, sentence and both values") {
  const std::vector<ids> two{{4, 5}, {6, 7, 8}}, one{{4}}, empty{{4}, {}};
  CHECK_THROWS_WITH_AS(sentence_pairs(two, one), "sentence_pairs: 2 sources and 1 targets", value_error);
  CHECK_THROWS_WITH_AS(sentence_pairs(empty, two), "sentence_pairs: source 1 has no tokens, target 1 has 3",
                       value_error);
  CHECK_THROWS_WITH_AS(sentence_pairs(two, empty), "sentence_pairs: target 1 has no tokens, source 1 has 3",
                       value_error);
  CHECK(sentence_pairs(two, empty, {.allow_empty = true}).size() == 2);
  CHECK(sentence_pairs(two, two, {.vocabulary = 9, .length = 3}).size() == 2);
  CHECK_THROWS_WITH_AS(sentence_pairs(two, two, {.length = 2}),
                       "sentence_pairs: source 1 has 3 tokens, more than 2", value_error);
  CHECK_THROWS_WITH_AS(sentence_pairs(two, two, {.vocabulary = 8}),
                       "sentence_pairs: source 1: token 8 at position 2 is not in 0 .. 7 (a vocabulary of 8)",
                       value_error);
  CHECK_THROWS_WITH_AS(sentence_pairs({{4}}, {{-2}}, {.vocabulary = 8}),
                       doctest::Contains("target 0: token -2 at position 0"), value_error);
}
