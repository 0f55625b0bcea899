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
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <pufferfish/dist/compressor.hpp>
#include <pufferfish/dist/exchange_options.hpp>
#include <pufferfish/dist/gradient_staging.hpp>
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
/// Between begin and finish nobody else may use the communicator. The mean is the sum times 1 / p, rounded;
/// the order of the sum is the algorithm's: the same plan (see exchange_plan) on as many ranks gives the same
/// bits again. All ranks end with the same bits.
///
/// With a compressor nothing starts before finish: it sees all gradients, and what it computes would only
/// compete with the backward pass. What finish leaves is then the compressor's result.
///
/// Gradients on a device go through memory of the host: a bucket is copied there while the backward pass
/// still runs, exchanged as one of the host's, and copied back; compressors, too, work on the host. A
/// backward pass that is replayed from a graph tells nobody when gradients are ready: call begin behind it.
template <class T, class Comm, class Device = device::cpu>
class gradient_exchange {
 public:
  /// The store and the communicator must outlive the object. Collective: throws state_error on all ranks if
  /// their buckets, options or compressors differ, naming the first difference; value_error for options that
  /// cannot be.
  gradient_exchange(parameter_store<T>& store, Comm& comm, const exchange_options& options = {},
                    std::optional<any_compressor<T>> compressor = {})
      : store_(&store),
        comm_(&comm),
        options_(options),
        plan_(checked(options.plan ? *options.plan : default_plan(comm.size()))),
        generation_(store.generation()),
        buckets_(cut_buckets(store, plan_.buckets)),
        missing_(buckets_.size()),
        staging_(store, buckets_.size()),
        compressor_(std::move(compressor)) {
    detail::check_communicator<Comm>();
    bucket_of_.reserve(store.parameters().size());
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      bucket_of_.insert(bucket_of_.end(), static_cast<std::size_t>(buckets_[b].count), static_cast<int>(b));
    }
    options_.progress = resolved_progress();
    agree_on_lines(comm, "gradient exchange", option_lines());
    check_options();
    if (with_thread() && comm.size() > 1) thread_ = std::thread([this] { serve(); });
  }
  gradient_exchange(const gradient_exchange&) = delete;
  gradient_exchange& operator=(const gradient_exchange&) = delete;
  ~gradient_exchange() {
    if (!thread_.joinable()) return;
    stopping_ = true;
    ready_.fetch_add(1, std::memory_order_release);
    ready_.notify_one();
    thread_.join();
  }

  const std::vector<gradient_bucket>& buckets() const { return buckets_; }
  const exchange_plan& plan() const { return plan_; }
  bool with_thread() const { return options_.progress == exchange_progress::thread; }
  const exchange_report& report() const { return report_; }
  void clear_report() { report_ = {}; }

  /// What one rank gives to the collectives of a step, in bytes.
  index_t payload_bytes() const {
    if (compressor_) return compressor_->payload_bytes();
    const auto elements = static_cast<index_t>(store_->gradients().size());
    return elements * static_cast<index_t>(is_narrow() ? sizeof(bfloat16) : sizeof(T));
  }

  /// What the compressor carries; empty without one.
  std::vector<compressor_state<T>> states() {
    if (!compressor_) return {};
    return compressor_->states();
  }
  /// Exchanges that were made; a checkpoint keeps them with the states. Skipped ones do not count.
  std::uint64_t steps() const { return steps_; }
  void set_steps(std::uint64_t steps) {
    steps_ = steps;
    steps_agreed_ = false;
  }

  /// The last one that nonfinite_policy::skip has met; the same on all ranks.
  const std::optional<nonfinite_gradient>& nonfinite() const { return nonfinite_; }

  /// From now on gradients that get ready are exchanged. Throws state_error if the network has changed its
  /// arenas, or if an exchange has begun and not finished; and, on all ranks, if they are at different steps:
  /// the first begin, and that after set_steps, compares them (later ones need not: they count together).
  void begin(context<Device>& ctx) {
    if (store_->generation() != generation_) {
      PUFFERFISH_THROW(state_error("gradient_exchange: the network has new arenas; make a new exchange"));
    }
    if (running_) PUFFERFISH_THROW(state_error("gradient_exchange: begin without finish"));
    if (!steps_agreed_) agree_on_steps();
    running_ = true;
    local_nonfinite_ = -1;
    if (!overlapped()) return;
    for (std::size_t b = 0; b < buckets_.size(); ++b) missing_[b] = buckets_[b].count;
    released_ = 0;
    started_ = 0;
    requests_.clear();
    ctx_ = &ctx;
    ctx.on_gradient_ready(&gradient_exchange::on_ready, this);
  }

  /// Waits until every gradient is the mean over all ranks, whether or not a backward pass has written it.
  /// True if the step may be taken: false, on all ranks, where nonfinite_policy::skip has met something (the
  /// gradients are then of no use; a compressor's state is as it was). Throws value_error on all ranks for
  /// nonfinite_policy::stop, and for a compressor whose result is not finite though all gradients are: its
  /// state is spoilt. Rethrows what went wrong in between.
  bool finish(context<Device>& ctx) {
    return finish(ctx, [](const gradient_bucket&) {});
  }

  /// The same; `arrived(bucket)` is called for every gradient_bucket, in order, on this thread, as soon as
  /// its gradients may be used: while later buckets are on their way where arrives_early() says so, else when
  /// all is known to be well. If something goes wrong, some buckets may have been given already.
  template <class Arrived>
  bool finish(context<Device>& ctx, Arrived&& arrived) {
    if (!running_) PUFFERFISH_THROW(state_error("gradient_exchange: finish without begin"));
    running_ = false;
    ++report_.steps;
    const auto start = clock::now();
    double updating = 0.0;
    const bool changed = compressor_ || comm_->size() > 1;
    const auto hand_out = [&](const gradient_bucket& bucket) {
      if (changed) staging_.send(ctx, bucket);
      const auto given = clock::now();
      arrived(bucket);
      updating += milliseconds_since(given);
    };
    bool usable = true;
    if (arrives_early()) {
      finish_overlapped(ctx, hand_out);
    } else {
      usable = compressor_ ? finish_compressed(ctx) : finish_checked(ctx);
      for (std::size_t b = 0; usable && b < buckets_.size(); ++b) hand_out(buckets_[b]);
    }
    if (usable) ++steps_;
    report_.update_ms += updating;
    if (comm_->size() > 1 || compressor_) report_.exposed_ms += milliseconds_since(start) - updating;
    return usable;
  }

  /// True if finish hands out buckets before all have come: several ranks, no compressor, and nobody asks
  /// whether all gradients are finite.
  bool arrives_early() const { return overlapped() && options_.nonfinite == nonfinite_policy::ignore; }

 private:
  using clock = std::chrono::steady_clock;
  using request = decltype(std::declval<Comm&>().start_all_reduce_sum(std::span<T>()));

  static double milliseconds_since(clock::time_point start) {
    return std::chrono::duration<double, std::milli>(clock::now() - start).count();
  }

  bool is_narrow() const { return options_.wire != exchange_wire::same; }
  bool overlapped() const { return comm_->size() > 1 && !compressor_; }

  static exchange_plan checked(exchange_plan plan) {
    detail::check_plan("gradient_exchange", plan);
    return plan;
  }

  std::string option_lines() const {
    return to_text(buckets_) + detail::order_lines(plan_) + "algorithm " + to_string(options_.algorithm) +
           "\nwire " + to_string(options_.wire) + "\nnon-finite gradients " + to_string(options_.nonfinite) +
           "\ncompressor " + (compressor_ ? compressor_->describe() : std::string("none")) +
           "\nprogress by " + (with_thread() ? "a thread" : "calls") + "\n";
  }

  void agree_on_steps() {
    agree_on_lines(*comm_, "gradient exchange", "steps done: " + std::to_string(steps_) + "\n");
    steps_agreed_ = true;
  }

  bool may_have_thread() const {
    if constexpr (requires { comm_->usable_from_threads(); }) return comm_->usable_from_threads();
    return false;
  }
  exchange_progress resolved_progress() const {
    if (compressor_) return exchange_progress::calls;
    if (options_.progress != exchange_progress::automatic) return options_.progress;
    return may_have_thread() ? exchange_progress::thread : exchange_progress::calls;
  }
  // After the ranks have agreed: then all throw or none.
  void check_options() const {
    if (compressor_ && is_narrow()) {
      PUFFERFISH_THROW(
          value_error(std::string("gradient_exchange: what travels is the compressor's to say: ") +
                      to_string(options_.wire) + " has no meaning with it"));
    }
    if (comm_->size() > 1 && with_thread() && !may_have_thread()) {
      PUFFERFISH_THROW(
          value_error("gradient_exchange: a progress thread needs a communicator that any thread "
                      "may use (MPI_THREAD_SERIALIZED or more)"));
    }
  }

  static void on_ready(void* object, int id) { static_cast<gradient_exchange*>(object)->parameter_ready(id); }

  // Buckets start in order: one that is complete early waits for those before it.
  void parameter_ready(int id) {
    const int bucket = bucket_of_[static_cast<std::size_t>(id)];
    if (--missing_[static_cast<std::size_t>(bucket)] > 0) {
      if (!with_thread()) progress();
      return;
    }
    std::size_t complete = released_;
    while (complete < buckets_.size() && missing_[complete] <= 0) ++complete;
    release(complete);
  }

  // This step's buckets below `count` may go.
  void release(std::size_t count) {
    for (std::size_t b = released_; b < count; ++b) staging_.fetch(*ctx_, b, buckets_[b]);
    if (!with_thread()) {
      released_ = count;
      progress();
    } else if (count > released_) {
      ready_.fetch_add(static_cast<std::uint32_t>(count - released_), std::memory_order_release);
      released_ = count;
      ready_.notify_one();
    }
  }

  std::span<T> gradients_of(std::size_t bucket) {
    return staging_.gradients().subspan(static_cast<std::size_t>(buckets_[bucket].offset),
                                        static_cast<std::size_t>(buckets_[bucket].size));
  }
  T divisor() const { return T(1) / static_cast<T>(comm_->size()); }

  // The thread: one bucket after the other, asleep in between.
  void serve() {
    double processor_ms = 0.0;
    for (std::size_t next = 0;; next = (next + 1) % buckets_.size()) {
      const std::uint32_t done = done_.load(std::memory_order_relaxed);
      while (ready_.load(std::memory_order_acquire) == done) ready_.wait(done, std::memory_order_acquire);
      if (stopping_) return;
      const auto start = clock::now();
      try {
        if (!failure_) {
          take(next);
          average(gradients_of(next));
        }
      } catch (...) {
        failure_ = std::current_exception();
        failed_.store(true, std::memory_order_relaxed);
      }
      report_.busy_ms += milliseconds_since(start);
      const double now = detail::thread_processor_ms();
      report_.processor_ms += now - processor_ms;
      processor_ms = now;
      done_.store(done + 1, std::memory_order_release);
      done_.notify_one();
    }
  }

  // A bucket's own gradients are complete and on the host.
  void take(std::size_t bucket) {
    staging_.await(bucket);
    look_at(gradients_of(bucket), buckets_[bucket].offset);
  }

  void average(std::span<T> values) {
    if (options_.wire == exchange_wire::bf16) {
      narrow_all_reduce(*comm_, values, bf16_scratch_, divisor());
    } else if (options_.wire == exchange_wire::fp16) {
      narrow_all_reduce(*comm_, values, fp16_scratch_, divisor());
    } else {
      all_reduce_by(algorithm_for(values), *comm_, values, scratch_, divisor());
    }
  }
  all_reduce_algorithm algorithm_for(std::span<const T> values) const {
    if (options_.algorithm != all_reduce_algorithm::automatic) return options_.algorithm;
    if (!with_thread() && !compressor_) return all_reduce_algorithm::library;
    return plan_.algorithm_for(values.size_bytes());
  }

  template <class Arrived>
  void finish_overlapped(context<Device>& ctx, Arrived&& arrived) {
    ctx.on_gradient_ready(nullptr, nullptr);
    release(buckets_.size());
    if (with_thread()) {
      finish_thread(arrived);
    } else {
      finish_requests(arrived);
    }
    report_.payload_bytes += static_cast<std::uint64_t>(payload_bytes());
    if (is_narrow()) report_.copied_bytes += store_->gradients().size_bytes();
  }

  // Whatever happens, it leaves when the thread no longer uses the gradients.
  template <class Arrived>
  void finish_thread(Arrived&& arrived) {
    const std::uint32_t all = ready_.load(std::memory_order_relaxed);
    const auto until = [&](std::uint32_t count) {
      // Counters wrap around.
      for (std::uint32_t done = done_.load(std::memory_order_acquire);
           static_cast<std::int32_t>(count - done) > 0; done = done_.load(std::memory_order_acquire)) {
        done_.wait(done, std::memory_order_acquire);
      }
    };
    try {
      std::uint32_t count = all - static_cast<std::uint32_t>(buckets_.size());
      for (const gradient_bucket& bucket : buckets_) {
        until(++count);
        if (failed_.load(std::memory_order_relaxed)) break;
        arrived(bucket);
      }
    } catch (...) {
      until(all);
      throw;
    }
    until(all);
    failed_.store(false, std::memory_order_relaxed);
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

  bool finish_checked(context<Device>& ctx) {
    if (comm_->size() == 1) {
      if (options_.nonfinite != nonfinite_policy::ignore) take_all(ctx);
      return usable_everywhere();
    }
    finish_overlapped(ctx, [](const gradient_bucket&) {});
    return usable_everywhere() && usable_result();
  }

  void take_all(context<Device>& ctx) {
    for (std::size_t b = 0; b < buckets_.size(); ++b) staging_.fetch(ctx, b, buckets_[b]);
    for (std::size_t b = 0; b < buckets_.size(); ++b) take(b);
  }

  // Compressors work on the host.
  context<device::cpu>& host(context<Device>& ctx) {
    if constexpr (std::is_same_v<Device, device::cpu>) {
      return ctx;
    } else {
      return host_;
    }
  }

  bool finish_compressed(context<Device>& device_ctx) {
    context<device::cpu>& ctx = host(device_ctx);
    take_all(device_ctx);
    const std::span<T> gradients = staging_.gradients();
    // Before the compressor keeps any of it.
    if (!usable_everywhere()) return false;
    const exchange_place place{comm_->rank(), comm_->size(), steps_};
    for (int round = 0; round < compressor_->rounds(); ++round) {
      const auto start = clock::now();
      const compressor_message<T> message = compressor_->encode(ctx, place, round, gradients);
      report_.encode_ms += milliseconds_since(start);
      if (place.ranks > 1) {
        all_reduce_by(algorithm_for(message.sum), *comm_, message.sum, scratch_);
        ring_all_gather(*comm_, message.blocks);
        report_.payload_bytes +=
            message.sum.size_bytes() + message.blocks.size() / static_cast<std::size_t>(place.ranks);
      }
      const auto decoding = clock::now();
      compressor_->decode(ctx, place, round, gradients);
      report_.decode_ms += milliseconds_since(decoding);
    }
    if (usable_result()) return true;
    PUFFERFISH_THROW(value_error("gradient_exchange: " + to_string(*nonfinite_)));
  }

  // Remembers the first element that is not finite.
  void look_at(std::span<const T> gradients, index_t offset) {
    if (options_.nonfinite == nonfinite_policy::ignore || local_nonfinite_ >= 0) return;
    const index_t found = detail::find_nonfinite(gradients);
    if (found >= 0) local_nonfinite_ = offset + found;
  }

  // What all ranks have found in their own gradients.
  bool usable_everywhere() {
    if (options_.nonfinite == nonfinite_policy::ignore) return true;
    const auto found = comm_->all_gather(static_cast<std::uint64_t>(local_nonfinite_ + 1));
    const auto first = std::find_if(found.begin(), found.end(), [](std::uint64_t f) { return f != 0; });
    if (first == found.end()) return true;
    return refuse(static_cast<index_t>(*first) - 1, static_cast<int>(first - found.begin()));
  }

  // The exchanged gradients are the same on all ranks, and so is what is found in them.
  bool usable_result() {
    if (options_.nonfinite == nonfinite_policy::ignore) return true;
    const index_t found = detail::find_nonfinite(std::span<const T>(staging_.gradients()));
    return found < 0 || refuse(found, -1);
  }

  bool refuse(index_t element, int rank) {
    nonfinite_ = detail::name_nonfinite(*store_, element, rank);
    if (options_.nonfinite == nonfinite_policy::stop) {
      PUFFERFISH_THROW(value_error("gradient_exchange: " + to_string(*nonfinite_)));
    }
    ++report_.skipped;
    return false;
  }

  // Without a thread: starts what is ready, where it can be started, and lets what is under way move.
  bool starts(std::size_t bucket) {
    return !is_narrow() && algorithm_for(gradients_of(bucket)) == all_reduce_algorithm::library;
  }
  void progress() {
    for (; started_ < released_ && staging_.has_come(started_); ++started_) {
      take(started_);
      if (starts(started_)) {
        requests_.push_back(comm_->start_all_reduce_sum(gradients_of(started_)));
      } else {
        requests_.emplace_back();
      }
    }
    for (request& r : requests_) r.done();
  }
  template <class Arrived>
  void finish_requests(Arrived&& arrived) {
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      if (b == requests_.size()) {
        staging_.await(b);
        progress();
      }
      if (starts(b)) {
        requests_[b].wait();
        detail::scale_values(gradients_of(b), divisor());
        progress();
      } else {
        average(gradients_of(b));
      }
      arrived(buckets_[b]);
    }
    requests_.clear();
  }

  parameter_store<T>* store_;
  Comm* comm_;
  exchange_options options_;
  exchange_plan plan_;
  std::uint64_t generation_;
  std::vector<gradient_bucket> buckets_;
  std::vector<int> bucket_of_;  // of each parameter
  std::vector<int> missing_;    // gradients of each bucket that are not ready
  detail::gradient_staging<T, Device> staging_;
  context<Device>* ctx_ = nullptr;  // of the backward pass that runs
  std::conditional_t<std::is_same_v<Device, device::cpu>, std::monostate, context<device::cpu>> host_;
  std::vector<request> requests_;
  std::vector<T> scratch_;
  std::vector<bfloat16> bf16_scratch_;
  std::vector<float16> fp16_scratch_;
  // Buckets released to the thread, and done by it, since the beginning; both wrap around.
  std::atomic<std::uint32_t> ready_{0}, done_{0};
  std::atomic<bool> stopping_{false};
  std::size_t released_ = 0, started_ = 0;  // of this step
  bool running_ = false;
  std::optional<any_compressor<T>> compressor_;
  std::uint64_t steps_ = 0;
  bool steps_agreed_ = false;
  index_t local_nonfinite_ = -1;  // offset in the arena of this rank's first one of the step
  std::optional<nonfinite_gradient> nonfinite_;
  std::exception_ptr failure_;
  std::atomic<bool> failed_{false};
  exchange_report report_;
  std::thread thread_;
};

PUFFERFISH_NAMESPACE_END
