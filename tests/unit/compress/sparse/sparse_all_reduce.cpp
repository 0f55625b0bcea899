// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include <pufferfish/compress/quantize/qsgd.hpp>
#include <pufferfish/compress/sparse/coded_sparse_all_reduce.hpp>
#include <pufferfish/core/random.hpp>
#include <pufferfish/distributed/self.hpp>

#include "../../../threads/thread_ranks.hpp"

namespace {

using namespace pufferfish;

constexpr sparse_algorithm algorithms[] = {sparse_algorithm::recursive_doubling, sparse_algorithm::split,
                                           sparse_algorithm::split_dense};

template <class T>
std::vector<T> elements_of(const sparse_stream<T>& stream) {
  std::vector<T> result(static_cast<std::size_t>(stream.length()), T(0));
  stream.add_to(result);
  return result;
}

/// Which elements each rank has.
enum class support { random, same, disjoint, empty, full, one_rank };

template <class T>
sparse_stream<T> stream_of(support kind, index_t length, int rank, int ranks) {
  const random_stream random(static_cast<std::uint64_t>(rank) + 3, 8);
  std::vector<std::int32_t> indices;
  std::vector<T> values;
  for (index_t i = 0; i < length; ++i) {
    const auto number = static_cast<std::uint64_t>(i);
    const bool has = kind == support::random     ? random.word(number) % 5 == 0
                     : kind == support::same     ? i % 7 == 2
                     : kind == support::disjoint ? i % (3 * ranks) == rank
                     : kind == support::full     ? true
                     : kind == support::one_rank ? rank == ranks / 2 && i % 3 == 0
                                                 : false;
    if (!has) continue;
    indices.push_back(static_cast<std::int32_t>(i));
    // Zeros of both signs travel too.
    values.push_back(i % 9 == 0 ? T(0) : i % 11 == 0 ? -T(0) : static_cast<T>(random.normal(number)));
  }
  return {length, indices, values};
}

/// What a rank ended with.
template <class T>
struct outcome {
  sparse_stream<T> sum;
  sparse_all_reduce_report report;
};

template <class T, class Make>
std::vector<outcome<T>> sums(int ranks, const sparse_all_reduce_options& options, const Make& make) {
  std::vector<outcome<T>> all(static_cast<std::size_t>(ranks));
  thread_ranks::run(ranks, [&](thread_ranks::communicator& comm) {
    outcome<T>& mine = all[static_cast<std::size_t>(comm.rank())];
    mine.sum = make(comm.rank());
    mine.report = sparse_all_reduce(comm, mine.sum, options);
  });
  return all;
}

template <class T>
bool same_bits(const sparse_stream<T>& a, const sparse_stream<T>& b) {
  const auto equal = [](const auto& x, const auto& y) {
    return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size_bytes()) == 0);
  };
  return a.is_dense() == b.is_dense() && equal(a.indices(), b.indices()) && equal(a.values(), b.values());
}

TEST_CASE_TEMPLATE("sparse_all_reduce: every algorithm gives the dense sum, the same bits on all ranks", T,
                   float, double) {
  for (int ranks = 1; ranks <= 5; ++ranks) {
    for (const index_t length : {0, 1, 3, 40, 20001}) {
      for (const support kind : {support::random, support::same, support::disjoint, support::empty,
                                 support::full, support::one_rank}) {
        std::vector<T> serial(static_cast<std::size_t>(length), T(0));
        for (int rank = 0; rank < ranks; ++rank) stream_of<T>(kind, length, rank, ranks).add_to(serial);
        for (const sparse_algorithm algorithm : algorithms) {
          CAPTURE(ranks);
          CAPTURE(length);
          CAPTURE(static_cast<int>(kind));
          CAPTURE(std::string(to_string(algorithm)));
          const auto all =
              sums<T>(ranks, {algorithm}, [&](int rank) { return stream_of<T>(kind, length, rank, ranks); });
          CHECK(all[0].report.algorithm == algorithm);
          for (const outcome<T>& one : all) CHECK(same_bits(one.sum, all[0].sum));
          const std::vector<T> found = elements_of(all[0].sum);
          if (algorithm != sparse_algorithm::recursive_doubling) {
            CHECK(found == serial);  // the order of the ranks
          } else {
            double worst = 0;
            for (std::size_t i = 0; i < found.size(); ++i) {
              worst = std::max(worst, std::abs(static_cast<double>(found[i] - serial[i])));
            }
            CHECK(worst <= (sizeof(T) == 4 ? 2e-6 : 5e-15));
          }
        }
      }
    }
  }
}

