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

#include <pufferfish/dist/bucket_counter.hpp>
#include <pufferfish/dist/exchange_failure.hpp>
#include <pufferfish/dist/gradient_reducer.hpp>
#include <pufferfish/dist/gradient_staging.hpp>
#include <pufferfish/dist/job_thread.hpp>
#include <pufferfish/dist/waiting.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Averages gradients in place: a bucket starts as soon as the last writer of its last parameter is done, in
/// the order of the arena on every rank. Nothing is packed: messages leave from where backward wrote.
///
///     gradient_exchange<float, mpi::communicator> exchange(net.store(), comm);
///     exchange.begin(ctx);          // before the backward pass (of the step's last micro-batch)
///     ... forward, backward ...
///     exchange.finish(ctx);         // every gradient is the mean over the ranks
///
/// Layers of other networks, and layers that belong to none, may run between begin and finish: their
/// gradients are ignored. A second backward pass through one of the exchange's own parameters throws
/// state_error unless micro_batches (dist/micro_batches.hpp) says so before.
///
/// After a failed step (an exception from begin to finish that came from the exchange, a compressor or the
/// communicator) begin throws state_error: the ranks' collectives may no longer fit together. Make a new
/// exchange on all ranks. A step that nonfinite_policy::stop ends has not failed in this sense.
///
/// Between begin and finish no one else may use the communicator. The mean is the sum times 1 / p, rounded;
/// the order of the sum is the algorithm's: the same plan (see exchange_plan) on as many ranks gives the same
/// bits again. All ranks end with the same bits.
///
/// With a compressor nothing starts before finish: it sees all gradients, and what it computes would compete
/// with the backward pass; unless exchange_options::compress_by_bucket says that the time on the network is
/// worth more. What finish leaves is the compressor's result.
///
/// Gradients on a device go through memory of the host (unless exchange_memory says otherwise): a bucket is
/// copied there while the backward pass still runs, exchanged as one of the host's, and copied back, before
/// what is put into the context's stream after finish; compressors, too, work on the host. gpu::nccl
/// (gpu/nccl.hpp) exchanges without the host.
///
/// In a step that is captured into a graph (gpu::step_graph), begin and finish stand in the captured work as
/// they would stand in a direct one. Each replay then exchanges its own gradients: the graph tells the
/// exchange's thread when a bucket has come, and waits for it before the bucket is copied back; the host only
/// launches. So the communicator must be usable from a thread (else state_error), and belongs to the exchange
/// until the context has been synchronized. What the host cannot be told by a return value then:
/// - whether the step counts is skip(), which an optimizer's kernels read; finish returns true.
/// - what goes wrong comes out of a later call: see context::failures. The step of it is skipped, too.
/// - steps(), report() and nonfinite() are those of the replays that are done; look at them when none is on
///   its way, after context::synchronize.
/// A graph that has captured an exchange must not be launched after the exchange's end.
template <class T, class Comm, class Device = device::cpu>
class gradient_exchange {
  using staging = detail::gradient_staging<T, Device>;

 public:
  /// The store and the communicator must outlive the object. Collective: throws state_error on all ranks if
  /// their buckets, options or compressors differ, naming the first difference; value_error on all ranks for
  /// options or a plan that cannot be, naming the rank that has them; backend_error if
  /// exchange_memory::device cannot, naming the ranks.
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
    staging_.drain();  // what is in streams may call the thread, or wait for it
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

  /// What one rank gives to the collectives of a step, in bytes.
  index_t payload_bytes() const { return reducer_.payload_bytes(); }

  /// What the compressor carries; empty without one.
  std::vector<compressor_state<T>> states() { return reducer_.states(); }
  /// Exchanges that were made; a checkpoint keeps them with the states. Skipped ones do not count.
  std::uint64_t steps() const { return reducer_.steps(); }
  void set_steps(std::uint64_t steps) {
    reducer_.set_steps(steps);
    steps_agreed_ = false;
  }
  /// Tells compressors the epoch and its learning rate, between steps.
  void set_epoch(index_t epoch, double learning_rate) { reducer_.set_epoch(epoch, learning_rate); }
  /// The last one that nonfinite_policy::skip has met; the same on all ranks.
  const std::optional<nonfinite_gradient>& nonfinite() const { return reducer_.nonfinite(); }

  /// On a device: not 0, from the last finish on in the stream's order, if the step does not count.
  const int* skip() const requires(staging::copies) { return staging_.skip(); }

