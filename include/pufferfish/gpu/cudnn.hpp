// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gpu::cudnn`: convolutions by NVIDIA's cuDNN. Not part of <pufferfish/gpu.hpp>: a program that includes
/// this header links cudnn (if <cudnn.h> is absent, the header is empty).
///
///     gpu_context ctx;
///     gpu::cudnn cudnn(ctx);
///     ctx.use(&cudnn);

#if __has_include(<cudnn.h>)

#include <cudnn.h>

#include <array>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include <pufferfish/gpu/kernels/copy/transpose.hpp>
#include <pufferfish/gpu/ops/conv.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// Throws backend_error with the call's name and cuDNN's message unless `status` is success.
inline void check(cudnnStatus_t status, std::string_view call) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  pufferfish::detail::throw_error<backend_error>({call, ": ", cudnnGetErrorString(status)});
}

/// cuDNN on a context's stream, for float and 16 bits. cuDNN reads filters as [out][height][width][in], so
/// filters are transposed before a call and their gradients after it; unlike those of the own kernels,
/// gradients of 16-bit filters are rounded to 16 bits. Candidates are the algorithms of cuDNN's heuristics
/// that obey the context's math mode and, for a deterministic context, are deterministic. The first one that
/// cuDNN does not refuse at the first call of a shape computes all later calls of the shape, too. Without
/// any, the own kernels compute the shape. One thread at a time uses an object. It must exist as long as the
/// context uses it, and be destroyed before the context. Workspaces and transposed filters are taken from the
/// context's scratch memory; an algorithm with more than 1 GB of workspace is not used. Errors of cuDNN other
/// than a refusal of an algorithm are thrown as backend_error.
class cudnn final : public conv_library {
 public:
  /// Throws backend_error. Use it with this context only.
  explicit cudnn(const context<device::gpu>& ctx) : math_(ctx.math()), deterministic_(ctx.deterministic()) {
    check(cudnnCreate(&handle_), "cudnnCreate");
    check(cudnnSetStream(handle_, ctx.stream()), "cudnnSetStream");
  }
  ~cudnn() override {
    if (handle_ != nullptr) static_cast<void>(cudnnDestroy(handle_));
  }

  /// Whether the context of the constructor is deterministic.
  bool deterministic() const override { return deterministic_; }

  bool forward(context<device::gpu>& ctx, const conv_request& asked, const void* x, const void* w,
               const void* bias, void* y) override {
    return with_type(asked.type, [&]<class T>(T) {
      return run_forward(ctx, asked, static_cast<const T*>(x), static_cast<const T*>(w),
                         static_cast<const T*>(bias), static_cast<T*>(y));
    });
  }
  bool backward_input(context<device::gpu>& ctx, const conv_request& asked, const void* dy, const void* w,
                      void* dx, bool add) override {
    return with_type(asked.type, [&]<class T>(T) {
      return run_backward_input(ctx, asked, static_cast<const T*>(dy), static_cast<const T*>(w),
                                static_cast<T*>(dx), add);
    });
  }
  bool backward_weight(context<device::gpu>& ctx, const conv_request& asked, const void* x, const void* dy,
                       float* dw, bool accumulate) override {
    return with_type(asked.type, [&]<class T>(T) {
      return run_backward_weight(ctx, asked, static_cast<const T*>(x), static_cast<const T*>(dy), dw,
                                 accumulate);
    });
  }

 private:
  static constexpr float one = 1.0F;
  static constexpr std::size_t most_workspace = std::size_t{1} << 30;

  struct algorithm {
    int number = 0;
    cudnnMathType_t math = CUDNN_DEFAULT_MATH;
    index_t bytes = 0;  ///< size of the workspace
    std::size_t size() const { return static_cast<std::size_t>(bytes); }
  };

