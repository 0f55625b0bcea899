// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The gradient exchange over `gpu::nccl`: gradients are sent from a device's arena and received in it, and
/// the host only launches the work. Include <pufferfish/gpu/nccl.hpp>.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/distributed/exchange.hpp>
#include <pufferfish/distributed/exchange/bucket_counter.hpp>
#include <pufferfish/distributed/exchange/exchange_failure.hpp>
#include <pufferfish/gpu/kernels/comm/exchange.hpp>
#include <pufferfish/gpu/nccl.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/nn/unwritten_gradients.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// Sums buckets by NCCL. With a narrow wire, numbers are sent as by narrow_all_reduce, with the same bits as
/// result: every rank adds its part of the bucket in float, without rounding in between. The narrow sum has
/// three steps on one stream. Rank r owns part r of the bucket. (1) Every rank rounds its bucket to 16 bits
/// and sends part s to rank s. (2) The owner adds the parts of the other ranks, in the order of the distance
/// of their ranks, to its own unrounded part, and rounds the sum. (3) The owner sends the rounded sum to all
/// others, and every rank widens it and multiplies it by 1 / ranks.
template <class T, class Host>
class nccl_reducer {
 public:
  /// `longest_bucket`: elements. With a narrow wire, allocates 4 bytes for each of them, on the current
  /// device. Throws backend_error.
  nccl_reducer(nccl<Host>& comm, exchange_wire wire, index_t longest_bucket)
      : comm_(&comm), wire_(wire), ranks_(static_cast<std::size_t>(comm.size())) {
    if (wire == exchange_wire::same || ranks_ == 1) return;
    part_ = longest_bucket / comm.size() + 1;
    sent_ = memory_block<std::uint16_t>(device_memory(), longest_bucket, uninitialized);
    received_ = memory_block<std::uint16_t>(device_memory(), part_ * (comm.size() - 1), uninitialized);
  }

  /// Element i becomes the mean over all ranks. In place, in the order of the stream: the sum times the
  /// rounded 1 / ranks. Collective; `values` has the same length on all ranks, at most longest_bucket. Throws
  /// the errors of gpu::nccl.
  void average(std::span<T> values, cudaStream_t stream) {
    if (ranks_ == 1) return;
    if (wire_ != exchange_wire::same) return average_narrow(values, stream);
    comm_->start_sum(values, stream);
    kernels::multiply(stream, values.data(), static_cast<index_t>(values.size()), factor());
  }

 private:
  T factor() const { return T(1) / static_cast<T>(comm_->size()); }

  // The three steps of the class comment. sent_ holds the rounded bucket, then the rounded sums of all parts;
  // received_ holds one part from each other rank.
  void average_narrow(std::span<T> values, cudaStream_t stream) {
    const auto me = static_cast<std::size_t>(comm_->rank());
    const auto format =
        wire_ == exchange_wire::bf16 ? kernels::wire_format::bf16 : kernels::wire_format::fp16;
    const std::span<std::uint16_t> sent = sent_.span().first(values.size());
    const auto part = [&](auto all, std::size_t rank) {
      return pufferfish::detail::part_of(all, rank % ranks_, ranks_);
    };
    const std::span<T> own = part(values, me);
    const std::span<std::uint16_t> sum = part(sent, me);
    const auto from_rank = [&](std::size_t step) {
      return received_.span().subspan((step - 1) * static_cast<std::size_t>(part_), own.size());
    };
    kernels::narrow(stream, format, values.data(), sent.data(), static_cast<index_t>(values.size()));
    for_messages(
        stream, [&](std::size_t to) { return part(sent, to); },
        [&](std::size_t, std::size_t step) { return from_rank(step); });
    kernels::add_narrow(stream, format, received_.data(), comm_->size() - 1, part_, own.data(), sum.data(),
                        static_cast<index_t>(own.size()), factor());
    for_messages(
        stream, [&](std::size_t) { return sum; },
        [&](std::size_t from, std::size_t) { return part(sent, from); });
    const std::size_t before = static_cast<std::size_t>(own.data() - values.data());
    const std::size_t after = before + own.size();
    kernels::widen(stream, format, sent.data(), values.data(), static_cast<index_t>(before), factor());
    kernels::widen(stream, format, sent.data() + after, values.data() + after,
                   static_cast<index_t>(values.size() - after), factor());
  }

