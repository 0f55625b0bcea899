// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Losses over tokens on the device against the CPU's.
#include "support.hpp"

#include <limits>

#include <pufferfish/gpu/ops/loss.hpp>

using namespace gpu_test;

namespace {

constexpr std::int32_t padding = 1;

twin<std::int32_t> random_targets(index_t count, index_t classes, std::uint64_t stream) {
  std::vector<std::int32_t> targets(static_cast<std::size_t>(count));
  const pf::random_stream random(11, stream);
  for (std::size_t i = 0; i < targets.size(); ++i) {
    targets[i] = static_cast<std::int32_t>(random.below(i, static_cast<std::uint64_t>(classes)));
  }
  return twin<std::int32_t>(std::move(targets));
}

std::vector<pf::token_loss_options> options() {
  return {{{0.0, pf::smoothing_kind::wrong_classes}, pf::no_token, pf::loss_reduction::mean},
          {{0.1, pf::smoothing_kind::wrong_classes}, padding, pf::loss_reduction::sum},
          {{0.1, pf::smoothing_kind::all_classes}, padding, pf::loss_reduction::mean}};
}

void check_results(const twin<double>& found, const pf::token_loss_result& expected) {
  const std::vector<double> results = found.fetched();
  CHECK(results[0] == doctest::Approx(expected.loss_sum).epsilon(1e-6));
  CHECK(results[1] == static_cast<double>(expected.tokens));
}

struct output_case {
  index_t tokens, vocabulary, depth;
  bool bias;
  float scale;
};
constexpr output_case output_cases[] = {{1, 1, 1, false, 1.0F},
                                        {0, 5, 3, true, 1.0F},
                                        {33, 70, 9, true, 0.5F},
                                        {130, 301, 16, true, 1.0F},
                                        {7, 1100, 20, false, 2.0F}};

}  // namespace

TEST_CASE("gpu token loss: values and gradients, with and without smoothing and padding") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  std::uint64_t stream = 0;
  for (const pf::extents<2>& shape : {pf::extents<2>{0, 4}, {1, 2}, {3, 7}, {65, 33}, {40, 300}, {6, 1500}}) {
    for (const pf::token_loss_options& o : options()) {
      CAPTURE(shape[0]);
      CAPTURE(shape[1]);
      auto logits = random_twin<float>(pf::volume<2>(shape), ++stream);
      for (float& z : logits.host()) z *= 8.0F;
      logits = twin<float>(logits.host());
      auto targets = random_targets(shape[0], shape[1], ++stream);
      twin<float> gradient(logits.size());
      twin<double> results(2, NAN);
      const auto expected = pf::ops::token_loss<float>(host, logits.host_view(shape), targets.host_span(), o,
                                                       13.0, gradient.host_view(shape));
      pf::ops::token_loss<float>(ctx, logits.device_view(shape), targets.device_span(), o, 13.0,
                                 gradient.device_view(shape), results.device_data());
      check_results(results, expected);
      CHECK(difference(gradient) < 1e-5);
      // Without a gradient; then with a normalizer of the device's, in place.
      pf::ops::token_loss<float>(ctx, logits.device_view(shape), targets.device_span(), o, 13.0, {},
                                 results.device_data());
      check_results(results, expected);
      twin<double> normalizer(1, 13.0);
      pf::ops::token_loss<float>(ctx, logits.device_view(shape), targets.device_span(), o,
                                 normalizer.device_data(), logits.device_view(shape), results.device_data());
      check_results(results, expected);
      logits.host() = gradient.host();
      CHECK(difference(logits) < 1e-5);
    }
  }
}

TEST_CASE("gpu token loss: numbers of any size, NaN, targets out of range, shapes that do not fit") {
  pf::gpu_context& ctx = gpu_context();
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const pf::extents<2> shape{4, 3};
  twin<float> logits(std::vector<float>{3e38F, 1.0F, -infinity, -3e38F, 0.0F, 3e38F,  //
                                        NAN, 1.0F, 2.0F, 1.0F, 2.0F, infinity});
  twin<float> gradient(12, NAN);
  twin<double> results(2, NAN);
  const auto loss_of = [&](index_t row, std::int32_t target) {
    twin<std::int32_t> targets(1, target);
    pf::ops::token_loss<float>(ctx, logits.device_view(shape).slice(0, row, 1), targets.device_span(), {},
                               1.0, gradient.device_view(shape).slice(0, row, 1), results.device_data());
    return results.fetched()[0];
  };
  CHECK(loss_of(0, 0) == 0.0);
  CHECK(loss_of(1, 2) == 0.0);
  CHECK(std::isnan(loss_of(2, 1)));
  CHECK(std::isnan(loss_of(3, 1)));
  CHECK(std::isnan(loss_of(0, 3)));
  CHECK(std::isnan(loss_of(0, -1)));
  CHECK(std::isnan(gradient.fetched()[1]));
  twin<std::int32_t> targets(4, 0);
  CHECK_THROWS_AS(pf::ops::token_loss<float>(ctx, logits.device_view(shape), targets.device_span(), {}, 1.0,
                                             gradient.device_view<2>({3, 4}), results.device_data()),
                  pf::shape_error);
  CHECK_THROWS_AS(pf::ops::token_loss<float>(ctx, logits.device_view(shape), targets.device_span(), {}, 0.0,
                                             {}, results.device_data()),
                  pf::value_error);
}

