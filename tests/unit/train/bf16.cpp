// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Networks that compute in bfloat16 on the CPU: training follows float's, bits do not depend on threads, and
// checkpoints hold the float parameters.
#include "../support/scratch_folder.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/models/small_resnet.hpp>
#include <pufferfish/nn.hpp>
#include <pufferfish/train/checkpoint.hpp>

namespace {
using namespace pufferfish;

constexpr index_t batch = 12, classes = 5;
const extents<4> images{batch, 8, 8, 3}, outputs{batch, 1, 1, classes};

template <class T>
network<T> made() {
  network<T> net =
      small_resnet<T>({.channels_in = 3, .classes = classes, .width = 8, .blocks = 1, .stages = 2});
  net.initialize(3);
  return net;
}

/// A network with its optimizer and one batch.
template <class T>
struct training {
  explicit training(int threads, bool hybrid = false)
      : ctx({threads}), net(made<T>()), y(outputs), dy(outputs) {
    if (hybrid) factorize(net, {.first_layer = 2});
    optimizer.emplace(make_optimizer_target(net.store()), sgd_options{.momentum = 0.9});
    std::vector<float> pixels(static_cast<std::size_t>(volume<4>(images)));
    fill_normal(std::span<float>(pixels), 1.0, random_stream(5, 1));
    for (const float value : pixels) x.push_back(static_cast<T>(value));
    for (std::int32_t i = 0; i < batch; ++i) labels.push_back(i % classes);
  }

  tensor_view<const T, 4> input() const { return {x.data(), images}; }

  double step() {
    ctx.set_mode(run_mode::training);
    ctx.begin_step(steps++);
    net.forward(ctx, input(), y.view());
    const loss_result loss = SoftmaxCrossEntropy<T>()(ctx, y.view(), labels, batch, dy.view());
    net.backward(ctx, dy.view());
    optimizer->step(ctx, 0.02);
    return loss.mean_loss();
  }

  cpu_context ctx;
  network<T> net;
  std::optional<SGD<float>> optimizer;
  std::vector<T> x;
  tensor<T, 4> y, dy;
  std::vector<std::int32_t> labels;
  std::uint64_t steps = 0;
};

/// Whether the network's 16-bit copies are its parameters, rounded.
bool copies_are_current(const network<bfloat16>& net) {
  for (const auto& entry : net.store().parameters()) {
    const bfloat16* copies = entry.thing->template as<bfloat16>();
    for (const float value : std::as_const(*entry.thing).values()) {
      if ((copies++)->bits() != bfloat16(value).bits()) return false;
    }
  }
  return true;
}

TEST_CASE("bf16 on the CPU: training follows float's, dense and factorized") {
  for (const bool hybrid : {false, true}) {
    CAPTURE(hybrid);
    training<float> wide(1, hybrid);
    training<bfloat16> narrow(1, hybrid), threads(3, hybrid);
    CHECK(copies_are_current(narrow.net));
    double first = 0.0, last = 0.0;
    for (int i = 0; i < 12; ++i) {
      const double want = wide.step(), got = narrow.step();
      CHECK(threads.step() == got);
      CHECK(std::abs(got - want) < 0.05 * want + 0.01);
      (i == 0 ? first : last) = got;
    }
    CHECK(last < 0.8 * first);
    CHECK(copies_are_current(narrow.net));
    const std::span<const float> one = std::as_const(narrow.net.store()).values(),
                                 three = std::as_const(threads.net.store()).values();
    CHECK(std::equal(one.begin(), one.end(), three.begin()));
  }
}

TEST_CASE("bf16 on the CPU: a checkpoint, a copy and a change of parameters") {
  training<bfloat16> trained(1, true);
  for (int i = 0; i < 3; ++i) trained.step();
  const scratch_folder folder;
  const std::string path = folder / "net.safetensors";
  save_checkpoint(path, trained.net);
  training<bfloat16> again(1);
  open_checkpoint(path).restore(again.net);
  CHECK(copies_are_current(again.net));
  network<float> wide = made<float>();
  apply_ranks(wide, low_rank_layers(trained.net));
  copy_state(trained.net, wide);
  network<bfloat16> copied = made<bfloat16>();
  apply_ranks(copied, low_rank_layers(wide));
  copy_state(wide, copied);
  CHECK(copies_are_current(copied));
  const network<bfloat16> copy = copied;
  CHECK(copies_are_current(copy));
  for (training<bfloat16>* one : {&trained, &again}) one->ctx.set_mode(run_mode::inference);
  const tensor<bfloat16, 4> want = trained.net.forward(trained.ctx, trained.input());
  for (const network<bfloat16>* net : {&std::as_const(again.net), &std::as_const(copied), &copy}) {
    const tensor<bfloat16, 4> got = net->forward(again.ctx, trained.input());
    for (index_t i = 0; i < want.size(); ++i) CHECK(got.data()[i].bits() == want.data()[i].bits());
  }
  merge(copied);
  CHECK(copies_are_current(copied));
  copied.on_host([](auto& root) { root.initialize({9, 9}); });
  CHECK(copies_are_current(copied));
}

TEST_CASE("bf16 on the CPU: a layer outside of a network has no 16-bit parameters") {
  cpu_context ctx({1});
  const LowRankConv<bfloat16> layer(conv_shape::square(4, 4, 3, 1, 1), 2);
  const tensor<bfloat16, 4> x({1, 4, 4, 4});
  CHECK_THROWS_AS(layer.forward(ctx, x.view()), state_error);
}

}  // namespace
