// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The part of cuDNN's C interface that gpu/cudnn.hpp uses, for the emulated device (stand_in.cpp). Names and
// meanings are those of cuDNN; numbers need not be, except that a status / 1000 is its category.
#pragma once

#include <cuda_runtime_api.h>

#include <stddef.h>

enum cudnnStatus_t {
  CUDNN_STATUS_SUCCESS = 0,
  CUDNN_STATUS_BAD_PARAM = 2000,
  CUDNN_STATUS_NOT_SUPPORTED = 3000,
  CUDNN_STATUS_NOT_SUPPORTED_SHAPE = 3002,
  CUDNN_STATUS_EXECUTION_FAILED = 5000,
};
#define CUDNN_STATUS_CATEGORY(status) ((status) / 1000 * 1000)

enum cudnnBackendNumericalNote_t {
  CUDNN_NUMERICAL_NOTE_TENSOR_CORE,
  CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS,
  CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION,
  CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC,
};

typedef struct cudnnContext* cudnnHandle_t;
/// An engine, a plan or the operands of an execution.
typedef struct cudnnBackendStruct* cudnnBackendDescriptor_t;

size_t cudnnGetVersion();
const char* cudnnGetErrorString(cudnnStatus_t status);
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle);
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle);
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream);
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t operands);
