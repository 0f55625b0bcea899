// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// cuDNN for benchmarks on a device, in a source of its own: its front end takes long to compile.
#include "device_steps.hpp"

#include <pufferfish/gpu/ops/conv.hpp>
#if defined(PUFFERFISH_BENCH_CUDNN)
#include <pufferfish/gpu/cudnn.hpp>
#endif

namespace bench {

#if defined(PUFFERFISH_BENCH_CUDNN)
std::size_t device_step::cudnn_version() { return cudnnGetVersion(); }
std::unique_ptr<pufferfish::gpu::conv_library> make_cudnn(const pufferfish::gpu_context& ctx) {
  return std::make_unique<pufferfish::gpu::cudnn>(ctx);
}
#else
std::size_t device_step::cudnn_version() { return 0; }
std::unique_ptr<pufferfish::gpu::conv_library> make_cudnn(const pufferfish::gpu_context&) { return nullptr; }
#endif

}  // namespace bench
