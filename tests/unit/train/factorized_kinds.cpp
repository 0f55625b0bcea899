// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Whole models with grouped convolutions, an LSTM, attention and embeddings: planned, factorized, saved,
// restored, merged.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/transformer.hpp>
#include <pufferfish/nn.hpp>
#include <pufferfish/train/checkpoint.hpp>

#include "../support/scratch_folder.hpp"
#include "../support/small_transformer.hpp"

namespace {

using namespace pufferfish;

/// What a model computes for a fixed input.
std::vector<double> outputs_of(const network<double>& net) {
  cpu_context ctx;
  tensor<double, 4> x({2, 6, 5, 4});
  fill_normal<double>(x.flat(), 1.0, {3, 3});
  const tensor<double, 4> y = net.forward(ctx, x.view());
  return {y.flat().begin(), y.flat().end()};
}
std::vector<double> outputs_of(const model<lstm_lm<double>>& net) {
  cpu_context ctx;
  auto state = net.root().make_state(2);
  tensor<std::int32_t, 2> tokens({5, 2});
  for (std::size_t i = 0; i < 10; ++i) tokens.flat()[i] = static_cast<std::int32_t>(i * i % 60);
  return {net.root().loss(ctx, tokens, tokens, state).loss_sum};
}
std::vector<double> outputs_of(const model<transformer<double>>& net) {
  cpu_context ctx;
  tensor<std::int32_t, 2> source({2, 3}), target({2, 4});
  for (std::size_t i = 0; i < 6; ++i) source.flat()[i] = static_cast<std::int32_t>(2 + 7 * i);
  for (std::size_t i = 0; i < 8; ++i) target.flat()[i] = static_cast<std::int32_t>(3 + 5 * i);
  tensor<double, 2> logits({net.root().output_rows(target), net.root().options().vocabulary});
  net.root().forward(ctx, source, target, logits.view());
  return {logits.flat().begin(), logits.flat().end()};
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]));
  return worst;
}

template <class Root>
bool same_state(const model<Root>& a, const model<Root>& b) {
  const auto same = [](std::span<const double> x, std::span<const double> y) {
    return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size_bytes()) == 0);
  };
  return a.structure() == b.structure() && same(a.store().values(), b.store().values()) &&
         same(a.store().buffers(), b.store().buffers());
}

struct expectation {
  std::vector<layer_rank> ranks;
  std::vector<std::string> kept_dense;
  std::size_t matrices = 0;
  index_t saved = 0;  ///< parameters
};

/// Everything that the structure of a factorized model must survive. `other` is the same model with other
/// numbers.
template <class Net>
factorization check_model(Net net, Net other, const factorize_policy& policy, const expectation& expected) {
  const Net dense = net;
  const std::vector<layer_rank> planned = planned_ranks(net, policy);
  CHECK(planned == expected.ranks);
  const factorization made = factorize(net, policy);
  CHECK(made.ranks() == planned);
  CHECK(low_rank_layers(net) == planned);
  CHECK(made.kept_dense == expected.kept_dense);
  CHECK(made.layers.size() == expected.matrices);
  CHECK(made.parameters_before == dense.parameter_count());
  CHECK(made.parameters_after == net.parameter_count());
  CHECK(made.parameters_before - made.parameters_after == expected.saved);
  index_t before = 0, after = 0;
  for (const factor_report& report : made.layers) {
    before += report.parameters_before;
    after += report.parameters_after;
  }
  CHECK(before - after == expected.saved);
  // A second time there is nothing left to do; the layers keep their numbers.
  Net again = net;
  CHECK(factorize(again, policy).low_rank.empty());
  CHECK(numbered_layers(net) == numbered_layers(dense));

  Net shaped = other;
  apply_ranks(shaped, planned);
  CHECK(shaped.structure() == net.structure());
  CHECK(low_rank_layers(shaped) == planned);
  CHECK_THROWS_AS(apply_ranks(shaped, planned), state_error);

  const scratch_folder folder;
  const std::string path = folder / "model";
  save_checkpoint(path, net);
  const checkpoint_file file = open_checkpoint(path);
  std::vector<layer_rank> sorted = planned;
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  CHECK(file.ranks() == sorted);
  for (Net* target : {&other, &shaped}) {  // dense, and of the right structure already
    file.restore(*target);
    CHECK(same_state(*target, net));
    CHECK(outputs_of(*target) == outputs_of(net));
  }

  const std::vector<double> low_rank = outputs_of(net);
  CHECK(distance(low_rank, outputs_of(dense)) > 1e-6);
  merge(net);
  CHECK(net.structure() == dense.structure());
  CHECK(low_rank_layers(net).empty());
  CHECK(distance(outputs_of(net), low_rank) < 1e-10);
  // Merged matrices have the rank of their factors: factorizing them again loses nothing.
  CHECK(factorize(net, policy).kept_energy() == doctest::Approx(1.0).epsilon(1e-12));
  CHECK(distance(outputs_of(net), low_rank) < 1e-9);
  // A dense checkpoint into a low-rank model merges that first.
  save_checkpoint(path, dense);
  open_checkpoint(path).restore(other);
  CHECK(same_state(other, dense));
  return made;
}

