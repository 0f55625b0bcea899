// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Parameters on a device with gradients that are known, and the same on the host: what tests of the exchange
// compare.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../support.hpp"

#include <pufferfish/core/hash.hpp>
#include <pufferfish/distributed.hpp>
#include <pufferfish/gpu/comm/staging.hpp>
#include <pufferfish/gpu/optim/loss_scaler.hpp>
#include <pufferfish/gpu/optim/optimizer.hpp>
#include <pufferfish/gpu/runtime/graph.hpp>
#include <pufferfish/optim/sgd.hpp>
#include <pufferfish/prune/compact_sum.hpp>
#include <pufferfish/prune/magnitude.hpp>

namespace gpu_test {

/// Parameters of odd sizes without layers, in the memory of a source.
template <class T>
struct odd_parameters {
  std::vector<pf::parameter<T>> all;
  pf::parameter_store<T> store;

  explicit odd_parameters(pf::memory_source& source) : store(source) {
    const auto add = [this](const pf::logical_layout& layout) {
      all.emplace_back(layout, pf::parameter_role::weight);
    };
    add(pf::logical_layout::vector(11));
    add(pf::logical_layout::matrix(7, 5));
    add(pf::logical_layout::kernel(6, 3, 3, 3));
    add(pf::logical_layout::vector(0));
    add(pf::logical_layout::vector(1));
    add(pf::logical_layout::matrix(1, 9));
    add(pf::logical_layout::matrix(61, 37));
    add(pf::logical_layout::matrix(1, 1));
    add(pf::logical_layout::kernel(8, 16, 3, 3));
    add(pf::logical_layout::vector(300));
    store.pack([this](pf::state_visitor<T>& visitor) {
      int number = 0;
      for (pf::parameter<T>& p : all) {
        std::string name = "p";
        name += std::to_string(number++);
        visitor.on_parameter(name, p);
      }
    });
  }
  std::size_t size() const { return store.values().size(); }
};

/// A mask that has pruned three quarters of the odd parameters' matrices by random numbers.
inline std::shared_ptr<const pf::weight_mask> some_mask() {
  odd_parameters<float> net(pf::host_memory());
  pf::fill_normal(net.store.values(), 1.0, pf::random_stream(5, 6));
  auto mask = std::make_shared<pf::weight_mask>(net.store);
  pf::prune_by_magnitude(*mask, net.store, {.share = 0.75});
  return mask;
}

/// The gradient arena of a rank at a step.
template <class T>
std::vector<T> gradients_of(std::size_t size, int rank, std::uint64_t step) {
  std::vector<T> values(size);
  pf::fill_normal(std::span<T>(values), 1.0,
                  pf::random_stream(step + 1, static_cast<std::uint64_t>(rank) + 7));
  return values;
}

/// Stands for a backward pass: every parameter's gradient is copied from `source`, in the order of the arena.
/// What is in the source when the stream gets there is the gradient, in a replay as well. `between(i)` is
/// called when parameter i has been written.
template <class T, class Between>
void backward(pf::gpu_context& ctx, odd_parameters<T>& net, const T* source, Between&& between) {
  int i = 0;
  for (const auto& entry : net.store.parameters()) {
    const auto bytes = static_cast<std::size_t>(entry.thing->size()) * sizeof(T);
    pf::gpu::check(cudaMemcpyAsync(entry.thing->gradient_data(), source + entry.offset, bytes,
                                   cudaMemcpyDeviceToDevice, ctx.stream()),
                   "cudaMemcpyAsync");
    ctx.gradient_written(*entry.thing);
    between(i++);
  }
}
template <class T>
void backward(pf::gpu_context& ctx, odd_parameters<T>& net, const T* source) {
  backward(ctx, net, source, [](int) {});
}
template <class T>
void backward(pf::cpu_context& ctx, odd_parameters<T>& net, const std::vector<T>& source) {
  for (const auto& entry : net.store.parameters()) {
    std::copy_n(source.begin() + entry.offset, entry.thing->size(), entry.thing->gradient_data());
    ctx.gradient_written(*entry.thing);
  }
}

/// What the device has when all that the stream was given is done.
template <class T>
std::vector<T> read(pf::gpu_context& ctx, std::span<const T> device) {
  ctx.synchronize();
  std::vector<T> host(device.size());
  pf::gpu::check(cudaMemcpy(host.data(), device.data(), device.size_bytes(), cudaMemcpyDeviceToHost),
                 "cudaMemcpy");
  return host;
}

/// Numbers on the device that the host writes and reads in the order of a stream.
template <class T>
class stream_buffer {
 public:
  explicit stream_buffer(std::size_t size)
      : device_(pf::gpu::device_memory(), static_cast<pf::index_t>(size)) {}
  T* data() { return device_.data(); }
  void write(pf::gpu_context& ctx, const std::vector<T>& values) {
    pf::gpu::check(cudaMemcpyAsync(device_.data(), values.data(), values.size() * sizeof(T),
                                   cudaMemcpyHostToDevice, ctx.stream()),
                   "cudaMemcpyAsync");
  }
  void copy_from(pf::gpu_context& ctx, const T* from, pf::index_t offset, pf::index_t size) {
    pf::gpu::check(
        cudaMemcpyAsync(device_.data() + offset, from + offset, static_cast<std::size_t>(size) * sizeof(T),
                        cudaMemcpyDeviceToDevice, ctx.stream()),
        "cudaMemcpyAsync");
  }
  std::vector<T> read(pf::gpu_context& ctx) {
    return gpu_test::read(ctx, std::span<const T>(device_.span()));
  }

