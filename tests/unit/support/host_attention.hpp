// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Attention of a foreign framework, for tests.

#include <array>

#include <pufferfish/core/random.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/lowrank/traits.hpp>

/// A dense attention layer of a foreign framework: one matrix for query, key and value, as PyTorch stores
/// them.
namespace host {
struct Attention {
  pufferfish::index_t model, heads;
  pufferfish::tensor<double, 2> in, out;  // [3 model x model], [model x model]
  pufferfish::tensor<double, 1> in_bias, out_bias;

  Attention(pufferfish::index_t m, pufferfish::index_t h, bool bias, std::uint64_t seed)
      : model(m),
        heads(h),
        in({3 * m, m}),
        out({m, m}),
        in_bias({bias ? 3 * m : 0}),
        out_bias({bias ? m : 0}) {
    pufferfish::fill_normal<double>(in.flat(), 0.5, {seed, 1});
    pufferfish::fill_normal<double>(out.flat(), 0.5, {seed, 2});
    pufferfish::fill_normal<double>(in_bias.flat(), 0.5, {seed, 3});
    pufferfish::fill_normal<double>(out_bias.flat(), 0.5, {seed, 4});
  }
};
}  // namespace host

template <>
struct pufferfish::layer_traits<host::Attention> {
  static constexpr auto kind = layer_kind::attention;
  static index_t heads(const host::Attention& layer) { return layer.heads; }
  static auto matrices(const host::Attention& layer) {
    const index_t m = layer.model;
    const auto part = [&](index_t i) { return layer.in.view().slice(0, i * m, m); };
    return std::array<named_view<const double, 2>, 4>{
        {{"query", part(0)}, {"key", part(1)}, {"value", part(2)}, {"output", layer.out.view()}}};
  }
  static auto biases(const host::Attention& layer) {
    using view = tensor_view<const double, 1>;
    const index_t m = layer.model;
    const bool there = layer.in_bias.size() > 0;
    const auto part = [&](index_t i) { return there ? layer.in_bias.view().slice(0, i * m, m) : view(); };
    return std::array<named_view<const double, 1>, 4>{{{"query", part(0)},
                                                       {"key", part(1)},
                                                       {"value", part(2)},
                                                       {"output", there ? layer.out_bias.view() : view()}}};
  }
};
