// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// What tests of the device need: a context, vectors on the device, comparison with what the CPU computes. The same
/// tests run on a GPU and on the emulated device (emulated/cuda.hpp).

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <type_traits>
#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/gpu/context.hpp>

namespace gpu_test {

namespace pf = pufferfish;
using pf::index_t;

/// Ends the program with 77 (a skipped test) where there is no device.
inline void need_device() {
  if (pf::gpu::device_count() > 0) return;
  std::puts("skipped: no device");
  std::exit(77);
}

/// One for all tests of a program; in training mode, and at the start of a step.
inline pf::context<pf::device::gpu>& gpu_context() {
  need_device();
  // Never destroyed: the end of the program may come after the runtime's.
  static auto* ctx = new pf::context<pf::device::gpu>();
  ctx->set_mode(pf::run_mode::training);
  return *ctx;
}

/// Elements on the device. What is not uploaded is filled with NaNs (with 0xff, whatever T is), so that an operation
/// that leaves elements out is found on every device.
template <class T>
class device_vector {
 public:
  explicit device_vector(index_t size, index_t offset = 0) : size_(size), offset_(offset) {
    const std::size_t bytes = static_cast<std::size_t>(size + offset) * sizeof(T);
    if (bytes == 0) return;
    pf::gpu::check(cudaMalloc(&memory_, bytes), "cudaMalloc");
    pf::gpu::check(cudaMemset(memory_, 0xff, bytes), "cudaMemset");
    pf::gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  /// A copy of the host's elements, `offset` elements behind an address with the best alignment.
  explicit device_vector(const std::vector<T>& values, index_t offset = 0)
      : device_vector(static_cast<index_t>(values.size()), offset) {
    upload(values);
  }
  device_vector(const device_vector&) = delete;
  device_vector& operator=(const device_vector&) = delete;
  device_vector(device_vector&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)), size_(other.size_), offset_(other.offset_) {}
  ~device_vector() { static_cast<void>(cudaFree(memory_)); }

  T* data() const { return static_cast<T*>(memory_) + offset_; }
  index_t size() const { return size_; }
  std::span<T> span() const { return {data(), static_cast<std::size_t>(size_)}; }
  std::span<const T> values() const { return {data(), static_cast<std::size_t>(size_)}; }
  /// A dense view, last index fastest.
  template <std::size_t N>
  pf::tensor_view<T, N> view(const pf::extents<N>& shape) const {
    return pf::tensor_view<T, N>(data(), shape);
  }
  template <std::size_t N>
  pf::tensor_view<const T, N> values(const pf::extents<N>& shape) const {
    return pf::tensor_view<const T, N>(data(), shape);
  }

  /// Waits for the device before and after.
  void upload(const std::vector<T>& values) {
    REQUIRE(static_cast<index_t>(values.size()) == size_);
    copy(data(), values.data(), cudaMemcpyHostToDevice);
  }
  std::vector<T> download() const {
    std::vector<T> values(static_cast<std::size_t>(size_));
    copy(values.data(), data(), cudaMemcpyDeviceToHost);
    return values;
  }

 private:
  void copy(void* to, const void* from, cudaMemcpyKind direction) const {
    if (size_ == 0) return;
    pf::gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    pf::gpu::check(cudaMemcpy(to, from, static_cast<std::size_t>(size_) * sizeof(T), direction), "cudaMemcpy");
    pf::gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  void* memory_ = nullptr;
  index_t size_, offset_;
};

template <class T>
device_vector<T> upload(const std::vector<T>& values, index_t offset = 0) {
  return device_vector<T>(values, offset);
}

/// Normal numbers, the same for the same name.
template <class T>
std::vector<T> random_vector(index_t size, std::uint64_t number, double deviation = 1.0) {
  std::vector<T> values(static_cast<std::size_t>(size));
  pf::fill_normal<T>(values, deviation, pf::random_stream(20, number));
  return values;
}

/// Largest difference relative to the largest magnitude that is expected (or 1e-30); NaN where exactly one of two is
/// no number, or sizes differ. The scale of the whole, not of each element: sums cancel.
template <class T>
double difference(const std::vector<T>& found, const std::vector<T>& expected) {
  if (found.size() != expected.size()) return NAN;
  double largest = 0, scale = 1e-30;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const auto a = static_cast<double>(found[i]), b = static_cast<double>(expected[i]);
    if (std::isnan(a) && std::isnan(b)) continue;
    if (std::isnan(a) != std::isnan(b)) return NAN;
    if (a == b) {  // infinities
      if (std::isfinite(b)) scale = std::max(scale, std::abs(b));
      continue;
    }
    largest = std::max(largest, std::abs(a - b));
    scale = std::max(scale, std::abs(b));
  }
  return largest / scale;
}

/// What float sums of some length may differ by, relative to the largest element.
template <class T>
inline constexpr double tolerance = std::is_same_v<T, double> ? 1e-12 : std::is_same_v<T, float> ? 1e-5 : 1e-2;

template <class T>
void check_close(const std::vector<T>& found, const std::vector<T>& expected, double allowed = tolerance<T>) {
  const double d = difference(found, expected);
  CHECK(d <= allowed);  // false for a NaN
}
template <class T>
void check_close(const device_vector<T>& found, const std::vector<T>& expected, double allowed = tolerance<T>) {
  check_close(found.download(), expected, allowed);
}

}  // namespace gpu_test
