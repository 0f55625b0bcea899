// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include <pufferfish/compress/atomo/atomo.hpp>
#include <pufferfish/compress/atomo/entry_atomo.hpp>
#include <pufferfish/linalg/svd/svd.hpp>

#include "../../support/codec_support.hpp"
#include "../../support/resnet18_tensors.hpp"
#include "../../support/simulated_ranks.hpp"

namespace {

using namespace codec_support;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

template <class T>
std::vector<T> normal_values(index_t size, std::uint64_t stream) {
  std::vector<T> values(static_cast<std::size_t>(size));
  fill_normal(std::span<T>(values), 1.0, random_stream(6, stream));
  return values;
}

double sum_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

double variance_of(const std::vector<double>& weights, double sparsity) {
  const std::vector<double> p = atomo_probabilities(weights, sparsity);
  double variance = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    if (p[i] > 0.0) variance += weights[i] * weights[i] * (1.0 / p[i] - 1.0);
  }
  return variance;
}

/// The sequential rule, word by word.
std::vector<double> plain_probabilities(const std::vector<double>& weights, double s) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] != 0.0) order.push_back(i);
  }
  std::vector<double> p(weights.size(), 0.0);
  if (s >= static_cast<double>(order.size())) {
    for (const std::size_t i : order) p[i] = 1.0;
    return p;
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return std::abs(weights[a]) > std::abs(weights[b]); });
  std::vector<double> tails(order.size() + 1, 0.0);
  for (std::size_t i = order.size(); i-- > 0;) tails[i] = tails[i + 1] + std::abs(weights[order[i]]);
  std::size_t i = 0;
  for (; s * std::abs(weights[order[i]]) > tails[i]; ++i, s -= 1) p[order[i]] = 1.0;
  for (std::size_t j = i; j < order.size(); ++j) p[order[j]] = s * std::abs(weights[order[j]]) / tails[i];
  return p;
}

TEST_CASE("ATOMO's probabilities: the ones of small examples") {
  using list = std::vector<double>;
  CHECK(atomo_probabilities(list{4, 2, 1, 1}, 2) == list{1, .5, .25, .25});
  CHECK(variance_of({4, 2, 1, 1}, 2) == 10.0);
  CHECK(atomo_probabilities(list{1, -2, 4, -1}, 3) == list{.5, 1, 1, .5});
  CHECK(variance_of({4, 2, 1, 1}, 3) == 2.0);
  CHECK(atomo_probabilities(list{10, 1, 1, 1, 1}, 2) == list{1, .25, .25, .25, .25});
  CHECK(variance_of({10, 1, 1, 1, 1}, 2) == 12.0);
  CHECK(atomo_probabilities(list{4, 0, 2, 0}, 2) == list{1, 0, 1, 0});
  CHECK(atomo_probabilities(list{4, 2, 1}, 17) == list{1, 1, 1});
  CHECK(atomo_probabilities(list{3, 1}, .5) == list{.375, .125});
  CHECK(atomo_probabilities(list{0, 0}, 1) == list{0, 0});
  CHECK(atomo_probabilities(list{}, 1).empty());
}

TEST_CASE("ATOMO's probabilities equal those of the sequential rule, and sum to the sparsity") {
  for (const index_t size : {1, 2, 3, 17, 64, 501}) {
    for (const double power : {0.0, 1.0, 3.0, 9.0}) {  // equal weights to very unequal ones
      std::vector<double> weights = normal_values<double>(size, static_cast<std::uint64_t>(size));
      for (double& weight : weights) weight = std::copysign(std::pow(std::abs(weight), power), weight);
      if (size > 3) weights[1] = weights[3] = 0.0;
      const auto atoms = static_cast<double>(
          std::count_if(weights.begin(), weights.end(), [](double weight) { return weight != 0.0; }));
      for (const double s : {.3, 1.0, 2.0, 2.5, 16.0, 60.0, 498.0, 499.0, 600.0}) {
        CAPTURE(size);
        CAPTURE(power);
        CAPTURE(s);
        const std::vector<double> found = atomo_probabilities(weights, s);
        CHECK(largest_difference<double>(found, plain_probabilities(weights, s)) < 1e-12);
        CHECK(sum_of(found) == doctest::Approx(std::min(s, atoms)).epsilon(1e-12));
      }
    }
  }
}

