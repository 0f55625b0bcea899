// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <cmath>
#include <string>
#include <vector>

#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/nn.hpp>
#include <pufferfish/train/checkpoint.hpp>

#include "../../support/gradient_check.hpp"
#include "../../support/scratch_folder.hpp"

namespace {

using namespace test;

/// Convolutions with a stride, without padding, in groups, with a bias, of one pixel, on a shortcut, and a
/// linear layer.
template <class T>
network<T> dense_net(std::uint64_t seed) {
  conv_shape grouped = conv_shape::square(8, 12, 3, 1, 1);
  grouped.groups = 2;
  Sequential<T> layers;
  layers.add("conv1", Conv<T>(conv_shape::square(3, 8, 3, 2, 1)));
  layers.add("bn1", BatchNorm<T>(8));
  layers.add("relu1", ReLU<T>());
  layers.add("grouped", Conv<T>(grouped, true));
  layers.add("valid", Conv<T>(conv_shape::square(12, 6, 2, 1, 0)));
  Sequential<T> branch, shortcut;
  branch.add("conv", Conv<T>(conv_shape::square(6, 7, 3, 1, 1)));
  branch.add("bn", BatchNorm<T>(7));
  shortcut.add("conv", Conv<T>(conv_shape::square(6, 7, 1)));
  layers.add("block", Residual<T>(std::move(branch), std::move(shortcut), true));
  layers.add("pool", GlobalAvgPool<T>());
  layers.add("fc", Linear<T>(7, 5));
  network<T> net{any_layer<T>(std::move(layers))};
  net.initialize(seed);
  return net;
}

factorize_policy all_layers() {
  factorize_policy policy;
  policy.first_layer = 1;
  policy.last_layer_dense = policy.shortcuts_dense = policy.keep_dense_if_larger = false;
  policy.rank = fixed_rank{2};
  return policy;
}

const std::vector<layer_rank> everything{
    {"conv1", 2}, {"grouped", 2}, {"valid", 2}, {"block.conv", 2}, {"block.shortcut.conv", 2}, {"fc", 2}};

template <class T>
tensor<T, 4> batch(index_t n = 3) {
  tensor<T, 4> x({n, 9, 8, 3});
  fill_normal<T>(x.flat(), 1.0, {8, 1});
  return x;
}

template <class T>
double largest(const tensor<T, 4>& a, const tensor<T, 4>& b) {
  double most = 0.0;
  for (std::size_t i = 0; i < a.flat().size(); ++i) {
    most = std::max(most, std::abs(static_cast<double>(a.flat()[i]) - static_cast<double>(b.flat()[i])));
  }
  return most;
}

TEST_CASE_TEMPLATE(
    "residuals: share 1 is the dense network, share 0 the factors, detaching leaves the factors", T, float,
    double) {
  const network<T> dense = dense_net<T>(3);
  network<T> low = dense;
  factorize(low, all_layers());
  network<T> net = low;
  const std::uint64_t generation = net.generation();
  CHECK(attach_residuals(net, dense) == everything);
  CHECK(annealed_layers(net) == everything);
  CHECK(low_rank_layers(net) == low_rank_layers(low));
  CHECK(net.parameter_count() == low.parameter_count());
  CHECK(parameter_digest(net) == parameter_digest(low));
  CHECK(net.generation() > generation);

  const double exact = sizeof(T) == 4 ? 2e-5 : 1e-13;
  for (const int threads : {1, 3}) {
    cpu_context ctx({threads, 1});
    const tensor<T, 4> x = batch<T>(), of_dense = dense.forward(ctx, x), of_low = low.forward(ctx, x);
    set_residual_share(net, 1.0);
    CHECK(largest(net.forward(ctx, x), of_dense) < exact);
    CHECK(largest(net.forward(ctx, x), of_low) > 1e-2);  // the truncation drops much
    set_residual_share(net, 0.0);
    CHECK(largest(net.forward(ctx, x), of_low) < exact);
  }
  const extents<4> shape{1, 9, 8, 3};
  CHECK(net.root().macs(shape) == low.root().macs(shape));
  set_residual_share(net, 0.5);
  CHECK(net.root().macs(shape) == low.root().macs(shape) + dense.root().macs(shape));

  detach_residuals(net);
  CHECK(annealed_layers(net).empty());
  CHECK(net.structure() == low.structure());
  CHECK(parameter_digest(net) == parameter_digest(low));
}

TEST_CASE("residuals: gradients of inputs and factors against finite differences; none of the residual") {
  const network<double> dense = dense_net<double>(4);
  network<double> net = dense;
  factorize(net, all_layers());
  attach_residuals(net, dense);
  set_residual_share(net, 0.37);
  tensor<double, 4> x = batch<double>(2);
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  tensor<double, 4> y(net.output_shape(x.shape())), dy(y.shape()), dx(x.shape());
  fill_normal<double>(dy.flat(), 1.0, {4, 4});
  const auto objective = [&] {
    ctx.begin_step(1);
    net.forward(ctx, x, y.view());
    double sum = 0.0;
    for (std::size_t i = 0; i < y.flat().size(); ++i) sum += y.flat()[i] * dy.flat()[i];
    ctx.tape().clear();
    return sum;
  };
  ctx.begin_step(1);
  net.forward(ctx, x, y.view());
  net.root().backward(ctx, dy, dx.view());
  index_t checked = 0;
  for (std::size_t i = 0; i < x.flat().size(); i += 17) {
    CHECK(dx.flat()[i] == doctest::Approx(slope_at(x.flat()[i], objective)).epsilon(1e-4).scale(1.0));
    ++checked;
  }
  for (const auto& entry : net.store().parameters()) {
    CAPTURE(entry.name);
    const std::vector<double> gradient(entry.thing->gradient().begin(), entry.thing->gradient().end());
    for (std::size_t i = 0; i < gradient.size(); i += 5) {
      const double slope = slope_at(entry.thing->values()[i], objective);
      CHECK(gradient[i] == doctest::Approx(slope).epsilon(1e-4).scale(1.0));
      ++checked;
    }
  }
  CHECK(checked > 60);
  for (const auto& entry : net.store().parameters()) {
    CHECK(entry.name.find("residual") == std::string::npos);  // frozen: no parameter, no gradient
  }
}

TEST_CASE("residuals: recurrent layers and embeddings have none") {
  lstm_lm_options options;
  options.vocabulary = 30;
  options.width = 12;
  options.layers = 2;
  auto net = make_lstm_lm<float>(options);
  net.initialize(1);
  const auto dense = net;
  factorize_policy policy = all_layers();
  policy.embeddings_dense = false;
  factorize(net, policy);
  REQUIRE(low_rank_layers(net).size() > 2);
  for (const layer_rank& layer : attach_residuals(net, dense)) CHECK(layer.ranks.size() == 1);
  for (const layer_rank& layer : annealed_layers(net)) {
    CHECK(layer.name.find("rnn") == std::string::npos);
    CHECK(layer.name.find("encoder") == std::string::npos);
  }
}

TEST_CASE("residuals: files have them and their share; other networks are brought to the file's structure") {
  const scratch_folder folder;
  const network<float> dense = dense_net<float>(3);
  network<float> net = dense;
  factorize(net, all_layers());
  const network<float> low = net;
  attach_residuals(net, dense);
  set_residual_share(net, 0.25);
  save_checkpoint(folder / "annealed", net);
  save_checkpoint(folder / "low", low);
  cpu_context ctx;
  const tensor<float, 4> x = batch<float>();
  for (const bool from_dense : {true, false}) {
    network<float> loaded = from_dense ? dense_net<float>(9) : low;
    open_checkpoint(folder / "annealed").restore(loaded);
    CHECK(annealed_layers(loaded) == everything);
    CHECK(largest(loaded.forward(ctx, x), net.forward(ctx, x)) == 0.0);
    open_checkpoint(folder / "low").restore(loaded);
    CHECK(annealed_layers(loaded).empty());
    CHECK(largest(loaded.forward(ctx, x), low.forward(ctx, x)) == 0.0);
  }
}

TEST_CASE("residuals: what does not fit is refused, and nothing has changed") {
  const network<float> dense = dense_net<float>(3);
  network<float> net = dense;
  const auto refuse = [&](const std::vector<layer_rank>& layers, const char* says) {
    CAPTURE(says);
    const std::string before = net.structure();
    CHECK_THROWS_WITH_AS(apply_residuals(net, layers), doctest::Contains(says), state_error);
    CHECK(net.structure() == before);
  };
  refuse({{"conv1", 2}}, "conv1 is no low-rank layer of these ranks");
  refuse({{"conv7", 2}}, "conv7 is no low-rank layer of the network");
  factorize(net, all_layers());
  refuse({{"conv1", 3}}, "conv1 is no low-rank layer of these ranks");
  apply_residuals(net, {{"conv1", 2}});
  CHECK(annealed_layers(net) == std::vector<layer_rank>{{"conv1", 2}});
  CHECK_THROWS_WITH_AS(fold_batch_norm(net), doctest::Contains("conv1 has a residual"), state_error);
  apply_residuals(net, {{"fc", 2}});  // others lose theirs
  CHECK(annealed_layers(net) == std::vector<layer_rank>{{"fc", 2}});
}

TEST_CASE("residuals: a dense network of other layers is refused, and nothing has changed") {
  network<float> net = dense_net<float>(3);
  factorize(net, all_layers());
  const std::string before = net.structure();
  Sequential<float> one, renamed;
  one.add("conv1", Conv<float>(conv_shape::square(3, 8, 3, 2, 1)));
  for (const char* name : {"conv1", "grouped", "valid", "block.conv", "shortcut", "fc"}) {
    renamed.add(name, Linear<float>(3, 3));
  }
  CHECK_THROWS_WITH_AS(attach_residuals(net, network<float>{any_layer<float>(one)}),
                       doctest::Contains("the network has 6 layers with weights, the dense network 1"),
                       shape_error);
  CHECK_THROWS_WITH_AS(
      attach_residuals(net, network<float>{any_layer<float>(renamed)}),
      doctest::Contains("layer 4 is block.shortcut.conv in the network and shortcut in the dense network"),
      shape_error);
  CHECK(net.structure() == before);
}

TEST_CASE("residuals: a dense network with layers of other sizes is refused, and nothing has changed") {
  const auto linear = [](index_t in, index_t out) {
    Sequential<float> layers;
    layers.add("fc", Linear<float>(in, out));
    network<float> net{any_layer<float>(std::move(layers))};
    net.initialize(1);
    return net;
  };
  network<float> net = linear(16, 12);
  factorize(net, all_layers());
  const std::string before = net.structure();
  // As many elements, and more.
  CHECK_THROWS_WITH_AS(attach_residuals(net, linear(12, 16)),
                       doctest::Contains("fc is [12 x 16 x 1 x 1] in the network and [16 x 12 x 1 x 1]"),
                       shape_error);
  CHECK_THROWS_AS(attach_residuals(net, linear(20, 12)), shape_error);
  CHECK(net.structure() == before);
  CHECK(attach_residuals(net, linear(16, 12)).size() == 1);
}

TEST_CASE("residuals: the share falls from 1 to 0 by a cosine") {
  CHECK(residual_share(0, 8) == 1.0);
  CHECK(residual_share(-1, 8) == 1.0);
  CHECK(residual_share(4, 8) == doctest::Approx(0.5));
  CHECK(residual_share(2, 8) == doctest::Approx(0.5 + std::sqrt(0.125)));
  CHECK(residual_share(8, 8) == 0.0);
  CHECK(residual_share(9, 8) == 0.0);
  CHECK_THROWS_WITH_AS(residual_share(0, 0), doctest::Contains("after 0 of 0 steps"), value_error);
  CHECK_THROWS_AS(residual_share(std::nan(""), 8), value_error);
  CHECK_THROWS_AS(residual_share(1, std::nan("")), value_error);
}

TEST_CASE("residuals: a share outside of 0 .. 1 is refused, and no share has changed") {
  const network<float> dense = dense_net<float>(3);
  network<float> net = dense;
  factorize(net, all_layers());
  for (const double share : {-0.1, 1.1, std::nan("")}) {
    CHECK_THROWS_WITH_AS(set_residual_share(net, share), doctest::Contains("is not in 0 .. 1"), value_error);
  }
  attach_residuals(net, dense);
  set_residual_share(net, 0.25);
  CHECK_THROWS_AS(set_residual_share(net, 5.0), value_error);
  for (const auto& place : detail::find_annealed(net)) CHECK(place.layer->share() == 0.25);
}

}  // namespace
