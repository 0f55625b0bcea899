// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The part of NCCL's C interface that the library uses, for processes whose devices are emulated: messages
/// go by MPI, when the stream gets there. Every rank adds in the order of the ranks. As in NCCL, an operation
/// that not all ranks take part in hangs until its communicator is aborted.
///
/// PUFFERFISH_EMULATED_NCCL says what shall go wrong, for tests of that: "init" (of this rank), "call" (every
/// collective), "async" (noticed by ncclCommGetAsyncError).

#include <mpi.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "device.hpp"

// Outlives the handle that NCCL's caller has: operations in streams have a share.
struct ncclComm {
  MPI_Comm group = MPI_COMM_NULL;
  int rank = 0, size = 1;
  bool blocks = true;
  std::atomic<bool> aborted{false};
  std::atomic<int> polls_until_done{0};                     // of a call that does not block
  std::shared_ptr<ncclComm> self;                           // the handle's share
  std::shared_ptr<int> captured = std::make_shared<int>();  // shared by operations in graphs
  ~ncclComm() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (group != MPI_COMM_NULL && finalized == 0 && !aborted) MPI_Comm_free(&group);
  }
};

namespace {

using bytes = std::vector<unsigned char>;
using operation = std::function<void(ncclComm&)>;

thread_local std::string last_error;

bool shall_fail(std::string_view where) {
  const char* setting = std::getenv("PUFFERFISH_EMULATED_NCCL");
  return setting != nullptr && where == setting;
}

ncclResult_t fail(ncclResult_t result, const char* text) {
  last_error = text;
  return result;
}

// What a call returns that does not block: it is done at the second look.
ncclResult_t started(ncclComm& comm) {
  if (comm.blocks) return ncclSuccess;
  comm.polls_until_done = 2;
  return ncclInProgress;
}

/// Messages under way, in memory of their own: they may outlive an operation that is aborted.
class messages {
 public:
  explicit messages(ncclComm& comm) : comm_(comm) {}
  void send(const void* data, std::size_t size, int to) {
    const auto* from = static_cast<const unsigned char*>(data);
    sent_.push_back(std::make_unique<bytes>(from, from + size));
    MPI_Isend(sent_.back()->data(), static_cast<int>(size), MPI_BYTE, to, 0, comm_.group,
              &requests_.emplace_back());
  }
  void receive(void* data, std::size_t size, int from) {
    received_.push_back({std::make_unique<bytes>(size), data});
    MPI_Irecv(received_.back().message->data(), static_cast<int>(size), MPI_BYTE, from, 0, comm_.group,
              &requests_.emplace_back());
    receives_.push_back(requests_.size() - 1);
  }
  /// False if the communicator was aborted before all had come.
  bool wait() {
    for (int done = 0;;) {
      MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE);
      if (done != 0) break;
      if (comm_.aborted) return give_up();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    for (const arrival& a : received_) std::memcpy(a.to, a.message->data(), a.message->size());
    return true;
  }

 private:
  struct arrival {
    std::unique_ptr<bytes> message;
    void* to;
  };
  bool give_up() {
    for (const std::size_t i : receives_) {
      if (requests_[i] != MPI_REQUEST_NULL) MPI_Cancel(&requests_[i]);
    }
    for (MPI_Request& request : requests_) {
      if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
    }
    for (auto& message : sent_) static_cast<void>(message.release());
    for (arrival& a : received_) static_cast<void>(a.message.release());
    return false;
  }

  ncclComm& comm_;
  std::vector<MPI_Request> requests_;
  std::vector<std::size_t> receives_;
  std::vector<std::unique_ptr<bytes>> sent_;
  std::vector<arrival> received_;
};

std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

template <class T>
void combine(T* to, const T* from, std::size_t count, ncclRedOp_t how) {
  for (std::size_t i = 0; i < count; ++i) {
    if (how == ncclSum) to[i] = static_cast<T>(to[i] + from[i]);
    if (how == ncclMin && from[i] < to[i]) to[i] = from[i];
    if (how == ncclMax && to[i] < from[i]) to[i] = from[i];
  }
}
void combine(void* to, const void* from, std::size_t count, ncclDataType_t type, ncclRedOp_t how) {
  const auto as = [&]<class T>(T) { combine(static_cast<T*>(to), static_cast<const T*>(from), count, how); };
  switch (type) {
    case ncclInt32:
      return as(std::int32_t{});
    case ncclUint32:
      return as(std::uint32_t{});
    case ncclInt64:
      return as(std::int64_t{});
    case ncclUint64:
      return as(std::uint64_t{});
    case ncclFloat32:
      return as(float{});
    case ncclFloat64:
      return as(double{});
    default:
      return;
  }
}

// What is between ncclGroupStart and ncclGroupEnd on this thread.
struct point_to_point {
  void* data;
  std::size_t size;
  int peer;
  bool sends;
  ncclComm* comm;
  cudaStream_t stream;
};
thread_local std::vector<point_to_point> group;
thread_local int group_depth = 0;

ncclResult_t submit(ncclComm* comm, cudaStream_t stream, const char* name, operation work) {
  if (comm == nullptr || comm->aborted) return fail(ncclInvalidArgument, "this communicator was aborted");
  if (shall_fail("call")) return fail(ncclSystemError, "a cable has been pulled");
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &capture);
  const auto share = capture == cudaStreamCaptureStatusNone ? nullptr : comm->captured;
  const cudaError_t error =
      emulated_device::submit(stream, name, [comm = comm->self, share, work = std::move(work)] {
        if (!comm->aborted) work(*comm);
      });
  if (error != cudaSuccess) return fail(ncclUnhandledCudaError, cudaGetErrorString(error));
  return started(*comm);
}

