// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <map>

#include <pufferfish/nn.hpp>

#include "../support/gradient_check.hpp"

namespace {

using namespace test;

/// Dense, low-rank and normalised factors, each followed by a batch norm; dropout between them.
template <class T>
Sequential<T> layers() {
  Sequential<T> all;
  all.add("conv1", Conv<T>(conv_shape::square(3, 6, 3, 1, 1)));
  all.add("bn1", BatchNorm<T>(6));
  all.add("relu1", ReLU<T>());
  all.add("drop", Dropout<T>(0.3));
  all.add("conv2", LowRankConv<T>(conv_shape::square(6, 8, 3, 2, 1), 3));
  all.add("bn2", BatchNorm<T>(8, 1e-3, 0.25));
  all.add("conv3", LowRankNormConv<T>(conv_shape::square(8, 10, 3, 1, 1), 4));
  all.add("bn3", BatchNorm<T>(10));
  return all;
}

template <class T>
network<T> example() {
  network<T> net{any_layer<T>(layers<T>())};
  net.initialize(3);
  return net;
}

template <class T>
tensor<T, 4> batch(index_t k) {
  tensor<T, 4> x({4 + k % 2, 7, 6, 3});
  fill_normal<T>(x.flat(), 1.0 + 0.1 * static_cast<double>(k), {8, static_cast<std::uint64_t>(k)});
  for (T& value : x.flat()) value += static_cast<T>(2 * k);
  return x;
}

template <class T>
std::vector<double> buffers_of(const network<T>& net, const std::string& name) {
  for (const auto& entry : net.store().buffer_entries()) {
    if (entry.name == name) return {entry.thing->values().begin(), entry.thing->values().end()};
  }
  return {};
}

/// Adds mean and unbiased variance of each channel, formed in double, to `sums`.
template <class T>
void add_moments(const tensor<T, 4>& x, std::vector<double>& means, std::vector<double>& variances) {
  const index_t channels = x.extent(3), count = x.size() / channels;
  means.resize(static_cast<std::size_t>(channels));
  variances.resize(means.size());
  for (index_t c = 0; c < channels; ++c) {
    double mean = 0.0, squares = 0.0;
    for (index_t i = 0; i < count; ++i)
      mean += static_cast<double>(x.flat()[static_cast<std::size_t>(i * channels + c)]);
    mean /= static_cast<double>(count);
    for (index_t i = 0; i < count; ++i) {
      const double d = static_cast<double>(x.flat()[static_cast<std::size_t>(i * channels + c)]) - mean;
      squares += d * d;
    }
    means[static_cast<std::size_t>(c)] += mean;
    variances[static_cast<std::size_t>(c)] += squares / static_cast<double>(count - 1);
  }
}

/// The layers of `of` before layer `end`, and after them the first convolution of that layer if the layer is
/// a convolution with a batch norm inside.
template <class T>
network<T> part_before(const network<T>& of, std::size_t end, bool inside) {
  network<T> copy = of;
  Sequential<T> all = *copy.root().template target<Sequential<T>>(), part;
  for (std::size_t i = 0; i < end; ++i) part.add(all.name(i), all[i]);
  if (inside) part.add("down", (*all[end].template target<LowRankNormConv<T>>())[0]);
  return network<T>{any_layer<T>(std::move(part))};
}

template <class T>
double largest_difference(const std::vector<double>& got, const std::vector<double>& expected) {
  REQUIRE(got.size() == expected.size());
  double worst = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i)
    worst = std::max(worst, std::abs(got[i] - expected[i]) / (1.0 + std::abs(expected[i])));
  return worst;
}

TEST_CASE_TEMPLATE("norm estimation: the mean over passes of mean and unbiased variance of every batch norm",
                   T, float, double) {
  const double tolerance = sizeof(T) == 4 ? 1e-5 : 1e-12;
  const network<T> before = example<T>();
  struct norm {
    std::string name;
    std::size_t layer;
    bool inside;
  };
  for (const index_t passes : {1, 2, 5}) {
    network<T> net = before;
    cpu_context ctx({2, 7});
    ctx.begin_step(40);
    tensor<T, 4> first = batch<T>(0), y(net.output_shape(first.shape()));
    const index_t done = estimate_norms(ctx, net, passes, [&](index_t k) {
      ctx.begin_step(100 + static_cast<std::uint64_t>(k));
      const tensor<T, 4> x = batch<T>(k);
      y = tensor<T, 4>(net.output_shape(x.shape()));
      net.forward(ctx, x, y.view());
    });
    CHECK(done == passes);
    for (const norm& at :
         {norm{"bn1", 1, false}, norm{"bn2", 5, false}, norm{"conv3.bn", 6, true}, norm{"bn3", 7, false}}) {
      CAPTURE(at.name);
      const network<T> part = part_before(before, at.layer, at.inside);
      std::vector<double> means, variances;
      for (index_t k = 0; k < passes; ++k) {
        cpu_context own({1, 7});
        own.set_mode(run_mode::training);
        own.begin_step(100 + static_cast<std::uint64_t>(k));
        add_moments(part.forward(own, batch<T>(k)), means, variances);
      }
      for (double& value : means) value /= static_cast<double>(passes);
      for (double& value : variances) value /= static_cast<double>(passes);
      CHECK(largest_difference<T>(buffers_of(net, at.name + ".running_mean"), means) < tolerance);
      CHECK(largest_difference<T>(buffers_of(net, at.name + ".running_var"), variances) < tolerance);
      CHECK(buffers_of(net, at.name + ".num_batches_tracked") ==
            std::vector<double>{static_cast<double>(passes)});
    }
    // Whatever the statistics were before.
    network<T> other = before;
    for (T& value : other.store().buffers()) value = T{17};
    estimate_norms(ctx, other, passes, [&](index_t k) {
      ctx.begin_step(100 + static_cast<std::uint64_t>(k));
      const tensor<T, 4> x = batch<T>(k);
      other.forward(ctx, x);
    });
    CHECK(buffers_of(other, "conv3.bn.running_var") == buffers_of(net, "conv3.bn.running_var"));
    CHECK(buffers_of(other, "bn3.running_mean") == buffers_of(net, "bn3.running_mean"));
  }
}

