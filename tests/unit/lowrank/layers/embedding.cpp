// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/lowrank/layers/embedding.hpp>

#include <pufferfish/nn/containers/any_layer.hpp>
#include <pufferfish/nn/layers/embedding.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

std::vector<std::int32_t> random_tokens(picker& pick, index_t count, index_t vocabulary) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  for (auto& token : tokens) token = static_cast<std::int32_t>(pick(0, vocabulary - 1));
  return tokens;
}

/// The dense embedding of the same table.
template <class T>
Embedding<T> dense_twin(const detail::low_rank_embedding<T>& layer) {
  Embedding<T> dense(layer.vocabulary(), layer.width(), layer.padding());
  copy(tensor_view<const T, 2>(layer.to_dense()), dense.weight());
  return dense;
}

template <class T>
std::vector<T> gradients_of(detail::low_rank_embedding<T>& layer) {
  std::vector<T> all;
  layer.visit([&](const char*, auto& p) { all.insert(all.end(), p.gradient().begin(), p.gradient().end()); });
  return all;
}

TEST_CASE_TEMPLATE("LowRankEmbedding: rows and tied logits against the dense table, over random shapes", T,
                   float, double) {
  const double tolerance = sizeof(T) == 4 ? 2e-5 : 1e-12;
  cpu_context ctx({2, 0});
  picker pick(1);
  for (std::uint64_t round = 0; round < 60; ++round) {
    const index_t vocabulary = pick(1, 60), width = pick(1, round % 6 == 0 ? 300 : 20), count = pick(0, 40);
    LowRankEmbedding<T> layer(vocabulary, width, pick(1, std::min(vocabulary, width)));
    layer.initialize({1, round});
    const tensor<T, 2> table = layer.to_dense();
    REQUIRE(table.shape() == extents<2>{vocabulary, width});
    const auto tokens = random_tokens(pick, count, vocabulary);
    tensor<T, 2> y({count, width}), expected(y.shape());
    ctx.set_mode(round % 2 == 0 ? run_mode::training : run_mode::inference);
    layer.forward(ctx, tokens, y);
    ops::reference::embedding_forward<T>(table, tokens, expected.view());
    CHECK(largest_error(y, expected) < tolerance);
    if (ctx.training()) layer.backward(ctx, y);

    tensor<T, 2> h(y.shape()), logits({count, vocabulary}), dense_logits(logits.shape());
    fill_normal<T>(h.flat(), 1.0, {2, round});
    scratch_frame frame(ctx.scratch());
    const tensor_view<const T, 2> u = layer.output_rows(ctx, frame, h);
    REQUIRE(u.shape() == extents<2>{count, layer.rank()});
    REQUIRE(layer.rows().shape() == extents<2>{vocabulary, layer.rank()});
    reference_gemm{}.multiply<T>(u, transpose(layer.rows()), logits.view());
    reference_gemm{}.multiply<T>(h.view(), transpose(table.view()), dense_logits.view());
    CHECK(largest_error(logits, dense_logits) < 10 * tolerance);
    if (ctx.training()) layer.output_backward(ctx, h, layer.output_row_gradient(frame, y.view()), y.view());
    CHECK(ctx.tape().empty());
  }
}

/// sum_i a_i y_i, and of a tied output sum b_nv z_nv with z = h W^T.
struct objective {
  const std::vector<std::int32_t> tokens;
  tensor<double, 2> a, h, b;

  double operator()(cpu_context& ctx, const LowRankEmbedding<double>& layer, bool tied) const {
    tensor<double, 2> y(a.shape());
    layer.forward(ctx, tokens, y);
    double sum = 0.0;
    for (std::size_t i = 0; i < y.flat().size(); ++i) sum += a.flat()[i] * y.flat()[i];
    if (!tied) return sum;
    scratch_frame frame(ctx.scratch());
    const auto u = layer.output_rows(ctx, frame, h);
    tensor<double, 2> z(b.shape());
    reference_gemm{}.multiply<double>(u, transpose(layer.rows()), z.view());
    for (std::size_t i = 0; i < z.flat().size(); ++i) sum += b.flat()[i] * z.flat()[i];
    return sum;
  }
};

