// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The main of every unit test: doctest's, except that a filter which leaves no test is a failure.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>

#include "support/tests_run.hpp"

int main(int argc, char** argv) {
  doctest::Context context(argc, argv);
  const int failed = context.run();
  if (context.shouldExit()) return failed;
  if (failed == 0 && tests_run == 0) {
    std::fputs("no test was run: does a filter name a file that is not here?\n", stderr);
    return 1;
  }
  return failed;
}
