// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>

#include <pufferfish/distributed/compression_options.hpp>
#include <pufferfish/distributed/exchange/bucket.hpp>
#include <pufferfish/optim/sgd.hpp>
#include <pufferfish/prune/apply_mask.hpp>
#include <pufferfish/prune/compact_sum.hpp>

#include "../support/prune_support.hpp"
#include "../support/resnet18_tensors.hpp"
#include "../support/simulated_ranks.hpp"

namespace {

using namespace prune_support;
using rank_simulation::ranks_agree;
using rank_simulation::simulated_ranks;

static_assert(gradient_compressor<compact_sum<float>> && gradient_compressor<compact_sum<double>>);
static_assert(compressor_options<compact_sum_options, float> &&
              compressor_options<compact_sum_options, double>);

/// A mask of the small store: some tensors at random, one whole, one empty.
template <class T>
std::shared_ptr<const weight_mask> mixed_mask(const parameter_store<T>& store, double share = 0.7) {
  weight_mask mask(store);
  remove_at_random(mask, share, 5);
  weight_mask whole(store);
  std::vector<std::uint64_t> words(mask.words().begin(), mask.words().end());
  for (const masked_tensor& tensor : mask.tensors()) {
    if (tensor.name != "three.weight" && tensor.name != "conv.weight") continue;
    for (std::size_t w = 0; w < detail::words_for(tensor.size); ++w) {
      std::uint64_t& word = words[tensor.first_word + w];
      word = tensor.name == "three.weight" ? whole.words()[tensor.first_word + w] : 0;
    }
  }
  mask.set_words(words);
  return std::make_shared<const weight_mask>(mask);
}

/// Pieces of one list of normal numbers, from other places for each rank and step.
template <class T>
std::vector<std::vector<T>> gradients_of_ranks(std::size_t ranks, index_t size, std::uint64_t step) {
  static const std::vector<T> numbers = normal_values<T>(25000, 1);
  std::vector<std::vector<T>> all(ranks);
  for (std::size_t w = 0; w < ranks; ++w) {
    const auto from = numbers.begin() + static_cast<index_t>(step * 61 % 3000 + w * 307);
    all[w].assign(from, from + size);
  }
  return all;
}

/// Sums in the order of the ranks, times 1 / p: the plain exchange.
template <class T>
std::vector<T> plain_mean(const std::vector<std::vector<T>>& all) {
  std::vector<T> result = all[0];
  const T share = T(1) / static_cast<T>(all.size());
  for (std::size_t i = 0; i < result.size(); ++i) {
    for (std::size_t w = 1; w < all.size(); ++w) result[i] += all[w][i];
    result[i] *= share;
  }
  return result;
}

TEST_CASE_TEMPLATE("compact_sum: the plain exchange of masked gradients, bit for bit", T, float, double) {
  cpu_context one, three({3, 0});
  small_store<T> net;
  for (const double share : {0.0, 0.5, 0.9, 1.0}) {
    for (const int count : {1, 2, 3, 4}) {
      CAPTURE(share);
      CAPTURE(count);
      const auto mask = mixed_mask(net.store, share);
      const compact_sum_options options{mask};
      simulated_ranks<any_compressor<T>> ranks(count,
                                               [&](int) { return new_compressor(net.store, options); });
      simulated_ranks<compact_sum<T>> threaded(count, [&](int) { return compact_sum<T>(options); });
      for (std::uint64_t step = 0; step < 3; ++step) {
        auto gradients = gradients_of_ranks<T>(ranks.size(), mask->size(), step);
        if (step == 1) std::ranges::fill(gradients[0], T(0));
        auto masked = gradients, same = gradients;
        for (auto& values : masked) mask->apply(one, std::span<T>(values));
        std::vector<T> wanted = plain_mean(masked);
        mask->apply(one, std::span<T>(wanted));  // +0
        ranks.step(one, gradients);
        threaded.step(three, same);
        CHECK(ranks_agree(gradients));
        CHECK(same_bits<T>(gradients[0], wanted));
        CHECK(same_bits<T>(same[0], wanted));
        CHECK(ranks.payload_bytes(0) == static_cast<std::size_t>(mask->survivors()) * sizeof(T));
        CHECK(ranks[0].payload_bytes() == mask->survivors() * static_cast<index_t>(sizeof(T)));
      }
      CHECK(ranks[0].states().empty());
    }
  }
}

TEST_CASE_TEMPLATE("compact_sum: a mask that keeps everything is the plain exchange", T, float, double) {
  cpu_context ctx;
  small_store<T> net;
  const compact_sum_options options{std::make_shared<const weight_mask>(net.store)};
  simulated_ranks<compact_sum<T>> ranks(4, [&](int) { return compact_sum<T>(options); });
  auto gradients = gradients_of_ranks<T>(4, options.mask->size(), 3);
  gradients[0][7] = T(-0.0);
  for (auto& values : gradients) values[8] = T(-0.0);
  const std::vector<T> wanted = plain_mean(gradients);
  ranks.step(ctx, gradients);
  CHECK(ranks_agree(gradients));
  CHECK(same_bits<T>(gradients[0], wanted));
  CHECK(ranks.payload_bytes(0) == wanted.size() * sizeof(T));
}

TEST_CASE("compact_sum: gradients of pruned weights have no influence") {
  cpu_context ctx;
  small_store<float> net;
  const auto mask = mixed_mask(net.store);
  simulated_ranks<compact_sum<float>> ranks(2, [&](int) { return compact_sum<float>({mask}); });
  auto gradients = gradients_of_ranks<float>(2, mask->size(), 1), clean = gradients;
  const std::vector<bool> kept = kept_elements(*mask);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (!kept[i]) gradients[1][i] = std::numeric_limits<float>::quiet_NaN();
  }
  ranks.step(ctx, gradients);
  ranks.step(ctx, clean);
  CHECK(same_bits<float>(gradients[0], clean[0]));
  // Of a weight that remains the result is not finite on any rank.
  const auto first = static_cast<std::size_t>(std::find(kept.begin(), kept.end(), true) - kept.begin());
  gradients[1][first] = std::numeric_limits<float>::infinity();
  ranks.step(ctx, gradients);
  CHECK(ranks_agree(gradients));
  CHECK_FALSE(std::isfinite(gradients[0][first]));
}

