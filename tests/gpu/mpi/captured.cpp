// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The exchange inside of captured steps: what a replay does, without a word from the host, is what a direct
// step does.
#include <functional>

#include "parameters.hpp"

using namespace gpu_test;

// Every rank runs every case in the same order. No REQUIRE before a collective. A replay uses the
// communicator until the device has been waited for (gradients(), skip()), and a twin's step uses it as well:
// so results are read in a statement of their own, before the twin's step. Two arguments have no order.

namespace {

template <class T, class Comm = pf::mpi::communicator>
using exchange_of = pf::gradient_exchange<T, Comm, pf::device::gpu>;

/// A step that copies its gradients, exchanges them and keeps the result bucket by bucket.
template <class T, class Comm>
struct captured_step {
  captured_step(Comm& comm, const pf::exchange_options& options,
                const pf::compression_options& compression = {})
      : exchange(net.store, comm, options, pf::new_compressor(net.store, compression)) {}

  void run(const std::vector<T>& gradients) {
    ctx.begin_step(0);
    source.write(ctx, gradients);
    graph.run(ctx, 1, [&] {
      exchange.begin(ctx);
      backward(ctx, net, source.data(), between);
      exchange.finish(ctx, [&](const pf::gradient_bucket& b) {
        kept.copy_from(ctx, net.store.gradients().data(), b.offset, b.size);
      });
    });
  }
  std::vector<T> gradients() { return read(ctx, std::span<const T>(net.store.gradients())); }
  int skip() { return read(ctx, std::span<const int>(exchange.skip(), 1))[0]; }

  pf::gpu_context ctx;
  odd_parameters<T> net{pf::gpu::device_memory()};
  stream_buffer<T> source{net.size()}, kept{net.size()};
  std::function<void(int)> between = [](int) {};
  exchange_of<T, Comm> exchange;
  pf::gpu::step_graph graph;
};

template <class T>
void check_replays(pf::mpi::communicator& comm, const pf::exchange_options& options,
                   const pf::compression_options& compression = {}) {
  captured_step<T, pf::mpi::communicator> step(comm, options, compression);
  host_twin<T, pf::mpi::communicator> twin(comm, options, compression);
  for (std::uint64_t number = 0; number < 5; ++number) {
    const auto mine = gradients_of<T>(step.net.size(), comm.rank(), number);
    step.run(mine);
    const std::vector<T> got = step.gradients();
    const std::vector<T> expected = twin.step(mine);
    CHECK(same_bits(got, expected));
    CHECK(same_bits(step.kept.read(step.ctx), expected));
    CHECK(step.skip() == 0);
  }
  CHECK(step.graph.captures() == 1);
  CHECK(step.graph.replays() >= 2);
  CHECK(step.exchange.steps() == 5);
  CHECK(step.exchange.report().steps == 5);
  CHECK(step.exchange.report().payload_bytes == twin.exchange().report().payload_bytes);
  const auto states = step.exchange.states(), expected_states = twin.exchange().states();
  for (std::size_t i = 0; i < states.size(); ++i) {
    CHECK(std::equal(states[i].values.begin(), states[i].values.end(), expected_states[i].values.begin()));
  }
}

}  // namespace

TEST_CASE("captured exchange: replays give the CPU's bits, every algorithm, wire and policy") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (!comm.usable_from_threads()) return;
  pf::exchange_options options = small_buckets();
  for (auto progress : {pf::exchange_progress::thread, pf::exchange_progress::calls}) {
    options.progress = progress;
    for (auto policy : {pf::nonfinite_policy::ignore, pf::nonfinite_policy::skip}) {
      options.nonfinite = policy;
      check_replays<float>(comm, options);
    }
  }
  options.wire = pf::exchange_wire::bf16;
  check_replays<float>(comm, options);
  options.wire = pf::exchange_wire::fp16;
  check_replays<double>(comm, options);
}

TEST_CASE("captured exchange: compressors") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (!comm.usable_from_threads()) return;
  check_replays<float>(comm, small_buckets(), pf::power_sgd_options{2, pf::error_feedback::local, 1.0, 3});
  check_replays<float>(comm, small_buckets(), pf::signum_options{});
}