TEST_CASE("gpu log_sum_exp") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  for (const pf::extents<2>& shape : {pf::extents<2>{0, 4}, {1, 1}, {9, 37}, {3, 2000}}) {
    auto logits = random_twin<float>(pf::volume<2>(shape), static_cast<std::uint64_t>(shape[1]));
    if (shape[0] == 9) {
      std::fill_n(logits.host_data(), 37, -std::numeric_limits<float>::infinity());
      logits.host()[40] = -std::numeric_limits<float>::infinity();
      logits.host()[80] = NAN;
      logits = twin<float>(logits.host());
    }
    twin<double> result(shape[0]);
    pf::ops::log_sum_exp<float>(host, logits.host_view(shape), result.host_span());
    pf::ops::log_sum_exp<float>(ctx, logits.device_view(shape), result.device_span());
    CHECK(difference(result) < 1e-6);
  }
  twin<double> two(2);
  CHECK_THROWS_AS(
      pf::ops::log_sum_exp<float>(ctx, pf::tensor_view<float, 2>(nullptr, {3, 2}), two.device_span()),
      pf::shape_error);
}

TEST_CASE("gpu output layer: logits, the loss over them and all gradients") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  std::uint64_t stream = 100;
  for (const output_case& c : output_cases) {
    CAPTURE(c.tokens);
    CAPTURE(c.vocabulary);
    const pf::extents<2> xs{c.tokens, c.depth}, ws{c.vocabulary, c.depth}, zs{c.tokens, c.vocabulary};
    auto x = random_twin<float>(c.tokens * c.depth, ++stream),
         w = random_twin<float>(c.vocabulary * c.depth + 1, ++stream),
         bias = random_twin<float>(c.vocabulary, ++stream);
    auto targets = random_targets(c.tokens, c.vocabulary, ++stream);
    // A weight that is not aligned, as packed parameters are.
    const pf::ops::output_layer<float> mine{x.host_view(xs), pf::tensor_view<float, 2>(w.host_data() + 1, ws),
                                            c.bias ? bias.host_data() : nullptr, c.scale};
    const pf::ops::output_layer<float> its{x.device_view(xs),
                                           pf::tensor_view<float, 2>(w.device_data() + 1, ws),
                                           c.bias ? bias.device_data() : nullptr, c.scale};
    twin<float> logits(c.tokens * c.vocabulary, NAN);
    pf::ops::output_logits<float>(host, mine, logits.host_view(zs));
    pf::ops::output_logits<float>(ctx, its, logits.device_view(zs));
    CHECK(difference(logits) < 1e-5);

    auto dx = random_twin<float>(x.size(), ++stream),
         dw = random_twin<float>(c.vocabulary * c.depth, ++stream),
         dbias = random_twin<float>(c.vocabulary, ++stream);
    pf::aligned_buffer<float> kept_here(pf::ops::output_loss_kept(host, mine));
    twin<float> kept(pf::ops::output_loss_kept(ctx, its), NAN);
    twin<double> results(2, NAN), normalizer(1, 3.0);
    int round = 0;
    for (const pf::token_loss_options& o : options()) {
      const bool add = round++ == 1, with_bias = round != 3;
      const auto expected =
          pf::ops::output_loss_forward<float>(host, mine, targets.host_span(), o, kept_here.data());
      pf::ops::output_loss_forward<float>(ctx, its, targets.device_span(), o, nullptr, results.device_data());
      check_results(results, expected);
      pf::ops::output_loss_forward<float>(ctx, its, targets.device_span(), o, kept.device_data(),
                                          results.device_data());
      check_results(results, expected);
      pf::ops::output_loss_backward<float>(
          host, mine, targets.host_span(), o, 3.0, kept_here.data(),
          {dx.host_view(xs), dw.host_view(ws), add, with_bias ? dbias.host_data() : nullptr, add});
      const pf::ops::output_gradient<float> to{dx.device_view(xs), dw.device_view(ws), add,
                                               with_bias ? dbias.device_data() : nullptr, add};
      if (add) {
        pf::ops::output_loss_backward<float>(ctx, its, targets.device_span(), o, normalizer.device_data(),
                                             kept.device_data(), to);
      } else {
        pf::ops::output_loss_backward<float>(ctx, its, targets.device_span(), o, 3.0, kept.device_data(), to);
      }
      CHECK(difference(dx, 1e-3) < 1e-5);
      CHECK(difference(dw, 1e-3) < 1e-5);
      CHECK(difference(dbias, 1e-3) < 1e-5);
    }
  }
}
