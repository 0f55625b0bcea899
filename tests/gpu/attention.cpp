// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Attention on the device against the CPU's.
#include "attention_runs.hpp"

using namespace gpu_test;

namespace {

std::vector<attention_case> cases() {
  return {
      {{1}, {}, 1, 1, 1, 0, masks::none, false},
      {{5, 0, 33, 2}, {}, 2, 8, 8, 0, masks::none, true},
      {{5, 0, 33, 2}, {}, 2, 8, 12, 3, masks::causal, false},
      {{7, 40, 1}, {3, 12, 0}, 3, 5, 4, 1, masks::allowed, true},
      {{3, 31}, {9, 64}, 1, 16, 70, 0, masks::both, true},
      {{100, 65, 1}, {}, 2, 64, 64, 0, masks::causal, true},
      {{70}, {130}, 1, 68, 7, 4, masks::causal, false},
      {{130}, {45}, 1, 33, 5, 0, masks::causal, true},
  };
}

// Rows of a matrix with something between them.
struct spaced {
  spaced(index_t rows, index_t columns, index_t gap, std::uint64_t stream)
      : shape{rows, columns},
        step(columns + gap),
        values(random_twin<float>(rows * (columns + gap), stream)) {}
  pf::tensor_view<float, 2> on_host() { return {values.host_data(), shape, {step, 1}}; }
  pf::tensor_view<float, 2> on_device() { return {values.device_data(), shape, {step, 1}}; }

  pf::extents<2> shape;
  index_t step;
  twin<float> values;
};

struct attention_run {
  attention_run(const attention_case& c, std::uint64_t stream)
      : at(c),
        queries(c.queries),
        keys(c.keys.empty() ? c.queries : c.keys),
        q(queries.rows, c.heads * c.depth, c.gap, stream),
        k(keys.rows, c.heads * c.depth, c.gap, stream + 1),
        v(keys.rows, c.heads * c.value_depth, 0, stream + 2),
        y(queries.rows, c.heads * c.value_depth, c.gap, stream + 3),
        dy(queries.rows, c.heads * c.value_depth, 0, stream + 4),
        dq(queries.rows, c.heads * c.depth, 0, stream + 5),
        dk(keys.rows, c.heads * c.depth, 0, stream + 6),
        dv(keys.rows, c.heads * c.value_depth, c.gap, stream + 7),
        most{queries.on_host().sequences, queries.on_host().most(), keys.on_host().most()},
        allowed(random_bits(pf::volume<3>(most), stream + 8)) {}

  pf::ops::attention_input<float> input(bool device, const pf::random_stream& random) {
    pf::ops::attention_input<float> in;
    in.q = device ? q.on_device() : q.on_host();
    in.k = device ? k.on_device() : k.on_host();
    in.v = device ? v.on_device() : v.on_host();
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

  attention_case at;
  runs queries, keys;
  spaced q, k, v, y, dy, dq, dk, dv;
  pf::extents<3> most;
  twin<unsigned char> allowed;
};

}  // namespace

TEST_CASE("gpu attention: both passes, runs of all lengths, masks, dropout") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  std::uint64_t stream = 0;
  for (const attention_case& c : cases()) {
    CAPTURE(stream);
    host.begin_step(stream);
    ctx.begin_step(stream);
    attention_run run(c, stream += 10);
    const auto mine = run.input(false, host.next_random_stream());
    const auto its = run.input(true, ctx.next_random_stream());
    twin<float> kept(pf::ops::attention_kept_size(host, mine));
    twin<float> log_sums(pf::ops::attention_kept_size(ctx, its), NAN);
    pf::ops::attention_forward<float>(host, mine, run.y.on_host(), kept.host_data());
    pf::ops::attention_forward<float>(ctx, its, run.y.on_device(), log_sums.device_data());
    CHECK(difference(run.y.values) < 1e-5);
    pf::ops::attention_backward<float>(host, mine, kept.host_data(), run.dy.on_host(), run.dq.on_host(),
                                       run.dk.on_host(), run.dv.on_host());
    pf::ops::attention_backward<float>(ctx, its, log_sums.device_data(), run.dy.on_device(),
                                       run.dq.on_device(), run.dk.on_device(), run.dv.on_device(),
                                       run.y.on_device());
    CHECK(difference(run.dq.values) < 1e-5);
    CHECK(difference(run.dk.values) < 1e-5);
    CHECK(difference(run.dv.values) < 1e-5);
    // Inference: nothing is kept, nothing is dropped.
    pf::ops::attention_forward<float>(host, mine, run.y.on_host(), nullptr);
    pf::ops::attention_forward<float>(ctx, its, run.y.on_device(), nullptr);
    CHECK(difference(run.y.values) < 1e-5);
  }
}

