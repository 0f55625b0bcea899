// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Parts of the language-model example besides training: options for text and sampling, text generated from a
/// prompt, and the codec in a model's file.

#include <map>
#include <span>
#include <string>
#include <utility>

#include <CLI/CLI.hpp>

#include <pufferfish/io/corpus.hpp>
#include <pufferfish/io/token_streams.hpp>
#include <pufferfish/models/sampling.hpp>

#include "text_data.hpp"
#include "training.hpp"

namespace examples {

/// Choice of the text and its units.
struct language_options {
  pufferfish::text_unit unit = pufferfish::text_unit::words;
  index_t vocabulary = 0;
  std::int64_t minimum_count = 1;
  pufferfish::corpus_shares shares;
  index_t segment = 35;
  index_t eval_streams = 10;

  pufferfish::corpus_options corpus() const {
    pufferfish::corpus_options result;
    result.unit = unit;
    result.words.maximum_size = vocabulary;
    result.words.minimum_count = minimum_count;
    return result;
  }
  /// Streams of the training part: `batch` of them over all ranks; then those of the other parts.
  pufferfish::stream_options training_streams(index_t batch, int rank, int ranks) const {
    return {batch, segment, rank, ranks};
  }
  pufferfish::stream_options test_streams(int rank, int ranks) const {
    return {eval_streams, segment, rank, ranks};
  }
};

inline void add_language_options(CLI::App& app, language_options& o) {
  using pufferfish::text_unit;
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
  app.add_option("--sample", o.tokens, "Write so many tokens with the trained model")
      ->check(CLI::Range(0, 1000000));
  app.add_option("--prompt", o.prompt, "What the sample goes on from; empty: a new line");
  app.add_option("--temperature", o.temperature, "Of sampling; 0: always the likeliest token")
      ->check(check_not_negative);
  app.add_option("--top-k", o.top_k, "Sample among so many of the likeliest tokens; 0: all")
      ->check(CLI::Range(0, 100000000));
  app.add_flag("--sample-unknown", o.unknown, "Let samples have <unk> in them");
  app.add_option("--sample-seed", o.seed, "Of sampling");
}

/// The prompt and its continuation by the model. `step(token, logits)` as in sample_tokens. Throws
/// value_error for words of the prompt that have no id.
template <class T, class Step>
std::string write_sample(const pufferfish::text_codec& codec, const sample_options& o, Step&& step) {
  std::vector<std::int32_t> prompt = codec.encode(o.prompt);
  const bool words = codec.unit() == pufferfish::text_unit::words;
  // A prompt is the beginning of a line, so the end of line that encoding appends is removed.
  if (words && !prompt.empty() && !codec.end_of_line().empty()) prompt.pop_back();
  pufferfish::sampling_options options;
  options.temperature = o.temperature;
  options.top_k = o.top_k;
  if (words && !o.unknown && codec.words().unknown()) options.forbidden.push_back(*codec.words().unknown());
  // The model first reads the end of the line before the text.
  std::vector<std::int32_t> seen;
  if (!words) {
    seen.push_back('\n');
  } else if (!codec.end_of_line().empty()) {
    seen.push_back(codec.words().id(codec.end_of_line()));
  }
  if (seen.empty() && prompt.empty()) seen.push_back(0);
  seen.insert(seen.end(), prompt.begin(), prompt.end());
  const std::vector<std::int32_t> drawn = pufferfish::sample_tokens<T>(
      seen, o.tokens, codec.size(), options,
      pufferfish::random_stream(o.seed, pufferfish::stream_id("sample")), std::forward<Step>(step));
  prompt.insert(prompt.end(), drawn.begin(), drawn.end());
  return codec.decode(prompt);
}

/// A codec as facts of a checkpoint, and its inverse. Throws io_error, naming the file.
inline std::map<std::string, std::string> codec_facts(const pufferfish::text_codec& codec) {
  if (codec.unit() == pufferfish::text_unit::bytes) return {{"examples.unit", "bytes"}};
  return {{"examples.unit", "words"},
          {"examples.words", codec.words().to_text()},
          {"examples.end_of_line", codec.end_of_line()}};
}
template <class Checkpoint>
pufferfish::text_codec codec_from_facts(const Checkpoint& file, const std::string& path) {
  if (file.fact("examples.unit") == "bytes") return {};
  try {
    return pufferfish::text_codec(
        pufferfish::vocabulary::from_text(file.fact("examples.words"), path + ": its words"),
        file.fact("examples.end_of_line"));
  } catch (const pufferfish::value_error& e) {
    throw pufferfish::io_error(path + ": " + e.what());
  }
}

}  // namespace examples