TEST_CASE_TEMPLATE("compact_sum::part: buckets together are the whole, also with no survivor and with all", T,
                   float, double) {
  cpu_context ctx;
  small_store<T> net;
  const auto mask = mixed_mask(net.store);
  const compact_sum<T> whole({mask});
  index_t survivors = 0;
  bool has_empty = false, has_whole = false;
  for (const index_t bytes : {index_t{1}, index_t{1000}, index_t{1} << 20}) {
    auto wanted = gradients_of_ranks<T>(3, mask->size(), 8), found = wanted;
    simulated_ranks<compact_sum<T>> all(3, [&](int) { return compact_sum<T>({mask}); });
    all.step(ctx, wanted);
    survivors = 0;
    for (const gradient_bucket& bucket : cut_buckets(net.store, {bytes, bytes})) {
      simulated_ranks<compact_sum<T>> part(
          3, [&](int) { return whole.part(bucket.offset, bucket.offset + bucket.size); });
      std::vector<std::vector<T>> here;
      for (auto& values : found) {
        here.emplace_back(values.begin() + bucket.offset, values.begin() + bucket.offset + bucket.size);
      }
      part.step(ctx, here);
      for (std::size_t w = 0; w < found.size(); ++w) {
        std::copy(here[w].begin(), here[w].end(), found[w].begin() + bucket.offset);
      }
      survivors += part[0].survivors();
      has_empty = has_empty || (bucket.size > 0 && part[0].survivors() == 0);
      has_whole = has_whole || (bucket.size > 100 && part[0].survivors() == bucket.size);
      CHECK(part.payload_bytes(0) == static_cast<std::size_t>(part[0].survivors()) * sizeof(T));
    }
    CHECK(survivors == mask->survivors());
    for (std::size_t w = 0; w < found.size(); ++w) CHECK(same_bits<T>(found[w], wanted[w]));
  }
  CHECK(has_empty);
  CHECK(has_whole);
  CHECK_THROWS_AS(whole.part(0, 9), value_error);
  CHECK_THROWS_AS(whole.part(7, mask->size() + 1), value_error);
  // Nothing at all.
  compact_sum<T> none = whole.part(7, 7);
  CHECK(none.encode(ctx, {}, 0, {}).sum.empty());
  CHECK_NOTHROW(none.decode(ctx, {}, 0, {}));
  // The gradients are those of the range.
  std::vector<T> gradients(static_cast<std::size_t>(mask->size()));
  compact_sum<T> first = whole.part(0, 7);
  CHECK_THROWS_WITH_AS(first.encode(ctx, {}, 0, gradients), doctest::Contains("for a range of 7"),
                       value_error);
}

