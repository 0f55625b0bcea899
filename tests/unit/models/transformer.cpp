// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/models/transformer.hpp>
#include <pufferfish/models/transformer_decoding.hpp>
#include <pufferfish/optim/adam.hpp>

#include "../support/embedding_slots.hpp"
#include "../support/gradient_check.hpp"
#include "../support/small_transformer.hpp"

namespace {
using namespace test;

template <class T>
model<transformer<T>> small_model(double dropout = 0.0, std::uint64_t seed = 3) {
  auto net = make_transformer<T>(small_transformer(dropout));
  net.initialize(seed);
  return net;
}

using tokens = tensor<std::int32_t, 2>;

/// Sentences, padded with 1.
tokens sentences(const std::vector<std::vector<std::int32_t>>& all, index_t length = 0) {
  for (const auto& sentence : all) length = std::max(length, static_cast<index_t>(sentence.size()));
  tokens ids({static_cast<index_t>(all.size()), length});
  std::fill(ids.flat().begin(), ids.flat().end(), 1);
  for (std::size_t s = 0; s < all.size(); ++s) {
    std::copy(all[s].begin(), all[s].end(), ids.data() + static_cast<index_t>(s) * length);
  }
  return ids;
}

const std::vector<std::vector<std::int32_t>> german{{4, 5, 6, 3}, {7, 3}, {8, 9, 10, 11, 12, 3}};
const std::vector<std::vector<std::int32_t>> english{{2, 5, 5}, {2, 12, 4, 6, 0}, {2}};
const std::vector<std::vector<std::int32_t>> english_next{{5, 5, 3}, {12, 4, 6, 0, 3}, {3}};

tensor<double, 2> logits_of(const model<transformer<double>>& net, const tokens& source,
                            const tokens& target) {
  cpu_context ctx;
  tensor<double, 2> logits({net.root().output_rows(target), net.root().options().vocabulary});
  net.root().forward(ctx, source, target, logits.view());
  return logits;
}

TEST_CASE("transformer: the published counts and multiply-accumulates, dense, hybrid, all layers") {
  struct expected {
    bool low_rank;
    index_t dense_layers, parameters, one, twenty;
    std::size_t layers;
  };
  auto net = make_transformer<float>(transformer_options{});
  for (const expected& e : {expected{false, 0, 48978432, 48933376, 985671680, 0},
                            expected{true, 1, 26696192, 26651136, 540026880, 80},
                            expected{true, 0, 22239744, 22194688, 450897920, 96}}) {
    model<transformer<float>> of = net;
    if (e.low_rank) {
      const auto ranks = planned_ranks(of, transformer_policy(e.dense_layers));
      CHECK(ranks.size() == e.layers);
      for (const layer_rank& layer : ranks) CHECK(layer.rank() == 128);
      apply_ranks(of, ranks);
    }
    CHECK(of.parameter_count() == e.parameters);
    CHECK(of.root().cost().total().parameters == e.parameters);
    CHECK(of.root().cost(1, 1).total().macs == e.one);
    CHECK(of.root().cost(20, 20).total().macs == e.twenty);
  }
  // Different lengths: the encoder and the memory's projections see the source.
  const index_t of_source = net.root().cost(2, 1).total().macs - net.root().cost(1, 1).total().macs;
  CHECK(of_source == 6 * (4 * 512 * 512 + 2 * 512 * 2048 + 3 * 1024) + 6 * (2 * 512 * 512 + 1024));
}

TEST_CASE("transformer: names of the paper's code; which layers the policies take") {
  model<transformer<float>> net = small_model<float>();
  std::vector<std::string> names;
  for (const auto& entry : net.store().parameters()) names.push_back(entry.name);
  // Arenas are in reverse execution order.
  CHECK(names.back() == "encoder.src_word_emb.weight");
  CHECK(names.front() == "decoder.layer_stack.1.pos_ffn.layer_norm.bias");
  CHECK(names.size() == 1 + 2 + 2 * (6 + 6) + 2 + 2 * (6 + 6 + 6));
  const auto has = [&](const char* name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (const char* name :
       {"encoder.layer_norm.weight", "encoder.layer_stack.0.slf_attn.w_qs.weight",
        "encoder.layer_stack.1.pos_ffn.w_2.bias", "decoder.layer_norm.bias",
        "decoder.layer_stack.1.enc_attn.fc.weight", "decoder.layer_stack.0.slf_attn.layer_norm.weight"}) {
    CAPTURE(name);
    CHECK(has(name));
  }
  std::vector<std::string> slots;
  net.for_each_layer([&](const std::string& name, const auto&) { slots.push_back(name); });
  CHECK(slots.size() == 2 * (4 + 2) + 2 * (4 + 4 + 2));
  factorize_policy policy = transformer_policy();
  policy.rank = fixed_rank{2};
  const factorization done = factorize(net, policy);
  CHECK(done.layers.size() == 6 + 10);
  for (const factor_report& layer : done.layers) CHECK(contains(layer.name, "layer_stack.1."));
  CHECK(net.store().parameters().back().name == "encoder.src_word_emb.weight");
}

TEST_CASE("transformer: initial values are the paper's") {
  const model<transformer<double>> net = small_model<double>();
  for (const auto& entry : net.store().parameters()) {
    const auto& p = *entry.thing;
    CAPTURE(entry.name);
    double most = 0.0, least = HUGE_VAL;
    for (double value : p.values()) {
      most = std::max(most, std::abs(value));
      least = std::min(least, std::abs(value));
    }
    if (p.layout().dims == 2) {
      const double bound = std::sqrt(6.0 / static_cast<double>(p.layout().shape[0] + p.layout().shape[1]));
      CHECK(most <= bound);
      CHECK(most > 0.8 * bound);
    } else if (contains(entry.name, "layer_norm.weight")) {
      CHECK(least == 1.0);
      CHECK(most == 1.0);
    } else if (contains(entry.name, "layer_norm.bias")) {
      CHECK(most == 0.0);
    } else {
      CHECK(most <= 1.0 / std::sqrt(contains(entry.name, "w_1") ? 6.0 : 10.0));
      CHECK(most > 0.0);
    }
  }
}

/// The loss of a batch, and all gradients in arena order.
struct step_result {
  double loss = 0.0;
  index_t tokens = 0;
  std::vector<double> gradients;
};

template <class T>
step_result step(model<transformer<T>>& net, const tokens& source, const tokens& target, const tokens& next,
                 int threads = 1, index_t first_sample = 0) {
  cpu_context ctx({threads, 11});
  ctx.set_mode(run_mode::training);
  ctx.begin_step(4, first_sample);
  const token_loss_result loss =
      net.root().loss(ctx, source, target, next, {0.1, smoothing_kind::wrong_classes});
  net.root().backward(ctx, 1.0);
  CHECK(ctx.tape().empty());
  step_result result{loss.loss_sum, loss.tokens, {}};
  for (T value : net.store().gradients()) result.gradients.push_back(static_cast<double>(value));
  return result;
}

double worst_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double worst = a.size() == b.size() ? 0.0 : HUGE_VAL;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    worst = std::max(worst, std::abs(a[i] - b[i]) / (1.0 + std::abs(b[i])));
  }
  return worst;
}