TEST_CASE("captured exchange: compact sums of a pruned network") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (!comm.usable_from_threads()) return;
  pf::exchange_options options = small_buckets();
  options.compress_by_bucket = true;
  for (auto policy : {pf::nonfinite_policy::ignore, pf::nonfinite_policy::skip}) {
    options.nonfinite = policy;
    check_replays<float>(comm, options, pf::compact_sum_options{some_mask()});
    check_replays<float>(comm, options, pf::compact_sum_options{some_mask(), pf::tern_grad_options{}});
  }
}

TEST_CASE("captured exchange: the host runs ahead of the replays") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (!comm.usable_from_threads()) return;
  captured_step<float, pf::mpi::communicator> step(comm, small_buckets());
  host_twin<float, pf::mpi::communicator> twin(comm, small_buckets());
  // Pinned, so that the copies are asynchronous.
  const std::size_t size = step.net.size();
  pf::memory_block<float> pinned(pf::gpu::pinned_memory(), static_cast<index_t>(10 * size));
  std::vector<stream_buffer<float>> results;
  for (std::uint64_t number = 0; number < 10; ++number) {
    const auto mine = gradients_of<float>(size, comm.rank(), number);
    std::copy(mine.begin(), mine.end(), pinned.data() + number * size);
    results.emplace_back(size);
  }
  for (std::uint64_t number = 0; number < 10; ++number) {
    pf::gpu::check(cudaMemcpyAsync(step.source.data(), pinned.data() + number * size, size * sizeof(float),
                                   cudaMemcpyHostToDevice, step.ctx.stream()),
                   "cudaMemcpyAsync");
    step.graph.run(step.ctx, 1, [&] {
      step.exchange.begin(step.ctx);
      backward(step.ctx, step.net, step.source.data());
      step.exchange.finish(step.ctx);
    });
    results[number].copy_from(step.ctx, step.net.store.gradients().data(), 0, static_cast<index_t>(size));
  }
  for (std::uint64_t number = 0; number < 10; ++number) {
    const std::vector<float> got = results[number].read(step.ctx);
    CHECK(same_bits(got, twin.step(number)));
  }
  CHECK(step.exchange.steps() == 10);
}

TEST_CASE("captured exchange: a replay that is not finite is skipped, or stops at a later call") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (!comm.usable_from_threads()) return;
  const int bad = comm.size() - 1;
  const std::string name = "p0 is not finite at element 10 on rank " + std::to_string(bad);
  for (const pf::compression_options& compression :
       {pf::compression_options(), pf::compression_options(pf::power_sgd_options{})}) {
    for (auto policy : {pf::nonfinite_policy::skip, pf::nonfinite_policy::stop}) {
      pf::exchange_options options = small_buckets();
      options.nonfinite = policy;
      captured_step<float, pf::mpi::communicator> step(comm, options, compression);
      host_twin<float, pf::mpi::communicator> twin(comm, options, compression);
      for (std::uint64_t number = 0; number < 7; ++number) {
        auto mine = gradients_of<float>(step.net.size(), comm.rank(), number);
        const bool spoilt = number == 5;
        if (spoilt && comm.rank() == bad) mine.back() = std::numeric_limits<float>::quiet_NaN();
        step.run(mine);
        if (spoilt && policy == pf::nonfinite_policy::stop) {
          CHECK_THROWS_WITH_AS(step.ctx.synchronize(), doctest::Contains(name.c_str()), pf::value_error);
        }
        CHECK((step.skip() != 0) == spoilt);
        if (spoilt) {
          CHECK((step.exchange.nonfinite() &&
                 to_string(*step.exchange.nonfinite()).find(name) != std::string::npos));
        } else {
          const std::vector<float> got = step.gradients();
          CHECK(same_bits(got, twin.step(mine)));
        }
      }
      CHECK(step.graph.replays() >= 3);
      CHECK(step.exchange.steps() == 6);
    }
  }
}

