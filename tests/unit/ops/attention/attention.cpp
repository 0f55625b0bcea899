// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <limits>

#include <pufferfish/ops/attention/attention.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

/// A problem with its own memory: sequences of random lengths one after the other, with gaps.
template <class T>
struct problem {
  index_t heads, depth, value_depth;
  std::vector<index_t> query_first, query_count, key_first, key_count;
  tensor<T, 2> q, k, v, dy;
  tensor<unsigned char, 3> allowed;
  bool causal = false, masked = false;
  double dropout = 0.0;

  problem(std::uint64_t seed, index_t sequences, index_t longest, index_t h, index_t d, index_t e)
      : heads(h), depth(d), value_depth(e) {
    picker pick(seed);
    index_t queries = 0, keys = 0;
    for (index_t s = 0; s < sequences; ++s) {
      query_first.push_back(queries += pick(0, 1));
      query_count.push_back(pick(0, longest));
      key_first.push_back(keys += pick(0, 1));
      key_count.push_back(pick(0, longest));
      queries += query_count.back();
      keys += key_count.back();
    }
    const auto random = [&](tensor<T, 2>& to, index_t rows, index_t columns, std::uint64_t stream) {
      to = tensor<T, 2>({rows, columns});
      fill_normal<T>(to.flat(), 1.0, {seed, stream});
    };
    random(q, queries, heads * depth, 1);
    random(k, keys, heads * depth, 2);
    random(v, keys, heads * value_depth, 3);
    random(dy, queries, heads * value_depth, 4);
    allowed = tensor<unsigned char, 3>({sequences, longest, longest});
    for (unsigned char& bit : allowed.flat()) bit = static_cast<unsigned char>(pick(0, 1));
  }

  ops::attention_input<T> input() const {
    ops::attention_input<T> in;
    in.q = q;
    in.k = k;
    in.v = v;
    in.queries = {static_cast<index_t>(query_first.size()), query_first.data(), query_count.data()};
    in.keys = {static_cast<index_t>(key_first.size()), key_first.data(), key_count.data()};
    in.heads = heads;
    in.mask.causal = causal;
    if (masked) in.mask.allowed = allowed;
    in.dropout.probability = dropout;
    in.dropout.random = {5, 6};
    in.dropout.first_sequence = 3;
    return in;
  }
};

/// Results of both passes: y, dq, dk, dv. Rows of no sequence keep a mark.
template <class T>
struct results {
  tensor<T, 2> y, dq, dk, dv;
  explicit results(const problem<T>& p) : y(p.dy.shape()), dq(p.q.shape()), dk(p.k.shape()), dv(p.v.shape()) {
    for (auto* t : {&y, &dq, &dk, &dv}) std::fill(t->flat().begin(), t->flat().end(), T{77});
  }
  std::vector<T> all() const {
    std::vector<T> row;
    for (const auto* t : {&y, &dq, &dk, &dv}) row.insert(row.end(), t->flat().begin(), t->flat().end());
    return row;
  }
};

template <class T>
results<T> run(const problem<T>& p, int threads) {
  results<T> r(p);
  cpu_context ctx({threads, 0});
  const auto in = p.input();
  aligned_buffer<T> kept(ops::attention_kept_size(ctx, in));
  ops::attention_forward<T>(ctx, in, r.y, kept.data());
  ops::attention_backward<T>(ctx, in, kept.data(), p.dy, r.dq, r.dk, r.dv);
  CHECK(ctx.scratch().in_use() == 0);
  return r;
}

template <class T>
void check_against_reference(const problem<T>& p, double tolerance) {
  const results<T> got = run(p, 1);
  results<T> expected(p);
  const auto in = p.input();
  ops::reference::attention_forward<T>(in, expected.y);
  ops::reference::attention_backward<T>(in, p.dy, expected.dq, expected.dk, expected.dv);
  CHECK(largest_error(got.y, expected.y) < tolerance);
  CHECK(largest_error(got.dq, expected.dq) < tolerance);
  CHECK(largest_error(got.dk, expected.dk) < tolerance);
  CHECK(largest_error(got.dv, expected.dv) < tolerance);
}

TEST_CASE_TEMPLATE("attention: fast against reference over random shapes and masks", T, float, double) {
  const double tolerance = sizeof(T) == 4 ? 1e-5 : 1e-12;
  picker pick(1);
  for (std::uint64_t round = 0; round < 80; ++round) {
    CAPTURE(round);
    problem<T> p(round, pick(0, 4), pick(0, 20), pick(1, 3), pick(1, 20), pick(1, 20));
    p.causal = round % 2 == 0;
    p.masked = round % 3 == 0;
    p.dropout = round % 5 == 0 ? 0.3 : 0.0;
    check_against_reference(p, tolerance);
  }
  // Whole vectors, and long enough for packed products.
  for (std::uint64_t round = 0; round < 4; ++round) {
    CAPTURE(round);
    problem<T> p(round, 2, 300, 2, 64, 128);
    p.causal = round % 2 == 0;
    p.dropout = round < 2 ? 0.1 : 0.0;
    check_against_reference(p, tolerance);
  }
}