TEST_CASE("transformer: all gradients against finite differences, dense and low rank, with dropout") {
  const tokens source = sentences(german), target = sentences(english), next = sentences(english_next);
  for (bool low_rank : {false, true}) {
    for (double dropout : {0.0, 0.2}) {
      model<transformer<double>> net = small_model<double>(dropout);
      // No table of small numbers: every part of the gradient counts.
      for (const auto& entry : net.store().parameters()) {
        if (entry.thing->layout().dims == 2) {
          fill_normal<double>(entry.thing->values(), 0.4, {5, static_cast<std::uint64_t>(entry.offset)});
        }
      }
      if (low_rank) {
        factorize_policy policy = transformer_policy(1);
        policy.rank = fixed_rank{2};
        factorize(net, policy);
        factor_embedding(net, 3);
      }
      const step_result found = step(net, source, target, next);
      CHECK(found.tokens == 9);
      cpu_context ctx({2, 11});
      ctx.set_mode(run_mode::training);
      const auto value = [&] {
        ctx.begin_step(4);
        return net.root().loss(ctx, source, target, next, {0.1, smoothing_kind::wrong_classes}).loss_sum;
      };
      const std::span<double> values = net.store().values();
      double worst = 0.0;
      // A third of all elements, every parameter among them.
      for (std::size_t i = 0; i < values.size(); i += 3) {
        constexpr double move = 1e-5;
        const double kept = values[i];
        values[i] = kept + move;
        const double above = value();
        values[i] = kept - move;
        const double below = value();
        values[i] = kept;
        const double difference = (above - below) / (2.0 * move);
        worst = std::max(worst, std::abs(difference - found.gradients[i]) / (1.0 + std::abs(difference)));
      }
      CHECK(worst < 1e-7);
    }
  }
}

