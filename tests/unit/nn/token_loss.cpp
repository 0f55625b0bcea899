// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Token losses from logits, and fused with the output layer.
#include <cmath>
#include <limits>

#include <pufferfish/nn/token_loss.hpp>
#include <pufferfish/ops/loss/output_loss.hpp>

#include "../support/gradient_check.hpp"

namespace {
using namespace test;

std::vector<std::int32_t> random_tokens(picker& pick, index_t count, index_t vocabulary) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  for (auto& token : tokens) token = static_cast<std::int32_t>(pick(0, vocabulary - 1));
  return tokens;
}

token_loss_options random_options(picker& pick, index_t vocabulary) {
  token_loss_options options;
  options.smoothing.epsilon = pick(0, 1) == 0 ? 0.0 : 0.1;
  options.smoothing.kind = pick(0, 1) == 0 ? smoothing_kind::all_classes : smoothing_kind::wrong_classes;
  if (pick(0, 1) == 0) options.padding = static_cast<std::int32_t>(pick(0, vocabulary - 1));
  return options;
}

TEST_CASE_TEMPLATE("token_loss: fast against reference over random shapes", T, float, double) {
  const double tolerance = sizeof(T) == 4 ? 1e-5 : 1e-12;
  cpu_context ctx({2, 0});
  picker pick(1);
  for (std::uint64_t round = 0; round < 60; ++round) {
    const extents<2> shape{pick(0, 30), pick(1, 50)};
    const auto targets = random_tokens(pick, shape[0], shape[1]);
    const token_loss_options options = random_options(pick, shape[1]);
    tensor<T, 2> z(shape), dz(shape), dz2(shape);
    fill_normal<T>(z.flat(), round % 3 == 0 ? 30.0 : 1.0, {1, round});
    const auto a = ops::token_loss<T>(ctx, z, targets, options, 7.0, dz);
    const auto b = ops::reference::token_loss<T>(z, targets, options, 7.0, dz2.view());
    CHECK(a.loss_sum == doctest::Approx(b.loss_sum).epsilon(tolerance));
    CHECK(a.tokens == b.tokens);
    CHECK(largest_error(dz, dz2) < tolerance);
    CHECK(ops::token_loss<T>(ctx, z, targets, options, 7.0, {}).loss_sum == a.loss_sum);
    ops::token_loss<T>(ctx, z, targets, options, 7.0, z);
    CHECK(largest_error(z, dz) == 0.0);
  }
}

TEST_CASE("TokenLoss: mean and sum, perplexity, padding, by hand") {
  cpu_context ctx;
  tensor<double, 2> z({3, 4}), dz(z.shape());
  const std::vector<std::int32_t> targets{1, 3, 2};
  // Equal logits: each of four tokens has probability 1/4.
  const TokenLoss<double> mean({{}, 3, loss_reduction::mean}), sum({{}, 3, loss_reduction::sum});
  token_loss_result result = mean(ctx, z, targets, dz);
  CHECK(result.tokens == 2);
  CHECK(result.mean_loss() == doctest::Approx(std::log(4.0)));
  CHECK(result.perplexity() == doctest::Approx(4.0));
  CHECK(dz(0, 1) == doctest::Approx(-0.75 / 2));
  CHECK(dz(0, 0) == doctest::Approx(0.25 / 2));
  for (index_t k = 0; k < 4; ++k) CHECK(dz(1, k) == 0.0);
  sum(ctx, z, targets, dz);
  CHECK(dz(2, 2) == doctest::Approx(-0.75));
  const TokenLoss<double> smooth({{0.3, smoothing_kind::wrong_classes}, no_token, loss_reduction::sum});
  smooth(ctx, z, targets, dz);
  CHECK(dz(0, 1) == doctest::Approx(0.25 - 0.7));
  CHECK(dz(0, 0) == doctest::Approx(0.25 - 0.1));
  result += result;
  CHECK(result.tokens == 4);
  CHECK(token_loss_result{}.mean_loss() == 0.0);
  CHECK(mean(ctx, z, std::vector<std::int32_t>{3, 3, 3}, dz).tokens == 0);
  for (double value : dz.flat()) CHECK(value == 0.0);
}

