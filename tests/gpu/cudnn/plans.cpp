// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Graphs, engines and plans of cuDNN itself for all convolutions of ResNet-18, without a device: cuDNN builds
// plans for a device of which it has only a description.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <pufferfish/gpu/cudnn_graph.hpp>

namespace {

namespace gpu = pufferfish::gpu;
using gpu::detail::conv_job;
using gpu::detail::conv_pass;
using pufferfish::index_t;

/// An H100 in the form of cudnn_frontend::DeviceProperties::serialize.
constexpr std::string_view h100 = R"({
  "deviceName": "NVIDIA H100 80GB HBM3", "deviceVer": 900, "driverVer": 13000, "cudaDeviceId": 0, "pciDeviceId": 0,
  "isTccDriver": 0, "supportCoopLaunch": 1, "multiProcessorCount": 132, "warpSize": 32, "maxGridSize": [2147483647, 65535, 65535],
  "maxBlockSize": [1024, 1024, 64], "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "maxCtasPerSM": 32,
  "regsPerBlock": 65536, "maxRegistersPerSM": 65536, "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
  "reservedSharedMemoryPerBlock": 1024, "l2CacheSize": 52428800, "totalGlobalMem": 85029158912, "smClockRateKHz": 1980000,
  "memClockRateKHz": 2619000
})";

std::shared_ptr<const cudnn_frontend::DeviceProperties> properties() {
  auto made = std::make_shared<cudnn_frontend::DeviceProperties>();
  auto status = made->deserialize(std::vector<std::uint8_t>(h100.begin(), h100.end()));
  REQUIRE_MESSAGE(status.is_good(), status.get_message());
  return made;
}

gpu::kernels::conv_geometry geometry(int in, int out, int pixels, int kernel, int stride) {
  const int to = pixels / stride, padding = kernel / 2;
  return {128, pixels, pixels, in, to, to, out, kernel, kernel, stride, stride, padding, padding, 1, 1};
}

/// The dense convolutions of ResNet-18 on 32 x 32 pixels that are not plain products, batch 128.
std::vector<gpu::kernels::conv_geometry> resnet18() {
  std::vector<gpu::kernels::conv_geometry> all{geometry(3, 64, 32, 3, 1), geometry(64, 64, 32, 3, 1)};
  for (int in = 64, pixels = 32; in < 512; in *= 2, pixels /= 2) {
    all.push_back(geometry(in, 2 * in, pixels, 3, 2));
    all.push_back(geometry(in, 2 * in, pixels, 1, 2));
    all.push_back(geometry(2 * in, 2 * in, pixels / 2, 3, 1));
  }
  return all;
}

struct arithmetic {
  const char* name;
  cudaDataType_t type;
  gpu::math_mode math;
};
constexpr arithmetic arithmetics[] = {{"fp32", CUDA_R_32F, gpu::math_mode::fp32},
                                      {"tf32", CUDA_R_32F, gpu::math_mode::tf32},
                                      {"bf16", CUDA_R_16BF, gpu::math_mode::fp32},
                                      {"fp16", CUDA_R_16F, gpu::math_mode::fp32}};
constexpr const char* pass_names[] = {"output", "gradient of x", "gradient of w"};

/// The name of the first plan, "" if there is none.
std::string first_plan(const conv_job& job, const arithmetic& how, bool deterministic) {
  const auto device = properties();
  auto graph = gpu::detail::conv_graph(nullptr, job);
  for (const auto& engine : gpu::detail::conv_engines(graph, how.type, how.math, deterministic, device)) {
    const auto config = engine->get_backend_descriptor();
    if (how.type == CUDA_R_32F && how.math == gpu::math_mode::fp32) {
      CHECK(!cudnn_frontend::hasNumericalNote<CUDNN_NUMERICAL_NOTE_TENSOR_CORE>(config));
    }
    if (deterministic)
      CHECK(!cudnn_frontend::hasNumericalNote<CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC>(config));
    const auto plan = gpu::detail::conv_plan(nullptr, graph, engine, device);
    if (plan) {
      CHECK(plan->getWorkspaceSize() <= std::int64_t{1} << 30);
      return plan->getTag();
    }
  }
  return "";
}

}  // namespace

TEST_CASE("cudnn plans: ResNet-18 on a described H100") {
  std::printf("cuDNN %zu, front end %d\n", cudnnGetVersion(), CUDNN_FRONTEND_VERSION);
  for (const arithmetic& how : arithmetics) {
    for (const auto& g : resnet18()) {
      for (const conv_pass pass : {conv_pass::forward, conv_pass::input, conv_pass::weight}) {
        const auto* const name = pass_names[static_cast<std::size_t>(pass)];
        CAPTURE(how.name);
        CAPTURE(name);
        CAPTURE(g.in_channels);
        CAPTURE(g.out_channels);
        CAPTURE(g.kernel_height);
        const std::string plan = first_plan({{g, how.type}, pass, false}, how, true);
        std::printf("%s, %s, %d x %d, %d to %d channels, %d x %d taps, stride %d: %s\n", how.name, name,
                    g.in_height, g.in_width, g.in_channels, g.out_channels, g.kernel_height, g.kernel_width,
                    g.stride_height, plan.empty() ? "no plan" : plan.c_str());
        // For such gradients, in float from 16 bits, cuDNN 9.19 has only engines that it compiles at run
        // time, with the driver of a device.
        const bool needs_driver = pass == conv_pass::weight && how.type != CUDA_R_32F;
        CHECK((needs_driver || !plan.empty()));
        if (pass == conv_pass::weight) continue;
        CHECK(!first_plan({{g, how.type}, pass, true}, how, false).empty());
      }
    }
  }
}
