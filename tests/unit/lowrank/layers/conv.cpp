// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <functional>

#include <pufferfish/lowrank/layers/conv.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

/// The convolution of to_dense(), by the reference, in double.
template <class T>
tensor<T, 4> dense_reference(const LowRankConv<T>& layer, const tensor<T, 4>& x) {
  const tensor<T, 4> y(layer.output_shape(x.shape()));
  tensor<double, 4> y2(y.shape());
  const tensor<double, 4> x2(x.view()), weight(layer.to_dense().view());
  tensor<double, 1> bias({layer.shape().out_channels});
  if (layer.has_bias()) copy(layer.bias(), bias.view());
  ops::reference::conv_forward<double>(layer.shape(), x2, weight, bias.data(), y2);
  tensor<T, 4> result(y.shape());
  copy(y2.view(), result.view());
  return result;
}

TEST_CASE_TEMPLATE("LowRankConv: output against the reference convolutions, over random shapes", T, float,
                   double) {
  const double tolerance = sizeof(T) == 4 ? 2e-5 : 1e-12;
  cpu_context ctx({2, 0});
  picker pick(1);
  int done = 0;
  for (std::uint64_t round = 0; round < 240; ++round) {
    const index_t groups = round % 2 == 0 ? 1 : pick(1, 5);
    const conv_shape shape{groups * pick(1, groups == 1 ? 12 : 5),
                           groups * pick(1, groups == 1 ? 24 : 6),
                           {pick(1, 4), pick(1, 4)},
                           {pick(1, 3), pick(1, 3)},
                           {pick(0, 3), pick(0, 3)},
                           {pick(1, 2), pick(1, 2)},
                           groups};
    CAPTURE(shape.describe());
    const extents<4> input{pick(0, 3), pick(1, 9), pick(1, 9), shape.in_channels};
    LowRankConv<T> layer(shape, pick(1, std::min(shape.patch(), shape.group_outputs())), round % 4 < 2);
    try {
      layer.output_shape(input);
    } catch (const shape_error&) {
      continue;
    }
    ++done;
    layer.initialize({1, round});
    tensor<T, 4> x(input);
    fill_normal<T>(x.flat(), 1.0, {2, round});
    const tensor<T, 4> y = layer.forward(ctx, x);

    conv_shape down = shape;
    down.out_channels = groups * layer.rank();
    conv_shape up = conv_shape::square(down.out_channels, shape.out_channels, 1);
    up.groups = groups;
    tensor<T, 4> t(down.output(input, "down")), expected(y.shape());
    ops::reference::conv_forward<T>(down, x, std::as_const(layer).down(), nullptr, t);
    ops::reference::conv_forward<T>(up, t, std::as_const(layer).up(), layer.bias().data(), expected);
    CHECK(largest_error(y, expected) < tolerance);
    CHECK(largest_error(y, dense_reference(layer, x)) < tolerance);
  }
  CHECK(done > 120);
}

TEST_CASE("LowRankConv: factor views write through to the kernels' storage; names, sizes") {
  LowRankConv<float> layer(conv_shape{2, 5, {3, 4}}, 3, true);
  CHECK(layer.down().shape() == extents<4>{3, 2, 3, 4});
  CHECK(layer.up().shape() == extents<4>{5, 3, 1, 1});
  layer.down()(2, 1, 0, 3) = 2.0F;
  layer.up()(4, 2, 0, 0) = 3.0F;
  const tensor<float, 4> dense = layer.to_dense();
  REQUIRE(dense.shape() == extents<4>{5, 2, 3, 4});
  for (index_t o = 0; o < 5; ++o) {
    for (index_t i = 0; i < 2; ++i) {
      for (index_t ky = 0; ky < 3; ++ky) {
        for (index_t kx = 0; kx < 4; ++kx) {
          CHECK(dense(o, i, ky, kx) == (o == 4 && i == 1 && ky == 0 && kx == 3 ? 6.0F : 0.0F));
        }
      }
    }
  }
  std::vector<std::string> names;
  layer.visit([&](const char* name, auto& p) { names.push_back(name + (" " + to_string(p.layout()))); });
  CHECK(names ==
        std::vector<std::string>{"down.weight [3 x 2 x 3 x 4]", "up.weight [5 x 3 x 1 x 1]", "up.bias [5]"});
  LowRankConv<float> plain(conv_shape::square(2, 5, 3), 3);
  CHECK(plain.bias().is_null());
  CHECK(parameters_of(plain).size() == 2);
  CHECK(plain.macs({2, 5, 4, 2}) == 2 * 3 * 2 * 3 * (18 + 5));
}

