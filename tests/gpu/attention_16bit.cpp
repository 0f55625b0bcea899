// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Attention on tensor cores against the definition in double, element by element, with the largest error that
// rounding can make.
#include "attention_runs.hpp"

using namespace gpu_test;
namespace kernels = pf::gpu::kernels;

namespace {

using pf::ops::reference::attention_kept;
using pf::ops::reference::attention_weights;

/// What float arithmetic adds, relative to the sum of magnitudes: rounding of scores and sums, and exp2.
constexpr double eps = 2e-5;

/// Numbers of T: their rounding error relative to the number, and the absolute one of small numbers.
template <class T>
struct rounding {
  static constexpr double relative = unit<T>;
  static constexpr double smallest = std::is_same_v<T, pf::gpu::fp16> ? 0x1p-25 : 0x1p-134;
  static double stored(double exact, double error) {
    return error + relative * (std::abs(exact) + error) + smallest;
  }
};

/// Rows on the device, with `before` elements before each and `gap` after, and as double.
template <class T>
struct matrix {
  matrix(index_t rows, index_t columns, index_t gap, index_t before, std::uint64_t stream)
      : shape{rows, columns},
        step(columns + gap + before),
        begin(before),
        values(rows * step + before, stream),
        wide(shape) {
    for (index_t i = 0; i < rows; ++i) {
      for (index_t j = 0; j < columns; ++j) wide(i, j) = values.wide.host_data()[begin + i * step + j];
    }
  }
  pf::tensor_view<T, 2> device() { return {values.narrow.device_data() + begin, shape, {step, 1}}; }
  pf::tensor<double, 2> fetched() {
    const std::vector<T> got = values.narrow.fetched();
    pf::tensor<double, 2> result(shape);
    for (index_t i = 0; i < shape[0]; ++i) {
      for (index_t j = 0; j < shape[1]; ++j) {
        result(i, j) = static_cast<float>(got[static_cast<std::size_t>(begin + i * step + j)]);
      }
    }
    return result;
  }

  pf::extents<2> shape;
  index_t step, begin;
  stored<T> values;
  pf::tensor<double, 2> wide;
};

/// A matrix that the device computes: expected numbers and the largest error of each. Rows of no run keep
/// what they had, or become zeros, with no error.
struct expectation {
  explicit expectation(const pf::tensor<double, 2>& before) : value(before), bound(before.shape()) {
    std::fill(bound.flat().begin(), bound.flat().end(), 0.0);
  }
  /// The largest error in units of the allowed one.
  double worst(const pf::tensor<double, 2>& got) const {
    double most = 0.0;
    for (std::size_t i = 0; i < got.flat().size(); ++i) {
      const double error = std::abs(got.flat()[i] - value.flat()[i]), allowed = bound.flat()[i];
      if (!(error <= 0.0)) most = std::max(most, error / allowed > 0.0 ? error / allowed : INFINITY);
    }
    return most;
  }
  void clear_outside(const pf::token_runs& runs) {
    for (index_t row = 0; row < value.extent(0); ++row) {
      bool inside = false;
      for (index_t s = 0; s < runs.sequences; ++s) {
        inside = inside || (row >= runs.first[s] && row < runs.first[s] + runs.count[s]);
      }
      for (index_t c = 0; c < value.extent(1) && !inside; ++c) value(row, c) = 0.0;
    }
  }
  pf::tensor<double, 2> value, bound;
};

template <class T>
struct tensor_run {
  tensor_run(const attention_case& c, index_t before, std::uint64_t stream)
      : at(c),
        queries(c.queries),
        keys(c.keys.empty() ? c.queries : c.keys),
        q(queries.rows, c.heads * c.depth, c.gap, before, stream),
        k(keys.rows, c.heads * c.depth, c.gap, 0, stream + 1),
        v(keys.rows, c.heads * c.value_depth, 0, before, stream + 2),
        y(queries.rows, c.heads * c.value_depth, c.gap, 0, stream + 3),
        dy(queries.rows, c.heads * c.value_depth, 0, 0, stream + 4),
        dq(queries.rows, c.heads * c.depth, 0, before, stream + 5),
        dk(keys.rows, c.heads * c.depth, 0, 0, stream + 6),
        dv(keys.rows, c.heads * c.value_depth, c.gap, 0, stream + 7),
        most{queries.on_host().sequences, queries.on_host().most(), keys.on_host().most()},
        allowed(random_bits(pf::volume<3>(most), stream + 8)),
        log_sums(c.heads * queries.rows),
        want_y(y.wide),
        want_dq(dq.wide),
        want_dk(dk.wide),
        want_dv(dv.wide) {}

