// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// A training run with checkpoints: runs until its end or a request to stop, resumes from a file, shows its
/// progress and lists its results.

#include <cmath>
#include <ctime>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include <pufferfish/train/checkpoint.hpp>
#include <pufferfish/train/rank_states.hpp>

#include "console.hpp"
#include "exchange_choice.hpp"
#include "progress.hpp"
#include "report.hpp"
#include "session.hpp"
#include "signals.hpp"

namespace examples {

struct checkpoint_options {
  std::string file;
  std::uint64_t every = 0;
  bool resume = false;
  std::uint64_t stop_after = 0;
  bool overwrite = false;
};

inline void add_checkpoint_options(CLI::App& app, checkpoint_options& o) {
  CLI::Option* file = app.add_option("--checkpoint", o.file, "File to go on from");
  app.add_option("--checkpoint-every", o.every, "Steps between checkpoints; 0: one an epoch")->needs(file);
  app.add_flag("--resume", o.resume, "Go on from the checkpoint, if it is there")->needs(file);
  app.add_option("--stop-after", o.stop_after,
                 "Number of steps after which to stop, with a checkpoint; 0: no stop")
      ->needs(file);
  app.add_flag("--overwrite", o.overwrite, "Replace files of checkpoints and weights that exist already");
}

/// On rank 0, before the work: throws io_error if the checkpoint or a file of `weights` exists and must not
/// be replaced, or if a file cannot be written.
inline void check_files(const checkpoint_options& o, const std::vector<std::string>& results,
                        const std::vector<std::string>& weights = {}) {
  if (!o.resume) check_new(o.file, o.overwrite, "--resume goes on from it, ");
  for (const std::string& path : weights) check_new(path, o.overwrite);
  for (const std::string& path : results) check_writable(path);
  for (const std::string& path : weights) check_writable(path);
  check_writable(o.file);
}

/// One of several runs of a program, each with checkpoints.
struct run_part {
  /// "level 3"; a run is not resumed from the checkpoint of a part with another name. Empty: the only run.
  std::string name = {};
  /// What the program stores in the run's checkpoints, and what it does with it on every rank at a resume.
  std::function<std::string()> save = {};
  std::function<void(const std::string&)> load = {};
};

/// Shows the progress of a run, and a table of the factors at its switch. The arguments are those of
/// progress; `explain`: the table has a row for every layer.
class run_display final : public pufferfish::training_observer {
 public:
  run_display(const console& out, std::string title, pufferfish::index_t batch, bool explain,
              progress_words words = {})
      : out_(out), explain_(explain), progress_(out, std::move(title), batch, words) {}
  void on_step(const pufferfish::training_position& at) override { progress_.on_step(at); }
  void on_epoch(const pufferfish::epoch_result& epoch) override { progress_.on_epoch(epoch); }
  void on_switch(const pufferfish::switch_result& result) override {
    progress_.on_switch(result);
    if (out_.speaks()) out_.write("\n" + switch_table(result.factors, explain_) + "\n");
  }

 private:
  const console& out_;
  bool explain_;
  progress progress_;
};

/// How a run ended.
struct run_end {
  bool finished = false;             ///< all epochs are trained, or the condition of kept_run::train holds
  int signal = 0;                    ///< the signal that ended it; 0: none
  std::exception_ptr diverged = {};  ///< the error of a run that diverged
  std::uint64_t steps = 0;           ///< taken by this process

  /// Takes the steps off those of --stop-after. Returns false, and sets `finished` to false, if none are left
  /// for the next run of the program.
  bool spend(checkpoint_options& o) {
    if (o.stop_after == 0) return true;
    if (steps >= o.stop_after) return finished = false;
    o.stop_after -= steps;
    return true;
  }

  nlohmann::ordered_json to_json() const {
    nlohmann::ordered_json j{{"finished", finished}, {"interrupted", signal > 0}, {"diverged", nullptr}};
    if (signal > 0) j["signal"] = signal;
    try {
      if (diverged) std::rethrow_exception(diverged);
    } catch (const std::exception& e) {
      j["diverged"] = e.what();
    }
    return j;
  }

  /// The program's exit status, 128 + signal as in a shell; throws the error of a run that diverged. Call it
  /// after everything has been written.
  int exit_status() const {
    if (diverged) std::rethrow_exception(diverged);
    return signal > 0 ? 128 + signal : 0;
  }
};

/// Run: a pufferfish::training_run. Collective, as its members are.
template <class Run, class Comm>
class kept_run {
 public:
  kept_run(checkpoint_options o, Run& run, Comm& comm, const console& out, run_part part = {})
      : o_(std::move(o)), run_(run), comm_(comm), out_(out), part_(std::move(part)) {}