network<double> conv_net(std::uint64_t seed) {
  const auto grouped = [](index_t in, index_t out, index_t groups) {
    conv_shape shape = conv_shape::square(in, out, 3, 1, 1);
    shape.groups = groups;
    return shape;
  };
  Sequential<double> layers;
  layers.add("stem", Conv<double>(conv_shape::square(4, 8, 3, 1, 1)));
  layers.add("grouped", Conv<double>(grouped(8, 24, 2), true)).add("bn1", BatchNorm<double>(24));
  layers.add("depthwise", Conv<double>(grouped(24, 24, 24))).add("bn2", BatchNorm<double>(24));
  layers.add("relu", ReLU<double>());
  layers.add("pointwise", Conv<double>(conv_shape::square(24, 32, 1))).add("bn3", BatchNorm<double>(32));
  layers.add("pool", GlobalAvgPool<double>()).add("fc", Linear<double>(32, 5));
  network<double> net{any_layer<double>(layers)};
  net.initialize(seed);
  fill_uniform(net.store().buffers(), 0.5, 1.5, random_stream(seed, 9));
  return net;
}

TEST_CASE("grouped convolutions in a network: one rank for all groups, depthwise ones stay dense") {
  // Each of two groups is 12 x 36, rank 3; each of 24 is 1 x 9, which nothing makes smaller.
  const expectation expected{
      {{"grouped", 3}, {"pointwise", 6}}, {"depthwise"}, 3, 2 * (12 * 36 - 3 * 48) + 24 * 32 - 6 * 56};
  const factorization made = check_model(conv_net(1), conv_net(2), {}, expected);
  CHECK(made.layers[0].name == "grouped.weight[0]");
  CHECK(made.layers[1].name == "grouped.weight[1]");
  CHECK(made.layers[2].name == "pointwise");

  factorize_policy policy;
  policy.keep_dense_if_larger = false;
  network<double> net = conv_net(1);
  for (const bool planned : {true, false}) {  // both refuse what would grow
    CHECK_THROWS_WITH_AS(planned ? void(planned_ranks(net, policy)) : void(factorize(net, policy)),
                         doctest::Contains("depthwise: rank 1 would need 10"), rank_error);
  }
  policy = {};
  policy.rank = energy_kept{0.7};
  const factorization by_energy = factorize(net, policy);
  REQUIRE(by_energy.layers.size() == 3);
  CHECK(by_energy.layers[0].rank == by_energy.layers[1].rank);
  for (const factor_report& report : by_energy.layers) CHECK(report.kept_energy >= 0.7);
}

TEST_CASE("fold_batch_norm: after grouped, depthwise and low-rank grouped convolutions") {
  for (const bool low_rank : {false, true}) {
    network<double> net = conv_net(3);
    if (low_rank) factorize(net, factorize_policy{});
    const std::vector<layer_rank> ranks = low_rank_layers(net);
    const std::vector<double> before = outputs_of(net);
    const index_t parameters = net.parameter_count();
    const batch_norm_folding made = fold_batch_norm(net);
    CHECK(made.folded ==
          std::vector<folded_batch_norm>{{"bn1", "grouped"}, {"bn2", "depthwise"}, {"bn3", "pointwise"}});
    CHECK(made.kept.empty());
    // Two numbers a channel leave; the convolutions without a bias get one.
    CHECK(net.parameter_count() == parameters - 2 * (24 + 24 + 32) + 24 + 32);
    CHECK(low_rank_layers(net) == ranks);
    CHECK(distance(outputs_of(net), before) < 1e-12);
    merge(net);
    CHECK(distance(outputs_of(net), before) < 1e-10);
  }
}

