// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/distributed.hpp>

namespace pf = pufferfish;

// Every rank runs every case in the same order. No REQUIRE before a collective: a rank that leaves a case
// early would leave the others waiting.

namespace {

static_assert(pf::communicator<pf::mpi::communicator>);
static_assert(pf::collective_request<pf::mpi::request>);
static_assert(!std::is_copy_constructible_v<pf::mpi::communicator>);

/// Element i of rank r: known to all ranks, of mixed sign and magnitude, so that sums round.
template <class T>
T element(int rank, std::size_t i, std::uint64_t seed) {
  const std::uint64_t bits = pf::hasher(seed).number(rank).number(i).digest();
  const double unit = static_cast<double>(bits >> 11) * 0x1p-53;
  return static_cast<T>(std::ldexp(unit - 0.5, static_cast<int>(bits % 16)));
}

template <class T>
std::vector<T> elements(int rank, std::size_t count, std::uint64_t seed) {
  std::vector<T> result(count);
  for (std::size_t i = 0; i < count; ++i) result[i] = element<T>(rank, i, seed);
  return result;
}

/// True if every element is the ranks' sum up to rounding.
template <class T>
bool is_sum(const std::vector<T>& values, int ranks, std::uint64_t seed) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    long double sum = 0;
    long double magnitude = 0;
    for (int r = 0; r < ranks; ++r) {
      sum += element<T>(r, i, seed);
      magnitude += std::fabs(element<T>(r, i, seed));
    }
    const long double error = std::fabs(static_cast<long double>(values[i]) - sum);
    if (!(error <= magnitude * std::numeric_limits<T>::epsilon() * ranks)) return false;
  }
  return true;
}

template <class T>
bool same_on_all_ranks(pf::mpi::communicator& comm, const std::vector<T>& values) {
  const std::uint64_t mine = pf::digest(std::span<const T>(values));
  for (std::uint64_t other : comm.all_gather(mine)) {
    if (other != mine) return false;
  }
  return true;
}

/// Of a clock that all processes of a machine share (MPI_Wtime may start anew in each).
double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Long enough for the other ranks to arrive first.
void linger() {
  const double until = seconds() + 0.03;
  while (seconds() < until) {
  }
}

template <class Error, class F>
std::string text_of(const F& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

const std::vector<std::size_t> sizes{0,  1,   2,    3,    5,    7,     8,      17,
                                     64, 255, 1000, 1023, 4099, 32768, 100003, 300007};

}  // namespace

TEST_CASE("mpi: rank and size are those of the user's communicator") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  int rank = -1;
  int size = -1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  CHECK(comm.rank() == rank);
  CHECK(comm.size() == size);
  int relation = MPI_UNEQUAL;
  MPI_Comm_compare(comm.handle(), MPI_COMM_WORLD, &relation);
  CHECK(relation == MPI_CONGRUENT);
}

TEST_CASE_TEMPLATE("mpi: sums are right and bit-identical on all ranks", T, float, double) {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  for (std::size_t size : sizes) {
    CAPTURE(size);
    const std::vector<T> mine = elements<T>(comm.rank(), size, size);
    std::vector<T> blocking = mine;
    comm.all_reduce_sum(std::span(blocking));
    CHECK(is_sum(blocking, comm.size(), size));
    CHECK(same_on_all_ranks(comm, blocking));

    std::vector<T> started = mine;
    comm.start_all_reduce_sum(std::span(started)).wait();
    CHECK(is_sum(started, comm.size(), size));
    CHECK(same_on_all_ranks(comm, started));
  }
}

TEST_CASE("mpi: the sums of the bit-identity test do round") {
  std::size_t inexact = 0;
  for (std::size_t i = 0; i < 1000; ++i) {
    const double exact = double{element<float>(0, i, 1)} + double{element<float>(1, i, 1)};
    inexact += static_cast<double>(static_cast<float>(exact)) != exact ? 1U : 0U;
  }
  CHECK(inexact > 500);
}

