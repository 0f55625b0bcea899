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

template <class T>
void check_columns(const rows_case& c, std::uint64_t stream) {
  pf::gpu_context& ctx = gpu_context();
  std::vector<float> numbers;
  for (index_t j = 0; j < c.columns; ++j) {
    if (j % 3 != 1) numbers.push_back(static_cast<float>(j) - 0.3F);  // is rounded
  }
  twin<float> columns(numbers);
  const index_t count = columns.size(), step = c.columns + c.gap;
  auto wide = random_twin<T>(c.rows * step, stream),
       narrow = random_twin<T>(c.rows * (count + 1), stream + 1);
  const auto whole = [&](T* data) { return pf::tensor_view<T, 2>(data, {c.rows, c.columns}, {step, 1}); };
  const auto part = [&](T* data) { return pf::tensor_view<T, 2>(data, {c.rows, count}, {count + 1, 1}); };
  const auto number = [&](index_t j) {
    return static_cast<std::size_t>(columns.host()[static_cast<std::size_t>(j)] + 0.5F);
  };
  pf::ops::gather_columns<T>(ctx, whole(wide.device_data()), columns.device_data(),
                             part(narrow.device_data()));
  for (index_t m = 0; m < c.rows; ++m) {
    for (index_t j = 0; j < count; ++j) {
      narrow.host()[static_cast<std::size_t>(m * (count + 1) + j)] =
          wide.host()[static_cast<std::size_t>(m * step) + number(j)];
    }
  }
  CHECK(difference(narrow) == 0.0);
  for (const bool add : {true, false}) {
    pf::ops::scatter_columns<T>(ctx, part(narrow.device_data()), columns.device_data(),
                                whole(wide.device_data()), add);
    for (index_t m = 0; m < c.rows; ++m) {
      for (index_t j = 0; j < c.columns && !add; ++j)
        wide.host()[static_cast<std::size_t>(m * step + j)] = T{};
      for (index_t j = 0; j < count; ++j) {
        T& to = wide.host()[static_cast<std::size_t>(m * step) + number(j)];
        to = static_cast<T>(static_cast<float>(to) +
                            static_cast<float>(narrow.host()[static_cast<std::size_t>(m * (count + 1) + j)]));
      }
    }
    CHECK(difference(wide) == 0.0);
  }
}

TEST_CASE("gpu rows: columns gathered, scattered and added, in all formats") {
  std::uint64_t stream = 100;
  for (const rows_case& c : cases) {
    CAPTURE(c.rows);
    CAPTURE(c.columns);
    check_columns<float>(c, stream += 2);
    check_columns<pf::gpu::bf16>(c, stream += 2);
    check_columns<pf::gpu::fp16>(c, stream += 2);
  }
  // A number that is no column: NaN, and ignored.
  pf::gpu_context& ctx = gpu_context();
  twin<float> columns(std::vector<float>{1.0F, 2.0F, -1.0F, NAN}), x(std::vector<float>{3.0F, 4.0F});
  twin<float> y(4, 7.0F);
  pf::ops::gather_columns<float>(ctx, x.device_view<2>({1, 2}), columns.device_data(),
                                 y.device_view<2>({1, 4}));
  CHECK(difference(y.fetched(), {4.0F, NAN, NAN, NAN}) == 0.0);
  pf::ops::scatter_columns<float>(ctx, y.device_view<2>({1, 4}), columns.device_data(),
                                  x.device_view<2>({1, 2}), false);
  CHECK(x.fetched() == std::vector<float>{0.0F, 4.0F});
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
