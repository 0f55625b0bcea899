// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Frobenius decay and carried states of optimizers on a device, against the host's.
#include "support.hpp"

#include <string>

#include <pufferfish/gpu.hpp>
#include <pufferfish/nn.hpp>
#include <pufferfish/nn/layers/lstm.hpp>
#include <pufferfish/train/carry_state.hpp>

using namespace gpu_test;

namespace {

/// Dense layers with one matrix, with several in one parameter (grouped convolution, LSTM), and the first and
/// last, which stay dense.
template <class T, class Device>
pf::network<T, Device> dense_network() {
  using namespace pf;
  conv_shape grouped = conv_shape::square(8, 12, 3, 1, 1);
  grouped.groups = 2;
  Sequential<T, Device> layers;
  layers.add("stem", Conv<T>(conv_shape::square(3, 8, 3, 1, 1)));
  layers.add("conv", Conv<T>(conv_shape::square(8, 8, 3, 1, 1), true));
  layers.add("grouped", Conv<T>(grouped, false));
  layers.add("pool", GlobalAvgPool<T>());
  layers.add("lstm", LSTM<T>(12, 10));
  layers.add("fc", Linear<T>(10, 16));
  layers.add("last", Linear<T>(16, 5));
  return network<T, Device>{any_layer<T, Device>(layers)};
}
const std::vector<pf::layer_rank> ranks = {{"conv", 3}, {"grouped", 1}, {"lstm", 2, 3}, {"fc", 4}};

/// The same low-rank network and gradients on both sides.
template <class T = float>
struct both_sides {
  pf::network<float> host = dense_network<float, pf::device::cpu>();
  pf::network<T, pf::device::gpu> there = dense_network<T, pf::device::gpu>();

  explicit both_sides(bool low_rank = true) {
    if (low_rank) {
      pf::apply_ranks(host, ranks);
      pf::apply_ranks(there, ranks);
    }
    host.initialize(5);
    pf::copy_state(host, there);
  }

  void fill_gradients(std::uint64_t stream) {
    pf::fill_normal<float>(host.store().gradients(), 1.0, {3, stream});
    const std::span<float> to = there.store().gradients();
    pf::gpu::device_memory().from_host(to.data(), host.store().gradients().data(), to.size_bytes());
  }
  static std::vector<float> fetched(std::span<const float> there) {
    gpu_context().synchronize();
    std::vector<float> result(there.size());
    pf::gpu::device_memory().to_host(result.data(), there.data(), there.size_bytes());
    return result;
  }
  static std::vector<float> copied(std::span<const float> here) { return {here.begin(), here.end()}; }
  double gradient_difference() {
    return difference(fetched(there.store().gradients()), copied(host.store().gradients()));
  }
  double value_difference() {
    return difference(fetched(there.store().values()), copied(host.store().values()));
  }
};

}  // namespace

TEST_CASE("gpu Frobenius decay: the host's gradients, whole and in ranges, the same bits") {
  pf::cpu_context host;
  both_sides<> net;
  pf::frobenius_decay of_host(net.host, {0.3});
  pf::frobenius_decay of_device(net.there, {0.3});
  CHECK(of_device.matrices() == 1 + 2 + 8 + 1);
  const index_t size = net.host.parameter_count();
  net.fill_gradients(1);
  of_host.begin_step(host, 0.1);
  of_host.add(host, 0, size);
  of_device.begin_step(gpu_context(), 0.1);
  of_device.add(gpu_context(), 0, size);
  CHECK(net.gradient_difference() < 1e-6);
  const std::vector<float> whole = net.fetched(net.there.store().gradients());

  net.fill_gradients(1);
  of_device.begin_step(gpu_context(), 0.1);
  const auto& entries = net.there.store().parameters();
  for (std::size_t i = entries.size(); i-- > 0;) {
    of_device.add(gpu_context(), entries[i].offset, entries[i].thing->size());
  }
  CHECK(net.fetched(net.there.store().gradients()) == whole);
  CHECK_THROWS_AS(pf::frobenius_decay(net.there, {0.3, true}), pf::value_error);
  pf::merge(net.there);
  CHECK_THROWS_AS(of_device.begin_step(gpu_context(), 0.1), pf::state_error);
}

