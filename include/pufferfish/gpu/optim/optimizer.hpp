// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// SGD and Adam on device::gpu (optim/sgd.hpp, optim/adam.hpp), the norm of a gradient in device memory, and
/// clipping by it.

#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/gpu/kernels/optim/optimizer.hpp>
#include <pufferfish/gpu/ops/elementwise.hpp>
#include <pufferfish/gpu/optim/loss_scaler.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/optim/optimizer.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

using pufferfish::detail::state_arrays;

/// Arguments of one update kernel. The arrays (gradients, states, values) and the list of pieces are in
/// device memory. A piece is a range of consecutive parameters with the same options, updated by one thread
/// block.
struct arena_step {
  const kernels::arena_piece* pieces;
  index_t count;  ///< number of pieces
  kernels::step_control control;
  const float* gradients;
  state_arrays<float> states;
  float* values;
  kernels::rounded_values rounded;
};

/// Selects the update kernels (SGD or Adam) by the optimizer's type of options.
template <class Options>
struct update_kernels;

template <>
struct update_kernels<sgd_options> {
  using numbers = kernels::sgd_numbers;
  static void begin(cudaStream_t stream, const sgd_options& o, double lr, const int* skip, numbers* to) {
    kernels::begin_sgd(stream, {o.momentum, o.dampening, o.weight_decay, o.nesterov}, lr, skip, to);
  }
  static void run(cudaStream_t stream, const numbers* n, const arena_step& s) {
    kernels::sgd(stream, n, s.pieces, s.count, s.control, s.gradients, s.states[0], s.values, s.rounded);
  }
};

template <>
struct update_kernels<adam_options> {
  using numbers = kernels::adam_numbers;
  static void begin(cudaStream_t stream, const adam_options& o, double lr, const int* skip, numbers* to) {
    kernels::begin_adam(stream, {o.beta1, o.beta2, o.eps, o.weight_decay, o.decoupled_decay}, lr, skip, to);
  }
  static void run(cudaStream_t stream, const numbers* n, const arena_step& s) {
    kernels::adam(stream, n, s.pieces, s.count, s.control, s.gradients, s.states[0], s.states[1], s.values,
                  s.rounded);
  }
};

}  // namespace gpu::detail

namespace detail {

/// Device version of the class of this name in optim/arena_optimizer.hpp. The constants of a step, which
/// begin() writes, and the list of tasks are in device memory.
template <class T, class Options>
class optimizer_pass<T, Options, device::gpu> {
  static_assert(std::is_same_v<T, float>, "pufferfish: on a device, parameters are trained in float");
  using rule = gpu::detail::update_kernels<Options>;

 public:
  using control_type = gpu::kernels::step_control;
  using array = memory_block<float>;
  static constexpr index_t task_size = 8192;  // a task is the work of one thread block

  /// Copies the list of tasks to the device. Throws backend_error.
  explicit optimizer_pass(const arena_tasks& tasks)
      : pieces_(gpu::device_memory(), static_cast<index_t>(tasks.tasks().size()), uninitialized),
        numbers_(gpu::device_memory(), 1) {
    std::vector<gpu::kernels::arena_piece> pieces;
    for (const arena_segment& task : tasks.tasks()) {
      pieces.push_back({task.offset, static_cast<std::int32_t>(task.size), task.decay ? 1 : 0, task.rounded});
    }
    pieces_.from_host(pieces);
  }

  /// Returns an array of zeros for an optimizer state, one element per parameter. It has the same alignment
  /// as the parameters' values, because the update kernels read and write both arrays in vectors. Throws
  /// backend_error.
  static array zeros(const optimizer_target<float>& target) {
    const auto address = reinterpret_cast<std::uintptr_t>(target.values.data());
    return {gpu::device_memory(), static_cast<index_t>(target.values.size()),
            static_cast<index_t>(address % memory_alignment / sizeof(float))};
  }