TEST_CASE("mpi: integer sums, minima and maxima") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  const int n = comm.size();
  const std::int64_t big = std::int64_t{1} << 40;
  std::vector<std::int64_t> sum{comm.rank(), -big, big + comm.rank()};
  comm.all_reduce_sum(std::span(sum));
  CHECK(sum == std::vector<std::int64_t>{n * (n - 1) / 2, -big * n, big * n + n * (n - 1) / 2});

  std::vector<std::int64_t> low{comm.rank() - 2, -comm.rank()};
  std::vector<std::int64_t> high = low;
  comm.all_reduce_min(std::span(low));
  comm.all_reduce_max(std::span(high));
  CHECK(low == std::vector<std::int64_t>{-2, 1 - n});
  CHECK(high == std::vector<std::int64_t>{n - 3, 0});

  // Rank 0 is small, the others are above 2^63: a signed comparison would swap them.
  const std::uint64_t top = ~std::uint64_t{0};
  const auto word = [&](int rank) {
    return rank == 0 ? std::uint64_t{1} : top - static_cast<std::uint64_t>(rank);
  };
  std::vector<std::uint64_t> lowest{word(comm.rank()), 5};
  std::vector<std::uint64_t> highest = lowest;
  comm.all_reduce_min(std::span(lowest));
  comm.all_reduce_max(std::span(highest));
  CHECK(lowest == std::vector<std::uint64_t>{1, 5});
  CHECK(highest == std::vector<std::uint64_t>{n == 1 ? 1 : top - 1, 5});

  std::vector<std::uint32_t> narrow{comm.rank() == 0 ? 1U : 4000000000U};
  comm.all_reduce_max(std::span(narrow));
  CHECK(narrow[0] == (n == 1 ? 1U : 4000000000U));
  std::vector<int> plain{comm.rank() == 0 ? -1 : 1};
  comm.all_reduce_max(std::span(plain));
  CHECK(plain[0] == (n == 1 ? -1 : 1));
  std::vector<float> floats{static_cast<float>(comm.rank()) - 0.5F};
  comm.all_reduce_min(std::span(floats));
  CHECK(floats[0] == -0.5F);
}

TEST_CASE("mpi: lengths above the chunk are sent in pieces, none lost, none twice") {
  for (std::size_t chunk : {std::size_t{1}, std::size_t{4}, std::size_t{1000}}) {
    pf::mpi::communicator comm(MPI_COMM_WORLD, chunk);
    for (std::size_t size : {std::size_t{0}, chunk - 1, chunk, chunk + 1, 3 * chunk, 3 * chunk + 1}) {
      CAPTURE(chunk);
      CAPTURE(size);
      std::vector<float> blocking = elements<float>(comm.rank(), size + 2, size);
      std::vector<float> started = blocking;
      std::vector<float> untouched = blocking;
      comm.all_reduce_sum(std::span(blocking).subspan(1, size));
      auto request = comm.start_all_reduce_sum(std::span(started).subspan(1, size));
      auto moved = std::move(request);
      while (!moved.done()) {
      }
      CHECK(blocking.front() == untouched.front());
      CHECK(blocking.back() == untouched.back());
      CHECK(started.front() == untouched.front());
      CHECK(started.back() == untouched.back());
      bool right = true;
      for (std::size_t i = 1; i <= size; ++i) {
        double sum = 0;
        for (int r = 0; r < comm.size(); ++r) sum += double{element<float>(r, i, size)};
        right = right && std::fabs(double{blocking[i]} - sum) < 0.05 &&
                std::fabs(double{started[i]} - sum) < 0.05;
      }
      CHECK(right);
      CHECK(same_on_all_ranks(comm, std::vector<float>(blocking.begin() + 1, blocking.end() - 1)));
      CHECK(same_on_all_ranks(comm, std::vector<float>(started.begin() + 1, started.end() - 1)));

      std::vector<std::byte> bytes(size, static_cast<std::byte>(comm.rank()));
      comm.broadcast_bytes(std::span(bytes), comm.size() - 1);
      CHECK(bytes == std::vector<std::byte>(size, static_cast<std::byte>(comm.size() - 1)));
    }
  }
}

