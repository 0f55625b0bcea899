// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gradient_exchange`: averages the gradient arena over all ranks, bucket by bucket, while the backward pass
/// still runs.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/dist/all_reduce.hpp>
#include <pufferfish/dist/bucket.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Who moves the messages while layers compute.
enum class exchange_progress {
  automatic,  ///< a thread where the communicator may be used from one, else calls
  thread,     ///< a thread of the exchange's own, asleep while no bucket is ready
  calls,      ///< nobody but the layers' calls when a gradient is ready (MPI_THREAD_FUNNELED and less)
};

/// How gradients travel.
enum class exchange_wire {
  same,  ///< as they are
  bf16,  ///< half of a float's bytes: rounded to bfloat16, added in float (narrow_all_reduce)
};

struct exchange_options {
  bucket_limits buckets;
  exchange_progress progress = exchange_progress::automatic;
  /// Of the thread. Layers' calls always drive the communicator's own started sums.
  all_reduce_algorithm algorithm = all_reduce_algorithm::library;
  exchange_wire wire = exchange_wire::same;
};

/// What an exchange has done since it was made (or since clear_report).
struct exchange_report {
  std::uint64_t steps = 0;
  std::uint64_t payload_bytes = 0;  ///< of one rank's gradients, as they travel, over all steps
  std::uint64_t copied_bytes = 0;   ///< gradient bytes packed or unpacked: none but for a narrow wire
  double exposed_ms = 0.0;          ///< between the end of the backward pass and the last bucket
  double busy_ms = 0.0;             ///< of the thread in all-reduces
};

/// Averages gradients in place: a bucket starts as soon as the last writer of its last parameter is done, in
/// the order of the arena on every rank. Nothing is packed: messages leave from where backward wrote.
///
///     gradient_exchange<float, mpi::communicator> exchange(net.store(), comm);
///     exchange.begin(ctx);          // before the backward pass (of the step's last micro-batch)
///     ... forward, backward ...
///     exchange.finish(ctx);         // every gradient is the mean over the ranks
///
/// Between begin and finish nobody else may use the communicator. The mean is the sum times 1 / p, rounded;
/// the order of the sum is the algorithm's. All ranks end with the same bits.
template <class T, class Comm>
class gradient_exchange {
 public:
  /// The store and the communicator must outlive the object. Collective: throws state_error on all ranks if
  /// their buckets or options differ; value_error for options that cannot be.
  gradient_exchange(parameter_store<T>& store, Comm& comm, const exchange_options& options = {})
      : store_(&store),
        comm_(&comm),
        options_(options),
        generation_(store.generation()),
        buckets_(cut_buckets(store, options.buckets)),
        missing_(buckets_.size()) {
    detail::check_communicator<Comm>();
    bucket_of_.reserve(store.parameters().size());
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      bucket_of_.insert(bucket_of_.end(), static_cast<std::size_t>(buckets_[b].count), static_cast<int>(b));
    }
    resolve_progress();
    agree_on_lines(comm, "gradient exchange",
                   to_text(buckets_) + "algorithm " + to_string(options_.algorithm) + "\nwire " +
                       (options_.wire == exchange_wire::bf16 ? "bf16" : "same") + "\n");
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
  bool with_thread() const { return options_.progress == exchange_progress::thread; }
  const exchange_report& report() const { return report_; }
  void clear_report() { report_ = {}; }

  /// From now on gradients that get ready are exchanged. Throws state_error if the network has changed its
  /// arenas, or if an exchange has begun and not finished.
  void begin(context<device::cpu>& ctx) {
    if (store_->generation() != generation_) {
      PUFFERFISH_THROW(state_error("gradient_exchange: the network has new arenas; make a new exchange"));
    }
    if (running_) PUFFERFISH_THROW(state_error("gradient_exchange: begin without finish"));
    running_ = true;
    if (comm_->size() == 1) return;
    for (std::size_t b = 0; b < buckets_.size(); ++b) missing_[b] = buckets_[b].count;
    released_ = 0;
    started_ = 0;
    ctx.on_gradient_ready(&gradient_exchange::on_ready, this);
  }

