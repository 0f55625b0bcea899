// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Parts of the language-model example besides training: options for text and sampling, and text generated
/// from a prompt.

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include <pufferfish/models/sampling.hpp>

#include "../text/corpus.hpp"
#include "text_data.hpp"
#include "training.hpp"

namespace examples {

/// Choice of the text and its units.
struct language_options {
  text_unit unit = text_unit::words;
  index_t vocabulary = 0;
  std::int64_t minimum_count = 1;
  corpus_shares shares;
  index_t segment = 35;
  index_t eval_streams = 10;

  corpus_options corpus() const {
    corpus_options result;
    result.unit = unit;
    result.words.maximum_size = vocabulary;
    result.words.minimum_count = minimum_count;
    return result;
  }
};

inline void add_language_options(CLI::App& app, language_options& o) {
  add_choice<text_unit>(app, "--unit", o.unit, {{"words", text_unit::words}, {"bytes", text_unit::bytes}},
                        "What a token is; bytes take any file");
  app.add_option("--vocabulary", o.vocabulary, "Most words, the others become <unk>; 0: all")
      ->check(CLI::Range(0, 100000000));
  app.add_option("--min-count", o.minimum_count, "Rarer words become <unk>")->check(CLI::Range(1, 1000000));
  app.add_option("--valid-share", o.shares.valid, "Of a text in one file, for validation")
      ->check(CLI::Range(0.0, 0.5));
  app.add_option("--test-share", o.shares.test, "Likewise for test")->check(CLI::Range(0.0, 0.49));
  app.add_option("--segment", o.segment, "Tokens of a stream in one step")->check(CLI::Range(1, 100000));
  app.add_option("--eval-streams", o.eval_streams, "Streams of validation and test")
      ->check(CLI::Range(1, 100000));
}

/// What the trained model writes.
struct sample_options {
  index_t tokens = 0;
  std::string prompt;
  double temperature = 1.0;
  index_t top_k = 0;
  bool unknown = false;
  std::uint64_t seed = 1;
};

inline void add_sample_options(CLI::App& app, sample_options& o) {
  app.add_option("--sample", o.tokens, "Number of tokens to write with the trained model")
      ->check(CLI::Range(0, 1000000));
  app.add_option("--prompt", o.prompt, "What the sample goes on from; empty: a new line");
  app.add_option("--temperature", o.temperature, "Of sampling; 0: always the likeliest token")
      ->check(check_not_negative);
  app.add_option("--top-k", o.top_k, "Number of likeliest tokens to sample among; 0: all")
      ->check(CLI::Range(0, 100000000));
  app.add_flag("--sample-unknown", o.unknown, "Let samples have <unk> in them");
  app.add_option("--sample-seed", o.seed, "Of sampling");
}

/// The prompt and its continuation by the model. `step(token, logits)` as in sample_tokens. Words of the
/// prompt that have no id become <unk>.
template <class T, class Step>
std::string write_sample(const text_codec& codec, const sample_options& o, Step&& step) {
  std::vector<std::int32_t> prompt = codec.encode(o.prompt);
  const bool words = codec.unit() == text_unit::words;
  // A prompt is the beginning of a line, so the end of line that encoding appends is removed.
  if (words && !prompt.empty()) prompt.pop_back();
  pufferfish::sampling_options options;
  options.temperature = o.temperature;
  options.top_k = o.top_k;
  if (words && !o.unknown) options.forbidden.push_back(codec.words().id(unknown_word));
  // The model first reads the end of the line before the text.
  std::vector<std::int32_t> seen{words ? codec.words().id(end_of_line) : '\n'};
  seen.insert(seen.end(), prompt.begin(), prompt.end());
  const std::vector<std::int32_t> drawn = pufferfish::sample_tokens<T>(
      seen, o.tokens, codec.size(), options,
      pufferfish::random_stream(o.seed, pufferfish::stream_id("sample")), std::forward<Step>(step));
  prompt.insert(prompt.end(), drawn.begin(), drawn.end());
  return codec.decode(prompt);
}

}  // namespace examples
