// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Trains an image classifier, removes channels and trains the smaller network on: Early-Bird tickets, network
// slimming or filter norms, alone or on many ranks:
//   mpirun -n 4 build/examples/early_bird --dataset cifar10 --data DIR --model vgg19_lth --share 0.3,0.5,0.7
//     --train-share 0.5 --checkpoint bird.safetensors --resume --json bird.json --plot bird.svg

#include <cstdio>

#include "common/channel_search.hpp"
#include "common/image_training.hpp"
#include "common/progress.hpp"

namespace {

using namespace examples;
using nlohmann::ordered_json;
using pufferfish::channel_rule;
using pufferfish::group_choice;
using network = pufferfish::network<float>;

struct options : image_options {
  channel_search_options search;
  std::optional<double> train_share;
  bool reinit = false;
  std::optional<double> scale_sparsity, gamma_start;
  std::optional<index_t> fine_tune_epochs;
  std::optional<double> fine_tune_lr;

  bool early() const { return search.by == criterion::early_bird; }
  double sparsity() const {
    return scale_sparsity.value_or(search.by == criterion::filter_norms ? 0.0 : 1e-4);
  }
  double first_gamma() const {
    return gamma_start.value_or(search.by == criterion::filter_norms ? 1.0 : 0.5);
  }
  index_t epochs_after() const { return early() ? 0 : fine_tune_epochs.value_or(10); }
};

void add_options(CLI::App& app, options& o) {
  add_image_options(app, o, false, false,
                    {{"--distance", "--criterion", "early-bird"},
                     {"--masks", "--criterion", "early-bird"},
                     {"--latest", "--criterion", "early-bird"}});
  app.add_option("--share", o.search.shares, "Shares of the channels to remove, searched at once")
      ->check(CLI::Range(0.0, 1.0))
      ->delimiter(',');
  app.add_option("--train-share", o.train_share, "The share whose network is trained on")
      ->default_str("the first of --share");
  add_choice<criterion>(app, "--criterion", o.search.by,
                        {{criterion_names[0], criterion::early_bird},
                         {criterion_names[1], criterion::slimming},
                         {criterion_names[2], criterion::filter_norms}},
                        "Which channels go, and when. early-bird: small scales, once masks have settled; "
                        "slimming: small scales, after all epochs; filter-norms: small filters, likewise");
  app.add_option("--distance", o.search.masks.distance,
                 "Early-Bird: largest share of differing bits of masks that agree")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--masks", o.search.masks.masks, "Early-Bird: masks in a row that must agree")
      ->check(CLI::Range(2, 1000));
  app.add_option("--latest", o.search.masks.latest,
                 "Early-Bird: draw the ticket after this epoch if masks have not settled before; 0: no limit")
      ->check(CLI::Range(index_t{0}, index_t{1000000}));
  add_choice<channel_rule>(app, "--rule", o.search.masks.rule,
                           {{"exact", channel_rule::exact}, {"reference", channel_rule::reference}},
                           "Count of removed channels. exact: the share, rounded down; reference: as the "
                           "published program counts, whose first mask is drawn before training");
  add_choice<group_choice>(app, "--channels", o.search.masks.groups,
                           {{"inner", group_choice::normed}, {"select", group_choice::select}},
                           "Of residual networks. inner: those inside of blocks; select: also those that a "
                           "block's branch reads");
  add_choice<bool>(app, "--weights", o.reinit, {{"inherit", false}, {"reinit", true}},
                   "The smaller network goes on with its weights, or starts from new ones");
  app.add_option("--scale-sparsity", o.scale_sparsity,
                 "Weight of the sum of the batch norms' |weight| in the loss; 0: none")
      ->check(check_not_negative)
      ->default_str("0.0001; filter-norms: 0");
  app.add_option("--gamma-start", o.gamma_start, "Initial weights of batch norms")
      ->check(check_positive)
      ->default_str("0.5; filter-norms: 1");
  app.add_option("--fine-tune-epochs", o.fine_tune_epochs, "Slimming, filter-norms: epochs after the removal")
      ->check(CLI::Range(0, 1000000))
      ->default_str("10");
  app.add_option("--fine-tune-lr", o.fine_tune_lr, "Slimming, filter-norms: learning rate of these epochs")
      ->check(check_positive)
      ->default_str("a tenth of --lr");
  add_wire_options(app, o.exchange);
  add_file_options(app, o);
}

/// Throws value_error for options that do not go together. Returns the position of the share to train.
std::size_t check(const options& o) {
  for (auto at = o.search.shares.begin(); at != o.search.shares.end(); ++at) {
    if (std::find(o.search.shares.begin(), at, *at) == at) continue;
    throw pufferfish::value_error(format("--share has %g twice", *at));
  }
  if (o.early() && (o.fine_tune_epochs || o.fine_tune_lr)) {
    throw pufferfish::value_error(
        "--fine-tune-epochs and --fine-tune-lr have no effect with --criterion early-bird");
  }
  const double share = o.train_share.value_or(o.search.shares.front());
  const auto found = std::find(o.search.shares.begin(), o.search.shares.end(), share);
  if (found == o.search.shares.end()) {
    throw pufferfish::value_error(format("--train-share %g is none of --share", share));
  }
  return static_cast<std::size_t>(found - o.search.shares.begin());
}

/// The recipe of the training before the removal of channels.
pufferfish::training_options recipe(const options& o) {
  pufferfish::training_options t = dense_recipe(o);
  t.scale_sparsity = o.sparsity();
  return t;
}

/// The recipe of the training after it. `first_step`: that of an Early-Bird ticket, which goes on.
pufferfish::training_options recipe_after(const options& o, std::uint64_t first_step) {
  if (o.early()) {
    pufferfish::training_options t = recipe(o);
    t.first_step = first_step;
    return t;
  }
  image_options fine = o;
  fine.epochs = std::max<index_t>(1, o.epochs_after());
  fine.lr = o.fine_tune_lr.value_or(0.1 * o.lr);
  fine.milestones.clear();
  pufferfish::training_options t = dense_recipe(fine);
  t.epochs = o.epochs_after();
  return t;
}

void set_scales(network& net, double value) {
  for (const auto& entry : net.store().parameters()) {
    if (entry.thing->role() != pufferfish::parameter_role::norm || !entry.name.ends_with("weight")) continue;
    std::ranges::fill(entry.thing->values(), static_cast<float>(value));
  }
}

ordered_json options_json(const options& o, std::size_t trained, int ranks) {
  ordered_json j{{"data_set", o.data_set}, {"model", o.model}, {"epochs", o.epochs}};
  j.update(recipe_json(o, static_cast<double>(o.epochs), ranks));
  j.update({{"shares", o.search.shares},
            {"train_share", o.search.shares[trained]},
            {"criterion", criterion_names[static_cast<int>(o.search.by)]},
            {"distance", o.search.masks.distance},
            {"masks", o.search.masks.masks},
            {"latest", o.search.masks.latest},
            {"rule", o.search.masks.rule == channel_rule::exact ? "exact" : "reference"},
            {"channels", o.search.masks.groups == group_choice::select ? "select" : "inner"},
            {"weights", o.reinit ? "reinit" : "inherit"},
            {"scale_sparsity", o.sparsity()},
            {"gamma_start", o.first_gamma()},
            {"fine_tune_epochs", o.epochs_after()},
            {"fine_tune_lr", o.early() ? o.lr : o.fine_tune_lr.value_or(0.1 * o.lr)}});
  return j;
}

/// A search and the training of one ticket, on one of the ranks. The file FILE of --checkpoint has the run
/// before the removal of channels, FILE.train the one after it.
template <class Comm>
class job {
 public:
  job(const options& o, Comm& comm)
      : o_(o),
        trained_(check(o)),
        comm_(comm),
        set_(o, comm.rank()),
        left_(o.checkpoints),
        net_(fresh()),
        search_(o.search) {
    if (pufferfish::channel_groups(net_, o.search.masks.groups).empty()) {
      throw pufferfish::value_error(o.model.name +
                                    ": no convolution has a batch norm and channels that one layer reads");
    }
  }