TEST_CASE("LowRankConv: groups: the factors are those of two grouped convolutions") {
  LowRankConv<float> layer(conv_shape{6, 4, {3, 2}, {1, 1}, {0, 0}, {1, 1}, 2}, 1, true);
  CHECK(layer.down().shape() == extents<4>{2, 3, 3, 2});
  CHECK(layer.up().shape() == extents<4>{4, 1, 1, 1});
  layer.down()(1, 2, 1, 1) = 2.0F;
  layer.up()(3, 0, 0, 0) = 3.0F;
  const tensor<float, 4> dense = layer.to_dense();
  REQUIRE(dense.shape() == extents<4>{4, 3, 3, 2});
  for (index_t o = 0; o < 4; ++o) {
    for (index_t i = 0; i < 3; ++i) {
      for (index_t ky = 0; ky < 3; ++ky) {
        for (index_t kx = 0; kx < 2; ++kx) {
          CHECK(dense(o, i, ky, kx) == (o == 3 && i == 2 && ky == 1 && kx == 1 ? 6.0F : 0.0F));
        }
      }
    }
  }
  CHECK(layer.macs({2, 5, 4, 6}) == 2 * 3 * 3 * 1 * (2 * 18 + 4));
  CHECK(layer.output_shape({2, 5, 4, 6}) == extents<4>{2, 3, 3, 4});
  // The rank is that of a group's matrix, 2 x 18.
  CHECK_THROWS_AS(LowRankConv<float>(layer.shape(), 3), rank_error);
  CHECK(contains(error_text([&] { LowRankConv<float>(layer.shape(), 3); }), "rank 3 of a 2 x 18 matrix"));
  CHECK_THROWS_AS(LowRankConv<float>(conv_shape{6, 4, {3, 2}, {1, 1}, {0, 0}, {1, 1}, 4}, 1), shape_error);
}

TEST_CASE("LowRankConv: groups: gradients, contract, threads, recomputed activation") {
  const auto grouped = [](index_t in, index_t out, index_t groups, index_t stride) {
    return conv_shape{in, out, {3, 3}, {stride, stride}, {1, 1}, {1, 1}, groups};
  };
  const extents<4> input{2, 5, 4, 6};
  const auto error = [&](const conv_shape& shape, index_t rank, bool bias) {
    return gradient_error(LowRankConv<double>(shape, rank, bias), input);
  };
  CHECK(error(grouped(6, 8, 2, 1), 3, true) < gradient_tolerance);
  CHECK(error(grouped(6, 9, 3, 2), 2, false) < gradient_tolerance);
  CHECK(error(grouped(6, 6, 6, 1), 1, true) < gradient_tolerance);
  CHECK(error(grouped(6, 12, 6, 2), 2, true) < gradient_tolerance);
  CHECK(error({6, 8, {1, 1}, {1, 1}, {0, 0}, {1, 1}, 2}, 2, true) < gradient_tolerance);
  check_contract(LowRankConv<double>(grouped(6, 8, 2, 2), 3, true), input);
  check_contract(LowRankConv<float>(grouped(6, 8, 2, 1), 3, true), {0, 5, 4, 6});
  check_threads(LowRankConv<float>(grouped(18, 36, 3, 1), 8, true), {4, 21, 19, 18});

  LowRankConv<float> layer(grouped(6, 8, 2, 1), 3, true), again(grouped(6, 8, 2, 1), 3, true);
  layer.initialize(random_stream{1, 0});
  again.initialize(random_stream{1, 0});
  again.set_recompute(true);
  CHECK(results_of_step(layer, input, 1) == results_of_step(again, input, 1));

  // The moments of the output, with and without a place for the activation between the factors.
  const extents<4> images{3, 40, 41, 6};
  tensor<float, 4> x(images), y(layer.output_shape(images));
  fill_normal<float>(x.flat(), 1.0, {1, 1});
  for (const run_mode mode : {run_mode::training, run_mode::inference}) {
    cpu_context ctx({2, 0});
    ctx.set_mode(mode);
    scratch_frame frame(ctx.scratch());
    ops::moment_parts<float> moments(frame);
    layer.forward_with_epilogue(ctx, x, y.view(), &moments);
    std::vector<double> mean(8), variance(8), sum(8);
    CHECK(moments.merge(mean.data(), variance.data()) == 3 * 40 * 41);
    for (index_t i = 0; i < y.size(); ++i) sum[static_cast<std::size_t>(i % 8)] += double{y.data()[i]};
    for (std::size_t c = 0; c < 8; ++c) CHECK(mean[c] == doctest::Approx(sum[c] / (3 * 40 * 41)));
  }
}

