// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: overloads of svd_factorize and svd_factors that are selected if layer_traits are incomplete. A
/// call is a compile-time error whose first line says what to add. They have no definitions.

#include <pufferfish/core/config.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/lowrank/kinds.hpp>

PUFFERFISH_NAMESPACE_BEGIN

// Declares the overloads for svd_factorize<L>(dense, ...), svd_factorize<16>(dense, ...),
// svd_factorize(dense, ...) and svd_factors(dense, ...).
#define PUFFERFISH_DETAIL_REFUSE(fault, text)                                                        \
  template <class LowRank, detail::has_trait_fault<detail::trait_fault::fault> Dense, class... More> \
  void svd_factorize(const Dense&, const More&...) PUFFERFISH_UNAVAILABLE(text);                     \
  template <index_t Rank, detail::has_trait_fault<detail::trait_fault::fault> Dense, class... More>  \
  void svd_factorize(const Dense&, const More&...) PUFFERFISH_UNAVAILABLE(text);                     \
  template <detail::has_trait_fault<detail::trait_fault::fault> Dense, class... More>                \
  void svd_factorize(const Dense&, const More&...) PUFFERFISH_UNAVAILABLE(text);                     \
  template <detail::has_trait_fault<detail::trait_fault::fault> Dense, class... More>                \
  void svd_factors(const Dense&, const More&...) PUFFERFISH_UNAVAILABLE(text)

// clang-format off
PUFFERFISH_DETAIL_REFUSE(no_traits,
    "this layer type is unknown: specialise pufferfish::layer_traits for it, with `kind` and `matrices(layer)` "
    "(and `shape(layer)` for a convolution); see pufferfish/lowrank/traits.hpp and examples/embed");
PUFFERFISH_DETAIL_REFUSE(kind,
    "the layer_traits of this layer have no `kind`: add "
    "`static constexpr auto kind = pufferfish::layer_kind::linear;` (or another kind with kind_traits)");
PUFFERFISH_DETAIL_REFUSE(matrices,
    "the layer_traits of this layer have no `matrices`: add `static auto matrices(const Layer&)`, which gives "
    "a std::array of pufferfish::named_view of its weights");
PUFFERFISH_DETAIL_REFUSE(dimensions,
    "`matrices` in the layer_traits of this layer gives views of another number of dimensions than its kind "
    "has: four for conv [out][in][height][width], two for all others [out][in]");
PUFFERFISH_DETAIL_REFUSE(scalar,
    "`matrices` in the layer_traits of this layer gives views of another scalar than float or double: convert "
    "the weights first");
PUFFERFISH_DETAIL_REFUSE(shape,
    "the layer_traits of this convolution have no `shape`: add "
    "`static pufferfish::conv_shape shape(const Layer&)`");
PUFFERFISH_DETAIL_REFUSE(heads,
    "the layer_traits of this attention layer have no `heads`: add "
    "`static pufferfish::index_t heads(const Layer&)`");
// clang-format on
#undef PUFFERFISH_DETAIL_REFUSE

/// Overload for a call without a rank. `None` keeps the L of svd_factorize<L>(dense) from being deduced as
/// Dense.
template <detail::trait_fault None = detail::trait_fault::none, detail::has_trait_fault<None> Dense>
void svd_factorize(const Dense&) PUFFERFISH_UNAVAILABLE(
    "svd_factorize(dense) needs a rank: svd_factorize(dense, rank_ratio{0.25}), or svd_factorize<16>(dense)");

PUFFERFISH_NAMESPACE_END
