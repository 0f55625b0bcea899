// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gpu::conv_library`: interface of a library that computes convolutions in place of the built-in kernels,
/// such as cuDNN (gpu/cudnn.hpp).

#include <pufferfish/core/error.hpp>
#include <pufferfish/gpu/kernels/conv/conv_axis.hpp>
#include <pufferfish/gpu/runtime/blas.hpp>
#include <pufferfish/gpu/runtime/context.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// A request to a convolution library: a convolution of one group, with elements of one type (CUDA_R_32F,
/// CUDA_R_16BF or CUDA_R_16F) and sums in float. Convolutions of several groups are never requested.
struct conv_request {
  kernels::conv_geometry geometry;
  cudaDataType_t type = CUDA_R_32F;
};

/// Interface of a convolution library that replaces the built-in kernels (context::use()). A function returns
/// false, without having done anything, if it does not support a request; the built-in kernels then compute
/// it. Arguments are those of the operations, with elements of the requested type; gradients of weights are
/// floats. All pointers are to memory of the context's device: x, y, dx, dy NHWC and dense, w [kernel
/// height][kernel width][in][out]. Work is put into ctx.stream(). With context_options::parallel_gradients,
/// calls have different streams, and their work may run at the same time: ask for the stream at every call,
/// and take workspaces from ctx.scratch(). An implementation may throw; the operation then throws the same
/// exception.
///
///     struct my_convolutions final : gpu::conv_library {
///       bool deterministic() const override { return true; }
///       bool forward(gpu_context& ctx, const gpu::conv_request& asked, const void* x, const void* w,
///                    const void* bias, void* y) override {
///         if (asked.type != CUDA_R_32F) return false;        // the built-in kernels compute it
///         ... puts the work into ctx.stream() ...
///         return true;
///       }
///       ... backward_input and backward_weight likewise ...
///     };
class conv_library {
 public:
  conv_library() = default;
  conv_library(const conv_library&) = delete;
  conv_library& operator=(const conv_library&) = delete;
  virtual ~conv_library() = default;

  /// Whether the library computes the same bits from the same arguments.
  virtual bool deterministic() const { return false; }

  /// y = x * w + bias; bias: out_channels elements, or nullptr.
  virtual bool forward(context<device::gpu>& ctx, const conv_request& asked, const void* x, const void* w,
                       const void* bias, void* y) = 0;
  /// dx = the gradient of the input, or with `add` dx += this gradient.
  virtual bool backward_input(context<device::gpu>& ctx, const conv_request& asked, const void* dy,
                              const void* w, void* dx, bool add) = 0;
  /// dw = the gradient of the weight, or with `accumulate` dw += this gradient.
  virtual bool backward_weight(context<device::gpu>& ctx, const conv_request& asked, const void* x,
                               const void* dy, float* dw, bool accumulate) = 0;
};

}  // namespace gpu

/// Sets the convolution library (see conv_library()). Takes effect at the next call of an operation; a
/// captured step keeps the calls that it has captured. Throws value_error for a non-deterministic library in
/// a deterministic context.
inline void context<device::gpu>::use(gpu::conv_library* library) {
  if (library != nullptr && deterministic_ && !library->deterministic()) {
    pufferfish::detail::throw_error<value_error>(
        {"context<device::gpu>::use: the library does not promise the same bits at every run, and "
         "context_options::deterministic is on"});
  }
  conv_library_ = library;
}

namespace gpu {
namespace detail {

/// Calls call(library, request) if the context has a convolution library. Returns whether the library has
/// computed the convolution.
template <class T, class Call>
bool done_by_library(context<device::gpu>& ctx, const kernels::conv_geometry& geometry, Call&& call) {
  conv_library* const library = ctx.conv_library();
  return library != nullptr && call(*library, conv_request{geometry, element<T>::type});
}

}  // namespace detail
}  // namespace gpu

PUFFERFISH_NAMESPACE_END
