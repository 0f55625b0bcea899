// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The options that the training examples share, and their translation to the library's options.

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include <pufferfish/core/number_text.hpp>
#include <pufferfish/train/procedure.hpp>

#include "add_choice.hpp"
#include "console.hpp"
#include "data.hpp"
#include "device.hpp"
#include "exchange_choice.hpp"
#include "models.hpp"
#include "plot.hpp"
#include "session.hpp"
#include "text.hpp"

namespace examples {

/// The number in a text; NaN for any other text.
inline double to_number(const std::string& text) {
  double value = 0.0;
  return pufferfish::detail::read_number(text, value) && std::isfinite(value) ? value : std::nan("");
}

/// Checks for options: an error message, or an empty text.
inline std::string check_positive(const std::string& given) {
  return to_number(given) > 0.0 ? "" : given + " is not a positive number";
}
inline std::string check_not_negative(const std::string& given) {
  return to_number(given) >= 0.0 ? "" : given + " is not a number from 0 on";
}

/// An option that has an effect only with one value of another option, or with one of two.
struct option_use {
  const char* option;
  const char* other;
  const char* value;
  const char* or_value = nullptr;
};

/// Rejects command lines with options that would have no effect. Call it once per program.
inline void refuse_without_effect(CLI::App& app, const std::vector<option_use>& uses) {
  app.parse_complete_callback([&app, uses] {
    for (const option_use& use : uses) {
      const auto value = app.get_option(use.other)->as<std::string>();
      if (app.count(use.option) == 0 || value == use.value) continue;
      if (use.or_value != nullptr && value == use.or_value) continue;
      throw CLI::ValidationError(
          use.option, std::string("has no effect with ") + use.other + " " + value + ", only with " +
                          use.other + " " + use.value +
                          (use.or_value == nullptr ? std::string() : std::string(" or ") + use.or_value));
    }
  });
}

/// Options of every program that trains.
struct common_options {
  std::string data;
  std::string json;
  std::string plot;
  progress_style progress = progress_style::automatic;
  int threads = 0;
  device_choice device;  // for programs that add its options
  index_t epochs = 20;
  index_t warmup_epochs = 5;
  index_t batch = 128;
  double lr = 0.1;
  index_t divergence_steps = pufferfish::run_options{}.divergence_steps;
};

/// Help texts of the common options whose meaning depends on the program.
struct common_texts {
  const char* data;
  const char* batch;
  const char* rate = "Learning rate";
  bool switches = true;  ///< false: the program never switches to low rank
};

/// Adds the options. The values of the fields at the call are the defaults that the help shows.
inline void add_common_options(CLI::App& app, common_options& o, const common_texts& texts) {
  app.option_defaults()->always_capture_default();
  app.add_option("--data", o.data, texts.data);
  app.add_option("--epochs", o.epochs, "Epochs in all")->check(CLI::Range(1, 1000000));
  if (texts.switches) {
    app.add_option("--warmup-epochs", o.warmup_epochs, "Dense epochs before the switch (hybrid)")
        ->check(CLI::Range(0, 1000000));
  }
  app.add_option("--batch", o.batch, texts.batch)->check(CLI::Range(1, 1000000));
  app.add_option("--lr", o.lr, texts.rate)->check(check_positive);
  app.add_option("--divergence-steps", o.divergence_steps,
                 "Steps in a row without a finite loss after which the run ends; 0: it goes on")
      ->check(CLI::Range(0, 1000000));
  app.add_option("--threads", o.threads, "Threads a rank; 0: the cores, divided by the ranks")
      ->check(CLI::Range(0, 4096));
  app.add_option("--json", o.json, "Write results to this file; - is standard output")->take_last();
  app.add_option("--plot", o.plot, "Draw the curves to this file, .svg or .png (needs gnuplot)")
      ->check(check_plot_name)
      ->take_last();
  add_choice<progress_style>(app, "--progress", o.progress,
                             {{"auto", progress_style::automatic},
                              {"bar", progress_style::bar},
                              {"lines", progress_style::lines},
                              {"none", progress_style::none}},
                             "How progress shows; auto: a bar on a terminal")
      ->take_last();
}

/// What the switch preserves: the weights at a rank ratio (Wang et al.), the outputs, or the loss; or stable
/// ranks, which also choose the time and the layers of the switch (Wang et al., Cuttlefish). The default, no
/// value, preserves the loss at the rank ratio.
enum class switch_policy { paper, data_aware, two_sided, cuttlefish };

/// Published settings of Cuttlefish.
enum class cuttlefish_preset { cifar, resnet50, deit };

/// Options of Cuttlefish. Without a value, those of the preset.
struct cuttlefish_choice {
  cuttlefish_preset preset = cuttlefish_preset::cifar;
  std::optional<index_t> window = {}, mean = {};
  std::optional<double> tolerance = {};
  bool floored = false;
  double least_gain = 0.0;

