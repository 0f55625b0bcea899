// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Calls into zlib by way of the headers of the component `train`.
#include <cstdio>
#include <exception>
#include <pufferfish/train.hpp>

int main() {
  try {
    pufferfish::load_mnist_layout("/nowhere", true);
  } catch (const pufferfish::io_error& e) {
    std::printf("pufferfish %s: %s\n", PUFFERFISH_VERSION_STRING, e.what());
    return 0;
  }
  return 1;
}