  /// Returns the exit status.
  int run() {
    if (comm_.rank() == 0) {
      check_files(o_.checkpoints, {o_.json, o_.plot}, {o_.save});
      if (!left_.resume) check_new(train_file(), left_.overwrite, "--resume goes on from it, ");
    }
    if (!left_.file.empty() && !(left_.resume && is_there(comm_, left_.file)) && comm_.rank() == 0) {
      std::remove(left_.file.c_str());  // of an earlier search; one file is of no use without the other
      std::remove(train_file().c_str());
    }
    const signal_watch signals;
    run_end end = search();
    if (end.finished && ticket() && end.spend(left_)) end = train_on();
    if (comm_.rank() == 0) finish(end);
    return end.exit_status();
  }

 private:
  using run_type = pufferfish::procedure<float, Comm>;
  using kept_type = kept_run<run_type, Comm>;

  /// Shows the progress and draws masks.
  class observer final : public pufferfish::training_observer {
   public:
    observer(job& of, const run_type& run)
        : job_(of), run_(run), shown_(of.set_.out, of.o_.model.name, of.o_.batch) {}
    void on_step(const pufferfish::training_position& at) override { shown_.on_step(at); }
    void on_epoch(const pufferfish::epoch_result& epoch) override {
      shown_.on_epoch(epoch);
      job_.observe(run_, epoch.epoch + 1);
    }

