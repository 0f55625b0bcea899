// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Layer normalisation on the device against the CPU's.
#include "support.hpp"

#include <limits>

#include <pufferfish/gpu/ops/norm.hpp>

using namespace gpu_test;

namespace {

struct norm_case {
  index_t rows, columns, gap;  // gap: elements between rows
  bool residual, sum, drops, numbers;
};
constexpr norm_case cases[] = {
    {0, 5, 0, true, true, true, false},     {1, 1, 0, false, false, false, false},
    {3, 7, 1, true, true, true, false},     {33, 64, 0, true, true, true, true},
    {130, 129, 0, false, true, true, true}, {300, 96, 4, true, false, false, false},
    {5, 1400, 0, true, true, true, false},  {64, 32, 8, true, false, true, true},
};

// Statistics of rows need a first pass and a second one; a row of equal numbers has variance 0.
template <class T>
pf::tensor_view<T, 2> matrix(T* data, index_t rows, index_t columns, index_t gap) {
  return {data, {rows, columns}, {columns + gap, 1}};
}

struct norm_run {
  explicit norm_run(const norm_case& c, std::uint64_t stream)
      : at(c),
        x(random_twin<float>(c.rows * (c.columns + c.gap), stream)),
        residual(random_twin<float>(c.rows * (c.columns + c.gap), stream + 1)),
        weight(random_twin<float>(c.columns, stream + 2)),
        bias(random_twin<float>(c.columns, stream + 3)),
        sum(c.rows * c.columns, NAN),
        y(c.rows * (c.columns + c.gap)),
        statistics(2 * c.rows, NAN),
        mask(pf::ops::norm_record<float>::mask_size({c.rows, c.columns})),
        numbers(row_numbers(c.rows)),
        dy(random_twin<float>(c.rows * (c.columns + c.gap), stream + 4)),
        dsum(c.rows * (c.columns + c.gap)),
        dx(c.rows * (c.columns + c.gap)),
        dweight(c.columns, NAN),
        dbias(c.columns, NAN) {}

  static std::vector<std::uint64_t> row_numbers(index_t rows) {
    std::vector<std::uint64_t> result(static_cast<std::size_t>(rows));
    for (std::size_t i = 0; i < result.size(); ++i) result[i] = (std::uint64_t{1} << 33) + 7 * i;
    return result;
  }

  // On the host, then on the device; in a step of both.
  void forward(pf::cpu_context& host, pf::gpu_context& ctx) {
    const double probability = at.drops ? 0.3 : 0.0;
    on_host = {probability, host.next_random_stream(), 11, at.numbers ? numbers.host_data() : nullptr};
    on_device = {probability, ctx.next_random_stream(), 11, at.numbers ? numbers.device_data() : nullptr};
    const auto view = [&](float* data) { return matrix(data, at.rows, at.columns, at.gap); };
    const auto none = pf::tensor_view<const float, 2>();
    pf::ops::layer_norm_forward<float>(host,
                                       {view(x.host_data()), at.residual ? view(residual.host_data()) : none,
                                        on_host, at.sum ? sum.host_data() : nullptr},
                                       weight.host_data(), bias.host_data(), 1e-6, view(y.host_data()),
                                       {nullptr, statistics.host_data(), mask.host_data()});
    pf::ops::layer_norm_forward<float>(
        ctx,
        {view(x.device_data()), at.residual ? view(residual.device_data()) : none, on_device,
         at.sum ? sum.device_data() : nullptr},
        weight.device_data(), bias.device_data(), 1e-6, view(y.device_data()),
        {nullptr, statistics.device_data(), nullptr});
  }

  void backward(pf::cpu_context& host, pf::gpu_context& ctx, bool wanted) {
    const auto view = [&](float* data) { return matrix(data, at.rows, at.columns, at.gap); };
    const auto gradient = [&](float* data) { return wanted ? view(data) : pf::tensor_view<float, 2>(); };
    pf::ops::layer_norm_backward<float>(host, {sum.host_data(), statistics.host_data(), mask.host_data()},
                                        on_host, weight.host_data(), view(dy.host_data()),
                                        {dweight.host_data(), true}, {dbias.host_data()},
                                        gradient(dsum.host_data()), gradient(dx.host_data()));
    pf::ops::layer_norm_backward<float>(ctx, {sum.device_data(), statistics.device_data(), nullptr},
                                        on_device, weight.device_data(), view(dy.device_data()),
                                        {dweight.device_data(), true}, {dbias.device_data()},
                                        gradient(dsum.device_data()), gradient(dx.device_data()));
  }

  norm_case at;
  pf::ops::row_dropout on_host, on_device;
  twin<float> x, residual, weight, bias, sum, y, statistics;
  twin<std::int32_t> mask;
  twin<std::uint64_t> numbers;
  twin<float> dy, dsum, dx;
  twin<float> dweight, dbias;
};

}  // namespace

TEST_CASE("gpu layer norm: both passes, with and without dropout, residual and sum") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  std::uint64_t stream = 0;
  for (const norm_case& c : cases) {
    CAPTURE(c.rows);
    CAPTURE(c.columns);
    host.begin_step(stream);
    ctx.begin_step(stream);
    norm_run run(c, stream += 10);
    host.next_random_stream();  // not the first layer
    ctx.next_random_stream();
    run.forward(host, ctx);
    CHECK(difference(run.y) < 1e-5);
    if (c.columns > 1) CHECK(difference(run.statistics) < 1e-5);
    const bool sums = c.residual || c.drops;
    if (!c.sum || !sums) continue;
    CHECK(difference(run.sum) < 1e-6);
    for (const bool wanted : {true, false}) {
      run.backward(host, ctx, wanted);
      CHECK(difference(run.dsum) < 1e-5);
      CHECK(difference(run.dx) < 1e-5);
      CHECK(difference(run.dweight, 1.0) < 1e-6);
      CHECK(difference(run.dbias, 1.0) < 1e-6);
    }
  }
}

TEST_CASE("gpu layer norm: in place, unaligned, NaN, shapes that do not fit") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  constexpr index_t rows = 9, columns = 20;
  auto x = random_twin<float>(rows * columns + 1, 1);
  auto weight = random_twin<float>(columns + 1, 2), bias = random_twin<float>(columns, 3);
  x.host()[3 * columns + 5] = NAN;
  x.host()[4 * columns + 5] = std::numeric_limits<float>::infinity();
  twin<float> both(x.host());
  const pf::extents<2> shape{rows, columns};
  const pf::tensor_view<float, 2> mine(both.host_data() + 1, shape), its(both.device_data() + 1, shape);
  pf::ops::layer_norm_forward<float>(host, {mine, {}, {}, nullptr}, weight.host_data() + 1, bias.host_data(),
                                     1e-5, mine, {});
  pf::ops::layer_norm_forward<float>(ctx, {its, {}, {}, nullptr}, weight.device_data() + 1,
                                     bias.device_data(), 1e-5, its, {});
  CHECK(difference(both) < 1e-5);
  CHECK_THROWS_AS(pf::ops::layer_norm_forward<float>(ctx, {its, {}, {}, nullptr}, weight.device_data(),
                                                     bias.device_data(), 1e-5, its.slice(0, 0, 3), {}),
                  pf::shape_error);
  CHECK(pf::ops::norm_mask_size<float>(ctx, shape) == 0);
}
