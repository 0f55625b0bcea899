// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/sampling.hpp>
#include <pufferfish/nn/model.hpp>
#include <pufferfish/nn/token_loss.hpp>
#include <pufferfish/optim/clip.hpp>
#include <pufferfish/optim/sgd.hpp>

#include "../support/embedding_slots.hpp"
#include "../support/gradient_check.hpp"

namespace {
using namespace test;

template <class T>
using language_model = model<lstm_lm<T>>;

template <class T>
language_model<T> small_model(double dropout = 0.0, index_t layers = 2, index_t vocabulary = 13,
                              index_t width = 8) {
  auto net = make_lstm_lm<T>({vocabulary, width, layers, dropout});
  net.initialize(1);
  // Larger than they start, so that the state matters.
  for (T& value : net.store().values()) value *= T{2};
  return net;
}

tensor<std::int32_t, 2> random_tokens(const extents<2>& shape, index_t vocabulary, std::uint64_t stream) {
  tensor<std::int32_t, 2> tokens(shape);
  picker pick(stream);
  for (auto& token : tokens.flat()) token = static_cast<std::int32_t>(pick(0, vocabulary - 1));
  return tokens;
}

TEST_CASE("lstm_lm: the parameters and multiply-adds of the paper, dense and factorized") {
  auto net = make_lstm_lm<float>({});
  CHECK(net.parameter_count() == 85962278);
  CHECK(net.root().cost().total().parameters == 85962278);
  CHECK(net.root().cost().total().macs == 36000000 + 49917000);
  CHECK(net.root().cost(10).total().macs == 10 * (36000000 + 49917000));
  const auto ranks = planned_ranks(net, lstm_lm_policy());
  REQUIRE(ranks.size() == 2);
  CHECK(ranks[0].name == "rnn.0");
  CHECK(ranks[1].ranks == rank_list{375, 375});
  apply_ranks(net, ranks);
  CHECK(net.parameter_count() == 67962278);
  CHECK(net.root().cost().total().macs == 18000000 + 49917000);
  CHECK(net.root().cost().layers[1].parameters == 9006000);
  CHECK(net.root().cost().layers[1].rank == 375);
}

TEST_CASE("lstm_lm: names and shapes of the parameters") {
  const language_model<float> net = small_model<float>();
  CHECK(net.structure() ==
        "decoder.bias [13]\n"
        "rnn.1.weight_hh [32 x 8]\nrnn.1.bias [32]\nrnn.1.weight_ih [32 x 8]\n"
        "rnn.0.weight_hh [32 x 8]\nrnn.0.bias [32]\nrnn.0.weight_ih [32 x 8]\n"
        "encoder.weight [13 x 8]\n");
  CHECK(net.root().describe() == "lstm_lm of 2 layers, 13 tokens, width 8");
}

TEST_CASE_TEMPLATE("lstm_lm: loss and gradients, fused against logits, loss and backward one by one", T,
                   float, double) {
  const double tolerance = sizeof(T) == 4 ? 2e-5 : 1e-12;
  for (double dropout : {0.0, 0.4}) {
    const language_model<T> net = small_model<T>(dropout);
    const auto tokens = random_tokens({5, 3}, 13, 1), targets = random_tokens({5, 3}, 13, 2);
    const auto run = [&](bool fused) {
      language_model<T> own(net);
      cpu_context ctx({2, 3});
      ctx.set_mode(run_mode::training);
      ctx.begin_step(4);
      auto state = own.root().make_state(3);
      std::vector<T> all;
      if (fused) {
        all.push_back(static_cast<T>(own.root().loss(ctx, tokens, targets, state).loss_sum));
        own.root().backward(ctx, 15.0);
      } else {
        tensor<T, 2> logits({15, 13}), dlogits(logits.shape());
        own.root().forward(ctx, tokens, state, logits);
        all.push_back(static_cast<T>(TokenLoss<T>()(ctx, logits, targets.flat(), dlogits).loss_sum));
        own.root().backward(ctx, dlogits);
      }
      CHECK(ctx.tape().empty());
      all.insert(all.end(), own.store().gradients().begin(), own.store().gradients().end());
      all.insert(all.end(), state.layer(1).c.flat().begin(), state.layer(1).c.flat().end());
      return all;
    };
    const auto a = run(true), b = run(false);
    REQUIRE(a.size() == b.size());
    double worst = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      worst = std::max(
          worst, std::abs(static_cast<double>(a[i] - b[i])) / (1.0 + std::abs(static_cast<double>(b[i]))));
    }
    CHECK(worst < tolerance);
  }
}

