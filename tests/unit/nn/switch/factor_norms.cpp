// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <pufferfish/models/resnet.hpp>
#include <pufferfish/nn.hpp>

#include "../../support/gradient_check.hpp"

namespace {

using namespace test;

conv_shape grouped(index_t in, index_t out, index_t groups) {
  conv_shape shape = conv_shape::square(in, out, 3, 1, 1);
  shape.groups = groups;
  return shape;
}

/// Low-rank convolutions with and without a bias, with groups, of a static rank, on a shortcut; one with its
/// own batch norm between the factors, and a low-rank linear layer.
template <class T, class Device = device::cpu>
network<T, Device> low_rank_net() {
  Sequential<T, Device> layers;
  layers.add("conv1", Conv<T>(conv_shape::square(3, 8, 3, 1, 1)));
  layers.add("bn1", BatchNorm<T>(8));
  layers.add("relu1", ReLU<T>());
  layers.add("plain", LowRankConv<T>(conv_shape::square(8, 10, 3, 2, 1), 4));
  layers.add("bn2", BatchNorm<T>(10));
  layers.add("static", LowRankConv<T, 3>(conv_shape::square(10, 12, 3, 1, 1), true));
  layers.add("grouped", LowRankConv<T>(grouped(12, 9, 3), 2, true));
  layers.add("own", LowRankNormConv<T, Device>(conv_shape::square(9, 8, 1), 5));
  Sequential<T, Device> branch, shortcut;
  branch.add("conv", LowRankConv<T>(conv_shape::square(8, 8, 3, 1, 1), 3));
  branch.add("bn", BatchNorm<T>(8));
  shortcut.add("conv", LowRankConv<T>(conv_shape::square(8, 8, 1), 3));
  layers.add("block", Residual<T, Device>(std::move(branch), std::move(shortcut), true));
  layers.add("pool", GlobalAvgPool<T>());
  layers.add("fc", LowRankLinear<T>(8, 5, 2));
  network<T, Device> net{any_layer<T, Device>(std::move(layers))};
  net.initialize(3);
  return net;
}

const std::vector<layer_rank> normed{{"plain", 4}, {"static", 3}, {"grouped", 2}, {"block.conv", 3}};

template <class T>
tensor<T, 4> batch(index_t k) {
  tensor<T, 4> x({4, 7, 6, 3});
  fill_normal<T>(x.flat(), 1.0, {8, static_cast<std::uint64_t>(k)});
  for (T& value : x.flat()) value += T{1};
  return x;
}

template <class T>
void set_statistics(network<T>& net) {
  cpu_context ctx;
  estimate_norms(ctx, net, 3, [&](index_t k) { net.forward(ctx, batch<T>(k)); });
}

template <class T>
std::vector<T> parameter_of(const network<T>& net, const std::string& name) {
  for (const auto& entry : net.store().parameters()) {
    if (entry.name == name) return {entry.thing->values().begin(), entry.thing->values().end()};
  }
  return {};
}

TEST_CASE_TEMPLATE("factor norms: inference gives what it gave, names and numbers of factors stay", T, float,
                   double) {
  network<T> net = low_rank_net<T>();
  set_statistics(net);
  const network<T> before = net;
  cpu_context ctx({2, 1});
  const auto layers = insert_factor_norms(ctx, net, 5, [&](index_t k) { net.forward(ctx, batch<T>(k % 3)); });
  std::vector<layer_rank> expected = normed;
  CHECK(layers == expected);
  expected.insert(expected.begin() + 3, {"own", 5});
  CHECK(factor_norm_layers(net) == expected);
  CHECK(low_rank_layers(net) == std::vector<layer_rank>{{"block.shortcut.conv", 3}, {"fc", 2}});
  CHECK(net.parameter_count() == before.parameter_count() + 2 * (4 + 3 + 6 + 3));
  for (const auto& entry : before.store().parameters()) {
    CAPTURE(entry.name);
    CHECK(parameter_of(net, entry.name) == parameter_of(before, entry.name));
  }
  for (const layer_rank& layer : normed) CHECK_FALSE(parameter_of(net, layer.name + ".bn.weight").empty());

  // The statistics of the other batch norms have been estimated over other batches.
  network<T> same = before;
  estimate_norms(ctx, same, 5, [&](index_t k) { same.forward(ctx, batch<T>(k % 3)); });
  for (const index_t k : {0, 7}) {
    CHECK(largest_error(net.forward(ctx, batch<T>(k)), same.forward(ctx, batch<T>(k))) <
          (sizeof(T) == 4 ? 2e-5 : 1e-12));
  }
  // A second time there is nothing left to do.
  CHECK(insert_factor_norms(ctx, net, 1, [](index_t) {}).empty());
  // Folded away, the function is still the same.
  fold_batch_norm(net);
  CHECK(factor_norm_layers(net).empty());
  CHECK(largest_error(net.forward(ctx, batch<T>(4)), same.forward(ctx, batch<T>(4))) <
        (sizeof(T) == 4 ? 5e-5 : 1e-12));
}

TEST_CASE("factor norms: a budget counts their parameters, groups and all, and so do the rows of the table") {
  Sequential<float> layers;
  layers.add("stem", Conv<float>(conv_shape::square(3, 12, 3, 1, 1)));
  layers.add("bn1", BatchNorm<float>(12));
  layers.add("plain", Conv<float>(conv_shape::square(12, 24, 3, 2, 1), true));
  layers.add("grouped", Conv<float>(grouped(24, 36, 3)));
  Sequential<float> branch, shortcut;
  branch.add("conv", Conv<float>(conv_shape::square(36, 24, 3, 1, 1)));
  branch.add("bn", BatchNorm<float>(24));
  shortcut.add("conv", Conv<float>(conv_shape::square(36, 24, 1)));
  layers.add("block", Residual<float>(std::move(branch), std::move(shortcut), true));
  layers.add("pool", GlobalAvgPool<float>());
  layers.add("hidden", Linear<float>(24, 24));
  layers.add("fc", Linear<float>(24, 5));
  network<float> dense{any_layer<float>(std::move(layers))};
  dense.initialize(3);
  cpu_context ctx;
  factorize_policy policy;
  policy.shortcuts_dense = false;  // a factorized shortcut gets no batch norm
  policy.budget.emplace();
  int too_large = 0;
  for (index_t permille = 430; permille < 700; permille += 7) {
    CAPTURE(permille);
    policy.budget->parameters = permille * dense.parameter_count() / 1000;
    for (const bool counted : {true, false}) {
      policy.factor_norms = counted;
      network<float> net = dense;
      const factorization made = factorize(net, policy);
      const index_t before = net.parameter_count();
      CHECK(before <= *policy.budget->parameters);
      CHECK(!insert_factor_norms(ctx, net, 1, [&](index_t k) { net.forward(ctx, batch<float>(k)); }).empty());
      CHECK(net.parameter_count() > before);
      if (!counted) {
        too_large += net.parameter_count() > *policy.budget->parameters ? 1 : 0;
        continue;
      }
      CHECK(net.parameter_count() <= *policy.budget->parameters);
      auto in_rows = static_cast<double>(dense.parameter_count());
      for (const rank_row& row : made.rows) in_rows += row.after.parameters - row.before.parameters;
      CHECK(in_rows == static_cast<double>(net.parameter_count()));
    }
  }
  CHECK(too_large > 0);
}

TEST_CASE("factor norms: statistics of down x, by hand; training on them is training on the plain factors") {
  network<double> net = low_rank_net<double>();
  const network<double> before = net;
  cpu_context ctx;
  // One batch: training normalises by its statistics, and weight and bias give them back.
  insert_factor_norms(ctx, net, 1, [&](index_t) { net.forward(ctx, batch<double>(0)); });
  network<double> plain = before;
  ctx.set_mode(run_mode::training);
  const auto gradients_of = [&](network<double>& of) {
    ctx.begin_step(1);
    const tensor<double, 4> x = batch<double>(0);
    tensor<double, 4> y(of.output_shape(x.shape())), dy(y.shape());
    of.forward(ctx, x, y.view());
    fill_normal<double>(dy.flat(), 1.0, {4, 4});
    of.backward(ctx, dy);
    return y;
  };
  // Not bit for bit: the batch norm uses the biased variance of the batch, running_var is the unbiased one.
  CHECK(largest_error(gradients_of(net), gradients_of(plain)) < 0.05);

  // The mean of t = down x of the first one, by hand.
  Sequential<double> part, all = *net.root().target<Sequential<double>>();
  for (std::size_t i = 0; i < 3; ++i) part.add(all.name(i), all[i]);
  part.add("down", (*all[3].target<LowRankNormConv<double>>())[0]);
  const tensor<double, 4> t =
      network<double>{any_layer<double>(std::move(part))}.forward(ctx, batch<double>(0).view());
  const index_t count = t.size() / 4;
  for (index_t c = 0; c < 4; ++c) {
    double mean = 0.0, squares = 0.0;
    const auto value = [&](index_t i) { return t.flat()[static_cast<std::size_t>(4 * i + c)]; };
    for (index_t i = 0; i < count; ++i) mean += value(i) / static_cast<double>(count);
    for (index_t i = 0; i < count; ++i) squares += (value(i) - mean) * (value(i) - mean);
    const auto at = static_cast<std::size_t>(c);
    CHECK(parameter_of(net, "plain.bn.bias")[at] == doctest::Approx(mean).epsilon(1e-12));
    CHECK(parameter_of(net, "plain.bn.weight")[at] ==
          doctest::Approx(std::sqrt(squares / static_cast<double>(count - 1) + 1e-5)).epsilon(1e-12));
  }

  // A step of SGD lowers the loss.
  const auto loss = [&] {
    ctx.begin_step(1);
    const tensor<double, 4> x = batch<double>(0);
    tensor<double, 4> y(net.output_shape(x.shape()));
    net.forward(ctx, x, y.view());
    double sum = 0.0;
    for (const double v : y.flat()) sum += 0.5 * v * v;
    net.backward(ctx, y);
    return sum;
  };
  const double first = loss();
  for (std::size_t i = 0; i < net.store().values().size(); ++i)
    net.store().values()[i] -= 1e-3 * net.store().gradients()[i];
  CHECK(loss() < first);
}

TEST_CASE("factor norms: probes change nothing, and go when something is thrown") {
  network<float> net = low_rank_net<float>();
  const network<float> before = net;
  CHECK(observe_factors(net) == normed);
  cpu_context ctx;
  const float tolerance = 1e-5F;
  CHECK(largest_error(net.forward(ctx, batch<float>(1)), before.forward(ctx, batch<float>(1))) < tolerance);
  CHECK(contains(error_text([&] { settle_factor_norms(net); }), "plain: no training pass"));
  CHECK(contains(error_text([&] { fold_batch_norm(net); }), "settle_factor_norms"));
  {
    // Training goes on through probes, with the same gradients.
    ctx.set_mode(run_mode::training);
    network<float> plain = before;
    const auto run = [&](network<float>& of) {
      ctx.begin_step(2);
      const tensor<float, 4> x = batch<float>(2);
      tensor<float, 4> y(of.output_shape(x.shape())), dy(y.shape()), dx(x.shape());
      fill_normal<float>(dy.flat(), 1.0, {4, 4});
      of.forward(ctx, x, y.view());
      of.backward(ctx, dy, dx.view());
      CHECK(ctx.tape().empty());
      return dx;
    };
    CHECK(largest_error(run(net), run(plain)) < 1e-4);
    ctx.set_mode(run_mode::inference);
  }
  release_factors(net);
  CHECK(factor_norm_layers(net) == std::vector<layer_rank>{{"own", 5}});
  CHECK(net.structure() == before.structure());
  CHECK(
      std::equal(net.store().values().begin(), net.store().values().end(), before.store().values().begin()));

  CHECK_THROWS_AS(
      insert_factor_norms(ctx, net, 2, [](index_t) { PUFFERFISH_THROW(io_error("no more data")); }),
      io_error);
  CHECK(net.structure() == before.structure());
  CHECK(
      std::equal(net.store().values().begin(), net.store().values().end(), before.store().values().begin()));

  CHECK_THROWS_AS(detail::moment_probe<float>(3).output_shape({1, 2, 2, 4}), shape_error);
  CHECK(gradient_error(detail::moment_probe<double>(3), {2, 3, 2, 3}) < gradient_tolerance);
  check_contract(detail::moment_probe<float>(3), {2, 3, 2, 3});
  check_contract(detail::moment_probe<float>(3), {0, 3, 2, 3});
  ctx.set_mode(run_mode::training);
  tensor<float, 4> one({1, 1, 1, 3}), out({1, 1, 1, 3});
  CHECK(contains(error_text([&] { detail::moment_probe<float>(3).forward(ctx, one.view(), out.view()); }),
                 "more than one"));
}

TEST_CASE("factor norms: the structure alone, from dense, low-rank and normalised convolutions") {
  network<float> net = low_rank_net<float>();
  cpu_context ctx;
  insert_factor_norms(ctx, net, 1, [&](index_t k) { net.forward(ctx, batch<float>(k)); });
  const std::vector<layer_rank> layers = factor_norm_layers(net);

  network<float> from_low_rank = low_rank_net<float>();
  apply_factor_norms(from_low_rank, layers);
  CHECK(from_low_rank.structure() == net.structure());
  network<float> from_dense = low_rank_net<float>();
  merge(from_dense);
  apply_factor_norms(from_dense, layers);
  CHECK(factor_norm_layers(from_dense) == layers);
  copy_state(net, from_low_rank);
  CHECK(largest_error(from_low_rank.forward(ctx, batch<float>(1)), net.forward(ctx, batch<float>(1))) == 0.0);

  // All of them back to dense convolutions, and others with other ranks.
  network<float> dense = net;
  apply_factor_norms(dense, {});
  CHECK(factor_norm_layers(dense).empty());
  network<float> merged = low_rank_net<float>();
  apply_factor_norms(merged, {});
  merge(dense);
  merge(merged);
  CHECK(dense.structure() == merged.structure());
  apply_factor_norms(net, {{"plain", 2}, {"conv1", 3}});
  CHECK(factor_norm_layers(net) == std::vector<layer_rank>{{"conv1", 3}, {"plain", 2}});

  network<float> untouched = low_rank_net<float>();
  const std::string before = untouched.structure();
  const auto text = [&](const std::vector<layer_rank>& list) {
    return error_text([&] { apply_factor_norms(untouched, list); });
  };
  CHECK(contains(text({{"fc", 2}}), "no convolution called fc"));
  CHECK(contains(text({{"nothing", 2}}), "nothing"));
  CHECK(contains(text({{"plain", 2}, {"plain", 2}}), "two entries"));
  CHECK(contains(text({{"own", 2}, {"own", 3}}), "two entries"));
  CHECK(contains(text({{"plain", 2, 3}}), "2 ranks"));
  CHECK(contains(text({{"own", 2, 3}}), "2 ranks"));
  CHECK_THROWS_AS(apply_factor_norms(untouched, {{"plain", 11}}), rank_error);
  CHECK_THROWS_AS(apply_factor_norms(untouched, {{"own", 0}}), rank_error);
  CHECK(untouched.structure() == before);
}

TEST_CASE("factor norms: parameters of the published ResNet-18 with them") {
  for (const bool stem : {false, true}) {
    resnet18_options options;
    options.stem_norm = stem;
    network<float> net = resnet18<float>(options);
    apply_ranks(net, planned_ranks(net, resnet18_policy()));
    CHECK(net.parameter_count() == (stem ? 3336138 + 128 : 3336138));
    const auto layers = observe_factors(net);
    CHECK(layers.size() == 14);
    release_factors(net);
    apply_factor_norms(net, layers);
    CHECK(net.parameter_count() == (stem ? 3338122 : 3337994));
  }
}

}  // namespace
