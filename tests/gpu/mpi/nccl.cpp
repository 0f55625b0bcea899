// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Devices that add up their memory by NCCL. Needs a device a rank: with fewer, nothing is tested.
#include <pufferfish/gpu/nccl.hpp>

#include <memory>

#include "parameters.hpp"

using namespace gpu_test;

// Every rank runs every case in the same order. No REQUIRE before a collective.

namespace {

using hosts = pf::mpi::communicator;
using nccl = pf::gpu::nccl<hosts>;
template <class T>
using exchange_of = pf::gradient_exchange<T, nccl, pf::device::gpu>;

static_assert(pf::communicator<nccl>);

/// Nothing where ranks share a device: NCCL does not do that.
std::unique_ptr<nccl> make_nccl(hosts& comm, std::optional<double> timeout = {}) {
  try {
    return std::make_unique<nccl>(comm, timeout);
  } catch (const pf::backend_error& e) {
    if (std::string(e.what()).find("Duplicate GPU") == std::string::npos) throw;
    MESSAGE("not tested: " << e.what());
    return nullptr;
  }
}

/// NCCL adds in an order of its own; two numbers have only one.
template <class T>
bool agrees(const std::vector<T>& got, const std::vector<T>& expected, int ranks, bool bits) {
  return bits || ranks <= 2 ? same_bits(got, expected) : difference(got, expected) < 1e-6;
}

template <class T>
struct nccl_step {
  nccl_step(nccl& comm, const pf::exchange_options& options, const pf::compression_options& compression = {})
      : exchange(net.store, comm, options, pf::new_compressor(net.store, compression)) {}

  void work() {
    exchange.begin(ctx);
    backward(ctx, net, source.data());
    usable = exchange.finish(ctx, [&](const pf::gradient_bucket& b) {
      kept.copy_from(ctx, net.store.gradients().data(), b.offset, b.size);
    });
  }
  void run(const std::vector<T>& gradients) {
    ctx.begin_step(0);
    source.write(ctx, gradients);
    graph.run(ctx, 1, [&] { work(); });
  }
  std::vector<T> gradients() { return read(ctx, std::span<const T>(net.store.gradients())); }
  int skip() { return read(ctx, std::span<const int>(exchange.skip(), 1))[0]; }

  pf::gpu_context ctx;
  odd_parameters<T> net{pf::gpu::device_memory()};
  stream_buffer<T> source{net.size()}, kept{net.size()};
  exchange_of<T> exchange;
  pf::gpu::step_graph graph;
  bool usable = true;
};

template <class T>
void check_steps(nccl& comm, const pf::exchange_options& options, bool captured,
                 const pf::compression_options& compression = {}) {
  pf::exchange_options on_host = options;
  on_host.plan = small_buckets().plan;
  nccl_step<T> step(comm, options, compression);
  step.graph.set_enabled(captured);
  host_twin<T, hosts> twin(comm.host(), on_host, compression);
  const bool narrow = options.wire != pf::exchange_wire::same;
  for (std::uint64_t number = 0; number < 5; ++number) {
    const auto mine = gradients_of<T>(step.net.size(), comm.rank(), number);
    step.run(mine);
    const std::vector<T> got = step.gradients(), kept = step.kept.read(step.ctx);
    const std::vector<T> expected = twin.step(mine);
    CHECK(agrees(got, expected, comm.size(), narrow));
    CHECK(same_bits(kept, got));
    CHECK((options.local || same_on_all_ranks(comm, got)));
    CHECK(step.usable);
    CHECK(step.skip() == 0);
  }
  CHECK(step.graph.captures() == (captured ? 1 : 0));
  CHECK(step.exchange.steps() == 5);
  CHECK(step.exchange.report().steps == 5);
  CHECK(step.exchange.report().payload_bytes == twin.exchange().report().payload_bytes);
}

pf::exchange_options any_order() {
  pf::exchange_options options = small_buckets();
  options.plan->rules.clear();
  return options;
}

}  // namespace

TEST_CASE("gpu nccl: sums, smallest elements and copies of devices' memory, in the order of a stream") {
  hosts comm(MPI_COMM_WORLD);
  const auto fast = make_nccl(comm);
  if (!fast) return;
  pf::gpu_context ctx;
  CHECK(fast->rank() == comm.rank());
  CHECK(fast->size() == comm.size());
  for (const std::size_t size : {0U, 1U, 1000U}) {
    stream_buffer<double> numbers(size);
    numbers.write(ctx, std::vector<double>(size, comm.rank() + 1.0));
    fast->all_reduce_sum(std::span<double>(numbers.data(), size), ctx.stream());
    CHECK(numbers.read(ctx) == std::vector<double>(size, comm.size() * (comm.size() + 1) / 2.0));
    stream_buffer<std::uint64_t> places(size);
    places.write(
        ctx, std::vector<std::uint64_t>(size, ~std::uint64_t{0} - static_cast<std::uint64_t>(comm.rank())));
    fast->all_reduce_min(std::span<std::uint64_t>(places.data(), size), ctx.stream());
    CHECK(places.read(ctx) ==
          std::vector<std::uint64_t>(size, ~std::uint64_t{0} - static_cast<std::uint64_t>(comm.size() - 1)));
    for (int root = 0; root < comm.size(); ++root) {
      stream_buffer<float> values(size);
      const auto of_root = gradients_of<float>(size, root, 3);
      values.write(ctx, comm.rank() == root ? of_root : std::vector<float>(size, 0.0F));
      fast->broadcast(std::span<float>(values.data(), size), root, ctx.stream());
      CHECK(values.read(ctx) == of_root);
    }
  }
  stream_buffer<float> values(1);
  CHECK_THROWS_AS(fast->broadcast(std::span<float>(values.data(), 1), comm.size(), ctx.stream()),
                  pf::value_error);
  CHECK_NOTHROW(fast->check());
}

