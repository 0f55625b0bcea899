// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Networks that compute in bfloat16 on the CPU: training follows float's, bits do not depend on threads, and
// checkpoints hold the float parameters.
#include "../support/scratch_folder.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/sampling.hpp>
#include <pufferfish/models/small_resnet.hpp>
#include <pufferfish/nn.hpp>
#include <pufferfish/optim/adam.hpp>
#include <pufferfish/train/checkpoint.hpp>
#include <pufferfish/train/translation_task.hpp>

namespace {
using namespace pufferfish;

constexpr index_t batch = 12, classes = 5;
const extents<4> images{batch, 8, 8, 3}, outputs{batch, 1, 1, classes};

template <class T>
network<T> made() {
  network<T> net =
      small_resnet<T>({.channels_in = 3, .classes = classes, .width = 8, .blocks = 1, .stages = 2});
  net.initialize(3);
  return net;
}

/// A network with its optimizer and one batch.
template <class T>
struct training {
  explicit training(int threads, bool hybrid = false)
      : ctx({threads}), net(made<T>()), y(outputs), dy(outputs) {
    if (hybrid) factorize(net, {.first_layer = 2});
    optimizer.emplace(make_optimizer_target(net.store()), sgd_options{.momentum = 0.9});
    std::vector<float> pixels(static_cast<std::size_t>(volume<4>(images)));
    fill_normal(std::span<float>(pixels), 1.0, random_stream(5, 1));
    for (const float value : pixels) x.push_back(static_cast<T>(value));
    for (std::int32_t i = 0; i < batch; ++i) labels.push_back(i % classes);
  }

  tensor_view<const T, 4> input() const { return {x.data(), images}; }

  double step() {
    ctx.set_mode(run_mode::training);
    ctx.begin_step(steps++);
    net.forward(ctx, input(), y.view());
    const loss_result loss = SoftmaxCrossEntropy<T>()(ctx, y.view(), labels, batch, dy.view());
    net.backward(ctx, dy.view());
    optimizer->step(ctx, 0.02);
    return loss.mean_loss();
  }

  cpu_context ctx;
  network<T> net;
  std::optional<SGD<float>> optimizer;
  std::vector<T> x;
  tensor<T, 4> y, dy;
  std::vector<std::int32_t> labels;
  std::uint64_t steps = 0;
};

/// Whether the network's 16-bit copies are its parameters, rounded.
template <class Net>
bool copies_are_current(const Net& net) {
  for (const auto& entry : net.store().parameters()) {
    const bfloat16* copies = entry.thing->template as<bfloat16>();
    for (const float value : std::as_const(*entry.thing).values()) {
      if ((copies++)->bits() != bfloat16(value).bits()) return false;
    }
  }
  return true;
}

TEST_CASE("bf16 on the CPU: training follows float's, dense and factorized") {
  for (const bool hybrid : {false, true}) {
    CAPTURE(hybrid);
    training<float> wide(1, hybrid);
    training<bfloat16> narrow(1, hybrid), threads(3, hybrid);
    CHECK(copies_are_current(narrow.net));
    double first = 0.0, last = 0.0;
    for (int i = 0; i < 12; ++i) {
      const double want = wide.step(), got = narrow.step();
      CHECK(threads.step() == got);
      CHECK(std::abs(got - want) < 0.05 * want + 0.01);
      (i == 0 ? first : last) = got;
    }
    CHECK(last < 0.8 * first);
    CHECK(copies_are_current(narrow.net));
    const std::span<const float> one = std::as_const(narrow.net.store()).values(),
                                 three = std::as_const(threads.net.store()).values();
    CHECK(std::equal(one.begin(), one.end(), three.begin()));
  }
}

TEST_CASE("bf16 on the CPU: a checkpoint, a copy and a change of parameters") {
  training<bfloat16> trained(1, true);
  for (int i = 0; i < 3; ++i) trained.step();
  const scratch_folder folder;
  const std::string path = folder / "net.safetensors";
  save_checkpoint(path, trained.net);
  training<bfloat16> again(1);
  open_checkpoint(path).restore(again.net);
  CHECK(copies_are_current(again.net));
  network<float> wide = made<float>();
  apply_ranks(wide, low_rank_layers(trained.net));
  copy_state(trained.net, wide);
  network<bfloat16> copied = made<bfloat16>();
  apply_ranks(copied, low_rank_layers(wide));
  copy_state(wide, copied);
  CHECK(copies_are_current(copied));
  const network<bfloat16> copy = copied;
  CHECK(copies_are_current(copy));
  for (training<bfloat16>* one : {&trained, &again}) one->ctx.set_mode(run_mode::inference);
  const tensor<bfloat16, 4> want = trained.net.forward(trained.ctx, trained.input());
  for (const network<bfloat16>* net : {&std::as_const(again.net), &std::as_const(copied), &copy}) {
    const tensor<bfloat16, 4> got = net->forward(again.ctx, trained.input());
    for (index_t i = 0; i < want.size(); ++i) CHECK(got.data()[i].bits() == want.data()[i].bits());
  }
  merge(copied);
  CHECK(copies_are_current(copied));
  copied.on_host([](auto& root) { root.initialize({9, 9}); });
  CHECK(copies_are_current(copied));
}

constexpr index_t sequences = 6, length = 7, words = 31;

/// Tokens 2 .. words - 1, each of which follows from the one before.
std::vector<std::int32_t> sentence_tokens(index_t shift) {
  std::vector<std::int32_t> tokens;
  for (index_t i = 0; i < sequences * length; ++i) {
    tokens.push_back(static_cast<std::int32_t>(2 + (5 * i + shift) % (words - 2)));
  }
  return tokens;
}

/// The language model with its optimizer, its state and one segment. The width is odd, so that its products
/// are not computed in pairs, or even.
template <class T>
struct language {
  static constexpr double rate = 4.0;

