// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Rows of a table by token, and its gradient, on the device against the CPU's.
#include "support.hpp"

#include <pufferfish/gpu/embedding.hpp>

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
