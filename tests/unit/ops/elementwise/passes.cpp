// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The kernels of all instruction sets that this machine has, against plain loops; what chooses among them is
// tested with the operations.
#include <cmath>
#include <limits>
#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/ops/elementwise/relu.hpp>
#include <pufferfish/ops/elementwise/sum.hpp>
#include <pufferfish/ops/loss/softmax_cross_entropy.hpp>
#include <pufferfish/ops/norm/batch_norm.hpp>
#include <pufferfish/optim/sgd.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;
namespace kernels = pufferfish::ops::detail;

std::vector<isa> targets() {
  std::vector<isa> all;
  for (const isa target : all_isas) {
    if (isa_available(target)) all.push_back(target);
  }
  return all;
}

template <class T>
std::vector<T> random_values(index_t count, std::uint64_t seed) {
  std::vector<T> values(static_cast<std::size_t>(count));
  fill_normal<T>(values, 1.0, {seed, 9});
  return values;
}

template <class T>
bool close(const std::vector<T>& a, const std::vector<T>& b, double tolerance) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    if (!(std::abs(x - y) <= tolerance * (1.0 + std::abs(y)))) return false;
  }
  return true;
}

TEST_CASE_TEMPLATE("elementwise kernels of all instruction sets", T, float, double) {
  const double tolerance = sizeof(T) == 4 ? 1e-6 : 1e-14;
  for (isa target : targets()) {
    CAPTURE(to_string(target));
    for (index_t count : {0, 1, 3, 15, 16, 33, 200}) {
      const auto n = static_cast<std::size_t>(count);
      const std::vector<T> x = random_values<T>(count, 1), dy = random_values<T>(count, 2);
      std::vector<T> y(n), expected(n);
      PUFFERFISH_KERNEL(target, kernels::passes, relu<T>)(x.data(), y.data(), count);
      ops::reference::relu_forward<T>(x, expected);
      CHECK(y == expected);
      PUFFERFISH_KERNEL(target, kernels::passes, relu_gradient<T>)(x.data(), dy.data(), y.data(), count);
      ops::reference::relu_backward<T>(x, dy, expected);
      CHECK(y == expected);
      for (bool relu : {false, true}) {
        y = expected = dy;
        const auto kernel = relu ? PUFFERFISH_KERNEL(target, kernels::passes, add_relu<T>)
                                 : PUFFERFISH_KERNEL(target, kernels::passes, add<T>);
        kernel(x.data(), y.data(), count);
        ops::reference::add<T>(x, expected, relu);
        CHECK(y == expected);
      }
      PUFFERFISH_KERNEL(target, kernels::passes, scale<T>)(T{3}, x.data(), y.data(), count);
      for (std::size_t i = 0; i < n; ++i) expected[i] = T{3} * x[i];
      CHECK(y == expected);
      double squares = 0.0;
      for (T value : x) squares += static_cast<double>(value) * static_cast<double>(value);
      CHECK(PUFFERFISH_KERNEL(target, kernels::passes, sum_of_squares<T>)(x.data(), count) ==
            doctest::Approx(squares).epsilon(1e-13));
      for (bool momentum : {false, true}) {
        const sgd_options options{momentum ? 0.9 : 0.0, 0.0, momentum, 0.01};
        std::vector<T> velocity = random_values<T>(count, 3), velocity2 = velocity;
        y = expected = dy;
        const ops::detail::sgd_numbers<T> numbers{T(0.1), T(0.01), T(0.9), T{1}, T{1}, T(0.9)};
        PUFFERFISH_KERNEL(target, kernels::passes, sgd<T>)
        (numbers, x.data(), momentum ? velocity.data() : nullptr, y.data(), count);
        for (std::size_t i = 0; i < n; ++i) {
          ops::reference::sgd_element<T>(expected[i], x[i], velocity2[i], 0.1, options, 0.01, false);
        }
        CHECK(close(y, expected, tolerance));
        CHECK(close(velocity, velocity2, tolerance));
      }
    }
  }
}