  explicit language(index_t width, int threads = 1)
      : ctx({threads}),
        net(make_lstm_lm<T>({.vocabulary = words, .width = width, .layers = 2, .dropout = 0.1})),
        state(net.root().make_state(sequences)) {
    net.initialize(3);
  }
  static factorize_policy policy() { return lstm_lm_policy(); }

  token_loss_result loss() {
    return net.root().loss(ctx, {tokens.data(), {length, sequences}}, {next.data(), {length, sequences}},
                           state);
  }
  tensor<T, 2> logits() {
    tensor<T, 2> result({length * sequences, words});
    state.reset();
    net.root().forward(ctx, {tokens.data(), {length, sequences}}, state, result.view());
    return result;
  }

  cpu_context ctx;
  model<lstm_lm<T>> net;
  lstm_lm_state<T> state;
  std::vector<std::int32_t> tokens = sentence_tokens(0), next = sentence_tokens(5);
};

/// The Transformer with one batch of sentence pairs.
template <class T>
struct translation {
  static constexpr double rate = 0.5;

  explicit translation(index_t width, int threads = 1)
      : ctx({threads}), net(make_transformer<T>(options(width))) {
    net.initialize(3);
  }
  static transformer_options options(index_t width) {
    transformer_options o;
    o.vocabulary = words;
    o.width = width;
    o.hidden = 2 * width;
    o.layers = 2;
    o.heads = 2;
    o.key = 8;
    o.value = 9;
    o.positions = 12;
    o.dropout = 0.1;
    return o;
  }
  static factorize_policy policy() { return transformer_policy(); }

  token_matrix source() const { return {tokens.data(), {sequences, length}}; }
  token_loss_result loss() {
    return net.root().loss(ctx, source(), source(), {next.data(), {sequences, length}}, {0.1});
  }
  tensor<T, 2> logits() {
    tensor<T, 2> result({length * sequences, words});
    net.root().forward(ctx, source(), source(), result.view());
    return result;
  }