  template <class U>
  pf::ops::attention_input<U> input(const pf::random_stream& random) {
    constexpr bool device = std::is_same_v<U, T>;
    pf::ops::attention_input<U> in;
    if constexpr (device) {
      in.q = q.device();
      in.k = k.device();
      in.v = v.device();
    } else {
      in.q = q.wide.view();
      in.k = k.wide.view();
      in.v = v.wide.view();
    }
    in.queries = device ? queries.on_device() : queries.on_host();
    in.keys = device ? keys.on_device() : keys.on_host();
    in.heads = at.heads;
    in.mask.causal = at.mask == masks::causal || at.mask == masks::both;
    if (at.mask == masks::allowed || at.mask == masks::both) {
      in.mask.allowed = {device ? allowed.device_data() : allowed.host_data(), most};
    }
    if (at.drops) in.dropout = {0.25, random, 3};
    return in;
  }

  /// Both passes, on the tensor cores whatever the shapes are.
  void on_device(const pf::random_stream& random) {
    pf::gpu_context& ctx = gpu_context();
    kernels::attention_problem<T> problem = pf::gpu::detail::problem_of(ctx, input<T>(random));
    problem.tensor = true;
    problem.query_gaps = problem.key_gaps = clears();
    const auto rows = [](auto& m) { return pf::gpu::detail::rows_of(m.device()); };
    twin<float> products(log_sums.size());
    kernels::attention_forward<T>(ctx.stream(), problem, rows(y), log_sums.device_data());
    kernels::attention_row_products<T>(ctx.stream(), problem, rows(dy), rows(y), products.device_data());
    kernels::attention_query_gradient<T>(ctx.stream(), problem, rows(dy), log_sums.device_data(),
                                         products.device_data(), rows(dq));
    kernels::attention_key_gradient<T>(ctx.stream(), problem, rows(dy), log_sums.device_data(),
                                       products.device_data(), rows(dk), rows(dv));
  }

  /// Expected results. A weight relative to the largest one, and a gradient of a score, are rounded once
  /// before they are multiplied; the products of y and dy contain the rounding of y.
  void expect(const pf::random_stream& random) {
    const pf::ops::attention_input<double> in = input<double>(random);
    if (clears()) {
      for (expectation* want : {&want_y, &want_dq}) want->clear_outside(in.queries);
      for (expectation* want : {&want_dk, &want_dv}) want->clear_outside(in.keys);
    }
    for (index_t s = 0; s < in.queries.sequences; ++s) {
      for (index_t head = 0; head < in.heads; ++head) expect_head(in, s, head);
    }
  }

  void check() {
    CHECK(want_y.worst(y.fetched()) <= 1.0);
    CHECK(want_dq.worst(dq.fetched()) <= 1.0);
    CHECK(want_dk.worst(dk.fetched()) <= 1.0);
    CHECK(want_dv.worst(dv.fetched()) <= 1.0);
  }

  // Whether the kernels know that there are rows of no run.
  bool clears() const { return at.drops; }

  attention_case at;
  runs queries, keys;
  matrix<T> q, k, v, y, dy, dq, dk, dv;
  pf::extents<3> most;
  twin<unsigned char> allowed;
  twin<float> log_sums;
  expectation want_y, want_dq, want_dk, want_dv;

 private:
  using round = rounding<T>;