TEST_CASE_TEMPLATE("window kernels of all instruction sets", T, float, double) {
  const double tolerance = sizeof(T) == 4 ? 1e-6 : 1e-14;
  for (isa target : targets()) {
    CAPTURE(to_string(target));
    for (index_t channels : {1, 5, 16, 37}) {
      const kernels::window_pixels w{2, 3, 4 * channels, channels};
      const std::vector<T> x = random_values<T>(8 * channels, 1), dy = random_values<T>(channels, 2);
      std::vector<T> y(static_cast<std::size_t>(channels)), largest = y, sum = y, dx(x.size()),
                                                            spread(x.size()), winners(x.size());
      for (std::size_t c = 0; c < y.size(); ++c) {
        std::size_t best = c;
        for (std::size_t row = 0; row < 2; ++row) {
          for (std::size_t column = 0; column < 3; ++column) {
            const std::size_t at = (row * 4 + column) * y.size() + c;
            if (x[at] > x[best]) best = at;
            sum[c] += x[at] / 6;
            spread[at] = dy[c] / 6;
          }
        }
        largest[c] = x[best];
        winners[best] = dy[c];
      }
      PUFFERFISH_KERNEL(target, kernels::passes, window_maximum<T>)(x.data(), w, y.data());
      CHECK(y == largest);
      PUFFERFISH_KERNEL(target, kernels::passes, window_winner<T>)
      (x.data(), largest.data(), dy.data(), w, dx.data());
      CHECK(dx == winners);
      PUFFERFISH_KERNEL(target, kernels::passes, window_sum<T>)(x.data(), w, T{1} / T{6}, y.data());
      CHECK(close(y, sum, tolerance));
      std::fill(dx.begin(), dx.end(), T{});
      PUFFERFISH_KERNEL(target, kernels::passes, window_spread<T>)(dy.data(), w, T{1} / T{6}, dx.data());
      CHECK(close(dx, spread, tolerance));
      std::vector<double> sums(y.size(), 1.0), expected(y.size(), 1.0);
      for (std::size_t i = 0; i < x.size(); ++i) expected[i % y.size()] += static_cast<double>(x[i]);
      PUFFERFISH_KERNEL(target, kernels::passes, column_sums<T>)
      (x.data(), 8, channels, channels, sums.data());
      CHECK(close(sums, expected, 1e-14));
    }
  }
}

TEST_CASE_TEMPLATE("batch norm kernels of all instruction sets", T, float, double) {
  const double tolerance = sizeof(T) == 4 ? 2e-5 : 1e-12;
  using word = typename ops::relu_mask<T>::word;
  picker pick(5);
  for (isa target : targets()) {
    CAPTURE(to_string(target));
    for (int round = 0; round < 12; ++round) {
      const extents<2> shape{pick(1, 400), round == 0 ? 300 : pick(1, 70)};
      const kernels::wide_rows<T> rows(shape);
      tensor<T, 2> x(shape), addend(shape), y(shape), expected(shape);
      fill_normal<T>(x.flat(), 1.0, {1, static_cast<std::uint64_t>(round)});
      fill_normal<T>(addend.flat(), 1.0, {2, static_cast<std::uint64_t>(round)});
      std::vector<T> mean = random_values<T>(rows.width, 1), spread = random_values<T>(rows.width, 2),
                     bias = random_values<T>(rows.width, 3), slope = random_values<T>(rows.width, 4),
                     one(static_cast<std::size_t>(shape[1]), T{1});
      for (auto* values : {&mean, &spread, &bias, &slope}) rows.repeat(values->data());
      std::vector<word> words(static_cast<std::size_t>(ops::relu_mask<T>::size(shape)), 0x33);
      const ops::relu_mask<T> mask{words.data()};
      kernels::norm_pass<T> pass;
      pass.x = x.data();
      pass.other = addend.data();
      pass.y = y.data();
      pass.mask = words.data();
      pass.relu = true;
      pass.mean = mean.data();
      pass.scale = spread.data();
      pass.slope = slope.data();
      pass.shift = bias.data();
      pass.width = rows.width;
      PUFFERFISH_KERNEL(target, kernels::norms, norm_apply<T>)(pass, 0, rows.size);
      ops::reference::batch_norm_apply<T>(x, mean.data(), spread.data(), one.data(), bias.data(), addend,
                                          true, expected);
      CHECK(largest_error(y, expected) < tolerance);
      std::vector<double> totals(static_cast<std::size_t>(2 * rows.width)),
          sums(static_cast<std::size_t>(2 * shape[1])), sums2 = sums;
      std::vector<T> work(static_cast<std::size_t>(2 * rows.width));
      for (index_t m = 0; m < shape[0]; ++m) {
        for (index_t c = 0; c < shape[1]; ++c) {
          const auto at = static_cast<std::size_t>(c);
          REQUIRE(mask.passes(shape, m, c) == (y(m, c) > T{}));
          const T g = mask.passes(shape, m, c) ? addend(m, c) : T{};
          expected(m, c) = spread[at] * g + ((x(m, c) - mean[at]) * slope[at] + bias[at]);
          sums2[at] += static_cast<double>(g);
          sums2[at + one.size()] += static_cast<double>(g) * static_cast<double>(x(m, c) - mean[at]);
        }
      }
      PUFFERFISH_KERNEL(target, kernels::norms, norm_gradient_sums<T>)
      (pass, 0, rows.size, work.data(), totals.data());
      for (index_t i = 0; i < rows.width; ++i) {
        sums[static_cast<std::size_t>(i % shape[1])] += totals[static_cast<std::size_t>(i)];
        sums[static_cast<std::size_t>(i % shape[1]) + one.size()] +=
            totals[static_cast<std::size_t>(rows.width + i)];
      }
      CHECK(close(sums, sums2, tolerance));
      PUFFERFISH_KERNEL(target, kernels::norms, norm_input_gradient<T>)(pass, 0, rows.size);
      CHECK(largest_error(y, expected) < tolerance);
      for (bool add : {false, true}) {
        PUFFERFISH_KERNEL(target, kernels::passes, masked<T, word>)
        (x.data(), words.data(), y.data(), rows.size, rows.width, add);
        ops::reference::masked<T>(x, mask, expected.view(), add);
        CHECK(largest_error(y, expected) < tolerance);
      }
      std::vector<double> m1(one.size()), v1 = m1, m2 = m1, v2 = m1;
      ops::block_moments<T>(x.data(), shape[0], shape[1], shape[1], 0, m1.data(), v1.data(), target);
      for (double& value : v1) value /= static_cast<double>(shape[0]);
      ops::reference::batch_norm_statistics<T>(x, m2.data(), v2.data());
      CHECK(close(m1, m2, tolerance));
      CHECK(close(v1, v2, tolerance));
    }
  }
}

