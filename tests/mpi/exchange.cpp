// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/compress/compression.hpp>
#include <pufferfish/core/hash.hpp>
#include <pufferfish/distributed.hpp>
#include <pufferfish/nn.hpp>

namespace pf = pufferfish;

// Every rank runs every case in the same order. No REQUIRE before a collective.

namespace {

pf::network<float> make_net(pf::index_t classes = 5) {
  pf::Sequential<float> layers;
  layers.add("conv1", pf::Conv<float>(pf::conv_shape::square(3, 8, 3, 1, 1), true));
  layers.add("bn1", pf::BatchNorm<float>(8));
  layers.add("relu1", pf::ReLU<float>());
  layers.add("conv2", pf::Conv<float>(pf::conv_shape::square(8, 12, 3, 2, 1), true));
  layers.add("pool", pf::GlobalAvgPool<float>());
  layers.add("fc", pf::Linear<float>(12, classes));
  pf::network<float> net{pf::any_layer<float>(std::move(layers))};
  net.initialize(4);
  return net;
}

/// A pass with data of this rank and step; gradients are in the store afterwards.
struct pass {
  pf::cpu_context ctx;
  pf::tensor<float, 4> x{pf::extents<4>{6, 8, 8, 3}}, y{pf::extents<4>{6, 1, 1, 5}},
      dy{pf::extents<4>{6, 1, 1, 5}};

  void run(pf::network<float>& net, int rank, std::uint64_t step) {
    ctx.set_mode(pf::run_mode::training);
    ctx.begin_step(step);
    pf::fill_normal(x.flat(), 1.0, pf::random_stream(step + 1, static_cast<std::uint64_t>(rank)));
    pf::fill_normal(dy.flat(), 1.0, pf::random_stream(step + 1, static_cast<std::uint64_t>(rank) + 100));
    net.forward(ctx, x.view(), y.view());
    net.backward(ctx, dy.view());
  }
};

std::vector<float> gradients_of(pf::network<float>& net) {
  return {net.store().gradients().begin(), net.store().gradients().end()};
}

/// The mean over ranks to rounding, summed serially in double.
std::vector<double> expected_mean(int ranks, std::uint64_t step) {
  std::vector<double> sum;
  for (int rank = 0; rank < ranks; ++rank) {
    pf::network<float> net = make_net();
    pass one;
    one.run(net, rank, step);
    const std::vector<float> gradients = gradients_of(net);
    sum.resize(gradients.size());
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += static_cast<double>(gradients[i]) / ranks;
  }
  return sum;
}

double distance(const std::vector<float>& a, const std::vector<double>& b) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference / norm);
}

bool same_on_all_ranks(pf::mpi::communicator& comm, const std::vector<float>& values) {
  const std::uint64_t mine = pf::digest(std::span<const float>(values));
  for (std::uint64_t other : comm.all_gather(mine)) {
    if (other != mine) return false;
  }
  return true;
}

pf::exchange_options small_buckets() {
  pf::exchange_options options;
  options.plan.emplace().buckets = {100, 1000};
  return options;
}

void check_steps(pf::mpi::communicator& comm, const pf::exchange_options& options, double tolerance) {
  pf::network<float> net = make_net();
  pf::gradient_exchange<float, pf::mpi::communicator> exchange(net.store(), comm, options);
  CHECK(exchange.buckets().size() >= 3);
  pass one;
  for (std::uint64_t step = 0; step < 20; ++step) {
    exchange.begin(one.ctx);
    one.run(net, comm.rank(), step);
    exchange.finish(one.ctx);
    const std::vector<float> got = gradients_of(net);
    CHECK(same_on_all_ranks(comm, got));
    if (step < 3) CHECK(distance(got, expected_mean(comm.size(), step)) < tolerance);
  }
  CHECK(exchange.report().steps == 20);
  const bool narrow = options.wire == pf::exchange_wire::bf16;
  if (comm.size() > 1) {
    const std::uint64_t element = narrow ? 2 : 4;
    CHECK(exchange.report().payload_bytes ==
          20 * element * static_cast<std::uint64_t>(net.parameter_count()));
  }
  if (!narrow) CHECK(exchange.report().copied_bytes == 0);
}

