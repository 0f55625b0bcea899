// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cmath>

#include <pufferfish/compress/qsgd.hpp>
#include <pufferfish/compress/stochastic_binary.hpp>
#include <pufferfish/compress/tern_grad.hpp>

#include "codec_support.hpp"
#include "resnet18_tensors.hpp"
#include "simulated_ranks.hpp"

// Codes that round at random: QSGD, TernGrad, stochastic binary.

namespace {

using namespace codec_support;

constexpr int draws = 4000;

/// Sums over seeded draws of what a codec makes of `values`, and of the squares.
template <class T>
struct drawn {
  std::vector<double> sum, square;
  std::vector<std::vector<T>> seen;  // of the first few

  template <class Codec>
  drawn(Codec& codec, const std::vector<T>& values) : sum(values.size()), square(values.size()) {
    cpu_context ctx;
    std::vector<T> none;
    for (int draw = 0; draw < draws; ++draw) {
      const auto code = coded(codec, ctx, values, none, {0, static_cast<std::uint64_t>(draw), 0});
      const std::vector<T> found = decoded(codec, ctx, code, static_cast<index_t>(values.size()));
      for (std::size_t i = 0; i < values.size(); ++i) {
        sum[i] += static_cast<double>(found[i]);
        square[i] += static_cast<double>(found[i]) * static_cast<double>(found[i]);
      }
      if (draw < 20) seen.push_back(found);
    }
  }

  /// Elements whose mean is further than five standard deviations of it from `wanted`.
  int biased(const std::vector<T>& wanted) const {
    int count = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const double mean = sum[i] / draws, variance = std::max(0.0, square[i] / draws - mean * mean);
      const double allowed = 5.0 * std::sqrt(variance / draws) + 1e-6;
      count += std::abs(mean - static_cast<double>(wanted[i])) > allowed ? 1 : 0;
    }
    return count;
  }
};

template <class T>
std::vector<T> normal_values(index_t size, std::uint64_t seed) {
  std::vector<T> values(static_cast<std::size_t>(size));
  fill_normal(std::span<T>(values), 1.0, random_stream(seed, 17));
  return values;
}

TEST_CASE_TEMPLATE("codes that round at random keep the rules of codecs", T, float, double) {
  for (const int bits : {2, 4, 8}) {
    for (const index_t bucket : {1, 7, 512}) {
      check_codec<qsgd_codec<T>>({.bits = bits, .bucket = bucket});
      check_codec<qsgd_codec<T>>({.bits = bits, .bucket = bucket, .norm = qsgd_norm::max});
    }
  }
  check_codec<stochastic_binary_codec<T>>({});
  check_codec<tern_codec<T>>({.shared_scaler = false});
  check_codec<tern_codec<T>>({.clip = 0.0, .shared_scaler = false});
}

TEST_CASE_TEMPLATE("codes that round at random are right in the mean", T, float, double) {
  const std::vector<T> values = normal_values<T>(64, 5);
  for (const int bits : {2, 4, 8}) {
    for (const auto norm : {qsgd_norm::l2, qsgd_norm::max}) {
      qsgd_codec<T> codec(vectors_of<T>({64}), {.bits = bits, .bucket = 48, .norm = norm});
      CHECK(drawn<T>(codec, values).biased(values) == 0);
    }
  }
  stochastic_binary_codec<T> binary(vectors_of<T>({40, 24}));
  CHECK(drawn<T>(binary, values).biased(values) == 0);
  tern_codec<T> unclipped(vectors_of<T>({40, 24}), {.clip = 0.0, .shared_scaler = false});
  CHECK(drawn<T>(unclipped, values).biased(values) == 0);
  // With a limit of one deviation: towards the limited values.
  tern_codec<T> limited(vectors_of<T>({64}), {.clip = 1.0, .shared_scaler = false});
  double mean = 0, square = 0;
  for (const T value : values) mean += static_cast<double>(value) / 64;
  for (const T value : values) square += std::pow(static_cast<double>(value) - mean, 2) / 64;
  std::vector<T> wanted = values;
  for (T& value : wanted)
    value = std::clamp(value, static_cast<T>(-std::sqrt(square)), static_cast<T>(std::sqrt(square)));
  CHECK(drawn<T>(limited, values).biased(wanted) == 0);
}

