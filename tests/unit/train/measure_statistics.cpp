// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <algorithm>
#include <cmath>
#include <vector>

#include <doctest/doctest.h>

#include "../support/train_support.hpp"

using namespace pufferfish;
using namespace train_support;

TEST_CASE("measure_statistics: sums of inputs and of gradients, as added up by hand") {
  Sequential<double> layers;
  layers.add("pool", GlobalAvgPool<double>());
  layers.add("hidden", Linear<double>(1, 3));
  layers.add("fc", Linear<double>(3, 4));
  network<double> net{any_layer<double>(std::move(layers))};
  net.initialize(3);
  const image_set set = quadrants(24, 2);
  training_options options = small_options(training_mode::dense);
  const std::vector<double> before(net.store().values().begin(), net.store().values().end());
  context<device::cpu> ctx;
  image_task<double> task(net, set, set, options, 0, 1);
  factorize_policy policy;
  policy.first_layer = 1;
  policy.last_layer_dense = false;
  const network_statistics seen = measure_statistics(ctx, task, net, policy, 2);
  CHECK(std::equal(before.begin(), before.end(), net.store().values().begin()));

  double mean = 0.0, square = 0.0;
  for (const std::uint8_t p : set.pixels) mean += p / static_cast<double>(set.pixels.size());
  for (const std::uint8_t p : set.pixels) square += (p - mean) * (p - mean);
  const double deviation = std::sqrt(square / static_cast<double>(set.pixels.size()));
  double inputs = 0.0;
  for (index_t n = 0; n < 24; ++n) {
    double x = 0.0;
    for (index_t i = 0; i < 36; ++i) {
      x += (set.pixels[static_cast<std::size_t>(36 * n + i)] - mean) / deviation / 36.0;
    }
    inputs += x * x / 24.0;
  }
  // Of h = w x + b, with x of mean 0: the trace of the mean of h h^T.
  double outputs = 0.0;
  for (const auto& entry : net.store().parameters()) {
    if (entry.name.rfind("hidden.", 0) != 0) continue;
    const double weight = entry.name == "hidden.weight" ? inputs : 1.0;
    for (const double value : entry.thing->values()) outputs += weight * value * value;
  }
  REQUIRE(seen.find("fc") != nullptr);
  const output_statistics& fc = seen.find("fc")->matrices.front();
  REQUIRE(fc.has_inputs());
  CHECK(fc.rows_of_sample() == 1.0);
  const tensor<double, 2> gradients = fc.gradient_moment();
  const tensor<double, 2> moment = fc.input_moment();
  CHECK(moment(0, 0) + moment(1, 1) + moment(2, 2) == doctest::Approx(outputs).epsilon(1e-5));
  // A sample's gradient is its softmax less the label's 1: it adds up to 0 over the classes.
  double diagonal = 0.0, all = 0.0;
  for (index_t i = 0; i < 4; ++i) {
    diagonal += gradients(i, i);
    for (index_t j = 0; j < 4; ++j) all += gradients(i, j);
  }
  CHECK(diagonal > 0.3);
  CHECK(diagonal < 2.0);
  CHECK(std::abs(all) < 1e-9);
  CHECK_THROWS_AS(measure_statistics(ctx, task, net, policy, 0), value_error);
}