  void expect_head(const pf::ops::attention_input<double>& in, index_t s, index_t head) {
    const index_t n = in.queries.count[s], m = in.keys.count[s], d = in.depth(), e = in.value_depth();
    const index_t q0 = in.queries.first[s], k0 = in.keys.first[s], qc = head * d, vc = head * e;
    // Sums of magnitudes, of which the errors are fractions.
    pf::tensor<double, 2> dk_sum({m, d}), dk_error({m, d}), dv_sum({m, e}), dv_error({m, e});
    std::vector<double> weights(static_cast<std::size_t>(m) + 1), kept(weights.size());
    for (index_t i = 0; i < n; ++i) {
      attention_weights(in, s, head, i, weights.data());
      for (index_t j = 0; j < m; ++j) kept[static_cast<std::size_t>(j)] = attention_kept(in, s, head, i, j);
      double product = 0.0, product_error = 0.0;
      for (index_t c = 0; c < e; ++c) {
        double sum = 0.0, size = 0.0, count = 0.0;
        for (index_t j = 0; j < m; ++j) {
          const auto x = static_cast<std::size_t>(j);
          const double value = in.v(k0 + j, vc + c);
          sum += weights[x] * kept[x] * value;
          size += weights[x] * kept[x] * std::abs(value);
          count += weights[x] > 0.0 ? kept[x] * std::abs(value) : 0.0;
        }
        const double error = round::stored(sum, (round::relative + eps) * size + round::smallest * count);
        const double g = dy.wide(q0 + i, vc + c);
        want_y.value(q0 + i, vc + c) = sum;
        want_y.bound(q0 + i, vc + c) = error;
        product += g * sum;
        product_error += std::abs(g) * (error + eps * std::abs(sum));
      }
      std::vector<double> dq_sum(static_cast<std::size_t>(d)), dq_error(dq_sum.size());
      for (index_t j = 0; j < m; ++j) {
        const auto x = static_cast<std::size_t>(j);
        if (weights[x] == 0.0) continue;
        double gradient = 0.0, size = 0.0;
        for (index_t c = 0; c < e; ++c) {
          const double g = dy.wide(q0 + i, vc + c), one = g * in.v(k0 + j, vc + c);
          gradient += kept[x] * one;
          size += kept[x] * std::abs(one);
          dv_sum(j, c) += weights[x] * kept[x] * g;
          dv_error(j, c) += ((round::relative + eps) * weights[x] + round::smallest) * kept[x] * std::abs(g);
        }
        const double dscore = weights[x] * (gradient - product);
        const double error = (round::relative + eps) * std::abs(dscore) +
                             weights[x] * (product_error + eps * (size + std::abs(product))) +
                             round::smallest;
        for (index_t c = 0; c < d; ++c) {
          const double key = in.k(k0 + j, qc + c), query = in.q(q0 + i, qc + c);
          dq_sum[static_cast<std::size_t>(c)] += in.scale() * dscore * key;
          dq_error[static_cast<std::size_t>(c)] +=
              in.scale() * (error + eps * std::abs(dscore)) * std::abs(key);
          dk_sum(j, c) += in.scale() * dscore * query;
          dk_error(j, c) += in.scale() * (error + eps * std::abs(dscore)) * std::abs(query);
        }
      }
      for (index_t c = 0; c < d; ++c) {
        const auto x = static_cast<std::size_t>(c);
        want_dq.value(q0 + i, qc + c) = dq_sum[x];
        want_dq.bound(q0 + i, qc + c) = round::stored(dq_sum[x], dq_error[x]);
      }
    }
    for (index_t j = 0; j < m; ++j) {
      for (index_t c = 0; c < d; ++c) {
        want_dk.value(k0 + j, qc + c) = dk_sum(j, c);
        want_dk.bound(k0 + j, qc + c) = round::stored(dk_sum(j, c), dk_error(j, c));
      }
      for (index_t c = 0; c < e; ++c) {
        want_dv.value(k0 + j, vc + c) = dv_sum(j, c);
        want_dv.bound(k0 + j, vc + c) = round::stored(dv_sum(j, c), dv_error(j, c));
      }
    }
  }
};

template <class T>
void check_case(const attention_case& c, index_t before, std::uint64_t stream) {
  CAPTURE(stream);
  gpu_context().begin_step(stream);
  pf::cpu_context host;
  host.begin_step(stream);
  tensor_run<T> run(c, before, stream);
  run.on_device(gpu_context().next_random_stream());
  run.expect(host.next_random_stream());
  run.check();
}

}  // namespace

TEST_CASE_TEMPLATE("gpu attention on tensor cores: both passes against the definition", T, pf::gpu::bf16,
                   pf::gpu::fp16) {
  const std::vector<attention_case> cases = {
      {{128}, {}, 1, 64, 64, 0, masks::none, false},
      {{127, 1, 0}, {}, 2, 64, 64, 8, masks::causal, true},
      {{130}, {192}, 1, 32, 64, 0, masks::causal, false},  // one pair of a tile is hidden
      {{200}, {129}, 1, 64, 16, 0, masks::causal, true},   // the first queries see no key
      {{129, 65}, {64, 0}, 2, 16, 24, 0, masks::allowed, true},
      {{70}, {150}, 1, 128, 128, 0, masks::both, true},  // one stage
      {{66, 3}, {}, 1, 33, 5, 0, masks::causal, true},   // rows that are copied element by element
      {{140}, {}, 2, 24, 72, 1, masks::both, false},
      {{1}, {1}, 1, 1, 1, 0, masks::none, false},
      {{20}, {300}, 1, 192, 128, 0, masks::none, true},
  };
  std::uint64_t stream = 0;
  for (const attention_case& c : cases) {
    stream += 10;
    check_case<T>(c, stream % 20 == 0 ? 8 : 3, stream);
  }
}