ncclResult_t end_group() {
  std::vector<point_to_point> all;
  all.swap(group);
  if (all.empty()) return ncclSuccess;
  return submit(all[0].comm, all[0].stream, "messages", [all](ncclComm& comm) {
    messages under_way(comm);
    for (const point_to_point& p : all) {
      if (p.sends) under_way.send(p.data, p.size, p.peer);
    }
    for (const point_to_point& p : all) {
      if (!p.sends) under_way.receive(p.data, p.size, p.peer);
    }
    under_way.wait();
  });
}

ncclResult_t add_to_group(const point_to_point& p) {
  if (p.comm == nullptr) return ncclInvalidArgument;
  if (p.peer < 0 || p.peer >= p.comm->size) return fail(ncclInvalidArgument, "no such peer");
  group.push_back(p);
  return group_depth > 0 ? ncclSuccess : end_group();
}

}  // namespace

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "operation in progress";
    default:
      return "unknown result code";
  }
}
const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  std::strcpy(id->internal, "emulated");
  return ncclSuccess;
}

// Every process of MPI's world takes part.
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  int world = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  if (std::strcmp(id.internal, "emulated") != 0)
    return fail(ncclInvalidArgument, "this id is not of the emulation");
  if (size != world) return fail(ncclInvalidUsage, "the emulation has groups of all processes only");
  const auto made = std::make_shared<ncclComm>();
  made->rank = rank;
  made->size = size;
  made->blocks = config->blocking != 0;
  MPI_Comm_split(MPI_COMM_WORLD, 0, rank, &made->group);
  if (shall_fail("init")) return fail(ncclInvalidUsage, "Duplicate GPU detected");
  made->self = made;
  *comm = made.get();
  return started(*made);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (shall_fail("async")) {
    *error = fail(ncclRemoteError, "rank 7 is gone");
  } else {
    *error =
        comm->polls_until_done > 0 && comm->polls_until_done.fetch_sub(1) > 1 ? ncclInProgress : ncclSuccess;
  }
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) { return started(*comm); }
// As NCCL, it waits for graphs with work of the communicator to go; not for ever.
static void await_graphs(const ncclComm& comm) {
  for (int i = 0; comm.captured.use_count() > 1; ++i) {
    if (i == 10000) {
      std::fputs("emulated NCCL: a graph outlives its communicator\n", stderr);
      std::abort();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  await_graphs(*comm);
  comm->self.reset();
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const std::shared_ptr<ncclComm> kept = comm->self;
  comm->aborted = true;
  await_graphs(*comm);
  comm->self.reset();
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() { return --group_depth > 0 ? ncclSuccess : end_group(); }

ncclResult_t ncclSend(const void* data, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add_to_group({const_cast<void*>(data), count * size_of(type), peer, true, comm, stream});
}
ncclResult_t ncclRecv(void* data, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add_to_group({data, count * size_of(type), peer, false, comm, stream});
}

ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t how, ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, "all-reduce", [=](ncclComm& c) {
    const std::size_t size = count * size_of(type);
    std::vector<bytes> all(static_cast<std::size_t>(c.size), bytes(size));
    std::memcpy(all[static_cast<std::size_t>(c.rank)].data(), from, size);
    messages under_way(c);
    for (int rank = 0; rank < c.size; ++rank) {
      if (rank == c.rank) continue;
      under_way.send(from, size, rank);
      under_way.receive(all[static_cast<std::size_t>(rank)].data(), size, rank);
    }
    if (!under_way.wait()) return;
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      combine(all[0].data(), all[rank].data(), count, type, how);
    }
    std::memcpy(to, all[0].data(), size);
  });
}

ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, stream, "broadcast", [=](ncclComm& c) {
    const std::size_t size = count * size_of(type);
    messages under_way(c);
    for (int rank = 0; c.rank == root && rank < c.size; ++rank) {
      if (rank != root) under_way.send(from, size, rank);
    }
    if (c.rank != root) under_way.receive(to, size, root);
    if (c.rank == root && to != from) std::memmove(to, from, size);
    under_way.wait();
  });
}
