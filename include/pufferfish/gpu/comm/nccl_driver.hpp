// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the driver of a gradient exchange over `gpu::nccl`. Gradients are sent from a device's arena and
/// received in it, and the host only launches the work. Include <pufferfish/gpu/nccl.hpp>.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/distributed/exchange.hpp>
#include <pufferfish/gpu/comm/nccl_sums.hpp>
#include <pufferfish/gpu/comm/packing.hpp>
#include <pufferfish/gpu/comm/staging.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// A driver: distributed/exchange/exchange_driver.hpp says what the members do, and the comment of gpu::nccl
/// how this driver differs from the others. In a captured step all work becomes nodes of the graph, without
/// host functions (except one that counts, and two for a timeout).
template <class T, class Host>
class nccl_driver {
  using compressor_type = std::optional<any_compressor<T>>;

 public:
  static constexpr bool on_device = true;

  // The failures of replays are NCCL's, which gpu::nccl keeps.
  nccl_driver(parameter_store<T>& store, nccl<Host>& comm, const exchange_options& options,
              compressor_type compressor, pufferfish::detail::exchange_failure&)
      : store_(&store),
        comm_(&comm),
        options_(options),
        plan_(agreed_plan(options, comm)),
        compressor_(std::move(compressor)),
        buckets_(cut_buckets(store, plan_.buckets)),
        reducer_(comm, options.wire, longest_bucket()),
        finite_check_(comm),
        averaged_(buckets_.size()) {
    if (!compressor_ || !compressor_->can_pack() || !compressor_->is_mean() || buckets_.empty()) return;
    compressor_->split(buckets_);
    packed_.emplace(compressor_->pack());
  }
  nccl_driver(const nccl_driver&) = delete;
  nccl_driver& operator=(const nccl_driver&) = delete;
  ~nccl_driver() {
    if (unfinished_ || counts_replays_) static_cast<void>(cudaDeviceSynchronize());
  }

  std::string option_lines() const {
    return to_text(buckets_) + pufferfish::detail::option_lines(options_, compressor_, "by NCCL\n");
  }
  void start() const {
    if (compressor_ && !packed_ && !buckets_.empty()) {
      PUFFERFISH_THROW(value_error(
          "gradient_exchange: compressors work on the host: give the exchange host() of gpu::nccl"));
    }
    if (compressor_ && pufferfish::detail::is_narrow(options_.wire)) {
      PUFFERFISH_THROW(value_error(std::string("gradient_exchange: a wire of ") + to_string(options_.wire) +
                                   ", but a compressor, which chooses the format of its messages"));
    }
    if (pufferfish::detail::names_own_algorithm(options_)) {
      PUFFERFISH_THROW(value_error(std::string("gradient_exchange: NCCL adds in its own order, not by ") +
                                   to_string(options_.algorithm)));
    }
    if (options_.local && compressor_) {
      PUFFERFISH_THROW(
          value_error("gradient_exchange: exchange_options::local sends nothing, but there is a compressor"));
    }
  }

  const std::vector<gradient_bucket>& buckets() const { return buckets_; }
  const exchange_plan& plan() const { return plan_; }
  bool with_thread() const { return false; }
  index_t payload_bytes() const {
    if (options_.local) return 0;
    return compressor_ ? compressor_->payload_bytes()
                       : pufferfish::detail::gradient_bytes(*store_, options_.wire);
  }
  pufferfish::detail::exchange_counts& counts() { return counts_; }
  const pufferfish::detail::exchange_counts& counts() const { return counts_; }
  bool arrives_early() const { return sums() && !checks_finite(); }
  bool can_be_captured() const { return true; }
  bool listens() const { return true; }
  const int* skip() const { return finite_check_.skip(); }

  // The only compressor that works here has no states and depends on neither epoch nor rate.
  std::vector<compressor_state<T>> states() { return {}; }
  void set_epoch(index_t, double) {}
  void set_rate(gpu_context&, double) {}

  bool is_captured(const gpu_context& ctx) const { return gpu::is_captured(ctx.stream()); }
  void prepare(gpu_context& ctx, bool captured) {
    // Replays under way write the counts, as the end of a direct step does.
    if (!captured && counts_replays_) ctx.synchronize();
    comm_->check();
    if (!pufferfish::detail::is_narrow(options_.wire)) comm_->require_deterministic(ctx);
    comm_->report_to(ctx);
  }
  void begin(gpu_context& ctx, bool captured) {
    captured_ = captured;
    unfinished_ = true;
    if (!captured) counts_.restart();
    ctx_ = &ctx;
  }

