// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <limits>

#include <pufferfish/compress/quantize/stochastic_binary.hpp>

#include "../../support/resnet18_tensors.hpp"
#include "../../support/rounding_support.hpp"
#include "../../support/simulated_ranks.hpp"

namespace {

using namespace rounding_support;
using rank_simulation::ranks_agree;
using rank_simulation::simulated_ranks;

TEST_CASE_TEMPLATE("stochastic_binary_codec keeps the rules of codecs", T, float, double) {
  check_codec<stochastic_binary_codec<T>>({});
  check_codec<stochastic_binary_codec<T>>({code_route::gather, 77});
  check_draws<stochastic_binary_codec<T>>({});
}

TEST_CASE_TEMPLATE("stochastic_binary_codec has the code of its formulas", T, float, double) {
  cpu_context ctx;
  std::vector<T> no_memory;
  std::vector<coded_tensor> tensors = vectors_of<T>({1, 70, 33, 90000, 5, 1000});
  tensors[1].first = 37;  // a part of a parameter
  const std::vector<T> values = normal_values<T>(coded_size(tensors), 1);
  const code_place place{3, 8, 1};
  const std::size_t word_bytes = (values.size() + 31) / 32 * 4;
  std::size_t open = 0;
  for (std::uint64_t seed = 1; seed < 4; ++seed) {
    std::vector<std::byte> wanted(word_bytes + 2 * tensors.size() * sizeof(T));
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      const auto begin = values.begin() + tensors[t].offset;
      const auto [low, high] = std::minmax_element(begin, begin + tensors[t].size);
      detail::write_at(wanted, word_bytes + 2 * t * sizeof(T), *low);
      detail::write_at(wanted, word_bytes + (2 * t + 1) * sizeof(T), *high);
      const random_stream random = detail::code_randoms(seed, "stochastic_binary", place, tensors[t]);
      for (index_t i = 0; i < tensors[t].size; ++i) {
        if (*low == *high) continue;
        const auto at = static_cast<std::size_t>(tensors[t].offset + i);
        const std::uint32_t draw = detail::draw_at(random, static_cast<std::uint64_t>(tensors[t].first + i));
        wanted[at / 8] |= static_cast<std::byte>(plain_binary_field(values[at], *low, *high, draw) << at % 8);
        open += undecided(plain_share(values[at] - *low, *high - *low), draw) ? 1U : 0U;
      }
    }
    stochastic_binary_codec<T> codec(tensors, {code_route::gather, seed});
    CHECK(coded(codec, ctx, values, no_memory, place) == wanted);
  }
  CHECK(open > 0);  // both ways to draw were taken
}

TEST_CASE_TEMPLATE("stochastic_binary_codec: tensors of one value or two are exact", T, float, double) {
  cpu_context ctx;
  std::vector<T> no_memory;
  stochastic_binary_codec<T> codec(vectors_of<T>({5, 1, 40}));
  std::vector<T> values(46, T(-0.3));
  for (std::size_t i = 0; i < 5; ++i) values[i] = T(0.1);
  values[5] = T(7);
  for (std::size_t i = 6; i < 46; i += 3) values[i] = T(1.7);
  for (std::uint64_t step = 0; step < 50; ++step) {
    CHECK(decoded(codec, ctx, coded(codec, ctx, values, no_memory, {0, step, 0}), 46) == values);
  }
}

TEST_CASE_TEMPLATE(
    "stochastic_binary_codec: the mean of draws is the gradient, with the variance of two values", T, float,
    double) {
  constexpr int draws = 4000;
  std::vector<T> values = normal_values<T>(64, 3);
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  std::vector<double> variances;
  for (const T value : values) {
    variances.push_back(static_cast<double>(*high - value) * static_cast<double>(value - *low));
  }
  stochastic_binary_codec<T> codec(vectors_of<T>({64}));
  const drawn_means found = means_of_draws(codec, values, draws);
  check_means(found, {values.begin(), values.end()}, variances, draws);
  const std::vector<double> spread = variances_of(found);
  for (std::size_t i = 0; i < values.size(); ++i) {
    CHECK(std::abs(spread[i] - variances[i]) < 0.02 * std::pow(static_cast<double>(*high - *low), 2));
  }
}

