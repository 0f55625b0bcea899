// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `switch_moment`: the moment at which a training run switches from dense to low rank: a fixed epoch, the
/// epoch at which stable ranks have settled (Cuttlefish), or the one at which the loss that the truncation is
/// predicted to cost has stopped falling. `switch_clock` decides.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/record_line.hpp>
#include <pufferfish/train/cuttlefish.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The switch happens at the start of this epoch (0-based). 0 factorizes the initial values.
struct fixed_epoch {
  index_t epoch = 5;
};

/// The switch happens at the start of the epoch after the one at which the stable ranks of all layers have
/// settled. The ranks come from the stable ranks, too; see cuttlefish_tracker.
struct cuttlefish_moment {
  cuttlefish_options options = {};
  /// The switch happens at the start of this epoch at the latest, with the ranks measured there. Empty: the
  /// run stays dense until all layers have settled.
  std::optional<index_t> latest = std::nullopt;
  /// Above 0: candidates are only the layers in stages that become at least `least_gain` times as fast at
  /// rank ratio 1/4 (profile_stages; 1.5 in the paper). Rank 0 measures the stages when the run starts, so
  /// the candidates depend on the machine; checkpoints contain them. 0: no measurement; all layers that the
  /// policy selects are candidates.
  double least_gain = 0.0;
  bool floored = false;  ///< rounds stable ranks down, as the paper's code does (stable_rank_options)
};

/// The switch happens at the start of the first epoch, from `earliest` on, at which the predicted loss p has
/// stopped falling or is small:
///     p > (1 - improvement) (p of the epoch before),   or   p <= tolerance.
/// p is the loss that a truncation within the budget is predicted to add: half of the sum of the dropped
/// eigenvalues, per sample. No p is measured at epoch 0, which has no training step before it.
struct predicted_loss_moment {
  double improvement = 0.05;
  double tolerance = 0.0;
  index_t earliest = 2;
  std::optional<index_t> latest = std::nullopt;  ///< epoch at whose start the switch is due at the latest
};

/// Rule for the moment at which a run switches from dense to low rank (switch_options::moment).
/// \code
///   switch_options options;
///   options.moment = cuttlefish_moment{.options = cuttlefish_options::cifar(), .latest = 20};
/// \endcode
using switch_moment = std::variant<fixed_epoch, cuttlefish_moment, predicted_loss_moment>;

/// Throws value_error, with the number, unless epochs are at least 0, `latest` is at least `earliest`,
/// improvement is in [0, 1), tolerance and least_gain are finite and at least 0, and options of Cuttlefish
/// satisfy check_cuttlefish.
PUFFERFISH_COLD inline void check_moment(const switch_moment& moment) {
  const auto require_epoch = [](const char* what, index_t epoch, index_t least) {
    if (epoch >= least) return;
    detail::throw_error<value_error>({"switch moment: ", what, " epoch ", epoch, " is below ", least});
  };
  if (const auto* fixed = std::get_if<fixed_epoch>(&moment)) return require_epoch("the", fixed->epoch, 0);
  if (const auto* c = std::get_if<cuttlefish_moment>(&moment)) {
    check_cuttlefish(c->options);
    if (!(c->least_gain >= 0.0) || !std::isfinite(c->least_gain)) {
      detail::throw_error<value_error>({"switch moment: a least gain of ", c->least_gain,
                                        " of a stage; it must be finite and not negative"});
    }
    return require_epoch("the latest", c->latest.value_or(0), 0);
  }
  const auto& p = std::get<predicted_loss_moment>(moment);
  if (!(p.improvement >= 0.0 && p.improvement < 1.0)) {
    detail::throw_error<value_error>({"switch moment: a relative improvement of the predicted loss of ",
                                      p.improvement, " is not in [0, 1)"});
  }
  if (!(p.tolerance >= 0.0) || !std::isfinite(p.tolerance)) {
    detail::throw_error<value_error>(
        {"switch moment: ", p.tolerance,
         " as tolerance of the predicted loss; it must be finite and not negative"});
  }
  require_epoch("the earliest", p.earliest, 0);
  require_epoch("the latest", p.latest.value_or(p.earliest), p.earliest);
}

/// The moment in words, for logs and for the lines that a resumed run must share: "epoch 5". Numbers are
/// exact.
PUFFERFISH_COLD inline std::string describe(const switch_moment& moment) {
  const auto latest = [](const std::optional<index_t>& epoch) {
    return epoch ? detail::message({", at the latest at epoch ", *epoch}) : std::string();
  };
  if (const auto* fixed = std::get_if<fixed_epoch>(&moment)) return detail::message({"epoch ", fixed->epoch});
  if (const auto* c = std::get_if<cuttlefish_moment>(&moment)) {
    const std::string stages =
        c->least_gain > 0.0 ? detail::message({", stages with a gain of at least ", c->least_gain}) : "";
    return describe(c->options) + (c->floored ? ", stable ranks rounded down" : "") + stages +
           latest(c->latest);
  }
  const auto& p = std::get<predicted_loss_moment>(moment);
  return detail::message({"predicted loss falls by less than ", p.improvement,
                          " of it over an epoch or is at most ", p.tolerance, ", from epoch ", p.earliest}) +
         latest(p.latest);
}

