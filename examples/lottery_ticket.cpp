// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Searches for lottery tickets of an image classifier: iterative magnitude pruning with rewinding, alone or
// on many ranks:
//   mpirun -n 4 build/examples/lottery_ticket --dataset cifar10 --data DIR --model vgg19_lth --target 8107466
//     --checkpoint tickets.safetensors --resume --json tickets.json --plot tickets.svg

#include <cstdio>

#include <pufferfish/train/lottery_file.hpp>

#include "common/image_training.hpp"
#include "common/progress.hpp"

namespace {

using namespace examples;
using nlohmann::ordered_json;
using pufferfish::lottery_rule;

struct options : image_options {
  double share = 0.2;
  lottery_rule rule = lottery_rule::exact;
  std::vector<std::string> unpruned;
  std::uint64_t rewind_step = 0;
  std::optional<int> levels;
  index_t target = 0;
};

void add_options(CLI::App& app, options& o) {
  add_image_options(app, o, false);
  app.add_option("--share", o.share, "Share of the remaining weights that a level removes")
      ->check(CLI::Range(0.0, 1.0));
  add_choice<lottery_rule>(
      app, "--rule", o.rule, {{"exact", lottery_rule::exact}, {"reference", lottery_rule::reference}},
      "Count of removed weights. exact: the share, rounded up; reference: as the published program counts");
  app.add_option("--unpruned", o.unpruned, "Layers that keep all weights; none: all layers are pruned")
      ->delimiter(',')
      ->default_str("the last layer");
  app.add_option("--rewind-step", o.rewind_step,
                 "Step of a dense run from whose values the levels start; 0: from the initial values");
  app.add_option("--levels", o.levels, "Number of the last level; level 0 is dense")
      ->check(CLI::Range(0, 1000))
      ->default_str("as --target says");
  app.add_option("--target", o.target, "Parameters at or below which a level is the last; 0: no limit")
      ->check(CLI::Range(index_t{0}, std::numeric_limits<index_t>::max()));
  add_file_options(app, o);
}

pufferfish::lottery_options search_of(const options& o, const pufferfish::network<float>& net) {
  pufferfish::lottery_options search{o.share, o.rule, o.unpruned, o.target};
  if (o.unpruned.empty()) {
    const auto rows = pufferfish::weight_mask(net.store()).report().rows;
    std::string last;
    net.for_each_layer([&](const std::string& name, const auto&) {
      if (std::ranges::any_of(rows, [&](const auto& row) { return row.name == name + ".weight"; }))
        last = name;
    });
    search.unpruned = {last};
  } else if (o.unpruned == std::vector<std::string>{"none"}) {
    search.unpruned.clear();
  }
  return search;
}

/// Throws value_error if the search would not end.
void check_end(const options& o, const pufferfish::lottery<float>& tickets) {
  if (!o.levels && o.target == 0)
    throw pufferfish::value_error("--levels or --target must say where to stop");
  const index_t least = tickets.parameters() - tickets.mask()->kept();
  if (o.target > 0 && o.target < least) {
    throw pufferfish::value_error(format("--target %td: %td parameters are never pruned", o.target, least));
  }
  if (!o.levels && o.share == 0.0 && !tickets.finished()) {
    throw pufferfish::value_error("--share 0 removes nothing, so --target is never reached");
  }
}

ordered_json options_json(const options& o, const pufferfish::lottery_options& search, int ranks) {
  ordered_json j{{"data_set", o.data_set}, {"model", o.model}, {"epochs", o.epochs}};
  j.update(recipe_json(o, static_cast<double>(o.epochs), ranks));
  j["share"] = o.share;
  j["rule"] = o.rule == lottery_rule::exact ? "exact" : "reference";
  j["unpruned"] = search.unpruned;
  j["rewind_step"] = o.rewind_step;
  j["levels"] = nullptr;
  if (o.levels) j["levels"] = *o.levels;
  j["target"] = o.target;
  return j;
}

/// A search with its checkpoints, on one of the ranks. The file FILE of --checkpoint has the state between
/// two levels, FILE.level that of the level's run.
template <class Comm>
class job {
 public:
  job(const options& o, Comm& comm)
      : o_(o),
        comm_(comm),
        set_(o, comm.rank()),
        left_(o.checkpoints),
        net_(set_.network_of(o)),
        search_(search_of(o, net_)),
        options_json_(options_json(o, search_, comm.size())) {
    check_end(o, pufferfish::lottery<float>(net_.store(), search_));
  }

  /// Returns the exit status.
  int run() {
    if (comm_.rank() == 0) {
      check_files(o_.checkpoints, {o_.json, o_.plot}, {o_.save});
      if (!left_.resume) check_new(level_file(), left_.overwrite, "--resume goes on from it, ");
    }
    const signal_watch signals;
    const run_end end = search();
    if (comm_.rank() == 0) finish(end);
    return end.exit_status();
  }