TEST_CASE("gpu Frobenius decay: a captured step uses each step's factors") {
  pf::cpu_context host;
  pf::gpu_context& ctx = gpu_context();
  both_sides<> net;
  const index_t size = net.host.parameter_count();
  const pf::sgd_options options{0.9, 0.0, false, 0.1, true};
  pf::frobenius_decay of_host(net.host, {0.3});
  pf::frobenius_decay of_device(net.there, {0.3});
  auto host_target = pf::make_optimizer_target(net.host.store());
  auto target = pf::make_optimizer_target(net.there.store());
  of_host.exempt(host_target);
  of_device.exempt(target);
  pf::SGD<float> expected(std::move(host_target), options);
  pf::SGD<float, pf::device::gpu> found(std::move(target), options);
  pf::gpu::step_graph graph;
  for (std::uint64_t step = 0; step < 5; ++step) {
    net.fill_gradients(step);
    of_host.begin_step(host, 0.1);
    of_host.add(host, 0, size);
    expected.step(host, 0.1);
    found.begin_step(ctx, 0.1);
    graph.run(ctx, graph.key(size), [&] {
      of_device.begin_step(ctx, 0.1);
      of_device.add(ctx, 0, size);
      found.step_range(ctx, 0, size);
    });
    ctx.synchronize();
  }
  CHECK(graph.replays() > 0);
  CHECK(net.value_difference() < 1e-5);
}

TEST_CASE("gpu Frobenius decay: factors whose gradient no layer has written, and networks in 16 bits") {
  pf::cpu_context host;
  both_sides<pf::gpu::bf16> net;
  pf::frobenius_decay of_host(net.host, {0.3});
  pf::frobenius_decay of_device(net.there, {0.3});
  const pf::sgd_options options{0.9, 0.0, false, 0.0, false};
  pf::SGD<float> expected(pf::make_optimizer_target(net.host.store()), options);
  pf::SGD<float, pf::device::gpu> found(pf::make_optimizer_target(net.there.store()), options);
  const index_t size = net.host.parameter_count();
  for (std::uint64_t step = 0; step < 3; ++step) {
    net.fill_gradients(step);
    const auto mark = [&](auto& store) {
      for (const auto& entry : store.parameters()) {
        if (step == 0 || entry.name.starts_with("fc")) {
          entry.thing->set_gradient_origin(pf::gradient_source::layer);
        }
      }
    };
    mark(net.host.store());
    mark(net.there.store());
    of_host.begin_step(host, 0.1);
    of_host.add(host, 0, size);
    expected.step(host, 0.1);
    of_device.begin_step(gpu_context(), 0.1);
    found.begin_step(gpu_context(), 0.1);
    of_device.add(gpu_context(), 0, size);
    found.step_range(gpu_context(), 0, size);
  }
  CHECK(net.value_difference() < 1e-5);
}

TEST_CASE("gpu optimizer_memory: states are carried as the host's are") {
  const auto check = [](const pf::optimizer_options& options) {
    CAPTURE(pf::describe(options));
    pf::cpu_context host;
    both_sides<> net(false);
    pf::optimizer<float> host_steps(pf::make_optimizer_target(net.host.store()), options);
    pf::optimizer<float, pf::device::gpu> steps(pf::make_optimizer_target(net.there.store()), options);
    for (std::uint64_t step = 0; step < 3; ++step) {
      net.fill_gradients(step);
      host_steps.step(host, 0.01);
      steps.begin_step(gpu_context(), 0.01);
      steps.step_range(gpu_context(), 0, net.host.parameter_count());
    }
    const pf::optimizer_memory on_host(net.host, host_steps);
    const pf::optimizer_memory on_device(net.there, steps);
    CHECK(on_device.steps() == 3);
    pf::apply_ranks(net.host, ranks);
    pf::apply_ranks(net.there, ranks);
    net.host.initialize(9);
    pf::copy_state(net.host, net.there);
    pf::optimizer<float> host_after(pf::make_optimizer_target(net.host.store()), options);
    pf::optimizer<float, pf::device::gpu> after(pf::make_optimizer_target(net.there.store()), options);
    const pf::carried_state report = on_host.carry(net.host, host_after);
    CHECK(on_device.carry(net.there, after).projected == report.projected);
    CHECK(report.projected.size() == 2 + 2 + 4 + 2);
    CHECK(after.steps() == 3);
    const auto expected = host_after.states();
    const auto found = after.states();
    REQUIRE(found.size() == expected.size());
    for (std::size_t s = 0; s < found.size(); ++s) {
      CHECK(found[s].first == expected[s].first);
      CHECK(difference(net.fetched(found[s].second), net.copied(expected[s].second)) < 1e-6);
    }
  };
  check(pf::sgd_options{0.9, 0.0, false, 0.01, false});
  check(pf::adam_options{});
}
