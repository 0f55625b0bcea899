// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/models/imagenet_resnet.hpp>
#include <pufferfish/models/small_resnet.hpp>
#include <pufferfish/models/small_vgg.hpp>
#include <pufferfish/models/vgg.hpp>
#include <pufferfish/nn/accounting.hpp>
#include <pufferfish/nn/loss.hpp>
#include <pufferfish/prune/slice/slice_channels.hpp>

/// What tests of slicing share: small networks of all structures, random masks, and the comparison of a
/// network with a sliced one.
namespace slice_support {

using namespace pufferfish;

/// All values random, so that no channel is trivial.
template <class T>
void fill_network(network<T>& net, std::uint64_t seed = 3) {
  net.initialize(seed);
  std::uint64_t number = 0;
  for (const auto& entry : net.store().parameters()) {
    const random_stream random(seed, 100 + number++);
    const bool is_scale = entry.thing->role() == parameter_role::norm && entry.name.ends_with("weight");
    if (entry.thing->role() == parameter_role::weight) continue;
    fill_uniform(entry.thing->values(), is_scale ? 0.5 : -0.5, is_scale ? 1.5 : 0.5, random);
  }
  for (const auto& entry : net.store().buffer_entries()) {
    const random_stream random(seed, 100 + number++);
    const bool is_mean = entry.name.ends_with("mean");
    if (entry.name.ends_with("tracked")) continue;
    fill_uniform(entry.thing->values(), is_mean ? -0.5 : 0.5, is_mean ? 0.5 : 1.5, random);
  }
}

/// A network with the shape of its images.
template <class T>
struct example {
  std::string name;
  network<T> net;
  extents<4> images;
};

template <class T>
std::vector<example<T>> dense_examples() {
  std::vector<example<T>> all;
  all.push_back({"VGG", vgg11<T>({.dropout = 0.0, .width = 6}), {3, 32, 32, 3}});
  all.push_back({"VGG of the lottery tickets", vgg19_lth<T>({.dropout = 0.0, .width = 4}), {3, 32, 32, 3}});
  all.push_back({"VGG, four pixels to the linear layer",
                 small_vgg<T>({.image = {8, 8}, .width = 6, .hidden = 10, .dropout = 0.0}),
                 {4, 8, 8, 3}});
  all.push_back(
      {"VGG without batch norm",
       small_vgg<T>({.image = {8, 8}, .width = 6, .hidden = 10, .dropout = 0.0, .batch_norm = false}),
       {4, 8, 8, 3}});
  all.push_back({"basic blocks", small_resnet<T>({.width = 6, .blocks = 2}), {3, 12, 12, 3}});
  all.push_back(
      {"bottlenecks", resnet50<T>({.classes = 7, .blocks = {1, 2, 1, 1}, .width = 6}), {3, 40, 40, 3}});
  for (example<T>& one : all) fill_network(one.net);
  return all;
}

/// The same with low-rank layers, and one with batch norms between the factors.
template <class T>
std::vector<example<T>> low_rank_examples() {
  std::vector<example<T>> all = dense_examples<T>();
  factorize_policy policy;
  policy.first_layer = 1;
  policy.rank = rank_ratio{0.3};
  policy.last_layer_dense = policy.shortcuts_dense = policy.keep_dense_if_larger = false;
  for (example<T>& one : all) {
    one.name += ", low rank";
    factorize(one.net, policy);
  }
  all.push_back({"batch norms between factors",
                 resnet18_imagenet<T>({.classes = 7, .blocks = {1, 1, 1, 1}, .width = 8, .factor_bn = true}),
                 {3, 40, 40, 3}});
  fill_network(all.back().net);
  return all;
}

/// Removes each channel with probability `share`, but never the last one.
inline void remove_channels(channel_mask& mask, double share, std::uint64_t seed) {
  const random_stream random(seed, 77);
  std::uint64_t number = 0;
  for (channel_marks& marks : mask) {
    for (std::size_t c = 0; c < marks.keep.size(); ++c) {
      if (random.uniform(number++) < share && marks.kept() > 1) marks.keep[c] = false;
    }
  }
}

/// Outputs in inference and in training, and gradients, of a step on random images.
template <class T>
struct step_results {
  std::vector<T> inference, training, dx, gradients, buffers;

  step_results(network<T> net, const extents<4>& images) {
    cpu_context ctx({1, 5});
    tensor<T, 4> x(images), y(net.output_shape(images)), dy(y.shape()), d(images);
    fill_normal<T>(x.flat(), 1.0, {3, 1});
    fill_normal<T>(dy.flat(), 1.0, {3, 2});
    net.forward(ctx, x.view(), y.view());
    inference.assign(y.flat().begin(), y.flat().end());
    ctx.set_mode(run_mode::training);
    ctx.begin_step(0);
    net.forward(ctx, x.view(), y.view());
    net.backward(ctx, dy.view(), d.view());
    training.assign(y.flat().begin(), y.flat().end());
    dx.assign(d.flat().begin(), d.flat().end());
    gradients.assign(net.store().gradients().begin(), net.store().gradients().end());
    for (const auto& entry : net.store().buffer_entries()) {
      buffers.insert(buffers.end(), entry.thing->values().begin(), entry.thing->values().end());
    }
  }
};

/// Largest difference, in units of the largest magnitude of `b` (at least 1).
template <class T>
double difference(const std::vector<T>& a, const std::vector<T>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0.0, scale = 1.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
    scale = std::max(scale, std::abs(static_cast<double>(b[i])));
  }
  return largest / scale;
}

template <class T>
inline constexpr double tolerance = std::is_same_v<T, float> ? 1e-5 : 1e-12;

/// Checks outputs, gradients and counts of a sliced network against those of the masked one. `share`: of the
/// channels that are removed.
template <class T>
void check_sliced_is_masked(example<T>& one, group_choice choice, double share, std::uint64_t seed) {
  CAPTURE(one.name);
  CAPTURE(share);
  channel_mask mask = whole_mask(channel_groups(one.net, choice));
  remove_channels(mask, share, seed);
  network<T> masked = one.net, cut = one.net;
  mask_channels(masked, mask);
  const channel_slicing done = slice_channels(cut, mask);
  CHECK(done.parameters_before == one.net.parameter_count());
  CHECK(done.parameters_after == cut.parameter_count());
  CHECK(done.parameters_after == cost_of(cut, one.images).total().parameters);
  const step_results<T> wanted(masked, one.images), found(cut, one.images);
  CHECK(difference(found.inference, wanted.inference) < tolerance<T>);
  CHECK(difference(found.training, wanted.training) < tolerance<T>);
  CHECK(difference(found.dx, wanted.dx) < 3 * tolerance<T>);
  if (!done.made_dense.empty()) return;
  const std::vector<T> gradients = sliced_values<T>(one.net, std::span<const T>(wanted.gradients),
                                                    [&](auto& net) { slice_channels(net, mask); });
  CHECK(difference(found.gradients, gradients) < 3 * tolerance<T>);
}

}  // namespace slice_support
