// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "../support/prune_support.hpp"

namespace {

using namespace prune_support;

template <class T>
std::vector<bool> after(const std::vector<T>& values, const magnitude_options& options) {
  one_matrix<T> net(values);
  weight_mask mask(net.store);
  prune_by_magnitude(mask, net.store, options);
  return kept_elements(mask);
}

TEST_CASE("magnitude: counts of both kinds of shares") {
  using enum removal_share;
  const auto ten = [](double share, removal_share of) {
    std::vector<float> values(10);
    std::iota(values.begin(), values.end(), 1.0F);
    const std::vector<bool> kept = after(values, {.share = share, .of = of});
    return std::count(kept.begin(), kept.end(), false);
  };
  CHECK(ten(0.0, of_remaining) == 0);
  CHECK(ten(0.01, of_remaining) == 1);
  CHECK(ten(0.1, of_remaining) == 1);
  CHECK(ten(0.11, of_remaining) == 2);
  CHECK(ten(1.0, of_remaining) == 10);
  CHECK(ten(0.0, of_whole) == 0);
  CHECK(ten(0.09, of_whole) == 0);
  CHECK(ten(0.1, of_whole) == 1);
  CHECK(ten(0.19, of_whole) == 1);
  CHECK(ten(1.0, of_whole) == 10);
}

TEST_CASE("magnitude: levels of the lottery tickets of VGG-19") {
  // Weights of convolutions that remain; the classifier's 5,120 and biases are not pruned.
  index_t kept = 20'018'880;
  const index_t levels[] = {16'015'104, 12'812'083, 10'249'666, 8'199'732, 6'559'785};
  for (const index_t level : levels) {
    kept -= detail::removal_count(0.2, removal_share::of_remaining, kept, 20'018'880);
    CHECK(kept == level);
  }
  for (int i = 0; i < 5; ++i)
    kept -= detail::removal_count(0.2, removal_share::of_remaining, kept, 20'018'880);
  CHECK(kept == 2'149'509);
  // The reference program counts the classifier and takes one more.
  kept = 20'018'880;
  for (const index_t level : {16'014'079, 12'810'238, 10'247'165, 8'196'707, 6'556'340}) {
    kept -= static_cast<index_t>(std::ceil(0.2 * static_cast<double>(kept + 5120))) + 1;
    CHECK(kept == level);
  }
  // ResNet-18 at the ratios of PacTrain.
  CHECK(detail::removal_count(0.5, removal_share::of_whole, 11'164'352, 11'164'352) == 5'582'176);
  CHECK(detail::removal_count(0.7, removal_share::of_whole, 11'164'352, 11'164'352) == 7'815'046);
}

TEST_CASE_TEMPLATE("magnitude: ties go by position, signs and signs of zero do not matter", T, float,
                   double) {
  using kept = std::vector<bool>;
  CHECK(after<T>({3, -1, 1, 2, -1, 5}, {.share = 1.0 / 3}) == kept{true, false, false, true, true, true});
  CHECK(after<T>({T(-0.0), 0, 1, 0, T(-0.0), -1}, {.share = 0.5}) ==
        kept{false, false, true, false, true, true});
  CHECK(after<T>({2, -2, 2, -2}, {.share = 0.5}) == kept{false, false, true, true});
  const T nan = std::numeric_limits<T>::quiet_NaN(), infinity = std::numeric_limits<T>::infinity();
  CHECK(after<T>({nan, 1, -infinity, 0}, {.share = 0.5}) == kept{true, false, true, false});
  const T least = std::numeric_limits<T>::denorm_min();
  CHECK(after<T>({2 * least, least, T(0), 3 * least}, {.share = 0.5}) == kept{true, false, false, true});
}

TEST_CASE("magnitude: the rules of reference programs") {
  using kept = std::vector<bool>;
  using enum removal_rule;
  const std::vector<float> values = {5, 1, 4, 2, 3};
  CHECK(after(values, {.share = 0.4, .rule = exact}) == kept{true, false, true, false, true});
  CHECK(after(values, {.share = 0.4, .rule = and_next}) == kept{true, false, true, false, false});
  CHECK(after(values, {.share = 0.4, .rule = but_last}) == kept{true, false, true, true, true});
  CHECK(after(values, {.share = 0.0, .rule = and_next}) == kept{true, false, true, true, true});
  CHECK(after(values, {.share = 0.0, .rule = but_last}) == kept(5, true));
  CHECK(after(values, {.share = 1.0, .rule = and_next}) == kept(5, false));
  CHECK(after(values, {.share = 1.0, .rule = but_last}) == kept{true, false, false, false, false});
  // Ties of the threshold all go, or all stay.
  const std::vector<float> ties = {2, 1, 2, 2, 3};
  CHECK(after(ties, {.share = 0.4, .rule = exact}) == kept{false, false, true, true, true});
  CHECK(after(ties, {.share = 0.4, .rule = and_next}) == kept{false, false, false, false, true});
  CHECK(after(ties, {.share = 0.4, .rule = but_last}) == kept{true, false, true, true, true});
}

/// The same by a stable sort.
template <class T>
std::vector<bool> by_sort(const weight_mask& before, std::span<const T> values, std::size_t first,
                          std::size_t last, index_t count) {
  std::vector<bool> kept = kept_elements(before);
  std::vector<std::size_t> order;
  for (std::size_t t = first; t < last; ++t) {
    const masked_tensor& tensor = before.tensors()[t];
    for (index_t i = 0; tensor.prunable && i < tensor.size; ++i) {
      if (before.keeps(t, i)) order.push_back(static_cast<std::size_t>(tensor.offset + i));
    }
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return std::abs(values[a]) < std::abs(values[b]); });
  for (index_t i = 0; i < count; ++i) kept[order[static_cast<std::size_t>(i)]] = false;
  return kept;
}