TEST_CASE("captured exchange: a failure skips its step and all later ones, and comes out of the next call") {
  pf::mpi::communicator mpi(MPI_COMM_WORLD);
  if (mpi.size() == 1 || !mpi.usable_from_threads()) return;
  watched comm(mpi);
  captured_step<float, watched> step(comm, by_library());
  host_twin<float, pf::mpi::communicator> twin(mpi, by_library());
  for (std::uint64_t number = 0; number < 8; ++number) {
    const auto mine = gradients_of<float>(step.net.size(), comm.rank(), number);
    comm.sums_until_failure = number == 5 ? 1 : -1;
    const int sums = comm.sums;
    step.run(mine);
    if (number < 5) {
      const std::vector<float> got = step.gradients();
      CHECK(same_bits(got, twin.step(number)));
      CHECK(step.skip() == 0);
      continue;
    }
    pf::gpu::check(cudaStreamSynchronize(step.ctx.stream()), "cudaStreamSynchronize");
    if (number == 5) {
      CHECK_THROWS_WITH_AS(step.ctx.begin_step(6), "the link is down", pf::backend_error);
    } else {
      CHECK_THROWS_WITH_AS(step.graph.run(step.ctx, 1, [] {}),
                           doctest::Contains("an earlier step failed (the link is down)"), pf::state_error);
      CHECK(comm.sums == sums);
    }
    CHECK(step.skip() != 0);
  }
  CHECK(step.exchange.steps() == 5);
  CHECK_THROWS_WITH_AS(step.exchange.begin(step.ctx), doctest::Contains("make a new exchange"),
                       pf::state_error);
}

TEST_CASE("captured exchange: after a replayed backward pass it is direct") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  pf::gpu_context ctx;
  odd_parameters<float> net(pf::gpu::device_memory());
  stream_buffer<float> source(net.size());
  exchange_of<float> exchange(net.store, comm, small_buckets());
  host_twin<float, pf::mpi::communicator> twin(comm, small_buckets());
  pf::gpu::step_graph graph;
  for (std::uint64_t number = 0; number < 6; ++number) {
    source.write(ctx, gradients_of<float>(net.size(), comm.rank(), number));
    graph.run(ctx, 1, [&] { backward(ctx, net, source.data()); });
    exchange.begin(ctx);
    exchange.finish(ctx);
    CHECK(same_bits(read(ctx, std::span<const float>(net.store.gradients())), twin.step(number)));
  }
  CHECK(graph.replays() >= 3);
}

TEST_CASE("captured exchange: direct steps between replays; a work that throws; half a capture") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (comm.size() == 1 || !comm.usable_from_threads()) return;
  captured_step<float, pf::mpi::communicator> step(comm, small_buckets());
  host_twin<float, pf::mpi::communicator> twin(comm, small_buckets());
  const auto check_step = [&](std::uint64_t number) {
    step.run(gradients_of<float>(step.net.size(), comm.rank(), number));
    const std::vector<float> got = step.gradients();
    CHECK(same_bits(got, twin.step(number)));
  };
  for (std::uint64_t number = 0; number < 5; ++number) check_step(number);
  // With replays on their way.
  for (std::uint64_t number = 5; number < 8; ++number) {
    step.run(gradients_of<float>(step.net.size(), comm.rank(), 5));
    step.source.write(step.ctx, gradients_of<float>(step.net.size(), comm.rank(), number));
    step.exchange.begin(step.ctx);
    backward(step.ctx, step.net, step.source.data());
    step.exchange.finish(step.ctx);
    CHECK(same_bits(step.gradients(), twin.step(number)));
  }
  step.graph.drop();
  check_step(8);
  // The second would be captured.
  step.between = [](int parameter) {
    if (parameter == 4) throw pf::value_error("no");
  };
  CHECK_THROWS_WITH_AS(check_step(10), "no", pf::value_error);
  step.between = [](int) {};
  for (std::uint64_t number = 11; number < 15; ++number) check_step(number);
  // Outside and inside of the graph.
  pf::gpu::step_graph other;
  other.run(step.ctx, 2, [] {});
  step.exchange.begin(step.ctx);
  CHECK_THROWS_WITH_AS(other.run(step.ctx, 2, [&] { backward(step.ctx, step.net, step.source.data()); }),
                       doctest::Contains("are captured into a graph together"), pf::state_error);
  step.exchange.finish(step.ctx);
  check_step(15);
}

