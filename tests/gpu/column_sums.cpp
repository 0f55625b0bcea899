// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Sums over the rows of tall matrices, whose parts are added up by the last block of a launch: in groups, if
// there are more than kernels::grouped_parts.
#include "support.hpp"

#include <pufferfish/gpu/ops/norm.hpp>
#include <pufferfish/gpu/ops/products.hpp>
#include <pufferfish/gpu/runtime/graph.hpp>

using namespace gpu_test;
namespace kernels = pf::gpu::kernels;

namespace {

// One part, one group of parts, and several groups, the last one complete or not.
constexpr pf::extents<2> shapes[] = {{500, 12},  {2200, 130}, {70000, 3},  {40000, 1},
                                     {4500, 64}, {33000, 8},  {8200, 257}, {32768, 16}};

std::vector<unsigned> counters_of(pf::gpu_context& ctx) {
  std::vector<unsigned> counters(static_cast<std::size_t>(kernels::most_column_counters));
  ctx.synchronize();
  pf::gpu::device_memory().to_host(counters.data(), ctx.counters(), counters.size() * sizeof(unsigned));
  return counters;
}

}  // namespace

TEST_CASE("gpu sums of tall matrices: against the reference, the same bits again, counters at zero") {
  pf::gpu_context& ctx = gpu_context();
  bool grouped = false, alone = false;
  std::uint64_t stream = 1;
  for (const auto& shape : shapes) {
    CAPTURE(shape[0]);
    CAPTURE(shape[1]);
    const index_t parts = kernels::row_parts(shape[0], shape[1]);
    grouped = grouped || parts > kernels::grouped_parts;
    alone = alone || parts == 1;
    auto x = random_twin<float>(shape[0] * shape[1], stream++);
    twin<float> sums(shape[1], 2.0F), again(shape[1], 2.0F);
    pf::ops::reference::column_sums<float>(x.host_view(shape), sums.host_data(), true);
    for (twin<float>* to : {&sums, &again}) {
      pf::ops::column_sums<float>(ctx, x.device_view(shape), to->device_data(), true);
    }
    CHECK(difference(sums, 1.0) < 2e-6);
    CHECK(again.fetched() == sums.fetched());
    CHECK(counters_of(ctx) == std::vector<unsigned>(static_cast<std::size_t>(kernels::most_column_counters)));
  }
  CHECK(grouped);
  CHECK(alone);
}

TEST_CASE_TEMPLATE("gpu batch norm of tall matrices: statistics against the reference", T, float,
                   pf::gpu::bf16, pf::gpu::fp16) {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  std::uint64_t stream = 40;
  for (const auto& shape : shapes) {
    CAPTURE(shape[0]);
    CAPTURE(shape[1]);
    const index_t channels = shape[1];
    std::vector<float> values = random_twin<float>(shape[0] * channels, stream++).host();
    std::vector<T> narrow;
    for (std::size_t i = 0; i < values.size(); ++i) {  // a large mean, and a far first row
      narrow.push_back(static_cast<T>(values[i] + (i < static_cast<std::size_t>(channels) ? 40.0F : 16.0F)));
      values[i] = static_cast<float>(narrow.back());
    }
    twin<T> x(narrow);
    twin<float> statistics(2 * channels), batches(1), means(channels), variances(channels, 1.0F);
    std::vector<double> mean(static_cast<std::size_t>(channels)), variance(mean.size());
    pf::ops::reference::batch_norm_statistics<float>({values.data(), shape}, mean.data(), variance.data());
    pf::ops::batch_norm_use_batch<float>(host, mean.data(), variance.data(), channels, shape[0], 1e-5, 0.1,
                                         statistics.host_data(), means.host_data(), variances.host_data(),
                                         batches.host_data());
    pf::ops::batch_norm_use_batch<T>(ctx, x.device_view(shape), 1e-5, 0.1, statistics.device_data(),
                                     means.device_data(), variances.device_data(), batches.device_data());
    CHECK(difference(statistics) < 1e-6);
    CHECK(difference(means) < 1e-6);
    CHECK(difference(variances) < 1e-5);
    CHECK(batches.fetched() == batches.host());
  }
}

TEST_CASE("gpu sums: no shape needs more counters than a context has") {
  index_t most = 0;
  for (index_t columns = 1; columns < 70000; columns += columns < 1100 ? 1 : 37) {
    for (const index_t rows : {index_t{0}, index_t{100}, index_t{5000}, index_t{1} << 17, index_t{1} << 40}) {
      for (const index_t width : {1, 4, 8}) {  // elements that a thread reads at once
        const index_t units = (columns + width - 1) / width;
        index_t across = 1;
        while (across < 32 && across < units) across *= 2;
        most = std::max(most, kernels::column_counters(rows, columns, across * width));
      }
    }
  }
  CHECK(most <= kernels::most_column_counters);
  CHECK(most > kernels::most_column_counters / 4);
}

TEST_CASE("gpu sums and batch norm of tall matrices: launches") {
  pf::gpu_context ctx;
  const pf::extents<2> shape{20000, 8};
  auto x = random_twin<float>(shape[0] * shape[1], 90), weight = random_twin<float>(shape[1], 91);
  twin<float> y(x.size()), sums(6 * shape[1]), batches(1);
  float* const s = sums.device_data();
  const auto operations = [&](auto&& work) {
    work();  // takes the scratch memory
    ctx.synchronize();
    pf::gpu::detail::stream_capture capture(ctx.stream());
    work();
    return capture.finish().operations();
  };
  CHECK(operations([&] { pf::ops::column_sums<float>(ctx, x.device_view(shape), s, false); }) == 1);
  CHECK(operations([&] {
          pf::ops::batch_norm_forward<float>(ctx, x.device_view(shape), 1e-5, 0.1, s, s + 16, s + 24,
                                             batches.device_data(), weight.device_data(),
                                             weight.device_data(), y.device_view(shape));
        }) == 2);
  CHECK(operations([&] {
          pf::ops::batch_norm_backward<float>(ctx, x.device_view(shape), y.device_view(shape), s, s + 8,
                                              weight.device_data(), {s + 16}, {s + 24}, y.device_view(shape));
        }) == 2);
}