TEST_CASE("transformer: logits and their gradient agree with the fused loss") {
  const tokens source = sentences(german), target = sentences(english), next = sentences(english_next);
  model<transformer<double>> net = small_model<double>(0.1);
  SUBCASE("dense") {}
  SUBCASE("low-rank embedding") { factor_embedding(net, 3); }
  const step_result fused = step(net, source, target, next);
  cpu_context ctx({2, 11});
  ctx.set_mode(run_mode::training);
  ctx.begin_step(4);
  tensor<double, 2> logits({9, 13}), dlogits({9, 13});
  net.root().forward(ctx, source, target, logits.view());
  const std::vector<std::int32_t> targets{5, 5, 3, 12, 4, 6, 0, 3, 3};
  const token_loss_options options{{0.1, smoothing_kind::wrong_classes}, 1, loss_reduction::sum};
  const token_loss_result loss = ops::token_loss<double>(ctx, logits, targets, options, 1.0, dlogits);
  CHECK(loss.loss_sum == doctest::Approx(fused.loss).epsilon(1e-12));
  net.root().backward(ctx, tensor_view<const double, 2>(dlogits));
  CHECK(ctx.tape().empty());
  const auto g = net.store().gradients();
  CHECK(worst_difference({g.begin(), g.end()}, fused.gradients) < 1e-12);
}

TEST_CASE("transformer: a batch that the caller has packed; rows of padding after it change nothing") {
  model<transformer<double>> net = small_model<double>(0.3), own = net;
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  const tokens source = sentences(german), target = sentences(english), next = sentences(english_next);
  const label_smoothing smoothing{0.1, smoothing_kind::wrong_classes};
  ctx.begin_step(4, 5);
  const token_loss_result expected = net.root().loss(ctx, source, target, next, smoothing);
  net.root().backward(ctx, 7.0);
  for (const index_t more : {0, 1, 6}) {
    CAPTURE(more);
    const pair_packing packing({3, 12 + more, 9 + 2 * more, more == 0});
    std::vector<std::byte> written(static_cast<std::size_t>(packing.bytes())), block(written.size());
    CHECK(packing.write(written.data(), source, target, next, 1, 5, 9) == expected.tokens);
    block = written;  // elsewhere, as in the memory of a device
    const packed_pairs pairs = packing.in(block.data());
    CHECK(pairs.source.rows() == 12 + more);
    CHECK(pairs.target.runs.count[1] == 5);
    double results[2] = {-1.0, -1.0};
    const double normalizer = 7.0;
    ctx.begin_step(4, 5);
    own.root().loss(ctx, pairs, smoothing, results);
    own.root().backward(ctx, &normalizer);
    CHECK(ctx.tape().empty());
    CHECK(results[0] == doctest::Approx(expected.loss_sum).epsilon(1e-12));
    CHECK(results[1] == static_cast<double>(expected.tokens));
    for (std::size_t p = 0; p < net.store().parameters().size(); ++p) {
      CAPTURE(net.store().parameters()[p].name);
      const std::span<const double> got = own.store().parameters()[p].thing->gradient();
      const std::span<const double> right = net.store().parameters()[p].thing->gradient();
      for (std::size_t i = 0; i < right.size(); ++i) {
        REQUIRE(got[i] == doctest::Approx(right[i]).epsilon(1e-11).scale(1e-3));
      }
    }
  }
  // Without padding, rows follow tokens.
  const pair_packing exact(source, target, 1);
  CHECK(exact.bytes() == pair_packing({3, 12, 9, true}).bytes());
  std::vector<std::byte> block(static_cast<std::size_t>(exact.bytes()));
  CHECK(exact.in(block.data()).source.runs.total == 12);
}

