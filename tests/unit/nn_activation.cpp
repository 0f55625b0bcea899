// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <limits>

#include <pufferfish/nn/activation.hpp>

#include "gradient_check.hpp"

namespace {
using namespace test;

TEST_CASE_TEMPLATE("ReLU: fast against reference, any length", T, float, double) {
  cpu_context ctx({2, 0});
  for (index_t size : {0, 1, 7, 16384, 40001}) {
    tensor<T, 1> x({size}), dy({size}), y({size}), dx({size}), y2({size}), dx2({size});
    fill_normal<T>(x.flat(), 1.0, {1, 1});
    fill_normal<T>(dy.flat(), 1.0, {1, 2});
    if (size > 3) x.flat()[3] = T{};
    ops::relu_forward<T>(ctx, std::as_const(x).flat(), y.flat());
    ops::relu_backward<T>(ctx, std::as_const(y).flat(), std::as_const(dy).flat(), dx.flat());
    ops::reference::relu_forward<T>(std::as_const(x).flat(), y2.flat());
    ops::reference::relu_backward<T>(std::as_const(y2).flat(), std::as_const(dy).flat(), dx2.flat());
    CHECK(largest_error(y, y2) == 0.0);
    CHECK(largest_error(dx, dx2) == 0.0);
    for (std::size_t i = 0; i < y.flat().size(); ++i) {
      const bool on = x.flat()[i] > T{};
      REQUIRE(y.flat()[i] == (on ? x.flat()[i] : T{}));
      REQUIRE(dx.flat()[i] == (on ? dy.flat()[i] : T{}));
    }
  }
}

TEST_CASE("ReLU: gradient, contract, threads, errors") {
  CHECK(gradient_error(ReLU<double>(), {2, 3, 1, 5}) < gradient_tolerance);
  check_contract(ReLU<double>(), {2, 3, 3, 5});
  check_contract(ReLU<float>(), {0, 3, 3, 5});
  check_threads(ReLU<float>(), {3, 17, 19, 33});
  cpu_context ctx;
  tensor<float, 4> x({1, 2, 2, 3}), y({1, 2, 2, 4});
  const std::string text = error_text([&] { ReLU<float>().forward(ctx, x, y); });
  CHECK(contains(text, "ReLU"));
  CHECK(contains(text, "[1 x 2 x 2 x 3]"));
  CHECK(contains(text, "[1 x 2 x 2 x 4]"));
}

TEST_CASE("ReLU: a NaN is not hidden") {
  cpu_context ctx;
  tensor<float, 4> x({1, 1, 1, 2}), y({1, 1, 1, 2});
  x.flat()[0] = std::numeric_limits<float>::quiet_NaN();
  x.flat()[1] = -std::numeric_limits<float>::infinity();
  ReLU<float>().forward(ctx, x, y);
  CHECK(std::isnan(y.flat()[0]));
  CHECK(y.flat()[1] == 0.0F);
}

}  // namespace