  template <class Handle, cudnnStatus_t (*Create)(Handle*), cudnnStatus_t (*Destroy)(Handle)>
  class descriptor {
   public:
    descriptor() { check(Create(&value_), "cudnnCreate..Descriptor"); }
    descriptor(const descriptor&) = delete;
    descriptor& operator=(const descriptor&) = delete;
    ~descriptor() { static_cast<void>(Destroy(value_)); }
    operator Handle() const { return value_; }

   private:
    Handle value_ = nullptr;
  };
  using tensor_descriptor =
      descriptor<cudnnTensorDescriptor_t, cudnnCreateTensorDescriptor, cudnnDestroyTensorDescriptor>;
  using filter_descriptor =
      descriptor<cudnnFilterDescriptor_t, cudnnCreateFilterDescriptor, cudnnDestroyFilterDescriptor>;
  using conv_descriptor = descriptor<cudnnConvolutionDescriptor_t, cudnnCreateConvolutionDescriptor,
                                     cudnnDestroyConvolutionDescriptor>;

  /// cuDNN's descriptors and algorithms of a convolution, made once. Calls use the first algorithm.
  struct shape {
    tensor_descriptor x, y;
    filter_descriptor w;
    conv_descriptor conv;
    std::optional<std::vector<algorithm>> forward, input, weight;
  };

  using key = std::array<index_t, 16>;
  static key key_of(const conv_request& asked) {
    const kernels::conv_geometry& g = asked.geometry;
    return {g.images,        g.in_height,       g.in_width,       g.in_channels,
            g.out_height,    g.out_width,       g.out_channels,   g.kernel_height,
            g.kernel_width,  g.stride_height,   g.stride_width,   g.padding_height,
            g.padding_width, g.dilation_height, g.dilation_width, static_cast<index_t>(asked.type)};
  }

  shape& shape_of(const conv_request& asked) {
    const auto [place, fresh] = shapes_.try_emplace(key_of(asked));
    if (fresh) describe(asked, place->second);
    return place->second;
  }

  /// Calls f with a number of the type, and returns its result; false for types that are not supported.
  template <class F>
  static bool with_type(cudaDataType_t type, F&& f) {
    if (type == CUDA_R_32F) return f(0.0F);
    if (type == CUDA_R_16BF) return f(bf16{});
    if (type == CUDA_R_16F) return f(fp16{});
    return false;
  }
  static cudnnDataType_t data_type(cudaDataType_t type) {
    if (type == CUDA_R_16BF) return CUDNN_DATA_BFLOAT16;
    return type == CUDA_R_16F ? CUDNN_DATA_HALF : CUDNN_DATA_FLOAT;
  }

  /// The math type of a convolution. Products of 16-bit numbers are exact in tensor cores, with sums in
  /// float. TF32, with 11 bits, is used only in math_mode::tf32.
  cudnnMathType_t math_of(cudaDataType_t type) const {
    if (type != CUDA_R_32F) return CUDNN_TENSOR_OP_MATH;
    return math_ == math_mode::tf32 ? CUDNN_DEFAULT_MATH : CUDNN_FMA_MATH;
  }
  static void use_math(const shape& s, cudnnMathType_t math) {
    check(cudnnSetConvolutionMathType(s.conv, math), "cudnnSetConvolutionMathType");
  }

  /// Whether a call refused the algorithm before it wrote anything.
  static bool is_refusal(cudnnStatus_t status) {
#if defined(CUDNN_STATUS_CATEGORY)  // from cuDNN 9 on, the status says why
    return CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_NOT_SUPPORTED;
#else
    return status == CUDNN_STATUS_NOT_SUPPORTED;
#endif
  }

