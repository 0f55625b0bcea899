// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Facts reported with benchmark results: processor, compiler, flags, instruction sets, cache sizes.

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <thread>

#include <nlohmann/json.hpp>

#include <pufferfish/linalg/isa.hpp>

#ifndef PUFFERFISH_BENCH_FLAGS
#define PUFFERFISH_BENCH_FLAGS "unknown"
#endif

namespace bench {

inline std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

/// The widest instruction set of this processor that the library has kernels for, whether or not this program
/// contains them. Bounds are computed for it.
inline pufferfish::isa processor_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return pufferfish::isa::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return pufferfish::isa::avx2;
#endif
  // Elsewhere there is only one.
  return pufferfish::widest_isa();
}

/// Bytes of the last-level cache; 32 MiB if the system does not report it.
inline double last_cache_bytes() {
  const long told = std::max(sysconf(_SC_LEVEL3_CACHE_SIZE), sysconf(_SC_LEVEL4_CACHE_SIZE));
  return told > 0 ? static_cast<double>(told) : 32.0 * 1024 * 1024;
}

inline nlohmann::ordered_json describe_machine() {
  return {{"cpu", processor_name()},
          {"cores", std::thread::hardware_concurrency()},
          {"last_cache_mib", last_cache_bytes() / (1 << 20)},
          {"compiler", __VERSION__},
          {"flags", PUFFERFISH_BENCH_FLAGS},
          {"isa", pufferfish::to_string(pufferfish::widest_isa())},
          {"processor_isa", pufferfish::to_string(processor_isa())}};
}

}  // namespace bench