TEST_CASE("buckets exchanged during the backward pass give the mean, the same bits on all ranks") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  pf::exchange_options options = small_buckets();
  options.progress = pf::exchange_progress::calls;
  check_steps(comm, options, 1e-6);
  options.progress = pf::exchange_progress::automatic;
  check_steps(comm, options, 1e-6);
}

TEST_CASE("every algorithm and wire, with a thread and without") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  pf::exchange_options options = small_buckets();
  for (auto progress : {pf::exchange_progress::thread, pf::exchange_progress::calls}) {
    if (progress == pf::exchange_progress::thread && !comm.usable_from_threads()) continue;
    options.progress = progress;
    options.wire = pf::exchange_wire::same;
    for (auto algorithm : {pf::all_reduce_algorithm::automatic, pf::all_reduce_algorithm::library,
                           pf::all_reduce_algorithm::ring, pf::all_reduce_algorithm::recursive_doubling}) {
      options.algorithm = algorithm;
      check_steps(comm, options, 1e-6);
    }
    options.wire = pf::exchange_wire::bf16;
    check_steps(comm, options, 1e-2);
  }
}

TEST_CASE("automatic: the plan's algorithm for each bucket's length, in its documented order") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (comm.size() == 1 || !comm.usable_from_threads()) return;
  pf::exchange_options options = small_buckets(), ring = small_buckets(), doubling = small_buckets();
  options.plan->rules = {{700, pf::all_reduce_algorithm::recursive_doubling},
                         {100000, pf::all_reduce_algorithm::ring}};
  ring.algorithm = pf::all_reduce_algorithm::ring;
  doubling.algorithm = pf::all_reduce_algorithm::recursive_doubling;
  std::vector<std::vector<float>> got;
  std::vector<pf::gradient_bucket> buckets;
  for (const auto& o : {options, ring, doubling}) {
    pf::network<float> net = make_net();
    pf::gradient_exchange<float, pf::mpi::communicator> exchange(net.store(), comm, o);
    pass one;
    exchange.begin(one.ctx);
    one.run(net, comm.rank(), 1);
    exchange.finish(one.ctx);
    got.push_back(gradients_of(net));
    buckets = exchange.buckets();
  }
  bool short_ones = false, long_ones = false;
  for (const pf::gradient_bucket& bucket : buckets) {
    const bool is_short = bucket.size * 4 <= 700;
    (is_short ? short_ones : long_ones) = true;
    const auto& expected = got[is_short ? 2 : 1];
    CHECK(std::equal(got[0].begin() + bucket.offset, got[0].begin() + bucket.offset + bucket.size,
                     expected.begin() + bucket.offset));
  }
  CHECK(short_ones);
  CHECK(long_ones);
}

TEST_CASE("finish hands out every bucket once, in order, with its mean in place") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  for (auto progress : {pf::exchange_progress::automatic, pf::exchange_progress::calls}) {
    for (auto policy : {pf::nonfinite_policy::ignore, pf::nonfinite_policy::skip}) {
      pf::exchange_options options = small_buckets();
      options.progress = progress;
      options.nonfinite = policy;
      pf::network<float> net = make_net();
      pf::gradient_exchange<float, pf::mpi::communicator> exchange(net.store(), comm, options);
      pass one;
      for (std::uint64_t step = 0; step < 20; ++step) {
        exchange.begin(one.ctx);
        one.run(net, comm.rank(), step);
        std::vector<pf::gradient_bucket> seen;
        std::vector<float> given;
        CHECK(exchange.finish(one.ctx, [&](const pf::gradient_bucket& bucket) {
          const auto part = net.store().gradients().subspan(static_cast<std::size_t>(bucket.offset),
                                                            static_cast<std::size_t>(bucket.size));
          seen.push_back(bucket);
          given.insert(given.end(), part.begin(), part.end());
        }));
        CHECK(seen == exchange.buckets());
        CHECK(given == gradients_of(net));
        CHECK(same_on_all_ranks(comm, given));
      }
      CHECK(exchange.report().update_ms > 0.0);
      CHECK(exchange.arrives_early() == (comm.size() > 1 && policy == pf::nonfinite_policy::ignore));
      // What the caller throws comes through, and the exchange can go on.
      exchange.begin(one.ctx);
      one.run(net, comm.rank(), 30);
      const auto last = exchange.buckets().back();
      CHECK_THROWS_AS(exchange.finish(one.ctx,
                                      [&](const pf::gradient_bucket& bucket) {
                                        if (bucket == last) throw pf::value_error("stop");
                                      }),
                      pf::value_error);
      exchange.begin(one.ctx);
      one.run(net, comm.rank(), 31);
      exchange.finish(one.ctx);
      CHECK(distance(gradients_of(net), expected_mean(comm.size(), 31)) < 1e-6);
    }
  }
}

