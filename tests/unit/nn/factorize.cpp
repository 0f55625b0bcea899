// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <pufferfish/nn/containers/residual.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/layers/activation.hpp>
#include <pufferfish/nn/layers/batch_norm.hpp>
#include <pufferfish/nn/layers/pooling.hpp>
#include <string>
#include <utility>
#include <vector>

#include "../support/host_pointwise_conv.hpp"

namespace {

using namespace pufferfish;

constexpr extents<4> image{2, 6, 5, 3};

/// Main path in execution order: 1 stem, 2 layer1.0.conv1, 3 layer1.0.conv2, 4 head.fc1, 5 head.fc2; one
/// shortcut.
template <class T>
network<T> make_net(std::uint64_t seed = 1) {
  Sequential<T> branch, shortcut, blocks, head, net;
  branch.add("conv1", Conv<T>(conv_shape::square(8, 12, 3, 2, 1)));
  branch.add("bn1", BatchNorm<T>(12));
  branch.add("relu", ReLU<T>());
  branch.add("conv2", Conv<T>(conv_shape::square(12, 12, 3, 1, 1), true));
  shortcut.add(Conv<T>(conv_shape::square(8, 12, 1, 2)));
  blocks.add(Residual<T>(branch, shortcut));
  head.add("fc1", Linear<T>(12, 10));
  head.add("fc2", Linear<T>(10, 4));
  net.add("stem", Conv<T>(conv_shape::square(3, 8, 3, 1, 1), true));
  net.add("layer1", std::move(blocks));
  net.add("pool", GlobalAvgPool<T>());
  net.add("head", std::move(head));
  network<T> result{any_layer<T>(net)};
  result.initialize(seed);
  fill_uniform(result.store().buffers(), 0.5, 1.5, random_stream(seed, 9));
  return result;
}

template <class T>
tensor<T, 4> output_of(const network<T>& net) {
  cpu_context ctx;
  tensor<T, 4> x(image);
  fill_normal(x.flat(), 1.0, random_stream(3, 3));
  return net.forward(ctx, x.view());
}

template <class T>
double distance(const tensor<T, 4>& a, const tensor<T, 4>& b) {
  REQUIRE(a.shape() == b.shape());
  double worst = 0.0;
  for (std::size_t i = 0; i < a.flat().size(); ++i) {
    worst = std::max(worst, std::abs(static_cast<double>(a.flat()[i]) - static_cast<double>(b.flat()[i])));
  }
  return worst;
}

/// All parameters and buffers by name.
template <class T>
std::map<std::string, std::vector<T>> state_of(const network<T>& net) {
  std::map<std::string, std::vector<T>> result;
  for (const auto& e : net.store().parameters()) {
    result[e.name] = {e.thing->values().begin(), e.thing->values().end()};
  }
  for (const auto& e : net.store().buffer_entries()) {
    result[e.name] = {e.thing->values().begin(), e.thing->values().end()};
  }
  return result;
}

template <class L, class T>
const L& layer_at(const network<T>& net, const std::string& wanted) {
  const L* found = nullptr;
  net.for_each_layer([&](const std::string& name, const any_layer<T>& layer) {
    if (name == wanted) found = layer.template target<L>();
  });
  REQUIRE(found != nullptr);
  return *found;
}

std::vector<std::string> names_of(const factorization& made) {
  std::vector<std::string> names;
  for (const factor_report& layer : made.layers) names.push_back(layer.name);
  return names;
}

using names = std::vector<std::string>;

TEST_CASE("factorize: K, the last layer, shortcuts and the caller's choice") {
  const auto chosen = [](const factorize_policy& policy) {
    network<float> net = make_net<float>();
    return names_of(factorize(net, policy));
  };
  factorize_policy policy;
  CHECK(chosen(policy) == names{"layer1.0.conv1", "layer1.0.conv2", "head.fc1"});
  policy.first_layer = 1;
  CHECK(chosen(policy) == names{"stem", "layer1.0.conv1", "layer1.0.conv2", "head.fc1"});
  policy.first_layer = 3;
  CHECK(chosen(policy) == names{"layer1.0.conv2", "head.fc1"});
  policy.first_layer = 5;
  CHECK(chosen(policy) == names{});
  policy.last_layer_dense = false;
  CHECK(chosen(policy) == names{"head.fc2"});
  policy.first_layer = 3;
  policy.shortcuts_dense = false;  // a shortcut has no number: K does not count it
  CHECK(chosen(policy) == names{"layer1.0.conv2", "layer1.0.shortcut.0", "head.fc1", "head.fc2"});
  policy.also_if = [](const std::string& name, matrix_size size) {
    CHECK(size.rows * size.cols > 0);
    return name != "head.fc1";
  };
  CHECK(chosen(policy) == names{"layer1.0.conv2", "layer1.0.shortcut.0", "head.fc2"});
}

TEST_CASE("factorize: K beyond the last layer is refused, with both numbers") {
  network<float> net = make_net<float>();  // five layers along the main path
  factorize_policy policy;
  for (const index_t first : {6, 100, 0, -1}) {
    policy.first_layer = first;
    const std::string text =
        "first_layer " + std::to_string(first) + " is none of the network's layers: it has 5";
    CHECK_THROWS_WITH_AS(factorize(net, policy), doctest::Contains(text.c_str()), value_error);
    CHECK_THROWS_WITH_AS(planned_ranks(net, policy), doctest::Contains(text.c_str()), value_error);
  }
  CHECK(low_rank_layers(net).empty());
  // The default asks for nothing of a network of one layer, which is the last one as well.
  Sequential<float> one;
  one.add(Linear<float>(8, 8));
  network<float> small{any_layer<float>(one)};
  CHECK(names_of(factorize(small, factorize_policy{})).empty());
}

TEST_CASE("factorize: a second one counts the layers as the first did") {
  network<float> net = make_net<float>();
  factorize_policy policy;
  policy.also_if = [](const std::string& name, matrix_size) { return name == "layer1.0.conv1"; };
  CHECK(names_of(factorize(net, policy)) == names{"layer1.0.conv1"});
  factorize_policy rest;
  rest.first_layer = 3;
  CHECK(names_of(factorize(net, rest)) == names{"layer1.0.conv2", "head.fc1"});
  CHECK(names_of(factorize(net, rest)).empty());
  CHECK(low_rank_layers(net).size() == 3);
}

TEST_CASE_TEMPLATE("factorize: at full rank the network computes the same function", T, float, double) {
  network<T> net = make_net<T>();
  const tensor<T, 4> dense = output_of(net);
  factorize_policy policy;
  policy.rank = rank_ratio{1.0};
  policy.first_layer = 1;
  policy.last_layer_dense = policy.shortcuts_dense = false;
  policy.keep_dense_if_larger = true;
  // Full rank makes a layer larger: kept dense by this policy, one by one.
  network<T> kept = net;
  const factorization refused = factorize(kept, policy);
  CHECK(refused.layers.empty());
  CHECK(refused.kept_dense.size() == 6);
  CHECK(refused.parameters_after == refused.parameters_before);
  CHECK(distance(output_of(kept), dense) == 0.0);

  apply_ranks(net, {{"stem", 8}, {"layer1.0.conv1", 12}, {"layer1.0.conv2", 12}, {"head.fc1", 10}});
  const network<T> original = make_net<T>();
  net.modify([&](any_layer<T>& root) {
    struct filler final : layer_visitor<T, device::cpu> {
      void on_layer(const std::string& name, any_layer<T>& slot) override {
        if (slot.ranks().empty()) return;
        std::vector<factor_report> report;
        source->for_each_layer([&](const std::string& other, const any_layer<T>& layer) {
          if (other != name) return;
          const auto weights = layer.weights(name);
          const auto made =
              detail::factorize_weights(weights, std::array{rank_policy(rank_ratio{1.0})}, {name, true});
          report = detail::reports_of(made);
          slot = detail::with_factors(layer, weights, made);
        });
        REQUIRE(report.size() == 1);
        CHECK(report[0].truncation_error <= 1e-5 * std::sqrt(report[0].squared_norm));
        CHECK(report[0].kept_energy == doctest::Approx(1.0));
        ++count;
      }
      const network<T>* source = nullptr;
      int count = 0;
    } visitor;
    visitor.source = &original;
    root.visit_layers(visitor);
    CHECK(visitor.count == 4);
  });
  const double rounding = static_cast<double>(std::numeric_limits<T>::epsilon());
  CHECK(distance(output_of(net), dense) < 300.0 * rounding);
}

/// ||up down - dense||_F^2, ||dense||_F^2.
template <class T, std::size_t N>
std::pair<double, double> squared_errors(const tensor<T, N>& low, const tensor_view<const T, N>& dense) {
  const tensor<T, N> plain(dense);
  std::pair<double, double> sums{0.0, 0.0};
  for (std::size_t i = 0; i < plain.flat().size(); ++i) {
    const double d = static_cast<double>(plain.flat()[i]);
    sums.first += std::pow(static_cast<double>(low.flat()[i]) - d, 2);
    sums.second += d * d;
  }
  return sums;
}

TEST_CASE("factorize: the error is that of the discarded singular values, the factors are balanced") {
  const network<double> dense = make_net<double>();
  network<double> net = dense;
  const factorization made = factorize(net, factorize_policy{});
  REQUIRE(made.layers.size() == 3);
  for (const factor_report& report : made.layers) {
    CAPTURE(report.name);
    const bool is_conv = report.name != "head.fc1";
    tensor<double, 2> matrix({report.rows, report.cols}), down({report.rank, report.cols}),
        up({report.rows, report.rank});
    std::pair<double, double> errors;
    if (is_conv) {
      const auto& before = layer_at<Conv<double>>(dense, report.name);
      const auto& after = layer_at<LowRankConv<double>>(net, report.name);
      errors = squared_errors(after.to_dense(), before.weight());
      copy(before.weight(), tensor_view<double, 4>(matrix.data(), before.weight().shape()));
      copy(after.down(), tensor_view<double, 4>(down.data(), after.down().shape()));
      copy(after.up(), tensor_view<double, 4>(up.data(), after.up().shape()));
      CHECK(after.rank() == report.rank);
    } else {
      const auto& before = layer_at<Linear<double>>(dense, report.name);
      const auto& after = layer_at<LowRankLinear<double>>(net, report.name);
      errors = squared_errors(after.to_dense(), before.weight());
      copy(before.weight(), matrix.view());
      copy(after.down(), down.view());
      copy(after.up(), up.view());
    }
    svd_options how;
    how.method = svd_method::jacobi;
    const svd_result exact = svd(tensor_view<const double, 2>(matrix), how);
    double discarded = 0.0;
    for (auto i = static_cast<std::size_t>(report.rank); i < exact.singular_values.size(); ++i) {
      discarded += exact.singular_values[i] * exact.singular_values[i];
    }
    CHECK(report.rank == std::max<index_t>(1, std::min(report.rows, report.cols) / 4));
    CHECK(std::sqrt(errors.first) == doctest::Approx(std::sqrt(discarded)).epsilon(1e-9));
    CHECK(report.truncation_error == doctest::Approx(std::sqrt(discarded)).epsilon(1e-9));
    CHECK(report.relative_error == doctest::Approx(std::sqrt(discarded / errors.second)).epsilon(1e-9));
    CHECK(report.kept_energy == doctest::Approx(1.0 - discarded / errors.second).epsilon(1e-9));
    for (index_t i = 0; i < report.rank; ++i) {
      double row = 0.0, column = 0.0;
      for (index_t j = 0; j < report.cols; ++j) row += down(i, j) * down(i, j);
      for (index_t j = 0; j < report.rows; ++j) column += up(j, i) * up(j, i);
      // Squared norms are sigma_i.
      const double sigma = exact.singular_values[static_cast<std::size_t>(i)];
      CHECK(row == doctest::Approx(sigma).epsilon(1e-9));
      CHECK(column == doctest::Approx(sigma).epsilon(1e-9));
    }
  }
  CHECK(made.kept_energy() < 1.0);
  CHECK(made.kept_energy() > 0.1);
  CHECK(factorization().kept_energy() == 1.0);
}

TEST_CASE("factorize: everything else is carried over bit for bit, and accounted for") {
  network<float> net = make_net<float>();
  const auto before = state_of(net);
  const std::uint64_t generation = net.generation();
  const factorization made = factorize(net, factorize_policy{});
  CHECK(net.generation() > generation);
  const auto after = state_of(net);
  int factors = 0, same = 0;
  for (const auto& [name, values] : after) {
    const std::size_t down = name.find(".down.weight"), up = name.find(".up.weight");
    const std::size_t bias = name.find(".up.bias");
    if (down != std::string::npos || up != std::string::npos) {
      ++factors;
      CHECK(before.count(name) == 0);
    } else if (bias != std::string::npos) {
      CHECK(before.at(name.substr(0, bias) + ".bias") == values);
    } else {
      ++same;
      CHECK(before.at(name) == values);
    }
  }
  CHECK(factors == 6);
  CHECK(same == 2 + 2 + 3 + 1 + 2);  // stem, batch norm (two parameters, two buffers), shortcut, fc2
  CHECK(after.size() == before.size() + 3);
  CHECK(made.parameters_before - made.parameters_after ==
        (12 * 72 - 3 * 84) + (12 * 108 - 3 * 120) + (10 * 12 - 2 * 22));
  CHECK(made.parameters_after == net.parameter_count());
  for (float g : net.store().gradients()) CHECK(g == 0.0F);
  CHECK(layer_at<LowRankConv<float>>(net, "layer1.0.conv1").has_bias() == false);
}

TEST_CASE("factorize: rank policies reach the layers") {
  const auto ranks = [](const rank_policy& rank) {
    network<double> net = make_net<double>();
    factorize_policy policy;
    policy.rank = rank;
    std::vector<index_t> result;
    for (const layer_rank& layer : factorize(net, policy).ranks()) result.push_back(layer.rank());
    return result;
  };
  CHECK(ranks(fixed_rank{2}) == std::vector<index_t>{2, 2, 2});
  CHECK(ranks(rank_ratio{0.5}) == std::vector<index_t>{6, 6, 5});
  // 300 / 84, 300 / 120; the third would take all 10 of rank and grow, so it stays dense.
  CHECK(ranks(parameter_budget{300}) == std::vector<index_t>{3, 2});
  CHECK(ranks(parameter_fraction{0.5}) == std::vector<index_t>{5, 5, 2});
  network<double> net = make_net<double>();
  factorize_policy policy;
  policy.rank = energy_kept{0.6};
  const factorization made = factorize(net, policy);
  REQUIRE(!made.layers.empty());
  for (const factor_report& layer : made.layers) CHECK(layer.kept_energy >= 0.6);
}

TEST_CASE("factorize: refusals change nothing") {
  const auto refused = [](const factorize_policy& policy, network<float>& net) {
    const auto before = state_of(net);
    const std::uint64_t generation = net.generation();
    std::string text;
    try {
      factorize(net, policy);
    } catch (const error& e) {
      text = e.what();
    }
    CHECK(state_of(net) == before);
    CHECK(net.generation() == generation);
    CHECK(low_rank_layers(net).empty());
    return text;
  };
  network<float> net = make_net<float>();
  factorize_policy policy;
  policy.rank = rank_ratio{0.9};
  policy.keep_dense_if_larger = false;
  const std::string growth = refused(policy, net);
  CHECK(growth.find("head.fc1") != std::string::npos);
  CHECK(growth.find("rank 9") != std::string::npos);
  policy.keep_dense_if_larger = true;
  policy.rank = fixed_rank{11};
  const std::string too_large = refused(policy, net);
  CHECK(too_large.find("head.fc1") != std::string::npos);
  CHECK(too_large.find("rank 11") != std::string::npos);
  policy.rank = rank_ratio{0.0};
  CHECK(!refused(policy, net).empty());
  policy.rank = rank_ratio{0.25};
  network<float> broken = make_net<float>();
  // The last layer that would be factorized: those before it have been worked on already.
  broken.for_each_layer([&](const std::string& name, const any_layer<float>& layer) {
    if (name != "head.fc1") return;
    const auto weight = layer.target<Linear<float>>()->weight();
    const_cast<float&>(weight(3, 4)) = std::numeric_limits<float>::infinity();
  });
  CHECK(refused(policy, broken).find("head.fc1") != std::string::npos);
}

TEST_CASE("apply_ranks: the structure that factorize makes, with zeros") {
  network<float> net = make_net<float>(), twin = make_net<float>();
  const factorization made = factorize(net, factorize_policy{});
  const std::uint64_t generation = twin.generation();
  apply_ranks(twin, made.ranks());
  CHECK(twin.structure() == net.structure());
  CHECK(low_rank_layers(twin) == made.ranks());
  CHECK(twin.generation() > generation);
  CHECK(twin.parameter_count() == net.parameter_count());
  const auto state = state_of(twin), original = state_of(net);
  for (float v : state.at("layer1.0.conv1.down.weight")) CHECK(v == 0.0F);
  CHECK(state.at("stem.weight") == original.at("stem.weight"));
  std::copy(net.store().values().begin(), net.store().values().end(), twin.store().values().begin());
  std::copy(net.store().buffers().begin(), net.store().buffers().end(), twin.store().buffers().begin());
  CHECK(distance(output_of(net), output_of(twin)) == 0.0);

  network<float> other = make_net<float>();
  const std::string structure = other.structure();
  CHECK_THROWS_AS(apply_ranks(other, {{"layer1.0.conv1", 2}, {"absent", 2}}), state_error);
  CHECK_THROWS_AS(apply_ranks(other, {{"layer1.0.conv1", 2}, {"pool", 2}}), state_error);
  CHECK_THROWS_AS(apply_ranks(other, {{"layer1.0.conv1", 2}, {"head.fc1", 11}}), rank_error);
  CHECK_THROWS_AS(apply_ranks(other, {{"head.fc1", 0}}), rank_error);
  CHECK_THROWS_AS(apply_ranks(other, {{"head.fc1", 2, 2}}), rank_error);
  CHECK_THROWS_AS(apply_ranks(other, {{"head.fc1", 2}, {"head.fc2", 2}, {"head.fc1", 3}}), state_error);
  CHECK(other.structure() == structure);
  CHECK_THROWS_AS(apply_ranks(net, made.ranks()), state_error);  // no longer dense
}

TEST_CASE_TEMPLATE("merge: a dense network of the same function", T, float, double) {
  network<T> net = make_net<T>();
  const std::string dense = net.structure();
  factorize(net, factorize_policy{});
  const tensor<T, 4> low = output_of(net);
  const auto before = state_of(net);
  const std::uint64_t generation = net.generation();
  merge(net);
  CHECK(net.generation() > generation);
  CHECK(net.structure() == dense);
  CHECK(low_rank_layers(net).empty());
  CHECK(distance(output_of(net), low) < 100.0 * static_cast<double>(std::numeric_limits<T>::epsilon()));
  const auto after = state_of(net);
  CHECK(after.at("head.fc1.bias") == before.at("head.fc1.up.bias"));
  CHECK(after.at("layer1.0.bn1.running_var") == before.at("layer1.0.bn1.running_var"));
  // Of rank 3 already: cutting to rank 3 loses nothing more.
  const factorization again = factorize(net, factorize_policy{});
  CHECK(again.kept_energy() == doctest::Approx(1.0).epsilon(1e-5));
  CHECK(distance(output_of(net), low) < 1000.0 * static_cast<double>(std::numeric_limits<T>::epsilon()));
}

TEST_CASE("factorize: a layer of another library inside any_layer") {
  Sequential<float> layers;
  layers.add("first", Conv<float>(conv_shape::square(3, 12, 3, 1, 1)));
  host::PointwiseConv foreign(12, 16);
  // Of rank 2, so that a factorization of rank 3 computes the same.
  for (index_t i = 0; i < 12; ++i) {
    for (index_t o = 0; o < 16; ++o) {
      foreign.weight().data()[i * 16 + o] =
          static_cast<float>(std::sin(double(i)) * std::cos(double(o)) + 0.1 * double(i % 3) * double(o % 5));
    }
  }
  layers.add("foreign", foreign);
  layers.add("last", Linear<float>(16, 4));
  network<float> net{any_layer<float>(layers)};
  net.initialize(2);
  const tensor<float, 4> before = output_of(net);
  const factorization made = factorize(net, factorize_policy{});
  CHECK(names_of(made) == names{"foreign"});
  CHECK(made.layers[0].rank == 3);
  CHECK(layer_at<LowRankConv<float>>(net, "foreign").has_bias() == false);
  CHECK(distance(output_of(net), before) < 1e-5);
  CHECK(state_of(net).count("foreign.down.weight") == 1);
  merge(net);
  CHECK(layer_at<Conv<float>>(net, "foreign").weight().extent(0) == 16);
  CHECK(distance(output_of(net), before) < 1e-5);
}

TEST_CASE("factorize: the same bits and the same order for any number of threads") {
  network<float> one = make_net<float>();
  factorize_policy policy;
  policy.first_layer = 1;
  const factorization made = factorize(one, policy);
  for (int threads : {2, 3, 8}) {
    network<float> more = make_net<float>();
    policy.threads = threads;
    CHECK(names_of(factorize(more, policy)) == names_of(made));
    CHECK(state_of(more) == state_of(one));
  }
}

TEST_CASE("any_layer: layers without a matrix refuse to be factorized") {
  const any_layer<float> relu{ReLU<float>()};
  CHECK(relu.weights("relu").matrices.empty());
  CHECK(relu.first_matrix().empty());
  CHECK_THROWS_AS(detail::with_factors(relu, {}, {}), state_error);
  CHECK_THROWS_AS(relu.twin({1}), state_error);
  any_layer<float> low{LowRankLinear<float>(6, 5, 2)};
  CHECK(low.weights("low").matrices.empty());
  CHECK(low.first_matrix() == matrix_size{5, 6});
  CHECK(low.ranks() == rank_list{2});
  REQUIRE(low.low_rank().factors.size() == 1);
  CHECK(low.low_rank().factors[0].down.shape() == extents<4>{2, 6, 1, 1});
  CHECK(low.low_rank().factors[0].up.shape() == extents<4>{5, 2, 1, 1});
  any_layer<float> fixed{LowRankConv<float, 3>(conv_shape::square(4, 8, 3))};
  CHECK(fixed.ranks() == rank_list{3});
  CHECK(fixed.first_matrix() == matrix_size{8, 36});
}

TEST_CASE("factorize: an LSTM's eight matrices, its two ranks, and back") {
  Sequential<double> layers;
  layers.add("in", Linear<double>(6, 8));
  layers.add("rnn", LSTM<double>(8, 12));
  layers.add("out", Linear<double>(12, 5));
  network<double> net{any_layer<double>(layers)};
  net.initialize(3);
  const network<double> dense = net;
  factorize_policy policy;
  policy.rank = rank_ratio{0.75};
  policy.first_layer = 1;
  policy.last_layer_dense = false;
  policy.also_if = [](const std::string& name, matrix_size) { return name == "rnn"; };
  CHECK(planned_ranks(net, policy) == std::vector<layer_rank>{});  // would not shrink

  policy.rank = rank_ratio{0.25};
  const std::vector<layer_rank> planned{{"rnn", 2, 3}};
  CHECK(planned_ranks(net, policy) == planned);
  const factorization made = factorize(net, policy);
  CHECK(made.ranks() == planned);
  REQUIRE(made.layers.size() == 8);
  CHECK(made.layers[0].name.substr(0, 4) == "rnn.");
  CHECK(low_rank_layers(net) == planned);
  // Four gates, each with rank (in + hidden) numbers a side, and the biases.
  CHECK(made.parameters_before - made.parameters_after == 4 * (12 * 8 + 12 * 12) - 4 * (2 * 20 + 3 * 24));

  network<double> shaped = dense;
  apply_ranks(shaped, made.ranks());
  CHECK(shaped.structure() == net.structure());
  CHECK_THROWS_AS(apply_ranks(shaped, {{"rnn", 2, 3}}), state_error);
  network<double> other = dense;
  CHECK_THROWS_AS(apply_ranks(other, {{"rnn", 2, 0}}), rank_error);

  const auto run = [](const network<double>& of) {
    cpu_context ctx;
    tensor<double, 4> x({5, 3, 1, 6});
    fill_normal(x.flat(), 1.0, random_stream(4, 4));
    return of.forward(ctx, x.view());
  };
  const tensor<double, 4> low = run(net);
  merge(net);
  CHECK(low_rank_layers(net).empty());
  CHECK(net.structure() == dense.structure());
  CHECK(distance(run(net), low) < 1e-12);
}

TEST_CASE("low_rank_layers: layers of static rank are found, merged and stored like the others") {
  Sequential<float> layers;
  layers.add("a", LowRankConv<float, 2>(conv_shape::square(3, 8, 3, 1, 1), true));
  layers.add("b", LowRankLinear<float, 3>(8, 6));
  network<float> net{any_layer<float>(layers)};
  net.initialize(7);
  CHECK(low_rank_layers(net) == std::vector<layer_rank>{{"a", 2}, {"b", 3}});
  const tensor<float, 4> before = output_of(net);
  merge(net);
  CHECK(low_rank_layers(net).empty());
  CHECK(distance(output_of(net), before) < 1e-5);
}

}  // namespace
