// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Statistics of networks' layers, collected during training passes, against sums by hand.

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include <pufferfish/nn.hpp>
#include <pufferfish/nn/layers/attention.hpp>

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
  Sequential<double> layers;
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
  return (*net.root().target<Sequential<double>>())[0];
}

double at(const output_statistics& seen, index_t i, index_t j) { return seen.gradient_moment()(i, j); }

using matrix = tensor<double, 2>;

// Compares a moment with `weight` times the mean of r r^T over the rows r of columns first, first + 1, ...
void check_moment(const matrix& found, const tensor_view<const double, 2>& rows, index_t first = 0,
                  double weight = 1.0, double tolerance = 1e-9) {
  for (index_t i = 0; i < found.extent(0); ++i) {
    for (index_t j = 0; j < found.extent(0); ++j) {
      double sum = 0.0;
      for (index_t n = 0; n < rows.extent(0); ++n) sum += rows(n, first + i) * rows(n, first + j);
      CHECK(found(i, j) ==
            doctest::Approx(weight * sum / static_cast<double>(rows.extent(0))).epsilon(tolerance));
    }
  }
}

// Self attention of one sequence with a residual sum and a layer norm, in plain loops.
struct plain_attention {
  static constexpr index_t heads = 2, key = 3, value = 4;
  std::vector<matrix> weights;  // of queries, keys, values and outputs
  matrix x, dy;
  std::vector<matrix> shifts;  // added to the outputs of each projection

  matrix project(const matrix& rows, std::size_t which) const {
    const matrix& w = weights[which];
    matrix result = shifts[which];
    for (index_t n = 0; n < rows.extent(0); ++n) {
      for (index_t o = 0; o < w.extent(0); ++o) {
        for (index_t i = 0; i < w.extent(1); ++i) result(n, o) += rows(n, i) * w(o, i);
      }
    }
    return result;
  }
  matrix outputs() const {
    const index_t tokens = x.extent(0);
    const matrix q = project(x, 0), k = project(x, 1), v = project(x, 2);
    matrix joined({tokens, heads * value});
    for (index_t h = 0; h < heads; ++h) {
      for (index_t i = 0; i < tokens; ++i) {
        std::vector<double> weight;
        double sum = 0.0;
        for (index_t j = 0; j < tokens; ++j) {
          double score = 0.0;
          for (index_t d = h * key; d < (h + 1) * key; ++d) score += q(i, d) * k(j, d);
          sum += weight.emplace_back(std::exp(score / std::sqrt(static_cast<double>(key))));
        }
        for (index_t j = 0; j < tokens; ++j) {
          for (index_t d = h * value; d < (h + 1) * value; ++d) {
            joined(i, d) += weight[static_cast<std::size_t>(j)] / sum * v(j, d);
          }
        }
      }
    }
    return project(joined, 3);
  }
  // sum of dy norm(x + outputs)
  double loss() const {
    const matrix z = outputs();
    double sum = 0.0;
    for (index_t n = 0; n < x.extent(0); ++n) {
      const index_t width = x.extent(1);
      double mean = 0.0, squares = 0.0;
      for (index_t c = 0; c < width; ++c) mean += (x(n, c) + z(n, c)) / static_cast<double>(width);
      for (index_t c = 0; c < width; ++c) squares += std::pow(x(n, c) + z(n, c) - mean, 2);
      const double deviation = std::sqrt(squares / static_cast<double>(width) + 1e-6);
      for (index_t c = 0; c < width; ++c) sum += dy(n, c) * (x(n, c) + z(n, c) - mean) / deviation;
    }
    return sum;
  }
  // Gradient of the loss with respect to the outputs of a projection, by central differences.
  matrix gradient(std::size_t which) {
    matrix result(shifts[which].shape());
    constexpr double step = 1e-5;
    for (index_t i = 0; i < result.size(); ++i) {
      double& shift = shifts[which].data()[i];
      shift = step;
      const double above = loss();
      shift = -step;
      result.data()[i] = (above - loss()) / (2.0 * step);
      shift = 0.0;
    }
    return result;
  }
};

