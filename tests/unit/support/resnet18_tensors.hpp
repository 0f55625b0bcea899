// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <string>
#include <vector>

#include <pufferfish/compress/codec.hpp>

/// The tensors of resnet18_cifar as codecs see them, without the model: layouts and sizes are exact, names
/// and order are not those of the model.
namespace resnet18_tensors {

using namespace pufferfish;

/// `hybrid`: with the 14 factorized convolutions of Pufferfish, rank = outputs / 4.
inline std::vector<coded_tensor> resnet18_tensors(bool hybrid) {
  std::vector<coded_tensor> result;
  const auto add = [&](const logical_layout& layout) {
    std::string name = "t";
    name += std::to_string(result.size());
    const index_t offset = coded_size(result);
    result.push_back({name, layout, offset, layout.size(), 0, stream_id(name)});
  };
  const auto norm = [&](index_t channels) {
    add(logical_layout::vector(channels));
    add(logical_layout::vector(channels));
  };
  const auto conv = [&](index_t out, index_t in, bool factorized) {
    if (factorized) {
      add(logical_layout::kernel(out / 4, in, 3, 3));
      add(logical_layout::kernel(out, out / 4, 1, 1));
    } else {
      add(logical_layout::kernel(out, in, 3, 3));
    }
    norm(out);
  };
  add(logical_layout::kernel(64, 3, 3, 3));
  index_t in = 64;
  for (const index_t out : {64, 128, 256, 512}) {
    for (int block = 0; block < 2; ++block) {
      const bool factorized = hybrid && (out > 64 || block > 0);
      conv(out, in, factorized);
      conv(out, out, factorized);
      if (in != out) {
        add(logical_layout::kernel(out, in, 1, 1));
        norm(out);
      }
      in = out;
    }
  }
  add(logical_layout::matrix(10, 512));
  add(logical_layout::vector(10));
  return result;
}

}  // namespace resnet18_tensors
