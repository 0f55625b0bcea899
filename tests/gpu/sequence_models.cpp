// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The language model, the Transformer and their layers on a device: losses, states and gradients of every
// parameter as on the CPU.
#include "../unit/support/embedding_slots.hpp"
#include "support.hpp"

#include <pufferfish/gpu.hpp>
#include <pufferfish/lowrank/layers/attention.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/transformer.hpp>
#include <pufferfish/nn.hpp>
#include <pufferfish/train/translation_task.hpp>

using namespace gpu_test;

namespace {

using pf::device::cpu;
using pf::device::gpu;

// Gradient by gradient; those of nothing but rounding are measured by what others are.
template <class Model, class DeviceModel>
void check_gradients(Model& host_net, DeviceModel& net) {
  const std::span<float> all = net.store().gradients();
  std::vector<float> gradients(all.size());
  pf::gpu::device_memory().to_host(gradients.data(), all.data(), all.size_bytes());
  double scale = 0.0;
  for (const float g : host_net.store().gradients()) {
    scale = std::max(scale, 0.01 * std::abs(static_cast<double>(g)));
  }
  for (const auto& entry : host_net.store().parameters()) {
    CAPTURE(entry.name);
    const std::span<const float> got(gradients.data() + entry.offset,
                                     static_cast<std::size_t>(entry.thing->size()));
    CHECK(difference(got, std::span<const float>(entry.thing->gradient()), scale) < 1e-4);
  }
}

struct language_pair {
  explicit language_pair(const pf::lstm_lm_options& options)
      : host_net(pf::lstm_lm<float>(options)), net(pf::lstm_lm<float, gpu>(options)) {
    host_net.initialize(3);
    pf::copy_state(host_net, net);
  }

  void factor_embeddings(index_t rank) {
    test::factor_embedding(host_net, rank);
    test::factor_embedding(net, rank);
    pf::copy_state(host_net, net);
  }

  // Two segments of a text, with the state between them; `masked`: begin_step's position in the global batch.
  void check(index_t steps, index_t batch, index_t first) {
    pf::gpu_context& ctx = gpu_context();
    pf::cpu_context host;
    host.set_mode(pf::run_mode::training);
    const pf::mode_scope<gpu> training(ctx, pf::run_mode::training);
    auto mine = host_net.root().make_state(batch);
    auto its = net.root().make_state(batch);
    const pf::extents<2> shape{steps, batch};
    const index_t vocabulary = host_net.root().options().vocabulary;
    twin<double> results(2, NAN);
    for (std::uint64_t segment = 0; segment < 2; ++segment) {
      auto tokens = random_tokens(steps * batch, vocabulary, 2 * segment);
      auto targets = random_tokens(steps * batch, vocabulary, 2 * segment + 1);
      host.begin_step(segment, first);
      ctx.begin_step(segment, first);
      const auto loss = host_net.root().loss(host, tokens.host_view(shape), targets.host_view(shape), mine);
      host_net.root().backward(host, static_cast<double>(loss.tokens));
      net.root().loss(ctx, tokens.device_view(shape), targets.device_view(shape), its, results.device_data());
      net.root().backward(ctx, static_cast<double>(loss.tokens));
      CHECK(ctx.tape().empty());
      CHECK(results.fetched()[0] == doctest::Approx(loss.loss_sum).epsilon(1e-6));
      CHECK(results.fetched()[1] == static_cast<double>(loss.tokens));
      std::vector<float> state(mine.values().size());
      its.memory().to_host(state);
      CHECK(difference(std::span<const float>(state), std::span<const float>(mine.values())) < 1e-5);
      check_gradients(host_net, net);
    }
    auto copy = its;
    copy.reset(ctx);
    std::vector<float> state(mine.values().size());
    copy.memory().to_host(state);
    CHECK(std::all_of(state.begin(), state.end(), [](float v) { return v == 0.0F; }));
  }

