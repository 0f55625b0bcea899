// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Options of a training run, and the results and events that it reports.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <pufferfish/distributed/compression_options.hpp>
#include <pufferfish/distributed/exchange.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/loss.hpp>
#include <pufferfish/nn/switch/soft_projection.hpp>
#include <pufferfish/optim/frobenius_decay.hpp>
#include <pufferfish/optim/optimizer.hpp>
#include <pufferfish/optim/schedule.hpp>
#include <pufferfish/prune/shrink_rank.hpp>
#include <pufferfish/train/evaluate.hpp>
#include <pufferfish/train/loader.hpp>
#include <pufferfish/train/pruning_options.hpp>
#include <pufferfish/train/rare_training.hpp>
#include <pufferfish/train/switch_moment.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Mode of a run. `dense`: the network is never factorized. `hybrid`: the Pufferfish procedure, dense for the
/// warm-up epochs, then factorized by SVD and trained on. `lowrank`: low rank from random initial values,
/// without warm-up and without SVD (the ablation).
enum class training_mode { dense, hybrid, lowrank };

/// Name of the mode: "dense", "hybrid" or "lowrank".
constexpr const char* to_string(training_mode mode) {
  return mode == training_mode::dense ? "dense" : mode == training_mode::hybrid ? "hybrid" : "lowrank";
}

/// Options of a hybrid run's switch from dense to low rank, and of the training after the switch.
/// \code
///   training_options options;
///   options.warmup_epochs = 10;
///   options.factorize.rank = rank_ratio{0.25};
///   options.switching.carry_state = true;
///   options.switching.ramp.steps = 200;
/// \endcode
struct switch_options {
  /// Moment of the switch. Empty: the start of epoch run_options::warmup_epochs.
  std::optional<switch_moment> moment = {};
  /// S: number of dense steps before the switch from which statistics of outputs and gradients are taken,
  /// summed over all ranks. The truncation and the ranks of the layers depend on them (truncation,
  /// factorize_policy). If the moment is not known in advance, the last S steps of every dense epoch are
  /// measured. At most the steps of one epoch: if an epoch has fewer than S, all steps of the last dense
  /// epoch are measured. 0: no statistics; plain truncations at the policy's ranks.
  index_t statistics_steps = 0;
  /// True: the optimizer's state is carried over to the factors (optimizer_memory). False: it starts at zero.
  bool carry_state = false;
  switch_ramp ramp = {};  ///< ramp of the learning rate after the switch
  /// Lambda of a frobenius_decay of the factors, which replaces their weight decay. The decay is decoupled if
  /// the optimizer's weight decay is. 0: the optimizer's weight decay.
  double frobenius_decay = 0.0;
  /// Number of batches from which the running statistics of batch norms are estimated right after the switch
  /// (estimate_norms). They matter for evaluations before the next training steps. 0: no estimation.
  index_t norm_batches = 0;
  /// Number of batches over which mean and variance are measured between the factors of each convolution on
  /// the main path; each such convolution then becomes a LowRankNormConv whose batch norm starts as the
  /// identity of inference (factor_norms.hpp). Budgets count their parameters. Not together with carry_state
  /// or frobenius_decay. 0: no batch norms between factors.
  index_t extra_norm_batches = 0;
  /// Number of epochs after the switch over which the part of the weights that the truncation drops fades out
  /// by a cosine (annealing.hpp). Convolutions and linear layers only, and only on the CPU. From the first
  /// step on only the factors are trained and exchanged. The multiply-adds of the dense layers are saved once
  /// these epochs, or the run, have ended. Not together with extra_norm_batches. 0: no annealing.
  index_t anneal_epochs = 0;
  /// Number of dense steps between soft projections of the weights to the policy's ranks (project_softly). 0:
  /// no projection.
  index_t project_every = 0;
  double project_strength = 0.1;  ///< strength of project_softly
  bool test = false;  ///< whether the network is tested before and after the switch (switch_result)

  /// Throws value_error, with the number, for an option out of its range.
  void validate() const {
    if (moment) check_moment(*moment);
    ramp.validate();
    frobenius_options{frobenius_decay}.validate();
    detail::check_strength(project_strength);
    const auto not_negative = [](const char* name, index_t value) {
      if (value < 0) detail::throw_error<value_error>({"switch: ", name, " ", value, " is negative"});
    };
    not_negative("statistics_steps", statistics_steps);
    not_negative("norm_batches", norm_batches);
    not_negative("extra_norm_batches", extra_norm_batches);
    not_negative("anneal_epochs", anneal_epochs);
    not_negative("project_every", project_every);
    if (extra_norm_batches > 0 && (carry_state || frobenius_decay > 0.0)) {
      detail::throw_error<value_error>(
          {"switch: extra_norm_batches ", extra_norm_batches, " together with ",
           carry_state ? "carry_state" : "frobenius_decay",
           "; with a batch norm between them, the product of two factors is no weight"});
    }
    if (extra_norm_batches > 0 && anneal_epochs > 0) {
      detail::throw_error<value_error>({"switch: extra_norm_batches ", extra_norm_batches,
                                        " together with anneal_epochs ", anneal_epochs,
                                        "; batch norms are measured between factors without a residual"});
    }
  }
};

