// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "support.hpp"

#include <limits>
#include <type_traits>

#include <pufferfish/gpu/ops/elementwise.hpp>
#include <pufferfish/gpu/optim/loss_scaler.hpp>
#include <pufferfish/gpu/optim/optimizer.hpp>
#include <pufferfish/gpu/runtime/graph.hpp>
#include <pufferfish/optim/clip.hpp>

using namespace gpu_test;

namespace {

using device_sgd = pf::SGD<float, pf::device::gpu>;
using device_adam = pf::Adam<float, pf::device::gpu>;

// Parameters of all sizes, packed, so that most begin anywhere.
std::vector<pf::arena_segment> segments() {
  std::vector<pf::arena_segment> result;
  index_t offset = 0;
  bool decays = true;
  for (const index_t size : {1, 3, 64, 1000, 0, 7, 20000, 5}) {
    result.push_back({offset, size, decays});
    offset += size;
    decays = !decays;
  }
  return result;
}

// The same arenas on both sides.
struct arenas {
  std::vector<pf::arena_segment> parts = segments();
  index_t size = parts.back().offset + parts.back().size;
  twin<float> values = random_twin<float>(size, 1), gradients = random_twin<float>(size, 2);

  pf::optimizer_target<float> on_host() {
    return {values.host_span(), gradients.host_span(), parts, nullptr, 0};
  }
  pf::optimizer_target<float> on_device() {
    return {values.device_span(), gradients.device_span(), parts, nullptr, 0};
  }
};

template <class Host, class Device, class Options>
void check_steps(const Options& options) {
  arenas a;
  pf::cpu_context host;
  Host expected(a.on_host(), options);
  Device found(a.on_device(), options);
  for (int step = 0; step < 4; ++step) {
    const double lr = 0.1 / (1 + step);
    expected.step(host, lr);
    if (step % 2 == 0) {
      found.step(gpu_context(), lr);
    } else {  // in parts, in any order
      found.begin_step(gpu_context(), lr);
      found.step_range(gpu_context(), 68, a.size - 68);
      found.step_range(gpu_context(), 0, 4);
      found.step_range(gpu_context(), 4, 64);
    }
  }
  CHECK(difference(a.values) < 1e-6);
  CHECK(found.steps() == 4);
  CHECK_THROWS_AS(found.step_range(gpu_context(), 2, 2), pf::value_error);
  CHECK_THROWS_AS(found.begin_step(gpu_context(), std::numeric_limits<double>::infinity()), pf::value_error);
  found.set_steps(17);
  CHECK(found.steps() == 17);
}

}  // namespace

TEST_CASE("gpu optimizer: SGD with everything that it has") {
  check_steps<pf::SGD<float>, device_sgd>(pf::sgd_options{});
  check_steps<pf::SGD<float>, device_sgd>(pf::sgd_options{0.0, 0.0, false, 0.01, true});
  check_steps<pf::SGD<float>, device_sgd>(pf::sgd_options{0.9, 0.1, false, 0.01, false});
  check_steps<pf::SGD<float>, device_sgd>(pf::sgd_options{0.9, 0.0, true, 0.01, true});
  arenas a;
  CHECK_THROWS_AS(device_sgd(a.on_device(), pf::sgd_options{-1.0}), pf::value_error);
  CHECK_THROWS_AS(device_sgd(a.on_device(), pf::sgd_options{0.0, 0.0, true}), pf::value_error);
}

TEST_CASE("gpu optimizer: Adam, both ways of weight decay") {
  pf::adam_options options;
  check_steps<pf::Adam<float>, device_adam>(options);
  options.weight_decay = 0.02;
  check_steps<pf::Adam<float>, device_adam>(options);
  options.decoupled_decay = false;
  options.decay_all = true;
  check_steps<pf::Adam<float>, device_adam>(options);
  options.beta1 = 1.0;
  arenas a;
  CHECK_THROWS_AS(device_adam(a.on_device(), options), pf::value_error);
}

TEST_CASE("gpu optimizer: a step captured into a graph takes every step's numbers") {
  arenas a;
  pf::cpu_context host;
  pf::gpu_context& ctx = gpu_context();
  pf::adam_options options;
  options.weight_decay = 0.02;
  pf::Adam<float> expected(a.on_host(), options);
  device_adam found(a.on_device(), options);
  pf::gpu::step_graph graph;
  for (int step = 0; step < 6; ++step) {
    const double lr = 0.1 / (1 + step);
    expected.step(host, lr);
    found.begin_step(ctx, lr);
    graph.run(ctx, graph.key(a.size), [&] { found.step_range(ctx, 0, a.size); });
  }
  CHECK(graph.replays() > 0);
  CHECK(difference(a.values) < 1e-6);
}

TEST_CASE("gpu optimizer: steps that are skipped change and count nothing; gradients with a factor") {
  arenas a;
  pf::cpu_context host;
  twin<int> skip(1);
  twin<float> factor(1, 0.5F);
  pf::Adam<float> expected(a.on_host(), {});
  device_adam found(a.on_device(), {});
  found.set_control({skip.device_data(), factor.device_data()});
  for (float& g : a.gradients.host()) g *= 0.5F;
  for (const bool skips : {false, true, true, false}) {
    twin<int> flag(1, skips ? 1 : 0);
    found.begin_step(gpu_context(), 0.1);
    pf::ops::copy_elements<int>(gpu_context(), flag.device_data(), skip.device_data(), 1);
    found.step_range(gpu_context(), 0, a.size);
    gpu_context().synchronize();
    if (!skips) expected.step(host, 0.1);
  }
  CHECK(difference(a.values) < 1e-6);
  CHECK(found.steps() == 2);
}