TEST_CASE("QSGD: levels around a value, the probability of zero, and the bound of the variance") {
  // |x| = 0.6 of the norm, 4 bits: 7 levels, so 4.2 of them: level 5 with probability 0.2, else 4.
  qsgd_codec<double> four(vectors_of<double>({2}), {.bits = 4});
  const std::vector<double> values{0.6, -0.8};
  const drawn<double> of_four(four, values);
  for (const auto& one : of_four.seen) {
    const double level = one[0] * 7;
    CHECK((level == doctest::Approx(4.0) || level == doctest::Approx(5.0)));
  }
  CHECK(of_four.sum[0] / draws * 7 == doctest::Approx(4.2).epsilon(0.01));
  // One level: not zero with probability |x| / norm.
  qsgd_codec<double> two(vectors_of<double>({2}), {.bits = 2});
  CHECK(drawn<double>(two, values).square[0] / draws == doctest::Approx(0.6).epsilon(0.05));
  for (const int bits : {2, 4, 8}) {
    const std::vector<double> many = normal_values<double>(256, 9);
    qsgd_codec<double> codec(vectors_of<double>({256}), {.bits = bits, .bucket = 256});
    const drawn<double> seen(codec, many);
    double lost = 0, norm = 0;
    for (std::size_t i = 0; i < many.size(); ++i) {
      lost += seen.square[i] / draws - 2 * many[i] * seen.sum[i] / draws + many[i] * many[i];
      norm += many[i] * many[i];
    }
    const double levels = (1 << (bits - 1)) - 1;
    CHECK(lost <= 1.02 * std::min(256 / (levels * levels), 16 / levels) * norm);
  }
}

TEST_CASE("TernGrad: values of the scaler's magnitude are exact; so is stochastic binary for one value") {
  cpu_context ctx;
  std::vector<float> none;
  tern_codec<float> codec(vectors_of<float>({6}), {.clip = 0.0, .shared_scaler = false});
  const std::vector<float> values{2, -2, 2, 2, -2, 0};
  stochastic_binary_codec<float> binary(vectors_of<float>({5}));
  const std::vector<float> same(5, -0.3F);
  for (std::uint64_t step = 0; step < 50; ++step) {
    CHECK(decoded(codec, ctx, coded(codec, ctx, values, none, {0, step, 0}), 6) == values);
    CHECK(decoded(binary, ctx, coded(binary, ctx, same, none, {0, step, 0}), 5) == same);
  }
}

TEST_CASE("codes that round at random: bytes for ResNet-18, dense and hybrid") {
  const auto dense = resnet18_tensors::resnet18_tensors(false),
             hybrid = resnet18_tensors::resnet18_tensors(true);
  const auto qsgd = [&](int bits, const auto& tensors) {
    return qsgd_codec<float>(tensors, {.bits = bits}).most_bytes();
  };
  CHECK(qsgd(2, dense) == 2'880'755);
  CHECK(qsgd(4, dense) == 5'674'213);
  CHECK(qsgd(8, dense) == 11'261'130);
  CHECK(qsgd(2, hybrid) == 860'099);
  CHECK(qsgd(4, hybrid) == 1'694'133);
  CHECK(qsgd(8, hybrid) == 3'362'202);
  CHECK(stochastic_binary_codec<float>(dense).most_bytes() == 1'397'212);
  CHECK(stochastic_binary_codec<float>(hybrid).most_bytes() == 417'612);
  CHECK(tern_codec<float>(dense, {.shared_scaler = false}).most_bytes() == 2'793'699);
  CHECK(tern_codec<float>(hybrid, {.shared_scaler = false}).most_bytes() == 834'331);
  CHECK(shared_tern_grad<float>(dense, {}).payload_bytes() == 2'793'459 + 480);
  CHECK(shared_tern_grad<float>(hybrid, {}).payload_bytes() == 834'035 + 592);
}

TEST_CASE("options out of their range are refused with their values") {
  const auto tensors = vectors_of<float>({4});
  CHECK_THROWS_WITH_AS(qsgd_codec<float>(tensors, {.bits = 3}), doctest::Contains("3"), value_error);
  CHECK_THROWS_WITH_AS(qsgd_codec<float>(tensors, {.bucket = 0}), doctest::Contains("0"), value_error);
  CHECK_THROWS_WITH_AS(tern_codec<float>(tensors, {.clip = -1.0}), doctest::Contains("-1"), value_error);
}

}  // namespace