TEST_CASE("mpi: many sums in flight, waited for in another order, with blocking collectives between") {
  pf::mpi::communicator comm(MPI_COMM_WORLD, 4096);
  constexpr std::size_t count = 8;
  std::vector<std::vector<float>> buckets;
  for (std::size_t i = 0; i < count; ++i) buckets.push_back(elements<float>(comm.rank(), 1500 * i, i));
  std::vector<pf::mpi::request> requests;
  for (auto& bucket : buckets) {
    requests.push_back(comm.start_all_reduce_sum(std::span(bucket)));
    requests.front().done();
  }
  std::vector<double> between = elements<double>(comm.rank(), 33, 99);
  comm.all_reduce_sum(std::span(between));
  CHECK(is_sum(between, comm.size(), 99));
  // Each rank waits in its own order: completion is local.
  for (std::size_t k = 0; k < count; ++k) {
    const std::size_t at = comm.rank() % 2 == 0 ? count - 1 - k : k;
    requests[at].wait();
    CHECK(is_sum(buckets[at], comm.size(), at));
  }
  for (const auto& bucket : buckets) CHECK(same_on_all_ranks(comm, bucket));
}

TEST_CASE("mpi: done() and wait() hold for every piece, however large and late") {
  pf::mpi::communicator comm(MPI_COMM_WORLD, 30000);
  for (const bool poll : {false, true}) {
    std::vector<double> values = elements<double>(comm.rank(), 100000, 4);
    if (comm.rank() == 0) linger();
    auto request = comm.start_all_reduce_sum(std::span(values));
    if (poll) {
      while (!request.done()) {
      }
    } else {
      request.wait();
    }
    CHECK(is_sum(values, comm.size(), 4));
    CHECK(request.done());
    request.wait();
  }
}

TEST_CASE("mpi: a request that is dropped or overwritten waits, and may outlive its communicator") {
  for (const std::size_t chunk : {std::size_t{1000}, pf::mpi::communicator::default_chunk}) {
    std::vector<double> first;
    std::vector<double> second;
    std::vector<double> third;
    int size = 0;
    {
      pf::mpi::request kept;
      CHECK(kept.done());
      {
        pf::mpi::communicator comm(MPI_COMM_WORLD, chunk);
        size = comm.size();
        first = elements<double>(comm.rank(), 20000, 1);
        second = elements<double>(comm.rank(), 20000, 2);
        third = elements<double>(comm.rank(), 20000, 3);
        // Rank 0 comes late, so the others' sums cannot be complete when they let go of them.
        if (comm.rank() == 0) linger();
        { auto dropped = comm.start_all_reduce_sum(std::span(first)); }
        CHECK(is_sum(first, size, 1));
        if (comm.rank() == 0) linger();
        kept = comm.start_all_reduce_sum(std::span(second));
        kept = comm.start_all_reduce_sum(std::span(third));
        CHECK(is_sum(second, size, 2));
        if (comm.rank() == 0) linger();
      }
    }
    CHECK(is_sum(third, size, 3));
  }
}

TEST_CASE("mpi: broadcast from every root, of any trivially copyable type") {
  struct record {
    double number;
    char letter;
  };
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  for (int root = 0; root < comm.size(); ++root) {
    CAPTURE(root);
    std::vector<float> values = elements<float>(comm.rank(), 5001, 7);
    comm.broadcast(std::span(values), root);
    CHECK(values == elements<float>(root, 5001, 7));
    std::vector<record> records{{comm.rank() + 0.5, static_cast<char>('a' + comm.rank())}};
    comm.broadcast(std::span(records), root);
    CHECK(records[0].number == root + 0.5);
    CHECK(records[0].letter == static_cast<char>('a' + root));
  }
  std::vector<float> values(3);
  const std::string ranks = pf::detail::counted(comm.size(), "rank");
  const std::string text = text_of<pf::value_error>([&] { comm.broadcast(std::span(values), comm.size()); });
  CHECK(text == "mpi::communicator: broadcast: root " + std::to_string(comm.size()) +
                    " is outside the group of " + ranks);
  CHECK_THROWS_AS(comm.broadcast(std::span(values), -1), pf::value_error);
}