  // Sends outgoing(to) to every other rank, `step` ranks ahead, and receives incoming(from, step) from it.
  template <class Outgoing, class Incoming>
  void for_messages(cudaStream_t stream, Outgoing&& outgoing, Incoming&& incoming) {
    const auto me = static_cast<std::size_t>(comm_->rank());
    comm_->start_messages(
        [&](auto&& send, auto&& receive) {
          for (std::size_t step = 1; step < ranks_; ++step) {
            const std::size_t to = (me + step) % ranks_, from = (me + ranks_ - step) % ranks_;
            send(outgoing(to), static_cast<int>(to));
            receive(incoming(from, step), static_cast<int>(from));
          }
        },
        stream);
  }

  nccl<Host>* comm_;
  exchange_wire wire_;
  std::size_t ranks_;
  index_t part_ = 0;  // most elements received from one rank
  memory_block<std::uint16_t> sent_, received_;
};

/// Decides, on the device, whether a step is skipped because of gradients that are not finite. found_[0] is
/// the position of the first such element of this rank's own gradients, found_[1] the smallest of all ranks
/// (rank in the upper bits), found_[2] that of the exchanged gradients; all_finite: none.
template <class T, class Host>
class nccl_judge {
 public:
  explicit nccl_judge(nccl<Host>& comm)
      : comm_(&comm), skip_(device_memory(), 1), found_(device_memory(), 3), seen_(pinned_memory(), 2) {}

  /// Address, in device memory, of a flag that is 1 if the step is skipped.
  const int* skip() const { return skip_.data(); }

  // In the order of the stream: restart, look_at for all gradients, decide when they are exchanged.

  void restart(cudaStream_t stream) {
    gpu::check(cudaMemsetAsync(found_.data(), 0xff, 3 * sizeof(std::uint64_t), stream), "cudaMemsetAsync");
  }
  void look_at(std::span<const T> gradients, index_t offset, cudaStream_t stream) {
    kernels::find_nonfinite(stream, gradients.data(), static_cast<index_t>(gradients.size()),
                            static_cast<std::uint64_t>(offset), found_.data());
  }
  /// Finds the first element that is not finite, before the exchange and after it, and sets the flag skip().
  void decide(std::span<const T> exchanged, cudaStream_t stream) {
    kernels::tag_with_rank(stream, found_.data(), static_cast<std::uint64_t>(comm_->rank()),
                           found_.data() + 1);
    comm_->start_min(found_.span().subspan(1, 1), stream);
    kernels::find_nonfinite(stream, exchanged.data(), static_cast<index_t>(exchanged.size()), 0,
                            found_.data() + 2);
    kernels::decide_skip(stream, found_.data() + 1, 2, skip_.data());
    gpu::check(cudaMemcpyAsync(seen_.data(), found_.data() + 1, 2 * sizeof(std::uint64_t),
                               cudaMemcpyDeviceToHost, stream),
               "cudaMemcpyAsync of a verdict to the host");
  }

  /// After the stream has executed decide(): the first gradient that is not finite, if any.
  template <class Store>
  std::optional<nonfinite_gradient> seen(const Store& store) const {
    const std::uint64_t own = seen_.data()[0], exchanged = seen_.data()[1];
    if (own != kernels::all_finite) {
      return pufferfish::detail::name_nonfinite(store, static_cast<index_t>(own & 0xffffffffffU),
                                                static_cast<int>(own >> 40));
    }
    if (exchanged == kernels::all_finite) return std::nullopt;
    return pufferfish::detail::name_nonfinite(store, static_cast<index_t>(exchanged), -1);
  }

 private:
  nccl<Host>* comm_;
  memory_block<int> skip_;
  memory_block<std::uint64_t> found_;  // first in this rank's gradients, in all ranks', in the exchanged ones
  memory_block<std::uint64_t> seen_;   // the last two, on the host
};

}  // namespace gpu::detail

