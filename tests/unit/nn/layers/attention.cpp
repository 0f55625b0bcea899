// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/layers/attention.hpp>
#include <pufferfish/nn/layers/feed_forward.hpp>
#include <pufferfish/nn/layers/positional_encoding.hpp>
#include <pufferfish/nn/model.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

attention_options small_attention(double dropout) {
  attention_options options;
  options.shape = {6, 2, 3, 4};
  options.dropout = dropout;
  options.attention_dropout = dropout;
  return options;
}

/// Name and layout of each parameter.
template <class Layer>
std::vector<std::string> names_of(Layer& layer) {
  std::vector<std::string> names;
  detail::for_each_parameter(
      layer, [&](const std::string& name, auto& p) { names.push_back(name + " " + to_string(p.layout())); });
  return names;
}

/// A block in the way gradient_check sees layers, for attention with a memory and masks.
template <class Block>
struct tested {
  using value_type = typename Block::value_type;
  using T = value_type;
  Block block;
  std::vector<index_t> first{}, count{}, key_first{}, key_count{};
  tensor<T, 2> memory{};
  bool causal = false, from_memory = false, numbered = false;
  std::vector<std::uint64_t> numbers{};

  std::string describe() const { return block.describe(); }
  extents<4> output_shape(const extents<4>& input) const { return input; }
  void forward(cpu_context& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    if constexpr (requires { block.shape(); }) {
      if (!first.empty()) {
        const auto rows = static_cast<index_t>(first.size());
        const attention_batch batch{
            {rows, first.data(), count.data()}, {rows, key_first.data(), key_count.data()}, {causal, {}}};
        const auto flat = detail::rows_of(x);
        return block.forward(ctx, flat, from_memory ? tensor_view<const T, 2>(memory) : flat, batch,
                             detail::rows_of(y), numbers.empty() ? nullptr : numbers.data());
      }
    }
    block.forward(ctx, x, y);
  }
  void backward(cpu_context& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    if (first.empty()) return block.backward(ctx, dy, dx);
    const auto wanted = dx.is_null() ? tensor_view<T, 2>() : detail::rows_of(dx);
    if constexpr (requires { block.shape(); }) block.backward(ctx, detail::rows_of(dy), wanted);
  }
  void visit_state(state_visitor<T>& visitor, const std::string& prefix) {
    block.visit_state(visitor, prefix);
  }
};

template <class T>
tested<MultiHeadAttention<T>> make_attention(double dropout, index_t rank) {
  tested<MultiHeadAttention<T>> result{MultiHeadAttention<T>(small_attention(dropout))};
  struct replacer final : layer_visitor<T, device::cpu> {
    void on_layer(const std::string&, any_layer<T>& slot) override { slot = slot.twin({rank}); }
    index_t rank = 0;
  } visitor;
  visitor.rank = rank;
  if (rank > 0) result.block.visit_layers(visitor, "");
  return result;
}

template <class T>
tested<FeedForward<T>> make_feed_forward(double dropout) {
  feed_forward_options options;
  options.model = 5;
  options.hidden = 9;
  options.dropout = dropout;
  return {FeedForward<T>(options)};
}

TEST_CASE("MultiHeadAttention: gradients, contract, threads; dense and low rank") {
  for (double dropout : {0.0, 0.3}) {
    for (index_t rank : {0, 2}) {
      auto layer = make_attention<double>(dropout, rank);
      CHECK(gradient_error(layer, {2, 4, 1, 6}) < gradient_tolerance);
      check_contract(layer, {3, 2, 2, 6});
      // Sequences of different lengths, one of them empty, causal.
      layer.first = layer.key_first = {0, 3, 3};
      layer.count = layer.key_count = {3, 0, 4};
      layer.causal = true;
      layer.numbers = {5, 6, 7, 100, 101, 102, 103};
      CHECK(gradient_error(layer, {7, 1, 1, 6}) < gradient_tolerance);
      // Cross attention to a memory, of which a part is padding.
      layer.causal = false;
      layer.from_memory = true;
      layer.memory = tensor<double, 2>({9, 6});
      fill_normal<double>(layer.memory.flat(), 1.0, {4, 4});
      layer.key_first = {0, 4, 5};
      layer.key_count = {2, 1, 0};
      CHECK(gradient_error(layer, {7, 1, 1, 6}) < gradient_tolerance);
      check_contract(layer, {7, 1, 1, 6});
    }
  }
  check_contract(make_attention<float>(0.1, 0), {0, 4, 1, 6});
  check_contract(make_attention<float>(0.1, 0), {2, 0, 1, 6});
  check_contract(make_attention<float>(0.1, 0), {1, 1, 1, 6});
  check_threads(make_attention<float>(0.1, 3), {40, 21, 1, 6});
}