// conv1 with its rows multiplied by `scale`, and a batch norm whose running statistics are those of the last
// batch.
net_type normed_net(const std::vector<double>& scale) {
  Sequential<double> layers;
  layers.add("conv1", Conv<double>(conv_shape{3, 6, {3, 3}, {1, 1}, {1, 1}}));
  layers.add("norm1", BatchNorm<double>(6, 1e-12, 1.0));
  layers.add("flatten", Flatten<double>());
  layers.add("head", Linear<double>(6 * 16, 5));
  net_type net(std::move(layers));
  net.initialize(3);
  const double norm_weights[] = {0.5, -2.0, 1.0, 3.0, 0.2, 1.5};
  net.on_host([&](auto& root) {
    auto& parts = *root.template target<Sequential<double>>();
    const auto weight = parts[0].template target<Conv<double>>()->weight();
    for (index_t o = 0; o < 6; ++o) {
      for (index_t i = 0; i < 27; ++i)
        weight(o, i / 9, i / 3 % 3, i % 3) *= scale[static_cast<std::size_t>(o)];
    }
    parts[1].template target<BatchNorm<double>>()->visit([&](const char* name, auto& thing) {
      if (std::string(name) == "weight") std::copy_n(norm_weights, 6, thing.data());
    });
  });
  return net;
}

// Statistics of two batches of 8 images.
network_statistics statistics_of(net_type& net, cpu_context& ctx) {
  statistics_collector<double> collector(net, everything(), {0});
  for (unsigned step = 0; step < 2; ++step) {
    const observed_scope watching(ctx, collector);
    pass(net, ctx, 8, 7, step);
    collector.end_step(8.0);
  }
  return collector.statistics();
}

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
  network_statistics one = taken(1, 7), all = taken(1, 0);
  for (const int threads : {2, 3, 4}) {
    network_statistics three = taken(threads, 7);
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
  }
}

TEST_CASE("collect_statistics: turns sample as many rows as requested, and all rows equally often") {
  struct sampled {
    index_t count, columns, most, limit;
  };
  for (const sampled& of : {sampled{100, 4, 7, 7},
                            {1024, 4, 128, 128},
                            {8, 4, 7, 7},
                            {7, 4, 7, 7},
                            {0, 4, 7, 7},
                            {96, 40, 7, 20},
                            {98, 4, 10, 10},
                            {30, 4, 11, 11},
                            {64, 4, 0, 64}}) {
    const index_t count = of.count, columns = of.columns, most = of.most, limit = of.limit;
    CAPTURE(count);
    CAPTURE(most);
    std::vector<int> seen(static_cast<std::size_t>(count));
    for (index_t turn = 0; turn < count; ++turn) {
      index_t rows = 0;
      for (const auto& part : detail::sample_rows(count, columns, most, static_cast<std::uint64_t>(turn))) {
        for (index_t i = 0; i < part.rows; ++i)
          ++seen.at(static_cast<std::size_t>(part.first + i * part.step));
        rows += part.rows;
      }
      CHECK(rows == std::min(count, limit));
    }
    // `count` turns of `rows` samples each.
    for (const int times : seen) CHECK(times == std::min(count, limit));
  }
  // A turn samples all columns of 8 x 8 images equally often.
  std::array<int, 8> columns{};
  for (const auto& part : detail::sample_rows(8 * 8 * 16, 4, 128, 3)) {
    for (index_t i = 0; i < part.rows; ++i)
      ++columns.at(static_cast<std::size_t>((part.first + i * part.step) % 8));
  }
  for (const int times : columns) CHECK(times == 16);
}

