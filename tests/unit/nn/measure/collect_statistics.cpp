// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Statistics of networks' layers, collected during training passes, against sums by hand.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include <pufferfish/nn.hpp>

using namespace pufferfish;

namespace {

using net_type = network<double>;

tensor<double, 4> images(const extents<4>& shape, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> draw;
  tensor<double, 4> made(shape);
  for (index_t i = 0; i < made.size(); ++i) made.data()[i] = draw(random);
  return made;
}

net_type small_net() {
  sequential<double> layers;
  layers.add("conv1", Conv<double>(conv_shape{3, 6, {3, 3}, {1, 1}, {1, 1}}));
  layers.add("norm1", BatchNorm<double>(6));
  layers.add("relu", ReLU<double>());
  layers.add("conv2", Conv<double>(conv_shape{6, 4, {3, 3}, {1, 1}, {1, 1}}, true));
  layers.add("flatten", Flatten<double>());
  layers.add("wide", Linear<double>(4 * 16, 5));
  layers.add("narrow", Linear<double>(5, 9));
  net_type net(std::move(layers));
  net.initialize(3);
  return net;
}

factorize_policy everything() {
  factorize_policy policy;
  policy.first_layer = 1;
  policy.last_layer_dense = false;
  return policy;
}

// One training pass of `count` images; returns the gradient that was fed.
void pass(net_type& net, cpu_context& ctx, index_t count, unsigned seed, std::uint64_t step) {
  const tensor<double, 4> x = images({count, 4, 4, 3}, seed);
  const extents<4> shape = net.output_shape(x.shape());
  tensor<double, 4> y(shape);
  const tensor<double, 4> dy = images(shape, seed + 100);
  ctx.set_mode(run_mode::training);
  ctx.begin_step(step);
  net.forward(ctx, x.view(), y.view());
  net.backward(ctx, dy.view());
}

const any_layer<double>& first_slot(const net_type& net) {
  return (*net.root().target<sequential<double>>())[0];
}

double at(const output_statistics& seen, index_t i, index_t j) { return seen.gradient_moment()(i, j); }

}  // namespace

TEST_CASE("collect_statistics: a network's layers against sums by hand") {
  net_type net = small_net();
  cpu_context ctx;
  statistics_collector<double> collector(net, everything(), {0});
  {
    const observed_scope watching(ctx, collector);
    pass(net, ctx, 3, 1, 0);
  }
  collector.end_step(3.0);
  {
    const observed_scope watching(ctx, collector);
    pass(net, ctx, 2, 2, 1);
  }
  collector.end_step(2.0);
  pass(net, ctx, 2, 5, 2);  // unobserved
  const network_statistics all = collector.statistics();
  REQUIRE(all.layers.size() == 4);
  CHECK(all.layers[0].name == "conv1");
  CHECK(all.layers[0].normalized);
  CHECK(all.layers[0].output_scale.size() == 6);
  CHECK(!all.layers[1].normalized);
  REQUIRE(all.find("narrow") != nullptr);
  CHECK(all.find("nothing") == nullptr);

  // The last layer's gradients are those that were fed, times the samples of each batch.
  const output_statistics& last = all.find("narrow")->matrices[0];
  const tensor<double, 4> first_dy = images({3, 1, 1, 9}, 101), second_dy = images({2, 1, 1, 9}, 102);
  for (index_t i = 0; i < 9; ++i) {
    for (index_t j = 0; j < 9; ++j) {
      double sum = 0.0;
      for (index_t n = 0; n < 3; ++n) sum += 9.0 * first_dy(n, 0, 0, i) * first_dy(n, 0, 0, j);
      for (index_t n = 0; n < 2; ++n) sum += 4.0 * second_dy(n, 0, 0, i) * second_dy(n, 0, 0, j);
      CHECK(at(last, i, j) == doctest::Approx(sum / 5.0));
    }
  }
  CHECK(last.has_inputs());  // the narrower side
  CHECK(!all.find("wide")->matrices[0].has_inputs());
  CHECK(last.rows_of_sample() == doctest::Approx(1.0));

  // The first convolution's outputs.
  const output_statistics& conv = all.find("conv1")->matrices[0];
  CHECK(conv.rows_of_sample() == doctest::Approx(16.0));
  tensor<double, 2> moment({6, 6});
  double rows = 0.0;
  for (const auto& [count, seed] : {std::pair<index_t, unsigned>{3, 1}, {2, 2}}) {
    const tensor<double, 4> x = images({count, 4, 4, 3}, seed);
    tensor<double, 4> y({count, 4, 4, 6});
    ctx.set_mode(run_mode::inference);
    first_slot(net).forward(ctx, x.view(), y.view());
    for (index_t r = 0; r < count * 16; ++r, rows += 1.0) {
      for (index_t i = 0; i < 6; ++i) {
        for (index_t j = 0; j < 6; ++j) moment(i, j) += y.data()[r * 6 + i] * y.data()[r * 6 + j];
      }
    }
  }
  const tensor<double, 2> seen = conv.output_moment();
  for (index_t i = 0; i < 36; ++i) CHECK(seen.data()[i] == doctest::Approx(moment.data()[i] / rows));
}

