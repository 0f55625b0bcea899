// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <limits>

#include <pufferfish/compress/quantize/tern_grad.hpp>

#include "../../support/resnet18_tensors.hpp"
#include "../../support/rounding_support.hpp"
#include "../../support/simulated_ranks.hpp"

namespace {

using namespace rounding_support;
using rank_simulation::ranks_agree;
using rank_simulation::simulated_ranks;

static_assert(gradient_compressor<shared_tern_grad<float>> && gradient_compressor<shared_tern_grad<double>>);

tern_grad_options with_clip(double clip, bool shared = false, code_route route = code_route::gather) {
  tern_grad_options options;
  options.clip = clip;
  options.shared_scaler = shared;
  options.route = route;
  return options;
}
tern_grad_options without(const std::vector<std::string>& skip, bool shared = false,
                          code_route route = code_route::gather) {
  tern_grad_options options = with_clip(2.5, shared, route);
  options.skip = skip;
  return options;
}

/// The standard deviation of a tensor's values and the largest magnitude.
template <class T>
std::pair<double, double> deviation_of(const coded_tensor& tensor, const std::vector<T>& values) {
  const auto n = static_cast<double>(tensor.size);
  double mean = 0, squares = 0, largest = 0;
  for (index_t i = 0; i < tensor.size; ++i) {
    const auto x = static_cast<double>(values[static_cast<std::size_t>(tensor.offset + i)]);
    mean += x / n;
    largest = std::max(largest, std::abs(x));
  }
  for (index_t i = 0; i < tensor.size; ++i) {
    const auto x = static_cast<double>(values[static_cast<std::size_t>(tensor.offset + i)]);
    squares += (x - mean) * (x - mean) / n;
  }
  return {std::sqrt(squares), largest};
}
double scaler_of(double clip, double deviation, double largest) {
  return clip == 0.0 || deviation == 0.0 ? largest : std::min(clip * deviation, largest);
}

TEST_CASE_TEMPLATE("tern_codec keeps the rules of codecs", T, float, double) {
  for (const double clip : {2.5, 0.0, 0.5}) check_codec<tern_codec<T>>(with_clip(clip));
  check_codec<tern_codec<T>>(without({"p2", "p5"}));
  check_codec<tern_codec<T>>(
      without({"p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8", "p9", "p10", "p11"}));
  check_draws<tern_codec<T>>(with_clip(2.5));
}

TEST_CASE_TEMPLATE("tern_codec has the code of its formulas", T, float, double) {
  cpu_context ctx;
  std::vector<T> no_memory;
  std::vector<coded_tensor> tensors = vectors_of<T>({1, 70, 33, 90000, 5, 1000});
  tensors[1].first = 37;  // a part of a parameter
  const std::vector<T> values = normal_values<T>(coded_size(tensors), 1);
  const code_place place{3, 8, 1};
  std::size_t open = 0;
  for (const double clip : {2.5, 0.0, 1.0}) {
    for (const bool skips : {false, true}) {
      CAPTURE(clip);
      CAPTURE(skips);
      tern_grad_options options = with_clip(clip);
      if (skips) options.skip = {"v1", "v4"};
      tern_codec<T> codec(tensors, options);
      const auto code = coded(codec, ctx, values, no_memory, place);
      // The values of the tensors that are sent whole are left out of the fields.
      index_t size = 0, whole_size = 0;
      std::size_t count = 0;
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        const bool whole = skips && (t == 1 || t == 4);
        (whole ? whole_size : size) += tensors[t].size;
        count += whole ? 0U : 1U;
      }
      const std::size_t code_bytes = static_cast<std::size_t>(2 * size + 7) / 8;
      std::vector<std::byte> wanted(code_bytes + (count + static_cast<std::size_t>(whole_size)) * sizeof(T));
      REQUIRE(code.size() == wanted.size());
      std::size_t scaler_at = code_bytes, whole_at = code_bytes + count * sizeof(T), field = 0;
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        const coded_tensor& tensor = tensors[t];
        const auto first = static_cast<std::size_t>(tensor.offset), n = static_cast<std::size_t>(tensor.size);
        if (skips && (t == 1 || t == 4)) {
          std::memcpy(wanted.data() + whole_at, values.data() + first, n * sizeof(T));
          whole_at += n * sizeof(T);
          continue;
        }
        const auto [deviation, largest] = deviation_of(tensor, values);
        const T scaler = detail::read_at<T>(code, scaler_at);
        CHECK(static_cast<double>(scaler) ==
              doctest::Approx(scaler_of(clip, deviation, largest)).epsilon(sizeof(T) == 4 ? 1e-6 : 1e-12));
        detail::write_at(wanted, scaler_at, scaler);
        scaler_at += sizeof(T);
        const random_stream random = detail::code_randoms(options.seed, "tern_grad", place, tensor);
        for (std::size_t i = 0; i < n; ++i, ++field) {
          const std::uint32_t draw = detail::draw_at(random, static_cast<std::uint64_t>(tensor.first) + i);
          const T x = values[first + i];
          wanted[field / 4] |= static_cast<std::byte>(plain_ternary_field(x, scaler, draw) << field % 4 * 2);
          open += undecided(plain_share(std::abs(x), scaler), draw) ? 1U : 0U;
        }
      }
      CHECK(code == wanted);
    }
  }
  CHECK(open > 0);  // both ways to draw were taken
}

