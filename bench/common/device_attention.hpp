// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Attention on a device, by both kinds of the library's kernels.

#include "line_server.hpp"

namespace bench {

/// Times self attention in bf16 over sequences of 128, 512 and 2048 tokens, 16,384 tokens in all, with 8
/// heads of `depth` columns (64), for a causal mask and for none, and with dropout of weights if `dropout` is
/// greater than 0 (0). Each row has a pass and its microseconds: `floats_us` on float units, `tensor_us` on
/// tensor cores. `difference`: norm of the difference of the results over the norm of the first. `gflop`:
/// operations of the pairs that the mask allows, without those that a pass computes again. `tiny`: sequences
/// of 24 and 130 tokens, one of each length, with 2 heads.
answer time_attention(const request& asked);

}  // namespace bench