TEST_CASE_TEMPLATE("stochastic_binary_codec: tiny and wide ranges, and values that are not finite", T, float,
                   double) {
  cpu_context ctx;
  std::vector<T> no_memory;
  const T unit = std::numeric_limits<T>::denorm_min();
  const std::vector<T> tiny = {unit, -unit, -unit, unit};
  stochastic_binary_codec<T> codec(vectors_of<T>({4}));
  CHECK(decoded(codec, ctx, coded(codec, ctx, tiny, no_memory), 4) == tiny);
  const T most = std::numeric_limits<T>::max(), infinity = std::numeric_limits<T>::infinity();
  for (const std::vector<T>& bad :
       {std::vector<T>{1, std::numeric_limits<T>::quiet_NaN(), 2, 3}, std::vector<T>{infinity, 1, 2, 3},
        std::vector<T>{1, 2, -infinity, 3}, std::vector<T>{1, -most, most, 2}}) {
    for (const T value : decoded(codec, ctx, coded(codec, ctx, bad, no_memory), 4)) CHECK(std::isnan(value));
  }
  // In a tensor of many chunks, wherever the value is; its neighbours are not touched.
  stochastic_binary_codec<T> large(vectors_of<T>({3, 50000, 2}));
  for (const std::size_t at : {3U, 20000U, 50002U}) {
    std::vector<T> values = normal_values<T>(50005, 2);
    values[at] = std::numeric_limits<T>::quiet_NaN();
    const std::vector<T> found = decoded(large, ctx, coded(large, ctx, values, no_memory), 50005);
    std::size_t finite = 0;
    for (const T value : found) finite += std::isfinite(value) ? 1U : 0U;
    CHECK(finite == 5);
  }
}

TEST_CASE(
    "stochastic binary: both routes give all ranks the same bits, and the mean of gradients in the mean") {
  odd_parameters<float> net;
  cpu_context ctx;
  for (const code_route route : {code_route::gather, code_route::two_hop}) {
    for (const int count : {1, 2, 3, 4}) {
      CAPTURE(to_string(route));
      CAPTURE(count);
      simulated_ranks<any_compressor<float>> ranks(count, [&](int) {
        return new_compressor(net.store, stochastic_binary_options{route, 4});
      });
      std::vector<std::vector<float>> given;
      std::vector<std::vector<double>> wide;
      for (int w = 0; w < count; ++w) {
        wide.push_back(gradients_of(net.store, w, 9));
        given.emplace_back(wide.back().begin(), wide.back().end());
      }
      const int steps = count == 2 ? 1500 : 50;
      drawn_means found{std::vector<double>(given[0].size(), 0.0), std::vector<double>(given[0].size(), 0.0)};
      for (int step = 0; step < steps; ++step) {
        auto gradients = given;
        ranks.step(ctx, gradients);
        REQUIRE(ranks_agree(gradients));
        REQUIRE(ranks.payload_bytes(0) == static_cast<std::size_t>(ranks[0].payload_bytes()));
        for (std::size_t i = 0; i < found.mean.size(); ++i) {
          const auto value = static_cast<double>(gradients[0][i]);
          found.mean[i] += value / steps;
          found.square[i] += value * value / steps;
        }
      }
      if (count == 2) check_means(found, mean_of(wide), variances_of(found), steps);
    }
  }
}

TEST_CASE("stochastic binary: bytes of ResNet-18, and options") {
  using resnet18_tensors::resnet18_tensors;
  CHECK(stochastic_binary_codec<float>(resnet18_tensors(false)).most_bytes() == 1'397'212);
  CHECK(stochastic_binary_codec<float>(resnet18_tensors(true)).most_bytes() == 417'612);
  odd_parameters<float> net;
  CHECK(describe(stochastic_binary_options{}) == "stochastic binary, seed 1, gather");
  CHECK(new_compressor(net.store, stochastic_binary_options{code_route::two_hop, 5}).describe() ==
        "stochastic binary, seed 5, two hops, no memory");
}

}  // namespace