TEST_CASE("attention: the same bits for any number of threads") {
  problem<float> p(3, 5, 40, 3, 17, 16);
  p.dropout = 0.2;
  p.causal = true;
  const auto one = run(p, 1).all();
  CHECK(same_bits(one, run(p, 2).all()));
  CHECK(same_bits(one, run(p, 3).all()));
}

TEST_CASE("attention: gradients against finite differences") {
  problem<double> p(4, 3, 6, 2, 3, 4);
  for (double dropout : {0.0, 0.4}) {
    p.dropout = dropout;
    p.causal = dropout == 0.0;
    p.masked = dropout > 0.0;
    const results<double> got = run(p, 2);
    const auto value = [&] {
      cpu_context ctx;
      tensor<double, 2> y(p.dy.shape());
      const auto in = p.input();
      aligned_buffer<double> kept(ops::attention_kept_size(ctx, in));
      ops::attention_forward<double>(ctx, in, y, kept.data());
      double sum = 0.0;
      for (std::size_t i = 0; i < y.flat().size(); ++i) sum += y.flat()[i] * p.dy.flat()[i];
      return sum;
    };
    const auto check = [&](tensor<double, 2>& of, const tensor<double, 2>& gradient) {
      for (std::size_t i = 0; i < of.flat().size(); ++i) {
        const double kept = of.flat()[i];
        of.flat()[i] = kept + 1e-5;
        const double above = value();
        of.flat()[i] = kept - 1e-5;
        const double below = value();
        of.flat()[i] = kept;
        const double found = gradient.flat()[i] == 77.0 ? 0.0 : gradient.flat()[i];
        CHECK(std::abs((above - below) / 2e-5 - found) < 1e-8 * (1.0 + std::abs(found)));
      }
    };
    check(p.q, got.dq);
    check(p.k, got.dk);
    check(p.v, got.dv);
  }
}

TEST_CASE_TEMPLATE("attention: rows that see nothing give zeros and no gradient", T, float, double) {
  problem<T> p(9, 2, 5, 2, 4, 4);
  p.query_count = {2, 2};
  p.key_count = {2, 0};
  p.query_first = {0, 2};
  p.key_first = {0, 2};
  p.q = tensor<T, 2>({4, 8});
  p.k = p.v = tensor<T, 2>({2, 8});
  p.dy = p.q;
  for (auto* t : {&p.q, &p.k, &p.v, &p.dy}) fill_normal<T>(t->flat(), 1.0, {1, 1});
  p.masked = true;
  p.allowed(0, 0, 0) = p.allowed(0, 0, 1) = 0;
  p.allowed(0, 1, 0) = 1;
  p.allowed(0, 1, 1) = 0;
  for (double dropout : {0.0, 0.5}) {
    p.dropout = dropout;
    const results<T> r = run(p, 1);
    for (index_t c = 0; c < 8; ++c) {
      CHECK(r.y(0, c) == T{});
      CHECK(r.y(2, c) == T{});
      CHECK(r.dq(0, c) == T{});
      CHECK(r.dk(1, c) == T{});
      CHECK(r.dv(1, c) == T{});
      if (dropout == 0.0) CHECK(r.y(1, c) == p.v(0, c));  // one key only: its value
    }
  }
}

TEST_CASE("attention: inference drops nothing and keeps nothing; scores of any size; a NaN is not hidden") {
  problem<float> p(10, 3, 9, 2, 5, 3);
  results<float> r(p), plain(p);
  cpu_context ctx;
  ops::reference::attention_forward<float>(p.input(), plain.y);
  p.dropout = 0.9;
  ops::attention_forward<float>(ctx, p.input(), r.y, nullptr);
  CHECK(largest_error(r.y, plain.y) < 1e-5);
  p.dropout = 0.0;
  for (float& value : p.q.flat()) value *= 1e6F;
  ops::attention_forward<float>(ctx, p.input(), r.y, nullptr);
  for (float value : r.y.flat()) CHECK(std::isfinite(value));
  for (float& value : p.k.flat()) value = std::numeric_limits<float>::quiet_NaN();
  ops::attention_forward<float>(ctx, p.input(), r.y, nullptr);
  for (std::size_t s = 0; s < 3; ++s) {
    if (p.query_count[s] > 0 && p.key_count[s] > 0) CHECK(std::isnan(r.y(p.query_first[s], 0)));
  }
}

