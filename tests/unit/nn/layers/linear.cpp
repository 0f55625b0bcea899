// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/nn/layers/linear.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

TEST_CASE("Linear: gradients, contract, threads") {
  CHECK(gradient_error(Linear<double>(6, 5), {7, 1, 1, 6}) < gradient_tolerance);
  CHECK(gradient_error(Linear<double>(4, 9, false), {2, 2, 1, 4}) < gradient_tolerance);
  check_contract(Linear<double>(6, 5), {7, 1, 1, 6});
  check_contract(Linear<float>(6, 5), {0, 1, 1, 6});
  check_threads(Linear<float>(65, 33), {2000, 1, 1, 65});
}

TEST_CASE("Linear: the weight as frameworks see it is what multiplies") {
  cpu_context ctx;
  Linear<float> layer(3, 2);
  layer.weight()(1, 2) = 2.0F;
  layer.bias()(1) = 0.5F;
  tensor<float, 2> x({1, 3}), y({1, 2});
  x(0, 2) = 3.0F;
  layer.forward(ctx, x, y);
  CHECK(y(0, 0) == 0.0F);
  CHECK(y(0, 1) == 6.5F);
  CHECK(layer.macs({5, 1, 1, 3}) == 30);
}

TEST_CASE_TEMPLATE("Linear: backward_add adds to dx what backward writes", T, float, double) {
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  auto layer = Linear<T>(6, 5);
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

TEST_CASE("Linear: errors") {
  CHECK_THROWS_AS(Linear<float>(0, 4), shape_error);
  cpu_context ctx;
  const Linear<float> layer(3, 4);
  tensor<float, 2> x({2, 5}), y({2, 4});
  const std::string text = error_text([&] { layer.forward(ctx, x, y); });
  CHECK(contains(text, "[2 x 5]"));
  CHECK(contains(text, "[2 x 4]"));
  CHECK_THROWS_AS(layer.backward(ctx, y, x), state_error);
}

}  // namespace
