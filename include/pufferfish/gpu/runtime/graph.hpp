// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gpu::step_graph`: the work of a training step, captured into a CUDA graph once and replayed as one
/// launch.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/gpu/runtime/stream.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace detail {

/// Owner of an instantiated graph. Destroying or replacing it waits until the last launch has ended, because
/// the launched work uses memory that may be freed next. Moving from an object leaves it empty. launch()
/// requires a graph.
class executable_graph {
 public:
  executable_graph() = default;
  explicit executable_graph(cudaGraph_t graph) {
    cudaError_t status = cudaGraphGetNodes(graph, nullptr, &operations_);
    const char* call = "cudaGraphGetNodes";
    // Keeps the priorities of streams: urgent streams stay urgent within the graph.
    if (status == cudaSuccess) {
      call = "cudaGraphInstantiate";
      status = cudaGraphInstantiate(&handle_, graph, cudaGraphInstantiateFlagUseNodePriority);
    }
    static_cast<void>(cudaGraphDestroy(graph));
    check(status, call);
  }
  executable_graph(executable_graph&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)),
        operations_(std::exchange(other.operations_, 0)),
        launched_(std::move(other.launched_)) {}
  executable_graph& operator=(executable_graph&& other) noexcept {
    executable_graph replaced(std::move(other));
    std::swap(handle_, replaced.handle_);
    std::swap(operations_, replaced.operations_);
    std::swap(launched_, replaced.launched_);
    return *this;
  }
  executable_graph(const executable_graph&) = delete;
  executable_graph& operator=(const executable_graph&) = delete;
  ~executable_graph() {
    if (handle_ == nullptr) return;
    // The context throws the failures of the graph; a destructor has no caller to throw to.
    if (launched_) static_cast<void>(cudaEventSynchronize(launched_->handle()));
    static_cast<void>(cudaGraphExecDestroy(handle_));
  }

  bool empty() const { return handle_ == nullptr; }
  // Number of nodes of the graph: kernels, copies, fills and events.
  std::size_t operations() const { return operations_; }
  // Launches the graph in the stream and records the end of the launch. Throws backend_error.
  void launch(cudaStream_t stream) {
    if (!launched_) launched_ = std::make_unique<event>();
    check(cudaGraphLaunch(handle_, stream), "cudaGraphLaunch");
    launched_->record(stream);
  }

 private:
  cudaGraphExec_t handle_ = nullptr;
  std::size_t operations_ = 0;
  // Recorded after the last launch; null before the first. The stream may be destroyed before the event.
  std::unique_ptr<event> launched_;
};

/// Records the work that is put into a stream instead of running it, until finish(). If the object is
/// destroyed before finish(), for example by an exception, the recorded work is discarded.
class stream_capture {
 public:
  // Begins the capture. It concerns only calls of this thread: other threads may still allocate and copy.
  // Throws backend_error.
  explicit stream_capture(cudaStream_t stream) : stream_(stream) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  }
  stream_capture(const stream_capture&) = delete;
  stream_capture& operator=(const stream_capture&) = delete;
  ~stream_capture() {
    if (stream_ == nullptr) return;
    cudaGraph_t graph = nullptr;
    static_cast<void>(cudaStreamEndCapture(stream_, &graph));
    if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
    static_cast<void>(cudaGetLastError());
  }

  /// Ends the capture and instantiates the graph. Throws backend_error, also if the recorded work was not
  /// allowed in a capture. To be called once.
  executable_graph finish() {
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(std::exchange(stream_, nullptr), &graph), "cudaStreamEndCapture");
    return executable_graph(graph);
  }

 private:
  cudaStream_t stream_;
};

}  // namespace detail

