// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `accordion`: PowerSGD or top-k that compresses a matrix less while its gradients change a lot.

#include <algorithm>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <pufferfish/compress/accordion/accordion_methods.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of accordion. `low` and `high` are options of the same type, equal except for rank or ratio, of
/// which `high` has the smaller one.
///
///     accordion_options{.low = power_sgd_options{4}, .high = power_sgd_options{1}}
///     accordion_options{.low = top_k_options{0.99}, .high = top_k_options{0.1}}
struct accordion_options {
  std::variant<power_sgd_options, top_k_options> low = power_sgd_options{2};   ///< the low compression
  std::variant<power_sgd_options, top_k_options> high = power_sgd_options{1};  ///< the high compression
  double threshold = 0.5;  ///< eta: relative change of a norm from which on a matrix gets the low compression
  index_t interval = 10;   ///< I: levels are decided after epochs 0, I, 2 I, ...

  /// Throws value_error, naming the option, for a threshold or an interval out of its range, and for a rank
  /// of `high` below 1. Throws value_error, with the descriptions of both levels, unless they are of one
  /// type, differ in rank or ratio only, and low has at least the rank or ratio of high; and for top-k with
  /// another scope than `tensor` or another route than `gather`. The rank of `low` and both ratios are
  /// checked by the constructors of the methods.
  void validate() const {
    if (!(threshold >= 0.0)) {
      detail::throw_error<value_error>({"accordion: threshold ", threshold, " is not at least 0"});
    }
    if (interval < 1) {
      detail::throw_error<value_error>({"accordion: interval ", interval, " is not at least 1"});
    }
    std::visit([](const auto& one, const auto& other) { check_levels(one, other); }, low, high);
  }

 private:
  // The option by which levels differ: the rank of PowerSGD, the ratio of top-k.
  static double level_of(const power_sgd_options& options) { return static_cast<double>(options.rank); }
  static double level_of(const top_k_options& options) { return options.ratio; }

  // Throws the errors of validate() for the two levels.
  template <class Low, class High>
  static void check_levels(const Low& low, const High& high) {
    bool alike = false;
    if constexpr (std::is_same_v<Low, High>) {
      Low other = high;
      if constexpr (requires { other.rank; }) {
        if (high.rank < 1) {
          detail::throw_error<value_error>({"accordion: rank of high ", high.rank, " is not at least 1"});
        }
        other.rank = low.rank;
      } else {
        other.ratio = low.ratio;
        if (low.scope != top_k_scope::tensor || low.route != code_route::gather) {
          PUFFERFISH_THROW(value_error("accordion: \"" + describe(low) +
                                       "\"; top-k must be per tensor and travel by a gather"));
        }
      }
      alike = describe(other) == describe(low) && level_of(low) >= level_of(high);
    }
    if (!alike) {
      PUFFERFISH_THROW(value_error("accordion: low \"" + describe(low) + "\" and high \"" + describe(high) +
                                   "\"; they must differ in the rank or ratio only, and low has the larger"));
    }
  }
};

namespace detail {

/// The options as text, without those of the low method: "Accordion, threshold 0.5, interval 10, high rank 1,
/// low: PowerSGD, ...". `low`: the description of the low method.
inline std::string describe_accordion(const accordion_options& options, const std::string& low) {
  const auto level = [](const auto& one) {
    if constexpr (requires { one.rank; }) return message({"rank ", one.rank});
    if constexpr (requires { one.ratio; }) return "ratio " + shortest_number(one.ratio);
  };
  return message({"Accordion, threshold ", shortest_number(options.threshold), ", interval ",
                  options.interval, ", high ", std::visit(level, options.high), ", low: ", low});
}

}  // namespace detail

/// The options as text: "Accordion, threshold 0.5, interval 10, high rank 1, low: PowerSGD, rank 2, local
/// error feedback, least saving 1, seed 1".
inline std::string describe(const accordion_options& options) {
  return detail::describe_accordion(options,
                                    std::visit([](const auto& low) { return describe(low); }, options.low));
}

/// Compressor that switches each matrix between a low and a high compression of a method, PowerSGD or top-k
/// (Agarwal, Wang, Lee, Venkataraman and Papailiopoulos, Accordion, MLSys 2021). At first each matrix has the
/// low compression. Let s_e be the sum of the gradients of rank 0 for a matrix over the steps of epoch e.
/// After epochs e = 0, I, 2 I, ...:
///
///     Delta_e = ||s_e||;  low if |Delta_e - Delta_(e - I)| >= eta Delta_(e - I), else high
///
/// After the first such epoch, and where Delta_(e - I) is 0, the level is low. If an epoch has a smaller
/// learning rate than the previous epoch, all levels become low until the next decision. Epoch and learning
/// rate are those of gradient_exchange::set_epoch at the first step of an epoch. Vectors are sent whole, as
/// are matrices for which the low PowerSGD does not save enough (power_sgd_options::least_saving).
///
/// A change of level keeps the memory of error feedback; PowerSGD draws a new Q for the matrix.
///
/// A step has one round of messages more than a step of the method. In this round rank 0 sends one byte per
/// matrix to all ranks in the first step after such an epoch; in other steps the round is empty.
///
/// Collective behavior: all ranks must see the same epochs and rates, so set_epoch is called with equal
/// arguments on all ranks. Rank 0 needs memory for one more array of the gradients' size, for the sums.
///
/// With exchange_options::compress_by_bucket every bucket has an added round of its own, which sends the
/// levels of the bucket's matrices. The level of a matrix depends on its own gradients alone, so all levels
/// are those of an exchange without buckets.
///
/// \code
/// accordion_options options{.low = power_sgd_options{4}, .high = power_sgd_options{1}};
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, options);
/// for (index_t epoch = 0; epoch < epochs; ++epoch) {
///   exchange.set_epoch(epoch, learning_rate);  // without this call all matrices keep the low compression
///   // steps of the epoch
/// }
/// \endcode
///
/// `Method` is detail::power_sgd_levels or detail::top_k_levels: a compressor with ranges(),
/// set_levels(levels, step) and restore_levels(levels), one level per range.
template <class Method>
class accordion {
 public:
  using value_type = typename Method::value_type;

