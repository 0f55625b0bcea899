// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the driver of a gradient exchange by a communicator's functions for memory of the host.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/distributed/exchange/bucket_thread.hpp>
#include <pufferfish/distributed/exchange/gradient_reducer.hpp>
#include <pufferfish/distributed/exchange/gradient_staging.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The buckets of an exchange, the memory in which they are exchanged, and the reducer that exchanges them.
/// One thread at a time works on bucket b, after staging.await(b).
template <class T, class Comm, class Device>
struct bucket_work {
  static constexpr bool on_device = gradient_staging<T, Device>::copies;

  /// Makes reducer, buckets and memory for a store. Collective: throws on all ranks if the options of one
  /// rank are invalid.
  bucket_work(parameter_store<T>& store, Comm& comm, const exchange_options& options,
              std::optional<any_compressor<T>> compressor)
      : reducer(store, comm, options, std::move(compressor)),
        buckets(cut_buckets(store, reducer.plan().buckets)),
        clears(on_device && comm.size() == 1 && reducer.is_packed_mean()),
        staging(store, buckets.size(), options.memory, works(), places()) {}

  /// Whether buckets are exchanged during the backward pass.
  bool overlapped() const { return changes() && reducer.by_bucket(); }
  /// Whether finish changes gradients.
  bool changes() const {
    return !buckets.empty() && !reducer.is_local() && !clears &&
           (reducer.comm().size() > 1 || reducer.has_compressor());
  }
  /// Whether finish changes or checks gradients.
  bool works() const { return changes() || (!buckets.empty() && reducer.checks_finite()); }

  /// Gradients of bucket b in the memory in which they are exchanged.
  std::span<T> gradients_of(std::size_t b) { return staging.gradients_of(b, buckets[b]); }
  /// Checks a bucket's own gradients, before the sum.
  void check_finite(std::size_t b) { reducer.check_finite(gradients_of(b), buckets[b].offset); }
  /// Ends the step after all buckets. Returns and throws the errors of gradient_reducer::close.
  bool close() { return reducer.close(staging.host(*ctx), staging.gradients()); }

  gradient_reducer<T, Comm> reducer;
  const std::vector<gradient_bucket> buckets;
  const bool clears;  ///< the only rank's exchange sets elements to zero, on the device
  gradient_staging<T, Device> staging;
  context<Device>* ctx = nullptr;  ///< of the last step that has begun

 private:
  // Elements that are sent of each bucket of a device; empty: all. The compressor then gets them alone.
  std::vector<std::vector<std::int32_t>> places() {
    if (!on_device || buckets.empty()) return {};
    return reducer.pack();
  }
};

/// The driver for communicators whose functions take memory of the host, such as mpi::communicator;
/// exchange_driver.hpp has the contracts of the members. Buckets are exchanged by a bucket_thread or by
/// calls: sums of ready buckets are started and polled if they can be, and all other work is done in finish.
/// Captured steps always use the thread.
template <class T, class Comm, class Device>
class host_driver {
 public:
  static constexpr bool on_device = gradient_staging<T, Device>::copies;

  /// Store, communicator and `failure` must outlive the object. Collective: throws on all ranks if the
  /// options of one rank are invalid.
  host_driver(parameter_store<T>& store, Comm& comm, const exchange_options& options,
              std::optional<any_compressor<T>> compressor, exchange_failure& failure)
      : work_(store, comm, options, std::move(compressor)), thread_(work_, failure) {}
  host_driver(const host_driver&) = delete;
  host_driver& operator=(const host_driver&) = delete;
  ~host_driver() {
    staging_.drain();  // work in streams may notify the thread, or wait for it
    thread_.stop();
    if constexpr (on_device) {
      if (gave_up(reducer_.comm())) staging_.keep_host_memory();
    }
  }

  std::string option_lines() const { return reducer_.option_lines(buckets()); }
  // Throws value_error if the gradients are on the host and the options ask for another memory than staged.
  void start() {
    if (!on_device && reducer_.options().memory != exchange_memory::staged) {
      PUFFERFISH_THROW(
          value_error("gradient_exchange: exchange_memory::device, but no gradients on a device"));
    }
    check_device_memory(reducer_.options(), reducer_.comm());
    if (is_threaded()) all_or_none(reducer_.comm(), "gradient_exchange", [this] { thread_.start(); });
  }

  const std::vector<gradient_bucket>& buckets() const { return work_.buckets; }
  const exchange_plan& plan() const { return reducer_.plan(); }
  bool with_thread() const { return reducer_.with_thread(); }
  index_t payload_bytes() const { return reducer_.payload_bytes(); }
  exchange_counts& counts() { return reducer_.counts(); }
  const exchange_counts& counts() const { return reducer_.counts(); }
  bool arrives_early() const { return work_.overlapped() && !reducer_.checks_finite(); }
  bool can_be_captured() const {
    return !work_.works() ||
           (reducer_.options().memory != exchange_memory::device && reducer_.may_have_thread());
  }
  // A bucket on a device is copied to the host as soon as it is complete, even if it is exchanged in finish.
  bool listens() const { return work_.overlapped() || (on_device && work_.works()); }
  const int* skip() const requires(on_device) { return staging_.skip(); }

  std::vector<compressor_state<T>> states() { return reducer_.states(); }
  void set_epoch(index_t epoch, double learning_rate) { reducer_.set_epoch(epoch, learning_rate); }
  // Only compressors read the learning rate. Replays under way still read the old one, so they are awaited
  // first.
  void set_rate(context<Device>& ctx, double learning_rate) {
    if (!reducer_.has_compressor() || learning_rate == reducer_.learning_rate()) return;
    await_replays(ctx);
    reducer_.set_rate(learning_rate);
  }

