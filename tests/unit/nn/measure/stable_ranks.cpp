// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/resnet.hpp>
#include <pufferfish/nn/measure/stable_ranks.hpp>

namespace {

using namespace pufferfish;

/// Everything may be factorized.
factorize_policy open_policy() {
  factorize_policy policy;
  policy.first_layer = 1;
  policy.last_layer_dense = policy.shortcuts_dense = policy.embeddings_dense = false;
  return policy;
}

std::vector<std::string> names(const std::vector<layer_stable_rank>& all) {
  std::vector<std::string> result;
  for (const layer_stable_rank& one : all) result.push_back(one.name);
  return result;
}

network<double> small_resnet() {
  resnet18_options options;
  options.width = 4;
  network<double> net = resnet18<double>(options);
  net.initialize(3);
  return net;
}

TEST_CASE("stable ranks of a network: each layer's own, whatever the number of threads") {
  const network<double> net = small_resnet();
  factorize_policy policy = open_policy();
  const std::vector<layer_stable_rank> all = stable_ranks(net, policy);
  const auto found = detail::find_slots(net);
  // All layers but none: rank 1 makes each of them smaller.
  REQUIRE(all.size() == found.slots.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    CAPTURE(all[i].name);
    CHECK(all[i].name == found.layers[i].name);
    REQUIRE(all[i].values.size() == 1);
    const auto weight = detail::unroll(found.slots[i]->weights("").matrices[0].view);
    CHECK(all[i].values[0] == doctest::Approx(stable_rank<double>(weight)).epsilon(2e-6));
    CHECK(all[i].groups[0].size == matrix_size{weight.extent(0), weight.extent(1)});
  }
  policy.threads = 3;
  const std::vector<layer_stable_rank> by_threads = stable_ranks(net, policy);
  for (std::size_t i = 0; i < all.size(); ++i) CHECK(by_threads[i].values == all[i].values);
  for (const layer_stable_rank& one : stable_ranks(net, policy, {.floored = true})) {
    CHECK(one.values[0] == static_cast<double>(static_cast<index_t>(one.values[0])));
  }
}

TEST_CASE("stable ranks of a network: of the layers that the policy may factorize, low-rank ones left out") {
  network<double> net = small_resnet();
  factorize_policy policy;
  policy.rank = fixed_rank{1000000};  // counts for nothing
  policy.first_layer = 3;
  std::vector<std::string> expected;
  for (const auto& [name, number] : numbered_layers(net)) {
    if (number >= 3) expected.push_back(name);
  }
  expected.pop_back();
  CHECK(names(stable_ranks(net, policy)) == expected);

  apply_ranks(net, {{expected[2], 1}});
  expected.erase(expected.begin() + 2);
  CHECK(names(stable_ranks(net, policy)) == expected);

  policy.also_if = [](const std::string& name, matrix_size) {
    return name.find("conv2") == std::string::npos;
  };
  for (const std::string& name : names(stable_ranks(net, policy)))
    CHECK(name.find("conv1") != std::string::npos);
  policy.first_layer = 99;
  CHECK_THROWS_WITH_AS(stable_ranks(net, policy), doctest::Contains("stable_ranks: first_layer 99"),
                       value_error);
}

TEST_CASE("stable ranks of a network: LSTM layers have one a side, embeddings where they may be factorized") {
  lstm_lm_options options;
  options.vocabulary = 50;
  options.width = 12;
  auto net = make_lstm_lm<float>(options);
  net.initialize(1);
  factorize_policy policy = open_policy();
  const std::vector<layer_stable_rank> all = stable_ranks(net, policy);
  CHECK(names(all) == std::vector<std::string>{"encoder", "rnn.0", "rnn.1"});
  CHECK(all[0].values.size() == 1);
  for (const std::size_t layer : {std::size_t{1}, std::size_t{2}}) {
    REQUIRE(all[layer].values.size() == 2);
    const auto found = detail::find_slots(net);
    const auto weights = found.slots[layer]->weights("");
    for (const auto& matrix : weights.matrices) {
      CHECK(all[layer].values[matrix.group] >=
            stable_rank<float>(detail::unroll(matrix.view)) * (1.0 - 2e-6));
    }
  }
  policy.embeddings_dense = true;
  CHECK(names(stable_ranks(net, policy)) == std::vector<std::string>{"rnn.0", "rnn.1"});

  net.store().values().back() = std::numeric_limits<float>::quiet_NaN();
  CHECK_THROWS_WITH_AS(stable_ranks(net, open_policy()), doctest::Contains("is not a number"), value_error);
}

}  // namespace
