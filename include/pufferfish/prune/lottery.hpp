// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `lottery`: lottery tickets by iterative magnitude pruning with rewinding.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/record_line.hpp>
#include <pufferfish/prune/apply_mask.hpp>
#include <pufferfish/prune/magnitude.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The rule for the number of weights that a level of lottery tickets removes.
enum class lottery_rule {
  exact,     ///< ceil(share x remaining prunable weights)
  reference  ///< ceil(share x (remaining prunable + unpruned weights)) + 1: the reference program counts the
             ///< weights of layers that it does not prune, and removes one weight more
};

/// Options of a lottery.
struct lottery_options {
  double share = 0.2;  ///< share of the remaining weights that is removed between two levels, 0 .. 1
  lottery_rule rule = lottery_rule::exact;
  std::vector<std::string> unpruned = {};  ///< parameters or layers that keep all weights, such as "fc"
  /// The search is finished after the first level with at most this many parameters. 0: it has no end.
  index_t parameters = 0;
};

/// Text for logs: "share 0.2, rule exact, not fc, down to 8107466 parameters".
inline std::string describe(const lottery_options& options) {
  std::string text = "share " + detail::exact_number(options.share) + ", rule " +
                     (options.rule == lottery_rule::exact ? "exact" : "reference");
  for (const std::string& name : options.unpruned) text += ", not " + detail::quote_word(name);
  return text + detail::message({", down to ", options.parameters, " parameters"});
}

/// Results of one level, from training and test. The search does not read them.
struct lottery_row {
  int level = 0;
  index_t kept = 0;                    ///< number of remaining prunable weights
  index_t parameters = 0;              ///< number of parameters of the pruned network
  index_t epochs = 0;                  ///< epochs of all levels so far
  double seconds = 0.0;                ///< training time of all levels so far
  double accuracy = 0.0;               ///< accuracy on the test set, in percent
  index_t dense_bytes = 0, bytes = 0;  ///< payload of a step: all gradients, and those of remaining weights
  friend bool operator==(const lottery_row&, const lottery_row&) = default;
};

/// A search for lottery tickets: iterative magnitude pruning with rewinding to step k (Frankle and Carbin,
/// ICLR 2019; k > 0: Frankle et al., ICML 2020). theta_k is a copy of all values and buffers at step k. Level
/// 0 trains the dense network from theta_k. Level i removes the smallest weights of the trained network of
/// level i - 1 (prune), sets all values and buffers to theta_k and the removed weights to 0 (rewind), and
/// trains again from step k with a new optimizer. Of equal magnitudes, the weight earlier in the arena is
/// removed first.
///
/// The object works on any training loop that masks gradients (mask_gradients, compact_sum). A training_run
/// does so with pruning_options::mask and run_options::first_step. Equal networks give equal masks, so ranks
/// of a distributed run need no communication. Memory: one copy of values and buffers, 1 bit per prunable
/// weight. save_lottery (train/lottery_file.hpp) stores the object between two levels.
///
/// \code
/// lottery<float> tickets(net.store(), {.unpruned = {"fc"}, .parameters = 8'107'466});
/// for (;;) {
///   tickets.rewind(ctx, net.store());
///   train(net, *tickets.mask());          // with a new optimizer, from step tickets.step() on
///   if (tickets.finished()) break;
///   tickets.prune(net.store());
/// }
/// \endcode
template <class T>
class lottery {
 public:
  /// Starts at level 0, the dense network: copies the rewind point theta_k, all values and buffers of the
  /// store, and keeps no reference to the store. `step` is k, the number of training steps before this point.
  /// Throws value_error if options.share is outside 0 .. 1 or a name in options.unpruned is neither a
  /// parameter's nor a layer's, state_error if the values are on a device or in the memory of a host
  /// framework.
  explicit lottery(const parameter_store<T>& store, lottery_options options = {}, std::uint64_t step = 0)
      : options_(std::move(options)),
        step_(step),
        mask_(std::make_shared<const weight_mask>(store, prunable_except(store, options_.unpruned))),
        unpruned_(weight_mask(store).prunable() - mask_->prunable()) {
    detail::check_removal_share("lottery", options_.share);
    check_host(store);
    if (static_cast<index_t>(store.values().size()) != mask_->size()) {
      PUFFERFISH_THROW(state_error("lottery: the values are in the memory of a host framework"));
    }
    values_.assign(store.values().begin(), store.values().end());
    buffers_.assign(store.buffers().begin(), store.buffers().end());
  }

  /// The options given to the constructor.
  const lottery_options& options() const { return options_; }
  int level() const { return level_; }
  /// The step k to which rewind() returns the network.
  std::uint64_t step() const { return step_; }
  /// Mask of the level; the pointer changes with the level. Never nullptr.
  const std::shared_ptr<const weight_mask>& mask() const { return mask_; }
  /// Number of parameters of the level's network: remaining weights and all elements that are not prunable.
  index_t parameters() const { return mask_->survivors(); }
  /// Whether the level has at most options().parameters parameters.
  bool finished() const { return parameters() <= options_.parameters; }

  /// The values at step k, in storage order.
  std::span<const T> values() const { return values_; }
  /// The buffers at step k, in storage order.
  std::span<const T> buffers() const { return buffers_; }

