// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/nn/layers/flatten.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

TEST_CASE("Flatten: order height, width, channel; and back") {
  cpu_context ctx({2, 0});
  ctx.set_mode(run_mode::training);
  tensor<float, 4> x({2, 3, 5, 7}), y({2, 1, 1, 105}), dx(x.shape());
  fill_normal<float>(x.flat(), 1.0, {1, 1});
  const Flatten<float> layer;
  CHECK(layer.output_shape(x.shape()) == y.shape());
  layer.forward(ctx, x, y);
  for (index_t n = 0; n < 2; ++n) {
    for (index_t h = 0; h < 3; ++h) {
      for (index_t w = 0; w < 5; ++w) {
        for (index_t c = 0; c < 7; ++c) REQUIRE(y(n, 0, 0, (h * 5 + w) * 7 + c) == x(n, h, w, c));
      }
    }
  }
  layer.backward(ctx, y, dx);
  CHECK(largest_error(dx, x) == 0.0);
}

TEST_CASE("Flatten: gradient, contract, errors") {
  CHECK(gradient_error(Flatten<double>(), {2, 2, 3, 2}) < gradient_tolerance);
  check_contract(Flatten<float>(), {2, 2, 3, 2});
  check_contract(Flatten<float>(), {0, 2, 3, 2});
  check_threads(Flatten<float>(), {5, 9, 21, 33});
  cpu_context ctx;
  tensor<float, 4> x({2, 3, 5, 7}), y({2, 1, 1, 104});
  const std::string text = error_text([&] { Flatten<float>().forward(ctx, x, y); });
  CHECK(
      contains(text, "Flatten: input [2 x 3 x 5 x 7] gives output [2 x 1 x 1 x 105], not [2 x 1 x 1 x 104]"));
}

}  // namespace
