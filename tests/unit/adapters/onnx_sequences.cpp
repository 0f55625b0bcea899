// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The language model and the Transformer as ONNX models, dense and factorized, against ONNX Runtime.
#include <algorithm>
#include <string>
#include <tuple>

#include "../support/onnx_runtime.hpp"
#include "../support/small_transformer.hpp"

namespace {

using namespace test;

tensor<std::int64_t, 2> as_int64(const tensor<std::int32_t, 2>& tokens) {
  tensor<std::int64_t, 2> wide(tokens.shape());
  std::copy(tokens.flat().begin(), tokens.flat().end(), wide.flat().begin());
  return wide;
}

tensor<std::int32_t, 2> random_tokens(const extents<2>& shape, index_t vocabulary) {
  tensor<std::int32_t, 2> tokens(shape);
  random_stream random(7, 7);
  std::vector<float> values(static_cast<std::size_t>(tokens.size()));
  fill_uniform<float>(std::span<float>(values), 2.0, static_cast<double>(vocabulary) - 0.01, random);
  for (std::size_t i = 0; i < values.size(); ++i) tokens.flat()[i] = static_cast<std::int32_t>(values[i]);
  return tokens;
}

std::vector<double> doubles(std::span<const float> values) { return {values.begin(), values.end()}; }

/// Values of the usual size for every parameter, norms near the identity.
template <class Net>
void give_values(Net& net, std::uint64_t seed) {
  for (const auto& entry : net.store().parameters()) {
    const bool scale = entry.thing->role() == parameter_role::norm && entry.name.ends_with("weight");
    fill_uniform(entry.thing->values(), scale ? 0.5 : -0.5, scale ? 1.5 : 0.5,
                 random_stream(seed, 1).child(entry.name));
  }
}

/// All forms of a model: dense, with a factorized embedding, and factorized throughout.
template <class Net>
std::vector<Net> forms_of(const Net& dense) {
  std::vector<Net> all(3, dense);
  factorize_policy policy{.first_layer = 1, .last_layer_dense = false, .keep_dense_if_larger = false};
  policy.rank = fixed_rank{2};
  factorize(all[1], policy);
  policy.embeddings_dense = false;
  factorize(all[2], policy);
  REQUIRE(all[1].structure() != dense.structure());
  REQUIRE(all[2].structure() != all[1].structure());
  return all;
}

TEST_CASE("write_onnx: the LSTM language model, dense and factorized, with its state") {
  runtime_cases cases;
  auto dense = make_lstm_lm<float>({13, 8, 2, 0.5});
  give_values(dense, 3);
  index_t number = 0;
  for (const auto& net : forms_of(dense)) {
    const std::string name = "lm" + std::to_string(number++);
    write_onnx(cases.path_of(name), net);
    for (const index_t batch : {index_t{1}, index_t{7}}) {
      cpu_context ctx;
      auto state = net.root().make_state(batch);
      fill_uniform<float>(state.values(), -0.5, 0.5, {9, 9});
      tensor<float, 3> h({2, batch, 8}), c(h.shape());
      const auto store = [&](tensor<float, 3>& to_h, tensor<float, 3>& to_c) {
        for (index_t i = 0; i < 2; ++i) {
          const recurrent_state<float> one = state.layer(i);
          for (index_t b = 0; b < batch; ++b) {
            for (index_t k = 0; k < 8; ++k) {
              to_h(i, b, k) = one.h(b, k);
              to_c(i, b, k) = one.c(b, k);
            }
          }
        }
      };
      store(h, c);
      const tensor<std::int32_t, 2> tokens = random_tokens({5, batch}, 13);
      tensor<float, 2> logits({5 * batch, 13});
      net.root().forward(ctx, tokens, state, logits.view());
      tensor<float, 3> h_out(h.shape()), c_out(h.shape());
      store(h_out, c_out);
      const tensor<std::int64_t, 2> wide = as_int64(tokens);
      cases.add(name, {entry_of("tokens", wide), entry_of("h", h), entry_of("c", c)},
                {{"logits", doubles(logits.flat())},
                 {"h_out", doubles(h_out.flat())},
                 {"c_out", doubles(c_out.flat())}});
    }
  }
  CHECK(cases.worst() < 1e-4);
}

TEST_CASE("write_onnx: the Transformer, its encoder, its decoder, and steps with a cache") {
  runtime_cases cases;
  auto dense = make_transformer<float>(small_transformer());
  give_values(dense, 4);
  index_t number = 0;
  const index_t vocabulary = 13;
  for (const auto& net : forms_of(dense)) {
    const std::string name = "transformer" + std::to_string(number++);
    write_onnx(cases.path_of(name), net);
    write_onnx(cases.path_of(name + "-encoder"), net, onnx_part::encoder);
    write_onnx(cases.path_of(name + "-decoder"), net, onnx_part::decoder);
    write_onnx(cases.path_of(name + "-step"), net, onnx_part::step);
    for (const index_t batch : {index_t{1}, index_t{7}}) {
      const tensor<std::int32_t, 2> target = random_tokens({batch, 4}, vocabulary);
      tensor<std::int32_t, 2> source = random_tokens({batch, 6}, vocabulary);
      for (index_t b = 1; b < batch; ++b) {
        for (index_t t = 6 - b % 4; t < 6; ++t) source(b, t) = 1;  // padding
      }
      cpu_context ctx;
      tensor<float, 2> logits({4 * batch, vocabulary});
      net.root().forward(ctx, source, target, logits.view());
      const tensor<std::int64_t, 2> from = as_int64(source), to = as_int64(target);
      cases.add(name, {entry_of("source", from), entry_of("target", to)},
                {{"logits", doubles(logits.flat())}});
    }
  }
  CHECK(cases.worst() < 1e-4);
}

TEST_CASE(
    "write_onnx: tokens in networks: positions, attention, feed-forward and LSTMs, and their weights back") {
  runtime_cases cases;
  Sequential<float> tokens;
  tokens.add("embed", Linear<float>(5, 8))
      .add("positions", PositionalEncoding<float>(8, 20))
      .add("attention", MultiHeadAttention<float>(attention_options{{8, 2, 3, 4}}))
      .add("feed_forward", FeedForward<float>(feed_forward_options{8, 12}))
      .add("norm", LayerNorm<float>(8))
      .add("head", Linear<float>(8, 3));
  Sequential<float> steps;  // [steps][batch][1][input]
  steps.add("rnn", LSTM<float>(5, 8)).add("rnn2", LSTM<float>(8, 6)).add("fc", Linear<float>(6, 4));
  for (const bool low : {false, true}) {
    for (const auto& [name, layers, image] : {std::tuple{"tokens", tokens, extents<3>{3, 4, 5}},
                                              std::tuple{"steps", steps, extents<3>{3, 1, 5}}}) {
      const std::string model = std::string(name) + (low ? "-low" : "");
      CAPTURE(model);
      network<float> net{any_layer<float>(layers)};
      give_values(net, 6);
      if (low) {
        factorize_policy policy{.first_layer = 1, .last_layer_dense = false, .keep_dense_if_larger = false};
        policy.rank = fixed_rank{2};
        CHECK(factorize(net, policy).low_rank.size() >= 3);
      }
      cases.add_network(model, net, image);
      network<float> other = net;
      other.initialize(9);
      read_onnx(cases.path_of(model), other, {.image = image});
      CHECK(std::ranges::equal(net.store().values(), other.store().values()));
    }
  }
  CHECK(cases.worst() < 1e-4);
}

/// Rows of padding in the target are no rows of the library's logits; those of tokens are the same.
TEST_CASE("write_onnx: padding in target sentences") {
  runtime_cases cases;
  auto net = make_transformer<float>(small_transformer());
  give_values(net, 4);
  write_onnx(cases.path_of("net"), net);
  const tensor<std::int32_t, 2> source = random_tokens({2, 6}, 13);
  tensor<std::int32_t, 2> target = random_tokens({2, 4}, 13);
  target(1, 2) = target(1, 3) = 1;
  cpu_context ctx;
  tensor<float, 2> logits({6, 13});
  net.root().forward(ctx, source, target, logits.view());
  const tensor<std::int64_t, 2> from = as_int64(source), to = as_int64(target);
  cases.add("net", {entry_of("source", from), entry_of("target", to)}, {});
  if (cases.worst() < 0.0) return;
  tensor<float, 3> got({2, 4, 13});
  read_tensor(safetensors_file::read(cases.folder() / "net.0.out.safetensors"), "logits", got.flat());
  for (index_t row = 0; row < 6; ++row) {
    for (index_t k = 0; k < 13; ++k)
      CHECK(got.flat()[static_cast<std::size_t>(row * 13 + k)] ==
            doctest::Approx(logits(row, k)).epsilon(1e-4));
  }
}

TEST_CASE("write_onnx: encoder, decoder and cached steps compute what the whole model does") {
  auto dense = make_transformer<float>(small_transformer());
  give_values(dense, 5);
  for (const auto& net : forms_of(dense)) {
    const index_t batch = 3, width = 6;
    tensor<std::int32_t, 2> source = random_tokens({batch, 6}, 13);
    source(1, 5) = 1;
    const tensor<std::int32_t, 2> target = random_tokens({batch, 4}, 13);
    const tensor<std::int64_t, 2> from = as_int64(source), to = as_int64(target);
    cpu_context ctx;
    tensor<float, 2> logits({4 * batch, 13});
    net.root().forward(ctx, source, target, logits.view());
    const auto read = [](const runtime_cases& cases, const std::string& file, const std::string& name,
                         auto shape) {
      tensor<float, std::tuple_size_v<decltype(shape)>> values(shape);
      read_tensor(safetensors_file::read(cases.folder() / file), name, values.flat());
      return values;
    };
    runtime_cases encoder;
    write_onnx(encoder.path_of("encoder"), net, onnx_part::encoder);
    encoder.add("encoder", {entry_of("source", from)}, {});
    if (encoder.worst() < 0.0) return;
    const std::string made = "encoder.0.out.safetensors";
    const auto encoded = read(encoder, made, "encoded", extents<3>{batch, 6, width});
    std::map<std::string, tensor<float, 4>> values;
    for (const std::string layer : {"0", "1"}) {
      for (const auto& [side, columns] : {std::pair{".keys", 3}, {".values", 4}}) {
        const std::string name = "memory." + layer + side;
        values.emplace(name, read(encoder, made, name, extents<4>{batch, 2, 6, columns}));
        values.emplace("past." + layer + side, tensor<float, 4>({batch, 2, 0, columns}));
      }
    }
    runtime_cases decoder;
    write_onnx(decoder.path_of("decoder"), net, onnx_part::decoder);
    decoder.add("decoder", {entry_of("source", from), entry_of("encoded", encoded), entry_of("target", to)},
                {{"logits", doubles(logits.flat())}});
    CHECK(decoder.worst() < 1e-4);
    for (index_t t = 0; t < 4; ++t) {
      runtime_cases step;
      write_onnx(step.path_of("step"), net, onnx_part::step);
      tensor<std::int64_t, 2> token({batch, 1});
      std::vector<double> wanted;
      for (index_t b = 0; b < batch; ++b) {
        token(b, 0) = to(b, t);
        for (index_t k = 0; k < 13; ++k) wanted.push_back(static_cast<double>(logits(b * 4 + t, k)));
      }
      std::vector<tensor_entry> inputs{entry_of("source", from), entry_of("target", token)};
      for (const auto& [name, value] : values) inputs.push_back(entry_of(name, value));
      step.add("step", inputs, {{"logits", wanted}});
      CHECK(step.worst() < 1e-4);
      for (auto& [name, value] : values) {
        if (!name.starts_with("past.")) continue;
        value = read(step, "step.0.out.safetensors", "present." + name.substr(5),
                     extents<4>{batch, 2, t + 1, value.extent(3)});
      }
    }
  }
}

TEST_CASE("read_onnx: weights of the language model and the Transformer come back") {
  scratch_folder folder;
  const auto check = [&](const auto& dense) {
    for (const auto& net : forms_of(dense)) {
      write_onnx(folder / "net.onnx", net);
      auto other = net;
      give_values(other, 8);
      read_onnx(folder / "net.onnx", other);
      CHECK(std::ranges::equal(net.store().values(), other.store().values()));
    }
  };
  auto lm = make_lstm_lm<float>({13, 8, 2, 0.0});
  auto transformer = make_transformer<float>(small_transformer());
  give_values(lm, 3);
  give_values(transformer, 3);
  check(lm);
  check(transformer);
  CHECK_THROWS_WITH_AS(read_onnx(folder / "net.onnx", lm),
                       doctest::Contains("the model has no constant 'encoder.weight'"), io_error);
}

TEST_CASE("factorize_onnx: linear layers and LSTMs of written models") {
  scratch_folder folder;
  auto lm = make_lstm_lm<float>({40, 32, 2, 0.0});
  give_values(lm, 3);
  write_onnx(folder / "lm.onnx", lm);
  weight_policy policy;
  policy.keep_first = 0;
  policy.keep_last = false;
  std::set<std::string> names;
  for (const weight_result& one : factorize_onnx(folder / "lm.onnx", folder / "low.onnx", policy).tensors) {
    if (one.factorized) names.insert(one.name);
  }
  CHECK(names == std::set<std::string>{"rnn.0.weight_ih", "rnn.1.weight_ih"});
  auto net = make_transformer<float>(
      {.vocabulary = 40, .width = 32, .hidden = 64, .layers = 1, .heads = 4, .key = 8, .value = 8});
  give_values(net, 3);
  write_onnx(folder / "net.onnx", net);
  std::size_t count = 0;
  for (const weight_result& one : factorize_onnx(folder / "net.onnx", folder / "low.onnx", policy).tensors) {
    count += one.factorized ? 1 : 0;
  }
  CHECK(count == 4 + 2 + 8 + 2);
}

}  // namespace
