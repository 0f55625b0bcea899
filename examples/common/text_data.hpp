// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The texts that the examples train on: WikiText-2 or any file for language models, Multi30k for
/// translation.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/io/dataset.hpp>
#include <pufferfish/io/sentence_pairs.hpp>

#include "../text/corpus.hpp"
#include "../text/detokenizer.hpp"
#include "../text/parallel_corpus.hpp"

namespace examples {

namespace data {

inline bool is_file(const std::string& path) {
  return pufferfish::detail::is_regular_file(path) || pufferfish::detail::is_regular_file(path + ".gz");
}

/// `root` or its subfolder `name`: the one that has one of the files. Throws io_error.
inline std::string find_text_folder(const std::string& root, const std::string& name,
                                    const std::vector<std::string>& files) {
  if (root.empty()) throw io_error(name + " is not bundled: say where it is with --data");
  for (const std::string& folder : {root + "/" + name, root}) {
    for (const std::string& file : files) {
      if (is_file(folder + "/" + file)) return folder;
    }
  }
  throw io_error(root + ": no " + name + " here: neither this folder nor its subfolder " + name + " has " +
                 files.front() + " or " + files.front() + ".gz");
}

/// The first of several names that exists in a folder, plain or gzip. Throws io_error, naming the first.
inline std::string find_any(const std::string& folder, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (is_file(folder + "/" + name)) return pufferfish::detail::find_plain_or_gzip(folder + "/" + name);
  }
  return pufferfish::detail::find_plain_or_gzip(folder + "/" + names.front());
}

}  // namespace data

/// The data of a language model.
struct language_data {
  std::string name;
  language_corpus corpus;
};

/// `path`: a text file, split by `shares`; or a folder with WikiText's files or {train,valid,test}.txt; or a
/// folder with a subfolder wikitext-2 that has them. Throws as load_text and load_wikitext, and io_error if
/// the data are missing or too short.
inline language_data load_language_data(const std::string& path, const corpus_options& options,
                                        const corpus_shares& shares) {
  const auto checked = [&path](language_data data) {
    // Checked now rather than after an epoch of training.
    const auto& [codec, train, valid, test] = data.corpus;
    for (const std::size_t tokens : {train.size(), valid.size(), test.size()}) {
      if (tokens < 2) {
        throw io_error(path + ": too short a text: training, validation and test have " +
                       std::to_string(train.size()) + ", " + std::to_string(valid.size()) + " and " +
                       std::to_string(test.size()) + " tokens; each needs two");
      }
    }
    return data;
  };
  if (!path.empty() && pufferfish::detail::is_regular_file(path)) {
    return checked({path.substr(path.rfind('/') + 1), load_text(path, shares, options)});
  }
  const std::string folder = data::find_text_folder(path, "wikitext-2", {"wiki.train.tokens", "train.txt"});
  const bool wiki = data::is_file(folder + "/wiki.train.tokens");
  return checked({wiki ? "wikitext-2" : folder, load_wikitext(folder, options)});
}

/// How text becomes pairs of sentences.
struct translation_options {
  bool lower_case = true;
  std::int64_t minimum_count = 3;
  index_t maximum_words = 0;
  index_t max_length = 100;  ///< in words
};

/// Multi30k, German to English: sentence pairs for training and validation; the test set, with every line and
/// the raw English text for the scores.
struct translation_data {
  tokenizer german, english;
  vocabulary words;
  sentence_pairs train, valid, test;
  std::vector<std::string> test_references;

  /// The model's output as text.
  std::string text(std::span<const std::int32_t> ids) const {
    return detokenize(decode_sentence(ids, words), language::english);
  }
};

/// Loads Multi30k from `root` or its subfolder multi30k. Throws io_error.
inline translation_data load_translation_data(const std::string& root, const translation_options& options) {
  const std::string folder = data::find_text_folder(root, "multi30k", {"train.de"});
  const auto read = [&](const std::vector<std::string>& stems) {
    const auto names = [&](const char* ending) {
      std::vector<std::string> result;
      for (const std::string& stem : stems) result.push_back(stem + "." + ending);
      return result;
    };
    return read_parallel_text(data::find_any(folder, names("de")), data::find_any(folder, names("en")));
  };
  translation_data result;
  result.german = tokenizer({language::german, options.lower_case});
  result.english = tokenizer({language::english, options.lower_case});
  parallel_text train = read({"train"}), valid = read({"val", "valid"}),
                test = read({"test_2016_flickr", "test2016", "test"});
  result.test_references = test.target;
  for (parallel_text* text : {&train, &valid, &test}) {
    tokenize(*text, result.german, result.english);
  }
  result.words = joint_vocabulary(train, options.minimum_count, options.maximum_words);
  result.train = encode_pairs(train, result.words, options.max_length);
  result.valid = encode_pairs(valid, result.words, options.max_length);
  result.test = encode_pairs(test, result.words, options.max_length, unfit_pairs::keep);
  if (result.train.size() == 0 || result.valid.size() == 0 || result.test.size() == 0) {
    throw io_error(folder + ": a part of it has no sentence pairs that can be used");
  }
  return result;
}

}  // namespace examples
