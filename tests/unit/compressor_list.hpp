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
          sign_codec_options{code_memory::error_feedback, route::two_hop}};
}

}  // namespace compress_support
