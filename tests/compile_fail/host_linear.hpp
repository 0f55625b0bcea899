// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <array>
#include <pufferfish/lowrank.hpp>

namespace host {
struct Dense {
  float weight[64 * 32] = {};
};
}  // namespace host

template <>
struct pufferfish::layer_traits<host::Dense> {
  static constexpr auto kind = layer_kind::linear;
  static auto matrices(const host::Dense& layer) {
    return std::array{named_view<const float, 2>{"weight", {layer.weight, {64, 32}}}};
  }
};