TEST_CASE("MultiHeadAttention: the gradient of the memory, written and added") {
  auto layer = make_attention<double>(0.2, 0);
  layer.block.initialize({1, 1});
  const std::vector<index_t> first{0, 2}, count{2, 3}, key_first{0, 4}, key_count{3, 2};
  const attention_batch batch{{2, first.data(), count.data()}, {2, key_first.data(), key_count.data()}, {}};
  tensor<double, 2> x({5, 6}), memory({6, 6}), y({5, 6}), weights({5, 6}), dx({5, 6}), dmemory({6, 6});
  fill_normal<double>(x.flat(), 1.0, {2, 1});
  fill_normal<double>(memory.flat(), 1.0, {2, 2});
  fill_normal<double>(weights.flat(), 1.0, {2, 3});
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  const auto value = [&] {
    ctx.begin_step(1);
    layer.block.forward(ctx, x, memory, batch, y);
    double sum = 0.0;
    for (std::size_t i = 0; i < y.flat().size(); ++i) sum += y.flat()[i] * weights.flat()[i];
    return sum;
  };
  value();
  layer.block.backward(ctx, weights, dx, dmemory);
  for (std::size_t i = 0; i < memory.flat().size(); ++i) {
    const double kept = memory.flat()[i];
    memory.flat()[i] = kept + 1e-5;
    const double above = value();
    memory.flat()[i] = kept - 1e-5;
    const double below = value();
    memory.flat()[i] = kept;
    CHECK(dmemory.flat()[i] == doctest::Approx((above - below) / 2e-5).epsilon(1e-7));
  }
  tensor<double, 2> sum = dmemory;
  value();
  layer.block.backward(ctx, weights, {}, sum, true);
  for (std::size_t i = 0; i < sum.flat().size(); ++i) {
    CHECK(sum.flat()[i] == doctest::Approx(2 * dmemory.flat()[i]).epsilon(1e-12));
  }
  CHECK(ctx.tape().empty());
}

TEST_CASE("MultiHeadAttention: low rank at full rank gives the dense block's numbers") {
  auto layer = make_attention<double>(0.0, 0);
  layer.block.initialize({3, 3});
  auto low = layer;
  struct factorizer final : layer_visitor<double, device::cpu> {
    void on_layer(const std::string& name, any_layer<double>& slot) override {
      const auto weights = slot.weights(name);
      slot = detail::with_factors(
          slot, weights,
          detail::factorize_weights(weights, std::array{rank_policy(fixed_rank{6})}, {name, true}));
    }
  } visitor;
  low.block.visit_layers(visitor, "");
  CHECK(names_of(low.block).size() == 10);
  cpu_context ctx;
  tensor<double, 4> x({2, 5, 1, 6}), y(x.shape()), y2(x.shape());
  fill_normal<double>(x.flat(), 1.0, {1, 1});
  layer.block.forward(ctx, x, y);
  low.block.forward(ctx, x, y2);
  CHECK(largest_error(y2, y) < 1e-12);
}