   private:
    job& job_;
    const run_type& run_;
    progress shown_;
  };

  std::string train_file() const { return left_.file.empty() ? "" : left_.file + ".train"; }
  const channel_search::ticket_type& ticket() const { return search_.ticket(trained_); }

  network fresh() const {
    network net = set_.network_of(o_);
    set_scales(net, o_.first_gamma());
    return net;
  }
  run_type run_of(network net, const pufferfish::training_options& t) {
    return run_type(std::move(net), comm_, set_.data.train, set_.data.test, t, cpu_machine(o_, comm_));
  }
  run_type run_after(index_t steps_per_epoch) {
    return run_of(*small_, recipe_after(o_, static_cast<std::uint64_t>(ticket()->epoch * steps_per_epoch)));
  }
  kept_type kept_after(run_type& run) {
    checkpoint_options files = left_;
    files.file = train_file();
    files.resume = left_.resume && !found_now_;
    return kept_type(files, run, comm_, set_.out, {"training of the smaller network"});
  }

  run_end search() {
    run_type run = run_of(net_, recipe(o_));
    steps_ = run.steps_per_epoch();
    before_ = after_ = set_.costs_of(run.net(), run.exchange_bytes());
    set_.out.line(format("%s on %s: %s parameters, %s MACs; %s, %s each", o_.model.name.c_str(),
                         set_.data.name.c_str(), grouped(before_.parameters).c_str(),
                         grouped(before_.macs).c_str(), counted(comm_.size(), "rank").c_str(),
                         counted(threads_for(o_.threads, comm_.size()), "thread").c_str()));
    kept_type kept(left_, run, comm_, set_.out,
                   {"search", [this] { return notes(); }, [this](const std::string& text) { recall(text); }});
    run_end end;
    {
      observer shown(*this, run);
      if (o_.search.masks.rule == channel_rule::reference) observe(run, 0);
      end = kept.train(shown, [this] { return o_.early() && search_.complete(); });
    }
    if (end.finished && !o_.early()) {
      search_.choose(run.net(), o_.epochs);
      keep(run.net());
    }
    dense_ = kept.history(false, true);
    exchange_ = exchange_json(o_.exchange, run);
    digest_ = digest_text(run.net());
    if (ticket() && !small_) small_ = channel_search::sliced(net_, ticket());  // the values are in FILE.train
    return end;
  }

  /// Draws masks after an epoch. Keeps the smaller network when the ticket to train is found.
  void observe(const run_type& run, index_t epoch) {
    for (const std::size_t found : search_.observe(run.net(), epoch)) {
      set_.out.line(format("share %g: ticket after epoch %td", o_.search.shares[found], epoch));
      if (found != trained_) continue;
      keep(run.net());
      found_now_ = true;
      if (left_.file.empty()) continue;
      run_type after = run_after(run.steps_per_epoch());
      kept_after(after).save();
    }
  }

  void keep(const network& net) {
    small_ = channel_search::sliced(net, ticket());
    if (!o_.reinit) return;
    small_->initialize(o_.seed);
    set_scales(*small_, o_.first_gamma());
  }

  run_end train_on() {
    if (o_.early() && !found_now_ && !is_there(comm_, train_file())) {
      throw pufferfish::io_error(train_file() + ": is missing, and " + left_.file +
                                 " is of no use without it");
    }
    run_type run = run_after(steps_);
    kept_type kept = kept_after(run);
    run_end end;
    {
      progress shown(set_.out, o_.model.name + " sliced", o_.batch);
      end = kept.train(shown);
    }
    after_ = set_.costs_of(run.net(), run.exchange_bytes());
    small_epochs_ = kept.history(false, true);
    for (ordered_json& epoch : small_epochs_) {
      if (!o_.early()) epoch["epoch"] = epoch["epoch"].template get<index_t>() + o_.epochs;
    }
    exchange_ = exchange_json(o_.exchange, run);
    digest_ = digest_text(run.net());
    if (!end.finished) return end;
    if (run.history().empty()) tested_ = run.test();
    if (comm_.rank() == 0 && !o_.save.empty()) {
      save_model(o_.save, run.net(),
                 set_.card_of(o_, run.normalize(), criterion_names[static_cast<int>(o_.search.by)]));
    }
    return end;
  }