TEST_CASE("gpu nccl: for the host's memory it is the host's communicator") {
  hosts comm(MPI_COMM_WORLD);
  const auto fast = make_nccl(comm);
  if (!fast) return;
  std::vector<float> values(3, static_cast<float>(comm.rank()));
  fast->all_reduce_sum(std::span<float>(values));
  CHECK(values == std::vector<float>(3, static_cast<float>(comm.size() * (comm.size() - 1) / 2)));
  CHECK(fast->all_gather(std::uint64_t{7}) ==
        std::vector<std::uint64_t>(static_cast<std::size_t>(comm.size()), 7));
  CHECK(fast->usable_from_threads() == comm.usable_from_threads());
  CHECK(fast->timeout() == 0.0);
  CHECK_THROWS_AS(nccl(comm, -1.0), pf::value_error);
}

TEST_CASE("gpu nccl exchange: direct and captured, every wire and policy") {
  hosts comm(MPI_COMM_WORLD);
  const auto fast = make_nccl(comm);
  if (!fast) return;
  pf::exchange_options options = any_order();
  for (const bool captured : {false, true}) {
    for (auto policy : {pf::nonfinite_policy::ignore, pf::nonfinite_policy::skip}) {
      options.nonfinite = policy;
      options.wire = pf::exchange_wire::same;
      check_steps<float>(*fast, options, captured);
      options.wire = captured ? pf::exchange_wire::bf16 : pf::exchange_wire::fp16;
      check_steps<float>(*fast, options, captured);
    }
  }
  check_steps<double>(*fast, options, true);
}

TEST_CASE("gpu nccl exchange: compact sums of a pruned network, and local gradients") {
  hosts comm(MPI_COMM_WORLD);
  const auto fast = make_nccl(comm);
  if (!fast) return;
  const pf::compact_sum_options sum{some_mask()}, ternary{some_mask(), pf::tern_grad_options{}};
  for (const bool captured : {false, true}) {
    for (auto policy : {pf::nonfinite_policy::ignore, pf::nonfinite_policy::skip}) {
      pf::exchange_options options = any_order();
      options.nonfinite = policy;
      check_steps<float>(*fast, options, captured, sum);
      options.local = true;
      check_steps<float>(*fast, options, captured);
    }
  }
  odd_parameters<float> net(pf::gpu::device_memory());
  const auto refused = [&](const pf::exchange_options& options, const pf::compact_sum_options& compact,
                           const char* why) {
    CHECK_THROWS_WITH_AS(
        exchange_of<float>(net.store, *fast, options, pf::new_compressor(net.store, compact)),
        doctest::Contains(why), pf::value_error);
  };
  pf::exchange_options options = any_order();
  refused(options, ternary, "host() of gpu::nccl");
  options.wire = pf::exchange_wire::bf16;
  refused(options, sum, "a wire of bf16, but a compressor");
  options.wire = pf::exchange_wire::same;
  options.local = true;
  refused(options, sum, "local sends nothing");
}

TEST_CASE("gpu nccl exchange: with a timeout") {
  hosts comm(MPI_COMM_WORLD);
  comm.set_timeout(100.0);
  const auto fast = make_nccl(comm);
  if (!fast) return;
  CHECK(fast->timeout() == (comm.size() > 1 ? 100.0 : 0.0));
  pf::exchange_options options = any_order();
  options.wire = pf::exchange_wire::bf16;
  check_steps<float>(*fast, options, false);
  check_steps<float>(*fast, options, true);
}