 private:
  pf::memory_block<T> device_;
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size() || a.empty()) return a.size() == b.size();
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class Comm, class T>
bool same_on_all_ranks(Comm& comm, const std::vector<T>& values) {
  const std::uint64_t mine = pf::digest(std::span<const T>(values));
  const std::vector<std::uint64_t> all = comm.all_gather(mine);
  return std::all_of(all.begin(), all.end(), [&](std::uint64_t other) { return other == mine; });
}

/// The CPU's exchange of the same gradients.
template <class T, class Comm>
class host_twin {
 public:
  host_twin(Comm& comm, const pf::exchange_options& options, const pf::compression_options& compression = {})
      : net_(pf::host_memory()),
        rank_(comm.rank()),
        exchange_(net_.store, comm, options, pf::new_compressor(net_.store, compression)) {}

  /// What the exchange makes of them, and what it says.
  std::vector<T> step(const std::vector<T>& gradients) {
    exchange_.begin(ctx_);
    backward(ctx_, net_, gradients);
    usable = exchange_.finish(ctx_);
    return {net_.store.gradients().begin(), net_.store.gradients().end()};
  }
  std::vector<T> step(std::uint64_t number) { return step(gradients_of<T>(net_.size(), rank_, number)); }

  pf::gradient_exchange<T, Comm>& exchange() { return exchange_; }
  bool usable = true;

 private:
  odd_parameters<T> net_;
  int rank_;
  pf::cpu_context ctx_;
  pf::gradient_exchange<T, Comm> exchange_;
};

inline pf::exchange_options small_buckets() {
  pf::exchange_options options;
  options.plan.emplace().buckets = {1500, 5000};
  options.plan->rules = {{2000, pf::all_reduce_algorithm::recursive_doubling},
                         {std::numeric_limits<pf::index_t>::max(), pf::all_reduce_algorithm::ring}};
  return options;
}

/// Adds like MPI until it is told to fail, on all ranks alike, and counts.
class watched {
 public:
  using request = pf::mpi::request;
  explicit watched(pf::mpi::communicator& comm) : comm_(&comm) {}
  int rank() const { return comm_->rank(); }
  int size() const { return comm_->size(); }
  bool usable_from_threads() const { return threads && comm_->usable_from_threads(); }
  template <class T>
  void all_reduce_sum(std::span<T> values) {
    if (sums_until_failure-- == 0) throw pf::backend_error("the link is down");
    comm_->all_reduce_sum(values);
    ++sums;
  }
  template <class T>
  request start_all_reduce_sum(std::span<T> values) {
    return comm_->start_all_reduce_sum(values);
  }
  template <class T>
  void all_reduce_min(std::span<T> values) {
    comm_->all_reduce_min(values);
  }
  template <class T>
  void all_reduce_max(std::span<T> values) {
    comm_->all_reduce_max(values);
  }
  template <class T>
  void broadcast(std::span<T> values, int root) {
    comm_->broadcast(values, root);
  }
  void broadcast_bytes(std::span<std::byte> bytes, int root) { comm_->broadcast_bytes(bytes, root); }
  template <class T>
  std::vector<T> all_gather(const T& value) {
    return comm_->all_gather(value);
  }
  void barrier() { comm_->barrier(); }
  template <class T>
  request start_send(std::span<const T> values, int to) {
    return comm_->start_send(values, to);
  }
  template <class T>
  request start_receive(std::span<T> values, int from) {
    return comm_->start_receive(values, from);
  }