TEST_CASE("ATOMO's probabilities: those of TernGrad and of QSGD with one level") {
  const std::vector<double> g = normal_values<double>(200, 1);
  double l1 = 0, squares = 0, largest = 0;
  for (const double value : g) {
    l1 += std::abs(value);
    squares += value * value;
    largest = std::max(largest, std::abs(value));
  }
  const std::vector<double> ternary = atomo_probabilities(g, l1 / largest);
  const std::vector<double> quantized = atomo_probabilities(g, l1 / std::sqrt(squares));
  for (std::size_t i = 0; i < g.size(); ++i) {
    CHECK(ternary[i] == doctest::Approx(std::abs(g[i]) / largest).epsilon(1e-12));
    CHECK(quantized[i] == doctest::Approx(std::abs(g[i]) / std::sqrt(squares)).epsilon(1e-12));
  }
}

TEST_CASE_TEMPLATE("ATOMO codecs keep the rules of codecs", T, float, double) {
  for (const double sparsity : {.5, 2.0, 100.0}) check_codec<spectral_atomo_codec<T>>({sparsity, 3});
  for (const double ratio : {.01, .3, 1.0}) check_codec<entry_atomo_codec<T>>({ratio, 3});
}

/// The matrix of a tensor in logical order, written down from the rules.
tensor<double, 2> plain_matrix(const coded_tensor& coded, const std::vector<double>& values) {
  const logical_layout& layout = coded.layout;
  const bool whole = coded.size == layout.size() && layout.dims > 1;
  const index_t taps = whole ? layout.shape[2] * layout.shape[3] : 1;
  std::vector<double> logical;
  if (whole) {
    for (index_t o = 0; o < layout.shape[0]; ++o) {
      for (index_t i = 0; i < layout.shape[1]; ++i) {
        for (index_t h = 0; h < layout.shape[2]; ++h) {
          for (index_t w = 0; w < layout.shape[3]; ++w) {
            logical.push_back(
                values[static_cast<std::size_t>(coded.offset + o * layout.strides[0] + i * layout.strides[1] +
                                                h * layout.strides[2] + w * layout.strides[3])]);
          }
        }
      }
    }
  } else {
    logical.assign(values.begin() + coded.offset, values.begin() + coded.offset + coded.size);
  }
  const index_t columns = whole && taps == 1 ? layout.shape[1] : 2 * taps;
  const index_t rows = (static_cast<index_t>(logical.size()) + columns - 1) / columns;
  tensor<double, 2> result({rows, columns});
  std::copy(logical.begin(), logical.end(), result.data());
  return result;
}

std::vector<double> singular_values(const tensor<double, 2>& matrix) {
  return svd(matrix.view()).singular_values;
}

std::vector<coded_tensor> tensors_of_all_kinds() {
  return tensors_of({logical_layout::kernel(20, 8, 3, 3),
                     logical_layout::kernel(7, 3, 3, 3),
                     logical_layout::kernel(6, 5, 7, 1),
                     logical_layout::kernel(9, 1, 3, 3),
                     logical_layout::kernel(2, 2, 3, 3),
                     logical_layout::vector(33),
                     logical_layout::vector(64),
                     logical_layout::matrix(10, 51),
                     logical_layout::matrix(51, 10),
                     logical_layout::kernel(24, 12, 1, 1),
                     logical_layout::kernel(12, 24, 1, 1),
                     {2, {40, 7, 1, 1}, {7, 1, 0, 0}},
                     {2, {7, 40, 1, 1}, {40, 1, 0, 0}},
                     logical_layout::vector(1),
                     logical_layout::matrix(1, 1),
                     logical_layout::matrix(140, 130),
                     // More rows than a task has.
                     logical_layout::kernel(40, 130, 3, 3),
                     logical_layout::matrix(4000, 9)});
}

/// Singular values, kept and divided by probabilities, in the order of the code.
template <class T>
std::vector<std::vector<double>> values_of_code(const std::vector<coded_tensor>& tensors,
                                                const std::vector<double>& values,
                                                const std::vector<std::byte>& code) {
  std::vector<std::vector<double>> result;
  std::size_t at = 0;
  for (const coded_tensor& one : tensors) {
    const tensor<double, 2> matrix = plain_matrix(one, values);
    const auto kept = detail::read_at<std::uint32_t>(code, at);
    at += 4;
    result.emplace_back();
    for (std::uint32_t j = 0; j < kept; ++j) {
      result.back().push_back(static_cast<double>(detail::read_at<T>(code, at)));
      at += static_cast<std::size_t>(1 + matrix.extent(0) + matrix.extent(1)) * sizeof(T);
    }
  }
  CHECK(at == code.size());
  return result;
}