TEST_CASE("attention: dropout of a sequence does not depend on the rest of the batch") {
  problem<float> both(11, 2, 12, 2, 8, 8);
  both.query_count = both.key_count = {7, 9};
  both.query_first = both.key_first = {0, 7};
  for (auto* t : {&both.q, &both.k, &both.v, &both.dy}) {
    *t = tensor<float, 2>({16, 16});
    fill_normal<float>(t->flat(), 1.0, {12, 12});
  }
  both.dropout = 0.5;
  const results<float> together = run(both, 1);
  auto in = both.input();
  in.queries = {1, both.query_first.data() + 1, both.query_count.data() + 1};
  in.keys = {1, both.key_first.data() + 1, both.key_count.data() + 1};
  in.dropout.first_sequence += 1;
  results<float> alone(both);
  cpu_context ctx;
  aligned_buffer<float> kept(ops::attention_kept_size(ctx, in));
  ops::attention_forward<float>(ctx, in, alone.y, kept.data());
  for (index_t i = 7; i < 16; ++i) {
    for (index_t c = 0; c < 16; ++c) CHECK(alone.y(i, c) == together.y(i, c));
  }
}

TEST_CASE("attention: columns of one matrix, rows far apart") {
  problem<float> p(13, 2, 6, 2, 4, 4);
  p.query_count = p.key_count = {6, 5};
  p.query_first = p.key_first = {0, 6};
  tensor<float, 2> fused({11, 24}), dfused({11, 24}), expected({11, 8}), y({11, 8});
  fill_normal<float>(fused.flat(), 1.0, {1, 1});
  p.q = tensor<float, 2>(fused.view().slice(1, 0, 8));
  p.k = tensor<float, 2>(fused.view().slice(1, 8, 8));
  p.v = tensor<float, 2>(fused.view().slice(1, 16, 8));
  p.dy = tensor<float, 2>({11, 8});
  fill_normal<float>(p.dy.flat(), 1.0, {1, 2});
  const results<float> r = run(p, 1);
  auto in = p.input();
  in.q = fused.view().slice(1, 0, 8);
  in.k = fused.view().slice(1, 8, 8);
  in.v = fused.view().slice(1, 16, 8);
  cpu_context ctx;
  aligned_buffer<float> kept(ops::attention_kept_size(ctx, in));
  ops::attention_forward<float>(ctx, in, y, kept.data());
  ops::attention_backward<float>(ctx, in, kept.data(), p.dy, dfused.view().slice(1, 0, 8),
                                 dfused.view().slice(1, 8, 8), dfused.view().slice(1, 16, 8));
  CHECK(largest_error(y, r.y) < 1e-6);
  CHECK(largest_error(tensor<float, 2>(dfused.view().slice(1, 0, 8)), r.dq) < 1e-6);
  CHECK(largest_error(tensor<float, 2>(dfused.view().slice(1, 8, 8)), r.dk) < 1e-6);
  CHECK(largest_error(tensor<float, 2>(dfused.view().slice(1, 16, 8)), r.dv) < 1e-6);
}

TEST_CASE("attention: errors") {
  problem<float> p(14, 2, 6, 2, 4, 4);
  p.query_count = p.key_count = {6, 5};
  p.query_first = p.key_first = {0, 6};
  p.q = p.k = p.v = p.dy = tensor<float, 2>({11, 8});
  cpu_context ctx;
  tensor<float, 2> y({11, 8}), wrong({11, 9});
  CHECK(error_text([&] { ops::attention_forward<float>(ctx, p.input(), y, nullptr); }).empty());
  CHECK(contains(error_text([&] { ops::attention_forward<float>(ctx, p.input(), wrong, nullptr); }),
                 "[11 x 9]"));
  auto in = p.input();
  in.heads = 3;
  CHECK_THROWS_AS(ops::attention_forward<float>(ctx, in, y, nullptr), shape_error);
  in.heads = 0;
  CHECK_THROWS_AS(ops::attention_forward<float>(ctx, in, y, nullptr), shape_error);
  p.key_count = {6, 6};
  CHECK(contains(error_text([&] { ops::attention_forward<float>(ctx, p.input(), y, nullptr); }),
                 "sequence 1 has keys in rows 6 .. 11 of 11"));
  p.key_count = {6, 5};
  p.allowed = tensor<unsigned char, 3>({2, 6, 5});
  p.masked = true;
  CHECK(contains(error_text([&] { ops::attention_forward<float>(ctx, p.input(), y, nullptr); }),
                 "a mask [2 x 6 x 5] for 2 sequences of up to 6 queries and 6 keys"));
  p.masked = false;
  CHECK_THROWS_AS(
      ops::attention_backward<float>(ctx, p.input(), nullptr, p.dy, wrong.view(), y.view(), y.view()),
      shape_error);
}

}  // namespace
