// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Tokens of a tokenizer that the library does not know, as docs/training.md shows.
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/io/pair_batches.hpp>
#include <pufferfish/io/token_streams.hpp>

using namespace pufferfish;

namespace {

/// The members of sentencepiece::SentencePieceProcessor that the example calls. Pieces are characters.
class processor {
 public:
  std::vector<int> EncodeAsIds(std::string_view text) const {
    std::vector<int> ids;
    for (const char c : text) ids.push_back(4 + c - 'a');
    return ids;
  }
  int GetPieceSize() const { return 30; }
  int pad_id() const { return 1; }
  int bos_id() const { return 2; }
  int eos_id() const { return 3; }
};

}  // namespace

TEST_CASE("a text for a language model") {
  const processor pieces;
  const std::vector<std::string> lines{"abc", "de", "", "fgh"};
  // [stream]
  std::vector<std::int32_t> text;
  for (const std::string& line : lines) {
    const std::vector<int> ids = pieces.EncodeAsIds(line);
    text.insert(text.end(), ids.begin(), ids.end());
    text.push_back(pieces.eos_id());
  }
  token_streams source(text, {.streams = 2, .segment = 35, .vocabulary = pieces.GetPieceSize()});
  // [stream]
  CHECK(text == std::vector<std::int32_t>{4, 5, 6, 3, 7, 8, 3, 3, 9, 10, 11, 3});
  const token_segment part = source.load(0);
  CHECK(part.length == 5);
  CHECK(part.targets[0] == 5);
}

TEST_CASE("pairs for a translator") {
  const processor pieces;
  const std::vector<std::pair<std::string, std::string>> lines{{"ab", "c"}, {"d", "efg"}};
  // [pairs]
  std::vector<std::vector<std::int32_t>> german, english;
  for (const auto& [source, target] : lines) {
    german.push_back(pieces.EncodeAsIds(source));
    english.push_back(pieces.EncodeAsIds(target));
  }
  const sentence_pairs pairs(german, english, {.vocabulary = pieces.GetPieceSize(), .length = 100});
  pair_batches batches(
      pairs, {.batch = 64,
              .special = {.padding = pieces.pad_id(), .begin = pieces.bos_id(), .end = pieces.eos_id()}});
  // [pairs]
  const pair_batch batch = batches.load(0, 0);
  CHECK(batch.count == 2);
  CHECK(batch.global_tokens == 2 + 4);
}