  void set_control(const control_type& control) {
    if (control.skip != control_.skip) last_skip_ = nullptr;
    control_ = control;
  }
  void begin(const context<device::gpu>* ctx, const Options& options, double lr) {
    rule::begin(ctx->stream(), options, lr, std::exchange(last_skip_, control_.skip), numbers_.data());
  }
  void run(context<device::gpu>& ctx, const arena_tasks&, const arena_tasks::task_range& range,
           const optimizer_target<float>& target, const state_arrays<float>& states) {
    rule::run(ctx.stream(), numbers_.data(),
              {pieces_.data() + range.first,
               range.count,
               control_,
               target.gradients.data(),
               states,
               target.values.data(),
               {target.rounded, target.rounded_as == rounded_format::bf16}});
  }

  /// Number of steps that have updated the parameters. The device also counts the last step if it was
  /// skipped, so this function subtracts it. Waits for the device. Throws backend_error.
  std::uint64_t steps() const {
    typename rule::numbers values{};
    numbers_.to_host({&values, 1});
    int skipped = 0;
    if (last_skip_ != nullptr) gpu::device_memory().to_host(&skipped, last_skip_, sizeof skipped);
    return values.steps - (skipped != 0 ? 1U : 0U);
  }
  void set_steps(std::uint64_t steps) {
    typename rule::numbers values{};
    values.steps = steps;
    numbers_.from_host({&values, 1});
    last_skip_ = nullptr;
  }

 private:
  memory_block<gpu::kernels::arena_piece> pieces_;
  memory_block<typename rule::numbers> numbers_;
  control_type control_{nullptr, nullptr};
  // The flag of the last step. Flags outlive optimizers: before the first step of an optimizer its flag may
  // still tell that a step of another optimizer was skipped. nullptr: there is no flag that may be read.
  const int* last_skip_ = nullptr;
};

}  // namespace detail

namespace gpu {

using SGD [[deprecated("renamed to SGD<float, device::gpu>")]] = pufferfish::SGD<float, device::gpu>;
using Adam [[deprecated("renamed to Adam<float, device::gpu>")]] = pufferfish::Adam<float, device::gpu>;
using any_optimizer [[deprecated("renamed to optimizer<float, device::gpu>")]] =
    pufferfish::optimizer<float, device::gpu>;

/// Writes the norm of a gradient to *facts. Multiplying the gradient by facts->scale clips it to the norm
/// max_norm; a max_norm of 0 or less means no clipping. An optimizer whose step_control points to this scale
/// applies it during its step, so that clipping needs no pass of its own over the gradient. `inverse_scale`:
/// reciprocal of the loss scale that the gradient still contains, or nullptr for 1.
///
/// facts->norm is the norm before clipping, without the loss scale. facts->scale is *inverse_scale, times
/// max_norm / norm if max_norm > 0 and norm > max_norm; it is 1 if the norm is not finite. facts->not_finite
/// is 1 if the norm is not finite, else 0. The sum is in double, in an order that depends on the size and the
/// address modulo 16. `gradients`, `facts` and `inverse_scale` are in device memory. Does not wait. Throws
/// backend_error.
inline void gradient_norm(gpu_context& ctx, std::span<const float> gradients, double max_norm,
                          kernels::gradient_facts* facts, const float* inverse_scale = nullptr) {
  const auto size = static_cast<index_t>(gradients.size());
  scratch_frame frame(ctx.scratch());
  double* scratch = frame.take<double>(kernels::norm_parts(size));
  kernels::gradient_norm(ctx.stream(), gradients.data(), size, inverse_scale, max_norm, scratch, facts);
}

/// Computes the norm of the gradients and multiplies them in place by facts->scale, so that their norm is at
/// most max_norm. *facts receives the results of gradient_norm. Both are in device memory. Does not wait.
/// Throws value_error unless max_norm > 0, and backend_error.
inline void clip_gradient_norm(gpu_context& ctx, std::span<float> gradients, double max_norm,
                               kernels::gradient_facts* facts) {
  if (!(max_norm > 0.0)) {
    pufferfish::detail::throw_error<value_error>(
        {"clip_gradient_norm: maximal norm ", max_norm, " is not positive"});
  }
  gradient_norm(ctx, gradients, max_norm, facts);
  kernels::scale_by(ctx.stream(), gradients.data(), static_cast<index_t>(gradients.size()), &facts->scale);
}

}  // namespace gpu
PUFFERFISH_NAMESPACE_END
