// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Rows of a table by token, and its gradient, on the device against the CPU's; the layers of dense and
// low-rank tables, alone and tied to an output.
#include "support.hpp"

#include <pufferfish/gpu.hpp>
#include <pufferfish/nn/layers/embedding.hpp>
#include <pufferfish/nn/model.hpp>

using namespace gpu_test;

namespace {

// Tokens as words come: few of them often.
twin<std::int32_t> skewed_tokens(index_t count, index_t vocabulary, std::uint64_t stream) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  const pf::random_stream random(3, stream);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const double u = random.uniform(i);
    tokens[i] = static_cast<std::int32_t>(u * u * u * static_cast<double>(vocabulary));
  }
  return twin<std::int32_t>(std::move(tokens));
}

struct table_case {
  index_t vocabulary, width, tokens, gap;
};
constexpr table_case cases[] = {{1, 1, 0, 0},    {1, 3, 1, 0},      {1, 4, 100, 0},    {7, 5, 33, 1},
                                {50, 12, 64, 0}, {300, 33, 700, 3}, {40, 600, 513, 0}, {90, 64, 1000, 8}};

}  // namespace

TEST_CASE("gpu embedding: rows of a table and the sums of their gradients") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  std::uint64_t stream = 0;
  for (const table_case& c : cases) {
    CAPTURE(c.vocabulary);
    CAPTURE(c.tokens);
    const index_t step = c.width + c.gap;
    auto table = random_twin<float>(c.vocabulary * step, ++stream);
    auto y = random_twin<float>(c.tokens * step, ++stream);
    auto tokens = skewed_tokens(c.tokens, c.vocabulary, ++stream);
    const auto view = [&](float* data, index_t rows) {
      return pf::tensor_view<float, 2>(data, {rows, c.width}, {step, 1});
    };
    pf::ops::embedding_forward<float>(host, view(table.host_data(), c.vocabulary), tokens.host_span(),
                                      view(y.host_data(), c.tokens));
    pf::ops::embedding_forward<float>(ctx, view(table.device_data(), c.vocabulary), tokens.device_span(),
                                      view(y.device_data(), c.tokens));
    CHECK(y.fetched() == y.host());
    for (const std::int32_t padding : {pf::no_token, std::int32_t{0}, std::int32_t{2}}) {
      for (const bool add : {false, true}) {
        pf::ops::embedding_backward<float>(host, tokens.host_span(), view(y.host_data(), c.tokens), padding,
                                           view(table.host_data(), c.vocabulary), add);
        pf::ops::embedding_backward<float>(ctx, tokens.device_span(), view(y.device_data(), c.tokens),
                                           padding, view(table.device_data(), c.vocabulary), add);
        CHECK(difference(table, 1.0) < 1e-5);
      }
    }
  }
}

TEST_CASE("gpu embedding: unaligned tables, tokens out of range, shapes that do not fit") {
  pf::gpu_context& ctx = gpu_context();
  constexpr index_t vocabulary = 6, width = 8;
  auto table = random_twin<float>(vocabulary * width + 1, 1);
  const pf::tensor_view<float, 2> its(table.device_data() + 1, {vocabulary, width});
  twin<std::int32_t> tokens(std::vector<std::int32_t>{5, -1, 6, 2});
  twin<float> y(4 * width);
  pf::ops::embedding_forward<float>(ctx, its, tokens.device_span(), y.device_view<2>({4, width}));
  const std::vector<float> found = y.fetched();
  for (std::size_t i = 0; i < width; ++i) {
    CHECK(found[i] == table.host()[1 + 5 * width + i]);
    CHECK(std::isnan(found[width + i]));
    CHECK(std::isnan(found[2 * width + i]));
    CHECK(found[3 * width + i] == table.host()[1 + 2 * width + i]);
  }
  auto dy = random_twin<float>(4 * width, 2);
  twin<float> gradient(vocabulary * width, NAN);
  pf::ops::embedding_backward<float>(ctx, tokens.device_span(), dy.device_view<2>({4, width}), pf::no_token,
                                     gradient.device_view<2>({vocabulary, width}), false);
  for (index_t v = 0; v < vocabulary; ++v) {
    for (index_t i = 0; i < width; ++i) {
      const index_t row = v == 5 ? 0 : 3;
      gradient.host()[static_cast<std::size_t>(v * width + i)] =
          v == 5 || v == 2 ? dy.host()[static_cast<std::size_t>(row * width + i)] : 0.0F;
    }
  }
  CHECK(gradient.fetched() == gradient.host());
  CHECK_THROWS_AS(
      pf::ops::embedding_forward<float>(ctx, its, tokens.device_span(), y.device_view<2>({2, 2 * width})),
      pf::shape_error);
}