TEST_CASE("token_loss: errors name the target, its position and the vocabulary, before anything is written") {
  cpu_context ctx;
  tensor<float, 2> z({3, 10}), dz(z.shape()), odd({3, 9});
  const auto run = [&](std::vector<std::int32_t> targets, token_loss_options options = {},
                       double normalizer = 1.0) {
    return error_text([&] { ops::token_loss<float>(ctx, z, targets, options, normalizer, dz); });
  };
  CHECK(contains(run({1, 2, 12}), "token 12 at position 2 is not in 0 .. 9"));
  CHECK(contains(run({1, -1, 3}), "token -1 at position 1"));
  CHECK(run({1, 77, 3}, {{}, 77}).empty());
  CHECK(contains(run({1, 2}), "2 targets for logits [3 x 10]"));
  CHECK(contains(run({1, 2, 3}, {{1.0}}), "epsilon 1"));
  CHECK(contains(run({1, 2, 3}, {}, 0.0), "normalizer 0"));
  CHECK(contains(run({1, 2, 3}, {}, HUGE_VAL), "normalizer inf"));
  const std::vector<std::int32_t> targets{1, 2, 3};
  CHECK_THROWS_AS(ops::token_loss<float>(ctx, z, targets, {}, 1.0, odd), shape_error);
}

/// An output layer with random numbers.
template <class T>
struct random_output {
  tensor<T, 2> x, weight, dx, dweight;
  std::vector<T> bias, dbias;
  T scale;

  random_output(index_t tokens, index_t vocabulary, index_t depth, T s, double size, std::uint64_t seed)
      : x({tokens, depth}),
        weight({vocabulary, depth}),
        dx(x.shape()),
        dweight(weight.shape()),
        bias(static_cast<std::size_t>(vocabulary)),
        dbias(bias),
        scale(s) {
    fill_normal<T>(x.flat(), 1.0, {seed, 1});
    fill_normal<T>(weight.flat(), size, {seed, 2});
    fill_normal<T>(bias, 1.0, {seed, 3});
    fill_normal<T>(dweight.flat(), 1.0, {seed, 4});
    fill_normal<T>(dbias, 1.0, {seed, 5});
  }
  ops::output_layer<T> layer(bool with_bias) const {
    return {x, weight, with_bias ? bias.data() : nullptr, scale};
  }
  ops::output_gradient<T> gradient(bool with_bias, bool add) {
    return {dx, dweight, add, with_bias ? dbias.data() : nullptr, add};
  }
};

TEST_CASE_TEMPLATE("output_loss: fused against logits, loss and products one by one, over random shapes", T,
                   float, double) {
  const double tolerance = sizeof(T) == 4 ? 3e-5 : 1e-12;
  picker pick(2);
  for (std::uint64_t round = 0; round < 40; ++round) {
    cpu_context ctx({2, 0});
    const bool large = round % 5 == 0;
    const index_t tokens = pick(0, large ? 70 : 20), vocabulary = pick(1, large ? 2000 : 120),
                  depth = pick(1, 60);
    const auto targets = random_tokens(pick, tokens, vocabulary);
    const token_loss_options options = random_options(pick, vocabulary);
    const bool biased = round % 3 != 0, add = round % 2 == 0;
    random_output<T> given(tokens, vocabulary, depth, T(0.7), round % 4 == 0 ? 5.0 : 0.3, round),
        plain = given;
    const ops::output_layer<T> layer = given.layer(biased);
    tensor<T, 2> z({tokens, vocabulary}), dz(z.shape());
    ops::reference::output_logits<T>(layer, z.view());
    const auto expected = ops::reference::token_loss<T>(z, targets, options, 3.0, dz.view());
    ops::reference::output_backward<T>(layer, dz, plain.gradient(biased, add));

    aligned_buffer<T> kept(ops::output_loss_kept(ctx, layer));
    const auto result = ops::output_loss_forward<T>(ctx, layer, targets, options, kept.data());
    CHECK(result.loss_sum == doctest::Approx(expected.loss_sum).epsilon(tolerance));
    CHECK(result.tokens == expected.tokens);
    CHECK(ops::output_loss_forward<T>(ctx, layer, targets, options, nullptr).loss_sum == result.loss_sum);
    ops::output_loss_backward<T>(ctx, layer, targets, options, 3.0, kept.data(), given.gradient(biased, add));
    CHECK(largest_error(given.dx, plain.dx) < tolerance);
    CHECK(largest_error(given.dweight, plain.dweight) < tolerance);
    for (std::size_t v = 0; biased && v < given.bias.size(); ++v) {
      CHECK(static_cast<double>(given.dbias[v]) ==
            doctest::Approx(static_cast<double>(plain.dbias[v])).epsilon(tolerance));
    }
  }
}