TEST_CASE("gpu nccl exchange: what is not finite is named on all ranks, direct and captured") {
  hosts comm(MPI_COMM_WORLD);
  const auto fast = make_nccl(comm);
  if (!fast) return;
  const int bad = comm.size() - 1;
  const std::string name = "p0 is not finite at element 10 on rank " + std::to_string(bad);
  for (const bool captured : {false, true}) {
    for (auto policy : {pf::nonfinite_policy::skip, pf::nonfinite_policy::stop}) {
      pf::exchange_options options = any_order();
      options.nonfinite = policy;
      options.wire = policy == pf::nonfinite_policy::skip ? pf::exchange_wire::fp16 : pf::exchange_wire::same;
      nccl_step<float> step(*fast, options);
      step.graph.set_enabled(captured);
      for (std::uint64_t number = 0; number < 7; ++number) {
        auto mine = gradients_of<float>(step.net.size(), comm.rank(), number);
        const bool spoilt = number == 4, overflows = number == 5 && policy == pf::nonfinite_policy::skip;
        if (spoilt && comm.rank() == bad) mine.back() = std::numeric_limits<float>::quiet_NaN();
        if (overflows) std::fill(mine.begin(), mine.end(), 6e4F);
        const bool refused = spoilt || (overflows && comm.size() > 1);
        const auto whole = [&] {
          step.run(mine);
          step.ctx.synchronize();
        };
        if (spoilt && policy == pf::nonfinite_policy::stop) {
          CHECK_THROWS_WITH_AS(whole(), doctest::Contains(name.c_str()), pf::value_error);
        } else {
          whole();
          if (!captured) CHECK(step.usable == !refused);
        }
        CHECK((step.skip() != 0) == refused);
        if (spoilt) {
          CHECK((step.exchange.nonfinite() &&
                 to_string(*step.exchange.nonfinite()).find(name) != std::string::npos));
        } else if (refused) {
          CHECK((step.exchange.nonfinite() && step.exchange.nonfinite()->rank == -1));
        } else {
          CHECK(same_on_all_ranks(comm, step.gradients()));
        }
      }
      CHECK(step.exchange.steps() == (policy == pf::nonfinite_policy::skip && comm.size() > 1 ? 5 : 6));
    }
  }
}

TEST_CASE("gpu nccl exchange: what it does not take, and calls out of order") {
  hosts comm(MPI_COMM_WORLD);
  const auto fast = make_nccl(comm);
  if (!fast) return;
  pf::gpu_context ctx;
  odd_parameters<float> net(pf::gpu::device_memory());
  pf::exchange_options options = any_order();
  CHECK_THROWS_WITH_AS(exchange_of<float>(net.store, *fast, options,
                                          pf::new_compressor<float>(net.store, pf::signum_options{})),
                       doctest::Contains("host() of gpu::nccl"), pf::value_error);
  options.algorithm = pf::all_reduce_algorithm::ring;
  CHECK_THROWS_WITH_AS(exchange_of<float>(net.store, *fast, options), doctest::Contains("not by ring"),
                       pf::value_error);
  options = any_order();
  exchange_of<float> exchange(net.store, *fast, options);
  CHECK_THROWS_AS(exchange.finish(ctx), pf::state_error);
  exchange.begin(ctx);
  CHECK_THROWS_AS(exchange.begin(ctx), pf::state_error);
  exchange.finish(ctx);
  ctx.synchronize();
  exchange.set_steps(comm.rank() == 0 ? 8 : 7);
  if (comm.size() > 1) {
    CHECK_THROWS_WITH_AS(exchange.begin(ctx), doctest::Contains("steps done: 7"), pf::state_error);
  }
  // A compressor with the host's communicator.
  pf::gradient_exchange<float, hosts, pf::device::gpu> compressed(
      net.store, fast->host(), small_buckets(), pf::new_compressor<float>(net.store, pf::signum_options{}));
  compressed.begin(ctx);
  CHECK(compressed.finish(ctx));
}

TEST_CASE("gpu nccl exchange: training with a step that is not finite, as direct and as on the CPU") {
  hosts comm(MPI_COMM_WORLD);
  const auto fast = make_nccl(comm);
  if (!fast) return;
  pf::exchange_options options = any_order(), on_host = small_buckets();
  options.nonfinite = on_host.nonfinite = pf::nonfinite_policy::skip;
  const auto direct = train_on_device(*fast, options, false),
             captured = train_on_device(*fast, options, true);
  CHECK(same_bits(direct, captured));
  CHECK(difference(direct, train_on_host(comm, on_host)) < 1e-5);
}

TEST_CASE("gpu nccl exchange: loss scaling: all ranks skip together and have one scale") {
  hosts comm(MPI_COMM_WORLD);
  const auto fast = make_nccl(comm);
  if (fast) check_scaled_training(*fast, any_order());
}

TEST_CASE(
    "gpu nccl exchange: a rank that does not come; what waits for it returns, and every call says why") {
  hosts comm(MPI_COMM_WORLD);
  if (comm.size() == 1) return;
  const auto fast = make_nccl(comm, 0.5);
  if (!fast) return;
  nccl_step<float> step(*fast, any_order());
  const auto mine = gradients_of<float>(step.net.size(), comm.rank(), 0);
  for (int i = 0; i < 3; ++i) {
    step.run(mine);
    step.ctx.synchronize();
  }
  comm.barrier();
  if (comm.rank() > 0) {
    // A replay, in which no thread of the host waits.
    CHECK_THROWS_WITH_AS(
        [&] {
          step.run(mine);
          step.ctx.synchronize();
        }(),
        doctest::Contains("did not end within"), pf::timeout_error);
    CHECK_THROWS_AS(step.run(mine), pf::timeout_error);
    CHECK_THROWS_AS(step.ctx.synchronize(), pf::timeout_error);
    CHECK_THROWS_AS(fast->check(), pf::timeout_error);
    step.graph.drop();
  }
  comm.barrier();
}