TEST_CASE("LowRankConv: gradients") {
  const extents<4> input{2, 5, 4, 3};
  const auto error = [&](const conv_shape& shape, index_t rank, bool bias) {
    return gradient_error(LowRankConv<double>(shape, rank, bias), input);
  };
  CHECK(error(conv_shape::square(3, 4, 3, 1, 1), 2, false) < gradient_tolerance);
  CHECK(error(conv_shape::square(3, 4, 3, 2, 1), 3, true) < gradient_tolerance);
  CHECK(error(conv_shape::square(3, 4, 1), 1, true) < gradient_tolerance);
  CHECK(error(conv_shape::square(3, 4, 1, 2), 2, false) < gradient_tolerance);
  CHECK(error({3, 2, {2, 3}, {1, 2}, {1, 2}, {2, 1}}, 2, true) < gradient_tolerance);
  CHECK(error({3, 5, {4, 1}, {1, 1}, {0, 0}, {1, 1}}, 5, false) < gradient_tolerance);
  CHECK(gradient_error(LowRankConv<double, 2>(conv_shape::square(3, 4, 3, 1, 1)), input) <
        gradient_tolerance);
}

TEST_CASE("LowRankConv: recomputing the activation gives the same bits; backward_add adds") {
  const conv_shape shape = conv_shape::square(9, 20, 3, 1, 1);
  const extents<4> input{5, 6, 7, 9};
  LowRankConv<float> layer(shape, 6, true), again(shape, 6, true);
  layer.initialize(random_stream{1, 0});
  again.initialize(random_stream{1, 0});
  again.set_recompute(true);
  const auto kept = results_of_step(layer, input, 1), recomputed = results_of_step(again, input, 1);
  CHECK(kept == recomputed);

  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  tensor<float, 4> x(input), y({5, 6, 7, 20}), dy(y.shape()), dx(input), sum(input);
  fill_normal<float>(x.flat(), 1.0, {1, 1});
  fill_normal<float>(dy.flat(), 1.0, {2, 1});
  layer.forward(ctx, x, y);
  layer.backward(ctx, dy, dx);
  for (float& value : sum.flat()) value = 2.0F;
  layer.forward(ctx, x, y);
  layer.backward_add(ctx, dy, sum);
  for (index_t i = 0; i < dx.size(); ++i) dx.data()[i] += 2.0F;
  CHECK(largest_error(sum, dx) < 1e-5);
}

TEST_CASE("LowRankConv: contract, threads") {
  const LowRankConv<double> layer(conv_shape::square(3, 6, 3, 2, 1), 3, true);
  check_contract(layer, {2, 5, 7, 3});
  check_contract(LowRankConv<float>(conv_shape::square(3, 6, 3, 1, 1), 3, true), {0, 5, 7, 3});
  check_threads(LowRankConv<float>(conv_shape::square(17, 33, 3, 1, 1), 16, true), {4, 21, 19, 17});
  check_threads(LowRankConv<float>(conv_shape::square(17, 33, 3, 2, 1), 16), {4, 21, 19, 17});
}

TEST_CASE("LowRankConv: a batch of zero images gives gradients of zero") {
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  LowRankConv<float> layer(conv_shape::square(3, 6, 3, 1, 1), 3, true);
  for (auto* p : parameters_of(layer)) std::fill_n(p->gradient_data(), p->size(), 9.0F);
  tensor<float, 4> x({0, 5, 5, 3}), y({0, 5, 5, 6}), dx(x.shape());
  layer.forward(ctx, x, y);
  layer.backward(ctx, y, dx);
  for (auto* p : parameters_of(layer)) {
    for (float value : p->gradient()) REQUIRE(value == 0.0F);
  }
}

TEST_CASE("LowRankConv: static and dynamic rank give the same bits") {
  const conv_shape shape = conv_shape::square(9, 33, 3, 1, 1);
  const extents<4> input{3, 17, 13, 9};
  const auto fixed = results_of_step(LowRankConv<float, 16>(shape, true), input, 2);
  const auto dynamic = results_of_step(LowRankConv<float>(shape, 16, true), input, 2);
  CHECK(fixed.size() > 3U * 17 * 13 * 33);
  CHECK(same_bits(fixed, dynamic));
}

