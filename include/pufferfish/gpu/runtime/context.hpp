// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `context<device::gpu>`: state of a pass through layers on an NVIDIA device: a stream, device memory for
/// the tape and for scratch, cuBLAS, random numbers, and the mode (training or inference).

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>

#include <pufferfish/core/context.hpp>
#include <pufferfish/gpu/kernels/overlap.hpp>
#include <pufferfish/gpu/kernels/step.hpp>
#include <pufferfish/gpu/runtime/failure.hpp>
#include <pufferfish/gpu/runtime/lane.hpp>
#include <pufferfish/gpu/runtime/scalar.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

class conv_library;  // gpu/ops/conv_library.hpp

/// Options of a context on a device. Contexts on the CPU have pufferfish::context_options.
struct context_options {
  /// Number of the device, as CUDA counts the devices that the process can use.
  int device = 0;
  /// Seed of all random streams of the context's layers.
  std::uint64_t seed = 0;
  /// How products and convolutions of floats are computed. Those of 16-bit numbers do not depend on it.
  math_mode math = math_mode::fp32;
  /// Whether two runs on devices of one kind, with the same versions of NVIDIA's libraries, give the same
  /// bits. The kernels of this library always do. true: cuBLAS without atomic sums, deterministic algorithms
  /// of cuDNN, cuSOLVER's deterministic mode; a library without this guarantee is refused (use(), gpu::nccl
  /// with sums in NVLink switches). false: the libraries may choose faster algorithms.
  bool deterministic = true;
  /// Whether layers compute the gradients of their weights in a second stream, while the context's stream
  /// computes the gradient of their input. Bits do not change. Costs scratch memory for both streams, and the
  /// gradient of a convolution's input no longer takes the memory of the input. Off, because its gain has not
  /// been measured on a device. Not to be combined with kernels::overlap_launches.
  bool parallel_gradients = false;
};

namespace detail {

/// Makes a device current before the other members of a context are constructed on it.
struct current_device {
  explicit current_device(int device) : number(device) { use_device(device); }
  int number;
};

}  // namespace detail
}  // namespace gpu

/// The context of an NVIDIA device. Operations are put into its stream in the order of the calls, and may not
/// have finished when the calls return; synchronize() waits for them. One thread at a time uses a context,
/// and that thread must have the context's device current (the constructor does this). The device must be
/// current before a network is made: construct the context, or call gpu::use_device, first.
///
/// Numbers that change from step to step are not passed to kernels by value. Kernels read them from
/// step_values(), so that a step captured into a CUDA graph is right at every replay. A context, its tape and
/// its scratch memory belong to one device. Several contexts may share the same layers. The destructor waits
/// for the stream.
///
///     gpu_context ctx({.device = 0, .seed = 7});                  // device 0 is current from now on
///     memory_block<float> x(gpu::device_memory(), 64 * 32), w(gpu::device_memory(), 32 * 10);
///     memory_block<float> y(gpu::device_memory(), 64 * 10);
///     gpu::multiply<float>(ctx, {x.data(), {64, 32}}, {w.data(), {32, 10}}, {y.data(), {64, 10}});
///     ctx.synchronize();                                          // now y is written
template <>
class context<device::gpu> {
 public:
  using device_type = device::gpu;

  /// Throws backend_error if there is no such device. Starts step 0, in inference mode.
  explicit context(const gpu::context_options& options = {})
      : device_(options.device),
        main_(options.deterministic),
        tape_(main_.memory),
        step_values_(gpu::device_memory(), 1),
        seed_(options.seed),
        math_(options.math),
        deterministic_(options.deterministic) {
    if (options.parallel_gradients) side_.emplace(options.deterministic);
    begin_step(0);
  }
  context(const context&) = delete;
  context& operator=(const context&) = delete;
  ~context() { static_cast<void>(cudaStreamSynchronize(main_.stream.handle())); }

  /// Number of the context's device.
  int device() const { return device_.number; }
  /// The stream of this context's work; within in_parallel, of the work that is put into streams now. The
  /// context owns it.
  cudaStream_t stream() const { return lane_->stream.handle(); }
  /// Matrix products in stream(); functions of gpu/ops/products.hpp use it. The context owns it.
  gpu::blas& blas() { return lane_->blas; }
  gpu::math_mode math() const { return math_; }
  bool deterministic() const { return deterministic_; }

