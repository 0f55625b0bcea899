// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/nn/fold_batch_norm.hpp>

#include "../support/fold_checks.hpp"
#include "../support/host_twice_biased.hpp"

namespace {

using namespace test;

TEST_CASE_TEMPLATE("fold_batch_norm: one layer and its norm", T, float, double) {
  const auto check = [](const any_layer<T>& layer, const extents<4>& images) {
    CAPTURE(layer.describe());
    const index_t channels = layer.output_shape(images)[3];
    Sequential<T> net;
    net.add("a", layer).add("norm", BatchNorm<T>(channels));
    check_folding<T>(network<T>{any_layer<T>(net)}, images, {{{"norm", "a"}}, {}});
    // Norms directly after norms, and with another layer in between.
    Sequential<T> more;
    more.add("a", layer).add("n1", BatchNorm<T>(channels)).add("n2", BatchNorm<T>(channels));
    more.add("relu", ReLU<T>()).add("n3", BatchNorm<T>(channels));
    check_folding<T>(network<T>{any_layer<T>(more)}, images, {{{"n1", "a"}, {"n2", "a"}}, {"n3"}});
  };
  const conv_shape same = conv_shape::square(6, 9, 3, 2, 1), point = conv_shape::square(6, 9, 1);
  const conv_shape groups{6, 9, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 3};
  for (const bool bias : {false, true}) {
    check(Conv<T>(same, bias), {2, 7, 5, 6});
    check(Conv<T>(point, bias), {2, 7, 5, 6});
    check(LowRankConv<T>(same, 4, bias), {2, 7, 5, 6});
    check(LowRankConv<T, 3>(point, bias), {3, 4, 4, 6});
    check(Conv<T>(groups, bias), {2, 7, 5, 6});
    check(LowRankConv<T>(groups, 2, bias), {2, 7, 5, 6});
    check(Linear<T>(6, 9, bias), {5, 1, 1, 6});
    check(LowRankLinear<T>(6, 9, 2, bias), {5, 1, 1, 6});
    check(LowRankLinear<T, 1>(6, 9, bias), {5, 1, 1, 6});
  }
  check(LowRankConv<T>(same, 4), {0, 7, 5, 6});
}

TEST_CASE("fold_batch_norm: a layer of another framework with two biases") {
  Sequential<float> net;
  net.add("a", host::TwiceBiased(6, 9)).add("norm", BatchNorm<float>(9));
  check_folding<float>(network<float>{any_layer<float>(net)}, {2, 7, 5, 6}, {{{"norm", "a"}}, {}});
}

TEST_CASE_TEMPLATE("fold_batch_norm: a LowRankNormConv becomes a LowRankConv", T, float, double) {
  Sequential<T> net;
  net.add("conv", LowRankNormConv<T>(conv_shape::square(6, 9, 3, 1, 1), 4)).add("bn", BatchNorm<T>(9));
  network<T> one{any_layer<T>(net)};
  check_folding<T>(one, {2, 5, 5, 6}, {{{"conv.bn", "conv"}, {"bn", "conv"}}, {}});
  fold_batch_norm(one);
  const auto ranks = low_rank_layers(one);
  REQUIRE(ranks.size() == 1);
  CHECK(ranks[0] == layer_rank{"conv", 4});
  Sequential<T> grouped;
  grouped.add("conv", LowRankNormConv<T>(conv_shape{6, 9, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 3}, 2));
  check_folding<T>(network<T>{any_layer<T>(grouped)}, {2, 5, 5, 6}, {{{"conv.bn", "conv"}}, {}});
}

TEST_CASE_TEMPLATE("fold_batch_norm: branches and shortcuts of residual blocks", T, float, double) {
  for (const bool relu : {false, true}) {
    Sequential<T> branch, shortcut, net;
    branch.add("bn0", BatchNorm<T>(6)).add("conv", LowRankConv<T>(conv_shape::square(6, 9, 3, 2, 1), 2));
    branch.add("bn1", BatchNorm<T>(9));
    shortcut.add("0", Conv<T>(conv_shape::square(6, 9, 1, 2))).add("1", BatchNorm<T>(9));
    net.add("block", Residual<T>(branch, shortcut, relu)).add("last", BatchNorm<T>(9));
    check_folding<T>(
        network<T>{any_layer<T>(net)}, {2, 6, 6, 6},
        {{{"block.bn1", "block.conv"}, {"block.shortcut.1", "block.shortcut.0"}}, {"block.bn0", "last"}});
    // The last layer of a block is not followed by the layer after the block.
    Sequential<T> plain, outer;
    plain.add("conv", Conv<T>(conv_shape::square(6, 6, 3, 1, 1)));
    outer.add("", Residual<T>(plain, {}, relu)).add("norm", BatchNorm<T>(6));
    check_folding<T>(network<T>{any_layer<T>(outer)}, {2, 6, 6, 6}, {{}, {"norm"}});
  }
}

TEST_CASE_TEMPLATE("fold_batch_norm: narrow networks of the zoo", T, float, double) {
  resnet18_options small;
  small.width = 8;
  small.stem_norm = true;
  vgg_options vgg;
  vgg.width = 8;
  imagenet_resnet_options wide;
  wide.width = 8;
  wide.classes = 7;
  imagenet_resnet_options factor_norms = wide;
  factor_norms.factor_bn = true;
  const auto check = [](const network<T>& dense, const factorize_policy& policy, const extents<4>& images,
                        std::size_t folded) {
    check_folding_of_all<T>(dense, images, folded);
    network<T> hybrid = dense;
    apply_ranks(hybrid, planned_ranks(hybrid, policy));
    check_folding_of_all<T>(hybrid, images, folded);
  };
  factorize_policy all;
  all.first_layer = 1;
  all.shortcuts_dense = false;
  check(resnet18<T>(small), all, {2, 32, 32, 3}, 20);
  check(vgg19<T>(vgg), all, {2, 32, 32, 3}, 16);
  check(small_resnet<T>({}), all, {2, 16, 16, 3}, 7 + 2);
  check(small_vgg<T>({}), all, {2, 32, 32, 3}, 4);
  check(resnet50<T>(wide), all, {1, 64, 64, 3}, 53);
  check(resnet34<T>(factor_norms), all, {1, 64, 64, 3}, 36 + 32);
}

TEST_CASE("fold_batch_norm: a new generation, fewer parameters, and training goes on without norms") {
  small_resnet_options options;
  network<float> net = small_resnet<float>(options);
  give_values(net);
  const std::uint64_t generation = net.generation();
  network<float> copy = net;
  const batch_norm_folding done = fold_batch_norm(net);
  CHECK(net.generation() != generation);
  CHECK(done.parameters_before == copy.parameter_count());
  CHECK(done.parameters_after == net.parameter_count());
  CHECK(done.parameters_after < done.parameters_before);
  CHECK(net.store().buffer_entries().empty());
  // Nothing left to do.
  CHECK(fold_batch_norm(net).folded.empty());
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  tensor<float, 4> x({2, 16, 16, 3}), dy({2, 1, 1, 10});
  fill_normal<float>(x.flat(), 1.0, {1, 1});
  fill_normal<float>(dy.flat(), 1.0, {1, 2});
  ctx.begin_step(0);
  const tensor<float, 4> y = net.forward(ctx, x);
  net.backward(ctx, dy);
  CHECK(ctx.tape().empty());
  // A network without batch norms stays as it is.
  options.batch_norm = false;
  network<float> without = small_resnet<float>(options);
  CHECK(fold_batch_norm(without).folded.empty());
}

TEST_CASE("fold_batch_norm: inference keeps nothing on the tape and allocates nothing when warm") {
  network<float> net = small_resnet<float>({});
  apply_ranks(net, planned_ranks(net, factorize_policy{}));
  give_values(net);
  fold_batch_norm(net);
  cpu_context ctx({2, 1});
  ctx.set_mode(run_mode::training);
  tensor<float, 4> x({2, 16, 16, 3}), y({2, 1, 1, 10});
  fill_normal<float>(x.flat(), 1.0, {1, 1});
  std::size_t allocations = 0;
  for (int i = 0; i < 5; ++i) {
    const mode_scope inference(ctx, run_mode::inference);
    net.forward(ctx, x.view(), y.view());
    CHECK(ctx.tape().empty());
    CHECK(ctx.tape().memory().peak_bytes() == 0);
    if (i == 1) allocations = ctx.system_allocations();
    if (i > 1) CHECK(ctx.system_allocations() == allocations);
  }
  CHECK(ctx.training());
}

}  // namespace