namespace {

// A model of one embedding, for its arenas.
template <class Device>
struct table_root {
  using value_type = float;
  pf::any_layer<float, Device> table;
  void visit_state(pf::state_visitor<float>& visitor, const std::string& prefix = {}) {
    table.visit_state(visitor, prefix);
  }
  void visit_layers(pf::layer_visitor<float, Device>& visitor, const std::string& = {}) {
    visitor.on_embedding("table", table);
  }
  void initialize(pf::random_stream random) { table.initialize(random); }
};

// A lookup and a tied output of given gradients: rows, what the output multiplies, dh, all gradients.
template <class Layer>
void check_layer(Layer layer, index_t count, std::uint64_t stream) {
  CAPTURE(layer.describe());
  CAPTURE(count);
  layer.initialize({1, stream});
  layer.tie(2);
  pf::model<table_root<pf::device::cpu>> host_net(table_root<pf::device::cpu>{layer});
  pf::model<table_root<pf::device::gpu>, pf::device::gpu> net(table_root<pf::device::gpu>{layer});
  pf::cpu_context host;
  pf::gpu_context& ctx = gpu_context();
  host.set_mode(pf::run_mode::training);
  const pf::mode_scope<pf::device::gpu> training(ctx, pf::run_mode::training);

  const pf::extents<2> rows{count, layer.width()};
  auto tokens = skewed_tokens(count, layer.vocabulary(), ++stream);
  twin<float> y(count * layer.width()), dh(count * layer.width());
  auto h = random_twin<float>(count * layer.width(), ++stream), dy = random_twin<float>(y.size(), ++stream);
  auto dz = random_twin<float>(count * layer.vocabulary(), ++stream);
  const pf::extents<2> logits{count, layer.vocabulary()};
  twin<float> u(count * layer.rows().extent(1));
  const auto pass = [&](auto& context, const auto& root, auto&& of, const auto& its_tokens,
                        const auto& copy_u) {
    const auto& table = *root.table.tokens();
    table.forward(context, its_tokens, of(y, rows));
    pf::scratch_frame frame(context.scratch());
    const pf::tensor_view<const float, 2> products = table.output_rows(context, frame, of(h, rows));
    copy_u(products);
    const pf::tensor_view<float, 2> drows = table.output_row_gradient(frame, of(dh, rows));
    pf::ops::wide_product<float>(context, of(dz, logits), table.rows(), drows);
    pf::ops::wide_backward_weight<float>(context, of(dz, logits), products, table.weight_gradient(),
                                         table.table().accumulate());
    table.output_backward(context, of(h, rows), drows, of(dh, rows));
    table.backward(context, of(dy, rows));
    CHECK(context.tape().empty());
  };
  pass(
      host, host_net.root(), [](auto& t, const pf::extents<2>& shape) { return t.host_view(shape); },
      tokens.host_span(),
      [&](const auto& products) { std::copy_n(products.data(), products.size(), u.host_data()); });
  std::vector<float> found(u.host().size());
  pass(
      ctx, net.root(), [](auto& t, const pf::extents<2>& shape) { return t.device_view(shape); },
      tokens.device_span(),
      [&](const auto& products) {
        pf::gpu::device_memory().to_host(found.data(), products.data(), found.size() * sizeof(float));
      });
  CHECK(difference(std::span<const float>(found), std::span<const float>(u.host())) < 1e-5);
  CHECK(difference(y) < 1e-5);
  CHECK(difference(dh) < 1e-5);
  std::vector<float> gradients(host_net.store().gradients().size());
  pf::gpu::device_memory().to_host(gradients.data(), net.store().gradients().data(),
                                   gradients.size() * sizeof(float));
  CHECK(difference(std::span<const float>(gradients), std::span<const float>(host_net.store().gradients()),
                   0.1) < 1e-4);
}

}  // namespace

TEST_CASE("gpu embedding: dense and low-rank layers, alone and tied, with and without padding") {
  std::uint64_t stream = 100;
  for (const index_t count : {0, 1, 33, 200}) {
    for (const std::int32_t padding : {pf::no_token, std::int32_t{0}}) {
      check_layer(pf::Embedding<float>(50, 12, padding), count, stream += 10);
      check_layer(pf::LowRankEmbedding<float>(50, 12, 5, padding), count, stream += 10);
      check_layer(pf::LowRankEmbedding<float, 7>(23, 9, padding), count, stream += 10);
    }
  }
  check_layer(pf::LowRankEmbedding<float>(1, 1, 1), 3, stream);
}

TEST_CASE("gpu embedding: a token out of range makes the row of a low-rank embedding NaN") {
  pf::LowRankEmbedding<float> layer(6, 8, 3);
  layer.initialize({1, 1});
  pf::model<table_root<pf::device::gpu>, pf::device::gpu> net(table_root<pf::device::gpu>{layer});
  twin<std::int32_t> tokens(std::vector<std::int32_t>{5, 6, 2});
  twin<float> y(3 * 8);
  net.root().table.tokens()->forward(gpu_context(), tokens.device_span(), y.device_view<2>({3, 8}));
  const std::vector<float> found = y.fetched();
  for (std::size_t i = 0; i < found.size(); ++i) CHECK(std::isnan(found[i]) == (i / 8 == 1));
}
