// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <limits>

#include <pufferfish/compress/quantize/qsgd.hpp>

#include "../../support/resnet18_tensors.hpp"
#include "../../support/rounding_support.hpp"
#include "../../support/simulated_ranks.hpp"

namespace {

using namespace rounding_support;
using rank_simulation::ranks_agree;
using rank_simulation::simulated_ranks;

qsgd_options with(int bits, index_t bucket, qsgd_norm norm = qsgd_norm::l2, std::uint64_t seed = 1) {
  return {bits, bucket, norm, code_route::gather, seed};
}

/// Buckets shorter and longer than a chunk, that divide it or not, and one for everything.
constexpr index_t buckets[] = {1, 3, 64, 100, 512, 16384, 20000, 1 << 30};

TEST_CASE_TEMPLATE("qsgd_codec keeps the rules of codecs", T, float, double) {
  for (const int bits : {2, 4, 8}) {
    for (const index_t bucket : {1, 7, 512, 1 << 30}) {
      for (const qsgd_norm norm : {qsgd_norm::l2, qsgd_norm::max}) {
        check_codec<qsgd_codec<T>>(with(bits, bucket, norm));
      }
    }
  }
  check_draws<qsgd_codec<T>>(with(4, 512));
}

/// The code of the formulas, value by value, and how many draws the upper half left open.
template <class T>
struct plain_qsgd {
  std::vector<std::byte> code;
  std::size_t open = 0;