  /// From now on gradients that get ready are exchanged. Forgets the writes of an abandoned step. Throws
  /// state_error if the network has changed its arenas, an exchange has begun and not finished, an earlier
  /// step has failed, or parameters are at different passes of micro_batches; and, on all ranks, if they are
  /// at different steps: the first begin, and that after set_steps, compares them.
  void begin(context<Device>& ctx) {
    if (store_->generation() != generation_) {
      PUFFERFISH_THROW(state_error("gradient_exchange: the network has new arenas; make a new exchange"));
    }
    failure_.require_none();
    // What was captured only in part has left nothing behind.
    if (running_ && !captured_) PUFFERFISH_THROW(state_error("gradient_exchange: begin without finish"));
    captured_ = staging_.is_captured(ctx);
    if constexpr (staging::copies) {
      // Replays on their way have the communicator and the thread.
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
  /// since the last exchange or optimizer step is zero on this rank: see parameter.
  /// True if the step may be taken: false, on all ranks, where nonfinite_policy::skip has met something (the
  /// gradients are then of no use; a compressor's state is as it was). Throws value_error on all ranks for
  /// nonfinite_policy::stop, and for a compressor whose result is not finite though all gradients are: its
  /// state is spoilt. Rethrows what went wrong in between. Throws state_error if a call since begin has
  /// failed.
  bool finish(context<Device>& ctx) {
    return finish(ctx, [](const gradient_bucket&) {});
  }

  /// The same; `arrived(bucket)` is called for every gradient_bucket, in order, on this thread, as soon as
  /// its gradients may be used: while later buckets are on their way where arrives_early() says so, else when
  /// all is known to be well. If something goes wrong, some buckets may have been given already. An exception
  /// from `arrived` is rethrown when all buckets have been exchanged, so that the ranks stay in step.
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

  /// True if finish hands out buckets before all have come: several ranks, no compressor, and nobody asks
  /// whether all gradients are finite.
  bool arrives_early() const { return overlapped() && !reducer_.looks(); }

  /// On a device: whether begin and finish may stand in a step that is captured.
  bool can_be_captured() const requires(staging::copies) {
    return !works() || (reducer_.memory() != exchange_memory::device && reducer_.may_have_thread());
  }

 private:
  using clock = std::chrono::steady_clock;
  using request = decltype(std::declval<Comm&>().start_all_reduce_sum(std::span<T>()));

  // What a host function in a stream is given.
  struct place {
    gradient_exchange* exchange;
    std::uint32_t bucket;
    std::uint32_t jobs;  // that may be done when the bucket has come
  };

  // Whether there is a sum to overlap with the backward pass; whether finish leaves other gradients; whether
  // it looks at them at all.
  bool overlapped() const { return changes() && reducer_.by_bucket(); }
  bool changes() const {
    return buckets_.size() > 0 && !reducer_.is_local() &&
           (reducer_.comm().size() > 1 || reducer_.has_compressor());
  }
  bool works() const { return changes() || (buckets_.size() > 0 && reducer_.looks()); }
  // Whether layers' calls matter: a device's gradients come to the host early, whatever happens there.
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

  // Does a part of the step. If the part throws, the step has failed: its collectives may be incomplete. What
  // is being captured has not called any, and nonfinite_policy::stop stops all ranks after the same ones.
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

  // This step's buckets below `count` are complete: they may go.
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

  // A bucket's own gradients are complete and where the exchange works on them.
  void look_at(std::size_t bucket) { reducer_.look_at(gradients_of(bucket), buckets_[bucket].offset); }

  // -------------------------------------------------------------------------------------------------------
  // The thread: a job for every bucket, and one that closes the step.

  std::uint32_t jobs_of_step() const { return static_cast<std::uint32_t>(buckets_.size() + 1); }
  // The step can be closed when the last bucket is done.
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
    exchange_report& report = reducer_.report();
    report.busy_ms += detail::milliseconds_since(start);
    const double now = detail::thread_processor_ms();
    report.processor_ms += now - processor_ms_;
    processor_ms_ = now;
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

  // Whatever happens, it leaves when the thread no longer uses the gradients.
  template <class Arrived>
  bool thread_step(Arrived&& arrived) {
    // From here on all of the step's jobs are there; without it a device that has failed would never add
    // them.
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

  // -------------------------------------------------------------------------------------------------------
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

  // After the backward pass, on this thread: compressors, and one rank that only looks at its gradients.
  bool step_at_once() {
    for (std::size_t b = 0; works() && b < buckets_.size(); ++b) {
      staging_.await(b);
      look_at(b);
    }
    return reducer_.close(staging_.host(*ctx_), staging_.gradients());
  }

  // Without a thread: starts what is ready, where it can be started, and lets what is under way move.
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

  // -------------------------------------------------------------------------------------------------------
  // Captured steps: what a direct one does, put into the graph as host functions.

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
    // CUDA may call host functions one after the other, in any order that streams allow: one that waits for
    // the thread comes only behind all that tell the thread something. Then every rank's buckets are on
    // their way before any rank waits for one, and no wait can stand before what it waits for.
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
  // Of the replay under way: its jobs have all been added.
  static void await_bucket(void* object) {
    const place& p = *static_cast<place*>(object);
    gradient_exchange& self = *p.exchange;
    const auto start = clock::now();
    self.jobs_.await(self.jobs_.added() - self.jobs_of_step() + p.bucket + p.jobs);
    self.reducer_.report().exposed_ms += detail::milliseconds_since(start);
  }

  // Later replays are skipped and leave the failure again.
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
  // What the thread leaves: whether the step may be taken, what went wrong.
  bool usable_ = true;
  detail::thread_exception thrown_;
  detail::exchange_failure failure_;
  std::atomic<bool> replayed_{false};
  double processor_ms_ = 0.0;
  detail::job_thread jobs_;
};

PUFFERFISH_NAMESPACE_END
