// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gradient_exchange`: averages the gradient arena over all ranks, bucket by bucket, while the backward pass
/// still runs; or through a compressor, after it.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/distributed/exchange/bucket_counter.hpp>
#include <pufferfish/distributed/exchange/exchange_failure.hpp>
#include <pufferfish/distributed/exchange/gradient_reducer.hpp>
#include <pufferfish/distributed/exchange/gradient_staging.hpp>
#include <pufferfish/distributed/exchange/job_thread.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Averages gradients in place. The exchange of a bucket starts as soon as all of its gradients are written,
/// in the order of the arena on every rank. Nothing is packed: messages are sent from the gradient arena.
///
///     gradient_exchange<float, mpi::communicator> exchange(net.store(), comm);
///     exchange.begin(ctx);          // before the backward pass (of the step's last micro-batch)
///     ... forward, backward ...
///     exchange.finish(ctx);         // every gradient is the mean over the ranks
///
/// Layers of other networks, and layers that belong to none, may run between begin and finish: their
/// gradients are ignored. A second backward pass through one of the exchange's own parameters throws
/// state_error unless micro_batches (distributed/micro_batches.hpp) has announced it.
///
/// After a failed step (an exception from begin to finish that came from the exchange, a compressor or the
/// communicator) begin throws state_error: the ranks' collectives may no longer fit together. Make a new
/// exchange on all ranks. A step that nonfinite_policy::stop ends has not failed in this sense.
///
/// Begin and finish are collective. One thread at a time calls the members. Between begin and finish no other
/// code may use the communicator, nor read report(). The mean is the sum times 1 / p, rounded.
/// The algorithm decides the order of the sum: the same plan (exchange_plan) on the same number of ranks
/// gives the same bits again. All ranks end with the same bits.
///
/// With a compressor the exchange starts in finish, since the compressor needs all gradients and its work
/// would compete with the backward pass for cores. With exchange_options::compress_by_bucket it starts bucket
/// by bucket during the backward pass. After finish the gradients are the compressor's result.
///
/// Gradients on a device are staged in host memory (unless exchange_memory says otherwise): a bucket is
/// copied to the host while the backward pass still runs, exchanged there, and copied back. Work put into the
/// context's stream after finish sees the result. Compressors work on the host, too. gpu::nccl (gpu/nccl.hpp)
/// exchanges without the host.
///
/// In a step that is captured into a graph (gpu::step_graph), begin and finish are called as in a direct
/// step. Each replay then exchanges its own gradients: the graph notifies the exchange's thread when a bucket
/// is on the host, and waits for the thread before it copies the bucket back; the host only launches the
/// graph. So threads must be able to use the communicator (else state_error), and no other code may use it
/// until the context has been synchronized. Replays have no return values; instead:
/// - The optimizer's kernels read from skip() whether the step counts. finish returns true.
/// - An error is thrown by a later call (see context::failures), and its step is skipped.
/// - steps(), report() and nonfinite() are those of completed replays. Read them while none is under way,
///   after context::synchronize.
/// A graph that has captured an exchange must not be launched after the exchange's destruction.
template <class T, class Comm, class Device = device::cpu>
class gradient_exchange {
  using staging = detail::gradient_staging<T, Device>;

