// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cstring>
#include <vector>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/distributed.hpp>
#include <pufferfish/nn.hpp>

namespace pf = pufferfish;

// Every rank runs every case in the same order. No REQUIRE before a collective.

namespace {

pf::network<float> make_net() {
  pf::sequential<float> layers;
  layers.add("conv1", pf::Conv<float>(pf::conv_shape::square(3, 8, 3, 1, 1), true));
  layers.add("bn1", pf::BatchNorm<float>(8));
  layers.add("relu1", pf::ReLU<float>());
  layers.add("conv2", pf::Conv<float>(pf::conv_shape::square(8, 12, 3, 2, 1), true));
  layers.add("pool", pf::GlobalAvgPool<float>());
  layers.add("fc", pf::Linear<float>(12, 5));
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
  options.buckets = {100, 1000};
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

TEST_CASE("with a thread: every algorithm, and messages of bfloat16") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (!comm.usable_from_threads()) return;
  pf::exchange_options options = small_buckets();
  options.progress = pf::exchange_progress::thread;
  for (auto algorithm : {pf::all_reduce_algorithm::library, pf::all_reduce_algorithm::ring,
                         pf::all_reduce_algorithm::recursive_doubling}) {
    options.algorithm = algorithm;
    check_steps(comm, options, 1e-6);
  }
  options.wire = pf::exchange_wire::bf16;
  check_steps(comm, options, 1e-2);
}

TEST_CASE("gradients that no pass wrote are exchanged too; calls out of order are refused") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  pf::network<float> net = make_net();
  pf::gradient_exchange<float, pf::mpi::communicator> exchange(net.store(), comm, small_buckets());
  pf::cpu_context ctx;
  std::fill(net.store().gradients().begin(), net.store().gradients().end(),
            static_cast<float>(comm.rank() + 1));
  exchange.begin(ctx);
  CHECK_THROWS_AS(exchange.begin(ctx), pf::state_error);
  exchange.finish(ctx);
  const float mean = static_cast<float>(comm.size() + 1) / 2.0F;
  for (float value : gradients_of(net)) CHECK(value == doctest::Approx(mean).epsilon(1e-6));
  CHECK_THROWS_AS(exchange.finish(ctx), pf::state_error);
  net.modify([](pf::any_layer<float>&) {});
  CHECK_THROWS_AS(exchange.begin(ctx), pf::state_error);
}

TEST_CASE("ranks with other buckets are told so") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  pf::network<float> net = make_net();
  pf::exchange_options options = small_buckets();
  options.buckets.bytes += comm.rank() == 0 ? 0 : 5000;
  using exchange = pf::gradient_exchange<float, pf::mpi::communicator>;
  if (comm.size() > 1) {
    CHECK_THROWS_AS(exchange(net.store(), comm, options), pf::state_error);
  } else {
    CHECK_NOTHROW(exchange(net.store(), comm, options));
  }
}

}  // namespace