TEST_CASE("tune: one plan on all ranks, within its time; the exchange takes it") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  pf::tune_options how;
  how.largest_bytes = 1 << 16;
  how.repeats = 3;
  how.seconds = 1.0;
  const auto start = std::chrono::steady_clock::now();
  const pf::exchange_plan plan = pf::tune(comm, how);
  // A busy machine may be slow, but not without end.
  CHECK(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < 30.0);
  const std::string text = pf::to_text(plan);
  for (std::uint64_t other : comm.all_gather(pf::digest(std::string_view(text)))) {
    CHECK(other == pf::digest(std::string_view(text)));
  }
  CHECK(plan.ranks == comm.size());
  CHECK((plan.bytes_per_second > 0.0) == (comm.size() > 1));
  pf::exchange_options options;
  options.plan = plan;
  pf::network<float> net = make_net();
  pf::gradient_exchange<float, pf::mpi::communicator> exchange(net.store(), comm, options);
  CHECK(exchange.plan() == plan);
  pass one;
  exchange.begin(one.ctx);
  one.run(net, comm.rank(), 2);
  exchange.finish(one.ctx);
  CHECK(distance(gradients_of(net), expected_mean(comm.size(), 2)) < 1e-6);
  how.repeats = 0;
  CHECK_THROWS_AS(pf::tune(comm, how), pf::value_error);
}

TEST_CASE("the progress thread's processor time is told") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (comm.size() == 1 || !comm.usable_from_threads()) return;
  pf::network<float> net = make_net();
  pf::gradient_exchange<float, pf::mpi::communicator> exchange(net.store(), comm, small_buckets());
  pass one;
  for (std::uint64_t step = 0; step < 5; ++step) {
    exchange.begin(one.ctx);
    one.run(net, comm.rank(), step);
    exchange.finish(one.ctx);
  }
  CHECK(exchange.report().busy_ms > 0.0);
  CHECK(exchange.report().processor_ms > 0.0);
}

/// Every gradient is this rank's number, counted from 1.
void fill_with_rank(pf::network<float>& net, const pf::mpi::communicator& comm) {
  const std::span<float> gradients = net.store().gradients();
  std::fill(gradients.begin(), gradients.end(), static_cast<float>(comm.rank() + 1));
}

TEST_CASE("gradients that no pass wrote are exchanged too; calls out of order are refused") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  pf::network<float> net = make_net();
  pf::gradient_exchange<float, pf::mpi::communicator> exchange(net.store(), comm, small_buckets());
  pf::cpu_context ctx;
  fill_with_rank(net, comm);
  exchange.begin(ctx);
  CHECK_THROWS_AS(exchange.begin(ctx), pf::state_error);
  exchange.finish(ctx);
  const float mean = static_cast<float>(comm.size() + 1) / 2.0F;
  for (float value : gradients_of(net)) CHECK(value == doctest::Approx(mean).epsilon(1e-6));
  CHECK_THROWS_AS(exchange.finish(ctx), pf::state_error);
  net.modify([](pf::any_layer<float>&) {});
  CHECK_THROWS_AS(exchange.begin(ctx), pf::state_error);
}

