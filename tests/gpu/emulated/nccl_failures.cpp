// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What goes wrong in NCCL, and what the library makes of it: only the emulation fails on request.
#include <pufferfish/gpu/nccl.hpp>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "../mpi/parameters.hpp"

using namespace gpu_test;

namespace {

using hosts = pf::mpi::communicator;
using nccl = pf::gpu::nccl<hosts>;

struct failing {
  explicit failing(const char* where) { setenv("PUFFERFISH_EMULATED_NCCL", where, 1); }
  ~failing() { unsetenv("PUFFERFISH_EMULATED_NCCL"); }
};

}  // namespace

TEST_CASE("emulated nccl: a rank that cannot join is named on all") {
  hosts comm(MPI_COMM_WORLD);
  if (comm.size() == 1) return;
  const int bad = comm.size() - 1;
  const std::string name =
      "rank " + std::to_string(bad) + ": gpu::nccl: ncclCommInitRankConfig: invalid usage (Duplicate";
  for (const double timeout : {0.0, 20.0}) {
    std::optional<failing> fails;
    if (comm.rank() == bad) fails.emplace("init");
    CHECK_THROWS_WITH_AS(nccl(comm, timeout), doctest::Contains(name.c_str()), pf::backend_error);
  }
  CHECK_NOTHROW(static_cast<void>(nccl(comm, 0.0)));
}

TEST_CASE("emulated nccl: a call that fails ends the communicator; contexts tell it") {
  hosts comm(MPI_COMM_WORLD);
  if (comm.size() == 1) return;
  nccl fast(comm);
  pf::gpu_context ctx, other;
  fast.report_to(ctx);
  stream_buffer<float> values(4);
  const std::span<float> all(values.data(), 4);
  {
    const failing fails("call");
    CHECK_THROWS_WITH_AS(fast.all_reduce_sum(all, ctx.stream()),
                         "gpu::nccl: ncclAllReduce: unhandled system error (a cable has been pulled)",
                         pf::backend_error);
  }
  CHECK_THROWS_AS(fast.all_reduce_sum(all, ctx.stream()), pf::backend_error);
  CHECK_THROWS_AS(fast.check(), pf::backend_error);
  CHECK_THROWS_AS(ctx.begin_step(1), pf::backend_error);
  CHECK_THROWS_AS(ctx.synchronize(), pf::backend_error);
  CHECK_NOTHROW(other.synchronize());
  fast.report_to(other);
  CHECK_THROWS_AS(other.synchronize(), pf::backend_error);
}

TEST_CASE("emulated nccl: an error that is found later") {
  hosts comm(MPI_COMM_WORLD);
  if (comm.size() == 1) return;
  {
    nccl fast(comm);
    const failing fails("async");
    CHECK_THROWS_WITH_AS(fast.check(), doctest::Contains("rank 7 is gone"), pf::backend_error);
  }
  comm.barrier();
  // By the thread, while the host does something else.
  nccl fast(comm, 0.5);
  pf::gpu_context ctx;
  odd_parameters<float> net(pf::gpu::device_memory());
  pf::gradient_exchange<float, nccl, pf::device::gpu> exchange(net.store, fast);
  exchange.begin(ctx);
  exchange.finish(ctx);
  ctx.synchronize();
  const failing fails("async");
  bool seen = false;
  for (int i = 0; i < 2000 && !seen; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    try {
      ctx.synchronize();
    } catch (const pf::backend_error& e) {
      seen = std::string(e.what()).find("rank 7 is gone") != std::string::npos;
    }
  }
  CHECK(seen);
  CHECK_THROWS_AS(exchange.begin(ctx), pf::backend_error);
}
