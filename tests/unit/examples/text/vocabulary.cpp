// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../../../../examples/text/vocabulary.hpp"
#include "../../../../examples/text/lines.hpp"

#include <memory>

#include <doctest/doctest.h>

using namespace examples;

namespace {

word_counts counts_of(std::string_view text) {
  word_counts counts;
  for (const std::string_view word : split_words(text)) counts.add(word);
  return counts;
}

std::vector<std::string> words_of(const vocabulary& words) {
  std::vector<std::string> result;
  for (std::int32_t id = 0; id < words.size(); ++id) result.push_back(words.word(id));
  return result;
}

using strings = std::vector<std::string>;

}  // namespace

TEST_CASE("counting words") {
  word_counts counts = counts_of("the cat the dog");
  CHECK(counts.total() == 4);
  CHECK(counts.count("the") == 2);
  CHECK(counts.count("bird") == 0);
  counts.add("bird", 5);
  CHECK(counts.total() == 9);
  using row = std::pair<std::string, std::int64_t>;
  CHECK(counts.sorted() == std::vector<row>{{"bird", 5}, {"the", 2}, {"cat", 1}, {"dog", 1}});
  CHECK_THROWS_AS(counts.add(""), value_error);
  CHECK_THROWS_WITH_AS(counts.add("x", -1), "word_counts: 'x' counted -1 times", value_error);
  CHECK(counts.sorted().size() == 4);
}

TEST_CASE("a vocabulary orders by count, then bytes, whatever the order of counting") {
  const vocabulary one(counts_of("b a b c a d"));
  CHECK(words_of(one) == strings{"<unk>", "a", "b", "c", "d"});
  CHECK(words_of(one) == words_of(vocabulary(counts_of("d c a a b b"))));
  CHECK(one.id("b") == 2);
  CHECK(one.id("zebra") == 0);
  CHECK(one.find("zebra") == std::nullopt);
  CHECK(one.find("a") == 1);
  CHECK_THROWS_WITH_AS(one.word(5), "vocabulary: id 5 is not in 0 .. 4", value_error);
  CHECK_THROWS_AS(one.word(-1), value_error);
}

TEST_CASE("minimum count, maximum size, special words") {
  vocabulary_options options;
  options.special = {"<pad>", "<unk>", "</s>"};
  options.minimum_count = 2;
  const word_counts counts = counts_of("a a a b b c d d <unk>");
  const vocabulary words(counts, options);
  CHECK(words_of(words) == strings{"<pad>", "<unk>", "</s>", "a", "b", "d"});
  CHECK(words.id("c") == 1);
  options.maximum_size = 4;
  CHECK(words_of(vocabulary(counts, options)) == strings{"<pad>", "<unk>", "</s>", "a"});
  options.maximum_size = 3;
  CHECK(vocabulary(counts, options).size() == 3);
  options.maximum_size = 2;
  CHECK_THROWS_AS(vocabulary(counts, options), value_error);
}

TEST_CASE("an empty vocabulary has no word for unknown ones") {
  CHECK(vocabulary().size() == 0);
  CHECK_THROWS_WITH_AS(vocabulary().id("a"), doctest::Contains("'a' has no id"), value_error);
}

TEST_CASE("special words that are none, or twice, or without the unknown one") {
  for (const strings& special :
       {strings{"<unk>", ""}, strings{"<unk>", "<unk>"}, strings{"<pad>"}, strings{}}) {
    vocabulary_options options;
    options.special = special;
    CHECK_THROWS_AS(vocabulary(counts_of("a"), options), value_error);
  }
}

TEST_CASE("copies are independent of their source") {
  auto source = std::make_unique<vocabulary>(counts_of("a b c"));
  const vocabulary copy = *source;
  source.reset();
  CHECK(copy.id("c") == 3);
}
