// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../support/io_support.hpp"

#include <memory>

#include <doctest/doctest.h>

#include <pufferfish/io/vocabulary.hpp>

using namespace pufferfish;
using namespace io_test;

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
  CHECK(counts.distinct() == 3);
  CHECK(counts.count("the") == 2);
  CHECK(counts.count("bird") == 0);
  counts.add("bird", 5);
  CHECK(counts.total() == 9);
  using row = std::pair<std::string, std::int64_t>;
  CHECK(counts.sorted() == std::vector<row>{{"bird", 5}, {"the", 2}, {"cat", 1}, {"dog", 1}});
  for (const char* bad : {"", "a\tb", "a\nb", "\xff", "\xc3"}) CHECK_THROWS_AS(counts.add(bad), value_error);
  CHECK_THROWS_AS(counts.add("x", -1), value_error);
  CHECK(counts.distinct() == 4);
}

TEST_CASE("a vocabulary orders by count, then bytes, whatever the order of counting") {
  const vocabulary one(counts_of("b a b c a d"));
  CHECK(words_of(one) == strings{"<unk>", "a", "b", "c", "d"});
  CHECK(one == vocabulary(counts_of("d c a a b b")));
  CHECK(one.id("b") == 2);
  CHECK(one.count(2) == 2);
  CHECK(one.id("zebra") == 0);
  CHECK(one.find("zebra") == std::nullopt);
  CHECK(one.find("a") == 1);
  CHECK(one.unknown() == 0);
  CHECK_THROWS_WITH_AS(one.word(5), "vocabulary: id 5 is not in 0 .. 4", value_error);
  CHECK_THROWS_AS(one.word(-1), value_error);
}

TEST_CASE("minimum count, maximum size, special words; left-out words count as unknown") {
  vocabulary_options options;
  options.special = {"<pad>", "<unk>", "</s>"};
  options.minimum_count = 2;
  const word_counts counts = counts_of("a a a b b c d d <unk>");
  const vocabulary words(counts, options);
  CHECK(words_of(words) == strings{"<pad>", "<unk>", "</s>", "a", "b", "d"});
  CHECK(words.count(1) == 2);  // itself and c
  CHECK(words.count(0) == 0);
  std::int64_t total = 0;
  for (std::int32_t id = 0; id < words.size(); ++id) total += words.count(id);
  CHECK(total == counts.total());
  options.maximum_size = 4;
  CHECK(words_of(vocabulary(counts, options)) == strings{"<pad>", "<unk>", "</s>", "a"});
  options.maximum_size = 3;
  CHECK(vocabulary(counts, options).size() == 3);
  options.maximum_size = 2;
  CHECK_THROWS_AS(vocabulary(counts, options), value_error);
}

TEST_CASE("without an unknown word, unknown words are errors") {
  vocabulary_options options;
  options.special = {};
  options.unknown = "";
  const vocabulary words(counts_of("a b"), options);
  CHECK(words.size() == 2);
  CHECK_THROWS_WITH_AS(words.id("c"), doctest::Contains("'c' is not one of its 2 words"), value_error);
  CHECK(vocabulary().size() == 0);
  CHECK_THROWS_AS(vocabulary().id("a"), value_error);
}