TEST_CASE("MultiHeadAttention: names, macs, errors") {
  MultiHeadAttention<float> layer(small_attention(0.1));
  CHECK(names_of(layer) == std::vector<std::string>{"w_qs.weight [6 x 6]", "w_ks.weight [6 x 6]",
                                                    "w_vs.weight [8 x 6]", "fc.weight [6 x 8]",
                                                    "layer_norm.weight [6]", "layer_norm.bias [6]"});
  CHECK(layer.describe() == "MultiHeadAttention width 6, 2 heads of 3 and 4");
  CHECK(layer.macs(3, 5) == 3 * 36 + 5 * 36 + 5 * 48 + 3 * 48 + 3 * 5 * 14);
  CHECK(layer.macs(extents<4>{2, 3, 1, 6}) == 2 * layer.macs(3, 3));
  CHECK_THROWS_AS(MultiHeadAttention<float>(small_attention(1.0)), value_error);
  attention_options bad = small_attention(0.0);
  bad.shape.heads = 0;
  CHECK_THROWS_AS(MultiHeadAttention<float>{bad}, shape_error);
  cpu_context ctx;
  tensor<float, 4> x({2, 3, 1, 5}), y(x.shape()), z({2, 3, 1, 6});
  CHECK(contains(error_text([&] { layer.forward(ctx, x, y); }), "[2 x 3 x 1 x 5]"));
  CHECK_THROWS_AS(layer.backward(ctx, z, z), state_error);
  ctx.set_mode(run_mode::training);
  tensor<float, 2> rows({2, 6}), keys({2, 6}), values({2, 8});
  CHECK_THROWS_AS(layer.project(ctx, rows, keys, values), state_error);
}

TEST_CASE("MultiHeadAttention: token by token with a cache, reordered on the way, as in one pass") {
  MultiHeadAttention<double> layer(small_attention(0.1));
  layer.initialize({7, 7});
  cpu_context ctx({2, 0});
  const index_t tokens = 6;
  // Histories of three rows; new row i continues old row parents[t][i].
  const std::vector<std::vector<std::int32_t>> parents{{0, 1, 2}, {0, 0, 1}, {2, 1, 0}, {1, 1}, {0, 1, 0, 1}};
  std::vector<std::vector<std::vector<double>>> history(3);
  key_value_cache<double> cache(4, tokens, 6, 8);
  cache.start(3);
  std::uint64_t made = 0;
  for (index_t t = 0; t < tokens; ++t) {
    if (t > 0) {
      const auto& from = parents[static_cast<std::size_t>(t - 1)];
      cache.reorder(ctx, from);
      std::vector<std::vector<std::vector<double>>> next;
      for (const std::int32_t parent : from) next.push_back(history[static_cast<std::size_t>(parent)]);
      history = next;
    }
    const auto rows = static_cast<index_t>(history.size());
    tensor<double, 2> x({rows, 6}), y({rows, 6});
    fill_normal<double>(x.flat(), 1.0, {8, ++made});
    for (index_t i = 0; i < rows; ++i) {
      history[static_cast<std::size_t>(i)].emplace_back(x.data() + i * 6, x.data() + (i + 1) * 6);
    }
    layer.step(ctx, x, cache, y.view());
    CHECK(cache.length() == t + 1);
    for (index_t i = 0; i < rows; ++i) {
      tensor<double, 2> whole({t + 1, 6}), expected({t + 1, 6});
      for (index_t p = 0; p <= t; ++p) {
        const auto& token = history[static_cast<std::size_t>(i)][static_cast<std::size_t>(p)];
        std::copy(token.begin(), token.end(), whole.data() + p * 6);
      }
      const index_t first = 0, count = t + 1;
      const token_runs runs{1, &first, &count};
      layer.forward(ctx, whole, whole, {runs, runs, {true, {}}}, expected.view());
      for (index_t c = 0; c < 6; ++c) CHECK(y(i, c) == doctest::Approx(expected(t, c)).epsilon(1e-12));
    }
  }
  tensor<double, 2> x({4, 6}), y({4, 6});
  CHECK(contains(error_text([&] { layer.step(ctx, x, cache, y.view()); }), "token 7 of 6"));
  const tensor_view<const double, 2> strided(x.data(), {4, 6}, {1, 4});
  CHECK(contains(error_text([&] { layer.step(ctx, strided, cache, y.view()); }), ": x [4 x 6] has strides"));
  using cache_type = key_value_cache<double>;
  CHECK_THROWS_WITH_AS(cache_type(-3, 4, 4, 4), doctest::Contains("-3 rows of 4 tokens"), shape_error);
  CHECK_THROWS_AS(cache_type(2, 0, 4, 4), shape_error);
  CHECK_THROWS_AS(cache_type(2, 4, 0, 4), shape_error);
  CHECK_THROWS_AS(cache_type(2, 4, 4, -1), shape_error);
  CHECK_THROWS_AS(cache.start(5), shape_error);
  CHECK_THROWS_AS(cache.start(-1), shape_error);
  CHECK_THROWS_AS(cache.reorder(ctx, std::vector<std::int32_t>{4}), shape_error);
  CHECK_THROWS_AS(cache.reorder(ctx, std::vector<std::int32_t>{-1}), shape_error);
  CHECK_THROWS_AS(cache.reorder(ctx, std::vector<std::int32_t>{0, 0, 0, 0, 0}), shape_error);
}