 private:
  using run_type = pufferfish::procedure<float, Comm>;
  using kept_type = kept_run<run_type, Comm>;

  std::string level_file() const { return left_.file.empty() ? "" : left_.file + ".level"; }

  run_end search() {
    run_end end = begin();
    while (end.finished && end.spend(left_)) {
      if (o_.levels && tickets_->level() > *o_.levels && !is_trained()) break;  // FILE is of a longer search
      end = train_level();
      if (is_last()) break;
    }
    return end;
  }

  bool is_trained() const { return tickets_->rows().size() > static_cast<std::size_t>(tickets_->level()); }
  /// Whether the current level is trained and no other one follows.
  bool is_last() const {
    return is_trained() && ((o_.levels && tickets_->level() >= *o_.levels) || tickets_->finished());
  }

  /// Makes the tickets: from the file, from the initial values or from a dense run to the step of rewinding.
  run_end begin() {
    if (left_.resume && is_there(comm_, left_.file)) {
      pufferfish::detail::on_root(comm_, [this] {
        const pufferfish::checkpoint_file file = pufferfish::open_checkpoint(left_.file);
        const ordered_json notes = ordered_json::parse(file.fact(notes_fact));
        check_same_options(left_.file, notes.at("options"), options_json_);
        start_ = notes.at("start");
        levels_ = notes.at("levels");
        return std::string();
      });
      tickets_.emplace(pufferfish::load_lottery(left_.file, net_, search_, comm_));
      set_.out.line(format("going on from %s: level %d", left_.file.c_str(), tickets_->level()));
      print_head();
      for (const ordered_json& level : levels_) print(level);
      return {.finished = true};
    }
    run_end end{.finished = true};
    if (o_.rewind_step == 0) {
      tickets_.emplace(net_.store(), search_);
    } else {
      end = run_to_start();
    }
    if (!end.finished) return end;
    save();
    print_head();
    return end;
  }

  pufferfish::training_options level_options() const {
    pufferfish::training_options t = dense_recipe(o_);
    if (tickets_) t.first_step = tickets_->step();
    if (tickets_ && tickets_->level() > 0) t.pruning.emplace().mask = tickets_->mask();
    return t;
  }
  run_type run_of(pufferfish::network<float> net) {
    return run_type(std::move(net), comm_, set_.data.train, set_.data.test, level_options(),
                    cpu_machine(o_, comm_));
  }
  kept_type kept_of(run_type& run, const std::string& part) {
    checkpoint_options files = left_;
    files.file = level_file();
    return kept_type(files, run, comm_, set_.out, {part});
  }

  run_end run_to_start() {
    run_type run = run_of(net_);
    const auto all = static_cast<std::uint64_t>(o_.epochs * run.steps_per_epoch());
    if (o_.rewind_step >= all) {
      throw pufferfish::value_error(format("--rewind-step %ju: a level has %ju steps",
                                           std::uintmax_t{o_.rewind_step}, std::uintmax_t{all}));
    }
    kept_type kept = kept_of(run, "dense run to the step of rewinding");
    run_end end;
    {
      progress shown(set_.out, o_.model.name, o_.batch);
      end = kept.train(shown, [&] { return run.total_steps() >= o_.rewind_step; });
    }
    start_ = summary(run, kept, run.total_steps());
    if (!end.finished) return end;
    run.synchronize();
    net_ = run.net();
    tickets_.emplace(net_.store(), search_, o_.rewind_step);
    return end;
  }

  run_end train_level() {
    pufferfish::network<float> net = net_;
    pufferfish::cpu_context ctx(cpu_machine(o_, comm_));
    tickets_->rewind(ctx, net.store());
    run_type run = run_of(std::move(net));
    const std::string name = "level " + std::to_string(tickets_->level());
    kept_type kept = kept_of(run, name);
    run_end end;
    {
      progress shown(set_.out, o_.model.name + " " + name, o_.batch);
      end = kept.train(shown);
    }
    unfinished_ = level_json(run, kept);
    if (!end.finished) return end;
    if (!is_trained()) add_row();
    const bool last = is_last();
    if (last && comm_.rank() == 0 && !o_.save.empty()) {
      save_model(o_.save, run.net(), set_.card_of(o_, run.normalize(), "lottery ticket"));
    }
    if (!last) tickets_->prune(run.net().store());
    save(!last);
    return end;
  }

  /// What a run has cost, with its epochs.
  static ordered_json summary(const run_type& run, const kept_type& kept, std::uint64_t steps) {
    const ordered_json history = kept.history(false, true);
    return {{"steps", steps},
            {"epochs", static_cast<double>(steps) / static_cast<double>(run.steps_per_epoch())},
            {"seconds", sum_of(history, "seconds")},
            {"processor_seconds", sum_of(history, "processor_seconds") + kept.processor_seconds_since()},
            {"digest", digest_text(run.net())},
            {"history", history}};
  }

