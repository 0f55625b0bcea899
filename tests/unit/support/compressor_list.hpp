// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <vector>

#include <pufferfish/compress/compression.hpp>

/// Options of every compressor, with settings that small tensors show. Tests of what all of them must do go
/// through this list.
namespace compress_support {

inline std::vector<pufferfish::compression_options> all_compressors() {
  using namespace pufferfish;
  using route = code_route;
  return {power_sgd_options{2},
          power_sgd_options{.rank = 1, .rescale_memory = true},
          accordion_options{},
          accordion_options{.low = top_k_options{.ratio = 0.2}, .high = top_k_options{.ratio = 0.1}},
          signum_options{},
          sign_codec_options{},
          sign_codec_options{code_memory::none},
          sign_codec_options{code_memory::error_feedback, route::two_hop},
          sign_codec_options{code_memory::rescaled_error_feedback},
          two_hop_signum_options{},
          top_k_options{.ratio = 0.1},
          top_k_options{.ratio = 0.1, .scope = top_k_scope::arena, .memory = code_memory::none},
          top_k_options{.ratio = 0.1, .route = route::two_hop},
          top_k_options{.ratio = 0.1, .route = route::sparse},
          block_top_k_options{.side = 8, .count = 4, .decay = 1.0},
          random_k_options{.ratio = 0.1},
          random_k_options{.rank = 1, .block = true},
          random_k_options{.ratio = 0.1, .memory = code_memory::none, .unbiased = true},
          dgc_options{.ratio = 0.1, .warmup_epochs = 2},
          dgc_options{.ratio = 0.1, .sampled = true, .route = route::sparse},
          one_bit_options{},
          one_bit_options{.cell = one_bit_cell::tensor, .route = route::two_hop},
          qsgd_options{},
          qsgd_options{.bits = 8, .bucket = 100, .norm = qsgd_norm::max, .route = route::two_hop},
          tern_grad_options{},
          tern_grad_options{.shared_scaler = false},
          tern_grad_options{.skip = {"p2"}, .route = route::two_hop},
          stochastic_binary_options{},
          atomo_options{},
          entry_atomo_options{.ratio = 0.1},
          entry_atomo_options{.ratio = 0.1, .route = route::sparse}};
}

}  // namespace compress_support