TEST_CASE("FeedForward: gradients, contract, threads, names, errors") {
  for (double dropout : {0.0, 0.3}) {
    CHECK(gradient_error(make_feed_forward<double>(dropout), {2, 3, 1, 5}) < gradient_tolerance);
    check_contract(make_feed_forward<double>(dropout), {2, 3, 1, 5});
    check_contract(make_feed_forward<float>(dropout), {0, 3, 1, 5});
    check_threads(make_feed_forward<float>(dropout), {40, 40, 1, 5});
  }
  auto layer = make_feed_forward<float>(0.1);
  CHECK(names_of(layer.block) == std::vector<std::string>{"w_1.weight [9 x 5]", "w_1.bias [9]",
                                                          "w_2.weight [5 x 9]", "w_2.bias [5]",
                                                          "layer_norm.weight [5]", "layer_norm.bias [5]"});
  CHECK(layer.block.macs({2, 3, 1, 5}) == 2 * 3 * 90);
  cpu_context ctx;
  tensor<float, 4> x({2, 3, 1, 4}), y(x.shape());
  CHECK(contains(error_text([&] { layer.block.forward(ctx, x, y); }), "FeedForward 5 -> 9 -> 5"));
  CHECK_THROWS_AS(make_feed_forward<float>(1.0), value_error);
  feed_forward_options bad;
  bad.hidden = 0;
  CHECK_THROWS_AS(FeedForward<float>{bad}, shape_error);
}

TEST_CASE("PositionalEncoding: the table, addition, sequences that are too long") {
  const PositionalEncoding<double> encoding(6, 50);
  CHECK(encoding.table()(0, 0) == 0.0);
  CHECK(encoding.table()(0, 1) == 1.0);
  CHECK(encoding.table()(3, 0) == doctest::Approx(std::sin(3.0)));
  CHECK(encoding.table()(3, 3) == doctest::Approx(std::cos(3.0 / std::pow(10000.0, 2.0 / 6.0))));
  CHECK(encoding.table()(49, 4) == doctest::Approx(std::sin(49.0 / std::pow(10000.0, 4.0 / 6.0))));
  CHECK(gradient_error(encoding, {2, 3, 1, 6}) < gradient_tolerance);
  check_contract(encoding, {2, 3, 1, 6});
  check_threads(PositionalEncoding<float>(33), {3, 199, 1, 33});
  cpu_context ctx;
  tensor<double, 4> x({2, 3, 1, 6}), y(x.shape());
  fill_normal<double>(x.flat(), 1.0, {1, 1});
  encoding.forward(ctx, x, y);
  tensor<double, 2> rows({6, 6});
  std::copy(x.flat().begin(), x.flat().end(), rows.flat().begin());
  const std::int32_t positions[] = {0, 1, 2, 0, 1, 2};
  encoding.add(ctx, positions, rows);
  for (std::size_t i = 0; i < 36; ++i) CHECK(rows.flat()[i] == y.flat()[i]);
  CHECK(y(1, 2, 0, 5) == x(1, 2, 0, 5) + encoding.table()(2, 5));
  const std::string text = error_text([&] { static_cast<void>(encoding.output_shape({1, 51, 1, 6})); });
  CHECK(contains(text, "50 positions"));
  CHECK(contains(text, "51 tokens"));
  CHECK_THROWS_AS(static_cast<void>(encoding.output_shape({1, 5, 1, 7})), shape_error);
  tensor<double, 2> narrow({6, 5}), wide({6, 7});
  CHECK(contains(error_text([&] { encoding.add(ctx, positions, wide); }),
                 "width 6: x [6 x 7] has vectors of 7"));
  CHECK_THROWS_AS(encoding.add(ctx, positions, narrow), shape_error);
  CHECK_THROWS_AS(PositionalEncoding<float>(0), shape_error);
  CHECK_THROWS_AS(PositionalEncoding<float>(4, 0), shape_error);
}

}  // namespace