compact_sum_options ternary(std::shared_ptr<const weight_mask> mask, bool shared,
                            code_route route = code_route::gather, std::vector<std::string> skip = {}) {
  compact_sum_options options{std::move(mask)};
  options.ternary.emplace();
  options.ternary->shared_scaler = shared;
  options.ternary->route = route;
  options.ternary->skip = std::move(skip);
  return options;
}

/// The survivors of all tensors, without gaps, and their values.
template <class T>
std::vector<coded_tensor> survivors_of(const weight_mask& mask) {
  std::vector<coded_tensor> result;
  for (const masked_tensor& tensor : mask.tensors()) {
    if (tensor.kept == 0) continue;
    result.push_back({tensor.name, logical_layout::vector(tensor.kept), coded_size(result), tensor.kept, 0,
                      stream_id(tensor.name)});
  }
  return result;
}
template <class T>
std::vector<T> only(const std::vector<bool>& kept, const std::vector<T>& values) {
  std::vector<T> result;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (kept[i]) result.push_back(values[i]);
  }
  return result;
}

TEST_CASE_TEMPLATE("compact_sum, ternary: TernGrad of the survivors", T, float, double) {
  cpu_context one, three({3, 0});
  small_store<T> net;
  const auto mask = mixed_mask(net.store);
  const std::vector<bool> kept = kept_elements(*mask);
  const std::vector<coded_tensor> tensors = survivors_of<T>(*mask);
  for (const bool shared : {false, true}) {
    for (const code_route route : {code_route::gather, code_route::two_hop}) {
      CAPTURE(shared);
      CAPTURE(to_string(route));
      const compact_sum_options options = ternary(mask, shared, route, {"fc.bias"});
      const auto dense = [&](int) -> any_compressor<T> {
        if (shared) return shared_tern_grad<T>(tensors, *options.ternary);
        if (route == code_route::two_hop) {
          return two_hop_codes<tern_codec<T>>(tensors, *options.ternary, code_memory::none);
        }
        return gathered_codes<tern_codec<T>>(tensors, *options.ternary, code_memory::none);
      };
      simulated_ranks<any_compressor<T>> ranks(3, [&](int) { return new_compressor(net.store, options); });
      simulated_ranks<any_compressor<T>> of_survivors(3, dense);
      for (std::uint64_t step = 0; step < 3; ++step) {
        auto gradients = gradients_of_ranks<T>(3, mask->size(), step);
        std::vector<std::vector<T>> dense_gradients;
        for (const auto& values : gradients) dense_gradients.push_back(only(kept, values));
        ranks.step(step == 1 ? three : one, gradients);
        of_survivors.step(one, dense_gradients);
        CHECK(ranks_agree(gradients));
        CHECK(only(kept, gradients[0]) == dense_gradients[0]);
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < kept.size(); ++i) wrong += !kept[i] && gradients[0][i] != T(0) ? 1U : 0U;
        CHECK(wrong == 0);
        CHECK(ranks.payload_bytes(1) == of_survivors.payload_bytes(1));
        CHECK(ranks[1].payload_bytes() == static_cast<index_t>(ranks.payload_bytes(1)));
      }
      CHECK(ranks[0].states().empty());
    }
  }
}

