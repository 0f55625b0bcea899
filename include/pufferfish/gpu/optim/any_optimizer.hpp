// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gpu::any_optimizer`: the optimizer that a training run's options select, on a device.

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <pufferfish/gpu/optim/optimizer.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// As pufferfish::optimizer, over arenas in device memory; float only. One thread at a time uses an object.
/// It belongs to the device of the target's arenas.
///
///     gpu::any_optimizer optimizer(make_optimizer_target(net.store()), sgd_options{.momentum = 0.9});
///     optimizer.begin_step(ctx, 0.1);
///     optimizer.step_range(ctx, 0, net.parameter_count());
class any_optimizer {
 public:
  /// Throws the errors of gpu::SGD and gpu::Adam. The options' type decides: sgd_options or adam_options.
  any_optimizer(optimizer_target<float> target, const optimizer_options& options)
      : held_(make(std::move(target), options)) {}

  /// Sets the skip flag and the factor of later steps; see gpu::SGD::set_control.
  void set_control(const kernels::step_control& control) {
    std::visit([&](auto& one) { one.set_control(control); }, held_);
  }

  /// See gpu::SGD: begin_step must not be captured into a graph, step_range may be. Errors as gpu::SGD and
  /// gpu::Adam.
  void begin_step(gpu_context& ctx, double lr) {
    std::visit([&](auto& one) { one.begin_step(ctx, lr); }, held_);
  }
  void step_range(gpu_context& ctx, index_t offset, index_t size) {
    std::visit([&](auto& one) { one.step_range(ctx, offset, size); }, held_);
  }

  /// Number of steps, without skipped ones. Waits for the device. Throws backend_error.
  std::uint64_t steps() const {
    return std::visit([](const auto& one) { return one.steps(); }, held_);
  }
  /// Sets the number of steps: the next one is steps + 1. Waits for the device; the momentum and the moments
  /// stay.
  void set_steps(std::uint64_t steps) {
    std::visit([&](auto& one) { one.set_steps(steps); }, held_);
  }

  /// The states for a checkpoint, in device memory, under the names of the CPU's. Spans have one element per
  /// value, arranged as the values; without momentum SGD's span is empty. They stay valid for the life of
  /// this object.
  std::vector<std::pair<std::string, std::span<float>>> states() {
    if (auto* sgd = std::get_if<SGD>(&held_)) return {{"optimizer.momentum", sgd->velocity()}};
    auto& adam = std::get<Adam>(held_);
    return {{"optimizer.first_moment", adam.first_moment()},
            {"optimizer.second_moment", adam.second_moment()}};
  }

 private:
  using held = std::variant<SGD, Adam>;
  static held make(optimizer_target<float> target, const optimizer_options& options) {
    if (const auto* sgd = std::get_if<sgd_options>(&options)) return SGD(std::move(target), *sgd);
    return Adam(std::move(target), std::get<adam_options>(options));
  }

  held held_;
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
