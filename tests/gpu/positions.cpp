// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Rows as wholes on the device against the CPU's.
#include "support.hpp"

#include <pufferfish/core/tensor.hpp>
#include <pufferfish/gpu/ops/attention.hpp>
#include <pufferfish/gpu/ops/copy.hpp>
#include <pufferfish/gpu/ops/embedding.hpp>

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

TEST_CASE("gpu rows: copied, cleared, gathered, scattered, scaled") {
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
    const auto same = [&] { CHECK(to.fetched() == to.host()); };

    pf::ops::gather_rows<float>(host, view(from.host_data()), places.host_data(), view(to.host_data()));
    pf::ops::gather_rows<float>(ctx, view(from.device_data()), places.device_data(), view(to.device_data()));
    same();
    pf::ops::scatter_rows<float>(host, view(from.host_data()), places.host_data(), view(to.host_data()));
    pf::ops::scatter_rows<float>(ctx, view(from.device_data()), places.device_data(), view(to.device_data()));
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

TEST_CASE("gpu rows: sinusoids of positions") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  std::uint64_t stream = 50;
  for (const rows_case& c : cases) {
    CAPTURE(c.rows);
    CAPTURE(c.columns);
    constexpr index_t positions = 200;
    pf::tensor<float, 2> table({positions, c.columns});
    for (index_t p = 0; p < positions; ++p) {
      for (index_t j = 0; j < c.columns; ++j) {
        table(p, j) = static_cast<float>(pf::ops::sinusoid(p, j, c.columns));
      }
    }
    const index_t step = c.columns + c.gap;
    const auto view = [&](float* data) {
      return pf::tensor_view<float, 2>(data, {c.rows, c.columns}, {step, 1});
    };
    auto x = random_twin<float>(c.rows * step, ++stream), y = random_twin<float>(c.rows * step, ++stream);
    std::vector<std::int32_t> numbers(static_cast<std::size_t>(c.rows));
    for (std::size_t i = 0; i < numbers.size(); ++i)
      numbers[i] = static_cast<std::int32_t>(i * 37 % positions);
    twin<std::int32_t> places(numbers);
    pf::ops::add_positions<float>(host, table, places.host_data(), view(x.host_data()));
    pf::ops::add_positions<float>(ctx, table, places.device_data(), view(x.device_data()));
    CHECK(difference(x) < 1e-6);
    pf::ops::add_positions_in_turn<float>(host, table, 13, view(x.host_data()), view(y.host_data()));
    pf::ops::add_positions_in_turn<float>(ctx, table, 13, view(x.device_data()), view(y.device_data()));
    CHECK(difference(y) < 1e-6);
  }
}

TEST_CASE("gpu rows: what the host has written") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  twin<std::int32_t> place(1000);
  pf::scratch_frame notes(ctx.host_scratch());
  auto* const written = pf::ops::upload_buffer(ctx, notes, place.device_data(), place.size());
  for (index_t i = 0; i < place.size(); ++i) {
    written[i] = static_cast<std::int32_t>(i);
    place.host()[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i);
  }
  pf::ops::upload(ctx, written, place.device_data(), place.size());
  std::fill_n(written, place.size(), -1);
  pf::ops::upload(ctx, written, place.device_data(), 0);
  ctx.synchronize();
  CHECK(place.fetched() == place.host());
  CHECK(pf::ops::upload_buffer(host, notes, place.host_data(), place.size()) == place.host_data());
}