TEST_CASE("compact_sum, ternary: parts draw the numbers of the whole") {
  cpu_context ctx;
  small_store<float> net;
  const auto mask = mixed_mask(net.store);
  for (const bool shared : {false, true}) {
    const compact_sum<float> whole(ternary(mask, shared, code_route::gather, {"fc.bias", "conv"}));
    auto wanted = gradients_of_ranks<float>(2, mask->size(), 4);
    auto found = wanted;
    const index_t size = mask->size();
    simulated_ranks<compact_sum<float>> all(2, [&](int) { return whole.part(0, size); });
    all.step(ctx, wanted);
    for (const gradient_bucket& bucket : cut_buckets(net.store, {1000, 1000})) {
      simulated_ranks<compact_sum<float>> part(
          2, [&](int) { return whole.part(bucket.offset, bucket.offset + bucket.size); });
      std::vector<std::vector<float>> here;
      for (auto& values : found) {
        here.emplace_back(values.begin() + bucket.offset, values.begin() + bucket.offset + bucket.size);
      }
      part.step(ctx, here);
      for (std::size_t w = 0; w < found.size(); ++w) {
        std::copy(here[w].begin(), here[w].end(), found[w].begin() + bucket.offset);
      }
    }
    CHECK(same_bits<float>(found[0], wanted[0]));
    CHECK(same_bits<float>(found[1], wanted[1]));
  }
}

TEST_CASE("compact_sum, ternary: unbiased, in the mean over draws") {
  cpu_context ctx;
  one_matrix<float> net(std::vector<float>(128, 1.0F));
  weight_mask mask(net.store);
  remove_at_random(mask, 0.5, 2);
  const std::vector<bool> kept = kept_elements(mask);
  compact_sum_options options = ternary(std::make_shared<const weight_mask>(mask), false);
  options.ternary->clip = 0;
  simulated_ranks<compact_sum<float>> ranks(1, [&](int) { return compact_sum<float>(options); });
  const std::vector<float> given = normal_values<float>(128, 6);
  double most = 0;
  for (std::size_t i = 0; i < 128; ++i) {
    if (kept[i]) most = std::max(most, std::abs(static_cast<double>(given[i])));
  }
  constexpr int steps = 4000;
  std::vector<double> sums(128, 0.0);
  for (int step = 0; step < steps; ++step) {
    std::vector<std::vector<float>> gradients = {given};
    ranks.step(ctx, gradients);
    for (std::size_t i = 0; i < 128; ++i) sums[i] += static_cast<double>(gradients[0][i]);
  }
  for (std::size_t i = 0; i < 128; ++i) {
    const double g = kept[i] ? static_cast<double>(given[i]) : 0.0, a = std::abs(g);
    CHECK(std::abs(sums[i] / steps - g) <= 5 * std::sqrt(a * (most - a) / steps) + 1e-6);
  }
}

