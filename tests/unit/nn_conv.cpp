// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/nn/conv.hpp>

#include "gradient_check.hpp"

namespace {
using namespace test;

TEST_CASE("Conv: gradients, contract, threads") {
  const extents<4> input{2, 5, 4, 3};
  CHECK(gradient_error(Conv<double>(conv_shape::square(3, 4, 3, 1, 1)), input) < gradient_tolerance);
  CHECK(gradient_error(Conv<double>(conv_shape::square(3, 4, 3, 2, 1), true), input) < gradient_tolerance);
  CHECK(gradient_error(Conv<double>(conv_shape::square(3, 4, 1), true), input) < gradient_tolerance);
  CHECK(gradient_error(Conv<double>({3, 2, {2, 3}, {1, 2}, {1, 2}, {2, 1}}), input) < gradient_tolerance);
  check_contract(Conv<double>(conv_shape::square(3, 4, 3, 2, 1), true), input);
  check_contract(Conv<float>(conv_shape::square(3, 4, 3, 2, 1), true), {0, 5, 4, 3});
  check_threads(Conv<float>(conv_shape::square(17, 9, 3, 1, 1), true), {4, 21, 19, 17});
}

TEST_CASE("Conv: the weight as frameworks see it is what multiplies") {
  cpu_context ctx;
  Conv<float> layer(conv_shape{2, 3, {2, 3}}, true);
  layer.weight()(2, 1, 1, 0) = 2.0F;
  layer.bias()(2) = 0.5F;
  tensor<float, 4> x({1, 2, 3, 2}), y(layer.output_shape(x.shape()));
  x(0, 1, 0, 1) = 3.0F;
  layer.forward(ctx, x, y);
  CHECK(y(0, 0, 0, 2) == 6.5F);
  CHECK(y(0, 0, 0, 1) == 0.0F);
  CHECK(layer.macs({5, 4, 6, 2}) == 5 * 3 * 4 * 12 * 3);
}

TEST_CASE("Conv: errors") {
  CHECK_THROWS_AS(Conv<float>(conv_shape::square(3, 0, 3)), shape_error);
  cpu_context ctx;
  const Conv<float> layer(conv_shape::square(3, 4, 3));
  tensor<float, 4> x({1, 2, 5, 3}), y({1, 3, 3, 4});
  const std::string text = error_text([&] { layer.output_shape(x.shape()); });
  CHECK(contains(text, "Conv, convolution 3 -> 4"));
  CHECK(contains(text, "[1 x 2 x 5 x 3]"));
  CHECK_THROWS_AS(layer.forward(ctx, x, y), shape_error);
  CHECK_THROWS_AS(layer.backward(ctx, y, x), state_error);
}

}  // namespace
