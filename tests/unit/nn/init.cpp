// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/nn/init.hpp>

#include "../support/gradient_check.hpp"

namespace {
using namespace test;

struct moments {
  double mean = 0.0, deviation = 0.0, largest = 0.0;
};

template <class T>
moments moments_of(const parameter<T>& p) {
  moments m;
  const double n = static_cast<double>(p.size());
  for (T value : p.values()) {
    m.mean += static_cast<double>(value) / n;
    m.largest = std::max(m.largest, std::abs(static_cast<double>(value)));
  }
  for (T value : p.values()) m.deviation += std::pow(static_cast<double>(value) - m.mean, 2) / n;
  m.deviation = std::sqrt(m.deviation);
  return m;
}

void check_uniform(const parameter<float>& p, double bound) {
  const moments m = moments_of(p);
  CHECK(m.largest <= bound * (1.0 + 1e-6));
  CHECK(m.largest > 0.99 * bound);
  CHECK(std::abs(m.mean) < 0.03 * bound);
  CHECK(m.deviation == doctest::Approx(bound / std::sqrt(3.0)).epsilon(0.03));
}

TEST_CASE("init: fans of matrices and kernels, none of vectors") {
  const auto matrix = init::fans_of(logical_layout::matrix(7, 5));
  CHECK(matrix.in == 5);
  CHECK(matrix.out == 7);
  const auto kernel = init::fans_of(logical_layout::kernel(64, 3, 5, 2));
  CHECK(kernel.in == 30);
  CHECK(kernel.out == 640);
  CHECK_THROWS_AS(init::fans_of(logical_layout::vector(4)), value_error);
  parameter<float> bias(logical_layout::vector(4), parameter_role::bias);
  CHECK(contains(error_text([&] { init::xavier_uniform(bias, {1, 1}); }), "[4]"));
}

TEST_CASE("init: bounds and deviations as the formulas say") {
  parameter<float> kernel(logical_layout::kernel(48, 16, 3, 3), parameter_role::weight);
  parameter<float> matrix(logical_layout::matrix(100, 60), parameter_role::weight);
  init::kaiming_uniform(kernel, {1, 1});
  check_uniform(kernel, 1.0 / std::sqrt(144.0));
  init::kaiming_uniform(kernel, {1, 1}, 0.0);
  check_uniform(kernel, std::sqrt(6.0 / 144.0));
  init::xavier_uniform(matrix, {1, 2}, 2.0);
  check_uniform(matrix, 2.0 * std::sqrt(6.0 / 160.0));
  init::uniform(matrix, -0.1, 0.1, {1, 3});
  check_uniform(matrix, 0.1);
  init::kaiming_normal_fan_out(kernel, {1, 4});
  CHECK(moments_of(kernel).deviation == doctest::Approx(std::sqrt(2.0 / (48 * 9))).epsilon(0.03));
  CHECK(std::abs(moments_of(kernel).mean) < 0.002);
  init::normal(matrix, 0.5, {1, 5});
  CHECK(moments_of(matrix).deviation == doctest::Approx(0.5).epsilon(0.03));
  init::constant(matrix, -2.0);
  CHECK(moments_of(matrix).mean == doctest::Approx(-2.0));
  CHECK(moments_of(matrix).deviation < 1e-6);
}

TEST_CASE("init: the same stream gives the same numbers, another one others") {
  parameter<double> a(logical_layout::matrix(4, 4), parameter_role::weight), b(a);
  init::kaiming_uniform(a, {1, 1});
  init::kaiming_uniform(b, {1, 1});
  CHECK(std::equal(a.values().begin(), a.values().end(), b.values().begin()));
  init::kaiming_uniform(b, {1, 2});
  CHECK(!std::equal(a.values().begin(), a.values().end(), b.values().begin()));
}

}  // namespace
