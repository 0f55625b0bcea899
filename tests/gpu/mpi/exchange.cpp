// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Gradients of a device, exchanged through the host: bit for bit what the CPU's exchange makes of them.
#include "parameters.hpp"

using namespace gpu_test;

// Every rank runs every case in the same order. No REQUIRE before a collective.

namespace {

template <class T, class Comm = pf::mpi::communicator>
using exchange_of = pf::gradient_exchange<T, Comm, pf::device::gpu>;

template <class T>
void check_direct(pf::mpi::communicator& comm, const pf::exchange_options& options,
                  const pf::compression_options& compression = {}) {
  pf::gpu_context ctx;
  odd_parameters<T> net(pf::gpu::device_memory());
  stream_buffer<T> source(net.size()), handed(net.size());
  exchange_of<T> exchange(net.store, comm, options, pf::new_compressor(net.store, compression));
  host_twin<T, pf::mpi::communicator> twin(comm, options, compression);
  CHECK(exchange.buckets().size() >= 3);
  CHECK(exchange.with_thread() == twin.exchange().with_thread());
  for (std::uint64_t step = 0; step < 5; ++step) {
    const auto mine = gradients_of<T>(net.size(), comm.rank(), step);
    source.write(ctx, mine);
    exchange.begin(ctx);
    backward(ctx, net, source.data());
    std::vector<pf::gradient_bucket> seen;
    const bool usable = exchange.finish(ctx, [&](const pf::gradient_bucket& b) {
      handed.copy_from(ctx, net.store.gradients().data(), b.offset, b.size);
      seen.push_back(b);
    });
    const std::vector<T> got = read(ctx, std::span<const T>(net.store.gradients()));
    const std::vector<T> expected = twin.step(mine);
    CHECK(usable == twin.usable);
    CHECK(same_bits(got, expected));
    CHECK(same_bits(handed.read(ctx), expected));
    CHECK(seen == exchange.buckets());
  }
  CHECK(exchange.steps() == 5);
  CHECK(exchange.report().steps == 5);
  CHECK(exchange.report().payload_bytes == twin.exchange().report().payload_bytes);
  const auto states = exchange.states(), expected_states = twin.exchange().states();
  CHECK(states.size() == expected_states.size());
  for (std::size_t i = 0; i < states.size(); ++i) {
    CHECK(std::equal(states[i].values.begin(), states[i].values.end(), expected_states[i].values.begin()));
  }
}

}  // namespace

TEST_CASE("gpu exchange: the CPU's bits, by a thread and by calls, every algorithm and wire") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  pf::exchange_options options = small_buckets();
  for (auto progress : {pf::exchange_progress::thread, pf::exchange_progress::calls}) {
    options.progress = progress;
    options.wire = pf::exchange_wire::same;
    for (auto algorithm : {pf::all_reduce_algorithm::automatic, pf::all_reduce_algorithm::library,
                           pf::all_reduce_algorithm::ring}) {
      options.algorithm = algorithm;
      check_direct<float>(comm, options);
    }
    for (auto wire : {pf::exchange_wire::bf16, pf::exchange_wire::fp16}) {
      options.wire = wire;
      check_direct<float>(comm, options);
    }
  }
  check_direct<double>(comm, small_buckets());
}

TEST_CASE("gpu exchange: compressors work on the host, with the CPU's results and states") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  pf::exchange_options options = small_buckets();
  for (auto policy : {pf::nonfinite_policy::ignore, pf::nonfinite_policy::skip}) {
    options.nonfinite = policy;
    check_direct<float>(comm, options, pf::power_sgd_options{2, pf::error_feedback::local, 1.0, 3});
    check_direct<float>(comm, options, pf::signum_options{});
  }
}

TEST_CASE("gpu exchange: compact sums of a pruned network are gathered on the device, with the CPU's bits") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  pf::exchange_options options = small_buckets();
  const pf::compact_sum_options sum{some_mask()}, ternary{some_mask(), pf::tern_grad_options{}};
  for (const bool by_bucket : {true, false}) {
    options.compress_by_bucket = by_bucket;
    for (auto progress : {pf::exchange_progress::thread, pf::exchange_progress::calls}) {
      if (!by_bucket && progress == pf::exchange_progress::thread) continue;
      options.progress = progress;
      for (auto policy : {pf::nonfinite_policy::ignore, pf::nonfinite_policy::skip}) {
        options.nonfinite = policy;
        check_direct<float>(comm, options, sum);
        check_direct<float>(comm, options, ternary);
      }
    }
  }
  options.compress_by_bucket = true;
  options.nonfinite = pf::nonfinite_policy::ignore;
  check_direct<double>(comm, options, sum);
}