/// Epochs of a run in which gradients are compressed: all epochs, those before the switch, or those after it.
enum class compression_phase { both, dense, low_rank };

/// Name of the phase: "both", "dense" or "low rank".
constexpr const char* to_string(compression_phase phase) {
  return phase == compression_phase::both ? "both" : phase == compression_phase::dense ? "dense" : "low rank";
}

/// Options that training runs of all tasks share.
/// All ranks must have the same options. The constructor of training_run compares the lines that a checkpoint
/// keeps (mode, rates, optimizer, switch, compression, pruning, wire, task, data and layers), the number of
/// epochs, divergence_steps, tune_exchange and switch_options::test; the exchange compares its plan and
/// formats. resume() requires the lines of the run that wrote the checkpoint; the number of epochs may
/// differ.
///
/// Learning rate of step k of n in epoch t (both from 0):
///
///     rate = learning_rate rate_schedule(t + k / n) plateau_factor             before the switch
///     rate = learning_rate rate_schedule(t - s + k / n) plateau_factor
///                switch_rate_factor ramp(number of steps since the switch)     after it
///
/// where s is the epoch of the switch with restart_schedule_at_switch, else 0. plateau_factor is 1 without
/// rate_plateau. A hybrid run whose switch would be at epoch `epochs` or later stays dense.
struct run_options {
  training_mode mode = training_mode::hybrid;
  index_t epochs = 20;
  /// The run starts at this step instead of 0: earlier steps of the schedule, the epochs and the order of
  /// samples are left out, as for a level of lottery tickets that is rewound to it.
  std::uint64_t first_step = 0;
  /// E: epochs before the switch; the switch happens at the start of epoch E (0-based). Hybrid only; 0
  /// factorizes the initial values.
  index_t warmup_epochs = 5;
  factorize_policy factorize;
  switch_options switching;

  double learning_rate = 0.1;               ///< base rate; the factors of the next four members scale it
  schedule rate_schedule;                   ///< factor at a fractional epoch; continues across the switch
  bool restart_schedule_at_switch = false;  ///< the schedule counts epochs from the switch on
  double switch_rate_factor = 1.0;          ///< further factor from the switch on
  std::optional<plateau> rate_plateau;      ///< factor that falls when the test loss stops improving

  optimizer_options optimizer = sgd_options{0.9, 0.0, false, 1e-4, false};
  double clip_norm = 0.0;  ///< largest norm of the gradient of all parameters; 0: no clipping
  exchange_options exchange;
  /// True: `tune` measures the interconnect before the first step and makes the exchange plan. This takes
  /// about 3 s, longer on links with long delays (tune).
  bool tune_exchange = false;
  /// Ranks exchange their parameter changes after some local steps, instead of gradients in every step. They
  /// also exchange at the end of an epoch and before tests, checkpoints and the switch, which need equal
  /// parameters on all ranks. Each rank has its own optimizer state. nonfinite_policy::ignore only.
  std::optional<rare_training> rare;
  /// Prunes the network during training; only gradients of the remaining weights are exchanged.
  std::optional<pruning_options> pruning;
  /// At the end of every epoch with factors, removes rank components whose contribution has stayed small
  /// (rank_shrinker); bytes and multiply-adds of a step fall. The optimizer's state is carried over, the
  /// memory of a compressor starts afresh. CPU only.
  std::optional<shrink_rank_options> shrink_rank;
  /// Factor s of a scale_sparsity, whose gradient is added to the weights of batch norms in every step; CPU
  /// only. Early-Bird tickets use 1e-4. 0: no such term.
  double scale_sparsity = 0.0;
  /// Compressor of the gradients, or with `rare` of the parameter changes. The switch makes a new one. With a
  /// momentum of its own (brings_momentum) it needs SGD without momentum, or `rare` without outer momentum.
  compression_options compression;
  /// Epochs in which `compression` applies. Powerfish: PowerSGD in the dense phase.
  compression_phase phase_of_compression = compression_phase::both;
  /// A run ends with divergence_error after this many consecutive steps whose loss is not finite on one of
  /// the ranks; 0: never. Ranks compare losses about four times a second and at the end of an epoch, so some
  /// more steps may pass. On a device, all steps of an epoch after its first such loss count.
  index_t divergence_steps = 10;
  /// On a device: repeated steps are captured into CUDA graphs, with the gradient exchange if it can be
  /// captured. False (for debugging): every kernel is launched on its own. The bits are the same.
  bool captured_steps = true;
  std::uint64_t seed = 1;  ///< initial values, order of samples, augmentation, dropout

