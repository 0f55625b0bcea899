// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <limits>

#include <pufferfish/optim/clip.hpp>

#include "../support/gradient_check.hpp"

namespace {
using namespace test;

TEST_CASE_TEMPLATE("gradient_norm: against a plain sum, any length, any threads", T, float, double) {
  for (index_t size : {0, 1, 7, 8, 16384, 16389, 100003}) {
    tensor<T, 1> g({size});
    fill_normal<T>(g.flat(), 1.0, {1, 1});
    double sum = 0.0;
    for (T value : g.flat()) sum += static_cast<double>(value) * static_cast<double>(value);
    cpu_context one({1, 0}), two({2, 0}), three({3, 0});
    const double norm = gradient_norm<T>(one, std::as_const(g).flat());
    CHECK(norm == doctest::Approx(std::sqrt(sum)).epsilon(1e-12));
    CHECK(norm == gradient_norm<T>(two, std::as_const(g).flat()));
    CHECK(norm == gradient_norm<T>(three, std::as_const(g).flat()));
  }
}

TEST_CASE("clip_gradient_norm: scales what is too long, leaves the rest") {
  cpu_context ctx({2, 0});
  tensor<float, 1> g({40000}), kept = g;
  fill_normal<float>(g.flat(), 1.0, {1, 1});
  kept = g;
  auto result = clip_gradient_norm<float>(ctx, g.flat(), 1000.0);
  CHECK(!result.clipped);
  CHECK(result.finite);
  CHECK(result.norm == doctest::Approx(200.0).epsilon(0.02));
  CHECK(largest_error(g, kept) == 0.0);
  result = clip_gradient_norm<float>(ctx, g.flat(), 0.25);
  CHECK(result.clipped);
  CHECK(gradient_norm<float>(ctx, std::as_const(g).flat()) == doctest::Approx(0.25).epsilon(1e-5));
  CHECK(static_cast<double>(g(7)) ==
        doctest::Approx(static_cast<double>(kept(7)) * 0.25 / result.norm).epsilon(1e-5));
}

TEST_CASE("clip_gradient_norm: what is not finite is reported and left alone") {
  cpu_context ctx;
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    tensor<float, 1> g({3});
    g(0) = 100.0F;
    g(2) = bad;
    const auto result = clip_gradient_norm<float>(ctx, g.flat(), 1.0);
    CHECK(!result.finite);
    CHECK(!result.clipped);
    CHECK(g(0) == 100.0F);
  }
  tensor<float, 1> large({2});
  large(0) = large(1) = 3e38F;  // squares that no float holds
  CHECK(clip_gradient_norm<float>(ctx, large.flat(), 1.0).finite);
  CHECK(large(0) == doctest::Approx(std::sqrt(0.5)).epsilon(1e-6));
  CHECK_THROWS_AS(clip_gradient_norm<float>(ctx, large.flat(), 0.0), value_error);
  CHECK_THROWS_AS(clip_gradient_norm<float>(ctx, large.flat(), std::nan("")), value_error);
}

}  // namespace
