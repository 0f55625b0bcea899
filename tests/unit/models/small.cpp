// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <pufferfish/models/by_name.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/loss.hpp>
#include <string>
#include <vector>

namespace {

using namespace pufferfish;

template <class T>
std::vector<std::string> parameter_names(const network<T>& net) {
  std::vector<std::string> names;
  for (const auto& entry : net.store().parameters()) names.push_back(entry.name);
  std::reverse(names.begin(), names.end());  // arenas hold them in reverse execution order
  return names;
}

index_t conv_parameters(index_t in, index_t out, index_t kernel, bool batch_norm) {
  return kernel * kernel * in * out + (batch_norm ? 2 * out : out);
}

index_t resnet_parameters(const small_resnet_options& o) {
  index_t total = conv_parameters(o.channels_in, o.width, 3, o.batch_norm), in = o.width;
  for (index_t stage = 0; stage < o.stages; ++stage) {
    const index_t out = o.width << stage;
    for (index_t block = 0; block < o.blocks; ++block) {
      total += conv_parameters(in, out, 3, o.batch_norm) + conv_parameters(out, out, 3, o.batch_norm);
      if (in != out) total += conv_parameters(in, out, 1, o.batch_norm);
      in = out;
    }
  }
  return total + in * o.classes + o.classes;
}

template <class T>
tensor<T, 4> random_images(const extents<4>& shape, std::uint64_t seed) {
  tensor<T, 4> x(shape);
  fill_normal(x.flat(), 1.0, random_stream(seed, 4));
  return x;
}

/// Largest difference between backward and central differences of sum(r * net(x)), over every `stride`-th
/// parameter and every input, relative to 1 + |derivative|.
double gradient_error(network<double>& net, const extents<4>& shape, std::size_t stride) {
  cpu_context ctx({1, 9});
  ctx.set_mode(run_mode::training);
  tensor<double, 4> x = random_images<double>(shape, 1), y(net.output_shape(shape)), dx(shape);
  const tensor<double, 4> r = random_images<double>(y.shape(), 2);
  const auto objective = [&] {
    ctx.begin_step(0);  // the same step: the same dropout masks
    net.forward(ctx, x.view(), y.view());
    double sum = 0.0;
    for (std::size_t i = 0; i < y.flat().size(); ++i) sum += y.flat()[i] * r.flat()[i];
    return sum;
  };
  objective();
  net.backward(ctx, r.view(), dx.view());
  const std::vector<double> gradient(net.store().gradients().begin(), net.store().gradients().end());
  double worst = 0.0;
  const auto compare = [&](double& value, double derivative) {
    const double step = 1e-6, kept = value;
    value = kept + step;
    const double above = objective();
    value = kept - step;
    const double below = objective();
    value = kept;
    worst =
        std::max(worst, std::abs((above - below) / (2 * step) - derivative) / (1.0 + std::abs(derivative)));
  };
  for (std::size_t i = 0; i < gradient.size(); i += stride) compare(net.store().values()[i], gradient[i]);
  for (std::size_t i = 0; i < x.flat().size(); ++i) compare(x.flat()[i], dx.flat()[i]);
  return worst;
}

TEST_CASE("small_resnet: names, shapes and counts") {
  small_resnet_options options;
  options.width = 4;
  network<float> net = small_resnet<float>(options);
  CHECK(net.output_shape({7, 32, 32, 3}) == extents<4>{7, 1, 1, 10});
  CHECK(net.output_shape({1, 9, 5, 3}) == extents<4>{1, 1, 1, 10});
  CHECK(parameter_names(net) == std::vector<std::string>{"conv1.weight",
                                                         "bn1.weight",
                                                         "bn1.bias",
                                                         "layer1.0.conv1.weight",
                                                         "layer1.0.bn1.weight",
                                                         "layer1.0.bn1.bias",
                                                         "layer1.0.conv2.weight",
                                                         "layer1.0.bn2.weight",
                                                         "layer1.0.bn2.bias",
                                                         "layer2.0.conv1.weight",
                                                         "layer2.0.bn1.weight",
                                                         "layer2.0.bn1.bias",
                                                         "layer2.0.conv2.weight",
                                                         "layer2.0.bn2.weight",
                                                         "layer2.0.bn2.bias",
                                                         "layer2.0.shortcut.0.weight",
                                                         "layer2.0.shortcut.1.weight",
                                                         "layer2.0.shortcut.1.bias",
                                                         "layer3.0.conv1.weight",
                                                         "layer3.0.bn1.weight",
                                                         "layer3.0.bn1.bias",
                                                         "layer3.0.conv2.weight",
                                                         "layer3.0.bn2.weight",
                                                         "layer3.0.bn2.bias",
                                                         "layer3.0.shortcut.0.weight",
                                                         "layer3.0.shortcut.1.weight",
                                                         "layer3.0.shortcut.1.bias",
                                                         "fc.weight",
                                                         "fc.bias"});
  CHECK_THROWS_AS(net.output_shape({1, 32, 32, 1}), shape_error);
  for (const index_t width : {1, 5, 16}) {
    for (const index_t blocks : {1, 3}) {
      for (const index_t stages : {1, 2, 4}) {
        for (const bool batch_norm : {true, false}) {
          options = {2, 7, width, blocks, stages, 1, batch_norm};
          CHECK(small_resnet<float>(options).parameter_count() == resnet_parameters(options));
        }
      }
    }
  }
  // ResNet-20 of the paper: 0.27 M parameters.
  options = {3, 10, 16, 3, 3, 1, true};
  CHECK(small_resnet<float>(options).parameter_count() == 272474);
  options = {3, 10, 4, 1, 2, 2, true};
  network<float> strided = small_resnet<float>(options);
  CHECK(strided.summary({1, 16, 16, 3})[0].output == extents<4>{1, 8, 8, 4});
}

TEST_CASE("small_resnet: MACs of ResNet-20") {
  const small_resnet_options options{3, 10, 16, 3, 3, 1, true};
  const network<float> net = small_resnet<float>(options);
  const index_t stem = 9 * 3 * 16 * 1024, stage1 = 6 * 9 * 16 * 16 * 1024;
  const index_t stage2 = (9 * 16 * 32 + 5 * 9 * 32 * 32 + 16 * 32) * 256;
  const index_t stage3 = (9 * 32 * 64 + 5 * 9 * 64 * 64 + 32 * 64) * 64;
  CHECK(net.macs({1, 32, 32, 3}) == stem + stage1 + stage2 + stage3 + 640);
}

TEST_CASE("small_vgg: names, shapes and counts") {
  small_vgg_options options;
  options.image = {9, 8};
  options.channels_in = 1;
  options.width = 4;
  options.hidden = 10;
  options.classes = 3;
  const network<float> net = small_vgg<float>(options);
  CHECK(net.output_shape({2, 9, 8, 1}) == extents<4>{2, 1, 1, 3});
  const std::vector<std::string> names = parameter_names(net);
  CHECK(names.front() == "features.0.weight");
  CHECK(names.back() == "classifier.4.bias");
  CHECK(std::count(names.begin(), names.end(), "features.4.bias") == 1);
  CHECK(std::count(names.begin(), names.end(), "features.0.bias") == 0);
  const index_t convs = conv_parameters(1, 4, 3, true) + conv_parameters(4, 4, 3, true) +
                        conv_parameters(4, 8, 3, true) + conv_parameters(8, 8, 3, true);
  CHECK(net.parameter_count() == convs + (2 * 2 * 8 * 10 + 10) + (10 * 3 + 3));
  CHECK_THROWS_AS(net.output_shape({2, 16, 16, 1}), shape_error);
  options.batch_norm = false;
  CHECK(small_vgg<float>(options).parameter_count() == net.parameter_count() - 24);
}

TEST_CASE("mlp: names, shapes and counts") {
  const network<double> net = mlp<double>({12, {7, 5}, 3});
  CHECK(parameter_names(net) == std::vector<std::string>{"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias",
                                                         "fc3.weight", "fc3.bias"});
  CHECK(net.parameter_count() == 12 * 7 + 7 + 7 * 5 + 5 + 5 * 3 + 3);
  CHECK(net.output_shape({6, 2, 3, 2}) == extents<4>{6, 1, 1, 3});
  CHECK(mlp<double>({12, {}, 3}).parameter_count() == 39);
}

TEST_CASE("models: gradients agree with finite differences, batch norm and dropout included") {
  network<double> resnet = small_resnet<double>({2, 3, 3, 1, 2, 1, true});
  resnet.initialize(3);
  CHECK(gradient_error(resnet, {3, 5, 4, 2}, 3) < 1e-6);
  network<double> biased = small_resnet<double>({2, 3, 3, 2, 2, 2, false});
  biased.initialize(3);
  CHECK(gradient_error(biased, {2, 6, 7, 2}, 7) < 1e-6);
  small_vgg_options options{{6, 5}, 2, 3, 3, 2, 6, 0.3, true};
  network<double> vgg = small_vgg<double>(options);
  vgg.initialize(4);
  CHECK(gradient_error(vgg, {3, 6, 5, 2}, 3) < 1e-6);
  network<double> dense = mlp<double>({8, {6}, 3});
  dense.initialize(5);
  CHECK(gradient_error(dense, {4, 2, 2, 2}, 1) < 1e-6);
  factorize_policy policy;
  policy.rank = rank_ratio{0.4};
  factorize(resnet, policy);
  factorize(vgg, policy);
  CHECK(low_rank_layers(resnet).size() == 4);
  CHECK(low_rank_layers(vgg).size() == 4);
  CHECK(gradient_error(resnet, {3, 5, 4, 2}, 3) < 1e-6);
  CHECK(gradient_error(vgg, {3, 6, 5, 2}, 3) < 1e-6);
}

TEST_CASE("small_resnet: hybrids from layer K on, shortcuts and ends dense") {
  const small_resnet_options options{3, 10, 16, 2, 3, 1, true};
  for (const index_t first : {1, 2, 4, 13}) {
    network<float> net = small_resnet<float>(options);
    net.initialize(1);
    factorize_policy policy;
    policy.first_layer = first;
    const factorization made = factorize(net, policy);
    // 13 main-path convolutions and fc. The stem 16 x 27 at rank 4 shrinks too: 172 of 432.
    CHECK(static_cast<index_t>(made.layers.size()) == 14 - first);
    for (const factor_report& layer : made.layers) {
      CHECK(layer.name.find("shortcut") == std::string::npos);
      CHECK(layer.name != "fc");
      CHECK(layer.rank == std::min(layer.rows, layer.cols) / 4);
    }
    index_t saved = 0;
    for (const factor_report& layer : made.layers) {
      saved += layer.rows * layer.cols - layer.rank * (layer.rows + layer.cols);
    }
    CHECK(made.parameters_before - made.parameters_after == saved);
    CHECK(net.parameter_count() == resnet_parameters(options) - saved);
  }
}

TEST_CASE("models: a few steps of gradient descent fit a handful of images") {
  for (const std::string& name : small_model_names()) {
    CAPTURE(name);
    const extents<4> shape{8, 8, 8, 1};
    network<float> net = make_model<float>(name, shape, 4, 1);
    cpu_context ctx({1, 1});
    ctx.set_mode(run_mode::training);
    const tensor<float, 4> x = random_images<float>(shape, 6);
    const std::vector<std::int32_t> labels{0, 1, 2, 3, 0, 1, 2, 3};
    tensor<float, 4> y({8, 1, 1, 4}), dy(y.shape());
    double first = 0.0, last = 0.0;
    for (std::uint64_t step = 0; step < 30; ++step) {
      ctx.begin_step(step);
      net.forward(ctx, x.view(), y.view());
      last = SoftmaxCrossEntropy<float>()(ctx, y.view(), labels, 8.0, dy.view()).loss_sum;
      if (step == 0) first = last;
      net.backward(ctx, dy.view());
      const auto values = net.store().values(), gradients = net.store().gradients();
      for (std::size_t i = 0; i < values.size(); ++i) values[i] -= 0.1F * gradients[i];
    }
    CHECK(first > 8.0);
    CHECK(last < 0.6 * first);
  }
}

template <class E, class F>
std::string text_of(F&& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "nothing of that type thrown";
}

TEST_CASE("models: by name, and refusals") {
  const std::vector<std::string> names = model_names();
  CHECK(std::is_sorted(names.begin(), names.end()));
  CHECK(names.size() == 13);
  for (const std::string& name : small_model_names()) {
    CHECK(std::count(names.begin(), names.end(), name) == 1);
    network<float> net = make_model<float>(name, {1, 8, 12, 3}, 6, 5), again = net;
    CHECK(net.output_shape({4, 8, 12, 3}) == extents<4>{4, 1, 1, 6});
    again.initialize(5);
    CHECK(
        std::equal(net.store().values().begin(), net.store().values().end(), again.store().values().begin()));
    again.initialize(6);
    CHECK(!std::equal(net.store().values().begin(), net.store().values().end(),
                      again.store().values().begin()));
  }
  const std::string unknown = text_of<value_error>([] { make_model<float>("vgg", {1, 8, 8, 3}, 6, 5); });
  CHECK(
      unknown ==
      "no model is called vgg; there are mlp, resnet101, resnet152, resnet18_cifar, resnet18_cifar_stem_bn, "
      "resnet34, resnet50, small-resnet, small-vgg, vgg11_bn, vgg19_bn, vgg19_lth, wide_resnet50_2");
  CHECK(make_model<float>("resnet18_cifar", {1, 8, 12, 2}, 6, 5).output_shape({4, 8, 12, 2}) ==
        extents<4>{4, 1, 1, 6});
  CHECK_THROWS_AS(make_model<float>("vgg11_bn", {1, 64, 64, 3}, 6, 5), shape_error);
  CHECK(text_of<value_error>([] {
          small_resnet<float>({0, 10});
        }) == "small_resnet: channels_in is 0, not in 1 .. 1048576");
  CHECK(text_of<value_error>([] {
          small_resnet<float>({3, 10, 16, 1, 17});
        }) == "small_resnet: stages is 17, not in 1 .. 16");
  CHECK_THROWS_AS(small_resnet<float>({3, 10, 16, 1, 3, 0}), value_error);
  CHECK_THROWS_AS(small_vgg<float>({{7, 8}, 3, 10, 16, 3}), value_error);
  CHECK_NOTHROW(small_vgg<float>({{8, 8}, 3, 10, 16, 3}));
  CHECK_THROWS_AS(mlp<float>({4, {3, 0}, 2}), value_error);
  CHECK_THROWS_AS(make_model<float>("mlp", {1, 0, 4, 1}, 2, 0), value_error);
  CHECK_THROWS_AS(make_model<float>("small-resnet", {1, 0, 4, 1}, 2, 0), error);
}

}  // namespace