  /// Throws value_error, naming the option and its value, if an option is out of its range or two options
  /// exclude each other.
  void validate() const {
    switching.validate();
    detail::check_range(epochs >= 0, "epochs", epochs);
    detail::check_range(divergence_steps >= 0, "divergence_steps", divergence_steps);
    detail::check_range(learning_rate >= 0.0 && learning_rate < 1e300, "learning_rate", learning_rate);
    detail::check_range(switch_rate_factor >= 0.0 && switch_rate_factor < 1e300, "switch_rate_factor",
                        switch_rate_factor);
    detail::check_range(clip_norm >= 0.0 && std::isfinite(clip_norm), "clip_norm", clip_norm);
    detail::check_range(scale_sparsity >= 0.0 && scale_sparsity < 1e300, "scale_sparsity", scale_sparsity);
    if (rare) rare->validate();
    if (rare && exchange.nonfinite != nonfinite_policy::ignore) {
      detail::throw_error<value_error>(
          {"rare exchanges with nonfinite_policy::", to_string(exchange.nonfinite),
           ": ranks that take local steps cannot leave one out together"});
    }
    if (rare && switching.project_every > 0) {
      detail::throw_error<value_error>({"rare exchanges with soft projections every ",
                                        switching.project_every,
                                        " steps: every rank would continue with rank 0's local steps"});
    }
    if (shrink_rank) static_cast<void>(rank_shrinker(*shrink_rank));
    if (shrink_rank && (pruning || mode == training_mode::dense)) {
      detail::throw_error<value_error>({"shrinking ranks together with ",
                                        pruning ? "pruning, whose mask is for one layout" : "mode dense"});
    }
    if (pruning) validate_pruning();
    if (rare && rare->outer_momentum > 0.0 && compression.brings_momentum()) {
      detail::throw_error<value_error>({"compression ", describe(compression),
                                        " has a momentum of its own, and the outer momentum is ",
                                        rare->outer_momentum});
    }
    if (rare && compression.brings_weight_decay()) {
      detail::throw_error<value_error>(
          {"rare exchanges with compression ", describe(compression),
           ", whose weight decay needs the same weights on all ranks: use that of the optimizer"});
    }
    const auto* const sgd = std::get_if<sgd_options>(&optimizer);
    if (compression.brings_weight_decay() && sgd != nullptr && sgd->weight_decay > 0.0) {
      detail::throw_error<value_error>({"compression ", describe(compression),
                                        " has a weight decay of its own, and this is ", describe(optimizer)});
    }
    if (!rare && compression.brings_momentum() && (sgd == nullptr || sgd->momentum != 0.0)) {
      detail::throw_error<value_error>(
          {"compression ", describe(compression),
           " has a momentum of its own: it needs SGD without momentum, and this is ", describe(optimizer)});
    }
  }

 private:
  // Throws value_error for options that would move pruned weights away from 0 or that compact_sum excludes.
  void validate_pruning() const {
    pruning->validate();
    if (pruning->mask && mode != training_mode::dense) {
      detail::throw_error<value_error>(
          {"pruning by a given mask, which is one of the dense network, in mode ", to_string(mode)});
    }
    const auto refuse = [](const char* with) {
      detail::throw_error<value_error>({"pruning together with ", with});
    };
    if (rare) refuse("rare exchanges, whose local steps send no gradients");
    if (compression) refuse("a compressor; TernGrad of the survivors is pruning_options::ternary");
    if (exchange.wire != exchange_wire::same) refuse("a narrow wire");
    if (switching.frobenius_decay > 0.0) refuse("Frobenius decay, which moves pruned weights");
    if (switching.anneal_epochs > 0) refuse("annealing, whose residuals are no weights to prune");
    if (switching.project_every > 0) refuse("soft projections, which move pruned weights");
  }
};