TEST_CASE("sparse_all_reduce: recursive doubling adds in the order of the dense one") {
  for (int ranks = 2; ranks <= 5; ++ranks) {
    CAPTURE(ranks);
    std::vector<std::vector<float>> dense(static_cast<std::size_t>(ranks));
    thread_ranks::run(ranks, [&](thread_ranks::communicator& comm) {
      std::vector<float>&mine = dense[static_cast<std::size_t>(comm.rank())], scratch;
      mine = elements_of(stream_of<float>(support::random, 5000, comm.rank(), ranks));
      recursive_doubling_all_reduce(comm, std::span<float>(mine), scratch);
    });
    const auto all = sums<float>(ranks, {sparse_algorithm::recursive_doubling}, [&](int rank) {
      return stream_of<float>(support::random, 5000, rank, ranks);
    });
    CHECK(elements_of(all[0].sum) == dense[0]);
  }
}

TEST_CASE("sparse_all_reduce: formats of the sum, and explicit zeros") {
  // The ranks have different even indices of 60, ten each, so that every part has delta entries; the eleventh
  // entry is an odd one.
  const auto made = [](int each) {
    return [each](int rank) {
      std::vector<std::int32_t> indices;
      for (int i = 0; i < each; ++i) indices.push_back(i < 10 ? 2 * (3 * i + rank) : 2 * rank + 1);
      std::sort(indices.begin(), indices.end());
      return sparse_stream<float>(60, indices, std::vector<float>(indices.size(), 0.0F));
    };
  };
  for (const sparse_algorithm algorithm : {sparse_algorithm::recursive_doubling, sparse_algorithm::split}) {
    const auto at = sums<float>(3, {algorithm}, made(10)), above = sums<float>(3, {algorithm}, made(11));
    CHECK_FALSE(at[1].sum.is_dense());
    CHECK(at[1].sum.count() == 30);  // half of 60, all of them zeros
    CHECK(above[1].sum.is_dense());
  }
  CHECK(sums<float>(3, {sparse_algorithm::split_dense}, made(1))[2].sum.is_dense());
}

TEST_CASE("sparse_all_reduce: bytes that are sent") {
  // 1200 elements on 3 ranks; each rank has entries 0, 3, ..., 297 of its own, all in the part of rank 0.
  const auto make = [](int rank) {
    std::vector<std::int32_t> indices;
    for (int i = 0; i < 100; ++i) indices.push_back(3 * i + rank);
    return sparse_stream<float>(1200, indices, std::vector<float>(100, 1.0F));
  };
  const auto split = sums<float>(3, {sparse_algorithm::split}, make);
  // Two headers to the owners, two for the sums; then 100 entries to rank 0. The sum of 300 entries is dense,
  // 400 elements. Rank 2, next before rank 0, is the only one that does not pass it on.
  CHECK(split[0].report.sent_bytes == 4 * 8 + 1600);
  CHECK(split[1].report.sent_bytes == 4 * 8 + 800 + 1600);
  CHECK(split[2].report.sent_bytes == 4 * 8 + 800);
  const auto dense = sums<float>(3, {sparse_algorithm::split_dense}, make);
  CHECK(dense[0].report.sent_bytes == 2 * 8 + 2 * 1600);
  CHECK(dense[1].report.sent_bytes == 2 * 8 + 800 + 2 * 1600);
  // Rank 2 gives its stream to rank 0; ranks 0 and 1 exchange 200 and 100 entries; rank 2 gets 300.
  const auto doubling = sums<float>(3, {sparse_algorithm::recursive_doubling}, make);
  CHECK(doubling[2].report.sent_bytes == 8 + 800);
  CHECK(doubling[1].report.sent_bytes == 8 + 800);
  CHECK(doubling[0].report.sent_bytes == 8 + 1600 + 8 + 2400);
}

