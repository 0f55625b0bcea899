// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What tests of device operations share: a context, data on its way there and back, comparisons.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/gpu/runtime/context.hpp>

namespace gpu_test {

namespace pf = pufferfish;
using pf::index_t;

/// One context for all tests of a program: making one takes longer than most tests.
inline pf::gpu_context& gpu_context() {
  static pf::gpu_context ctx;
  return ctx;
}

/// The largest error of a value that is rounded to 16 bits, relative to it.
template <class T>
inline constexpr double unit = std::is_same_v<T, pf::gpu::bf16> ? 1.0 / 256 : 1.0 / 2048;

/// The same numbers on the host and on the device.
template <class T>
class twin {
 public:
  explicit twin(std::vector<T> values)
      : host_(std::move(values)),
        device_(pf::gpu::device_memory(), static_cast<index_t>(host_.size()), pf::uninitialized) {
    device_.from_host(host_);
  }
  explicit twin(index_t size, T value = T{}) : twin(std::vector<T>(static_cast<std::size_t>(size), value)) {}

  index_t size() const { return device_.size(); }
  std::vector<T>& host() { return host_; }
  T* host_data() { return host_.data(); }
  std::span<T> host_span() { return host_; }
  T* device_data() { return device_.data(); }
  std::span<T> device_span() { return device_.span(); }

  template <std::size_t N>
  pf::tensor_view<T, N> host_view(const pf::extents<N>& shape) {
    return {host_.data(), shape};
  }
  template <std::size_t N>
  pf::tensor_view<T, N> device_view(const pf::extents<N>& shape) {
    return {device_.data(), shape};
  }

  /// What the device has now; waits for it.
  std::vector<T> fetched() const {
    std::vector<T> result(static_cast<std::size_t>(size()));
    device_.to_host(result);
    return result;
  }

 private:
  std::vector<T> host_;
  pf::memory_block<T> device_;
};

/// Uniform in -1 .. 1, from a stream of its own.
template <class T>
twin<T> random_twin(index_t size, std::uint64_t stream) {
  std::vector<T> values(static_cast<std::size_t>(size));
  pf::fill_uniform(std::span<T>(values), -1.0, 1.0, pf::random_stream(7, stream));
  return twin<T>(std::move(values));
}

/// Tokens of a vocabulary, from a stream of their own.
inline twin<std::int32_t> random_tokens(index_t count, index_t vocabulary, std::uint64_t stream) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  const pf::random_stream random(13, stream);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<std::int32_t>(random.below(i, static_cast<std::uint64_t>(vocabulary)));
  }
  return twin<std::int32_t>(std::move(tokens));
}

/// The largest difference, relative to the largest expected magnitude (at least `scale`); infinite where one
/// of them is not finite and the other is another.
template <class T>
double difference(std::span<const T> got, std::span<const T> expected, double scale = 1e-30) {
  if (got.size() != expected.size()) return INFINITY;
  double worst = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto g = static_cast<double>(got[i]), e = static_cast<double>(expected[i]);
    if (std::isfinite(e)) scale = std::max(scale, std::abs(e));
    if (g == e || (std::isnan(g) && std::isnan(e))) continue;
    const double d = std::abs(g - e);
    worst = std::isfinite(d) ? std::max(worst, d) : INFINITY;
  }
  return worst / scale;
}
template <class T>
double difference(const std::vector<T>& got, const std::vector<T>& expected, double scale = 1e-30) {
  return difference(std::span<const T>(got), std::span<const T>(expected), scale);
}

/// How far the device's copy is from the host's.
template <class T>
double difference(twin<T>& both, double scale = 1e-30) {
  return difference(both.fetched(), both.host(), scale);
}

/// Random integers from `low` to `high`.
class picker {
 public:
  explicit picker(std::uint64_t seed) : random_(seed, 1) {}
  index_t operator()(index_t low, index_t high) {
    return low + static_cast<index_t>(random_.bits(at_++) % static_cast<std::uint64_t>(high - low + 1));
  }

 private:
  pf::random_stream random_;
  std::uint64_t at_ = 0;
};

/// Random numbers as T stores them, on the device, and the same ones as float on the host.
template <class T>
struct stored {
  twin<float> wide;
  twin<T> narrow;

  stored(index_t size, std::uint64_t stream)
      : wide(random_twin<float>(size, stream)), narrow(rounded(wide.host())) {
    for (index_t i = 0; i < size; ++i) wide.host_data()[i] = static_cast<float>(narrow.host_data()[i]);
  }
  static std::vector<T> rounded(const std::vector<float>& values) {
    std::vector<T> result;
    for (const float value : values) result.push_back(static_cast<T>(value));
    return result;
  }
  /// How far the device's numbers are from the host's.
  double error() {
    std::vector<float> got;
    for (const T value : narrow.fetched()) got.push_back(static_cast<float>(value));
    return difference(got, wide.host(), 1.0);
  }
};

}  // namespace gpu_test
