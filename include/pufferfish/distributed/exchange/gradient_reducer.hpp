// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the work of a gradient exchange on buckets: means or compression, and the check for numbers that
/// are not finite. Called by host_driver, bucket_thread and fragment_exchanges.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/distributed/collectives/sparse_all_reduce.hpp>
#include <pufferfish/distributed/exchange/exchange_counts.hpp>
#include <pufferfish/distributed/exchange/option_checks.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Replaces gradients by their means over the ranks or by a compressor's result, and checks for numbers that
/// are not finite. One thread at a time may use an object, not always the same. Calls of a step, all ranks
/// alike:
///
///     reducer.restart();
///     for (b ...) reducer.check_finite(part(b), buckets[b].offset);
///     if (reducer.by_bucket()) for (b ...) reducer.reduce(b, part(b));
///     const bool usable = reducer.close(ctx, all_gradients);
template <class T, class Comm>
class gradient_reducer {
 public:
  /// Checks the options. Store and communicator must outlive the object. Collective: throws on all ranks if
  /// the options of one rank are invalid.
  gradient_reducer(const parameter_store<T>& store, Comm& comm, const exchange_options& options,
                   std::optional<any_compressor<T>> compressor)
      : store_(&store),
        arena_(store.gradient_memory()),
        comm_(&comm),
        options_(options),
        compressor_(std::move(compressor)) {
    options_.progress = resolved_progress();
    all_or_none(comm, "gradient_exchange", [this] {
      plan_ = checked_plan(options_, comm_->size());
      check_options(options_, compressor_, *comm_);
      if (!compressor_) return;
      if (options_.compress_by_bucket) compressor_->split(cut_buckets(*store_, plan_.buckets));
      compressor_->start(comm_->rank(), comm_->size());
    });
  }
  gradient_reducer(const gradient_reducer&) = delete;
  gradient_reducer& operator=(const gradient_reducer&) = delete;
  /// After a timeout, messages may still arrive in the gradients and the buffers, so these are kept for good.
  ~gradient_reducer() {
    if (!gave_up(*comm_)) return;
    keep_for_good(arena_);
    keep_for_good(std::make_shared<std::vector<T>>(std::move(scratch_)));
    keep_for_good(std::make_shared<std::vector<bfloat16>>(std::move(bf16_scratch_)));
    keep_for_good(std::make_shared<std::vector<float16>>(std::move(fp16_scratch_)));
    keep_for_good(std::make_shared<std::optional<any_compressor<T>>>(std::move(compressor_)));
  }

  /// The communicator, and the plan in use, which is the same on all ranks.
  Comm& comm() const { return *comm_; }
  const exchange_plan& plan() const { return plan_; }
  bool has_compressor() const { return compressor_.has_value(); }
  bool is_local() const { return options_.local; }
  /// Whether a bucket can be reduced before all others have come.
  bool by_bucket() const { return !compressor_ || options_.compress_by_bucket; }
  const exchange_options& options() const { return options_; }
  bool checks_finite() const { return detail::checks_finite(options_); }
  /// Whether the compressor may get only some elements of each bucket (any_compressor::pack): it works bucket
  /// by bucket, and nothing else looks at all elements. pack() then returns these elements, else nothing.
  bool can_pack() const {
    return compressor_ && options_.compress_by_bucket && !checks_finite() && compressor_->can_pack();
  }
  /// Lists, for each bucket, the elements that the compressor gets; an empty list if it gets all.
  std::vector<std::vector<std::int32_t>> pack() {
    if (!can_pack()) return {};
    return compressor_->pack();
  }
  /// Whether the result of packed elements is their mean.
  bool is_packed_mean() const { return can_pack() && compressor_->is_mean(); }
  /// Whether a thread other than the caller's may do the work.
  bool may_have_thread() const { return comm_->size() == 1 || usable_from_threads(*comm_); }
  /// Whether a thread of the exchange does the work in every step.
  bool with_thread() const { return options_.progress == exchange_progress::thread; }
  exchange_counts& counts() { return counts_; }
  const exchange_counts& counts() const { return counts_; }
  /// 1 / (number of ranks): the mean is the sum times this factor.
  T mean_factor() const { return T(1) / static_cast<T>(comm_->size()); }

  /// Views of the compressor's states; empty without a compressor.
  std::vector<compressor_state<T>> states() {
    if (!compressor_) return {};
    return compressor_->states();
  }
  /// Sets the epoch and its learning rate, which compressors get.
  void set_epoch(index_t epoch, double learning_rate) {
    epoch_ = epoch;
    epoch_rate_ = learning_rate;
    learning_rate_ = learning_rate;
  }
  /// Learning rate of the next steps; set_epoch sets it, too.
  double learning_rate() const { return learning_rate_; }
  /// Sets the learning rate of the next steps within an epoch.
  void set_rate(double learning_rate) { learning_rate_ = learning_rate; }

