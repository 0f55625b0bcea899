// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/lowrank/layers/linear.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

/// up (down x) + b, written out.
template <class Layer, class T = typename Layer::value_type>
tensor<T, 2> compose(const Layer& layer, const tensor<T, 2>& x) {
  tensor<T, 2> y({x.extent(0), layer.out_features()});
  for (index_t m = 0; m < x.extent(0); ++m) {
    for (index_t o = 0; o < layer.out_features(); ++o) {
      double sum = layer.has_bias() ? static_cast<double>(layer.bias()(o)) : 0.0;
      for (index_t r = 0; r < layer.rank(); ++r) {
        double inner = 0.0;
        for (index_t i = 0; i < layer.in_features(); ++i) {
          inner += static_cast<double>(layer.down()(r, i)) * static_cast<double>(x(m, i));
        }
        sum += static_cast<double>(layer.up()(o, r)) * inner;
      }
      y(m, o) = static_cast<T>(sum);
    }
  }
  return y;
}

TEST_CASE_TEMPLATE("LowRankLinear: output and to_dense against the composition, over random shapes", T, float,
                   double) {
  const double tolerance = sizeof(T) == 4 ? 1e-5 : 1e-13;
  cpu_context ctx({2, 0});
  picker pick(1);
  for (std::uint64_t round = 0; round < 60; ++round) {
    const index_t in = pick(1, 40), out = pick(1, 40), rows = pick(0, 20), rank = pick(1, std::min(in, out));
    LowRankLinear<T> layer(in, out, rank, round % 2 == 0);
    layer.initialize({1, round});
    tensor<T, 2> x({rows, in});
    fill_normal<T>(x.flat(), 1.0, {2, round});
    const tensor<T, 2> expected = compose(layer, x);
    CHECK(largest_error(layer.forward(ctx, x), expected) < tolerance);
    const tensor<T, 2> dense = layer.to_dense();
    REQUIRE(dense.shape() == extents<2>{out, in});
    tensor<T, 2> y({rows, out});
    reference_gemm{}.multiply<T>(x.view(), transpose(dense.view()), y.view());
    if (layer.has_bias()) {
      for (index_t m = 0; m < rows; ++m) {
        for (index_t o = 0; o < out; ++o) y(m, o) += layer.bias()(o);
      }
    }
    CHECK(largest_error(y, expected) < tolerance);
  }
}

TEST_CASE("LowRankLinear: factor views write through, null bias, names and sizes") {
  LowRankLinear<float> layer(5, 7, 3);
  CHECK(layer.down().shape() == extents<2>{3, 5});
  CHECK(layer.up().shape() == extents<2>{7, 3});
  CHECK(layer.bias().shape() == extents<1>{7});
  layer.down()(2, 4) = 2.0F;
  layer.up()(6, 2) = 3.0F;
  CHECK(layer.to_dense()(6, 4) == 6.0F);
  CHECK(layer.to_dense()(6, 3) == 0.0F);
  std::vector<std::string> names;
  layer.visit([&](const char* name, auto& p) { names.push_back(name + (" " + to_string(p.layout()))); });
  CHECK(names == std::vector<std::string>{"down.weight [3 x 5]", "up.weight [7 x 3]", "up.bias [7]"});
  LowRankLinear<float> plain(5, 7, 3, false);
  CHECK(plain.bias().is_null());
  CHECK(parameters_of(plain).size() == 2);
  CHECK(layer.describe() == "LowRankLinear 5 -> 3 -> 7");
  CHECK(layer.macs({4, 1, 1, 5}) == 4 * 3 * 12);
  const LowRankLinear<float> copy(layer);
  layer.down()(2, 4) = 0.0F;
  CHECK(copy.to_dense()(6, 4) == 6.0F);
}

TEST_CASE("LowRankLinear: gradients, contract, threads") {
  CHECK(gradient_error(LowRankLinear<double>(6, 5, 3), {7, 1, 1, 6}) < gradient_tolerance);
  CHECK(gradient_error(LowRankLinear<double>(4, 9, 1, false), {2, 2, 1, 4}) < gradient_tolerance);
  CHECK(gradient_error(LowRankLinear<double, 2>(3, 2), {1, 1, 1, 3}) < gradient_tolerance);
  check_contract(LowRankLinear<double>(6, 5, 3), {7, 1, 1, 6});
  check_contract(LowRankLinear<float>(6, 5, 3), {0, 1, 1, 6});
  check_threads(LowRankLinear<float>(65, 33, 16), {2000, 1, 1, 65});
}

TEST_CASE("LowRankLinear: static and dynamic rank give the same bits") {
  const extents<4> shape{900, 1, 1, 37};
  const auto fixed = results_of_step(image_layer(LowRankLinear<float, 16>(37, 41)), shape, 2);
  const auto dynamic = results_of_step(image_layer(LowRankLinear<float>(37, 41, 16)), shape, 2);
  CHECK(fixed.size() > 900U * (37 + 41));
  CHECK(same_bits(fixed, dynamic));
}

TEST_CASE_TEMPLATE("LowRankLinear: backward_add adds to dx what backward writes", T, float, double) {
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  auto layer = LowRankLinear<T>(6, 5, 3);
  layer.initialize({1, 1});
  tensor<T, 2> x({7, 6}), y({7, 5}), dx({7, 6}), sum({7, 6});
  fill_normal<T>(x.flat(), 1.0, {1, 2});
  fill_normal<T>(y.flat(), 1.0, {1, 3});
  fill_normal<T>(sum.flat(), 1.0, {1, 4});
  tensor<T, 2> expected = sum, out = y;
  layer.forward(ctx, x, out.view());
  layer.backward(ctx, y, dx.view());
  layer.forward(ctx, x, out.view());
  layer.backward_add(ctx, y, sum.view());
  for (std::size_t i = 0; i < sum.flat().size(); ++i) expected.flat()[i] += dx.flat()[i];
  CHECK(largest_error(sum, expected) < (sizeof(T) == 4 ? 1e-6 : 1e-14));
}

TEST_CASE("LowRankLinear: errors name the layer and both shapes or ranks") {
  std::string text = error_text([] { LowRankLinear<float>(5, 7, 6); });
  CHECK(contains(text, "LowRankLinear 5 -> 7"));
  CHECK(contains(text, "rank 6"));
  CHECK(contains(text, "1 .. 5"));
  CHECK_THROWS_AS(LowRankLinear<float>(5, 7, 0), rank_error);
  CHECK_THROWS_AS((LowRankLinear<float, 6>(5, 7)), rank_error);
  cpu_context ctx;
  const LowRankLinear<float> layer(5, 7, 3);
  tensor<float, 2> x({4, 5}), y({4, 6}), good({4, 7}), wide({4, 6});
  text = error_text([&] { layer.forward(ctx, x, y); });
  CHECK(contains(text, "LowRankLinear 5 -> 3 -> 7"));
  CHECK(contains(text, "[4 x 5]"));
  CHECK(contains(text, "[4 x 6]"));
  CHECK_THROWS_AS(layer.forward(ctx, wide, good), shape_error);
  CHECK_THROWS_AS(layer.backward(ctx, good, x), state_error);
  CHECK_THROWS_AS(layer.backward(ctx, good), state_error);
  CHECK(contains(error_text([&] { layer.backward(ctx, good, x); }), "forward"));
}

}  // namespace
