// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/models/resnet.hpp>
#include <pufferfish/nn/accounting.hpp>

#include "../../support/host_pointwise_conv.hpp"
#include "../../support/prune_support.hpp"
#include "../../support/slice_support.hpp"

namespace {

using namespace slice_support;
using prune_support::same_bits;

TEST_CASE_TEMPLATE("slicing: a sliced network computes what the masked one does, with its gradients", T,
                   float, double) {
  for (example<T>& one : dense_examples<T>()) {
    for (const double share : {0.0, 0.3, 0.7, 1.0}) check_sliced_is_masked(one, group_choice::all, share, 1);
  }
}

TEST_CASE_TEMPLATE("slicing: the same with low-rank layers", T, float, double) {
  for (example<T>& one : low_rank_examples<T>()) {
    for (const double share : {0.2, 0.5}) {
      const bool has_norms = !factor_norm_layers(one.net).empty();
      check_sliced_is_masked(one, group_choice::all, has_norms ? share / 2 : share, 2);
    }
  }
}

TEST_CASE("slicing: the groups of networks") {
  const auto line = [](const channel_group& group) {
    return group.producer + " " + (group.norms.empty() ? "-" : group.norms[0]) + " " + group.consumer + " " +
           std::to_string(group.channels) + " " + std::to_string(group.pixels);
  };
  const auto lines = [&](const network<float>& net, group_choice choice) {
    std::vector<std::string> all;
    for (const channel_group& group : channel_groups(net, choice)) all.push_back(line(group));
    return all;
  };
  const network<float> plain = small_vgg<float>({.image = {8, 8}, .width = 4, .hidden = 10});
  using texts = std::vector<std::string>;
  const texts convolutions{"features.0 features.1 features.3 4 1", "features.3 features.4 features.7 4 1",
                           "features.7 features.8 features.10 8 1",
                           "features.10 features.11 classifier.1 8 4"};
  texts with_hidden = convolutions;
  with_hidden.push_back("classifier.1 - classifier.4 10 1");
  CHECK(lines(plain, group_choice::normed) == convolutions);
  CHECK(lines(plain, group_choice::all) == with_hidden);
  const network<float> blocks = small_resnet<float>({.width = 4, .stages = 2});
  CHECK(lines(blocks, group_choice::all) == texts{"layer1.0.conv1 layer1.0.bn1 layer1.0.conv2 4 1",
                                                  "layer2.0.conv1 layer2.0.bn1 layer2.0.conv2 8 1"});
  const network<float> bottlenecks = resnet50<float>({.blocks = {1, 1, 1, 1}, .width = 2});
  CHECK(lines(bottlenecks, group_choice::all).size() == 8);
  CHECK(lines(bottlenecks, group_choice::all)[1] == "layer1.0.conv2 layer1.0.bn2 layer1.0.conv3 2 1");
  // Convolutions of several groups, and sigmoids, neither produce nor pass channels.
  Sequential<float> layers;
  conv_shape depthwise = conv_shape::square(4, 4, 3, 1, 1);
  depthwise.groups = 4;
  layers.add("a", Conv<float>(conv_shape::square(2, 4, 1)))
      .add("b", Conv<float>(depthwise))
      .add("c", Conv<float>(conv_shape::square(4, 4, 1)))
      .add("sigmoid", Sigmoid<float>())
      .add("d", Conv<float>(conv_shape::square(4, 3, 1)))
      .add("e", Conv<float>(conv_shape::square(3, 2, 1)));
  CHECK(lines(network<float>(std::move(layers)), group_choice::all) == texts{"d - e 3 1"});
}

/// Keeps the first share of the channels of every group.
channel_mask first_part(const std::vector<channel_group>& groups, index_t part) {
  channel_mask mask = whole_mask(groups);
  for (channel_marks& marks : mask) {
    const auto kept = static_cast<std::ptrdiff_t>(marks.keep.size()) / part;
    std::fill(marks.keep.begin() + kept, marks.keep.end(), false);
  }
  return mask;
}

TEST_CASE("slicing: counts of published networks") {
  struct row {
    network<float> net;
    index_t part, channels, parameters;
    extents<4> images;
  };
  std::vector<row> rows;
  rows.push_back({vgg19_lth<float>(), 2, 5'504, 5'013'226, {1, 32, 32, 3}});
  rows.push_back({vgg19_lth<float>(), 4, 5'504, 1'255'546, {1, 32, 32, 3}});
  rows.push_back({resnet18<float>(), 2, 1'920, 5'679'178, {1, 32, 32, 3}});
  rows.push_back({resnet50<float>(), 2, 7'552, 12'381'864, {1, 224, 224, 3}});
  for (row& wanted : rows) {
    const auto groups = channel_groups(wanted.net);
    CHECK(all_channels(whole_mask(groups)) == wanted.channels);
    const channel_slicing done = slice_channels(wanted.net, first_part(groups, wanted.part));
    CHECK(done.parameters_after == wanted.parameters);
    CHECK(cost_of(wanted.net, wanted.images).total().parameters == wanted.parameters);
    CHECK(done.rows.size() == groups.size());
  }
}

TEST_CASE("slicing: values are copied bit for bit, names stay, and buffers are those of the channels") {
  auto all = dense_examples<float>();
  example<float>& one = all[2];
  channel_mask mask = whole_mask(channel_groups(one.net));
  remove_channels(mask, 0.5, 9);
  const network<float> before = one.net;
  slice_channels(one.net, mask);
  const auto& old = before.store().parameters();
  const auto& now = one.net.store().parameters();
  REQUIRE(old.size() == now.size());
  for (std::size_t i = 0; i < old.size(); ++i) CHECK(old[i].name == now[i].name);
  CHECK(one.net.generation() > before.generation());
  const auto value_of = [](const network<float>& net, const std::string& name) {
    for (const auto& entry : net.store().buffer_entries()) {
      if (entry.name == name)
        return std::vector<float>(entry.thing->values().begin(), entry.thing->values().end());
    }
    return std::vector<float>();
  };
  std::vector<float> wanted;
  const std::vector<float> variance = value_of(before, "features.4.running_var");
  for (std::size_t c = 0; c < variance.size(); ++c) {
    if (mask[1].keep[c]) wanted.push_back(variance[c]);
  }
  CHECK(value_of(one.net, "features.4.running_var") == wanted);
  // A mask that keeps everything changes nothing but the generation.
  network<float> same = before;
  CHECK(slice_channels(same, whole_mask(channel_groups(same))).rows.empty());
  CHECK(same_bits<float>(same.store().values(), before.store().values()));
}

TEST_CASE("slicing and factorizing in any order") {
  for (example<float>& one : dense_examples<float>()) {
    CAPTURE(one.name);
    factorize_policy policy;
    policy.rank = rank_ratio{0.25};
    channel_mask mask = whole_mask(channel_groups(one.net));
    remove_channels(mask, 0.4, 4);
    if (mask.empty()) continue;
    network<float> first = one.net, second = one.net;
    slice_channels(first, mask);
    const network<float> sliced = first;
    factorize(first, policy);
    CHECK(first.parameter_count() < sliced.parameter_count());
    CHECK_NOTHROW(step_results<float>(first, one.images));
    factorize(second, policy);
    slice_channels(second, mask);
    CHECK_NOTHROW(step_results<float>(second, one.images));
  }
  // Of a network whose matrices have low rank, the order makes no difference but rounding, also where a layer
  // becomes dense.
  index_t made_dense = 0;
  for (example<float>& one : low_rank_examples<float>()) {
    if (!factor_norm_layers(one.net).empty()) continue;
    CAPTURE(one.name);
    channel_mask mask = whole_mask(channel_groups(one.net, group_choice::all));
    remove_channels(mask, 0.8, 4);
    network<float> first = one.net, second = one.net;
    made_dense += static_cast<index_t>(slice_channels(first, mask).made_dense.size());
    merge(second);
    slice_channels(second, mask);
    const step_results<float> a(first, one.images), b(second, one.images);
    CHECK(difference(a.inference, b.inference) < 1e-4);
    merge(first);
    CHECK(first.structure() == second.structure());
  }
  CHECK(made_dense > 5);
}

TEST_CASE("slicing: a layer of another library is sliced into one of this library") {
  Sequential<float> layers;
  layers.add("a", host::PointwiseConv(3, 6)).add("relu", ReLU<float>());
  layers.add("b", host::PointwiseConv(6, 2));
  network<float> net(std::move(layers));
  fill_normal(net.store().values(), 1.0, random_stream(1, 1));
  channel_mask mask = whole_mask(channel_groups(net, group_choice::all));
  REQUIRE(mask.size() == 1);
  mask[0].keep[1] = mask[0].keep[4] = false;
  network<float> masked = net;
  mask_channels(masked, mask);
  slice_channels(net, mask);
  const extents<4> images{2, 3, 3, 3};
  CHECK(net.root().describe() == "sequential of 3");
  CHECK(difference(step_results<float>(net, images).inference,
                   step_results<float>(masked, images).inference) < 1e-6);
}

TEST_CASE("apply_widths: the structure without the values, and back") {
  for (example<float>& one : low_rank_examples<float>()) {
    CAPTURE(one.name);
    network<float> cut = one.net, other = one.net, back = one.net;
    channel_mask mask = whole_mask(channel_groups(one.net, group_choice::all));
    remove_channels(mask, 0.2, 6);
    const channel_slicing done = slice_channels(cut, mask);
    if (!done.made_dense.empty()) continue;
    apply_widths(other, layer_widths(cut));
    CHECK(other.structure() == cut.structure());
    CHECK(layer_widths(other) == layer_widths(cut));
    copy_state(cut, other);
    const step_results<float> a(cut, one.images), b(other, one.images);
    CHECK(a.training == b.training);
    apply_widths(other, layer_widths(back));
    CHECK(other.structure() == back.structure());
  }
}

TEST_CASE("slicing: what is refused leaves the network unchanged") {
  auto all = dense_examples<float>();
  network<float>& net = all[4].net;  // basic blocks
  const network<float> before = net;
  const std::uint64_t generation = net.generation();
  const channel_mask good = whole_mask(channel_groups(net));
  const auto refused = [&](const channel_mask& mask, const char* text, auto error) {
    CHECK_THROWS_WITH_AS(slice_channels(net, mask), doctest::Contains(text), decltype(error));
    CHECK_THROWS_WITH_AS(mask_channels(net, mask), doctest::Contains(text), decltype(error));
  };
  channel_mask mask = good;
  mask[1].keep.assign(mask[1].keep.size(), false);
  refused(mask, "layer1.1.conv1: none of its 6 channels would remain", value_error(""));
  mask = good;
  mask[0].keep.pop_back();
  refused(mask, "layer1.0.conv1: 5 marks for 6 channels", value_error(""));
  mask = good;
  mask.push_back(good[0]);
  refused(mask, "layer1.0.conv1: the mask lists this layer twice", value_error(""));
  mask = good;
  mask[0].layer = "conv1";  // the stem
  refused(mask, "conv1: the network has no layer", state_error(""));
  CHECK_THROWS_AS(apply_widths(net, {{"conv1", 3}}), state_error);
  CHECK_THROWS_AS(apply_widths(net, {{"layer1.0.conv1", 0}}), value_error);
  CHECK_THROWS_AS(sliced_values<float>(net, std::span<const float>(), [](auto&) {}), shape_error);
  CHECK(net.structure() == before.structure());
  CHECK(same_bits<float>(net.store().values(), before.store().values()));
  // A LowRankNormConv cannot become dense.
  auto low = low_rank_examples<float>();
  network<float>& norms = low.back().net;
  mask = whole_mask(channel_groups(norms));
  std::fill(mask[0].keep.begin() + 1, mask[0].keep.end(), false);
  CHECK_THROWS_WITH_AS(slice_channels(norms, mask), doctest::Contains("layer1.0.conv1: rank 2"), rank_error);
  CHECK(net.generation() >= generation);
}

TEST_CASE("channel masks: distance") {
  const channel_mask a{{"a", {true, true, false, true}}}, b{{"a", {true, false, false, true}}};
  CHECK(mask_distance(a, b) == 0.25);
  CHECK(mask_distance(a, a) == 0.0);
  CHECK(mask_distance({}, {}) == 0.0);
  CHECK(kept_channels(a) == 3);
  CHECK(all_channels(a) == 4);
  CHECK_THROWS_AS(mask_distance(a, {}), value_error);
  CHECK_THROWS_AS(mask_distance(a, {{"b", {true, true, true, true}}}), value_error);
  CHECK_THROWS_AS(mask_distance(a, {{"a", {true}}}), value_error);
}

}  // namespace