  /// Convolution library used instead of the built-in kernels (gpu/cudnn.hpp), or nullptr, the default, for
  /// the built-in kernels. The context does not own it.
  gpu::conv_library* conv_library() const { return conv_library_; }
  /// Sets the convolution library (see gpu/ops/conv_library.hpp); nullptr: built-in kernels. The library must
  /// exist until another one is set, and until graphs that have captured its calls are dropped. Throws
  /// value_error for a non-deterministic library in a deterministic context.
  void use(gpu::conv_library* library);

  /// Waits for all work in the stream. Throws backend_error if any of it has failed, and the failure stored
  /// in failures(), if there is one.
  void synchronize() const {
    if (lane_ != &main_) lane_->stream.synchronize();
    main_.stream.synchronize();
    failures_->rethrow();
  }

  /// Calls first(), then second(). With context_options::parallel_gradients the work that first() puts into
  /// stream() may run at the same time as that of second(). Neither may write what the other one reads or
  /// writes; both take scratch memory from frames of their own; only first() may call gradient_written.
  /// `independent`: false if any of this does not hold, so that one runs after the other. Work after this
  /// call starts when both have ended. Calls within first() or second() are allowed. Throws what they throw,
  /// after which later work still waits for both, state_error while launches overlap, and backend_error.
  template <class First, class Second>
  void in_parallel(First&& first, Second&& second, bool independent = true) {
    if (!side_ || !independent || lane_ != &main_) {
      first();
      second();
      return;
    }
    if (gpu::kernels::launches_overlap()) {
      PUFFERFISH_THROW(state_error("context<device::gpu>: parallel_gradients while launches overlap"));
    }
    std::exception_ptr failure;
    const auto call = [&](auto& work, gpu::detail::lane& where) {
      lane_ = &where;
      try {
        if (!failure) work();
      } catch (...) {
        failure = std::current_exception();
      }
      lane_ = &main_;
    };
    side_->blas.costs() = main_.blas.costs();
    side_->fork_from(main_);
    call(first, *side_);
    call(second, main_);
    try {
      side_->join(main_);
    } catch (...) {
      if (!failure) throw;  // else most likely a consequence
    }
    if (failure) std::rethrow_exception(failure);
  }
  /// Whether in_parallel uses two streams.
  bool parallel_gradients() const { return side_.has_value(); }

  /// The object that stores exceptions of host functions in the stream, which have no caller to catch them.
  const std::shared_ptr<gpu::late_failure>& failures() const { return failures_; }

  /// Address, in device memory, of a factor by which losses multiply their gradients; nullptr, the default:
  /// no factor. See loss_scaler. A captured step keeps the address of its capture: the memory must be valid
  /// at every replay.
  const float* loss_scale() const { return loss_scale_; }
  /// Sets the address of the loss scale. The caller owns the memory.
  void set_loss_scale(const float* factor) { loss_scale_ = factor; }

  run_mode mode() const { return mode_; }
  bool training() const { return mode_ == run_mode::training; }
  /// Changes the mode of later passes. Must not change between a forward pass and its backward pass.
  void set_mode(run_mode mode) { mode_ = mode; }

  /// Momentum that all batch norms use in training mode instead of their own; empty (the default): each layer
  /// uses its own momentum. norm_estimation sets it.
  std::optional<double> norm_momentum() const { return norm_momentum_; }
  /// Sets the momentum of all batch norms; empty: each layer uses its own. The momentum is a kernel argument,
  /// so a captured step keeps the value of its capture. Throws value_error unless the momentum is empty or in
  /// 0 .. 1.
  void set_norm_momentum(std::optional<double> momentum) {
    norm_momentum_ = pufferfish::detail::checked_norm_momentum(momentum);
  }

  /// Temporary memory on the device, to be allocated through a scratch_frame.
  stack_arena& scratch() { return lane_->scratch; }
  /// Temporary memory on the host for data that host code reads and writes, allocated through a
  /// scratch_frame.
  stack_arena& host_scratch() { return host_scratch_; }
  /// The tape, on which layers keep data for the backward pass: tensors in device memory, other objects in
  /// host memory.
  pufferfish::tape& tape() { return tape_; }

  /// Starts training step `step`: clears the tape, and makes the random numbers of this step's passes a
  /// function of (seed, step). `first_sample` is the position of this rank's first sample in the global
  /// batch, so that dropout masks do not depend on how a batch is split over ranks. Must not be captured into
  /// a graph; a captured step reads the numbers that this call stores in device memory. Throws backend_error,
  /// and a failure of earlier steps (failures()).
  void begin_step(std::uint64_t step, index_t first_sample = 0) {
    failures_->rethrow();
    tape_.clear();
    step_ = step;
    first_sample_ = first_sample;
    streams_used_ = 0;
    store_step();
  }