// At the switch a training run makes a new optimizer, but keeps the loss scaler with its flag.
TEST_CASE("gpu optimizer: a flag that another optimizer's skipped step has left is not read") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  const auto check = [&](auto expected_type, auto found_type, const auto& options, std::uint64_t done) {
    using host_type = typename decltype(expected_type)::type;
    using device_type = typename decltype(found_type)::type;
    arenas a;
    twin<int> flag(1, 1), usable(1, 0), skipped(1, 1);
    host_type expected(a.on_host(), options);
    device_type found(a.on_device(), options);
    found.set_control({flag.device_data(), nullptr});
    if (done > 0) {
      expected.set_steps(done);
      found.set_steps(done);
    }
    CHECK(found.steps() == done);
    const auto step = [&](twin<int>& outcome) {
      found.begin_step(ctx, 0.1);
      pf::ops::copy_elements<int>(ctx, outcome.device_data(), flag.device_data(), 1);
      found.step_range(ctx, 0, a.size);
    };
    step(usable);
    expected.step(host, 0.1);
    CHECK(difference(a.values) < 1e-6);
    CHECK(found.steps() == done + 1);
    step(skipped);
    CHECK(found.steps() == done + 1);
    found.set_control({flag.device_data(), nullptr});  // as in every epoch: the step stays skipped
    CHECK(found.steps() == done + 1);
    step(usable);
    expected.step(host, 0.1);
    CHECK(difference(a.values) < 1e-6);
    CHECK(found.steps() == done + 2);
  };
  const pf::sgd_options sgd{0.9, 0.1, false, 0.01, false};
  for (const std::uint64_t done : {0U, 5U}) {
    CAPTURE(done);
    check(std::type_identity<pf::Adam<float>>(), std::type_identity<device_adam>(), pf::adam_options{}, done);
    check(std::type_identity<pf::SGD<float>>(), std::type_identity<device_sgd>(), sgd, done);
    check(std::type_identity<pf::Adam<float>>(), std::type_identity<pf::optimizer<float, pf::device::gpu>>(),
          pf::adam_options{}, done);
  }
}

TEST_CASE("gpu optimizer: the gradient's norm, and clipping by it") {
  pf::cpu_context host;
  for (const index_t size : {1, 5, 1000, 100003}) {
    for (const index_t offset : {0, 1}) {
      auto x = random_twin<float>(size + 1, static_cast<std::uint64_t>(size));
      const auto part = [&](std::span<float> all) {
        return all.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(size));
      };
      twin<pf::gpu::kernels::gradient_facts> facts(1);
      const double norm = pf::gradient_norm<float>(host, part(x.host_span()));
      for (const double limit : {2.0 * norm, 0.25 * norm}) {
        CAPTURE(limit / norm);
        pf::clip_gradient_norm<float>(host, part(x.host_span()), limit);
        pf::gpu::clip_gradient_norm(gpu_context(), part(x.device_span()), limit, facts.device_data());
        CHECK(facts.fetched()[0].norm == doctest::Approx(norm).epsilon(1e-9));
        CHECK(facts.fetched()[0].not_finite == 0);
        CHECK(difference(x) < 1e-6);
      }
    }
  }
  twin<float> bad(std::vector<float>{1.0F, std::numeric_limits<float>::infinity(), 2.0F});
  twin<pf::gpu::kernels::gradient_facts> facts(1);
  pf::gpu::clip_gradient_norm(gpu_context(), bad.device_span(), 1.0, facts.device_data());
  CHECK(facts.fetched()[0].not_finite == 1);
  CHECK(bad.fetched() == bad.host());
  CHECK_THROWS_AS(pf::gpu::clip_gradient_norm(gpu_context(), bad.device_span(), 0.0, facts.device_data()),
                  pf::value_error);
}

TEST_CASE("gpu optimizer: loss scaling skips, falls and grows") {
  pf::gpu_context& ctx = gpu_context();
  pf::gpu::loss_scaler scaler(1024.0F, {2.0F, 0.5F, 1.0F, 2048.0F, 2});
  const float infinity = std::numeric_limits<float>::infinity();
  arenas a;
  device_sgd sgd(a.on_device(), {});
  sgd.set_control(scaler.control());
  const auto before = a.values.fetched();
  const auto step = [&](float first_gradient) {
    auto values = a.gradients.host();
    values[0] = first_gradient;
    const std::vector<float> unscaled = values;
    const float scale = scaler.scale();
    for (float& g : values) g *= scale;
    twin<float> gradients(values);
    sgd.begin_step(ctx, 0.1);
    scaler.unscale(ctx, gradients.device_span());
    if (std::isfinite(first_gradient)) CHECK(difference(gradients.fetched(), unscaled) < 1e-6);
    sgd.step_range(ctx, 0, a.size);
    scaler.update(ctx);
    ctx.synchronize();
  };
  step(infinity);
  CHECK(scaler.scale() == 512.0F);
  CHECK(a.values.fetched() == before);
  step(0.5F);
  CHECK(scaler.scale() == 512.0F);
  CHECK(a.values.fetched() != before);
  CHECK(sgd.steps() == 1);
  step(0.5F);
  CHECK(scaler.scale() == 1024.0F);
  for (int i = 0; i < 6; ++i) step(0.5F);
  CHECK(scaler.scale() == 2048.0F);
}