 public:
  /// The store and the communicator must outlive the object. Collective: throws state_error on all ranks if
  /// their buckets, options or compressors differ, naming the first difference; value_error on all ranks for
  /// invalid options or an invalid plan, naming the rank that has them; backend_error on all ranks if MPI
  /// does not support exchange_memory::device, naming the ranks.
  gradient_exchange(parameter_store<T>& store, Comm& comm, const exchange_options& options = {},
                    std::optional<any_compressor<T>> compressor = {})
      : store_(&store),
        generation_(store.generation()),
        reducer_(store, comm, options, std::move(compressor)),
        buckets_(store, reducer_.plan().buckets),
        staging_(store, buckets_.size(), options.memory, works()) {
    detail::check_communicator<Comm>();
    agree_on_lines(comm, "gradient exchange", reducer_.option_lines(buckets_.buckets()));
    if (!staging::copies && options.memory != exchange_memory::staged) {
      PUFFERFISH_THROW(value_error("gradient_exchange: exchange_memory::device, but no gradients on one"));
    }
    reducer_.check_device_memory();
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      places_.push_back({this, static_cast<std::uint32_t>(b), jobs_with(b)});
    }
    if (with_thread() && overlapped()) {
      detail::all_or_none(comm, "gradient_exchange", [this] { start_thread(); });
    }
  }
  /// The same with a new compressor, which new_compressor makes of its options.
  template <compressor_options<T> Options>
  gradient_exchange(parameter_store<T>& store, Comm& comm, const exchange_options& options,
                    const Options& compressor)
      : gradient_exchange(store, comm, options, new_compressor(store, compressor)) {}
  gradient_exchange(const gradient_exchange&) = delete;
  gradient_exchange& operator=(const gradient_exchange&) = delete;
  ~gradient_exchange() {
    listener_.stop();
    staging_.drain();  // work in streams may notify the thread, or wait for it
    jobs_.stop();
    if constexpr (staging::copies) {
      if (detail::gave_up(reducer_.comm())) staging_.keep_host_memory();
    }
  }

  const std::vector<gradient_bucket>& buckets() const { return buckets_.buckets(); }
  const exchange_plan& plan() const { return reducer_.plan(); }
  bool with_thread() const { return reducer_.with_thread(); }
  const exchange_report& report() const { return reducer_.report(); }
  void clear_report() { reducer_.report() = {}; }

  /// Bytes that one rank passes to the collectives of a step.
  index_t payload_bytes() const { return reducer_.payload_bytes(); }

  /// States of the compressor; empty without one.
  std::vector<compressor_state<T>> states() { return reducer_.states(); }
  /// Number of exchanges, skipped steps excluded. A checkpoint stores it with the states. All ranks must call
  /// set_steps if one does: the next begin compares the numbers.
  std::uint64_t steps() const { return reducer_.steps(); }
  void set_steps(std::uint64_t steps) {
    reducer_.set_steps(steps);
    steps_agreed_ = false;
  }
  /// Sets the epoch and its learning rate for compressors; to be called between steps. Local.
  void set_epoch(index_t epoch, double learning_rate) { reducer_.set_epoch(epoch, learning_rate); }
  /// Sets the learning rate of the next steps for compressors. Waits for replays that use the present one.
  void set_rate([[maybe_unused]] context<Device>& ctx, double learning_rate) {
    if (!reducer_.has_compressor() || learning_rate == reducer_.learning_rate()) return;
    if constexpr (staging::copies) {
      if (ever_captured_) ctx.synchronize();
    }
    reducer_.set_rate(learning_rate);
  }
  /// The last non-finite element that nonfinite_policy::skip or stop has found; the same on all ranks.
  const std::optional<nonfinite_gradient>& nonfinite() const { return reducer_.nonfinite(); }

  /// On a device: address of a flag that is not 0, in stream order after finish, if the step does not count.
  const int* skip() const requires(staging::copies) { return staging_.skip(); }

  /// Starts a step: gradients that become ready are exchanged from now on. Forgets the writes of an abandoned
  /// step. Throws state_error if the network has changed its arenas, the last begin had no finish, an earlier
  /// step has failed, or parameters are at different passes of micro_batches; and on all ranks if their
  /// numbers of steps differ, which the first begin, and the first after set_steps, compares.
  void begin(context<Device>& ctx) {
    if (store_->generation() != generation_) {
      PUFFERFISH_THROW(state_error("gradient_exchange: the network has new arenas; make a new exchange"));
    }
    failure_.require_none();
    // A step that was captured only in part has called no collectives, so it need not be finished.
    if (running_ && !captured_) PUFFERFISH_THROW(state_error("gradient_exchange: begin without finish"));
    captured_ = staging_.is_captured(ctx);
    if constexpr (staging::copies) {
      // Replays under way use the communicator and the thread.
      if (!captured_ && ever_captured_) ctx.synchronize();
    }
    if (!steps_agreed_) agree_on_steps();
    if (captured_) prepare_capture(ctx);
    buckets_.restart();
    running_ = true;
    if (!captured_) reducer_.restart();
    ctx_ = &ctx;
    released_ = 0;
    started_ = 0;
    requests_.clear();
    listener_ = ctx.on_gradient_ready(&gradient_exchange::on_ready, this);
  }

  /// Waits until every gradient is the mean over all ranks. A gradient that no layer of this rank has written
  /// since the last exchange or optimizer step counts as zero on this rank: see parameter.
  /// Returns true if the step may be taken; false, on all ranks, if nonfinite_policy::skip has found an
  /// element that is not finite (gradients are then undefined, a compressor's state is unchanged). Throws
  /// value_error on all ranks for nonfinite_policy::stop, and if a compressor's result is not finite though
  /// all gradients are; the compressor's state is then unusable. Rethrows exceptions of the exchange since
  /// begin. Throws state_error if a call since begin has failed.
  bool finish(context<Device>& ctx) {
    return finish(ctx, [](const gradient_bucket&) {});
  }

  /// The same, and calls arrived(bucket) for every gradient_bucket, in order, on this thread, as soon as its
  /// gradients may be used: while later buckets are still under way if arrives_early(), else when the whole
  /// exchange has succeeded. After an error it may have been called for some buckets. An exception from
  /// `arrived` is rethrown when all buckets have been exchanged, so that the ranks stay in step.
  template <class Arrived>
  bool finish(context<Device>& ctx, Arrived&& arrived) {
    failure_.require_none();
    if (!running_) PUFFERFISH_THROW(state_error("gradient_exchange: finish without begin"));
    check_capture(ctx);
    running_ = false;
    listener_.stop();
    guarded([&] {
      staging_.zero_unwritten(ctx);
      release(buckets_.size());
    });
    if constexpr (staging::copies) {
      if (captured_) {
        finish_captured(ctx, arrived);
        return true;
      }
    }
    const auto start = clock::now();
    double updating = 0.0;
    std::exception_ptr thrown;  // by `arrived`; the remaining buckets are exchanged nevertheless
    const auto hand_out = [&](const gradient_bucket& bucket) {
      if (thrown) return;
      try {
        if (changes()) staging_.send(ctx, bucket, reducer_.divisor());
        const auto given = clock::now();
        arrived(bucket);
        updating += detail::milliseconds_since(given);
      } catch (...) {
        thrown = std::current_exception();
      }
    };
    const bool usable = guarded([&] { return step(ctx, hand_out); });
    reducer_.report().update_ms += updating;
    if (changes()) reducer_.report().exposed_ms += detail::milliseconds_since(start) - updating;
    if (thrown) std::rethrow_exception(thrown);
    return usable;
  }

  /// True if finish calls `arrived` before all buckets have come: buckets are exchanged one by one (several
  /// ranks without a compressor, or compress_by_bucket), and nonfinite_policy is ignore.
  bool arrives_early() const { return overlapped() && !reducer_.looks(); }

  /// On a device: whether a step with begin and finish can be captured.
  bool can_be_captured() const requires(staging::copies) {
    return !works() || (reducer_.memory() != exchange_memory::device && reducer_.may_have_thread());
  }

 private:
  using clock = std::chrono::steady_clock;
  using request = decltype(std::declval<Comm&>().start_all_reduce_sum(std::span<T>()));

  // Argument of a host function in a stream.
  struct place {
    gradient_exchange* exchange;
    std::uint32_t bucket;
    std::uint32_t jobs;  // number of jobs that may be done when the bucket has come
  };

  // overlapped: buckets are exchanged during the backward pass. changes: finish changes gradients. works:
  // finish changes or checks gradients.
  bool overlapped() const { return changes() && reducer_.by_bucket(); }
  bool changes() const {
    return buckets_.size() > 0 && !reducer_.is_local() &&
           (reducer_.comm().size() > 1 || reducer_.has_compressor());
  }
  bool works() const { return changes() || (buckets_.size() > 0 && reducer_.looks()); }
  // Whether ready gradients start work. Gradients of a device are copied to the host early in any case.
  bool listens() const { return overlapped() || (staging::copies && works()); }

  void agree_on_steps() {
    agree_on_lines(reducer_.comm(), "gradient exchange", "steps done: " + std::to_string(steps()) + "\n");
    steps_agreed_ = true;
  }

  static void on_ready(void* object, const void* parameter, int id) {
    auto& self = *static_cast<gradient_exchange*>(object);
    std::size_t count = 0;
    self.guarded([&] { count = self.buckets_.written(parameter, id); });
    if (!self.listens()) return;
    if (count > self.released_) self.check_capture(*self.ctx_);
    self.guarded([&] { self.release(count); });
  }

  // Does a part of the step. If the part throws, the step has failed: its collectives may be incomplete. Not
  // so while capturing, which calls none, nor after nonfinite_policy::stop, which stops all ranks alike.
  template <class Part>
  decltype(auto) guarded(Part&& part) {
    try {
      return part();
    } catch (...) {
      if (!captured_ && !reducer_.stopped()) failure_.keep(std::current_exception());
      if (!captured_) running_ = false;
      listener_.stop();
      throw;
    }
  }

  // Starts the exchange of this step's buckets below `count`, which are complete.
  void release(std::size_t count) {
    for (; listens() && released_ < count; ++released_) {
      staging_.fetch(*ctx_, released_, buckets_[released_], call_for(released_));
    }
    if (overlapped() && !with_thread() && !captured_) progress();
  }

  std::span<T> gradients_of(std::size_t bucket) {
    return staging_.gradients().subspan(static_cast<std::size_t>(buckets_[bucket].offset),
                                        static_cast<std::size_t>(buckets_[bucket].size));
  }

  // Checks a bucket's own gradients, which are complete and in the exchange's memory, before the sum.
  void look_at(std::size_t bucket) { reducer_.look_at(gradients_of(bucket), buckets_[bucket].offset); }

  // The thread: a job for every bucket, and one that closes the step.

  std::uint32_t jobs_of_step() const { return static_cast<std::uint32_t>(buckets_.size() + 1); }
  // The last bucket also allows the job that closes the step.
  std::uint32_t jobs_with(std::size_t bucket) const { return bucket + 1 < buckets_.size() ? 1 : 2; }
  void start_thread() {
    jobs_.start(jobs_of_step(), [this](std::size_t job) { serve(job); });
  }

  detail::host_call call_for(std::size_t bucket) {
    if (captured_) return {&gradient_exchange::replayed_bucket_came, &places_[bucket]};
    if (overlapped() && with_thread()) return {&gradient_exchange::bucket_came, &places_[bucket]};
    return {};
  }
  static void bucket_came(void* object) { came(*static_cast<place*>(object), false); }
  static void replayed_bucket_came(void* object) { came(*static_cast<place*>(object), true); }
  static void came(const place& p, bool replayed) {
    p.exchange->replayed_.store(replayed, std::memory_order_relaxed);
    p.exchange->jobs_.add(p.jobs);
  }

  void serve(std::size_t job) {
    const auto start = clock::now();
    try {
      if (job == 0) {
        staging_.enter_thread();
        staging_.set_usable(true);
        if (replayed_.load(std::memory_order_relaxed)) {
          reducer_.restart();
          failure_.require_none();
        }
      }
      if (!thrown_.any()) serve_unless_failed(job);
    } catch (...) {
      thrown_.keep_current();
      staging_.set_usable(false);
    }
    if (job == buckets_.size() && replayed_.load(std::memory_order_relaxed)) leave_failure();
    reducer_.count_thread_time(start);
  }
  void serve_unless_failed(std::size_t job) {
    if (job < buckets_.size()) {
      look_at(job);
      if (reducer_.by_bucket()) reducer_.reduce(job, gradients_of(job));
    } else {
      usable_ = reducer_.close(staging_.host(*ctx_), staging_.gradients());
      staging_.set_usable(usable_);
    }
  }

  // Returns and throws only when the thread no longer uses the gradients.
  template <class Arrived>
  bool thread_step(Arrived&& arrived) {
    // After this, all of the step's jobs have been added. If a device has failed, this throws; its jobs would
    // never be added.
    staging_.await(buckets_.size() - 1);
    const std::uint32_t all = jobs_.added();
    std::uint32_t count = all - jobs_of_step();
    for (const gradient_bucket& bucket : buckets_.buckets()) {
      jobs_.await(++count);
      if (thrown_.any()) break;
      arrived(bucket);
    }
    jobs_.await(all);
    if (const std::exception_ptr thrown = thrown_.take()) std::rethrow_exception(thrown);
    return usable_;
  }

  // Direct steps. `arrived` throws nothing.

  template <class Arrived>
  bool step(context<Device>& ctx, Arrived&& arrived) {
    if (arrives_early()) {
      staging_.publish(ctx, true);
      return overlapped_step(arrived);
    }
    const bool usable = overlapped() ? overlapped_step([](const gradient_bucket&) {}) : step_at_once();
    staging_.publish(ctx, usable);
    for (std::size_t b = 0; usable && b < buckets_.size(); ++b) arrived(buckets_[b]);
    return usable;
  }

  template <class Arrived>
  bool overlapped_step(Arrived&& arrived) {
    return with_thread() ? thread_step(arrived) : request_step(arrived);
  }

  // After the backward pass, on this thread: a compressor of all gradients, or only the check on one rank.
  bool step_at_once() {
    for (std::size_t b = 0; works() && b < buckets_.size(); ++b) {
      staging_.await(b);
      look_at(b);
    }
    return reducer_.close(staging_.host(*ctx_), staging_.gradients());
  }

  // Without a thread: starts sums of ready buckets if they can be started, and lets started sums progress.
  void progress() {
    for (; started_ < released_ && staging_.has_come(started_); ++started_) {
      look_at(started_);
      if (reducer_.starts(gradients_of(started_))) {
        requests_.push_back(reducer_.comm().start_all_reduce_sum(gradients_of(started_)));
      } else {
        requests_.emplace_back();
      }
    }
    for (request& r : requests_) r.done();
  }
  template <class Arrived>
  bool request_step(Arrived&& arrived) {
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      if (b == requests_.size()) {
        staging_.await(b);
        progress();
      }
      if (reducer_.starts(gradients_of(b))) {
        requests_[b].wait();
        detail::scale_values(gradients_of(b), reducer_.divisor());
        progress();
      } else {
        reducer_.reduce(b, gradients_of(b));
      }
      arrived(buckets_[b]);
    }
    requests_.clear();
    return reducer_.close(staging_.host(*ctx_), staging_.gradients());
  }

  // Captured steps: the work of a direct step, put into the graph as host functions.

  void check_capture(const context<Device>& ctx) const {
    if (staging_.is_captured(ctx) != captured_) detail::refuse_half_capture();
  }

  void prepare_capture(const context<Device>& ctx) {
    if (!works()) return;
    reducer_.require_capturable();
    if constexpr (staging::copies) staging_.leave_failures_to(ctx);
    ever_captured_ = true;
    if (!jobs_.running()) start_thread();
  }

  template <class Arrived>
  void finish_captured(context<Device>& ctx, Arrived&& arrived) {
    if (!works()) staging_.call(ctx, {&gradient_exchange::count_replay, this});
    // CUDA may run host functions one at a time, in any order that the streams allow. So those that wait for
    // the thread come after all that notify the thread: every rank's buckets are then under way before any
    // rank waits for one, and no wait can block the notification that it waits for.
    if (works()) staging_.join(ctx);
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      if (works() && (arrives_early() || b == 0)) {
        staging_.call(ctx,
                      {&gradient_exchange::await_bucket, arrives_early() ? &places_[b] : &places_.back()});
        staging_.publish_replayed(ctx);
      }
      if (changes()) staging_.send(ctx, buckets_[b], reducer_.divisor());
      arrived(buckets_[b]);
    }
  }

  static void count_replay(void* object) { static_cast<gradient_exchange*>(object)->reducer_.count(); }
  // For the replay under way, all of whose jobs have been added.
  static void await_bucket(void* object) {
    const place& p = *static_cast<place*>(object);
    gradient_exchange& self = *p.exchange;
    const auto start = clock::now();
    self.jobs_.await(self.jobs_.added() - self.jobs_of_step() + p.bucket + p.jobs);
    self.reducer_.report().exposed_ms += detail::milliseconds_since(start);
  }

  // Passes the thread's exception to the context. Later replays are skipped and pass a failure again.
  void leave_failure() {
    const std::exception_ptr thrown = thrown_.take();
    if (!thrown) return;
    if (!reducer_.stopped()) failure_.keep(thrown);
    if constexpr (staging::copies) staging_.leave_failure(thrown);
  }

  parameter_store<T>* store_;
  std::uint64_t generation_;
  detail::gradient_reducer<T, Comm> reducer_;
  detail::bucket_counter<T> buckets_;
  staging staging_;
  std::vector<place> places_;       // of each bucket
  context<Device>* ctx_ = nullptr;  // of this step
  gradient_listener listener_;      // from begin to finish
  std::vector<request> requests_;
  std::size_t released_ = 0, started_ = 0;  // of this step
  bool running_ = false, captured_ = false, ever_captured_ = false;
  bool steps_agreed_ = false;
  // Results of the thread: whether the step may be taken, and its exception.
  bool usable_ = true;
  detail::thread_exception thrown_;
  detail::exchange_failure failure_;
  std::atomic<bool> replayed_{false};
  detail::job_thread jobs_;
};

PUFFERFISH_NAMESPACE_END