/// Largest error of the gradient of the mean loss against differences, over all parameters, carried state and
/// dropout included.
double model_gradient_error(language_model<double>& net) {
  cpu_context ctx({2, 3});
  ctx.set_mode(run_mode::training);
  const auto tokens = random_tokens({4, 3}, 13, 1), targets = random_tokens({4, 3}, 13, 2);
  auto start = net.root().make_state(3);
  {
    cpu_context before;
    net.root().loss(before, targets, tokens, start);
  }
  const auto loss = [&] {
    ctx.begin_step(4);
    auto state = start;
    return net.root().loss(ctx, tokens, targets, state).loss_sum / 12.0;
  };
  loss();
  net.root().backward(ctx, 12.0);
  const std::vector<double> gradient(net.store().gradients().begin(), net.store().gradients().end());
  double worst = 0.0;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    double& value = net.store().values()[i];
    const double kept = value;
    value = kept + 1e-5;
    const double above = loss();
    value = kept - 1e-5;
    const double below = loss();
    value = kept;
    const double difference = (above - below) / 2e-5;
    worst = std::max(worst, std::abs(difference - gradient[i]) / (1.0 + std::abs(difference)));
  }
  return worst;
}

TEST_CASE("lstm_lm: gradients against differences, dense and factorized, with and without dropout") {
  for (double dropout : {0.0, 0.4}) {
    language_model<double> net = small_model<double>(dropout);
    CHECK(model_gradient_error(net) < gradient_tolerance);
    const factorization done = factorize(net, lstm_lm_policy());
    CHECK(done.low_rank.size() == 2);
    CHECK(done.layers.size() == 16);
    CHECK(model_gradient_error(net) < gradient_tolerance);
    factor_embedding(net, 3);
    CHECK(model_gradient_error(net) < gradient_tolerance);
  }
}

TEST_CASE("lstm_lm: a low-rank embedding serves lookup and output as the dense table of its factors does") {
  const auto tokens = random_tokens({5, 3}, 13, 1), targets = random_tokens({5, 3}, 13, 2);
  for (const double dropout : {0.0, 0.4}) {
    language_model<double> net = small_model<double>(dropout);
    factor_embedding(net, 3);
    CHECK(contains(net.structure(), "\nencoder.up.weight [8 x 3]\nencoder.down.weight [13 x 3]\n"));
    for (const auto& entry : net.store().parameters()) {
      CHECK(entry.thing->writers() == (contains(entry.name, "encoder") ? 2 : 1));
    }
    language_model<double> dense = with_dense_embedding(net);
    CHECK(contains(dense.structure(), "\nencoder.weight [13 x 8]\n"));
    const auto loss = [&](language_model<double>& of, bool fused) {
      cpu_context ctx({2, 3});
      ctx.set_mode(run_mode::training);
      ctx.begin_step(4);
      auto state = of.root().make_state(3);
      double sum = 0.0;
      if (fused) {
        sum = of.root().loss(ctx, tokens, targets, state).loss_sum;
        of.root().backward(ctx, 15.0);
      } else {
        tensor<double, 2> logits({15, 13}), dlogits(logits.shape());
        of.root().forward(ctx, tokens, state, logits);
        sum = TokenLoss<double>()(ctx, logits, targets.flat(), dlogits).loss_sum;
        of.root().backward(ctx, dlogits);
      }
      CHECK(ctx.tape().empty());
      return sum;
    };
    const double expected = loss(dense, true);
    CHECK(loss(net, true) == doctest::Approx(expected).epsilon(1e-12));
    const std::vector<double> fused(net.store().gradients().begin(), net.store().gradients().end());
    CHECK(loss(net, false) == doctest::Approx(expected).epsilon(1e-12));
    for (std::size_t i = 0; i < fused.size(); ++i) {
      CHECK(net.store().gradients()[i] == doctest::Approx(fused[i]).epsilon(1e-10).scale(1e-3));
    }
    // Below the embedding's own parameters, all gradients are the same.
    for (const auto& entry : dense.store().parameters()) {
      for (const auto& own : net.store().parameters()) {
        if (own.name != entry.name) continue;
        for (std::size_t i = 0; i < own.thing->gradient().size(); ++i) {
          CHECK(own.thing->gradient()[i] ==
                doctest::Approx(entry.thing->gradient()[i]).epsilon(1e-10).scale(1e-3));
        }
      }
    }
    cpu_context ctx;
    auto state = net.root().make_state(2), same = state;
    tensor<double, 2> logits({2, 13}), dense_logits(logits.shape());
    const std::vector<std::int32_t> words{4, 12};
    net.root().next(ctx, words, state, logits);
    dense.root().next(ctx, words, same, dense_logits);
    CHECK(largest_error(logits, dense_logits) < 1e-12);
    const language_model<double> copied(net);
    CHECK(copied.structure() == net.structure());
    copied.root().next(ctx, words, same, dense_logits);
  }
}