TEST_CASE_TEMPLATE("softmax kernels of all instruction sets", T, float, double) {
  const double tolerance = sizeof(T) == 4 ? 3e-7 : 1e-15;
  for (isa target : targets()) {
    CAPTURE(to_string(target));
    const index_t count = 2001;
    std::vector<T> z(static_cast<std::size_t>(count)), powers = z, expected = z;
    double sum = 0.0, shifted = 0.0;
    for (std::size_t k = 0; k < z.size(); ++k) {
      z[k] = static_cast<T>(5.0 - (sizeof(T) == 4 ? 0.045 : 0.36) * static_cast<double>(k));
      expected[k] = std::exp(z[k] - z[0]);
      sum += static_cast<double>(expected[k]);
      shifted += static_cast<double>(z[k] - z[0]);
    }
    std::swap(z[0], z[1000]);
    std::swap(expected[0], expected[1000]);
    const T largest = PUFFERFISH_KERNEL(target, kernels::softmax, row_maximum<T>)(z.data(), count);
    CHECK(largest == z[1000]);
    double found = 0.0, found_shifted = 0.0;
    PUFFERFISH_KERNEL(target, kernels::softmax, row_exponentials<T>)
    (z.data(), count, largest, powers.data(), &found, &found_shifted);
    double worst = 0.0;
    for (std::size_t k = 0; k < z.size(); ++k) {
      if (!(expected[k] > 4 * std::numeric_limits<T>::min())) {
        CHECK(powers[k] <= 8 * std::numeric_limits<T>::min());
      } else {
        worst = std::max(worst, std::abs(static_cast<double>(powers[k] / expected[k]) - 1.0));
      }
    }
    CHECK(worst < tolerance);
    CHECK(found == doctest::Approx(sum).epsilon(tolerance));
    CHECK(found_shifted == doctest::Approx(shifted).epsilon(tolerance));
    PUFFERFISH_KERNEL(target, kernels::softmax, row_gradient<T>)
    (powers.data(), count, T(0.5), T(0.25), T{2}, powers.data());
    CHECK(close(
        powers,
        [&] {
          for (T& value : expected) value = (value * T(0.5) - T(0.25)) * T{2};
          return expected;
        }(),
        1e-6));
  }
}

}  // namespace