TEST_CASE_TEMPLATE("magnitude: the selection of a stable sort, of all layers and of each", T, float, double) {
  small_store<T> net;
  for (T& value : net.store.values()) value = std::round(value * 8) / 8;  // many ties
  for (const double share : {0.001, 0.2, 0.5, 0.9}) {
    CAPTURE(share);
    weight_mask mask(net.store);
    for (int round = 0; round < 3; ++round) {
      const weight_mask before = mask;
      const auto count = static_cast<index_t>(std::ceil(share * static_cast<double>(mask.kept())));
      const auto wanted = by_sort<T>(before, net.store.values(), 0, before.tensors().size(), count);
      CHECK(prune_by_magnitude(mask, net.store, {share, removal_share::of_remaining}) == count);
      CHECK(kept_elements(mask) == wanted);
      CHECK(mask.kept() == before.kept() - count);
    }
    weight_mask layers(net.store);
    index_t removed = 0;
    std::vector<bool> wanted = kept_elements(layers);
    for (std::size_t t = 0; t < layers.tensors().size(); ++t) {
      const masked_tensor& tensor = layers.tensors()[t];
      if (!tensor.prunable) continue;
      const auto count = static_cast<index_t>(std::floor(share * static_cast<double>(tensor.size)));
      const std::vector<bool> here = by_sort<T>(layers, net.store.values(), t, t + 1, count);
      for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = wanted[i] && here[i];
      removed += count;
    }
    CHECK(prune_by_magnitude(layers, net.store, {share, removal_share::of_whole, removal_scope::layers}) ==
          removed);
    CHECK(kept_elements(layers) == wanted);
  }
}

TEST_CASE("magnitude: a share of the whole is reached from where a mask is") {
  small_store<float> net;
  weight_mask once(net.store), twice(net.store);
  prune_by_magnitude(once, net.store, {.share = 0.8});
  CHECK(once.kept() == once.prunable() - 16472);
  prune_by_magnitude(twice, net.store, {.share = 0.5});
  prune_by_magnitude(twice, net.store, {.share = 0.8});
  CHECK(once == twice);
  CHECK(prune_by_magnitude(twice, net.store, {.share = 0.6}) == 0);
  CHECK(once == twice);
}

TEST_CASE("magnitude: errors") {
  small_store<float> net;
  weight_mask mask(net.store);
  for (const double share : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK_THROWS_AS(prune_by_magnitude(mask, net.store, {.share = share}), value_error);
  }
  CHECK_THROWS_WITH_AS(prune_smallest(mask, net.store, 20591),
                       doctest::Contains("20591 weights to remove of 20590"), value_error);
  CHECK_THROWS_AS(prune_smallest(mask, net.store, -1), value_error);
  CHECK(mask.kept() == mask.prunable());
  CHECK(prune_smallest(mask, net.store, 20590) == 20590);
  CHECK(mask.kept() == 0);
  one_matrix<float> other({1});
  CHECK_THROWS_AS(prune_by_magnitude(mask, other.store, {}), state_error);
}

}  // namespace
