// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "library.hpp"

extern "C" {
const void* launcher_of_second() { return library::launcher(); }
const void* kernel_of_second() { return library::kernel(); }
int devices_of_second() { return pufferfish::gpu::device_count(); }
int compute_in_second() { return library::compute(3.0F); }
}
