// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Sequences of rows, for tests of the device's attention.
#pragma once

#include <pufferfish/gpu/ops/attention.hpp>

#include "support.hpp"

namespace gpu_test {

/// Runs of rows; after each sequence one row belongs to no sequence.
struct runs {
  explicit runs(const std::vector<index_t>& counts) : first(places(counts)), count(counts), rows(0) {
    for (const index_t c : counts) rows += c + 1;
  }
  static std::vector<index_t> places(const std::vector<index_t>& counts) {
    std::vector<index_t> result;
    index_t at = 0;
    for (const index_t c : counts) {
      result.push_back(at);
      at += c + 1;
    }
    return result;
  }
  pf::token_runs on_host() { return {first.size(), first.host_data(), count.host_data()}; }
  pf::token_runs on_device() { return {first.size(), first.device_data(), count.device_data()}; }

  twin<index_t> first, count;
  index_t rows;
};

enum class masks { none, causal, allowed, both };

struct attention_case {
  std::vector<index_t> queries, keys;  // of each sequence; no keys: self attention
  index_t heads, depth, value_depth, gap;
  masks mask;
  bool drops;
};

/// Bytes of a mask, 60 % of them 1.
inline std::vector<unsigned char> random_bits(index_t count, std::uint64_t stream) {
  std::vector<unsigned char> bits(static_cast<std::size_t>(count));
  const pf::random_stream random(9, stream);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = random.uniform(i) < 0.6 ? 1 : 0;
  return bits;
}

}  // namespace gpu_test