  /// Number of weights that the next prune() removes.
  index_t next_count() const { return count_of(mask_->kept()); }
  /// Number of weights that prune() would remove at a level with `kept` remaining prunable weights.
  index_t count_of(index_t kept) const {
    if (options_.rule == lottery_rule::exact) {
      return detail::removal_count(options_.share, removal_share::of_remaining, kept, mask_->prunable());
    }
    const double of = static_cast<double>(kept + unpruned_);
    return std::min(kept, static_cast<index_t>(std::ceil(options_.share * of)) + 1);
  }

  /// Begins the next level: removes the next_count() smallest |w| of the remaining weights of the trained
  /// network. The store is not changed. Returns the number of removed weights. Throws state_error if the
  /// store has other arenas or its values are on a device; the level is unchanged then.
  index_t prune(const parameter_store<T>& trained) {
    auto next = std::make_shared<weight_mask>(*mask_);
    const index_t removed = prune_smallest(*next, trained, next_count());
    mask_ = std::move(next);
    ++level_;
    return removed;
  }

  /// Sets values and buffers of the store to those of step k, then removed weights to 0. States of optimizers
  /// are not changed: a level needs a new optimizer. Throws state_error if the store has other parameters or
  /// buffers, or its values are on a device.
  void rewind(context<device::cpu>& ctx, parameter_store<T>& store) const {
    check_host(store);
    mask_->check_store(store);
    if (store.buffers().size() != buffers_.size()) {
      detail::throw_error<state_error>({"lottery: made for a network with ", buffers_.size(),
                                        " elements of buffers, this one has ", store.buffers().size()});
    }
    std::ranges::copy(values_, store.values().begin());
    std::ranges::copy(buffers_, store.buffers().begin());
    mask_weights(ctx, *mask_, store);
  }

  /// Results of the levels so far, in the order of the levels.
  const std::vector<lottery_row>& rows() const { return rows_; }
  /// A row of the current level with kept, parameters and bytes filled in; the caller adds the rest.
  lottery_row new_row() const {
    lottery_row row;
    row.level = level_;
    row.kept = mask_->kept();
    row.parameters = parameters();
    row.dense_bytes = mask_->size() * static_cast<index_t>(sizeof(T));
    row.bytes = row.parameters * static_cast<index_t>(sizeof(T));
    return row;
  }
  void add(const lottery_row& row) { rows_.push_back(row); }

  /// The level, the step k and the rows as lines of text, for checkpoints. The mask's bits are stored
  /// separately, as mask_numbers<T>(*mask()).
  std::string to_text() const {
    std::string text = detail::message({"lottery ", level_, " ", step_, " ", describe(options_), "\n"});
    for (const lottery_row& row : rows_) {
      text += detail::message({"row ", row.level, " ", row.kept, " ", row.parameters, " ", row.epochs, " ",
                               row.dense_bytes, " ", row.bytes, " "}) +
              detail::hexadecimal_number(row.seconds) + " " + detail::hexadecimal_number(row.accuracy) + "\n";
    }
    return text;
  }
  /// Restores the state that to_text and mask_numbers have stored; theta_k must be this object's. `source`:
  /// the file's name in errors. Throws io_error for other text, state_error for other options, value_error
  /// for other numbers; the object is unchanged then.
  void restore(const std::string& text, std::span<const T> numbers, const std::string& source) {
    lottery other = *this;
    other.rows_.clear();
    other.level_ = -1;  // no line of the state yet
    const std::string mine = describe(options_);
    detail::for_each_line(detail::shorten_numbers(text),
                          [&](std::string_view line) { other.read(line, mine, source); });
    if (other.level_ < 0) {
      detail::throw_error<io_error>({source, ": there is no level of a search of lottery tickets"});
    }
    auto mask = std::make_shared<weight_mask>(*mask_);
    set_mask_numbers(*mask, numbers);
    other.mask_ = std::move(mask);
    *this = std::move(other);
  }

 private:
  // Throws state_error for values on a device.
  static void check_host(const parameter_store<T>& store) {
    if (!store.on_host()) {
      PUFFERFISH_THROW(state_error("lottery: the values are on a device: use model::on_host"));
    }
  }

  // Reads a line of to_text(). Throws io_error or state_error, naming `source`, for another one.
  void read(std::string_view line, const std::string& mine, const std::string& source) {
    const bool is_row = line.starts_with("row ");
    const std::string_view head = is_row ? "row " : "lottery ";
    bool good = line.starts_with(head);
    if (good) line.remove_prefix(head.size());
    if (is_row) {
      lottery_row row;
      good = detail::record_line(line)
                 .read(row.level, row.kept, row.parameters, row.epochs, row.dense_bytes, row.bytes,
                       row.seconds, row.accuracy)
                 .complete();
      rows_.push_back(row);
    } else if (good) {
      const std::size_t at = line.find(' ', line.find(' ') + 1);
      good = at != std::string_view::npos &&
             detail::record_line(line.substr(0, at)).read(level_, step_).complete();
      if (good && line.substr(at + 1) != mine) {
        detail::throw_error<state_error>(
            {source, ": made by lottery tickets of ", line.substr(at + 1), "; these have ", mine});
      }
    }
    if (!good) detail::throw_error<io_error>({source, ": this is no line of lottery tickets: ", line});
  }

  lottery_options options_;
  std::uint64_t step_;
  int level_ = 0;
  std::shared_ptr<const weight_mask> mask_;
  index_t unpruned_;  // number of weights that are not prunable because of options_.unpruned
  std::vector<T> values_, buffers_;
  std::vector<lottery_row> rows_;
};

PUFFERFISH_NAMESPACE_END
