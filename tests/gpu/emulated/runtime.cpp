// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The part of the CUDA runtime's C interface that the library and its tests use, for the emulated device:
/// the device, its memory, copies and errors (streams.cpp has the rest).

#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "streams.hpp"

using namespace emulated_device;

struct CUmemPoolHandle_st {};

// ---------------------------------------------------------------------------------------------------------
// Device

cudaError_t cudaGetDeviceCount(int* count) {
  *count = devices;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices) return result(cudaErrorInvalidDevice);
  current_device() = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }
cudaError_t cudaDeviceReset() { return cudaSuccess; }
cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= devices) return result(cudaErrorInvalidDevice);
  *properties = {};
  std::strcpy(properties->name, "emulated device");
  properties->major = 9;
  properties->minor = 0;
  properties->multiProcessorCount = multiprocessors;
  properties->totalGlobalMem = total_bytes();
  properties->sharedMemPerBlock = 48 * 1024;
  properties->sharedMemPerBlockOptin = most_shared_bytes;
  properties->sharedMemPerMultiprocessor = 228 * 1024;
  properties->reservedSharedMemPerBlock = 1024;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 0x7fffffff;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->l2CacheSize = 50 << 20;
  properties->unifiedAddressing = 1;
  properties->concurrentKernels = 1;
  properties->asyncEngineCount = 3;
  properties->memoryPoolsSupported = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (cudaGetDeviceProperties(&p, device) != cudaSuccess) return cudaErrorInvalidDevice;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = p.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = p.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(p.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(p.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(p.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrL2CacheSize:
      *value = p.l2CacheSize;
      break;
    case cudaDevAttrWarpSize:
      *value = p.warpSize;
      break;
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrCooperativeLaunch:
      *value = 1;
      break;
    case cudaDevAttrUnifiedAddressing:
      *value = 1;
      break;
    default:
      return result(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

namespace {
struct error_text {
  cudaError_t error;
  const char *name, *text;
};
constexpr error_text error_texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidPitchValue, "cudaErrorInvalidPitchValue", "invalid pitch argument"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorGraphExecUpdateFailure, "cudaErrorGraphExecUpdateFailure",
     "the graph update was not performed"},
    {cudaErrorIllegalState, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
};
const error_text& text_of(cudaError_t error) {
  for (const error_text& t : error_texts) {
    if (t.error == error) return t;
  }
  static constexpr error_text unknown{cudaErrorUnknown, "unrecognized error code", "unrecognized error code"};
  return unknown;
}
}  // namespace

const char* cudaGetErrorName(cudaError_t error) { return text_of(error).name; }
const char* cudaGetErrorString(cudaError_t error) { return text_of(error).text; }

// ---------------------------------------------------------------------------------------------------------
// Memory

namespace {

struct rows {
  void* to;
  std::size_t to_pitch;
  const void* from;
  std::size_t from_pitch;
  std::size_t width, height;

  std::size_t to_bytes() const { return height == 0 || width == 0 ? 0 : (height - 1) * to_pitch + width; }
  std::size_t from_bytes() const { return height == 0 || width == 0 ? 0 : (height - 1) * from_pitch + width; }
};

// Between host and device so far.
std::size_t copied_bytes = 0;

void copy(const rows& r) {
  for (std::size_t i = 0; i < r.height; ++i) {
    std::memmove(static_cast<char*>(r.to) + i * r.to_pitch,
                 static_cast<const char*>(r.from) + i * r.from_pitch, r.width);
  }
}

bool fits(cudaMemcpyKind direction, bool to_device, bool from_device) {
  switch (direction) {
    case cudaMemcpyHostToHost:
      return !to_device && !from_device;
    case cudaMemcpyHostToDevice:
      return to_device && !from_device;
    case cudaMemcpyDeviceToHost:
      return !to_device && from_device;
    case cudaMemcpyDeviceToDevice:
      return to_device && from_device;
    case cudaMemcpyDefault:
      return true;
  }
  return false;
}

cudaError_t copy_async(rows r, cudaMemcpyKind direction, cudaStream_t stream) {
  if (r.to_bytes() == 0) return cudaSuccess;
  if (r.to_pitch < r.width || r.from_pitch < r.width) return cudaErrorInvalidPitchValue;
  CUstream_st* s = find(stream);
  if (s == nullptr) return cudaErrorInvalidResourceHandle;
  const kind to = kind_of(r.to, r.to_bytes()), from = kind_of(r.from, r.from_bytes());
  if (!fits(direction, to == kind::device, from == kind::device)) return cudaErrorInvalidValue;
  if ((to == kind::device) != (from == kind::device)) copied_bytes += r.width * r.height;
  const bool pageable = to == kind::pageable || from == kind::pageable;
  if (pageable && s->captured_by != nullptr) {
    return break_capture(*s->captured_by, cudaErrorStreamCaptureUnsupported);
  }
  if (from == kind::pageable) {  // as it is now: the caller may change it as soon as this returns
    auto now = std::make_shared<std::vector<char>>(r.width * r.height);
    copy({now->data(), r.width, r.from, r.from_pitch, r.width, r.height});
    r.from_pitch = r.width;
    r.from = now->data();
    if (const cudaError_t error = take(*s, "copy", [r, now] { copy(r); }); error != cudaSuccess) return error;
  } else {
    if (const cudaError_t error = take(*s, "copy", [r] { copy(r); }); error != cudaSuccess) return error;
  }
  if (to == kind::pageable) drain(*s);
  return cudaSuccess;
}

cudaError_t copy_now(const rows& r, cudaMemcpyKind direction) {
  if (const cudaError_t error = unsafe_call(); error != cudaSuccess) return error;
  return copy_async(r, direction, nullptr);
}

cudaError_t set_async(void* to, std::size_t pitch, int value, std::size_t width, std::size_t height,
                      cudaStream_t stream) {
  const rows r{to, pitch, nullptr, width, width, height};
  if (r.to_bytes() == 0) return cudaSuccess;
  if (kind_of(to, r.to_bytes()) != kind::device) return cudaErrorInvalidValue;
  return take(stream, "set", [=] {
    for (std::size_t i = 0; i < height; ++i) std::memset(static_cast<char*>(to) + i * pitch, value, width);
  });
}

}  // namespace

/// For tests that something stays on the device.
extern "C" std::size_t emulated_device_copied_bytes() { return copied_bytes; }

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  const guard locked(device_lock());
  if (const cudaError_t error = unsafe_call(); error != cudaSuccess) return result(error);
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  *memory = allocate_device(bytes);
  return result(*memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}

cudaError_t cudaFree(void* memory) {
  const guard locked(device_lock());
  if (const cudaError_t error = unsafe_call(); error != cudaSuccess) return result(error);
  drain_all();
  return result(memory == nullptr || free_device(memory) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t stream) {
  const guard locked(device_lock());
  CUstream_st* s = find(stream);
  if (s == nullptr) return result(cudaErrorInvalidResourceHandle);
  if (s->captured_by != nullptr)
    return result(break_capture(*s->captured_by, cudaErrorStreamCaptureUnsupported));
  *memory = bytes == 0 ? nullptr : allocate_device(bytes);
  return result(bytes != 0 && *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaMallocFromPoolAsync(void** memory, std::size_t bytes, cudaMemPool_t, cudaStream_t stream) {
  return cudaMallocAsync(memory, bytes, stream);
}

cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  const guard locked(device_lock());
  if (memory == nullptr) return cudaSuccess;
  if (kind_of(memory, 1) != kind::device) return result(cudaErrorInvalidValue);
  return result(take(stream, "free", [memory] { free_device(memory); }));
}

cudaError_t cudaMallocHost(void** memory, std::size_t bytes) { return cudaHostAlloc(memory, bytes, 0); }
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  const guard locked(device_lock());
  if (const cudaError_t error = unsafe_call(); error != cudaSuccess) return result(error);
  *memory = allocate_pinned(bytes);
  return result(*memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaFreeHost(void* memory) {
  const guard locked(device_lock());
  if (const cudaError_t error = unsafe_call(); error != cudaSuccess) return result(error);
  drain_all();
  return result(memory == nullptr || free_pinned(memory) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned) {
  const guard locked(device_lock());
  pin(memory, bytes);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* memory) {
  const guard locked(device_lock());
  drain_all();
  return result(unpin(memory) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const guard locked(device_lock());
  *free = free_bytes();
  *total = total_bytes();
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
  const guard locked(device_lock());
  *attributes = {};
  const kind k = kind_of(memory, 1);
  attributes->type = k == kind::device   ? cudaMemoryTypeDevice
                     : k == kind::pinned ? cudaMemoryTypeHost
                                         : cudaMemoryTypeUnregistered;
  attributes->device = k == kind::device ? device_of(memory) : current_device();
  if (k != kind::pageable) attributes->devicePointer = const_cast<void*>(memory);
  if (k != kind::device) attributes->hostPointer = const_cast<void*>(memory);
  return cudaSuccess;
}

namespace {
cudaMemPool_t the_pool() {
  static auto* pool = new CUmemPoolHandle_st;
  return pool;
}
}  // namespace

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = the_pool();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) {
  return cudaDeviceGetDefaultMemPool(pool, device);
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, std::size_t) { return cudaSuccess; }

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind direction) {
  const guard locked(device_lock());
  return result(copy_now({to, bytes, from, bytes, bytes, 1}, direction));
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind direction,
                            cudaStream_t stream) {
  const guard locked(device_lock());
  return result(copy_async({to, bytes, from, bytes, bytes, 1}, direction, stream));
}
cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                         std::size_t width, std::size_t height, cudaMemcpyKind direction) {
  const guard locked(device_lock());
  return result(copy_now({to, to_pitch, from, from_pitch, width, height}, direction));
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind direction,
                              cudaStream_t stream) {
  const guard locked(device_lock());
  return result(copy_async({to, to_pitch, from, from_pitch, width, height}, direction, stream));
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  const guard locked(device_lock());
  return result(set_async(to, bytes, value, bytes, 1, nullptr));
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  const guard locked(device_lock());
  return result(set_async(to, bytes, value, bytes, 1, stream));
}
cudaError_t cudaMemset2DAsync(void* to, std::size_t pitch, int value, std::size_t width, std::size_t height,
                              cudaStream_t stream) {
  const guard locked(device_lock());
  return result(set_async(to, pitch, value, width, height, stream));
}