TEST_CASE("lstm_lm: factorize takes the embedding if the policy says so, with a rank of its own") {
  const auto tokens = random_tokens({5, 3}, 13, 1), targets = random_tokens({5, 3}, 13, 2);
  const auto loss = [&](const language_model<double>& of) {
    cpu_context ctx;
    auto state = of.root().make_state(3);
    return of.root().loss(ctx, tokens, targets, state).loss_sum;
  };
  language_model<double> net = small_model<double>();
  factorize_policy policy = lstm_lm_policy();
  CHECK(planned_ranks(net, policy).size() == 2);
  policy.embeddings_dense = false;
  CHECK(planned_ranks(net, policy).front() == layer_rank{"encoder", 2});
  policy.embedding_rank = fixed_rank{4};
  const auto planned = planned_ranks(net, policy);
  REQUIRE(planned.size() == 3);
  CHECK(planned[0] == layer_rank{"encoder", 4});
  const index_t rest = net.parameter_count() - 13 * 8 - 2 * 8 * 64;
  const factorization done = factorize(net, policy);
  CHECK(done.ranks() == planned);
  CHECK(net.parameter_count() == rest + 4 * 21 + 2 * 8 * 2 * 16);
  for (const auto& entry : net.store().parameters()) {
    CHECK(entry.thing->writers() == (contains(entry.name, "encoder") ? 2 : 1));
  }
  CHECK(model_gradient_error(net) < gradient_tolerance);
  language_model<double> twin = small_model<double>();
  apply_ranks(twin, planned);
  copy_state(net, twin);
  CHECK(loss(twin) == loss(net));
  const double low_rank = loss(net);
  merge(net);
  CHECK(contains(net.structure(), "\nencoder.weight [13 x 8]\n"));
  CHECK(loss(net) == doctest::Approx(low_rank).epsilon(1e-12));
  CHECK(model_gradient_error(net) < gradient_tolerance);
}

TEST_CASE("lstm_lm: cost and initial values of a low-rank embedding; a slot of no embedding") {
  auto net = make_lstm_lm<float>({8000, 40, 2, 0.0});
  net.initialize(1);
  const auto table_deviation = [&] {
    tensor<float, 2> table({8000, 40});
    change_embedding(net, [&](any_layer<float>& slot) {
      if (const auto* factors = slot.target<LowRankEmbedding<float>>()) {
        table = factors->to_dense();
      } else {
        copy(std::as_const(*slot.target<Embedding<float>>()).weight(), table.view());
      }
    });
    double squares = 0.0;
    for (const float v : table.flat()) squares += static_cast<double>(v) * static_cast<double>(v);
    return std::sqrt(squares / static_cast<double>(table.size()));
  };
  CHECK(table_deviation() == doctest::Approx(0.1 / std::sqrt(3.0)).epsilon(0.01));
  const index_t rest = net.parameter_count() - 8000 * 40;
  for (const index_t rank : {1, 10, 40}) {
    language_model<float> low(net);
    factor_embedding(low, rank);
    low.initialize(1);
    std::swap(low, net);
    CHECK(table_deviation() == doctest::Approx(0.1 / std::sqrt(3.0)).epsilon(0.15));
    std::swap(low, net);
    CHECK(low.parameter_count() == rest + rank * 8040);
    const model_cost cost = low.root().cost(7);
    CHECK(cost.total().parameters == low.parameter_count());
    CHECK(cost.layers.front().name == "encoder");
    CHECK(cost.layers.front().rank == rank);
    CHECK(cost.layers.front().macs == 7 * rank * 40);
    CHECK(cost.layers.back().macs == 7 * rank * 8040);
  }
  change_embedding(net, [](any_layer<float>& slot) { slot = Linear<float>(40, 40); });
  cpu_context ctx;
  auto state = net.root().make_state(1);
  const auto tokens = random_tokens({3, 1}, 13, 1);
  CHECK(contains(error_text([&] { net.root().loss(ctx, tokens, tokens, state); }),
                 "its embedding takes no tokens but is Linear 40 -> 40"));
}

