// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The ground the other MPI tests stand on: ranks see each other, and threads are provided.

#include <doctest/doctest.h>

#include <mpi.h>

TEST_CASE("every rank takes part in a sum") {
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  int sum = 0;
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  CHECK(sum == size * (size - 1) / 2);
}

TEST_CASE("a thread of its own may call MPI") {
  int provided = MPI_THREAD_SINGLE;
  MPI_Query_thread(&provided);
  CHECK(provided >= MPI_THREAD_SERIALIZED);
}
