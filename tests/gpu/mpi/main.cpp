// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The main of MPI tests (tests/mpi/main.cpp), for those that need a device.
#define PUFFERFISH_TEST_NEEDS_DEVICE
#include "../../mpi/main.cpp"

// Contexts are deterministic, and want NCCL to be. Before anything asks NCCL.
[[maybe_unused]] static const int no_sums_in_switches = setenv("NCCL_NVLS_ENABLE", "0", 0);