TEST_CASE("lstm_lm: every layer carries its state: cut or whole, a text gives the same") {
  language_model<double> net = small_model<double>(0.65, 3);
  for (bool low_rank : {false, true}) {
    if (low_rank) {
      factorize(net, lstm_lm_policy());
      factor_embedding(net, 2);
    }
    cpu_context ctx({2, 0});
    const auto tokens = random_tokens({7, 2}, 13, 1);
    const tensor_view<const std::int32_t, 2> all = tokens;
    auto whole = net.root().make_state(2), cut = whole;
    tensor<double, 2> logits({14, 13}), parts(logits.shape());
    net.root().forward(ctx, all, whole, logits);
    index_t first = 0;
    for (index_t length : {2, 0, 4, 1}) {
      net.root().forward(ctx, all.slice(0, first, length), cut, parts.view().slice(0, 2 * first, 2 * length));
      first += length;
    }
    CHECK(largest_error(parts, logits) < 1e-13);
    for (index_t layer = 0; layer < 3; ++layer) {
      CHECK(largest_error(tensor<double, 2>(cut.layer(layer).c), tensor<double, 2>(whole.layer(layer).c)) <
            1e-13);
    }
    // Token by token, as texts are generated.
    auto state = net.root().make_state(2);
    for (index_t t = 0; t < 7; ++t) {
      tensor<double, 2> next({2, 13});
      net.root().next(ctx, all.slice(0, t, 1).flat(), state, next);
      CHECK(largest_error(next, tensor<double, 2>(logits.view().slice(0, 2 * t, 2))) < 1e-13);
    }
  }
}

TEST_CASE("lstm_lm: the same bits for any number of threads") {
  const language_model<float> given = small_model<float>(0.3, 2, 1000, 70);
  for (bool low_rank : {false, true}) {
    const auto run = [&](int threads) {
      language_model<float> net(given);
      if (low_rank) {
        factorize(net, lstm_lm_policy());
        factor_embedding(net, 30);
      }
      cpu_context ctx({threads, 3});
      ctx.set_mode(run_mode::training);
      const auto tokens = random_tokens({6, 5}, 1000, 1), targets = random_tokens({6, 5}, 1000, 2);
      auto state = net.root().make_state(5);
      ctx.begin_step(0);
      const auto loss = static_cast<float>(net.root().loss(ctx, tokens, targets, state).loss_sum);
      net.root().backward(ctx, 30.0);
      std::vector<float> all(net.store().gradients().begin(), net.store().gradients().end());
      all.push_back(loss);
      return all;
    };
    const auto one = run(1);
    CHECK(same_bits(one, run(2)));
    CHECK(same_bits(one, run(3)));
  }
}

TEST_CASE("lstm_lm: dropout does not depend on how sequences are split over ranks") {
  const language_model<double> net = small_model<double>(0.5);
  const auto tokens = random_tokens({5, 4}, 13, 1), targets = random_tokens({5, 4}, 13, 2);
  const auto loss = [&](index_t first, index_t count) {
    cpu_context ctx({1, 3});
    ctx.set_mode(run_mode::training);
    ctx.begin_step(2, first);
    auto state = net.root().make_state(count);
    const tensor<std::int32_t, 2> own(tensor_view<const std::int32_t, 2>(tokens).slice(1, first, count)),
        own_targets(tensor_view<const std::int32_t, 2>(targets).slice(1, first, count));
    return net.root().loss(ctx, own, own_targets, state).loss_sum;
  };
  CHECK(loss(0, 1) + loss(1, 3) == doctest::Approx(loss(0, 4)).epsilon(1e-12));
}

TEST_CASE("lstm_lm: factorized at full rank the same model; merged back; saved state untouched") {
  language_model<double> net = small_model<double>();
  const auto tokens = random_tokens({4, 2}, 13, 1), targets = random_tokens({4, 2}, 13, 2);
  const auto loss = [&] {
    cpu_context ctx;
    auto state = net.root().make_state(2);
    return net.root().loss(ctx, tokens, targets, state).loss_sum;
  };
  const double dense = loss();
  factorize_policy policy = lstm_lm_policy();
  policy.rank = rank_ratio{1.0};
  policy.keep_dense_if_larger = false;
  CHECK_THROWS_AS(factorize(net, policy), rank_error);
  CHECK(loss() == dense);
  policy.rank = fixed_rank{3};
  const std::uint64_t generation = net.generation();
  factorize(net, policy);
  CHECK(net.generation() > generation);
  const double low_rank = loss();
  CHECK(low_rank != dense);
  merge(net);
  CHECK(loss() == doctest::Approx(low_rank).epsilon(1e-12));
  const language_model<double> copy(net);
  CHECK(copy.structure() == net.structure());
}