TEST_CASE("mpi: all_gather is ordered by rank") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  const std::vector<std::array<int, 3>> all =
      comm.all_gather(std::array<int, 3>{comm.rank(), 7, -comm.rank()});
  CHECK(all.size() == static_cast<std::size_t>(comm.size()));
  for (std::size_t r = 0; r < all.size(); ++r) {
    const int rank = static_cast<int>(r);
    CHECK(all[r] == std::array<int, 3>{rank, 7, -rank});
  }
}

TEST_CASE("mpi: no rank passes a barrier before the last has come") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (comm.rank() == 0) linger();
  const double entered = seconds();
  comm.barrier();
  const double left = seconds();
  CHECK(left >= comm.all_gather(entered)[0]);
}

TEST_CASE_TEMPLATE("mpi: mean", T, float, double) {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  for (std::size_t size : sizes) {
    CAPTURE(size);
    std::vector<T> sums = elements<T>(comm.rank(), size, 3);
    std::vector<T> means = sums;
    comm.all_reduce_sum(std::span(sums));
    pf::mean(comm, std::span(means));
    CHECK(same_on_all_ranks(comm, means));
    const T factor = T(1) / static_cast<T>(comm.size());
    for (T& sum : sums) sum *= factor;
    CHECK(means == sums);
  }
}

TEST_CASE("mpi: agree throws on all ranks and names those that differ") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  CHECK_NOTHROW(pf::agree(comm, "network", 42));
  const int last = comm.size() - 1;
  const std::string text =
      text_of<pf::state_error>([&] { pf::agree(comm, "network", comm.rank() == last ? 0xbadU : 0x600dU); });
  const std::string bad = " has digest 0x0000000000000bad";
  const std::string good = " digest 0x000000000000600d";
  if (comm.size() == 1) CHECK(text == "nothing was thrown");
  if (comm.size() == 2) CHECK(text == "network differs between ranks: rank 0 has" + good + "; rank 1" + bad);
  if (comm.size() == 4)
    CHECK(text == "network differs between ranks: rank 3" + bad + "; ranks 0-2 have" + good);
  // All ranks threw, so all are still in step.
  CHECK_NOTHROW(pf::agree(comm, "network", 43));
}

TEST_CASE("mpi: agree_on_lines quotes the first line that differs, on all ranks") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  const std::string network = "conv1.weight [16 x 3 x 3 x 3]\nconv2.down [4 x 3 x 3 x 16]\nfc.bias [10]";
  CHECK_NOTHROW(pf::agree_on_lines(comm, "network", network));
  CHECK_NOTHROW(pf::agree_on_lines(comm, "network", ""));
  const std::string other = "conv1.weight [16 x 3 x 3 x 3]\nconv2.down [8 x 3 x 3 x 16]";
  const std::string text = text_of<pf::state_error>(
      [&] { pf::agree_on_lines(comm, "network", comm.rank() == 0 ? other : network); });
  const std::string start =
      "network differs between ranks at line 2: rank 0 has \"conv2.down [8 x 3 x 3 x 16]\"; ";
  const std::string end = " \"conv2.down [4 x 3 x 3 x 16]\"";
  if (comm.size() == 1) CHECK(text == "nothing was thrown");
  if (comm.size() == 2) CHECK(text == start + "rank 1 has" + end);
  if (comm.size() == 4) CHECK(text == start + "ranks 1-3 have" + end);
  const std::string shorter =
      text_of<pf::state_error>([&] { pf::agree_on_lines(comm, "plan", comm.rank() == 0 ? "a" : "a\nb"); });
  if (comm.size() == 2)
    CHECK(shorter == "plan differs between ranks at line 2: rank 0 has nothing; rank 1 has \"b\"");
  CHECK_NOTHROW(pf::agree_on_lines(comm, "network", network));
}

