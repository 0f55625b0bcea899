// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The part of cuDNN's C++ front end that gpu/cudnn.hpp uses, for the emulated device (stand_in.cpp). Names
// and meanings are those of the front end. The log at the end is for tests.
#pragma once

#include <cudnn.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace cudnn_frontend {

class cudnnException : public std::runtime_error {
 public:
  cudnnException(const char* message, cudnnStatus_t status)
      : std::runtime_error(message), error_status(status) {}
  cudnnStatus_t error_status;
};

enum class DataType_t { FLOAT, HALF, BFLOAT16 };
enum class ConvolutionMode_t { CONVOLUTION, CROSS_CORRELATION };
enum class HeurMode_t { A, B, FALLBACK };
enum class DescriptorType_t {
  OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
  OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
  OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
};
class DeviceProperties {};

/// Extents of any count, as the builders get them.
using numbers = std::vector<std::int64_t>;

struct Tensor {
  std::int64_t id = 0, alignment = 0;
  DataType_t type = DataType_t::FLOAT;
  numbers extents, strides;
};
class TensorBuilder {
 public:
  TensorBuilder& setId(std::int64_t id) { return made_.id = id, *this; }
  TensorBuilder& setDim(std::int64_t n, const std::int64_t* v) { return made_.extents = {v, v + n}, *this; }
  TensorBuilder& setStride(std::int64_t n, const std::int64_t* v) {
    return made_.strides = {v, v + n}, *this;
  }
  TensorBuilder& setAlignment(std::int64_t bytes) { return made_.alignment = bytes, *this; }
  TensorBuilder& setDataType(DataType_t type) { return made_.type = type, *this; }
  Tensor&& build() { return std::move(made_); }

 private:
  Tensor made_;
};

struct ConvDesc {
  DataType_t compute = DataType_t::HALF;
  ConvolutionMode_t mode = ConvolutionMode_t::CONVOLUTION;
  std::int64_t axes = 0;
  numbers before, after, stride, dilation;
};
class ConvDescBuilder {
 public:
  ConvDescBuilder& setComputeType(DataType_t type) { return made_.compute = type, *this; }
  ConvDescBuilder& setMathMode(ConvolutionMode_t mode) { return made_.mode = mode, *this; }
  ConvDescBuilder& setSpatialDimCount(std::int64_t axes) { return made_.axes = axes, *this; }
  ConvDescBuilder& setPrePadding(std::int64_t n, const std::int64_t* v) {
    return made_.before = {v, v + n}, *this;
  }
  ConvDescBuilder& setPostPadding(std::int64_t n, const std::int64_t* v) {
    return made_.after = {v, v + n}, *this;
  }
  ConvDescBuilder& setSpatialStride(std::int64_t n, const std::int64_t* v) {
    return made_.stride = {v, v + n}, *this;
  }
  ConvDescBuilder& setDilation(std::int64_t n, const std::int64_t* v) {
    return made_.dilation = {v, v + n}, *this;
  }
  ConvDesc&& build() { return std::move(made_); }

 private:
  ConvDesc made_;
};

struct Operation {
  DescriptorType_t kind;
  std::optional<Tensor> x, w, y, dx, dw, dy;
  ConvDesc conv;
  float alpha = 0, beta = 0;
};
class OperationBuilder {
 public:
  explicit OperationBuilder(DescriptorType_t kind) { made_.kind = kind; }
  OperationBuilder& setxDesc(const Tensor& t) { return made_.x = t, *this; }
  OperationBuilder& setwDesc(const Tensor& t) { return made_.w = t, *this; }
  OperationBuilder& setyDesc(const Tensor& t) { return made_.y = t, *this; }
  OperationBuilder& setdxDesc(const Tensor& t) { return made_.dx = t, *this; }
  OperationBuilder& setdwDesc(const Tensor& t) { return made_.dw = t, *this; }
  OperationBuilder& setdyDesc(const Tensor& t) { return made_.dy = t, *this; }
  OperationBuilder& setcDesc(const ConvDesc& conv) { return made_.conv = conv, *this; }
  OperationBuilder& setAlpha(float alpha) { return made_.alpha = alpha, *this; }
  OperationBuilder& setBeta(float beta) { return made_.beta = beta, *this; }
  Operation&& build() { return std::move(made_); }

 private:
  Operation made_{};
};

struct problem;  // an operation whose parts fit each other

