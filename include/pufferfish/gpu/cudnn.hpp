// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gpu::cudnn`: convolutions by NVIDIA's cuDNN 9, through NVIDIA's C++ front end (headers of the Python
/// package nvidia-cudnn-frontend). Not part of <pufferfish/gpu.hpp>: a program that includes this header
/// links cudnn. If <cudnn.h> or <cudnn_frontend.h> is absent, the header is empty. With
/// -DCUDNN_FRONTEND_SKIP_JSON_LIB, the same in all sources that include the front end, it compiles in half
/// the time, about half a minute.
///
///     gpu_context ctx;
///     gpu::cudnn cudnn(ctx);
///     ctx.use(&cudnn);

#if __has_include(<cudnn.h>) && __has_include(<cudnn_frontend.h>)

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include <pufferfish/gpu/cudnn_graph.hpp>
#include <pufferfish/gpu/kernels/copy/transpose.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// Throws backend_error with the call's name and cuDNN's message unless `status` is success.
inline void check(cudnnStatus_t status, std::string_view call) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  pufferfish::detail::throw_error<backend_error>({call, ": ", cudnnGetErrorString(status)});
}

/// cuDNN on a context's stream, for float and 16 bits. cuDNN reads filters as [out][height][width][in], so
/// filters are transposed before a call and their gradients after it. Sums are float, and so are gradients of
/// 16-bit filters. Candidates are the engines of cuDNN's heuristics that obey the context's math mode, that
/// are deterministic if the context is, and that build a plan with at most 1 GiB of workspace. The first call
/// of a shape chooses the plan of all its calls:
///
/// - In a deterministic context the plan is the first candidate, without timing. Two runs on devices of one
///   kind with the same version of cuDNN then have the same plan and give the same bits.
/// - Otherwise the plan is the fastest of the first four candidates, by the shortest of three times. Trials
///   write to scratch memory and wait for the stream. Two runs may have different plans.
/// - If the stream is being captured during the first call, the plan is the first candidate.
///
/// Without candidates, the built-in kernels compute the shape. They also compute gradients of 16-bit filters
/// for which cuDNN has no engine with a float result, and calls with operands that are not aligned to 16
/// bytes.
///
/// One thread at a time uses an object. It must exist as long as the context uses it, and be destroyed before
/// the context. Workspaces and transposed filters are taken from the context's scratch memory. Failures of
/// cuDNN are thrown as backend_error, with the extents of the convolution.
class cudnn final : public conv_library {
 public:
  /// Throws backend_error. Use it with this context only.
  explicit cudnn(const context<device::gpu>& ctx) : math_(ctx.math()), deterministic_(ctx.deterministic()) {
    check(cudnnCreate(&handle_), "cudnnCreate");
  }
  ~cudnn() override {
    plans_.clear();
    if (handle_ != nullptr) static_cast<void>(cudnnDestroy(handle_));
  }

  /// Whether the context of the constructor is deterministic.
  bool deterministic() const override { return deterministic_; }

  bool forward(context<device::gpu>& ctx, const conv_request& asked, const void* x, const void* w,
               const void* bias, void* y) override {
    const detail::conv_job job{asked, detail::conv_pass::forward, bias != nullptr};
    if (!is_possible(job, x, y)) return false;
    return with_type(asked.type, [&]<class T>(T) {
      const kernels::conv_geometry& g = asked.geometry;
      scratch_frame frame(ctx.scratch());
      // The bias is written to y first; cuDNN then adds the product to y.
      if (bias != nullptr) {
        kernels::fill_rows<T>(ctx.stream(), static_cast<const T*>(bias), static_cast<T*>(y), g.out_pixels(),
                              g.out_channels, g.out_channels);
      }
      return run(ctx, job, {const_cast<void*>(x), turned<T>(ctx, g, w, frame), y});
    });
  }
  bool backward_input(context<device::gpu>& ctx, const conv_request& asked, const void* dy, const void* w,
                      void* dx, bool add) override {
    const detail::conv_job job{asked, detail::conv_pass::input, add};
    if (!is_possible(job, dx, dy)) return false;
    return with_type(asked.type, [&]<class T>(T) {
      scratch_frame frame(ctx.scratch());
      return run(ctx, job, {dx, turned<T>(ctx, asked.geometry, w, frame), const_cast<void*>(dy)});
    });
  }
  bool backward_weight(context<device::gpu>& ctx, const conv_request& asked, const void* x, const void* dy,
                       float* dw, bool accumulate) override {
    const detail::conv_job job{asked, detail::conv_pass::weight, false};
    if (!is_possible(job, x, dy)) return false;
    const kernels::conv_geometry& g = asked.geometry;
    scratch_frame frame(ctx.scratch());
    auto* const filter = frame.take<float>(weights(g));
    if (!run(ctx, job, {const_cast<void*>(x), filter, const_cast<void*>(dy)})) return false;
    kernels::transpose_wide<float>(ctx.stream(), filter, g.out_channels, g.patch(), dw, accumulate);
    return true;
  }