/// As gradient_exchange, with these differences. Buckets are summed on a stream of the exchange's own while
/// the backward pass goes on. finish makes the context's stream wait for them; the host waits only to check a
/// nonfinite_policy or, with a timeout, the other ranks. In a captured step all of this becomes nodes of the
/// graph, without host functions (except one that counts, and two for a timeout). NCCL adds, so there is no
/// choice of algorithm and no thread for progress. Compressors work on the host: an exchange with one is made
/// with host(). All ranks make the same calls in the same order. One thread at a time uses an object, with
/// the context's device current. The object must outlive graphs that have captured its calls; the destructor
/// waits for the device if a step is unfinished or was captured.
///
///     gradient_exchange<float, gpu::nccl<mpi::communicator>, device::gpu> exchange(net.store(), comm);
///     exchange.begin(ctx);
///     ... forward, loss, backward ...
///     exchange.finish(ctx, [&](const gradient_bucket& b) { optimizer.step_range(ctx, b.offset, b.size); });
template <class T, class Host>
class gradient_exchange<T, gpu::nccl<Host>, device::gpu> {
  using comm_type = gpu::nccl<Host>;

 public:
  /// As for gradient_exchange; value_error for a compressor or an algorithm of this library. Collective.
  /// Store and communicator must outlive the object. Memory of a narrow wire is on the device that is
  /// current.
  gradient_exchange(parameter_store<T>& store, comm_type& comm, const exchange_options& options = {},
                    const std::optional<any_compressor<T>>& compressor = {})
      : store_(&store),
        comm_(&comm),
        options_(options),
        plan_(options.plan ? *options.plan : default_plan(comm.size())),
        generation_(store.generation()),
        buckets_(store, agreed_limits()),
        reducer_(comm, options.wire, longest(buckets_)),
        judge_(comm),
        come_(buckets_.size()) {
    agree_on_lines(comm, "gradient exchange", option_lines(compressor));
    check_options(compressor.has_value());
  }
  gradient_exchange(const gradient_exchange&) = delete;
  gradient_exchange& operator=(const gradient_exchange&) = delete;
  ~gradient_exchange() {
    listener_.stop();
    if (running_ || counts_replays_) static_cast<void>(cudaDeviceSynchronize());
  }

  const std::vector<gradient_bucket>& buckets() const { return buckets_.buckets(); }
  const exchange_plan& plan() const { return plan_; }
  bool with_thread() const { return false; }
  /// The host does not measure how long the exchange takes: its times are zero.
  const exchange_report& report() const { return report_; }
  void clear_report() { report_ = {}; }
  /// Bytes that one rank passes to NCCL in a step: all gradients, with 2 bytes each on a narrow wire.
  index_t payload_bytes() const {
    return static_cast<index_t>(store_->gradients().size() * (is_narrow() ? sizeof(bfloat16) : sizeof(T)));
  }
  /// Empty: there is no compressor.
  std::vector<compressor_state<T>> states() { return {}; }
  /// Number of exchanges, skipped steps excluded. In captured steps a host function of the graph counts: read
  /// it, report() and nonfinite() after context::synchronize.
  std::uint64_t steps() const { return steps_; }
  /// The next begin compares the numbers of all ranks.
  void set_steps(std::uint64_t steps) {
    steps_ = steps;
    steps_agreed_ = false;
  }
  /// Without effect, as set_rate: there is no compressor.
  void set_epoch(index_t, double) {}
  void set_rate(gpu_context&, double) {}
  const std::optional<nonfinite_gradient>& nonfinite() const { return nonfinite_; }
  /// Address of a flag in device memory, not 0 in stream order after finish if the step does not count.
  /// Written only if exchange_options::nonfinite is not `ignore`; else it stays 0.
  const int* skip() const { return judge_.skip(); }

  /// As for gradient_exchange. Also throws failures of NCCL since the last call, and value_error if NCCL's
  /// sums are not deterministic and the context is (gpu::nccl).
  void begin(gpu_context& ctx) {
    if (store_->generation() != generation_) {
      PUFFERFISH_THROW(state_error("gradient_exchange: the network has new arenas; make a new exchange"));
    }
    failure_.require_none();
    if (running_ && !captured_) PUFFERFISH_THROW(state_error("gradient_exchange: begin without finish"));
    comm_->check();
    if (!is_narrow()) comm_->require_deterministic(ctx);
    comm_->report_to(ctx);
    if (!steps_agreed_) {
      agree_on_lines(*comm_, "gradient exchange", "steps done: " + std::to_string(steps_) + "\n");
      steps_agreed_ = true;
    }
    captured_ = gpu::is_captured(ctx.stream());
    buckets_.restart();
    running_ = true;
    if (!captured_) stopped_ = false;
    released_ = 0;
    ctx_ = &ctx;
    listener_ = ctx.on_gradient_ready(&gradient_exchange::on_ready, this);
  }