  /// Bytes of the messages of one rank in a step, as far as they are known before; 0 if nothing is sent.
  index_t payload_bytes() const {
    if (is_local()) return 0;
    if (compressor_) return compressor_->payload_bytes();
    return gradient_bytes(*store_, options_.wire);
  }

  /// Text of the options that must be equal on all ranks.
  std::string option_lines(const std::vector<gradient_bucket>& buckets) const {
    const std::string how = std::string("progress by ") + (with_thread() ? "a thread" : "calls") +
                            "\nmemory " + to_string(options_.memory) + "\n";
    return to_text(buckets) + order_lines(plan_) + detail::option_lines(options_, compressor_, how);
  }
  /// Throws state_error unless the work may be part of a captured step.
  void require_capturable() const {
    if (options_.memory == exchange_memory::device) {
      PUFFERFISH_THROW(
          state_error("gradient_exchange: exchange_memory::device in a captured step: MPI's own work on the "
                      "device could wait for a graph that waits for MPI"));
    }
    if (!may_have_thread()) {
      PUFFERFISH_THROW(state_error(
          "gradient_exchange: a captured step needs a communicator that any thread may use "
          "(MPI_THREAD_SERIALIZED or more); or direct begin and finish after the graph's launch"));
    }
  }

  /// The algorithm for a message of these elements: that of the options; else the library's, in polled steps
  /// without a compressor; else that of the plan.
  all_reduce_algorithm algorithm_for(std::span<const T> values) const {
    if (options_.algorithm != all_reduce_algorithm::automatic) return options_.algorithm;
    if (!with_thread() && !compressor_) return all_reduce_algorithm::library;
    return plan_.algorithm_for(values.size_bytes());
  }

  /// Whether the sum is started (start_all_reduce_sum) and polled, instead of blocking.
  bool starts(std::span<const T> values) const {
    return !compressor_ && !is_narrow(options_.wire) && options_.memory == exchange_memory::staged &&
           algorithm_for(values) == all_reduce_algorithm::library;
  }

  // Calls of a step, in order: restart, check_finite for all gradients, reduce per bucket if by_bucket(),
  // close.
  /// Begins a step. Not collective.

  void restart() {
    local_nonfinite_ = -1;
    counts_.restart();
  }

  /// Remembers the first element of the step that is not finite, if the options ask for the check. `offset`:
  /// place of the first of these gradients in the arena.
  void check_finite(std::span<const T> gradients, index_t offset) {
    if (!checks_finite() || local_nonfinite_ >= 0) return;
    const index_t found = find_nonfinite(gradients);
    if (found >= 0) local_nonfinite_ = offset + found;
  }

  /// Replaces the gradients of a bucket by their means over the ranks or by a compressor's result, in place.
  /// With exchange_memory::device they become the sums. Collective. Throws the errors of the communicator,
  /// such as timeout_error.
  void reduce(std::size_t bucket, std::span<T> values) {
    if (!compressor_) return average(values);
    check_not_given_up(*comm_);
    compress(one_thread_, values, bucket);
  }

  /// Ends a step; a compressor for all buckets at once works here. Returns whether the optimizer step may be
  /// taken. Throws value_error on all ranks if a gradient is not finite and the policy is
  /// nonfinite_policy::stop, and if a compressor's result is not finite though all gradients are. Collective.
  bool close(context<device::cpu>& ctx, std::span<T> gradients) {
    const bool sums = !compressor_ && !is_local() && comm_->size() > 1;
    sums ? counts_.add_step(*store_, options_.wire) : counts_.add_step();
    bool usable = true;
    if (compressor_ && !options_.compress_by_bucket) {
      usable = compress_all(ctx, gradients);
    } else {
      usable = usable_everywhere() && (!sums || usable_result(gradients)) &&
               (!compressor_ || require_finite(gradients));
    }
    if (usable) counts_.count_step();
    return usable;
  }

 private:
  using clock = std::chrono::steady_clock;

  // The progress of the options; for `automatic` a thread if the communicator allows one. A compressor for
  // all buckets at once has no work before the last bucket, and needs no thread.
  exchange_progress resolved_progress() const {
    if (compressor_ && !options_.compress_by_bucket) return exchange_progress::calls;
    if (options_.progress != exchange_progress::automatic) return options_.progress;
    return usable_from_threads(*comm_) ? exchange_progress::thread : exchange_progress::calls;
  }
  // Replaces `values` by the mean over the ranks, by the memory, wire and algorithm of the options; on a
  // device by the sum.
  void average(std::span<T> values) {
    if (options_.memory == exchange_memory::device) {
      if constexpr (requires { comm_->all_reduce_sum_on_device(values); }) {
        comm_->all_reduce_sum_on_device(values);
      } else {
        comm_->all_reduce_sum(values);
      }
    } else if (options_.wire == exchange_wire::bf16) {
      narrow_all_reduce(*comm_, values, bf16_scratch_, mean_factor());
    } else if (options_.wire == exchange_wire::fp16) {
      narrow_all_reduce(*comm_, values, fp16_scratch_, mean_factor());
    } else if (starts(values) && !with_thread()) {
      // In a replay: the same started sum as in a direct step, since MPI may add in another order otherwise.
      comm_->start_all_reduce_sum(values).wait();
      scale_values(values, mean_factor());
    } else {
      all_reduce_by(algorithm_for(values), *comm_, values, scratch_, mean_factor());
    }
  }

