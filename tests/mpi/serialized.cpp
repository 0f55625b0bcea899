// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// At MPI_THREAD_SERIALIZED threads call MPI one at a time, whatever exchanges a process has. MPI's profiling
// interface counts the calls that overlap.
#include <doctest/doctest.h>

#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <pufferfish/distributed.hpp>
#include <pufferfish/nn.hpp>

namespace pf = pufferfish;

namespace {

std::atomic<int> inside{0};
std::atomic<std::uint64_t> calls{0}, overlaps{0}, blocking_calls{0};

/// An MPI call under way. Lets another thread run meanwhile, which is what a call that waits for a lock of
/// MPI's own may do.
struct counted {
  counted() {
    ++calls;
    if (inside.fetch_add(1) > 0) ++overlaps;
    std::this_thread::yield();
  }
  ~counted() { inside.fetch_sub(1); }
  counted(const counted&) = delete;
  counted& operator=(const counted&) = delete;
};

}  // namespace

// Every function of MPI's that the library calls, but for those that any thread may call at any time
// (MPI_Initialized, MPI_Finalized). The test's own barriers are counted as well.
#define COUNTED(name, parameters, ...)   \
  extern "C" int MPI_##name parameters { \
    const counted call;                  \
    return PMPI_##name(__VA_ARGS__);     \
  }
#define COUNTED_BLOCKING(name, parameters, ...) \
  extern "C" int MPI_##name parameters {        \
    const counted call;                         \
    ++blocking_calls;                           \
    return PMPI_##name(__VA_ARGS__);            \
  }

extern "C" int MPI_Init_thread(int* argc, char*** argv, int, int* provided) {
  return PMPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, provided);
}
extern "C" int MPI_Query_thread(int* provided) {
  const counted call;
  const int code = PMPI_Query_thread(provided);
  *provided = std::min<int>(*provided, MPI_THREAD_SERIALIZED);
  return code;
}
COUNTED(Test, (MPI_Request * r, int* flag, MPI_Status* s), r, flag, s)
COUNTED(Testall, (int n, MPI_Request r[], int* flag, MPI_Status s[]), n, r, flag, s)
COUNTED(Isend, (const void* b, int n, MPI_Datatype t, int to, int tag, MPI_Comm c, MPI_Request* r), b, n, t,
        to, tag, c, r)
COUNTED(Irecv, (void* b, int n, MPI_Datatype t, int from, int tag, MPI_Comm c, MPI_Request* r), b, n, t, from,
        tag, c, r)
COUNTED(Iprobe, (int from, int tag, MPI_Comm c, int* flag, MPI_Status* s), from, tag, c, flag, s)
COUNTED(Iallreduce, (const void* a, void* b, int n, MPI_Datatype t, MPI_Op o, MPI_Comm c, MPI_Request* r), a,
        b, n, t, o, c, r)
COUNTED(Ibcast, (void* b, int n, MPI_Datatype t, int root, MPI_Comm c, MPI_Request* r), b, n, t, root, c, r)
COUNTED(Iallgather,
        (const void* a, int n, MPI_Datatype t, void* b, int m, MPI_Datatype u, MPI_Comm c, MPI_Request* r), a,
        n, t, b, m, u, c, r)
COUNTED(Ibarrier, (MPI_Comm c, MPI_Request* r), c, r)
COUNTED(Comm_idup, (MPI_Comm c, MPI_Comm* made, MPI_Request* r), c, made, r)
COUNTED(Comm_free, (MPI_Comm * c), c)
COUNTED(Comm_rank, (MPI_Comm c, int* rank), c, rank)
COUNTED(Comm_size, (MPI_Comm c, int* size), c, size)
COUNTED(Comm_set_errhandler, (MPI_Comm c, MPI_Errhandler h), c, h)
COUNTED(Comm_test_inter, (MPI_Comm c, int* flag), c, flag)
COUNTED_BLOCKING(Wait, (MPI_Request * r, MPI_Status* s), r, s)
COUNTED_BLOCKING(Waitall, (int n, MPI_Request r[], MPI_Status s[]), n, r, s)
COUNTED_BLOCKING(Allreduce, (const void* a, void* b, int n, MPI_Datatype t, MPI_Op o, MPI_Comm c), a, b, n, t,
                 o, c)
