// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// select(): which layers become low-rank, and to what ranks, over plain lists of layers.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/lowrank/selection.hpp>

namespace {

using namespace pufferfish;
using reason = dense_because;

layer_info layer(std::string name, std::vector<matrix_group> groups, layer_place place = layer_place::path) {
  return {std::move(name), std::move(groups), place};
}
layer_info matrix(std::string name, index_t rows, index_t cols, layer_place place = layer_place::path) {
  return layer(std::move(name), {{{rows, cols}, 1}}, place);
}

/// An embedding, four layers of the main path of which the second is low-rank already, and a shortcut.
std::vector<layer_info> network() {
  return {matrix("table", 16, 100, layer_place::embedding),  matrix("first", 20, 30), layer("low", {}),
          matrix("shortcut", 24, 12, layer_place::shortcut), matrix("third", 40, 16), matrix("last", 10, 40)};
}

template <class Of>
auto column(const std::vector<layer_info>& layers, const factorize_policy& policy, Of&& of) {
  std::vector<std::decay_t<decltype(of(layer_choice{}))>> all;
  for (const layer_choice& choice : select(layers, policy)) all.push_back(of(choice));
  return all;
}
std::vector<reason> reasons(const factorize_policy& policy,
                            const std::vector<layer_info>& layers = network()) {
  const std::vector<layer_choice> choices = select(layers, policy);
  REQUIRE(choices.size() == layers.size());
  std::vector<reason> all;
  for (const layer_choice& choice : choices) {
    CHECK(choice.factorize() == (choice.reason == reason::nothing));
    all.push_back(choice.reason);
  }
  return all;
}

template <class Error, class Call>
std::string text_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "no such error";
}
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Everything may be factorized.
factorize_policy open_policy(const rank_policy& rank = rank_ratio{0.25}) {
  factorize_policy policy;
  policy.rank = rank;
  policy.first_layer = 1;
  policy.last_layer_dense = policy.shortcuts_dense = policy.embeddings_dense = false;
  return policy;
}

TEST_CASE("select: layers of the main path are numbered, low-rank ones too; all others have number 0") {
  CHECK(number_layers(network()) == std::vector<index_t>{0, 1, 2, 0, 3, 4});
  CHECK(column(network(), {}, [](const layer_choice& c) { return c.number; }) ==
        std::vector<index_t>{0, 1, 2, 0, 3, 4});
  CHECK(number_layers({}).empty());
  CHECK(select({}, {}).empty());
}

TEST_CASE("select: every rule that keeps a layer dense") {
  using all = std::vector<reason>;
  constexpr reason yes = reason::nothing, low = reason::low_rank;
  CHECK(reasons({}) ==
        all{reason::embedding, reason::first_layers, low, reason::shortcut, yes, reason::last_layer});
  factorize_policy policy = open_policy();
  CHECK(reasons(policy) == all{yes, yes, low, yes, yes, yes});
  policy.first_layer = 3;  // counts the low-rank layer, neither the table nor the shortcut
  CHECK(reasons(policy) == all{yes, reason::first_layers, low, yes, yes, yes});
  policy.first_layer = 4;
  CHECK(reasons(policy) == all{yes, reason::first_layers, low, yes, reason::first_layers, yes});
  policy.last_layer_dense = true;
  CHECK(reasons(policy) ==
        all{yes, reason::first_layers, low, yes, reason::first_layers, reason::last_layer});
  policy = open_policy();
  policy.shortcuts_dense = true;
  CHECK(reasons(policy) == all{yes, yes, low, reason::shortcut, yes, yes});
  policy = open_policy();
  policy.embeddings_dense = true;
  CHECK(reasons(policy) == all{reason::embedding, yes, low, yes, yes, yes});

  // The caller is asked for the layers that are left, with the size of the first matrix.
  policy = open_policy();
  policy.first_layer = 2;
  std::vector<std::pair<std::string, matrix_size>> asked;
  policy.also_if = [&asked](const std::string& name, matrix_size size) {
    asked.emplace_back(name, size);
    return name != "third";
  };
  CHECK(reasons(policy) == all{yes, reason::first_layers, low, yes, reason::caller, yes});
  REQUIRE(asked.size() == 4);
  CHECK(asked[0] == std::pair{std::string("table"), matrix_size{16, 100}});
  CHECK(asked[1] == std::pair{std::string("shortcut"), matrix_size{24, 12}});
  CHECK(asked[3] == std::pair{std::string("last"), matrix_size{10, 40}});

  // Growth: 2 x 2 matrices do at no rank become smaller, 20 x 30 does not at rank 12.
  std::vector<layer_info> small = network();
  small[4] = matrix("third", 2, 2);
  CHECK(reasons(open_policy(), small) == all{yes, yes, low, yes, reason::growth, yes});
  CHECK(reasons(open_policy(energy_kept{0.5}), small) == all{yes, yes, low, yes, reason::growth, yes});
  CHECK(reasons(open_policy(fixed_rank{9})) ==
        all{yes, yes, low, reason::growth, yes, reason::growth});  // 24 x 12 up to 7, 10 x 40 up to 7
  // The last layer is the last of the main path, also where a shortcut or a low-rank layer comes after it.
  const std::vector<layer_info> ends{matrix("a", 20, 20), matrix("b", 20, 20),
                                     matrix("s", 20, 20, layer_place::shortcut)};
  policy = open_policy();
  policy.last_layer_dense = true;
  CHECK(reasons(policy, ends) == all{yes, reason::last_layer, yes});
  CHECK(reasons(policy, {matrix("a", 20, 20), layer("b", {})}) == all{yes, low});
}

