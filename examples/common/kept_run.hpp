// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// A training run with checkpoints: runs until its end or a request to stop, and resumes from a file.

#include <exception>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <pufferfish/train/checkpoint.hpp>
#include <pufferfish/train/rank_states.hpp>

#include "console.hpp"
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
  app.add_option("--stop-after", o.stop_after, "Stop after so many steps, with a checkpoint; 0: at the end")
      ->needs(file);
  app.add_flag("--overwrite", o.overwrite, "Replace files of checkpoints and weights that exist already");
}

/// How a run ended.
struct run_end {
  bool finished = false;        ///< all epochs are trained
  int signal = 0;               ///< the signal that ended it; 0: none
  std::exception_ptr diverged;  ///< the error of a run that diverged

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
  kept_run(const checkpoint_options& o, Run& run, Comm& comm, const console& out)
      : o_(o), run_(run), comm_(comm), out_(out) {}

  /// The parameters' digest after each epoch.
  const std::vector<std::string>& digests() const { return digests_; }

  /// Resumes from the checkpoint if requested, then trains to the end or until it must stop: after the steps
  /// of --stop-after, or after the step during which any rank received SIGINT or SIGTERM. If ranks are lost,
  /// one of the other ranks saves the run alone, in a file named after the checkpoint's.
  run_end train(pufferfish::training_observer& shown) {
    rescuer observer(shown, *this);
    const signal_watch signals;
    if (o_.resume) resume();
    try {
      for (std::uint64_t step = 1; !run_.finished(); ++step) {
        if (signals.caught() > 0) run_.request_stop(signals.caught());
        run_.advance(observer);
        const bool epoch_ended = run_.step_of_epoch() == 0;
        if (epoch_ended) digests_.push_back(digest_text(run_.net()));
        const bool stop = step == o_.stop_after || run_.stop_reason() > 0;
        const bool due = o_.every == 0 ? epoch_ended : run_.total_steps() % o_.every == 0;
        if (!o_.file.empty() && (due || stop || run_.finished())) save(observer);
        if (stop && !run_.finished()) {
          out_.line(format("%s in epoch %td after %td steps of it; %s",
                           run_.stop_reason() > 0 ? "interrupted" : "stopped", run_.epoch() + 1,
                           run_.step_of_epoch(),
                           o_.file.empty() ? "nothing is kept without --checkpoint" : "--resume goes on"));
          return {false, run_.stop_reason(), nullptr};
        }
      }
    } catch (const pufferfish::divergence_error&) {
      return {false, 0, std::current_exception()};
    }
    return {true, 0, nullptr};
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

  std::map<std::string, std::string> facts() const {
    std::string digests;
    for (const std::string& digest : digests_) digests += digest + " ";
    return {{digests_fact, digests}};
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
      std::fprintf(stderr, "rank %d has saved the run by itself: --checkpoint %s --resume goes on\n",
                   comm_.rank(), path.c_str());
    } catch (const std::exception& e) {
      std::fprintf(stderr, "rank %d could not save the run by itself: %s\n", comm_.rank(), e.what());
    }
  }

  /// All ranks do what rank 0 decides.
  void resume() {
    std::int32_t there[1] = {pufferfish::detail::is_regular_file(o_.file) ? 1 : 0};
    comm_.broadcast(std::span<std::int32_t>(there), 0);
    if (there[0] == 0) {
      out_.line(o_.file + " is not there yet: starting afresh");
      return;
    }
    run_.resume(o_.file);
    std::istringstream words(pufferfish::detail::on_root(comm_, [&] {
      const pufferfish::checkpoint_file file = pufferfish::open_checkpoint(o_.file);
      if (const std::string& ranks = file.fact("training.ranks"); ranks != std::to_string(comm_.size())) {
        out_.line(format("%s was saved on %s ranks, this run has %d: sums are added in another order",
                         o_.file.c_str(), ranks.c_str(), comm_.size()));
      }
      return file.fact(digests_fact);
    }));
    for (std::string word; words >> word;) digests_.push_back(word);
    out_.line(format("going on from %s: epoch %td, step %td", o_.file.c_str(), run_.epoch() + 1,
                     run_.step_of_epoch()));
  }

  static constexpr const char* digests_fact = "examples.digests";

  const checkpoint_options& o_;
  Run& run_;
  Comm& comm_;
  const console& out_;
  std::vector<std::string> digests_;
};

}  // namespace examples