TEST_CASE("norm estimation: everything else stays as it was") {
  network<float> net = example<float>();
  cpu_context ctx({1, 7});
  ctx.set_norm_momentum(0.75);
  ctx.begin_step(9, 12);
  ctx.next_random_stream();
  const tensor<float, 4> x = batch<float>(0);
  tensor<float, 4> y(net.output_shape(x.shape()));
  fill_normal<float>(net.store().gradients(), 1.0, {1, 1});
  const std::vector<float> values(net.store().values().begin(), net.store().values().end());
  const std::vector<float> gradients(net.store().gradients().begin(), net.store().gradients().end());
  const std::uint64_t generation = net.generation();
  const random_place place = ctx.random_place();
  {
    norm_estimation estimation(ctx);
    CHECK(ctx.training());
    for (int k = 0; k < 3; ++k) estimation.pass([&] { net.forward(ctx, x, y.view()); });
    CHECK(ctx.random_place().streams_used == place.streams_used + 3);  // one dropout layer
    CHECK(estimation.passes() == 3);
  }
  CHECK(ctx.mode() == run_mode::inference);
  CHECK(ctx.norm_momentum() == std::optional<double>(0.75));
  CHECK(ctx.random_place() == place);
  CHECK(place == random_place{9, 12, 1});
  CHECK(ctx.tape().empty());
  CHECK(net.generation() == generation);
  CHECK(std::equal(values.begin(), values.end(), net.store().values().begin()));
  CHECK(std::equal(gradients.begin(), gradients.end(), net.store().gradients().begin()));

  // Also after an exception.
  CHECK_THROWS_AS(estimate_norms(ctx, net, 2,
                                 [&](index_t) {
                                   net.forward(ctx, x, y.view());
                                   PUFFERFISH_THROW(state_error("stop"));
                                 }),
                  state_error);
  CHECK(ctx.mode() == run_mode::inference);
  CHECK(ctx.norm_momentum() == std::optional<double>(0.75));
  CHECK(ctx.random_place() == place);
  CHECK(ctx.tape().empty());
}

TEST_CASE("norm estimation: passes without samples do not count") {
  network<double> net = example<double>(), expected = net;
  cpu_context ctx;
  const auto run = [&](network<double>& of, bool with_empty) {
    norm_estimation estimation(ctx);
    for (index_t k = 0; k < 6; ++k) {
      if (k % 2 == 0 && with_empty) estimation.pass([] { return false; });
      if (k % 2 == 1) estimation.pass([&] { return of.forward(ctx, batch<double>(k)).size() > 0; });
    }
    return estimation.passes();
  };
  CHECK(run(net, true) == 3);
  CHECK(run(expected, false) == 3);
  CHECK(std::equal(net.store().buffers().begin(), net.store().buffers().end(),
                   expected.store().buffers().begin()));
}

TEST_CASE("norm estimation: a model without batch norms, and misuse") {
  Sequential<float> plain;
  plain.add("fc", Linear<float>(4, 3));
  network<float> net{any_layer<float>(std::move(plain))};
  CHECK_FALSE(has_batch_norm(net));
  CHECK(has_batch_norm(example<float>()));
  network<float> single{any_layer<float>(BatchNorm<float>(2))};
  CHECK(has_batch_norm(single));
  cpu_context ctx;
  int calls = 0;
  CHECK(estimate_norms(ctx, net, 4, [&](index_t) { ++calls; }) == 0);
  CHECK(calls == 0);
  CHECK(contains(error_text([&] { estimate_norms(ctx, net, 0, [](index_t) {}); }), "0 passes"));

  // A forward pass whose backward pass is still to come.
  ctx.set_mode(run_mode::training);
  network<float> waiting = example<float>();
  waiting.forward(ctx, batch<float>(0));
  CHECK(contains(error_text([&] { norm_estimation estimation(ctx); }), "backward pass"));
  CHECK_FALSE(ctx.tape().empty());
  CHECK(ctx.training());

  CHECK_THROWS_AS(ctx.set_norm_momentum(1.5), value_error);
  CHECK_THROWS_AS(ctx.set_norm_momentum(-0.1), value_error);
}

}  // namespace
