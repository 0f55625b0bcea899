// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <limits>

#include <pufferfish/ops/recurrent/lstm.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

template <class T>
tensor<T, 2> random_matrix(const extents<2>& shape, double deviation, std::uint64_t stream) {
  tensor<T, 2> m(shape);
  fill_normal<T>(m.flat(), deviation, {3, stream});
  return m;
}

/// Distance in units in the last place of the expected value (of the smallest normal number near zero).
template <class T>
double ulps(T got, double expected) {
  const double unit = std::max(std::abs(expected), static_cast<double>(std::numeric_limits<T>::min())) *
                      static_cast<double>(std::numeric_limits<T>::epsilon());
  return std::abs(static_cast<double>(got) - expected) / unit;
}

TEST_CASE_TEMPLATE("lstm_forward and lstm_backward: fast against reference over random shapes", T, float,
                   double) {
  const double tolerance = sizeof(T) == 4 ? 2e-6 : 1e-14;
  cpu_context ctx({2, 0});
  picker pick(1);
  for (std::uint64_t round = 0; round < 60; ++round) {
    const extents<2> shape{pick(0, 9), pick(1, 50)}, wide{shape[0], 4 * shape[1]};
    const bool first = round % 3 == 0;
    const double size = round % 5 == 0 ? 30.0 : 1.0;
    tensor<T, 2> gates = random_matrix<T>(wide, size, round), gates2 = gates;
    const tensor<T, 2> before = random_matrix<T>(shape, 1.0, round + 100);
    const tensor_view<const T, 2> old = first ? tensor_view<const T, 2>() : before.view();
    tensor<T, 2> cell(shape), cell2(shape), y(shape), y2(shape);
    ops::lstm_forward<T>(ctx, gates, old, cell, y);
    ops::reference::lstm_forward<T>(gates2, old, cell2, y2);
    CHECK(largest_error(gates, gates2) < tolerance);
    CHECK(largest_error(cell, cell2) < tolerance);
    CHECK(largest_error(y, y2) < tolerance);

    const tensor<T, 2> dy = random_matrix<T>(shape, 1.0, round + 200),
                       dh = random_matrix<T>(shape, 1.0, round + 300);
    tensor<T, 2> dc = random_matrix<T>(shape, 1.0, round + 400), dc2 = dc;
    const bool last = round % 2 == 0;
    const auto after = [last](const tensor<T, 2>& t) { return last ? tensor_view<const T, 2>() : t.view(); };
    ops::lstm_backward<T>(ctx, gates, old, cell, dy, after(dh), after(dc), dc);
    ops::reference::lstm_backward<T>(gates2, old, cell2, dy, after(dh), after(dc2), dc2);
    CHECK(largest_error(gates, gates2) < tolerance);
    CHECK(largest_error(dc, dc2) < tolerance);
  }
}

TEST_CASE_TEMPLATE("lstm_backward: a null dy counts as zeros, a null dc_before is refused", T, float,
                   double) {
  cpu_context ctx;
  const extents<2> shape{3, 21}, wide{3, 84};
  const tensor<T, 2> before = random_matrix<T>(shape, 1.0, 1), cell = random_matrix<T>(shape, 1.0, 2),
                     dh = random_matrix<T>(shape, 1.0, 3), zeros(shape);
  tensor<T, 2> gates = random_matrix<T>(wide, 1.0, 4), gates2 = gates, gates3 = gates, dc(shape), dc2(shape);
  ops::lstm_backward<T>(ctx, gates, before, cell, {}, dh, {}, dc);
  ops::lstm_backward<T>(ctx, gates2, before, cell, zeros, dh, {}, dc2);
  CHECK(largest_error(gates, gates2) == 0.0);
  CHECK(largest_error(dc, dc2) == 0.0);
  CHECK_THROWS_AS(ops::lstm_backward<T>(ctx, gates3, before, cell, dh, dh, {}, {}), shape_error);
}

TEST_CASE_TEMPLATE("lstm_forward: gates within a few units in the last place, wherever they are", T, float,
                   double) {
  cpu_context ctx;
  const index_t count = 4001;
  tensor<T, 2> gates({1, 4 * count}), cell({1, count}), y({1, count});
  std::vector<double> z(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < z.size(); ++i) {
    const double magnitude = std::pow(10.0, -6.0 + 8.0 * static_cast<double>(i / 2) / 2000.0);
    const T value = static_cast<T>(i % 2 == 0 ? magnitude : -magnitude);
    z[i] = static_cast<double>(value);
    for (std::size_t gate = 0; gate < 4; ++gate) gates.flat()[gate * z.size() + i] = value;
  }
  ops::lstm_forward<T>(ctx, gates, {}, cell, y);
  double sigmoid = 0.0, tangent = 0.0;
  for (std::size_t i = 0; i < z.size(); ++i) {
    if (z[i] < (sizeof(T) == 4 ? -87.0 : -700.0)) continue;
    sigmoid = std::max(sigmoid, ulps(gates.flat()[i], 1.0 / (1.0 + std::exp(-z[i]))));
    tangent = std::max(tangent, ulps(gates.flat()[2 * z.size() + i], std::tanh(z[i])));
  }
  CHECK(sigmoid < 4.0);
  CHECK(tangent < 4.0);
}

TEST_CASE("lstm_forward: infinities saturate, NaN stays") {
  cpu_context ctx;
  const float infinity = std::numeric_limits<float>::infinity(),
              nan = std::numeric_limits<float>::quiet_NaN();
  tensor<float, 2> gates({1, 12}), cell({1, 3}), y({1, 3});
  const float z[] = {infinity, -infinity, nan};
  for (std::size_t i = 0; i < 12; ++i) gates.flat()[i] = z[i % 3];
  ops::lstm_forward<float>(ctx, gates, {}, cell, y);
  CHECK(gates(0, 0) == 1.0F);
  CHECK(gates(0, 6) == 1.0F);
  CHECK(gates(0, 1) == 0.0F);
  CHECK(gates(0, 7) == -1.0F);
  for (index_t gate = 0; gate < 4; ++gate) CHECK(std::isnan(gates(0, 3 * gate + 2)));
  CHECK(std::isnan(y(0, 2)));
}

TEST_CASE("lstm_forward, lstm_backward: the cell may be updated in place; errors name the shapes") {
  cpu_context ctx;
  tensor<float, 2> gates = random_matrix<float>({5, 28}, 1.0, 1), again = gates,
                   cell = random_matrix<float>({5, 7}, 1.0, 2), before = cell, other({5, 7}), y({5, 7}),
                   y2({5, 7});
  ops::lstm_forward<float>(ctx, gates, before, other, y);
  ops::lstm_forward<float>(ctx, again, cell, cell, y2);
  CHECK(largest_error(cell, other) == 0.0);
  CHECK(largest_error(y, y2) == 0.0);
  tensor<float, 2> narrow({5, 6});
  CHECK(contains(error_text([&] { ops::lstm_forward<float>(ctx, gates, {}, narrow, narrow); }), "[5 x 28]"));
  CHECK_THROWS_AS(ops::lstm_forward<float>(ctx, gates, narrow, cell, y), shape_error);
  CHECK_THROWS_AS(ops::lstm_backward<float>(ctx, gates, before, cell, y, narrow, {}, other), shape_error);
}

}  // namespace