  // Compresses all gradients at once. Returns false if the step is left out.
  bool compress_all(context<device::cpu>& ctx, std::span<T> gradients) {
    check_not_given_up(*comm_);
    // Checked before the compressor takes the gradients into its state.
    if (!usable_everywhere()) return false;
    compress(ctx, gradients);
    return require_finite(gradients);
  }

  // Returns true. Throws value_error if a compressor's result is not finite, though all gradients are.
  bool require_finite(std::span<const T> result) {
    if (usable_result(result)) return true;
    counts_.throw_nonfinite();
  }

  // Makes all rounds of a step of the compressor, for all gradients or those of a bucket.
  void compress(context<device::cpu>& ctx, std::span<T> gradients, std::size_t bucket = 0) {
    const exchange_place place{comm_->rank(), comm_->size(),  counts_.steps(),
                               epoch_,        learning_rate_, epoch_rate_};
    for (int round = 0; round < compressor_->rounds(); ++round) {
      const auto start = clock::now();
      const compressor_message<T> message = compressor_->encode(ctx, place, round, gradients, bucket);
      counts_.report().encode_ms += milliseconds_since(start);
      if (place.ranks > 1) counts_.report().payload_bytes += message.payload_bytes(place.rank);
      send(message);
      const auto decoding = clock::now();
      compressor_->decode(ctx, place, round, gradients, bucket);
      counts_.report().decode_ms += milliseconds_since(decoding);
    }
  }

  // Makes the collectives of a message, in the order of its members. Collective.
  void send(const compressor_message<T>& message) {
    if (comm_->size() > 1 && !message.sum.empty()) {
      all_reduce_by(algorithm_for(message.sum), *comm_, message.sum, scratch_);
    }
    if (!message.maxima.empty()) comm_->all_reduce_max(message.maxima);
    if (message.sends_length) {
      gather_blocks(*comm_, message.own, *message.gathered);
    } else if (message.gathered != nullptr) {
      gather_blocks(*comm_, *message.gathered);
    }
    if (message.to_ranks != nullptr) exchange_blocks(*comm_, *message.to_ranks, *message.from_ranks);
    if (message.sparse != nullptr) sparse_all_reduce(*comm_, *message.sparse);
  }

  // Whether all ranks' own gradients are finite. Collective.
  bool usable_everywhere() {
    if (!checks_finite()) return true;
    const auto found = comm_->all_gather(static_cast<std::uint64_t>(local_nonfinite_ + 1));
    const auto first = std::find_if(found.begin(), found.end(), [](std::uint64_t f) { return f != 0; });
    if (first == found.end()) return true;
    return refuse(static_cast<index_t>(*first) - 1, static_cast<int>(first - found.begin()));
  }

  // Whether the exchanged gradients are finite. They are equal on all ranks, and so is the result.
  bool usable_result(std::span<const T> gradients) {
    if (!checks_finite()) return true;
    const index_t found = find_nonfinite(gradients);
    return found < 0 || refuse(found, -1);
  }

  // Notes the non-finite element; rank -1: of the result. Returns false, or throws for
  // nonfinite_policy::stop.
  bool refuse(index_t element, int rank) {
    // After a non-finite result a compressor's state is unusable: then the step counts as failed.
    return counts_.refuse(name_nonfinite(*store_, element, rank), options_.nonfinite,
                          !compressor_ || rank >= 0);
  }

  const parameter_store<T>* store_;
  std::shared_ptr<const void> arena_;  // memory of the gradients
  Comm* comm_;
  exchange_plan plan_;
  exchange_options options_;
  std::optional<any_compressor<T>> compressor_;
  context<device::cpu> one_thread_;  // for compressing buckets, while the backward pass uses all threads
  std::vector<T> scratch_;           // for the all-reduce algorithms of this library
  std::vector<bfloat16> bf16_scratch_;
  std::vector<float16> fp16_scratch_;
  index_t epoch_ = 0;  // of set_epoch
  double learning_rate_ = 0.0, epoch_rate_ = 0.0;
  index_t local_nonfinite_ = -1;  // arena offset of this rank's first non-finite gradient; -1: none
  exchange_counts counts_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
