// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <algorithm>
#include <cmath>

#include <pufferfish/nn/layers/conv.hpp>

#include "../../support/gradient_check.hpp"

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

TEST_CASE("Conv: groups: gradients, contract, threads, sizes") {
  const auto grouped = [](index_t in, index_t out, index_t groups, index_t stride) {
    return conv_shape{in, out, {3, 3}, {stride, stride}, {1, 1}, {1, 1}, groups};
  };
  const extents<4> input{2, 5, 4, 6};
  CHECK(gradient_error(Conv<double>(grouped(6, 4, 2, 1), true), input) < gradient_tolerance);
  CHECK(gradient_error(Conv<double>(grouped(6, 6, 6, 1), true), input) < gradient_tolerance);
  CHECK(gradient_error(Conv<double>(grouped(6, 6, 6, 2)), input) < gradient_tolerance);
  CHECK(gradient_error(Conv<double>(grouped(6, 12, 6, 2), true), input) < gradient_tolerance);
  CHECK(gradient_error(Conv<double>({6, 9, {1, 1}, {1, 1}, {0, 0}, {1, 1}, 3}, true), input) <
        gradient_tolerance);
  CHECK(gradient_error(Conv<double>({6, 6, {2, 3}, {1, 2}, {1, 2}, {2, 1}, 6}), input) < gradient_tolerance);
  check_contract(Conv<double>(grouped(6, 4, 2, 2), true), input);
  check_contract(Conv<double>(grouped(6, 6, 6, 1), true), input);
  check_contract(Conv<float>(grouped(6, 6, 6, 2), true), {0, 5, 4, 6});
  check_threads(Conv<float>(grouped(18, 9, 3, 1), true), {4, 21, 19, 18});
  check_threads(Conv<float>(grouped(18, 18, 18, 1), true), {4, 21, 19, 18});
  Conv<float> layer(grouped(6, 4, 2, 1));
  CHECK(layer.weight().shape() == extents<4>{4, 3, 3, 3});
  CHECK(layer.macs(input) == 2 * 5 * 4 * 27 * 4);
  layer.initialize({1, 1});
  double largest = 0.0;
  for (index_t i = 0; i < 4 * 27; ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(layer.weight().data()[i])));
  }
  CHECK(largest < 1.0 / std::sqrt(27.0));
  CHECK(largest > 0.8 / std::sqrt(27.0));
  CHECK(contains(error_text([&] { Conv<float>(grouped(6, 4, 3, 1)); }), "groups 3"));
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