  /// The means are in the arena for work that is put into the context's stream after the call. Returns
  /// whether the step counts; in a captured step always true (see skip()).
  bool finish(gpu_context& ctx) {
    return finish(ctx, [](const gradient_bucket&) {});
  }

  /// As for gradient_exchange. Work that `arrived` puts into the
  /// context's stream reads the means of the bucket.
  template <class Arrived>
  bool finish(gpu_context& ctx, Arrived&& arrived) {
    failure_.require_none();
    if (!running_) PUFFERFISH_THROW(state_error("gradient_exchange: finish without begin"));
    check_capture(ctx);
    listener_.stop();
    const bool usable = guarded([&] {
      detail::zero_before_exchange(*store_, true, [&](index_t offset, index_t size) {
        gpu::check(cudaMemsetAsync(store_->gradients().data() + offset, 0,
                                   static_cast<std::size_t>(size) * sizeof(T), ctx.stream()),
                   "cudaMemsetAsync of gradients");
      });
      release(buckets_.size());
      return end_step(ctx);
    });
    running_ = false;
    try {
      for (std::size_t b = 0; usable && b < buckets_.size(); ++b) {
        if (arrives_early()) wait(ctx, come_[b]);
        arrived(buckets_[b]);
      }
    } catch (...) {
      wait(ctx, ended_);  // the next backward pass must not overwrite gradients that are being summed
      throw;
    }
    wait(ctx, ended_);
    return usable;
  }

  /// A step may be captured with begin and finish, both or neither.
  bool can_be_captured() const { return true; }
  /// Whether finish calls `arrived` for a bucket before the later ones are exchanged (in stream order).
  bool arrives_early() const { return comm_->size() > 1 && !looks(); }

 private:
  bool is_narrow() const { return options_.wire != exchange_wire::same; }
  bool looks() const { return options_.nonfinite != nonfinite_policy::ignore; }

  // Collective: throws on all ranks if the plan of one of them is not valid.
  const bucket_limits& agreed_limits() const {
    detail::all_or_none(*comm_, "gradient_exchange",
                        [this] { detail::check_plan("gradient_exchange", plan_); });
    return plan_.buckets;
  }
  static index_t longest(const detail::bucket_counter<T>& buckets) {
    index_t result = 0;
    for (const gradient_bucket& bucket : buckets.buckets()) result = std::max(result, bucket.size);
    return result;
  }

  std::string option_lines(const std::optional<any_compressor<T>>& compressor) const {
    return to_text(buckets_.buckets()) + "algorithm " + to_string(options_.algorithm) + "\nwire " +
           to_string(options_.wire) + "\nnon-finite gradients " + to_string(options_.nonfinite) +
           "\ncompressor " + (compressor ? compressor->describe() : std::string("none")) + "\nby NCCL\n";
  }
  // Throws value_error; the options are equal on all ranks, so all of them throw.
  void check_options(bool has_compressor) const {
    if (has_compressor) {
      PUFFERFISH_THROW(value_error(
          "gradient_exchange: compressors work on the host: give the exchange host() of gpu::nccl"));
    }
    if (options_.algorithm != all_reduce_algorithm::automatic &&
        options_.algorithm != all_reduce_algorithm::library) {
      PUFFERFISH_THROW(value_error(std::string("gradient_exchange: NCCL adds in its own order, not by ") +
                                   to_string(options_.algorithm)));
    }
  }

  void check_capture(const gpu_context& ctx) const {
    if (gpu::is_captured(ctx.stream()) != captured_) detail::refuse_half_capture();
  }

  static void on_ready(void* object, const void* parameter, int id) {
    auto& self = *static_cast<gradient_exchange*>(object);
    std::size_t count = 0;
    self.guarded([&] { count = self.buckets_.written(parameter, id); });
    if (count > self.released_) self.check_capture(*self.ctx_);
    self.guarded([&] { self.release(count); });
  }

  // As in gradient_exchange. After a failure running_ stays true, so that the destructor waits for the sums.
  template <class Part>
  decltype(auto) guarded(Part&& part) {
    try {
      return part();
    } catch (...) {
      if (stopped_) running_ = false;
      if (!captured_ && !stopped_) failure_.keep(std::current_exception());
      listener_.stop();
      throw;
    }
  }

