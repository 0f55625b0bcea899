// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-error: on this device needs the header of that device's back end: <pufferfish/gpu.hpp>

#include <pufferfish/lowrank.hpp>

namespace layer_without_device_header {
#ifdef PUFFERFISH_FAIL
using where = pufferfish::device::gpu;
#else
using where = pufferfish::device::cpu;
#endif

pufferfish::LowRankLinear<float, 8, where> layer(64, 32);
}  // namespace layer_without_device_header