TEST_CASE_TEMPLATE(
    "tern_codec: the mean of draws is the clipped gradient; signs are sent as often as |g| / s", T, float,
    double) {
  constexpr int draws = 4000;
  std::vector<T> values = normal_values<T>(64, 3);
  values[6] = T(0);
  const coded_tensor tensor = vectors_of<T>({64})[0];
  const auto [deviation, largest] = deviation_of(tensor, values);
  for (const double clip : {2.5, 0.0, 1.0}) {
    CAPTURE(clip);
    const double s = scaler_of(clip, deviation, largest);
    std::vector<double> clipped, variances;
    for (const T value : values) {
      clipped.push_back(std::clamp(static_cast<double>(value), -s, s));
      variances.push_back(std::abs(clipped.back()) * (s - std::abs(clipped.back())));
    }
    tern_codec<T> codec({tensor}, with_clip(clip));
    const drawn_means found = means_of_draws(codec, values, draws);
    check_means(found, clipped, variances, draws);
    for (std::size_t i = 0; i < values.size(); ++i) {
      // Every value that is not zero has the square s^2.
      const double p = std::abs(clipped[i]) / s, share = found.square[i] / (s * s);
      CHECK(std::abs(share - p) <= 5 * std::sqrt(p * (1 - p) / draws) + 1e-5);
    }
  }
}

TEST_CASE_TEMPLATE("tern_codec: equal values, one value and values of one magnitude are exact", T, float,
                   double) {
  cpu_context ctx;
  std::vector<T> no_memory;
  // Deviation zero; one value; deviation above magnitude / 2.5.
  const std::vector<coded_tensor> tensors = vectors_of<T>({1000, 1, 41, 3});
  std::vector<T> values(1045, T(0.1));
  values[1000] = T(-3e-5);
  for (std::size_t i = 1001; i < 1042; ++i) values[i] = i % 3 == 0 ? T(-1.3) : T(1.3);
  for (std::size_t i = 1042; i < 1045; ++i) values[i] = T(0);
  tern_codec<T> codec(tensors, with_clip(2.5));
  for (std::uint64_t step = 0; step < 50; ++step) {
    CHECK(decoded(codec, ctx, coded(codec, ctx, values, no_memory, {0, step, 0}), 1045) == values);
  }
}

TEST_CASE_TEMPLATE("tern_codec: tiny and huge gradients", T, float, double) {
  cpu_context ctx;
  std::vector<T> no_memory;
  for (const T unit : {std::numeric_limits<T>::denorm_min(), std::numeric_limits<T>::max()}) {
    const std::vector<T> values = {unit, -unit, -unit, 0, unit};
    tern_codec<T> codec(vectors_of<T>({5}), with_clip(2.5));
    CHECK(decoded(codec, ctx, coded(codec, ctx, values, no_memory), 5) == values);
  }
}