class OperationGraph {
 public:
  explicit OperationGraph(std::shared_ptr<const problem> what) : what_(std::move(what)) {}
  const std::shared_ptr<const problem>& what() const { return what_; }
  std::string getTag() const { return "conv"; }

 private:
  std::shared_ptr<const problem> what_;
};
class OperationGraphBuilder {
 public:
  OperationGraphBuilder& setHandle(cudnnHandle_t handle) { return handle_ = handle, *this; }
  OperationGraphBuilder& setOperationGraph(std::int64_t count, const Operation** all) {
    return count_ = count, first_ = all[0], *this;
  }
  OperationGraph build();

 private:
  cudnnHandle_t handle_ = nullptr;
  std::int64_t count_ = 0;
  const Operation* first_ = nullptr;
};

class opaque_descriptor {
 public:
  explicit opaque_descriptor(cudnnBackendDescriptor_t made) : made_(made) {}
  opaque_descriptor(const opaque_descriptor&) = delete;
  opaque_descriptor& operator=(const opaque_descriptor&) = delete;
  ~opaque_descriptor();
  cudnnBackendDescriptor_t get_backend_descriptor() const { return made_; }

 private:
  cudnnBackendDescriptor_t made_;
};
using ManagedOpaqueDescriptor = std::shared_ptr<opaque_descriptor>;
using EngineConfigList = std::vector<ManagedOpaqueDescriptor>;

/// `left_out` returns true for engines that are not wanted.
std::vector<cudnnStatus_t> get_heuristics_list(const std::vector<HeurMode_t>& modes, OperationGraph& graph,
                                               std::function<bool(cudnnBackendDescriptor_t)> left_out,
                                               EngineConfigList& engines, bool all_modes,
                                               std::int32_t multiprocessors,
                                               std::shared_ptr<const DeviceProperties> properties);

bool has_note(cudnnBackendDescriptor_t engine, cudnnBackendNumericalNote_t note);
template <cudnnBackendNumericalNote_t Note>
bool hasNumericalNote(cudnnBackendDescriptor_t engine) {
  return has_note(engine, Note);
}

class ExecutionPlan {
 public:
  ExecutionPlan(ManagedOpaqueDescriptor made, std::int64_t workspace)
      : made_(std::move(made)), workspace_(workspace) {}
  ExecutionPlan(ExecutionPlan&&) = default;
  ExecutionPlan& operator=(ExecutionPlan&&) = default;
  std::int64_t getWorkspaceSize() const { return workspace_; }
  cudnnBackendDescriptor_t get_raw_desc() const { return made_->get_backend_descriptor(); }

 private:
  ManagedOpaqueDescriptor made_;
  std::int64_t workspace_;
};
class ExecutionPlanBuilder {
 public:
  ExecutionPlanBuilder& setHandle(cudnnHandle_t handle) { return handle_ = handle, *this; }
  ExecutionPlanBuilder& setDeviceProperties(std::shared_ptr<const DeviceProperties>) { return *this; }
  ExecutionPlanBuilder& setEngineConfig(const ManagedOpaqueDescriptor& engine, const std::string&) {
    return engine_ = engine, *this;
  }
  ExecutionPlan build();

 private:
  cudnnHandle_t handle_ = nullptr;
  ManagedOpaqueDescriptor engine_;
};

class VariantPack {
 public:
  explicit VariantPack(ManagedOpaqueDescriptor made) : made_(std::move(made)) {}
  cudnnBackendDescriptor_t get_raw_desc() const { return made_->get_backend_descriptor(); }

 private:
  ManagedOpaqueDescriptor made_;
};
class VariantPackBuilder {
 public:
  VariantPackBuilder& setDataPointers(std::int64_t n, void** v) { return data_.assign(v, v + n), *this; }
  VariantPackBuilder& setUids(std::int64_t n, const std::int64_t* v) { return ids_ = {v, v + n}, *this; }
  VariantPackBuilder& setWorkspacePointer(void* memory) { return workspace_ = memory, *this; }
  VariantPack build();

 private:
  std::vector<void*> data_;
  numbers ids_;
  void* workspace_ = nullptr;
};

}  // namespace cudnn_frontend

namespace cudnn_stand_in {

struct execution {
  int engine;
  const void* result;
  bool captured;
};
/// The executions of the process, in the order of the calls, and the number of questions to the heuristics.
struct log {
  std::vector<execution> executions;
  int questions = 0;
};
log& told();

}  // namespace cudnn_stand_in
