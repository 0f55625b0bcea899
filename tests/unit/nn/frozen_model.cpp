// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/nn/frozen_model.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <pufferfish/linalg/kernel_choice.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/small_resnet.hpp>
#include <pufferfish/nn.hpp>

namespace {

using namespace pufferfish;

static_assert(std::is_nothrow_move_constructible_v<frozen_model<network<float>>>);
static_assert(!std::is_copy_constructible_v<frozen_model<network<float>>>);

/// A network of one layer with random values.
template <class T>
network<T> of_layer(any_layer<T> layer) {
  Sequential<T> layers;
  layers.add("layer", std::move(layer));
  network<T> net(any_layer<T>(std::move(layers)));
  net.initialize(3);
  return net;
}

template <class T>
tensor<T, 4> random_images(const extents<4>& shape, std::uint64_t seed = 1) {
  tensor<float, 4> values(shape);
  fill_normal(values.flat(), 1.0, random_stream(7, seed));
  tensor<T, 4> images(shape);
  for (index_t i = 0; i < images.size(); ++i) images.data()[i] = static_cast<T>(values.data()[i]);
  return images;
}

template <class T>
double largest(const tensor<T, 4>& y) {
  double most = 0.0;
  for (const T value : y.flat()) most = std::max(most, std::abs(static_cast<double>(value)));
  return most;
}

template <class T>
double largest_difference(const tensor<T, 4>& a, const tensor<T, 4>& b) {
  REQUIRE(a.shape() == b.shape());
  double most = 0.0;
  for (index_t i = 0; i < a.size(); ++i) {
    most = std::max(most, std::abs(static_cast<double>(a.data()[i]) - static_cast<double>(b.data()[i])));
  }
  return most;
}

/// Passes of the frozen network with several batches, each twice, against those of a copy. `keeps`: whether
/// a weight is packed at all.
template <class T>
void check_frozen(network<T> net, extents<4> image, bool keeps = true) {
  const network<T> plain = net;
  const frozen_model served(std::move(net));
  CHECK(served.packed_bytes() == 0);
  cpu_context ctx({.threads = 2}), fresh;
  const double rounding = std::is_same_v<T, double> ? 1e-13 : std::is_same_v<T, float> ? 2e-6 : 2e-2;
  for (const index_t batch : {1, 5, 40, 1}) {
    CAPTURE(batch);
    image[0] = batch;
    for (const std::uint64_t seed : {1U, 2U}) {
      const auto x = random_images<T>(image, seed);
      const auto y = served.forward(ctx, x.view()), expected = plain.forward(fresh, x.view());
      CHECK(largest_difference(y, expected) <= rounding * (1.0 + largest(expected)));
    }
  }
  const std::size_t bytes = served.packed_bytes();
  // Without kernels for pairs, weights of bfloat16 are widened in each pass.
  if (!std::is_same_v<T, bfloat16> || detail::has_pairs<T>()) CHECK((bytes > 0) == keeps);
  served.forward(fresh, random_images<T>(image).view());
  CHECK(served.packed_bytes() == bytes);
}

TEST_CASE_TEMPLATE("frozen_model: each layer gives the results of the network", T, float, double, bfloat16) {
  const auto check = [](any_layer<T> layer, const extents<4>& image, bool keeps = true) {
    const std::string name = layer.describe();
    CAPTURE(name);
    check_frozen<T>(of_layer<T>(std::move(layer)), image, keeps);
  };
  const bool widened = std::is_same_v<T, bfloat16>;  // odd channels and groups of bfloat16
  check(Conv<T>(conv_shape::square(64, 96, 3, 1, 1)), {1, 13, 12, 64});   // Winograd tiles, from 12 tiles on
  check(Conv<T>(conv_shape::square(16, 256, 3, 1, 1)), {1, 16, 16, 16});  // two blocks of columns
  check(Conv<T>(conv_shape::square(12, 96, 3, 2, 1)), {1, 9, 9, 12});     // direct sums, panels
  check(Conv<T>(conv_shape::square(512, 512, 3, 1, 1)), {1, 2, 2, 512});  // few pixels
  check(Conv<T>(conv_shape::square(7, 33, 3, 1, 1)), {1, 5, 6, 7}, !widened);  // odd channels
  check(Conv<T>(conv_shape::square(64, 192, 1, 2)), {1, 6, 6, 64});            // pixels are skipped
  check(Conv<T>(conv_shape{12, 24, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 3}), {1, 6, 6, 12}, false);  // groups
  check(LowRankConv<T>(conv_shape::square(64, 128, 3, 1, 1), 16), {1, 9, 9, 64});
  check(LowRankConv<T>(conv_shape::square(32, 100, 3, 2, 1), 24), {1, 9, 9, 32});
  check(Linear<T>(96, 200), {1, 1, 1, 96});
  check(LowRankLinear<T>(128, 96, 10), {1, 1, 1, 128});
}

TEST_CASE("frozen_model: a whole network, dense, factorized, and with folded batch norms") {
  network<float> net = small_resnet<float>({});
  net.initialize(1);
  check_frozen<float>(net, {1, 32, 32, 3});
  factorize(net, factorize_policy{});
  check_frozen<float>(net, {1, 32, 32, 3});
  fold_batch_norm(net);
  check_frozen<float>(net, {1, 32, 32, 3});
}

TEST_CASE_TEMPLATE("frozen_model: a language model, dense and factorized, token by token", T, float,
                   bfloat16) {
  for (const index_t width : {32, 17}) {
    CAPTURE(width);
    auto net = make_lstm_lm<T>({.vocabulary = 41, .width = width, .layers = 2, .dropout = 0.0});
    net.initialize(2);
    if (width == 32) factorize(net, factorize_policy{});
    const auto plain = net;
    const frozen_model served(std::move(net));
    cpu_context ctx({.threads = 2}), fresh;
    auto state = served.get().root().make_state(3), expected_state = plain.root().make_state(3);
    tensor<T, 2> logits({3, 41}), expected({3, 41});
    for (std::int32_t step = 0; step < 4; ++step) {
      const std::vector<std::int32_t> tokens{step, 7, 40 - step};
      served.run(ctx, [&](const auto& model) { model.root().next(ctx, tokens, state, logits.view()); });
      plain.root().next(fresh, tokens, expected_state, expected.view());
      for (index_t i = 0; i < logits.size(); ++i) {
        const double got = static_cast<double>(logits.data()[i]),
                     want = static_cast<double>(expected.data()[i]);
        CHECK(std::abs(got - want) <= (std::is_same_v<T, float> ? 1e-5 : 0.02));
      }
    }
    const bool widened = std::is_same_v<T, bfloat16> && width == 17;
    CHECK((served.packed_bytes() > 0 || widened));
  }
}

TEST_CASE("frozen_model: several threads share the packed weights") {
  const frozen_model served(of_layer<float>(Conv<float>(conv_shape::square(64, 128, 3, 1, 1))));
  const auto x = random_images<float>({3, 16, 16, 64});
  std::vector<tensor<float, 4>> results(4);
  std::vector<std::thread> threads;
  for (auto& result : results) {
    threads.emplace_back([&] {
      cpu_context ctx;
      for (int pass = 0; pass < 3; ++pass) result = served.forward(ctx, x.view());
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) CHECK(largest_difference(result, results[0]) == 0.0);
  CHECK(largest(results[0]) > 0.0);
}

TEST_CASE("frozen_model: training passes are refused; a thawed model has new values at once") {
  frozen_model served(of_layer<float>(Conv<float>(conv_shape::square(64, 96, 3, 1, 1))));
  const auto x = random_images<float>({1, 16, 16, 64});
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  CHECK_THROWS_WITH_AS(served.forward(ctx, x.view()),
                       doctest::Contains("frozen_model: a pass in training mode"), state_error);
  ctx.set_mode(run_mode::inference);
  const auto before = served.forward(ctx, x.view());
  CHECK(served.packed_bytes() > 0);
  network<float> net = std::move(served).thaw();
  net.initialize(4);
  const auto after = net.forward(ctx, x.view());
  CHECK(largest_difference(before, after) > 0.1);
  frozen_model again(std::move(net));
  CHECK(largest_difference(again.forward(ctx, x.view()), after) < 1e-4);
  const frozen_model moved(std::move(again));
  CHECK_THROWS_AS(again.forward(ctx, x.view()), state_error);
  CHECK_THROWS_AS(again.packed_bytes(), state_error);
  CHECK_THROWS_AS(served.forward(ctx, x.view()), state_error);
  CHECK(largest_difference(moved.forward(ctx, x.view()), after) < 1e-4);
}

TEST_CASE("frozen_model: measuring keeps the forms of chosen algorithms only, and rows of their own") {
  const frozen_model served(of_layer<float>(Conv<float>(conv_shape::square(64, 64, 3, 1, 1))));
  const auto x = random_images<float>({1, 16, 16, 64});
  cpu_context ctx;
  const auto expected = served.get().forward(ctx, x.view());
  kernel_choices::measure();
  const auto y = served.forward(ctx, x.view());
  const auto rows = kernel_choices::rows();
  kernel_choices::builtin();
  CHECK(largest_difference(y, expected) <= 1e-5 * (1.0 + largest(expected)));
  REQUIRE(rows.size() == 1);
  CHECK(rows.begin()->first.shape.find(", kept weight") != std::string::npos);
  constexpr std::size_t weight = 9 * 64 * 64 * sizeof(float);
  CHECK(served.packed_bytes() <= 4 * weight + (std::size_t{64} << 10));  // tiles alone: four times and gaps
}

}  // namespace
