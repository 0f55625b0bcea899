// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The options that the training examples share, and what they mean to the library.

#include <cmath>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include <pufferfish/train/procedure.hpp>

#include "console.hpp"
#include "data.hpp"
#include "models.hpp"
#include "session.hpp"

namespace examples {

/// An option whose words stand for values.
template <class Value>
CLI::Option* add_choice(CLI::App& app, const std::string& name, Value& value,
                        const std::vector<std::pair<std::string, Value>>& choices, const std::string& text) {
  std::vector<std::string> words;
  std::string now;
  for (const auto& [word, meaning] : choices) {
    words.push_back(word);
    if (meaning == value) now = word;
  }
  const auto assign = [&value, choices](const std::string& given) {
    for (const auto& [word, meaning] : choices) {
      if (word == given) value = meaning;
    }
  };
  return app.add_option_function<std::string>(name, assign, text)
      ->check(CLI::IsMember(words))
      ->default_str(now);
}

/// The number that a text is; NaN if it is none.
inline double to_number(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  return !text.empty() && *end == '\0' && std::isfinite(value) ? value : std::nan("");
}

/// Checks for options: what is wrong, or nothing.
inline std::string check_positive(const std::string& given) {
  return to_number(given) > 0.0 ? "" : given + " is not a positive number";
}
inline std::string check_not_negative(const std::string& given) {
  return to_number(given) >= 0.0 ? "" : given + " is not a number from 0 on";
}

/// Options of every program that trains.
struct common_options {
  std::string data;
  std::string json;
  std::string plot;
  progress_style progress = progress_style::automatic;
  int threads = 0;
  index_t epochs = 20;
  index_t warmup_epochs = 5;
  index_t batch = 128;
  double lr = 0.1;
};

/// Adds them; what the fields hold now are the defaults shown.
inline void add_common_options(CLI::App& app, common_options& o) {
  app.option_defaults()->always_capture_default();
  app.add_option("--data", o.data,
                 "Folder of the data set, or of several by name; empty: the bundled digits");
  app.add_option("--epochs", o.epochs, "Epochs in all")->check(CLI::Range(1, 1000000));
  app.add_option("--warmup-epochs", o.warmup_epochs, "Dense epochs before the switch (hybrid)")
      ->check(CLI::Range(0, 1000000));
  app.add_option("--batch", o.batch, "Images a step, over all ranks")->check(CLI::Range(1, 1000000));
  app.add_option("--lr", o.lr, "Learning rate")->check(check_positive);
  app.add_option("--threads", o.threads, "Threads a rank; 0: the cores, divided by the ranks")
      ->check(CLI::Range(0, 4096));
  app.add_option("--json", o.json, "Write results to this file; - is standard output")->take_last();
  app.add_option("--plot", o.plot, "Draw the curves to this file, .svg or .png (needs gnuplot)")->take_last();
  add_choice<progress_style>(app, "--progress", o.progress,
                             {{"auto", progress_style::automatic},
                              {"bar", progress_style::bar},
                              {"lines", progress_style::lines},
                              {"none", progress_style::none}},
                             "How progress shows; auto: a bar on a terminal")
      ->take_last();
}

/// Throws on all ranks if a hybrid run would have nothing to factorize, before it has trained for hours. Also
/// if the switch would come after the last epoch.
inline void check_switch(const pufferfish::training_options& t, pufferfish::network<float> net) {
  if (t.mode == pufferfish::training_mode::dense) return;
  if (t.mode == pufferfish::training_mode::hybrid && t.warmup_epochs >= t.epochs) {
    throw pufferfish::value_error("a warm-up of " + std::to_string(t.warmup_epochs) +
                                  " epochs leaves none of " + std::to_string(t.epochs) +
                                  " for the factorized network");
  }
  if (pufferfish::factorize(net, t.factorize).layers.empty()) {
    throw pufferfish::value_error("from layer " + std::to_string(t.factorize.first_layer) +
                                  " on this network has no layer that factorizing makes smaller");
  }
}

}  // namespace examples