 private:
  using plan = cudnn_frontend::ExecutionPlan;
  using operands = std::array<void*, 3>;  ///< x, w and y, or their gradients

  static constexpr int most_trials = 4;

  using key = std::array<index_t, 18>;
  static key key_of(const detail::conv_job& job) {
    const kernels::conv_geometry& g = job.asked.geometry;
    return {g.images,
            g.in_height,
            g.in_width,
            g.in_channels,
            g.out_height,
            g.out_width,
            g.out_channels,
            g.kernel_height,
            g.kernel_width,
            g.stride_height,
            g.stride_width,
            g.padding_height,
            g.padding_width,
            g.dilation_height,
            g.dilation_width,
            static_cast<index_t>(job.asked.type),
            static_cast<index_t>(job.pass),
            job.add ? 1 : 0};
  }

  /// Calls f with a number of the type, and returns its result; false for types that are not supported.
  template <class F>
  static bool with_type(cudaDataType_t type, F&& f) {
    if (type == CUDA_R_32F) return f(0.0F);
    if (type == CUDA_R_16BF) return f(bf16{});
    if (type == CUDA_R_16F) return f(fp16{});
    return false;
  }

  /// Whether cuDNN may compute the job: unless it is empty, has operands that are not aligned, or is known to
  /// have no plan.
  bool is_possible(const detail::conv_job& job, const void* x, const void* y) const {
    const auto is_aligned = [](const void* p) {
      return reinterpret_cast<std::uintptr_t>(p) % detail::conv_alignment == 0;
    };
    if (job.asked.geometry.images == 0 || !is_aligned(x) || !is_aligned(y)) return false;
    const auto known = plans_.find(key_of(job));
    return known == plans_.end() || known->second;
  }

  /// Computes the job by its plan, which the first call chooses. Returns false if there is none.
  bool run(context<device::gpu>& ctx, const detail::conv_job& job, const operands& data) {
    try {
      auto place = plans_.find(key_of(job));
      if (place == plans_.end()) place = plans_.emplace(key_of(job), choose(ctx, job, data)).first;
      if (place->second) execute(ctx, *place->second, data);
      return place->second.has_value();
    } catch (const cudnn_frontend::cudnnException& failure) {
      const kernels::conv_geometry& g = job.asked.geometry;
      const extents<4> x{g.images, g.in_height, g.in_width, g.in_channels},
          y{g.images, g.out_height, g.out_width, g.out_channels},
          w{g.kernel_height, g.kernel_width, g.in_channels, g.out_channels};
      constexpr std::array names{"output", "gradient of the input", "gradient of the weight"};
      pufferfish::detail::throw_error<backend_error>(
          {"gpu::cudnn: ", names[static_cast<std::size_t>(job.pass)], " of a convolution from ", x, " to ", y,
           " by ", w, ": ", failure.what()});
    }
  }

  /// The job's graph; empty if cuDNN does not support it.
  std::optional<cudnn_frontend::OperationGraph> described(const detail::conv_job& job) const {
    try {
      return detail::conv_graph(handle_, job);
    } catch (const cudnn_frontend::cudnnException& failure) {
      if (CUDNN_STATUS_CATEGORY(failure.error_status) != CUDNN_STATUS_NOT_SUPPORTED) throw;
      return std::nullopt;
    }
  }

