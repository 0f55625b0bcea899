// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/layers/low_rank_norm_conv.hpp>

#include "../../support/gradient_check.hpp"

namespace {

using namespace test;

/// With visit(), as the shared checks want it.
template <class T>
struct visited : LowRankNormConv<T> {
  using LowRankNormConv<T>::LowRankNormConv;
  template <class F>
  void visit(F&& f) {
    struct visitor final : state_visitor<T> {
      explicit visitor(F& g) : call(g) {}
      void on_parameter(const std::string& name, parameter<T>& p) override { call(name.c_str(), p); }
      void on_buffer(const std::string& name, state_buffer<T>& b) override { call(name.c_str(), b); }
      F& call;
    } v(f);
    this->visit_state(v, {});
  }
};

TEST_CASE("LowRankNormConv: gradient, contract, threads") {
  const conv_shape shape = conv_shape::square(3, 4, 3, 2, 1);
  CHECK(gradient_error(visited<double>(shape, 2), {2, 5, 4, 3}) < gradient_tolerance);
  CHECK(gradient_error(visited<double>(conv_shape::square(5, 3, 1), 3), {2, 3, 3, 5}) < gradient_tolerance);
  CHECK(gradient_error(visited<double>(conv_shape::square(1, 1, 1), 1), {3, 1, 1, 1}) < gradient_tolerance);
  CHECK(gradient_error(visited<double>(conv_shape{4, 6, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 2}, 2),
                       {2, 5, 4, 4}) < gradient_tolerance);
  check_contract(visited<double>(shape, 2), {2, 5, 4, 3});
  check_contract(visited<float>(shape, 2), {0, 5, 4, 3});
  check_threads(visited<float>(conv_shape::square(9, 20, 3, 1, 1), 5), {5, 9, 8, 9});
}

TEST_CASE("LowRankNormConv: is its three layers; names, shapes, errors") {
  const conv_shape shape = conv_shape::square(3, 6, 3, 2, 1);
  visited<float> layer(shape, 2);
  layer.initialize({1, 2});
  std::vector<std::string> names;
  index_t parameters = 0;
  layer.visit([&](const char* name, auto& thing) {
    names.emplace_back(name);
    if constexpr (std::is_same_v<std::decay_t<decltype(thing)>, parameter<float>>) parameters += thing.size();
  });
  CHECK(names == std::vector<std::string>{"down.weight", "bn.weight", "bn.bias", "bn.running_mean",
                                          "bn.running_var", "bn.num_batches_tracked", "up.weight"});
  CHECK(parameters == 2 * 27 + 4 + 6 * 2);
  CHECK(layer.output_shape({5, 9, 8, 3}) == extents<4>{5, 5, 4, 6});
  CHECK(layer.macs({5, 9, 8, 3}) == 5 * 5 * 4 * 2 * (27 + 6));
  CHECK(layer.describe() ==
        "LowRankNormConv rank 2, convolution 3 -> 6, kernel 3x3, stride 2x2, padding 1x1, dilation 1x1");

  // In inference with statistics of nothing seen it is the low-rank convolution of the same factors, but for
  // 1 / sqrt(1 + eps).
  LowRankConv<float> plain(shape, 2);
  plain.visit([&](const std::string& name, auto& to) {
    layer.visit([&](const std::string& from_name, auto& from) {
      if (from_name == name) std::copy_n(from.data(), from.size(), to.data());
    });
  });
  cpu_context ctx;
  tensor<float, 4> x({2, 5, 4, 3}), y(layer.output_shape(x.shape())), z(y.shape());
  fill_normal<float>(x.flat(), 1.0, {3, 1});
  layer.forward(ctx, x.view(), y.view());
  plain.forward(ctx, x.view(), z.view());
  CHECK(largest_error(y, z) < 1e-5);

  CHECK_THROWS_AS(LowRankNormConv<float>(shape, 7), rank_error);
  CHECK_THROWS_AS(LowRankNormConv<float>(shape, 0), rank_error);
  CHECK_THROWS_AS(LowRankNormConv<float>(conv_shape::square(0, 6, 3), 1), shape_error);
  CHECK(contains(error_text([&] { layer.output_shape({2, 5, 4, 4}); }), "[2 x 5 x 4 x 4]"));
}

TEST_CASE("LowRankNormConv: factorize leaves its convolutions alone") {
  Sequential<float> layers;
  layers.add("first", Conv<float>(conv_shape::square(3, 8, 3)));
  layers.add("middle", LowRankNormConv<float>(conv_shape::square(8, 16, 3), 8));
  layers.add("last", Conv<float>(conv_shape::square(16, 8, 1)));
  const network<float> net{any_layer<float>(std::move(layers))};
  factorize_policy policy;
  policy.first_layer = 1;
  policy.last_layer_dense = false;
  std::vector<std::string> names;
  for (const layer_rank& layer : planned_ranks(net, policy)) names.push_back(layer.name);
  CHECK(names == std::vector<std::string>{"first", "last"});
}

}  // namespace