/// Options of a training run of an image classifier.
/// \code
///   training_options options;
///   options.epochs = 30;
///   options.warmup_epochs = 10;                 // the switch happens at the start of epoch 10
///   options.rate_schedule = cosine(30.0);
///   options.optimizer = sgd_options{.momentum = 0.9, .weight_decay = 5e-4};
///   options.batch = 256;                        // of all ranks together
///   options.augment = {.pad_crop = 4, .flip = true};
/// \endcode
struct training_options : run_options {
  label_smoothing smoothing;
  index_t batch = 128;  ///< samples per step, over all ranks
  augmentation augment;
};

/// Results of one epoch. Losses and accuracies are over all ranks, times are those of this rank.
/// `learning_rate` is that of the epoch's last step. Losses are means per sample or token in nats; the
/// training loss contains label smoothing, the test loss does not.
struct epoch_result {
  index_t epoch = 0;      ///< number of the epoch, 0-based
  bool low_rank = false;  ///< whether the epoch trained factors
  double learning_rate = 0.0;
  double train_loss = 0.0;
  double train_accuracy = 0.0;  ///< percent, of augmented samples, while training
  double test_loss = 0.0;
  double test_accuracy = 0.0;  ///< percent of the test samples
  double test_top5 = 0.0;      ///< evaluation::top5_accuracy(); 0 where it is not counted
  double seconds = 0.0;        ///< duration of the training steps, without evaluation
  double step_ms = 0.0;        ///< median duration of the epoch's steps
  double exchange_ms = 0.0;    ///< mean part of a step in which the exchange outlasted the backward pass
  index_t parameters = 0;      ///< number of parameters of the network that was tested
  index_t macs = 0;            ///< multiply-adds of its forward pass of one image; 0 for other samples
  index_t bytes_per_step = 0;  ///< exchange_bytes() of the epoch's steps
};

/// Report of the switch from dense to low rank.
/// Times are those of this rank. `epoch` is the epoch at whose start the switch happened.
///
/// Order of a switch: synchronize, test `before`, statistics summed over the ranks, factorization on rank 0,
/// broadcast, new optimizer and exchange, carried state, test `after`, estimated batch norms, test
/// `estimated`.
struct switch_result {
  index_t epoch = 0;
  /// Duration without tests: statistics, decompositions, broadcast, new arenas and optimizer.
  double milliseconds = 0.0;
  factorization factors;  ///< per-layer reports on rank 0 only
  std::string why = {};   ///< reason of the moment, in words
  /// The stages that cuttlefish_moment::least_gain has measured, on rank 0 of the run that measured them
  /// only.
  std::vector<stage_time> stages = {};
  /// Results of switch_options::test, empty without it: of the dense network, of the factorized network, and
  /// of the factorized network with batch-norm statistics estimated from norm_batches.
  std::optional<evaluation> before = {}, after = {}, estimated = {};
};

/// Position and running results of a run, for progress displays.
/// On a device, loss and accuracy may lack the last steps (training_run).
struct training_position {
  index_t epoch = 0;
  index_t epochs = 0;
  index_t step = 0;  ///< completed steps of this epoch
  index_t steps = 0;
  bool low_rank = false;
  double loss = 0.0;      ///< mean over this rank's part of the epoch so far
  double accuracy = 0.0;  ///< percent of this rank's samples in the epoch so far
};

/// Callbacks of a training run. Every rank calls all of them, on the thread that trains.
/// The default of each callback does nothing. Callbacks must not call members of the run that are collective,
/// unless they do so on all ranks. An exception from a callback leaves advance() on this rank only.
/// \code
///   struct printer : training_observer {
///     void on_epoch(const epoch_result& e) override {
///       std::printf("epoch %td: loss %.3f, accuracy %.2f %%\n", e.epoch, e.test_loss, e.test_accuracy);
///     }
///   };
/// \endcode
class training_observer {
 public:
  virtual ~training_observer() = default;
  /// Called after each step, skipped steps included, and after on_skipped_step.
  virtual void on_step(const training_position&) {}
  /// Called after the test at the end of an epoch, when the run is at the start of the next one.
  virtual void on_epoch(const epoch_result&) {}
  /// Called after the switch, before the first step with factors.
  virtual void on_switch(const switch_result&) {}
  /// Called when a step was left out because a gradient was not finite (nonfinite_policy::skip).
  virtual void on_skipped_step(const nonfinite_gradient&) {}
  /// Called when a collective of training_run::advance has timed out because ranks did not arrive. No
  /// collective is possible any more. The run's state is that after its last whole step;
  /// training_run::save_alone can write it. After this call advance rethrows the error.
  virtual void on_lost_ranks(const timeout_error&) {}
};

PUFFERFISH_NAMESPACE_END