  bool any() const {
    return preset != cuttlefish_preset::cifar || window || mean || tolerance || floored || least_gain > 0.0;
  }
  /// Without an option, the mean is over at most the derivatives that the window has.
  pufferfish::cuttlefish_options options() const {
    using published = pufferfish::cuttlefish_options;
    published result = preset == cuttlefish_preset::cifar      ? published::cifar()
                       : preset == cuttlefish_preset::resnet50 ? published::resnet50()
                                                               : published::deit();
    result.window = window.value_or(result.window);
    result.mean_of = mean.value_or(std::min(result.mean_of, result.window + 1));
    result.tolerance = tolerance.value_or(result.tolerance);
    return result;
  }
};

/// How a program switches from dense to low rank.
struct procedure_options {
  pufferfish::training_mode mode = pufferfish::training_mode::hybrid;
  double rank_ratio = 0.25;
  double switch_rate = 1.0;
  bool restart = false;
  std::optional<switch_policy> policy = {};
  std::optional<pufferfish::truncation> truncation = {};  // empty: by the policy
  bool uniform_ranks = false;
  std::optional<double> budget = {}, mac_budget = {};  // shares of parameters and multiply-adds
  std::optional<double> ms_budget = {};
  std::optional<index_t> byte_budget = {};
  bool by_predicted_loss = false;  // time of the switch
  cuttlefish_choice cuttlefish = {};
  pufferfish::switch_options switching = {};
  bool explain = false;
  bool factorize_embeddings = false;  // for programs that add its options
  std::optional<index_t> embedding_rank = {};