TEST_CASE("transformer: every sentence for itself gives the same logits; padding anywhere changes nothing") {
  const model<transformer<double>> net = small_model<double>();
  const tensor<double, 2> all = logits_of(net, sentences(german), sentences(english));
  index_t row = 0;
  for (std::size_t s = 0; s < german.size(); ++s) {
    const tensor<double, 2> alone = logits_of(net, sentences({german[s]}), sentences({english[s]}));
    for (index_t i = 0; i < alone.extent(0); ++i, ++row) {
      for (index_t v = 0; v < 13; ++v) CHECK(alone(i, v) == doctest::Approx(all(row, v)).epsilon(1e-12));
    }
  }
  CHECK(row == all.extent(0));
  CHECK(largest_error(logits_of(net, sentences(german, 9), sentences(english, 9)), all) < 1e-14);
  // Tokens of later positions do not change earlier logits: the mask is causal.
  auto changed = english;
  changed[1][4] = 8;
  const tensor<double, 2> other = logits_of(net, sentences(german), sentences(changed));
  for (index_t i = 0; i < 9; ++i) CHECK((other(i, 0) == all(i, 0)) == (i != 7));
}

TEST_CASE("transformer: dropout does not depend on padding, nor on how a batch is split") {
  model<transformer<double>> net = small_model<double>(0.3);
  const step_result whole = step(net, sentences(german), sentences(english), sentences(english_next));
  const step_result padded =
      step(net, sentences(german, 9), sentences(english, 8), sentences(english_next, 8));
  CHECK(padded.loss == doctest::Approx(whole.loss).epsilon(1e-13));
  double loss = 0.0;
  std::vector<double> sum(whole.gradients.size());
  for (std::size_t s = 0; s < 3; ++s) {
    const step_result part = step(net, sentences({german[s]}), sentences({english[s]}),
                                  sentences({english_next[s]}), 1, static_cast<index_t>(s));
    loss += part.loss;
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part.gradients[i];
  }
  CHECK(loss == doctest::Approx(whole.loss).epsilon(1e-12));
  CHECK(worst_difference(sum, whole.gradients) < 1e-12);
}

TEST_CASE("transformer: the same bits for any number of threads") {
  transformer_options options = small_transformer(0.1);
  options.width = 40;
  options.key = options.value = 20;
  options.hidden = 70;
  options.vocabulary = 700;
  auto net = make_transformer<float>(options);
  net.initialize(5);
  SUBCASE("dense") {}
  SUBCASE("low-rank embedding") { factor_embedding(net, 17); }
  tokens source({60, 8}), target({60, 9}), next({60, 9});
  picker pick(3);
  for (tokens* ids : {&source, &target, &next}) {
    for (std::int32_t& id : ids->flat()) id = static_cast<std::int32_t>(pick(0, 699));
  }
  const step_result one = step(net, source, target, next, 1);
  for (int threads : {2, 3}) {
    const step_result more = step(net, source, target, next, threads);
    CHECK(more.loss == one.loss);
    CHECK(same_bits(more.gradients, one.gradients));
  }
}

TEST_CASE("transformer: at full rank the dense numbers; merged back, too") {
  model<transformer<double>> net = small_model<double>();
  const tokens source = sentences(german), target = sentences(english);
  const tensor<double, 2> dense = logits_of(net, source, target);
  factorize_policy policy = transformer_low_rank_policy();
  policy.rank = rank_ratio{1.0};
  policy.keep_dense_if_larger = false;
  CHECK_THROWS_AS(factorize(net, policy), rank_error);  // would grow
  std::vector<layer_rank> ranks;
  net.for_each_layer([&](const std::string& name, const auto& layer) {
    ranks.push_back({name, std::min(layer.first_matrix().rows, layer.first_matrix().cols)});
  });
  model<transformer<double>> full = net;
  apply_ranks(full, ranks);
  struct loader final : layer_visitor<double, device::cpu> {
    void on_layer(const std::string& name, any_layer<double>& slot) override {
      const auto weights = slot.weights(name);
      slot = detail::with_factors(
          slot, weights,
          detail::factorize_weights(weights, std::array{rank_policy(rank_ratio{1.0})}, {name, true}));
    }
  } visitor;
  full = net;
  full.modify([&](transformer<double>& root) { root.visit_layers(visitor); });
  CHECK(low_rank_layers(full).size() == ranks.size());
  CHECK(largest_error(logits_of(full, source, target), dense) < 1e-11);
  merge(full);
  CHECK(low_rank_layers(full).empty());
  CHECK(largest_error(logits_of(full, source, target), dense) < 1e-11);
}