TEST_CASE("tern_codec: a field 11 is refused before anything changes") {
  cpu_context ctx;
  std::vector<float> no_memory;
  const std::vector<float> values = normal_values<float>(1003, 1);
  tern_codec<float> codec(vectors_of<float>({1003}), with_clip(2.5));
  const auto code = coded(codec, ctx, values, no_memory);
  for (const std::size_t at : {0U, 1U, 5U, 500U, 1001U, 1002U}) {
    auto bad = code;
    bad[at / 4] |= static_cast<std::byte>(3U << at % 4 * 2);
    std::vector<float> to(1003, 5.0F);
    CHECK_THROWS_WITH_AS(codec.decode(ctx, bad, decode_as::values, to), doctest::Contains("field 11"),
                         value_error);
    CHECK(to == std::vector<float>(1003, 5.0F));
  }
}

/// The result of shared_tern_grad over all ranks, value by value.
template <class T>
std::vector<T> plain_shared(const std::vector<coded_tensor>& tensors, const tern_grad_options& options,
                            const std::vector<std::vector<T>>& gradients, std::uint64_t step) {
  const auto ranks = static_cast<T>(gradients.size());
  std::vector<T> result(gradients[0].size());
  for (const coded_tensor& tensor : tensors) {
    const bool whole = std::find(options.skip.begin(), options.skip.end(), tensor.name) != options.skip.end();
    // The codec of each rank has found the deviations that the maxima are of.
    float clip = 0, largest = 0;
    for (const auto& one : gradients) {
      const detail::tern_codes<T> codes(tensors, options.clip, {});
      cpu_context ctx;
      const detail::tern_bounds<T> bounds =
          codes.bounds(ctx, one.data())[static_cast<std::size_t>(&tensor - tensors.data())];
      clip = std::max(clip, detail::float_above(bounds.clip));
      largest = std::max(largest, detail::float_above(bounds.largest));
    }
    const auto scaler = static_cast<T>(std::min(clip, largest));
    for (index_t i = 0; i < tensor.size; ++i) {
      const auto at = static_cast<std::size_t>(tensor.offset + i);
      T sum = 0;
      int levels = 0;
      for (std::size_t w = 0; w < gradients.size(); ++w) {
        sum += gradients[w][at];
        const code_place place{static_cast<int>(w), step, 0};
        const random_stream random = detail::code_randoms(options.seed, "tern_grad", place, tensor);
        const std::uint32_t draw = detail::draw_at(random, static_cast<std::uint64_t>(tensor.first + i));
        if (scaler == T(0)) continue;
        const unsigned field = plain_ternary_field(gradients[w][at], scaler, draw);
        levels += field == 1 ? 1 : field == 2 ? -1 : 0;
      }
      result[at] = whole ? sum * (T(1) / ranks) : static_cast<T>(levels) * (scaler * (T(1) / ranks));
    }
  }
  return result;
}

template <class T>
std::vector<std::vector<T>> gradients_of_ranks(std::size_t ranks, index_t size) {
  std::vector<std::vector<T>> all;
  for (std::size_t w = 0; w < ranks; ++w) {
    all.push_back(normal_values<T>(size, 20 + w, 1.0 + static_cast<double>(w)));
  }
  return all;
}

TEST_CASE_TEMPLATE("shared_tern_grad: both routes have the bits of its formulas", T, float, double) {
  cpu_context one, three({3, 0});
  const std::vector<coded_tensor> tensors = vectors_of<T>({1, 70, 33, 5000, 5, 1000, 2, 17});
  const index_t size = coded_size(tensors);
  for (const bool skips : {false, true}) {
    for (const double clip : {2.5, 0.0}) {
      for (const int count : {1, 2, 3, 4, 5, 8, 16}) {
        CAPTURE(skips);
        CAPTURE(clip);
        CAPTURE(count);
        tern_grad_options options = with_clip(clip, true), hops = options;
        if (skips) options.skip = {"v1", "v7"};
        hops.skip = options.skip;
        hops.route = code_route::two_hop;
        simulated_ranks<shared_tern_grad<T>> gathered(
            count, [&](int) { return shared_tern_grad<T>(tensors, options); });
        simulated_ranks<shared_tern_grad<T>> two_hop(count,
                                                     [&](int) { return shared_tern_grad<T>(tensors, hops); });
        for (std::uint64_t step = 0; step < 3; ++step) {
          auto a = gradients_of_ranks<T>(gathered.size(), size);
          if (step == 1) {
            for (auto& values : a) std::fill(values.begin() + 100, values.begin() + 6000, T(0));
          }
          const std::vector<T> wanted = plain_shared(tensors, options, a, step);
          auto b = a;
          gathered.step(one, a);
          two_hop.step(three, b);
          CHECK(same_bits(a[0], wanted));
          CHECK(ranks_agree(a));
          CHECK(same_bits(a[0], b[0]));
          CHECK(ranks_agree(b));
        }
        for (std::size_t w = 0; w < gathered.size(); ++w) {
          CHECK(gathered.payload_bytes(w) == static_cast<std::size_t>(gathered[w].payload_bytes()));
          CHECK(two_hop.payload_bytes(w) == static_cast<std::size_t>(two_hop[w].payload_bytes()));
        }
      }
    }
  }
}

