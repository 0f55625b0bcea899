// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/nn/layers/embedding.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

std::vector<std::int32_t> random_tokens(picker& pick, index_t count, index_t vocabulary) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  for (auto& token : tokens) token = static_cast<std::int32_t>(pick(0, vocabulary - 1));
  return tokens;
}

TEST_CASE_TEMPLATE("embedding: fast against reference over random shapes", T, float, double) {
  cpu_context ctx({2, 0});
  picker pick(1);
  for (std::uint64_t round = 0; round < 60; ++round) {
    const index_t vocabulary = pick(1, 30), width = pick(1, round % 6 == 0 ? 1100 : 20), count = pick(0, 40);
    const auto tokens = random_tokens(pick, count, vocabulary);
    tensor<T, 2> table({vocabulary, width}), y({count, width}), y2(y.shape());
    fill_normal<T>(table.flat(), 1.0, {1, round});
    ops::embedding_forward<T>(ctx, table, tokens, y);
    ops::reference::embedding_forward<T>(table, tokens, y2.view());
    CHECK(largest_error(y, y2) == 0.0);
    tensor<T, 2> dtable = table, dtable2 = table;
    const std::int32_t padding =
        round % 3 == 0 ? static_cast<std::int32_t>(pick(0, vocabulary - 1)) : no_token;
    ops::embedding_backward<T>(ctx, tokens, y, padding, dtable, round % 2 == 0);
    ops::reference::embedding_backward<T>(tokens, y, padding, dtable2.view(), round % 2 == 0);
    CHECK(largest_error(dtable, dtable2) == 0.0);
  }
}

TEST_CASE("Embedding: the gradient against differences, accumulation, the rules of the tape") {
  cpu_context ctx({2, 0});
  Embedding<double> layer(5, 3, 2);
  layer.initialize({1, 1});
  const std::vector<std::int32_t> tokens{4, 0, 4, 2, 1, 4};
  tensor<double, 2> y({6, 3}), dy({6, 3});
  fill_normal<double>(dy.flat(), 1.0, {1, 2});
  layer.forward(ctx, tokens, y);
  CHECK(ctx.tape().empty());
  CHECK_THROWS_AS(layer.backward(ctx, dy), state_error);
  ctx.set_mode(run_mode::training);
  layer.forward(ctx, tokens, y);
  layer.backward(ctx, dy);
  CHECK(ctx.tape().empty());
  for (index_t v = 0; v < 5; ++v) {
    for (index_t d = 0; d < 3; ++d) {
      double expected = 0.0;
      for (index_t n = 0; n < 6; ++n)
        expected += tokens[static_cast<std::size_t>(n)] == v && v != 2 ? dy(n, d) : 0.0;
      CHECK(layer.weight_gradient()(v, d) == doctest::Approx(expected));
    }
  }
  const tensor<double, 2> once(layer.weight_gradient());
  layer.tie();
  CHECK(layer.table().writers() == 2);
  for (int pass = 0; pass < 2; ++pass) {
    layer.forward(ctx, tokens, y);
    layer.backward(ctx, dy);
  }
  for (index_t v = 0; v < 5; ++v) CHECK(layer.weight_gradient()(v, 1) == doctest::Approx(2.0 * once(v, 1)));
}

TEST_CASE("Embedding: the same bits for any number of threads") {
  picker pick(2);
  const auto tokens = random_tokens(pick, 300, 7);
  const auto run = [&](int threads) {
    cpu_context ctx({threads, 0});
    ctx.set_mode(run_mode::training);
    Embedding<float> layer(7, 1300);
    layer.initialize({1, 1});
    tensor<float, 2> y({300, 1300});
    layer.forward(ctx, tokens, y);
    layer.backward(ctx, y);
    const auto gradient = layer.table().gradient();
    return std::vector<float>(gradient.begin(), gradient.end());
  };
  CHECK(same_bits(run(1), run(2)));
  CHECK(same_bits(run(1), run(3)));
}

TEST_CASE("Embedding: names, sizes, errors with token, position and vocabulary") {
  Embedding<float> layer(10, 4);
  CHECK(layer.describe() == "Embedding 10 x 4");
  std::vector<std::string> names;
  layer.visit([&](const char* name, auto& p) { names.push_back(name + (" " + to_string(p.layout()))); });
  CHECK(names == std::vector<std::string>{"weight [10 x 4]"});
  layer.weight()(3, 1) = 2.0F;
  CHECK(layer.table().data()[3 * 4 + 1] == 2.0F);
  cpu_context ctx;
  tensor<float, 2> y({3, 4}), odd({3, 5});
  const std::string text = error_text([&] { layer.forward(ctx, std::vector<std::int32_t>{1, 2, 10}, y); });
  CHECK(contains(text, "Embedding 10 x 4: token 10 at position 2 is not in 0 .. 9 (a vocabulary of 10)"));
  CHECK(contains(error_text([&] {
                   layer.forward(ctx, std::vector<std::int32_t>{1, -1, 1}, y);
                 }),
                 "token -1 at position 1"));
  CHECK_THROWS_AS(layer.forward(ctx, std::vector<std::int32_t>{1, 2}, y), shape_error);
  CHECK_THROWS_AS(layer.forward(ctx, std::vector<std::int32_t>{1, 2, 3}, odd), shape_error);
  CHECK_THROWS_AS(Embedding<float>(0, 4), shape_error);
  CHECK_THROWS_AS(Embedding<float>(4, 4, 4), value_error);
}

}  // namespace
