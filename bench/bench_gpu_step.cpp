// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// This library's side of bench/gpu_step: answers requests for single measurements on a device, one JSON
// object per line. Without a device: prints a message and exits with status 77.
//   {"work": "machine"}
//   {"work": "rates", "tiny": false}                 copies within the device, products in each precision
//   {"work": "step", "network": "resnet18", "mode": "hybrid", "batch": 128, "precision": "tf32", "steps": 20,
//    "captured": true, "cudnn": false, "overlap": false, "copies": true, "together": true,
//    "parallel": false, "tiny": false}
//          milliseconds a step, of `steps` in a row; the number of operations in a captured step; copies:
//          whether operands of products are copied to aligned rows; together: whether all time steps of an
//          LSTM are one launch (gpu/runtime/product_costs.hpp); parallel: whether gradients of weights and of
//          inputs are computed in two streams (gpu::context_options::parallel_gradients)
//   {"work": "layers", ... as step, "repeats": 20, "samples": 5}
//   {"work": "convolutions", "batch": 128, "tiny": false}   those of ResNet-18, by each kind of kernels
//   {"work": "attention", "depth": 64, "dropout": 0.0, "tiny": false}   each pass, by each kind of kernels
//   {"work": "forget"}                               frees the memory of kept steps

#include <pufferfish/gpu/kernels/overlap.hpp>
#include <pufferfish/gpu/ops/products.hpp>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "common/device_attention.hpp"
#include "common/device_convolutions.hpp"
#include "common/device_steps.hpp"
#include "common/line_server.hpp"
#include "common/machine.hpp"
#include "common/timing.hpp"

namespace {

using namespace bench;
namespace pf = pufferfish;

/// "Driver Version" of the kernel module; empty if the system does not report it.
std::string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  std::getline(file, line);
  return line;
}

answer machine(const request&) {
  cudaDeviceProp properties{};
  pf::gpu::check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  int of_driver = 0, of_runtime = 0;
  pf::gpu::check(cudaDriverGetVersion(&of_driver), "cudaDriverGetVersion");
  pf::gpu::check(cudaRuntimeGetVersion(&of_runtime), "cudaRuntimeGetVersion");
  return {{"device", properties.name},
          {"multiprocessors", properties.multiProcessorCount},
          {"memory_gib", static_cast<double>(properties.totalGlobalMem) / (1 << 30)},
          {"driver", driver_version()},
          {"cuda_of_driver", of_driver},
          {"cuda_runtime", of_runtime},
          {"cudnn", device_step::cudnn_version()},
          {"compiler", __VERSION__},
          {"flags", PUFFERFISH_BENCH_FLAGS},
          {"processor", processor_name()}};
}

/// Seconds of `work`: the least of several measurements by events, which shows what the device can do.
template <class Work>
double least_seconds(pf::gpu_context& ctx, int repeats, Work&& work) {
  pf::gpu::event start(pf::gpu::event_use::timing), end(pf::gpu::event_use::timing);
  double least = INFINITY;
  for (int sample = -2; sample < 5; ++sample) {
    start.record(ctx.stream());
    for (int i = 0; i < repeats; ++i) work();
    end.record(ctx.stream());
    ctx.synchronize();
    if (sample >= 0) least = std::min(least, end.seconds_since(start) / repeats);
  }
  return least;
}

double copy_bytes_a_second(pf::gpu_context& ctx, bool tiny) {
  const index_t bytes = tiny ? 1 << 16 : index_t{1} << 30;
  pf::memory_block<std::byte> from(pf::gpu::device_memory(), bytes), to(pf::gpu::device_memory(), bytes);
  const double seconds = least_seconds(ctx, 4, [&] {
    pf::gpu::check(cudaMemcpyAsync(to.data(), from.data(), static_cast<std::size_t>(bytes),
                                   cudaMemcpyDeviceToDevice, ctx.stream()),
                   "cudaMemcpyAsync on the device");
  });
  return 2.0 * static_cast<double>(bytes) / seconds;  // read and written
}

/// FLOP/s of a square product.
template <class T>
double product_rate(pf::gpu_context& ctx, bool tiny, cublasComputeType_t compute) {
  const index_t n = tiny ? 32 : 8192;
  pf::memory_block<T> a(pf::gpu::device_memory(), n * n), b(pf::gpu::device_memory(), n * n),
      c(pf::gpu::device_memory(), n * n);
  fill_device(a.span(), 1);  // with zeros, a device needs less power and is faster
  fill_device(b.span(), 2);
  pf::gpu::detail::blas_product product;
  product.m = product.n = product.k = product.c_step = n;
  product.a = {a.data(), n, false};
  product.b = {b.data(), n, false};
  product.c = c.data();
  product.type = product.c_type = pf::gpu::detail::element<T>::type;
  product.compute = compute;
  const auto order = static_cast<double>(n);
  return 2 * order * order * order / least_seconds(ctx, 3, [&] { ctx.blas().multiply(product); });
}