TEST_CASE("mpi: messages and collectives on the user's communicator do not meet ours") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  const int next = (comm.rank() + 1) % comm.size();
  const int previous = (comm.rank() + comm.size() - 1) % comm.size();
  // A receive of any tag from any rank, posted before our traffic.
  int received = -1;
  MPI_Request receive = MPI_REQUEST_NULL;
  MPI_Irecv(&received, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &receive);
  // The user's started sum and ours, begun in opposite order on odd ranks: legal on different communicators
  // only.
  std::vector<double> ours = elements<double>(comm.rank(), 3000, 5);
  std::vector<double> theirs = elements<double>(comm.rank(), 3000, 6);
  MPI_Request their_sum = MPI_REQUEST_NULL;
  const auto start_theirs = [&] {
    MPI_Iallreduce(MPI_IN_PLACE, theirs.data(), 3000, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD, &their_sum);
  };
  if (comm.rank() % 2 == 0) start_theirs();
  auto our_sum = comm.start_all_reduce_sum(std::span(ours));
  if (comm.rank() % 2 != 0) start_theirs();
  comm.barrier();
  our_sum.wait();
  int flag = 0;
  MPI_Test(&receive, &flag, MPI_STATUS_IGNORE);
  CHECK(flag == 0);
  MPI_Wait(&their_sum, MPI_STATUS_IGNORE);
  CHECK(is_sum(ours, comm.size(), 5));
  CHECK(is_sum(theirs, comm.size(), 6));
  comm.barrier();
  const int message = 100 + comm.rank();
  MPI_Send(&message, 1, MPI_INT, next, 17, MPI_COMM_WORLD);
  MPI_Wait(&receive, MPI_STATUS_IGNORE);
  CHECK(received == 100 + previous);
}

TEST_CASE("mpi: the user's error handler stays, ours returns MPI's text") {
  MPI_Errhandler before = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &before);
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  MPI_Errhandler after = MPI_ERRHANDLER_NULL;
  MPI_Errhandler ours = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &after);
  MPI_Comm_get_errhandler(comm.handle(), &ours);
  CHECK(before == after);
  CHECK(ours == MPI_ERRORS_RETURN);
  MPI_Errhandler_free(&before);
  MPI_Errhandler_free(&after);
  MPI_Errhandler_free(&ours);

  // A moved-from communicator holds MPI_COMM_NULL, which MPI refuses locally. The world's handler is asked
  // for that.
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  pf::mpi::communicator taken = std::move(comm);
  std::vector<float> values(3);
  const std::string text = text_of<pf::backend_error>([&] { comm.all_reduce_sum(std::span(values)); });
  CHECK(text.find("mpi::communicator: MPI_Allreduce failed: ") == 0);
  CHECK(text.find("communicator", 40) != std::string::npos);
  CHECK_THROWS_AS(comm.barrier(), pf::backend_error);
  CHECK_THROWS_AS((void)comm.start_all_reduce_sum(std::span(values)), pf::backend_error);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL);
  taken.barrier();
}