  std::string notes() const {
    return ordered_json{{"options", options_json(o_, trained_, comm_.size())}, {"search", search_.state()}}
        .dump();
  }
  void recall(const std::string& text) {
    const ordered_json j = ordered_json::parse(text);
    check_same_options(left_.file, j.at("options"), options_json(o_, trained_, comm_.size()));
    search_.restore(j.at("search"), left_.file);
  }

  void finish(const run_end& end) const {
    const auto last = static_cast<std::size_t>(ticket() ? ticket()->epoch : o_.epochs);
    ordered_json path = ordered_json::array(), rest = path;
    for (std::size_t e = 0; e < dense_.size(); ++e) (e < last ? path : rest).push_back(dense_[e]);
    for (const ordered_json& epoch : small_epochs_) path.push_back(epoch);
    const ordered_json shares = search_.report(net_, set_.image);
    ordered_json j{{"options", options_json(o_, trained_, comm_.size())}, {"accuracy", nullptr}};
    if (!path.empty()) j["accuracy"] = path.back()["test_accuracy"];
    if (tested_) j["accuracy"] = tested_->accuracy();
    if (end.finished) {
      set_.out.write("\n" + channel_search::table(shares) + "\n");
      set_.out.line(format("test accuracy %.2f %%; %s parameters, %s MACs, %s bytes a step%s",
                           j["accuracy"].get<double>(), grouped(after_.parameters).c_str(),
                           grouped(after_.macs).c_str(), grouped(after_.bytes_per_step).c_str(),
                           ticket() ? "" : "; no ticket was found"));
    }
    j.update({{"before", examples::to_json(before_)},
              {"after", examples::to_json(after_)},
              {"ticket", ticket() ? shares[trained_] : ordered_json()},
              {"epochs", path.size()},
              {"seconds", sum_of(path, "seconds")},
              {"processor_seconds", sum_of(path, "processor_seconds")},
              {"digest", digest_},
              {"exchange", exchange_}});
    j.update(end.to_json());
    j.update({{"shares", shares}, {"history", path}, {"further_search", rest}});
    write_json(o_.json, j);
    const std::string drawn = plot_curves(o_.plot, o_.model.name + " on " + set_.data.name, {curve_of(path)});
    if (!drawn.empty()) set_.out.line(drawn);
  }

  curve curve_of(const ordered_json& path) const {
    curve c;
    c.name =
        format("%s, share %g", criterion_names[static_cast<int>(o_.search.by)], o_.search.shares[trained_]);
    c.event = "sliced";
    if (ticket()) c.switch_epoch = static_cast<double>(ticket()->epoch);
    for (const ordered_json& epoch : path) {
      const auto sum = [](const std::vector<double>& so_far) { return so_far.empty() ? 0.0 : so_far.back(); };
      c.accuracy.push_back(epoch["test_accuracy"]);
      c.loss.push_back(epoch["test_loss"]);
      c.seconds.push_back(sum(c.seconds) + epoch["seconds"].get<double>());
      c.bytes.push_back(sum(c.bytes) + static_cast<double>(steps_) * epoch["bytes_per_step"].get<double>());
    }
    return c;
  }

  const options& o_;
  std::size_t trained_;  // position of the share to train
  Comm& comm_;
  image_setting set_;
  checkpoint_options left_;  // with the steps that --stop-after leaves
  network net_;              // as it was before training
  channel_search search_;
  std::optional<network> small_;
  bool found_now_ = false;  // the ticket to train was found by this process, so small_ has its values
  index_t steps_ = 0;       // an epoch
  costs before_, after_;
  ordered_json dense_ = ordered_json::array(), small_epochs_ = ordered_json::array(), exchange_, digest_;
  std::optional<pufferfish::evaluation> tested_;
};

}  // namespace

int main(int argc, char** argv) {
  options o;
  CLI::App app("Finds a smaller image classifier by removing channels, and trains it on", "early_bird");
  add_options(app, o);
  return run(app, argc, argv, [&](auto& comm) { return job<std::decay_t<decltype(comm)>>(o, comm).run(); });
}
