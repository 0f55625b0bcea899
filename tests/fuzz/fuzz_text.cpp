// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The text processing of the examples against arbitrary bytes: the first byte chooses the part. Files must be
// accepted or refused with an io_error, text that is not UTF-8 with a value_error; what is accepted must hold
// to its promises.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../../examples/text/bleu.hpp"
#include "../../examples/text/detokenizer.hpp"
#include "../../examples/text/lines.hpp"
#include "../../examples/text/vocabulary.hpp"

namespace {

using namespace examples;

void require(bool condition) {
  if (!condition) std::abort();
}

void try_lines(std::string_view text) {
  const std::span bytes(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
  for (const std::string& line : parse_lines(bytes, "fuzz")) {
    for (const std::string_view word : split_words(line)) require(!word.empty());
  }
}

void try_words(std::string_view text) {
  word_counts counts;
  for (const std::string_view word : split_words(text)) counts.add(word);
  vocabulary_options options;
  options.minimum_count = static_cast<std::int64_t>(text.size() % 3);
  const vocabulary words(counts, options);
  for (std::int32_t id = 0; id < words.size(); ++id) require(words.find(words.word(id)) == id);
}

void try_tokenizer(std::string_view text, language of) {
  const tokenizer cut({.of = of});
  const std::vector<std::string> tokens = cut(text);
  for (const std::string& token : tokens) require(split_words(token).size() == 1);
  const std::string line = cut.line(text);
  require(cut.line(line) == line);
  (void)detokenize(tokens, of);
  (void)to_lower(text);
}

void try_bleu(std::string_view text) {
  const std::string whole(text), half(text.substr(text.size() / 2));
  const std::string tokens = tokenize_13a(text);
  require(tokens.find("  ") == tokens.npos && tokens.find('\n') == tokens.npos);
  bleu counter;
  counter.add(whole, whole);
  require(counter.score().matches == counter.score().totals);
  counter.add(whole, half);
  const double score = counter.score().score;
  require(score >= 0.0 && score <= 100.0 + 1e-9);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data + 1), size - 1);
  try {
    switch (data[0] % 5) {
      case 0:
        try_lines(text);
        break;
      case 1:
        try_words(text);
        break;
      case 2:
        try_tokenizer(text, language::english);
        break;
      case 3:
        try_tokenizer(text, language::german);
        break;
      default:
        try_bleu(text);
        break;
    }
  } catch (const io_error&) {
  } catch (const value_error&) {
  }
  return 0;
}