  plain_qsgd(const std::vector<coded_tensor>& tensors, const qsgd_options& options, const code_place& place,
             const std::vector<T>& values) {
    const index_t size = coded_size(tensors), count = (size + options.bucket - 1) / options.bucket;
    const std::size_t level_bytes = detail::field_bytes(size, options.bits);
    code.resize(level_bytes + static_cast<std::size_t>(count) * sizeof(T));
    std::vector<double> norms(static_cast<std::size_t>(count), 0.0);
    for (index_t i = 0; i < size; ++i) {
      const double x = std::abs(static_cast<double>(values[static_cast<std::size_t>(i)]));
      double& norm = norms[static_cast<std::size_t>(i / options.bucket)];
      norm = options.norm == qsgd_norm::max ? std::max(norm, x) : norm + x * x;
    }
    for (std::size_t b = 0; b < norms.size(); ++b) {
      if (options.norm == qsgd_norm::l2) norms[b] = std::sqrt(norms[b]);
      detail::write_at(code, level_bytes + b * sizeof(T), static_cast<T>(norms[b]));
    }
    for (const coded_tensor& tensor : tensors) {
      const random_stream random = detail::code_randoms(options.seed, "qsgd", place, tensor);
      for (index_t i = 0; i < tensor.size; ++i) {
        const index_t at = tensor.offset + i;
        const T x = values[static_cast<std::size_t>(at)];
        const T norm = static_cast<T>(norms[static_cast<std::size_t>(at / options.bucket)]);
        if (norm == T(0)) continue;
        const std::uint32_t draw = detail::draw_at(random, static_cast<std::uint64_t>(tensor.first + i));
        const unsigned field = plain_level_field(x, norm, options.bits, draw);
        const T most = static_cast<T>((1 << (options.bits - 1)) - 1);
        open += undecided(level_of(x, norm, most).scaled, draw) ? 1U : 0U;
        code[static_cast<std::size_t>(at * options.bits / 8)] |=
            static_cast<std::byte>(field << at * options.bits % 8);
      }
    }
  }
};

TEST_CASE_TEMPLATE("qsgd_codec has the code of its formulas", T, float, double) {
  cpu_context ctx;
  std::vector<T> no_memory;
  std::size_t open = 0;
  std::vector<coded_tensor> tensors = vectors_of<T>({1, 70, 33, 40000, 5, 1000});
  tensors[1].first = 37;  // a part of a parameter
  std::vector<T> values = normal_values<T>(coded_size(tensors), 1);
  std::fill(values.begin() + 200, values.begin() + 1300, T(0));
  for (std::size_t i = 3; i < values.size(); i += 11) values[i] *= T(100);
  const code_place place{3, 8, 1};
  for (const int bits : {2, 4, 8}) {
    for (const index_t bucket : buckets) {
      CAPTURE(bits);
      CAPTURE(bucket);
      // Sums of squares in another order may differ in the last bit of a norm; small whole numbers do not.
      std::vector<T> whole = values;
      for (T& value : whole) value = std::round(value);
      for (const auto& [norm, given] : {std::pair(qsgd_norm::max, values), std::pair(qsgd_norm::l2, whole)}) {
        const qsgd_options options = with(bits, bucket, norm, 9);
        qsgd_codec<T> codec(tensors, options);
        const plain_qsgd<T> plain(tensors, options, place, given);
        CHECK(coded(codec, ctx, given, no_memory, place) == plain.code);
        open += plain.open;
      }
    }
  }
  CHECK(open > 0);  // both ways to draw were taken
}

TEST_CASE_TEMPLATE("qsgd_codec: decoded values are sign, level, norm over the highest level", T, float,
                   double) {
  cpu_context ctx;
  for (index_t n = 0; n <= 24; ++n) {
    for (const int bits : {2, 4, 8}) {
      CAPTURE(n);
      CAPTURE(bits);
      qsgd_codec<T> codec(vectors_of<T>({n + 1}), with(bits, 10));
      // Every byte is a code: fields of all kinds.
      std::vector<std::byte> code(codec.most_bytes());
      const random_stream random(2, static_cast<std::uint64_t>(n));
      for (std::size_t i = 0; i < code.size(); ++i) code[i] = static_cast<std::byte>(random.word(i) & 0xffU);
      const std::size_t level_bytes = detail::field_bytes(n + 1, bits);
      const T norms[] = {T(1.75), T(0.6), T(11)};
      REQUIRE(code.size() == level_bytes + static_cast<std::size_t>(n / 10 + 1) * sizeof(T));
      for (std::size_t b = 0; b <= static_cast<std::size_t>(n / 10); ++b) {
        detail::write_at(code, level_bytes + b * sizeof(T), norms[b]);
      }
      const std::vector<T> values = decoded(codec, ctx, code, n + 1);
      for (index_t i = 0; i <= n; ++i) {
        const unsigned field = detail::field_at(reinterpret_cast<const std::uint8_t*>(code.data()), bits, i);
        const int most = (1 << (bits - 1)) - 1, level = static_cast<int>(field) & most;
        const T step = norms[i / 10] / static_cast<T>(most);
        CHECK(values[static_cast<std::size_t>(i)] ==
              static_cast<T>(field >> (bits - 1) != 0 ? -level : level) * step);
      }
    }
  }
}

TEST_CASE("qsgd_codec: 0.6 of the norm is level 4.2 of 7") {
  cpu_context ctx;
  std::vector<double> no_memory;
  const std::vector<double> values = {0.6, -0.8};  // of norm 1
  qsgd_codec<double> codec(vectors_of<double>({2}), with(4, 512));
  int fives = 0, sixes = 0;
  constexpr int draws = 10000;
  for (int step = 0; step < draws; ++step) {
    const auto code = coded(codec, ctx, values, no_memory, {0, static_cast<std::uint64_t>(step), 0});
    const auto field = std::to_integer<unsigned>(code[0]);
    const unsigned first = field & 15U, second = field >> 4;
    REQUIRE((first == 4U || first == 5U));
    REQUIRE((second == (8U | 5U) || second == (8U | 6U)));
    fives += first == 5U ? 1 : 0;
    sixes += second == (8U | 6U) ? 1 : 0;
  }
  CHECK(std::abs(fives - 0.2 * draws) < 5 * std::sqrt(0.2 * 0.8 * draws));
  CHECK(std::abs(sixes - 0.6 * draws) < 5 * std::sqrt(0.6 * 0.4 * draws));
}

TEST_CASE("qsgd_codec: two bits with the L2 norm send a value with probability |x| / norm") {
  cpu_context ctx;
  std::vector<float> no_memory;
  const std::vector<float> values = normal_values<float>(40, 6);
  double norm = 0;
  for (const float value : values) norm += static_cast<double>(value) * static_cast<double>(value);
  norm = std::sqrt(norm);
  std::vector<int> sent(values.size(), 0);
  constexpr int draws = 4000;
  qsgd_codec<float> codec(vectors_of<float>({40}), with(2, 512));
  for (int step = 0; step < draws; ++step) {
    const auto code = coded(codec, ctx, values, no_memory, {0, static_cast<std::uint64_t>(step), 0});
    const std::vector<float> one = decoded(codec, ctx, code, 40);
    for (std::size_t i = 0; i < one.size(); ++i) sent[i] += one[i] != 0.0F ? 1 : 0;
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    CAPTURE(i);
    const double p = std::abs(static_cast<double>(values[i])) / norm;
    CHECK(std::abs(sent[i] - p * draws) <= 5 * std::sqrt(p * (1 - p) * draws));
  }
}

/// Of one draw: step^2 f (1 - f) for a value f steps above a level.
template <class T>
std::vector<double> level_variances(const std::vector<T>& values, const qsgd_options& options) {
  const auto bucket = static_cast<std::size_t>(options.bucket);
  const double most = (1 << (options.bits - 1)) - 1;
  std::vector<double> norms(values.size() / bucket + 1, 0.0), result;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double x = std::abs(static_cast<double>(values[i]));
    double& norm = norms[i / bucket];
    norm = options.norm == qsgd_norm::max ? std::max(norm, x) : std::hypot(norm, x);
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double step = norms[i / bucket] / most;
    const double level = step == 0.0 ? 0.0 : std::abs(static_cast<double>(values[i])) / step;
    const double rest = level - std::floor(level);
    result.push_back(step * step * rest * (1.0 - rest));
  }
  return result;
}