TEST_CASE("gpu attention on tensor cores: random shapes") {
  picker pick(5);
  constexpr index_t depths[] = {8, 16, 24, 32, 40, 64, 64, 80, 7}, lengths[] = {0, 1, 63, 64, 65, 130, 210};
  for (std::uint64_t done = 1; done <= 12; ++done) {
    attention_case c{};
    for (index_t sequence = pick(0, 2); sequence >= 0; --sequence) {
      c.queries.push_back(lengths[pick(0, 6)]);
      c.keys.push_back(lengths[pick(0, 6)]);
    }
    c.heads = pick(1, 2);
    c.depth = depths[pick(0, 8)];
    c.value_depth = depths[pick(0, 8)];
    c.gap = pick(0, 1) * pick(0, 8);
    c.mask = static_cast<masks>(pick(0, 3));
    c.drops = pick(0, 1) == 1;
    const index_t before = pick(0, 1) * pick(0, 8);
    if (done % 2 == 0) {
      check_case<pf::gpu::bf16>(c, before, done * 10 + 1000);
    } else {
      check_case<pf::gpu::fp16>(c, before, done * 10 + 1000);
    }
  }
}

TEST_CASE_TEMPLATE("gpu attention on tensor cores: the allowed error shows one missing tile", T,
                   pf::gpu::bf16, pf::gpu::fp16) {
  // Query 70 does not see keys 64 .. 127 in the expected results.
  tensor_run<T> run({{130}, {200}, 1, 64, 64, 0, masks::none, false}, 0, 900);
  run.on_device({0, 0});
  run.expect({0, 0});
  run.check();
  for (int tile = 0; tile < 3; ++tile) {
    CAPTURE(tile);
    std::fill(run.allowed.host().begin(), run.allowed.host().end(), static_cast<unsigned char>(1));
    for (index_t key = 64 * tile; key < 64 * (tile + 1); ++key) run.allowed.host_data()[70 * 200 + key] = 0;
    run.at.mask = masks::allowed;
    run.expect({0, 0});
    CHECK(run.want_y.worst(run.y.fetched()) > 4.0);
    CHECK(run.want_dq.worst(run.dq.fetched()) > 4.0);
    CHECK(run.want_dk.worst(run.dk.fetched()) > 1.0);
    CHECK(run.want_dv.worst(run.dv.fetched()) > 1.0);
  }
}

TEST_CASE("gpu attention on tensor cores: dropout keeps the weights that the definition keeps") {
  // Equal scores and values of a unit matrix: y(i, j) is weight j of query i.
  constexpr index_t rows = 131, heads = 2;
  tensor_run<pf::gpu::fp16> run({{rows}, {}, heads, 8, rows, 0, masks::causal, true}, 0, 40);
  std::vector<pf::gpu::fp16> none(static_cast<std::size_t>(run.q.values.narrow.size())), unit;
  run.q.values.narrow = twin<pf::gpu::fp16>(none);
  for (index_t i = 0; i < run.v.values.narrow.size(); ++i) {
    unit.push_back(static_cast<pf::gpu::fp16>(i / (heads * rows) == i % rows ? 1.0F : 0.0F));
  }
  run.v.values.narrow = twin<pf::gpu::fp16>(unit);
  gpu_context().begin_step(3);
  pf::cpu_context host;
  host.begin_step(3);
  run.on_device(gpu_context().next_random_stream());
  const pf::ops::attention_input<double> in = run.input<double>(host.next_random_stream());
  const pf::tensor<double, 2> y = run.y.fetched();
  index_t kept = 0, wrong = 0;
  for (index_t head = 0; head < heads; ++head) {
    for (index_t i = 0; i < rows; ++i) {
      for (index_t j = 0; j < rows; ++j) {
        const bool keeps = j <= i && attention_kept(in, 0, head, i, j) > 0.0;
        kept += keeps ? 1 : 0;
        wrong += keeps != (y(i, head * rows + j) > 0.0) ? 1 : 0;
      }
    }
  }
  CHECK(wrong == 0);
  CHECK(kept > rows * rows / 2);
}