TEST_CASE("sparse_all_reduce: the choice by the expected union and by bytes") {
  CHECK(expected_union(1000, 10, 1) == doctest::Approx(10));
  CHECK(expected_union(1000, 10, 8) / 1000 == doctest::Approx(0.0773).epsilon(0.001));
  CHECK(expected_union(1000, 100, 8) / 1000 == doctest::Approx(0.5695).epsilon(0.001));
  CHECK(expected_union(1000, 1000, 2) == 1000);
  CHECK(expected_union(0, 0, 4) == 0);
  const auto choice = [](index_t length, index_t count, int ranks,
                         const sparse_all_reduce_options& options = {}) {
    return choose_sparse_algorithm<float>(length, count, ranks, options);
  };
  // 8 ranks: 10 % of the elements each is a union above half, 1 % is not.
  CHECK(choice(1000000, 100000, 8) == sparse_algorithm::split_dense);
  CHECK(choice(1000000, 10000, 8) == sparse_algorithm::split);
  // 8 ranks x 1024 entries x 8 bytes = 64 KiB.
  CHECK(choice(1000000, 1024, 8) == sparse_algorithm::recursive_doubling);
  CHECK(choice(1000000, 1025, 8) == sparse_algorithm::split);
  CHECK(choose_sparse_algorithm<double>(1000000, 1024, 8, {}) == sparse_algorithm::split);
  sparse_all_reduce_options options;
  options.most_doubling_bytes = 0;
  CHECK(choice(1000000, 1024, 8, options) == sparse_algorithm::split);
  options.dense_factor = 0.01;
  CHECK(choice(1000000, 1024, 8, options) == sparse_algorithm::split_dense);
  // The largest count of all ranks decides on all of them.
  const auto all = sums<float>(4, {}, [](int rank) {
    return stream_of<float>(rank == 2 ? support::full : support::empty, 1000, rank, 4);
  });
  for (const auto& one : all) CHECK(one.report.algorithm == sparse_algorithm::split_dense);
}

TEST_CASE("sparse_all_reduce: streams of different lengths are refused on all ranks") {
  int refused = 0;
  for (int rank = 0; rank < 3; ++rank) {
    CHECK_THROWS_AS(thread_ranks::run(3,
                                      [&](thread_ranks::communicator& comm) {
                                        sparse_stream<float> mine(comm.rank() == 1 ? 9 : 10);
                                        try {
                                          sparse_all_reduce(comm, mine);
                                        } catch (const shape_error&) {
                                          if (comm.rank() == rank) ++refused;
                                          throw;
                                        }
                                      }),
                    shape_error);
  }
  CHECK(refused == 3);
}

TEST_CASE("coded_sparse_all_reduce: codes of the sum, the same bits on all ranks") {
  // One bucket per part. Random rounding is wrong by less than a level, which is the largest magnitude of the
  // part divided by 7 or 127.
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (const index_t length : {0, 1, 3, 1000, 5003}) {
      for (const int bits : {4, 8}) {
        CAPTURE(ranks);
        CAPTURE(length);
        CAPTURE(bits);
        qsgd_options options;
        options.bits = bits;
        options.bucket = 8192;
        options.norm = qsgd_norm::max;
        std::vector<double> serial(static_cast<std::size_t>(length), 0.0);
        for (int rank = 0; rank < ranks; ++rank) {
          stream_of<double>(support::random, length, rank, ranks).add_to(serial);
        }
        std::vector<outcome<float>> all(static_cast<std::size_t>(ranks));
        thread_ranks::run(ranks, [&](thread_ranks::communicator& comm) {
          cpu_context ctx;
          outcome<float>& mine = all[static_cast<std::size_t>(comm.rank())];
          mine.sum = stream_of<float>(support::random, length, comm.rank(), ranks);
          mine.report = coded_sparse_all_reduce<qsgd_codec<float>>(comm, ctx, 3, mine.sum, options);
        });
        const std::vector<float> found = elements_of(all[0].sum);
        for (const auto& one : all) CHECK(same_bits(one.sum, all[0].sum));
        const double levels = bits == 4 ? 7.0 : 127.0;
        double largest = 0.0, worst = 0.0;
        for (std::size_t i = 0; i < serial.size(); ++i) {
          largest = std::max(largest, std::abs(serial[i]));
          worst = std::max(worst, std::abs(static_cast<double>(found[i]) - serial[i]));
        }
        CHECK(worst <= 1.0001 * largest / levels);
        // Coded, not sent whole.
        if (length == 5003) CHECK(worst > 0.1 * largest / levels);
        if (length != 5003 || ranks == 1) continue;
        const auto dense = sums<float>(ranks, {sparse_algorithm::split_dense}, [&](int rank) {
          return stream_of<float>(support::random, length, rank, ranks);
        });
        CHECK(all[0].report.sent_bytes < dense[0].report.sent_bytes);
      }
    }
  }
}

TEST_CASE("sparse_all_reduce: alone the stream stays as it is") {
  self comm;
  auto stream = stream_of<float>(support::random, 100, 0, 1);
  const auto before = stream;
  CHECK(sparse_all_reduce(comm, stream).sent_bytes == 0);
  CHECK(same_bits(before, stream));
}

}  // namespace