  bool is_captured(const context<Device>& ctx) const { return staging_.is_captured(ctx); }
  void prepare(context<Device>& ctx, bool captured) {
    if (!captured) await_replays(ctx);
  }
  void begin(context<Device>& ctx, bool captured) {
    captured_ = captured;
    captured ? prepare_capture(ctx) : reducer_.restart();
    // No needless write: the thread may be reading it for a replay of an earlier capture.
    if (work_.ctx != &ctx) work_.ctx = &ctx;
    requests_.clear();
  }

  void release(std::size_t b) {
    const bool notifies = captured_ || is_threaded();
    staging_.fetch(*work_.ctx, b, buckets()[b], notifies ? thread_.notification(b, captured_) : host_call{});
  }
  void progress(std::size_t released) {
    if (work_.overlapped() && !with_thread() && !captured_) poll(released);
  }
  void zero_unwritten(context<Device>& ctx) { staging_.zero_unwritten(ctx); }

  template <class Take>
  bool finish(context<Device>& ctx, Take&& take) {
    if constexpr (on_device) {
      if (captured_) return finish_captured(ctx, take);
    }
    if (arrives_early()) {
      staging_.publish(ctx, true);
      return finish_direct(take);
    }
    const bool usable = finish_direct([](std::size_t) {});
    staging_.publish(ctx, usable);
    for (std::size_t b = 0; usable && b < buckets().size(); ++b) take(b);
    return usable;
  }
  void deliver(context<Device>& ctx, std::size_t b) {
    if (work_.changes()) staging_.write_back(ctx, b, buckets()[b], reducer_.mean_factor());
    if constexpr (on_device) {
      if (work_.clears) staging_.clear_others(ctx, b, buckets()[b]);
    }
  }
  void count_times(double exposed, double updating) {
    if (captured_) return;  // replays count their own
    counts().report().update_ms += updating;
    if (work_.changes()) counts().report().exposed_ms += exposed;
  }

 private:
  // A started sum; a default-made one stands for a bucket whose sum is made in finish().
  using request = decltype(std::declval<Comm&>().start_all_reduce_sum(std::span<T>()));

  // Whether the thread exchanges the buckets of direct steps.
  bool is_threaded() const { return work_.overlapped() && with_thread(); }

  // Replays under way use the communicator and the thread.
  void await_replays([[maybe_unused]] context<Device>& ctx) {
    if constexpr (on_device) {
      if (ever_captured_) ctx.synchronize();
    }
  }

  // Whether the sum of bucket b is started as soon as the bucket is fetched, and then polled.
  bool starts(std::size_t b) { return work_.overlapped() && reducer_.starts(work_.gradients_of(b)); }
  // Starts sums of ready buckets if they can be started, and lets started sums progress.
  void poll(std::size_t released) {
    for (std::size_t b = requests_.size(); b < released && staging_.is_fetched(b); ++b) {
      work_.check_finite(b);
      requests_.push_back(starts(b) ? reducer_.comm().start_all_reduce_sum(work_.gradients_of(b))
                                    : request());
    }
    for (request& r : requests_) r.done();
  }

  // Exchanges the buckets of a direct step, by the thread or by calls, and closes the step.
  template <class Take>
  bool finish_direct(Take&& take) {
    return is_threaded() ? thread_.finish(take) : finish_by_calls(take);
  }
  // Exchanges all buckets in order. While one is exchanged, started sums of later ones progress.
  template <class Take>
  bool finish_by_calls(Take&& take) {
    for (std::size_t b = 0; work_.works() && b < buckets().size(); ++b) {
      if (b == requests_.size()) {
        staging_.await(b);
        poll(buckets().size());
      }
      if (starts(b)) {
        requests_[b].wait();
        scale_values(work_.gradients_of(b), reducer_.mean_factor());
        poll(buckets().size());
      } else if (work_.overlapped()) {
        reducer_.reduce(b, work_.gradients_of(b));
      }
      take(b);
    }
    requests_.clear();
    return work_.close();
  }

  // Captured steps: the work of a direct step, put into the graph as host functions. Throws state_error if
  // the options exclude them.

  void prepare_capture([[maybe_unused]] context<Device>& ctx) {
    if (!work_.works()) return;
    reducer_.require_capturable();
    if constexpr (on_device) staging_.leave_failures_to(ctx);
    ever_captured_ = true;
    thread_.start();
  }
  // CUDA may run host functions one at a time, in any order that the streams allow. So those that wait for
  // the thread come after all that notify the thread: every rank's buckets are then under way before any
  // rank waits for one, and no wait can block the notification that it waits for.
  template <class Take>
  bool finish_captured(context<Device>& ctx, Take&& take) {
    const std::size_t count = buckets().size();
    work_.works() ? staging_.join(ctx) : staging_.call(ctx, {&host_driver::count_replay, this});
    for (std::size_t b = 0; b < count; ++b) {
      if (work_.works() && (arrives_early() || b == 0)) {
        staging_.call(ctx, thread_.wait(arrives_early() ? b : count - 1));
        staging_.publish_replayed(ctx);
      }
      take(b);
    }
    return true;
  }
  // Counts a replay of a step that neither changes nor checks gradients.
  static void count_replay(void* object) {
    exchange_counts& counts = static_cast<host_driver*>(object)->counts();
    counts.add_step();
    counts.count_step();
  }

  bucket_work<T, Comm, Device> work_;
  gradient_reducer<T, Comm>& reducer_ = work_.reducer;
  gradient_staging<T, Device>& staging_ = work_.staging;
  bucket_thread<bucket_work<T, Comm, Device>> thread_;
  std::vector<request> requests_;  // of the buckets that are fetched, in polled steps
  bool captured_ = false, ever_captured_ = false;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