TEST_CASE("gpu exchange: the first bucket's sum is there before the backward pass goes on") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (comm.size() == 1 || !comm.usable_from_threads()) return;
  watched watcher(comm);
  pf::gpu_context ctx;
  odd_parameters<float> net(pf::gpu::device_memory());
  stream_buffer<float> source(net.size());
  source.write(ctx, gradients_of<float>(net.size(), comm.rank(), 0));
  exchange_of<float, watched> exchange(net.store, watcher, by_library());
  exchange.begin(ctx);
  bool overlapped = false;
  backward(ctx, net, source.data(), [&](int parameter) {
    if (parameter == exchange.buckets()[0].count - 1) overlapped = watcher.await_sums(1, 20.0);
  });
  exchange.finish(ctx);
  CHECK(overlapped);
}

TEST_CASE("gpu exchange: what is not finite is named on all ranks; skip() says so on the device") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  const int bad = comm.size() - 1;
  const std::string name = "p0 is not finite at element 10 on rank " + std::to_string(bad);
  for (auto progress : {pf::exchange_progress::thread, pf::exchange_progress::calls}) {
    for (const pf::compression_options& compression :
         {pf::compression_options(), pf::compression_options(pf::power_sgd_options{})}) {
      pf::exchange_options options = small_buckets();
      options.progress = progress;
      options.nonfinite = pf::nonfinite_policy::skip;
      pf::gpu_context ctx;
      odd_parameters<float> net(pf::gpu::device_memory());
      stream_buffer<float> source(net.size());
      const auto step = [&](exchange_of<float>& exchange, std::uint64_t number) {
        auto mine = gradients_of<float>(net.size(), comm.rank(), number);
        if (number == 1 && comm.rank() == bad) mine.back() = std::numeric_limits<float>::quiet_NaN();
        source.write(ctx, mine);
        exchange.begin(ctx);
        backward(ctx, net, source.data());
        return exchange.finish(ctx);
      };
      const auto skip = [&](exchange_of<float>& exchange) {
        return read(ctx, std::span<const int>(exchange.skip(), 1))[0];
      };
      exchange_of<float> skipping(net.store, comm, options, pf::new_compressor(net.store, compression));
      CHECK(step(skipping, 0));
      CHECK(skip(skipping) == 0);
      CHECK_FALSE(step(skipping, 1));
      CHECK(skip(skipping) != 0);
      CHECK(skipping.report().skipped == 1);
      CHECK((skipping.nonfinite() && to_string(*skipping.nonfinite()).find(name) != std::string::npos));
      CHECK(step(skipping, 2));
      CHECK(skip(skipping) == 0);
      CHECK(skipping.steps() == 2);
      options.nonfinite = pf::nonfinite_policy::stop;
      exchange_of<float> stopping(net.store, comm, options, pf::new_compressor(net.store, compression));
      CHECK_THROWS_WITH_AS(step(stopping, 1), doctest::Contains(name.c_str()), pf::value_error);
      CHECK(step(stopping, 2));
    }
  }
}

TEST_CASE("gpu exchange: micro-batches; unwritten gradients; calls out of order; what arrived throws") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  pf::gpu_context ctx;
  odd_parameters<float> net(pf::gpu::device_memory());
  stream_buffer<float> source(net.size());
  const pf::exchange_options options = small_buckets();
  exchange_of<float> exchange(net.store, comm, options);
  host_twin<float, pf::mpi::communicator> twin(comm, options);
  {
    pf::micro_batches parts(net.store, 3);
    for (int part = 0; part < 3; ++part) {
      source.write(ctx, gradients_of<float>(net.size(), comm.rank(), static_cast<std::uint64_t>(part)));
      if (part == 2) exchange.begin(ctx);
      backward(ctx, net, source.data());
    }
    exchange.finish(ctx);
    CHECK(same_bits(read(ctx, std::span<const float>(net.store.gradients())), twin.step(2)));
  }
  exchange.begin(ctx);
  CHECK_THROWS_AS(exchange.begin(ctx), pf::state_error);
  exchange.finish(ctx);  // of what is there: the mean of equal numbers
  CHECK_THROWS_AS(exchange.finish(ctx), pf::state_error);
  for (std::uint64_t step = 4; step < 6; ++step) {
    source.write(ctx, gradients_of<float>(net.size(), comm.rank(), step));
    exchange.begin(ctx);
    backward(ctx, net, source.data());
    if (step == 4) {
      CHECK_THROWS_AS(exchange.finish(ctx,
                                      [](const pf::gradient_bucket& b) {
                                        if (b.offset > 0) throw pf::value_error("stop");
                                      }),
                      pf::value_error);
      static_cast<void>(twin.step(step));
    } else {
      exchange.finish(ctx);
      CHECK(same_bits(read(ctx, std::span<const float>(net.store.gradients())), twin.step(step)));
    }
  }
}

