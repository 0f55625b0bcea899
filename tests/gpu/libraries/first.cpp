// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "library.hpp"

extern "C" {
const void* launcher_of_first() { return library::launcher(); }
const void* kernel_of_first() { return library::kernel(); }
int devices_of_first() { return pufferfish::gpu::device_count(); }
int compute_in_first() { return library::compute(2.0F); }
}