TEST_CASE_TEMPLATE("qsgd_codec: the mean of draws is the gradient, and the squared error is bounded", T,
                   float, double) {
  constexpr int draws = 4000;
  std::vector<T> values = normal_values<T>(64, 3);
  values[5] = T(0);
  values[6] *= T(0.05);
  for (const int bits : {2, 4, 8}) {
    for (const qsgd_norm norm : {qsgd_norm::l2, qsgd_norm::max}) {
      for (const index_t bucket : {64, 24, 1}) {
        CAPTURE(bits);
        CAPTURE(bucket);
        qsgd_codec<T> codec(vectors_of<T>({64}), with(bits, bucket, norm));
        const drawn_means found = means_of_draws(codec, values, draws);
        check_means(found, {values.begin(), values.end()}, level_variances(values, with(bits, bucket, norm)),
                    draws);
        if (norm == qsgd_norm::max || bucket != 64) continue;
        double squares = 0, error = 0;
        for (std::size_t i = 0; i < values.size(); ++i) {
          const auto x = static_cast<double>(values[i]);
          squares += x * x;
          error += found.square[i] - 2 * found.mean[i] * x + x * x;
        }
        const double s = (1 << (bits - 1)) - 1;
        CHECK(error > 0.0);
        CHECK(error < std::min(64 / (s * s), 8 / s) * squares);
      }
    }
  }
}

TEST_CASE_TEMPLATE("qsgd_codec: tiny gradients are coded as others are", T, float, double) {
  cpu_context ctx;
  std::vector<T> no_memory;
  // Subnormal, so that 7 / norm would overflow.
  const T unit = std::numeric_limits<T>::denorm_min() * T(1 << 20);
  const std::vector<T> values = {unit * 7, -unit * 3, 0, unit * 4, -unit * 7};
  qsgd_codec<T> codec(vectors_of<T>({5}), with(4, 512, qsgd_norm::max));
  CHECK(decoded(codec, ctx, coded(codec, ctx, values, no_memory), 5) == values);
}

TEST_CASE_TEMPLATE("qsgd_codec: a bucket with a value that is not finite has no finite value", T, float,
                   double) {
  cpu_context ctx;
  std::vector<T> no_memory;
  for (const T bad : {std::numeric_limits<T>::quiet_NaN(), -std::numeric_limits<T>::infinity()}) {
    for (const qsgd_norm norm : {qsgd_norm::l2, qsgd_norm::max}) {
      std::vector<T> values = normal_values<T>(100, 5);
      values[57] = bad;
      qsgd_codec<T> codec(vectors_of<T>({100}), with(4, 50, norm));
      const std::vector<T> found = decoded(codec, ctx, coded(codec, ctx, values, no_memory), 100);
      for (std::size_t i = 0; i < 100; ++i) CHECK(std::isfinite(found[i]) == (i < 50));
    }
  }
}

