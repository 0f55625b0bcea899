// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/nn/switch/soft_projection.hpp>

#include "../../support/gradient_check.hpp"
#include "../../support/layer_shelf.hpp"

namespace {

using namespace test;

template <class T>
using shelf_model = model<shelf<T>>;

/// All matrices of the dense layers of a model as [out][rest], under the names of their reports.
template <class T>
std::vector<std::pair<std::string, tensor<T, 2>>> matrices_of(const shelf_model<T>& net) {
  std::vector<std::pair<std::string, tensor<T, 2>>> all;
  const auto found = detail::find_slots(net);
  for (std::size_t i = 0; i < found.slots.size(); ++i) {
    const layer_weights<T> weights = found.slots[i]->weights(found.layers[i].name);
    for (std::size_t m = 0; m < weights.matrices.size(); ++m) {
      all.emplace_back(weights.name_of(m), detail::unroll(weights.matrices[m].view));
    }
  }
  return all;
}

template <class T>
std::vector<T> values_of(const shelf_model<T>& net) {
  return {net.store().values().begin(), net.store().values().end()};
}

TEST_CASE("soft projection: singular values beyond the rank shrink, the others and all else stay") {
  const shelf_model<double> dense = every_kind<double>(5);
  const index_t rank = 3;
  for (const double strength : {0.0, 0.25, 1.0}) {
    CAPTURE(strength);
    shelf_model<double> net = dense;
    fill_normal<double>(net.store().gradients(), 1.0, {4, 4});
    const std::vector<double> gradients(net.store().gradients().begin(), net.store().gradients().end());
    const std::uint64_t generation = net.generation();
    const auto reports = project_softly(net, all_layers(fixed_rank{rank}), strength);
    CHECK(net.generation() == generation);
    CHECK(std::equal(gradients.begin(), gradients.end(), net.store().gradients().begin()));
    const auto before = matrices_of(dense), after = matrices_of(net);
    REQUIRE(before.size() == 1 + 1 + 3 + 8 + 4 + 2);
    REQUIRE(reports.size() == before.size());
    for (std::size_t m = 0; m < before.size(); ++m) {
      CAPTURE(before[m].first);
      CHECK(reports[m].name == before[m].first);
      CHECK(reports[m].rank == rank);
      CHECK(reports[m].kept_energy < 1.0);
      if (strength == 0.0) CHECK(before[m].second.flat()[0] == after[m].second.flat()[0]);
      const svd_result old = svd<double>(before[m].second), now = svd<double>(after[m].second);
      for (std::size_t i = 0; i < old.singular_values.size(); ++i) {
        const double factor = static_cast<index_t>(i) < rank ? 1.0 : 1.0 - strength;
        CHECK(now.singular_values[i] ==
              doctest::Approx(factor * old.singular_values[i]).epsilon(1e-10).scale(1.0));
      }
    }
    // Biases are no matrices.
    shelf_model<double> other = dense;
    const auto is_bias = [](const auto& entry) { return entry.thing->role() == parameter_role::bias; };
    for (std::size_t i = 0; i < net.store().parameters().size(); ++i) {
      const auto& entry = net.store().parameters()[i];
      if (!is_bias(entry)) continue;
      const auto kept = other.store().parameters()[i].thing->values();
      CHECK(std::equal(kept.begin(), kept.end(), entry.thing->values().begin()));
    }
    if (strength == 0.0) CHECK(values_of(net) == values_of(dense));
    // At strength 1, one truncation is all there is to do.
    if (strength == 1.0) {
      const auto again = project_softly(net, all_layers(fixed_rank{rank}), 0.5);
      for (const factor_report& report : again) CHECK(report.relative_error < 1e-7);
      const std::vector<double> once = values_of(net);
      project_softly(net, ranks_of_all(dense, rank), 0.75);
      const std::vector<double> twice = values_of(net);
      double worst = 0.0;
      for (std::size_t i = 0; i < once.size(); ++i) worst = std::max(worst, std::abs(once[i] - twice[i]));
      CHECK(worst < 1e-13);
    }
  }
}

TEST_CASE("soft projection: strength 1 is the product of factorize's factors; a list says the same") {
  const shelf_model<float> dense = every_kind<float>(6);
  shelf_model<float> projected = dense, listed = dense, factors = dense;
  project_softly(projected, all_layers(fixed_rank{2}), 1.0);
  const auto reports = project_softly(listed, ranks_of_all(dense, 2), 1.0);
  CHECK(values_of(projected) == values_of(listed));
  const factorization made = factorize(factors, all_layers(fixed_rank{2}));
  REQUIRE(reports.size() == made.layers.size());
  for (std::size_t i = 0; i < reports.size(); ++i) {
    CHECK(reports[i].name == made.layers[i].name);
    CHECK(reports[i].kept_energy == made.layers[i].kept_energy);
  }
  merge(factors);
  const auto got = matrices_of(projected), expected = matrices_of(factors);
  for (std::size_t m = 0; m < expected.size(); ++m) {
    CAPTURE(expected[m].first);
    CHECK(largest_error(got[m].second, expected[m].second) < 1e-5);
  }
}

TEST_CASE("soft projection: the layers that a policy chooses, and none that would grow") {
  const shelf_model<double> dense = every_kind<double>(7);
  factorize_policy policy;
  policy.rank = energy_kept{0.5};
  policy.first_layer = 2;
  shelf_model<double> net = dense, factorized = dense;
  const auto reports = project_softly(net, policy, 0.5);
  const factorization made = factorize(factorized, policy);
  std::vector<std::string> expected, got;
  for (const factor_report& report : made.layers) expected.push_back(report.name);
  for (const factor_report& report : reports) got.push_back(report.name);
  CHECK(got == expected);
  CHECK_FALSE(got.empty());
  const auto before = matrices_of(dense), after = matrices_of(net);
  for (std::size_t m = 0; m < before.size(); ++m) {
    CAPTURE(before[m].first);
    const bool chosen = std::find(got.begin(), got.end(), before[m].first) != got.end();
    const auto a = before[m].second.flat(), b = after[m].second.flat();
    CHECK(std::equal(a.begin(), a.end(), b.begin()) == !chosen);
  }
  // After the switch there is nothing left to project.
  const std::vector<double> low_rank = values_of(factorized);
  factorize_policy rest = policy;
  rest.also_if = [](const std::string&, matrix_size) { return false; };
  CHECK(project_softly(factorized, rest, 1.0).empty());
  CHECK(values_of(factorized) == low_rank);
}

TEST_CASE("soft projection: the same bits for any number of threads") {
  const shelf_model<float> dense = every_kind<float>(8);
  std::vector<float> first;
  for (const int threads : {1, 2, 5}) {
    shelf_model<float> net = dense;
    factorize_policy policy = all_layers(rank_ratio{0.25});
    policy.threads = threads;
    project_softly(net, policy, 0.3);
    if (first.empty()) first = values_of(net);
    CHECK(values_of(net) == first);
    shelf_model<float> listed = dense;
    project_softly(listed, planned_ranks(dense, policy), 0.3, threads);
    CHECK(values_of(listed) == first);
  }
}

TEST_CASE("soft projection: errors name their numbers and change nothing") {
  shelf_model<double> net = every_kind<double>(9);
  const std::vector<double> before = values_of(net);
  const factorize_policy policy = all_layers(fixed_rank{2});
  CHECK(contains(error_text([&] { project_softly(net, policy, 1.5); }), "1.5"));
  CHECK_THROWS_AS(project_softly(net, policy, -0.1), value_error);
  CHECK_THROWS_AS(project_softly(net, policy, std::nan("")), value_error);
  CHECK_THROWS_AS(project_softly(net, ranks_of_all(net, 2), 2.0), value_error);
  CHECK_THROWS_AS(project_softly(net, all_layers(fixed_rank{100}), 0.5), rank_error);
  CHECK(contains(error_text([&] { project_softly(net, {{"nothing", 2}}, 0.5); }), "nothing"));
  CHECK(contains(error_text([&] { project_softly(net, {{"wide", 2}, {"wide", 3}}, 0.5); }), "wide"));
  CHECK_THROWS_AS(project_softly(net, {{"lstm", 2}}, 0.5), rank_error);
  CHECK_THROWS_AS(project_softly(net, {{"wide", 10}}, 0.5), rank_error);
  CHECK(values_of(net) == before);

  const auto found = detail::find_slots(net);
  const auto last = found.slots.back()->weights("tall").matrices[0].view;
  detail::writable(last)(1, 1, 0, 0) = std::nan("");
  const std::vector<double> spoilt = values_of(net);
  CHECK(contains(error_text([&] { project_softly(net, policy, 0.5); }), "tall"));
  CHECK(std::memcmp(values_of(net).data(), spoilt.data(), spoilt.size() * sizeof(double)) == 0);
}

}  // namespace