  bool low_rank_embeddings() const { return factorize_embeddings || embedding_rank.has_value(); }
  bool shares_ranks() const {
    return !uniform_ranks && (policy == switch_policy::data_aware || policy == switch_policy::two_sided);
  }
};

inline void add_cuttlefish_options(CLI::App& app, cuttlefish_choice& o) {
  add_choice<cuttlefish_preset>(app, "--cuttlefish-preset", o.preset,
                                {{"cifar", cuttlefish_preset::cifar},
                                 {"resnet50", cuttlefish_preset::resnet50},
                                 {"deit", cuttlefish_preset::deit}},
                                "Cuttlefish: published settings of the options below, and its least ranks");
  app.add_option("--cuttlefish-window", o.window,
                 "Cuttlefish: N, the first epoch (from 0) at which stable ranks may have settled; the switch "
                 "is then after N + 1 epochs, if --warmup-epochs is larger than N")
      ->check(CLI::Range(1, 1000000))
      ->default_str("15; resnet50, deit: 5");
  app.add_option("--cuttlefish-mean", o.mean, "Cuttlefish: M, derivatives in a mean; at most N + 1")
      ->check(CLI::Range(1, 1000000))
      ->default_str("11; resnet50, deit: 5");
  app.add_option("--cuttlefish-tolerance", o.tolerance,
                 "Cuttlefish: EPS, the mean derivative at which a layer has settled")
      ->check(check_positive)
      ->default_str("0.1; resnet50: 0.33; deit: 0.411");
  app.add_flag("--cuttlefish-floored", o.floored, "Cuttlefish: round stable ranks down, as its code does");
  app.add_option("--least-gain", o.least_gain,
                 "Cuttlefish: only stages that low rank makes this many times as fast, as measured at the "
                 "start; 1.5 in its paper, 0: no measurement")
      ->check(check_not_negative);
}

/// Options of the switch and of what follows it, for experiments.
inline void add_switch_options(CLI::App& app, procedure_options& o) {
  using pufferfish::truncation;
  add_choice<std::optional<truncation>>(app, "--truncation", o.truncation,
                                        {{"by the policy", std::nullopt},
                                         {"plain", truncation::plain},
                                         {"data-aware", truncation::data_aware},
                                         {"two-sided", truncation::two_sided}},
                                        "What the factors keep as much of as they can");
  app.add_flag("--uniform-ranks", o.uniform_ranks, "Each layer has the rank of --rank-ratio");
  app.add_option("--budget", o.budget, "In place of --rank-ratio: share of the dense network's parameters")
      ->check(CLI::Range(1e-6, 1.0))
      ->default_str("none");
  app.add_option("--mac-budget", o.mac_budget,
                 "In place of --rank-ratio: share of the dense network's multiply-adds")
      ->check(CLI::Range(1e-6, 1.0))
      ->default_str("none");
  app.add_option(
         "--ms-budget", o.ms_budget,
         "In place of --rank-ratio: milliseconds of a step in these layers, as measured at the switch")
      ->check(check_positive)
      ->default_str("none");
  app.add_option("--byte-budget", o.byte_budget,
                 "In place of --rank-ratio: bytes of gradients in a step, 4 for each parameter")
      ->check(CLI::Range(index_t{1}, std::numeric_limits<index_t>::max()))
      ->default_str("none");
  app.add_option("--statistics-steps", o.switching.statistics_steps,
                 "Last dense steps that the switch goes by, at most those of an epoch; 0: 20, or none if the "
                 "policy needs none")
      ->check(CLI::Range(0, 1000000));
  add_choice<bool>(app, "--switch-when", o.by_predicted_loss, {{"epoch", false}, {"predicted-loss", true}},
                   "Switch after --warmup-epochs, or once the loss that it is to cost has stopped falling, "
                   "--warmup-epochs at the latest");
  add_cuttlefish_options(app, o.cuttlefish);
  app.add_flag("--carry-state,!--no-carry-state", o.switching.carry_state,
               "At the switch, carry the optimizer's state over to the factors");
  app.add_option("--frobenius-decay", o.switching.frobenius_decay,
                 "Decay of the factors' products in place of the weight decay of each factor; 0: none")
      ->check(check_not_negative);
  app.add_option("--ramp-steps", o.switching.ramp.steps, "Steps of a ramp of the rate after the switch")
      ->check(CLI::Range(0, 1000000000));
  app.add_option("--ramp-start", o.switching.ramp.start, "Factor of the rate from which the ramp starts")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--norm-batches", o.switching.norm_batches,
                 "Batches from which batch norms are estimated again right after the switch")
      ->check(CLI::Range(0, 1000000));
  app.add_option("--extra-norm", o.switching.extra_norm_batches,
                 "Put batch norms between the factors of convolutions, measured over N batches")
      ->check(CLI::Range(0, 1000000));
  app.add_option("--anneal-epochs", o.switching.anneal_epochs,
                 "Epochs after the switch over which what the factors lack fades out; on the CPU only")
      ->check(CLI::Range(0, 1000000));
  app.add_option("--project-every", o.switching.project_every,
                 "Dense steps between soft projections towards low rank; 0: none")
      ->check(CLI::Range(0, 1000000000));
  app.add_flag("--test-switch", o.switching.test, "Test right before and after the switch");
  app.add_flag("--explain", o.explain, "Print each layer's rank, cost, predicted loss, and why");
}

inline void add_procedure_options(CLI::App& app, procedure_options& o) {
  using pufferfish::training_mode;
  add_choice<training_mode>(app, "--mode", o.mode,
                            {{"dense", training_mode::dense},
                             {"hybrid", training_mode::hybrid},
                             {"lowrank", training_mode::lowrank}},
                            "Hybrid: dense, then factorized; lowrank: low rank from random values");
  app.add_option("--rank-ratio", o.rank_ratio, "Rank of a factorized matrix, as a share of its full rank")
      ->check(CLI::Range(1e-6, 1.0));
  add_choice<std::optional<switch_policy>>(
      app, "--policy", o.policy,
      {{"uniform", std::nullopt},
       {"paper", switch_policy::paper},
       {"data-aware", switch_policy::data_aware},
       {"two-sided", switch_policy::two_sided},
       {"cuttlefish", switch_policy::cuttlefish}},
      "What the switch keeps as much of as it can. uniform: the loss, each layer at its --rank-ratio; paper: "
      "the "
      "weights at the same ranks; data-aware, two-sided: outputs of layers, or the loss, with layers sharing "
      "the "
      "parameters; cuttlefish: the weights at stable ranks, which also say when");
  add_switch_options(app, o);
  app.add_option("--switch-rate", o.switch_rate, "Multiply the learning rate by this at the switch")
      ->check(check_positive);
  app.add_flag("--restart-rate", o.restart,
               "At the switch, start the learning rate's schedule again; its length is that of what follows");
}