TEST_CASE("LowRankEmbedding: gradients against differences, alone and tied, with and without padding") {
  picker pick(3);
  for (std::uint64_t round = 0; round < 12; ++round) {
    const bool tied = round % 2 == 0;
    const index_t vocabulary = pick(2, 9), width = pick(1, 7), count = round < 2 ? 1 : pick(1, 12);
    const std::int32_t padding = round % 3 == 0 ? 1 : no_token;
    LowRankEmbedding<double> layer(vocabulary, width, pick(1, std::min(vocabulary, width)), padding);
    layer.initialize({1, round});
    objective value{random_tokens(pick, count, vocabulary), tensor<double, 2>({count, width}),
                    tensor<double, 2>({5, width}), tensor<double, 2>({5, vocabulary})};
    fill_normal<double>(value.a.flat(), 1.0, {2, round});
    fill_normal<double>(value.h.flat(), 1.0, {3, round});
    fill_normal<double>(value.b.flat(), 1.0, {4, round});
    layer.tie(tied ? 2 : 1);

    cpu_context ctx({2, 0});
    ctx.set_mode(run_mode::training);
    value(ctx, layer, tied);
    tensor<double, 2> dh(value.h.shape());
    if (tied) {
      scratch_frame frame(ctx.scratch());
      const tensor_view<double, 2> drows = layer.output_row_gradient(frame, dh);
      // u is on the tape until output_backward.
      cpu_context other;
      const auto u = layer.output_rows(other, frame, value.h);
      reference_gemm{}.multiply<double>(value.b.view(), layer.rows(), drows);
      reference_gemm{}.multiply<double>(transpose(tensor_view<const double, 2>(value.b)), u,
                                        layer.weight_gradient(), layer.table().accumulate());
      layer.output_backward(ctx, value.h, drows, dh);
    }
    layer.backward(ctx, value.a);
    CHECK(ctx.tape().empty());

    ctx.set_mode(run_mode::inference);
    const auto now = [&] { return value(ctx, layer, tied); };
    layer.visit([&](const char*, parameter<double>& p) {
      const bool table = p.data() == layer.table().data();
      for (index_t i = 0; i < p.size(); ++i) {
        double expected = slope_at(p.data()[i], now);
        if (table && padding != no_token && i / layer.rank() == padding) {
          // Of this row only the tied output's part counts.
          tensor<double, 2> silent = value.a;
          for (std::size_t n = 0; n < value.tokens.size(); ++n) {
            for (index_t d = 0; d < width && value.tokens[n] == padding; ++d)
              silent(static_cast<index_t>(n), d) = 0.0;
          }
          const objective without{value.tokens, silent, value.h, value.b};
          expected = slope_at(p.data()[i], [&] { return without(ctx, layer, tied); });
        }
        CHECK(p.gradient()[static_cast<std::size_t>(i)] == doctest::Approx(expected).epsilon(1e-6));
      }
    });
    for (std::size_t i = 0; tied && i < dh.flat().size(); ++i) {
      CHECK(dh.flat()[i] == doctest::Approx(slope_at(value.h.flat()[i], now)).epsilon(1e-6));
    }
  }
}

TEST_CASE("LowRankEmbedding: the gradient of the dense table, projected on the factors") {
  picker pick(5);
  cpu_context ctx({2, 0});
  ctx.set_mode(run_mode::training);
  for (std::uint64_t round = 0; round < 20; ++round) {
    const index_t vocabulary = pick(1, 40), width = pick(1, 30), count = pick(0, 50);
    LowRankEmbedding<double> layer(vocabulary, width, pick(1, std::min(vocabulary, width)));
    layer.initialize({1, round});
    const Embedding<double> dense = dense_twin(layer);
    const auto tokens = random_tokens(pick, count, vocabulary);
    tensor<double, 2> y({count, width}), dy(y.shape());
    fill_normal<double>(dy.flat(), 1.0, {2, round});
    layer.forward(ctx, tokens, y);
    layer.backward(ctx, dy);
    dense.forward(ctx, tokens, y);
    dense.backward(ctx, dy);
    const tensor_view<const double, 2> dw = dense.weight_gradient();
    tensor<double, 2> ddown(layer.down().shape()), dup(layer.up().shape());
    reference_gemm{}.multiply<double>(dw, tensor_view<const double, 2>(layer.up()), ddown.view());
    reference_gemm{}.multiply<double>(transpose(dw), tensor_view<const double, 2>(layer.down()), dup.view());
    CHECK(largest_error(tensor<double, 2>(layer.weight_gradient()), ddown) < 1e-11);
    tensor<double, 2> up_gradient(dup.shape());
    layer.visit([&](const std::string& name, parameter<double>& p) {
      if (name != "up.weight") return;
      const auto all = p.logical_gradient();
      for (index_t i = 0; i < width; ++i) {
        for (index_t r = 0; r < layer.rank(); ++r) up_gradient(i, r) = all(i, r, 0, 0);
      }
    });
    CHECK(largest_error(up_gradient, dup) < 1e-11);
  }
}