  /// The row of the current level; its costs are those of all runs so far.
  ordered_json level_json(const run_type& run, const kept_type& kept) const {
    const pufferfish::lottery_row row = tickets_->new_row();
    ordered_json j{{"level", row.level},
                   {"kept", row.kept},
                   {"parameters", row.parameters},
                   {"macs", run.net().macs(set_.image)},
                   {"dense_bytes", row.dense_bytes},
                   {"bytes", row.bytes},
                   {"accuracy", nullptr}};
    if (!run.history().empty()) j["accuracy"] = run.history().back().test_accuracy;
    j.update(summary(run, kept, run.total_steps() - tickets_->step()));
    const ordered_json& before = levels_.empty() ? start_ : levels_.back();
    if (before.is_null()) return j;
    for (const char* const name : {"steps", "epochs", "seconds", "processor_seconds"}) {
      j[name] = before.at(name).is_number_integer()
                    ? ordered_json(before.at(name).get<std::uint64_t>() + j.at(name).get<std::uint64_t>())
                    : ordered_json(before.at(name).get<double>() + j.at(name).get<double>());
    }
    return j;
  }

  void add_row() {
    pufferfish::lottery_row row = tickets_->new_row();
    row.accuracy = unfinished_.at("accuracy").get<double>();
    row.epochs = std::llround(unfinished_.at("epochs").get<double>());
    row.seconds = unfinished_.at("seconds").get<double>();
    tickets_->add(row);
    levels_.push_back(unfinished_);
    print(unfinished_);
  }

  /// Writes the state between two levels. Afterwards the level's own file is of no use, except after the
  /// last.
  void save(bool drop_level = true) {
    if (left_.file.empty()) return;
    pufferfish::detail::on_root(comm_, [&] {
      const ordered_json notes{{"options", options_json_}, {"start", start_}, {"levels", levels_}};
      pufferfish::save_lottery(left_.file, net_, *tickets_, {{notes_fact, notes.dump()}});
      if (drop_level) std::remove(level_file().c_str());
      return std::string();
    });
  }

  void print_head() const {
    set_.out.line(format("%5s %12s %12s %14s %12s %12s %9s %9s %9s", "level", "kept", "parameters", "MACs",
                         "dense bytes", "bytes/step", "accuracy", "epochs", "seconds"));
  }
  void print(const ordered_json& level) const {
    const auto whole = [&](const char* name) { return grouped(level.at(name).get<index_t>()); };
    const auto real = [&](const char* name) { return level.at(name).get<double>(); };
    set_.out.line(format("%5d %12s %12s %14s %12s %12s %9.2f %9.4g %9.1f", level.at("level").get<int>(),
                         whole("kept").c_str(), whole("parameters").c_str(), whole("macs").c_str(),
                         whole("dense_bytes").c_str(), whole("bytes").c_str(), real("accuracy"),
                         real("epochs"), real("seconds")));
  }

  void finish(const run_end& end) const {
    ordered_json levels = levels_;
    if (!end.finished && !unfinished_.is_null() && levels.size() == unfinished_.at("level")) {
      levels.push_back(unfinished_);
    }
    ordered_json j{{"options", options_json_}, {"start", start_}};
    for (const char* const name :
         {"accuracy", "parameters", "epochs", "seconds", "processor_seconds", "digest"}) {
      j[name] = levels.empty() ? ordered_json() : levels.back().at(name);
    }
    j.update(end.to_json());
    j["levels"] = levels;
    write_json(o_.json, j);
    plotting::labelled_points points{o_.model.name + ", by level", {}, {}, {}};
    for (const ordered_json& level : levels_) {
      points.x.push_back(level.at("parameters").get<double>());
      points.y.push_back(level.at("accuracy").get<double>());
      points.labels.push_back(level.at("level").dump());
    }
    const std::string drawn = plot_sizes(o_.plot, "Lottery tickets on " + set_.data.name, points);
    if (!drawn.empty()) set_.out.line(drawn);
  }

  static constexpr const char* notes_fact = "examples.lottery";

  const options& o_;
  Comm& comm_;
  image_setting set_;
  checkpoint_options left_;  // with the steps that --stop-after leaves
  pufferfish::network<float> net_;
  pufferfish::lottery_options search_;
  ordered_json options_json_;
  std::optional<pufferfish::lottery<float>> tickets_;
  ordered_json start_;                           // the dense run to the step of rewinding; null without it
  ordered_json levels_ = ordered_json::array();  // finished ones; complete on rank 0 only
  ordered_json unfinished_;
};

}  // namespace

int main(int argc, char** argv) {
  options o;
  CLI::App app("Searches for lottery tickets of an image classifier", "lottery_ticket");
  add_options(app, o);
  return run(app, argc, argv, [&](auto& comm) { return job<std::decay_t<decltype(comm)>>(o, comm).run(); });
}
