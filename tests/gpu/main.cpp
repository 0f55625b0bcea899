// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The main of tests that need a device: 77, which Meson counts as skipped, where there is none.
// `--red-zones`: every block of scratch and tape is an allocation of its own, so that tools find accesses
// past its end (stack_arena::red_zones).
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <cstring>

#include <pufferfish/core/arena.hpp>
#include <pufferfish/gpu/runtime/error.hpp>

int main(int argc, char** argv) {
  doctest::Context context(argc, argv);
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--red-zones") == 0) pufferfish::stack_arena::red_zones() = true;
  }
  if (pufferfish::gpu::device_count() == 0) {
    std::puts("no CUDA device: nothing was run");
    return 77;
  }
  return context.run();
}