TEST_CASE("ranks at different steps are told so, before anything is mixed") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  pf::network<float> net = make_net();
  pf::gradient_exchange<float, pf::mpi::communicator> exchange(net.store(), comm, small_buckets());
  pf::cpu_context ctx;
  fill_with_rank(net, comm);
  exchange.set_steps(comm.rank() == 0 ? 8 : 7);
  if (comm.size() > 1) {
    CHECK_THROWS_WITH_AS(exchange.begin(ctx), doctest::Contains("steps done: 7"), pf::state_error);
    for (float value : gradients_of(net)) REQUIRE(value == static_cast<float>(comm.rank() + 1));
  }
  exchange.set_steps(7);
  exchange.begin(ctx);
  exchange.finish(ctx);
  CHECK(exchange.steps() == 8);
}

TEST_CASE("ranks that start from different values are told the parameter, unless their steps are local") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (comm.size() == 1) return;
  pf::network<float> net = make_net();
  const auto& stored = net.store().parameters();
  const auto entry =
      std::find_if(stored.begin(), stored.end(), [](const auto& e) { return e.name == "bn1.weight"; });
  REQUIRE(entry != stored.end());  // the same on all ranks
  if (comm.rank() == comm.size() - 1) entry->thing->data()[3] += 1e-3F;
  pf::cpu_context ctx;
  fill_with_rank(net, comm);
  pf::exchange_options options = small_buckets();
  {
    pf::gradient_exchange<float, pf::mpi::communicator> exchange(net.store(), comm, options);
    CHECK_THROWS_WITH_AS(exchange.begin(ctx), doctest::Contains("values of bn1.weight: digest 0x"),
                         pf::state_error);
    for (float value : gradients_of(net)) REQUIRE(value == static_cast<float>(comm.rank() + 1));
  }
  options.local = true;
  pf::gradient_exchange<float, pf::mpi::communicator> local(net.store(), comm, options);
  local.begin(ctx);
  local.finish(ctx);
}

TEST_CASE("ranks of which one sends nothing are told so, before one waits") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (comm.size() == 1) return;
  pf::network<float> net = make_net();
  pf::exchange_options options = small_buckets();
  options.local = comm.rank() == 0;
  const auto make = [&] {
    pf::gradient_exchange<float, pf::mpi::communicator> exchange(net.store(), comm, options);
  };
  CHECK_THROWS_WITH_AS(make(), doctest::Contains("rank 0 has \"local yes\""), pf::state_error);
}

/// Adds like MPI; on the last rank, sums fail when `sums_left` is used up.
class failing : public pf::mpi::communicator {
 public:
  using pf::mpi::communicator::communicator;
  template <class T>
  void all_reduce_sum(std::span<T> values) {
    count();
    pf::mpi::communicator::all_reduce_sum(values);
  }
  template <class T>
  pf::mpi::request start_all_reduce_sum(std::span<T> values) {
    count();
    return pf::mpi::communicator::start_all_reduce_sum(values);
  }
  int sums_left = -1;

 private:
  void count() {
    if (rank() == size() - 1 && sums_left-- == 0) throw pf::backend_error("the link is down");
  }
};