  pf::model<pf::lstm_lm<float>> host_net;
  pf::model<pf::lstm_lm<float, gpu>, gpu> net;
};

// Losses of steps over one place for tokens, and the last gradients.
std::vector<double> losses_of_steps(language_pair& pair, bool captured, std::size_t& replays) {
  pf::gpu_context& ctx = gpu_context();
  const pf::mode_scope<gpu> training(ctx, pf::run_mode::training);
  constexpr index_t steps = 4, batch = 3;
  const pf::extents<2> shape{steps, batch};
  auto state = pair.net.root().make_state(batch);
  pf::memory_block<std::int32_t> place(pf::gpu::device_memory(), 2 * steps * batch);
  const pf::tensor_view<const std::int32_t, 2> tokens(place.data(), shape),
      targets(place.data() + steps * batch, shape);
  twin<double> results(2, NAN);
  pf::gpu::step_graph graph;
  graph.set_enabled(captured);
  std::vector<double> found;
  for (std::uint64_t step = 0; step < 6; ++step) {
    place.from_host(random_tokens(2 * steps * batch, 37, 100 + step).host());
    ctx.begin_step(step);
    graph.run(ctx, pf::gpu::step_graph::key(shape, pair.net.generation()), [&] {
      pair.net.root().loss(ctx, tokens, targets, state, results.device_data());
      pair.net.root().backward(ctx, static_cast<double>(steps * batch));
    });
    found.push_back(results.fetched()[0]);
  }
  const std::span<float> all = pair.net.store().gradients();
  std::vector<float> gradients(all.size());
  pf::gpu::device_memory().to_host(gradients.data(), all.data(), all.size_bytes());
  found.insert(found.end(), gradients.begin(), gradients.end());
  replays = graph.replays();
  return found;
}

}  // namespace

TEST_CASE("gpu language model: steps captured into a graph are the direct ones bit for bit") {
  language_pair pair({37, 12, 2, 0.4});
  SUBCASE("dense") {}
  SUBCASE("low-rank embedding") { pair.factor_embeddings(5); }
  std::size_t replays = 0;
  const std::vector<double> direct = losses_of_steps(pair, false, replays);
  const std::vector<double> captured = losses_of_steps(pair, true, replays);
  CHECK(replays > 0);
  CHECK(captured == direct);
}

TEST_CASE("gpu language model: two segments, dense and factorized, with and without dropout") {
  for (const double dropout : {0.0, 0.4}) {
    CAPTURE(dropout);
    language_pair pair({37, 12, 2, dropout});
    pair.check(5, 3, 0);
    const pf::factorization made = pf::factorize(pair.host_net, pf::lstm_lm_policy());
    CHECK(made.low_rank.size() == 2);
    pf::apply_ranks(pair.net, made.ranks());
    pf::copy_state(pair.host_net, pair.net);
    using hidden_product = pf::ops::step_operand<float, gpu>;
    CHECK(hidden_product::merges(4, 2, 400, 100));
    CHECK(!hidden_product::merges(4, 2, 401, 100));
    pair.check(4, 2, 6);
    CHECK(!hidden_product::merges(4, 65, 2, 1));
    pair.check(4, 65, 0);
    CHECK(!hidden_product::merges(2, 3, 2, 1));
    pair.check(2, 3, 0);
    pair.factor_embeddings(5);
    pair.check(5, 3, 0);
  }
}

TEST_CASE("gpu language model: logits, and their gradients") {
  language_pair pair({21, 8, 1, 0.0});
  SUBCASE("dense") {}
  SUBCASE("low-rank embedding") { pair.factor_embeddings(3); }
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  host.set_mode(pf::run_mode::training);
  const pf::mode_scope<gpu> training(ctx, pf::run_mode::training);
  const pf::extents<2> shape{3, 4}, rows{12, 21};
  auto tokens = random_tokens(12, 21, 5);
  auto logits = random_twin<float>(12 * 21, 6), gradient = random_twin<float>(12 * 21, 7);
  auto mine = pair.host_net.root().make_state(4);
  auto its = pair.net.root().make_state(4);
  host.begin_step(0);
  ctx.begin_step(0);
  pair.host_net.root().forward(host, tokens.host_view(shape), mine, logits.host_view(rows));
  pair.net.root().forward(ctx, tokens.device_view(shape), its, logits.device_view(rows));
  CHECK(difference(logits) < 1e-5);
  pair.host_net.root().backward(host, gradient.host_view(rows));
  pair.net.root().backward(ctx, gradient.device_view(rows));
  check_gradients(pair.host_net, pair.net);
}