  /// The parameters' digest after each epoch.
  const std::vector<std::string>& digests() const { return digests_; }
  /// Seconds of processor time of this rank's process in each epoch, tests and checkpoints included.
  const std::vector<double>& processor_seconds() const { return processor_; }
  /// The same since the last of these epochs.
  double processor_seconds_since() const { return earlier_ + processor_now() - mark_; }

  /// The epochs with the digest of the parameters after each. `perplexity`: also that of the test loss;
  /// `processor`: also this rank's processor time.
  nlohmann::ordered_json history(bool perplexity = false, bool processor = false) const {
    nlohmann::ordered_json epochs = nlohmann::ordered_json::array();
    for (std::size_t e = 0; e < run_.history().size(); ++e) {
      const pufferfish::epoch_result& epoch = run_.history()[e];
      epochs.push_back(to_json(epoch));
      if (perplexity) epochs.back()["valid_perplexity"] = std::exp(epoch.test_loss);
      if (processor) epochs.back()["processor_seconds"] = processor_[e];
      epochs.back()["digest"] = digests_[e];
    }
    return epochs;
  }

  /// Adds the results of the run to a document. `perplexity`: also that of the test loss after each epoch.
  void add_results(nlohmann::ordered_json& j, const costs& before, const costs& after,
                   const exchange_choice& exchange, const run_end& end, bool perplexity = false) const {
    double seconds = 0.0;
    for (const pufferfish::epoch_result& epoch : run_.history()) seconds += epoch.seconds;
    j["before"] = to_json(before);
    j["after"] = to_json(after);
    j["exchange"] = exchange_json(exchange, run_);
    j["ms_per_step_dense"] = step_ms(run_.history(), false);
    j["ms_per_step_low_rank"] = step_ms(run_.history(), true);
    j["seconds"] = seconds;
    j["digest"] = digest_text(run_.net());
    if (run_.switched()) j["switch"] = switch_result_json(run_);
    j.update(end.to_json());
    j["history"] = history(perplexity);
  }

  /// Resumes from the checkpoint if requested, then trains to the end or until it must stop: after the steps
  /// of --stop-after, or after the step during which any rank received SIGINT or SIGTERM. If ranks are lost,
  /// one of the other ranks saves the run alone, in a file named after the checkpoint's.
  run_end train(pufferfish::training_observer& shown) {
    return train(shown, [] { return false; });
  }
  /// The same, but ends also after the step from which on until() is true on all ranks.
  template <class Until>
  run_end train(pufferfish::training_observer& shown, Until&& until) {
    rescuer observer(shown, *this);
    const signal_watch signals;
    if (o_.resume) resume();
    mark_ = processor_now();
    std::uint64_t step = 0;
    try {
      while (!run_.finished() && !until()) {
        ++step;
        if (signals.caught() > 0) run_.request_stop(signals.caught());
        run_.advance(observer);
        const bool epoch_ended = run_.step_of_epoch() == 0;
        if (epoch_ended) end_epoch();
        const bool ended = run_.finished() || until();
        const bool stop = step == o_.stop_after || run_.stop_reason() > 0;
        const bool due = o_.every == 0 ? epoch_ended : run_.total_steps() % o_.every == 0;
        if (!o_.file.empty() && (due || stop || ended)) save(observer);
        if (stop && !ended) {
          out_.line(format("%s in epoch %td after %td steps of it; %s",
                           run_.stop_reason() > 0 ? "interrupted" : "stopped", run_.epoch() + 1,
                           run_.step_of_epoch(),
                           o_.file.empty() ? "nothing is kept without --checkpoint" : "--resume goes on"));
          return {false, run_.stop_reason(), nullptr, step};
        }
      }
    } catch (const pufferfish::divergence_error&) {
      return {false, 0, std::current_exception(), step};
    }
    return {true, 0, nullptr, step};
  }

  /// Writes a checkpoint of the run as it is, if there is a file for it. Collective.
  void save() {
    if (!o_.file.empty()) run_.save(o_.file, facts());
  }

 private:
  /// Forwards everything to another observer, and saves the run when ranks are lost.
  class rescuer final : public pufferfish::training_observer {
   public:
    rescuer(pufferfish::training_observer& shown, kept_run& of) : shown_(shown), of_(of) {}
    void on_step(const pufferfish::training_position& at) override { shown_.on_step(at); }
    void on_epoch(const pufferfish::epoch_result& epoch) override { shown_.on_epoch(epoch); }
    void on_switch(const pufferfish::switch_result& result) override { shown_.on_switch(result); }
    void on_skipped_step(const pufferfish::nonfinite_gradient& found) override {
      shown_.on_skipped_step(found);
    }
    void on_lost_ranks(const pufferfish::timeout_error& lost) override {
      of_.rescue(lost);
      shown_.on_lost_ranks(lost);
    }

   private:
    pufferfish::training_observer& shown_;
    kept_run& of_;
  };

  static double processor_now() {
    return static_cast<double>(std::clock()) / static_cast<double>(CLOCKS_PER_SEC);
  }

