// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The zoo of convolutional networks: counts, names, ranks, initial values, the switch.
#include <algorithm>
#include <string>
#include <vector>

#include <pufferfish/models/zoo.hpp>

#include "../support/model_checks.hpp"

namespace {

using namespace test;

std::vector<std::string> names_of(const network<float>& net) {
  std::vector<std::string> names;
  for (const auto& entry : net.store().parameters()) names.push_back(entry.name);
  std::reverse(names.begin(), names.end());  // arenas hold them in reverse execution order
  return names;
}

bool has_parameter(const network<float>& net, const std::string& name) {
  const auto names = names_of(net);
  return std::find(names.begin(), names.end(), name) != names.end();
}

struct expected {
  const char* model;
  factor_mode mode;
  index_t parameters, buffers, macs, macs_paper;
};

constexpr auto dense = factor_mode::dense, hybrid = factor_mode::hybrid, lowrank = factor_mode::lowrank;

// Measured on the classes of the paper's code, whose published numbers among them are the same. A shortcut
// with factors has its stride in the first of them here and in the second there: our MACs are the measured
// ones less what that saves, written out.
constexpr index_t shortcut4 = 256 * 1024 * (14 * 14 - 7 * 7);
constexpr index_t shortcuts =
    32 * 256 * (56 * 56 - 28 * 28) + 64 * 512 * (28 * 28 - 14 * 14) + 128 * 1024 * (14 * 14 - 7 * 7);
constexpr expected published[] = {
    {"vgg11_bn", dense, 9753674, 5512, 153293824, 153597952},
    {"vgg19_bn", dense, 20560330, 11024, 398660608, 399267840},
    {"vgg19_bn", hybrid, 8370634, 11024, 289346560, 289953792},
    {"vgg19_lth", dense, 20035018, 11024, 398136320, 398742528},
    {"vgg19_lth", hybrid, 8107466, 11024, 289084416, 289690624},
    {"resnet18_cifar", dense, 11173834, 9491, 555422720, 556520448},
    {"resnet18_cifar", hybrid, 3336138, 9491, 216208384, 217306112},
    {"resnet18_cifar", lowrank, 3282890, 9491, 161682432, 162780160},
    {"resnet34", dense, 21797672, 17060, 3663761408, 3675628032},
    {"resnet34", lowrank, 6615528, 20868, 1122045952, 1135292416},
    {"resnet50", dense, 25557032, 53173, 4089184256, 4121924096},
    {"resnet50", hybrid, 15202344, 53173, 3572170752 - shortcut4, 3604910592 - shortcut4},
    {"resnet50", lowrank, 8745000, 53173, 1337131008 - shortcuts, 1369870848 - shortcuts},
    {"resnet101", dense, 44549160, 105448, 7801405440, 7849499136},
    {"resnet101", hybrid, 34194472, 105448, 7284391936 - shortcut4, 7332485632 - shortcut4},
    {"resnet152", dense, 60192808, 151579, 11513626624, 11580686848},
    {"resnet152", hybrid, 49838120, 151579, 10996613120 - shortcut4, 11063673344 - shortcut4},
    {"wide_resnet50_2", dense, 68883240, 68277, 11398021120, 11440620544},
    {"wide_resnet50_2", hybrid, 40047400, 68277, 9946529792 - shortcut4, 9989129216 - shortcut4},
    {"wide_resnet50_2", lowrank, 22417192, 68277, 3713466368 - shortcuts, 3756065792 - shortcuts},
};

TEST_CASE("zoo: parameters, buffers and MACs in both conventions are the published ones") {
  for (const expected& want : published) {
    CAPTURE(want.model);
    CAPTURE(to_string(want.mode));
    const zoo_model<float>& model = zoo_model_called<float>(want.model);
    const network<float> net = model.make(want.mode);
    const layer_cost cost = model.cost(net).total();
    CHECK(cost.parameters == want.parameters);
    CHECK(cost.buffers == want.buffers);
    CHECK(cost.macs == want.macs);
    CHECK(cost.macs_paper == want.macs_paper);
    CHECK(net.parameter_count() == want.parameters);
    CHECK(static_cast<index_t>(net.store().buffers().size()) == want.buffers);
    CHECK(net.macs(model.image) == want.macs);
    CHECK(net.output_shape(model.image) == extents<4>{1, 1, 1, model.classes});
  }
}

TEST_CASE("zoo: counts that follow from a formula") {
  const auto parameters = [](const char* name, factor_mode mode) {
    return zoo_model_called<float>(name).make(mode).parameter_count();
  };
  CHECK(parameters("vgg11_bn", lowrank) == 2878538);
  CHECK(parameters("vgg19_bn", lowrank) == 5884362);
  CHECK(parameters("vgg19_lth", lowrank) == 5884362 - 2 * 131584);
  CHECK(parameters("resnet18_cifar_stem_bn", dense) == 11173834 + 128);
  CHECK(parameters("resnet18_cifar_stem_bn", hybrid) == 3336138 + 128);
  CHECK(parameters("vgg11_bn", hybrid) == 9753674 - 3 * (2359296 - 655360) - 2 * (262656 - 131584));
  // Stage 4: 512x256 and five 512x512 of 3x3.
  CHECK(parameters("resnet34", hybrid) == 21797672 - (1179648 - 360448) - 5 * (2359296 - 655360));
  imagenet_resnet_options options;
  CHECK(resnet18_imagenet<float>(options).parameter_count() == 11689512);
  options.factor_bn = true;
  CHECK(resnet18_imagenet<float>(options).parameter_count() == 3800488);
  CHECK(cost_of(resnet18_imagenet<float>(options), {1, 224, 224, 3}).total().macs_paper == 617099776);
}

TEST_CASE("zoo: names, errors") {
  std::string names;
  for (const auto& model : zoo<double>()) names.append(model.name).append(" ");
  CHECK(names ==
        "vgg11_bn vgg19_bn vgg19_lth resnet18_cifar resnet18_cifar_stem_bn resnet34 resnet50 resnet101 "
        "resnet152 wide_resnet50_2 ");
  CHECK_THROWS_WITH_AS(
      zoo_model_called<float>("resnet"),
      doctest::Contains("no model of the zoo is called resnet; there are vgg11_bn, vgg19_bn"), value_error);
  const network<float> gray = zoo_model_called<float>("resnet50").make(hybrid, 1, 7);
  CHECK(gray.output_shape({2, 64, 64, 1}) == extents<4>{2, 1, 1, 7});
}

TEST_CASE("resnet18: published ranks, names") {
  network<float> net = resnet18<float>();
  CHECK(has_parameter(net, "conv1.weight"));
  CHECK_FALSE(has_parameter(net, "conv1.bias"));
  CHECK_FALSE(has_parameter(net, "bn1.weight"));
  CHECK(has_parameter(net, "layer2.0.shortcut.0.weight"));
  CHECK(has_parameter(net, "layer2.0.shortcut.1.bias"));
  CHECK(has_parameter(net, "linear.weight"));
  CHECK(planned_ranks(net, resnet18_policy()) == std::vector<layer_rank>{{"layer1.1.conv1", 16},
                                                                         {"layer1.1.conv2", 16},
                                                                         {"layer2.0.conv1", 32},
                                                                         {"layer2.0.conv2", 32},
                                                                         {"layer2.1.conv1", 32},
                                                                         {"layer2.1.conv2", 32},
                                                                         {"layer3.0.conv1", 64},
                                                                         {"layer3.0.conv2", 64},
                                                                         {"layer3.1.conv1", 64},
                                                                         {"layer3.1.conv2", 64},
                                                                         {"layer4.0.conv1", 128},
                                                                         {"layer4.0.conv2", 128},
                                                                         {"layer4.1.conv1", 128},
                                                                         {"layer4.1.conv2", 128}});
  CHECK(planned_ranks(net, resnet18_low_rank_policy()).size() == 16);

  // Numbers as a policy counts: the first one that it takes is its K, and a switch shifts none.
  const std::vector<layer_number> numbers = numbered_layers(net);
  const auto number_of = [&numbers](const std::string& name) {
    const auto found =
        std::find_if(numbers.begin(), numbers.end(), [&](const auto& l) { return l.name == name; });
    return found == numbers.end() ? -1 : found->number;
  };
  CHECK(numbers.size() == 21);
  CHECK(number_of("conv1") == 1);
  CHECK(number_of("layer1.1.conv1") == resnet18_policy().first_layer);
  CHECK(number_of("layer2.0.shortcut.0") == 0);
  CHECK(number_of("layer2.1.conv1") == 8);
  CHECK(number_of("linear") == 18);
  CHECK(number_of("layer1.0.bn1") == -1);
  apply_ranks(net, planned_ranks(net, resnet18_policy()));
  CHECK(numbered_layers(net) == numbers);
}

TEST_CASE("resnet18: options") {
  resnet18_options options;
  options.stem_norm = true;
  network<float> net = resnet18<float>(options);
  CHECK(net.parameter_count() == 11173962);
  CHECK(has_parameter(net, "bn1.weight"));
  options.channels_in = 1;
  options.classes = 100;
  options.width = 4;
  CHECK(resnet18<float>(options).output_shape({2, 28, 28, 1}) == extents<4>{2, 1, 1, 100});
  options.classes = 0;
  CHECK_THROWS_WITH_AS(resnet18<float>(options), doctest::Contains("resnet18: classes is 0"), value_error);
}

TEST_CASE("vgg: published ranks, names") {
  const network<float> net = vgg19<float>();
  CHECK(has_parameter(net, "conv1.weight"));
  CHECK_FALSE(has_parameter(net, "conv1.bias"));
  CHECK(has_parameter(net, "batch_norm16.bias"));
  CHECK(has_parameter(net, "classifier.6.bias"));
  const std::vector<layer_rank> ranks = planned_ranks(net, vgg19_policy());
  REQUIRE(ranks.size() == 9);
  for (const layer_rank& layer : ranks) CHECK(layer.rank() == 128);
  CHECK(ranks[0].name == "conv10");
  CHECK(ranks[6].name == "conv16");
  CHECK(ranks[7].name == "classifier.1");
  CHECK(ranks[8].name == "classifier.4");
  const network<float> lottery = vgg19_lth<float>();
  CHECK(has_parameter(lottery, "fc.weight"));
  CHECK(planned_ranks(lottery, vgg19_policy()).size() == 7);
  CHECK(planned_ranks(vgg11<float>(), vgg11_policy()).front().name == "conv6");
}

TEST_CASE("vgg: options") {
  vgg_options options;
  options.classes = 7;
  options.dropout = 0.0;
  options.width = 3;
  network<float> net = vgg19<float>(options);
  CHECK(net.output_shape({2, 32, 32, 3}) == extents<4>{2, 1, 1, 7});
  CHECK_THROWS_AS(net.output_shape({2, 64, 64, 3}), shape_error);
  options.channels_in = 0;
  CHECK_THROWS_WITH_AS(vgg11<float>(options), doctest::Contains("vgg11: channels_in is 0"), value_error);
  CHECK_THROWS_WITH_AS(vgg19_lth<float>(options), doctest::Contains("vgg19_lth: channels_in is 0"),
                       value_error);
  options.channels_in = 3;
  CHECK_NOTHROW(vgg19_lth<float>(options));
  options.dropout = 0.3;
  CHECK_THROWS_WITH_AS(vgg19_lth<float>(options), doctest::Contains("vgg19_lth: dropout is 0.3"),
                       value_error);
}

TEST_CASE("resnet50: torchvision's names, ranks of the hybrid") {
  const network<float> net = resnet50<float>();
  const std::vector<std::string> names = names_of(net);
  CHECK(names.size() == 161);
  CHECK(std::vector<std::string>(names.begin(), names.begin() + 12) ==
        std::vector<std::string>{"conv1.weight", "bn1.weight", "bn1.bias", "layer1.0.conv1.weight",
                                 "layer1.0.bn1.weight", "layer1.0.bn1.bias", "layer1.0.conv2.weight",
                                 "layer1.0.bn2.weight", "layer1.0.bn2.bias", "layer1.0.conv3.weight",
                                 "layer1.0.bn3.weight", "layer1.0.bn3.bias"});
  CHECK(names[12] == "layer1.0.downsample.0.weight");
  CHECK(names[13] == "layer1.0.downsample.1.weight");
  CHECK(names.back() == "fc.bias");
  CHECK(planned_ranks(net, resnet50_policy()) == std::vector<layer_rank>{{"layer4.0.conv1", 128},
                                                                         {"layer4.0.conv2", 128},
                                                                         {"layer4.0.conv3", 128},
                                                                         {"layer4.0.downsample.0", 256},
                                                                         {"layer4.1.conv1", 128},
                                                                         {"layer4.1.conv2", 128},
                                                                         {"layer4.1.conv3", 128},
                                                                         {"layer4.2.conv1", 128},
                                                                         {"layer4.2.conv2", 128},
                                                                         {"layer4.2.conv3", 128}});
  for (const layer_rank& layer : reference_ranks(net)) {
    if (layer.name == "layer4.0.downsample.0") CHECK(layer.rank() == 128);
    if (layer.name == "layer4.0.conv3") CHECK(layer.rank() == 128);
  }
}

TEST_CASE("ResNets for ImageNet: options") {
  imagenet_resnet_options options;
  options.width = 2;
  options.blocks = {1, 2, 1, 1};
  options.classes = 5;
  CHECK(resnet50<float>(options).output_shape({3, 33, 47, 3}) == extents<4>{3, 1, 1, 5});
  CHECK(has_parameter(resnet34<float>(options), "layer2.1.conv2.weight"));
  CHECK_FALSE(has_parameter(resnet34<float>(options), "layer1.1.conv1.weight"));
  options.factor_bn = true;
  CHECK(has_parameter(resnet34<float>(options), "layer2.0.conv1.down.weight"));
  CHECK(has_parameter(resnet34<float>(options), "layer2.0.conv1.bn.bias"));
  CHECK(has_parameter(resnet34<float>(options), "layer2.0.conv1.up.weight"));
  CHECK_THROWS_WITH_AS(resnet50<float>(options), doctest::Contains("resnet50: factor_bn is for basic blocks"),
                       value_error);
  options.blocks = {1, 2, 0, 1};
  CHECK_THROWS_WITH_AS(resnet34<float>(options), doctest::Contains("resnet34: a stage's blocks is 0"),
                       value_error);
}

double deviation(std::span<const float> values) {
  double squares = 0.0;
  for (const float value : values) squares += static_cast<double>(value) * static_cast<double>(value);
  return std::sqrt(squares / static_cast<double>(values.size()));
}

TEST_CASE("models: initial values of the paper's code") {
  const auto parameter_of = [](const network<float>& net, const std::string& name) {
    for (const auto& entry : net.store().parameters()) {
      if (entry.name == name) return entry.thing->values();
    }
    FAIL("no parameter " << name);
    return std::span<float>();
  };
  vgg_options narrow;
  narrow.width = 16;
  network<float> vgg = vgg11<float>(narrow);
  apply_ranks(vgg, planned_ranks(vgg, vgg_low_rank_policy()));
  vgg.initialize(1);
  CHECK(deviation(parameter_of(vgg, "conv1.weight")) == doctest::Approx(std::sqrt(2.0 / 144)).epsilon(0.1));
  CHECK(deviation(parameter_of(vgg, "conv8.down.weight")) ==
        doctest::Approx(std::sqrt(2.0 / (9 * 32))).epsilon(0.03));
  CHECK(deviation(parameter_of(vgg, "conv8.up.weight")) ==
        doctest::Approx(std::sqrt(2.0 / 128)).epsilon(0.05));
  // U(+-1/sqrt(128)).
  CHECK(deviation(parameter_of(vgg, "classifier.6.weight")) ==
        doctest::Approx(std::sqrt(1.0 / 3 / 128)).epsilon(0.05));

  network<float> lottery = vgg19_lth<float>(narrow);
  lottery.initialize(1);
  CHECK(deviation(parameter_of(lottery, "conv16.weight")) ==
        doctest::Approx(std::sqrt(2.0 / (9 * 128))).epsilon(0.02));
  const auto scale = parameter_of(lottery, "batch_norm16.weight");
  CHECK(*std::min_element(scale.begin(), scale.end()) < 0.1F);
  CHECK(*std::max_element(scale.begin(), scale.end()) > 0.9F);
  CHECK(deviation(parameter_of(lottery, "batch_norm16.bias")) == 0.0);

  imagenet_resnet_options options;
  options.zero_init_residual = true;
  options.width = 16;
  network<float> resnet = resnet50<float>(options);
  resnet.initialize(1);
  CHECK(deviation(parameter_of(resnet, "layer4.1.conv2.weight")) ==
        doctest::Approx(std::sqrt(2.0 / (9 * 128))).epsilon(0.02));
  CHECK(deviation(parameter_of(resnet, "layer4.1.bn3.weight")) == 0.0);
  CHECK(deviation(parameter_of(resnet, "layer4.1.bn2.weight")) == 1.0);
  CHECK(deviation(parameter_of(resnet, "bn1.weight")) == 1.0);
  network<float> basic = resnet34<float>(options);
  basic.initialize(1);
  CHECK(deviation(parameter_of(basic, "layer3.1.bn2.weight")) == 0.0);
  options.zero_init_residual = false;
  network<float> plain = resnet34<float>(options);
  plain.initialize(1);
  CHECK(deviation(parameter_of(plain, "layer3.1.bn2.weight")) == 1.0);
}

TEST_CASE("the switch of VGG-19 and ResNet-18: counts of the state, factors, what is untouched") {
  network<float> resnet = resnet18<float>();
  switch_counts counts = check_switch(resnet, resnet18_policy());
  CHECK(counts.entries == 131);
  CHECK(counts.factors == 28);
  CHECK(counts.untouched == 103);
  network<float> vgg = vgg19<float>();
  counts = check_switch(vgg, vgg19_policy());
  CHECK(counts.entries == 111);
  CHECK(counts.factors == 18);
  CHECK(counts.untouched == 93);
}

TEST_CASE("the switch of networks of bottlenecks, narrow: counts of the state, factors, what is untouched") {
  imagenet_resnet_options options;
  options.width = 8;
  network<double> net = resnet50<double>(options);
  const switch_counts counts = check_switch(net, resnet50_policy());
  CHECK(counts.entries == 330);
  CHECK(counts.factors == 20);
  CHECK(counts.untouched == 310);
  network<double> pure = wide_resnet50_2<double>(options);
  CHECK(check_switch(pure, bottleneck_low_rank_policy()).factors == 2 * 52);
}

// All others: tests/slow/models_full_size.cpp.
TEST_CASE("a training pass at full size: smaller networks of each family") {
  struct chosen {
    const char* name;
    factor_mode mode;
  };
  for (const chosen& c : {chosen{"vgg11_bn", hybrid}, chosen{"resnet18_cifar", dense},
                          chosen{"resnet18_cifar_stem_bn", lowrank}, chosen{"resnet34", lowrank}}) {
    CAPTURE(c.name);
    const zoo_model<float>& model = zoo_model_called<float>(c.name);
    network<float> net = model.make(c.mode);
    extents<4> images = model.image;
    images[0] = images[1] == 32 ? 2 : 1;
    check_training_pass(net, images, model.classes);
  }
}

TEST_CASE("a training pass: narrow networks of bottlenecks") {
  imagenet_resnet_options options;
  options.width = 4;
  network<float> narrow = wide_resnet50_2<float>(options);
  check_training_pass(narrow, {2, 64, 64, 3}, 1000);
  apply_ranks(narrow, reference_ranks(narrow));
  check_training_pass(narrow, {2, 64, 64, 3}, 1000);
}

}  // namespace