namespace {

// Sentences of different lengths, filled up with token 1.
std::vector<std::int32_t> random_sentences(index_t sentences, index_t length, index_t vocabulary,
                                           std::uint64_t stream) {
  const pf::random_stream random(17, stream);
  std::vector<std::int32_t> ids;
  for (index_t s = 0; s < sentences; ++s) {
    const index_t own = 1 + (s * 5 + 3) % length;
    for (index_t t = 0; t < length; ++t) {
      const auto drawn = random.below(ids.size(), static_cast<std::uint64_t>(vocabulary - 2));
      ids.push_back(t < own ? static_cast<std::int32_t>(drawn) + 2 : 1);
    }
  }
  return ids;
}

index_t sentence_tokens(const std::vector<std::int32_t>& ids) {
  return static_cast<index_t>(std::count_if(ids.begin(), ids.end(), [](std::int32_t id) { return id != 1; }));
}

pf::transformer_options small_transformer(double dropout) {
  pf::transformer_options options;
  options.vocabulary = 23;
  options.width = 12;
  options.hidden = 20;
  options.layers = 2;
  options.heads = 2;
  options.key = 5;
  options.value = 6;
  options.positions = 16;
  options.dropout = dropout;
  return options;
}

struct translator_pair {
  explicit translator_pair(double dropout)
      : host_net(pf::transformer<float>(small_transformer(dropout))),
        net(pf::transformer<float, gpu>(small_transformer(dropout))) {
    host_net.initialize(3);
    pf::copy_state(host_net, net);
  }

  void check(index_t sentences, index_t first) {
    pf::gpu_context& ctx = gpu_context();
    pf::cpu_context host;
    host.set_mode(pf::run_mode::training);
    const pf::mode_scope<gpu> training(ctx, pf::run_mode::training);
    const auto source = random_sentences(sentences, 9, 23, 1),
               target = random_sentences(sentences, 11, 23, 2), next = random_sentences(sentences, 11, 23, 3);
    const pf::token_matrix s(source.data(), {sentences, 9}), t(target.data(), {sentences, 11}),
        n(next.data(), {sentences, 11});
    const pf::label_smoothing smoothing{0.1, pf::smoothing_kind::wrong_classes};
    twin<double> results(2, NAN);
    host.begin_step(4, first);
    ctx.begin_step(4, first);
    const auto loss = host_net.root().loss(host, s, t, n, smoothing);
    host_net.root().backward(host, 7.0);
    const index_t tokens = net.root().loss(ctx, s, t, n, smoothing, results.device_data());
    net.root().backward(ctx, 7.0);
    CHECK(ctx.tape().empty());
    CHECK(tokens == loss.tokens);
    CHECK(results.fetched()[0] == doctest::Approx(loss.loss_sum).epsilon(1e-6));
    CHECK(results.fetched()[1] == static_cast<double>(loss.tokens));
    check_gradients(host_net, net);

    // Packed by the caller, with rows of padding after the last sentence.
    const index_t sources = sentence_tokens(source), targets = sentence_tokens(target);
    const pf::pair_packing packing({sentences, sources + 5, targets + 3, false});
    std::vector<std::byte> packed(static_cast<std::size_t>(packing.bytes()));
    packing.write(packed.data(), s, t, n, 1, first, 16);
    pf::memory_block<std::byte> block(pf::gpu::device_memory(), packing.bytes());
    block.from_host(packed);
    twin<double> normalizer(std::vector<double>{7.0});
    ctx.begin_step(4, first);
    net.root().loss(ctx, packing.in(block.data()), smoothing, results.device_data());
    net.root().backward(ctx, normalizer.device_data());
    CHECK(ctx.tape().empty());
    CHECK(results.fetched()[0] == doctest::Approx(loss.loss_sum).epsilon(1e-6));
    CHECK(results.fetched()[1] == static_cast<double>(loss.tokens));
    check_gradients(host_net, net);

    const index_t rows = host_net.root().output_rows(t);
    twin<float> logits(rows * 23), gradient = random_twin<float>(rows * 23, 9);
    for (const pf::run_mode mode : {pf::run_mode::training, pf::run_mode::inference}) {
      host.begin_step(5, first);
      ctx.begin_step(5, first);
      host.set_mode(mode);
      const pf::mode_scope<gpu> same(ctx, mode);
      host_net.root().forward(host, s, t, logits.host_view<2>({rows, 23}));
      net.root().forward(ctx, s, t, logits.device_view<2>({rows, 23}));
      CHECK(difference(logits) < 1e-5);
      if (mode == pf::run_mode::inference) continue;
      host_net.root().backward(host, gradient.host_view<2>({rows, 23}));
      net.root().backward(ctx, gradient.device_view<2>({rows, 23}));
      check_gradients(host_net, net);
    }
  }