TEST_CASE("transformer: the switch leaves everything else as it is") {
  model<transformer<double>> net = small_model<double>();
  const model<transformer<double>> before = net;
  factorize_policy policy = transformer_policy();
  policy.rank = fixed_rank{2};
  const factorization done = factorize(net, policy);
  const auto values_of = [](const model<transformer<double>>& of, const std::string& name) {
    for (const auto& entry : of.store().parameters()) {
      if (entry.name == name)
        return std::vector<double>(entry.thing->values().begin(), entry.thing->values().end());
    }
    return std::vector<double>();
  };
  std::size_t untouched = 0, factors = 0;
  for (const auto& entry : net.store().parameters()) {
    if (contains(entry.name, ".down.") || contains(entry.name, ".up.weight")) {
      ++factors;
      continue;
    }
    std::string old = entry.name;
    if (const auto at = old.find(".up.bias"); at != std::string::npos) old.replace(at, 8, ".bias");
    CHECK(values_of(net, entry.name) == values_of(before, old));
    ++untouched;
  }
  CHECK(factors == 2 * done.layers.size());
  CHECK(untouched == before.store().parameters().size() - done.layers.size());
}

TEST_CASE("transformer: token by token with beams gives the numbers of one pass") {
  model<transformer<double>> net = small_model<double>();
  for (bool low_rank : {false, true}) {
    if (low_rank) {
      factorize_policy policy = transformer_policy();
      policy.rank = fixed_rank{2};
      factorize(net, policy);
      factor_embedding(net, 4);
    }
    cpu_context ctx({2, 0});
    const tokens source = sentences(german);
    transformer_decoding<double> decoding(ctx, net.root(), source, 2, 5);
    struct move {
      std::vector<std::int32_t> tokens, parents, owners;
    };
    // Sentence 1 ends on the way.
    const std::vector<move> moves{{{2, 2, 2}, {0, 1, 2}, {0, 1, 2}},
                                  {{5, 6, 7, 8, 0}, {0, 0, 1, 2, 2}, {0, 0, 1, 2, 2}},
                                  {{4, 4, 9, 10}, {1, 1, 4, 3}, {0, 0, 2, 2}},
                                  {{3, 12}, {1, 2}, {0, 2}}};
    std::vector<std::vector<std::int32_t>> history{{}, {}, {}};
    for (const move& m : moves) {
      std::vector<std::vector<std::int32_t>> next;
      for (std::size_t i = 0; i < m.tokens.size(); ++i) {
        next.push_back(history[static_cast<std::size_t>(m.parents[i])]);
        next.back().push_back(m.tokens[i]);
      }
      history = next;
      tensor<double, 2> logits({static_cast<index_t>(m.tokens.size()), 13});
      decoding.step(ctx, m.tokens, m.parents, m.owners, logits.view());
      CHECK(decoding.rows() == logits.extent(0));
      for (std::size_t i = 0; i < history.size(); ++i) {
        const tensor<double, 2> expected = logits_of(
            net, sentences({german[static_cast<std::size_t>(m.owners[i])]}), sentences({history[i]}));
        for (index_t v = 0; v < 13; ++v) {
          CHECK(logits(static_cast<index_t>(i), v) ==
                doctest::Approx(expected(expected.extent(0) - 1, v)).epsilon(1e-11));
        }
      }
    }
    CHECK(decoding.length() == 4);
    tensor<double, 2> logits({2, 13});
    const std::vector<std::int32_t> two{3, 4}, parents{0, 1}, owners{0, 2}, wrong{0, 3};
    CHECK_THROWS_AS(decoding.step(ctx, two, parents, wrong, logits.view()), shape_error);
    CHECK_THROWS_AS(decoding.step(ctx, wrong, wrong, owners, logits.view()), shape_error);
    const std::vector<std::int32_t> unknown{3, 13};
    CHECK(contains(error_text([&] { decoding.step(ctx, unknown, parents, owners, logits.view()); }),
                   "token 13 at position 1"));
    decoding.step(ctx, two, parents, owners, logits.view());
    CHECK(contains(error_text([&] { decoding.step(ctx, two, parents, owners, logits.view()); }),
                   "token 6 of at most 5"));
    CHECK_THROWS_AS(transformer_decoding<double>(ctx, net.root(), source, 2, 10), shape_error);
    CHECK_THROWS_AS(transformer_decoding<double>(ctx, net.root(), source, 0, 5), shape_error);
    ctx.set_mode(run_mode::training);
    CHECK_THROWS_AS(transformer_decoding<double>(ctx, net.root(), source, 2, 5), state_error);
  }
}