TEST_CASE("shared_tern_grad: one rank is what its own scaler makes of it") {
  cpu_context ctx;
  std::vector<float> no_memory;
  const std::vector<coded_tensor> tensors = vectors_of<float>({1, 70, 33, 5000, 5});
  const std::vector<float> values = normal_values<float>(coded_size(tensors), 3);
  tern_codec<float> own(tensors, with_clip(2.5));
  simulated_ranks<shared_tern_grad<float>> shared(
      1, [&](int) { return shared_tern_grad<float>(tensors, with_clip(2.5, true)); });
  std::vector<std::vector<float>> gradients = {values};
  shared.step(ctx, gradients);
  CHECK(gradients[0] == decoded(own, ctx, coded(own, ctx, values, no_memory), coded_size(tensors)));
}

TEST_CASE_TEMPLATE("shared_tern_grad: in the mean, the mean of gradients clipped at the shared bound", T,
                   float, double) {
  cpu_context ctx;
  constexpr int steps = 4000;
  const std::vector<coded_tensor> tensors = vectors_of<T>({64});
  const auto given = gradients_of_ranks<T>(3, 64);
  double clip = 0, largest = 0;
  for (const auto& one : given) {
    const auto [deviation, most] = deviation_of(tensors[0], one);
    clip = std::max(clip, deviation);  // clip 1
    largest = std::max(largest, most);
  }
  const double s = std::min(clip, largest);
  std::vector<double> expected(64, 0.0), variances(64, 0.0);
  for (const auto& one : given) {
    for (std::size_t i = 0; i < 64; ++i) {
      const double x = std::clamp(static_cast<double>(one[i]), -s, s);
      expected[i] += x / 3;
      variances[i] += std::abs(x) * (s - std::abs(x)) / 9;
    }
  }
  drawn_means found{std::vector<double>(64, 0.0), {}};
  simulated_ranks<shared_tern_grad<T>> ranks(
      3, [&](int) { return shared_tern_grad<T>(tensors, with_clip(1.0, true, code_route::two_hop)); });
  for (int step = 0; step < steps; ++step) {
    auto gradients = given;
    ranks.step(ctx, gradients);
    for (std::size_t i = 0; i < 64; ++i) found.mean[i] += static_cast<double>(gradients[0][i]) / steps;
  }
  check_means(found, expected, variances, steps);
}

TEST_CASE_TEMPLATE("shared_tern_grad: values of one magnitude on all ranks are exact", T, float, double) {
  cpu_context ctx;
  // 1.25 is a float, so that a shared scaler has it.
  const std::vector<coded_tensor> tensors = vectors_of<T>({1, 40, 7});
  for (const code_route route : {code_route::gather, code_route::two_hop}) {
    simulated_ranks<shared_tern_grad<T>> ranks(
        4, [&](int) { return shared_tern_grad<T>(tensors, with_clip(2.5, true, route)); });
    std::vector<std::vector<T>> gradients(4, std::vector<T>(48, T(1.25)));
    std::vector<T> mean(48, T(0));
    for (std::size_t w = 0; w < 4; ++w) {
      for (std::size_t i = 0; i < 41; ++i) {
        if ((i + w) % 3 == 0) gradients[w][i] = T(-1.25);
      }
      for (std::size_t i = 0; i < 48; ++i) mean[i] += gradients[w][i] / 4;
    }
    for (int step = 0; step < 20; ++step) {
      auto all = gradients;
      ranks.step(ctx, all);
      CHECK(all[0] == mean);
    }
  }
}

