// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Statistics that every rank has collected from its own rows, summed over the ranks.
#include <doctest/doctest.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/core/random.hpp>
#include <pufferfish/distributed.hpp>
#include <pufferfish/lowrank.hpp>

namespace {

using namespace pufferfish;

constexpr index_t all_rows = 37;

/// The global batch: all_rows rows of `columns` numbers.
tensor<double, 2> numbers(index_t columns, std::uint64_t stream) {
  tensor<double, 2> made({all_rows, columns});
  fill_normal<double>(made.flat(), 1.0, {5, stream});
  return made;
}

/// Statistics of rows first .. last - 1 of the global batch: of a linear layer by inputs and gradients, of a
/// convolution of two groups by outputs, and of an embedding by tokens. No rows: nothing is added.
network_statistics statistics_of(index_t first, index_t last) {
  network_statistics all;
  const auto add_layer = [&](const char* name, std::vector<output_statistics> matrices) {
    all.layers.emplace_back(std::move(matrices)).name = name;
  };
  add_layer("fc 1", {output_statistics(8, 5)});
  add_layer("conv", {output_statistics(3, 9), output_statistics(3, 9)});
  add_layer("table", {output_statistics(4, 11)});
  all.layers[0].output_scale.assign(8, static_cast<double>(first));
  all.layers[1].normalized = true;
  if (first == last) return all;
  const auto rows = [&](index_t columns, std::uint64_t stream) {
    const tensor<double, 2> batch = numbers(columns, stream);
    return tensor<double, 2>(tensor_view<const double, 2>(batch).slice(0, first, last - first));
  };
  const tensor<double, 2> x = rows(5, 1), dy = rows(8, 2), y = rows(6, 3);
  output_statistics& fc = all.layers[0].matrices[0];
  fc.add_inputs(tensor_view<const double, 2>(x));
  fc.add_gradients(tensor_view<const double, 2>(dy), static_cast<double>(all_rows));
  fc.add_batch(static_cast<double>(last - first), static_cast<double>(last - first));
  for (index_t g = 0; g < 2; ++g) {
    all.layers[1].matrices[static_cast<std::size_t>(g)].add_outputs(
        tensor_view<const double, 2>(y).slice(1, 3 * g, 3));
  }
  std::vector<std::int32_t> tokens;
  for (index_t i = first; i < last; ++i) tokens.push_back(static_cast<std::int32_t>(i * i % 11));
  all.layers[2].matrices[0].add_tokens(tokens);
  return all;
}

/// Statistics of this rank's rows. Of more than two ranks, the last one has none.
network_statistics own_statistics(const mpi::communicator& comm) {
  const index_t with_rows = comm.size() > 2 ? comm.size() - 1 : comm.size();
  const auto bound = [&](index_t rank) { return all_rows * std::min(rank, with_rows) / with_rows; };
  return statistics_of(bound(comm.rank()), bound(comm.rank() + 1));
}

/// All sums, one after another.
std::vector<double> sums_of(network_statistics& statistics) {
  std::vector<double> all;
  for (layer_statistics& layer : statistics.layers) {
    for (output_statistics& one : layer.matrices) {
      for (const auto& part : one.parts()) all.insert(all.end(), part.values.begin(), part.values.end());
    }
  }
  return all;
}

TEST_CASE(
    "statistics summed over ranks are those of one rank with all rows, with the same bits on every rank") {
  mpi::communicator comm(MPI_COMM_WORLD);
  network_statistics seen = own_statistics(comm), whole = statistics_of(0, all_rows);
  const network_statistics before = seen;
  sum_over_ranks(comm, seen);
  const std::vector<double> found = sums_of(seen), expected = sums_of(whole);
  REQUIRE(found.size() == expected.size());
  double worst = 0.0, largest = 0.0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    worst = std::max(worst, std::abs(found[i] - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  CHECK(worst <= 1e-13 * largest);
  if (comm.size() == 1) CHECK(found == expected);
  const std::vector<std::uint64_t> digests = comm.all_gather(digest(std::span<const double>(found)));
  for (const std::uint64_t other : digests) CHECK(other == digests[0]);
  CHECK(seen.layers[2].matrices[0].token_shares() == whole.layers[2].matrices[0].token_shares());
  CHECK(seen.layers[0].matrices[0].rows_of_sample() == 1.0);
  // The other members are the rank's own.
  CHECK(seen.layers[1].normalized);
  CHECK(seen.layers[0].output_scale == before.layers[0].output_scale);
}

TEST_CASE("statistics of other layers on one rank are refused on all, and nothing is summed") {
  mpi::communicator comm(MPI_COMM_WORLD);
  if (comm.size() == 1) return;
  const bool odd_one = comm.rank() == comm.size() - 1;
  network_statistics seen = own_statistics(comm);
  if (odd_one) seen.layers[1].matrices[0] = output_statistics(3, 10);
  const std::vector<double> before = sums_of(seen);
  CHECK_THROWS_WITH_AS(sum_over_ranks(comm, seen),
                       doctest::Contains("statistics differs between ranks at line 2"), state_error);
  CHECK(sums_of(seen) == before);
  seen = own_statistics(comm);
  if (odd_one) seen.layers.pop_back();
  CHECK_THROWS_WITH_AS(sum_over_ranks(comm, seen), doctest::Contains("at line 4"), state_error);
}

}  // namespace
