// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <limits>

#include <pufferfish/nn/layers/pooling.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

pool_shape random_window(picker& pick) {
  pool_shape shape;
  shape.kernel = {pick(1, 4), pick(1, 4)};
  shape.stride = {pick(1, 4), pick(1, 4)};
  shape.padding = {pick(0, shape.kernel.height / 2), pick(0, shape.kernel.width / 2)};
  return shape;
}

TEST_CASE_TEMPLATE("pooling operations: fast against reference over random shapes", T, float, double) {
  const double tolerance = sizeof(T) == 4 ? 1e-6 : 1e-14;
  cpu_context ctx({2, 0});
  picker pick(1);
  int done = 0;
  for (std::uint64_t round = 0; round < 300; ++round) {
    const MaxPool<T> layer(random_window(pick));
    const pool_shape shape = layer.shape();
    const extents<4> input{pick(0, 3), pick(1, 9), pick(1, 9), pick(1, 20)};
    extents<4> output{};
    try {
      output = layer.output_shape(input);
    } catch (const shape_error&) {
      continue;
    }
    ++done;
    tensor<T, 4> x(input), y(output), y2(output), dy(output), dx(input), dx2(input);
    // Few different values: many ties.
    for (T& value : x.flat()) value = static_cast<T>(pick(-2, 2));
    fill_normal<T>(dy.flat(), 1.0, {1, round});
    ops::max_pool_forward<T>(ctx, shape, x, y);
    ops::reference::max_pool_forward<T>(shape, x, y2);
    CHECK(largest_error(y, y2) == 0.0);
    ops::max_pool_backward<T>(ctx, shape, x, y, dy, dx);
    ops::reference::max_pool_backward<T>(shape, x, dy, dx2);
    CHECK(largest_error(dx, dx2) < tolerance);
    for (bool count_padding : {false, true}) {
      ops::average_pool_forward<T>(ctx, shape, count_padding, x, y);
      ops::reference::average_pool_forward<T>(shape, count_padding, x, y2);
      CHECK(largest_error(y, y2) < tolerance);
      ops::average_pool_backward<T>(ctx, shape, count_padding, dy, dx);
      ops::reference::average_pool_backward<T>(shape, count_padding, dy, dx2);
      CHECK(largest_error(dx, dx2) < tolerance);
    }
    const extents<4> vector{input[0], 1, 1, input[3]};
    tensor<T, 4> mean(vector), mean2(vector);
    ops::global_average_forward<T>(ctx, x, mean);
    ops::reference::global_average_forward<T>(x, mean2);
    CHECK(largest_error(mean, mean2) < tolerance);
    ops::global_average_backward<T>(ctx, mean, dx);
    ops::reference::global_average_backward<T>(mean, dx2);
    CHECK(largest_error(dx, dx2) < tolerance);
  }
  CHECK(done > 150);
}

TEST_CASE("MaxPool: of equal values the first in row order gets the gradient; padding never wins; NaN does") {
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  tensor<float, 4> x({1, 2, 2, 1}), y({1, 1, 1, 1}), dy({1, 1, 1, 1}), dx(x.shape());
  std::fill(x.flat().begin(), x.flat().end(), -3.0F);
  dy.flat()[0] = 5.0F;
  const MaxPool<float> plain(2);
  plain.forward(ctx, x, y);
  plain.backward(ctx, dy, dx);
  CHECK(y.flat()[0] == -3.0F);
  CHECK(dx(0, 0, 0, 0) == 5.0F);
  CHECK(dx(0, 0, 1, 0) + dx(0, 1, 0, 0) + dx(0, 1, 1, 0) == 0.0F);

  const MaxPool<float> padded(3, 2, 1);
  tensor<float, 4> corner({1, 1, 1, 1});
  padded.forward(ctx, x, corner);
  CHECK(corner.flat()[0] == -3.0F);

  x(0, 0, 1, 0) = std::numeric_limits<float>::quiet_NaN();
  plain.forward(ctx, x, y);
  CHECK(std::isnan(y.flat()[0]));
  std::fill(x.flat().begin(), x.flat().end(), -std::numeric_limits<float>::infinity());
  plain.forward(ctx, x, y);
  plain.backward(ctx, dy, dx);
  CHECK(y.flat()[0] == x.flat()[0]);
  CHECK(dx(0, 0, 0, 0) == 5.0F);
}