/// Adds the options of a program whose network has an embedding.
inline void add_embedding_options(CLI::App& app, procedure_options& o) {
  app.add_flag("--factorize-embeddings", o.factorize_embeddings,
               "Factorize the embedding, and the output layer tied to it, too: by --rank-ratio");
  app.add_option("--embedding-rank", o.embedding_rank, "The same with this rank")
      ->check(CLI::Range(1, 65536))
      ->default_str("by --rank-ratio");
}

/// Throws before training if the embedding options would have no effect for a table of this size: in dense
/// training, or with a rank whose factors are not smaller than the table.
inline void check_embeddings(const procedure_options& o, const std::string& name, index_t vocabulary,
                             index_t width) {
  if (!o.low_rank_embeddings()) return;
  const char* const given = o.embedding_rank ? "--embedding-rank" : "--factorize-embeddings";
  if (o.mode == pufferfish::training_mode::dense) {
    throw pufferfish::value_error(std::string(given) + " has no effect with --mode dense");
  }
  if (!o.embedding_rank) return;
  pufferfish::check_rank(std::string(given) + ": " + name, width, vocabulary, *o.embedding_rank);
  pufferfish::check_shrinks(std::string(given) + ": " + name, width, vocabulary, *o.embedding_rank);
}

/// The embedding options in JSON results.
inline nlohmann::ordered_json embeddings_json(const procedure_options& o) {
  if (o.embedding_rank) return {{"rank", *o.embedding_rank}};
  if (o.factorize_embeddings) return {{"rank_ratio", o.rank_ratio}};
  return nullptr;
}

/// Whether the learning rate's schedule restarts.
inline bool restarts(const procedure_options& o) {
  return o.restart && o.mode == pufferfish::training_mode::hybrid;
}

/// Length of the learning rate's schedule.
inline double schedule_epochs(const common_options& o, const procedure_options& procedure) {
  return static_cast<double>(restarts(procedure) ? o.epochs - o.warmup_epochs : o.epochs);
}

/// Throws if the switch would come after the last epoch, or after the end of a schedule that restarts, and
/// for options of a policy that is not the one asked for.
inline void check_epochs(const common_options& o, const procedure_options& procedure) {
  if (procedure.cuttlefish.any() && procedure.policy != switch_policy::cuttlefish) {
    throw pufferfish::value_error(
        "--least-gain and options that begin with --cuttlefish have no effect without --policy cuttlefish");
  }
  if (procedure.mode != pufferfish::training_mode::hybrid) return;
  const std::string warmup = "a warm-up of " + std::to_string(o.warmup_epochs) + " epochs ";
  if (o.warmup_epochs >= o.epochs) {
    throw pufferfish::value_error(warmup + "leaves none of " + std::to_string(o.epochs) +
                                  " for the factorized network");
  }
  if (procedure.restart && 2 * o.warmup_epochs > o.epochs) {
    throw pufferfish::value_error(warmup + "is longer than the schedule of " +
                                  std::to_string(o.epochs - o.warmup_epochs) + " that starts again");
  }
}

/// Copies the procedure to run options, except for ranks that depend on the network: the program sets those.
inline void apply(const procedure_options& o, const common_options& common, pufferfish::run_options& run) {
  run.mode = o.mode;
  run.epochs = common.epochs;
  run.divergence_steps = common.divergence_steps;
  run.warmup_epochs = common.warmup_epochs;
  run.factorize.rank = pufferfish::rank_ratio{o.rank_ratio};
  run.switching = o.switching;
  const bool cuttlefish = o.policy == switch_policy::cuttlefish;
  // Without an option and without dense steps there are no steps to record statistics in.
  const bool plain =
      o.policy == switch_policy::paper || cuttlefish || (!o.policy && common.warmup_epochs == 0);
  run.factorize.share = o.shares_ranks();
  if (o.budget || o.mac_budget || o.ms_budget || o.byte_budget) {
    pufferfish::network_budget& budget = run.factorize.budget.emplace();
    budget.fraction = o.budget;
    budget.mac_fraction = o.mac_budget;
    budget.milliseconds = o.ms_budget;
    budget.bytes = o.byte_budget;
  }
  run.factorize.truncate = o.truncation                            ? o.truncation
                           : plain                                 ? pufferfish::truncation::plain
                           : o.policy == switch_policy::data_aware ? pufferfish::truncation::data_aware
                                                                   : pufferfish::truncation::two_sided;
  const bool measures = run.factorize.share || run.factorize.budget.has_value() ||
                        run.factorize.truncate != pufferfish::truncation::plain || o.by_predicted_loss;
  if (o.mode != pufferfish::training_mode::hybrid) {
    run.switching.statistics_steps = 0;
  } else if (measures && run.switching.statistics_steps == 0) {
    run.switching.statistics_steps = 20;
  }
  if (cuttlefish) {
    run.switching.moment = pufferfish::cuttlefish_moment{o.cuttlefish.options(), common.warmup_epochs,
                                                         o.cuttlefish.least_gain, o.cuttlefish.floored};
  } else if (o.by_predicted_loss) {
    pufferfish::predicted_loss_moment moment;
    moment.latest = common.warmup_epochs;
    moment.earliest = std::min(moment.earliest, common.warmup_epochs);
    run.switching.moment = moment;
  }
  run.factorize.embeddings_dense = !o.low_rank_embeddings();
  if (o.embedding_rank) run.factorize.embedding_rank = pufferfish::fixed_rank{*o.embedding_rank};
  run.switch_rate_factor = o.switch_rate;
  run.restart_schedule_at_switch = restarts(o);
}

