// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: convolutions as graphs of cuDNN, their engines and plans, for gpu/cudnn.hpp. Empty if <cudnn.h>
/// or <cudnn_frontend.h> is absent.

#if __has_include(<cudnn.h>) && __has_include(<cudnn_frontend.h>)

#include <cudnn.h>
#include <cudnn_frontend.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include <pufferfish/gpu/ops/conv_library.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace detail {

/// What cuDNN computes: the output, the gradient of the input or the gradient of the weight.
enum class conv_pass { forward, input, weight };

/// A convolution of one pass. With `add`, the result is added to the contents of its memory.
struct conv_job {
  conv_request asked;
  conv_pass pass = conv_pass::forward;
  bool add = false;
};

/// Alignment in bytes that a graph promises for every operand.
inline constexpr std::size_t conv_alignment = 16;

/// cuDNN's graph of a job. Its tensors have the identifiers 'x', 'w' and 'y'; these stand for dx, dw and dy
/// in the pass that computes or reads them. x and y are NHWC, w is [out][height][width][in], all of the
/// requested type, except that a gradient of the weight is float. Sums are float. Throws
/// cudnn_frontend::cudnnException if cuDNN refuses the graph.
inline cudnn_frontend::OperationGraph conv_graph(cudnnHandle_t handle, const conv_job& job) {
  using namespace cudnn_frontend;
  const kernels::conv_geometry& g = job.asked.geometry;
  const DataType_t type = job.asked.type == CUDA_R_16BF  ? DataType_t::BFLOAT16
                          : job.asked.type == CUDA_R_16F ? DataType_t::HALF
                                                         : DataType_t::FLOAT;
  // cuDNN names extents in the order NCHW; the strides put channels innermost.
  const auto tensor = [](std::int64_t id, std::int64_t outer, int height, int width, int channels,
                         DataType_t element) {
    const std::int64_t row = std::int64_t{width} * channels;
    const std::array<std::int64_t, 4> extents{outer, channels, height, width},
        strides{height * row, 1, row, channels};
    return TensorBuilder()
        .setId(id)
        .setDim(4, extents.data())
        .setStride(4, strides.data())
        .setAlignment(conv_alignment)
        .setDataType(element)
        .build();
  };
  const auto x = tensor('x', g.images, g.in_height, g.in_width, g.in_channels, type);
  const auto w = tensor('w', g.out_channels, g.kernel_height, g.kernel_width, g.in_channels,
                        job.pass == conv_pass::weight ? DataType_t::FLOAT : type);
  const auto y = tensor('y', g.images, g.out_height, g.out_width, g.out_channels, type);

  const std::array<std::int64_t, 2> padding{g.padding_height, g.padding_width},
      stride{g.stride_height, g.stride_width}, dilation{g.dilation_height, g.dilation_width};
  const auto how = ConvDescBuilder()
                       .setComputeType(DataType_t::FLOAT)
                       .setMathMode(ConvolutionMode_t::CROSS_CORRELATION)
                       .setSpatialDimCount(2)
                       .setPrePadding(2, padding.data())
                       .setPostPadding(2, padding.data())
                       .setSpatialStride(2, stride.data())
                       .setDilation(2, dilation.data())
                       .build();
  constexpr std::array kinds{DescriptorType_t::OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
                             DescriptorType_t::OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
                             DescriptorType_t::OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR};
  OperationBuilder builder(kinds[static_cast<std::size_t>(job.pass)]);
  job.pass == conv_pass::input ? builder.setdxDesc(x) : builder.setxDesc(x);
  job.pass == conv_pass::weight ? builder.setdwDesc(w) : builder.setwDesc(w);
  job.pass == conv_pass::forward ? builder.setyDesc(y) : builder.setdyDesc(y);
  const auto operation = builder.setcDesc(how).setAlpha(1.0F).setBeta(job.add ? 1.0F : 0.0F).build();
  std::array<const Operation*, 1> operations{&operation};
  return OperationGraphBuilder().setHandle(handle).setOperationGraph(1, operations.data()).build();
}

/// Engines for a graph of elements of a type, in the order of cuDNN's heuristics (mode A, then the fallback
/// list); none if cuDNN has no engine for it. Left out are engines that round operands or sums to fewer bits,
/// for floats engines that use TF32 unless the mode is math_mode::tf32, and with `deterministic` engines that
/// are not. `properties`: the device of a graph without a handle.
inline cudnn_frontend::EngineConfigList conv_engines(
    cudnn_frontend::OperationGraph& graph, cudaDataType_t type, math_mode math, bool deterministic,
    const std::shared_ptr<const cudnn_frontend::DeviceProperties>& properties = nullptr) {
  using namespace cudnn_frontend;
  const bool tensor_cores = type != CUDA_R_32F || math == math_mode::tf32;
  const auto is_left_out = [tensor_cores, deterministic](cudnnBackendDescriptor_t engine) {
    return hasNumericalNote<CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS>(engine) ||
           hasNumericalNote<CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION>(engine) ||
           (!tensor_cores && hasNumericalNote<CUDNN_NUMERICAL_NOTE_TENSOR_CORE>(engine)) ||
           (deterministic && hasNumericalNote<CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC>(engine));
  };
  EngineConfigList engines;
  static_cast<void>(get_heuristics_list({HeurMode_t::A, HeurMode_t::FALLBACK}, graph, is_left_out, engines,
                                        true, -1, properties));
  return engines;
}

/// The plan of an engine; empty if cuDNN does not build it or if it needs more than 1 GiB of workspace.
/// `properties`: as for conv_engines().
inline std::optional<cudnn_frontend::ExecutionPlan> conv_plan(
    cudnnHandle_t handle, const cudnn_frontend::OperationGraph& graph,
    const cudnn_frontend::ManagedOpaqueDescriptor& engine,
    const std::shared_ptr<const cudnn_frontend::DeviceProperties>& properties = nullptr) {
  constexpr std::int64_t most_workspace = std::int64_t{1} << 30;
  try {
    cudnn_frontend::ExecutionPlanBuilder builder;
    builder.setEngineConfig(engine, graph.getTag());
    properties != nullptr ? builder.setDeviceProperties(properties) : builder.setHandle(handle);
    std::optional<cudnn_frontend::ExecutionPlan> plan(builder.build());
    if (plan->getWorkspaceSize() > most_workspace) plan.reset();
    return plan;
  } catch (const cudnn_frontend::cudnnException&) {
    return std::nullopt;
  }
}

}  // namespace detail

}  // namespace gpu
PUFFERFISH_NAMESPACE_END

#endif
