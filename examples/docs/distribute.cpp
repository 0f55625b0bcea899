// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A training loop of one's own on many ranks: mpirun -n 2 build/examples/distribute.
// docs/distributed.md shows the parts between markers.

#include <cstdio>
#include <exception>
#include <vector>

#include <pufferfish/distributed.hpp>
#include <pufferfish/distributed/mpi_environment.hpp>
#include <pufferfish/models/small_resnet.hpp>
#include <pufferfish/nn.hpp>

#include "../common/usage.hpp"

namespace pf = pufferfish;

namespace {

constexpr pf::index_t images = 32;  // of each rank, a step

/// Ten patterns of 8 x 8 in noise: every rank draws images of its own.
void draw(int rank, std::uint64_t step, pf::tensor<float, 4>& x, std::vector<std::int32_t>& labels) {
  std::vector<float> patterns(10 * 64);
  pf::fill_normal<float>(patterns, 1.0, {1, 1});
  pf::fill_normal<float>(x.flat(), 0.5, pf::random_stream(step + 2, static_cast<std::uint64_t>(rank)));
  for (std::size_t n = 0; n < labels.size(); ++n) {
    labels[n] = static_cast<std::int32_t>(n % 10);
    for (std::size_t i = 0; i < 64; ++i) x.flat()[n * 64 + i] += patterns[n % 10 * 64 + i];
  }
}

// [train]
/// Data-parallel SGD; the last step's loss on this rank.
double train(pf::network<float>& net, pf::mpi::communicator& comm, std::uint64_t steps) {
  pf::SGD<float> sgd(pf::make_optimizer_target(net.store()), {.momentum = 0.9});
  pf::gradient_exchange<float, pf::mpi::communicator> exchange(net.store(), comm);
  const pf::SoftmaxCrossEntropy<float> loss;
  pf::cpu_context ctx;
  ctx.set_mode(pf::run_mode::training);
  pf::tensor<float, 4> x({images, 8, 8, 1}), y({images, 1, 1, 10}), dy({images, 1, 1, 10});
  std::vector<std::int32_t> labels(images);
  double last = 0.0;
  for (std::uint64_t step = 0; step < steps; ++step) {
    draw(comm.rank(), step, x, labels);
    ctx.begin_step(step);
    exchange.begin(ctx);
    net.forward(ctx, x.view(), y.view());
    last = loss(ctx, y.view(), labels, images, dy.view()).mean_loss();
    net.backward(ctx, dy.view());  // buckets of gradients leave while it runs
    sgd.begin_step(ctx, 0.05);
    exchange.finish(ctx, [&](const pf::gradient_bucket& b) { sgd.step_range(ctx, b.offset, b.size); });
  }
  return last;
}
// [train]

}  // namespace

int main(int argc, char** argv) try {
  if (const auto status =
          examples::usage_shown(argc, argv, 0, "\n  Trains a small network on patterns in noise.")) {
    return *status;
  }
  // [main]
  const pf::mpi::environment environment(pf::mpi::thread_level::serialized);
  try {
    pf::mpi::communicator comm(MPI_COMM_WORLD);
    comm.set_timeout(60);  // seconds; then a rank that waits throws an error that names the missing ranks
    pf::network<float> net = pf::small_resnet<float>({.channels_in = 1, .classes = 10});
    net.initialize(1);  // the same values on every rank
    const double dense = train(net, comm, 40);

    pf::factorize_policy policy;  // a quarter of the full rank
    policy.first_layer = 4;
    pf::factorize(net, policy);  // the switch: new arenas
    comm.broadcast(net.store().values(), 0);
    comm.broadcast(net.store().buffers(), 0);      // batch norm's statistics
    const double low_rank = train(net, comm, 40);  // a new optimizer, a new exchange
    // [main]
    if (comm.rank() == 0)
      std::printf("loss %.3f dense, %.3f low-rank, %td parameters\n", dense, low_rank, net.parameter_count());
    return dense < 0.1 && low_rank < 0.1 ? 0 : 1;  // from 2.3, the logarithm of 10
    // [errors]
  } catch (const pf::timeout_error& lost) {
    std::fprintf(stderr, "distribute: %s\n", lost.what());  // lost.missing(): the ranks that did not come
    environment.abort(1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "distribute: %s\n", error.what());
    environment.abort(1);
  }
  // [errors]
} catch (const std::exception& error) {  // of MPI's initialization
  std::fprintf(stderr, "distribute: %s\n", error.what());
  return 1;
}