  /// Calls run(algorithm, workspace) with the first of `left` that cuDNN does not refuse. Refused ones are
  /// removed, because the heuristics also name algorithms that do not support the layout or the number of
  /// channels. Returns false if none is left. After the first call of a shape the first algorithm is the one
  /// in use, so that a captured step makes no other calls.
  template <class Run>
  static bool run_first(context<device::gpu>& ctx, const shape& s, std::vector<algorithm>& left,
                        const char* name, Run&& run) {
    while (!left.empty()) {
      const algorithm& a = left.front();
      use_math(s, a.math);
      scratch_frame frame(ctx.scratch());
      const cudnnStatus_t status = run(a, frame.take<std::byte>(a.bytes));
      if (status == CUDNN_STATUS_SUCCESS) return true;
      if (!is_refusal(status)) check(status, name);
      left.erase(left.begin());
    }
    return false;
  }

  // The bias is written to y first; cuDNN then adds the product to y (beta = 1).
  template <class T>
  bool run_forward(context<device::gpu>& ctx, const conv_request& asked, const T* x, const T* w,
                   const T* bias, T* y) {
    const kernels::conv_geometry& g = asked.geometry;
    shape& s = shape_of(asked);
    if (!s.forward)
      s.forward =
          choose<cudnnConvolutionFwdAlgoPerf_t>(math_of(asked.type), [&](int most, int* found, auto* all) {
            return cudnnGetConvolutionForwardAlgorithm_v7(handle_, s.x, s.w, s.conv, s.y, most, found, all);
          });
    if (s.forward->empty()) return false;
    scratch_frame frame(ctx.scratch());
    const T* filter = turned(ctx, g, w, frame);
    if (bias != nullptr) {
      kernels::fill_rows<T>(ctx.stream(), bias, y, g.out_pixels(), g.out_channels, g.out_channels);
    }
    const float beta = bias != nullptr ? 1.0F : 0.0F;
    return run_first(ctx, s, *s.forward, "cudnnConvolutionForward",
                     [&](const algorithm& a, std::byte* workspace) {
                       return cudnnConvolutionForward(handle_, &one, s.x, x, s.w, filter, s.conv,
                                                      static_cast<cudnnConvolutionFwdAlgo_t>(a.number),
                                                      workspace, a.size(), &beta, s.y, y);
                     });
  }

  // With `add`, cuDNN adds to dx (beta = 1).
  template <class T>
  bool run_backward_input(context<device::gpu>& ctx, const conv_request& asked, const T* dy, const T* w,
                          T* dx, bool add) {
    shape& s = shape_of(asked);
    if (!s.input)
      s.input = choose<cudnnConvolutionBwdDataAlgoPerf_t>(math_of(asked.type), [&](int most, int* found,
                                                                                   auto* all) {
        return cudnnGetConvolutionBackwardDataAlgorithm_v7(handle_, s.w, s.y, s.conv, s.x, most, found, all);
      });
    if (s.input->empty()) return false;
    scratch_frame frame(ctx.scratch());
    const T* filter = turned(ctx, asked.geometry, w, frame);
    const float beta = add ? 1.0F : 0.0F;
    return run_first(
        ctx, s, *s.input, "cudnnConvolutionBackwardData", [&](const algorithm& a, std::byte* workspace) {
          return cudnnConvolutionBackwardData(handle_, &one, s.w, filter, s.y, dy, s.conv,
                                              static_cast<cudnnConvolutionBwdDataAlgo_t>(a.number), workspace,
                                              a.size(), &beta, s.x, dx);
        });
  }