  pf::model<pf::transformer<float>> host_net;
  pf::model<pf::transformer<float, gpu>, gpu> net;
};

}  // namespace

TEST_CASE("gpu transformer: dense and factorized, with and without dropout") {
  for (const double dropout : {0.0, 0.2}) {
    CAPTURE(dropout);
    translator_pair pair(dropout);
    pair.check(5, 0);
    const pf::factorization made = pf::factorize(pair.host_net, pf::transformer_policy());
    CHECK(made.low_rank.size() == 16);
    pf::apply_ranks(pair.net, made.ranks());
    pf::copy_state(pair.host_net, pair.net);
    pair.check(3, 8);
    test::factor_embedding(pair.host_net, 5);
    test::factor_embedding(pair.net, 5);
    pf::copy_state(pair.host_net, pair.net);
    pair.check(4, 0);
  }
}

TEST_CASE("gpu transformer: translations by beams are the CPU's") {
  using words = std::vector<std::int32_t>;
  const std::vector<words> sentences{{4, 5, 6}, {7}, {}, {8, 9, 10, 11, 12, 13, 22}};
  const std::vector<std::span<const std::int32_t>> views(sentences.begin(), sentences.end());
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  translator_pair pair(0.2);
  for (const bool low_rank : {false, true}) {
    CAPTURE(low_rank);
    if (low_rank) {
      pf::apply_ranks(pair.net, pf::factorize(pair.host_net, pf::transformer_policy(0)).ranks());
      test::factor_embedding(pair.host_net, 6);
      test::factor_embedding(pair.net, 6);
      pf::copy_state(pair.host_net, pair.net);
    }
    for (const index_t beam : {1, 2, 5}) {
      CAPTURE(beam);
      pf::beam_options options;
      options.beam = beam;
      options.max_length = 14;
      options.forbidden = {1, 2};
      const std::vector<words> found = pf::translate(ctx, host, pair.net, views, options);
      CHECK(found == pf::translate(host, pair.host_net, views, options));
      CHECK(std::any_of(found.begin(), found.end(), [](const words& w) { return w.size() > 3; }));
    }
  }
  CHECK_FALSE(ctx.training());
  CHECK(pf::translate(ctx, host, pair.net, {}, {}).empty());

  pf::model<pf::transformer<pf::gpu::bf16, gpu>, gpu> rounded{
      pf::transformer<pf::gpu::bf16, gpu>(small_transformer(0.0))};
  rounded.initialize(3);
  pf::beam_options options;
  options.max_length = 6;
  CHECK(pf::translate(ctx, host, rounded, views, options).size() == sentences.size());
}

