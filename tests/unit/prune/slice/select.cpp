// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Branches of residual blocks that read a part of the stream.
#include <algorithm>

#include <pufferfish/models/resnet.hpp>
#include <pufferfish/nn/accounting.hpp>
#include <pufferfish/prune/channel_criteria.hpp>

#include "../../support/slice_support.hpp"

namespace {

using namespace slice_support;
using names = std::vector<std::string>;

/// Blocks whose branches begin with a batch norm, one of them within another one.
template <class T>
example<T> pre_activation() {
  const auto block = [] {
    Sequential<T> branch;
    branch.add("bn1", BatchNorm<T>(6)).add("relu1", ReLU<T>());
    branch.add("conv1", Conv<T>(conv_shape::square(6, 5, 3, 1, 1)));
    branch.add("bn2", BatchNorm<T>(5)).add("relu2", ReLU<T>());
    branch.add("conv2", Conv<T>(conv_shape::square(5, 6, 3, 1, 1)));
    return branch;
  };
  Sequential<T> layers, nested;
  nested.add("conv0", Conv<T>(conv_shape::square(6, 6, 1)));
  nested.add("inner", Residual<T>(block(), {}, false));
  layers.add("stem", Conv<T>(conv_shape::square(3, 6, 3, 1, 1)));
  layers.add("a", Residual<T>(block(), {}, false)).add("b", Residual<T>(std::move(nested), {}, false));
  layers.add("bn", BatchNorm<T>(6)).add("relu", ReLU<T>());
  layers.add("pool", GlobalAvgPool<T>()).add("fc", Linear<T>(6, 4));
  example<T> one{"pre-activation", network<T>(any_layer<T>(std::move(layers))), {3, 6, 6, 3}};
  fill_network(one.net);
  return one;
}

template <class T>
std::vector<example<T>> residual_examples() {
  std::vector<example<T>> all, dense = dense_examples<T>(), low = low_rank_examples<T>();
  for (const std::size_t i : {std::size_t{4}, std::size_t{5}}) {
    all.push_back(std::move(dense[i]));
    all.push_back(std::move(low[i]));
  }
  all.push_back(std::move(low[6]));
  all.push_back(pre_activation<T>());
  return all;
}

names select_names(const std::vector<channel_group>& groups) {
  names all;
  for (const channel_group& group : groups) {
    if (group.stream > 0) all.push_back(group.producer + " " + group.scale + " " + group.consumer);
  }
  return all;
}

template <class Net>
index_t select_layers(const Net& net) {
  index_t count = 0;
  net.for_each_layer([&](const std::string&, const any_layer<float>& layer) {
    count += layer.template target<ChannelSelect<float>>() != nullptr ? 1 : 0;
  });
  return count;
}

TEST_CASE("select: the groups of networks, with the batch norms that scale the channels") {
  const network<float> basic = small_resnet<float>({.width = 6, .blocks = 2, .stages = 2});
  const names wanted{"layer1.0.select bn1 layer1.0.conv1", "layer1.1.select layer1.0.bn2 layer1.1.conv1",
                     "layer2.0.select layer1.1.bn2 layer2.0.conv1",
                     "layer2.1.select layer2.0.bn2 layer2.1.conv1"};
  CHECK(select_names(channel_groups(basic, group_choice::select)) == wanted);
  CHECK(select_names(channel_groups(basic, group_choice::any)) == wanted);
  CHECK(select_names(channel_groups(basic)).empty());
  CHECK(select_names(channel_groups(basic, group_choice::all)).empty());
  // Without a batch norm in the stem, nothing scales what the first block reads.
  const network<float> no_norm = resnet18<float>({.width = 4});
  CHECK(select_names(channel_groups(no_norm, group_choice::select)).size() == 7);
  CHECK(select_names(channel_groups(no_norm, group_choice::any))[0] == "layer1.0.select  layer1.0.conv1");
  // Through the pooling of the stem, and into bottlenecks.
  const network<float> deep = resnet50<float>({.blocks = {1, 2, 1, 1}, .width = 2});
  const auto groups = channel_groups(deep, group_choice::select);
  CHECK(select_names(groups)[0] == "layer1.0.select bn1 layer1.0.conv1");
  CHECK(select_names(groups)[2] == "layer2.1.select layer2.0.bn3 layer2.1.conv1");
  CHECK(groups[0].channels == 2);
  CHECK(groups[0].stream == 2);
  CHECK(select_names(channel_groups(pre_activation<float>().net, group_choice::any)) ==
        names{"a.select a.bn1 a.conv1", "b.select  b.conv0", "b.inner.select b.inner.bn1 b.inner.conv1"});
  // A layer of this name elsewhere in the block keeps the branch as it is.
  Sequential<float> branch, layers;
  branch.add("conv", Conv<float>(conv_shape::square(2, 2, 1))).add("select", ReLU<float>());
  layers.add("stem", Conv<float>(conv_shape::square(1, 2, 1))).add("block", Residual<float>(branch));
  CHECK(channel_groups(network<float>(any_layer<float>(std::move(layers))), group_choice::any).empty());
}

TEST_CASE_TEMPLATE("select: a sliced network computes what the masked one does, with its gradients", T, float,
                   double) {
  for (example<T>& one : residual_examples<T>()) {
    for (const double share : {0.0, 0.15, 0.5, 1.0}) {
      if (share > 0.2 && !factor_norm_layers(one.net).empty()) continue;  // ranks would not fit
      check_sliced_is_masked(one, group_choice::any, share, 1);
    }
  }
}

TEST_CASE("select: slicing twice composes the lists; factorizing after slicing; the way back") {
  for (example<float>& one : residual_examples<float>()) {
    CAPTURE(one.name);
    if (!factor_norm_layers(one.net).empty()) continue;
    channel_mask first = whole_mask(channel_groups(one.net, group_choice::any));
    remove_channels(first, 0.3, 2);
    network<float> cut = one.net;
    slice_channels(cut, first);
    CHECK(select_layers(cut) > 0);
    example<float> again{one.name + ", sliced", cut, one.images};
    check_sliced_is_masked(again, group_choice::any, 0.4, 3);
    channel_mask second = whole_mask(channel_groups(cut, group_choice::any));
    remove_channels(second, 0.4, 3);
    slice_channels(cut, second);
    // Both at once.
    channel_mask both = first;
    for (std::size_t g = 0; g < both.size(); ++g) {
      REQUIRE(both[g].layer == second[g].layer);
      std::size_t next = 0;
      for (std::size_t c = 0; c < both[g].keep.size(); ++c) {
        if (first[g].keep[c]) both[g].keep[c] = second[g].keep[next++];
      }
    }
    network<float> at_once = one.net;
    slice_channels(at_once, both);
    CHECK(layer_widths(cut) == layer_widths(at_once));
    const bool low_rank = !low_rank_layers(one.net).empty();
    const step_results<float> a(cut, one.images), b(at_once, one.images);
    CHECK(difference(a.inference, b.inference) < (low_rank ? 1e-5 : 1e-30));
    // Widths of the whole network remove the layers again.
    network<float> back = cut;
    apply_widths(back, layer_widths(one.net));
    CHECK(select_layers(back) == 0);
    if (!low_rank) CHECK(back.structure() == one.net.structure());
    if (low_rank) continue;
    factorize_policy policy;
    policy.first_layer = 1;
    factorize(cut, policy);
    CHECK_NOTHROW(step_results<float>(cut, one.images));
    CHECK(select_layers(cut) == select_layers(at_once));
  }
}

TEST_CASE("select: counts of published networks, every group halved; numbers of layers stay") {
  struct row {
    network<float> net;
    index_t channels, parameters;
    extents<4> images;
  };
  std::vector<row> rows;
  rows.push_back({resnet18<float>({.stem_norm = true}), 1'920 + 1'472, 4'499'658, {1, 32, 32, 3}});
  rows.push_back({resnet50<float>(), 7'552 + 13'120, 11'299'496, {1, 224, 224, 3}});
  for (row& wanted : rows) {
    channel_mask mask = whole_mask(channel_groups(wanted.net, group_choice::select));
    CHECK(all_channels(mask) == wanted.channels);
    for (channel_marks& marks : mask) {
      std::fill_n(marks.keep.begin(), marks.keep.size() / 2, false);
    }
    const auto numbers = numbered_layers(wanted.net);
    CHECK(slice_channels(wanted.net, mask).parameters_after == wanted.parameters);
    CHECK(cost_of(wanted.net, wanted.images).total().parameters == wanted.parameters);
    CHECK(numbered_layers(wanted.net) == numbers);
  }
}

TEST_CASE("select: scales of the batch norms before the blocks, and norms of what reads the channels") {
  network<float> net = small_resnet<float>({.width = 6, .blocks = 2, .stages = 2});
  fill_network(net);
  const auto scales_of = [&](const std::string& norm) {
    std::vector<double> scales;
    for (const auto& entry : net.store().parameters()) {
      if (entry.name != norm + ".weight") continue;
      for (const float value : entry.thing->values()) scales.push_back(std::abs(value));
    }
    return scales;
  };
  const auto score_of = [](const std::vector<channel_scores>& all, const std::string& layer) {
    for (const channel_scores& one : all) {
      if (one.layer == layer) return one.scores;
    }
    return std::vector<double>();
  };
  const auto scores = norm_scales(net, group_choice::select);
  CHECK(scores.size() == 8);
  CHECK(score_of(scores, "layer1.0.select") == scales_of("bn1"));
  CHECK(score_of(scores, "layer2.0.select") == scales_of("layer1.1.bn2"));
  const channel_mask mask = prune_channels(scores, {.share = 0.99});
  for (const channel_marks& marks : mask) CHECK(marks.kept() == 1);
  CHECK(score_of(filter_norms(net, group_choice::select), "layer1.1.select").size() == 6);
  channel_mask part = whole_mask({channel_groups(net, group_choice::select)[2]});
  REQUIRE(part[0].layer == "layer1.1.select");
  part[0].keep[0] = part[0].keep[4] = false;
  slice_channels(net, part);
  std::vector<double> wanted = scales_of("layer1.0.bn2");
  wanted.erase(wanted.begin() + 4);
  wanted.erase(wanted.begin());
  CHECK(score_of(norm_scales(net, group_choice::select), "layer1.1.select") == wanted);
  // An input that is zero has no norm.
  part = {{"layer1.1.select", {true, false, true, true}}};
  mask_channels(net, part);
  const auto norms = score_of(filter_norms(net, group_choice::select), "layer1.1.select");
  REQUIRE(norms.size() == 4);
  CHECK(norms[1] == 0.0);
  CHECK(norms[0] > 0.0);
}

TEST_CASE("select: what is refused") {
  network<float> net = small_resnet<float>({.width = 6, .blocks = 1, .stages = 1});
  const std::string before = net.structure();
  CHECK_THROWS_WITH_AS(apply_widths(net, {{"layer1.0.select", 7}}),
                       doctest::Contains("layer1.0.select: 7 channels, not at least 1 and at most 6"),
                       value_error);
  CHECK_THROWS_WITH_AS(slice_channels(net, {{"layer1.0.select", std::vector<bool>(6, false)}}),
                       doctest::Contains("layer1.0.select: none of its 6 channels would remain"),
                       value_error);
  CHECK(net.structure() == before);
  slice_channels(net, {{"layer1.0.select", {true, false, true, true, true, true}}});
  CHECK(net.store().buffer_entries().size() > 0);
  CHECK_THROWS_AS(slice_channels(net, {{"layer1.0.select", std::vector<bool>(6, true)}}), value_error);
}

}  // namespace
