// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// A training run with checkpoints: steps it to its end or until it is to stop, and goes on from a file.

#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <pufferfish/train/checkpoint.hpp>

#include "console.hpp"
#include "report.hpp"

namespace examples {

struct checkpoint_options {
  std::string file;
  std::uint64_t every = 0;
  bool resume = false;
  std::uint64_t stop_after = 0;
};

inline void add_checkpoint_options(CLI::App& app, checkpoint_options& o) {
  CLI::Option* file = app.add_option("--checkpoint", o.file, "File to go on from");
  app.add_option("--checkpoint-every", o.every, "Steps between checkpoints; 0: one an epoch")->needs(file);
  app.add_flag("--resume", o.resume, "Go on from the checkpoint, if it is there")->needs(file);
  app.add_option("--stop-after", o.stop_after, "Stop after so many steps, with a checkpoint; 0: at the end")
      ->needs(file);
}

/// Run: a pufferfish::training_run. Collective, as its members are.
template <class Run, class Comm>
class kept_run {
 public:
  kept_run(const checkpoint_options& o, Run& run, Comm& comm, const console& out)
      : o_(o), run_(run), comm_(comm), out_(out) {}

  /// The parameters' digest after every epoch.
  const std::vector<std::string>& digests() const { return digests_; }

  /// Goes on from the checkpoint if that is asked for, then trains to the end (true) or until it is to stop.
  bool train(pufferfish::training_observer& observer) {
    if (o_.resume) resume();
    for (std::uint64_t step = 1; !run_.finished(); ++step) {
      run_.advance(observer);
      const bool epoch_ended = run_.step_of_epoch() == 0;
      if (epoch_ended) digests_.push_back(digest_text(run_.net()));
      const bool stop = step == o_.stop_after;
      const bool due = o_.every == 0 ? epoch_ended : run_.total_steps() % o_.every == 0;
      if (!o_.file.empty() && (due || stop || run_.finished())) save();
      if (stop && !run_.finished()) {
        out_.line(format("stopped in epoch %td after %td steps of it; --resume goes on", run_.epoch() + 1,
                         run_.step_of_epoch()));
        return false;
      }
    }
    return true;
  }

 private:
  void save() {
    std::string digests;
    for (const std::string& digest : digests_) digests += digest + " ";
    run_.save(o_.file, {{digests_fact, digests}});
  }

  /// All ranks go by what rank 0 sees.
  void resume() {
    std::int32_t there[1] = {pufferfish::detail::is_regular_file(o_.file) ? 1 : 0};
    comm_.broadcast(std::span<std::int32_t>(there), 0);
    if (there[0] == 0) {
      out_.line(o_.file + " is not there yet: starting afresh");
      return;
    }
    run_.resume(o_.file);
    if (comm_.rank() == 0) {
      std::istringstream words(pufferfish::open_checkpoint(o_.file).fact(digests_fact));
      for (std::string word; words >> word;) digests_.push_back(word);
    }
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
