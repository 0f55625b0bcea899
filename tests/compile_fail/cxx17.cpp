// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// fail-args: -std=c++17
// expected-error: pufferfish needs C++20: add -std=c++20
// last-error: stopped_by_the_error_above

#include <pufferfish/lowrank.hpp>
#include <pufferfish/nn.hpp>