  /// Waits up to `seconds` seconds for `count` sums. Returns whether they have happened.
  bool await_sums(int count, double seconds) const {
    const auto start = std::chrono::steady_clock::now();
    while (sums < count) {
      if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > seconds)
        return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  std::atomic<int> sums_until_failure{-1}, sums{0};
  bool threads = true;

 private:
  pf::mpi::communicator* comm_;
};
static_assert(pf::communicator<watched>);

inline pf::exchange_options by_library() {
  pf::exchange_options options = small_buckets();
  options.algorithm = pf::all_reduce_algorithm::library;
  return options;
}

/// Training with numbers that are not finite in one of its steps; what the parameters are at the end.
inline constexpr std::uint64_t training_steps = 8, spoilt_step = 5;
inline constexpr pf::sgd_options training_sgd{0.9, 0.0, false, 1e-2, true};

inline std::vector<float> training_gradients(std::size_t size, int rank, int ranks, std::uint64_t step) {
  auto gradients = gradients_of<float>(size, rank, step);
  if (step == spoilt_step && rank == ranks - 1) gradients[40] = std::numeric_limits<float>::infinity();
  return gradients;
}

template <class Comm>
std::vector<float> train_on_device(Comm& comm, const pf::exchange_options& options, bool captured) {
  pf::gpu_context ctx;
  odd_parameters<float> net(pf::gpu::device_memory());
  stream_buffer<float> source(net.size());
  pf::gradient_exchange<float, Comm, pf::device::gpu> exchange(net.store, comm, options);
  pf::SGD<float, pf::device::gpu> optimizer(pf::make_optimizer_target(net.store), training_sgd);
  optimizer.set_control({exchange.skip(), nullptr});
  pf::gpu::step_graph graph;
  graph.set_enabled(captured);
  for (std::uint64_t step = 0; step < training_steps; ++step) {
    ctx.begin_step(step);
    optimizer.begin_step(ctx, 0.1 / static_cast<double>(step + 1));
    source.write(ctx, training_gradients(net.size(), comm.rank(), comm.size(), step));
    graph.run(ctx, 1, [&] {
      exchange.begin(ctx);
      backward(ctx, net, source.data());
      exchange.finish(ctx,
                      [&](const pf::gradient_bucket& b) { optimizer.step_range(ctx, b.offset, b.size); });
    });
  }
  const auto values = read(ctx, std::span<const float>(net.store.values()));
  CHECK(graph.replays() >= (captured ? 4 : 0));
  CHECK(exchange.report().skipped == 1);
  CHECK(exchange.steps() == training_steps - 1);
  CHECK(optimizer.steps() == training_steps - 1);
  CHECK(same_on_all_ranks(comm, values));
  return values;
}

/// The same with dynamic loss scaling: gradients come multiplied by a power of two, so that the parameters
/// get the bits that they get without it.
struct scaled_training {
  std::vector<float> values;
  float scale = 0.0F;
  std::uint64_t steps = 0, skipped_by_exchange = 0;
};
enum class unscaling { after_exchange, before_exchange };

template <class Comm>
scaled_training train_scaled(Comm& comm, const pf::exchange_options& options, bool captured, float scale,
                             unscaling when = unscaling::after_exchange,
                             const pf::compression_options& compression = {}) {
  pf::gpu_context ctx;
  odd_parameters<float> net(pf::gpu::device_memory());
  stream_buffer<float> source(net.size());
  pf::gradient_exchange<float, Comm, pf::device::gpu> exchange(net.store, comm, options,
                                                               pf::new_compressor(net.store, compression));
  pf::SGD<float, pf::device::gpu> optimizer(pf::make_optimizer_target(net.store), training_sgd);
  pf::gpu::loss_scaler scaler(scale);
  scaler.use(ctx);
  optimizer.set_control(scaler.control());
  pf::gpu::step_graph graph;
  graph.set_enabled(captured);
  for (std::uint64_t step = 0; step < training_steps; ++step) {
    ctx.begin_step(step);
    optimizer.begin_step(ctx, 0.1 / static_cast<double>(step + 1));
    source.write(ctx, training_gradients(net.size(), comm.rank(), comm.size(), step));
    graph.run(ctx, 1, [&] {
      // As a loss does that has a scale.
      pf::gpu::kernels::scale_by(ctx.stream(), source.data(), static_cast<pf::index_t>(net.size()),
                                 ctx.loss_scale());
      if (when == unscaling::after_exchange) {
        exchange.begin(ctx);
        backward(ctx, net, source.data());
        exchange.finish(ctx);
        scaler.unscale(ctx, net.store.gradients());
      } else {
        backward(ctx, net, source.data());
        scaler.unscale(ctx, net.store.gradients());
        exchange.begin(ctx);
        exchange.finish(ctx);
      }
      scaler.skip_if(ctx, exchange.skip());
      optimizer.step_range(ctx, 0, static_cast<pf::index_t>(net.size()));
      scaler.update(ctx);
    });
  }
  scaled_training result;
  result.values = read(ctx, std::span<const float>(net.store.values()));
  result.scale = scaler.scale();
  result.steps = optimizer.steps();
  result.skipped_by_exchange = exchange.report().skipped;
  CHECK(graph.replays() >= (captured ? 4 : 0));
  CHECK(same_on_all_ranks(comm, result.values));
  CHECK(same_on_all_ranks(comm, std::vector<float>{result.scale}));
  return result;
}

/// Scales, skips and numbers of all policies and wires, direct and captured.
template <class Comm>
void check_scaled_training(Comm& comm, pf::exchange_options options) {
  for (auto wire : {pf::exchange_wire::same, pf::exchange_wire::bf16}) {
    options.wire = wire;
    options.nonfinite = pf::nonfinite_policy::skip;
    const std::vector<float> expected = train_on_device(comm, options, false);
    for (const bool captured : {false, true}) {
      for (auto policy : {pf::nonfinite_policy::ignore, pf::nonfinite_policy::skip}) {
        options.nonfinite = policy;
        const scaled_training got = train_scaled(comm, options, captured, 1024.0F);
        CHECK(same_bits(got.values, expected));
        CHECK(got.scale == 512.0F);
        CHECK(got.steps == training_steps - 1);
        CHECK(got.skipped_by_exchange == (policy == pf::nonfinite_policy::skip ? 1U : 0U));
      }
    }
  }
  // Sums beyond float16, until the scale is small enough.
  if (comm.size() == 1) return;
  options.wire = pf::exchange_wire::fp16;
  options.nonfinite = pf::nonfinite_policy::ignore;
  const scaled_training direct = train_scaled(comm, options, false, 131072.0F);
  const scaled_training captured = train_scaled(comm, options, true, 131072.0F);
  CHECK(same_bits(direct.values, captured.values));
  CHECK(direct.scale == captured.scale);
  CHECK(direct.scale < 32768.0F);
  CHECK(direct.steps < training_steps - 1);
}

template <class Comm>
std::vector<float> train_on_host(Comm& comm, const pf::exchange_options& options) {
  pf::cpu_context ctx;
  odd_parameters<float> net(pf::host_memory());
  pf::gradient_exchange<float, Comm> exchange(net.store, comm, options);
  pf::SGD<float> optimizer(pf::make_optimizer_target(net.store), training_sgd);
  for (std::uint64_t step = 0; step < training_steps; ++step) {
    exchange.begin(ctx);
    backward(ctx, net, training_gradients(net.size(), comm.rank(), comm.size(), step));
    if (exchange.finish(ctx)) optimizer.step(ctx, 0.1 / static_cast<double>(step + 1));
  }
  return {net.store.values().begin(), net.store.values().end()};
}

}  // namespace gpu_test
