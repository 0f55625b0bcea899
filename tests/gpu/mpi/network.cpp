// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A network on the devices of several ranks, before and after the switch: direct, captured, and as on the
// CPU. docs/gpu.md shows parts of it.
#include "parameters.hpp"

// [include]
#include <pufferfish/distributed.hpp>
#include <pufferfish/gpu.hpp>
// [include]
#include <pufferfish/models/small_vgg.hpp>
#include <pufferfish/nn.hpp>

using namespace gpu_test;

// Every rank runs every case in the same order. No REQUIRE before a collective.

namespace {

using communicator = pf::mpi::communicator;

constexpr pf::extents<4> images{4, 8, 8, 3};
constexpr pf::extents<4> logits{4, 1, 1, 4};
constexpr int steps = 5;
constexpr pf::sgd_options sgd{0.9, 0.0, true, 1e-3, false};
double rate(int step) { return 0.05 / (1 + step); }

pf::small_vgg_options options() {
  pf::small_vgg_options result;
  result.image = {images[1], images[2]};
  result.classes = logits[3];
  result.width = 4;
  result.stages = 1;
  result.hidden = 12;
  return result;
}
pf::factorize_policy policy() {
  pf::factorize_policy result;
  result.first_layer = 2;
  return result;
}

std::vector<float> images_of(int rank, int step) {
  std::vector<float> values(static_cast<std::size_t>(pf::volume<4>(images)));
  pf::fill_uniform(
      std::span<float>(values), -1.0, 1.0,
      pf::random_stream(static_cast<std::uint64_t>(step) + 1, static_cast<std::uint64_t>(rank) + 1));
  return values;
}
std::vector<std::int32_t> labels_of(int rank, int step) {
  std::vector<std::int32_t> labels(static_cast<std::size_t>(images[0]));
  for (std::size_t i = 0; i < labels.size(); ++i) {
    labels[i] = (static_cast<std::int32_t>(i) * 3 + rank + step) % 4;
  }
  return labels;
}

/// What all ranks have in the end.
std::vector<float> train_on_devices(communicator& comm, bool captured, bool parallel = false) {
  pf::gpu_context ctx({.parallel_gradients = parallel});
  auto net = pf::small_vgg<float, pf::device::gpu>(options());
  net.initialize(1);
  const pf::mode_scope<pf::device::gpu> training(ctx, pf::run_mode::training);
  twin<float> x_memory(pf::volume<4>(images)), y_memory(pf::volume<4>(logits)),
      dy_memory(pf::volume<4>(logits));
  twin<std::int32_t> label_memory(images[0]);
  twin<double> results(2);
  const auto x = x_memory.device_view(images), y = y_memory.device_view(logits),
             dy = dy_memory.device_view(logits);
  const std::span<const std::int32_t> labels = label_memory.device_span();
  const pf::SoftmaxCrossEntropy<float> criterion;
  for (const bool hybrid : {false, true}) {
    if (hybrid) {
      // [switch]
      pf::factorize(net, policy());
      pf::gpu::broadcast(ctx, comm, net.store().values(), 0);
      pf::gpu::broadcast(ctx, comm, net.store().buffers(), 0);
      // [switch]
    }
    // [exchange]
    pf::gradient_exchange<float, pf::mpi::communicator, pf::device::gpu> exchange(net.store(), comm);
    // [exchange]
    pf::SGD<float, pf::device::gpu> optimizer(pf::make_optimizer_target(net.store()), sgd);
    pf::gpu::step_graph graph;
    graph.set_enabled(captured);
    for (int step = 0; step < steps; ++step) {
      const std::vector<float> batch = images_of(comm.rank(), step);
      pf::gpu::device_memory().from_host(x.data(), batch.data(), batch.size() * sizeof(float));
      pf::gpu::device_memory().from_host(label_memory.device_data(), labels_of(comm.rank(), step).data(),
                                         labels.size() * sizeof(std::int32_t));
      // [step]
      ctx.begin_step(static_cast<std::uint64_t>(step));
      optimizer.begin_step(ctx, rate(step));
      graph.run(ctx, pf::gpu::step_graph::key(x.shape(), net.generation()), [&] {
        exchange.begin(ctx);
        net.forward(ctx, x, y);
        criterion(ctx, y, labels, static_cast<double>(labels.size()), dy, results.device_data());
        net.backward(ctx, dy);  // buckets leave while it runs
        exchange.finish(ctx,
                        [&](const pf::gradient_bucket& b) { optimizer.step_range(ctx, b.offset, b.size); });
      });
      // [step]
      ctx.synchronize();
    }
    CHECK(graph.captures() == (captured ? 1 : 0));
    CHECK(exchange.steps() == static_cast<std::uint64_t>(steps));
  }
  const std::vector<float> values = read(ctx, std::span<const float>(net.store().values()));
  CHECK(same_on_all_ranks(comm, values));
  return values;
}

std::vector<float> train_on_hosts(communicator& comm) {
  pf::cpu_context ctx;
  auto net = pf::small_vgg<float>(options());
  net.initialize(1);
  ctx.set_mode(pf::run_mode::training);
  pf::tensor<float, 4> x(images), y(logits), dy(logits);
  const pf::SoftmaxCrossEntropy<float> criterion;
  for (const bool hybrid : {false, true}) {
    if (hybrid) {
      pf::factorize(net, policy());
      comm.broadcast(net.store().values(), 0);
      comm.broadcast(net.store().buffers(), 0);
    }
    pf::gradient_exchange<float, communicator> exchange(net.store(), comm);
    pf::SGD<float> optimizer(pf::make_optimizer_target(net.store()), sgd);
    for (int step = 0; step < steps; ++step) {
      const std::vector<float> batch = images_of(comm.rank(), step);
      std::copy(batch.begin(), batch.end(), x.view().data());
      const std::vector<std::int32_t> labels = labels_of(comm.rank(), step);
      ctx.begin_step(static_cast<std::uint64_t>(step));
      exchange.begin(ctx);
      net.forward(ctx, x.view(), y.view());
      static_cast<void>(criterion(ctx, y.view(), labels, static_cast<double>(labels.size()), dy.view()));
      net.backward(ctx, dy.view());
      exchange.finish(ctx);
      optimizer.step(ctx, rate(step));
    }
  }
  return {net.store().values().begin(), net.store().values().end()};
}

}  // namespace

TEST_CASE("networks on devices of several ranks: direct, captured and as on the CPU, through the switch") {
  communicator comm(MPI_COMM_WORLD);
  if (!comm.usable_from_threads()) return;
  const std::vector<float> direct = train_on_devices(comm, false), captured = train_on_devices(comm, true);
  CHECK(same_bits(direct, captured));
  for (const bool replayed : {false, true}) CHECK(same_bits(direct, train_on_devices(comm, replayed, true)));
  CHECK(difference(direct, train_on_hosts(comm)) < 1e-3);
}
