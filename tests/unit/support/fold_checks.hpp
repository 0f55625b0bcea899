// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Checks of fold_batch_norm that quick and slow tests share.

#include <algorithm>
#include <cmath>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/models/small_resnet.hpp>
#include <pufferfish/models/small_vgg.hpp>
#include <pufferfish/models/zoo.hpp>
#include <pufferfish/nn/fold_batch_norm.hpp>

namespace test {

using namespace pufferfish;

/// Values as after some training: random weights of the usual size, norms that are not the identity.
template <class T>
void give_values(network<T>& net, std::uint64_t seed = 5) {
  random_stream random(seed, 2);
  for (const auto& entry : net.store().parameters()) {
    if (entry.thing->role() == parameter_role::weight) {
      // Not initialize: drawing millions of normal numbers takes longer than all else.
      const double bound = std::sqrt(6.0 / static_cast<double>(init::fans_of(entry.thing->layout()).in));
      fill_uniform(entry.thing->values(), -bound, bound, random.child(entry.name));
      continue;
    }
    const bool scale = entry.thing->role() == parameter_role::norm && detail::ends_with(entry.name, "weight");
    fill_uniform(entry.thing->values(), scale ? 0.5 : -0.5, scale ? 1.2 : 0.5, random.child(entry.name));
  }
  for (const auto& entry : net.store().buffer_entries()) {
    const bool variance = detail::ends_with(entry.name, "running_var");
    fill_uniform(entry.thing->values(), variance ? 0.5 : -0.5, variance ? 2.0 : 0.5,
                 random.child(entry.name));
  }
}

template <class T>
constexpr double fold_tolerance = std::is_same_v<T, float> ? 1e-5 : 1e-12;

/// The largest difference that folding makes to the outputs of random images, in units of the largest output.
template <class T>
double folding_error(network<T>& net, const extents<4>& images, batch_norm_folding& report) {
  cpu_context ctx({2, 1});
  tensor<T, 4> x(images);
  fill_normal(x.flat(), 1.0, {3, 1});
  const tensor<T, 4> before = net.forward(ctx, x);
  report = fold_batch_norm(net);
  const tensor<T, 4> after = net.forward(ctx, x);
  REQUIRE(before.shape() == after.shape());
  double worst = 0.0, largest = 0.0;
  for (index_t i = 0; i < before.size(); ++i) {
    const auto a = static_cast<double>(before.data()[i]), b = static_cast<double>(after.data()[i]);
    worst = std::max(worst, std::abs(a - b));
    largest = std::max(largest, std::abs(a));
    CHECK(std::isfinite(b));
  }
  return largest > 0.0 ? worst / largest : worst;
}

struct expected_folding {
  std::vector<folded_batch_norm> folded;
  std::vector<std::string> kept;
};

template <class T>
void check_folding(network<T> net, const extents<4>& images, const expected_folding& expected) {
  give_values(net);
  batch_norm_folding report;
  CHECK(folding_error(net, images, report) <= fold_tolerance<T>);
  CHECK(report.folded == expected.folded);
  CHECK(report.kept == expected.kept);
}

/// Checks that folding removes `folded` batch norms and leaves none.
template <class T>
void check_folding_of_all(network<T> net, const extents<4>& images, std::size_t folded) {
  give_values(net);
  batch_norm_folding report;
  CHECK(folding_error(net, images, report) <= fold_tolerance<T>);
  CHECK(report.folded.size() == folded);
  CHECK(report.kept.empty());
}

}  // namespace test