TEST_CASE("a rank whose bucket has failed takes no further step with the same exchange") {
  failing comm(MPI_COMM_WORLD);
  if (comm.size() == 1) return;
  const bool bad = comm.rank() == comm.size() - 1;
  pf::exchange_options options = small_buckets();
  options.algorithm = pf::all_reduce_algorithm::library;
  for (auto progress : {pf::exchange_progress::thread, pf::exchange_progress::calls}) {
    const bool threads = progress == pf::exchange_progress::thread;
    if (threads && !comm.usable_from_threads()) continue;
    options.progress = progress;
    pf::network<float> net = make_net();
    pass one;
    std::optional<pf::gradient_exchange<float, failing>> exchange(std::in_place, net.store(), comm, options);
    const auto step = [&](std::uint64_t number) {
      exchange->begin(one.ctx);
      one.run(net, comm.rank(), number);
      exchange->finish(one.ctx);
    };
    comm.sums_left = -1;
    step(0);
    comm.sums_left = 1;
    if (bad) {
      CHECK_THROWS_WITH_AS(step(1), "the link is down", pf::backend_error);
      comm.sums_left = -1;
      // The others wait for the rest of step 1: a sum of step 2 would end it with that step's numbers.
      CHECK_THROWS_WITH_AS(step(2), doctest::Contains("an earlier step failed (the link is down)"),
                           pf::state_error);
      for (std::size_t b = 1; b < exchange->buckets().size(); ++b) {
        std::vector<float> rest(static_cast<std::size_t>(exchange->buckets()[b].size));
        if (threads) {
          comm.all_reduce_sum(std::span<float>(rest));
        } else {
          comm.start_all_reduce_sum(std::span<float>(rest)).wait();
        }
      }
    } else {
      step(1);
    }
    comm.sums_left = -1;
    exchange.emplace(net.store(), comm, options);
    step(3);
    CHECK(distance(gradients_of(net), expected_mean(comm.size(), 3)) < 1e-6);
  }
}

TEST_CASE("what a call-back throws on one rank leaves the ranks in step") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  for (auto progress : {pf::exchange_progress::automatic, pf::exchange_progress::calls}) {
    pf::exchange_options options = small_buckets();
    options.progress = progress;
    pf::network<float> net = make_net();
    pf::gradient_exchange<float, pf::mpi::communicator> exchange(net.store(), comm, options);
    pass one;
    exchange.begin(one.ctx);
    one.run(net, comm.rank(), 1);
    const auto call_back = [&](const pf::gradient_bucket&) {
      if (comm.rank() == 0) throw pf::value_error("stop");
    };
    if (comm.rank() == 0) {
      CHECK_THROWS_AS(exchange.finish(one.ctx, call_back), pf::value_error);
    } else {
      exchange.finish(one.ctx, call_back);
    }
    exchange.begin(one.ctx);
    one.run(net, comm.rank(), 2);
    exchange.finish(one.ctx);
    CHECK(distance(gradients_of(net), expected_mean(comm.size(), 2)) < 1e-6);
  }
}

TEST_CASE("a gradient that one rank has stopped writing is zero there, and the mean is of the others") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  pf::network<float> net = make_net();
  pf::gradient_exchange<float, pf::mpi::communicator> exchange(net.store(), comm, small_buckets());
  pass one;
  for (std::uint64_t step = 0; step < 4; ++step) {
    const bool absent = step > 0 && comm.rank() == 0;  // without samples
    exchange.begin(one.ctx);
    if (!absent) one.run(net, comm.rank(), step);
    exchange.finish(one.ctx);
    if (step == 0) continue;
    std::vector<double> expected = expected_mean(comm.size(), step);
    pf::network<float> first = make_net();
    pass other;
    other.run(first, 0, step);
    const std::vector<float> missing = gradients_of(first);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      expected[i] -= static_cast<double>(missing[i]) / comm.size();
    }
    const std::vector<float> got = gradients_of(net);
    if (comm.size() == 1) {
      CHECK(std::all_of(got.begin(), got.end(), [](float g) { return g == 0.0F; }));
    } else {
      CHECK(distance(got, expected) < 1e-6);
    }
  }
}

TEST_CASE("ranks with other buckets are told so") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  pf::network<float> net = make_net();
  pf::exchange_options options = small_buckets();
  options.plan->buckets.bytes += comm.rank() == 0 ? 0 : 5000;
  using exchange = pf::gradient_exchange<float, pf::mpi::communicator>;
  if (comm.size() > 1) {
    CHECK_THROWS_AS(exchange(net.store(), comm, options), pf::state_error);
    options = small_buckets();
    options.progress = comm.rank() == 0 ? pf::exchange_progress::calls : pf::exchange_progress::thread;
    CHECK_THROWS_AS(exchange(net.store(), comm, options), pf::state_error);
  } else {
    CHECK_NOTHROW(exchange(net.store(), comm, options));
  }
}