TEST_CASE("mpi: with a timeout everything is as without") {
  pf::mpi::communicator comm(MPI_COMM_WORLD, 3);
  comm.set_timeout(60.0);
  auto values = elements<float>(comm.rank(), 100, 5);
  comm.all_reduce_sum(std::span<float>(values));
  CHECK(is_sum(values, comm.size(), 5));
  CHECK(same_on_all_ranks(comm, values));
  std::vector<std::uint64_t> words{static_cast<std::uint64_t>(comm.rank()), std::uint64_t{1} << 63};
  comm.all_reduce_max(std::span<std::uint64_t>(words));
  CHECK(words ==
        std::vector<std::uint64_t>{static_cast<std::uint64_t>(comm.size() - 1), std::uint64_t{1} << 63});
  std::vector<int> sent(10, comm.rank());
  comm.broadcast(std::span<int>(sent), comm.size() - 1);
  CHECK(sent == std::vector<int>(10, comm.size() - 1));
  CHECK(comm.all_gather(comm.rank()).back() == comm.size() - 1);
  comm.barrier();
  const int next = (comm.rank() + 1) % comm.size(), before = (comm.rank() + comm.size() - 1) % comm.size();
  std::vector<int> received(10);
  auto arriving = comm.start_receive(std::span<int>(received), before);
  comm.start_send(std::span<const int>(sent), next).wait();
  arriving.wait();
  CHECK(received == sent);
  comm.set_timeout(0.0);
  comm.barrier();
  CHECK_THROWS_AS(comm.set_timeout(-1.0), pf::value_error);
}

TEST_CASE("mpi: who does not arrive is named, and the communicator is of no use afterwards") {
  // MPI may write here until it ends.
  static std::vector<float> values(100000, 1.0F);
  static std::vector<float> more(10, 1.0F);
  pf::mpi::communicator all(MPI_COMM_WORLD);
  if (all.size() == 1) return;
  const bool late = all.rank() == all.size() - 1;
  const auto wait = [&](double seconds) {
    static pf::mpi::communicator watched(MPI_COMM_WORLD);
    watched.set_timeout(seconds);
    if (late) std::this_thread::sleep_for(std::chrono::duration<double>(3 * seconds));
    std::string text;
    try {
      watched.all_reduce_sum(std::span<float>(values));
    } catch (const pf::timeout_error& e) {
      text = e.what();
    }
    CHECK_THROWS_AS(watched.barrier(), pf::timeout_error);
    CHECK_THROWS_AS(watched.set_timeout(0.0), pf::timeout_error);
    CHECK_THROWS_AS(static_cast<void>(watched.start_all_reduce_sum(std::span<float>(more))),
                    pf::timeout_error);
    CHECK_THROWS_AS(watched.all_reduce_sum_on_device(std::span<float>(more)), pf::timeout_error);
    return text;
  };
  const std::string text = wait(1.0);
  CAPTURE(text);
  // On a busy machine others may be too slow to answer as well.
  const std::string end = std::to_string(all.size() - 1) + " did not arrive";
  CHECK((late || text.find(end) != std::string::npos));
  all.barrier();
}

TEST_CASE("mpi: bad arguments of the constructor") {
  CHECK_THROWS_AS(pf::mpi::communicator{MPI_COMM_NULL}, pf::value_error);
  CHECK(text_of<pf::value_error>([] { pf::mpi::communicator comm(MPI_COMM_WORLD, 0); }) ==
        "mpi::communicator: chunk of 0 elements is outside 1 .. 2147483647");
  CHECK_THROWS_AS(pf::mpi::communicator(MPI_COMM_WORLD, std::size_t{1} << 31), pf::value_error);
}

TEST_CASE("mpi: a group smaller than the world, moved about, created many times") {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);
  pf::mpi::communicator comm(half);
  MPI_Comm_free(&half);  // the duplicate lives on
  std::vector<std::int64_t> sum{rank % 2, 1};
  comm.all_reduce_sum(std::span(sum));
  CHECK(sum == std::vector<std::int64_t>{(rank % 2) * comm.size(), comm.size()});
  for (int i = 0; i < 300; ++i) {
    pf::mpi::communicator fresh(comm.handle());
    comm = std::move(fresh);
  }
  std::vector<std::int64_t> again{rank % 2};
  comm.all_reduce_sum(std::span(again));
  CHECK(again[0] == (rank % 2) * comm.size());
}
