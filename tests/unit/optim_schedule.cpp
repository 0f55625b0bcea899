// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <cmath>

#include <doctest/doctest.h>

#include <pufferfish/optim/schedule.hpp>

namespace {
using namespace pufferfish;
using doctest::Approx;

TEST_CASE("schedule: constant") {
  CHECK(schedule()(0.0) == 1.0);
  CHECK(constant_schedule()(1e6) == 1.0);
  CHECK(schedule().describe() == "constant");
}

TEST_CASE("schedule: milestones apply from their epoch on") {
  const schedule s = multi_step({150, 250}, 0.1);
  CHECK(s(0.0) == 1.0);
  CHECK(s(149.999) == 1.0);
  CHECK(s(150.0) == Approx(0.1));
  CHECK(s(249.5) == Approx(0.1));
  CHECK(s(250.0) == Approx(0.01));
  CHECK(s(1e9) == Approx(0.01));
  CHECK(s.describe() == "x0.1 at epoch 150, 250");
  CHECK(multi_step({})(5.0) == 1.0);
}

TEST_CASE("schedule: cosine") {
  const schedule s = cosine(10, 0.2);
  CHECK(s(0.0) == Approx(1.0));
  CHECK(s(5.0) == Approx(0.6));
  CHECK(s(2.5) == Approx(0.2 + 0.4 * (1.0 + std::sqrt(0.5))));
  CHECK(s(10.0) == Approx(0.2));
  CHECK(s(11.0) == Approx(0.2));
  CHECK(cosine(4)(4.0) == Approx(0.0));
}

TEST_CASE("schedule: warm-up, then another by absolute epochs") {
  // The distributed CIFAR recipe: 0.1 to 1.6 over five epochs.
  const schedule s = linear_warmup(5, 1.0 / 16, multi_step({150, 250}));
  for (int epoch = 0; epoch <= 5; ++epoch) CHECK(1.6 * s(epoch) == Approx(0.1 + 0.3 * epoch));
  CHECK(s(149.0) == 1.0);
  CHECK(s(150.0) == Approx(0.1));
  CHECK(s.describe() == "warm-up over 5 epochs from 0.0625, x0.1 at epoch 150, 250");
  CHECK(linear_warmup(0, 0.1)(0.0) == 1.0);
  CHECK(linear_warmup(4, 0.0, cosine(8))(2.0) == Approx(0.5 * cosine(8)(2.0)));
  const schedule copy = s;
  CHECK(copy(2.0) == s(2.0));
}

TEST_CASE("schedule: errors") {
  CHECK_THROWS_AS(multi_step({3, 3}), value_error);
  CHECK_THROWS_AS(multi_step({3, 2}), value_error);
  CHECK_THROWS_AS(multi_step({std::nan("")}), value_error);
  CHECK_THROWS_AS(multi_step({3}, 0.0), value_error);
  CHECK_THROWS_AS(cosine(0), value_error);
  CHECK_THROWS_AS(cosine(10, -1.0), value_error);
  CHECK_THROWS_AS(linear_warmup(-1, 0.5), value_error);
  CHECK_THROWS_AS(linear_warmup(1, std::nan("")), value_error);
}

}  // namespace
