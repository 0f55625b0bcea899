// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Checks of whole models that quick and slow tests share: a training pass at full size, and the switch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/models/zoo.hpp>
#include <pufferfish/nn/loss.hpp>

namespace test {

using namespace pufferfish;

inline bool starts_with(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

/// One training step of a few random images: shapes, a finite loss near that of guessing, and a finite
/// gradient that is not all zero for every parameter.
template <class T>
void check_training_pass(network<T>& net, const extents<4>& images, index_t classes) {
  // Not initialize: drawing millions of normal numbers takes longer than the pass, and some models switch
  // branches off at the start, and their gradients with them.
  fill_uniform(net.store().values(), -0.03, 0.03, {7, 1});
  for (const auto& entry : net.store().parameters()) {
    if (entry.thing->role() == parameter_role::norm) fill_uniform(entry.thing->values(), 0.5, 1.5, {7, 2});
  }
  cpu_context ctx({2, 1});
  ctx.set_mode(run_mode::training);
  tensor<T, 4> x(images), y(net.output_shape(images)), dy(y.shape()), dx(images);
  REQUIRE(y.shape() == extents<4>{images[0], 1, 1, classes});
  fill_normal<T>(x.flat(), 1.0, {3, 1});
  std::vector<std::int32_t> labels;
  for (index_t n = 0; n < images[0]; ++n) labels.push_back(static_cast<std::int32_t>(n % classes));
  ctx.begin_step(0);
  net.forward(ctx, x.view(), y.view());
  const auto rows = static_cast<double>(images[0]);
  const double loss = SoftmaxCrossEntropy<T>()(ctx, y.view(), labels, rows, dy.view()).mean_loss();
  net.backward(ctx, dy.view(), dx.view());
  CHECK(std::isfinite(loss));
  CHECK(loss < 3.0 * std::log(static_cast<double>(classes)));
  CHECK(ctx.tape().entries() == 0);
  const auto norm = [](std::span<const T> values) {
    double squares = 0.0;
    for (const T value : values) squares += static_cast<double>(value) * static_cast<double>(value);
    return std::sqrt(squares);
  };
  for (const auto& entry : net.store().parameters()) {
    CAPTURE(entry.name);
    const double size = norm(entry.thing->gradient());
    CHECK(std::isfinite(size));
    CHECK(size > 0.0);
  }
  CHECK(std::isfinite(norm(dx.flat())));
  CHECK(norm(dx.flat()) > 0.0);
}

/// Every tensor of a model's state by name: parameters and buffers.
template <class T>
std::map<std::string, std::vector<T>> state_of(const network<T>& net) {
  std::map<std::string, std::vector<T>> state;
  const auto keep = [&](const auto& entry) {
    state[entry.name].assign(entry.thing->values().begin(), entry.thing->values().end());
  };
  for (const auto& entry : net.store().parameters()) keep(entry);
  for (const auto& entry : net.store().buffer_entries()) keep(entry);
  return state;
}

/// A weight as frameworks see it, in rows of one output, in double.
template <class T>
std::vector<double> logical_values(const tensor_view<T, 4>& view) {
  std::vector<double> values;
  for (index_t a = 0; a < view.extent(0); ++a) {
    for (index_t b = 0; b < view.extent(1); ++b) {
      for (index_t c = 0; c < view.extent(2); ++c) {
        for (index_t d = 0; d < view.extent(3); ++d) values.push_back(static_cast<double>(view(a, b, c, d)));
      }
    }
  }
  return values;
}
template <class T>
std::map<std::string, std::vector<double>> weights_of(const network<T>& net) {
  std::map<std::string, std::vector<double>> weights;
  for (const auto& entry : net.store().parameters()) {
    if (entry.thing->layout().dims > 1) weights[entry.name] = logical_values(entry.thing->logical());
  }
  return weights;
}

/// Factors of a dense matrix rows x cols: row i of `down` and column i of `up` have one norm, sqrt(sigma_i),
/// and what the product misses is what the report says was discarded.
inline void check_factors(const std::vector<double>& dense, const std::vector<double>& down,
                          const std::vector<double>& up, const factor_report& report, double tolerance) {
  const auto rows = static_cast<std::size_t>(report.rows), cols = static_cast<std::size_t>(report.cols);
  const auto rank = static_cast<std::size_t>(report.rank);
  REQUIRE(dense.size() == rows * cols);
  REQUIRE(down.size() == rank * cols);
  REQUIRE(up.size() == rows * rank);
  double kept = 0.0;
  for (std::size_t i = 0; i < rank; ++i) {
    double left = 0.0, right = 0.0;
    for (std::size_t c = 0; c < cols; ++c) right += down[i * cols + c] * down[i * cols + c];
    for (std::size_t r = 0; r < rows; ++r) left += up[r * rank + i] * up[r * rank + i];
    CHECK(left == doctest::Approx(right).epsilon(tolerance));
    kept += left * right;  // sigma_i^2
  }
  CHECK(kept == doctest::Approx(report.squared_norm * report.kept_energy).epsilon(tolerance));
  tensor<double, 2> product({report.rows, report.cols});
  stack_arena scratch;
  native_gemm(scratch).multiply<double>(tensor_view<const double, 2>(up.data(), {report.rows, report.rank}),
                                        tensor_view<const double, 2>(down.data(), {report.rank, report.cols}),
                                        product.view());
  double missed = 0.0;
  for (std::size_t i = 0; i < dense.size(); ++i) {
    missed += (dense[i] - product.flat()[i]) * (dense[i] - product.flat()[i]);
  }
  CHECK(std::sqrt(missed) == doctest::Approx(report.truncation_error).epsilon(tolerance));
  CHECK(missed == doctest::Approx(report.squared_norm * (1.0 - report.kept_energy)).epsilon(tolerance));
}

struct switch_counts {
  index_t entries = 0;    ///< of the state after the switch: parameters and buffers
  index_t factors = 0;    ///< of them weights of factors
  index_t untouched = 0;  ///< of them carried over bit for bit
};

/// Factorizes a network with random values everywhere and checks spec points: factors as check_factors says,
/// all else bit for bit as it was.
template <class T>
switch_counts check_switch(network<T>& net, const factorize_policy& policy) {
  fill_uniform(net.store().values(), -1.0, 1.0, random_stream(5, 8));
  fill_uniform(net.store().buffers(), 0.5, 1.5, random_stream(5, 9));
  const auto before = state_of(net);
  const auto dense = weights_of(net);
  const std::vector<layer_rank> planned = planned_ranks(net, policy);
  factorize_policy threaded = policy;
  threaded.threads = 2;
  const factorization done = factorize(net, threaded);
  CHECK(done.ranks() == planned);
  const auto after = state_of(net);
  const auto factors = weights_of(net);

  const double tolerance = sizeof(T) == 4 ? 2e-5 : 1e-10;
  for (const factor_report& report : done.layers) {
    CAPTURE(report.name);
    check_factors(dense.at(report.name + ".weight"), factors.at(report.name + ".down.weight"),
                  factors.at(report.name + ".up.weight"), report, tolerance);
  }
  switch_counts counts;
  for (const auto& entry : after) {
    const std::string& name = entry.first;
    const std::vector<T>& values = entry.second;
    CAPTURE(name);
    ++counts.entries;
    const bool made = std::any_of(done.layers.begin(), done.layers.end(), [&](const auto& layer) {
      return starts_with(name, layer.name + ".down.") || starts_with(name, layer.name + ".up.");
    });
    if (!made) {
      ++counts.untouched;
      CHECK(before.at(name) == values);
    } else if (name.find(".bias") == std::string::npos) {
      ++counts.factors;
    } else {  // the bias is up's now
      const std::string layer = name.substr(0, name.size() - std::string(".up.bias").size());
      CHECK(before.at(layer + ".bias") == values);
      ++counts.untouched;
    }
  }
  return counts;
}

}  // namespace test
