// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include <pufferfish/compress/sparse/dgc.hpp>
#include <pufferfish/compress/sparse/sampled_selector.hpp>
#include <pufferfish/distributed/compression_options.hpp>

#include "../../support/codec_support.hpp"
#include "../../support/simulated_ranks.hpp"

namespace {

using namespace codec_support;
using rank_simulation::ranks_agree;
using rank_simulation::simulated_ranks;

/// The selected entries of one tensor, by the words of the header, with plain loops.
template <class T>
std::vector<std::int32_t> plain_selection(const std::vector<T>& values, index_t k) {
  const auto size = static_cast<index_t>(values.size());
  const double share = static_cast<double>(k) / static_cast<double>(size);
  const auto wanted = std::max(static_cast<index_t>(std::ceil(0.01 * static_cast<double>(size))),
                               static_cast<index_t>(std::ceil(2.0 / share)));
  std::vector<T> sample;
  for (index_t i = 0; i < size; i += (size + wanted - 1) / wanted) {
    sample.push_back(std::abs(values[static_cast<std::size_t>(i)]));
  }
  std::sort(sample.begin(), sample.end(), std::greater<>());
  const double rank = std::ceil(share * static_cast<double>(sample.size()));
  T threshold = sample[static_cast<std::size_t>(rank) - 1];
  std::vector<std::int32_t> found;
  for (int pass = 0;; ++pass) {
    found.clear();
    for (index_t i = 0; i < size; ++i) {
      if (std::abs(values[static_cast<std::size_t>(i)]) >= threshold) {
        found.push_back(static_cast<std::int32_t>(i));
      }
    }
    const auto count = static_cast<double>(found.size()), aim = static_cast<double>(k);
    if (pass == 10 || count >= 0.8 * aim) break;
    threshold *= T(0.8);
  }
  std::stable_sort(found.begin(), found.end(), [&](std::int32_t a, std::int32_t b) {
    return std::abs(values[static_cast<std::size_t>(a)]) > std::abs(values[static_cast<std::size_t>(b)]);
  });
  if (static_cast<index_t>(found.size()) > k) found.resize(static_cast<std::size_t>(k));
  std::sort(found.begin(), found.end());
  found.resize(static_cast<std::size_t>(k), static_cast<std::int32_t>(size));
  return found;
}

template <class T>
std::vector<T> values_of(int kind, index_t size) {
  std::vector<T> values(static_cast<std::size_t>(size));
  fill_normal(std::span<T>(values), 1.0, random_stream(4, static_cast<std::uint64_t>(size)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    T& value = values[i];
    if (kind == 1) value = i % 50 == 1 ? value : T(0);              // the sample may have zeros only
    if (kind == 2) value = T(-3);                                   // all alike
    if (kind == 3) value *= value * value * value * value * value;  // heavy tails
    if (kind == 4) value = i % 2 == 0 ? T(100) + value : value;     // a sample that misleads
  }
  return values;
}

TEST_CASE_TEMPLATE("sampled_selector is what its formulas say", T, float, double) {
  cpu_context one, three({3, 0});
  int filled = 0, cut = 0;
  for (const index_t size : {1, 5, 100, 4097, 30000}) {
    for (int kind = 0; kind < 5; ++kind) {
      const std::vector<T> values = values_of<T>(kind, size);
      for (const double share : {0.001, 0.01, 0.3, 1.0}) {
        const auto k = static_cast<index_t>(std::ceil(share * static_cast<double>(size)));
        CAPTURE(size);
        CAPTURE(kind);
        CAPTURE(k);
        sampled_selector<T> selector("test", vectors_of<T>({size}));
        for (cpu_context* ctx : {&one, &three}) {
          selector.select(*ctx, detail::entry_lists({k}), values);
          const std::vector<std::int32_t> found(selector.indices().begin(), selector.indices().end());
          REQUIRE(found == plain_selection(values, k));
          for (std::size_t i = 0; i < found.size(); ++i) {
            const auto at = static_cast<std::size_t>(found[i]);
            REQUIRE(selector.values()[i] == (at < values.size() ? values[at] : T(0)));
          }
          filled += found.back() == size ? 1 : 0;
          cut += found.back() < size ? 1 : 0;
        }
      }
    }
  }
  CHECK(filled > 0);
  CHECK(cut > 0);
}

TEST_CASE("sampled_selector: about the right number of the largest of normal numbers; NaN is among them") {
  cpu_context ctx;
  const index_t size = 200000, k = 200;
  std::vector<float> values = values_of<float>(0, size);
  values[4711] = std::numeric_limits<float>::quiet_NaN();
  sampled_selector<float> selector("test", vectors_of<float>({size}));
  selector.select(ctx, detail::entry_lists({k}), values);
  const auto indices = selector.indices();
  CHECK(std::find(indices.begin(), indices.end(), 4711) != indices.end());
  const auto padding = std::count(indices.begin(), indices.end(), static_cast<std::int32_t>(size));
  CHECK(padding <= k / 5);
  // The entries are the largest ones but for those that the padding stands for.
  values[4711] = 100.0F;
  const auto largest = reference::select_largest<float>(values, k - padding);
  CHECK(std::equal(largest.begin(), largest.end(), indices.begin()));
}

template <class T>
std::vector<std::vector<T>> gradients_of_ranks(const parameter_store<T>& store, int ranks,
                                               std::uint64_t step) {
  std::vector<std::vector<T>> all;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::vector<double> values = gradients_of(store, rank, step);
    all.emplace_back(values.begin(), values.end());
  }
  return all;
}

TEST_CASE_TEMPLATE("dgc with a sampled threshold: same bits on all ranks, and nothing is lost", T, float,
                   double) {
  cpu_context one, three({3, 0});
  for (const bool half : {false, true}) {
    const odd_parameters<T> net;
    dgc_options options;
    options.ratio = 0.03;
    options.momentum = 0.0;
    options.half_values = half;
    options.sampled = true;
    const auto make = [&](int) { return dgc<T>(net.store, options); };
    simulated_ranks<dgc<T>> a(3, make), b(3, make);
    options.sampled = false;
    simulated_ranks<dgc<T>> exact(3, make);
    std::vector<double> given(net.store.values().size(), 0.0), taken = given;
    int differs = 0;
    for (std::uint64_t step = 0; step < 50; ++step) {
      auto x = gradients_of_ranks(net.store, 3, step);
      if (step == 9) x.assign(3, std::vector<T>(x[0].size(), T(0)));
      auto y = x, z = x;
      for (const auto& g : x) {
        for (std::size_t i = 0; i < given.size(); ++i) given[i] += static_cast<double>(g[i]) / 3;
      }
      a.step(one, x);
      b.step(three, y);
      exact.step(one, z);
      CHECK(ranks_agree(x));
      CHECK(x == y);
      CHECK(a.payload_bytes(1) == exact.payload_bytes(1));
      differs += x[0] == z[0] ? 0 : 1;
      for (std::size_t i = 0; i < taken.size(); ++i) taken[i] += static_cast<double>(x[0][i]);
    }
    CHECK(differs > 0);
    double worst = 0.0;
    for (std::size_t w = 0; w < 3; ++w) {
      const auto v = a[w].states()[1].values;
      for (std::size_t i = 0; i < taken.size(); ++i) taken[i] += static_cast<double>(v[i]) / 3;
    }
    for (std::size_t i = 0; i < given.size(); ++i) worst = std::max(worst, std::abs(taken[i] - given[i]));
    CHECK(worst < (sizeof(T) == 4 ? 1e-4 : 1e-11));
  }
}

TEST_CASE("dgc with a sampled threshold: entries that fill a block, and those that are refused") {
  parameter<float> matrix(logical_layout::matrix(4, 4), parameter_role::weight);
  parameter_store<float> store;
  store.pack([&](state_visitor<float>& visitor) { visitor.on_parameter("m", matrix); });
  cpu_context ctx;
  const exchange_place place{0, 1, 0};
  const auto decode_with = [&](bool sampled, std::vector<std::int32_t> indices) {
    dgc<float> compressor(store, {.ratio = 0.25, .sampled = sampled});
    std::vector<float> gradients(16, 1.0F);
    const auto message = compressor.encode(ctx, place, 0, gradients);
    REQUIRE((*message.gathered)[0].size() == 32);
    std::memcpy((*message.gathered)[0].data() + 16, indices.data(), 16);
    compressor.decode(ctx, place, 0, gradients);
    return std::count(gradients.begin(), gradients.end(), 1.0F);
  };
  CHECK(decode_with(true, {2, 5, 16, 16}) == 2);
  CHECK(decode_with(true, {2, 5, 7, 16}) == 3);
  CHECK(decode_with(true, {16, 16, 16, 16}) == 0);
  CHECK_THROWS_AS(decode_with(true, {2, 16, 5, 16}), value_error);
  CHECK_THROWS_AS(decode_with(true, {2, 5, 5, 16}), value_error);
  CHECK_THROWS_AS(decode_with(true, {2, 5, 16, 17}), value_error);
  CHECK_THROWS_AS(decode_with(false, {2, 5, 7, 16}), value_error);
  CHECK_THROWS_AS(decode_with(false, {2, 5, 16, 16}), value_error);
}

TEST_CASE("dgc: its own weight decay and sampling are named") {
  dgc_options options;
  CHECK_FALSE(options.brings_weight_decay());
  CHECK_FALSE(compression_options(options).brings_weight_decay());
  options.weight_decay = 1e-4;
  CHECK(options.brings_weight_decay());
  CHECK(compression_options(options).brings_weight_decay());
  static_assert(!dgc_options{}.brings_weight_decay());
  CHECK(describe(dgc_options{.sampled = true}) ==
        "DGC, ratio 0.001, momentum 0.9, factor masking, sampled threshold");
}

}  // namespace
