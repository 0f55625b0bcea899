// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Masks of weights on a device: applied to arenas, and the elements that they keep gathered and scattered.
#include "support.hpp"

#include <cstring>
#include <limits>

#include <pufferfish/gpu.hpp>
#include <pufferfish/gpu/comm/packing.hpp>
#include <pufferfish/prune/apply_mask.hpp>
#include <pufferfish/prune/compact_sum.hpp>

#include "../unit/support/prune_support.hpp"

using namespace gpu_test;

namespace {

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

/// Half of the weights of a small store, one tensor without survivors, and one with all.
template <class Store>
pf::weight_mask half_mask(const Store& net) {
  pf::weight_mask mask(net.store);
  pf::prune_by_magnitude(mask, net.store, {.share = 0.5});
  const auto& tensors = mask.tensors();
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    if (tensors[t].name != "three.weight") continue;
    for (index_t i = 0; i < tensors[t].size; ++i) mask.remove(t, i);
  }
  return mask;
}

template <class T>
std::vector<T> numbers(index_t size) {
  std::vector<T> values(static_cast<std::size_t>(size));
  pf::fill_normal(std::span<T>(values), 1.0, pf::random_stream(9, 2));
  for (std::size_t i = 0; i < values.size(); i += 7) values[i] = std::numeric_limits<T>::quiet_NaN();
  return values;
}

template <class T>
void check_mask() {
  const prune_support::small_store<T> net;
  const pf::weight_mask mask = half_mask(net);
  const std::vector<T> values = numbers<T>(mask.size());
  pf::cpu_context host;
  std::vector<T> expected = values;
  mask.apply(host, std::span<T>(expected));
  std::vector<T> on_host = values;
  pf::arena_mask<>(mask).apply(host, std::span<T>(on_host));
  CHECK(same_bits(on_host, expected));
  pf::gpu_context& ctx = gpu_context();
  const pf::arena_mask<pf::device::gpu> bits(mask);
  twin<T> there(values);
  // In two parts that divide a tensor and a word.
  bits.apply(ctx, there.device_span().first(333));
  bits.apply(ctx, there.device_span().subspan(333), 333);
  CHECK(same_bits(there.fetched(), expected));
  CHECK_THROWS_AS(bits.apply(ctx, there.device_span(), 1), pf::value_error);
  CHECK_THROWS_AS(bits.apply(ctx, there.device_span(), -1), pf::value_error);
}

}  // namespace

TEST_CASE("gpu masks: applied on a device as on the CPU") {
  check_mask<float>();
  check_mask<double>();
}

TEST_CASE("gpu masks: weights and states of an optimizer on a device") {
  pf::gpu_context& ctx = gpu_context();
  pf::Sequential<float, pf::device::gpu> layers;
  layers.add("conv", pf::Conv<float>(pf::conv_shape::square(3, 5, 3, 1, 1), true));
  layers.add("fc", pf::Linear<float>(5, 70));
  pf::network<float, pf::device::gpu> net{pf::any_layer<float, pf::device::gpu>(std::move(layers))};
  net.initialize(4);
  pf::weight_mask mask(net.store());
  CHECK_THROWS_AS(pf::prune_by_magnitude(mask, net.store()), pf::state_error);
  net.read_on_host([&](const auto&) { pf::prune_by_magnitude(mask, net.store(), {.share = 0.7}); });
  pf::optimizer<float, pf::device::gpu> optimizer(pf::make_optimizer_target(net.store()), pf::adam_options{});
  pf::ops::fill<float>(ctx, net.store().gradients(), 1.0F);
  optimizer.step(ctx, 0.1);
  const auto fetched = [](std::span<const float> values) {
    std::vector<float> here(values.size());
    pf::gpu::device_memory().to_host(here.data(), values.data(), values.size_bytes());
    return here;
  };
  const auto masked = [&](std::vector<float> values) {
    pf::cpu_context host;
    mask.apply(host, std::span<float>(values));
    return values;
  };
  std::vector<std::vector<float>> expected{masked(fetched(net.store().values()))};
  for (const auto& [name, values] : optimizer.states()) expected.push_back(masked(fetched(values)));
  CHECK(expected.size() == 3);
  pf::mask_weights(ctx, mask, net.store());
  pf::mask_states(ctx, mask, optimizer);
  std::vector<std::vector<float>> got{fetched(net.store().values())};
  for (const auto& [name, values] : optimizer.states()) got.push_back(fetched(values));
  CHECK(got == expected);
  CHECK(got[0] != masked(std::vector<float>(got[0].size(), 1.0F)));
  pf::cpu_context host;
  CHECK_THROWS_WITH_AS(pf::mask_weights(host, mask, net.store()), doctest::Contains("on a device"),
                       pf::state_error);
  net.on_host([&](auto&) {
    CHECK_THROWS_WITH_AS(pf::mask_weights(ctx, mask, net.store()), doctest::Contains("on the host"),
                         pf::state_error);
  });
}

TEST_CASE("gpu masks: survivors are gathered and scattered on a device as on the CPU") {
  const prune_support::small_store<float> net;
  const auto mask = std::make_shared<pf::weight_mask>(half_mask(net));
  const auto buckets = pf::cut_buckets(net.store, {100, 30000});
  auto compressor = pf::new_compressor(net.store, pf::compact_sum_options{mask});
  compressor.split(buckets);
  CHECK(compressor.can_pack());
  CHECK(compressor.is_mean());
  const index_t payload = compressor.payload_bytes();
  pf::gpu::detail::packed_buckets<float> packed(compressor.pack());
  CHECK(compressor.payload_bytes() == payload);
  CHECK(packed.size() == mask->survivors());
  std::vector<float> expected = numbers<float>(mask->size());
  twin<float> there(expected);
  pf::cpu_context host;
  mask->apply(host, std::span<float>(expected));
  const cudaStream_t stream = gpu_context().stream();
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const auto part = there.device_span().subspan(static_cast<std::size_t>(buckets[b].offset),
                                                  static_cast<std::size_t>(buckets[b].size));
    CHECK(packed.gather(b, part.data(), stream).size() == static_cast<std::size_t>(packed.count(b)));
    packed.scatter(b, part, stream);
  }
  CHECK(same_bits(there.fetched(), expected));
}
