// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Ranks of a network from one budget, and from a list.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include <pufferfish/nn/containers/sequential.hpp>
#include <pufferfish/nn/layers/activation.hpp>
#include <pufferfish/nn/layers/batch_norm.hpp>
#include <pufferfish/nn/layers/flatten.hpp>
#include <pufferfish/nn/measure/collect_statistics.hpp>
#include <pufferfish/nn/network.hpp>
#include <pufferfish/train/host_mirror.hpp>

namespace {

using namespace pufferfish;
using net_type = network<double>;

tensor<double, 4> images(const extents<4>& shape, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> draw;
  tensor<double, 4> made(shape);
  for (double& value : made.flat()) value = draw(random);
  return made;
}

net_type make_net() {
  Sequential<double> layers;
  layers.add("stem", Conv<double>(conv_shape{3, 8, {3, 3}, {1, 1}, {1, 1}}));
  layers.add("norm", BatchNorm<double>(8));
  layers.add("relu", ReLU<double>());
  layers.add("early", Conv<double>(conv_shape{8, 12, {3, 3}, {2, 2}, {1, 1}}, true));
  layers.add("late", Conv<double>(conv_shape{12, 16, {3, 3}, {2, 2}, {1, 1}}));
  layers.add("flatten", Flatten<double>());
  layers.add("hidden", Linear<double>(16 * 4, 40));
  layers.add("head", Linear<double>(40, 10));
  net_type net(std::move(layers));
  net.initialize(3);
  return net;
}

network_statistics statistics_of(const net_type& net, const factorize_policy& policy) {
  cpu_context ctx;
  statistics_collector<double> collector(net, policy, {0});
  for (unsigned step = 0; step < 3; ++step) {
    const observed_scope watching(ctx, collector);
    const tensor<double, 4> x = images({16, 8, 8, 3}, step);
    tensor<double, 4> y({16, 1, 1, 10});
    ctx.set_mode(run_mode::training);
    ctx.begin_step(step);
    net.forward(ctx, x.view(), y.view());
    net.backward(ctx, images(y.shape(), step + 50).view());
    collector.end_step(16.0);
  }
  return collector.statistics();
}

double predicted_loss(const factorization& made) {
  double sum = 0.0;
  for (const factor_report& one : made.layers) sum += one.predicted_loss;
  return sum;
}

double macs_of(const factorization& made, bool after) {
  double sum = 0.0;
  for (const rank_row& row : made.rows) sum += after ? row.after.macs : row.before.macs;
  return sum;
}

}  // namespace

TEST_CASE(
    "factorize: times of another number of rank groups are refused by name, also without a limit of time") {
  net_type net = make_net();
  factorize_policy policy;
  network_statistics seen = statistics_of(net, policy);
  const std::string structure = net.structure();
  for (const std::vector<double>& times : {std::vector<double>{}, {0.5, 0.5}}) {
    seen.times.layers = {{"stem", 2.0, 0.1, times}};
    CHECK_THROWS_WITH_AS(factorize(net, policy, &seen), doctest::Contains("stem: times of "), rank_error);
  }
  CHECK(net.structure() == structure);
}

TEST_CASE("factorize: layers share the parameters of the policy's rank where gradients are known") {
  const net_type net = make_net();
  factorize_policy policy;
  policy.share = true;
  const network_statistics seen = statistics_of(net, policy);
  REQUIRE(seen.layers.size() == 5);  // the rows of all layers, moments of three
  CHECK(!seen.find("stem")->matrices[0].has_rows());
  CHECK(seen.find("stem")->matrices[0].rows_of_sample() == 64.0);

  net_type shared = net, uniform = net;
  const factorization of_shared = factorize(shared, policy, &seen);
  policy.share = false;
  const factorization of_uniform = factorize(uniform, policy, &seen);
  CHECK(of_shared.parameters_after <= of_uniform.parameters_after);
  CHECK(of_shared.ranks() != of_uniform.ranks());
  CHECK(predicted_loss(of_shared) < predicted_loss(of_uniform));

  // The table has all layers, with the multiply-adds that the network itself counts.
  REQUIRE(of_shared.rows.size() == 5);
  const extents<4> image{1, 8, 8, 3};
  CHECK(macs_of(of_shared, false) == static_cast<double>(net.macs(image)));
  CHECK(macs_of(of_shared, true) == static_cast<double>(shared.macs(image)));
  CHECK(of_shared.rows.front().why == "dense: among the first layers");
  CHECK(of_shared.rows.back().why == "dense: the last layer");
  CHECK(of_uniform.rows[1].why == "ratio 0.25");

  CHECK(factorize(uniform = net, factorize_policy{}, &seen).ranks() == of_uniform.ranks());

  // Without gradients, and the paper's way, each layer has the policy's rank.
  net_type plain = net, paper = net;
  policy.share = true;
  CHECK(factorize(plain, policy).ranks() == of_uniform.ranks());
  const network_statistics* const none = nullptr;
  CHECK(factorize(paper, factorize_policy::paper(), none).ranks() == of_uniform.ranks());
  CHECK(factorize(uniform = net, factorize_policy::paper(), &seen).ranks() == of_uniform.ranks());
  CHECK(parameter_digest(paper) == parameter_digest(plain));
  // Statistics leave the bits of the paper's way as they are, biases included.
  net_type paper_seen = net;
  const factorization of_paper = factorize(paper_seen, factorize_policy::paper(), &seen);
  CHECK(parameter_digest(paper_seen) == parameter_digest(paper));
  CHECK(of_paper.predicted_loss() > 0.0);
}

