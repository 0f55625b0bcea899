// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <chrono>
#include <cstdio>
#include <vector>

#include "emulation_kernels.hpp"

#include <pufferfish/core/error.hpp>

namespace pf = pufferfish;
using pf::gpu::kernels::index_t;

namespace {
struct stream_owner {
  stream_owner() { REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess); }
  ~stream_owner() { cudaStreamDestroy(stream); }
  cudaStream_t stream = nullptr;
};
template <class T>
struct memory {
  explicit memory(std::size_t n) : size(n) { REQUIRE(cudaMalloc(reinterpret_cast<void**>(&data), n * sizeof(T)) == cudaSuccess); }
  explicit memory(const std::vector<T>& v) : memory(v.size()) {
    REQUIRE(cudaMemcpy(data, v.data(), size * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
  }
  ~memory() { cudaFree(data); }
  std::vector<T> get() const {
    std::vector<T> v(size);
    REQUIRE(cudaMemcpy(v.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
    return v;
  }
  T* data = nullptr;
  std::size_t size;
};
std::vector<float> numbers(std::size_t n) {
  std::vector<float> v(n);
  for (std::size_t i = 0; i < n; ++i) v[i] = static_cast<float>(i % 97) - 30.0F;
  return v;
}
}  // namespace

TEST_CASE("launch") {
  stream_owner s;
  for (std::size_t n : {0U, 1U, 5U, 1000U, 70001U}) {
    const auto x = numbers(n);
    memory<float> a(x), b(n);
    pf::gpu::kernels::test_scale(s.stream, a.data, b.data, static_cast<index_t>(n), 2.0F);
    cudaStreamSynchronize(s.stream);
    const auto y = b.get();
    for (std::size_t i = 0; i < n; ++i) REQUIRE(y[i] == 2 * x[i]);
  }
}

TEST_CASE("row sums") {
  stream_owner s;
  for (unsigned threads : {32U, 64U, 1024U}) {
    const auto x = numbers(60 * 1001);
    memory<float> a(x), b(60);
    pf::gpu::kernels::test_row_sums(s.stream, a.data, b.data, 60, 1001, threads);
    cudaStreamSynchronize(s.stream);
    const auto y = b.get();
    for (std::size_t i = 0; i < 60; ++i) {
      float sum = 0;
      for (std::size_t j = 0; j < 1001; ++j) sum += x[i * 1001 + j];
      REQUIRE(y[i] == sum);
    }
  }
}

TEST_CASE("reverse") {
  stream_owner s;
  const auto x = numbers(1024);
  memory<float> a(x), b(1024);
  pf::gpu::kernels::test_reverse(s.stream, a.data, b.data, 4, 256, 1024);
  cudaStreamSynchronize(s.stream);
  const auto y = b.get();
  for (std::size_t i = 0; i < 1024; ++i) REQUIRE(y[i] == x[i / 256 * 256 + 255 - i % 256]);
  CHECK_THROWS_AS(pf::gpu::kernels::test_reverse(s.stream, a.data, b.data, 4, 2048, 8192), pf::backend_error);
}

TEST_CASE("time") {
  stream_owner s;
  memory<float> a(numbers(1 << 20)), b(1 << 20);
  auto time = [&](const char* what, auto f) {
    const auto t0 = std::chrono::steady_clock::now();
    f();
    cudaStreamSynchronize(s.stream);
    std::printf("%s: %.2f ms\n", what, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - t0).count());
  };
  for (int i = 0; i < 2; ++i) {
    time("scale 1M (256k threads)", [&] { pf::gpu::kernels::test_scale(s.stream, a.data, b.data, 1 << 20, 2.0F); });
    time("1024 row sums of 1024 threads (2 barriers, 10 shuffles)", [&] { pf::gpu::kernels::test_row_sums(s.stream, a.data, b.data, 1024, 1024, 1024); });
  }
}