COUNTED_BLOCKING(Bcast, (void* b, int n, MPI_Datatype t, int root, MPI_Comm c), b, n, t, root, c)
COUNTED_BLOCKING(Allgather,
                 (const void* a, int n, MPI_Datatype t, void* b, int m, MPI_Datatype u, MPI_Comm c), a, n, t,
                 b, m, u, c)
COUNTED_BLOCKING(Barrier, (MPI_Comm c), c)
COUNTED_BLOCKING(Comm_dup, (MPI_Comm c, MPI_Comm* made), c, made)

namespace {

/// A network of its own, exchanged by a communicator of its own.
struct exchanged {
  using exchange_type = pf::gradient_exchange<float, pf::mpi::communicator>;

  exchanged(const pf::exchange_options& options, double timeout) : comm(MPI_COMM_WORLD), net(make_net()) {
    comm.set_timeout(timeout);
    exchange.emplace(net.store(), comm, options);
  }

  static pf::network<float> make_net() {
    pf::Sequential<float> layers;
    for (const char* name : {"fc1", "fc2", "fc3"}) layers.add(name, pf::Linear<float>(50, 50));
    return pf::network<float>{pf::any_layer<float>(std::move(layers))};
  }

  /// False if a mean is wrong.
  bool run(int steps) {
    const float mean = static_cast<float>(comm.size() + 1) / 2.0F;
    for (int step = 0; step < steps; ++step) {
      const std::span<float> gradients = net.store().gradients();
      std::fill(gradients.begin(), gradients.end(), static_cast<float>(comm.rank() + 1));
      exchange->begin(ctx);
      exchange->finish(ctx);
      for (float value : gradients) {
        if (value != mean) return false;
      }
      if (step % 5 == 0) comm.barrier();
    }
    return true;
  }

  pf::mpi::communicator comm;
  pf::network<float> net;
  pf::cpu_context ctx;
  std::optional<exchange_type> exchange;
};

pf::exchange_options options_of(pf::all_reduce_algorithm algorithm) {
  pf::exchange_options options;
  options.plan.emplace().buckets = {4000, 8000};
  options.algorithm = algorithm;
  return options;
}

}  // namespace

TEST_CASE("serialized: two exchanges in two threads never call MPI at the same time, nor block in it") {
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  REQUIRE(level == MPI_THREAD_SERIALIZED);
  CHECK(pf::mpi::call_lock().owns_lock());
  CHECK(pf::mpi::serialized([] { return 7; }) == 7);
  for (const double timeout : {pf::mpi::default_timeout, 0.0}) {
    blocking_calls = 0;
    exchanged first(options_of(pf::all_reduce_algorithm::ring), timeout);
    exchanged second(options_of(pf::all_reduce_algorithm::library), timeout);
    CHECK(first.exchange->with_thread());
    bool right[2] = {false, false};
    overlaps = 0;
    const std::uint64_t before = calls;
    {
      std::thread other([&] { right[1] = second.run(50); });
      right[0] = first.run(50);
      other.join();
    }
    CHECK(right[0]);
    CHECK(right[1]);
    CHECK(overlaps.load() == 0);
    if (first.comm.size() > 1) CHECK(calls - before > 1000);
    CHECK(blocking_calls.load() == 0);
  }
}

TEST_CASE("serialized: communicators that two threads make at once, and the program's own calls") {
  MPI_Comm ours = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &ours);
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  overlaps = 0;
  std::thread other([&] {
    for (int i = 0; i < 10; ++i) pf::mpi::communicator(ours).barrier();
  });
  int size = 0;
  for (int i = 0; i < 10; ++i) {
    pf::mpi::communicator fresh(comm.handle());
    const auto turn = pf::mpi::call_lock();
    MPI_Comm_size(MPI_COMM_WORLD, &size);
  }
  other.join();
  CHECK(size == comm.size());
  CHECK(overlaps.load() == 0);
  MPI_Comm_free(&ours);
}