TEST_CASE("transformer: empty sentences, one token, no sentences at all") {
  model<transformer<double>> net = small_model<double>(0.1);
  // A sentence without source: its translation attends to nothing.
  const step_result result = step(net, sentences({{}, {4}}, 2), sentences({{2}, {2}}), sentences({{3}, {3}}));
  CHECK(std::isfinite(result.loss));
  for (double g : result.gradients) REQUIRE(std::isfinite(g));
  CHECK(step(net, sentences({{4}}), sentences({{2}}), sentences({{3}})).tokens == 1);
  const step_result padding = step(net, sentences({{4}}), sentences({{2}}), sentences({{1}}));
  CHECK(padding.tokens == 0);
  CHECK(padding.loss == 0.0);
  for (double g : padding.gradients) REQUIRE(g == 0.0);
  const step_result nothing = step(net, tokens({0, 3}), tokens({0, 2}), tokens({0, 2}));
  CHECK(nothing.tokens == 0);
  for (double g : nothing.gradients) REQUIRE(g == 0.0);
}

TEST_CASE("transformer: errors") {
  model<transformer<double>> net = small_model<double>();
  cpu_context ctx;
  const auto loss = [&](const tokens& source, const tokens& target, const tokens& next) {
    return error_text([&] { net.root().loss(ctx, source, target, next); });
  };
  const tokens good = sentences({{2, 3}});
  CHECK(loss(good, good, good).empty());
  CHECK(contains(loss(sentences({{2, 13}}), good, good), "source: token 13 at position 1"));
  CHECK(contains(loss(good, sentences({{2, -5}}), good), "target: token -5 at position 1"));
  CHECK(contains(loss(good, good, sentences({{2, 14}})), "token 14"));
  CHECK(contains(loss(good, good, sentences({{2, 3, 4}})), "[1 x 3]"));
  CHECK(contains(loss(sentences({{2}, {3}}), good, good), "source tokens [2 x 1]"));
  const tokens longer = sentences({{2, 2, 2, 2, 2, 2, 2, 2, 2, 3}});
  const std::string text = loss(longer, good, good);
  CHECK(contains(text, "9 positions"));
  CHECK(contains(text, "10 tokens"));
  CHECK(loss(sentences({{2, 3}}, 20), good, good).empty());  // padding needs no position
  tensor<double, 2> logits({1, 13});
  CHECK(contains(error_text([&] { net.root().forward(ctx, good, good, logits.view()); }), "[2 x 13]"));
  CHECK_THROWS_AS(net.root().backward(ctx, 1.0), state_error);
  for (int which = 0; which < 7; ++which) {
    transformer_options bad = small_transformer();
    if (which == 0) bad.layers = 0;
    if (which == 1) bad.padding = 13;
    if (which == 2) bad.dropout = 1.0;
    if (which == 3) bad.vocabulary = 0;
    if (which == 4) bad.positions = -1;
    if (which == 5) bad.embedding_deviation = -1.0;
    if (which == 6) bad.embedding_deviation = std::nan("");
    CHECK_THROWS_AS(transformer<double>{bad}, value_error);
  }
}

TEST_CASE("transformer: the table starts by Xavier or with a deviation, everything else alike") {
  transformer_options options = small_transformer();
  options.vocabulary = 500;
  const auto table_and_rest = [&](double deviation) {
    options.embedding_deviation = deviation;
    auto net = make_transformer<double>(options);
    net.initialize(3);
    std::vector<double> words, rest;
    for (const auto& entry : net.store().parameters()) {
      std::vector<double>& to = entry.name == "encoder.src_word_emb.weight" ? words : rest;
      const std::span<const double> values = entry.thing->values();
      to.insert(to.end(), values.begin(), values.end());
    }
    return std::pair(words, rest);
  };
  const auto deviation_of = [](const std::vector<double>& values) {
    double sum = 0.0;
    for (const double v : values) sum += v * v;
    return std::sqrt(sum / static_cast<double>(values.size()));
  };
  const auto [xavier, rest] = table_and_rest(0.0);
  const auto [normal, same] = table_and_rest(0.5);
  CHECK(rest == same);
  CHECK(deviation_of(xavier) == doctest::Approx(std::sqrt(2.0 / 506.0)).epsilon(0.05));
  CHECK(deviation_of(normal) == doctest::Approx(0.5).epsilon(0.05));
}

