// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <cmath>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/models/sampling.hpp>

using namespace pufferfish;

namespace {

using ids = std::vector<std::int32_t>;
constexpr float nothing = -std::numeric_limits<float>::infinity();

std::int32_t draw(const std::vector<float>& logits, const sampling_options& options, double uniform) {
  return sample_token<float>(logits, options, uniform);
}

}  // namespace

TEST_CASE("tokens come as often as their probabilities say") {
  const std::vector<float> logits{0.0F, 1.0F, nothing, -1.0F, 1.0F};
  for (const double temperature : {0.5, 1.0, 3.0}) {
    std::vector<double> expected;
    double sum = 0.0;
    for (const float z : logits) sum += std::exp(static_cast<double>(z) / temperature);
    for (const float z : logits) expected.push_back(std::exp(static_cast<double>(z) / temperature) / sum);
    const random_stream random(3, 1);
    constexpr int rounds = 40000;
    std::vector<double> seen(logits.size());
    for (std::uint64_t i = 0; i < rounds; ++i) {
      seen[static_cast<std::size_t>(draw(logits, {.temperature = temperature}, random.uniform(i)))] +=
          1.0 / rounds;
    }
    for (std::size_t k = 0; k < seen.size(); ++k)
      CHECK(seen[k] == doctest::Approx(expected[k]).epsilon(0.05));
    CHECK(seen[2] == 0.0);
  }
}

TEST_CASE("greedy, top-k, forbidden; ties go to the lower token") {
  const std::vector<float> logits{1.0F, 3.0F, 2.0F, 3.0F, 2.0F};
  for (const double u : {0.0, 0.5, 0.999999}) {
    CHECK(draw(logits, {.temperature = 0.0}, u) == 1);
    CHECK(draw(logits, {.top_k = 1}, u) == 1);
    CHECK(draw(logits, {.temperature = 0.0, .forbidden = {1, 3}}, u) == 2);
    CHECK(draw(logits, {.temperature = 1e-9}, u) == (u < 0.5 ? 1 : 3));
  }
  CHECK(draw(logits, {.top_k = 3}, 0.9999999) == 2);
  CHECK(draw(logits, {.top_k = 99}, 0.9999999) == 0);
  CHECK(draw({5.0F}, {}, 0.7) == 0);
}

TEST_CASE("bad input to a draw") {
  const std::vector<float> logits{1.0F, 2.0F};
  CHECK_THROWS_AS(draw({}, {}, 0.5), value_error);
  CHECK_THROWS_AS(draw({nothing, nothing}, {}, 0.5), value_error);
  CHECK_THROWS_AS(draw(logits, {.forbidden = {0, 1}}, 0.5), value_error);
  CHECK_THROWS_AS(draw({1.0F, std::nanf("")}, {}, 0.5), value_error);
  CHECK_THROWS_AS(draw({1.0F, -nothing}, {}, 0.5), value_error);
  CHECK_THROWS_AS(draw(logits, {.temperature = -1.0}, 0.5), value_error);
  CHECK_THROWS_AS(draw(logits, {.temperature = std::nan("")}, 0.5), value_error);
  CHECK_THROWS_AS(draw(logits, {.top_k = -1}, 0.5), value_error);
  CHECK_THROWS_AS(draw(logits, {}, 1.0), value_error);
  CHECK_THROWS_AS(draw(logits, {}, -0.1), value_error);
}

TEST_CASE("a text: the model sees the prompt and every token drawn but the last, once and in order") {
  constexpr index_t vocabulary = 6;
  const ids prompt{4, 2};
  const auto run = [&](std::uint64_t seed, ids* seen) {
    return sample_tokens<double>(prompt, 20, vocabulary, {.temperature = 0.8}, random_stream(seed, 1),
                                 [&](std::int32_t token, std::span<double> logits) {
                                   REQUIRE(logits.size() == vocabulary);
                                   if (seen != nullptr) seen->push_back(token);
                                   for (std::size_t k = 0; k < logits.size(); ++k) {
                                     logits[k] = std::cos(static_cast<double>(k) * (token + 1.0));
                                   }
                                 });
  };
  ids seen;
  const ids drawn = run(1, &seen);
  CHECK(drawn.size() == 20);
  ids expected = prompt;
  expected.insert(expected.end(), drawn.begin(), drawn.end() - 1);
  CHECK(seen == expected);
  CHECK(run(1, nullptr) == drawn);
  CHECK(run(2, nullptr) != drawn);
}

TEST_CASE("bad prompts") {
  const auto step = [](std::int32_t, std::span<float> logits) { logits[0] = 0.0F; };
  const random_stream random(1, 1);
  CHECK_THROWS_AS(sample_tokens<float>(ids{}, 3, 5, {}, random, step), value_error);
  CHECK_THROWS_AS(sample_tokens<float>(ids{5}, 3, 5, {}, random, step), value_error);
  CHECK_THROWS_AS(sample_tokens<float>(ids{-1}, 3, 5, {}, random, step), value_error);
  CHECK_THROWS_AS(sample_tokens<float>(ids{1}, -1, 5, {}, random, step), value_error);
  CHECK_THROWS_AS(sample_tokens<float>(ids{1}, 3, 0, {}, random, step), value_error);
  CHECK(sample_tokens<float>(ids{1}, 0, 5, {}, random, step).empty());
}