model<lstm_lm<double>> language_model_of(std::uint64_t seed) {
  auto net = make_lstm_lm<double>({60, 16, 2, 0.0});
  net.initialize(seed);
  fill_normal<double>(net.store().values(), 0.4, {seed, 1});
  return net;
}

TEST_CASE("an LSTM language model with a factorized embedding: one table serves lookup and output") {
  factorize_policy policy = lstm_lm_policy();
  constexpr index_t saved_by_lstms = 2 * 8 * (16 * 16 - 4 * 32);
  CHECK(planned_ranks(language_model_of(1), policy) ==
        std::vector<layer_rank>{{"rnn.0", 4, 4}, {"rnn.1", 4, 4}});
  policy.embeddings_dense = false;
  // As the layers' policy says, min(60, 16) / 4.
  check_model(
      language_model_of(1), language_model_of(2), policy,
      {{{"encoder", 4}, {"rnn.0", 4, 4}, {"rnn.1", 4, 4}}, {}, 17, saved_by_lstms + 60 * 16 - 4 * 76});
  policy.embedding_rank = fixed_rank{7};
  const factorization made = check_model(
      language_model_of(1), language_model_of(2), policy,
      {{{"encoder", 7}, {"rnn.0", 4, 4}, {"rnn.1", 4, 4}}, {}, 17, saved_by_lstms + 60 * 16 - 7 * 76});
  CHECK(made.layers[0].name == "encoder");
  CHECK(made.layers[0].rows == 16);
  CHECK(made.layers[0].cols == 60);
  // Rank 13 makes the table larger: 13 * 76 > 960.
  policy.embedding_rank = fixed_rank{13};
  model<lstm_lm<double>> net = language_model_of(1);
  CHECK(factorize(net, policy).kept_dense == std::vector<std::string>{"encoder"});
  CHECK(low_rank_layers(net).size() == 2);
}

model<transformer<double>> transformer_of(std::uint64_t seed) {
  transformer_options options = test::small_transformer();
  options.vocabulary = 50;
  options.width = 12;
  options.key = options.value = 6;
  options.hidden = 24;
  auto net = make_transformer<double>(options);
  net.initialize(seed);
  return net;
}

TEST_CASE("a Transformer with a factorized embedding, which three places share") {
  factorize_policy policy = transformer_policy();
  policy.embeddings_dense = false;
  policy.embedding_rank = fixed_rank{5};
  expectation expected;
  expected.ranks.push_back({"encoder.src_word_emb", 5});
  const auto add = [&](const std::string& part, const std::vector<std::string>& names) {
    for (const std::string& name : names) expected.ranks.push_back({part + ".layer_stack.1." + name, 3});
  };
  const std::vector<std::string> self{"slf_attn.w_qs", "slf_attn.w_ks", "slf_attn.w_vs", "slf_attn.fc"};
  add("encoder", self);
  add("encoder", {"pos_ffn.w_1", "pos_ffn.w_2"});
  add("decoder", self);
  add("decoder", {"enc_attn.w_qs", "enc_attn.w_ks", "enc_attn.w_vs", "enc_attn.fc"});
  add("decoder", {"pos_ffn.w_1", "pos_ffn.w_2"});
  expected.matrices = 17;
  expected.saved = 50 * 12 - 5 * 62 + 12 * (144 - 3 * 24) + 4 * (12 * 24 - 3 * 36);
  check_model(transformer_of(1), transformer_of(2), policy, expected);
  // The padding token survives both ways.
  model<transformer<double>> net = transformer_of(1);
  struct padding final : layer_visitor<double, device::cpu> {
    void on_layer(const std::string&, any_layer<double>&) override {}
    void on_embedding(const std::string&, any_layer<double>& slot) override {
      if (const auto* dense = slot.target<Embedding<double>>()) token = dense->padding();
      if (const auto* low_rank = slot.target<LowRankEmbedding<double>>()) token = low_rank->padding();
    }
    std::int32_t token = -5;
  };
  const auto padding_of = [](const model<transformer<double>>& of) {
    padding found;
    of.visit_layers(found);
    return found.token;
  };
  const std::int32_t token = padding_of(net);
  CHECK(token == test::small_transformer().padding);
  factorize(net, policy);
  CHECK(padding_of(net) == token);
  merge(net);
  CHECK(padding_of(net) == token);
}

}  // namespace