TEST_CASE("lstm_lm: learns a text by heart, then says it") {
  auto net = make_lstm_lm<float>({10, 24, 2, 0.0});
  net.initialize(3);
  const std::vector<std::int32_t> text{0, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5};
  cpu_context ctx({2, 0});
  SGD<float> optimizer(make_optimizer_target(net.store()), sgd_options{});
  ctx.set_mode(run_mode::training);
  const auto length = static_cast<index_t>(text.size()) - 1;
  token_loss_result loss;
  std::size_t asked = 0;
  for (std::uint64_t step = 0; step < 250; ++step) {
    ctx.begin_step(step);
    auto state = net.root().make_state(1);
    loss = net.root().loss(ctx, {text.data(), {length, 1}}, {text.data() + 1, {length, 1}}, state);
    net.root().backward(ctx, static_cast<double>(loss.tokens));
    clip_gradient_norm<float>(ctx, net.store().gradients(), 0.25);
    optimizer.step(ctx, 4.0);
    if (step == 2) asked = ctx.system_allocations();
  }
  CHECK(ctx.system_allocations() == asked);
  CHECK(loss.perplexity() < 1.2);
  ctx.set_mode(run_mode::inference);
  auto state = net.root().make_state(1);
  sampling_options best;
  best.temperature = 0.0;
  const auto said = sample_tokens<float>(
      std::span(text).first(1), length, 10, best, {1, 1}, [&](std::int32_t token, std::span<float> logits) {
        net.root().next(ctx, std::span(&token, 1), state, {logits.data(), {1, 10}});
      });
  CHECK(said == std::vector<std::int32_t>(text.begin() + 1, text.end()));
}

TEST_CASE("lstm_lm: batches of one, empty sequences, errors") {
  language_model<float> net = small_model<float>(0.2);
  SUBCASE("dense") {}
  SUBCASE("low-rank embedding") { factor_embedding(net, 4); }
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  auto one = net.root().make_state(1), two = net.root().make_state(2);
  const auto tokens = random_tokens({3, 1}, 13, 1), nothing = random_tokens({0, 1}, 13, 1);
  ctx.begin_step(0);
  CHECK(net.root().loss(ctx, tokens, tokens, one).tokens == 3);
  net.root().backward(ctx, 3.0);
  ctx.begin_step(1);
  CHECK(net.root().loss(ctx, nothing, nothing, one).tokens == 0);
  net.root().backward(ctx, 1.0);
  for (float value : net.store().gradients()) CHECK(value == 0.0F);
  std::string text = error_text([&] { net.root().loss(ctx, tokens, tokens, two); });
  CHECK(contains(text, "2 sequences for tokens [3 x 1]"));
  CHECK_THROWS_AS(net.root().loss(ctx, tokens, nothing, one), shape_error);
  tensor<std::int32_t, 2> wrong = tokens;
  wrong.flat()[1] = 13;
  text = error_text([&] { net.root().loss(ctx, wrong, tokens, one); });
  CHECK(contains(text, "token 13 at position 1 is not in 0 .. 12"));
  text = error_text([&] { net.root().loss(ctx, tokens, wrong, one); });
  CHECK(contains(text, "token 13 at position 1"));
  ctx.begin_step(2);
  CHECK_THROWS_AS(net.root().backward(ctx, 1.0), state_error);
  CHECK_THROWS_AS(lstm_lm<float>({0, 8, 2, 0.0}), value_error);
  CHECK_THROWS_AS(lstm_lm<float>({13, 8, 2, 1.0}), value_error);
  net.modify([](lstm_lm<float>& root) {
    struct spoiler final : layer_visitor<float, device::cpu> {
      void on_layer(const std::string&, any_layer<float>& slot) override {
        slot = any_layer<float>(Linear<float>(8, 8));
      }
    } visitor;
    root.visit_layers(visitor);
  });
  CHECK(contains(error_text([&] { net.root().loss(ctx, tokens, tokens, one); }),
                 "rnn.0 is no recurrent layer"));
}

}  // namespace