TEST_CASE("LowRankEmbedding: rows of other tokens get zeros, also over what an earlier step left") {
  LowRankEmbedding<float> layer(50, 8, 3, 2);
  layer.initialize({1, 1});
  cpu_context ctx({2, 0});
  ctx.set_mode(run_mode::training);
  tensor<float, 2> y({4, 8});
  for (const std::vector<std::int32_t>& tokens :
       {std::vector<std::int32_t>{7, 8, 9, 2}, std::vector<std::int32_t>{40, 41, 40, 2}}) {
    layer.forward(ctx, tokens, y);
    layer.backward(ctx, y);
    for (std::int32_t v = 0; v < 50; ++v) {
      const bool in_batch = v != 2 && std::find(tokens.begin(), tokens.end(), v) != tokens.end();
      for (index_t r = 0; r < 3; ++r) CHECK((layer.weight_gradient()(v, r) != 0.0F) == in_batch);
    }
  }
  layer.forward(ctx, std::vector<std::int32_t>{}, tensor<float, 2>({0, 8}).view());
  layer.backward(ctx, tensor<float, 2>({0, 8}));
  for (const float value : gradients_of(layer)) CHECK(value == 0.0F);
}

TEST_CASE("LowRankEmbedding: the same bits for any number of threads; two writers add up") {
  picker pick(2);
  const auto tokens = random_tokens(pick, 700, 90);
  const auto run = [&](int threads, int passes) {
    cpu_context ctx({threads, 0});
    ctx.set_mode(run_mode::training);
    LowRankEmbedding<float> layer(90, 130, 33);
    layer.initialize({1, 1});
    layer.tie(passes);
    tensor<float, 2> y({700, 130});
    for (int pass = 0; pass < passes; ++pass) {
      layer.forward(ctx, tokens, y);
      layer.backward(ctx, y);
    }
    std::vector<float> all = gradients_of(layer);
    all.insert(all.end(), y.flat().begin(), y.flat().end());
    return all;
  };
  const std::vector<float> once = run(1, 1), twice = run(1, 2);
  CHECK(same_bits(once, run(2, 1)));
  CHECK(same_bits(once, run(3, 1)));
  CHECK(same_bits(twice, run(3, 2)));
  for (std::size_t i = 0; i < 90 * 33 + 130 * 33; ++i) {
    CHECK(twice[i] == doctest::Approx(2.0 * static_cast<double>(once[i])).epsilon(1e-3));
  }
}

TEST_CASE("LowRankEmbedding: names, sizes, initial values, static ranks, copies") {
  LowRankEmbedding<float> layer(300, 40, 16, 5);
  CHECK(layer.describe() == "LowRankEmbedding 300 -> 16 -> 40");
  CHECK(layer.padding() == 5);
  std::vector<std::string> names;
  layer.visit([&](const char* name, auto& p) { names.push_back(name + (" " + to_string(p.layout()))); });
  CHECK(names == std::vector<std::string>{"down.weight [300 x 16]", "up.weight [40 x 16]"});
  layer.initialize({1, 1});
  double squares = 0.0;
  for (index_t v = 0; v < 300; ++v) {
    for (index_t r = 0; r < 16; ++r) squares += static_cast<double>(layer.down()(v, r) * layer.down()(v, r));
  }
  CHECK(squares / 4800.0 == doctest::Approx(1.0).epsilon(0.06));
  float largest = 0.0F;
  for (index_t d = 0; d < 40; ++d) {
    for (index_t r = 0; r < 16; ++r) largest = std::max(largest, std::abs(layer.up()(d, r)));
  }
  CHECK(largest <= 0.25F);
  CHECK(largest > 0.24F);
  layer.down()(7, 3) = 2.0F;
  CHECK(layer.table().data()[7 * 16 + 3] == 2.0F);
  const LowRankEmbedding<float> copied(layer);
  layer.down()(7, 3) = 1.0F;
  CHECK(copied.down()(7, 3) == 2.0F);
  CHECK(LowRankEmbedding<double, 3>(10, 4).rank() == 3);
  CHECK(LowRankEmbedding<double, 3>(10, 4, 2).padding() == 2);
  static_assert(!std::is_constructible_v<LowRankEmbedding<float>, index_t, index_t>);
}