TEST_CASE_TEMPLATE("spectral ATOMO: with the sparsity of the rank, all singular triplets and the input", T,
                   float, double) {
  cpu_context ctx;
  const std::vector<coded_tensor> all = tensors_of_all_kinds();
  const double tolerance = sizeof(T) == 4 ? 2e-6 : 1e-11;
  // Whole tensors, and parts of them.
  for (const index_t first : {0, 1000}) {
    const index_t size = coded_size(all) - first;
    const auto tensors = coded_parts(all, first, coded_size(all));
    const std::vector<T> values = normal_values<T>(size, 2);
    const std::vector<double> doubles(values.begin(), values.end());
    spectral_atomo_codec<T> codec(tensors, {1000.0});
    std::vector<T> memory(values.size(), T(0));
    const auto code = coded(codec, ctx, values, memory);
    CHECK(code.size() == codec.most_bytes());
    CHECK(codec.expected_bytes() == static_cast<double>(code.size()));
    CHECK(largest_difference<T>(decoded(codec, ctx, code, size), doubles) < tolerance);
    CHECK(largest_difference<T>(memory, std::vector<double>(memory.size(), 0.0)) < tolerance);
    const auto found = values_of_code<T>(tensors, doubles, code);
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      CAPTURE(to_string(tensors[t].layout));
      const std::vector<double> wanted = singular_values(plain_matrix(tensors[t], doubles));
      CHECK(largest_difference<double>(found[t], wanted) < 10.0 * tolerance);
    }
  }
}

TEST_CASE("spectral ATOMO: matrices of a lower rank have fewer triplets") {
  cpu_context ctx;
  const std::vector<coded_tensor> tensors =
      tensors_of({logical_layout::matrix(30, 20), logical_layout::kernel(16, 8, 3, 3)});
  std::vector<float> values = normal_values<float>(coded_size(tensors), 3), none;
  const std::vector<float> left = normal_values<float>(60, 4), right = normal_values<float>(40, 5);
  for (std::size_t i = 0; i < 600; ++i) {
    values[i] = left[i % 30] * right[i / 30] + left[30 + i % 30] * right[20 + i / 30];
  }
  // Nothing but the first tap.
  for (std::size_t i = 600 + 128; i < values.size(); ++i) values[i] = 0.0F;
  spectral_atomo_codec<double> codec(tensors, {2.0});
  const std::vector<double> doubles(values.begin(), values.end());
  std::vector<double> empty;
  // Rounding to float adds small triplets to the first matrix, but not to the second.
  const auto found = values_of_code<double>(tensors, doubles, coded(codec, ctx, doubles, empty));
  CHECK(found[1].size() == 2);
  for (std::size_t i = 0; i < 600; ++i) {
    values[i] = std::round(left[i % 30] * 8) * std::round(right[i / 30] * 8) -
                std::round(left[30 + i % 30] * 8) * std::round(right[20 + i / 30] * 8);
  }
  spectral_atomo_codec<float> single(tensors, {2.0});
  const auto code = coded(single, ctx, values, none);
  CHECK(detail::read_at<std::uint32_t>(code, 0) == 2U);
  CHECK(largest_difference<float>(decoded(single, ctx, code, 600 + 1152), {values.begin(), values.end()}) <
        2e-4);  // of values up to 1000
}

/// The mean of codes over draws, of each element and of the squared error, against what it must be.
template <class Codec>
void check_moments(Codec& codec, const std::vector<typename Codec::value_type>& d, double variance,
                   int draws = 4000) {
  using T = typename Codec::value_type;
  cpu_context ctx;
  const std::size_t checked = std::min<std::size_t>(64, d.size());
  std::vector<double> sums(checked, 0.0), squares(checked, 0.0);
  double errors = 0, squared_errors = 0;
  std::vector<T> none;
  for (int draw = 0; draw < draws; ++draw) {
    const code_place place{1, static_cast<std::uint64_t>(draw), 0};
    const auto values =
        decoded(codec, ctx, coded(codec, ctx, d, none, place), static_cast<index_t>(d.size()));
    double error = 0;
    for (std::size_t i = 0; i < d.size(); ++i) {
      const double lost = static_cast<double>(values[i]) - static_cast<double>(d[i]);
      error += lost * lost;
      if (i >= checked) continue;
      sums[i] += lost;
      squares[i] += lost * lost;
    }
    errors += error;
    squared_errors += error * error;
  }
  const double n = draws;
  for (std::size_t i = 0; i < checked; ++i) {
    CHECK(std::abs(sums[i] / n) <= 5.0 * std::sqrt(squares[i]) / n + 1e-6);
  }
  const double mean = errors / n, deviation = std::sqrt(std::max(0.0, squared_errors / n - mean * mean) / n);
  CHECK(std::abs(mean - variance) <= 5.0 * deviation + 1e-5 * variance);
  CHECK(mean > 0.5 * variance);
}

