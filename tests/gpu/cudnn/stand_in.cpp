// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The part of cuDNN and of its front end that gpu/cudnn.hpp uses, for the emulated device: plain sums, and
/// checks of all arguments. There are ten engines (engine_table). Mode A of the heuristics has the first
/// five, the fallback list the others. Numbers of input channels stand for what may go wrong: no engine for
/// 5, engines without plans for 3, no graph for 7, and a failure at execution for 11.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cudnn_frontend.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#include "../emulated/device.hpp"

struct cudnnContext {
  cudaStream_t stream = nullptr;
};
struct cudnnBackendStruct {
  std::shared_ptr<const cudnn_frontend::problem> what;
  int engine = -1;
  std::vector<void*> data;
  cudnn_frontend::numbers ids;
  void* workspace = nullptr;
};

namespace cudnn_frontend {

namespace {

using note = cudnnBackendNumericalNote_t;

struct engine_row {
  std::vector<note> notes;
  std::int64_t workspace;
  bool builds, slow, exact;
};
const std::vector<engine_row>& engine_table() {
  static const std::vector<engine_row> all{
      {{CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC}, 100, true, true, true},               // 0
      {{CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION}, 100, true, false, false},  // 1
      {{CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS}, 100, true, false, false},          // 2
      {{CUDNN_NUMERICAL_NOTE_TENSOR_CORE}, 100, true, true, true},                    // 3
      {{}, std::int64_t{1} << 31, true, false, true},                                 // 4: too much workspace
      {{}, 100, false, false, true},                                                  // 5: no plan
      {{}, 100, true, true, true},                                                    // 6
      {{}, 0, true, true, true},                                                      // 7
      {{}, 300, true, false, true},                                                   // 8
      {{}, 100, true, false, true},                                                   // 9: never tried
  };
  return all;
}
constexpr int first_of_fallback = 5;
constexpr auto time_of_slow = std::chrono::milliseconds(5);

[[noreturn]] void refuse(cudnnStatus_t status, const char* why) { throw cudnnException(why, status); }
void require(bool condition, const char* what) {
  if (!condition) refuse(CUDNN_STATUS_BAD_PARAM, what);
}

std::size_t size_of(DataType_t type) { return type == DataType_t::FLOAT ? 4 : 2; }
float get(const void* data, DataType_t type, std::size_t i) {
  if (type == DataType_t::FLOAT) return static_cast<const float*>(data)[i];
  if (type == DataType_t::HALF) return __half2float(static_cast<const __half*>(data)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
}
void put(void* data, DataType_t type, std::size_t i, float value) {
  if (type == DataType_t::FLOAT) {
    static_cast<float*>(data)[i] = value;
  } else if (type == DataType_t::HALF) {
    static_cast<__half*>(data)[i] = __float2half(value);
  } else {
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(value);
  }
}

}  // namespace

struct problem {
  DescriptorType_t kind;
  std::array<Tensor, 3> tensors;  // x, w, y or gradients
  std::array<int, 4> x, w, y;     // N (or K) H W C
  ConvDesc conv;
  float beta;

  int result() const {
    return kind == DescriptorType_t::OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR         ? 2
           : kind == DescriptorType_t::OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR ? 0
                                                                                      : 1;
  }
  std::size_t elements(int i) const {
    std::size_t count = 1;
    for (const std::int64_t extent : tensors[static_cast<std::size_t>(i)].extents) {
      count *= static_cast<std::size_t>(extent);
    }
    return count;
  }