  void end_epoch() {
    digests_.push_back(digest_text(run_.net()));
    processor_.push_back(processor_seconds_since());
    mark_ = processor_now();
    earlier_ = 0.0;
  }

  std::map<std::string, std::string> facts() const {
    std::string digests, processor;
    for (const std::string& digest : digests_) digests += digest + " ";
    for (const double seconds : processor_) processor += format("%.6f ", seconds);
    std::map<std::string, std::string> all{
        {digests_fact, digests}, {processor_fact, processor + format("%.6f", processor_seconds_since())}};
    if (!part_.name.empty()) all[part_fact] = part_.name;
    if (part_.save) all[notes_fact] = part_.save();
    return all;
  }

  void save(pufferfish::training_observer& observer) {
    try {
      if (run_.nonfinite_steps() > 0) {
        // The existing checkpoint is worth more.
        out_.line(format("no checkpoint after step %td of epoch %td: the loss is not finite",
                         run_.step_of_epoch(), run_.epoch() + 1));
        return;
      }
      run_.save(o_.file, facts());
    } catch (const pufferfish::timeout_error& lost) {
      observer.on_lost_ranks(lost);
      throw;
    }
  }

  // Done by the lowest rank that is left. The checkpoint is not replaced: it has the state of all ranks.
  void rescue(const pufferfish::timeout_error& lost) {
    if (o_.file.empty() || comm_.rank() != lowest_present(lost.missing())) return;
    const std::string path = o_.file + ".rank" + std::to_string(comm_.rank());
    try {
      run_.save_alone(path, facts());
      const std::string advice = part_.name.empty()
                                     ? "--checkpoint " + path + " --resume goes on"
                                     : "rename " + path + " to " + o_.file + " before --resume";
      std::fprintf(stderr, "rank %d has saved the run by itself: %s\n", comm_.rank(), advice.c_str());
    } catch (const std::exception& e) {
      std::fprintf(stderr, "rank %d could not save the run by itself: %s\n", comm_.rank(), e.what());
    }
  }

  /// The checkpoint, if it is there and this run's. Call it on one rank.
  std::optional<pufferfish::checkpoint_file> mine() const {
    if (!pufferfish::detail::is_regular_file(o_.file)) return std::nullopt;
    pufferfish::checkpoint_file file = pufferfish::open_checkpoint(o_.file);
    const auto named = file.facts().find(part_fact);
    if ((named == file.facts().end() ? "" : named->second) != part_.name) return std::nullopt;
    return file;
  }

  /// All ranks do what rank 0 decides.
  void resume() {
    std::optional<pufferfish::checkpoint_file> file;
    const std::string there = pufferfish::detail::on_root(comm_, [&] {
      file = mine();
      return std::string(file ? "yes" : "");
    });
    if (there.empty()) {
      if (part_.name.empty()) out_.line(o_.file + " is not there yet: starting afresh");
      return;
    }
    run_.resume(o_.file);
    const auto shared = [&](const char* name) { return pufferfish::detail::shared_fact(comm_, file, name); };
    if (const std::string ranks = shared("training.ranks"); ranks != std::to_string(comm_.size())) {
      out_.line(format("%s was saved on %s ranks, this run has %d: sums are added in another order",
                       o_.file.c_str(), ranks.c_str(), comm_.size()));
    }
    std::istringstream words(shared(digests_fact)), seconds(shared(processor_fact));
    for (std::string word; words >> word;) digests_.push_back(word);
    for (double value = 0.0; seconds >> value;) processor_.push_back(value);
    if (digests_.size() != run_.history().size()) {
      throw pufferfish::io_error(format("%s: %zu digests of parameters for %zu epochs", o_.file.c_str(),
                                        digests_.size(), run_.history().size()));
    }
    if (!processor_.empty()) {
      earlier_ = processor_.back();
      processor_.pop_back();
    }
    processor_.resize(digests_.size());
    if (part_.load) part_.load(shared(notes_fact));
    out_.line(format("going on from %s%s%s: epoch %td, step %td", o_.file.c_str(),
                     part_.name.empty() ? "" : ", ", part_.name.c_str(), run_.epoch() + 1,
                     run_.step_of_epoch()));
  }

  static constexpr const char* digests_fact = "examples.digests";
  static constexpr const char* processor_fact = "examples.processor";
  static constexpr const char* part_fact = "examples.part";
  static constexpr const char* notes_fact = "examples.notes";

  checkpoint_options o_;
  Run& run_;
  Comm& comm_;
  const console& out_;
  run_part part_;
  std::vector<std::string> digests_;
  std::vector<double> processor_;
  double mark_ = processor_now();  // start of the epoch, or of the process's part of it
  double earlier_ = 0.0;           // processor time of the epoch in earlier processes
};

}  // namespace examples
