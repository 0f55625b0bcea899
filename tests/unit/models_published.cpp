// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <pufferfish/models/resnet.hpp>
#include <pufferfish/models/vgg.hpp>
#include <string>
#include <vector>

namespace {

using namespace pufferfish;

bool has_parameter(const network<float>& net, const std::string& name) {
  const auto& all = net.store().parameters();
  return std::any_of(all.begin(), all.end(), [&](const auto& entry) { return entry.name == name; });
}

struct expected {
  index_t dense_parameters, hybrid_parameters, dense_macs, hybrid_macs;
};

/// Counts of the paper and of its published code, before and after what the paper factorizes.
std::vector<layer_rank> check_counts(network<float>& net, const factorize_policy& policy,
                                     const expected& counts) {
  const extents<4> image{1, 32, 32, 3};
  net.initialize(3);
  CHECK(net.output_shape({5, 32, 32, 3}) == extents<4>{5, 1, 1, 10});
  CHECK(net.parameter_count() == counts.dense_parameters);
  CHECK(net.macs(image) == counts.dense_macs);
  const factorization done = factorize(net, policy);
  CHECK(done.parameters_before == counts.dense_parameters);
  CHECK(done.parameters_after == counts.hybrid_parameters);
  CHECK(done.kept_dense.empty());
  CHECK(net.parameter_count() == counts.hybrid_parameters);
  CHECK(net.macs(image) == counts.hybrid_macs);
  CHECK(net.output_shape({5, 32, 32, 3}) == extents<4>{5, 1, 1, 10});
  return done.ranks();
}

TEST_CASE("resnet18 has the published counts, dense and hybrid") {
  network<float> net = resnet18<float>();
  CHECK(has_parameter(net, "conv1.weight"));
  CHECK_FALSE(has_parameter(net, "conv1.bias"));
  CHECK_FALSE(has_parameter(net, "bn1.weight"));
  const std::vector<layer_rank> ranks =
      check_counts(net, resnet18_policy(), {11173834, 3336138, 555422720, 216208384});
  CHECK(ranks == std::vector<layer_rank>{{"layer1.1.conv1", 16},
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
}

TEST_CASE("resnet18: options") {
  resnet18_options options;
  options.stem_norm = true;
  network<float> net = resnet18<float>(options);
  CHECK(net.parameter_count() == 11173962);
  CHECK(has_parameter(net, "bn1.weight"));
  options.channels_in = 1;
  options.classes = 100;
  CHECK(resnet18<float>(options).output_shape({2, 28, 28, 1}) == extents<4>{2, 1, 1, 100});
  options.classes = 0;
  CHECK_THROWS_WITH_AS(resnet18<float>(options), doctest::Contains("resnet18: classes is 0"), value_error);
}

TEST_CASE("vgg19 has the published counts, dense and hybrid") {
  network<float> net = vgg19<float>();
  CHECK(has_parameter(net, "features.0.weight"));
  CHECK_FALSE(has_parameter(net, "features.0.bias"));
  const std::vector<layer_rank> ranks =
      check_counts(net, vgg19_policy(), {20560330, 8370634, 398660608, 289346560});
  REQUIRE(ranks.size() == 9);
  for (const layer_rank& layer : ranks) CHECK(layer.rank == 128);
  CHECK(ranks[6].name.rfind("features.", 0) == 0);
  CHECK(ranks[7].name == "classifier.1");
  CHECK(ranks[8].name == "classifier.4");
}

TEST_CASE("vgg19: options") {
  vgg19_options options;
  options.classes = 7;
  options.dropout = 0.0;
  network<float> net = vgg19<float>(options);
  CHECK(net.output_shape({2, 32, 32, 3}) == extents<4>{2, 1, 1, 7});
  CHECK_THROWS_AS(net.output_shape({2, 64, 64, 3}), shape_error);
  options.channels_in = 0;
  CHECK_THROWS_WITH_AS(vgg19<float>(options), doctest::Contains("vgg19: channels_in is 0"), value_error);
}

}  // namespace
