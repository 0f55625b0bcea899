// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The main of tests that need a device: 77, which Meson counts as skipped, where there is none.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>

#include <pufferfish/gpu/error.hpp>

int main(int argc, char** argv) {
  doctest::Context context(argc, argv);
  if (pufferfish::gpu::device_count() == 0) {
    std::puts("no CUDA device: nothing was run");
    return 77;
  }
  return context.run();
}
