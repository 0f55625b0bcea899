// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Parity with PyTorch: the layers of convolutional networks, and a small instance of each family.
#include <array>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/models/imagenet_resnet.hpp>
#include <pufferfish/models/resnet.hpp>
#include <pufferfish/models/vgg.hpp>
#include <pufferfish/models/weights.hpp>
#include <pufferfish/nn/loss.hpp>
#include <pufferfish/optim/sgd.hpp>

#include "../support/golden.hpp"

namespace {

using namespace golden;

/// One layer on its own: "NAME.output", ... of the case `layers`, for an NCHW input there.
template <class T>
void check_layer(results& golden, const std::string& name, any_layer<T> layer, const extents<4>& nhwc) {
  CAPTURE(name);
  network<T> net(std::move(layer));
  set_values(net);
  const tensor<T, 4> x = hashed_images<T>("input", nhwc);
  tensor<T, 4> y(net.output_shape(nhwc)), dx(nhwc);
  const tensor<T, 4> dy = hashed_images<T>("output_gradient", y.shape());
  cpu_context ctx({2, 1});
  ctx.set_mode(run_mode::training);
  ctx.begin_step(0);
  net.forward(ctx, x.view(), y.view());
  net.backward(ctx, dy.view(), dx.view());
  const auto nchw = [](const tensor<T, 4>& t) { return t.view().permute({0, 3, 1, 2}); };
  CHECK(golden.error_of(name + ".output", nchw(y)) < tolerance<T>);
  CHECK(golden.error_of(name + ".input_gradient", nchw(dx)) < tolerance<T>);
  for (const auto& entry : net.store().parameters()) {
    CAPTURE(entry.name);
    CHECK(golden.error_of(name + ".gradient." + entry.name, entry.thing->logical_gradient()) < tolerance<T>);
  }
  for (const auto& entry : net.store().buffer_entries()) {
    CAPTURE(entry.name);
    CHECK(golden.error_of(name + ".buffer." + entry.name, std::span<const T>(entry.thing->values())) <
          tolerance<T>);
  }
}

TEST_CASE_TEMPLATE("layers: outputs and gradients are PyTorch's", T, float, double) {
  results golden("layers");
  const auto conv = &conv_shape::square;
  const auto check = [&](const char* name, any_layer<T> layer, const extents<4>& nhwc) {
    check_layer<T>(golden, name, std::move(layer), nhwc);
  };
  check("conv3x3", Conv<T>(conv(3, 5, 3, 1, 1, 1)), {2, 4, 5, 3});
  check("conv3x3_stride2_bias", Conv<T>(conv(3, 4, 3, 2, 1, 1), true), {2, 5, 4, 3});
  check("conv3x3_dilated", Conv<T>(conv(3, 4, 3, 1, 2, 2)), {1, 6, 5, 3});
  check("conv1x1", Conv<T>(conv(6, 9, 1, 1, 0, 1)), {2, 3, 2, 6});
  check("conv1x1_stride2", Conv<T>(conv(6, 9, 1, 2, 0, 1)), {2, 5, 4, 6});
  check("conv7x7_stride2", Conv<T>(conv(3, 4, 7, 2, 3, 1)), {1, 9, 8, 3});
  const auto grouped = [](conv_shape shape, index_t groups) {
    shape.groups = groups;
    return shape;
  };
  check("grouped_conv3x3", Conv<T>(grouped(conv(6, 4, 3, 1, 1, 1), 2), true), {2, 4, 5, 6});
  check("grouped_conv3x3_stride2", Conv<T>(grouped(conv(6, 9, 3, 2, 1, 1), 3)), {2, 5, 4, 6});
  check("grouped_conv1x1", Conv<T>(grouped(conv(6, 9, 1, 1, 0, 1), 3)), {2, 3, 2, 6});
  check("depthwise_conv3x3", Conv<T>(grouped(conv(5, 5, 3, 1, 1, 1), 5), true), {2, 4, 6, 5});
  check("depthwise_conv3x3_stride2", Conv<T>(grouped(conv(5, 5, 3, 2, 1, 1), 5)), {2, 7, 6, 5});
  check("depthwise_conv5x5_dilated", Conv<T>(grouped(conv(4, 4, 5, 1, 4, 2), 4)), {1, 6, 5, 4});
  check("depthwise_conv3x3_multiplier", Conv<T>(grouped(conv(4, 8, 3, 1, 1, 1), 4), true), {2, 5, 3, 4});
  check("low_rank_grouped_conv3x3", LowRankConv<T>(grouped(conv(6, 8, 3, 1, 1, 1), 2), 3, true),
        {2, 4, 5, 6});
  check("low_rank_grouped_conv3x3_stride2", LowRankConv<T>(grouped(conv(6, 9, 3, 2, 1, 1), 3), 2),
        {2, 5, 4, 6});
  check("low_rank_depthwise_conv3x3", LowRankConv<T>(grouped(conv(4, 8, 3, 1, 1, 1), 4), 1), {2, 5, 3, 4});
  check("low_rank_norm_grouped_conv3x3", LowRankNormConv<T>(grouped(conv(4, 6, 3, 1, 1, 1), 2), 2),
        {2, 4, 3, 4});
  check("linear", Linear<T>(11, 6), {5, 1, 1, 11});
  check("low_rank_conv3x3_stride2", LowRankConv<T>(conv(4, 6, 3, 2, 1, 1), 3), {2, 4, 5, 4});
  check("low_rank_conv3x3_bias", LowRankConv<T>(conv(4, 6, 3, 1, 1, 1), 2, true), {2, 3, 4, 4});
  check("low_rank_conv1x1_stride2", LowRankConv<T>(conv(8, 12, 1, 2, 0, 1), 4), {2, 5, 4, 8});
  check("low_rank_conv7x7_stride2", LowRankConv<T>(conv(3, 5, 7, 2, 3, 1), 3), {1, 9, 8, 3});
  check("low_rank_norm_conv3x3", LowRankNormConv<T>(conv(4, 6, 3, 1, 1, 1), 3), {2, 4, 3, 4});
  check("low_rank_linear", LowRankLinear<T>(11, 6, 3), {5, 1, 1, 11});
  check("batch_norm", BatchNorm<T>(5), {2, 4, 3, 5});
  check("max_pool2", MaxPool<T>(2), {2, 5, 4, 3});
  check("max_pool3_stride2_padded", MaxPool<T>(3, 2, 1), {2, 5, 6, 3});
  check("average_pool2", AvgPool<T>(2), {2, 4, 5, 3});
  check("average_pool3_stride2_padded", AvgPool<T>(3, 2, 1), {2, 5, 6, 3});
  check("global_average_pool", GlobalAvgPool<T>(), {2, 4, 5, 3});
  check("relu", ReLU<T>(), {2, 4, 5, 3});
  golden.check_all_used();
}

/// convolutional.py's classifier_case: eight images, SGD.
template <class T>
void check_classifier(const std::string& name, network<T> net, index_t pixels, const std::string& input) {
  CAPTURE(name);
  results golden(name);
  constexpr index_t count = 8, classes = 5;
  set_values(net);
  const tensor<T, 4> x = hashed_images<T>(input, {count, pixels, pixels, 3});
  tensor<T, 4> y(net.output_shape(x.shape())), dy(y.shape());
  std::vector<std::int32_t> labels;
  for (std::int32_t n = 0; n < count; ++n) labels.push_back((7 * n + 3) % std::int32_t{classes});
  cpu_context ctx({2, 1});
  ctx.set_mode(run_mode::training);
  SGD<T> optimizer(make_optimizer_target(net.store()), {0.9, 0.0, false, 1e-4, true});
  double loss = 0.0;
  const auto forward = [&](std::uint64_t step) {
    ctx.begin_step(step);
    net.forward(ctx, x.view(), y.view());
    loss = SoftmaxCrossEntropy<T>()(ctx, y.view(), labels, double{count}, dy.view()).mean_loss();
  };
  for (std::uint64_t step = 0; step < 20; ++step) {
    forward(step);
    net.backward(ctx, dy.view());
    if (step == 0) {
      CHECK(golden.error_of("logits", y.view()) < tolerance<T>);
      CHECK(golden.error_of("loss", loss) < tolerance<T>);
      golden.check_state(net);
    }
    optimizer.step(ctx, 0.0005);
  }
  forward(20);
  CHECK(golden.error_of("loss_after", loss) < tolerance_after<T>);
  ctx.set_mode(run_mode::inference);
  net.forward(ctx, x.view(), y.view());
  CHECK(golden.error_of("eval.logits", y.view()) < tolerance_after<T>);
  golden.check_all_used();
}

template <class T>
network<T> with_ranks(network<T> net, const std::vector<layer_rank>& ranks) {
  apply_ranks(net, ranks);
  return net;
}
template <class T>
network<T> with_policy(network<T> net, const factorize_policy& policy) {
  const std::vector<layer_rank> ranks = planned_ranks(net, policy);
  return with_ranks(std::move(net), ranks);
}

TEST_CASE_TEMPLATE("VGG: forward, loss, gradients, training are PyTorch's", T, float, double) {
  vgg_options options;
  options.classes = 5;
  options.dropout = 0.0;
  options.width = 4;
  check_classifier("vgg19_lth", vgg19_lth<T>(options), 32, "input 33");
  options.width = 8;
  check_classifier("vgg11", vgg11<T>(options), 32, "input 35");
  check_classifier("vgg11_hybrid", with_policy(vgg11<T>(options), vgg11_policy()), 32, "input 38");
}

TEST_CASE_TEMPLATE("ResNet-18 for CIFAR: forward, loss, gradients, training are PyTorch's", T, float,
                   double) {
  resnet18_options options;
  options.classes = 5;
  options.width = 8;
  check_classifier("resnet18", resnet18<T>(options), 16, "input 6");
  check_classifier("resnet18_hybrid", with_policy(resnet18<T>(options), resnet18_policy()), 16, "input 6");
}

TEST_CASE_TEMPLATE("ResNets for ImageNet: forward, loss, gradients, training are PyTorch's", T, float,
                   double) {
  imagenet_resnet_options options;
  options.classes = 5;
  options.blocks = {1, 1, 1, 1};
  options.width = 8;
  check_classifier("resnet50", resnet50<T>(options), 33, "input 38");
  factorize_policy stage4;
  stage4.shortcuts_dense = false;
  stage4.also_if = [](const std::string& name, matrix_size) { return name.compare(0, 7, "layer4.") == 0; };
  check_classifier("resnet50_hybrid", with_policy(resnet50<T>(options), stage4), 33, "input 2");
  network<T> wide = wide_resnet50_2<T>(options);
  const std::vector<layer_rank> ranks = reference_ranks(wide);
  check_classifier("wide_resnet50_2_lowrank", with_ranks(std::move(wide), ranks), 33, "input 14");
  options.factor_bn = true;
  options.width = 16;
  check_classifier("resnet34_factor_bn", resnet34<T>(options), 33, "input 17");
}

TEST_CASE_TEMPLATE("load_weights: a state_dict of PyTorch, by name", T, float, double) {
  results golden("state_dict");
  resnet18_options options;
  options.classes = 3;
  options.width = 1;
  network<T> net = resnet18<T>(options);
  // The file also holds an output, which is no weight.
  std::vector<tensor_entry> entries;
  for (const std::string& name : golden.file().tensor_names()) {
    const tensor_info& info = golden.file().tensor(name);
    if (name != "eval.logits") entries.push_back({name, info.dtype, info.shape, info.bytes});
  }
  load_weights(net, safetensors_file::parse(encode_safetensors(entries), "weights"));
  network<float> expected = resnet18<float>(options);
  set_values(expected);
  for (std::size_t i = 0; i < expected.store().values().size(); ++i) {
    CHECK(net.store().values()[i] == static_cast<T>(expected.store().values()[i]));
  }
  for (const auto& entry : net.store().buffer_entries()) {
    if (entry.name == "layer1.0.bn1.num_batches_tracked") CHECK(entry.thing->data()[0] == T{2});
  }
  const tensor<T, 4> x = hashed_images<T>("input", {2, 8, 8, 3});
  cpu_context ctx;
  CHECK(golden.error_of("eval.logits", net.forward(ctx, x.view()).view()) < 1e-5);

  const auto loading = [&](auto change) {
    std::vector<tensor_entry> changed = entries;
    change(changed);
    network<T> other = resnet18<T>(options);
    const std::vector<T> before(other.store().values().begin(), other.store().values().end());
    std::string text;
    try {
      load_weights(other, safetensors_file::parse(encode_safetensors(changed), "weights"));
    } catch (const io_error& e) {
      text = e.what();
      CHECK(std::equal(before.begin(), before.end(), other.store().values().begin()));
    }
    return text;
  };
  const auto named = [](auto& list, const std::string& name) {
    return std::find_if(list.begin(), list.end(), [&](const auto& e) { return e.name == name; });
  };
  CHECK(loading([&](auto& list) { list.erase(named(list, "layer1.0.bn1.num_batches_tracked")); }).empty());
  CHECK(loading([&](auto& list) { named(list, "linear.bias")->name = "fc.bias"; }) ==
        "weights: the file is of another model; missing in the file: 'linear.bias'; unknown to the model: "
        "'fc.bias'");
  CHECK(loading([&](auto& list) {
          named(list, "linear.weight")->shape = {8, 3};
        }) == "weights: tensor 'linear.weight' has shape [8 x 3], the model's has [3 x 8]");
  CHECK(loading([&](auto& list) { named(list, "linear.bias")->dtype = tensor_dtype::i32; }) ==
        "weights: tensor 'linear.bias' has dtype I32, not F32, F64, F16, BF16 or I64");
}

}  // namespace