TEST_CASE("LowRankEmbedding: errors name the layer and both values") {
  LowRankEmbedding<float> layer(10, 4, 2);
  cpu_context ctx;
  tensor<float, 2> y({3, 4}), odd({3, 5});
  const std::vector<std::int32_t> tokens{1, 2, 3};
  const auto text_of = [&](const std::vector<std::int32_t>& given) {
    return error_text([&] { layer.forward(ctx, given, y); });
  };
  CHECK(contains(text_of({1, 2, 10}),
                 "LowRankEmbedding 10 -> 2 -> 4: token 10 at position 2 is not in 0 .. 9"));
  CHECK(contains(text_of({1, -1, 1}), "token -1 at position 1"));
  CHECK(contains(text_of({1, 2}), "LowRankEmbedding 10 -> 2 -> 4: 2 tokens do not fit rows [3 x 4]"));
  CHECK_THROWS_AS(layer.forward(ctx, tokens, odd), shape_error);
  const tensor_view<float, 2> strided(odd.data(), {3, 4}, {5, 1});
  CHECK(contains(error_text([&] { layer.forward(ctx, tokens, strided); }), "y [3 x 4] has strides (5, 1)"));
  CHECK_THROWS_AS(layer.backward(ctx, y), state_error);
  scratch_frame frame(ctx.scratch());
  CHECK(contains(error_text([&] { layer.output_rows(ctx, frame, odd); }),
                 "LowRankEmbedding 10 -> 2 -> 4: rows [3 x 5] of a tied output, not of width 4"));
  tensor<float, 2> rows({3, 2}), few({2, 2});
  CHECK(contains(error_text([&] { layer.output_backward(ctx, y, few, y); }),
                 "LowRankEmbedding 10 -> 2 -> 4: gradients [2 x 2] of the rows and [3 x 4] of h do not fit h "
                 "[3 x 4] and rank 2"));
  CHECK_THROWS_AS(layer.output_backward(ctx, y, rows, odd), shape_error);
  CHECK(contains(error_text([&] { layer.output_backward(ctx, y, rows, strided); }),
                 "dh [3 x 4] has strides (5, 1)"));
  CHECK_THROWS_AS(LowRankEmbedding<float>(0, 4, 1), shape_error);
  CHECK_THROWS_AS(LowRankEmbedding<float>(4, 4, 2, 4), value_error);
  CHECK(contains(error_text([] { LowRankEmbedding<float>(9, 4, 5); }),
                 "LowRankEmbedding 9 x 4: rank 5 of a 4 x 9 matrix; it must be in 1 .. 4"));
  CHECK_THROWS_AS((LowRankEmbedding<float, 5>(9, 4)), rank_error);
  const LowRankEmbedding<float> moved(std::move(layer));
  CHECK(layer.is_moved_from());  // NOLINT(bugprone-use-after-move): the error is the point
  CHECK_THROWS_AS(layer.forward(ctx, tokens, y), state_error);
  CHECK_THROWS_AS(layer.output_rows(ctx, frame, y), state_error);
  CHECK(contains(error_text([&] { layer.output_backward(ctx, y, rows, y); }), "was moved from"));
}

TEST_CASE("any_layer: shows layers of tokens, whose other passes throw") {
  const any_layer<float> dense = Embedding<float>(7, 4), low = LowRankEmbedding<float>(7, 4, 2);
  REQUIRE(dense.tokens() != nullptr);
  REQUIRE(low.tokens() != nullptr);
  CHECK(dense.tokens()->rank() == 0);
  CHECK(dense.tokens()->parameters() == 28);
  CHECK(dense.tokens()->macs() == 0);
  CHECK(low.tokens()->rank() == 2);
  CHECK(low.tokens()->parameters() == 22);
  CHECK(low.tokens()->macs() == 8);
  CHECK(low.tokens()->vocabulary() == 7);
  CHECK(low.tokens()->width() == 4);
  CHECK(low.tokens()->describe() == low.describe());
  cpu_context ctx;
  tensor<float, 4> x({1, 1, 1, 4}), y({1, 1, 1, 4});
  for (const any_layer<float>& layer : {dense, low}) {
    const auto needs_tokens = [&](auto&& call) {
      CHECK_THROWS_AS(call(), state_error);
      CHECK(contains(error_text(call), layer.describe() + ": takes tokens"));
    };
    needs_tokens([&] { layer.output_shape({1, 1, 1, 4}); });
    needs_tokens([&] { layer.forward(ctx, x, y); });
    needs_tokens([&] { layer.backward(ctx, y, x); });
    needs_tokens([&] { layer.forward_fused(ctx, x, y, {}); });
    needs_tokens([&] { layer.backward_fused(ctx, y, x, {}); });
    CHECK(layer.macs({1, 1, 1, 4}) == 0);
  }
  // A slot shows its own layer, also after copies and moves.
  any_layer<float> copied = low;
  CHECK(copied.tokens() != low.tokens());
  const token_layer<float>* const before = copied.tokens();
  const any_layer<float> moved = std::move(copied);
  CHECK(moved.tokens() == before);
  CHECK(moved.tokens()->rows().data() == moved.target<LowRankEmbedding<float>>()->table().data());
}

}  // namespace
