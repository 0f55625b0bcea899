// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <pufferfish/models/mlp.hpp>

#include "../support/train_support.hpp"

namespace {

using namespace train_support;

TEST_CASE("top-5 hits: against a sorted order, with equal values") {
  std::mt19937 random(4);
  const index_t rows = 50, classes = 12;
  std::vector<float> logits(static_cast<std::size_t>(rows * classes));
  for (float& value : logits) value = static_cast<float>(random() % 9);  // many are equal
  std::vector<std::int32_t> labels;
  for (index_t i = 0; i < rows; ++i) labels.push_back(static_cast<std::int32_t>(random() % 12));
  std::int64_t expected = 0;
  for (index_t i = 0; i < rows; ++i) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(classes));
    std::iota(order.begin(), order.end(), 0);
    const float* const row = logits.data() + i * classes;
    std::stable_sort(order.begin(), order.end(), [row](int a, int b) { return row[a] > row[b]; });
    expected +=
        std::find(order.begin(), order.begin() + 5, labels[static_cast<std::size_t>(i)]) != order.begin() + 5;
  }
  CHECK(expected > 5);
  CHECK(expected < 45);
  CHECK(detail::count_in_top5(logits, labels, classes) == expected);
  CHECK(detail::count_in_top5({}, {}, classes) == 0);
  const std::vector<float> broken(5, std::numeric_limits<float>::quiet_NaN());
  CHECK(detail::count_in_top5(broken, std::vector<std::int32_t>{0}, 5) == 0);
}

TEST_CASE("evaluate: networks of 100 classes have top-5 hits, smaller ones none") {
  const index_t count = 230;
  for (const index_t classes : {99, 100}) {
    image_set set{count, 1, 1, 7, classes, {}, {}};
    std::mt19937 random(8);
    for (index_t i = 0; i < 7 * count; ++i) set.pixels.push_back(static_cast<std::uint8_t>(random()));
    for (index_t i = 0; i < count; ++i) set.labels.push_back(static_cast<std::int32_t>(i % classes));
    network<float> net = mlp<float>({.inputs = 7, .hidden = {16}, .classes = classes});
    net.initialize(2);
    context<device::cpu> ctx;
    self alone;
    const normalization normalize = measure_normalization(set);
    const evaluation seen = evaluate(ctx, net, alone, set, normalize, 64);
    CHECK(seen.count == count);
    if (classes < 100) {
      CHECK(seen.in_top5 == 0);
      continue;
    }
    loader all(set, {.batch = count, .shuffle = false, .normalize = normalize});
    tensor<float, 4> x({count, 1, 1, 7}), y({count, 1, 1, classes});
    std::vector<std::int32_t> labels(static_cast<std::size_t>(count));
    all.load(0, 0, x.view(), std::span<std::int32_t>(labels));
    ctx.set_mode(run_mode::inference);
    net.forward(ctx, x.view(), y.view());
    const std::span<const float> logits(y.data(), static_cast<std::size_t>(count * classes));
    CHECK(seen.in_top5 == detail::count_in_top5(logits, labels, classes));
    CHECK(seen.in_top5 > seen.correct);
    CHECK(seen.top5_accuracy() == doctest::Approx(100.0 * static_cast<double>(seen.in_top5) / 230.0));
  }
}

}  // namespace
