// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

#include <pufferfish/distributed/local_steps.hpp>

namespace {

using namespace pufferfish;

TEST_CASE("local_steps_schedule: H follows a power of the learning rate between its limits") {
  const local_steps_schedule constant{20};
  CHECK(constant(0.0, 1.0) == 20);
  CHECK(constant(5.0, 1.0) == 20);
  const local_steps_schedule linear{40, 1.0, 2, 60};
  CHECK(linear(0.1, 0.1) == 40);
  CHECK(linear(0.05, 0.1) == 20);
  CHECK(linear(0.024, 0.1) == 10);  // 9.6
  CHECK(linear(0.0, 0.1) == 2);
  CHECK(linear(0.2, 0.1) == 60);
  const local_steps_schedule square{40, 2.0, 1, 40};
  CHECK(square(0.5, 1.0) == 10);
  CHECK(square(0.25, 1.0) == 3);  // 2.5
  const local_steps_schedule rarer{4, -2.0, 1, 100};
  CHECK(rarer(1.0, 1.0) == 4);
  CHECK(rarer(0.5, 1.0) == 16);
  CHECK(rarer(0.0, 1.0) == 100);
  CHECK(describe(constant) == "20 local steps");
  CHECK(describe(linear) == "40 local steps times (rate / peak)^1, 2 to 60");
}

TEST_CASE("local_steps_schedule: falls and rises with the rate alone") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double power : {0.5, 1.0, 3.0}) {
    const local_steps_schedule down{30, power, 1, 30}, up{1, -power, 1, 30};
    for (int i = 1; i <= 100; ++i) {
      CHECK(down(0.01 * i, 1.0) >= down(0.01 * (i - 1), 1.0));
      CHECK(up(0.01 * i, 1.0) <= up(0.01 * (i - 1), 1.0));
    }
  }
  CHECK_THROWS_WITH_AS(local_steps_schedule{}(-1.0, 1.0), doctest::Contains("rate -1"), value_error);
  CHECK_THROWS_WITH_AS(local_steps_schedule{}(1.0, 0.0), doctest::Contains("peak rate 0"), value_error);
  CHECK_THROWS_AS(local_steps_schedule{}(nan, 1.0), value_error);
  CHECK_THROWS_WITH_AS((local_steps_schedule{20, 1.0, 30, 40}.validate()), doctest::Contains("base 20"),
                       value_error);
  CHECK_THROWS_WITH_AS((local_steps_schedule{20, 1.0, 0, 40}.validate()), doctest::Contains("limits of 0"),
                       value_error);
  CHECK_THROWS_WITH_AS((local_steps_schedule{20, nan, 1, 40}.validate()), doctest::Contains("power nan"),
                       value_error);
  CHECK_NOTHROW(local_steps_schedule{}.validate());
}

TEST_CASE(
    "local_steps_by_spread: H comes to the target where the spread grows with H, by factors of two at most") {
  const local_steps_by_spread rule{1e-3, 2, 300};
  CHECK(rule(10, 1e-3) == 10);
  CHECK(rule(10, 0.8e-3) == 13);  // 12.5
  CHECK(rule(10, 1.0) == 5);
  CHECK(rule(10, 0.0) == 20);
  CHECK(rule(200, 0.0) == 300);
  CHECK(rule(3, 1.0) == 2);
  CHECK(rule(10, std::numeric_limits<double>::infinity()) == 5);
  CHECK(rule(10, std::numeric_limits<double>::quiet_NaN()) == 5);
  // S = 2e-5 H: the target is at 50, wherever H starts.
  for (const index_t start : {2, 17, 300}) {
    index_t steps = start;
    for (int i = 0; i < 8; ++i) steps = rule(steps, 2e-5 * static_cast<double>(steps));
    CHECK(steps == 50);
  }
  CHECK_THROWS_WITH_AS((local_steps_by_spread{0.0}.validate()), doctest::Contains("target 0"), value_error);
  CHECK_THROWS_WITH_AS((local_steps_by_spread{1.0, 5, 4}.validate()), doctest::Contains("5 and 4"),
                       value_error);
  CHECK_NOTHROW(local_steps_by_spread{}.validate());
}

}  // namespace