/// Captures the work of a training step into a CUDA graph and replays it. A step consists of hundreds of
/// kernels, many of them shorter than the time it takes to launch one. A captured step is one launch.
///
/// The work must do the same every time: the same kernels on the same addresses with the same arguments. Data
/// that change from step to step are read from device memory: inputs are copied to fixed addresses,
/// context::begin_step stores the step's number, and the optimizer's begin_step the learning rate, both
/// before run(). The work may not wait for the device nor read from it.
///
///     ctx.begin_step(step);
///     optimizer.begin_step(ctx, lr);
///     graph.run(ctx, graph.key(x.shape(), net.generation()), [&] {
///       net.forward(ctx, x, y); ... net.backward(ctx, dy); optimizer.step_range(ctx, 0, size);
///     });
///
/// The first runs are direct, until the context's arenas no longer grow; then one is captured. A new key, or
/// an arena that has grown for another graph, starts this again. All memory that the work uses must stay at
/// its address until the next drop(). One object serves one context, and one thread at a time. A graph must
/// not be launched after the destruction of an exchange whose calls it has captured, and must be dropped
/// before a gpu::nccl whose calls it has captured is destroyed.
class step_graph {
 public:
  /// Number that identifies the addresses and arguments of a step's work; made by key().
  using key_type = std::uint64_t;

  /// Returns a 64-bit hash of numbers and extents, for run(). Each part is a number or `extents<N>`. Pass all
  /// values that change the kernels or their arguments: shapes, options, and model::generation(), which
  /// changes whenever the network's memory does. Two different lists have the same key with a probability of
  /// about 2^-64.
  template <class... Parts>
  static key_type key(const Parts&... parts) {
    hasher h;
    (add(h, parts), ...);
    return h.digest();
  }

  /// Whether run() captures steps. If not, run() calls the work every time, which helps debugging.
  bool enabled() const { return enabled_; }
  /// Switches capturing on or off. Switching it off drops the captured graph.
  void set_enabled(bool on) {
    enabled_ = on;
    if (!on) drop();
  }

  /// Runs the work of a step, directly or by launching the captured graph. If the work throws, nothing is
  /// captured. `work` is called without arguments: at direct runs and once for the capture, but not at
  /// replays. Its host code therefore does not run at replays. Throws backend_error, and a failure of earlier
  /// steps from the context's failures().
  template <class Work>
  void run(gpu_context& ctx, key_type key, Work&& work) {
    ctx.failures()->rethrow();
    const state now{key, ctx.system_allocations()};
    if (!graph_.empty() && now != captured_) drop();
    if (!graph_.empty()) {
      graph_.launch(ctx.stream());
      ++replays_;
      return;
    }
    if (!enabled_ || !settled_ || now != last_) {
      work();
      last_ = {key, ctx.system_allocations()};
      settled_ = last_ == now;
      return;
    }
    detail::stream_capture capture(ctx.stream());
    work();
    graph_ = capture.finish();
    captured_ = now;
    ++captures_;
    graph_.launch(ctx.stream());
  }

  /// Drops the captured graph, after the end of its last launch.
  void drop() {
    graph_ = {};
    settled_ = false;
  }

  /// Number of nodes of the captured step: kernels, copies, fills and events; 0 if none is captured.
  std::size_t operations() const { return graph_.operations(); }
  /// Number of times a step was captured.
  std::size_t captures() const { return captures_; }
  /// Number of times a captured step was replayed.
  std::size_t replays() const { return replays_; }

 private:
  struct state {
    key_type key = 0;
    std::size_t allocations = 0;
    friend bool operator==(const state&, const state&) = default;
  };

  template <std::size_t N>
  static void add(hasher& h, const extents<N>& shape) {
    for (const index_t extent : shape) h.number(extent);
  }
  template <class Number>
  static void add(hasher& h, const Number& number) {
    h.number(number);
  }

  bool enabled_ = true;
  bool settled_ = false;  // the last run was direct, in state last_, and allocated no memory
  state last_, captured_;
  detail::executable_graph graph_;
  std::size_t captures_ = 0, replays_ = 0;
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