TEST_CASE("spectral ATOMO is unbiased, with the variance of its probabilities") {
  const std::vector<coded_tensor> tensors = tensors_of(
      {logical_layout::kernel(4, 6, 3, 3), logical_layout::matrix(7, 5), logical_layout::vector(9)});
  const std::vector<double> d = normal_values<double>(coded_size(tensors), 6);
  for (const double sparsity : {1.0, 2.5}) {
    double variance = 0;
    for (const coded_tensor& one : tensors) {
      variance += variance_of(singular_values(plain_matrix(one, d)), sparsity);
    }
    spectral_atomo_codec<double> codec(tensors, {sparsity, 11});
    check_moments(codec, d, variance);
    spectral_atomo_codec<float> single(tensors, {sparsity, 12});
    check_moments(single, {d.begin(), d.end()}, variance);
  }
}

TEST_CASE("spectral ATOMO: singular values 4, 2, 1, 1 have variance 10 and 2") {
  const std::vector<coded_tensor> tensors = tensors_of({logical_layout::matrix(4, 4)});
  // H diag(4, 2, 1, 1) with the orthogonal H of order four.
  std::vector<double> d;
  for (const double sigma : {4.0, 2.0, 1.0, 1.0}) {
    const std::size_t row = d.size() / 4;
    for (std::size_t i = 0; i < 4; ++i) {
      d.push_back(sigma * (__builtin_popcountll(row & i) % 2 == 0 ? .5 : -.5));
    }
  }
  for (const auto& [sparsity, variance] : {std::pair(2.0, 10.0), std::pair(3.0, 2.0)}) {
    spectral_atomo_codec<double> codec(tensors, {sparsity, 5});
    check_moments(codec, d, variance);
  }
}

TEST_CASE("entry-wise ATOMO: the examples' variances; unbiased") {
  {
    entry_atomo_codec<float> codec(vectors_of<float>({4}), {.5});
    check_moments(codec, {4, -2, 1, -1}, 10.0);
  }
  {
    entry_atomo_codec<float> codec(vectors_of<float>({4}), {.75});
    check_moments(codec, {1, -1, 4, 2}, 2.0);
  }
  {
    entry_atomo_codec<double> codec(vectors_of<double>({5}), {.4});
    check_moments(codec, {10, 1, 1, 1, 1}, 12.0);
  }
  const std::vector<coded_tensor> tensors = vectors_of<double>({70, 33, 1});
  const std::vector<double> d = normal_values<double>(104, 7);
  entry_atomo_codec<double> codec(tensors, {.2, 9});
  const double variance = variance_of({d.begin(), d.begin() + 70}, 14.0) +
                          variance_of({d.begin() + 70, d.begin() + 103}, .2 * 33.0);
  check_moments(codec, d, variance);
  entry_atomo_codec<float> single(tensors, {.2, 9});
  check_moments(single, {d.begin(), d.end()}, variance);
}

TEST_CASE("ATOMO: as many atoms are kept as expected") {
  cpu_context ctx;
  std::vector<double> none;
  constexpr int draws = 2000;
  {
    const std::vector<coded_tensor> tensors =
        tensors_of({logical_layout::kernel(8, 8, 3, 3), logical_layout::matrix(20, 30)});
    const std::vector<double> d = normal_values<double>(coded_size(tensors), 8);
    spectral_atomo_codec<double> codec(tensors, {3.0});
    double bytes = 0;
    for (int draw = 0; draw < draws; ++draw) {
      bytes +=
          static_cast<double>(coded(codec, ctx, d, none, {0, static_cast<std::uint64_t>(draw), 0}).size());
    }
    CHECK(codec.expected_bytes() == 8.0 + 8.0 * 3.0 * (51.0 + 51.0));
    // The variance of a count of independent draws is at most its mean.
    const double deviation = 8.0 * 51.0 * std::sqrt(6.0 / draws);
    CHECK(std::abs(bytes / draws - codec.expected_bytes()) < 5.0 * deviation);
  }
  const std::vector<double> d = normal_values<double>(1000, 9);
  entry_atomo_codec<double> codec(vectors_of<double>({1000}), {.05});
  double entries = 0;
  for (int draw = 0; draw < draws; ++draw) {
    const auto code = coded(codec, ctx, d, none, {0, static_cast<std::uint64_t>(draw), 0});
    const auto kept = detail::read_at<std::uint32_t>(code, 0);
    CHECK(code.size() == 4 + 12 * std::size_t{kept});
    entries += kept;
  }
  CHECK(std::abs(entries / draws - 50.0) < 5.0 * std::sqrt(50.0 / draws));
}

