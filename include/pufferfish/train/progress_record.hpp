// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal state of a training run: its position and results, and their text form in checkpoints.

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/number_text.hpp>
#include <pufferfish/core/record_line.hpp>
#include <pufferfish/train/evaluate.hpp>
#include <pufferfish/train/options.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Encodes ranks as lines "name rank rank ...", one rank for each rank group, with names as quote_word writes
/// them: "layer1.0.conv1" 16.
inline std::string ranks_to_text(const std::vector<layer_rank>& ranks) {
  std::string text;
  for (const layer_rank& layer : ranks) {
    add_line(text, quote_word(layer.name), layer.ranks);
  }
  return text;
}

/// The inverse of ranks_to_text. Throws io_error for anything that ranks_to_text does not write.
inline std::vector<layer_rank> ranks_from_text(std::string_view text) {
  std::vector<layer_rank> ranks;
  for_each_line(text, [&](std::string_view line) {
    layer_rank layer;
    if (!record_line(line).read(layer.name).read_rest(layer.ranks).complete()) {
      throw_error<io_error>(
          {"list of ranks: this is not a layer and its ranks: \"", line.substr(0, 80), "\""});
    }
    ranks.push_back(std::move(layer));
  });
  return ranks;
}

}  // namespace detail

/// The state of a training run without its network and optimizer: position, counters and results. Every rank
/// has its own record. Position and counters of steps are equal on all ranks; `seen`, times and losses of
/// single steps are those of the rank.
///
///     const std::string text = record.to_text();                        // stored in a checkpoint
///     record = training_record::from_text(text, "epoch3.safetensors");
struct training_record {
  index_t epoch = 0;                  ///< current epoch, from 0
  index_t step = 0;                   ///< completed steps of this epoch
  std::uint64_t total_steps = 0;      ///< completed steps of the run
  std::uint64_t optimizer_steps = 0;  ///< steps since the optimizer was made, at the start or the switch
  bool low_rank = false;              ///< whether the network is low-rank now
  std::uint64_t skipped_steps = 0;    ///< steps of the whole run left out for gradients that are not finite
  evaluation seen;                    ///< losses and hits of this epoch's training samples on this rank
  double exchange_ms = 0.0;           ///< exchange time of this epoch that the backward pass did not hide
  std::uint64_t finite_steps = 0;     ///< total_steps after the last step with a finite loss; not stored
  double last_loss = 0.0;             ///< mean loss of the last step whose loss is not finite; not stored
  int saved_by = -1;                  ///< rank that wrote the record by training_run::save_alone; else -1
  std::vector<epoch_result> history;  ///< results of the completed epochs
  std::optional<switch_result> switched;  ///< result of the switch, after it

  /// Records the loss of a step on this rank. `steps`: number of steps of the run, this step included.
  void note_loss(const evaluation& of, std::uint64_t steps) {
    if (std::isfinite(of.loss_sum)) {
      finite_steps = steps;
    } else {
      last_loss = std::isnan(of.loss()) ? std::numeric_limits<double>::quiet_NaN() : of.loss();  // not -nan
    }
  }

  /// The record as lines "kind numbers", with floating-point numbers in hexadecimal, so that from_text
  /// restores them bit for bit. Kinds that are not needed are left out: "alone", "skipped", "switch" and the
  /// lines of the switch.
  ///
  ///     position EPOCH STEP TOTAL_STEPS OPTIMIZER_STEPS LOW_RANK
  ///     seen LOSS_SUM CORRECT COUNT EXCHANGE_MS
  ///     alone RANK                        written by save_alone
  ///     skipped STEPS
  ///     epoch ..., size ..., top5 ...     for each completed epoch; top5 if it was counted
  ///     switch EPOCH MS BEFORE AFTER      numbers of parameters before and after the switch
  ///     layer ..., weighted ...           for each factorized matrix; weighted if losses are predicted
  ///     row ..., why REASON               for rank_table; the reason of the switch
  ///     tested NAME LOSS_SUM CORRECT COUNT   NAME: before, after, estimated
  std::string to_text() const {
    using detail::add_line;
    std::string text;
    add_line(text, "position", epoch, step, total_steps, optimizer_steps, low_rank);
    add_line(text, "seen", seen.loss_sum, seen.correct, seen.count, exchange_ms);
    if (saved_by >= 0) add_line(text, "alone", saved_by);
    if (skipped_steps > 0) add_line(text, "skipped", skipped_steps);
    for (const epoch_result& e : history) {
      add_line(text, "epoch", e.epoch, e.low_rank, e.learning_rate, e.train_loss, e.train_accuracy,
               e.test_loss, e.test_accuracy, e.seconds, e.step_ms, e.exchange_ms);
      add_line(text, "size", e.parameters, e.macs, e.bytes_per_step);
      if (e.test_top5 > 0.0) add_line(text, "top5", e.test_top5);
    }
    if (switched) {
      add_line(text, "switch", switched->epoch, switched->milliseconds, switched->factors.parameters_before,
               switched->factors.parameters_after);
      for (const factor_report& layer : switched->factors.layers) {
        add_line(text, "layer", layer.name, layer.rows, layer.cols, layer.rank, layer.squared_norm,
                 layer.kept_energy, layer.truncation_error, layer.relative_error);
        if (std::isnan(layer.predicted_loss)) continue;
        add_line(text, "weighted", layer.weighted_energy, layer.predicted_loss);
      }
      for (const rank_row& row : switched->factors.rows) {
        with_members(row, [&text](const auto&... all) { add_line(text, "row", all...); });
      }
      if (!switched->why.empty()) add_line(text, "why", switched->why);
      add_test(text, "before", switched->before);
      add_test(text, "after", switched->after);
      add_test(text, "estimated", switched->estimated);
    }
    return text;
  }