TEST_CASE("shared_tern_grad: a value that is not finite on one rank spoils its tensor on all") {
  cpu_context ctx;
  const std::vector<coded_tensor> tensors = vectors_of<float>({30, 70, 33});
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    for (const code_route route : {code_route::gather, code_route::two_hop}) {
      for (const double clip : {2.5, 0.0}) {
        simulated_ranks<shared_tern_grad<float>> ranks(
            3, [&](int) { return shared_tern_grad<float>(tensors, with_clip(clip, true, route)); });
        auto gradients = gradients_of_ranks<float>(3, 133);
        gradients[1][50] = bad;
        ranks.step(ctx, gradients);
        CHECK(ranks_agree(gradients));
        for (std::size_t i = 0; i < 133; ++i) CHECK(std::isfinite(gradients[2][i]) == (i < 30 || i >= 100));
      }
    }
  }
}

TEST_CASE("tern_codec: a value that is not finite spoils its tensor") {
  cpu_context ctx;
  std::vector<float> no_memory;
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const double clip : {2.5, 0.0}) {
      std::vector<float> values = normal_values<float>(40100, 5);
      values[30057] = bad;
      tern_codec<float> codec(vectors_of<float>({50, 40000, 50}), with_clip(clip));
      const std::vector<float> found = decoded(codec, ctx, coded(codec, ctx, values, no_memory), 40100);
      std::size_t finite = 0;
      for (const float value : found) finite += std::isfinite(value) ? 1U : 0U;
      CHECK(finite == 100);
    }
  }
}