  cpu_context ctx;
  model<transformer<T>> net;
  std::vector<std::int32_t> tokens = sentence_tokens(0), next = sentence_tokens(5);
};

/// Trains a sequence model: the first steps dense, the others factorized, the embedding too if `embedding` is
/// set. Returns the losses.
template <class Model>
std::vector<double> losses(Model& it, int dense, int factorized, bool embedding) {
  std::vector<double> found;
  factorize_policy policy = Model::policy();
  policy.embeddings_dense = !embedding;
  policy.rank = rank_ratio{0.5};
  for (const int steps : {dense, factorized}) {
    if (!found.empty()) factorize(it.net, policy);
    SGD<float> optimizer(make_optimizer_target(it.net.store()), sgd_options{.momentum = 0.5});
    it.ctx.set_mode(run_mode::training);
    for (int i = 0; i < steps; ++i) {
      it.ctx.begin_step(found.size());
      const token_loss_result result = it.loss();
      it.net.root().backward(it.ctx, static_cast<double>(result.tokens));
      clip_gradient_norm<float>(it.ctx, it.net.store().gradients(), 0.5);
      optimizer.step(it.ctx, Model::rate);
      found.push_back(result.mean_loss());
    }
  }
  return found;
}

template <class T>
bool same_bits_of(const tensor<T, 2>& a, const tensor<T, 2>& b) {
  return std::equal(a.flat().begin(), a.flat().end(), b.flat().begin(), b.flat().end(),
                    [](bfloat16 x, bfloat16 y) { return x.bits() == y.bits(); });
}

template <template <class> class Model>
void check_sequence_model() {
  for (const index_t width : {16, 17}) {
    for (const bool embedding : {false, true}) {
      CAPTURE(width);
      CAPTURE(embedding);
      Model<float> wide(width);
      Model<bfloat16> narrow(width), threads(width, 3);
      const std::vector<double> want = losses(wide, 25, 25, embedding),
                                got = losses(narrow, 25, 25, embedding);
      CHECK(losses(threads, 25, 25, embedding) == got);
      double distance = 0.0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        CAPTURE(i);
        if (i < 8) CHECK(std::abs(got[i] - want[i]) < 0.01 * want[i]);
        distance += std::abs(got[i] - want[i]) / static_cast<double>(got.size());
      }
      CHECK(distance < 0.05 * want[0]);
      CHECK(got[24] < 0.9 * got[0]);
      CHECK(got.back() < 0.9 * got[24]);
      CHECK(copies_are_current(narrow.net));
      const auto one = std::as_const(narrow.net.store()).values(),
                 three = std::as_const(threads.net.store()).values();
      CHECK(std::equal(one.begin(), one.end(), three.begin()));

      // A checkpoint holds the float parameters; the network that opens it is factorized on the way.
      const scratch_folder folder;
      const std::string path = folder / "net.safetensors";
      save_checkpoint(path, narrow.net);
      Model<bfloat16> again(width);
      open_checkpoint(path).restore(again.net);
      CHECK(copies_are_current(again.net));
      Model<float> opened(width);
      open_checkpoint(path).restore(opened.net);
      for (Model<bfloat16>* one_of : {&narrow, &again}) one_of->ctx.set_mode(run_mode::inference);
      opened.ctx.set_mode(run_mode::inference);
      const tensor<bfloat16, 2> seen = narrow.logits();
      CHECK(same_bits_of(again.logits(), seen));
      const tensor<float, 2> exact = opened.logits();
      double largest = 0.0, worst = 0.0;
      for (index_t i = 0; i < exact.size(); ++i) {
        const auto value = static_cast<double>(exact.data()[i]);
        largest = std::max(largest, std::abs(value));
        worst = std::max(worst, std::abs(static_cast<double>(seen.data()[i]) - value));
      }
      CHECK(worst < 0.05 * largest);
    }
  }
}

TEST_CASE("bf16 on the CPU: the LSTM language model learns as float's does, dense and factorized") {
  check_sequence_model<language>();
}

TEST_CASE("bf16 on the CPU: the Transformer learns as float's does, dense and factorized") {
  check_sequence_model<translation>();
}

