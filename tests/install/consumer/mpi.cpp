// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Calls into MPI by way of the headers of the component `mpi`, if it is given an argument.
#include <cstdio>
#include <pufferfish/distributed.hpp>

int main(int argc, char**) {
  if (argc > 1) {
    const pufferfish::mpi::environment environment;
    std::printf("rank %d\n", pufferfish::mpi::communicator(MPI_COMM_WORLD).rank());
  }
  std::printf("pufferfish %s\n", PUFFERFISH_VERSION_STRING);
}
