// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What follows a switch to low rank, on a device: as on the CPU.
#include "support.hpp"

#include <string>

#include <pufferfish/gpu.hpp>
#include <pufferfish/nn.hpp>

using namespace gpu_test;

namespace {

template <class Device>
pf::network<float, Device> normed_network() {
  using namespace pf;
  Sequential<float, Device> layers;
  layers.add("conv1", Conv<float>(conv_shape::square(3, 8, 3, 1, 1)));
  layers.add("bn1", BatchNorm<float>(8));
  layers.add("relu1", ReLU<float>());
  layers.add("drop", Dropout<float>(0.25));
  layers.add("conv2", LowRankConv<float>(conv_shape::square(8, 12, 3, 2, 1), 3));
  layers.add("bn2", BatchNorm<float>(12));
  layers.add("conv3", LowRankNormConv<float, Device>(conv_shape::square(12, 8, 3, 1, 1), 4));
  layers.add("pool", GlobalAvgPool<float>());
  layers.add("fc", Linear<float>(8, 5));
  return network<float, Device>{any_layer<float, Device>(std::move(layers))};
}

template <class Net>
std::vector<float> buffers_on_host(const Net& net) {
  std::vector<float> result;
  net.read_on_host([&](const auto&) {
    for (const auto& entry : net.store().buffer_entries()) {
      result.insert(result.end(), entry.thing->values().begin(), entry.thing->values().end());
    }
  });
  return result;
}

}  // namespace

TEST_CASE("gpu after a switch: batch-norm statistics estimated over passes are those of the CPU") {
  pf::gpu_context& ctx = gpu_context();
  pf::context_options options;
  options.winograd = false;
  options.seed = ctx.seed();
  pf::cpu_context host(options);
  auto host_net = normed_network<pf::device::cpu>();
  auto net = normed_network<pf::device::gpu>();
  host_net.initialize(3);
  pf::copy_state(host_net, net);
  const pf::extents<4> input{5, 6, 7, 3}, output = host_net.output_shape(input);
  auto y = random_twin<float>(pf::volume<4>(output), 2);
  ctx.begin_step(3, 2);
  const pf::random_place place = ctx.random_place();
  const pf::run_mode mode = ctx.mode();
  for (const pf::index_t passes : {1, 3}) {
    const auto at = [](pf::index_t k) { return 20 + static_cast<std::uint64_t>(k); };
    pf::estimate_norms(host, host_net, passes, [&](pf::index_t k) {
      auto x = random_twin<float>(pf::volume<4>(input), 10 + at(k));
      host.begin_step(at(k));
      host_net.forward(host, x.host_view(input), y.host_view(output));
    });
    pf::estimate_norms(ctx, net, passes, [&](pf::index_t k) {
      auto x = random_twin<float>(pf::volume<4>(input), 10 + at(k));
      ctx.begin_step(at(k));
      net.forward(ctx, x.device_view(input), y.device_view(output));
      ctx.synchronize();
    });
    const std::vector<float> got = buffers_on_host(net), expected = buffers_on_host(host_net);
    CHECK(difference(std::span<const float>(got), std::span<const float>(expected)) < 1e-5);
    CHECK(ctx.random_place() == place);
    CHECK(ctx.mode() == mode);
    CHECK_FALSE(ctx.norm_momentum().has_value());
    CHECK(ctx.tape().empty());
  }
}

TEST_CASE("gpu after a switch: soft projection of a network on a device is that of the CPU") {
  pf::network<float> host_net = normed_network<pf::device::cpu>();
  auto net = normed_network<pf::device::gpu>();
  host_net.initialize(4);
  pf::copy_state(host_net, net);
  pf::factorize_policy policy;
  policy.rank = pf::fixed_rank{2};
  policy.first_layer = 1;
  policy.last_layer_dense = false;
  const std::uint64_t generation = net.generation();
  const auto reports = pf::project_softly(host_net, policy, 0.4);
  CHECK(pf::project_softly(net, policy, 0.4).size() == reports.size());
  CHECK(reports.size() == 2);
  CHECK(net.generation() == generation);
  std::vector<float> got;
  net.read_on_host([&](const auto&) {
    for (const auto& entry : net.store().parameters()) {
      got.insert(got.end(), entry.thing->values().begin(), entry.thing->values().end());
    }
  });
  const std::span<const float> expected = host_net.store().values();
  CHECK(std::equal(got.begin(), got.end(), expected.begin(), expected.end()));
}