TEST_CASE("entry-wise ATOMO: all entries of ratio 1, the wire, one entry, values that saturate") {
  cpu_context ctx;
  std::vector<float> none;
  entry_atomo_codec<float> all(vectors_of<float>({5, 1}), {1.0});
  const std::vector<float> d{3, 0, -1e-30F, -0.0F, 2, 7};
  const auto code = coded(all, ctx, d, none);
  REQUIRE(code.size() == 8 + 8 * 4);
  CHECK(detail::read_at<std::uint32_t>(code, 0) == 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(detail::read_at<float>(code, 4 + 4 * i) == std::vector<float>{3, -1e-30F, 2}[i]);
    CHECK(detail::read_at<std::int32_t>(code, 16 + 4 * i) == std::vector<std::int32_t>{0, 2, 4}[i]);
  }
  CHECK(detail::read_at<std::uint32_t>(code, 28) == 1U);
  CHECK(detail::read_at<float>(code, 32) == 7.0F);
  CHECK(decoded(all, ctx, code, 6) == d);
  // s is at least 1: one entry that is not zero is sent. (10, 1, 1, 1, 1) with s = 2: 10, and others as 4.
  entry_atomo_codec<float> few(vectors_of<float>({100, 5}), {.4});
  std::vector<float> single(105, 0.0F);
  single[17] = -5.0F;
  for (std::size_t i = 100; i < 105; ++i) single[i] = i == 102 ? -10.0F : 1.0F;
  for (std::uint64_t step = 0; step < 50; ++step) {
    const auto values = decoded(few, ctx, coded(few, ctx, single, none, {0, step, 0}), 105);
    CHECK(std::vector<float>(values.begin(), values.begin() + 100) ==
          std::vector<float>(single.begin(), single.begin() + 100));
    for (std::size_t i = 100; i < 105; ++i) {
      CHECK((i == 102 ? values[i] == -10.0F : values[i] == 0.0F || values[i] == 4.0F));
    }
  }
}

TEST_CASE_TEMPLATE("ATOMO: threads change no bit of large tensors; steps, ranks and seeds draw differently",
                   Codec, spectral_atomo_codec<float>, entry_atomo_codec<float>) {
  cpu_context one, three({3, 0});
  const std::vector<coded_tensor> tensors = tensors_of_all_kinds();
  const std::vector<float> d = normal_values<float>(coded_size(tensors), 10);
  typename Codec::options_type options, other;
  other.seed = 77;
  Codec codec(tensors, options), threaded(tensors, options), of_other_seed(tensors, other);
  std::vector<float> memory(d.size(), 0.0F), memory_of_threaded = memory, none;
  for (std::uint64_t step = 0; step < 3; ++step) {
    const auto code = coded(codec, one, d, memory, {1, step, 0});
    CHECK(same_bits(code, coded(threaded, three, d, memory_of_threaded, {1, step, 0})));
    CHECK(same_bits(memory, memory_of_threaded));
  }
  const auto code = coded(codec, one, d, none, {1, 5, 0});
  CHECK(same_bits(code, coded(threaded, three, d, none, {1, 5, 0})));
  CHECK(!same_bits(code, coded(codec, one, d, none, {1, 6, 0})));
  CHECK(!same_bits(code, coded(codec, one, d, none, {2, 5, 0})));
  CHECK(!same_bits(code, coded(of_other_seed, one, d, none, {1, 5, 0})));
  CHECK(codec.describe() != of_other_seed.describe());
}

TEST_CASE_TEMPLATE("ATOMO: the code of a tensor does not depend on the tensors before it", Codec,
                   spectral_atomo_codec<float>, entry_atomo_codec<float>) {
  cpu_context ctx;
  std::vector<coded_tensor> both = tensors_of({logical_layout::vector(999), logical_layout::matrix(70, 300)});
  const std::vector<float> d = normal_values<float>(coded_size(both), 17);
  std::vector<float> none;
  Codec codec(both);
  coded_tensor second = both[1];
  second.offset = 0;
  Codec alone(std::vector<coded_tensor>{second});
  const auto all = coded(codec, ctx, d, none);
  const auto last = coded(alone, ctx, {d.begin() + 999, d.end()}, none);
  REQUIRE(all.size() > last.size());
  CHECK(std::equal(last.begin(), last.end(), all.end() - static_cast<std::ptrdiff_t>(last.size())));
}

