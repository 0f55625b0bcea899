// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Times of layers and stages: what is measured, and what is made of it. No check depends on how fast or how
// busy a machine is, but for sizes that are a hundred times apart.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/resnet.hpp>
#include <pufferfish/models/transformer.hpp>
#include <pufferfish/nn/measure/profile_stages.hpp>

namespace {

using namespace pufferfish;

factorize_policy open_policy() {
  factorize_policy policy;
  policy.first_layer = 1;
  policy.last_layer_dense = policy.shortcuts_dense = policy.embeddings_dense = false;
  return policy;
}

constexpr timing_options quick{3, 0.5};

const layer_input* find(const std::vector<layer_input>& inputs, const std::string& name) {
  const auto at =
      std::find_if(inputs.begin(), inputs.end(), [&](const layer_input& one) { return one.name == name; });
  return at == inputs.end() ? nullptr : &*at;
}

network<float> small_resnet(index_t width = 4) {
  resnet18_options options;
  options.width = width;
  network<float> net = resnet18<float>(options);
  net.initialize(3);
  return net;
}

void check_times(const layer_times& times) {
  for (const layer_time& layer : times.layers) {
    CAPTURE(layer.name);
    CHECK(layer.dense_ms > 0.0);
    CHECK(layer.low_rank_ms >= 0.0);
    rank_list ones;
    for (const double ms : layer.ms_per_rank) {
      CHECK(ms >= 0.0);
      ones.push_back(1);
    }
    CHECK(layer.milliseconds(ones) > 0.0);
  }
  CHECK(layer_times_from_text(to_text(times), "again") == times);
}

TEST_CASE("layer times: the linear model") {
  // Exact where times are linear.
  const auto at = [](index_t a, index_t b) {
    return rank_time{{a, b}, 3.0 + 0.25 * static_cast<double>(a) + 0.5 * static_cast<double>(b)};
  };
  const layer_time two = fit_layer_time("rnn", 20.0, {at(4, 8), at(8, 8), at(16, 8), at(4, 16), at(4, 32)});
  CHECK(two.name == "rnn");
  CHECK(two.dense_ms == 20.0);
  CHECK(two.low_rank_ms == doctest::Approx(3.0));
  REQUIRE(two.ms_per_rank.size() == 2);
  CHECK(two.ms_per_rank[0] == doctest::Approx(0.25));
  CHECK(two.ms_per_rank[1] == doctest::Approx(0.5));
  CHECK(two.milliseconds({10, 20}) == doctest::Approx(15.5));
  CHECK_THROWS_WITH_AS(two.milliseconds({10}),
                       doctest::Contains("rnn: 1 rank where times were measured for 2"), rank_error);

  // Least squares; the line through (1, 1), (2, 3), (3, 2).
  const layer_time noisy = fit_layer_time("a", 1.0, {{{1}, 1.0}, {{2}, 3.0}, {{3}, 2.0}});
  CHECK(noisy.ms_per_rank[0] == doctest::Approx(0.5));
  CHECK(noisy.low_rank_ms == doctest::Approx(1.0));
  // One rank; times that fall; a constant below zero.
  CHECK(fit_layer_time("a", 1.0, {{{1}, 2.0}}) == layer_time{"a", 1.0, 2.0, {0.0}});
  CHECK(fit_layer_time("a", 1.0, {{{1}, 3.0}, {{2}, 1.0}}) == layer_time{"a", 1.0, 2.0, {0.0}});
  CHECK(fit_layer_time("a", 1.0, {{{10}, 1.0}, {{20}, 4.0}}).low_rank_ms == 0.0);

  const auto refused = [](double dense, const std::vector<rank_time>& points) {
    CHECK_THROWS_WITH_AS(fit_layer_time("conv3", dense, points), doctest::Contains("conv3"), value_error);
  };
  refused(1.0, {});
  refused(1.0, {{{}, 1.0}});
  refused(-1.0, {{{1}, 1.0}});
  refused(1.0, {{{1}, std::numeric_limits<double>::quiet_NaN()}});
  refused(1.0, {{{1, 1}, 1.0}, {{2, 2}, 1.0}});
  refused(1.0, {{{1, 1}, 1.0}, {{2}, 1.0}});
}

TEST_CASE("layer times: as text and back, bit for bit, and nothing else is read") {
  const layer_times times{{{"a b\n", 1.0 / 3.0, 1e-300, {0.1}}, {"", 2.0, 0.0, {0.25, 3.0}}}};
  CHECK(layer_times_from_text(to_text(times), "file") == times);
  CHECK(layer_times_from_text("", "file").layers.empty());
  CHECK(times.find("") == &times.layers[1]);
  CHECK(times.find("b") == nullptr);
  for (const std::string bad :
       {"a 1 1", "a 1", "a", "", "a -1 1 1", "a 1 nan 1", "a 1 1 inf", "a 1 1 x", "b 1 1 1"}) {
    CAPTURE(bad);
    CHECK_THROWS_WITH_AS(layer_times_from_text("b 1 1 1\n" + bad + "\n", "file"),
                         doctest::Contains("file: line 2 of the layers' times"), io_error);
  }
  const std::vector<stage_time> stages{{"conv 1", "b", 64, 1.0 / 3.0, 0.1, {"b.c", "b d"}},
                                       {"c", "c", 8, 2.0, 1.0, {"c"}}};
  CHECK(stage_times_from_text(to_text(stages), "file") == stages);
  for (const std::string bad : {"a b 64 1 1", "a b 0 1 1 c", "a b 64 -1 1 c", "a b 64 1 inf c", ""}) {
    CAPTURE(bad);
    CHECK_THROWS_WITH_AS(stage_times_from_text(bad + "\n", "file"),
                         doctest::Contains("file: line 1 of the stages' times"), io_error);
  }
}

TEST_CASE("stage times: what is worth factorizing, and the policy for it") {
  const std::vector<stage_time> stages{
      {"a", "a", 8, 1.49, 1.0, {"a"}}, {"b", "c", 16, 1.5, 1.0, {"b", "c"}}, {"d", "d", 32, 9.0, 0.0, {"d"}}};
  CHECK(stages[2].gain() == 1.0);
  CHECK(profitable_layers(stages) == std::vector<std::string>{"b", "c"});
  CHECK(profitable_layers(stages, 1.0) == std::vector<std::string>{"a", "b", "c", "d"});
  factorize_policy policy;
  policy.also_if = [](const std::string& name, matrix_size) { return name != "c"; };
  policy = only_layers(policy, {"c", "b"});
  CHECK(policy.also_if("b", {}));
  CHECK_FALSE(policy.also_if("c", {}));
  CHECK_FALSE(policy.also_if("a", {}));
}

TEST_CASE("layer inputs: of a network, as its input has them on the way") {
  const network<float> net = small_resnet();
  const auto inputs = traced_inputs(net, {6, 32, 32, 3});
  CHECK(inputs.size() == detail::find_slots(net).slots.size());
  CHECK_FALSE(inputs[0].gradient);
  CHECK(inputs[0].shape == extents<4>{6, 32, 32, 3});
  for (std::size_t i = 1; i < inputs.size(); ++i) CHECK(inputs[i].gradient);
  REQUIRE(find(inputs, "layer2.0.conv1") != nullptr);
  CHECK(find(inputs, "layer2.0.conv1")->shape == extents<4>{6, 32, 32, 4});
  CHECK(find(inputs, "layer2.0.conv2")->shape == extents<4>{6, 16, 16, 8});
  CHECK(find(inputs, "linear")->shape == extents<4>{6, 1, 1, 32});
}

TEST_CASE("layer inputs: of a language model, counted and by its sizes, are the same") {
  lstm_lm_options options;
  options.vocabulary = 40;
  options.width = 12;
  auto net = make_lstm_lm<float>(options);
  net.initialize(1);
  const index_t steps = 5, batch = 3;
  const std::vector<layer_input> by_sizes = sequence_inputs(net, steps, batch);
  REQUIRE(by_sizes.size() == 3);
  CHECK(by_sizes[0].tied_rows == 15);
  CHECK(by_sizes[1].shape == extents<4>{5, 3, 1, 12});

  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  auto state = net.root().make_state(batch);
  tensor<std::int32_t, 2> tokens({steps, batch});
  for (index_t i = 0; i < tokens.size(); ++i) tokens.data()[i] = static_cast<std::int32_t>(i % 40);
  row_counter counter;
  for (std::uint64_t step = 0; step < 2; ++step) {
    const observed_scope counted(ctx, counter);
    ctx.begin_step(step);
    net.root().loss(ctx, tokens.view(), tokens.view(), state);
    net.root().backward(ctx, 15.0);
  }
  const std::vector<layer_input> counted = counted_inputs(net, counter, 2, steps);
  REQUIRE(counted.size() == by_sizes.size());
  for (std::size_t i = 0; i < counted.size(); ++i) {
    CAPTURE(counted[i].name);
    CHECK(counted[i].name == by_sizes[i].name);
    CHECK(counted[i].shape == by_sizes[i].shape);
    CHECK(counted[i].tied_rows == by_sizes[i].tied_rows);
    CHECK(counted[i].gradient);
  }
  CHECK(counted_inputs(net, row_counter()).empty());
  CHECK_THROWS_WITH_AS(counted_inputs(net, counter, 2, 4), doctest::Contains("rnn.0 has 15 rows"),
                       value_error);
  CHECK_THROWS_AS(counted_inputs(net, counter, 0), value_error);
  CHECK_THROWS_AS(sequence_inputs(net, 0, 3), value_error);

  const layer_times times = measure_layers(net, counted, open_policy(), ctx, quick);
  REQUIRE(times.layers.size() == 3);
  CHECK(times.layers[0].ms_per_rank.size() == 1);
  CHECK(times.layers[1].ms_per_rank.size() == 2);
  // Equal layers are measured once.
  CHECK(times.layers[1].dense_ms == times.layers[2].dense_ms);
  check_times(times);
}

TEST_CASE("layer inputs: of a Transformer, from a step of it") {
  transformer_options options;
  options.vocabulary = 30;
  options.width = 16;
  options.hidden = 24;
  options.layers = 1;
  options.heads = 2;
  options.key = options.value = 8;
  options.positions = 12;
  auto net = make_transformer<float>(options);
  net.initialize(1);
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  tensor<std::int32_t, 2> source({2, 5}), target({2, 4}), next({2, 4});
  for (index_t i = 0; i < source.size(); ++i) source.data()[i] = static_cast<std::int32_t>(2 + i);
  for (index_t i = 0; i < target.size(); ++i)
    target.data()[i] = next.data()[i] = static_cast<std::int32_t>(5 + i);
  row_counter counter;
  {
    const observed_scope counted(ctx, counter);
    ctx.begin_step(0);
    net.root().loss(ctx, source.view(), target.view(), next.view());
    net.root().backward(ctx, 8.0);
  }
  const auto inputs = counted_inputs(net, counter);
  REQUIRE(inputs.size() == detail::find_slots(net).slots.size());
  CHECK(find(inputs, "encoder.src_word_emb")->shape == extents<4>{18, 1, 1, 16});
  CHECK(find(inputs, "encoder.src_word_emb")->tied_rows == 8);
  CHECK(find(inputs, "encoder.layer_stack.0.slf_attn.w_qs")->shape == extents<4>{10, 1, 1, 16});
  CHECK(find(inputs, "decoder.layer_stack.0.enc_attn.w_qs")->shape == extents<4>{8, 1, 1, 16});
  CHECK(find(inputs, "decoder.layer_stack.0.enc_attn.w_ks")->shape == extents<4>{10, 1, 1, 16});
  CHECK(find(inputs, "decoder.layer_stack.0.pos_ffn.w_2")->shape == extents<4>{8, 1, 1, 24});
  const layer_times times = measure_layers(net, inputs, open_policy(), ctx, quick);
  CHECK(times.layers.size() == inputs.size());
  check_times(times);
}

TEST_CASE("layer times: of a convolutional network, which stays as it is, as does the context") {
  const network<float> net = small_resnet();
  const std::vector<float> before(net.store().values().begin(), net.store().values().end());
  cpu_context ctx;
  ctx.begin_step(17, 5);
  const auto inputs = traced_inputs(net, {2, 32, 32, 3});
  const layer_times times = measure_layers(net, inputs, open_policy(), ctx, quick);
  CHECK(times.layers.size() == inputs.size());
  check_times(times);
  CHECK(std::equal(before.begin(), before.end(), net.store().values().begin()));
  CHECK(ctx.step() == 17);
  CHECK(ctx.first_sample() == 5);
  CHECK_FALSE(ctx.training());

  // Only what the policy may factorize, and each of it needs an input.
  factorize_policy policy;
  policy.first_layer = 16;
  CHECK(measure_layers(net, inputs, policy, ctx, quick).layers.size() == 2);
  CHECK_THROWS_WITH_AS(measure_layers(net, {}, policy, ctx, quick),
                       doctest::Contains("none of layer layer4.1.conv"), state_error);
  CHECK_THROWS_AS(measure_layers(net, inputs, policy, ctx, {1, 1.0}), value_error);
  CHECK_THROWS_AS(measure_layers(net, inputs, policy, ctx, {3, 0.0}), value_error);
}

TEST_CASE("layer times: a layer of a hundred times the work takes longer") {
  Sequential<float> row;
  row.add("small", Linear<float>(64, 64));
  row.add("wide", Linear<float>(64, 1024));
  row.add("large", Linear<float>(1024, 1024));
  const network<float> net{any_layer<float>(std::move(row))};
  cpu_context ctx;
  const layer_times times = measure_layers(net, traced_inputs(net, {256, 1, 1, 64}), open_policy(), ctx);
  REQUIRE(times.layers.size() == 3);
  CHECK(times.find("large")->dense_ms > times.find("small")->dense_ms);
  CHECK(times.find("large")->milliseconds({512}) > times.find("small")->milliseconds({32}));
  CHECK(times.find("large")->dense_ms > times.find("large")->milliseconds({1}));
}

TEST_CASE("stage times: stages by the channels of layers and blocks, from the network itself") {
  const network<float> net = small_resnet();
  cpu_context ctx;
  factorize_policy policy;
  const auto stages = profile_stages(net, {2, 32, 32, 3}, policy, ctx, {0.25, quick});
  REQUIRE(stages.size() == 4);
  CHECK(stages[0].first == "conv1");
  CHECK(stages[0].last == "layer1.1");
  CHECK(stages[1].first == "layer2.0");
  CHECK(stages[3].first == "layer4.0");
  std::vector<std::string> names;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    CHECK(stages[i].channels == index_t{4} << i);
    CHECK(stages[i].dense_ms > 0.0);
    CHECK(stages[i].low_rank_ms > 0.0);
    CHECK(stages[i].layers.size() == 4);
    names.insert(names.end(), stages[i].layers.begin(), stages[i].layers.end());
  }
  std::vector<std::string> planned;
  for (const layer_rank& one : planned_ranks(net, policy)) planned.push_back(one.name);
  CHECK(names == planned);
  CHECK(stage_times_from_text(to_text(stages), "again") == stages);

  // Only the layers that it names stay chosen.
  planned.clear();
  for (const layer_rank& one : planned_ranks(net, only_layers(policy, stages[2].layers)))
    planned.push_back(one.name);
  CHECK(planned == stages[2].layers);

  // A network that is no sequential is one stage; a layer that no network can replace is none.
  Sequential<float> branch;
  branch.add("fc", Linear<float>(30, 30));
  const network<float> block{any_layer<float>(Residual<float>(std::move(branch)))};
  const auto one = profile_stages(block, {4, 1, 1, 30}, open_policy(), ctx, {0.25, quick});
  REQUIRE(one.size() == 1);
  CHECK(one[0].layers == std::vector<std::string>{"fc"});
  const network<float> single{any_layer<float>(Linear<float>(30, 20))};
  CHECK(profile_stages(single, {4, 1, 1, 30}, open_policy(), ctx, {0.25, quick}).empty());
  CHECK_THROWS_AS(profile_stages(net, {2, 32, 32, 3}, policy, ctx, {0.0, quick}), value_error);
  CHECK_THROWS_AS(profile_stages(net, {2, 32, 32, 5}, policy, ctx, {0.25, quick}), shape_error);
}

}  // namespace