  void release(std::size_t count) {
    for (; released_ < count; ++released_) exchange(released_);
  }
  // Puts the exchange of bucket b into the stream of sums, after the work that is in the context's stream
  // now.
  void exchange(std::size_t b) {
    const cudaStream_t stream = sums_.handle();
    const gradient_bucket& bucket = buckets_[b];
    written_.record(ctx_->stream());
    sums_.wait_for(written_);
    if (b == 0) {
      comm_->mark_begin(stream);
      if (looks()) judge_.restart(stream);
    }
    const std::span<T> gradients = store_->gradients().subspan(static_cast<std::size_t>(bucket.offset),
                                                               static_cast<std::size_t>(bucket.size));
    if (looks()) judge_.look_at(gradients, bucket.offset, stream);
    reducer_.average(gradients, stream);
    come_[b].record(stream);
  }

  // Ends the step on the stream of sums. A direct step whose result is checked waits for this stream.
  bool end_step(gpu_context& ctx) {
    const cudaStream_t stream = sums_.handle();
    if (buckets_.size() == 0) {
      written_.record(ctx.stream());
      sums_.wait_for(written_);
    } else {
      if (looks()) judge_.decide(store_->gradients(), stream);
      comm_->mark_end(stream);
    }
    if (captured_) {
      // No needless write: a replay of another graph may be posting a failure in another thread.
      if (failures_ != ctx.failures()) failures_ = ctx.failures();
      counts_replays_ = true;
      gpu::check(cudaLaunchHostFunc(stream, &gradient_exchange::replayed, this), "cudaLaunchHostFunc");
    }
    ended_.record(stream);
    // Later work in the context's stream must not run before the decision.
    if (!arrives_early()) wait(ctx, ended_);
    if (captured_) return true;
    if (looks() || comm_->timeout() > 0.0) ended_.synchronize();
    if (comm_->timeout() > 0.0) comm_->check();  // an aborted sum ends, too, with an invalid result
    return settle();
  }

  static void wait(gpu_context& ctx, const gpu::event& point) {
    gpu::check(cudaStreamWaitEvent(ctx.stream(), point.handle(), 0), "cudaStreamWaitEvent");
  }

  static void replayed(void* object) {
    auto& self = *static_cast<gradient_exchange*>(object);
    try {
      static_cast<void>(self.settle());
    } catch (...) {
      self.failures_->post(std::current_exception());
    }
  }

  // Updates the host's report after a step. Returns whether the step counts.
  bool settle() {
    ++report_.steps;
    if (comm_->size() > 1) {
      report_.payload_bytes += static_cast<std::uint64_t>(payload_bytes());
      if (is_narrow()) report_.copied_bytes += store_->gradients().size_bytes();
    }
    std::optional<nonfinite_gradient> found;
    if (looks() && buckets_.size() > 0) found = judge_.seen(*store_);
    if (!found) {
      ++steps_;
      return true;
    }
    nonfinite_ = std::move(found);
    if (options_.nonfinite == nonfinite_policy::stop) {
      stopped_ = true;
      PUFFERFISH_THROW(value_error("gradient_exchange: " + to_string(*nonfinite_)));
    }
    ++report_.skipped;
    return false;
  }

  parameter_store<T>* store_;
  comm_type* comm_;
  exchange_options options_;
  exchange_plan plan_;
  std::uint64_t generation_;
  detail::bucket_counter<T> buckets_;
  gpu::detail::nccl_reducer<T, Host> reducer_;
  gpu::detail::nccl_judge<T, Host> judge_;
  gpu::stream sums_ = gpu::stream::urgent();
  std::vector<gpu::event> come_;  // one per bucket
  gpu::event written_, ended_{gpu::event_use::sleep};
  gpu_context* ctx_ = nullptr;  // context of the running backward pass
  gradient_listener listener_;  // from begin to finish
  std::size_t released_ = 0;    // buckets of this step that were released
  bool running_ = false, captured_ = false, counts_replays_ = false;
  std::uint64_t steps_ = 0;
  bool steps_agreed_ = false;
  std::optional<nonfinite_gradient> nonfinite_;
  std::atomic<bool> stopped_{false};  // by nonfinite_policy::stop, on all ranks alike
  detail::exchange_failure failure_;
  exchange_report report_;
  std::shared_ptr<gpu::late_failure> failures_;
};

PUFFERFISH_NAMESPACE_END
