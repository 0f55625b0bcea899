// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Operations of sequence models on bfloat16: results of the same operations on floats with the same values,
// rounded once.
#include "../support/narrow_checks.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/ops/attention/attention.hpp>
#include <pufferfish/ops/elementwise/sequence_dropout.hpp>
#include <pufferfish/ops/embedding/embedding.hpp>
#include <pufferfish/ops/embedding/positions.hpp>
#include <pufferfish/ops/loss/log_sum_exp.hpp>
#include <pufferfish/ops/loss/output_loss.hpp>
#include <pufferfish/ops/norm/layer_norm.hpp>
#include <pufferfish/ops/recurrent/lstm.hpp>
#include <pufferfish/ops/recurrent/step_product.hpp>

#include "../support/gradient_check.hpp"

namespace {
using namespace test;

std::vector<std::int32_t> random_tokens(picker& pick, index_t count, index_t vocabulary) {
  std::vector<std::int32_t> tokens;
  for (index_t i = 0; i < count; ++i) tokens.push_back(static_cast<std::int32_t>(pick(0, vocabulary - 1)));
  return tokens;
}

TEST_CASE("bf16: layer norm, with and without dropout and residual") {
  picker pick(1);
  for (std::uint64_t round = 0; round < 24; ++round) {
    CAPTURE(round);
    const extents<2> shape{pick(0, 140), pick(2, round % 4 == 0 ? 300 : 40)};
    const index_t size = shape[0] * shape[1];
    const bool with_residual = round % 2 == 0, sums = with_residual || round % 3 == 0;
    ops::row_dropout dropout;
    dropout.probability = round % 3 == 0 ? 0.3 : 0.0;
    dropout.random = {7, round};
    dropout.first_row = 17;
    std::vector<float> rounded;  // the sum in bfloat16, from which the float form computes the rest
    compare([&](auto type, cpu_context& ctx) {
      using T = decltype(type);
      const std::vector<T> x = numbers<T>(size, 1), other = numbers<T>(size, 2), dy = numbers<T>(size, 3);
      const std::vector<float> weight = numbers<float>(shape[1], 4), bias = numbers<float>(shape[1], 5);
      const auto residual = with_residual ? view_of(other, shape) : tensor_view<const T, 2>();
      std::vector<T> sum(x.size()), y(x.size()), dsum(x.size()), dx(x.size()), in_place = x;
      std::vector<float> statistics(2 * static_cast<std::size_t>(shape[0])), dweight(weight.size(), 1.0F),
          dbias(bias.size());
      std::vector<typename ops::norm_record<T>::word> mask(
          static_cast<std::size_t>(ops::norm_mask_size<T>(ctx, shape)));
      ops::norm_record<T> record{sums ? sum.data() : x.data(), statistics.data(),
                                 dropout.drops() ? mask.data() : nullptr};
      ops::layer_norm_forward<T>(ctx, {view_of(x, shape), residual, dropout, sums ? sum.data() : nullptr},
                                 weight.data(), bias.data(), 1e-6, view_of(y, shape), record);
      if constexpr (std::is_same_v<T, float>) {
        if (sums) {
          record.sum = rounded.data();
          ops::norm_record<float> of_sum{rounded.data(), statistics.data()};
          ops::layer_norm_forward<float>(ctx, {view_of(std::as_const(rounded), shape), {}, {}, nullptr},
                                         weight.data(), bias.data(), 1e-6, view_of(y, shape), of_sum);
        }
        in_place = y;
      } else {
        rounded.assign(sum.begin(), sum.end());
        // Inference overwrites x and normalizes the same rounded sum.
        ops::layer_norm_forward<T>(ctx, {view_of(std::as_const(in_place), shape), residual, dropout, nullptr},
                                   weight.data(), bias.data(), 1e-6, view_of(in_place, shape), {});
      }
      ops::layer_norm_backward<T>(ctx, record, dropout, weight.data(), view_of(dy, shape),
                                  {dweight.data(), true}, {dbias.data(), false}, view_of(dsum, shape),
                                  view_of(dx, shape));
      return results<T>{{sum, y, in_place, dsum, dx}, {statistics, dweight, dbias}};
    });
  }
}

TEST_CASE("bf16: embeddings and positions") {
  picker pick(2);
  for (const extents<3>& s :
       {extents<3>{0, 5, 4}, extents<3>{9, 1, 1}, extents<3>{40, 7, 33}, extents<3>{70, 300, 530}}) {
    CAPTURE(s[0]);
    const std::vector<std::int32_t> tokens = random_tokens(pick, s[0], s[1]);
    const extents<2> rows{s[0], s[2]}, table{s[1], s[2]};
    compare([&](auto type, cpu_context& ctx) {
      using T = decltype(type);
      const std::vector<T> w = numbers<T>(s[1] * s[2], 1), dy = numbers<T>(s[0] * s[2], 2);
      const std::vector<float> places = numbers<float>(s[1] * s[2], 3);
      std::vector<T> y(dy.size()), placed = dy, in_turn(dy.size());
      std::vector<float> dw(w.size()), added = numbers<float>(s[1] * s[2], 4);
      ops::embedding_forward<T>(ctx, view_of(w, table), tokens, view_of(y, rows));
      ops::embedding_backward<T>(ctx, tokens, view_of(dy, rows), 0, view_of(dw, table), false);
      ops::embedding_backward<T>(ctx, tokens, view_of(dy, rows), no_token, view_of(added, table), true);
      ops::add_positions<T>(ctx, view_of(places, table), tokens.data(), view_of(placed, rows));
      ops::add_positions_in_turn<T>(ctx, view_of(places, table), s[1], view_of(dy, rows),
                                    view_of(in_turn, rows));
      return results<T>{{y, placed, in_turn}, {dw, added}};
    });
  }
}

TEST_CASE("bf16: dropout of sequences") {
  for (const index_t width : {1, 16, 37, 1500}) {
    const extents<2> rows{4 * 3, width};
    compare([&](auto type, cpu_context& ctx) {
      using T = decltype(type);
      const std::vector<T> x = numbers<T>(12 * width, 1);
      std::vector<T> y(x.size());
      ops::sequence_dropout<T>(ctx, view_of(x, rows), {{1, 2}, 0.4, 4, 3, 5}, view_of(y, rows));
      return results<T>{{y}, {}};
    });
  }
}

TEST_CASE("bf16: token loss and the logarithm of a sum of exponentials") {
  picker pick(3);
  for (const extents<2>& shape :
       {extents<2>{0, 5}, extents<2>{1, 1}, extents<2>{30, 7}, extents<2>{20, 1003}}) {
    CAPTURE(shape[1]);
    const std::vector<std::int32_t> targets = random_tokens(pick, shape[0], shape[1]);
    const token_loss_options options{{0.1, smoothing_kind::wrong_classes}, shape[1] > 5 ? 3 : no_token};
    compare([&](auto type, cpu_context& ctx) {
      using T = decltype(type);
      const std::vector<T> logits = numbers<T>(shape[0] * shape[1], 1);
      std::vector<T> gradient(logits.size()), in_place = logits;
      const token_loss_result loss =
          ops::token_loss<T>(ctx, view_of(logits, shape), targets, options, 3.0, view_of(gradient, shape));
      ops::token_loss<T>(ctx, view_of(std::as_const(in_place), shape), targets, options, 3.0,
                         view_of(in_place, shape));
      std::vector<double> sums(static_cast<std::size_t>(shape[0]));
      ops::log_sum_exp<T>(ctx, view_of(logits, shape), sums);
      return results<T>{{gradient, in_place},
                        {{static_cast<float>(loss.loss_sum), static_cast<float>(loss.tokens)},
                         std::vector<float>(sums.begin(), sums.end())}};
    });
  }
  // A row that forbids everything, and one with a NaN.
  const bfloat16 nothing(-std::numeric_limits<float>::infinity()), nan(std::nanf(""));
  const std::vector<bfloat16> rows{nothing, nothing, nan, bfloat16(1.0F)};
  std::vector<double> sums(2);
  cpu_context ctx({1});
  ops::log_sum_exp<bfloat16>(ctx, view_of(rows, extents<2>{2, 2}), sums);
  CHECK(sums[0] == -std::numeric_limits<double>::infinity());
  CHECK(std::isnan(sums[1]));
}

TEST_CASE("bf16: the output layer and its loss") {
  picker pick(4);
  for (std::uint64_t round = 0; round < 24; ++round) {
    CAPTURE(round);
    const index_t tokens = pick(0, round % 5 == 0 ? 70 : 20),
                  vocabulary = pick(1, round % 5 == 0 ? 2000 : 120);
    const index_t depth = round % 3 == 0 ? pick(1, 60) : 2 * pick(1, 60);  // odd depths are computed in float
    CAPTURE(depth);
    const extents<2> rows{tokens, depth}, table{vocabulary, depth}, matrix{tokens, vocabulary};
    const std::vector<std::int32_t> targets = random_tokens(pick, tokens, vocabulary);
    token_loss_options options;
    options.smoothing.epsilon = round % 2 == 0 ? 0.1 : 0.0;
    options.padding = round % 4 == 0 ? 0 : no_token;
    const bool biased = round % 3 != 1, add = round % 2 == 0;
    const float scale = round % 4 == 1 ? 5.0F : 0.3F;
    std::vector<float> wide[3];  // dx, dweight and dbias of float
    const auto pass = [&](auto type, cpu_context& ctx) {
      using T = decltype(type);
      const std::vector<T> x = numbers<T>(tokens * depth, 1), w = numbers<T>(vocabulary * depth, 2),
                           bias = numbers<T>(vocabulary, 3);
      const ops::output_layer<T> layer{view_of(x, rows), view_of(w, table), biased ? bias.data() : nullptr,
                                       scale};
      std::vector<T> logits(static_cast<std::size_t>(tokens * vocabulary)), dx(x.size());
      std::vector<float> dweight = numbers<float>(vocabulary * depth, 4),
                         dbias = numbers<float>(vocabulary, 5);
      ops::output_logits<T>(ctx, layer, view_of(logits, matrix));
      aligned_buffer<T> kept(ops::output_loss_kept(ctx, layer));
      const auto loss = ops::output_loss_forward<T>(ctx, layer, targets, options, kept.data());
      const auto again = ops::output_loss_forward<T>(ctx, layer, targets, options, nullptr);
      CHECK(again.loss_sum == loss.loss_sum);
      ops::output_loss_backward<T>(
          ctx, layer, targets, options, 3.0, kept.data(),
          {view_of(dx, rows), view_of(dweight, table), add, biased ? dbias.data() : nullptr, add});
      if constexpr (std::is_same_v<T, float>) {
        wide[0] = dx;
        wide[1] = dweight;
        wide[2] = dbias;
      } else if (!wide[0].empty()) {
        CHECK(distance(dx, wide[0]) < 0x1p-6);
        CHECK(distance(dweight, wide[1]) < 0x1p-6);
        CHECK(distance(dbias, wide[2]) < 0x1p-6);
      }
      return results<T>{{logits}, {{static_cast<float>(loss.loss_sum), static_cast<float>(loss.tokens)}}};
    };
    cpu_context one({1}), three({3});
    pass(float{}, one);
    compare(pass);
    // The gradients have the same bits on any number of threads.
    const auto bits = [&](cpu_context& ctx) {
      const std::vector<bfloat16> x = numbers<bfloat16>(tokens * depth, 1),
                                  w = numbers<bfloat16>(vocabulary * depth, 2);
      const ops::output_layer<bfloat16> layer{view_of(x, rows), view_of(w, table), nullptr, scale};
      std::vector<bfloat16> dx(x.size());
      std::vector<float> all(w.size());
      aligned_buffer<bfloat16> kept(ops::output_loss_kept(ctx, layer));
      ops::output_loss_forward<bfloat16>(ctx, layer, targets, options, kept.data());
      ops::output_loss_backward<bfloat16>(ctx, layer, targets, options, 3.0, kept.data(),
                                          {view_of(dx, rows), view_of(all, table)});
      all.insert(all.end(), dx.begin(), dx.end());
      return all;
    };
    CHECK(bits(one) == bits(three));
  }
}

TEST_CASE("bf16: the gradient of an output layer keeps the last part of a probability near 1") {
  // p - 1 of a target whose probability is nearly 1 is not the difference of rounded numbers.
  cpu_context ctx({1});
  const std::vector<bfloat16> x{bfloat16(1.0F), bfloat16(0.0F)};
  const std::vector<bfloat16> w{bfloat16(6.0F), bfloat16(0.0F), bfloat16(0.0F), bfloat16(0.0F)};
  const std::vector<std::int32_t> target{0};
  const ops::output_layer<bfloat16> layer{view_of(x, extents<2>{1, 2}), view_of(w, extents<2>{2, 2})};
  aligned_buffer<bfloat16> kept(ops::output_loss_kept(ctx, layer));
  std::vector<bfloat16> dx(2);
  std::vector<float> dw(4);
  ops::output_loss_forward<bfloat16>(ctx, layer, target, {}, kept.data());
  ops::output_loss_backward<bfloat16>(ctx, layer, target, {}, 1.0, kept.data(),
                                      {view_of(dx, extents<2>{1, 2}), view_of(dw, extents<2>{2, 2})});
  const double rest = 1.0 / (1.0 + std::exp(6.0));
  CHECK(std::abs(static_cast<double>(dw[0]) / rest + 1.0) < 0.01);
  CHECK(std::abs(static_cast<double>(dw[2]) / rest - 1.0) < 0.01);
}

TEST_CASE("bf16: attention over random sequences and masks, as columns of one matrix") {
  picker pick(5);
  for (std::uint64_t round = 0; round < 24; ++round) {
    CAPTURE(round);
    const bool large = round >= 22;  // whole vectors, and long enough for packed products
    const index_t sequences = large ? 2 : pick(0, 4), longest = large ? 300 : pick(0, 20),
                  heads = large ? 2 : pick(1, 3), depth = large ? 64 : pick(1, 20),
                  value = large ? 128 : pick(1, 20);
    std::vector<index_t> query_first, query_count, key_first, key_count;
    index_t queries = 1, keys = 1;
    for (index_t s = 0; s < sequences; ++s) {
      query_first.push_back(queries);
      query_count.push_back(pick(0, longest));
      key_first.push_back(keys += pick(0, 1));
      key_count.push_back(pick(0, longest));
      queries += query_count.back();
      keys += key_count.back();
    }
    tensor<unsigned char, 3> allowed({sequences, longest, longest});
    for (unsigned char& bit : allowed.flat()) bit = static_cast<unsigned char>(pick(0, 1));
    const index_t of_keys = heads * depth, of_values = heads * value, both = of_keys + of_values;
    compare([&](auto type, cpu_context& ctx) {
      using T = decltype(type);
      const std::vector<T> q = numbers<T>(queries * of_keys, 1), kv = numbers<T>(keys * both, 2),
                           dy = numbers<T>(queries * of_values, 3);
      std::vector<T> y(dy.size()), seen(dy.size()), dq(q.size()), dkv(kv.size());
      const extents<2> of_both{keys, both}, of_query{queries, of_keys}, of_output{queries, of_values};
      ops::attention_input<T> in;
      in.q = view_of(q, of_query);
      in.k = view_of(kv, of_both).slice(1, 0, of_keys);
      in.v = view_of(kv, of_both).slice(1, of_keys, of_values);
      in.queries = {sequences, query_first.data(), query_count.data()};
      in.keys = {sequences, key_first.data(), key_count.data()};
      in.heads = heads;
      in.mask.causal = round % 2 == 0;
      if (round % 3 == 0) in.mask.allowed = allowed;
      in.dropout.probability = round % 5 == 0 ? 0.3 : 0.0;
      in.dropout.random = {5, 6};
      aligned_buffer<float> kept(ops::attention_kept_size(ctx, in));
      ops::attention_forward<T>(ctx, in, view_of(y, of_output), kept.data());
      ops::attention_forward<T>(ctx, in, view_of(seen, of_output), nullptr);
      const tensor_view<T, 2> gradient = view_of(dkv, of_both);
      ops::attention_backward<T>(ctx, in, kept.data(), view_of(dy, of_output), view_of(dq, of_query),
                                 gradient.slice(1, 0, of_keys), gradient.slice(1, of_keys, of_values));
      CHECK(ctx.scratch().in_use() == 0);
      return results<T>{{y, seen, dq, dkv}, {std::vector<float>(kept.data(), kept.data() + kept.size())}};
    });
  }
}

TEST_CASE("bf16: the cell of an LSTM") {
  picker pick(6);
  for (std::uint64_t round = 0; round < 16; ++round) {
    CAPTURE(round);
    const extents<2> shape{pick(0, 9), pick(1, 70)}, wide{shape[0], 4 * shape[1]};
    const index_t size = shape[0] * shape[1];
    const bool first = round % 3 == 0, last = round % 2 == 0;
    compare([&](auto type, cpu_context& ctx) {
      using T = decltype(type);
      const std::vector<T> old = numbers<T>(size, 1), after = numbers<T>(size, 2), dy = numbers<T>(size, 3),
                           dh = numbers<T>(size, 4), dc = numbers<T>(size, 5);
      std::vector<T> gates = numbers<T>(4 * size, 6), activations = numbers<T>(4 * size, 7);
      std::vector<T> cell(old.size()), y(old.size()), dc_before(old.size());
      const auto given = [&](bool there, const std::vector<T>& values) {
        return there ? view_of(values, shape) : tensor_view<const T, 2>();
      };
      ops::lstm_forward<T>(ctx, view_of(gates, wide), given(!first, old), view_of(cell, shape),
                           view_of(y, shape));
      ops::lstm_backward<T>(ctx, view_of(activations, wide), given(!first, old), view_of(after, shape),
                            view_of(dy, shape), given(!last, dh), given(!last, dc),
                            view_of(dc_before, shape));
      return results<T>{{gates, cell, y, activations, dc_before}, {}};
    });
  }
}

TEST_CASE("bf16: products of columns of larger matrices") {
  picker pick(7);
  for (std::uint64_t round = 0; round < 40; ++round) {
    CAPTURE(round);
    const index_t m = pick(0, round % 4 == 0 ? 700 : 40), k = pick(round % 8 == 0 ? 0 : 1, 70),
                  n = pick(1, 70);
    // Columns before and after those of the product.
    const index_t before = pick(0, 3), a_step = k + before + pick(0, 2), b_step = n + pick(0, 3);
    const bool transposed = round % 2 == 0, add = round % 3 == 0, biased = round % 4 != 0;
    const index_t t_step = k + pick(0, 3);
    compare([&](auto type, cpu_context& ctx) {
      using T = decltype(type);
      const std::vector<T> a = numbers<T>(m * a_step, 1), b = numbers<T>(k * b_step, 2),
                           bt = numbers<T>(n * t_step, 3), bias = numbers<T>(n, 4),
                           dy = numbers<T>(m * b_step, 5);
      std::vector<T> c = numbers<T>(m * b_step, 6);
      std::vector<float> dw = numbers<float>(k * b_step, 7), dense(static_cast<std::size_t>(k * n));
      const auto left = view_of(a, extents<2>{m, a_step}).slice(1, before, k);
      const auto right = transposed ? transpose(view_of(bt, extents<2>{n, t_step}).slice(1, 0, k))
                                    : view_of(b, extents<2>{k, b_step}).slice(1, 0, n);
      const auto gradient = view_of(dy, extents<2>{m, b_step}).slice(1, 0, n);
      ops::strided_product<T>(ctx, left, right, view_of(c, extents<2>{m, b_step}).slice(1, 0, n), add,
                              biased ? bias.data() : nullptr);
      ops::strided_weight_gradient<T>(ctx, left, gradient, view_of(dw, extents<2>{k, b_step}).slice(1, 0, n),
                                      add);
      ops::strided_weight_gradient<T>(ctx, left, gradient, view_of(dense, extents<2>{k, n}), false);
      return results<T>{{c}, {dw, dense}};
    });
  }
  cpu_context ctx({1});
  const tensor<bfloat16, 2> a({2, 3}), b({4, 5});
  tensor<bfloat16, 2> c({2, 5});
  tensor<float, 2> dw({3, 4});
  CHECK_THROWS_AS(ops::strided_product<bfloat16>(ctx, a, b, c), shape_error);
  CHECK_THROWS_AS(ops::strided_weight_gradient<bfloat16>(ctx, a, c, dw, false), shape_error);
}

TEST_CASE("bf16: products of single steps, of one matrix and of groups") {
  picker pick(8);
  for (std::uint64_t round = 0; round < 40; ++round) {
    CAPTURE(round);
    const index_t groups = round % 2 == 0 ? 1 : pick(2, 4), m = pick(0, 30);
    const index_t k = round % 20 == 3 ? 0 : pick(1, round % 8 == 0 ? 4000 : 60), n = pick(1, 70);
    const index_t a_step = groups * k + pick(0, 2);
    // Groups side by side, or (transposed) one below the other.
    const bool transposed = round % 4 < 2, add = round % 5 < 2;
    const index_t group_step = transposed ? n * k : n;
    compare([&](auto type, cpu_context& ctx) {
      using T = decltype(type);
      const std::vector<T> a = numbers<T>(m * a_step, 1), b = numbers<T>(groups * n * k, 2);
      std::vector<T> c = numbers<T>(m * groups * n, 3);
      const tensor_view<const T, 2> right =
          transposed ? transpose(view_of(b, extents<2>{groups * n, k}).slice(0, 0, n))
                     : view_of(b, extents<2>{k, groups * n}).slice(1, 0, n);
      scratch_frame frame(ctx.scratch());
      const ops::step_operand<T> operand(ctx, frame, right, 35, groups, group_step);
      operand.multiply(ctx, view_of(a, extents<2>{m, a_step}).slice(1, 0, groups * k),
                       view_of(c, extents<2>{m, groups * n}), add);
      return results<T>{{c}, {}};
    });
  }
}

}  // namespace