/// The measurement that a switch_clock needs at the start of an epoch: none, the stable ranks of the layers
/// that may be factorized (stable_ranks), or the loss that a truncation is predicted to add.
enum class switch_measurement { none, stable_ranks, predicted_loss };

/// Measurements at the start of an epoch. A cuttlefish_moment uses the stable ranks, a predicted_loss_moment
/// the predicted loss, a fixed_epoch none.
struct switch_evidence {
  std::vector<layer_stable_rank> stable_ranks = {};
  std::optional<double> predicted_loss = std::nullopt;
};

/// Decides at the start of each epoch of dense training whether the switch is due.
///
///     switch_clock clock(predicted_loss_moment{});
///     // At the start of each epoch, on rank 0:
///     switch_evidence seen;
///     if (clock.wanted(epoch) == switch_measurement::predicted_loss) seen.predicted_loss = ...;
///     clock.decide(epoch, seen);
///     // On all other ranks, so that all ranks have the same answer:
///     clock.set_state(the text of rank 0's clock.state(), "rank 0");
///     if (clock.is_due(epoch)) ...  // switch; at clock.ranks() unless that list is empty
///
/// The state contains the answer. A clock of the same moment with this state, as in a resumed run, gives the
/// same answers from then on.
class switch_clock {
 public:
  /// Throws value_error for an option outside of its range.
  explicit switch_clock(const switch_moment& moment = fixed_epoch{})
      : moment_(moment), tracker_((check_moment(moment_), cuttlefish_of(moment_))) {}

  /// The moment given to the constructor.
  const switch_moment& moment() const { return moment_; }

  /// The measurement that decide(epoch) needs.
  /// The result is `none` after the decision and for an epoch that has been decided.
  switch_measurement wanted(index_t epoch) const {
    if (due_ || epoch == decided_) return switch_measurement::none;
    if (std::holds_alternative<cuttlefish_moment>(moment_)) return switch_measurement::stable_ranks;
    const auto* const p = std::get_if<predicted_loss_moment>(&moment_);
    // The loss of the epoch before `earliest` is needed for a comparison.
    const bool compared = p != nullptr && epoch >= 1 && epoch + 1 >= p->earliest;
    return compared ? switch_measurement::predicted_loss : switch_measurement::none;
  }

  /// Decides whether the switch is due at the start of `epoch`. The first call for an epoch decides: later
  /// calls for the same epoch return its answer and change nothing, and so do all calls after the switch has
  /// become due. If `seen` has no predicted loss, neither this call nor the next compares losses. Throws
  /// state_error for an epoch before the last one and, with Cuttlefish, as cuttlefish_tracker::observe.
  /// Throws value_error for a predicted loss that is negative or not finite. The clock is unchanged if
  /// anything is thrown.
  bool decide(index_t epoch, const switch_evidence& seen = {}) {
    if (due_ || epoch == decided_) return is_due(epoch);
    if (epoch < decided_) {
      detail::throw_error<state_error>({"switch clock: epoch ", epoch, " after epoch ", decided_});
    }
    std::string why;
    if (const auto* fixed = std::get_if<fixed_epoch>(&moment_)) {
      if (epoch >= fixed->epoch) why = detail::message({"epoch ", fixed->epoch, " was asked for"});
    } else if (const auto* c = std::get_if<cuttlefish_moment>(&moment_)) {
      const index_t left = tracker_.left();
      const bool settled = tracker_.observe(epoch, seen.stable_ranks);
      why = settled ? std::string("the stable ranks of all layers have settled")
                    : at_latest(epoch, c->latest,
                                detail::message({"stable ranks of ", left, " layers still change"}));
    } else {
      why = by_predicted_loss(epoch, std::get<predicted_loss_moment>(moment_), seen.predicted_loss);
    }
    decided_ = epoch;
    if (!why.empty()) {
      due_ = epoch;
      reason_ = std::move(why);
    }
    return due_.has_value();
  }

  /// The answer that decide(epoch) has given.
  bool is_due(index_t epoch) const { return due_ && epoch >= *due_; }
  /// The epoch at whose start the switch is due. Empty: decide() has not returned true yet.
  const std::optional<index_t>& due() const { return due_; }
  /// The reason of the decision in words; empty before the decision.
  const std::string& reason() const { return reason_; }

  /// Layers to factorize and their ranks, once Cuttlefish's switch is due; empty before that and for other
  /// moments.
  std::vector<layer_rank> ranks() const {
    if (!due_ || !std::holds_alternative<cuttlefish_moment>(moment_)) return {};
    return tracker_.ranks();
  }
  /// The tracker of a cuttlefish_moment, for reports.
  const cuttlefish_tracker& cuttlefish() const { return tracker_; }
  /// All predicted losses up to now as (epoch, loss), for plots.
  const std::vector<std::pair<index_t, double>>& predicted_losses() const { return losses_; }