TEST_CASE("factorize: a budget holds for the whole network, whatever the factors keep") {
  const net_type net = make_net();
  factorize_policy policy;
  const network_statistics seen = statistics_of(net, policy);
  const auto parameters = static_cast<double>(net.parameter_count());
  const auto macs = static_cast<double>(net.macs({1, 8, 8, 3}));
  for (const double fraction : {0.4, 0.6, 0.9, 1.0}) {
    CAPTURE(fraction);
    policy.budget.emplace();
    policy.budget->fraction = fraction;
    net_type copy = net;
    const factorization made = factorize(copy, policy, &seen);
    CHECK(static_cast<double>(made.parameters_after) <= fraction * parameters);
    CHECK(static_cast<double>(made.parameters_after) > (fraction - 0.03) * parameters);
    CHECK((made.layers.empty() == (fraction == 1.0)));

    // The same ranks for factors of another kind: components are worth what they are worth.
    factorize_policy plain = policy;
    plain.truncate = truncation::plain;
    net_type other = net;
    const factorization of_plain = factorize(other, plain, &seen);
    CHECK(of_plain.ranks() == made.ranks());
    if (!made.layers.empty()) CHECK(predicted_loss(of_plain) > predicted_loss(made));
  }
  policy.budget->fraction = 0.6;
  policy.budget->mac_fraction = 0.5;
  net_type both = net;
  const factorization made = factorize(both, policy, &seen);
  CHECK(static_cast<double>(both.macs({1, 8, 8, 3})) <= 0.5 * macs);
  CHECK(static_cast<double>(made.parameters_after) <= 0.6 * parameters);
  CHECK(rank_table(made.rows).find("multiply-adds") != std::string::npos);

  // Threads change nothing.
  policy.threads = 3;
  net_type again = net;
  CHECK(factorize(again, policy, &seen).ranks() == made.ranks());
  CHECK(parameter_digest(again) == parameter_digest(both));
}

TEST_CASE("factorize: what a budget cannot know is refused, and nothing changes") {
  const net_type net = make_net();
  factorize_policy policy;
  network_statistics seen = statistics_of(net, policy);
  net_type copy = net;
  policy.budget.emplace();
  CHECK_THROWS_WITH_AS(factorize(copy, policy), doctest::Contains("no limit is set"), value_error);
  policy.budget->mac_fraction = 0.5;
  CHECK_THROWS_WITH_AS(factorize(copy, policy), doctest::Contains("early: the budget limits multiply-adds"),
                       value_error);
  policy.budget->mac_fraction.reset();
  policy.budget->fraction = 0.01;
  CHECK_THROWS_WITH_AS(check_reachable(copy, policy), doctest::Contains("fraction 0.01 cannot be met"),
                       rank_error);
  CHECK_THROWS_AS(factorize(copy, policy, &seen), rank_error);
  policy.budget->fraction = 0.5;
  std::erase_if(seen.layers, [](const layer_statistics& one) { return one.name == "late"; });
  CHECK_THROWS_WITH_AS(factorize(copy, policy, &seen),
                       doctest::Contains("early, whose statistics allow a two-sided truncation, and late"),
                       value_error);
  CHECK(parameter_digest(copy) == parameter_digest(net));
  CHECK(copy.generation() == net.generation());

  // Without statistics the singular values decide.
  const factorization made = factorize(copy, policy);
  CHECK(static_cast<double>(made.parameters_after) <= 0.5 * static_cast<double>(made.parameters_before));
  CHECK(!made.layers.empty());
  CHECK_THROWS_WITH_AS(planned_ranks(net, policy), doctest::Contains("needs the values"), value_error);
}

TEST_CASE("factorize: a list of ranks") {
  const net_type net = make_net();
  factorize_policy policy;
  policy.ranks = std::vector<layer_rank>{{"late", 3}, {"early", 5}};
  CHECK(planned_ranks(net, policy) == std::vector<layer_rank>{{"early", 5}, {"late", 3}});
  net_type copy = net;
  const factorization made = factorize(copy, policy);
  CHECK(made.ranks() == std::vector<layer_rank>{{"early", 5}, {"late", 3}});
  CHECK(low_rank_layers(copy) == made.ranks());
  const network_statistics seen = statistics_of(net, policy);
  CHECK(!seen.find("hidden")->matrices[0].has_rows());
  net_type weighted = net;
  CHECK(factorize(weighted, policy, &seen).ranks() == made.ranks());

  policy.ranks->emplace_back("nothing", 3);
  net_type unchanged = net;
  CHECK_THROWS_WITH_AS(factorize(unchanged, policy),
                       doctest::Contains("ranks for nothing, which is no dense"), value_error);
  policy.ranks = std::vector<layer_rank>{{"hidden", 41}};
  net_type other = net;
  CHECK_THROWS_AS(factorize(other, policy), rank_error);
  policy.ranks = std::vector<layer_rank>{{"hidden", 3, 4}};
  CHECK_THROWS_WITH_AS(factorize(other, policy), doctest::Contains("hidden: 2 ranks"), rank_error);
}