TEST_CASE("ATOMO: expected bytes of ResNet-18") {
  const auto bytes = [](bool hybrid, double sparsity) {
    return spectral_atomo_codec<float>(resnet18_tensors::resnet18_tensors(hybrid), {sparsity})
        .expected_bytes();
  };
  CHECK(bytes(false, 1) == 2470044);
  CHECK(bytes(false, 2) == 4939848);
  CHECK(bytes(false, 3) == 7390220);
  CHECK(bytes(false, 4) == 9840592);
  CHECK(bytes(true, 1) == 670092);
  CHECK(bytes(true, 2) == 1339888);
  CHECK(bytes(true, 3) == 1990252);
  CHECK(bytes(true, 4) == 2640616);
}

TEST_CASE("ATOMO: tensors that are very small or not finite") {
  cpu_context ctx;
  std::vector<float> none;
  const std::vector<coded_tensor> tensors =
      tensors_of({logical_layout::matrix(3, 4), logical_layout::vector(2)});
  std::vector<float> d(14, 1e-32F);
  d[12] = 1.0F;
  spectral_atomo_codec<float> spectral(tensors, {1.0});
  const auto code = coded(spectral, ctx, d, none);
  CHECK(detail::read_at<std::uint32_t>(code, 0) == 0U);
  CHECK(detail::read_at<std::uint32_t>(code, 4) == 1U);
  entry_atomo_codec<float> entries(tensors, {.1});
  CHECK(decoded(entries, ctx, coded(entries, ctx, d, none), 14)[12] == 1.0F);
  for (const double bad : {not_a_number, infinity, -infinity}) {
    d[2] = static_cast<float>(bad);
    const auto of_triplets = decoded(spectral, ctx, coded(spectral, ctx, d, none), 14);
    const auto of_entries = decoded(entries, ctx, coded(entries, ctx, d, none), 14);
    CHECK(!std::isfinite(of_triplets[2]));
    CHECK(!std::isfinite(of_entries[2]));
    CHECK(of_triplets[12] == 1.0F);
  }
}

TEST_CASE("ATOMO: options out of range and codes that are none") {
  for (const double bad : {0.0, -1.0, infinity, not_a_number}) {
    CHECK_THROWS_WITH_AS(spectral_atomo_codec<float>({}, {bad}), doctest::Contains("sparsity"), value_error);
    CHECK_THROWS_WITH_AS(atomo_probabilities(std::vector<double>{1.0}, bad), doctest::Contains("sparsity"),
                         value_error);
    CHECK_THROWS_WITH_AS(entry_atomo_codec<float>({}, {bad}), doctest::Contains("ratio"), value_error);
  }
  CHECK_THROWS_WITH_AS(entry_atomo_codec<float>({}, {1.5}), doctest::Contains("1.5"), value_error);
  coded_tensor large{"large", logical_layout::vector(index_t{1} << 31), 0, index_t{1} << 31, 0, 0};
  CHECK_THROWS_WITH_AS(entry_atomo_codec<float>({large}), doctest::Contains("large"), value_error);

  cpu_context ctx;
  std::vector<float> to(20), none, d = normal_values<float>(20, 11);
  const auto throws = [&](const auto& codec, std::vector<std::byte> code, const char* text) {
    CHECK_THROWS_WITH_AS(codec.decode(ctx, code, decode_as::values, to), doctest::Contains(text),
                         value_error);
  };
  const auto with = [](std::vector<std::byte> code, std::size_t at, auto value) {
    detail::write_at(std::span(code), at, value);
    return code;
  };
  spectral_atomo_codec<float> spectral(vectors_of<float>({12, 8}), {9.0});
  const auto triplets = coded(spectral, ctx, d, none);
  throws(spectral, {}, "not 4");
  throws(spectral, {triplets.begin(), triplets.end() - 1}, "not");
  throws(spectral, {triplets.begin(), triplets.begin() + 5}, "not");
  throws(spectral, with(triplets, 0, 1U), "v1");
  throws(spectral, with(triplets, 0, 3U), "v0");
  throws(spectral, with(triplets, 0, ~0U), "v0");
  entry_atomo_codec<float> entries(vectors_of<float>({12, 8}), {1.0});
  const auto all = coded(entries, ctx, d, none);
  throws(entries, {}, "not 4");
  throws(entries, {all.begin(), all.end() - 1}, "not");
  throws(entries, with(all, 0, 11U), "v1");
  throws(entries, with(all, 0, 13U), "v0");
  throws(entries, with(all, 4 + 12 * 4, -1), "position -1");
  throws(entries, with(all, 4 + 12 * 4 + 11 * 4, 12), "position 12");
  throws(entries, with(all, 4 + 12 * 4 + 5 * 4, 4), "position 4 after 4");
}

