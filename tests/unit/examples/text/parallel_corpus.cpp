// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../../../../examples/text/parallel_corpus.hpp"
#include "../../../../examples/text/detokenizer.hpp"
#include "../../support/io_support.hpp"
#include "../../support/real_data.hpp"

#include <doctest/doctest.h>

#include <pufferfish/io/dataset.hpp>

using namespace examples;
using namespace io_test;
using pufferfish::gzip;
using pufferfish::write_file_atomically;

namespace {

using strings = std::vector<std::string>;
using ids = std::vector<std::int32_t>;

ids list(std::span<const std::int32_t> values) { return {values.begin(), values.end()}; }

}  // namespace

TEST_CASE("two files that belong together, and two that do not") {
  const scratch_folder folder;
  write_file_atomically(folder / "a.de", to_bytes("eins\nzwei\n"));
  write_file_atomically(folder / "a.en.gz", gzip(to_bytes("one\ntwo")));
  const parallel_text text = read_parallel_text(folder / "a.de", folder / "a.en.gz");
  CHECK(text.source == strings{"eins", "zwei"});
  CHECK(text.target == strings{"one", "two"});
  write_file_atomically(folder / "b", to_bytes("one\ntwo\nthree\n"));
  const std::string problem = io_error_of([&] { read_parallel_text(folder / "a.de", folder / "b"); });
  CHECK(mentions(problem, "a.de has 2 lines"));
  CHECK(mentions(problem, "/b has 3"));
  write_file_atomically(folder / "c", to_bytes("one\n\xff\n"));
  CHECK(mentions(io_error_of([&] { read_parallel_text(folder / "a.de", folder / "c"); }),
                 "line 2 is not UTF-8"));
  CHECK(mentions(io_error_of([&] { read_parallel_text(folder / "a.de", folder / "none"); }), "none"));
}

TEST_CASE("tokenising both sides") {
  parallel_text text{{"Zwei Männer, hier."}, {"Two men aren't here."}};
  tokenize(text, tokenizer({language::german, true}), tokenizer({language::english, true}));
  CHECK(text.source == strings{"zwei männer , hier ."});
  CHECK(text.target == strings{"two men are n't here ."});
}

TEST_CASE("the joint vocabulary has what is frequent in one of the languages") {
  const parallel_text text{{"a a a x b", "b in"}, {"c c c x b", "in </s> <pad> <pad> <pad>"}};
  const vocabulary words = joint_vocabulary(text, 3);
  strings found;
  for (std::int32_t id = 0; id < words.size(); ++id) found.push_back(words.word(id));
  // b occurs three times, but only twice in the one language and once in the other.
  CHECK(found == strings{"<unk>", "<pad>", "<s>", "</s>", "a", "c"});
  CHECK(words.find("<unk>") == translation_tokens::unknown);
  CHECK(words.find("<pad>") == translation_tokens::padding);
  CHECK(words.find("<s>") == translation_tokens::begin);
  CHECK(words.find("</s>") == translation_tokens::end);
  CHECK(joint_vocabulary(text, 1).size() == 4 + 5);
  CHECK(joint_vocabulary(text, 1, 6).size() == 6);
  CHECK(joint_vocabulary({}, 1).size() == 4);
}

TEST_CASE("pairs as ids: unknown and special words, dropped or kept") {
  const parallel_text text{{"a b", "", "a a a a", "zebra </s> a", "b"}, {"c", "c", "c", "c <s>", ""}};
  const vocabulary words = joint_vocabulary({{"a b"}, {"c"}}, 1);
  const sentence_pairs dropped = encode_pairs(text, words, 3);
  CHECK(dropped.size() == 2);
  const std::int32_t a = words.id("a");
  CHECK(list(dropped.source[0]) == ids{a, words.id("b")});
  CHECK(list(dropped.source[1]) == ids{0, 0, a});
  CHECK(list(dropped.target[1]) == ids{words.id("c"), 0});
  const sentence_pairs kept = encode_pairs(text, words, 3, unfit_pairs::keep);
  CHECK(kept.size() == 5);
  CHECK(kept.source[1].empty());
  CHECK(kept.target[4].empty());
  CHECK(list(kept.source[2]) == ids{a, a, a});
  CHECK(kept.source.longest() == 3);
  CHECK(decode_sentence(ids{2, a, 0, 1, 3, a}, words) == strings{"a", "<unk>"});
  CHECK_THROWS_AS(decode_sentence(ids{99}, words), value_error);
  CHECK_THROWS_AS(encode_pairs(text, words, 0), value_error);
  CHECK_THROWS_AS(encode_pairs({{"a"}, {}}, words), value_error);
  CHECK_THROWS_AS(encode_pairs(text, vocabulary()), value_error);
  word_counts counts;
  counts.add("a");
  CHECK_THROWS_WITH_AS(encode_pairs(text, vocabulary(counts)), doctest::Contains("begins with <unk>, <pad>"),
                       value_error);
}

TEST_CASE("an empty corpus has no pairs; a gigantic line is dropped or cut") {
  const vocabulary words = joint_vocabulary({{"a"}, {"b"}}, 1);
  CHECK(encode_pairs({}, words).size() == 0);
  std::string line;
  for (int i = 0; i < 500000; ++i) line += "a ";
  const parallel_text text{{line}, {"b"}};
  CHECK(encode_pairs(text, words).size() == 0);
  CHECK(encode_pairs(text, words, 100, unfit_pairs::keep).source[0].size() == 100);
}

TEST_CASE("Multi30k") {
  const std::string folder = real_data("multi30k", "train.de");
  if (folder.empty()) return;
  const auto path = [&](const char* name) {
    return pufferfish::detail::find_plain_or_gzip(folder + "/" + name);
  };
  // The set's own tokens: the counts in its README.
  const parallel_text tokens = read_parallel_text(path("train.lc.norm.tok.de"), path("train.lc.norm.tok.en"));
  std::size_t german = 0, english = 0;
  word_counts counts[2];
  for (std::size_t i = 0; i < tokens.source.size(); ++i) {
    for (const std::string_view word : split_words(tokens.source[i])) counts[0].add(word), ++german;
    for (const std::string_view word : split_words(tokens.target[i])) counts[1].add(word), ++english;
  }
  CHECK(tokens.source.size() == 29000);
  CHECK(german == 360706);
  CHECK(english == 377534);
  CHECK(counts[0].sorted().size() == 18722);
  CHECK(counts[1].sorted().size() == 10210);

  parallel_text raw = read_parallel_text(path("train.de"), path("train.en"));
  tokenize(raw, tokenizer({language::german, true}), tokenizer({language::english, true}));
  const vocabulary words = joint_vocabulary(raw, 3);
  MESSAGE("words that occur three times: " << words.size());
  // spaCy's tokens give the paper 9,521.
  CHECK(words.size() > 9000);
  CHECK(words.size() < 10000);
  const sentence_pairs pairs = encode_pairs(raw, words);
  CHECK(pairs.size() <= 29000);
  CHECK(pairs.size() > 28990);
}