TEST_CASE("bf16 on the CPU: a text and translations, token by token") {
  language<bfloat16> writer(16);
  losses(writer, 60, 60, false);
  writer.ctx.set_mode(run_mode::inference);
  auto state = writer.net.root().make_state(1);
  const std::vector<std::int32_t> prompt{2, 7};
  const auto step = [&](std::int32_t token, std::span<bfloat16> logits) {
    writer.net.root().next(writer.ctx, {&token, 1}, state, {logits.data(), {1, words}});
  };
  const auto text =
      sample_tokens<bfloat16>(prompt, 5, words, {.temperature = 0.0, .forbidden = {0}}, {1, 2}, step);
  CHECK(text.size() == 5);
  CHECK(std::ranges::all_of(text, [](std::int32_t token) { return token > 0 && token < words; }));

  translation<bfloat16> translator(16);
  losses(translator, 40, 40, false);
  const std::vector<std::int32_t> first{5, 10, 15}, second{7};
  const std::vector<std::span<const std::int32_t>> sentences{first, second};
  const beam_options beams{.beam = 3, .max_length = 6, .begin = 2, .end = 3, .forbidden = {1}};
  const auto found = translate<bfloat16>(translator.ctx, translator.net, sentences, beams);
  REQUIRE(found.size() == 2);
  // The search in float over the same network, whose parameters are not rounded, and the search over logits
  // of bfloat16 find the same translations of a trained network.
  translation<float> wide(16);
  apply_ranks(wide.net, low_rank_layers(translator.net));
  copy_state(translator.net, wide.net);
  const auto exact = translate<float>(wide.ctx, wide.net, sentences, beams);
  translator.ctx.set_mode(run_mode::inference);
  const std::vector<std::int32_t> source{2, 5, 10, 15, 3};
  transformer_decoding<bfloat16, device::cpu> decoding(translator.ctx, translator.net.root(),
                                                       token_matrix(source.data(), {1, 5}), beams.beam,
                                                       beams.max_length);
  const auto direct = beam_search<bfloat16>(
      translator.ctx, 1, words, beams, [&](const beam_rows& r, const tensor_view<bfloat16, 2>& logits) {
        decoding.step(translator.ctx, r.tokens, r.parents, r.sentences, logits);
      });
  REQUIRE(direct[0].size() == 1);
  std::vector<std::int32_t> best = direct[0][0].tokens;
  if (direct[0][0].ended) best.pop_back();
  CHECK(best == found[0]);
  CHECK(exact[0].size() == found[0].size());
}

/// LowRankAttention as the root of a network.
template <class T>
class attention_root : public detail::layer_of_parts<attention_root<T>, T, device::cpu> {
 public:
  using value_type = T;
  attention_root() : layer({6, 2, 3, 4}, 2, true) {}
  bool is_moved_from() const { return layer.is_moved_from(); }
  std::string describe() const { return layer.describe(); }
  template <class F>
  void parts(F&& f) {
    f("attention", layer);
  }
  LowRankAttention<T> layer;
};

TEST_CASE("bf16 on the CPU: LowRankAttention in a network of its own") {
  const extents<3> shape{2, 5, 6};
  const auto run = [&](auto type, int threads) {
    using T = decltype(type);
    cpu_context ctx({threads});
    model<attention_root<T>> net{attention_root<T>()};
    net.initialize(4);
    std::vector<float> drawn(60);
    fill_normal(std::span<float>(drawn), 1.0, random_stream(5, 1));
    tensor<T, 3> x(shape), y(shape), dx(shape);
    for (std::size_t i = 0; i < drawn.size(); ++i) {
      x.flat()[i] = static_cast<T>(static_cast<float>(bfloat16(drawn[i])));
    }
    ctx.set_mode(run_mode::training);
    ctx.begin_step(0);
    net.root().layer.forward(ctx, x, y.view(), {true, {}, {}});
    net.root().layer.backward(ctx, y, dx.view());
    std::vector<float> all(y.flat().begin(), y.flat().end());
    all.insert(all.end(), dx.flat().begin(), dx.flat().end());
    const auto gradients = net.store().gradients();
    all.insert(all.end(), gradients.begin(), gradients.end());
    return all;
  };
  const std::vector<float> want = run(float{}, 1), got = run(bfloat16{}, 1);
  CHECK(got == run(bfloat16{}, 3));
  double largest = 0.0;
  for (const float value : want) largest = std::max(largest, std::abs(static_cast<double>(value)));
  for (std::size_t i = 0; i < want.size(); ++i) {
    CHECK(std::abs(static_cast<double>(got[i] - want[i])) < 0.03 * largest);
  }
}

TEST_CASE("bf16 on the CPU: a layer outside of a network has no 16-bit parameters") {
  cpu_context ctx({1});
  const LowRankConv<bfloat16> layer(conv_shape::square(4, 4, 3, 1, 1), 2);
  const tensor<bfloat16, 4> x({1, 4, 4, 4});
  CHECK_THROWS_AS(layer.forward(ctx, x.view()), state_error);
  const LowRankLSTM<bfloat16> recurrent(4, 4, 2, 2);
  const tensor<bfloat16, 3> sequence({3, 2, 4});
  CHECK_THROWS_AS(static_cast<void>(recurrent.forward(ctx, sequence.view())), state_error);
  const LowRankEmbedding<bfloat16> table(5, 4, 2);
  const std::vector<std::int32_t> tokens{1, 2};
  tensor<bfloat16, 2> rows({2, 4});
  CHECK_THROWS_AS(table.forward(ctx, tokens, rows.view()), state_error);
}

}  // namespace
