// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <cmath>
#include <cstdio>

#include <pufferfish/models/resnet.hpp>
#include <pufferfish/optim/sgd.hpp>
#include <pufferfish/prune/early_bird.hpp>
#include <pufferfish/prune/scale_sparsity.hpp>

#include "../support/prune_support.hpp"
#include "../support/slice_support.hpp"

namespace {

using namespace slice_support;

std::string bits(const channel_mask& mask) {
  std::string text;
  for (const channel_marks& one : mask) {
    for (const bool kept : one.keep) text += kept ? '1' : '0';
    text += ' ';
  }
  return text;
}

TEST_CASE("prune_channels: exactly floor(q C) smallest, ties in the order of layers and channels") {
  const std::vector<channel_scores> ten{{"a", {0.5, 0.1, 0.9, 0.3}}, {"b", {0.2, 1.0, 0.4, 0.8, 0.6, 0.7}}};
  CHECK(bits(prune_channels(ten, {.share = 0.3})) == "1010 011111 ");
  CHECK(bits(prune_channels(ten, {.share = 0.39})) == "1010 011111 ");
  CHECK(bits(prune_channels(ten, {.share = 0.0})) == "1111 111111 ");
  // The reference program removes one more.
  CHECK(bits(prune_channels(ten, {.share = 0.3, .rule = channel_rule::reference})) == "1010 010111 ");
  const std::vector<channel_scores> equal{{"a", {1, 1}}, {"b", {1, 1, 1, 1}}};
  CHECK(bits(prune_channels(equal, {.share = 0.5})) == "10 0111 ");
  // Equal scores: no channel is above the threshold, and channel 0 of each layer remains.
  CHECK(bits(prune_channels(equal, {.share = 0.5, .rule = channel_rule::reference})) == "10 1000 ");
  // Scores of batch norms outside the groups move the reference's threshold.
  const std::vector<double> others{0.1, 0.15, 0.2, 0.9};
  CHECK(bits(prune_channels({{"a", {0.1, 0.2, 0.9}}}, {.share = 0.5, .rule = channel_rule::reference},
                            others)) == "001 ");
  // A layer that would vanish keeps its largest channel, or is refused.
  CHECK(bits(prune_channels(ten, {.share = 1.0})) == "0010 010000 ");
  CHECK_THROWS_WITH_AS(prune_channels(ten, {.share = 1.0, .last = last_channel::refuse}),
                       doctest::Contains("a: a share of 1 removes all of its 4 channels"), value_error);
  CHECK(bits(prune_channels(ten, {.share = 0.5, .scope = removal_scope::layers})) == "1010 010101 ");
  CHECK_THROWS_AS(prune_channels(ten, {.share = 1.1}), value_error);
  CHECK(prune_channels({}, {.share = 0.0}).empty());
  CHECK_THROWS_WITH_AS(prune_channels({}, {}), doctest::Contains("no channels that can be removed"),
                       value_error);
  const double nan = std::nan("");
  CHECK_THROWS_WITH_AS(prune_channels({{"a", {5, 1}}, {"b", {2, nan, 3}}}, {}),
                       doctest::Contains("channel 1 of b has score nan"), value_error);
  CHECK_THROWS_AS(prune_channels(ten, {.rule = channel_rule::reference}, std::vector<double>{0.1, HUGE_VAL}),
                  value_error);
}

TEST_CASE("criteria: scales of batch norms, and L1 norms of filters, also of low-rank layers") {
  for (example<double>& one : dense_examples<double>()) {
    CAPTURE(one.name);
    const auto groups = channel_groups(one.net);
    const auto scales = norm_scales(one.net);
    REQUIRE(scales.size() == groups.size());
    for (std::size_t g = 0; g < groups.size(); ++g) {
      CHECK(scales[g].layer == groups[g].producer);
      for (const auto& entry : one.net.store().parameters()) {
        if (entry.name != groups[g].norms[0] + ".weight") continue;
        for (std::size_t c = 0; c < scales[g].scores.size(); ++c) {
          CHECK(scales[g].scores[c] == std::abs(entry.thing->values()[c]));
        }
      }
    }
    const auto norms = filter_norms(one.net, group_choice::all);
    CHECK(norms.size() == channel_groups(one.net, group_choice::all).size());
    if (norms.empty()) continue;
    const channel_slicing done =
        slice_channels(one.net, prune_channels(norms, {.share = 0.5, .scope = removal_scope::layers}));
    for (const auto& row : done.rows) CHECK(row.after == row.before - row.before / 2);
  }
  for (example<double>& one : low_rank_examples<double>()) {
    CAPTURE(one.name);
    const auto of_factors = filter_norms(one.net, group_choice::all);
    if (!factor_norm_layers(one.net).empty()) continue;
    merge(one.net);
    const auto norms = filter_norms(one.net, group_choice::all);
    REQUIRE(norms.size() == of_factors.size());
    for (std::size_t g = 0; g < norms.size(); ++g) {
      for (std::size_t c = 0; c < norms[g].scores.size(); ++c) {
        CHECK(of_factors[g].scores[c] == doctest::Approx(norms[g].scores[c]).epsilon(1e-9));
      }
    }
  }
  network<float> kernel(any_layer<float>(Sequential<float>()
                                             .add(Conv<float>(conv_shape::square(1, 2, 1)))
                                             .add(BatchNorm<float>(2))
                                             .add(Conv<float>(conv_shape::square(2, 1, 1)))));
  kernel.store().values()[static_cast<std::size_t>(kernel.parameter_count()) - 1] = -3.0F;
  CHECK(filter_norms(kernel)[0].scores == std::vector<double>{0.0, 3.0});
  CHECK(all_norm_scales(kernel) == std::vector<double>{1.0, 1.0});
  CHECK(all_norm_scales(resnet18<float>()).size() == 1'920 + 1'920 + 128 + 256 + 512);
}

TEST_CASE("early_bird: a ticket is found when five masks agree") {
  const auto mask = [](const char* text) {
    channel_mask one{{"a", {}}};
    for (const char* c = text; *c != 0; ++c) one[0].keep.push_back(*c == '1');
    return one;
  };
  early_bird search({.share = 0.5, .distance = 0.25});
  const char* const masks[] = {"1100", "1100", "0011", "1001", "1001", "1000", "1001"};
  const double distances[] = {0.0, 0.0, 1.0, 0.5, 0.5, 0.75, 0.5};
  for (index_t e = 0; e < 7; ++e) {
    CHECK_FALSE(search.observe(mask(masks[e]), e));
    CHECK(search.distance().value_or(0.0) == distances[e]);
  }
  CHECK(search.observe(mask("1001"), 7));  // 0, 0, 0.25 and 0 from the four masks before

  early_bird hurried({.share = 0.5, .distance = 0.25, .latest = 3});
  for (index_t e = 1; e <= 3; ++e) {
    CHECK(hurried.observe(mask(masks[e]), e) == (e == 3));
  }
  CHECK(hurried.ticket()->mask == mask(masks[3]));
  CHECK(hurried.ticket()->epoch == 3);
}

TEST_CASE("early_bird: fixed scales give a ticket at the fifth mask; state in text") {
  auto all = dense_examples<float>();
  network<float>& net = all[0].net;
  early_bird three({.share = 0.3}), half({.share = 0.5}), half_again({.share = 0.5}),
      reference({.share = 0.5, .rule = channel_rule::reference});
  for (index_t epoch = 1; epoch <= 5; ++epoch) {
    CHECK(three.observe(net, epoch) == (epoch == 5));
    CHECK(half.observe(net, epoch) == (epoch == 5));
    CHECK(reference.observe(net, epoch) == (epoch == 5));
    early_bird resumed({.share = 0.5});
    resumed.restore(half_again.to_text(), "file");
    half_again = resumed;
    CHECK(half_again.observe(net, epoch) == (epoch == 5));
    CHECK(half_again.to_text() == half.to_text());
  }
  const index_t channels = all_channels(half.ticket()->mask);
  CHECK(channels == all_channels(whole_mask(channel_groups(net))));
  CHECK(kept_channels(half.ticket()->mask) == channels - channels / 2);
  CHECK(kept_channels(three.ticket()->mask) == channels - channels * 3 / 10);
  CHECK(kept_channels(reference.ticket()->mask) == channels - channels / 2 - 1);
  CHECK(half.ticket()->epoch == 5);
  early_bird done({.share = 0.5});
  done.restore(half.to_text(), "file");
  CHECK(done.ticket()->mask == half.ticket()->mask);
  CHECK(done.observe(net, 9));
  CHECK(done.ticket()->epoch == 5);
  slice_channels(net, done.ticket()->mask);
  for (const char* text : {"mask 1", "layer a 01", "mask\nlayer a 02", "mask\nlay a 01", "ticket x"}) {
    CHECK_THROWS_WITH_AS(done.restore(text, "file"), doctest::Contains("file: "), io_error);
  }
  // With the channels that residual blocks read.
  network<float>& blocks = all[4].net;
  early_bird with_streams({.share = 0.5, .groups = group_choice::select});
  for (index_t epoch = 1; epoch <= 5; ++epoch) with_streams.observe(blocks, epoch);
  REQUIRE(with_streams.ticket());
  const channel_mask& mask = with_streams.ticket()->mask;
  CHECK(all_channels(mask) == all_channels(whole_mask(channel_groups(blocks, group_choice::select))));
  CHECK(all_channels(mask) > all_channels(whole_mask(channel_groups(blocks))));
  slice_channels(blocks, mask);
  early_bird many({.share = 0.5, .masks = 10}), few({.share = 0.5, .masks = 2});
  for (index_t epoch = 1; epoch <= 5; ++epoch) many.observe(blocks, epoch);
  CHECK_THROWS_WITH_AS(few.restore(many.to_text(), "file"), doctest::Contains("file: 5 masks"), state_error);
  CHECK(few.to_text().empty());
  // Nothing can be removed.
  Sequential<float> layers;
  layers.add("fc", Linear<float>(3, 4));
  const network<float> without{any_layer<float>(std::move(layers))};
  CHECK_THROWS_AS(few.observe(without, 1), value_error);
  CHECK_THROWS_AS(early_bird({.masks = 1}), value_error);
  CHECK_THROWS_AS(early_bird({.share = -0.5}), value_error);
  CHECK_THROWS_AS(early_bird({.distance = 2.0}), value_error);
}

TEST_CASE_TEMPLATE("scale_sparsity: the gradient of s sum |gamma|, for batch norms only", T, float, double) {
  auto all = dense_examples<T>();
  network<T>& net = all[4].net;
  scale_sparsity<T> sparsity(net.store(), 0.25);
  index_t scales = 0;
  for (const auto& entry : net.store().parameters()) {
    if (entry.name.ends_with(".weight") && entry.thing->role() == parameter_role::norm) {
      scales += entry.thing->size();
      entry.thing->values()[0] = T(0);
      entry.thing->values()[1] = T(-2);
    }
  }
  CHECK(sparsity.size() == scales);
  CHECK(sparsity.size() == static_cast<index_t>(all_norm_scales(net).size()));
  std::ranges::fill(net.store().gradients(), T(1));
  sparsity.add();
  const std::vector<T> whole(net.store().gradients().begin(), net.store().gradients().end());
  double sum = 0.0;
  for (const auto& entry : net.store().parameters()) {
    const bool is_scale = entry.name.ends_with(".weight") && entry.thing->role() == parameter_role::norm;
    for (index_t i = 0; i < entry.thing->size(); ++i) {
      const T value = entry.thing->values()[static_cast<std::size_t>(i)];
      const T sign = value > T(0) ? T(1) : value < T(0) ? T(-1) : T(0);
      CHECK(entry.thing->gradient()[static_cast<std::size_t>(i)] ==
            T(1) + (is_scale ? T(0.25) * sign : T(0)));
      sum += is_scale ? 0.25 * std::abs(static_cast<double>(value)) : 0.0;
    }
  }
  CHECK(sparsity.penalty() == doctest::Approx(sum));
  // In parts.
  std::ranges::fill(net.store().gradients(), T(1));
  for (const auto& entry : net.store().parameters()) sparsity.add(entry.offset, entry.thing->size());
  CHECK(prune_support::same_bits<T>(net.store().gradients(), whole));
  CHECK_THROWS_AS(scale_sparsity<T>(net.store(), -1.0), value_error);
  slice_channels(net, prune_channels(norm_scales(net)));
  CHECK_THROWS_AS(sparsity.add(), state_error);
}

TEST_CASE("docs: slicing a network") {
  network<float> net = vgg11<float>({.width = 8});
  net.initialize(1);
  const index_t before = net.parameter_count();
  // [slicing]
  const channel_mask mask = prune_channels(norm_scales(net), {.share = 0.5});
  const channel_slicing done = slice_channels(net, mask);
  for (const channel_slicing::row& row : done.rows) {
    std::printf("%s: %td of %td channels\n", row.layer.c_str(), row.after, row.before);
  }
  SGD<float> optimizer(make_optimizer_target(net.store()), {.momentum = 0.9});  // the old one is of no use
  // [slicing]
  CHECK(done.parameters_after < before);
}

TEST_CASE("docs: searching for an Early-Bird ticket") {
  network<float> net = vgg11<float>({.width = 4});
  net.initialize(1);
  cpu_context ctx;
  SGD<float> optimizer(make_optimizer_target(net.store()), {.momentum = 0.9});
  const int steps = 2;
  const auto forward_and_backward = [&](int) { std::ranges::fill(net.store().gradients(), 0.0F); };
  // [search]
  early_bird search({.share = 0.5});
  scale_sparsity<float> sparsity(net.store(), 1e-4);
  for (index_t epoch = 1; !search.ticket(); ++epoch) {
    for (int step = 0; step < steps; ++step) {
      forward_and_backward(step);
      sparsity.add();
      optimizer.step(ctx, 0.1);
    }
    search.observe(net, epoch);
  }
  slice_channels(net, search.ticket()->mask);
  // [search]
  CHECK(search.ticket()->epoch == 5);
}

}  // namespace
