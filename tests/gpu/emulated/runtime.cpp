// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The part of the CUDA runtime's C interface that the library and its tests use, for the emulated device:
/// streams, events, copies, capture and replay. A non-blocking stream executes nothing before somebody waits
/// for it, so that a missing wait shows up as a wrong result; PUFFERFISH_EMULATED_STREAMS=eager executes
/// everything at once.

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "device.hpp"

namespace {

using emulated_device::kind;
using emulated_device::kind_of;
using emulated_device::operation;

struct node {
  std::string name;
  operation work;
};

}  // namespace

struct CUgraph_st {
  std::vector<node> nodes;
};

struct CUgraphExec_st {
  std::shared_ptr<const std::vector<node>> nodes;  // those of a launch under way may be replaced meanwhile
};

struct CUmemPoolHandle_st {};

namespace {

// One capture: from cudaStreamBeginCapture to cudaStreamEndCapture.
struct capture {
  cudaStream_t origin;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  std::unique_ptr<CUgraph_st> graph = std::make_unique<CUgraph_st>();
  bool broken = false;
};

struct queue {
  std::deque<operation> waiting;
  std::uint64_t taken = 0, done = 0;  // operations
};

void run_until(queue& q, std::uint64_t done) {
  if (q.done >= done) return;
  const emulated_device::access open;
  while (q.done < done) {
    const operation next = std::move(q.waiting.front());
    q.waiting.pop_front();
    next();
    ++q.done;
  }
}

}  // namespace

struct CUstream_st {
  unsigned flags = 0;
  bool late = false;
  std::shared_ptr<queue> work = std::make_shared<queue>();
  std::shared_ptr<capture> captured_by;
  std::uint64_t captured = 0,
                joined = 0;  // operations of this stream in its capture; those that others wait for
};

struct CUevent_st {
  unsigned flags = 0;
  std::shared_ptr<queue> work;  // null: never recorded
  std::uint64_t position = 0;
  std::shared_ptr<std::chrono::steady_clock::time_point> time;
  std::shared_ptr<capture> captured_by;
  cudaStream_t captured_on = nullptr;
  std::uint64_t captured = 0;
};

namespace {

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

using guard = std::lock_guard<std::recursive_mutex>;

CUstream_st& legacy_stream() {
  static auto* stream = new CUstream_st;
  return *stream;
}
std::set<cudaStream_t>& streams() {
  static auto* all = new std::set<cudaStream_t>;
  return *all;
}
std::set<std::shared_ptr<capture>>& captures() {
  static auto* all = new std::set<std::shared_ptr<capture>>;
  return *all;
}

// Null where there is no such stream.
CUstream_st* find(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread)
    return &legacy_stream();
  return streams().count(stream) != 0 ? stream : nullptr;
}

cudaError_t break_capture(const std::shared_ptr<capture>& c, cudaError_t why) {
  c->broken = true;
  return why;
}

// What a call that could interfere with a capture returns.
cudaError_t unsafe_call() {
  for (const auto& c : captures()) {
    const bool mine = c->thread == std::this_thread::get_id();
    if (c->mode == cudaStreamCaptureModeGlobal || (c->mode == cudaStreamCaptureModeThreadLocal && mine)) {
      return break_capture(c, cudaErrorStreamCaptureUnsupported);
    }
  }
  return cudaSuccess;
}

// What a call that waits for everything, or for the legacy stream, returns.
cudaError_t implicit_call() {
  for (const auto& c : captures()) {
    if ((c->origin->flags & cudaStreamNonBlocking) == 0)
      return break_capture(c, cudaErrorStreamCaptureImplicit);
  }
  return cudaSuccess;
}

void drain(CUstream_st& s) { run_until(*s.work, s.work->taken); }
void drain_all() {
  for (cudaStream_t s : streams()) drain(*s);
}

cudaError_t take(CUstream_st& s, const char* name, operation work) {
  if (s.captured_by != nullptr) {
    if (s.captured_by->broken) return cudaErrorStreamCaptureInvalidated;
    s.captured_by->graph->nodes.push_back({name, std::move(work)});
    ++s.captured;
    return cudaSuccess;
  }
  if (&s == &legacy_stream()) {
    if (const cudaError_t error = implicit_call(); error != cudaSuccess) return error;
  }
  s.work->waiting.push_back(std::move(work));
  ++s.work->taken;
  if (!s.late) drain(s);
  return cudaSuccess;
}

