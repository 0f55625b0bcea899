// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the options of a training run as text, to compare ranks with each other and a checkpoint with
/// the run that resumes it; and small computations of a run.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/core/record_line.hpp>
#include <pufferfish/distributed/communicator.hpp>
#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/train/host_mirror.hpp>
#include <pufferfish/train/options.hpp>
#include <pufferfish/train/progress_record.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Version of the format of the lines that resume_lines makes. Version 1 had neither the data nor the layers.
inline constexpr const char* record_version = "2";

/// Reason in an error of save_alone if ranks were lost in the switch, whose intermediate state must not be
/// saved.
inline constexpr const char* in_switch = "in the switch, so that the network is neither dense nor factorized";
/// Reason in an error of save_alone if ranks were lost in a step without a timeout of the program.
inline constexpr const char* in_unguarded_step =
    "and the program has set no timeout (mpi::communicator::set_timeout), so that parameters may be partly "
    "those of the next step";

/// Lines of the options, without the exchange plan: a checkpoint stores it, and the exchange compares it.
/// Each line is "NAME VALUE". Numbers have enough digits to be read back exactly. `scalar_bytes`: size of the
/// type of the parameters.
inline std::string option_lines(const run_options& options, std::size_t scalar_bytes) {
  std::string text;
  const auto line = [&text](const char* name, const std::string& value) {
    text += std::string(name) + " " + value + "\n";
  };
  line("record", record_version);
  line("mode", to_string(options.mode));
  line("warm-up epochs", std::to_string(options.warmup_epochs));
  line("first factorized layer", std::to_string(options.factorize.first_layer));
  line("learning rate", exact_number(options.learning_rate) + ", " + options.rate_schedule.describe() +
                            (options.restart_schedule_at_switch ? ", again from the switch on" : ""));
  line("learning rate after the switch", "x " + exact_number(options.switch_rate_factor));
  line("plateau", options.rate_plateau ? options.rate_plateau->describe() : "no");
  line("optimizer", describe(options.optimizer));
  // Options of the switch have lines only if they differ from the default, so that older checkpoints go on.
  const switch_options& at = options.switching;
  if (at.moment) line("switch", describe(*at.moment));
  if (at.statistics_steps > 0) line("statistics steps", std::to_string(at.statistics_steps));
  if (at.carry_state) line("optimizer's state", "carried over the switch");
  if (at.ramp.steps > 0) line("ramp", at.ramp.describe());
  if (at.frobenius_decay > 0.0) line("Frobenius decay", exact_number(at.frobenius_decay));
  if (at.norm_batches > 0) line("norm batches", std::to_string(at.norm_batches));
  if (at.extra_norm_batches > 0) line("norms between factors", std::to_string(at.extra_norm_batches));
  if (at.anneal_epochs > 0) line("annealing epochs", std::to_string(at.anneal_epochs));
  if (at.project_every > 0) {
    line("soft projection",
         message({"every ", at.project_every, " steps, "}) + exact_number(at.project_strength));
  }
  line("clip norm", exact_number(options.clip_norm));
  line("seed", std::to_string(options.seed));
  if (options.first_step > 0) line("first step", std::to_string(options.first_step));
  line("scalar bytes", std::to_string(scalar_bytes));
  line("compression", pufferfish::describe(options.compression));
  if (options.phase_of_compression != compression_phase::both) {
    line("phase of compression", to_string(options.phase_of_compression));
  }
  if (options.exchange.compress_by_bucket) line("compression of", "single buckets");
  if (options.scale_sparsity > 0.0) line("sparsity of scales", exact_number(options.scale_sparsity));
  if (options.shrink_rank) line("shrinking ranks", pufferfish::describe(*options.shrink_rank));
  if (options.pruning) line("pruning", pufferfish::describe(*options.pruning));
  if (options.rare) line("rare exchanges", pufferfish::describe(*options.rare));
  line("wire", to_string(options.exchange.wire));
  line("non-finite gradients", to_string(options.exchange.nonfinite));
  return text;
}

