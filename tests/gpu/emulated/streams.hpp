// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Streams, events and captures of the emulated device (streams.cpp), and what the other calls of the runtime
/// need of them.

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device.hpp"

namespace emulated_device {

/// An operation of a graph.
struct node {
  std::string name;
  operation work;
};

/// Operations of a stream in their order, and how far it is.
struct queue {
  std::deque<operation> waiting;
  std::uint64_t taken = 0, done = 0;  // operations
};

struct capture;

}  // namespace emulated_device

struct CUgraph_st {
  std::vector<emulated_device::node> nodes;
};

struct CUgraphExec_st {
  // Those of a launch under way may be replaced meanwhile.
  std::shared_ptr<const std::vector<emulated_device::node>> nodes;
};

struct CUstream_st {
  unsigned flags = 0;
  bool late = false;  // executes nothing before it is waited for
  std::shared_ptr<emulated_device::queue> work = std::make_shared<emulated_device::queue>();
  std::shared_ptr<emulated_device::capture> captured_by;
  // Operations of this stream in its capture; those of them that another stream waits for.
  std::uint64_t captured = 0, joined = 0;
};

struct CUevent_st {
  unsigned flags = 0;
  std::shared_ptr<emulated_device::queue> work;  // null: never recorded
  std::uint64_t position = 0;
  std::shared_ptr<std::chrono::steady_clock::time_point> time;
  std::shared_ptr<emulated_device::capture> captured_by;
  cudaStream_t captured_on = nullptr;
  std::uint64_t captured = 0;
};

namespace emulated_device {

/// From cudaStreamBeginCapture to cudaStreamEndCapture.
struct capture {
  cudaStream_t origin = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  std::unique_ptr<CUgraph_st> graph = std::make_unique<CUgraph_st>();
  bool broken = false;
};

using guard = std::lock_guard<std::recursive_mutex>;

/// What a call returns: `error`, which cudaGetLastError will tell, too.
cudaError_t result(cudaError_t error);

/// Null where there is no such stream.
CUstream_st* find(cudaStream_t stream);

/// Takes an operation into a stream or its capture.
cudaError_t take(CUstream_st& stream, const char* name, operation work);
cudaError_t take(cudaStream_t stream, const char* name, operation work);

/// Executes what a stream has taken; what all have.
void drain(CUstream_st& stream);
void drain_all();

/// Makes a capture useless, and returns why.
cudaError_t break_capture(capture& c, cudaError_t why);
/// What a call that could interfere with a capture returns: an error where there is one that forbids it.
cudaError_t unsafe_call();

}  // namespace emulated_device