TEST_CASE("qsgd_codec: draws of a stripe are those of the whole parameter") {
  cpu_context ctx;
  std::vector<float> no_memory;
  const std::vector<coded_tensor> tensors = vectors_of<float>({1000, 3000});
  const std::vector<float> values = normal_values<float>(4000, 1);
  const qsgd_options options = with(8, 32);
  qsgd_codec<float> whole(tensors, options);
  const std::vector<float> all = decoded(whole, ctx, coded(whole, ctx, values, no_memory), 4000);
  std::vector<float> parts;
  for (int r = 0; r < 3; ++r) {
    const stripe_range stripe = stripe_of(4000, r, 3);
    qsgd_codec<float> part(coded_parts(tensors, stripe.begin, stripe.end), options);
    const std::vector<float> given(values.begin() + stripe.begin, values.begin() + stripe.end);
    const auto found = decoded(part, ctx, coded(part, ctx, given, no_memory), stripe.size());
    parts.insert(parts.end(), found.begin(), found.end());
  }
  CHECK(same_bits(all, parts));
}

TEST_CASE("qsgd: both routes give all ranks the same bits, and the mean of gradients in the mean") {
  odd_parameters<float> net;
  cpu_context ctx;
  constexpr int draws = 1500;
  for (const code_route route : {code_route::gather, code_route::two_hop}) {
    for (const int count : {1, 2, 3, 4}) {
      CAPTURE(to_string(route));
      CAPTURE(count);
      qsgd_options options = with(4, 100);
      options.route = route;
      simulated_ranks<any_compressor<float>> ranks(count,
                                                   [&](int) { return new_compressor(net.store, options); });
      std::vector<std::vector<float>> given;
      for (int w = 0; w < count; ++w) {
        given.push_back(normal_values<float>(static_cast<index_t>(net.store.values().size()),
                                             40U + static_cast<unsigned>(w)));
      }
      const std::vector<std::vector<double>> wide = [&] {
        std::vector<std::vector<double>> all;
        for (const auto& one : given) all.emplace_back(one.begin(), one.end());
        return all;
      }();
      const int steps = count == 3 ? draws : 50;
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
      if (count == 3) check_means(found, mean_of(wide), variances_of(found), steps);
    }
  }
}

TEST_CASE("qsgd: bytes of ResNet-18") {
  const index_t dense[] = {2'880'755, 5'674'213, 11'261'130}, hybrid[] = {860'099, 1'694'133, 3'362'202};
  for (std::size_t i = 0; i < 3; ++i) {
    const qsgd_options options = with(2 << i, 512);
    CHECK(qsgd_codec<float>(resnet18_tensors::resnet18_tensors(false), options).most_bytes() ==
          static_cast<std::size_t>(dense[i]));
    CHECK(qsgd_codec<float>(resnet18_tensors::resnet18_tensors(true), options).most_bytes() ==
          static_cast<std::size_t>(hybrid[i]));
  }
}

TEST_CASE("qsgd: options") {
  odd_parameters<float> net;
  const auto made = [&](const qsgd_options& options) { return new_compressor(net.store, options); };
  for (const int bits : {0, 1, 3, 5, 16, -4}) {
    CHECK_THROWS_WITH_AS(made(with(bits, 512)),
                         doctest::Contains(("qsgd: " + std::to_string(bits) + " bits").c_str()), value_error);
  }
  for (const index_t bucket : {0, -5}) {
    CHECK_THROWS_WITH_AS(made(with(4, bucket)),
                         doctest::Contains(("buckets of " + std::to_string(bucket)).c_str()), value_error);
  }
  qsgd_options two_hop = with(8, 64, qsgd_norm::max, 3);
  two_hop.route = code_route::two_hop;
  CHECK(describe(qsgd_options{}) == "QSGD, 4 bits, buckets of 512, L2 norm, seed 1, gather");
  CHECK(describe(two_hop) == "QSGD, 8 bits, buckets of 64, largest magnitude, seed 3, two hops");
  CHECK(made(two_hop).describe() ==
        "QSGD, 8 bits, buckets of 64, largest magnitude, seed 3, two hops, no memory");
  CHECK(made({}).describe() == "QSGD, 4 bits, buckets of 512, L2 norm, seed 1, no memory");
}

}  // namespace
