// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// fail-args: -std=c++17
// expected-error: pufferfish needs C++20: add -std=c++20

#include <pufferfish/core/tensor.hpp>
