// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Training steps on a device: direct, captured into a graph, and as on the CPU. docs/gpu.md shows parts of
// it.
#include "support.hpp"

#include <memory>
#include <vector>

// [include]
#include <pufferfish/gpu.hpp>
#include <pufferfish/models/small_vgg.hpp>
#include <pufferfish/nn.hpp>
// [include]

using namespace gpu_test;

namespace {

constexpr pf::extents<4> images{6, 8, 8, 3};
constexpr pf::extents<4> logits{6, 1, 1, 4};
constexpr int steps = 9;

pf::small_vgg_options options() {
  pf::small_vgg_options result;
  result.image = {images[1], images[2]};
  result.classes = logits[3];
  result.width = 4;
  result.stages = 1;
  result.hidden = 12;
  result.dropout = 0.3;
  return result;
}
constexpr pf::sgd_options sgd{0.9, 0.0, true, 1e-3, false};
double rate(int step) { return 0.05 / (1 + step); }

std::vector<std::int32_t> labels_of(int step) {
  std::vector<std::int32_t> labels(static_cast<std::size_t>(images[0]));
  for (std::size_t i = 0; i < labels.size(); ++i) {
    labels[i] = static_cast<std::int32_t>((i * 3 + static_cast<std::size_t>(step)) % 4);
  }
  return labels;
}

struct outcome {
  std::vector<double> losses;
  std::vector<float> values;
  std::size_t captures = 0, replays = 0;
};

outcome train_on_device(bool captured, const pf::gpu::context_options& machine = {}) {
  outcome result;
  pf::gpu_context ctx(machine);
  pf::network<float, pf::device::gpu> net = pf::small_vgg<float, pf::device::gpu>(options());
  net.initialize(1);
  const pf::mode_scope<pf::device::gpu> training(ctx, pf::run_mode::training);
  auto x_memory = twin<float>(pf::volume<4>(images));
  auto y_memory = twin<float>(pf::volume<4>(logits)), dy_memory = twin<float>(pf::volume<4>(logits));
  auto label_memory = twin<std::int32_t>(images[0]);
  auto results = twin<double>(2);
  const auto x = x_memory.device_view(images), y = y_memory.device_view(logits),
             dy = dy_memory.device_view(logits);
  const std::span<const std::int32_t> labels = label_memory.device_span();
  pf::SGD<float, pf::device::gpu> optimizer(pf::make_optimizer_target(net.store()), sgd);
  const pf::SoftmaxCrossEntropy<float> criterion;
  pf::gpu::step_graph graph;
  graph.set_enabled(captured);
  for (int step = 0; step < steps; ++step) {
    const auto batch = random_twin<float>(x_memory.size(), 100 + static_cast<std::uint64_t>(step)).host();
    pf::gpu::device_memory().from_host(x.data(), batch.data(), batch.size() * sizeof(float));
    pf::gpu::device_memory().from_host(label_memory.device_data(), labels_of(step).data(),
                                       labels.size() * sizeof(std::int32_t));
    // [step]
    ctx.begin_step(static_cast<std::uint64_t>(step));
    optimizer.begin_step(ctx, rate(step));
    graph.run(ctx, pf::gpu::step_graph::key(x.shape(), net.generation()), [&] {
      net.forward(ctx, x, y);
      criterion(ctx, y, labels, static_cast<double>(labels.size()), dy, results.device_data());
      net.backward(ctx, dy);
      optimizer.step_range(ctx, 0, net.parameter_count());
    });
    // [step]
    result.losses.push_back(results.fetched()[0]);
  }
  net.read_on_host([&](const auto&) {
    for (const auto& entry : net.store().parameters()) {
      result.values.insert(result.values.end(), entry.thing->values().begin(), entry.thing->values().end());
    }
  });
  result.captures = graph.captures();
  result.replays = graph.replays();
  return result;
}

outcome train_on_host() {
  outcome result;
  pf::cpu_context ctx;
  pf::network<float> net = pf::small_vgg<float>(options());
  net.initialize(1);
  ctx.set_mode(pf::run_mode::training);
  pf::tensor<float, 4> y(logits), dy(logits);
  pf::SGD<float> optimizer(pf::make_optimizer_target(net.store()), sgd);
  const pf::SoftmaxCrossEntropy<float> criterion;
  for (int step = 0; step < steps; ++step) {
    auto batch = random_twin<float>(pf::volume<4>(images), 100 + static_cast<std::uint64_t>(step));
    const std::vector<std::int32_t> labels = labels_of(step);
    ctx.begin_step(static_cast<std::uint64_t>(step));
    net.forward(ctx, batch.host_view(images), y.view());
    const auto loss = criterion(ctx, y.view(), labels, static_cast<double>(labels.size()), dy.view());
    net.backward(ctx, dy.view());
    optimizer.step(ctx, rate(step));
    result.losses.push_back(loss.loss_sum);
  }
  result.values.assign(net.store().values().begin(), net.store().values().end());
  return result;
}

}  // namespace

