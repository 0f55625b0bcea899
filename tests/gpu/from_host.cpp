// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What the host writes into layers and networks on a device: factors of a host's attention, weights of a
// file.
#include "support.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/gpu.hpp>
#include <pufferfish/lowrank.hpp>
#include <pufferfish/models/mlp.hpp>
#include <pufferfish/models/weights.hpp>

#include "../unit/support/host_attention.hpp"
#include "../unit/support/host_kinds.hpp"

using namespace gpu_test;

namespace {

using pf::device::gpu;

template <class Layer>
std::vector<double> values_of(Layer& layer) {
  std::vector<double> all;
  layer.visit([&](const char*, auto& p) { all.insert(all.end(), p.values().begin(), p.values().end()); });
  return all;
}
template <class Layer>
std::vector<double> values_on_device(Layer& layer) {
  std::vector<double> all;
  layer.on_host([&](auto& on_host) { all = values_of(on_host); });
  return all;
}

TEST_CASE("gpu: svd_factorize fills attention on a device, in every spelling") {
  gpu_context();
  const host::Attention dense(16, 2, true, 9);
  auto expected = pf::svd_factorize<4>(dense);
  const std::vector<double> want = values_of(expected);
  std::vector<pf::factor_report> reports;
  auto fixed = pf::svd_factorize<pf::LowRankAttention<double, 4, gpu>>(dense, {}, &reports);
  CHECK(values_on_device(fixed) == want);
  REQUIRE(reports.size() == 4);
  CHECK(reports[3].name == "layer.output");
  auto dynamic =
      pf::svd_factorize<pf::LowRankAttention<double, pf::dynamic_rank, gpu>>(dense, pf::fixed_rank{4});
  CHECK(values_on_device(dynamic) == want);
  pf::LowRankAttention<double, pf::dynamic_rank, gpu> existing({16, 2, 8, 8}, 4, true);
  CHECK(pf::svd_factorize(dense, existing).size() == 4);
  CHECK(values_on_device(existing) == want);

  // Without a bias in the host's layer, those of the existing layer become zero.
  const host::Attention plain(16, 2, false, 9);
  pf::svd_factorize(plain, existing);
  existing.on_host([](auto& layer) {
    for (auto& p : layer.projections()) {
      for (const double value : p.bias().flat()) CHECK(value == 0.0);
    }
  });
}

TEST_CASE("gpu: svd_factorize fills a layer of every kind on a device with the bits of the CPU's") {
  gpu_context();
  host::for_each_kind([](const auto& dense) {
    using dense_type = std::remove_cvref_t<decltype(dense)>;
    using kind = pf::kind_traits<dense_type::kind>;
    using fixed = typename kind::template low_rank<double, 3, gpu>;
    using dynamic = typename kind::template low_rank<double, pf::dynamic_rank, gpu>;
    const pf::factorize_options options{.name = "it", .allow_growth = true};
    std::vector<pf::factor_report> wanted, reports;
    auto expected = pf::svd_factorize(dense, pf::fixed_rank{3}, options, &wanted);
    const std::vector<double> want = values_of(expected);
    auto typed = pf::svd_factorize<fixed>(dense, options, &reports);
    CHECK(values_on_device(typed) == want);
    REQUIRE(reports.size() == wanted.size());
    CHECK(reports.back().name == wanted.back().name);
    auto chosen = pf::svd_factorize<dynamic>(dense, pf::fixed_rank{3}, options);
    CHECK(values_on_device(chosen) == want);
    const auto device_dense = chosen.describe();
    CHECK(device_dense == expected.describe());
    // Into an existing layer, after other numbers; a copy holds the numbers, too.
    chosen.initialize({1, 1});
    CHECK(values_on_device(chosen) != want);
    pf::svd_factorize(dense, chosen, options);
    CHECK(values_on_device(chosen) == want);
    dynamic copy(chosen);
    CHECK(values_on_device(copy) == want);
    // What is refused leaves the layer on the device as it was.
    auto spoiled = dense;
    spoiled.matrices.back()(0, 0) = NAN;
    store(spoiled);
    CHECK_THROWS_AS(pf::svd_factorize(spoiled, chosen, options), pf::value_error);
    CHECK(values_on_device(chosen) == want);
  });
}

TEST_CASE("gpu: load_weights into a network on a device") {
  gpu_context();
  const pf::mlp_options options{12, {8}, 3};
  pf::network<float> source = pf::mlp<float>(options);
  source.initialize(4);
  std::vector<pf::tensor_entry> entries;
  std::vector<std::vector<std::uint8_t>> bytes;
  bytes.reserve(source.store().parameters().size());
  for (const auto& entry : source.store().parameters()) {
    const pf::logical_layout& layout = entry.thing->layout();
    const pf::tensor<float, 4> ordered(entry.thing->logical());
    pf::detail::append_floating<float>(pf::tensor_dtype::f16, ordered.flat(), bytes.emplace_back());
    entries.push_back({entry.name,
                       pf::tensor_dtype::f16,
                       {layout.shape.begin(), layout.shape.begin() + layout.dims},
                       bytes.back()});
  }
  pf::network<float, gpu> net = pf::mlp<float, gpu>(options);
  pf::load_weights(net, pf::safetensors_file::parse(pf::encode_safetensors(entries), "x"));
  std::size_t wrong = 0;
  net.on_host([&](auto&) {
    const auto& have = net.store().parameters();
    const auto& want = source.store().parameters();
    REQUIRE(have.size() == want.size());
    for (std::size_t p = 0; p < have.size(); ++p) {
      const auto values = want[p].thing->values();
      for (std::size_t i = 0; i < values.size(); ++i) {
        wrong += have[p].thing->values()[i] != static_cast<float>(pf::scalar_cast<pf::float16>(values[i]));
      }
    }
  });
  CHECK(wrong == 0);
}

}  // namespace