  /// The seed and the other numbers of the step, in device memory. The address is the same for the life of
  /// the context. The host must not read it.
  const gpu::kernels::step_values* step_values() const { return step_values_.data(); }

  /// Counters for kernels in stream() whose last block continues with the results of all blocks
  /// (kernels::column_workspace), in device memory. They are zero between kernels.
  unsigned* counters() { return lane_->counters.data(); }

  std::uint64_t seed() const { return seed_; }
  std::uint64_t step() const { return step_; }
  /// Position of this rank's first sample in the global batch, as passed to begin_step().
  index_t first_sample() const { return first_sample_; }

  /// Returns a new random stream for a layer. Streams are numbered within the step, in execution order.
  /// Kernels add the step number when they run, so that they draw the numbers that layers on the CPU draw,
  /// also in replays.
  random_stream next_random_stream() { return {seed_, streams_used_++}; }

  /// The current position in the sequence of random streams.
  pufferfish::random_place random_place() const { return {step_, first_sample_, streams_used_}; }
  /// Restores a position: layers then draw the same random streams as from `place` on. The tape is not
  /// changed. An error of the device is stored in failures().
  void return_to(const pufferfish::random_place& place) noexcept {
    step_ = place.step;
    first_sample_ = place.first_sample;
    streams_used_ = place.streams_used;
    try {
      store_step();
    } catch (...) {
      failures_->post(std::current_exception());
    }
  }

  /// Records one write of a parameter's gradient, and calls the function registered with on_gradient_ready if
  /// the gradient is complete with it. The gradient is in memory when the work that is in stream() now is
  /// done; during the call, stream() may be the second stream (in_parallel). In a captured step the function
  /// is called at the capture, not at replays.
  template <class T>
  void gradient_written(const parameter<T>& p) {
    if (p.written()) ready_(&p, p.id());
  }
  /// While the returned object exists, `call(object, parameter, parameter's id)` is called in backward passes
  /// for each parameter as soon as the work that completes its gradient is in the stream; the device may not
  /// have done that work yet. The function may put work into streams. A later registration replaces this one.
  /// See gradient_hook.
  gradient_listener on_gradient_ready(gradient_hook::call_type call, void* object) {
    return {ready_, call, object};
  }

  /// The hook that layers call with the rows that they multiply their weights with; see row_observer. A step
  /// with an observer must not be captured (gpu/train/host_rows.hpp waits for the device).
  const observed_rows& rows() const { return rows_; }
  observed_rows& rows() { return rows_; }

  /// Sum of the peak sizes of the tape's and the scratch memory on the device, in bytes.
  std::size_t peak_bytes() const {
    return main_.scratch.peak_bytes() + (side_ ? side_->scratch.peak_bytes() : 0) +
           tape_.memory().peak_bytes();
  }
  /// Number of allocations from the system for the tape and for scratch memory of device and host. It is
  /// constant from step 2 on.
  std::size_t system_allocations() const {
    return main_.scratch.system_allocations() + (side_ ? side_->scratch.system_allocations() : 0) +
           tape_.memory().system_allocations() + tape_.notes().system_allocations() +
           host_scratch_.system_allocations();
  }

 private:
  void store_step() {
    gpu::kernels::step_values values{};
    values.seed = seed_;
    values.step = step_;
    values.layer_stream = substream(stream_id("layer"), step_);
    gpu::kernels::store_step_values(stream(), step_values_.data(), values);
  }

  gpu::detail::current_device device_;
  gpu::detail::lane main_;
  std::optional<gpu::detail::side_lane> side_;
  gpu::detail::lane* lane_ = &main_;  // whose work is put into streams now
  stack_arena host_scratch_;
  pufferfish::tape tape_;
  memory_block<gpu::kernels::step_values> step_values_;
  std::shared_ptr<gpu::late_failure> failures_ = std::make_shared<gpu::late_failure>();
  run_mode mode_ = run_mode::inference;
  std::optional<double> norm_momentum_;
  std::uint64_t seed_;
  gpu::math_mode math_;
  bool deterministic_;
  gpu::conv_library* conv_library_ = nullptr;
  const float* loss_scale_ = nullptr;
  std::uint64_t step_ = 0;
  index_t first_sample_ = 0;
  std::uint64_t streams_used_ = 0;
  gradient_hook ready_;
  observed_rows rows_;
};

using gpu_context = context<device::gpu>;

PUFFERFISH_NAMESPACE_END