TEST_CASE("gpu training: steps captured into a graph are the direct ones bit for bit, dropout included") {
  const outcome direct = train_on_device(false), captured = train_on_device(true);
  CHECK(direct.captures == 0);
  CHECK(captured.captures == 1);
  CHECK(captured.replays >= 3);
  CHECK(direct.losses == captured.losses);
  CHECK(direct.values == captured.values);
}

TEST_CASE("gpu training: two runs of a deterministic context give the same bits") {
  for (const auto math : {pf::gpu::math_mode::fp32, pf::gpu::math_mode::tf32}) {
    const outcome one = train_on_device(true, {.math = math}), other = train_on_device(true, {.math = math});
    CHECK(one.losses == other.losses);
    CHECK(one.values == other.values);
  }
}

TEST_CASE("gpu training: what deterministic contexts ask of others") {
  pf::gpu_context strict, loose({.deterministic = false});
  CHECK(strict.deterministic());
  CHECK(!loose.deterministic());
  cublasAtomicsMode_t mode = CUBLAS_ATOMICS_ALLOWED;
  pf::gpu::check(cublasGetAtomicsMode(strict.blas().handle(), &mode), "cublasGetAtomicsMode");
  CHECK(mode == CUBLAS_ATOMICS_NOT_ALLOWED);
  pf::gpu::check(cublasGetAtomicsMode(loose.blas().handle(), &mode), "cublasGetAtomicsMode");
  CHECK(mode == CUBLAS_ATOMICS_ALLOWED);

  class idle_library : public pf::gpu::conv_library {
   public:
    using request = pf::gpu::conv_request;
    bool forward(pf::gpu_context&, const request&, const void*, const void*, const void*, void*) override {
      return false;
    }
    bool backward_input(pf::gpu_context&, const request&, const void*, const void*, void*, bool) override {
      return false;
    }
    bool backward_weight(pf::gpu_context&, const request&, const void*, const void*, float*, bool) override {
      return false;
    }
  };
  class steady_library final : public idle_library {
   public:
    bool deterministic() const override { return true; }
  };
  idle_library idle;
  steady_library steady;
  CHECK_THROWS_AS(strict.use(&idle), pf::value_error);
  CHECK(strict.conv_library() == nullptr);
  strict.use(&steady);
  CHECK(strict.conv_library() == &steady);
  strict.use(nullptr);
  CHECK(strict.conv_library() == nullptr);
  loose.use(&idle);
  CHECK(loose.conv_library() == &idle);
}

TEST_CASE("gpu training: as on the CPU") {
  const outcome device = train_on_device(true), host = train_on_host();
  for (std::size_t i = 0; i < host.losses.size(); ++i) {
    CAPTURE(i);
    CHECK(device.losses[i] == doctest::Approx(host.losses[i]).epsilon(1e-3));
  }
  CHECK(difference(device.values, host.values) < 1e-3);
}

TEST_CASE("gpu training: from the second step on, nothing asks the system for memory") {
  pf::gpu_context ctx;
  pf::network<float, pf::device::gpu> net = pf::small_vgg<float, pf::device::gpu>(options());
  net.initialize(1);
  const pf::mode_scope<pf::device::gpu> training(ctx, pf::run_mode::training);
  auto x = random_twin<float>(pf::volume<4>(images), 1), y = twin<float>(pf::volume<4>(logits));
  auto dy = random_twin<float>(y.size(), 2);
  std::size_t settled = 0;
  for (std::uint64_t step = 0; step < 4; ++step) {
    ctx.begin_step(step);
    net.forward(ctx, x.device_view(images), y.device_view(logits));
    net.backward(ctx, dy.device_view(logits));
    if (step == 1) settled = ctx.system_allocations();
  }
  CHECK(ctx.system_allocations() == settled);
  CHECK(ctx.peak_bytes() > 0);
}

TEST_CASE("gpu graphs: a graph that is dropped or replaced waits for its last launch") {
  pf::gpu_context ctx;
  pf::memory_block<float> from(pf::gpu::device_memory(), 1), to(pf::gpu::pinned_memory(), 1);
  from.from_host(std::vector<float>{3.0F});
  const auto copy = [&] {
    pf::gpu::check(
        cudaMemcpyAsync(to.data(), from.data(), sizeof(float), cudaMemcpyDeviceToHost, ctx.stream()),
        "cudaMemcpyAsync");
  };
  const auto launch_and = [&](auto&& end) {
    auto graph = std::make_unique<pf::gpu::step_graph>();
    for (int step = 0; step < 3; ++step) graph->run(ctx, 1, copy);
    REQUIRE(graph->captures() == 1);
    ctx.synchronize();
    *to.data() = 0.0F;
    graph->run(ctx, 1, copy);
    CHECK(graph->replays() > 0);
    end(graph);
    CHECK(*to.data() == 3.0F);
  };
  launch_and([](auto& graph) { graph->drop(); });
  launch_and([](auto& graph) { graph->set_enabled(false); });
  launch_and([](auto& graph) { graph.reset(); });
  launch_and([&](auto& graph) { graph->run(ctx, 2, [] {}); });
}
