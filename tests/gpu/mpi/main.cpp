// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The main of MPI tests (tests/mpi/main.cpp), for those that need a device.
#define PUFFERFISH_TEST_NEEDS_DEVICE
#include "../../mpi/main.cpp"