TEST_CASE("ranks with other networks are told the first parameter that differs, with its shapes") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (comm.size() == 1) return;
  pf::network<float> net = make_net(comm.rank() == 0 ? 6 : 5);
  std::string text = "nothing was thrown";
  try {
    pf::gradient_exchange<float, pf::mpi::communicator> exchange(net.store(), comm, small_buckets());
  } catch (const pf::state_error& e) {
    text = e.what();
  }
  CAPTURE(text);
  CHECK(text.find("parameter fc.bias [6]") != std::string::npos);
  CHECK(text.find("parameter fc.bias [5]") != std::string::npos);
}

/// Calls `f` on all ranks, of which only the last has something that cannot be: that rank must throw what it
/// throws alone, and every other one value_error with the same text and the rank.
template <class Error, class F>
void check_refused_everywhere(pf::mpi::communicator& comm, const char* what, F&& f) {
  const int last = comm.size() - 1;
  const std::string other = "rank " + std::to_string(last) + " failed: ";
  if (comm.rank() == last) {
    CHECK_THROWS_WITH_AS(f(), doctest::Contains(what), Error);
  } else {
    CHECK_THROWS_WITH_AS(f(), doctest::Contains((other + what).c_str()), pf::value_error);
  }
  comm.barrier();  // and the communicator is in step
}

TEST_CASE("what cannot be on one rank is refused on all, naming the rank") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  const bool last = comm.rank() == comm.size() - 1;
  pf::network<float> net = make_net();
  using exchange = pf::gradient_exchange<float, pf::mpi::communicator>;
  pf::exchange_options bad_plan = small_buckets(), bad_wire = small_buckets();
  if (last) bad_plan.plan->buckets.bytes = 0;
  check_refused_everywhere<pf::value_error>(comm, "gradient_exchange: this is no plan",
                                            [&] { exchange(net.store(), comm, bad_plan); });
  if (last) bad_wire.wire = pf::exchange_wire::bf16;
  check_refused_everywhere<pf::value_error>(comm, "gradient_exchange: a wire of bf16, but a compressor", [&] {
    exchange(net.store(), comm, bad_wire, pf::new_compressor<float>(net.store(), pf::power_sgd_options{}));
  });
  pf::power_sgd_options bad_rank;
  if (last) bad_rank.rank = 0;
  check_refused_everywhere<pf::value_error>(comm, "power_sgd: rank 0",
                                            [&] { exchange(net.store(), comm, small_buckets(), bad_rank); });
  pf::tune_options measure;
  if (last) measure.repeats = 0;
  check_refused_everywhere<pf::value_error>(comm, "tune: at least", [&] { pf::tune(comm, measure); });
  check_refused_everywhere<pf::shape_error>(comm, "made here", [&] {
    pf::detail::all_or_none(comm, "work", [&] {
      if (last) throw pf::shape_error("made here");
      return 1;
    });
  });
}

TEST_CASE("a rank that fails alone, catches and goes on: the others are told, with its number") {
  pf::mpi::communicator all(MPI_COMM_WORLD), comm(MPI_COMM_WORLD);
  // Unless the program says otherwise, waits end after ten minutes.
  CHECK(comm.timeout() == 600.0);
  CHECK(!comm.may_lose_ranks());
  if (comm.size() == 1) return;
  const bool last = comm.rank() == comm.size() - 1;
  std::string text = "nothing was thrown";
  try {
    pf::network<float> net = make_net();
    pf::gradient_exchange<float, pf::mpi::communicator> exchange(net.store(), comm, small_buckets());
    pf::cpu_context ctx;
    exchange.begin(ctx);
    comm.set_timeout(0.5);
    CHECK(comm.may_lose_ranks());
    if (last) throw pf::value_error("this rank's data");
    exchange.finish(ctx);
  } catch (const pf::error& e) {
    text = e.what();
  }
  CAPTURE(text);
  const std::string name = std::to_string(comm.size() - 1) + " did not arrive";
  CHECK(text.find(last ? "this rank's data" : name) != std::string::npos);
  CHECK(comm.broken() == !last);
  all.barrier();
}

}  // namespace
