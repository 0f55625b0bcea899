// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Bad and degenerate input to layers, models and tasks of sequences, beyond what their own tests have:
// queries that see no key, nothing at all, one of everything, sentences that are too long, tokens that do not
// exist.
#include <pufferfish/distributed/self.hpp>
#include <pufferfish/lowrank/layers/attention.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/nn/token_loss.hpp>
#include <pufferfish/optim/clip.hpp>
#include <pufferfish/train/language_task.hpp>
#include <pufferfish/train/translation_task.hpp>

#include "../support/gradient_check.hpp"
#include "../support/small_transformer.hpp"

namespace {
using namespace test;

using tokens = tensor<std::int32_t, 2>;
using sentence = std::vector<std::int32_t>;
using translator = model<transformer<double>>;

template <class T, std::size_t N>
tensor<T, N> normal(const extents<N>& shape, std::uint64_t stream) {
  tensor<T, N> result(shape);
  fill_normal<T>(result.flat(), 1.0, {1, stream});
  return result;
}

bool all_finite(const auto& values) {
  return std::all_of(values.begin(), values.end(), [](auto v) { return std::isfinite(v); });
}
bool all_zero(const auto& values) {
  return std::all_of(values.begin(), values.end(), [](auto v) { return v == 0; });
}

TEST_CASE("MultiHeadAttention: a query that sees no key passes the residual connection only") {
  MultiHeadAttention<double> layer({{6, 2, 3, 4}, 0.0, 0.0, 1e-6});
  layer.initialize({1, 1});
  const LayerNorm<double> norm(6);
  const tensor<double, 2> x = normal<double, 2>({5, 6}, 1), dy = normal<double, 2>({5, 6}, 2);
  tensor<double, 2> y({5, 6}), dx({5, 6}), alone({5, 6}), dalone({5, 6});
  cpu_context ctx({2, 0});
  ctx.set_mode(run_mode::training);
  const auto as_images = [](const auto& t) {
    return tensor_view<const double, 4>(t.data(), {t.extent(0), 1, 1, t.extent(1)});
  };
  norm.forward(ctx, as_images(x), {alone.data(), {5, 1, 1, 6}});
  norm.backward(ctx, as_images(dy), {dalone.data(), {5, 1, 1, 6}});
  const std::vector<index_t> first{0, 3}, count{3, 2}, none{0, 0}, one{1, 1};
  tensor<unsigned char, 3> allowed({2, 3, 3});
  const token_runs queries{2, first.data(), count.data()};
  const attention_batch no_keys{queries, {2, first.data(), none.data()}, {}},
      nothing_allowed{queries, queries, {false, allowed}},
      // With one key to three queries, only the last query sees it; with one to two, the second.
      too_early{queries, {2, first.data(), one.data()}, {true, {}}};
  for (const attention_batch& batch : {no_keys, nothing_allowed, too_early}) {
    ctx.begin_step(0);
    layer.forward(ctx, x, x, batch, y);
    layer.backward(ctx, dy, dx);
    CHECK(all_finite(y.flat()));
    CHECK(all_finite(dx.flat()));
    const bool causal = batch.mask.causal;
    for (index_t row = 0; row < 5; ++row) {
      if (causal && row != 1) continue;  // the others see a key, or are one
      for (index_t c = 0; c < 6; ++c) {
        CHECK(y(row, c) == doctest::Approx(alone(row, c)).epsilon(1e-12));
        CHECK(dx(row, c) == doctest::Approx(dalone(row, c)).epsilon(1e-12));
      }
    }
    detail::for_each_parameter(layer, [&](const std::string& name, auto& p) {
      CHECK(all_finite(p.gradient()));
      if (!causal && name.compare(0, 2, "w_") == 0) CHECK(all_zero(p.gradient()));
    });
  }
}

TEST_CASE("LowRankAttention: a sequence without keys gives the output's bias and no gradient") {
  LowRankAttention<float> layer({6, 2, 3, 4}, 3, true);
  layer.initialize({1, 1});
  for (index_t c = 0; c < 6; ++c) layer.output().bias()(c) = static_cast<float>(c);
  const tensor<float, 3> x = normal<float, 3>({2, 4, 6}, 1), dy = normal<float, 3>({2, 4, 6}, 2);
  tensor<float, 3> y({2, 4, 6}), dx({2, 4, 6});
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  const std::vector<index_t> lengths{0, 2};
  tensor<unsigned char, 3> allowed({2, 4, 4});
  std::fill(allowed.flat().begin() + 16, allowed.flat().end(), static_cast<unsigned char>(1));
  for (const attention_call& call :
       {attention_call{false, lengths, {}}, attention_call{false, {}, allowed}}) {
    layer.forward(ctx, x, y.view(), call);
    layer.backward(ctx, dy, dx.view());
    CHECK(all_finite(y.flat()));
    CHECK(all_finite(dx.flat()));
    for (index_t t = 0; t < 4; ++t) {
      for (index_t c = 0; c < 6; ++c) CHECK(y(0, t, c) == static_cast<float>(c));
    }
    CHECK(all_zero(dx.flat().first(24)));
    CHECK(!all_zero(dx.flat().last(24)));
  }
}

TEST_CASE("nothing at all: no tokens, no streams, only padding") {
  cpu_context ctx({2, 0});
  ctx.set_mode(run_mode::training);
  Embedding<float> table(5, 3);
  tensor<float, 2> nothing({0, 3});
  std::fill_n(table.weight_gradient().data(), 15, 7.0F);
  table.forward(ctx, {}, nothing.view());
  table.backward(ctx, nothing);
  CHECK(all_zero(table.table().gradient()));

  const TokenLoss<double> loss({{0.1, smoothing_kind::wrong_classes}, 1, loss_reduction::mean});
  tensor<double, 2> dlogits({2, 5}), none({0, 5});
  std::fill_n(dlogits.data(), 10, 7.0);
  const token_loss_result padded =
      loss(ctx, normal<double, 2>({2, 5}, 1), std::vector<std::int32_t>{1, 1}, dlogits);
  CHECK(padded.tokens == 0);
  CHECK(padded.mean_loss() == 0.0);
  CHECK(padded.perplexity() == 1.0);
  CHECK(all_zero(dlogits.flat()));
  CHECK(loss(ctx, none, std::span<const std::int32_t>(), none.view()).loss_sum == 0.0);

  for (const bool low_rank : {false, true}) {
    auto net = make_lstm_lm<double>({7, 8, 2, 0.2});
    net.initialize(1);
    if (low_rank) factorize(net, lstm_lm_policy());
    for (const extents<2>& shape : {extents<2>{3, 0}, extents<2>{0, 0}, extents<2>{0, 2}}) {
      std::fill(net.store().gradients().begin(), net.store().gradients().end(), 7.0);
      auto state = net.root().make_state(shape[1]);
      const tokens ids(shape);
      ctx.begin_step(1);
      const token_loss_result result = net.root().loss(ctx, ids, ids, state);
      net.root().backward(ctx, 1.0);
      CHECK(ctx.tape().empty());
      CHECK(result.tokens == 0);
      CHECK(result.mean_loss() == 0.0);
      CHECK(all_zero(net.store().gradients()));
      CHECK(!clip_gradient_norm<double>(ctx, net.store().gradients(), 0.25).clipped);
    }
  }
}

TEST_CASE("lstm_lm: one stream gives what it gives among others; a vocabulary of one word is no surprise") {
  auto net = make_lstm_lm<double>({11, 6, 2, 0.0});
  net.initialize(2);
  cpu_context ctx;
  tokens ids({4, 3});
  picker pick(1);
  for (auto& id : ids.flat()) id = static_cast<std::int32_t>(pick(0, 10));
  auto three = net.root().make_state(3), one = net.root().make_state(1);
  tensor<double, 2> all({12, 11}), alone({4, 11});
  net.root().forward(ctx, ids, three, all.view());
  const tokens middle(tensor_view<const std::int32_t, 2>(ids).slice(1, 1, 1));
  net.root().forward(ctx, middle, one, alone.view());
  for (index_t t = 0; t < 4; ++t) {
    for (index_t v = 0; v < 11; ++v) {
      CHECK(alone(t, v) == doctest::Approx(all(3 * t + 1, v)).epsilon(1e-12));
    }
  }
  auto sure = make_lstm_lm<float>({1, 1, 1, 0.0});
  sure.initialize(1);
  ctx.set_mode(run_mode::training);
  ctx.begin_step(0);
  auto state = sure.root().make_state(1);
  const tokens word({1, 1});
  CHECK(sure.root().loss(ctx, word, word, state).loss_sum == 0.0);
  sure.root().backward(ctx, 1.0);
  CHECK(all_zero(sure.store().gradients()));
}

TEST_CASE("lstm_lm: after a bad token, the state and the next step are as if it had not been") {
  const auto net = make_lstm_lm<double>({7, 4, 2, 0.3});
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  tokens good({3, 2}), bad = good;
  bad(2, 0) = 7;
  auto state = net.root().make_state(2);
  std::fill(state.values().begin(), state.values().end(), 0.5);
  const auto text = [&](const tokens& input, const tokens& targets) {
    ctx.begin_step(0);
    return error_text([&] { net.root().loss(ctx, input, targets, state); });
  };
  CHECK(contains(text(bad, good), "token 7 at position 4 is not in 0 .. 6"));
  CHECK(contains(text(good, bad), "width 4, targets: token 7 at position 4"));
  CHECK(std::all_of(state.values().begin(), state.values().end(), [](double v) { return v == 0.5; }));
  CHECK(text(good, good).empty());
  net.root().backward(ctx, 6.0);
  CHECK(ctx.tape().empty());
}

translator make_translator() {
  translator net(transformer<double>{small_transformer()});
  net.initialize(3);
  return net;
}
tokens one_sentence(const sentence& ids) {
  tokens result({1, static_cast<index_t>(ids.size())});
  std::copy(ids.begin(), ids.end(), result.data());
  return result;
}

TEST_CASE("transformer: the table's last position can be used, the next cannot; then goes on as before") {
  const translator net = make_translator();
  const tokens nine = one_sentence(sentence(9, 5)), ten = one_sentence(sentence(10, 5));
  tokens wrong = nine;
  wrong(0, 8) = 13;
  cpu_context ctx({2, 0});
  ctx.set_mode(run_mode::training);
  const auto step = [&] {
    ctx.begin_step(0);
    const double loss = net.root().loss(ctx, nine, nine, nine).loss_sum;
    net.root().backward(ctx, 1.0);
    CHECK(ctx.tape().empty());
    return loss;
  };
  const double before = step();
  CHECK(std::isfinite(before));
  const auto text = [&](const tokens& source, const tokens& target, const tokens& next) {
    ctx.begin_step(1);
    return error_text([&] { net.root().loss(ctx, source, target, next); });
  };
  CHECK(contains(text(ten, nine, nine), "a sequence of 10 tokens is longer than the table"));
  CHECK(contains(text(nine, ten, ten), "a sequence of 10 tokens is longer than the table"));
  CHECK(contains(text(wrong, nine, nine), "source: token 13 at position 8"));
  CHECK(contains(text(nine, wrong, nine), "target: token 13 at position 8"));
  CHECK(contains(text(nine, nine, wrong), "next: token 13 at position 8"));
  CHECK(step() == before);
}

TEST_CASE("transformer: sentences of padding only, sources and targets") {
  const translator net = make_translator();
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  tokens source({2, 3}), target({2, 3});
  std::fill(source.flat().begin(), source.flat().end(), 1);
  std::fill(target.flat().begin(), target.flat().end(), 1);
  ctx.begin_step(0);
  CHECK(net.root().output_rows(target) == 0);
  CHECK(net.root().loss(ctx, source, target, target).tokens == 0);
  net.root().backward(ctx, 1.0);
  // One target has words, and no source to look at.
  target(1, 0) = 2;
  target(1, 1) = 5;
  ctx.begin_step(1);
  const token_loss_result result = net.root().loss(ctx, source, target, target);
  net.root().backward(ctx, 1.0);
  CHECK(result.tokens == 2);
  CHECK(std::isfinite(result.loss_sum));
  CHECK(ctx.tape().empty());
}

sentence_pairs pairs_of(const std::vector<std::pair<sentence, sentence>>& all) {
  sentence_pairs result;
  for (const auto& [source, target] : all) {
    result.source.push_back(source);
    result.target.push_back(target);
  }
  return result;
}

TEST_CASE("translation_task: what does not fit the model, batches of one") {
  using task = translation_task<double>;
  translator net = make_translator();
  const translation_task_options by_two{2, 0, {0.1, smoothing_kind::wrong_classes}, false};
  const auto good = pairs_of({{{4, 5}, {6}}, {{7}, {8, 9}}, {{4}, {4}}});
  const auto making = [&](const sentence_pairs& train, const translator& of) {
    return error_text([&] { task(of, train, good, by_two, 0, 0, 1); });
  };
  CHECK(making(good, net).empty());
  CHECK(making(pairs_of({{sentence(7, 5), {4}}}), net).empty());  // <s> and </s> are two more
  CHECK(contains(making(pairs_of({{sentence(8, 5), {4}}}), net), "up to 10 tokens for a table of 9"));
  CHECK(contains(making(pairs_of({{{4}, sentence(9, 5)}}), net), "up to 10 tokens for a table of 9"));
  CHECK(contains(making(pairs_of({}), net), "a set without pairs"));
  transformer_options other = small_transformer();
  other.padding = 0;
  CHECK(contains(making(good, translator(transformer<double>{other})), "pads with token 0"));
  translation_task_options beyond = by_two;
  beyond.special.end = 13;
  CHECK(contains(error_text([&] { task(net, good, good, beyond, 0, 0, 1); }),
                 "padding, begin and end: token 13 at position 2 is not in 0 .. 12"));

  self comm;
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  // Three pairs in batches of two: the last has one.
  task work(net, good, good, by_two, 0, 0, 1);
  const auto described = [&](const label_smoothing& smoothing) {
    return task(net, good, good, {2, 0, smoothing, false}, 0, 0, 1).describe();
  };
  CHECK(contains(described({0.125}), "label smoothing 0.125\n"));
  CHECK(
      contains(described({0.125, smoothing_kind::wrong_classes}), "label smoothing 0.125, wrong classes\n"));
  CHECK(contains(described({0.0, smoothing_kind::wrong_classes}), "label smoothing 0\n"));
  CHECK(work.steps_per_epoch() == 2);
  index_t counted = 0;
  for (index_t step = 0; step < 2; ++step) {
    const evaluation part = work.step(ctx, net, {0, step, static_cast<std::uint64_t>(step)});
    CHECK(std::isfinite(part.loss_sum));
    counted += part.count;
  }
  CHECK(counted == 2 + 3 + 2);
  const double whole = work.test(ctx, net, comm).loss();
  CHECK(evaluate_translation(ctx, net, comm, good, 1).loss() == doctest::Approx(whole).epsilon(1e-12));
  // Empty sentences are tests as others.
  CHECK(std::isfinite(evaluate_translation(ctx, net, comm, pairs_of({{{}, {4}}, {{4}, {}}}), 2).loss()));
  const auto unknown = pairs_of({{{4}, {6}}, {{4, 13}, {6}}});
  CHECK(contains(making(unknown, net), "source, sentence 1: token 13 at position 1"));
  CHECK(contains(making(pairs_of({{{4}, {-1}}}), net), "target, sentence 0: token -1 at position 0"));
  CHECK(contains(error_text([&] { task(net, good, unknown, by_two, 0, 0, 1); }), "test, source, sentence 1"));
  CHECK(contains(error_text([&] { evaluate_translation(ctx, net, comm, unknown, 2); }), "token 13"));
}

TEST_CASE("translate: no sentences, an empty one, one too long, one of unknown tokens") {
  const translator net = make_translator();
  cpu_context ctx;
  beam_options options;
  options.beam = 2;
  options.max_length = 9;
  const auto run = [&](const std::vector<sentence>& all) {
    std::vector<std::span<const std::int32_t>> views(all.begin(), all.end());
    return translate<double>(ctx, net, views, options);
  };
  CHECK(run({}).empty());
  const auto together = run({{}, {4, 5, 6}, {7}});
  REQUIRE(together.size() == 3);
  CHECK(run({{}})[0] == together[0]);
  CHECK(run({{4, 5, 6}})[0] == together[1]);
  CHECK(run({{7}})[0] == together[2]);
  CHECK(run({sentence(7, 5)}).size() == 1);
  CHECK(contains(error_text([&] { run({sentence(8, 5)}); }), "10 tokens is longer than the table"));
  CHECK(contains(error_text([&] { run({{4}, {-1}}); }), "token -1 at position 4"));
  options.max_length = 10;
  CHECK(contains(error_text([&] { run({{4}}); }), "10 tokens is longer than the table"));
}

TEST_CASE("language_task: texts that are too short, streams without a token") {
  using task = language_task<lstm_lm<float>>;
  auto net = make_lstm_lm<float>({7, 4, 1, 0.0});
  net.initialize(1);
  const std::vector<std::int32_t> text{0, 1, 2, 3, 4, 5, 6, 0, 1}, one{3}, bad{0, 1, -2, 3};
  CHECK_THROWS_AS(task(net, one, text, {1, 5, 1}, 0, 1), value_error);
  CHECK_THROWS_AS(task(net, text, text, {5, 5, 1}, 0, 1), value_error);
  CHECK(contains(error_text([&] { task(net, bad, text, {1, 5, 1}, 0, 1); }), "token -2 at position 2"));
  CHECK(contains(error_text([&] { task(net, text, one, {1, 5, 1}, 0, 1); }), "a test text of 1 tokens"));
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  task work(net, text, text, {1, 5, 9}, 0, 1);
  index_t counted = 0;
  for (index_t step = 0; step < work.steps_per_epoch(); ++step) {
    counted += work.step(ctx, net, {0, step, static_cast<std::uint64_t>(step)}).count;
  }
  CHECK(counted == 8);
  self comm;
  CHECK(work.test(ctx, net, comm).count > 0);
  CHECK(ctx.training());
  CHECK_THROWS_AS(evaluate_language(ctx, net, comm, bad, 1, 5), value_error);
  CHECK(ctx.training());  // an error puts the mode back too
}

}  // namespace
