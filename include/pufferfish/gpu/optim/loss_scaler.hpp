// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gpu::loss_scaler`: dynamic loss scaling, for networks that compute in fp16.

#include <span>

#include <pufferfish/gpu/kernels/comm/exchange.hpp>
#include <pufferfish/gpu/kernels/optim/optimizer.hpp>
#include <pufferfish/gpu/runtime/context.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {

/// Dynamic loss scaling, for networks that compute in fp16 (Micikevicius et al., Mixed precision training,
/// ICLR 2018, section 3.2). After use(ctx) losses multiply their gradients by scale() before rounding.
/// unscale() divides the gradients of the parameters by the scale, and a step with a gradient that is not
/// finite is skipped. All of this happens on the device:
///
///     scaler.use(ctx);  optimizer.set_control(scaler.control());          // once
///     loss, backward;  scaler.unscale(ctx, gradients);                    // each step
///     optimizer.step_range(...);  scaler.update(ctx);
///
/// All ranks must skip the same steps and have the same scale: call unscale after the gradients have been
/// exchanged. A number that is not finite on one rank then makes the mean on all ranks not finite. Steps that
/// the exchange skips (nonfinite_policy::skip) leave different gradients on every rank; skip_if skips them. A
/// compressor keeps unsent values for later steps, so its gradients must not contain the scale: call unscale
/// after the backward pass, then exchange with nonfinite_policy::skip.
///
///     exchange.begin(ctx);  backward;  exchange.finish(ctx);  scaler.unscale(ctx, gradients);
///     scaler.skip_if(ctx, exchange.skip());  optimizer.step_range(...);  scaler.update(ctx);
///
/// One thread at a time uses an object. All functions but scale(), set_scale(), state() and set_state() may
/// be captured into a graph.
class loss_scaler {
 public:
  /// `constants`: growth, backoff, smallest and largest scale, and the number of finite steps between two
  /// growths. The values are not checked. Throws backend_error.
  explicit loss_scaler(float initial = 65536.0F,
                       const kernels::loss_scale_constants& constants = {2.0F, 0.5F, 1.0F, 16777216.0F, 2000})
      : constants_(constants), scale_(device_memory(), 1), not_finite_(device_memory(), 1) {
    set_scale(initial);
  }

  /// The argument of the optimizer's set_control(). Its flag is an address in this object, which must outlive
  /// the optimizer's steps.
  kernels::step_control control() const { return {not_finite_.data(), nullptr}; }

  /// Makes the losses of this context multiply their gradients by the scale, until
  /// context::set_loss_scale(nullptr) is called. The scale is in this object, which must exist until then.
  void use(gpu_context& ctx) const { ctx.set_loss_scale(&scale_.data()->value); }
  /// Divides the gradients in place by the scale. Sets a flag in device memory to whether an element is not
  /// finite; the flag of the previous step is overwritten. `gradients` is in device memory. Does not wait.
  /// Throws backend_error.
  void unscale(gpu_context& ctx, std::span<float> gradients) {
    check(cudaMemsetAsync(not_finite_.data(), 0, sizeof(int), ctx.stream()), "cudaMemsetAsync");
    kernels::unscale(ctx.stream(), gradients.data(), static_cast<index_t>(gradients.size()),
                     &scale_.data()->inverse, not_finite_.data());
  }
  /// Skips the step if *flag (in device memory) is not 0 when the stream reaches this call, like a step with
  /// gradients that are not finite. Call it after unscale and before the optimizer's step. Throws
  /// backend_error.
  void skip_if(gpu_context& ctx, const int* flag) {
    kernels::join_flag(ctx.stream(), flag, not_finite_.data());
  }
  /// Updates the scale by the flag that unscale and skip_if have set. After a step with a gradient that is
  /// not finite: scale = max(smallest, backoff scale). After `interval` finite steps in a row: scale =
  /// min(largest, growth scale). Call it once per step, after the optimizer's step. Throws backend_error.
  void update(gpu_context& ctx) {
    kernels::update_loss_scale(ctx.stream(), constants_, not_finite_.data(), scale_.data());
  }

  /// The current scale. Waits for the device. Throws backend_error.
  float scale() const { return state().value; }
  /// Sets the scale and starts a new row of finite steps. Waits for the device. Throws backend_error.
  void set_scale(float scale) { set_state({scale, 1.0F / scale, 0}); }

  /// The scale, its reciprocal and the number of finite steps in a row, to be stored in checkpoints. Waits
  /// for the device. Throws backend_error.
  kernels::loss_scale state() const {
    kernels::loss_scale values{};
    scale_.to_host({&values, 1});
    return values;
  }
  /// Restores what state() has returned. Waits for the device. Throws backend_error.
  void set_state(const kernels::loss_scale& values) { scale_.from_host({&values, 1}); }

 private:
  kernels::loss_scale_constants constants_;
  memory_block<kernels::loss_scale> scale_;
  memory_block<int> not_finite_;
};

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
