// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Rows as wholes on the device against the CPU's.
#include "support.hpp"

#include <numeric>

#include <pufferfish/gpu/positions.hpp>

using namespace gpu_test;

namespace {

struct rows_case {
  index_t rows, columns, gap;
};
constexpr rows_case cases[] = {{0, 3, 0}, {1, 1, 0}, {5, 7, 1}, {40, 64, 0}, {33, 130, 2}, {3, 1100, 4}};

// 0 .. count - 1 in some order.
twin<index_t> some_order(index_t count, std::uint64_t stream) {
  std::vector<index_t> places;
  for (const std::uint32_t place : pf::random_permutation(count, pf::random_stream(5, stream))) {
    places.push_back(static_cast<index_t>(place));
  }
  return twin<index_t>(std::move(places));
}

}  // namespace

TEST_CASE("gpu rows: copied, cleared, gathered, scattered, rows of a table added, scaled") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  std::uint64_t stream = 0;
  for (const rows_case& c : cases) {
    CAPTURE(c.rows);
    CAPTURE(c.columns);
    const index_t step = c.columns + c.gap, size = c.rows * step;
    const auto view = [&](float* data) {
      return pf::tensor_view<float, 2>(data, {c.rows, c.columns}, {step, 1});
    };
    auto from = random_twin<float>(size, ++stream), to = random_twin<float>(size, ++stream);
    auto places = some_order(c.rows, ++stream);
    std::vector<std::int32_t> small(places.host().begin(), places.host().end());
    twin<std::int32_t> positions(small);
    const auto same = [&] { CHECK(to.fetched() == to.host()); };

    pf::ops::gather_rows<float>(host, view(from.host_data()), places.host_data(), view(to.host_data()));
    pf::ops::gather_rows<float>(ctx, view(from.device_data()), places.device_data(), view(to.device_data()));
    same();
    pf::ops::add_table_rows<float>(host, view(from.host_data()), positions.host_data(), view(to.host_data()));
    pf::ops::add_table_rows<float>(ctx, view(from.device_data()), positions.device_data(),
                                   view(to.device_data()));
    same();
    pf::ops::scatter_rows<float>(host, view(from.host_data()), places.host_data(), view(to.host_data()));
    pf::ops::scatter_rows<float>(ctx, view(from.device_data()), places.device_data(), view(to.device_data()));
    same();
    const index_t period = std::max<index_t>(1, c.rows / 3);
    pf::ops::add_repeated_rows<float>(host, view(from.host_data()), period, view(to.host_data()),
                                      view(to.host_data()));
    pf::ops::add_repeated_rows<float>(ctx, view(from.device_data()), period, view(to.device_data()),
                                      view(to.device_data()));
    same();
    pf::ops::scale<float>(host, 0.3F, to.host_span(), to.host_span());
    pf::ops::scale<float>(ctx, 0.3F, to.device_span(), to.device_span());
    same();
    pf::ops::copy_rows<float>(host, view(from.host_data()), view(to.host_data()));
    pf::ops::copy_rows<float>(ctx, view(from.device_data()), view(to.device_data()));
    same();
    pf::ops::clear_rows<float>(host, view(to.host_data()));
    pf::ops::clear_rows<float>(ctx, view(to.device_data()));
    same();
  }
  CHECK_THROWS_AS(pf::ops::copy_rows<float>(ctx, pf::tensor_view<float, 2>(nullptr, {2, 3}),
                                            pf::tensor_view<float, 2>(nullptr, {3, 2})),
                  pf::shape_error);
}

TEST_CASE("gpu rows: runs, and rows of no run") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  constexpr index_t sequences = 37, length = 3, columns = 9;
  std::vector<index_t> counts(sequences);
  for (std::size_t s = 0; s < counts.size(); ++s) counts[s] = static_cast<index_t>(s % 4);
  twin<index_t> lengths(counts), first(sequences, -1), count(sequences, -1);
  auto x = random_twin<float>(sequences * length * columns, 1);
  const pf::extents<2> shape{sequences * length, columns};

  const pf::token_runs whole =
      pf::ops::make_runs(ctx, sequences, length, nullptr, first.device_data(), count.device_data());
  pf::ops::make_runs(host, sequences, length, nullptr, first.host_data(), count.host_data());
  CHECK(first.fetched() == first.host());
  CHECK(count.fetched() == count.host());
  pf::ops::clear_rows_outside<float>(ctx, whole, x.device_view<2>(shape));
  CHECK(x.fetched() == x.host());
  pf::token_runs untold = whole;
  untold.total = -1;
  pf::ops::clear_rows_outside<float>(ctx, untold, x.device_view<2>(shape));
  CHECK(x.fetched() == x.host());

  const pf::token_runs some = pf::ops::make_runs(ctx, sequences, length, lengths.device_data(),
                                                 first.device_data(), count.device_data());
  CHECK(count.fetched() == counts);
  pf::ops::clear_rows_outside<float>(ctx, some, x.device_view<2>(shape));
  for (index_t s = 0; s < sequences; ++s) {
    for (index_t i = counts[static_cast<std::size_t>(s)]; i < length; ++i) {
      std::fill_n(x.host_data() + (s * length + i) * columns, columns, 0.0F);
    }
  }
  CHECK(x.fetched() == x.host());
}

TEST_CASE("gpu rows: a place outside of a table is NaN") {
  pf::gpu_context& ctx = gpu_context();
  twin<float> table(4, 1.0F), x(4, 1.0F);
  twin<std::int32_t> places(std::vector<std::int32_t>{2, 1});
  pf::ops::add_table_rows<float>(ctx, table.device_view<2>({2, 2}), places.device_data(),
                                 x.device_view<2>({2, 2}));
  const std::vector<float> found = x.fetched();
  CHECK(std::isnan(found[0]));
  CHECK(found[2] == 2.0F);
}