TEST_CASE("AvgPool: padding counts or does not") {
  cpu_context ctx;
  tensor<double, 4> x({1, 2, 2, 1}), y({1, 2, 2, 1});
  std::fill(x.flat().begin(), x.flat().end(), 1.0);
  AvgPool<double>(2, 2, 1).forward(ctx, x, y);
  CHECK(y.flat()[0] == 0.25);
  AvgPool<double>(2, 2, 1, false).forward(ctx, x, y);
  CHECK(y.flat()[0] == 1.0);
}

TEST_CASE("pooling layers: output shapes, errors") {
  CHECK(MaxPool<float>(3, 2, 1).output_shape({2, 112, 113, 64}) == extents<4>{2, 56, 57, 64});
  CHECK(AvgPool<float>(2).output_shape({2, 5, 4, 3}) == extents<4>{2, 2, 2, 3});
  CHECK(GlobalAvgPool<float>().output_shape({0, 5, 4, 3}) == extents<4>{0, 1, 1, 3});
  CHECK_THROWS_AS(MaxPool<float>(2, 2, 2), shape_error);
  CHECK_THROWS_AS(MaxPool<float>(0), shape_error);
  CHECK_THROWS_AS(AvgPool<float>(2, 0), shape_error);
  // Numbers of pixels that do not fit in index_t.
  constexpr index_t most = std::numeric_limits<index_t>::max();
  const pool_shape fitting{{most / 4, 1}, {most, 1}, {most / 8, 0}};
  CHECK_NOTHROW(MaxPool<float>{fitting});
  CHECK_THROWS_AS(MaxPool<float>(pool_shape{{most / 2, 1}, {1, 1}, {most / 4, 0}}), shape_error);
  CHECK_THROWS_AS(AvgPool<float>(index_t{1} << 32, 1), shape_error);
  CHECK_THROWS_AS(GlobalAvgPool<float>().output_shape({1, 0, 4, 3}), shape_error);
  std::string text = error_text([] { MaxPool<float>(3).output_shape({1, 2, 5, 4}); });
  CHECK(contains(text, "MaxPool, kernel 3x3"));
  CHECK(contains(text, "[1 x 2 x 5 x 4]"));
  cpu_context ctx;
  tensor<float, 4> x({1, 4, 4, 3}), y({1, 2, 1, 3});
  text = error_text([&] { AvgPool<float>(2).forward(ctx, x, y); });
  CHECK(contains(text, "AvgPool"));
  CHECK(contains(text, "[1 x 4 x 4 x 3] gives output [1 x 2 x 2 x 3], not [1 x 2 x 1 x 3]"));
}

TEST_CASE("pooling layers: gradients, contract, threads") {
  const extents<4> shape{2, 5, 6, 3};
  CHECK(gradient_error(MaxPool<double>(2), shape) < gradient_tolerance);
  CHECK(gradient_error(MaxPool<double>(3, 1, 1), shape) < gradient_tolerance);
  CHECK(gradient_error(MaxPool<double>(pool_shape{{2, 3}, {3, 2}, {1, 0}}), shape) < gradient_tolerance);
  CHECK(gradient_error(AvgPool<double>(3, 2, 1), shape) < gradient_tolerance);
  CHECK(gradient_error(AvgPool<double>(3, 2, 1, false), shape) < gradient_tolerance);
  CHECK(gradient_error(GlobalAvgPool<double>(), shape) < gradient_tolerance);
  const auto check = [](const auto& layer) {
    check_contract(layer, {2, 5, 6, 3});
    check_contract(layer, {0, 5, 6, 3});
    check_threads(layer, {5, 9, 8, 37});
  };
  check(MaxPool<float>(3, 2, 1));
  check(AvgPool<float>(3, 2, 1));
  check(GlobalAvgPool<float>());
}

}  // namespace