  /// Waits until every gradient is the mean over all ranks, whether or not a backward pass has written it.
  /// Rethrows what went wrong in between.
  void finish(context<device::cpu>& ctx) {
    if (!running_) PUFFERFISH_THROW(state_error("gradient_exchange: finish without begin"));
    running_ = false;
    ++report_.steps;
    if (comm_->size() == 1) return;
    ctx.on_gradient_ready(nullptr, nullptr);
    const auto start = clock::now();
    release(buckets_.size());
    if (with_thread()) {
      const std::uint32_t all = ready_.load(std::memory_order_relaxed);
      for (std::uint32_t done = done_.load(std::memory_order_acquire); done != all;
           done = done_.load(std::memory_order_acquire)) {
        done_.wait(done, std::memory_order_acquire);
      }
      if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    } else {
      finish_requests();
    }
    report_.exposed_ms += milliseconds_since(start);
    const std::uint64_t bytes = store_->gradients().size_bytes();
    report_.payload_bytes +=
        options_.wire == exchange_wire::bf16 ? bytes / sizeof(T) * sizeof(bfloat16) : bytes;
    if (options_.wire == exchange_wire::bf16) report_.copied_bytes += bytes;
  }

 private:
  using clock = std::chrono::steady_clock;
  using request = decltype(std::declval<Comm&>().start_all_reduce_sum(std::span<T>()));

  static double milliseconds_since(clock::time_point start) {
    return std::chrono::duration<double, std::milli>(clock::now() - start).count();
  }

  void resolve_progress() {
    bool may = false;
    if constexpr (requires { comm_->usable_from_threads(); }) may = comm_->usable_from_threads();
    if (options_.progress == exchange_progress::automatic) {
      options_.progress = may ? exchange_progress::thread : exchange_progress::calls;
    }
    if (comm_->size() == 1) return;
    if (with_thread() && !may) {
      PUFFERFISH_THROW(
          value_error("gradient_exchange: a progress thread needs a communicator that any thread "
                      "may use (MPI_THREAD_SERIALIZED or more)"));
    }
    if (!with_thread() &&
        (options_.wire != exchange_wire::same || options_.algorithm != all_reduce_algorithm::library)) {
      PUFFERFISH_THROW(
          value_error("gradient_exchange: without a progress thread sums are the communicator's own"));
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
    return store_->gradients().subspan(static_cast<std::size_t>(buckets_[bucket].offset),
                                       static_cast<std::size_t>(buckets_[bucket].size));
  }
  void divide(std::span<T> values) const {
    const T factor = T(1) / static_cast<T>(comm_->size());
    for (T& value : values) value *= factor;
  }

  // The thread: one bucket after the other, asleep in between.
  void serve() {
    for (std::size_t next = 0;; next = (next + 1) % buckets_.size()) {
      const std::uint32_t done = done_.load(std::memory_order_relaxed);
      while (ready_.load(std::memory_order_acquire) == done) ready_.wait(done, std::memory_order_acquire);
      if (stopping_) return;
      const auto start = clock::now();
      try {
        if (!failure_) sum(gradients_of(next));
      } catch (...) {
        failure_ = std::current_exception();
      }
      report_.busy_ms += milliseconds_since(start);
      done_.store(done + 1, std::memory_order_release);
      done_.notify_one();
    }
  }

  void sum(std::span<T> values) {
    if (options_.wire == exchange_wire::bf16) {
      narrow_all_reduce(*comm_, values, narrow_scratch_);
    } else if (options_.algorithm == all_reduce_algorithm::ring) {
      ring_all_reduce(*comm_, values, scratch_);
    } else if (options_.algorithm == all_reduce_algorithm::recursive_doubling) {
      recursive_doubling_all_reduce(*comm_, values, scratch_);
    } else {
      comm_->all_reduce_sum(values);
    }
    divide(values);
  }

  // Without a thread: starts what is ready and lets what is under way move.
  void progress() {
    for (; started_ < released_; ++started_) {
      requests_.push_back(comm_->start_all_reduce_sum(gradients_of(started_)));
    }
    for (request& r : requests_) r.done();
  }
  void finish_requests() {
    for (std::size_t b = 0; b < requests_.size(); ++b) {
      requests_[b].wait();
      divide(gradients_of(b));
    }
    requests_.clear();
  }

  parameter_store<T>* store_;
  Comm* comm_;
  exchange_options options_;
  std::uint64_t generation_;
  std::vector<gradient_bucket> buckets_;
  std::vector<int> bucket_of_;  // of each parameter
  std::vector<int> missing_;    // gradients of each bucket that are not ready
  std::vector<request> requests_;
  std::vector<T> scratch_;
  std::vector<bfloat16> narrow_scratch_;
  // Buckets released to the thread, and done by it, since the beginning; both wrap around.
  std::atomic<std::uint32_t> ready_{0}, done_{0};
  std::atomic<bool> stopping_{false};
  std::size_t released_ = 0, started_ = 0;  // of this step
  bool running_ = false;
  std::exception_ptr failure_;
  exchange_report report_;
  std::thread thread_;
};

PUFFERFISH_NAMESPACE_END