TEST_CASE("select: ranks come from the policy, those of embeddings from embedding_rank if there is one") {
  const auto ranks = [](const layer_choice& c) { return c.ranks; };
  using lists = std::vector<rank_list>;
  factorize_policy policy = open_policy();
  CHECK(column(network(), policy, ranks) == lists{{4}, {5}, {}, {3}, {4}, {2}});
  policy.embedding_rank = fixed_rank{7};
  CHECK(column(network(), policy, ranks) == lists{{7}, {5}, {}, {3}, {4}, {2}});
  policy.rank = parameter_budget{200};
  CHECK(column(network(), policy, ranks) == lists{{7}, {4}, {}, {5}, {3}, {4}});
  policy.rank = parameter_fraction{0.5};
  CHECK(column(network(), policy, ranks) == lists{{7}, {6}, {}, {4}, {5}, {4}});
  // Singular values decide: no ranks yet, but the policy that chooses them.
  policy.rank = energy_kept{0.8};
  CHECK(column(network(), policy, ranks) == lists{{7}, {}, {}, {}, {}, {}});
  const std::vector<layer_choice> choices = select(network(), policy);
  CHECK(std::get<fixed_rank>(choices[0].rank).rank == 7);
  CHECK(std::get<energy_kept>(choices[1].rank).fraction == 0.8);
}

TEST_CASE("select: layers of several rank groups have a rank for each, and grow or shrink as a whole") {
  // An LSTM 8 -> 40: four matrices 40 x 8, four 40 x 40.
  const layer_info lstm = layer("rnn", {{{40, 8}, 4}, {{40, 40}, 4}});
  CHECK(detail::parameters_as_dense(lstm) == 4 * (320 + 1600));
  CHECK(detail::parameters_as_factors(lstm, {2, 10}) == 4 * (2 * 48 + 10 * 80));
  factorize_policy policy = open_policy();
  CHECK(select({lstm}, policy)[0].ranks == rank_list{2, 10});
  // Rank 7 makes the input side larger (336 > 320), the layer smaller.
  policy.rank = fixed_rank{7};
  CHECK(select({lstm}, policy)[0].factorize());
  policy.keep_dense_if_larger = false;
  CHECK(contains(text_of<rank_error>([&] { select({lstm}, policy); }), "rnn: rank 7 would need 336"));
  policy.rank = rank_ratio{0.75};
  const std::string hidden = text_of<rank_error>([&] {
    select({layer("rnn", {{{40, 80}, 4}, {{40, 40}, 4}})}, policy);
  });
  CHECK(contains(hidden, "rank 30 would need"));
  policy.rank = fixed_rank{6};
  CHECK(select({lstm}, policy)[0].ranks == rank_list{6, 6});
  // Larger as a whole: exactly as large is growth, too.
  policy.keep_dense_if_larger = true;
  policy.rank = fixed_rank{2};
  const layer_info even = layer("even", {{{4, 4}, 3}});
  CHECK(detail::parameters_as_factors(even, {2}) == detail::parameters_as_dense(even));
  CHECK(select({even}, policy)[0].reason == reason::growth);
  policy.keep_dense_if_larger = false;
  CHECK(contains(text_of<rank_error>([&] { select({even}, policy); }), "even: rank 2 would need 16"));
  // One group that can shrink is enough to ask the policy.
  policy = open_policy(energy_kept{0.5});
  CHECK(select({layer("mixed", {{{1, 1}, 4}, {{20, 20}, 4}})}, policy)[0].factorize());
  CHECK(select({layer("tiny", {{{1, 1}, 4}, {{2, 2}, 4}})}, policy)[0].reason == reason::growth);
}