  // The gradient of the filter is computed in T, then transposed to dw in float.
  template <class T>
  bool run_backward_weight(context<device::gpu>& ctx, const conv_request& asked, const T* x, const T* dy,
                           float* dw, bool accumulate) {
    const kernels::conv_geometry& g = asked.geometry;
    if (g.images == 0) return false;
    shape& s = shape_of(asked);
    if (!s.weight)
      s.weight = choose<cudnnConvolutionBwdFilterAlgoPerf_t>(
          math_of(asked.type), [&](int most, int* found, auto* all) {
            return cudnnGetConvolutionBackwardFilterAlgorithm_v7(handle_, s.x, s.y, s.conv, s.w, most, found,
                                                                 all);
          });
    if (s.weight->empty()) return false;
    scratch_frame frame(ctx.scratch());
    T* filter = frame.take<T>(weights(g));
    const float beta = 0.0F;
    if (!run_first(ctx, s, *s.weight, "cudnnConvolutionBackwardFilter",
                   [&](const algorithm& a, std::byte* workspace) {
                     return cudnnConvolutionBackwardFilter(
                         handle_, &one, s.x, x, s.y, dy, s.conv,
                         static_cast<cudnnConvolutionBwdFilterAlgo_t>(a.number), workspace, a.size(), &beta,
                         s.w, filter);
                   })) {
      return false;
    }
    kernels::transpose_wide<T>(ctx.stream(), filter, g.out_channels, g.patch(), dw, accumulate);
    return true;
  }

  // NHWC descriptors; the number of images is narrowed to int.
  void describe(const conv_request& asked, shape& s) const {
    const kernels::conv_geometry& g = asked.geometry;
    const cudnnDataType_t type = data_type(asked.type);
    const int images = static_cast<int>(g.images);
    check(cudnnSetTensor4dDescriptor(s.x, CUDNN_TENSOR_NHWC, type, images, g.in_channels, g.in_height,
                                     g.in_width),
          "cudnnSetTensor4dDescriptor");
    check(cudnnSetTensor4dDescriptor(s.y, CUDNN_TENSOR_NHWC, type, images, g.out_channels, g.out_height,
                                     g.out_width),
          "cudnnSetTensor4dDescriptor");
    check(cudnnSetFilter4dDescriptor(s.w, type, CUDNN_TENSOR_NHWC, g.out_channels, g.in_channels,
                                     g.kernel_height, g.kernel_width),
          "cudnnSetFilter4dDescriptor");
    check(cudnnSetConvolution2dDescriptor(s.conv, g.padding_height, g.padding_width, g.stride_height,
                                          g.stride_width, g.dilation_height, g.dilation_width,
                                          CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT),
          "cudnnSetConvolution2dDescriptor");
    use_math(s, math_of(asked.type));
  }

  // Asks the heuristics and keeps the algorithms that the math mode, determinism and the limit of workspace
  // allow, in the order of the heuristics. Empty if the question fails.
  template <class Result, class Ask>
  std::vector<algorithm> choose(cudnnMathType_t math, Ask&& ask) const {
    std::array<Result, 16> results{};
    std::vector<algorithm> chosen;
    int found = 0;
    if (ask(static_cast<int>(results.size()), &found, results.data()) != CUDNN_STATUS_SUCCESS) return chosen;
    for (int i = 0; i < found; ++i) {
      const Result& r = results[static_cast<std::size_t>(i)];
      const bool allowed = (!deterministic_ || r.determinism == CUDNN_DETERMINISTIC) &&
                           (math != CUDNN_FMA_MATH || r.mathType == CUDNN_FMA_MATH);
      if (r.status == CUDNN_STATUS_SUCCESS && allowed && r.memory <= most_workspace) {
        chosen.push_back({static_cast<int>(r.algo), r.mathType, static_cast<index_t>(r.memory)});
      }
    }
    return chosen;
  }

  static index_t weights(const kernels::conv_geometry& g) {
    return static_cast<index_t>(g.patch()) * g.out_channels;
  }
  // The filter as [out][height][width][in], in memory of `frame`.
  template <class T>
  static const T* turned(context<device::gpu>& ctx, const kernels::conv_geometry& g, const T* w,
                         scratch_frame& frame) {
    T* filter = frame.take<T>(weights(g));
    kernels::transpose<T>(ctx.stream(), w, g.patch(), g.out_channels, filter);
    return filter;
  }

  cudnnHandle_t handle_ = nullptr;
  math_mode math_;
  bool deterministic_;
  std::map<key, shape> shapes_;
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END

#endif
