// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/distributed/self.hpp>

namespace pf = pufferfish;

namespace {

struct not_a_communicator {
  int rank() const { return 0; }
  int size() const { return 1; }
};

/// Stands for a group of which this process is one: all_gather answers with prepared values.
class scripted : public pf::self {
 public:
  explicit scripted(std::vector<std::uint64_t> gathered) : gathered_(std::move(gathered)) {}
  int size() const { return static_cast<int>(gathered_.size()); }
  template <class T>
  std::vector<T> all_gather(const T&) {
    return gathered_;
  }

 private:
  std::vector<std::uint64_t> gathered_;
};

std::string refusal(std::vector<std::uint64_t> digests) {
  scripted comm(std::move(digests));
  try {
    pf::agree(comm, "network", 0);
  } catch (const pf::state_error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

static_assert(pf::communicator<pf::self>);
static_assert(!pf::communicator<not_a_communicator>);
static_assert(!pf::communicator<int>);
static_assert(pf::collective_request<pf::self::request>);
static_assert(!pf::collective_request<int>, "requests are move-only");
static_assert(std::is_empty_v<pf::self> && std::is_empty_v<pf::self::request>);
static_assert(pf::is_reducible_v<float> && pf::is_reducible_v<std::uint64_t> && pf::is_reducible_v<int>);
static_assert(!pf::is_reducible_v<bool> && !pf::is_reducible_v<char> && !pf::is_reducible_v<const float>);

TEST_CASE("self: every collective leaves the memory as it is") {
  pf::self comm;
  CHECK(comm.rank() == 0);
  CHECK(comm.size() == 1);
  const std::vector<float> original{1.5F, -2.25F, 1e-30F, 3e30F};
  std::vector<float> values = original;
  comm.all_reduce_sum(std::span(values));
  comm.all_reduce_min(std::span(values));
  comm.all_reduce_max(std::span(values));
  comm.broadcast(std::span(values), 0);
  comm.broadcast_bytes(std::as_writable_bytes(std::span(values)), 0);
  comm.barrier();
  CHECK(values == original);
  CHECK(comm.all_gather(std::int64_t{-7}) == std::vector<std::int64_t>{-7});
}

TEST_CASE("self: a request is done, also when moved") {
  pf::self comm;
  std::vector<double> values{1, 2, 3};
  auto request = comm.start_all_reduce_sum(std::span(values));
  CHECK(request.done());
  request.wait();
  auto moved = std::move(request);
  moved.wait();
  CHECK(moved.done());
  CHECK(values == std::vector<double>{1, 2, 3});
}

TEST_CASE("self: a root other than 0 is an error with both numbers") {
  pf::self comm;
  std::vector<float> values(3);
  CHECK_THROWS_WITH_AS(comm.broadcast(std::span(values), 1),
                       "self: broadcast: root 1 is outside the group of 1 rank", pf::value_error);
  CHECK_THROWS_AS(comm.broadcast_bytes(std::as_writable_bytes(std::span(values)), -1), pf::value_error);
}

TEST_CASE("mean and agree on one rank do nothing") {
  pf::self comm;
  std::vector<double> values{1.0 / 3, 5e-324};
  const std::vector<double> original = values;
  pf::mean(comm, std::span(values));
  CHECK(values == original);
  CHECK_NOTHROW(pf::agree(comm, "network", 17));
  CHECK_NOTHROW(pf::agree_on_lines(comm, "network", "a\nb"));
}

TEST_CASE("agree: the text names the ranks, the odd one first") {
  CHECK(refusal({5, 5, 5, 5}).empty());
  CHECK(refusal({16, 16, 10, 16}) ==
        "network differs between ranks: rank 2 has digest 0x000000000000000a; "
        "ranks 0, 1, 3 have digest 0x0000000000000010");
  CHECK(refusal({1, 2}) ==
        "network differs between ranks: rank 0 has digest 0x0000000000000001; "
        "rank 1 has digest 0x0000000000000002");
  CHECK(refusal({~std::uint64_t{0}, 9, 9, 9, 9, 8, 9}).find("ranks 1-4, 6 have digest") != std::string::npos);
  CHECK(refusal({1, 2, 3, 4, 5, 6}).find("; and 2 more groups") != std::string::npos);
}

TEST_CASE("agree_on_lines: finding the line that differs") {
  namespace detail = pf::detail;
  CHECK(detail::line_of("a\nbc\n", 0) == "\"a\"");
  CHECK(detail::line_of("a\nbc\n", 1) == "\"bc\"");
  CHECK(detail::line_of("a\nbc\n", 2) == "\"\"");
  CHECK(detail::line_of("a\nbc\n", 3) == "nothing");
  CHECK(detail::line_of("", 0) == "\"\"");
  CHECK(detail::line_of("", 1) == "nothing");
  CHECK(detail::first_difference({"a\nb", "a\nc"}) == 1);
  CHECK(detail::first_difference({"a\nb", "a\nb", "a\nb\nc"}) == 2);
  CHECK(detail::first_difference({"", "x"}) == 0);
  CHECK(detail::first_difference({"a", "a\n"}) == 1);
  CHECK(detail::first_difference({"a\n", "a\n\n"}) == 2);
}