TEST_CASE("shared_tern_grad: maxima of doubles are rounded up") {
  for (const double x : {0.1, 1.0, 1e-50, 3.0e38, 1.0 / 3.0, 0.0}) {
    CHECK(static_cast<double>(detail::float_above(x)) >= x);
    CHECK(static_cast<double>(detail::float_above(x)) <= x * (1 + 1e-6) + 1e-44);
  }
  CHECK(detail::float_above(1.25) == 1.25F);
  CHECK(detail::float_above(0.1F) == 0.1F);
  CHECK(detail::float_above(1e300) == std::numeric_limits<float>::max());
  CHECK(std::isinf(detail::float_above(std::numeric_limits<double>::infinity())));
  CHECK(std::isinf(detail::float_above(std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("shared_tern_grad: codes and sums that no rank can have sent are refused") {
  cpu_context ctx;
  const std::vector<coded_tensor> tensors = vectors_of<float>({1003});
  std::vector<float> values = normal_values<float>(1003, 1);
  for (const code_route route : {code_route::gather, code_route::two_hop}) {
    CAPTURE(to_string(route));
    shared_tern_grad<float> compressor(tensors, with_clip(2.5, true, route));
    compressor.start(0, 2);
    const exchange_place place{0, 2, 0};
    compressor.encode(ctx, place, 0, values);
    compressor.decode(ctx, place, 0, values);
    auto message = compressor.encode(ctx, place, 1, values);
    rank_blocks& codes = route == code_route::gather ? *message.gathered : *message.from_ranks;
    for (std::size_t w = 0; w < 2; ++w) std::fill(codes[w].begin(), codes[w].end(), std::byte{0});
    codes[1].back() = std::byte{0x30};
    CHECK_THROWS_WITH_AS(compressor.decode(ctx, place, 1, values), doctest::Contains("field 11"),
                         value_error);
    codes[1].back() = std::byte{0x10};
    CHECK_NOTHROW(compressor.decode(ctx, place, 1, values));
    if (route == code_route::gather) continue;
    message = compressor.encode(ctx, place, 2, values);
    // Sums of 3 bits, from 0 to 4.
    for (std::size_t w = 0; w < 2; ++w) {
      std::fill(message.gathered->operator[](w).begin(), message.gathered->operator[](w).end(), std::byte{0});
    }
    CHECK_NOTHROW(compressor.decode(ctx, place, 2, values));
    message.gathered->operator[](1)[0] = std::byte{0x28};
    CHECK_THROWS_WITH_AS(compressor.decode(ctx, place, 2, values), doctest::Contains("number of ranks"),
                         value_error);
  }
}

TEST_CASE("TernGrad: new_compressor of both forms and routes") {
  odd_parameters<float> net;
  cpu_context ctx;
  for (const bool shared : {false, true}) {
    for (const code_route route : {code_route::gather, code_route::two_hop}) {
      for (const int count : {2, 3, 4}) {
        const tern_grad_options options = without({"p1"}, shared, route);
        simulated_ranks<any_compressor<float>> ranks(count,
                                                     [&](int) { return new_compressor(net.store, options); });
        for (std::uint64_t step = 0; step < 50; ++step) {
          std::vector<std::vector<float>> gradients;
          std::vector<std::vector<double>> wide;
          for (int w = 0; w < count; ++w) {
            wide.push_back(gradients_of(net.store, w, step));
            gradients.emplace_back(wide.back().begin(), wide.back().end());
          }
          ranks.step(ctx, gradients);
          REQUIRE(ranks_agree(gradients));
          REQUIRE(ranks.payload_bytes(0) == static_cast<std::size_t>(ranks[0].payload_bytes()));
          const std::vector<double> mean = mean_of(wide);
          for (const auto& entry : net.store.parameters()) {
            if (entry.name != "p1") continue;
            for (auto i = static_cast<std::size_t>(entry.offset);
                 i < static_cast<std::size_t>(entry.offset + entry.thing->size()); ++i) {
              REQUIRE(static_cast<double>(gradients[0][i]) == doctest::Approx(mean[i]).epsilon(1e-5));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("TernGrad: bytes of ResNet-18") {
  using resnet18_tensors::resnet18_tensors;
  CHECK(tern_codec<float>(resnet18_tensors(false)).most_bytes() == 2'793'699);
  CHECK(tern_codec<float>(resnet18_tensors(true)).most_bytes() == 834'331);
  const auto shared = [](bool hybrid, code_route route) {
    return shared_tern_grad<float>(resnet18_tensors(hybrid), with_clip(2.5, true, route));
  };
  CHECK(shared(false, code_route::gather).payload_bytes() == 2'793'459 + 480);
  CHECK(shared(true, code_route::gather).payload_bytes() == 834'035 + 592);
  // Codes of all stripes, and sums of -4 .. 4 of this one.
  auto four = shared(false, code_route::two_hop);
  four.start(0, 4);
  const index_t stripe = stripe_of(11'173'834, 0, 4).size();
  CHECK(four.payload_bytes() == 2'793'459 + 480 + stripe / 2);
}

TEST_CASE("TernGrad: options") {
  odd_parameters<float> net;
  for (const bool shared : {false, true}) {
    for (const double clip : {-0.5, std::nan(""), std::numeric_limits<double>::infinity()}) {
      CHECK_THROWS_WITH_AS(new_compressor(net.store, with_clip(clip, shared)),
                           doctest::Contains(("clip " + detail::shortest_number(clip)).c_str()), value_error);
    }
    CHECK_THROWS_WITH_AS(new_compressor(net.store, without({"p1", "head"}, shared)),
                         doctest::Contains("head"), value_error);
    // A part of a name is no name.
    CHECK_THROWS_AS(new_compressor(net.store, without({"p"}, shared)), value_error);
    CHECK_THROWS_WITH_AS(new_compressor(net.store, with_clip(2.5, shared, code_route::sparse)),
                         doctest::Contains("sparse sum"), value_error);
  }
  CHECK(detail::names_parameter("fc", "fc.weight"));
  CHECK(detail::names_parameter("fc.weight", "fc.weight"));
  CHECK_FALSE(detail::names_parameter("fc", "fc1.weight"));
  CHECK_FALSE(detail::names_parameter("fc.weight", "fc"));
  CHECK(describe(tern_grad_options{}) == "TernGrad, clip 2.5, seed 1, shared scalers, gather");
  CHECK(describe(without({"p1", "p2"}, false, code_route::two_hop)) ==
        "TernGrad, clip 2.5, seed 1, whole: p1 p2, own scalers, two hops");
  CHECK(new_compressor(net.store, with_clip(0, true)).describe() ==
        "TernGrad, clip 0, seed 1, shared scalers, gather");
  CHECK(new_compressor(net.store, with_clip(0, false, code_route::two_hop)).describe() ==
        "TernGrad, clip 0, seed 1, own scalers, two hops, no memory");
}

}  // namespace