/// The layers that the switch will factorize with ranks that are not known yet, and whether factors may be
/// larger than their weights.
template <class Root, class Device>
std::string by_switch_lines(const model<Root, Device>& net, const factorize_policy& policy) {
  std::string text = message(
      {"factors that do not shrink ", policy.keep_dense_if_larger ? "stay dense" : "are errors", "\n"});
  try {
    const std::vector<layer_info> layers = find_slots(net).layers;
    const std::vector<layer_choice> choices = select(layers, policy);
    for (std::size_t i = 0; i < layers.size(); ++i) {
      if (choices[i].factorize()) add_line(text, "factorized", layers[i].name, "by the switch");
    }
  } catch (const error& e) {  // the same error is thrown where the layers are factorized, on all ranks
    text += std::string("factorized: ") + e.what() + "\n";
  }
  return text;
}

/// One line for each layer, with properties that its parameters' shapes do not show, such as a stride; and,
/// unless the run stays dense, the rank policy and one line for each layer that is to be factorized, with its
/// ranks. The latter are left out if a budget or singular values decide the ranks, which are then known only
/// at the switch.
template <class Root, class Device>
std::string network_lines(const model<Root, Device>& net, const run_options& options) {
  std::string text;
  if constexpr (requires { net.root().describe(); }) text = "network " + net.root().describe() + "\n";
  net.for_each_layer([&text](const std::string& name, const auto& layer) {
    text += "layer " + quote_word(name) + " " + layer.describe() + "\n";
  });
  if (options.mode == training_mode::dense) return text;
  const factorize_policy& policy = options.factorize;
  text += "rank policy " + describe(policy.rank) +
          message({", from layer ", policy.first_layer, ", last layer ",
                   policy.last_layer_dense ? "dense" : "factorized", ", shortcuts ",
                   policy.shortcuts_dense ? "dense" : "factorized", ", embeddings ",
                   policy.embeddings_dense ? "dense" : describe(policy.embedding_rank.value_or(policy.rank)),
                   ", SVD ", static_cast<int>(policy.method), ", seed ", policy.seed,
                   policy.truncate ? ", " : "", policy.truncate ? to_string(*policy.truncate) : "",
                   policy.budget ? ", budget " + describe(*policy.budget) : std::string(),
                   policy.share ? "" : ", not shared", "\n"});
  const bool by_spectrum =
      !policy.embeddings_dense && needs_spectrum(policy.embedding_rank.value_or(policy.rank));
  if (policy.budget || needs_spectrum(policy.rank) || by_spectrum) {
    return text + by_switch_lines(net, policy);
  }
  try {
    for (const layer_rank& layer : planned_ranks(net, policy)) {
      add_line(text, "factorized", layer.name, "rank", layer.ranks);
    }
  } catch (const error& e) {  // the same error is thrown where the layers are factorized, on all ranks
    text += std::string("factorized: ") + e.what() + "\n";
  }
  return text;
}

/// The lines that must be equal on all ranks, and in a checkpoint and the run that resumes it. `net` is the
/// dense model.
template <class Root, class Device, class Task>
std::string resume_lines(const model<Root, Device>& net, const Task& task, const run_options& options) {
  return option_lines(options, sizeof(stored_t<model<Root, Device>>)) + task.describe() + task.data_lines() +
         network_lines(net, options);
}

/// Line of the kernels' properties that decide the bits of an update, which every rank computes by itself:
/// fused multiply-add, and with clipping the instruction set, since the norm is a sum over vectors.
inline std::string kernel_line(const run_options& options) {
  if (options.clip_norm > 0.0) return std::string("kernels ") + kernel_name() + "\n";
  return std::string("kernels with") + (fuses_multiply_add() ? "" : "out") + " fused multiply-add\n";
}

/// Compares models and options of the ranks before the run is made, so that invalid options throw on all
/// ranks. Returns the communicator. Throws the errors of agree_on_lines. Collective.
template <class Comm, class Root, class Device>
Comm* agree_on_run(Comm& comm, const model<Root, Device>& net, const std::string& lines,
                   const run_options& options) {
  agree_on_lines(comm, "network", net.structure());
  agree_on_lines(comm, "training options",
                 lines +
                     message({"epochs ", options.epochs, "\ndivergence steps ", options.divergence_steps,
                              "\ntune the exchange ", options.tune_exchange ? "yes" : "no",
                              "\ntests around the switch ", options.switching.test ? "yes\n" : "no\n"}) +
                     kernel_line(options));
  return &comm;
}