TEST_CASE("captured exchange: refused where no thread may use the communicator") {
  pf::mpi::communicator mpi(MPI_COMM_WORLD);
  if (mpi.size() == 1) return;
  watched comm(mpi);
  comm.threads = false;
  captured_step<float, watched> step(comm, by_library());
  const auto mine = gradients_of<float>(step.net.size(), comm.rank(), 0);
  step.run(mine);
  CHECK_THROWS_WITH_AS(step.run(mine), doctest::Contains("MPI_THREAD_SERIALIZED"), pf::state_error);
}

TEST_CASE("captured exchange: one process; the end of an exchange waits for replays") {
  pf::self self;
  captured_step<float, pf::self> alone(self, small_buckets());
  std::vector<float> mine;
  for (std::uint64_t number = 0; number < 5; ++number) {
    mine = gradients_of<float>(alone.net.size(), 0, number);
    alone.run(mine);
  }
  CHECK(same_bits(alone.gradients(), mine));
  CHECK(alone.exchange.steps() == 5);
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (!comm.usable_from_threads()) return;
  odd_parameters<float> net(pf::gpu::device_memory());
  stream_buffer<float> source(net.size());
  source.write(alone.ctx, gradients_of<float>(net.size(), comm.rank(), 1));
  pf::gpu::step_graph graph;
  {
    exchange_of<float> exchange(net.store, comm, small_buckets());
    for (int i = 0; i < 5; ++i) {
      graph.run(alone.ctx, 1, [&] {
        exchange.begin(alone.ctx);
        backward(alone.ctx, net, source.data());
        exchange.finish(alone.ctx);
      });
    }
  }
  graph.drop();
  host_twin<float, pf::mpi::communicator> twin(comm, small_buckets());
  const auto got = read(alone.ctx, std::span<const float>(net.store.gradients()));
  CHECK(same_bits(got, twin.step(1)));
}

TEST_CASE("captured exchange: replays overlap with the backward pass") {
  pf::mpi::communicator mpi(MPI_COMM_WORLD);
  if (mpi.size() == 1 || !mpi.usable_from_threads()) return;
  watched comm(mpi);
  captured_step<float, watched> step(comm, by_library());
  // In the middle of a replayed backward pass the stream waits for the first bucket's sum. A real device may
  // put this function before the one that tells of the bucket; then there is nothing to be seen.
  struct watch {
    watched* comm;
    int before, overlapped, calls;
  } state{&comm, 0, 0, 0};
  step.between = [&](int parameter) {
    if (parameter != step.exchange.buckets()[0].count - 1) return;
    pf::gpu::check(cudaLaunchHostFunc(
                       step.ctx.stream(),
                       [](void* object) {
                         watch& w = *static_cast<watch*>(object);
                         ++w.calls;
                         if (w.comm->await_sums(w.before + 1, 2.0)) ++w.overlapped;
                       },
                       &state),
                   "cudaLaunchHostFunc");
  };
  for (std::uint64_t number = 0; number < 6; ++number) {
    state.before = comm.sums;
    step.run(gradients_of<float>(step.net.size(), comm.rank(), number));
    step.ctx.synchronize();
  }
  CHECK(state.calls == 6);
  WARN(state.overlapped == 6);
}

TEST_CASE("captured exchange: training with a step that is not finite, as direct and as on the CPU") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (!comm.usable_from_threads()) return;
  pf::exchange_options options = small_buckets();
  options.nonfinite = pf::nonfinite_policy::skip;
  const auto direct = train_on_device(comm, options, false), captured = train_on_device(comm, options, true);
  CHECK(same_bits(direct, captured));
  CHECK(difference(direct, train_on_host(comm, options)) < 1e-5);
}
