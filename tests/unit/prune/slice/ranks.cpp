// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/transformer.hpp>
#include <pufferfish/nn/accounting.hpp>
#include <pufferfish/optim/sgd.hpp>
#include <pufferfish/prune/shrink_rank.hpp>

#include "../../support/prune_support.hpp"
#include "../../support/slice_support.hpp"
#include "../../support/small_transformer.hpp"

namespace {

using namespace slice_support;
using prune_support::same_bits;

/// Lists that keep every second component of the first matrix, and as many random ones of the others of its
/// group.
std::vector<kept_components> every_second(const std::vector<component_contributions>& all) {
  std::vector<kept_components> kept;
  for (const component_contributions& layer : all) {
    kept_components& one = kept.emplace_back(kept_components{layer.layer, {}});
    for (std::size_t m = 0; m < layer.of.size(); ++m) {
      const auto rank = static_cast<index_t>(layer.of[m].size());
      std::vector<index_t>& list = one.kept.emplace_back();
      for (index_t i = 0; i < (rank + 1) / 2; ++i) {
        list.push_back(m % 2 == 0 ? 2 * i : i);
      }
    }
  }
  return kept;
}

bool has(const std::vector<index_t>& list, index_t i) { return std::count(list.begin(), list.end(), i) > 0; }

/// Sets the columns of up of all components that are not listed to zero.
template <class Root>
void clear_components(model<Root>& net, const std::vector<kept_components>& kept) {
  using T = typename Root::value_type;
  net.on_host([&](Root& root) {
    for (auto& [name, slot] : detail::low_rank_slots<T, device::cpu>(root)) {
      for (const kept_components& one : kept) {
        if (one.layer != name) continue;
        std::vector<tensor_view<T, 4>> ups;
        for (const auto& factors : slot->low_rank().factors) ups.push_back(factors.up);
        if (auto* conv = slot->template target<LowRankNormConv<T>>()) {
          ups.push_back((*conv)[2].template target<Conv<T>>()->weight());
        }
        for (std::size_t m = 0; m < ups.size(); ++m) {
          for (index_t i = 0; i < ups[m].extent(1); ++i) {
            for (index_t o = 0; o < ups[m].extent(0); ++o) {
              if (!has(one.kept[m], i)) ups[m](o, i, 0, 0) = T(0);
            }
          }
        }
      }
    }
  });
}

TEST_CASE_TEMPLATE("slice_ranks: the network without the components, with its gradients", T, float, double) {
  for (example<T>& one : low_rank_examples<T>()) {
    CAPTURE(one.name);
    const auto kept = every_second(contributions(one.net));
    REQUIRE_FALSE(kept.empty());
    network<T> masked = one.net, cut = one.net;
    clear_components(masked, kept);
    const std::vector<layer_rank> before = slice_ranks(cut, kept);
    CHECK(before.size() == kept.size());
    CHECK(cut.parameter_count() < one.net.parameter_count());
    CHECK(cost_of(cut, one.images).total().parameters == cut.parameter_count());
    CHECK(cut.macs(one.images) < one.net.macs(one.images));
    for (const layer_rank& layer : low_rank_layers(cut)) {
      for (const kept_components& wanted : kept) {
        if (wanted.layer == layer.name) CHECK(layer.rank() == static_cast<index_t>(wanted.kept[0].size()));
      }
    }
    const step_results<T> a(cut, one.images), b(masked, one.images);
    const double tolerance = std::is_same_v<T, float> ? 1e-5 : 1e-12;
    CHECK(difference(a.inference, b.inference) < tolerance);
    CHECK(difference(a.training, b.training) < tolerance);
    CHECK(difference(a.dx, b.dx) < tolerance);
    const std::vector<T> gradients = sliced_values<T>(one.net, std::span<const T>(b.gradients),
                                                      [&](auto& net) { slice_ranks(net, kept); });
    CHECK(difference(a.gradients, gradients) < 3 * tolerance);
    // The structure is that of the ranks.
    network<T> other = one.net;
    if (factor_norm_layers(other).empty()) {
      merge(other);
      apply_ranks(other, low_rank_layers(cut));
      CHECK(other.structure() == cut.structure());
    }
  }
}

template <class Net>
void check_merged(Net net) {
  const auto kept = every_second(contributions(net));
  REQUIRE_FALSE(kept.empty());
  Net masked = net;
  clear_components(masked, kept);
  const auto before = low_rank_layers(net);
  CHECK(before == slice_ranks(net, kept));
  CHECK(low_rank_layers(net).size() == before.size());
  CHECK(net.parameter_count() < masked.parameter_count());
  merge(net);
  merge(masked);
  CHECK(net.structure() == masked.structure());
  const std::span<const float> a = std::as_const(net.store()).values(),
                               b = std::as_const(masked.store()).values();
  CHECK(difference(std::vector<float>(a.begin(), a.end()), std::vector<float>(b.begin(), b.end())) < 1e-5);
}

TEST_CASE("slice_ranks: LSTM layers, attention and embeddings") {
  factorize_policy policy;
  policy.embeddings_dense = false;
  policy.first_layer = 1;
  policy.last_layer_dense = false;
  auto language = make_lstm_lm<float>({.vocabulary = 40, .width = 16, .layers = 2});
  language.initialize(2);
  factorize(language, policy);
  check_merged(language);
  auto translator = make_transformer<float>(test::small_transformer());
  translator.initialize(2);
  policy.rank = fixed_rank{2};  // a quarter of full rank would be one component
  factorize(translator, policy);
  check_merged(translator);
  CHECK(channel_groups(language).empty());
  CHECK_THROWS_AS(slice_channels(language, {{"decoder", {true}}}), state_error);
}

TEST_CASE("slice_ranks: what is refused leaves the network unchanged") {
  auto all = low_rank_examples<float>();
  network<float>& net = all[4].net;
  const network<float> before = net;
  const auto ranks = low_rank_layers(net);
  const layer_rank first = ranks[0];
  const auto refused = [&](const std::vector<kept_components>& kept, auto error, const std::string& text) {
    CHECK_THROWS_WITH_AS(slice_ranks(net, kept), doctest::Contains(text.c_str()), decltype(error));
    CHECK(same_bits<float>(std::as_const(net.store()).values(), before.store().values()));
    CHECK(low_rank_layers(net) == ranks);
  };
  refused({{"nothing", {{0}}}}, state_error(""), "nothing is no low-rank layer");
  refused({{first.name, {{0}}}, {first.name, {{0}}}}, state_error(""), "listed twice");
  refused({{first.name, {{}}}}, value_error(""), first.name);
  refused({{first.name, {}}}, value_error(""), "0 lists of components for 1 matrices");
  refused({{first.name, {{1, 0}}}}, value_error(""), "ascending");
  refused({{first.name, {{first.rank()}}}}, value_error(""), "ascending");
  refused({{first.name, {{-1}}}}, value_error(""), "ascending");
}

TEST_CASE("contributions: norms of components, weighted by statistics") {
  Sequential<double> layers;
  LowRankLinear<double> low(3, 2, 2);
  const double up[2][2] = {{3, 0}, {4, 1}}, down[2][3] = {{1, 2, 2}, {0, 0, 2}};
  for (index_t o = 0; o < 2; ++o) {
    for (index_t r = 0; r < 2; ++r) low.up()(o, r) = up[o][r];
  }
  for (index_t r = 0; r < 2; ++r) {
    for (index_t i = 0; i < 3; ++i) low.down()(r, i) = down[r][i];
  }
  layers.add("fc", std::move(low));
  const network<double> net(std::move(layers));
  CHECK(contributions(net)[0].of == std::vector<std::vector<double>>{{15.0, 2.0}});
  output_statistics seen(2, 3);
  tensor<double, 2> dy({2, 2}), x({1, 3});
  dy(0, 0) = 1, dy(0, 1) = 1, dy(1, 0) = 1, dy(1, 1) = -1;  // D = I
  x(0, 0) = 0, x(0, 1) = 0, x(0, 2) = 3;                    // X = diag(0, 0, 9)
  seen.add_gradients(std::as_const(dy).view(), 1.0);
  network_statistics statistics;
  statistics.layers.push_back(layer_statistics(seen));
  statistics.layers[0].name = "fc";
  CHECK(contributions(net, &statistics)[0].of == std::vector<std::vector<double>>{{15.0, 2.0}});
  statistics.layers[0].matrices[0].add_inputs(std::as_const(x).view());
  CHECK(contributions(net, &statistics)[0].of == std::vector<std::vector<double>>{{30.0, 6.0}});
  output_statistics one_output(2, 3);
  tensor<double, 2> first({1, 2});
  first(0, 0) = 2, first(0, 1) = 0;  // D = diag(4, 0)
  one_output.add_gradients(std::as_const(first).view(), 1.0);
  statistics.layers[0].matrices[0] = one_output;
  CHECK(contributions(net, &statistics)[0].of == std::vector<std::vector<double>>{{18.0, 0.0}});
}

component_contributions of_layer(std::vector<std::vector<double>> of) {
  component_contributions one{"layer", std::vector<std::size_t>(of.size(), 0), std::move(of)};
  return one;
}

TEST_CASE("rank_shrinker: components that stay small go, and the state survives as text") {
  rank_shrinker shrinker({.threshold = 0.1, .patience = 2});
  CHECK(shrinker.observe({of_layer({{10, 0.5, 3, 0.9}})}).empty());
  CHECK(shrinker.observe({of_layer({{10, 1.5, 3, 0.9}})}).size() == 1);  // 0.9 twice below 1
  rank_shrinker again({.threshold = 0.1, .patience = 2});
  CHECK(again.observe({of_layer({{10, 0.5, 3, 0.9}})}).empty());
  rank_shrinker resumed({.threshold = 0.1, .patience = 2});
  resumed.restore(again.to_text(), "file");
  const auto kept = resumed.observe({of_layer({{10, 1.5, 3, 0.9}})});
  REQUIRE(kept.size() == 1);
  CHECK(kept[0].kept == std::vector<std::vector<index_t>>{{0, 1, 2}});
  CHECK(resumed.observe({of_layer({{10, 0.5, 3}})}).empty());
  CHECK(resumed.observe({of_layer({{10, 0.5, 0.5}})})[0].kept == std::vector<std::vector<index_t>>{{0, 2}});
  CHECK(resumed.observe({of_layer({{10, 0.4}})})[0].kept == std::vector<std::vector<index_t>>{{0}});
  // A matrix of the same group needs more: the largest of the small components stay.
  rank_shrinker pair({.threshold = 0.1, .patience = 1});
  const auto of_pair = pair.observe({of_layer({{10, 9, 0.1, 8}, {0.2, 20, 0.1, 0.3}})});
  CHECK(of_pair[0].kept == std::vector<std::vector<index_t>>{{0, 1, 3}, {0, 1, 3}});
  rank_shrinker least({.threshold = 1.0, .patience = 1, .least = 3});
  CHECK(least.observe({of_layer({{1, 2, 3, 4}})})[0].kept == std::vector<std::vector<index_t>>{{1, 2, 3}});
  CHECK(least.observe({of_layer({{1, 2}})}).empty());  // other ranks than before
  for (const char* text : {"layer", "layer 1 0", "layer 0 x", "layer 0 1\nlayer 2 1"}) {
    CHECK_THROWS_WITH_AS(least.restore(text, "file"), doctest::Contains("file: "), io_error);
  }
  CHECK_THROWS_AS(rank_shrinker({.threshold = 2.0}), value_error);
  CHECK_THROWS_AS(rank_shrinker({.patience = 0}), value_error);
  CHECK_THROWS_AS(rank_shrinker({.least = 0}), value_error);
}

TEST_CASE("rank_shrinker: a run loses ranks, and the optimizer's state follows") {
  auto all = low_rank_examples<float>();
  example<float>& one = all[4];
  network<float>& net = one.net;
  cpu_context ctx;
  SGD<float> optimizer(make_optimizer_target(net.store()), {.momentum = 0.9});
  fill_normal(net.store().gradients(), 1.0, {1, 1});
  optimizer.step(ctx, 1e-3);
  const auto all_contributions = contributions(net);
  rank_shrinker shrinker({.threshold = 0.95, .patience = 1});
  const auto kept = shrinker.observe(all_contributions);
  REQUIRE_FALSE(kept.empty());
  const network<float> before = net;
  slice_ranks(net, kept);
  SGD<float> fresh(make_optimizer_target(net.store()), {.momentum = 0.9});
  const auto velocity = sliced_values<float>(before, std::as_const(optimizer).velocity(),
                                             [&](auto& n) { slice_ranks(n, kept); });
  REQUIRE(velocity.size() == fresh.velocity().size());
  std::ranges::copy(velocity, fresh.velocity().begin());
  fresh.set_steps(optimizer.steps());
  CHECK(net.parameter_count() < before.parameter_count());
  CHECK_NOTHROW(fresh.step(ctx, 1e-3));
  CHECK_THROWS_AS(optimizer.step(ctx, 1e-3), state_error);
  for (const component_contributions& layer : contributions(net)) {
    for (const auto& of : layer.of) {
      const double largest = *std::max_element(of.begin(), of.end());
      CHECK(*std::min_element(of.begin(), of.end()) >= 0.949 * largest);
    }
  }
}

TEST_CASE("docs: shrinking ranks") {
  auto all = low_rank_examples<float>();
  network<float>& net = all[4].net;
  SGD<float> optimizer(make_optimizer_target(net.store()), {.momentum = 0.9});
  rank_shrinker shrinker({.threshold = 0.95, .patience = 1});
  const index_t parameters = net.parameter_count();
  // [shrink]
  if (const auto kept = shrinker.observe(contributions(net)); !kept.empty()) {
    const network<float> before = net;
    const auto slice = [&](auto& of) { slice_ranks(of, kept); };
    slice(net);
    SGD<float> smaller(make_optimizer_target(net.store()), optimizer.options());
    std::ranges::copy(sliced_values<float>(before, optimizer.velocity(), slice), smaller.velocity().begin());
    smaller.set_steps(optimizer.steps());
    optimizer = std::move(smaller);
  }
  // [shrink]
  CHECK(net.parameter_count() < parameters);
  CHECK(optimizer.target().values.size() == static_cast<std::size_t>(net.parameter_count()));
}

}  // namespace
