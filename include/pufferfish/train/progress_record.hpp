// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Where a training run stands and what it has seen, and the same as text for a checkpoint.

#include <cstdio>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <pufferfish/train/evaluate.hpp>
#include <pufferfish/train/options.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// "name rank hidden" lines.
inline std::string ranks_to_text(const std::vector<layer_rank>& ranks) {
  std::string text;
  for (const layer_rank& layer : ranks) {
    text += layer.name + " " + std::to_string(layer.rank) + " " + std::to_string(layer.hidden) + "\n";
  }
  return text;
}

inline std::vector<layer_rank> ranks_from_text(const std::string& text) {
  std::vector<layer_rank> ranks;
  std::istringstream lines(text);
  for (layer_rank layer; lines >> layer.name >> layer.rank >> layer.hidden;) ranks.push_back(layer);
  return ranks;
}

/// Exact: read back, the same bits.
inline std::string exact(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%a", value);
  return text;
}

inline double read_exact(std::istringstream& line) {
  std::string word;
  line >> word;
  char* end = nullptr;
  const double value = std::strtod(word.c_str(), &end);
  if (word.empty() || *end != '\0') line.setstate(std::ios::failbit);
  return value;
}

}  // namespace detail

/// The state of a procedure that is not in the network or the optimizer.
struct training_record {
  index_t epoch = 0;
  index_t step = 0;  ///< of this epoch, done
  std::uint64_t total_steps = 0;
  std::uint64_t optimizer_steps = 0;  ///< since the optimizer was made: since the switch, or the start
  bool low_rank = false;
  std::uint64_t skipped_steps = 0;  ///< of the whole run, because of gradients that are not finite
  evaluation seen;                  ///< this epoch's training samples, of this rank
  double exchange_ms = 0.0;         ///< spent in this epoch's all-reduces
  int saved_by = -1;                ///< the rank that has saved by itself (training_run::save_alone); else -1
  std::vector<epoch_result> history;
  std::optional<switch_result> switched;

  /// Lines of "kind numbers", floating-point numbers in hexadecimal.
  std::string to_text() const {
    using detail::exact;
    std::string text = "position " + std::to_string(epoch) + " " + std::to_string(step) + " " +
                       std::to_string(total_steps) + " " + std::to_string(optimizer_steps) + " " +
                       std::to_string(low_rank ? 1 : 0) + "\n";
    text += "seen " + exact(seen.loss_sum) + " " + std::to_string(seen.correct) + " " +
            std::to_string(seen.count) + " " + exact(exchange_ms) + "\n";
    if (saved_by >= 0) text += "alone " + std::to_string(saved_by) + "\n";
    if (skipped_steps > 0) text += "skipped " + std::to_string(skipped_steps) + "\n";
    for (const epoch_result& e : history) {
      text += "epoch " + std::to_string(e.epoch) + " " + std::to_string(e.low_rank ? 1 : 0);
      for (double value : {e.learning_rate, e.train_loss, e.train_accuracy, e.test_loss, e.test_accuracy,
                           e.seconds, e.step_ms, e.exchange_ms}) {
        text.append(" ").append(exact(value));
      }
      text += "\n";
    }
    if (switched) {
      text += "switch " + std::to_string(switched->epoch) + " " + exact(switched->milliseconds) + " " +
              std::to_string(switched->factors.parameters_before) + " " +
              std::to_string(switched->factors.parameters_after) + "\n";
      for (const factor_report& layer : switched->factors.layers) {
        text += "layer " + layer.name;
        for (index_t value : {layer.rows, layer.cols, layer.rank})
          text.append(" ").append(std::to_string(value));
        for (double value :
             {layer.squared_norm, layer.kept_energy, layer.truncation_error, layer.relative_error}) {
          text.append(" ").append(exact(value));
        }
        text += "\n";
      }
    }
    return text;
  }

  /// The inverse. Throws io_error, naming `source` and the line, for anything that to_text does not write.
  static training_record from_text(const std::string& text, const std::string& source) {
    training_record record;
    std::istringstream all(text);
    int number = 0;
    bool position = false;
    for (std::string content; std::getline(all, content);) {
      ++number;
      std::istringstream line(content);
      std::string kind;
      line >> kind;
      if (!record.read_line(kind, line) || !line) {
        PUFFERFISH_THROW(io_error(source + ": line " + std::to_string(number) +
                                  " of the training record is not one: \"" + content.substr(0, 80) + "\""));
      }
      position = position || kind == "position";
    }
    if (!position || record.epoch < 0 || record.step < 0) {
      PUFFERFISH_THROW(io_error(source + ": the training record has no valid position"));
    }
    return record;
  }

 private:
  bool read_line(const std::string& kind, std::istringstream& line) {
    using detail::read_exact;
    if (kind == "position") {
      line >> epoch >> step >> total_steps >> optimizer_steps >> low_rank;
    } else if (kind == "seen") {
      seen.loss_sum = read_exact(line);
      line >> seen.correct >> seen.count;
      exchange_ms = read_exact(line);
    } else if (kind == "skipped") {
      line >> skipped_steps;
    } else if (kind == "alone") {
      line >> saved_by;
      if (saved_by < 0) return false;
    } else if (kind == "epoch") {
      epoch_result e;
      line >> e.epoch >> e.low_rank;
      for (double* value : {&e.learning_rate, &e.train_loss, &e.train_accuracy, &e.test_loss,
                            &e.test_accuracy, &e.seconds, &e.step_ms, &e.exchange_ms}) {
        *value = read_exact(line);
      }
      history.push_back(e);
    } else if (kind == "switch") {
      switched.emplace();
      line >> switched->epoch;
      switched->milliseconds = read_exact(line);
      line >> switched->factors.parameters_before >> switched->factors.parameters_after;
    } else if (kind == "layer" && switched) {
      factor_report layer;
      line >> layer.name >> layer.rows >> layer.cols >> layer.rank;
      for (double* value :
           {&layer.squared_norm, &layer.kept_energy, &layer.truncation_error, &layer.relative_error}) {
        *value = read_exact(line);
      }
      layer.parameters_before = layer.macs_before = layer.rows * layer.cols;
      layer.parameters_after = layer.macs_after = factor_parameters(layer.rows, layer.cols, layer.rank);
      switched->factors.layers.push_back(layer);
    } else {
      return false;
    }
    return true;
  }
};

PUFFERFISH_NAMESPACE_END
