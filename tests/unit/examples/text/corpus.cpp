// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../../../../examples/text/corpus.hpp"
#include "../../support/io_support.hpp"
#include "../../support/real_data.hpp"

#include <numeric>

#include <doctest/doctest.h>

using namespace examples;
using namespace io_test;
using pufferfish::gzip;

namespace {

using ids = std::vector<std::int32_t>;

void put(const scratch_folder& folder, const std::string& name, std::string_view text) {
  pufferfish::write_file_atomically(folder / name, to_bytes(text));
}

}  // namespace

TEST_CASE("codec by words") {
  word_counts counts;
  for (const char* word : {"<eos>", "<eos>", "a", "b", "a", "a"}) counts.add(word);
  const text_codec codec{vocabulary(counts)};
  CHECK(codec.unit() == text_unit::words);
  CHECK(codec.size() == 4);
  CHECK(codec.encode("a b\n\nzebra a\n") == ids{1, 3, 2, 2, 0, 1, 2});
  CHECK(codec.encode("a") == ids{1, 2});
  CHECK(codec.encode("").empty());
  CHECK(codec.decode(ids{1, 3, 2, 2, 0, 1, 2}) == "a b\n\n<unk> a\n");
  CHECK(codec.decode(ids{}).empty());
  CHECK_THROWS_AS(codec.decode(ids{4}), value_error);
  CHECK_THROWS_AS(codec.encode("\xff"), io_error);
  CHECK_THROWS_AS(text_codec{vocabulary(word_counts())}, value_error);
  CHECK_THROWS_AS(text_codec{vocabulary()}, value_error);
}

TEST_CASE("codec by bytes") {
  const text_codec codec;
  CHECK(codec.unit() == text_unit::bytes);
  CHECK(codec.size() == 256);
  const std::string text("a\0\xff\n", 4);
  CHECK(codec.encode(text) == ids{'a', 0, 255, '\n'});
  CHECK(codec.decode(codec.encode(text)) == text);
  CHECK_THROWS_AS(codec.decode(ids{256}), value_error);
  CHECK_THROWS_AS(codec.decode(ids{-1}), value_error);
}

TEST_CASE("three files, plain and gzip; words of the training part only") {
  const scratch_folder folder;
  put(folder, "train.txt", "the cat\nthe dog\n");
  put(folder, "valid.txt", "the bird\n");
  pufferfish::write_file_atomically(folder / "test.txt.gz", gzip(to_bytes("cat dog")));
  const language_corpus corpus = load_wikitext(folder.path());
  CHECK(corpus.codec.size() == 5);  // <unk> <eos> the cat dog
  CHECK(corpus.codec.decode(corpus.train) == "the cat\nthe dog\n");
  CHECK(corpus.codec.decode(corpus.valid) == "the <unk>\n");
  CHECK(corpus.codec.decode(corpus.test) == "cat dog\n");

  corpus_options options;
  options.words.maximum_size = 3;
  const language_corpus small = load_wikitext(folder.path(), options);
  CHECK(small.codec.size() == 3);
  CHECK(small.codec.decode(small.train) == "the <unk>\nthe <unk>\n");
  options.unit = text_unit::bytes;
  const language_corpus raw = load_wikitext(folder.path(), options);
  CHECK(raw.codec.size() == 256);
  CHECK(raw.codec.decode(raw.test) == "cat dog");

  // WikiText's own names go first.
  put(folder, "wiki.train.tokens", "x y\n");
  put(folder, "wiki.valid.tokens", "x\n");
  CHECK(mentions(io_error_of([&] { load_wikitext(folder.path()); }), "wiki.test.tokens.gz exists"));
  put(folder, "wiki.test.tokens", "y\n");
  CHECK(load_wikitext(folder.path()).train.size() == 3);
}

