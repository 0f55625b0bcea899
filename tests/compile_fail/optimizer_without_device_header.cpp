// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-error: optimizers on device::gpu are defined by <pufferfish/gpu.hpp>: include that header

#include <pufferfish/optim/sgd.hpp>

namespace optimizer_without_device_header {
#ifdef PUFFERFISH_FAIL
using where = pufferfish::device::gpu;
#else
using where = pufferfish::device::cpu;
#endif

using optimizer = pufferfish::SGD<float, where>;
constexpr auto size = sizeof(optimizer);
}  // namespace optimizer_without_device_header