/// Throws state_error, naming the first line that differs, unless a checkpoint was made by a run with the
/// same lines.
inline void check_same_lines(const std::string& path, const std::string& stored, const std::string& mine,
                             const std::string& library_version) {
  if (stored == mine) return;
  if (line_of(stored, 0) != line_of(mine, 0)) {
    constexpr std::string_view advice =
        ", so it does not say on which data and with which layers the run was made; go on with the version "
        "that wrote it, or start again";
    throw_error<state_error>({path, ": its record, written by version ", library_version,
                              " of the library, is not of format ", record_version, advice});
  }
  const std::size_t line = first_difference({stored, mine});
  throw_error<state_error>(
      {path, ": made by a run with ", line_of(stored, line), ", this run has ", line_of(mine, line)});
}

/// Parses the plan in a checkpoint's `text`; nullopt if the text is empty or the plan is for another number
/// of ranks. A plan with ranks = 0 is for any number. Throws the errors of plan_from_text, in which `source`
/// names the file.
inline std::optional<exchange_plan> usable_plan(const std::string& text, const std::string& source,
                                                int ranks) {
  if (text.empty()) return std::nullopt;
  exchange_plan plan = plan_from_text(text, source);
  if (plan.ranks != 0 && plan.ranks != ranks) return std::nullopt;
  return plan;
}

/// Clock of all durations that a run reports; it is never set back.
using run_clock = std::chrono::steady_clock;

/// The median of values (of an even number the upper one); 0 without values.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Makes the result of an epoch, without its test. `train`: evaluation over all ranks; `step_ms`: durations
/// of the epoch's steps in ms. The result's seconds are their sum / 1000, its step_ms is their median, and
/// its exchange_ms the mean over the steps.
inline epoch_result epoch_seen(const training_record& record, double rate, const evaluation& train,
                               const std::vector<double>& step_ms) {
  epoch_result result;
  result.epoch = record.epoch;
  result.low_rank = record.low_rank;
  result.learning_rate = rate;
  result.train_loss = train.loss();
  result.train_accuracy = train.accuracy();
  for (const double ms : step_ms) result.seconds += ms / 1000.0;
  result.step_ms = median(step_ms);
  result.exchange_ms = record.exchange_ms / static_cast<double>(std::max<std::size_t>(1, step_ms.size()));
  return result;
}

/// Makes the record at the start of a run, at run_options::first_step: epoch first_step / n and step
/// first_step mod n of this epoch, with n = steps_per_epoch (at least 1).
inline training_record first_record(const run_options& options, index_t steps_per_epoch) {
  training_record record;
  const auto steps = static_cast<std::uint64_t>(std::max<index_t>(1, steps_per_epoch));
  record.epoch = static_cast<index_t>(options.first_step / steps);
  record.step = static_cast<index_t>(options.first_step % steps);
  record.total_steps = record.finite_steps = options.first_step;
  return record;
}

/// The learning rate of the step that is `steps_back` before the record's, without the plateau's factor.
/// rate = learning_rate x schedule(epoch), after the switch also x switch_rate_factor x ramp(steps since the
/// switch).
inline double rate_of_step(const run_options& options, const training_record& record, index_t steps_per_epoch,
                           index_t steps_back) {
  double epoch = static_cast<double>(record.epoch) +
                 static_cast<double>(record.step - steps_back) / static_cast<double>(steps_per_epoch);
  double rate = options.learning_rate;
  if (record.switched) {
    if (options.restart_schedule_at_switch) epoch -= static_cast<double>(record.switched->epoch);
    const auto steps = static_cast<std::uint64_t>((record.epoch - record.switched->epoch) * steps_per_epoch +
                                                  record.step - steps_back);
    rate *= options.switch_rate_factor * options.switching.ramp(steps);
  }
  return rate * options.rate_schedule(epoch);
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