  /// f(place in x, in w, in y) of every product.
  template <class F>
  void for_each(F&& f) const {
    const auto at = [](const std::array<int, 4>& shape, int a, int b, int c, int d) {
      return static_cast<std::size_t>(((a * shape[1] + b) * shape[2] + c) * shape[3] + d);
    };
    const auto place = [this](std::size_t axis, int out, int tap) {
      return static_cast<int>(out * conv.stride[axis] - conv.before[axis] + tap * conv.dilation[axis]);
    };
    for (int n = 0; n < y[0]; ++n) {
      for (int p = 0; p < y[1]; ++p) {
        for (int q = 0; q < y[2]; ++q) {
          for (int r = 0; r < w[1]; ++r) {
            for (int s = 0; s < w[2]; ++s) {
              const int i = place(0, p, r), j = place(1, q, s);
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

  /// result = result of the convolution + beta result. `scale`: 1 for engines that are exact.
  void compute(const std::array<void*, 3>& data, float scale) const {
    const int to = result();
    std::vector<float> sums(elements(to), 0.0F);
    const DataType_t tx = tensors[0].type, tw = tensors[1].type, ty = tensors[2].type;
    for_each([&](std::size_t i, std::size_t j, std::size_t k) {
      if (to == 0) sums[i] += get(data[1], tw, j) * get(data[2], ty, k);
      if (to == 1) sums[j] += get(data[0], tx, i) * get(data[2], ty, k);
      if (to == 2) sums[k] += get(data[0], tx, i) * get(data[1], tw, j);
    });
    void* const memory = data[static_cast<std::size_t>(to)];
    const DataType_t type = tensors[static_cast<std::size_t>(to)].type;
    for (std::size_t i = 0; i < sums.size(); ++i) {
      // What is multiplied by zero is not read.
      const float before = beta == 0.0F ? 0.0F : beta * get(memory, type, i);
      put(memory, type, i, scale * sums[i] + before);
    }
  }
};

OperationGraph OperationGraphBuilder::build() {
  require(handle_ != nullptr && count_ == 1, "one operation and a handle");
  const Operation& o = *first_;
  auto made = std::make_shared<problem>();
  made->kind = o.kind;
  made->conv = o.conv;
  made->beta = o.beta;
  const int to = made->result();
  require(o.dx.has_value() == (to == 0) && o.dw.has_value() == (to == 1) && o.y.has_value() == (to == 2),
          "the result of the operation");
  require(o.x.has_value() == (to != 0) && o.w.has_value() == (to != 1) && o.dy.has_value() == (to != 2),
          "the operands of the operation");
  made->tensors = {to == 0 ? *o.dx : *o.x, to == 1 ? *o.dw : *o.w, to == 2 ? *o.y : *o.dy};
  require(o.alpha == 1.0F && o.conv.compute == DataType_t::FLOAT && o.conv.axes == 2 &&
              o.conv.mode == ConvolutionMode_t::CROSS_CORRELATION,
          "how the convolution is computed");
  for (const numbers* n : {&o.conv.before, &o.conv.after, &o.conv.stride, &o.conv.dilation}) {
    require(n->size() == 2, "numbers of two axes");
  }
  std::array<std::array<int, 4>*, 3> shapes{&made->x, &made->w, &made->y};
  for (std::size_t i = 0; i < 3; ++i) {
    const Tensor& t = made->tensors[i];
    require(t.extents.size() == 4 && t.strides.size() == 4 && t.alignment == 16, "four extents and strides");
    const std::int64_t n = t.extents[0], c = t.extents[1], h = t.extents[2], w = t.extents[3];
    require(n > 0 && t.strides == numbers{h * w * c, 1, w * c, c}, "channels innermost");
    *shapes[i] = {static_cast<int>(n), static_cast<int>(h), static_cast<int>(w), static_cast<int>(c)};
  }
  const DataType_t type = made->tensors[2].type;
  require(made->tensors[0].type == type && made->tensors[1].type == (to == 1 ? DataType_t::FLOAT : type),
          "types of the tensors");
  require(made->x[0] == made->y[0] && made->x[3] == made->w[3] && made->y[3] == made->w[0],
          "images and channels");
  for (std::size_t i = 0; i < 2; ++i) {
    const std::int64_t reach = o.conv.dilation[i] * (made->w[i + 1] - 1) + 1;
    require(made->y[i + 1] ==
                (made->x[i + 1] + o.conv.before[i] + o.conv.after[i] - reach) / o.conv.stride[i] + 1,
            "extents of the output");
  }
  if (made->x[3] == 7) refuse(CUDNN_STATUS_NOT_SUPPORTED_SHAPE, "seven channels");
  return OperationGraph(std::move(made));
}

opaque_descriptor::~opaque_descriptor() { delete made_; }

bool has_note(cudnnBackendDescriptor_t engine, cudnnBackendNumericalNote_t wanted) {
  const std::vector<note>& notes = engine_table()[static_cast<std::size_t>(engine->engine)].notes;
  return std::find(notes.begin(), notes.end(), wanted) != notes.end();
}

std::vector<cudnnStatus_t> get_heuristics_list(const std::vector<HeurMode_t>& modes, OperationGraph& graph,
                                               std::function<bool(cudnnBackendDescriptor_t)> left_out,
                                               EngineConfigList& engines, bool all_modes, std::int32_t,
                                               std::shared_ptr<const DeviceProperties>) {
  ++cudnn_stand_in::told().questions;
  std::vector<cudnnStatus_t> statuses;
  if (graph.what()->x[3] == 5) return {CUDNN_STATUS_NOT_SUPPORTED};
  for (const HeurMode_t mode : modes) {
    const bool fallback = mode == HeurMode_t::FALLBACK;
    const int first = fallback ? first_of_fallback : 0;
    const int end = fallback ? static_cast<int>(engine_table().size()) : first_of_fallback;
    for (int i = first; i < end; ++i) {
      auto engine =
          std::make_shared<opaque_descriptor>(new cudnnBackendStruct{graph.what(), i, {}, {}, nullptr});
      if (!left_out(engine->get_backend_descriptor())) engines.push_back(std::move(engine));
    }
    statuses.push_back(CUDNN_STATUS_SUCCESS);
    if (!all_modes) break;
  }
  return statuses;
}

ExecutionPlan ExecutionPlanBuilder::build() {
  require(handle_ != nullptr && engine_ != nullptr, "a handle and an engine");
  const cudnnBackendStruct& engine = *engine_->get_backend_descriptor();
  const engine_row& row = engine_table()[static_cast<std::size_t>(engine.engine)];
  if (!row.builds || engine.what->x[3] == 3) refuse(CUDNN_STATUS_NOT_SUPPORTED, "no plan");
  return {std::make_shared<opaque_descriptor>(new cudnnBackendStruct(engine)), row.workspace};
}

VariantPack VariantPackBuilder::build() {
  return VariantPack(
      std::make_shared<opaque_descriptor>(new cudnnBackendStruct{nullptr, -1, data_, ids_, workspace_}));
}

}  // namespace cudnn_frontend

cudnn_stand_in::log& cudnn_stand_in::told() {
  static log all;
  return all;
}

std::size_t cudnnGetVersion() { return 1; }
const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status == CUDNN_STATUS_EXECUTION_FAILED ? "failed in the stand-in" : "refused by the stand-in";
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

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t operands) {
  const std::shared_ptr<const cudnn_frontend::problem> what = plan->what;
  const int number = plan->engine;
  const cudnn_frontend::engine_row& row = cudnn_frontend::engine_table()[static_cast<std::size_t>(number)];
  if (operands->data.size() != 3 || operands->ids.size() != 3) return CUDNN_STATUS_BAD_PARAM;
  std::array<void*, 3> data{};
  for (std::size_t i = 0; i < 3; ++i) {
    const auto found = std::find(operands->ids.begin(), operands->ids.end(), what->tensors[i].id);
    if (found == operands->ids.end()) return CUDNN_STATUS_BAD_PARAM;
    data[i] = operands->data[static_cast<std::size_t>(found - operands->ids.begin())];
    const std::size_t bytes =
        what->elements(static_cast<int>(i)) * cudnn_frontend::size_of(what->tensors[i].type);
    if (emulated_device::kind_of(data[i], bytes) != emulated_device::kind::device ||
        reinterpret_cast<std::uintptr_t>(data[i]) % 16 != 0) {
      return CUDNN_STATUS_BAD_PARAM;
    }
  }
  void* const workspace = operands->workspace;
  const auto bytes = static_cast<std::size_t>(row.workspace);
  if (bytes > 0 && emulated_device::kind_of(workspace, bytes) != emulated_device::kind::device) {
    return CUDNN_STATUS_BAD_PARAM;
  }
  if (what->x[3] == 11) return CUDNN_STATUS_EXECUTION_FAILED;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(handle->stream, &capture);
  cudnn_stand_in::told().executions.push_back(
      {number, data[static_cast<std::size_t>(what->result())], capture != cudaStreamCaptureStatusNone});
  const bool slow = row.slow;
  const float scale = row.exact ? 1.0F : 1.5F;
  const auto work = [=] {
    if (bytes > 0) std::memset(workspace, 0xff, bytes);
    if (slow) std::this_thread::sleep_for(cudnn_frontend::time_of_slow);
    what->compute(data, scale);
  };
  const cudaError_t status = emulated_device::submit(handle->stream, "cudnnBackendExecute", work);
  return status == cudaSuccess ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}