TEST_CASE("special words that are none, or twice, or without the unknown one") {
  for (const strings& special : {strings{"<unk>", ""}, strings{"<unk>", "a\tb"}, strings{"<unk>", "<unk>"},
                                 strings{"<unk>", "\xff"}, strings{"<pad>"}, strings{}}) {
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

TEST_CASE("to a file and back") {
  const scratch_folder folder;
  for (const char* text : {"", "a", "b a b \xc3\xa4 <unk> \"x\" a\rb \xe2\x80\xa8 # 7"}) {
    const vocabulary words(counts_of(text));
    words.save(folder / "words");
    CHECK(vocabulary::load(folder / "words") == words);
    CHECK(vocabulary::from_text(words.to_text(), "x") == words);
    write_file_atomically(folder / "words.gz", gzip(to_bytes(words.to_text())));
    CHECK(vocabulary::load(folder / "words.gz") == words);
  }
  vocabulary_options options;
  options.special = {};
  options.unknown = "";
  const vocabulary plain(counts_of("a b b"), options);
  CHECK(plain.to_text().substr(0, 48) == "pufferfish vocabulary 1\nunknown\nwords 2\nb\t2\na\t1\n");
  CHECK(vocabulary::from_text(plain.to_text(), "x") == plain);
  CHECK(vocabulary::from_text(vocabulary().to_text(), "x") == vocabulary());
  // Editors that change line ends do no harm.
  std::string crlf;
  for (const char c : plain.to_text()) crlf += c == '\n' ? std::string("\r\n") : std::string(1, c);
  CHECK(vocabulary::from_text(crlf, "x") == plain);
  CHECK(mentions(io_error_of([&] { vocabulary::load(folder / "none"); }), folder / "none"));
  CHECK(mentions(io_error_of([&] { vocabulary::load(folder / "words", 10); }), "10 bytes"));
}

TEST_CASE("damaged vocabularies are refused, and the line is named") {
  const std::string good = vocabulary(counts_of("a b b c c c")).to_text();
  const auto problem = [](const std::string& text) {
    return io_error_of([&] { vocabulary::from_text(text, "file"); });
  };
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    return text.replace(text.find(from), from.size(), to);
  };
  CHECK(problem(good).empty());
  CHECK(mentions(problem(""), "file: is not a vocabulary"));
  CHECK(mentions(problem("pufferfish vocabulary 1\n"), "is not a vocabulary"));
  CHECK(mentions(problem(replaced("vocabulary 1", "vocabulary 2")), "is not a vocabulary"));
  CHECK(mentions(problem(replaced("words 4", "words 5")), "'words 5', the file has 4 lines"));
  CHECK(mentions(problem(replaced("words 4", "words x")), "line 3"));
  CHECK(mentions(problem(replaced("words 4", "words 99999999999999999999")), "line 3"));
  CHECK(mentions(problem(replaced("words 4", "lines 4")), "line 3"));
  CHECK(
      mentions(problem(replaced("b\t2", "c\t2")), "line 6 of the vocabulary has the word 'c' a second time"));
  CHECK(mentions(problem(replaced("b\t2", "\t2")), "line 6 of the vocabulary is not a word"));
  CHECK(mentions(problem(replaced("b\t2", "b 2")), "line 6"));
  CHECK(mentions(problem(replaced("b\t2", "b\t-2")), "line 6"));
  CHECK(mentions(problem(replaced("b\t2", "b\t2 ")), "line 6"));
  CHECK(mentions(problem(replaced("b\t2", "b\t3")), "not the digest"));
  CHECK(mentions(problem(replaced("b\t2", "\xff\t2")), "line 6 is not UTF-8"));
  CHECK(mentions(problem(replaced("unknown <unk>", "unknown <unknown>")), "digest"));
  CHECK(mentions(problem(good + "d\t1\n"), "words"));
  const bytes data = to_bytes(good);
  // Only the line end after the digest may be missing.
  CHECK(accepted_prefixes(data, [](const bytes& cut) { vocabulary::from_text(to_text(cut), "cut"); }) == 1);
  CHECK(refused_damaged(data, 3000, 11,
                        [](const bytes& bad) { vocabulary::from_text(to_text(bad), "bad"); }) > 2900);
}

TEST_CASE("an unknown word that is no word of the file") {
  // The digest is right, so the text must be made.
  const std::string body = "pufferfish vocabulary 1\nunknown b\nwords 1\na\t1\n";
  const std::string text = body + "digest " + std::to_string(digest(std::string_view(body))) + "\n";
  CHECK(mentions(io_error_of([&] { vocabulary::from_text(text, "x"); }), "'b', which is no word"));
}
