// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-error: a device is pufferfish::device::cpu or pufferfish::device::gpu

#include <pufferfish/core/device.hpp>

namespace unknown_device {
#ifdef PUFFERFISH_FAIL
pufferfish::context<int> on_an_int;
#endif
}  // namespace unknown_device
