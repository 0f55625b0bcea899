// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of optimizers over the arenas of a network, of the gradient's norm, and of dynamic loss scaling.
/// Formulas: optim/. All arrays are in device memory. Those of values, gradients and states have the same
/// layout; passes are fast if their addresses are equal modulo 16 bytes.
///
/// Order of use in a step: begin_sgd (or begin_adam); gradient_norm or unscale, if the step clips or has a
/// loss scale; sgd (or adam) for all pieces; update_loss_scale.

#include <pufferfish/gpu/kernels/optim/optimizer_functors.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Consecutive elements of the arenas that one block works on.
struct arena_piece {
  index_t offset;
  std::int32_t size;
  std::int32_t decays;  ///< not 0: weight decay applies to them
  index_t rounded;      ///< position of the 16-bit copies
};

/// Control of a step, in device memory; null pointers: no effect.
struct step_control {
  const int* skip;              ///< not 0: the step changes nothing
  const float* gradient_scale;  ///< factor of the gradients
};

/// The results of a pass over all gradients.
struct gradient_facts {
  double norm;     ///< norm before clipping, without the loss scale
  float scale;     ///< factor that clips the gradient and removes the loss scale; 1 if it is not finite
  int not_finite;  ///< 1: a gradient is a NaN or infinity
};

/// 16-bit copies of values, which a step updates; nullptr: none. The two structs after this one are
/// for dynamic loss scaling: the scale falls by `backoff` when a gradient is not finite (that step
/// is skipped), and grows by `growth` after `interval` steps without one (Micikevicius et al.:
/// "Mixed precision training", ICLR 2018).
struct rounded_values {
  void* data;
  bool is_bf16;  ///< else fp16
};

/// Constants of dynamic loss scaling; `interval`: finite steps between two growths.
struct loss_scale_constants {
  float growth, backoff, smallest, largest;
  int interval;
};
/// The state of dynamic loss scaling; inverse = 1 / value.
struct loss_scale {
  float value, inverse;
  int good_steps;  ///< finite steps since the last change of the scale
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Counts a step and computes its numbers: increments numbers->steps unless the step before was skipped
/// (*skip is still not 0). `skip` is null if no step was before, or if it cannot be skipped. The learning
/// rate is a kernel argument: not to be captured.
void begin_sgd(cudaStream_t stream, const sgd_constants& constants, double lr, const int* skip,
               sgd_numbers* numbers);
void begin_adam(cudaStream_t stream, const adam_constants& constants, double lr, const int* skip,
                adam_numbers* numbers);

/// The step, on `count` pieces. Without momentum `velocity` is null. One block of 256 threads per piece.
/// Gradients are not changed; values, states and 16-bit copies are.
void sgd(cudaStream_t stream, const sgd_numbers* numbers, const arena_piece* pieces, index_t count,
         const step_control& control, const float* gradients, float* velocity, float* values,
         const rounded_values& rounded);
void adam(cudaStream_t stream, const adam_numbers* numbers, const arena_piece* pieces, index_t count,
          const step_control& control, const float* gradients, float* first, float* second, float* values,
          const rounded_values& rounded);

/// Doubles of scratch for gradient_norm.
inline index_t norm_parts(index_t size) {
  constexpr index_t piece = 16384, most = 1024;
  const index_t pieces = (size + piece - 1) / piece;
  return pieces < most ? pieces : most;
}
/// Computes *facts from sqrt(sum of squares), in double, in an order that depends on the size and the address
/// modulo 16 bytes. `inverse`: reciprocal of the loss scale, or null. max_norm <= 0: no clipping. `scratch`:
/// norm_parts(size) doubles. Two launches.
void gradient_norm(cudaStream_t stream, const float* gradients, index_t size, const float* inverse,
                   double max_norm, double* scratch, gradient_facts* facts);
/// x *= *factor. The kernel does not read x if the factor is 1.
void scale_by(cudaStream_t stream, float* x, index_t size, const float* factor);

/// gradients *= *inverse; *not_finite = 1 if a result is a NaN or infinity, else unchanged.
void unscale(cudaStream_t stream, float* gradients, index_t size, const float* inverse, int* not_finite);
/// If *not_finite is not 0: value = max(backoff value, smallest), good_steps = 0. Else good_steps grows by 1,
/// and at `interval` value = min(growth value, largest), good_steps = 0.
void update_loss_scale(cudaStream_t stream, const loss_scale_constants& constants, const int* not_finite,
                       loss_scale* scale);

PUFFERFISH_KERNELS_END