TEST_CASE(
    "collect_statistics: sampled rows are part of all rows, and are the same on any number of threads") {
  const auto taken = [](int threads, index_t most) {
    net_type net = small_net();
    cpu_context ctx(context_options{threads});
    statistics_collector<double> collector(net, everything(), {most});
    for (unsigned step = 0; step < 3; ++step) {
      const observed_scope watching(ctx, collector);
      pass(net, ctx, 6, step, step);
      collector.end_step(6.0);
    }
    return collector.statistics();
  };
  network_statistics one = taken(1, 7), three = taken(3, 7), all = taken(1, 0);
  for (std::size_t i = 0; i < one.layers.size(); ++i) {
    auto& a = one.layers[i].matrices[0];
    auto& b = three.layers[i].matrices[0];
    CHECK(a.rows_of_sample() == all.layers[i].matrices[0].rows_of_sample());
    const auto parts = a.parts(), others = b.parts();
    for (std::size_t p = 0; p < parts.size(); ++p) {
      CHECK(std::equal(parts[p].values.begin(), parts[p].values.end(), others[p].values.begin(),
                       others[p].values.end()));
    }
  }
  for (const auto& [count, columns, most] :
       {std::tuple<index_t, index_t, index_t>{100, 4, 7}, {1000, 4, 7}, {8, 4, 7}, {0, 4, 7}, {96, 40, 7}}) {
    for (std::uint64_t turn = 0; turn < 20; ++turn) {
      const auto part = detail::sample_rows(count, columns, most, turn);
      CHECK(part.first + (part.rows - 1) * part.step < std::max<index_t>(count, 1));
      CHECK((count <= std::max(most, columns) ? part.rows == count : part.rows >= std::max(most, columns)));
    }
  }
}

TEST_CASE("collect_statistics: a step whose gradients are not usable leaves no trace") {
  net_type net = small_net();
  cpu_context ctx;
  statistics_collector<double> collector(net, everything());
  {
    const observed_scope watching(ctx, collector);
    pass(net, ctx, 3, 1, 0);
  }
  collector.end_step(3.0, false);
  CHECK(collector.steps() == 0);
  CHECK(!collector.statistics().layers[0].matrices[0].has_rows());
}

TEST_CASE("collect_statistics: factorize with statistics loses less of the outputs than without") {
  net_type net = small_net();
  cpu_context ctx;
  statistics_collector<double> collector(net, everything(), {0});
  for (unsigned step = 0; step < 4; ++step) {
    const observed_scope watching(ctx, collector);
    pass(net, ctx, 16, step, step);
    collector.end_step(16.0);
  }
  const network_statistics seen = collector.statistics();
  factorize_policy policy = everything();
  policy.rank = fixed_rank{2};
  double lost[3] = {};
  for (const truncation kind : {truncation::plain, truncation::data_aware, truncation::two_sided}) {
    net_type copy = net;
    policy.truncate = kind;
    const factorization made = factorize(copy, policy, &seen);
    CHECK(made.layers.size() == 4);
    for (const factor_report& one : made.layers) {
      CHECK(one.predicted_loss > 0.0);
      lost[static_cast<int>(kind)] += one.predicted_loss;
    }
  }
  CHECK(lost[2] < lost[1]);
  CHECK(lost[2] < lost[0]);
  // The default takes the most that there is.
  net_type copy = net;
  policy.truncate.reset();
  double sum = 0.0;
  for (const factor_report& one : factorize(copy, policy, &seen).layers) sum += one.predicted_loss;
  CHECK(sum == lost[2]);
  net_type other = net;
  policy.truncate = truncation::two_sided;
  CHECK_THROWS_AS(factorize(other, policy), value_error);
}

TEST_CASE("collect_statistics: an LSTM's gates share their inputs") {
  LSTM<double> layer(3, 4);
  std::mt19937_64 random(5);
  sequential<double> layers;
  layers.add("rnn", std::move(layer));
  net_type net(std::move(layers));
  net.initialize(1);
  cpu_context ctx;
  statistics_collector<double> collector(net, everything(), {0});
  const tensor<double, 3> x = [&] {
    tensor<double, 3> made({5, 2, 3});
    std::normal_distribution<double> draw;
    for (index_t i = 0; i < made.size(); ++i) made.data()[i] = draw(random);
    return made;
  }();
  tensor<double, 3> y({5, 2, 4}), dy({5, 2, 4});
  std::fill_n(dy.data(), dy.size(), 1.0);
  {
    const observed_scope watching(ctx, collector);
    ctx.set_mode(run_mode::training);
    ctx.begin_step(0);
    const any_layer<double>& slot = first_slot(net);
    slot.forward_sequence(ctx, x.view(), {}, y.view(), {});
    slot.backward_sequence(ctx, dy.view(), {});
  }
  collector.end_step(2.0);
  const network_statistics all = collector.statistics();
  REQUIRE(all.layers.size() == 1);
  REQUIRE(all.layers[0].matrices.size() == 8);
  for (std::size_t i = 0; i < 8; ++i) {
    const output_statistics& seen = all.layers[0].matrices[i];
    CHECK(seen.has_inputs());
    CHECK(seen.has_gradients());
    // Without a state before, the hidden side has no input at the first of five steps.
    const tensor<double, 2> inputs = seen.input_moment();
    double sum = 0.0;
    for (index_t n = 0; n < (i < 4 ? 10 : 8); ++n) {
      const double value = i < 4 ? x.data()[n * 3] : y.data()[n * 4];
      sum += value * value / (i < 4 ? 10.0 : 8.0);
    }
    CHECK(inputs(0, 0) == doctest::Approx(sum));
  }
  factorize_policy policy = everything();
  policy.rank = fixed_rank{1};
  net_type copy = net;
  CHECK(factorize(copy, policy, &all).layers.size() == 8);
}