TEST_CASE("collect_statistics: means over sampled rows are unbiased") {
  // Over as many steps with one batch as rows are in a sample, all rows are sampled equally often.
  const auto taken = [](index_t most) {
    net_type net = small_net();
    cpu_context ctx;
    statistics_collector<double> collector(net, everything(), {most});
    for (unsigned step = 0; step < 6; ++step) {
      const observed_scope watching(ctx, collector);
      pass(net, ctx, 6, 1, 0);
      collector.end_step(6.0);
    }
    return collector.statistics();
  };
  const network_statistics some = taken(16), all = taken(0);
  for (const char* name : {"conv1", "conv2"}) {  // of 96 rows
    const output_statistics &a = some.find(name)->matrices[0], &b = all.find(name)->matrices[0];
    CHECK(a.rows_of_sample() == b.rows_of_sample());
    for (index_t i = 0; i < a.outputs(); ++i) {
      CHECK(a.output_mean()[static_cast<std::size_t>(i)] ==
            doctest::Approx(b.output_mean()[static_cast<std::size_t>(i)]));
      for (index_t j = 0; j < a.outputs(); ++j) {
        CHECK(a.output_moment()(i, j) == doctest::Approx(b.output_moment()(i, j)));
        CHECK(a.gradient_moment()(i, j) == doctest::Approx(b.gradient_moment()(i, j)));
      }
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
  Sequential<double> layers;
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

TEST_CASE("collect_statistics: each group of a convolution has the sums of its own outputs") {
  conv_shape shape = conv_shape::square(4, 6, 3, 1, 1);
  shape.groups = 2;
  Sequential<double> layers;
  layers.add("grouped", Conv<double>(shape, true));
  net_type net(std::move(layers));
  net.initialize(4);
  cpu_context ctx;
  statistics_collector<double> collector(net, everything(), {0});
  const tensor<double, 4> x = images({3, 5, 5, 4}, 8), dy = images({3, 5, 5, 6}, 9);
  tensor<double, 4> y(dy.shape());
  {
    const observed_scope watching(ctx, collector);
    ctx.set_mode(run_mode::training);
    ctx.begin_step(0);
    net.forward(ctx, x.view(), y.view());
    net.backward(ctx, dy.view());
  }
  collector.end_step(3.0);
  const network_statistics all = collector.statistics();
  REQUIRE(all.layers.size() == 1);
  const std::vector<output_statistics>& groups = all.layers[0].matrices;
  REQUIRE(groups.size() == 2);
  const tensor_view<const double, 2> outputs(y.data(), {75, 6}), gradients(dy.data(), {75, 6});
  for (index_t g = 0; g < 2; ++g) {
    CAPTURE(g);
    const output_statistics& seen = groups[static_cast<std::size_t>(g)];
    REQUIRE(seen.outputs() == 3);
    CHECK(seen.inputs() == 18);
    CHECK(!seen.has_inputs());
    CHECK(seen.rows_of_sample() == doctest::Approx(25.0));
    check_moment(seen.output_moment(), outputs, 3 * g);
    check_moment(seen.gradient_moment(), gradients, 3 * g, 9.0);
    double mean = 0.0;
    for (index_t n = 0; n < 75; ++n) mean += outputs(n, 3 * g + 1) / 75.0;
    CHECK(seen.output_mean()[1] == doctest::Approx(mean));
  }
}

TEST_CASE("collect_statistics: the projections of attention against sums by hand") {
  attention_options options;
  options.shape = {6, plain_attention::heads, plain_attention::key, plain_attention::value};
  options.dropout = options.attention_dropout = 0.0;
  Sequential<double> layers;
  layers.add("att", MultiHeadAttention<double>(options));
  net_type net(std::move(layers));
  net.initialize(6);
  cpu_context ctx;
  statistics_collector<double> collector(net, everything(), {0});
  const tensor<double, 4> x = images({1, 5, 1, 6}, 10), dy = images({1, 5, 1, 6}, 11);
  tensor<double, 4> y(x.shape());
  {
    const observed_scope watching(ctx, collector);
    ctx.set_mode(run_mode::training);
    ctx.begin_step(0);
    net.forward(ctx, x.view(), y.view());
    net.backward(ctx, dy.view());
  }
  collector.end_step(2.0);

  plain_attention by_hand;
  const extents<2> rows{5, 6};
  by_hand.x = matrix(tensor_view<const double, 2>(x.data(), rows));
  by_hand.dy = matrix(tensor_view<const double, 2>(dy.data(), rows));
  const auto found = detail::find_slots(net);
  REQUIRE(found.slots.size() == 4);
  for (any_layer<double>* const slot : found.slots) {
    const Linear<double>& one = *slot->target<Linear<double>>();
    by_hand.weights.emplace_back(tensor_view<const double, 2>(one.weight()));
    by_hand.shifts.emplace_back(extents<2>{5, one.out_features()});
  }
  double loss = 0.0;
  for (index_t i = 0; i < y.size(); ++i) loss += y.data()[i] * dy.data()[i];
  REQUIRE(by_hand.loss() == doctest::Approx(loss));

  const network_statistics all = collector.statistics();
  const char* const names[] = {"att.w_qs", "att.w_ks", "att.w_vs", "att.fc"};
  REQUIRE(all.layers.size() == 4);
  for (std::size_t i = 0; i < 4; ++i) {
    CAPTURE(names[i]);
    CHECK(all.layers[i].name == names[i]);
    const output_statistics& seen = all.layers[i].matrices.at(0);
    // Values are wider than their inputs; the statistics are those of the narrower side.
    CHECK(seen.has_inputs() == (i == 2));
    if (i == 2) {
      check_moment(seen.input_moment(), by_hand.x);
    } else {
      check_moment(seen.output_moment(), i == 3 ? by_hand.outputs() : by_hand.project(by_hand.x, i));
    }
    check_moment(seen.gradient_moment(), by_hand.gradient(i), 0, 4.0, 1e-6);
    CHECK(seen.rows_of_sample() == doctest::Approx(2.5));
  }
}

TEST_CASE("collect_statistics: the output scale is that of the batch norm that follows") {
  const std::vector<double> ones(6, 1.0), scale{0.1, 3.0, 1.0, 20.0, 0.5, 2.0};
  cpu_context ctx;
  net_type net = normed_net(ones), scaled = normed_net(scale);
  const network_statistics seen = statistics_of(net, ctx);
  network_statistics seen_scaled = statistics_of(scaled, ctx);
  REQUIRE(seen.layers[0].name == "conv1");
  REQUIRE(seen.layers[0].output_scale.size() == 6);
  CHECK(seen.find("head")->output_scale.empty());

  // weight / deviation of the last batch.
  const tensor<double, 4> x = images({8, 4, 4, 3}, 7);
  tensor<double, 4> y({8, 4, 4, 6});
  ctx.set_mode(run_mode::inference);
  first_slot(net).forward(ctx, x.view(), y.view());
  const double norm_weights[] = {0.5, -2.0, 1.0, 3.0, 0.2, 1.5};
  for (index_t c = 0; c < 6; ++c) {
    double mean = 0.0, squares = 0.0;
    for (index_t n = 0; n < 128; ++n) mean += y.data()[6 * n + c] / 128.0;
    for (index_t n = 0; n < 128; ++n) squares += std::pow(y.data()[6 * n + c] - mean, 2);
    const auto at = static_cast<std::size_t>(c);
    CHECK(seen.layers[0].output_scale[at] == doctest::Approx(norm_weights[at] / std::sqrt(squares / 127.0)));
    CHECK(seen_scaled.layers[0].output_scale[at] ==
          doctest::Approx(seen.layers[0].output_scale[at] / scale[at]));
  }

  // The batch norm undoes a scale of the outputs, so that the scale does not change which errors count.
  factorize_policy policy = everything();
  policy.rank = fixed_rank{2};
  policy.truncate = truncation::data_aware;
  const auto error = [&](const network_statistics& of_scaled) {
    net_type a = net, b = scaled;
    factorize(a, policy, &seen);
    factorize(b, policy, &of_scaled);
    merge(a);
    merge(b);
    double sum = 0.0, all = 0.0;
    const auto weight = [](const net_type& of) { return first_slot(of).target<Conv<double>>()->weight(); };
    for (index_t o = 0; o < 6; ++o) {
      for (index_t i = 0; i < 27; ++i) {
        const double expected = weight(a)(o, i / 9, i / 3 % 3, i % 3);
        const double value = weight(b)(o, i / 9, i / 3 % 3, i % 3) / scale[static_cast<std::size_t>(o)];
        sum += std::pow(value - expected, 2);
        all += expected * expected;
      }
    }
    return std::sqrt(sum / all);
  };
  CHECK(error(seen_scaled) < 1e-3);
  seen_scaled.layers[0].output_scale.clear();
  CHECK(error(seen_scaled) > 0.1);
}
