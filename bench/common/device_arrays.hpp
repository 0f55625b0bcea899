// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Arrays in device memory for single kernels, how far two results are apart, and times of calls.

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include <pufferfish/gpu.hpp>

#include "device_steps.hpp"

namespace bench {

/// Numbers in device memory: normal ones from a stream of their own, or not set.
template <class U>
class device_array {
 public:
  explicit device_array(pufferfish::index_t size)
      : memory_(pufferfish::gpu::device_memory(), std::max<pufferfish::index_t>(size, 1)) {}
  device_array(pufferfish::index_t size, std::uint64_t stream) : device_array(size) {
    fill_device(memory_.span(), stream);
  }
  U* data() { return memory_.data(); }
  std::vector<float> fetched() {
    std::vector<U> values(memory_.span().size());
    pufferfish::gpu::device_memory().to_host(values.data(), memory_.data(), values.size() * sizeof(U));
    std::vector<float> wide;
    for (const U value : values) wide.push_back(static_cast<float>(value));
    return wide;
  }

 private:
  pufferfish::memory_block<U> memory_;
};

/// Norm of the difference of two arrays over the norm of the first.
template <class U>
double difference(device_array<U>& a, device_array<U>& b) {
  const std::vector<float> x = a.fetched(), y = b.fetched();
  double apart = 0.0, whole = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double distance = static_cast<double>(x[i]) - static_cast<double>(y[i]);
    apart += distance * distance;
    whole += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  }
  return std::sqrt(apart / whole);
}

/// Median microseconds of a call, in pairs of calls.
inline double microseconds(pufferfish::gpu_context& ctx, int samples, const std::function<void()>& call) {
  pufferfish::gpu::event start(pufferfish::gpu::event_use::timing), end(pufferfish::gpu::event_use::timing);
  std::vector<double> times;
  for (int sample = -2; sample < samples; ++sample) {
    start.record(ctx.stream());
    call();
    call();
    end.record(ctx.stream());
    ctx.synchronize();
    if (sample >= 0) times.push_back(end.seconds_since(start) / 2);
  }
  std::nth_element(times.begin(), times.begin() + samples / 2, times.end());
  return times[static_cast<std::size_t>(samples / 2)] * 1e6;
}

}  // namespace bench