TEST_CASE("entry-wise ATOMO: no value is written before all positions of a code have been checked") {
  // The last position is wrong, in a list that threads divide.
  constexpr index_t size = 200000;
  entry_atomo_codec<float> codec(vectors_of<float>({size}), {1.0});
  cpu_context ctx({2, 0});
  std::vector<float> none;
  const auto code = coded(codec, ctx, normal_values<float>(size, 12), none);
  for (const index_t first_wrong : {size / 2, size - 1}) {
    std::vector<std::byte> bad = code;
    // From here on all positions are negative and ascend.
    for (index_t i = first_wrong; i < size; ++i) {
      detail::write_at(std::span(bad), static_cast<std::size_t>(4 + size * 4 + i * 4),
                       static_cast<std::int32_t>(i - size));
    }
    for (const decode_as as : {decode_as::values, decode_as::addition}) {
      std::vector<float> to(size, 7.0F);
      CHECK_THROWS_WITH_AS(codec.decode(ctx, bad, as, to), doctest::Contains("position -"), value_error);
      CHECK(to == std::vector<float>(size, 7.0F));
    }
  }
}

template <class Options>
void check_ranks(Options options) {
  odd_parameters<float> net;
  cpu_context ctx;
  const std::size_t size = net.store.gradients().size();
  for (const code_memory memory : {code_memory::none, code_memory::error_feedback}) {
    for (const int count : {1, 2, 3, 4}) {
      CAPTURE(count);
      options.memory = memory;
      rank_simulation::simulated_ranks<any_compressor<float>> ranks(
          count, [&](int) { return new_compressor(net.store, options); });
      std::vector<double> sum(size, 0.0), applied(size, 0.0);
      for (std::uint64_t step = 0; step < 50; ++step) {
        std::vector<std::vector<float>> gradients;
        for (std::size_t w = 0; w < ranks.size(); ++w) {
          const std::vector<double> values = gradients_of(net.store, static_cast<int>(w), step);
          gradients.emplace_back(values.begin(), values.end());
          for (std::size_t i = 0; i < size; ++i) sum[i] += values[i] / count;
        }
        ranks.step(ctx, gradients);
        CHECK(rank_simulation::ranks_agree(gradients));
        for (std::size_t i = 0; i < size; ++i) applied[i] += static_cast<double>(gradients[0][i]);
      }
      CHECK(ranks[0].states().size() == (memory == code_memory::none ? 0U : 1U));
      if (memory == code_memory::none) continue;
      double scale = 1.0;
      for (std::size_t w = 0; w < ranks.size(); ++w) {
        const auto left = ranks[w].states()[0].values;
        for (std::size_t i = 0; i < size; ++i) {
          applied[i] += static_cast<double>(left[i]) / count;
          scale = std::max(scale, std::abs(static_cast<double>(left[i])));
        }
      }
      CHECK(largest_difference<double>(applied, sum) < 1e-4 * scale);
    }
  }
}

TEST_CASE("ATOMO: ranks agree; with memory, what was applied and what is left are the gradients") {
  // With memory an unbiased code is not contractive unless most of the gradient is sent.
  check_ranks(atomo_options{6.0});
  check_ranks(entry_atomo_options{.6});
}

TEST_CASE("ATOMO: options are told apart") {
  CHECK(describe(atomo_options{}) == "ATOMO, singular triplets, sparsity 2, seed 1, no memory");
  CHECK(describe(entry_atomo_options{.5, 4, code_memory::error_feedback}) ==
        "ATOMO, entries, ratio 0.5, seed 4, error feedback");
  CHECK(spectral_atomo_codec<float>({}, {2.0}).describe() !=
        spectral_atomo_codec<float>({}, {3.0}).describe());
  CHECK(entry_atomo_codec<float>({}, {.2}).describe() != entry_atomo_codec<float>({}, {.3}).describe());
}