TEST_CASE("transformer: a low-rank embedding serves both stacks and the output as its dense table does") {
  const tokens source = sentences(german), target = sentences(english), next = sentences(english_next);
  model<transformer<double>> net = small_model<double>(0.2);
  factor_embedding(net, 4);
  CHECK(contains(net.structure(), "encoder.src_word_emb.up.weight [6 x 4]\n"));
  CHECK(contains(net.structure(), "encoder.src_word_emb.down.weight [13 x 4]\n"));
  for (const auto& entry : net.store().parameters()) {
    CHECK(entry.thing->writers() == (contains(entry.name, "src_word_emb") ? 3 : 1));
  }
  model<transformer<double>> dense = with_dense_embedding(net);
  CHECK(largest_error(logits_of(net, source, target), logits_of(dense, source, target)) < 1e-12);
  const step_result low = step(net, source, target, next), high = step(dense, source, target, next);
  CHECK(low.loss == doctest::Approx(high.loss).epsilon(1e-12));
  const model_cost cost = net.root().cost(20, 30), dense_cost = dense.root().cost(20, 30);
  CHECK(cost.total().parameters == net.parameter_count());
  CHECK(cost.layers.front().rank == 4);
  CHECK(cost.layers.front().macs == 50 * 4 * 6);
  CHECK(cost.layers.back().macs == 30 * 4 * 19);
  CHECK(dense_cost.layers.front().macs == 0);
  CHECK(dense_cost.layers.back().macs == 30 * 13 * 6);
  const tokens none({0, 0});
  CHECK(step(net, none, none, none).loss == 0.0);
  for (const double g : net.store().gradients()) CHECK(g == 0.0);
}

TEST_CASE("transformer: a low-rank table starts with the variance of the dense one") {
  transformer_options options = small_transformer();
  options.vocabulary = 3000;
  options.width = 24;
  for (const double deviation : {0.0, 0.5}) {
    options.embedding_deviation = deviation;
    auto net = make_transformer<double>(options);
    factor_embedding(net, 12);
    net.initialize(3);
    net = with_dense_embedding(net);
    double squares = 0.0;
    for (const auto& entry : net.store().parameters()) {
      if (entry.name != "encoder.src_word_emb.weight") continue;
      for (const double v : entry.thing->values()) squares += v * v;
    }
    const double expected = deviation > 0.0 ? deviation : std::sqrt(2.0 / 3024.0);
    CHECK(std::sqrt(squares / (3000.0 * 24.0)) == doctest::Approx(expected).epsilon(0.1));
  }
}

TEST_CASE("transformer: learns to copy; after the switch, too") {
  transformer_options options = small_transformer(0.0);
  options.width = 32;
  options.key = options.value = 16;
  options.hidden = 64;
  options.layers = 1;
  auto net = make_transformer<float>(options);
  net.initialize(1);
  cpu_context ctx({2, 1});
  ctx.set_mode(run_mode::training);
  picker pick(17);
  double loss = 0.0;
  const auto train = [&](int steps) {
    Adam<float> adam(make_optimizer_target(net.store()), {});
    for (int i = 0; i < steps; ++i) {
      tokens source({16, 4}), target({16, 4}), next({16, 4});
      for (index_t s = 0; s < 16; ++s) {
        for (index_t t = 0; t < 4; ++t) {
          next(s, t) = source(s, t) = static_cast<std::int32_t>(pick(4, 12));
          target(s, t) = t == 0 ? 2 : source(s, t - 1);
        }
      }
      ctx.begin_step(static_cast<std::uint64_t>(i));
      const token_loss_result result = net.root().loss(ctx, source, target, next);
      net.root().backward(ctx, static_cast<double>(result.tokens));
      adam.step(ctx, 3e-3);
      loss = result.mean_loss();
    }
  };
  train(150);
  CHECK(loss < 0.5);
  factorize(net, transformer_low_rank_policy());
  train(60);
  CHECK(loss < 0.5);
}

}  // namespace