answer rates(const request& asked) {
  const bool tiny = asked.value("tiny", false);
  pf::gpu_context ctx;
  const auto tflops = [&]<class T>(T, cublasComputeType_t compute) {
    return product_rate<T>(ctx, tiny, compute) * 1e-12;
  };
  return {{"copy_gbs", copy_bytes_a_second(ctx, tiny) * 1e-9},
          {"tflops",
           {{"fp32", tflops(0.0F, CUBLAS_COMPUTE_32F)},
            {"tf32", tflops(0.0F, CUBLAS_COMPUTE_32F_FAST_TF32)},
            {"bf16", tflops(pf::gpu::bf16{}, CUBLAS_COMPUTE_32F)},
            {"fp16", tflops(pf::gpu::fp16{}, CUBLAS_COMPUTE_32F)}}}};
}

device_case case_of(const request& asked) {
  device_case which;
  which.network = asked.at("network");
  which.mode = asked.value("mode", which.mode);
  which.batch = asked.at("batch");
  which.captured = asked.value("captured", true);
  which.cudnn = asked.value("cudnn", false);
  which.parallel = asked.value("parallel", false);
  which.tiny = asked.value("tiny", false);
  which.precision = asked.value("precision", which.precision);
  return which;
}

/// Steps that have run before, because candidates run in turns. All variants of one case are kept;
/// another case replaces them.
class kept_steps {
 public:
  device_step& of(const request& asked) {
    const device_case which = case_of(asked);
    const std::string name = which.network + "/" + which.mode + "/" + std::to_string(which.batch) + "/" +
                             which.precision + (which.tiny ? "/tiny" : "");
    if (name != name_) steps_.clear();
    name_ = name;
    const bool overlap = asked.value("overlap", false);
    pf::gpu::kernels::overlap_launches(overlap);  // of direct launches and of a capture
    const bool copies = asked.value("copies", true);
    const bool together = asked.value("together", true);
    std::unique_ptr<device_step>& step =
        steps_[{which.captured, which.cudnn, which.parallel, overlap, copies, together}];
    if (step == nullptr) {
      std::unique_ptr<device_step> made = make_device_step(which);
      pf::gpu::product_costs& costs = made->context().blas().costs();
      if (!copies) costs.launch = INFINITY;
      if (!together) costs.fewest_steps = std::numeric_limits<int>::max();
      for (int i = 0; i < 6; ++i) made->run();  // direct, captured, replayed
      made->context().synchronize();
      step = std::move(made);
    }
    return *step;
  }
  void forget() { steps_.clear(); }

 private:
  // By captured, cudnn, parallel, overlap, copies, together.
  std::map<std::tuple<bool, bool, bool, bool, bool, bool>, std::unique_ptr<device_step>> steps_;
  std::string name_;
};

answer time_step(device_step& step, const request& asked) {
  const int steps = asked.value("steps", 20);
  step.context().synchronize();
  const auto start = clock::now();
  for (int i = 0; i < steps; ++i) step.run();
  step.context().synchronize();
  const double seconds = seconds_since(start) / steps;
  return {{"ms", seconds * 1e3},
          {"parameters", step.parameters()},
          {"items", step.items()},
          {"captured", step.captured()},
          {"operations", step.operations()},
          {"gflop", 6e-9 * step.macs()},
          {"working_mib", static_cast<double>(step.context().peak_bytes()) / (1 << 20)}};
}

answer time_layers(device_step& step, const request& asked) {
  answer rows = answer::array();
  for (const layer_time& layer : step.layers(asked.value("repeats", 20), asked.value("samples", 5))) {
    rows.push_back({{"name", layer.name},
                    {"kind", layer.kind},
                    {"ms", layer.seconds * 1e3},
                    {"gflop", layer.flops * 1e-9},
                    {"mbyte", layer.bytes * 1e-6}});
  }
  return {{"layers", rows}};
}

}  // namespace

int main() {
  if (pf::gpu::device_count() == 0) {
    std::fputs("bench_gpu_step: no CUDA device: nothing is measured\n", stderr);
    return 77;
  }
  kept_steps kept;
  serve({{"machine", machine},
         {"rates", rates},
         {"convolutions", time_convolutions},
         {"attention", time_attention},
         {"step", [&](const request& asked) { return time_step(kept.of(asked), asked); }},
         {"layers", [&](const request& asked) { return time_layers(kept.of(asked), asked); }},
         {"forget", [&](const request&) {
            kept.forget();
            return answer::object();
          }}});
  return 0;
}
