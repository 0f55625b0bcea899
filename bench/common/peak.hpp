// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The processor's peak: fp32 multiply-adds per second with the widest instruction set, measured now.
///
/// The clock rate varies (by a factor of two on a shared machine), so a percentage of the peak is meaningful
/// only if both were measured within about a second. Measuring the peak takes about 3 ms.

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

#include "machine.hpp"

namespace bench {

using clock = std::chrono::steady_clock;

inline double seconds_since(clock::time_point start) {
  return std::chrono::duration<double>(clock::now() - start).count();
}

namespace chains {

// Independent chains of multiply-adds in registers named in assembly, because compilers spill arrays of
// accumulators. Two units of latency 4 need at least 8 chains. Each function returns the number of
// floating-point operations.

#if defined(__x86_64__)
__attribute__((target("avx512f"))) inline double avx512(long rounds) {
  const float a = 1.0009765625f, b = 1e-3f;
  const double operations = static_cast<double>(rounds) * 24 * 16 * 2;
  asm volatile(
      "vbroadcastss %[a], %%zmm30\n\t"
      "vbroadcastss %[b], %%zmm31\n\t"
      ".irp i,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23\n\t"
      "vmovaps %%zmm30, %%zmm\\i\n\t"
      ".endr\n"
      "1:\n\t"
      ".irp i,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23\n\t"
      "vfmadd231ps %%zmm30, %%zmm31, %%zmm\\i\n\t"
      ".endr\n\t"
      "dec %[n]\n\t"
      "jnz 1b\n\t"
      "vzeroupper"
      : [n] "+r"(rounds)
      : [a] "m"(a), [b] "m"(b)
      : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
        "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21",
        "xmm22", "xmm23", "xmm30", "xmm31");
  return operations;
}

__attribute__((target("avx2,fma"))) inline double avx2(long rounds) {
  const float a = 1.0009765625f, b = 1e-3f;
  const double operations = static_cast<double>(rounds) * 14 * 8 * 2;
  asm volatile(
      "vbroadcastss %[a], %%ymm14\n\t"
      "vbroadcastss %[b], %%ymm15\n\t"
      ".irp i,0,1,2,3,4,5,6,7,8,9,10,11,12,13\n\t"
      "vmovaps %%ymm14, %%ymm\\i\n\t"
      ".endr\n"
      "1:\n\t"
      ".irp i,0,1,2,3,4,5,6,7,8,9,10,11,12,13\n\t"
      "vfmadd231ps %%ymm14, %%ymm15, %%ymm\\i\n\t"
      ".endr\n\t"
      "dec %[n]\n\t"
      "jnz 1b\n\t"
      "vzeroupper"
      : [n] "+r"(rounds)
      : [a] "m"(a), [b] "m"(b)
      : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
        "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
  return operations;
}
#endif

/// Vectors of four floats on any processor: the best that plain C++ can do without wider vectors.
inline double portable(long rounds) {
  typedef float vector __attribute__((vector_size(16)));
  volatile float factor_source = 0.999f;
  const float factor = factor_source;
  const vector f = {factor, factor, factor, factor}, s = {1e-3f, 1e-3f, 1e-3f, 1e-3f};
  // All different, so that compilers do not compute one chain for all.
  vector a = s, b = a + s, c = b + s, d = c + s, e = d + s, g = e + s;
  vector h = g + s, i = h + s, j = i + s, k = j + s, l = k + s, m = l + s;
  for (long round = 0; round < rounds; ++round) {
    a = a * f + s, b = b * f + s, c = c * f + s, d = d * f + s, e = e * f + s, g = g * f + s;
    h = h * f + s, i = i * f + s, j = j * f + s, k = k * f + s, l = l * f + s, m = m * f + s;
  }
  const vector sum = a + b + c + d + e + g + h + i + j + k + l + m;
  volatile float sink = sum[0] + sum[1] + sum[2] + sum[3];
  static_cast<void>(sink);
  return static_cast<double>(rounds) * 12 * 4 * 2;
}

inline double run(pufferfish::isa target, long rounds) {
#if defined(__x86_64__)
  if (target == pufferfish::isa::avx512) return avx512(rounds);
  if (target == pufferfish::isa::avx2) return avx2(rounds);
#endif
  static_cast<void>(target);
  return portable(rounds);
}

}  // namespace chains

/// Runs body(thread) on `threads` threads at once and returns when all are done.
template <class Body>
void on_threads(int threads, Body&& body) {
  std::vector<std::thread> helpers;
  for (int t = 1; t < threads; ++t) helpers.emplace_back([&body, t] { body(t); });
  body(0);
  for (std::thread& helper : helpers) helper.join();
}

/// GFLOP/s (a multiply-add counts as two) of `threads` threads together. The best of several short
/// pieces counts for each thread, so that an interruption does not lower the peak and thereby
/// raise a measured percentage.
inline double measure_peak(pufferfish::isa target, int threads) {
  constexpr int pieces = 7;
  constexpr long rounds = 80000;
  std::barrier together(threads);
  std::vector<double> rates(static_cast<std::size_t>(threads));
  on_threads(threads, [&](int thread) {
    together.arrive_and_wait();
    double best = 0;
    for (int piece = 0; piece < pieces; ++piece) {
      const auto start = clock::now();
      const double operations = chains::run(target, rounds);
      best = std::max(best, operations / seconds_since(start));
    }
    rates[static_cast<std::size_t>(thread)] = best;
  });
  double sum = 0;
  for (double rate : rates) sum += rate;
  return sum * 1e-9;
}

/// The same for the processor's widest instruction set.
inline double measure_peak(int threads) { return measure_peak(processor_isa(), threads); }

}  // namespace bench