TEST_CASE("output_loss: gradients against differences of the loss") {
  cpu_context ctx({2, 0});
  random_output<double> given(7, 230, 5, 0.8, 0.5, 1);
  const std::vector<std::int32_t> targets{3, 229, 0, 100, 95, 96, 17};
  const token_loss_options options{{0.1, smoothing_kind::wrong_classes}, 100};
  const auto loss = [&] {
    return ops::output_loss_forward<double>(ctx, given.layer(true), targets, options, nullptr).loss_sum;
  };
  aligned_buffer<double> kept(ops::output_loss_kept(ctx, given.layer(true)));
  ops::output_loss_forward<double>(ctx, given.layer(true), targets, options, kept.data());
  ops::output_loss_backward<double>(ctx, given.layer(true), targets, options, 2.0, kept.data(),
                                    given.gradient(true, false));
  const auto compare = [&](double& element, double gradient) {
    const double old = element;
    element = old + 1e-5;
    const double above = loss();
    element = old - 1e-5;
    const double below = loss();
    element = old;
    CHECK(gradient == doctest::Approx((above - below) / 2e-5 / 2.0).epsilon(1e-6));
  };
  for (std::size_t i = 0; i < given.x.flat().size(); ++i) compare(given.x.flat()[i], given.dx.flat()[i]);
  for (std::size_t i = 0; i < given.weight.flat().size(); i += 37)
    compare(given.weight.flat()[i], given.dweight.flat()[i]);
  for (std::size_t i = 0; i < given.bias.size(); i += 19) compare(given.bias[i], given.dbias[i]);
}

TEST_CASE("output_loss: the same bits for any number of threads") {
  picker pick(3);
  const auto targets = random_tokens(pick, 50, 3000);
  const auto run = [&](int threads) {
    cpu_context ctx({threads, 0});
    random_output<float> given(50, 3000, 40, 1.0F, 0.5, 1);
    aligned_buffer<float> kept(ops::output_loss_kept(ctx, given.layer(true)));
    const double loss =
        ops::output_loss_forward<float>(ctx, given.layer(true), targets, {}, kept.data()).loss_sum;
    ops::output_loss_backward<float>(ctx, given.layer(true), targets, {}, 50.0, kept.data(),
                                     given.gradient(true, false));
    std::vector<float> all(given.dx.flat().begin(), given.dx.flat().end());
    all.insert(all.end(), given.dweight.flat().begin(), given.dweight.flat().end());
    all.insert(all.end(), given.dbias.begin(), given.dbias.end());
    return std::pair{loss, all};
  };
  const auto one = run(1);
  CHECK(one == run(2));
  CHECK(one == run(3));
}

TEST_CASE("output_loss: huge logits are safe, NaN and infinity are seen; errors") {
  cpu_context ctx;
  random_output<float> given(2, 300, 4, 1.0F, 0.0, 1);
  std::fill(given.bias.begin(), given.bias.end(), 0.0F);
  const std::vector<std::int32_t> targets{1, 250};
  const auto loss = [&] {
    return ops::output_loss_forward<float>(ctx, given.layer(true), targets, {}, nullptr).loss_sum;
  };
  CHECK(loss() == doctest::Approx(2.0 * std::log(300.0)));
  std::fill(given.bias.begin(), given.bias.end(), -1e30F);
  CHECK(loss() == doctest::Approx(2.0 * std::log(300.0)));
  given.bias[1] = 3e4F;
  CHECK(loss() == doctest::Approx(1e30).epsilon(1e-5));
  std::fill(given.bias.begin(), given.bias.end(), -std::numeric_limits<float>::infinity());
  given.bias[1] = given.bias[250] = 2.0F;
  CHECK(loss() == doctest::Approx(2.0 * std::log(2.0)));
  given.bias[7] = std::numeric_limits<float>::quiet_NaN();
  CHECK(std::isnan(loss()));
  given.bias[7] = std::numeric_limits<float>::infinity();
  CHECK(std::isnan(loss()));
  const auto run = [&](std::vector<std::int32_t> wrong) {
    return error_text([&] { ops::output_loss_forward<float>(ctx, given.layer(true), wrong, {}, nullptr); });
  };
  CHECK(contains(run({1, 300}), "token 300 at position 1 is not in 0 .. 299"));
  CHECK(contains(run({1}), "1 targets for logits [2 x 300]"));
  ops::output_layer<float> odd = given.layer(true);
  odd.weight = odd.weight.slice(1, 0, 3);
  CHECK_THROWS_AS(ops::output_loss_forward<float>(ctx, odd, targets, {}, nullptr), shape_error);
}

}  // namespace