  /// The inverse of to_text. Throws io_error, naming `source` and the line, for any other text, and for one
  /// without a valid position. The members that are not stored begin anew: no loss counts as not finite.
  static training_record from_text(const std::string& text, const std::string& source) {
    training_record record;
    int number = 0;
    bool position = false;
    detail::for_each_line(text, [&](std::string_view line) {
      ++number;
      const std::size_t space = std::min(line.find(' '), line.size());
      const std::string_view kind = line.substr(0, space);
      detail::record_line values(line.substr(std::min(line.size(), space + 1)));
      if (!record.read_line(kind, values)) {
        detail::throw_error<io_error>(
            {source, ": line ", number, " of the training record is not one: \"", line.substr(0, 80), "\""});
      }
      position = position || kind == "position";
    });
    if (!position || record.epoch < 0 || record.step < 0) {
      detail::throw_error<io_error>({source, ": the training record has no valid position"});
    }
    record.finite_steps = record.total_steps;
    return record;
  }

 private:
  // Reads a line of to_text() into the record. Returns false for any other line.
  bool read_line(std::string_view kind, detail::record_line& line) {
    if (kind == "position") {
      line.read(epoch, step, total_steps, optimizer_steps, low_rank);
    } else if (kind == "seen") {
      line.read(seen.loss_sum, seen.correct, seen.count, exchange_ms);
    } else if (kind == "skipped") {
      line.read(skipped_steps);
    } else if (kind == "alone") {
      line.read(saved_by);
      if (saved_by < 0) return false;
    } else if (kind == "epoch") {
      epoch_result& e = history.emplace_back();
      line.read(e.epoch, e.low_rank, e.learning_rate, e.train_loss, e.train_accuracy, e.test_loss,
                e.test_accuracy, e.seconds, e.step_ms, e.exchange_ms);
    } else if (kind == "size" && !history.empty()) {  // older files have none
      epoch_result& e = history.back();
      line.read(e.parameters, e.macs, e.bytes_per_step);
    } else if (kind == "top5" && !history.empty()) {
      line.read(history.back().test_top5);
    } else if (kind == "switch") {
      switch_result& s = switched.emplace();
      line.read(s.epoch, s.milliseconds, s.factors.parameters_before, s.factors.parameters_after);
    } else if (kind == "layer" && switched) {
      factor_report& layer = switched->factors.layers.emplace_back();
      line.read(layer.name, layer.rows, layer.cols, layer.rank, layer.squared_norm, layer.kept_energy,
                layer.truncation_error, layer.relative_error);
      if (!are_factors(layer.rows, layer.cols, layer.rank)) return false;
      // These follow from the size and the rank, so that the text does not contain them.
      layer.parameters_before = layer.macs_before = layer.rows * layer.cols;
      layer.parameters_after = layer.macs_after = factor_parameters(layer.rows, layer.cols, layer.rank);
      layer.weighted_energy = layer.kept_energy;
    } else if (kind == "weighted" && switched && !switched->factors.layers.empty()) {
      factor_report& layer = switched->factors.layers.back();
      line.read(layer.weighted_energy, layer.predicted_loss);
    } else if (kind == "row" && switched) {
      rank_row& row = switched->factors.rows.emplace_back();
      with_members(row, [&line](auto&... all) { line.read(all...); });
      if (row.size.rows < 0 || row.size.cols < 0 || row.count < 1 || row.rank < 0) return false;
    } else if (kind == "why" && switched) {
      line.read(switched->why);
    } else if (kind == "tested" && switched) {
      std::string name;
      evaluation tested;
      line.read(name, tested.loss_sum, tested.correct, tested.count);
      if (name != "before" && name != "after" && name != "estimated") return false;
      (name == "before"  ? switched->before
       : name == "after" ? switched->after
                         : switched->estimated) = tested;
    } else {
      return false;
    }
    return line.complete();
  }

  // Calls f with the members of a rank_row.
  template <class Row, class F>
  static void with_members(Row& row, F&& f) {
    f(row.name, row.size.rows, row.size.cols, row.count, row.rank, row.dense, row.why, row.before.parameters,
      row.before.macs, row.before.milliseconds, row.after.parameters, row.after.macs, row.after.milliseconds,
      row.at_rank_0.parameters, row.at_rank_0.macs, row.at_rank_0.milliseconds, row.per_rank.parameters,
      row.per_rank.macs, row.per_rank.milliseconds, row.weighted_energy, row.predicted_loss);
  }

  // Adds a line "tested" for a test of the network around the switch, if it was made.
  static void add_test(std::string& text, const char* name, const std::optional<evaluation>& tested) {
    if (tested) detail::add_line(text, "tested", name, tested->loss_sum, tested->correct, tested->count);
  }

  // Whether a matrix of this size can have this rank, and the numbers of parameters fit in index_t.
  static bool are_factors(index_t rows, index_t cols, index_t rank) {
    constexpr index_t most = std::numeric_limits<index_t>::max();
    return rows >= 1 && cols >= 1 && rank >= 1 && rank <= std::min(rows, cols) && rows <= most - cols &&
           rows <= most / cols && rank <= most / (rows + cols);
  }
};

PUFFERFISH_NAMESPACE_END