TEST_CASE("compact_sum: bytes of ResNet-18") {
  struct row {
    double share;
    index_t dense, hybrid, ternary_dense, ternary_hybrid;
  };
  for (const row& wanted :
       {row{0.5, 22'366'632, 6'691'240, 1'398'155, 418'499},
        row{0.7, 13'435'152, 4'029'916, 839'937, 252'166}, row{0.8, 8'969'412, 2'699'256, 560'829, 169'000},
        row{0.9, 4'503'672, 1'368'592, 281'720, 85'833}}) {
    CAPTURE(wanted.share);
    for (const bool hybrid : {false, true}) {
      weight_mask mask(resnet18_tensors::resnet18_tensors(hybrid));
      CHECK(mask.size() == (hybrid ? 3'336'138 : 11'173'834));
      CHECK(mask.prunable() == (hybrid ? 3'326'656 : 11'164'352));
      // The lowest bits of every word go, so that every tensor keeps survivors.
      const index_t count =
          detail::removal_count(wanted.share, removal_share::of_whole, mask.kept(), mask.prunable());
      std::vector<std::uint64_t> words(mask.words().begin(), mask.words().end());
      index_t seen = 0, removed = 0;
      for (std::uint64_t& word : words) {
        seen += std::popcount(word);
        const index_t here = count * seen / mask.prunable() - removed;
        word = here == 64 ? 0 : word >> here << here;
        removed += here;
      }
      mask.set_words(words);
      CHECK(mask.kept() == mask.prunable() - count);
      CHECK(std::ranges::all_of(mask.tensors(), [](const masked_tensor& one) { return one.kept > 0; }));
      const auto shared = std::make_shared<const weight_mask>(mask);
      CHECK(compact_sum<float>({shared}).payload_bytes() == (hybrid ? wanted.hybrid : wanted.dense));
      CHECK(compact_sum<float>(ternary(shared, false)).payload_bytes() ==
            (hybrid ? wanted.ternary_hybrid : wanted.ternary_dense));
    }
  }
}

TEST_CASE("compact_sum: 50 steps of training keep replicas equal and pruned weights at 0") {
  cpu_context ctx;
  for (const bool signs : {false, true}) {
    std::vector<std::unique_ptr<small_store<float>>> nets;
    std::vector<std::unique_ptr<SGD<float>>> rules;
    for (int w = 0; w < 3; ++w) {
      nets.push_back(std::make_unique<small_store<float>>());
      rules.push_back(std::make_unique<SGD<float>>(make_optimizer_target(nets.back()->store),
                                                   sgd_options{0.9, 0, true, 1e-3}));
    }
    const auto mask = mixed_mask(nets[0]->store);
    for (auto& net : nets) mask_weights(ctx, *mask, net->store);
    const compact_sum_options options = signs ? ternary(mask, false) : compact_sum_options{mask};
    simulated_ranks<any_compressor<float>> ranks(
        3, [&](int w) { return new_compressor(nets[static_cast<std::size_t>(w)]->store, options); });
    for (std::uint64_t step = 0; step < 50; ++step) {
      auto gradients = gradients_of_ranks<float>(3, mask->size(), step);
      ranks.step(ctx, gradients);
      for (std::size_t w = 0; w < 3; ++w) {
        std::ranges::copy(gradients[w], nets[w]->store.gradients().begin());
        rules[w]->step(ctx, 0.01);
      }
    }
    for (std::size_t w = 1; w < 3; ++w) {
      CHECK(same_bits<float>(nets[w]->store.values(), nets[0]->store.values()));
    }
    const std::vector<bool> kept = kept_elements(*mask);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < kept.size(); ++i) {
      const bool is_zero = nets[0]->store.values()[i] == 0.0F && rules[0]->velocity()[i] == 0.0F;
      wrong += !kept[i] && !is_zero ? 1U : 0U;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("compact_sum: options") {
  small_store<float> net;
  one_matrix<float> other({1, 2});
  const auto mask = mixed_mask(net.store);
  CHECK_THROWS_WITH_AS(new_compressor(net.store, compact_sum_options{}), doctest::Contains("no mask"),
                       value_error);
  CHECK_THROWS_AS(new_compressor(other.store, compact_sum_options{mask}), state_error);
  CHECK_THROWS_WITH_AS(new_compressor(net.store, ternary(mask, false, code_route::gather, {"head"})),
                       doctest::Contains("head"), value_error);
  for (const bool shared : {false, true}) {
    CHECK_THROWS_WITH_AS(new_compressor(net.store, ternary(mask, shared, code_route::sparse)),
                         doctest::Contains("sparse sum"), value_error);
  }
  CHECK(describe(compact_sum_options{mask}) == "compact sum of survivors");
  CHECK(describe(ternary(mask, false)) ==
        "compact sum of survivors, TernGrad, clip 2.5, seed 1, own scalers, gather");
  // Ranks whose masks differ have different lines.
  const std::string line = new_compressor(net.store, compact_sum_options{mask}).describe();
  CHECK(line.find("compact sum of " + std::to_string(mask->survivors()) + " of 20687 values, mask 0x") == 0);
  weight_mask changed = *mask;
  changed.for_each_kept(1, 2, [&](std::size_t t, index_t i) { changed.remove(t, i); });
  CHECK(compact_sum<float>({std::make_shared<const weight_mask>(changed)}).describe() != line);
  CHECK(compact_sum<float>(ternary(mask, true)).describe() ==
        line + ", TernGrad, clip 2.5, seed 1, shared scalers, gather");
  CHECK(describe(compression_options(compact_sum_options{mask})) == "compact sum of survivors");
  // Names of another bucket are no errors in a part.
  CHECK_NOTHROW(compact_sum<float>(ternary(mask, true, code_route::gather, {"conv"})).part(0, 7));
}

}  // namespace
