// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Stable ranks and times of a device's layers: the same ranks as the host's, and times of every kind of
// layer.
#include "support.hpp"

#include <string>
#include <vector>

#include <pufferfish/gpu.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/small_resnet.hpp>
#include <pufferfish/nn/measure/profile_stages.hpp>
#include <pufferfish/nn/measure/stable_ranks.hpp>

using namespace gpu_test;

namespace {

using pf::device::gpu;

constexpr pf::timing_options quick{3, 0.2};

pf::factorize_policy open_policy() {
  pf::factorize_policy policy;
  policy.first_layer = 1;
  policy.last_layer_dense = policy.shortcuts_dense = policy.embeddings_dense = false;
  return policy;
}

template <class T, class Device>
pf::network<T, Device> small_net() {
  pf::small_resnet_options options;
  options.width = 8;
  auto net = pf::small_resnet<T, Device>(options);
  net.initialize(5);
  return net;
}

void check_times(const pf::layer_times& times) {
  CHECK(!times.layers.empty());
  for (const pf::layer_time& layer : times.layers) {
    CAPTURE(layer.name);
    CHECK(layer.dense_ms > 0.0);
    CHECK(!layer.ms_per_rank.empty());
  }
}

TEST_CASE("stable ranks of a device's network are the host's") {
  const auto host = pf::stable_ranks(small_net<float, pf::device::cpu>(), open_policy());
  const auto device = pf::stable_ranks(small_net<float, gpu>(), open_policy());
  REQUIRE(host.size() == device.size());
  for (std::size_t i = 0; i < host.size(); ++i) {
    CHECK(host[i].name == device[i].name);
    CHECK(host[i].values == device[i].values);
  }
}

TEST_CASE_TEMPLATE("layers and stages of a device's network are timed, and the network stays as it is", T,
                   float, pf::gpu::bf16) {
  pf::gpu_context& ctx = gpu_context();
  const pf::network<T, gpu> net = small_net<T, gpu>();
  const auto inputs = pf::traced_inputs(net, {2, 16, 16, 3});
  const pf::layer_times times = pf::measure_layers(net, inputs, open_policy(), ctx, quick);
  CHECK(times.layers.size() == inputs.size());
  check_times(times);
  const auto stages = pf::profile_stages(net, {2, 16, 16, 3}, open_policy(), ctx, {0.25, quick});
  CHECK(!stages.empty());
  for (const pf::stage_time& stage : stages) CHECK(stage.gain() > 0.0);
  CHECK(!net.store().on_host());
  const auto values_of = [](const auto& model) {
    std::vector<float> values;
    model.read_on_host([&](const auto&) {
      for (const auto& entry : model.store().parameters()) {
        values.insert(values.end(), entry.thing->values().begin(), entry.thing->values().end());
      }
    });
    return values;
  };
  CHECK(values_of(small_net<T, gpu>()) == values_of(net));
}

TEST_CASE("recurrent layers and a tied embedding of a device are timed") {
  pf::lstm_lm_options options;
  options.vocabulary = 40;
  options.width = 16;
  auto net = pf::make_lstm_lm<float, gpu>(options);
  net.initialize(1);
  const pf::layer_times times =
      pf::measure_layers(net, pf::sequence_inputs(net, 3, 4), open_policy(), gpu_context(), quick);
  CHECK(times.layers.size() == 3);
  check_times(times);
}

}  // namespace