cudaError_t take(cudaStream_t stream, const char* name, operation work) {
  CUstream_st* s = find(stream);
  return s == nullptr ? cudaErrorInvalidResourceHandle : take(*s, name, std::move(work));
}

struct rows {
  void* to;
  std::size_t to_pitch;
  const void* from;
  std::size_t from_pitch;
  std::size_t width, height;

  std::size_t to_bytes() const { return height == 0 || width == 0 ? 0 : (height - 1) * to_pitch + width; }
  std::size_t from_bytes() const { return height == 0 || width == 0 ? 0 : (height - 1) * from_pitch + width; }
};

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
  const bool pageable = to == kind::pageable || from == kind::pageable;
  if (pageable && s->captured_by != nullptr) {
    return break_capture(s->captured_by, cudaErrorStreamCaptureUnsupported);
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

std::recursive_mutex& emulated_device::device_lock() {
  static auto* lock = new std::recursive_mutex;
  return *lock;
}

cudaError_t emulated_device::submit(cudaStream_t stream, const char* name, operation work) {
  const guard locked(device_lock());
  return take(stream, name, std::move(work));
}

using emulated_device::device_lock;

// ---------------------------------------------------------------------------------------------------------
// Device

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
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
  if (device != 0) return result(cudaErrorInvalidDevice);
  *properties = {};
  std::strcpy(properties->name, "emulated device");
  properties->major = 9;
  properties->minor = 0;
  properties->multiProcessorCount = emulated_device::multiprocessors;
  properties->totalGlobalMem = emulated_device::total_bytes();
  properties->sharedMemPerBlock = 48 * 1024;
  properties->sharedMemPerBlockOptin = emulated_device::most_shared_bytes;
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

cudaError_t cudaDeviceSynchronize() {
  const guard locked(device_lock());
  if (!captures().empty())
    return result(break_capture(*captures().begin(), cudaErrorStreamCaptureUnsupported));
  drain_all();
  emulated_device::check_guards();
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

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

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  const guard locked(device_lock());
  if (const cudaError_t error = unsafe_call(); error != cudaSuccess) return result(error);
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  *memory = emulated_device::allocate_device(bytes);
  return result(*memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}

cudaError_t cudaFree(void* memory) {
  const guard locked(device_lock());
  if (const cudaError_t error = unsafe_call(); error != cudaSuccess) return result(error);
  drain_all();
  return result(memory == nullptr || emulated_device::free_device(memory) ? cudaSuccess
                                                                          : cudaErrorInvalidValue);
}

cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t stream) {
  const guard locked(device_lock());
  CUstream_st* s = find(stream);
  if (s == nullptr) return result(cudaErrorInvalidResourceHandle);
  if (s->captured_by != nullptr)
    return result(break_capture(s->captured_by, cudaErrorStreamCaptureUnsupported));
  *memory = bytes == 0 ? nullptr : emulated_device::allocate_device(bytes);
  return result(bytes != 0 && *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaMallocFromPoolAsync(void** memory, std::size_t bytes, cudaMemPool_t, cudaStream_t stream) {
  return cudaMallocAsync(memory, bytes, stream);
}

cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  const guard locked(device_lock());
  if (memory == nullptr) return cudaSuccess;
  if (kind_of(memory, 1) != kind::device) return result(cudaErrorInvalidValue);
  return result(take(stream, "free", [memory] { emulated_device::free_device(memory); }));
}

cudaError_t cudaMallocHost(void** memory, std::size_t bytes) { return cudaHostAlloc(memory, bytes, 0); }
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  const guard locked(device_lock());
  if (const cudaError_t error = unsafe_call(); error != cudaSuccess) return result(error);
  *memory = emulated_device::allocate_pinned(bytes);
  return result(*memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaFreeHost(void* memory) {
  const guard locked(device_lock());
  if (const cudaError_t error = unsafe_call(); error != cudaSuccess) return result(error);
  drain_all();
  return result(memory == nullptr || emulated_device::free_pinned(memory) ? cudaSuccess
                                                                          : cudaErrorInvalidValue);
}
cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned) {
  const guard locked(device_lock());
  emulated_device::pin(memory, bytes);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* memory) {
  const guard locked(device_lock());
  drain_all();
  return result(emulated_device::unpin(memory) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const guard locked(device_lock());
  *free = emulated_device::free_bytes();
  *total = emulated_device::total_bytes();
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
  const guard locked(device_lock());
  *attributes = {};
  const kind k = kind_of(memory, 1);
  attributes->type = k == kind::device   ? cudaMemoryTypeDevice
                     : k == kind::pinned ? cudaMemoryTypeHost
                                         : cudaMemoryTypeUnregistered;
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

// ---------------------------------------------------------------------------------------------------------
// Streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  const guard locked(device_lock());
  const char* setting = std::getenv("PUFFERFISH_EMULATED_STREAMS");
  const bool eager = setting != nullptr && std::string_view(setting) == "eager";
  *stream = new CUstream_st;
  (*stream)->flags = flags;
  (*stream)->late = !eager && (flags & cudaStreamNonBlocking) != 0;
  streams().insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const guard locked(device_lock());
  if (streams().count(stream) == 0) return result(cudaErrorInvalidResourceHandle);
  if (stream->captured_by != nullptr) stream->captured_by->broken = true;
  drain(*stream);
  streams().erase(stream);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  const guard locked(device_lock());
  const CUstream_st* s = find(stream);
  if (s == nullptr) return result(cudaErrorInvalidResourceHandle);
  *flags = s->flags;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const guard locked(device_lock());
  CUstream_st* s = find(stream);
  if (s == nullptr) return result(cudaErrorInvalidResourceHandle);
  if (s->captured_by != nullptr)
    return result(break_capture(s->captured_by, cudaErrorStreamCaptureUnsupported));
  drain(*s);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const guard locked(device_lock());
  CUstream_st* s = find(stream);
  if (s == nullptr) return result(cudaErrorInvalidResourceHandle);
  if (s->captured_by != nullptr)
    return result(break_capture(s->captured_by, cudaErrorStreamCaptureUnsupported));
  if (s->work->done == s->work->taken) return cudaSuccess;
  run_until(*s->work, s->work->done + 1);  // whoever asks again and again gets there
  return cudaErrorNotReady;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  const guard locked(device_lock());
  CUstream_st* s = find(stream);
  if (s == nullptr) return result(cudaErrorInvalidResourceHandle);
  const cudaError_t error = take(*s, "host function", [function, data] { function(data); });
  // Others may wait for what it does, where we do not see them wait.
  if (error == cudaSuccess && s->captured_by == nullptr) drain(*s);
  return result(error);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st;
  (*event)->flags = flags;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const guard locked(device_lock());
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const guard locked(device_lock());
  CUstream_st* s = find(stream);
  if (s == nullptr || event == nullptr) return result(cudaErrorInvalidResourceHandle);
  if (s->captured_by != nullptr) {
    event->captured_by = s->captured_by;
    event->captured_on = stream;
    event->captured = s->captured;
    return cudaSuccess;
  }
  event->captured_by = nullptr;
  auto time = std::make_shared<std::chrono::steady_clock::time_point>();
  event->time = time;
  event->work = s->work;
  event->position = s->work->taken + 1;
  return result(take(*s, "event", [time] { *time = std::chrono::steady_clock::now(); }));
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const guard locked(device_lock());
  CUstream_st* s = find(stream);
  if (s == nullptr || event == nullptr) return result(cudaErrorInvalidResourceHandle);
  if (event->captured_by != nullptr && captures().count(event->captured_by) != 0) {
    if (s->captured_by == nullptr) {  // joins the capture
      s->captured_by = event->captured_by;
      s->captured = s->joined = 0;
    } else if (s->captured_by != event->captured_by) {
      return result(break_capture(s->captured_by, cudaErrorStreamCaptureIsolation));
    }
    if (CUstream_st* other = find(event->captured_on); other != nullptr) other->joined = event->captured;
    return cudaSuccess;
  }
  if (s->captured_by != nullptr) {
    return result(event->work == nullptr ? cudaSuccess
                                         : break_capture(s->captured_by, cudaErrorStreamCaptureIsolation));
  }
  if (event->work == nullptr) return cudaSuccess;
  return result(
      take(*s, "wait", [work = event->work, position = event->position] { run_until(*work, position); }));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const guard locked(device_lock());
  if (event == nullptr) return result(cudaErrorInvalidResourceHandle);
  if (event->captured_by != nullptr) return result(cudaErrorCapturedEvent);
  if (event->work != nullptr) run_until(*event->work, event->position);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const guard locked(device_lock());
  if (event == nullptr) return result(cudaErrorInvalidResourceHandle);
  if (event->captured_by != nullptr) return result(cudaErrorCapturedEvent);
  if (event->work == nullptr || event->work->done >= event->position) return cudaSuccess;
  run_until(*event->work, event->work->done + 1);
  return cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const guard locked(device_lock());
  for (cudaEvent_t event : {start, end}) {
    if (event == nullptr || event->work == nullptr || (event->flags & cudaEventDisableTiming) != 0) {
      return result(cudaErrorInvalidResourceHandle);
    }
    if (event->work->done < event->position) return cudaErrorNotReady;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(*end->time - *start->time).count();
  return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------
// Capture and replay

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const guard locked(device_lock());
  CUstream_st* s = find(stream);
  if (s == nullptr) return result(cudaErrorInvalidResourceHandle);
  if (s == &legacy_stream()) return result(cudaErrorStreamCaptureUnsupported);
  if (s->captured_by != nullptr) return result(cudaErrorIllegalState);
  s->captured_by = std::make_shared<capture>();
  s->captured_by->origin = stream;
  s->captured_by->mode = mode;
  s->captured_by->thread = std::this_thread::get_id();
  captures().insert(s->captured_by);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const guard locked(device_lock());
  *graph = nullptr;
  CUstream_st* s = find(stream);
  if (s == nullptr) return result(cudaErrorInvalidResourceHandle);
  const std::shared_ptr<capture> c = s->captured_by;
  if (c == nullptr) return result(cudaErrorIllegalState);
  if (c->origin != stream) return result(break_capture(c, cudaErrorStreamCaptureUnmatched));
  bool joined = true;
  for (cudaStream_t other : streams()) {
    if (other->captured_by != c) continue;
    joined = joined && (other == stream || other->joined == other->captured);
    other->captured_by = nullptr;
  }
  captures().erase(c);
  if (c->broken) return result(cudaErrorStreamCaptureInvalidated);
  if (!joined) return result(cudaErrorStreamCaptureUnjoined);
  *graph = c->graph.release();
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const guard locked(device_lock());
  const CUstream_st* s = find(stream);
  if (s == nullptr) return result(cudaErrorInvalidResourceHandle);
  *status = s->captured_by == nullptr ? cudaStreamCaptureStatusNone
            : s->captured_by->broken  ? cudaStreamCaptureStatusInvalidated
                                      : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  if (nodes != nullptr) return result(cudaErrorNotSupported);
  *count = graph->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  const guard locked(device_lock());
  if (graph == nullptr) return result(cudaErrorInvalidValue);
  *executable = new CUgraphExec_st{std::make_shared<const std::vector<node>>(graph->nodes)};
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  const guard locked(device_lock());
  if (executable == nullptr) return result(cudaErrorInvalidValue);
  return result(take(stream, "graph", [nodes = executable->nodes] {
    for (const node& n : *nodes) n.work();
  }));
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t executable, cudaGraph_t graph,
                                cudaGraphExecUpdateResultInfo* info) {
  const guard locked(device_lock());
  *info = {};
  bool same = executable->nodes->size() == graph->nodes.size();
  for (std::size_t i = 0; same && i < graph->nodes.size(); ++i) {
    same = (*executable->nodes)[i].name == graph->nodes[i].name;
  }
  info->result = same ? cudaGraphExecUpdateSuccess : cudaGraphExecUpdateErrorTopologyChanged;
  if (!same) return result(cudaErrorGraphExecUpdateFailure);
  executable->nodes = std::make_shared<const std::vector<node>>(graph->nodes);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
