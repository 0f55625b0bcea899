// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <pufferfish/core/random.hpp>
#include <pufferfish/ops/elementwise/sum.hpp>
#include <vector>

namespace {

using namespace pufferfish;

TEST_CASE_TEMPLATE("add and add_relu agree with the reference, bit for bit, on any number of threads", T,
                   float, double) {
  for (std::size_t size : {0U, 1U, 17U, 16384U, 50001U}) {
    std::vector<T> x(size), y(size);
    fill_normal<T>(x, 1.0, {size, 1});
    fill_normal<T>(y, 1.0, {size, 2});
    for (bool relu : {false, true}) {
      std::vector<T> expected = y;
      ops::reference::add<T>(x, expected, relu);
      for (int threads : {1, 3}) {
        cpu_context ctx({threads, 0});
        std::vector<T> result = y;
        if (relu) {
          ops::add_relu<T>(ctx, x, result);
        } else {
          ops::add<T>(ctx, x, result);
        }
        CHECK(result == expected);
      }
    }
  }
}

TEST_CASE("add_relu lets a NaN pass, so that it is noticed") {
  cpu_context ctx;
  std::vector<float> x{std::numeric_limits<float>::quiet_NaN(), -2.0F, 1.0F}, y{0.0F, 1.0F, 1.0F};
  ops::add_relu<float>(ctx, x, y);
  CHECK(std::isnan(y[0]));
  CHECK(y[1] == 0.0F);
  CHECK(y[2] == 2.0F);
}

}  // namespace