  /// Puts the exchange of bucket b into the stream of sums, after the work that is in the context's stream
  /// now.
  void release(std::size_t b) {
    const cudaStream_t stream = sums_.handle();
    written_.record(ctx_->stream());
    sums_.wait_for(written_);
    if (b == 0) {
      comm_->mark_begin(stream);
      if (checks_finite()) finite_check_.restart(stream);
    }
    const std::span<T> gradients = pufferfish::detail::span_of(store_->gradients(), buckets_[b]);
    if (checks_finite()) finite_check_.find(gradients, buckets_[b].offset, stream);
    if (packed_) {
      reducer_.average(packed_->gather(b, gradients.data(), stream), stream);
      packed_->scatter(b, gradients, stream);
    } else if (sums()) {
      reducer_.average(gradients, stream);
    }
    averaged_[b].record(stream);
  }
  void progress(std::size_t) {}
  void zero_unwritten(gpu_context& ctx) { detail::zero_unwritten(ctx, *store_); }

  template <class Take>
  bool finish(gpu_context& ctx, Take&& take) {
    const bool usable = end_step(ctx);
    for (std::size_t b = 0; usable && b < buckets_.size(); ++b) take(b);
    wait(ctx, ended_);  // the next backward pass must not overwrite gradients that are being summed
    return usable;
  }
  void deliver(gpu_context& ctx, std::size_t b) {
    if (arrives_early()) wait(ctx, averaged_[b]);
  }
  /// The host does not measure how long the exchange takes: its times stay zero.
  void count_times(double, double) {}

 private:
  bool sums() const { return comm_->size() > 1 && !options_.local; }
  bool checks_finite() const { return pufferfish::detail::checks_finite(options_); }

  // Collective: throws on all ranks if the plan of one of them is not valid.
  static exchange_plan agreed_plan(const exchange_options& options, nccl<Host>& comm) {
    exchange_plan plan;
    pufferfish::detail::all_or_none(comm, "gradient_exchange",
                                    [&] { plan = pufferfish::detail::checked_plan(options, comm.size()); });
    return plan;
  }
  index_t longest_bucket() const {
    index_t result = 0;
    for (const gradient_bucket& bucket : buckets_) result = std::max(result, bucket.size);
    return result;
  }

  // Ends the step on the stream of sums. A direct step whose result is checked waits for this stream.
  bool end_step(gpu_context& ctx) {
    const cudaStream_t stream = sums_.handle();
    if (buckets_.empty()) {
      written_.record(ctx.stream());
      sums_.wait_for(written_);
    } else {
      if (checks_finite()) finite_check_.decide(store_->gradients(), stream);
      comm_->mark_end(stream);
    }
    if (captured_) {
      // No needless write: a replay of another graph may be posting a failure in another thread.
      if (failures_ != ctx.failures()) failures_ = ctx.failures();
      counts_replays_ = true;
      check(cudaLaunchHostFunc(stream, &nccl_driver::replayed, this), "cudaLaunchHostFunc");
    }
    ended_.record(stream);
    // Later work in the context's stream must not run before the decision.
    if (!arrives_early()) wait(ctx, ended_);
    if (!captured_) {
      if (checks_finite() || comm_->timeout() > 0.0) ended_.synchronize();
      if (comm_->timeout() > 0.0) comm_->check();  // an aborted sum ends, too, with an invalid result
    }
    unfinished_ = false;
    return captured_ || settle();
  }

  static void wait(gpu_context& ctx, const event& point) {
    check(cudaStreamWaitEvent(ctx.stream(), point.handle(), 0), "cudaStreamWaitEvent");
  }

  static void replayed(void* object) {
    auto& self = *static_cast<nccl_driver*>(object);
    try {
      static_cast<void>(self.settle());
    } catch (...) {
      self.failures_->post(std::current_exception());
    }
  }

  // Updates the host's counts after a step. Returns whether the step counts.
  bool settle() {
    sums() && !packed_ ? counts_.add_step(*store_, options_.wire) : counts_.add_step();
    if (sums() && packed_) counts_.report().payload_bytes += static_cast<std::uint64_t>(payload_bytes());
    std::optional<nonfinite_gradient> found;
    if (checks_finite() && !buckets_.empty()) found = finite_check_.result(*store_);
    if (found) return counts_.refuse(std::move(*found), options_.nonfinite);
    counts_.count_step();
    return true;
  }

  parameter_store<T>* store_;
  nccl<Host>* comm_;
  exchange_options options_;
  exchange_plan plan_;
  compressor_type compressor_;  // refused by start() unless it is the mean of packed elements
  const std::vector<gradient_bucket> buckets_;
  std::optional<packed_buckets<T>> packed_;
  nccl_reducer<T, Host> reducer_;
  nccl_finite_check<T, Host> finite_check_;
  stream sums_ = stream::urgent();
  std::vector<event> averaged_;  // one per bucket
  event written_, ended_{event_use::sleep};
  gpu_context* ctx_ = nullptr;  // of the last step that has begun
  bool captured_ = false, counts_replays_ = false;
  bool unfinished_ = false;  // work of a step may be in the stream of sums
  pufferfish::detail::exchange_counts counts_;
  std::shared_ptr<late_failure> failures_;
};

}  // namespace gpu::detail

namespace detail {

template <class T, class Host>
struct exchange_driver<T, gpu::nccl<Host>, device::gpu> {
  using type = gpu::detail::nccl_driver<T, Host>;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
