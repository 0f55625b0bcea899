// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The main of every MPI test: runs doctest on all ranks; the program fails if any rank does. `--ranks=N` says
// how many were launched: the wrong launcher starts N programs of one rank each, which would pass without a
// word.

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <mpi.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>

#include "../unit/support/tests_run.hpp"

#if defined(PUFFERFISH_TEST_NEEDS_DEVICE)
#include <pufferfish/gpu/runtime/error.hpp>
#endif

namespace {

int launched_ranks(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--ranks=", 8) == 0) return std::atoi(argv[i] + 8);
  }
  return 0;
}

// Sums failures over all ranks. A rank that failed may have left others waiting in a collective call forever:
// after ten seconds it ends the whole job.
int sum_of_failures(int mine, MPI_Comm comm) {
  int sum = 0;
  int done = 0;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Iallreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, comm, &request);
  const auto start = std::chrono::steady_clock::now();
  while (done == 0) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (mine != 0 && std::chrono::steady_clock::now() - start > std::chrono::seconds(10)) MPI_Abort(comm, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  int provided = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm report = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &report);
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(report, &rank);
  MPI_Comm_size(report, &size);

  int failures = 0;
  if (size != launched_ranks(argc, argv)) {
    std::fprintf(stderr, "rank %d: %d ranks in the world, but --ranks=%d: wrong launcher?\n", rank, size,
                 launched_ranks(argc, argv));
    failures = 1;
  }
#if defined(PUFFERFISH_TEST_NEEDS_DEVICE)
  int devices = pufferfish::gpu::device_count();
  MPI_Allreduce(MPI_IN_PLACE, &devices, 1, MPI_INT, MPI_MIN, report);
  if (devices == 0) {  // Meson counts it as skipped
    if (rank == 0) std::puts("no CUDA device on some host: nothing was run");
    MPI_Comm_free(&report);
    MPI_Finalize();
    return 77;
  }
#endif
  std::ostringstream log;
  doctest::Context context(argc, argv);
  context.setCout(&log);
  context.setOption("no-colors", true);
  if (context.run() != 0) failures = 1;
  if (tests_run == 0 && !context.shouldExit()) {
    log << "no test was run: does a filter name a file that is not here?\n";
    failures = 1;
  }
  // Printed before the wait for other ranks, so that a hang does not hide its cause.
  if (failures != 0 || rank == 0)
    std::cout << "rank " << rank << " of " << size << ":\n" << log.str() << std::endl;

  const int failed_ranks = sum_of_failures(failures, report);
  if (rank == 0 && failed_ranks != 0) std::fprintf(stderr, "%d of %d ranks failed\n", failed_ranks, size);
  MPI_Comm_free(&report);
  MPI_Finalize();
  return failed_ranks == 0 ? 0 : 1;
}