TEST_CASE("LowRankConv: used twice in a step, both contributions arrive") {
  // y = layer(layer(x)) for a layer of equal channels, against finite differences.
  struct Twice {
    using value_type = double;
    LowRankConv<double> layer;
    extents<4> output_shape(const extents<4>& input) const { return layer.output_shape(input); }
    void forward(cpu_context& ctx, const tensor_view<const double, 4>& x,
                 const tensor_view<double, 4>& y) const {
      const auto inner = ctx.training() ? ctx.tape().push<double>(y.shape()) : tensor_view<double, 4>();
      layer.forward(ctx, x, inner);
      layer.forward(ctx, inner, y);
    }
    void backward(cpu_context& ctx, const tensor_view<const double, 4>& dy,
                  const tensor_view<double, 4>& dx) const {
      tensor<double, 4> between(dy.shape());
      layer.backward(ctx, dy, between);
      layer.backward(ctx, between, dx);
      ctx.tape().pop<double>(dy.shape());
    }
    void visit(const std::function<void(const char*, parameter<double>&)>& f) { layer.visit(f); }
  };
  Twice twice{LowRankConv<double>(conv_shape::square(3, 3, 3, 1, 1), 2, true)};
  for (auto* p : parameters_of(twice)) p->set_writers(2);
  CHECK(gradient_error(twice, {2, 4, 4, 3}) < gradient_tolerance);
}

TEST_CASE("low-rank convolution operations: groups are refused, no outputs give gradients of zero") {
  cpu_context ctx;
  conv_shape shape = conv_shape::square(4, 4, 3, 1, 1);
  shape.groups = 2;
  tensor<float, 4> x({1, 5, 5, 4}), t({1, 5, 5, 4}), y({1, 5, 5, 6});
  tensor<float, 2> up({4, 6});
  const std::vector<float> down(static_cast<std::size_t>(shape.patch() * shape.out_channels));
  const std::string text = error_text([&] {
    ops::low_rank_conv_forward<float>(ctx, shape, x, down.data(), up, static_cast<const float*>(nullptr), t,
                                      y);
  });
  CHECK(contains(text, "low_rank_conv_forward: for one group only"));
  CHECK(contains(text, "groups 2"));

  tensor<float, 4> no_outputs({1, 5, 5, 0}), dt({1, 5, 5, 4});
  tensor<float, 2> no_up({4, 0}), no_dup({4, 0});
  std::fill_n(dt.data(), dt.size(), 9.0F);
  ops::low_rank_conv_backward_up<float>(ctx, t, no_outputs, no_up, no_dup, false, dt);
  for (const float value : dt.flat()) REQUIRE(value == 0.0F);
}

TEST_CASE("LowRankConv: errors name the layer and both shapes or ranks") {
  const conv_shape shape = conv_shape::square(3, 8, 3, 1, 1);
  std::string text = error_text([&] { LowRankConv<float>(shape, 9); });
  CHECK(contains(text, "LowRankConv, convolution 3 -> 8, kernel 3x3"));
  CHECK(contains(text, "rank 9 of a 8 x 27 matrix"));
  CHECK_THROWS_AS(LowRankConv<float>(shape, 0), rank_error);
  CHECK_THROWS_AS((LowRankConv<float, 9>(shape)), rank_error);
  CHECK_THROWS_AS(LowRankConv<float>(conv_shape::square(3, 8, 0), 1), shape_error);
  cpu_context ctx;
  const LowRankConv<float> layer(shape, 4);
  tensor<float, 4> x({2, 5, 5, 3}), y({2, 5, 4, 8}), good({2, 5, 5, 8}), wide({2, 5, 5, 4});
  text = error_text([&] { layer.forward(ctx, x, y); });
  CHECK(contains(text, "LowRankConv rank 4"));
  CHECK(contains(text, "[2 x 5 x 5 x 3]"));
  CHECK(contains(text, "[2 x 5 x 4 x 8]"));
  text = error_text([&] { layer.forward(ctx, wide, good); });
  CHECK(contains(text, "LowRankConv rank 4"));
  CHECK(contains(text, "[2 x 5 x 5 x 4]"));
  CHECK_THROWS_AS(layer.backward(ctx, good, x), state_error);
  CHECK_THROWS_AS(layer.backward(ctx, good), state_error);
  CHECK(contains(error_text([&] { layer.backward(ctx, good, x); }), "forward"));
}

}  // namespace