TEST_CASE("gpu attention on tensor cores: the alignment of rows changes no bit") {
  const auto run_with = [](index_t gap, index_t before) {
    tensor_run<pf::gpu::bf16> run({{70, 130}, {}, 2, 24, 40, gap, masks::causal, false}, before, 600);
    const auto fill = [](matrix<pf::gpu::bf16>& m, std::uint64_t stream) {
      const auto values = stored<pf::gpu::bf16>(pf::volume<2>(m.shape), stream).narrow.host();
      std::vector<pf::gpu::bf16> all = m.values.narrow.host();
      for (std::size_t i = 0; i < values.size(); ++i) {
        const auto row = static_cast<index_t>(i) / m.shape[1], column = static_cast<index_t>(i) % m.shape[1];
        all[static_cast<std::size_t>(m.begin + row * m.step + column)] = values[i];
      }
      m.values.narrow = twin<pf::gpu::bf16>(all);
    };
    std::uint64_t stream = 700;
    for (auto* m : {&run.q, &run.k, &run.v, &run.y, &run.dy, &run.dq, &run.dk, &run.dv}) fill(*m, stream++);
    run.on_device({0, 0});
    std::vector<double> all;
    for (auto* m : {&run.y, &run.dq, &run.dk, &run.dv}) {
      const pf::tensor<double, 2> got = m->fetched();
      all.insert(all.end(), got.flat().begin(), got.flat().end());
    }
    return all;
  };
  const std::vector<double> aligned = run_with(0, 0);
  CHECK(run_with(1, 0) == aligned);
  CHECK(run_with(3, 5) == aligned);
  CHECK(run_with(8, 1) == aligned);
}

TEST_CASE("gpu attention on tensor cores: scores without a limit, NaN") {
  tensor_run<pf::gpu::bf16> run({{70, 40}, {}, 1, 16, 16, 0, masks::causal, false}, 0, 60);
  std::vector<pf::gpu::bf16> large, keys = run.k.values.narrow.host();
  for (const float x : run.q.values.wide.host()) large.push_back(static_cast<pf::gpu::bf16>(x * 1e20F));
  keys[static_cast<std::size_t>(run.keys.first.host()[1] + 7) * 16] = static_cast<pf::gpu::bf16>(NAN);
  run.q.values.narrow = twin<pf::gpu::bf16>(large);
  run.k.values.narrow = twin<pf::gpu::bf16>(keys);
  run.on_device({0, 0});
  const pf::tensor<double, 2> y = run.y.fetched();
  for (index_t i = 0; i < 70; ++i) CHECK(std::abs(y(i, 0)) <= 1.0);
  for (index_t i = 0; i < 40; ++i) CHECK(std::isnan(y(run.queries.first.host()[1] + i, 3)) == (i >= 7));
}

TEST_CASE("gpu attention: the rule for tensor cores") {
  kernels::attention_problem<pf::gpu::bf16> p{};
  p.queries.sequences = p.keys.sequences = 3;
  p.query_rows = p.key_rows = 384;
  p.depth = p.value_depth = 128;
  CHECK(kernels::attention_plans::tensor(p));
  p.depth = 192;
  CHECK(kernels::attention_plans::tensor(p));
  p.depth = 193;  // four panels and two
  CHECK_FALSE(kernels::attention_plans::tensor(p));
  p.depth = 64;
  p.key_rows = 383;
  CHECK_FALSE(kernels::attention_plans::tensor(p));
  p.key_rows = 384;
  p.query_rows = 383;
  CHECK_FALSE(kernels::attention_plans::tensor(p));
  kernels::attention_problem<float> wide{};
  wide.queries.sequences = wide.keys.sequences = 1;
  wide.query_rows = wide.key_rows = 1000;
  wide.depth = wide.value_depth = 64;
  CHECK_FALSE(kernels::attention_plans::tensor(wide));
  // Two stages of both matrices of the backward pass for heads of 64 columns, one for 128.
  CHECK(kernels::attention_plans::runs_ahead(2, 2));
  CHECK_FALSE(kernels::attention_plans::runs_ahead(4, 4));
}