  /// Makes the compressor. `method`: the method, with all levels low. `size`: number of elements of the
  /// gradient arena. Throws the errors of accordion_options::validate.
  accordion(Method method, index_t size, const accordion_options& options)
      : options_((options.validate(), options)),
        method_(std::move(method)),
        schedule_(method_.ranges(), size, options.threshold, options.interval) {
    start(0, 1);
    applied_.assign(schedule_.levels().begin(), schedule_.levels().end());
  }

  /// A compressor of elements [begin, end) of the arena, in which no epoch has begun.
  accordion part(index_t begin, index_t end) const {
    return {method_.part(begin, end), end - begin, options_};
  }

  /// Sets sums and norms to zero. Levels are kept. Only rank 0 has sums and norms.
  void start(int rank, int) { schedule_.start(rank); }
  /// Number of rounds of messages in a step: 3 for PowerSGD, 2 for top-k.
  int rounds() const { return 1 + method_.rounds(); }

  /// Prepares the message of a round. Round 0: in the first step after an epoch after which levels are
  /// decided, rank 0 decides them, and the message gathers its block; otherwise the message is empty. Round r
  /// > 0: encodes round r - 1 of the method.
  compressor_message<value_type> encode(context<device::cpu>& ctx, const exchange_place& place, int round,
                                        std::span<value_type> gradients) {
    if (round > 0) return method_.encode(ctx, place, round - 1, gradients);
    // Levels that were read from a checkpoint: the states of the method have been read with them.
    if (update_applied()) method_.restore_levels(applied_);
    const bool due = schedule_.enters(place) && schedule_.is_due();
    std::vector<std::size_t> lengths(static_cast<std::size_t>(place.ranks), 0);
    if (due) lengths[0] = applied_.size();
    decided_.resize(lengths);
    compressor_message<value_type> message;
    if (!due) return message;
    if (place.rank == 0) schedule_.decide(ctx, decided_[0]);
    message.gathered = &decided_;
    return message;
  }

  /// Completes a round. Round 0: if the step is the first one of an epoch, begins the epoch with the levels
  /// that rank 0 has decided; then adds the gradients to the sum on rank 0. Round r > 0: decodes round r - 1
  /// of the method.
  void decode(context<device::cpu>& ctx, const exchange_place& place, int round,
              std::span<value_type> gradients) {
    if (round > 0) return method_.decode(ctx, place, round - 1, gradients);
    if (schedule_.enters(place)) {
      schedule_.enter(ctx, place, std::as_const(decided_)[0]);
      if (update_applied()) method_.set_levels(applied_, place.step);
    }
    schedule_.add(ctx, gradients);
  }

  /// Bytes that this rank contributes to a step with the present levels, without the bytes of a decision.
  index_t payload_bytes() const { return method_.payload_bytes(); }

  /// States for checkpoints: those of the method; then "exchange.epoch_sum" and "exchange.epoch_norms", which
  /// are empty except on rank 0; and "exchange.levels" (epoch, learning rate, levels), equal on all ranks.
  std::vector<compressor_state<value_type>> states() {
    std::vector<compressor_state<value_type>> result = method_.states();
    for (const auto& state : schedule_.states()) result.push_back(state);
    return result;
  }

  /// The text of describe(options) with the line of the method in place of its options.
  std::string describe() const { return detail::describe_accordion(options_, method_.describe()); }

 private:
  // Copies the levels to applied_. Returns whether this changes applied_.
  bool update_applied() {
    const std::span<const value_type> levels = schedule_.levels();
    if (std::equal(levels.begin(), levels.end(), applied_.begin())) return false;
    applied_.assign(levels.begin(), levels.end());
    return true;
  }

  accordion_options options_;
  Method method_;
  detail::accordion_schedule<value_type> schedule_;
  std::vector<value_type> applied_;  // the levels that the method works with
  rank_blocks decided_;              // the levels of a decision, in the block of rank 0
};

/// Accordion for the gradients of a store. Throws value_error for options out of range or whose levels do not
/// match.
template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const accordion_options& options) {
  options.validate();
  const std::vector<coded_tensor> tensors = coded_tensors(store);
  const index_t size = coded_size(tensors);
  if (const auto* low = std::get_if<power_sgd_options>(&options.low)) {
    using method = detail::power_sgd_levels<T>;
    return accordion(method(tensors, *low, std::get<power_sgd_options>(options.high)), size, options);
  }
  using method = detail::top_k_levels<T>;
  const auto& high = std::get<top_k_options>(options.high);
  return accordion(method(tensors, std::get<top_k_options>(options.low), high), size, options);
}

PUFFERFISH_NAMESPACE_END
