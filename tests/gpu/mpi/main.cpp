// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The main of MPI tests (tests/mpi/main.cpp), for those that need a device.
#define PUFFERFISH_TEST_NEEDS_DEVICE
#include "../../mpi/main.cpp"

#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string>

// Contexts are deterministic, and want NCCL to be. Before anything asks NCCL.
[[maybe_unused]] static const int no_sums_in_switches = setenv("NCCL_NVLS_ENABLE", "0", 0);

// Each rank has a device of its own where there are several: NCCL wants that. Before anything asks CUDA, and
// so by what the driver shows.
[[maybe_unused]] static const bool has_own_device = [] {
  std::error_code none;
  const std::filesystem::directory_iterator devices("/proc/driver/nvidia/gpus", none);
  const auto count = none ? 0 : std::distance(begin(devices), end(devices));
  const char* const rank = std::getenv("OMPI_COMM_WORLD_LOCAL_RANK");
  if (count < 2 || rank == nullptr || std::getenv("CUDA_VISIBLE_DEVICES") != nullptr) return false;
  return setenv("CUDA_VISIBLE_DEVICES", std::to_string(std::atoi(rank) % count).c_str(), 1) == 0;
}();