TEST_CASE("gpu attention: one launch for all gradients has the bits of three") {
  pf::gpu_context& ctx = gpu_context();
  namespace kernels = pf::gpu::kernels;
  std::uint64_t stream = 500;
  int together = 0, apart = 0;
  for (const attention_case& c : cases()) {
    CAPTURE(stream);
    ctx.begin_step(stream);
    attention_run run(c, stream += 10);
    const auto in = run.input(true, ctx.next_random_stream());
    const kernels::attention_problem<float> problem = pf::gpu::detail::problem_of(ctx, in);
    CHECK(problem.query_gaps);
    CHECK(problem.key_gaps);
    twin<float> log_sums(pf::ops::attention_kept_size(ctx, in), NAN), products(log_sums.size(), NAN);
    const auto rows = [](spaced& m) { return pf::gpu::detail::rows_of(m.on_device()); };
    kernels::attention_forward<float>(ctx.stream(), problem, rows(run.y), log_sums.device_data());
    kernels::attention_gradients<float>(ctx.stream(), problem, rows(run.dy), rows(run.y),
                                        log_sums.device_data(), products.device_data(), rows(run.dq),
                                        rows(run.dk), rows(run.dv));
    const std::vector<float> dq = run.dq.values.fetched(), dk = run.dk.values.fetched(),
                             dv = run.dv.values.fetched();
    // The launch of all gradients needs no products in memory.
    const bool one = kernels::attention_plans::gradients_together(problem);
    CHECK(one == std::isnan(products.fetched()[0]));
    ++(one ? together : apart);
    kernels::attention_row_products<float>(ctx.stream(), problem, rows(run.dy), rows(run.y),
                                           products.device_data());
    kernels::attention_query_gradient<float>(ctx.stream(), problem, rows(run.dy), log_sums.device_data(),
                                             products.device_data(), rows(run.dq));
    kernels::attention_key_gradient<float>(ctx.stream(), problem, rows(run.dy), log_sums.device_data(),
                                           products.device_data(), rows(run.dk), rows(run.dv));
    CHECK(run.dq.values.fetched() == dq);
    CHECK(run.dk.values.fetched() == dk);
    CHECK(run.dv.values.fetched() == dv);
  }
  CHECK(together >= 4);
  CHECK(apart >= 3);
}

TEST_CASE("gpu attention: single queries against parts of a cache that they share") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  constexpr index_t rows = 40, heads = 2, depth = 8, capacity = 300;
  std::vector<index_t> first(rows), ones(rows, 1), key_first(rows), key_count(rows);
  for (index_t i = 0; i < rows; ++i) {
    const auto at = static_cast<std::size_t>(i);
    first[at] = i;
    key_first[at] = i % 7 * 20;
    key_count[at] = i * 5 % 100;
  }
  twin<index_t> queries(first), query_counts(ones), keys(key_first), key_counts(key_count);
  auto q = random_twin<float>(rows * heads * depth, 1), y = random_twin<float>(rows * heads * depth, 2);
  auto cache = random_twin<float>(capacity * 2 * heads * depth, 3);
  const pf::extents<2> shape{rows, heads * depth};
  const auto input = [&](float* from, float* all, index_t* f, index_t* c, index_t* kf, index_t* kc) {
    pf::ops::attention_input<float> in;
    const pf::tensor_view<const float, 2> both(all, {capacity, 2 * heads * depth});
    in.q = pf::tensor_view<const float, 2>(from, shape);
    in.k = both.slice(1, 0, heads * depth);
    in.v = both.slice(1, heads * depth, heads * depth);
    in.queries = {rows, f, c};
    in.keys = {rows, kf, kc};
    in.heads = heads;
    in.mask.causal = true;
    return in;
  };
  pf::ops::attention_forward<float>(host,
                                    input(q.host_data(), cache.host_data(), queries.host_data(),
                                          query_counts.host_data(), keys.host_data(), key_counts.host_data()),
                                    y.host_view(shape), nullptr);
  pf::ops::attention_forward<float>(
      ctx,
      input(q.device_data(), cache.device_data(), queries.device_data(), query_counts.device_data(),
            keys.device_data(), key_counts.device_data()),
      y.device_view(shape), nullptr);
  CHECK(difference(y) < 1e-5);
}

TEST_CASE("gpu attention: scores without a limit, NaN, shapes that do not fit") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  attention_run run({{6, 4}, {}, 1, 4, 4, 0, masks::none, false}, 77);
  for (float& x : run.q.values.host()) x *= 1e4F;
  run.k.values.host()[7 * 4] = NAN;  // the second sequence's first key
  run.q.values = twin<float>(run.q.values.host());
  run.k.values = twin<float>(run.k.values.host());
  const auto mine = run.input(false, {0, 0}), its = run.input(true, {0, 0});
  pf::ops::attention_forward<float>(host, mine, run.y.on_host(), nullptr);
  pf::ops::attention_forward<float>(ctx, its, run.y.on_device(), nullptr);
  CHECK(difference(run.y.values) < 1e-5);
  CHECK_THROWS_AS(pf::ops::attention_forward<float>(ctx, its, run.y.on_device().slice(0, 0, 3), nullptr),
                  pf::shape_error);
}