TEST_CASE("one file, cut by tokens") {
  const scratch_folder folder;
  std::string text;
  for (int i = 0; i < 100; ++i) text += "w" + std::to_string(i) + (i % 10 == 9 ? "\n" : " ");
  put(folder, "a", text);
  const language_corpus corpus = load_text(folder / "a", {0.1, 0.2});
  CHECK(corpus.train.size() == 77);
  CHECK(corpus.valid.size() == 11);
  CHECK(corpus.test.size() == 22);
  // 77 tokens: 70 words with their 7 ends.
  CHECK(corpus.codec.size() == 72);
  CHECK(corpus.codec.words().find("w69").has_value());
  CHECK_FALSE(corpus.codec.words().find("w70").has_value());
  ids all = corpus.train;
  all.insert(all.end(), corpus.valid.begin(), corpus.valid.end());
  all.insert(all.end(), corpus.test.begin(), corpus.test.end());
  CHECK(all == corpus.codec.encode(text));
  CHECK(load_text(folder / "a", {0.0, 0.0}).train.size() == 110);
  corpus_options bytes_only;
  bytes_only.unit = text_unit::bytes;
  const language_corpus raw = load_text(folder / "a", {0.25, 0.25}, bytes_only);
  CHECK(raw.codec.decode(raw.train) + raw.codec.decode(raw.valid) + raw.codec.decode(raw.test) == text);
  for (const corpus_shares& bad : {corpus_shares{-0.1, 0.1}, {0.5, 0.5}, {0.1, 2.0}, {std::nan(""), 0.0}}) {
    CHECK_THROWS_AS(load_text(folder / "a", bad), value_error);
  }
}

TEST_CASE("hostile files: binary, empty, one token, one gigantic line") {
  const scratch_folder folder;
  const auto problem = [&](const corpus_options& options = {}) {
    return io_error_of([&] { load_text(folder / "a", {}, options); });
  };
  corpus_options raw;
  raw.unit = text_unit::bytes;
  put(folder, "a", "");
  CHECK(mentions(problem(), "no tokens"));
  CHECK(mentions(problem(raw), "no tokens"));
  put(folder, "a", std::string_view("a\0\xfe\xff", 4));
  CHECK(mentions(problem(), "is not UTF-8"));
  CHECK(problem(raw).empty());
  put(folder, "a", "x");
  CHECK(problem().empty());
  CHECK(load_text(folder / "a").train.size() == 2);
  CHECK(load_text(folder / "a", {}, raw).train.size() == 1);
  put(folder, "a", std::string(3000000, 'x'));
  CHECK(load_text(folder / "a").codec.size() == 3);
  std::string line;
  for (int i = 0; i < 300000; ++i) line += "word ";
  put(folder, "a", line);
  CHECK(load_text(folder / "a", {0.0, 0.0}).train.size() == 300001);
  put(folder, "a", "\n\n\n");
  CHECK(load_text(folder / "a", {0.0, 0.0}).train == ids(3, 1));
  // Zero bytes are UTF-8, and words like others.
  put(folder, "a", std::string_view("a \0 b", 5));
  CHECK(load_text(folder / "a", {0.0, 0.0}).codec.size() == 5);
}

TEST_CASE("WikiText-2") {
  const std::string folder = real_data("wikitext-2", "wiki.train.tokens");
  if (folder.empty()) return;
  const language_corpus corpus = load_wikitext(folder);
  CHECK(corpus.codec.size() == 33278);
  CHECK(corpus.train.size() == 2088628);
  CHECK(corpus.valid.size() == 217646);
  CHECK(corpus.test.size() == 245569);
  const vocabulary& words = corpus.codec.words();
  CHECK(std::count(corpus.train.begin(), corpus.train.end(), words.id("<eos>")) == 36718);
  corpus_options options;
  options.words.maximum_size = 8000;
  const language_corpus small = load_wikitext(folder, options);
  CHECK(small.codec.size() == 8000);
  CHECK(small.train.size() == corpus.train.size());
}