/// Says which options of the switch will act otherwise than they read. Empty: none.
/// Run: a pufferfish::training_run with these options.
template <class Run>
std::vector<std::string> switch_notes(const procedure_options& o, const common_options& common,
                                      const Run& run) {
  std::vector<std::string> notes;
  if (o.mode != pufferfish::training_mode::hybrid) return notes;
  const index_t asked = o.switching.statistics_steps, steps = run.steps_per_epoch();
  if (asked > steps) {
    notes.push_back(
        format("--statistics-steps %td: an epoch has %td steps, all of which are measured", asked, steps));
  }
  const index_t window = o.cuttlefish.options().window;
  if (o.policy == switch_policy::cuttlefish && common.warmup_epochs <= window) {
    notes.push_back(
        format("Cuttlefish: stable ranks can cause the switch after %td epochs at the earliest, so "
               "--warmup-epochs %td decides",
               window + 1, common.warmup_epochs));
  }
  return notes;
}

/// Cuttlefish's options in JSON results; null for another policy.
inline nlohmann::ordered_json cuttlefish_json(const procedure_options& o) {
  if (o.policy != switch_policy::cuttlefish) return nullptr;
  const pufferfish::cuttlefish_options at = o.cuttlefish.options();
  return {{"window", at.window},
          {"mean_of", at.mean_of},
          {"tolerance", at.tolerance},
          {"few", at.few},
          {"very_few", at.very_few},
          {"least_share", at.least_share},
          {"floored", o.cuttlefish.floored},
          {"least_gain", o.cuttlefish.least_gain}};
}

/// The switch options in JSON results.
inline nlohmann::ordered_json switch_json(const procedure_options& o, const common_options& common) {
  pufferfish::run_options run;
  apply(o, common, run);
  const pufferfish::switch_options& at = run.switching;
  const char* const policies[] = {"paper", "data-aware", "two-sided", "cuttlefish"};
  nlohmann::ordered_json j = {
      {"policy", o.policy ? policies[static_cast<int>(*o.policy)] : "uniform"},
      {"truncation",
       pufferfish::to_string(run.factorize.truncate.value_or(pufferfish::truncation::two_sided))},
      {"shared_ranks", run.factorize.share},
      {"budget", run.factorize.budget ? nlohmann::ordered_json(describe(*run.factorize.budget)) : nullptr},
      {"moment", at.moment ? describe(*at.moment) : "epoch"},
      {"cuttlefish", cuttlefish_json(o)},
      {"statistics_steps", at.statistics_steps},
      {"carry_state", at.carry_state},
      {"frobenius_decay", at.frobenius_decay},
      {"ramp", at.ramp.describe()},
      {"norm_batches", at.norm_batches},
      {"extra_norm_batches", at.extra_norm_batches},
      {"anneal_epochs", at.anneal_epochs},
      {"project_every", at.project_every}};
  return j;
}

/// Throws on all ranks if a run would have nothing to factorize, before hours of training.
inline void check_switch(const pufferfish::training_options& t, const pufferfish::network<float>& net) {
  if (t.mode == pufferfish::training_mode::dense) return;
  if (t.factorize.budget) return;
  if (pufferfish::planned_ranks(net, t.factorize).empty()) {
    throw pufferfish::value_error("from layer " + std::to_string(t.factorize.first_layer) +
                                  " on this network has no layer that factorizing makes smaller");
  }
}

}  // namespace examples
