// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-error: context<device::gpu> is defined by <pufferfish/gpu.hpp>: include that header

#include <pufferfish/core/device.hpp>

namespace gpu_context_without_header {
#ifdef PUFFERFISH_FAIL
pufferfish::context<pufferfish::device::gpu> on_a_device;
#endif
}  // namespace gpu_context_without_header
