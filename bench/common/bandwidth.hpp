// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Memory bandwidth for half reads and half writes, as in a layer's pass.

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <barrier>
#include <vector>

#include <pufferfish/core/tensor.hpp>

#include "peak.hpp"

namespace bench {

namespace streams {

/// A cache line of floats: compilers at -O2 would move the elements of a plain loop one by one.
typedef float line __attribute__((vector_size(64), may_alias));

/// Reads, changes and writes back each element in place. count is a multiple of 16, data is aligned.
inline void update(float* data, std::ptrdiff_t count) {
  auto* const lines = reinterpret_cast<line*>(data);
  for (std::ptrdiff_t i = 0; i < count / 16; ++i) lines[i] = lines[i] * 0.999F + 1e-3F;
}

/// Copies, past the caches where the processor can. count is a multiple of 16, pointers are aligned.
inline void copy(const float* from, float* to, std::ptrdiff_t count) {
#if defined(__x86_64__)
  for (std::ptrdiff_t i = 0; i < count; i += 16) {
    const __m128 a = _mm_load_ps(from + i), b = _mm_load_ps(from + i + 4), c = _mm_load_ps(from + i + 8),
                 d = _mm_load_ps(from + i + 12);
    _mm_stream_ps(to + i, a);
    _mm_stream_ps(to + i + 4, b);
    _mm_stream_ps(to + i + 8, c);
    _mm_stream_ps(to + i + 12, d);
  }
  _mm_sfence();
#else
  std::copy_n(from, count, to);
#endif
}

}  // namespace streams

struct bandwidth {
  double memory = 0;  ///< bytes per second, read and written together, of data that no cache holds
  double cache = 0;   ///< of data that the last cache holds, but not the caches before it
};

/// Measures bandwidth with buffers of its own, which are kept between measurements.
class bandwidth_meter {
 public:
  explicit bandwidth_meter(int threads) : threads_(threads) {
    const double bytes = std::max(2.0 * last_cache_bytes(), 64.0 * (1 << 20));
    count_ = static_cast<std::ptrdiff_t>(bytes / sizeof(float)) / 1024 * 1024;
    from_ = pufferfish::aligned_buffer<float>(count_);
    to_ = pufferfish::aligned_buffer<float>(count_);
  }

  /// The faster of two ways to move data; the best of `runs` each.
  bandwidth measure(int runs = 2) {
    const std::ptrdiff_t share = count_ / threads_ / 16 * 16;
    const std::ptrdiff_t small = std::min<std::ptrdiff_t>(share, (3 << 19) / sizeof(float));  // 1.5 MiB
    bandwidth result;
    for (int run = 0; run < runs; ++run) {
      result.memory = std::max({result.memory, rate(share, 1, true), rate(share, 1, false)});
      result.cache = std::max(result.cache, rate(small, 8, false));
    }
    return result;
  }

 private:
  double rate(std::ptrdiff_t share, int repeats, bool copies) {
    std::barrier together(threads_);
    std::vector<double> seconds(static_cast<std::size_t>(threads_));
    on_threads(threads_, [&](int thread) {
      float* const target = to_.data() + thread * share;
      together.arrive_and_wait();
      const auto start = clock::now();
      for (int r = 0; r < repeats; ++r) {
        copies ? streams::copy(from_.data() + thread * share, target, share) : streams::update(target, share);
      }
      seconds[static_cast<std::size_t>(thread)] = seconds_since(start);
    });
    const double bytes = 2.0 * sizeof(float) * static_cast<double>(share) * repeats * threads_;
    return bytes / *std::max_element(seconds.begin(), seconds.end());
  }

  int threads_;
  std::ptrdiff_t count_ = 0;
  pufferfish::aligned_buffer<float> from_, to_;
};

}  // namespace bench
