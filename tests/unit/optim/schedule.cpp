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

TEST_CASE("schedule: Noam") {
  const noam_rate rate{512, 128000, 2.0};
  CHECK(rate(0) == 0.0);
  CHECK(rate(1) == Approx(2.0 / std::sqrt(512.0) * std::pow(128000.0, -1.5)));
  CHECK(rate(45600) == Approx(8.8e-5).epsilon(1e-2));  // the last step of the paper's Multi30k run
  CHECK(rate(128000) == Approx(2.0 / std::sqrt(512.0 * 128000.0)));
  CHECK(rate(512000) == Approx(rate(128000) / 2));
  const schedule s = noam(rate, 114);
  CHECK(s(0.0) == rate(1));
  CHECK(s(10.0) == Approx(rate(1141)));
  CHECK(s.describe() == "Noam, width 512, warm-up 128000 steps, factor 2");
  CHECK_THROWS_AS(noam({0, 4000, 1}, 10), value_error);
  CHECK_THROWS_AS(noam({512, -1, 1}, 10), value_error);
  CHECK_THROWS_AS(noam({512, 4000, 1}, 0), value_error);
}

TEST_CASE("plateau: divides whenever the best is not beaten") {
  plateau p;
  CHECK(p.factor() == 1.0);
  CHECK(p.observe(5.0));
  CHECK(p.observe(4.0));
  CHECK(p.factor() == 1.0);
  CHECK_FALSE(p.observe(4.5));
  CHECK(p.factor() == 0.25);
  CHECK_FALSE(p.observe(4.2));  // better than the last, not than the best
  CHECK(p.factor() == 0.0625);
  CHECK_FALSE(p.observe(std::nan("")));
  CHECK(p.best() == 4.0);
  p.forget_best();
  CHECK(p.observe(6.0));
  CHECK(p.factor() == Approx(std::pow(0.25, 3)));
  p.scale(0.5);
  CHECK(p.factor() == Approx(0.5 * std::pow(0.25, 3)));
  plateau patient(2.0, 2);
  patient.observe(1.0);
  patient.observe(2.0);
  CHECK(patient.factor() == 1.0);
  patient.observe(2.0);
  CHECK(patient.factor() == 0.5);
  CHECK_THROWS_AS(plateau(1.0), value_error);
  CHECK_THROWS_AS(plateau(4.0, 0), value_error);
}

TEST_CASE("plateau: the state as text, bit for bit") {
  plateau p(3.0, 2);
  CHECK(p.state() == "inf 1 0");
  for (double loss : {4.1, 4.123456789012345, 4.2, 4.3}) p.observe(loss);
  plateau q(3.0, 2);
  q.set_state(p.state());
  CHECK(q.state() == p.state());
  CHECK(q.factor() == p.factor());
  CHECK(q.best() == 4.1);
  q.set_state("inf 1 0");
  CHECK(q.observe(1e9));
  for (const char* text : {"", "1 2", "1 2 3 4", "nan 1 0", "1 -1 0", "1 inf 0", "1 1 -1", "1 1 x"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(q.set_state(text), value_error);
  }
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

TEST_CASE("switch_ramp: a straight line from start to 1, counted in steps after the switch") {
  const switch_ramp none;
  CHECK(none(0) == 1.0);
  CHECK(none(1000) == 1.0);
  CHECK(none.describe() == "none");
  const switch_ramp one{1, 0.25};
  CHECK(one(0) == 1.0);
  const switch_ramp from_zero{4};
  CHECK(from_zero(0) == 0.25);
  CHECK(from_zero(1) == 0.5);
  CHECK(from_zero(3) == 1.0);
  CHECK(from_zero(4) == 1.0);
  CHECK(from_zero(~std::uint64_t{0} - 1) == 1.0);
  const switch_ramp cuttlefish{5 * 49, 0.1};
  CHECK(cuttlefish(0) == Approx(0.1 + 0.9 / 245.0));
  CHECK(cuttlefish(121) == Approx(0.1 + 0.9 * 122.0 / 245.0));
  CHECK(cuttlefish(243) < 1.0);
  CHECK(cuttlefish(244) == 1.0);
  for (std::uint64_t k = 0; k < 300; ++k) CHECK(cuttlefish(k) <= cuttlefish(k + 1));
  CHECK(cuttlefish.describe() == "from 0.1 over 245 steps");
  CHECK(switch_ramp{3, 1.0}(0) == 1.0);
  CHECK_NOTHROW(cuttlefish.validate());
  CHECK_THROWS_WITH_AS((switch_ramp{-1, 0.5}.validate()), doctest::Contains("-1 steps"), value_error);
  for (const double start : {-0.1, 1.5, std::nan("")}) {
    CHECK_THROWS_AS((switch_ramp{5, start}.validate()), value_error);
  }
}

}  // namespace
