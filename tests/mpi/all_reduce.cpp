// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/distributed.hpp>

namespace pf = pufferfish;

// Every rank runs every case in the same order. No REQUIRE before a collective: a rank that leaves a case
// early would leave the others waiting.

namespace {

static_assert(pf::messenger<pf::mpi::communicator>);
static_assert(pf::messenger<pf::self>);

template <class T>
std::vector<T> elements(int rank, std::size_t count) {
  std::vector<T> result(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t bits = pf::hasher(17).number(rank).number(i).digest();
    result[i] = static_cast<T>((static_cast<double>(bits >> 11) * 0x1p-53 - 0.5) *
                               static_cast<double>(1U << bits % 12));
  }
  return result;
}

template <class T>
std::vector<std::vector<T>> elements_of_all(int ranks, std::size_t count) {
  std::vector<std::vector<T>> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(elements<T>(rank, count));
  return all;
}

// The orders that the headers document, written serially.

template <class T>
std::vector<T> ring_serially(const std::vector<std::vector<T>>& all) {
  const std::size_t ranks = all.size(), count = all[0].size();
  std::vector<T> sum(count);
  for (std::size_t c = 0; c < ranks; ++c) {
    for (std::size_t i = count * c / ranks; i < count * (c + 1) / ranks; ++i) {
      T total = all[c][i];
      for (std::size_t r = 1; r < ranks; ++r) total = total + all[(c + r) % ranks][i];
      sum[i] = total;
    }
  }
  return sum;
}

template <class T>
std::vector<T> doubling_serially(std::vector<std::vector<T>> all) {
  std::size_t power = 1;
  while (2 * power <= all.size()) power *= 2;
  const std::size_t count = all[0].size();
  for (std::size_t r = power; r < all.size(); ++r) {
    for (std::size_t i = 0; i < count; ++i) all[r - power][i] += all[r][i];
  }
  for (std::size_t d = 1; d < power; d *= 2) {
    for (std::size_t r = 0; r < power; r += 2 * d) {
      for (std::size_t i = 0; i < count; ++i) all[r][i] = all[r][i] + all[r + d][i];
    }
  }
  return all[0];
}

std::vector<float> narrow_serially(const std::vector<std::vector<float>>& all) {
  const std::size_t ranks = all.size(), count = all[0].size();
  if (ranks == 1) return all[0];
  std::vector<float> sum(count);
  for (std::size_t c = 0; c < ranks; ++c) {
    for (std::size_t i = count * c / ranks; i < count * (c + 1) / ranks; ++i) {
      float total = all[c][i];
      for (std::size_t r = 1; r < ranks; ++r)
        total += static_cast<float>(pf::bfloat16(all[(c + ranks - r) % ranks][i]));
      sum[i] = static_cast<float>(pf::bfloat16(total));
    }
  }
  return sum;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

const std::vector<std::size_t> lengths = {0, 1, 2, 3, 5, 6, 7, 64, 1000, 100003, 1048577};

template <class T>
void check_orders(pf::mpi::communicator& comm) {
  std::vector<T> scratch;
  for (const std::size_t count : lengths) {
    CAPTURE(count);
    const auto all = elements_of_all<T>(comm.size(), count);
    std::vector<T> values = elements<T>(comm.rank(), count);
    pf::ring_all_reduce(comm, std::span<T>(values), scratch);
    CHECK(same_bits(values, ring_serially(all)));
    values = elements<T>(comm.rank(), count);
    pf::recursive_doubling_all_reduce(comm, std::span<T>(values), scratch);
    CHECK(same_bits(values, doubling_serially(all)));
  }
}

TEST_CASE("ring and recursive doubling add in their documented order, bit for bit") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  check_orders<float>(comm);
  check_orders<double>(comm);
}

TEST_CASE("narrow messages: float sums of rounded numbers, rounded once more") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  std::vector<pf::bfloat16> scratch;
  for (const std::size_t count : lengths) {
    CAPTURE(count);
    std::vector<float> values = elements<float>(comm.rank(), count);
    pf::narrow_all_reduce(comm, std::span<float>(values), scratch);
    CHECK(same_bits(values, narrow_serially(elements_of_all<float>(comm.size(), count))));
  }
}

TEST_CASE("messages longer than what may be under way; the ring's scratch is shorter than its chunks") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  const auto ranks = static_cast<std::size_t>(comm.size());
  const std::size_t chunk = 4300000, most = std::size_t{15} << 20;
  REQUIRE(chunk * sizeof(float) > most);
  // Small integers, whose sums are exact in every order and type.
  const auto fill = [&](std::vector<float>& values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(i % 7) + static_cast<float>(comm.rank());
  };
  const auto wrong = [&](const std::vector<float>& values) {
    const auto p = static_cast<float>(ranks);
    std::size_t count = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      count += values[i] == p * static_cast<float>(i % 7) + p * (p - 1) / 2 ? 0U : 1U;
    }
    return count;
  };
  std::vector<float> values(2 * chunk), scratch;  // two ranks: of each a chunk
  fill(values);
  pf::ring_all_reduce(comm, std::span<float>(values), scratch);
  CHECK(wrong(values) == 0);
  CHECK(scratch.size() * sizeof(float) <= most);
  fill(values);
  pf::recursive_doubling_all_reduce(comm, std::span<float>(values), scratch);
  CHECK(wrong(values) == 0);
  values.resize(4 * chunk);
  fill(values);
  std::vector<pf::bfloat16> narrow;
  pf::narrow_all_reduce(comm, std::span<float>(values), narrow);
  CHECK(wrong(values) == 0);
  CHECK(narrow.size() <= values.size() / ranks + 1 + 2 * most / sizeof(pf::bfloat16));
}

TEST_CASE("messages: in order, in pieces where MPI counts are short, a rank outside the group is refused") {
  pf::mpi::communicator comm(MPI_COMM_WORLD, 7);
  const int next = (comm.rank() + 1) % comm.size(), before = (comm.rank() + comm.size() - 1) % comm.size();
  const std::vector<double> first = elements<double>(comm.rank(), 33),
                            second = elements<double>(comm.rank() + 50, 5);
  std::vector<double> got_first(33), got_second(5);
  auto r1 = comm.start_receive(std::span<double>(got_first), before);
  auto r2 = comm.start_receive(std::span<double>(got_second), before);
  auto s1 = comm.start_send(std::span<const double>(first), next);
  auto s2 = comm.start_send(std::span<const double>(second), next);
  r1.wait();
  r2.wait();
  s1.wait();
  s2.wait();
  CHECK(same_bits(got_first, elements<double>(before, 33)));
  CHECK(same_bits(got_second, elements<double>(before + 50, 5)));
  CHECK_THROWS_AS(static_cast<void>(comm.start_send(std::span<const double>(first), comm.size())),
                  pf::value_error);
  CHECK_THROWS_AS(static_cast<void>(comm.start_receive(std::span<double>(got_first), -1)), pf::value_error);
}

}  // namespace