TEST_CASE("select: batch norms between the factors of convolutions on the main path count as parameters") {
  // Rank 10 of a 21 x 20 matrix: 410 of 420 parameters, 430 with a batch norm.
  std::vector<layer_info> layers{matrix("linear", 21, 20), matrix("conv", 21, 20),
                                 matrix("shortcut", 21, 20, layer_place::shortcut), matrix("last", 5, 5)};
  layers[1].convolution = layers[2].convolution = true;
  factorize_policy policy;
  policy.first_layer = 1;
  policy.shortcuts_dense = false;
  policy.rank = fixed_rank{10};
  const auto extra = [](const layer_choice& choice) { return choice.extra_parameters; };
  CHECK(column(layers, policy, extra) == std::vector<index_t>{0, 0, 0, 0});
  CHECK(reasons(policy, layers) ==
        std::vector<reason>{reason::nothing, reason::nothing, reason::nothing, reason::last_layer});
  policy.factor_norms = true;
  CHECK(column(layers, policy, extra) == std::vector<index_t>{0, 2, 0, 0});
  CHECK(reasons(policy, layers) ==
        std::vector<reason>{reason::nothing, reason::growth, reason::nothing, reason::last_layer});
}

TEST_CASE("select: errors name the layer, the group and both values") {
  factorize_policy policy = open_policy(fixed_rank{13});
  std::string text = text_of<rank_error>([&] { select(network(), policy); });
  CHECK(contains(text, "shortcut: rank 13 of a 24 x 12 matrix; it must be in 1 .. 12"));
  policy.rank = fixed_rank{0};
  CHECK(contains(text_of<rank_error>([&] { select(network(), policy); }), "table: rank 0 of a 16 x 100"));
  policy.rank = fixed_rank{9};
  text = text_of<rank_error>([&] { select({layer("rnn", {{{40, 20}, 4}, {{40, 8}, 4}})}, policy); });
  CHECK(contains(text, "rnn, rank 2: rank 9 of a 40 x 8 matrix"));
  policy = open_policy();
  policy.embedding_rank = fixed_rank{17};
  CHECK(contains(text_of<rank_error>([&] { select(network(), policy); }), "table: rank 17 of a 16 x 100"));

  for (const index_t first : {5, 100, 0, -2}) {
    policy = open_policy();
    policy.first_layer = first;
    text = text_of<value_error>([&] { select(network(), policy, "tool"); });
    CHECK(contains(
        text, "tool: first_layer " + std::to_string(first) + " is none of the network's layers: it has 4"));
  }
  policy.first_layer = 2;  // the default, also of a network of one layer or none
  CHECK(select({matrix("only", 20, 20)}, policy)[0].reason == reason::first_layers);
  CHECK(select({matrix("only", 20, 20, layer_place::shortcut)}, policy)[0].factorize());

  policy = open_policy();
  policy.ranks = std::vector<layer_rank>{{"shortcut", 2}, {"shortcut", 3}};
  CHECK(contains(text_of<value_error>([&] { select(network(), policy, "tool"); }),
                 "tool: ranks of shortcut are listed twice"));

  // Fractions are refused also where no layer would use them, or only its singular values would show it.
  for (const rank_policy& wrong :
       {rank_policy(rank_ratio{0.0}), rank_policy(rank_ratio{1.5}), rank_policy(energy_kept{1.5}),
        rank_policy(parameter_fraction{-0.1}), rank_policy(parameter_budget{0})}) {
    CHECK_THROWS_AS(select(network(), open_policy(wrong)), value_error);
    CHECK_THROWS_AS(select({}, open_policy(wrong)), value_error);
    policy = open_policy();
    policy.embedding_rank = wrong;
    CHECK_THROWS_AS(select({matrix("only", 20, 20)}, policy), value_error);
  }
  CHECK(contains(text_of<rank_error>([] {
                   detail::check_ranks(matrix("fc", 4, 4), {1, 1});
                 }),
                 "fc: 2 ranks where its matrices need 1"));
}

TEST_CASE("select: decompositions begin with the most expensive layer") {
  const std::vector<layer_info> layers{
      matrix("small", 4, 4),   layer("none", {}),    layer("many", {{{8, 8}, 9}}),
      matrix("wide", 4, 1000), matrix("same", 4, 4), layer("two", {{{8, 8}, 4}, {{8, 16}, 4}})};
  // Costs: 64, 0, 9 * 512, 16000, 64, 4 * 512 + 4 * 1024.
  CHECK(detail::decomposition_order(layers) == std::vector<std::size_t>{3, 5, 2, 0, 4, 1});
  CHECK(detail::decomposition_order({}).empty());
}

TEST_CASE("layer_rank: one rank, several, or a list") {
  CHECK(layer_rank("a", 3).ranks == rank_list{3});
  CHECK(layer_rank("a", 3, 4).ranks == rank_list{3, 4});
  CHECK(layer_rank("a", rank_list{3, 4, 5}) == layer_rank("a", 3, 4, 5));
  CHECK(layer_rank("a", 3).rank() == 3);
  CHECK(layer_rank().rank() == 0);
  CHECK(!(layer_rank("a", 3) == layer_rank("b", 3)));
}

}  // namespace
