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
          signum_options{},
          sign_codec_options{},
          sign_codec_options{code_memory::none},
          sign_codec_options{code_memory::error_feedback, route::two_hop},
          two_hop_signum_options{},
          top_k_options{.ratio = 0.1},
          top_k_options{.ratio = 0.1, .scope = top_k_scope::arena, .memory = code_memory::none},
          random_k_options{.ratio = 0.1},
          random_k_options{.rank = 1, .block = true},
          random_k_options{.ratio = 0.1, .memory = code_memory::none, .unbiased = true},
          dgc_options{.ratio = 0.1, .warmup_epochs = 2},
          one_bit_options{},
          one_bit_options{.cell = one_bit_cell::tensor, .route = route::two_hop},
          qsgd_options{},
          qsgd_options{.bits = 8, .bucket = 100, .norm = qsgd_norm::max, .route = route::two_hop},
          tern_grad_options{},
          tern_grad_options{.shared_scaler = false},
          tern_grad_options{.skip = {"p2"}, .route = route::two_hop},
          stochastic_binary_options{},
          atomo_options{},
          entry_atomo_options{.ratio = 0.1}};
}

}  // namespace compress_support
