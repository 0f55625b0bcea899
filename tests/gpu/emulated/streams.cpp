// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Streams, events, capture and replay. A non-blocking stream executes nothing before it is waited for,
/// so that a missing wait shows up as a wrong result; PUFFERFISH_EMULATED_STREAMS=eager executes everything
/// at once. Others execute at once, as the legacy stream would make them.

#include "streams.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace emulated_device {

namespace {

thread_local cudaError_t last_error = cudaSuccess;

CUstream_st& legacy_stream() {
  static auto* stream = new CUstream_st;
  return *stream;
}
// In the order in which they were made.
std::vector<cudaStream_t>& streams() {
  static auto* all = new std::vector<cudaStream_t>;
  return *all;
}
std::vector<std::shared_ptr<capture>>& captures() {
  static auto* all = new std::vector<std::shared_ptr<capture>>;
  return *all;
}

template <class T>
bool contains(const std::vector<T>& all, const T& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

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

// What a call that waits for the legacy stream returns.
cudaError_t implicit_call() {
  for (const auto& c : captures()) {
    if ((c->origin->flags & cudaStreamNonBlocking) == 0)
      return break_capture(*c, cudaErrorStreamCaptureImplicit);
  }
  return cudaSuccess;
}

}  // namespace

std::recursive_mutex& device_lock() {
  static auto* lock = new std::recursive_mutex;
  return *lock;
}

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

CUstream_st* find(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread)
    return &legacy_stream();
  return contains(streams(), stream) ? stream : nullptr;
}

cudaError_t break_capture(capture& c, cudaError_t why) {
  c.broken = true;
  return why;
}

cudaError_t unsafe_call() {
  for (const auto& c : captures()) {
    const bool mine = c->thread == std::this_thread::get_id();
    if (c->mode == cudaStreamCaptureModeGlobal || (c->mode == cudaStreamCaptureModeThreadLocal && mine)) {
      return break_capture(*c, cudaErrorStreamCaptureUnsupported);
    }
  }
  return cudaSuccess;
}

void drain(CUstream_st& stream) { run_until(*stream.work, stream.work->taken); }
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

cudaError_t submit(cudaStream_t stream, const char* name, operation work) {
  const guard locked(device_lock());
  return take(stream, name, std::move(work));
}

}  // namespace emulated_device

using namespace emulated_device;

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

// ---------------------------------------------------------------------------------------------------------
// Streams and events

cudaError_t cudaDeviceSynchronize() {
  const guard locked(device_lock());
  if (!captures().empty())
    return result(break_capture(*captures().front(), cudaErrorStreamCaptureUnsupported));
  drain_all();
  emulated_device::check_guards();
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  const guard locked(device_lock());
  const char* setting = std::getenv("PUFFERFISH_EMULATED_STREAMS");
  const bool eager = setting != nullptr && std::string_view(setting) == "eager";
  *stream = new CUstream_st;
  (*stream)->flags = flags;
  (*stream)->late = !eager && (flags & cudaStreamNonBlocking) != 0;
  streams().push_back(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const guard locked(device_lock());
  if (!contains(streams(), stream)) return result(cudaErrorInvalidResourceHandle);
  if (stream->captured_by != nullptr) stream->captured_by->broken = true;
  drain(*stream);
  std::erase(streams(), stream);
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
    return result(break_capture(*s->captured_by, cudaErrorStreamCaptureUnsupported));
  drain(*s);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const guard locked(device_lock());
  CUstream_st* s = find(stream);
  if (s == nullptr) return result(cudaErrorInvalidResourceHandle);
  if (s->captured_by != nullptr)
    return result(break_capture(*s->captured_by, cudaErrorStreamCaptureUnsupported));
  if (s->work->done == s->work->taken) return cudaSuccess;
  run_until(*s->work, s->work->done + 1);  // repeated queries complete the stream
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
  if (event->captured_by != nullptr && contains(captures(), event->captured_by)) {
    if (s->captured_by == nullptr) {  // joins the capture
      s->captured_by = event->captured_by;
      s->captured = s->joined = 0;
    } else if (s->captured_by != event->captured_by) {
      return result(break_capture(*s->captured_by, cudaErrorStreamCaptureIsolation));
    }
    if (CUstream_st* other = find(event->captured_on); other != nullptr) other->joined = event->captured;
    return cudaSuccess;
  }
  if (s->captured_by != nullptr) {
    return result(event->work == nullptr ? cudaSuccess
                                         : break_capture(*s->captured_by, cudaErrorStreamCaptureIsolation));
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
  captures().push_back(s->captured_by);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const guard locked(device_lock());
  *graph = nullptr;
  CUstream_st* s = find(stream);
  if (s == nullptr) return result(cudaErrorInvalidResourceHandle);
  const std::shared_ptr<capture> c = s->captured_by;
  if (c == nullptr) return result(cudaErrorIllegalState);
  if (c->origin != stream) return result(break_capture(*c, cudaErrorStreamCaptureUnmatched));
  bool joined = true;
  for (cudaStream_t other : streams()) {
    if (other->captured_by != c) continue;
    joined = joined && (other == stream || other->joined == other->captured);
    other->captured_by = nullptr;
  }
  std::erase(captures(), c);
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
  // Prints how often each operation occurs; `only`: then ends the process, without having run the operations.
  if (const char* print = std::getenv("PUFFERFISH_EMULATED_GRAPHS"); print != nullptr) {
    std::map<std::string, int> counts;
    for (const node& n : graph->nodes) ++counts[n.name];
    for (const auto& [name, count] : counts) std::fprintf(stderr, "%5d %s\n", count, name.c_str());
    std::fprintf(stderr, "%5zu operations\n", graph->nodes.size());
    if (std::string_view(print) == "only") std::_Exit(0);
  }
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
// CUDA lets a launch under way end first. What the launch reads and writes then outlives the graph's owner by
// accident.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  const guard locked(device_lock());
  if (executable != nullptr && executable->nodes.use_count() > 1) {
    std::fprintf(stderr, "emulated device: a graph is destroyed while a launch of it has not ended\n");
    std::abort();
  }
  delete executable;
  return cudaSuccess;
}
