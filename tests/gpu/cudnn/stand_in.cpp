// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The part of cuDNN that gpu/cudnn.hpp uses, for the emulated device: plain sums, and a close look at what
/// it is given. Of the five algorithms that it offers, the first is not deterministic, the second takes too
/// much memory and the third, in float, uses tensor cores. The third and the fourth are refused when they are
/// called. The fifth computes, but not over three channels. For filters over five channels no algorithm is
/// offered.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cudnn.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "../emulated/device.hpp"

using emulated_device::kind;

struct cudnnContext {
  cudaStream_t stream = nullptr;
};
struct cudnnTensorStruct {
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  std::array<int, 4> nhwc{};
};
struct cudnnFilterStruct {
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  std::array<int, 4> khwc{};
};
struct cudnnConvolutionStruct {
  std::array<int, 2> padding{}, stride{}, dilation{};
  std::optional<cudnnMathType_t> math;
};

namespace {

constexpr std::size_t workspace_bytes = 100;

std::size_t size_of(cudnnDataType_t type) { return type == CUDNN_DATA_FLOAT ? 4 : 2; }
std::size_t bytes_of(cudnnDataType_t type, const std::array<int, 4>& shape) {
  std::size_t bytes = size_of(type);
  for (const int extent : shape) bytes *= static_cast<std::size_t>(extent);
  return bytes;
}
bool on_device(const void* memory, std::size_t bytes) {
  return emulated_device::kind_of(memory, bytes) == kind::device;
}

float get(const void* data, cudnnDataType_t type, std::size_t i) {
  if (type == CUDNN_DATA_FLOAT) return static_cast<const float*>(data)[i];
  if (type == CUDNN_DATA_HALF) return __half2float(static_cast<const __half*>(data)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
}
void put(void* data, cudnnDataType_t type, std::size_t i, float value) {
  if (type == CUDNN_DATA_FLOAT) {
    static_cast<float*>(data)[i] = value;
  } else if (type == CUDNN_DATA_HALF) {
    static_cast<__half*>(data)[i] = __float2half(value);
  } else {
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(value);
  }
}

/// A convolution whose descriptors fit each other.
struct problem {
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  std::array<int, 4> x{}, w{}, y{};
  cudnnConvolutionStruct conv;

  static bool find(const cudnnTensorStruct* x, const cudnnFilterStruct* w, const cudnnConvolutionStruct* conv,
                   const cudnnTensorStruct* y, problem& result) {
    if (x == nullptr || w == nullptr || conv == nullptr || y == nullptr || !conv->math) return false;
    result = {x->type, x->nhwc, w->khwc, y->nhwc, *conv};
    bool fits = x->type == w->type && x->type == y->type && result.x[0] == result.y[0] &&
                result.x[3] == result.w[3] && result.y[3] == result.w[0];
    for (std::size_t i = 0; i < 2; ++i) {
      const int reach = conv->dilation[i] * (result.w[i + 1] - 1) + 1;
      fits =
          fits && result.y[i + 1] == (result.x[i + 1] + 2 * conv->padding[i] - reach) / conv->stride[i] + 1;
    }
    return fits;
  }

  /// f(place in x, in w, in y) of every product.
  template <class F>
  void for_each(F&& f) const {
    const auto at = [](const std::array<int, 4>& shape, int a, int b, int c, int d) {
      return static_cast<std::size_t>(((a * shape[1] + b) * shape[2] + c) * shape[3] + d);
    };
    for (int n = 0; n < y[0]; ++n) {
      for (int p = 0; p < y[1]; ++p) {
        for (int q = 0; q < y[2]; ++q) {
          for (int r = 0; r < w[1]; ++r) {
            for (int s = 0; s < w[2]; ++s) {
              const int i = p * conv.stride[0] - conv.padding[0] + r * conv.dilation[0];
              const int j = q * conv.stride[1] - conv.padding[1] + s * conv.dilation[1];
              if (i < 0 || i >= x[1] || j < 0 || j >= x[2]) continue;
              for (int k = 0; k < w[0]; ++k) {
                for (int c = 0; c < w[3]; ++c) f(at(x, n, i, j, c), at(w, k, r, s, c), at(y, n, p, q, k));
              }
            }
          }
        }
      }
    }
  }
};

constexpr int offered = 5;

/// What heuristics name is not always what a call takes.
template <class Algorithm>
bool refuses(const problem& p, Algorithm asked) {
  const int number = static_cast<int>(asked);
  return number == 2 || number == 3 || p.x[3] == 3;
}

template <class Result>
cudnnStatus_t offer(bool fits, const problem& p, int most, int* found, Result* results) {
  if (!fits || most < offered) return CUDNN_STATUS_BAD_PARAM;
  if (p.x[3] == 5) return CUDNN_STATUS_NOT_SUPPORTED;
  *found = offered;
  for (int i = 0; i < offered; ++i) {
    results[i] = {};
    results[i].status = CUDNN_STATUS_SUCCESS;
    results[i].determinism = i == 0 ? CUDNN_NON_DETERMINISTIC : CUDNN_DETERMINISTIC;
    results[i].memory = i == 1 ? std::size_t{1} << 40 : workspace_bytes;
    results[i].algo = static_cast<decltype(results[i].algo)>(i);
    const cudnnMathType_t asked = *p.conv.math;
    results[i].mathType = i == 2 && asked == CUDNN_FMA_MATH ? CUDNN_TENSOR_OP_MATH : asked;
  }
  return CUDNN_STATUS_SUCCESS;
}

/// to = alpha sum + beta to, of sums that `sum` makes.
struct work {
  problem p;
  float alpha, beta;
  void* to;
  std::array<int, 4> shape;
  void* workspace;

  template <class Sum>
  cudnnStatus_t submit(cudnnHandle_t handle, const char* name, Sum sum) const {
    const auto run = [*this, sum] {
      std::memset(workspace, 0xff, workspace_bytes);
      std::vector<float> sums(bytes_of(p.type, shape) / size_of(p.type), 0.0F);
      sum(p, sums);
      for (std::size_t i = 0; i < sums.size(); ++i) {
        // What is multiplied by zero is not read.
        const float before = beta == 0.0F ? 0.0F : beta * get(to, p.type, i);
        put(to, p.type, i, alpha * sums[i] + before);
      }
    };
    const cudaError_t status = emulated_device::submit(handle->stream, name, run);
    return status == cudaSuccess ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
  }
};

bool all_there(const problem& p, const void* x, const void* w, const void* y, const void* workspace,
               std::size_t size) {
  return on_device(x, bytes_of(p.type, p.x)) && on_device(w, bytes_of(p.type, p.w)) &&
         on_device(y, bytes_of(p.type, p.y)) && size >= workspace_bytes && on_device(workspace, size);
}

float number(const void* scale) { return *static_cast<const float*>(scale); }

}  // namespace

std::size_t cudnnGetVersion() { return 1; }
const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status == CUDNN_STATUS_SUCCESS ? "success" : "refused by the stand-in";
}
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = new cudnnContext;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  delete handle;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t* made) {
  *made = new cudnnTensorStruct;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t what) {
  delete what;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetTensor4dDescriptor(cudnnTensorDescriptor_t what, cudnnTensorFormat_t format,
                                         cudnnDataType_t type, int n, int c, int h, int w) {
  *what = {type, {n, h, w, c}};
  return format == CUDNN_TENSOR_NHWC && n > 0 ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}
cudnnStatus_t cudnnCreateFilterDescriptor(cudnnFilterDescriptor_t* made) {
  *made = new cudnnFilterStruct;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroyFilterDescriptor(cudnnFilterDescriptor_t what) {
  delete what;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetFilter4dDescriptor(cudnnFilterDescriptor_t what, cudnnDataType_t type,
                                         cudnnTensorFormat_t format, int k, int c, int h, int w) {
  *what = {type, {k, h, w, c}};
  return format == CUDNN_TENSOR_NHWC ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}
cudnnStatus_t cudnnCreateConvolutionDescriptor(cudnnConvolutionDescriptor_t* made) {
  *made = new cudnnConvolutionStruct;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroyConvolutionDescriptor(cudnnConvolutionDescriptor_t what) {
  delete what;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetConvolution2dDescriptor(cudnnConvolutionDescriptor_t what, int pad_h, int pad_w, int u,
                                              int v, int dilation_h, int dilation_w,
                                              cudnnConvolutionMode_t mode, cudnnDataType_t compute) {
  *what = {{pad_h, pad_w}, {u, v}, {dilation_h, dilation_w}, {}};
  const bool right = mode == CUDNN_CROSS_CORRELATION && compute == CUDNN_DATA_FLOAT;
  return right ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}
cudnnStatus_t cudnnSetConvolutionMathType(cudnnConvolutionDescriptor_t what, cudnnMathType_t math) {
  what->math = math;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetConvolutionForwardAlgorithm_v7(cudnnHandle_t, cudnnTensorDescriptor_t x,
                                                     cudnnFilterDescriptor_t w,
                                                     cudnnConvolutionDescriptor_t conv,
                                                     cudnnTensorDescriptor_t y, int most, int* found,
                                                     cudnnConvolutionFwdAlgoPerf_t* results) {
  problem p;
  const bool fits = problem::find(x, w, conv, y, p);
  return offer(fits, p, most, found, results);
}
cudnnStatus_t cudnnGetConvolutionBackwardDataAlgorithm_v7(cudnnHandle_t, cudnnFilterDescriptor_t w,
                                                          cudnnTensorDescriptor_t dy,
                                                          cudnnConvolutionDescriptor_t conv,
                                                          cudnnTensorDescriptor_t dx, int most, int* found,
                                                          cudnnConvolutionBwdDataAlgoPerf_t* results) {
  problem p;
  const bool fits = problem::find(dx, w, conv, dy, p);
  return offer(fits, p, most, found, results);
}
cudnnStatus_t cudnnGetConvolutionBackwardFilterAlgorithm_v7(cudnnHandle_t, cudnnTensorDescriptor_t x,
                                                            cudnnTensorDescriptor_t dy,
                                                            cudnnConvolutionDescriptor_t conv,
                                                            cudnnFilterDescriptor_t dw, int most, int* found,
                                                            cudnnConvolutionBwdFilterAlgoPerf_t* results) {
  problem p;
  const bool fits = problem::find(x, dw, conv, dy, p);
  return offer(fits, p, most, found, results);
}

cudnnStatus_t cudnnConvolutionForward(cudnnHandle_t handle, const void* alpha, cudnnTensorDescriptor_t x_of,
                                      const void* x, cudnnFilterDescriptor_t w_of, const void* w,
                                      cudnnConvolutionDescriptor_t conv, cudnnConvolutionFwdAlgo_t algorithm,
                                      void* workspace, size_t size, const void* beta,
                                      cudnnTensorDescriptor_t y_of, void* y) {
  problem p;
  if (!problem::find(x_of, w_of, conv, y_of, p) || !all_there(p, x, w, y, workspace, size)) {
    return CUDNN_STATUS_BAD_PARAM;
  }
  if (refuses(p, algorithm)) return CUDNN_STATUS_NOT_SUPPORTED;
  return work{p, number(alpha), number(beta), y, p.y, workspace}.submit(
      handle, "cudnnConvolutionForward", [x, w](const problem& of, std::vector<float>& sums) {
        of.for_each([&](std::size_t i, std::size_t j, std::size_t k) {
          sums[k] += get(x, of.type, i) * get(w, of.type, j);
        });
      });
}
cudnnStatus_t cudnnConvolutionBackwardData(cudnnHandle_t handle, const void* alpha,
                                           cudnnFilterDescriptor_t w_of, const void* w,
                                           cudnnTensorDescriptor_t dy_of, const void* dy,
                                           cudnnConvolutionDescriptor_t conv,
                                           cudnnConvolutionBwdDataAlgo_t algorithm, void* workspace,
                                           size_t size, const void* beta, cudnnTensorDescriptor_t dx_of,
                                           void* dx) {
  problem p;
  if (!problem::find(dx_of, w_of, conv, dy_of, p) || !all_there(p, dx, w, dy, workspace, size)) {
    return CUDNN_STATUS_BAD_PARAM;
  }
  if (refuses(p, algorithm)) return CUDNN_STATUS_NOT_SUPPORTED;
  return work{p, number(alpha), number(beta), dx, p.x, workspace}.submit(
      handle, "cudnnConvolutionBackwardData", [dy, w](const problem& of, std::vector<float>& sums) {
        of.for_each([&](std::size_t i, std::size_t j, std::size_t k) {
          sums[i] += get(dy, of.type, k) * get(w, of.type, j);
        });
      });
}
cudnnStatus_t cudnnConvolutionBackwardFilter(cudnnHandle_t handle, const void* alpha,
                                             cudnnTensorDescriptor_t x_of, const void* x,
                                             cudnnTensorDescriptor_t dy_of, const void* dy,
                                             cudnnConvolutionDescriptor_t conv,
                                             cudnnConvolutionBwdFilterAlgo_t algorithm, void* workspace,
                                             size_t size, const void* beta, cudnnFilterDescriptor_t dw_of,
                                             void* dw) {
  problem p;
  if (!problem::find(x_of, dw_of, conv, dy_of, p) || !all_there(p, x, dw, dy, workspace, size)) {
    return CUDNN_STATUS_BAD_PARAM;
  }
  if (refuses(p, algorithm)) return CUDNN_STATUS_NOT_SUPPORTED;
  return work{p, number(alpha), number(beta), dw, p.w, workspace}.submit(
      handle, "cudnnConvolutionBackwardFilter", [x, dy](const problem& of, std::vector<float>& sums) {
        of.for_each([&](std::size_t i, std::size_t j, std::size_t k) {
          sums[j] += get(x, of.type, i) * get(dy, of.type, k);
        });
      });
}