TEST_CASE("gpu layers of sequences: in networks of any device") {
  const pf::extents<4> input{3, 1, 7, 12};
  const auto make = [](auto device) {
    using Device = decltype(device);
    pf::Sequential<float, Device> layers;
    layers.add("positions", pf::PositionalEncoding<float>(12, 20));
    pf::attention_options attention;
    attention.shape = {12, 3, 4, 5};
    layers.add("attention", pf::MultiHeadAttention<float, Device>(attention));
    layers.add("feed_forward", pf::FeedForward<float, Device>({12, 30, 0.1, 1e-6}));
    layers.add("norm", pf::LayerNorm<float>(12));
    return pf::network<float, Device>{pf::any_layer<float, Device>(std::move(layers))};
  };
  auto host_net = make(cpu());
  auto net = make(gpu());
  host_net.initialize(5);
  pf::copy_state(host_net, net);
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  host.set_mode(pf::run_mode::training);
  const pf::mode_scope<gpu> training(ctx, pf::run_mode::training);
  auto x = random_twin<float>(pf::volume<4>(input), 1), y = random_twin<float>(x.size(), 2),
       dy = random_twin<float>(x.size(), 3), dx = random_twin<float>(x.size(), 4);
  host.begin_step(2, 3);
  ctx.begin_step(2, 3);
  host_net.forward(host, x.host_view(input), y.host_view(input));
  host_net.backward(host, dy.host_view(input), dx.host_view(input));
  net.forward(ctx, x.device_view(input), y.device_view(input));
  net.backward(ctx, dy.device_view(input), dx.device_view(input));
  CHECK(ctx.tape().empty());
  CHECK(difference(y) < 1e-5);
  CHECK(difference(dx) < 1e-4);
  check_gradients(host_net, net);
}

TEST_CASE("gpu layers of sequences: low-rank layers that stand alone") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  host.set_mode(pf::run_mode::training);
  const pf::mode_scope<gpu> training(ctx, pf::run_mode::training);
  host.begin_step(1);
  ctx.begin_step(1);
  const pf::random_stream random(2, 5);
  const auto check = [&](auto& mine, auto& its, const pf::extents<3>& from, const pf::extents<3>& to) {
    mine.initialize(random);
    its.initialize(random);
    auto x = random_twin<float>(pf::volume<3>(from), 1), dx = random_twin<float>(x.size(), 2);
    auto y = random_twin<float>(pf::volume<3>(to), 3), dy = random_twin<float>(y.size(), 4);
    mine.forward(host, pf::tensor_view<const float, 3>(x.host_data(), from), {}, y.host_view(to));
    its.forward(ctx, pf::tensor_view<const float, 3>(x.device_data(), from), {}, y.device_view(to));
    CHECK(difference(y) < 1e-5);
    mine.backward(host, dy.host_view(to), dx.host_view(from));
    its.backward(ctx, dy.device_view(to), dx.device_view(from));
    CHECK(difference(dx) < 1e-5);
  };
  pf::LowRankLSTM<float, 2> lstm(5, 4);
  pf::LowRankLSTM<float, 2, gpu> device_lstm(5, 4);
  check(lstm, device_lstm, {3, 2, 5}, {3, 2, 4});
  CHECK(device_lstm.input_rank() == 2);

  // Attention, with keys of which some are padding.
  const pf::attention_shape shape{6, 2, 3, 4};
  pf::LowRankAttention<float> attention(shape, 2, true);
  pf::LowRankAttention<float, pf::dynamic_rank, gpu> device_attention(shape, 2, true);
  attention.initialize(random);
  device_attention.initialize(random);
  const pf::extents<3> xs{3, 5, 6};
  twin<index_t> lengths(std::vector<index_t>{5, 0, 3});
  auto x = random_twin<float>(90, 5), y = random_twin<float>(90, 6), dy = random_twin<float>(90, 7),
       dx = random_twin<float>(90, 8);
  pf::attention_call call, device_call;
  call.key_lengths = lengths.host();
  device_call.key_lengths = lengths.device_span();
  attention.forward(host, x.host_view(xs), y.host_view(xs), call);
  device_attention.forward(ctx, x.device_view(xs), y.device_view(xs), device_call);
  CHECK(difference(y) < 1e-5);
  attention.backward(host, dy.host_view(xs), dx.host_view(xs));
  device_attention.backward(ctx, dy.device_view(xs), dx.device_view(xs));
  CHECK(difference(dx) < 1e-5);
  CHECK(ctx.tape().empty());
}
