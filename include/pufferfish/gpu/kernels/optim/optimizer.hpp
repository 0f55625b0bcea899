// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of optimizers over the arenas of a network, of the gradient's norm, and of dynamic loss scaling.
/// Formulas: the headers of optim/. All arrays are in device memory. The arrays of values, gradients and
/// states have the same layout; passes are fast if their addresses are equal modulo 16 bytes. Each launcher
/// throws backend_error if its launch fails.
///
/// Order of use in a step: begin_sgd (or begin_adam); gradient_norm or unscale, if the step clips gradients
/// or has a loss scale; sgd (or adam) for all pieces; update_loss_scale.

#include <pufferfish/gpu/kernels/optim/optimizer_functors.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Consecutive elements of the arenas that one block processes.
struct arena_piece {
  index_t offset;       ///< first element
  std::int32_t size;    ///< number of elements
  std::int32_t decays;  ///< not 0: weight decay applies to these elements
  index_t rounded;      ///< position of the 16-bit copies of these elements
};

/// Control of a step, in device memory. A null pointer has no effect.
struct step_control {
  const int* skip;              ///< if *skip is not 0, the step changes nothing
  const float* gradient_scale;  ///< factor of the gradients
};

/// The results of a pass over all gradients.
struct gradient_facts {
  double norm;     ///< norm before clipping, without the loss scale
  float scale;     ///< factor that clips the gradient and removes the loss scale; 1 if it is not finite
  int not_finite;  ///< 1: a gradient is a NaN or infinity
};

/// 16-bit copies of the values, which a step updates. data nullptr: no copies.
struct rounded_values {
  void* data;
  bool is_bf16;  ///< whether the copies are bfloat16; else half precision
};

/// Constants of dynamic loss scaling (Micikevicius et al.: "Mixed precision training", ICLR 2018). The scale
/// is multiplied by `backoff` when a gradient is not finite (that step is skipped), and by `growth` after
/// `interval` consecutive finite steps.
struct loss_scale_constants {
  float growth, backoff, smallest, largest;
  int interval;
};
/// The state of dynamic loss scaling, with inverse = 1 / value.
struct loss_scale {
  float value, inverse;
  int good_steps;  ///< finite steps since the last change of the scale
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// Counts a step and computes its numbers: increments numbers->steps unless the previous step was skipped
/// (*skip is still not 0). `skip` is null if there was no previous step, or if steps cannot be skipped. The
/// learning rate is an argument of the kernel, so this launch must not be captured in a graph.
void begin_sgd(cudaStream_t stream, const sgd_constants& constants, double lr, const int* skip,
               sgd_numbers* numbers);
/// Does the same as begin_sgd for Adam.
void begin_adam(cudaStream_t stream, const adam_constants& constants, double lr, const int* skip,
                adam_numbers* numbers);

/// Applies a step of SGD to `count` pieces: changes values, velocities and 16-bit copies, but not the
/// gradients. Without momentum `velocity` is null. One block of 256 threads per piece.
void sgd(cudaStream_t stream, const sgd_numbers* numbers, const arena_piece* pieces, index_t count,
         const step_control& control, const float* gradients, float* velocity, float* values,
         const rounded_values& rounded);
/// Applies a step of Adam to `count` pieces: changes values, first and second moments, and 16-bit copies, but
/// not the gradients. One block of 256 threads per piece.
void adam(cudaStream_t stream, const adam_numbers* numbers, const arena_piece* pieces, index_t count,
          const step_control& control, const float* gradients, float* first, float* second, float* values,
          const rounded_values& rounded);

/// Number of doubles of scratch for gradient_norm.
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
