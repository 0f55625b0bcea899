// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <cmath>
#include <limits>

#include <pufferfish/nn/loss.hpp>

#include "../support/gradient_check.hpp"

namespace {
using namespace test;

std::vector<std::int32_t> random_labels(picker& pick, index_t rows, index_t classes) {
  std::vector<std::int32_t> labels(static_cast<std::size_t>(rows));
  for (auto& label : labels) label = static_cast<std::int32_t>(pick(0, classes - 1));
  return labels;
}

TEST_CASE_TEMPLATE("softmax cross entropy: fast against reference over random shapes", T, float, double) {
  const double tolerance = sizeof(T) == 4 ? 1e-5 : 1e-12;
  cpu_context ctx({2, 0});
  picker pick(1);
  for (std::uint64_t round = 0; round < 60; ++round) {
    const extents<2> shape{pick(0, 50), pick(1, 30)};
    const auto labels = random_labels(pick, shape[0], shape[1]);
    tensor<T, 2> z(shape), dz(shape), dz2(shape);
    fill_normal<T>(z.flat(), round % 3 == 0 ? 100.0 : 1.0, {1, round});
    if (round % 4 == 0) std::fill(z.flat().begin(), z.flat().end(), T{1});
    const label_smoothing smoothing{round % 2 == 0 ? 0.0 : 0.1, round % 4 < 2
                                                                    ? smoothing_kind::all_classes
                                                                    : smoothing_kind::wrong_classes};
    const auto a = ops::softmax_cross_entropy<T>(ctx, z, labels, smoothing, 7.0, dz);
    const auto b = ops::reference::softmax_cross_entropy<T>(z, labels, smoothing, 7.0, dz2.view());
    CHECK(a.loss_sum == doctest::Approx(b.loss_sum).epsilon(tolerance));
    CHECK(a.correct == b.correct);
    CHECK(a.count == shape[0]);
    CHECK(largest_error(dz, dz2) < tolerance);
    const auto alone = ops::softmax_cross_entropy<T>(ctx, z, labels, smoothing, 7.0, {});
    CHECK(alone.loss_sum == a.loss_sum);
  }
}

TEST_CASE("softmax cross entropy: the two conventions of smoothing, by hand") {
  // p = (1/2, 1/4, 1/4), label 0.
  cpu_context ctx;
  tensor<double, 4> z({1, 1, 1, 3}), dz(z.shape());
  z.flat()[0] = std::log(2.0);
  const std::vector<std::int32_t> labels{0};
  const double half = std::log(2.0), quarter = std::log(4.0);
  auto result = SoftmaxCrossEntropy<double>()(ctx, z, labels, 1.0, dz);
  CHECK(result.loss_sum == doctest::Approx(half));
  CHECK(result.correct == 1);
  CHECK(dz.flat()[0] == doctest::Approx(-0.5));
  CHECK(dz.flat()[1] == doctest::Approx(0.25));
  result = SoftmaxCrossEntropy<double>({0.3, smoothing_kind::all_classes})(ctx, z, labels, 2.0, dz);
  CHECK(result.loss_sum == doctest::Approx(0.8 * half + 0.2 * quarter));
  CHECK(dz.flat()[0] == doctest::Approx((0.5 - 0.8) / 2));
  CHECK(dz.flat()[2] == doctest::Approx((0.25 - 0.1) / 2));
  result = SoftmaxCrossEntropy<double>({0.3, smoothing_kind::wrong_classes})(ctx, z, labels, 1.0, dz);
  CHECK(result.loss_sum == doctest::Approx(0.7 * half + 0.3 * quarter));
  CHECK(dz.flat()[0] == doctest::Approx(0.5 - 0.7));
  CHECK(dz.flat()[2] == doctest::Approx(0.25 - 0.15));
}

TEST_CASE("softmax cross entropy: gradient against finite differences") {
  cpu_context ctx;
  picker pick(3);
  for (auto kind : {smoothing_kind::all_classes, smoothing_kind::wrong_classes}) {
    tensor<double, 2> z({4, 5}), dz(z.shape());
    fill_normal<double>(z.flat(), 2.0, {1, 1});
    const auto labels = random_labels(pick, 4, 5);
    const label_smoothing smoothing{0.2, kind};
    const auto loss = [&] {
      return ops::softmax_cross_entropy<double>(ctx, z, labels, smoothing, 1.0, {}).loss_sum;
    };
    ops::softmax_cross_entropy<double>(ctx, z, labels, smoothing, 4.0, dz);
    for (std::size_t i = 0; i < z.flat().size(); ++i) {
      const double kept = z.flat()[i];
      z.flat()[i] = kept + 1e-5;
      const double above = loss();
      z.flat()[i] = kept - 1e-5;
      const double below = loss();
      z.flat()[i] = kept;
      CHECK(dz.flat()[i] == doctest::Approx((above - below) / 2e-5 / 4.0).epsilon(1e-7));
    }
  }
}

TEST_CASE("softmax cross entropy: huge logits are safe, NaN and infinity are seen") {
  cpu_context ctx;
  const std::vector<std::int32_t> labels{1};
  const auto loss = [&](float a, float b, double epsilon = 0.0) {
    tensor<float, 2> z({1, 2});
    z.flat()[0] = a;
    z.flat()[1] = b;
    return ops::softmax_cross_entropy<float>(ctx, z, labels, {epsilon}, 1.0, {});
  };
  const float infinity = std::numeric_limits<float>::infinity(),
              nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(loss(1e30F, 1e30F).loss_sum == doctest::Approx(std::log(2.0)));
  CHECK(loss(-1e30F, -1e30F).loss_sum == doctest::Approx(std::log(2.0)));
  CHECK(loss(0.0F, 3e4F).loss_sum == 0.0);
  CHECK(loss(3e4F, 0.0F).loss_sum == doctest::Approx(3e4));
  CHECK(loss(-infinity, 0.0F).loss_sum == 0.0);  // a masked class
  CHECK(loss(-infinity, 0.0F).correct == 1);
  CHECK(std::isnan(loss(nan, 0.0F).loss_sum));
  CHECK(loss(nan, 0.0F).correct == 0);
  CHECK(loss(0.0F, nan).correct == 0);
  CHECK(std::isnan(loss(infinity, 0.0F).loss_sum));
}

TEST_CASE("softmax cross entropy: of equal logits the first is the answer") {
  cpu_context ctx;
  tensor<float, 4> z({3, 1, 1, 3});
  const std::vector<std::int32_t> labels{0, 1, 2};
  CHECK(SoftmaxCrossEntropy<float>()(ctx, z, labels).correct == 1);
  loss_result sum;
  sum += SoftmaxCrossEntropy<float>()(ctx, z, labels);
  sum += SoftmaxCrossEntropy<float>()(ctx, z, labels);
  CHECK(sum.count == 6);
  CHECK(sum.accuracy() == doctest::Approx(1.0 / 3));
  CHECK(sum.mean_loss() == doctest::Approx(std::log(3.0)));
  CHECK(loss_result{}.mean_loss() == 0.0);
}

TEST_CASE("softmax cross entropy: the same bits for any number of threads") {
  picker pick(4);
  tensor<float, 2> z({700, 100});
  fill_normal<float>(z.flat(), 3.0, {1, 1});
  const auto labels = random_labels(pick, 700, 100);
  const auto run = [&](int threads) {
    cpu_context ctx({threads, 0});
    tensor<float, 2> dz(z.shape());
    const double loss = ops::softmax_cross_entropy<float>(ctx, z, labels, {0.1}, 700.0, dz).loss_sum;
    return std::pair{loss, std::vector<float>(dz.flat().begin(), dz.flat().end())};
  };
  CHECK(run(1) == run(2));
  CHECK(run(1) == run(3));
}

TEST_CASE("softmax cross entropy: errors name numbers and positions, and come before anything is written") {
  cpu_context ctx;
  tensor<float, 2> z({3, 10}), dz(z.shape()), odd({3, 9});
  const auto run = [&](std::vector<std::int32_t> labels, double epsilon = 0.0, double normalizer = 1.0) {
    return error_text([&] { ops::softmax_cross_entropy<float>(ctx, z, labels, {epsilon}, normalizer, dz); });
  };
  CHECK(contains(run({1, 2, 12}), "label 12 at position 2 is not in 0 .. 9"));
  CHECK(contains(run({1, -1, 3}), "label -1 at position 1"));
  CHECK(contains(run({1, 2}), "2 labels for 3 rows"));
  CHECK(contains(run({1, 2, 3}, 1.0), "epsilon 1"));
  CHECK(contains(run({1, 2, 3}, 0.0, 0.0), "normalizer 0"));
  CHECK(contains(run({1, 2, 3}, 0.0, HUGE_VAL), "normalizer inf"));
  CHECK(contains(run({1, 2, 3}, std::nan("")), "epsilon nan"));
  for (float value : dz.flat()) CHECK(value == 0.0F);
  const std::vector<std::int32_t> labels{1, 2, 3};
  CHECK_THROWS_AS(ops::softmax_cross_entropy<float>(ctx, z, labels, {}, 1.0, odd), shape_error);
}

}  // namespace