TEST_CASE("gpu exchange: a failure of the communicator comes out of finish; a new exchange goes on") {
  pf::mpi::communicator mpi(MPI_COMM_WORLD);
  if (mpi.size() == 1 || !mpi.usable_from_threads()) return;
  watched comm(mpi);
  pf::gpu_context ctx;
  odd_parameters<float> net(pf::gpu::device_memory());
  stream_buffer<float> source(net.size());
  std::optional<exchange_of<float, watched>> exchange(std::in_place, net.store, comm, by_library());
  host_twin<float, pf::mpi::communicator> twin(mpi, by_library());
  for (std::uint64_t step = 0; step < 4; ++step) {
    comm.sums_until_failure = step == 1 ? 2 : -1;
    source.write(ctx, gradients_of<float>(net.size(), comm.rank(), step));
    exchange->begin(ctx);
    backward(ctx, net, source.data());
    int arrived = 0;
    const auto finish = [&] { exchange->finish(ctx, [&](const pf::gradient_bucket&) { ++arrived; }); };
    if (step == 1) {
      CHECK_THROWS_WITH_AS(finish(), "the link is down", pf::backend_error);
      CHECK(arrived <= 2);
      CHECK_THROWS_WITH_AS(exchange->begin(ctx), doctest::Contains("make a new exchange"), pf::state_error);
      exchange.emplace(net.store, comm, by_library());
    } else {
      finish();
      CHECK(same_bits(read(ctx, std::span<const float>(net.store.gradients())), twin.step(step)));
    }
  }
}

TEST_CASE("gpu exchange: one process has nothing to exchange") {
  pf::self comm;
  pf::gpu_context ctx;
  odd_parameters<float> net(pf::gpu::device_memory());
  stream_buffer<float> source(net.size());
  pf::gradient_exchange<float, pf::self, pf::device::gpu> exchange(net.store, comm, small_buckets());
  const auto mine = gradients_of<float>(net.size(), 0, 3);
  source.write(ctx, mine);
  exchange.begin(ctx);
  backward(ctx, net, source.data());
  std::size_t arrived = 0;
  CHECK(exchange.finish(ctx, [&](const pf::gradient_bucket&) { ++arrived; }));
  CHECK(arrived == exchange.buckets().size());
  CHECK(same_bits(read(ctx, std::span<const float>(net.store.gradients())), mine));
}

TEST_CASE("gpu exchange: a gradient that layers have stopped writing is zero, in replays as well") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  for (const bool captured : {false, true}) {
    if (captured && !comm.usable_from_threads()) continue;
    for (const bool exchanged : {false, true}) {
      pf::gpu_context ctx;
      odd_parameters<float> net(pf::gpu::device_memory()), expected(pf::gpu::device_memory());
      stream_buffer<float> source(net.size());
      exchange_of<float> exchange(net.store, comm, small_buckets()),
          other(expected.store, comm, small_buckets());
      pf::SGD<float, pf::device::gpu> optimizer(pf::make_optimizer_target(net.store), training_sgd),
          reference(pf::make_optimizer_target(expected.store), training_sgd);
      pf::gpu::step_graph graph;
      graph.set_enabled(captured);
      const auto left_out = net.store.parameters()[3];
      const auto pass = [&](odd_parameters<float>& to, bool all) {
        for (const auto& entry : to.store.parameters()) {
          if (!all && entry.offset == left_out.offset) continue;
          const auto bytes = static_cast<std::size_t>(entry.thing->size()) * sizeof(float);
          pf::gpu::check(cudaMemcpyAsync(entry.thing->gradient_data(), source.data() + entry.offset, bytes,
                                         cudaMemcpyDeviceToDevice, ctx.stream()),
                         "cudaMemcpyAsync");
          ctx.gradient_written(*entry.thing);
        }
      };
      const auto size = static_cast<index_t>(net.size());
      for (std::uint64_t step = 0; step < 7; ++step) {
        ctx.begin_step(step);
        optimizer.begin_step(ctx, 0.1);
        reference.begin_step(ctx, 0.1);
        auto gradients = gradients_of<float>(net.size(), comm.rank(), step);
        if (step > 0) std::fill_n(gradients.begin() + left_out.offset, left_out.thing->size(), 0.0F);
        source.write(ctx, gradients);
        graph.run(ctx, step == 0 ? 1 : 2, [&] {
          if (exchanged) exchange.begin(ctx);
          pass(net, step == 0);
          if (exchanged) exchange.finish(ctx);
          optimizer.step_range(ctx, 0, size);
          if (exchanged) other.begin(ctx);
          pass(expected, true);
          if (exchanged) other.finish(ctx);
          reference.step_range(ctx, 0, size);
        });
        CHECK(same_bits(read(ctx, std::span<const float>(net.store.values())),
                        read(ctx, std::span<const float>(expected.store.values()))));
      }
      CHECK(graph.replays() >= (captured ? 2 : 0));
    }
  }
}