/// A kernel of every instruction set against plain loops.
template <class T>
void check_kernels(isa target) {
  namespace d = pufferfish::detail;
  const auto tail = PUFFERFISH_KERNEL(target, d::atomo_passes, magnitude_tail<T>);
  const auto draw = PUFFERFISH_KERNEL(target, d::atomo_passes, draw_entries<T>);
  const auto project = PUFFERFISH_KERNEL(target, d::atomo_passes, project<T>);
  const auto combine = PUFFERFISH_KERNEL(target, d::atomo_passes, combine<T>);
  const auto add_gram = PUFFERFISH_KERNEL(target, d::atomo_passes, add_gram<T>);
  const double tolerance = sizeof(T) == 4 ? 1e-6 : 1e-13;
  for (const index_t size : {0, 1, 5, 31, 32, 33, 64, 97, 1000}) {
    CAPTURE(size);
    std::vector<T> x = normal_values<T>(size, 12);
    if (size > 40) x[40] = x[3] = T(0);
    for (const double level : {0.0, .5, 1.0, infinity}) {
      double found[3], wanted[3] = {};
      tail(x.data(), size, level, found);
      for (const T value : x) {
        const double magnitude = std::abs(static_cast<double>(value));
        wanted[0] += magnitude <= level ? magnitude : 0.0;
        wanted[1] += magnitude > level ? 1.0 : 0.0;
        wanted[2] += magnitude > 0.0 ? 1.0 : 0.0;
      }
      CHECK(found[0] == doctest::Approx(wanted[0]).epsilon(1e-12));
      CHECK(found[1] == wanted[1]);
      CHECK(found[2] == wanted[2]);
      if (level == infinity) continue;
      std::vector<std::uint32_t> words, bits(static_cast<std::size_t>(size + 31) / 32, 7U),
          plain(bits.size(), 0);
      index_t kept = 0;
      for (std::uint64_t i = 0; i < x.size(); ++i) words.push_back(random_stream(3, 4).word(i));
      if (size > 4) words[4] = 0xffffffffU, words[2] = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        const bool keep = std::abs(static_cast<double>(x[i])) > words[i] * 0x1p-32 * level;
        plain[i / 32] |= static_cast<std::uint32_t>(keep) << i % 32;
        kept += keep ? 1 : 0;
      }
      CHECK(draw(x.data(), words.data(), level, bits.data(), size) == kept);
      CHECK(bits == plain);
    }
    for (const index_t columns : {1, 2, 3, 5, 18}) {
      const auto n = static_cast<std::size_t>(columns), rows = static_cast<std::size_t>(size);
      const std::vector<T> a = normal_values<T>(size * columns, 13);
      const std::vector<double> weights = normal_values<double>(columns, 14);
      std::vector<T> projected(rows);
      project(a.data(), size, columns, weights.data(), projected.data());
      std::vector<double> plain(rows, 0.0), gram(n * n, 1.0), plain_gram(n * n, 1.0);
      for (std::size_t i = 0; i < a.size(); ++i)
        plain[i % rows] += weights[i / rows] * static_cast<double>(a[i]);
      CHECK(largest_difference<T>(projected, plain) < 10.0 * tolerance);
      add_gram(a.data(), size, columns, gram.data());
      for (std::size_t i = 0; i < n; ++i) {
        for (std::size_t j = 0; j < n; ++j) {
          for (std::size_t r = 0; r < rows; ++r) {
            plain_gram[i * n + j] +=
                static_cast<double>(a[i * rows + r]) * static_cast<double>(a[j * rows + r]);
          }
          if (j > i) gram[i * n + j] = plain_gram[i * n + j];  // not specified
        }
      }
      CHECK(largest_difference<double>(gram, plain_gram) < 1e-10);
      for (const index_t count : {0, 1, 3}) {
        const std::vector<T> left = normal_values<T>(count * size, 15),
                             right = normal_values<T>(count * columns, 16);
        std::vector<T> sum(a.size(), T(9));
        combine(left.data(), size, right.data(), columns, count, sum.data());
        std::vector<double> plain_sum(a.size(), 0.0);
        for (std::size_t j = 0; j < static_cast<std::size_t>(count); ++j) {
          for (std::size_t i = 0; i < a.size(); ++i) {
            plain_sum[i] +=
                static_cast<double>(left[j * rows + i % rows]) * static_cast<double>(right[j * n + i / rows]);
          }
        }
        CHECK(largest_difference<T>(sum, plain_sum) < tolerance);
      }
    }
  }
}

TEST_CASE_TEMPLATE("ATOMO: kernels of all instruction sets equal plain loops", T, float, double) {
  for (const isa target : all_isas) {
    if (!isa_available(target)) continue;
    CAPTURE(to_string(target));
    check_kernels<T>(target);
  }
}

}  // namespace
