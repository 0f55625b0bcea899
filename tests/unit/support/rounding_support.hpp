// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include <pufferfish/compress/quantize/stochastic_rounding.hpp>

#include "codec_support.hpp"

/// What tests of codecs that round at random share: the roundings written down value by value, and checks of
/// means over many draws.
namespace rounding_support {

using namespace codec_support;

/// 1 if the draw takes an event of probability scaled / 2^32.
template <class T>
unsigned taken(T scaled, std::uint32_t draw) {
  return draw < static_cast<std::uint64_t>(scaled) ? 1U : 0U;
}

/// Whether the upper half of the draw leaves that open.
template <class T>
bool undecided(T scaled, std::uint32_t draw) {
  return static_cast<std::uint64_t>(scaled) >> 16 == draw >> 16;
}

/// 2^32 x / limit, below 2^32.
template <class T>
T plain_share(T x, T limit) {
  const detail::quotient<T> share(T(0x1p32), limit);
  return std::min(x * share.lift * share.factor, T(0x1p32 - 0x1p8));
}

template <class T>
struct plain_level {
  unsigned whole;
  T scaled;  // 2^32 times the rest
};
template <class T>
plain_level<T> level_of(T x, T norm, T most) {
  const detail::quotient<T> level(most, norm);
  const T magnitude = std::min(std::abs(x) * level.lift * level.factor, most);
  const auto whole = static_cast<unsigned>(magnitude);
  return {whole, (magnitude - static_cast<T>(whole)) * T(0x1p32)};
}

template <class T>
unsigned plain_level_field(T x, T norm, int bits, std::uint32_t draw) {
  const plain_level<T> level = level_of(x, norm, static_cast<T>((1 << (bits - 1)) - 1));
  return (level.whole + taken(level.scaled, draw)) | (x < T(0) ? 1U << (bits - 1) : 0U);
}
template <class T>
unsigned plain_ternary_field(T x, T scaler, std::uint32_t draw) {
  const T magnitude = std::abs(x);
  const bool sent = magnitude >= scaler || taken(plain_share(magnitude, scaler), draw) != 0;
  return !sent ? 0U : x < T(0) ? 2U : 1U;
}
template <class T>
unsigned plain_binary_field(T x, T low, T high, std::uint32_t draw) {
  return x >= high ? 1U : taken(plain_share(x - low, high - low), draw);
}

template <class T>
std::vector<T> normal_values(index_t size, std::uint64_t stream, double deviation = 1.0) {
  std::vector<T> values(static_cast<std::size_t>(size));
  fill_normal(std::span<T>(values), deviation, random_stream(5, stream));
  return values;
}

/// Decoded codes of the same gradients, one per step: their mean and the mean of their squares.
struct drawn_means {
  std::vector<double> mean, square;
};
template <class Codec, class T>
drawn_means means_of_draws(Codec& codec, const std::vector<T>& gradients, int draws) {
  cpu_context ctx;
  std::vector<T> no_memory;
  drawn_means result{std::vector<double>(gradients.size(), 0.0), std::vector<double>(gradients.size(), 0.0)};
  for (int step = 0; step < draws; ++step) {
    const code_place place{1, static_cast<std::uint64_t>(step), 0};
    const auto code = coded(codec, ctx, gradients, no_memory, place);
    const auto values = decoded(codec, ctx, code, static_cast<index_t>(gradients.size()));
    for (std::size_t i = 0; i < values.size(); ++i) {
      result.mean[i] += static_cast<double>(values[i]) / draws;
      result.square[i] += static_cast<double>(values[i]) * static_cast<double>(values[i]) / draws;
    }
  }
  return result;
}

/// Every mean is within 5 deviations of its expectation: `variances` are of one draw.
inline void check_means(const drawn_means& found, const std::vector<double>& expected,
                        const std::vector<double>& variances, int draws) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    CAPTURE(i);
    const double tolerance = 5.0 * std::sqrt(variances[i] / draws) + 1e-6 * std::abs(expected[i]);
    CHECK(std::abs(found.mean[i] - expected[i]) <= tolerance);
  }
}
/// The variances as the draws have them.
inline std::vector<double> variances_of(const drawn_means& found) {
  std::vector<double> result;
  for (std::size_t i = 0; i < found.mean.size(); ++i) {
    result.push_back(std::max(0.0, found.square[i] - found.mean[i] * found.mean[i]));
  }
  return result;
}

/// What a random codec must keep beside the rules of all codecs: draws depend on step, rank, hop and seed,
/// and on the position in the parameter, not on how tensors are cut into stripes.
template <class Codec>
void check_draws(const typename Codec::options_type& options) {
  using T = typename Codec::value_type;
  cpu_context ctx;
  std::vector<T> no_memory;
  const std::vector<coded_tensor> tensors = vectors_of<T>({3000});
  const std::vector<T> values = normal_values<T>(3000, 1);
  Codec codec(tensors, options);
  const auto code = [&](Codec& one, const code_place& place) {
    return coded(one, ctx, values, no_memory, place);
  };
  const auto first = code(codec, {1, 3, 0});
  CHECK(first == code(codec, {1, 3, 0}));
  CHECK(first != code(codec, {1, 4, 0}));
  CHECK(first != code(codec, {2, 3, 0}));
  CHECK(first != code(codec, {1, 3, 1}));
  typename Codec::options_type other = options;
  other.seed += 1;
  Codec seeded(tensors, other);
  CHECK(first != code(seeded, {1, 3, 0}));
  std::vector<coded_tensor> renamed = tensors;
  renamed[0].stream = stream_id("another");
  Codec another(renamed, options);
  CHECK(first != code(another, {1, 3, 0}));
}

}  // namespace rounding_support