  std::optional<plan> choose(context<device::gpu>& ctx, const detail::conv_job& job, operands data) const {
    std::optional<cudnn_frontend::OperationGraph> graph = described(job);
    if (!graph) return std::nullopt;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(ctx.stream(), &capture), "cudaStreamIsCapturing");
    const bool timed = !deterministic_ && capture == cudaStreamCaptureStatusNone;

    scratch_frame frame(ctx.scratch());
    if (timed) {
      check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // other streams' work would be timed, too
      trial_result(ctx, job, frame, data);
    }
    std::optional<plan> best;
    double least = 0.0;
    int trials = 0;
    for (const auto& engine : detail::conv_engines(*graph, job.asked.type, math_, deterministic_)) {
      std::optional<plan> made = detail::conv_plan(handle_, *graph, engine);
      if (!made) continue;
      if (!timed) return made;
      const double seconds = seconds_of(ctx, *made, data);
      if (!best || seconds < least) {
        best = std::move(made);
        least = seconds;
      }
      if (++trials == most_trials) break;
    }
    return best;
  }

  /// Replaces the result by zeros in memory of `frame`: a repeated call would add to the result.
  static void trial_result(context<device::gpu>& ctx, const detail::conv_job& job, scratch_frame& frame,
                           operands& data) {
    if (job.pass == detail::conv_pass::weight) return;  // in scratch memory already, and not added to
    const kernels::conv_geometry& g = job.asked.geometry;
    const bool forward = job.pass == detail::conv_pass::forward;
    const index_t elements = forward ? g.out_pixels() * g.out_channels : g.in_pixels() * g.in_channels;
    const index_t bytes = elements * (job.asked.type == CUDA_R_32F ? 4 : 2);
    data[forward ? 2 : 0] = frame.take<std::byte>(bytes);
    check(cudaMemsetAsync(data[forward ? 2 : 0], 0, static_cast<std::size_t>(bytes), ctx.stream()),
          "cudaMemsetAsync");
  }

  /// The shortest of three times, after a first run, which loads the kernel.
  double seconds_of(context<device::gpu>& ctx, const plan& tried, const operands& data) const {
    std::array<event, 4> points{event(event_use::timing), event(event_use::timing), event(event_use::timing),
                                event(event_use::timing)};
    for (event& point : points) {
      execute(ctx, tried, data);
      point.record(ctx.stream());
    }
    points.back().synchronize();
    double least = points[1].seconds_since(points[0]);
    for (std::size_t i = 2; i < points.size(); ++i) {
      least = std::min(least, points[i].seconds_since(points[i - 1]));
    }
    return least;
  }

  void execute(context<device::gpu>& ctx, const plan& chosen, operands data) const {
    constexpr std::array<std::int64_t, 3> ids{'x', 'w', 'y'};
    scratch_frame frame(ctx.scratch());
    const auto pack = cudnn_frontend::VariantPackBuilder()
                          .setDataPointers(3, data.data())
                          .setUids(3, ids.data())
                          .setWorkspacePointer(frame.take<std::byte>(chosen.getWorkspaceSize()))
                          .build();
    check(cudnnSetStream(handle_, ctx.stream()), "cudnnSetStream");
    const cudnnStatus_t status = cudnnBackendExecute(handle_, chosen.get_raw_desc(), pack.get_raw_desc());
    if (status != CUDNN_STATUS_SUCCESS) {
      throw cudnn_frontend::cudnnException(cudnnGetErrorString(status), status);
    }
  }

  static index_t weights(const kernels::conv_geometry& g) {
    return static_cast<index_t>(g.patch()) * g.out_channels;
  }
  // The filter as [out][height][width][in], in memory of `frame`.
  template <class T>
  static T* turned(context<device::gpu>& ctx, const kernels::conv_geometry& g, const void* w,
                   scratch_frame& frame) {
    T* filter = frame.take<T>(weights(g));
    kernels::transpose<T>(ctx.stream(), static_cast<const T*>(w), g.patch(), g.out_channels, filter);
    return filter;
  }

  cudnnHandle_t handle_ = nullptr;
  math_mode math_;
  bool deterministic_;
  std::map<key, std::optional<plan>> plans_;  ///< no plan: cuDNN does not support the job
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END

#endif