  /// The state as text. The text is empty before the first call of decide(). Lines:
  ///     decided EPOCH           the last epoch of decide()
  ///     due EPOCH REASON        once the switch is due
  ///     loss EPOCH LOSS         for each predicted loss
  /// and then those of cuttlefish_tracker::state.
  std::string state() const {
    if (decided_ < 0) return {};
    std::string text;
    detail::add_line(text, "decided", decided_);
    if (due_) detail::add_line(text, "due", *due_, reason_);
    for (const auto& [epoch, loss] : losses_) detail::add_line(text, "loss", epoch, loss);
    return text + tracker_.state();
  }
  /// Replaces the state by that of a clock of the same moment. Throws io_error, naming `source` and the line,
  /// for a text that state() does not write; the clock is unchanged then.
  void set_state(const std::string& text, const std::string& source) {
    switch_clock read(moment_);
    std::string series;
    index_t number = 0;
    detail::for_each_line(text, [&](std::string_view line) {
      ++number;
      if (line.substr(0, 7) == "series ") {
        series.append(line).append("\n");
      } else if (!read.read_line(line)) {
        detail::throw_error<io_error>({source, ": line ", number,
                                       " of the switch clock's state is not one: \"", line.substr(0, 80),
                                       "\""});
      }
    });
    read.tracker_.set_state(series, source);
    const bool follows = std::holds_alternative<cuttlefish_moment>(moment_);
    if (read.tracker_.measurements() != (follows ? read.decided_ + 1 : 0) ||
        (!text.empty() && read.decided_ < 0) ||
        (!read.losses_.empty() && !std::holds_alternative<predicted_loss_moment>(moment_))) {
      detail::throw_error<io_error>({source, ": the switch clock's state was decided up to epoch ",
                                     read.decided_, " with ", read.tracker_.measurements(),
                                     " measurements of stable ranks and ", read.losses_.size(),
                                     " predicted losses, which is not a state of: ", describe(moment_)});
    }
    *this = std::move(read);
  }

 private:
  // The options of a cuttlefish_moment; defaults for another moment.
  static cuttlefish_options cuttlefish_of(const switch_moment& moment) {
    const auto* const c = std::get_if<cuttlefish_moment>(&moment);
    return c != nullptr ? c->options : cuttlefish_options{};
  }

  // The reason for a switch at the latest epoch; an empty text before it.
  static std::string at_latest(index_t epoch, const std::optional<index_t>& latest,
                               const std::string& although) {
    if (!latest || epoch < *latest) return {};
    return detail::message({"epoch ", *latest, " is the latest, although ", although});
  }

  // Stores the loss, and returns the reason for a switch at `epoch`; empty: no switch.
  std::string by_predicted_loss(index_t epoch, const predicted_loss_moment& p,
                                const std::optional<double>& loss) {
    if (loss && !(*loss >= 0.0 && std::isfinite(*loss))) {
      detail::throw_error<value_error>({"switch clock: the predicted loss at epoch ", epoch, " is ", *loss,
                                        "; it must be finite and not negative"});
    }
    // Only losses of consecutive epochs are compared, since `improvement` is a rate per epoch.
    const bool compared = !losses_.empty() && losses_.back().first + 1 == epoch;
    const double before = compared ? losses_.back().second : 0.0;
    if (loss) losses_.emplace_back(epoch, *loss);
    if (loss && epoch >= p.earliest) {
      if (*loss <= p.tolerance) {
        return detail::message({"the predicted loss ", *loss, " is at most ", p.tolerance});
      }
      if (compared && *loss > (1.0 - p.improvement) * before) {
        return detail::message({"the predicted loss has stopped falling: ", before, ", then ", *loss});
      }
    }
    return at_latest(epoch, p.latest,
                     loss ? detail::message({"the predicted loss of ", *loss, " still falls"})
                          : std::string("no predicted loss was measured"));
  }

  // Reads a line of state() other than those of the tracker. Returns false for any other line.
  bool read_line(std::string_view content) {
    const std::size_t space = std::min(content.find(' '), content.size());
    const std::string_view kind = content.substr(0, space);
    detail::record_line line(content.substr(std::min(content.size(), space + 1)));
    if (kind == "decided") {
      line.read(decided_);
      return line.complete() && decided_ >= 0;
    }
    if (kind == "due") {
      line.read(due_.emplace(), reason_);
      return line.complete() && *due_ >= 0 && *due_ == decided_;
    }
    if (kind == "loss") {
      const index_t before = losses_.empty() ? -1 : losses_.back().first;
      auto& [epoch, loss] = losses_.emplace_back();
      line.read(epoch, loss);
      return line.complete() && epoch > before && epoch <= decided_ && loss >= 0.0 && std::isfinite(loss);
    }
    return false;
  }

  switch_moment moment_;
  index_t decided_ = -1;  // last epoch of decide()
  std::optional<index_t> due_;
  std::string reason_;
  cuttlefish_tracker tracker_;                      // of a cuttlefish_moment
  std::vector<std::pair<index_t, double>> losses_;  // of a predicted_loss_moment
};

PUFFERFISH_NAMESPACE_END
