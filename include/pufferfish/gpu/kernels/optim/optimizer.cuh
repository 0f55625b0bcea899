// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of optimizer.hpp. Memory bandwidth limits their speed.
///
/// Piece p has the same elements, offset .. offset + size - 1, in all arenas. Pieces do not overlap, so a
/// step needs no atomics and no barriers. If the arrays are aligned alike modulo 16 bytes, the threads
/// process single elements up to the first multiple of 16 bytes, then groups of four, then single elements
/// again; else single elements only.

#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/kernels/narrow.cuh>
#include <pufferfish/gpu/kernels/optim/optimizer.hpp>
#include <pufferfish/gpu/kernels/reduce/column_parts.hpp>

PUFFERFISH_KERNELS_BEGIN

inline constexpr unsigned optimizer_threads = 256;

/// Number of elements, of `size`, before the first one at which all arrays are aligned to vectors; `size` if
/// the arrays' alignments differ. Parameters are packed: a piece begins at any offset, which is the same in
/// all arenas.
template <class... P>
__device__ inline index_t vector_head(index_t size, const P*... arrays) {
  const std::uintptr_t addresses[] = {reinterpret_cast<std::uintptr_t>(arrays)...};
  for (const std::uintptr_t address : addresses) {
    if (((address ^ addresses[0]) & 15U) != 0) return size;
  }
  const auto head = static_cast<index_t>((16U - (addresses[0] & 15U)) % 16U / sizeof(float));
  return head < size ? head : size;
}

/// Distributes the elements 0 .. size - 1 over the threads of a block: calls by_vector(i) for groups of four,
/// and by_element(i) for single elements. `head`: see vector_head.
template <class V, class E>
__device__ inline void for_block_vectors(index_t size, index_t head, V by_vector, E by_element) {
  const index_t thread = threadIdx.x, threads = blockDim.x, end = head + (size - head) / 4 * 4;
  for (index_t i = thread; i < head; i += threads) by_element(i);
  for (index_t i = head + 4 * thread; i < end; i += 4 * threads) by_vector(i);
  for (index_t i = end + thread; i < size; i += threads) by_element(i);
}

/// Whether the step is skipped. A null pointer: it is not.
__device__ inline bool skips(const int* skip) { return skip != nullptr && *skip != 0; }
/// The factor at an address; 1 for a null pointer.
__device__ inline float factor_of(const float* factor) { return factor == nullptr ? 1.0F : *factor; }

// ---------------------------------------------------------------------------------------------------------
// Steps

/// Grid of this kernel and of begin_adam_kernel: one thread.
static __global__ void begin_sgd_kernel(grid_dependency earlier, sgd_constants constants, double lr,
                                        const int* skip, sgd_numbers* numbers) {
  earlier.wait();
  *numbers = sgd_numbers_of(constants, numbers->steps + (skips(skip) ? 0U : 1U), lr);
}
static __global__ void begin_adam_kernel(grid_dependency earlier, adam_constants constants, double lr,
                                         const int* skip, adam_numbers* numbers) {
  earlier.wait();
  *numbers = adam_numbers_of(constants, numbers->steps + (skips(skip) ? 0U : 1U), lr);
}

void begin_sgd(cudaStream_t stream, const sgd_constants& constants, double lr, const int* skip,
               sgd_numbers* numbers) {
  launch(stream, {1, 1}, begin_sgd_kernel, constants, lr, skip, numbers);
}
void begin_adam(cudaStream_t stream, const adam_constants& constants, double lr, const int* skip,
                adam_numbers* numbers) {
  launch(stream, {1, 1}, begin_adam_kernel, constants, lr, skip, numbers);
}

/// The rounded copies of a piece's values.
struct rounded_piece {
  rounded_values all;
  index_t offset;

  /// The bits of the rounded value.
  __device__ std::uint16_t round(float value) const {
    return all.is_bf16 ? bf16_bits::narrow(value) : fp16_bits::narrow(value);
  }
  /// Address of the copy of the piece's element i.
  __device__ std::uint16_t* place(index_t i) const {
    return static_cast<std::uint16_t*>(all.data) + offset + i;
  }
  /// Stores the copy of element i, if there are copies.
  __device__ void store(index_t i, float value) const {
    if (all.data != nullptr) *place(i) = round(value);
  }
  /// Stores the copies of the elements i .. i + 3, if there are copies.
  __device__ void store(index_t i, const vector<float>& values) const {
    if (all.data == nullptr) return;
    ushort4 bits{round(values[0]), round(values[1]), round(values[2]), round(values[3])};
    if (reinterpret_cast<std::uintptr_t>(place(i)) % sizeof bits == 0) {
      *reinterpret_cast<ushort4*>(place(i)) = bits;
    } else {
      for (int k = 0; k < 4; ++k) *place(i + k) = round(values[k]);
    }
  }
};

/// Grid: block b has piece b, with 256 threads, four elements per thread and step where all arrays are
/// aligned alike. Without momentum `velocities` is not used.
template <bool Momentum>
static __global__ void sgd_kernel(grid_dependency earlier, const sgd_numbers* numbers,
                                  const arena_piece* pieces, step_control control, const float* gradients,
                                  float* velocities, float* values, rounded_values copies) {
  earlier.wait();
  if (skips(control.skip)) return;
  const arena_piece piece = pieces[blockIdx.x];
  const sgd_element step{*numbers, Momentum};
  const float scale = factor_of(control.gradient_scale);
  const bool decays = piece.decays != 0;
  const float* gradient = gradients + piece.offset;
  float* value = values + piece.offset;
  float* velocity = Momentum ? velocities + piece.offset : value;
  const rounded_piece rounded{copies, piece.rounded};
  for_block_vectors(
      piece.size, vector_head(piece.size, gradient, velocity, value),
      [&](index_t i) {
        const vector<float> g = load_vector(gradient + i);
        vector<float> v = load_vector(velocity + i), x = load_vector(value + i);
        for (int k = 0; k < 4; ++k) step(x[k], v[k], g[k] * scale, decays);
        if (Momentum) store_vector(velocity + i, v);
        store_vector(value + i, x);
        rounded.store(i, x);
      },
      [&](index_t i) {
        float v = velocity[i], x = value[i];
        step(x, v, gradient[i] * scale, decays);
        if (Momentum) velocity[i] = v;
        value[i] = x;
        rounded.store(i, x);
      });
}

void sgd(cudaStream_t stream, const sgd_numbers* numbers, const arena_piece* pieces, index_t count,
         const step_control& control, const float* gradients, float* velocity, float* values,
         const rounded_values& rounded) {
  launch(stream, {static_cast<unsigned>(count), optimizer_threads},
         velocity == nullptr ? sgd_kernel<false> : sgd_kernel<true>, numbers, pieces, control, gradients,
         velocity, values, rounded);
}

/// Grid: that of sgd_kernel.
static __global__ void adam_kernel(grid_dependency earlier, const adam_numbers* numbers,
                                   const arena_piece* pieces, step_control control, const float* gradients,
                                   float* firsts, float* seconds, float* values, rounded_values copies) {
  earlier.wait();
  if (skips(control.skip)) return;
  const arena_piece piece = pieces[blockIdx.x];
  const adam_element step{*numbers};
  const float scale = factor_of(control.gradient_scale);
  const bool decays = piece.decays != 0;
  const float* gradient = gradients + piece.offset;
  float *first = firsts + piece.offset, *second = seconds + piece.offset, *value = values + piece.offset;
  const rounded_piece rounded{copies, piece.rounded};
  for_block_vectors(
      piece.size, vector_head(piece.size, gradient, first, second, value),
      [&](index_t i) {
        const vector<float> g = load_vector(gradient + i);
        vector<float> m = load_vector(first + i), v = load_vector(second + i), x = load_vector(value + i);
        for (int k = 0; k < 4; ++k) step(x[k], m[k], v[k], g[k] * scale, decays);
        store_vector(first + i, m);
        store_vector(second + i, v);
        store_vector(value + i, x);
        rounded.store(i, x);
      },
      [&](index_t i) {
        step(value[i], first[i], second[i], gradient[i] * scale, decays);
        rounded.store(i, value[i]);
      });
}

void adam(cudaStream_t stream, const adam_numbers* numbers, const arena_piece* pieces, index_t count,
          const step_control& control, const float* gradients, float* first, float* second, float* values,
          const rounded_values& rounded) {
  launch(stream, {static_cast<unsigned>(count), optimizer_threads}, adam_kernel, numbers, pieces, control,
         gradients, first, second, values, rounded);
}

// ---------------------------------------------------------------------------------------------------------
// Norm and scale of the gradient

/// Block b sums the squares of part b of `size` elements, cut into gridDim.x parts, and writes the sum to
/// sums[b].
static __global__ void square_sums_kernel(grid_dependency earlier, const float* x, index_t size,
                                          double* sums) {
  earlier.wait();
  const index_t begin = part_begin(size, gridDim.x, blockIdx.x);
  const index_t count = part_begin(size, gridDim.x, blockIdx.x + 1) - begin;
  const float* from = x + begin;
  double sum = 0.0;
  const auto add = [&](float value) { sum += static_cast<double>(value) * static_cast<double>(value); };
  for_block_vectors(
      count, vector_head(count, from),
      [&](index_t i) {
        const vector<float> values = load_vector(from + i);
        for (int k = 0; k < 4; ++k) add(values[k]);
      },
      [&](index_t i) { add(from[i]); });
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

/// Grid: one block of 256 threads.
static __global__ void gradient_facts_kernel(grid_dependency earlier, const double* sums, index_t parts,
                                             const float* inverse, double max_norm, gradient_facts* facts) {
  earlier.wait();
  double sum = 0.0;
  for (index_t part = threadIdx.x; part < parts; part += blockDim.x) sum += sums[part];
  sum = block_sum(sum);
  if (threadIdx.x > 0) return;
  const double unscaled = static_cast<double>(factor_of(inverse)), norm = sqrt(sum) * unscaled;
  const bool finite = norm - norm == 0.0, clips = max_norm > 0.0 && norm > max_norm;
  facts->norm = norm;
  facts->not_finite = finite ? 0 : 1;
  facts->scale = finite ? static_cast<float>(clips ? unscaled * (max_norm / norm) : unscaled) : 1.0F;
}

void gradient_norm(cudaStream_t stream, const float* gradients, index_t size, const float* inverse,
                   double max_norm, double* scratch, gradient_facts* facts) {
  const index_t parts = norm_parts(size);
  launch(stream, {static_cast<unsigned>(parts), optimizer_threads}, square_sums_kernel, gradients, size,
         scratch);
  launch(stream, {1, 256}, gradient_facts_kernel, scratch, parts, inverse, max_norm, facts);
}

/// Grid of this kernel and of unscale_kernel: one-dimensional, 256 threads, four elements per thread and
/// step.
static __global__ void scale_by_kernel(grid_dependency earlier, float* x, index_t size, const float* factor) {
  earlier.wait();
  const float f = *factor;
  if (f == 1.0F) return;
  for_each_vector<float>(
      size, aligned16(x),
      [&](index_t i) {
        vector<float> values = load_vector(x + i);
        for (int k = 0; k < 4; ++k) values[k] *= f;
        store_vector(x + i, values);
      },
      [&](index_t i) { x[i] *= f; });
}

void scale_by(cudaStream_t stream, float* x, index_t size, const float* factor) {
  launch(stream, {blocks_for(size, 4 * index_t{optimizer_threads}), optimizer_threads}, scale_by_kernel, x,
         size, factor);
}

// ---------------------------------------------------------------------------------------------------------
// Loss scaling

/// Sets the flag if a result is not finite; the flag is never cleared here.
static __global__ void unscale_kernel(grid_dependency earlier, float* gradients, index_t size,
                                      const float* inverse, int* not_finite) {
  earlier.wait();
  const float f = *inverse;
  bool bad = false;
  const auto unscaled = [&](float& g) {
    g *= f;
    bad |= !(g - g == 0.0F);
  };
  for_each_vector<float>(
      size, aligned16(gradients),
      [&](index_t i) {
        vector<float> values = load_vector(gradients + i);
        for (int k = 0; k < 4; ++k) unscaled(values[k]);
        store_vector(gradients + i, values);
      },
      [&](index_t i) { unscaled(gradients[i]); });
  if (bad) *not_finite = 1;  // all threads that write, write the same value
}

void unscale(cudaStream_t stream, float* gradients, index_t size, const float* inverse, int* not_finite) {
  launch(stream, {blocks_for(size, 4 * index_t{optimizer_threads}), optimizer_threads}, unscale_kernel,
         gradients, size, inverse, not_finite);
}

/// Grid: one thread.
static __global__ void update_loss_scale_kernel(grid_dependency earlier, loss_scale_constants c,
                                                const int* not_finite, loss_scale* scale) {
  earlier.wait();
  loss_scale s = *scale;
  if (*not_finite != 0) {
    s.value = fmaxf(s.value * c.backoff, c.smallest);
    s.good_steps = 0;
  } else if (++s.good_steps >= c.interval) {
    s.value = fminf(s.value * c.growth, c.largest);
    s.good_steps = 0;
  }
  s.inverse = 1.0F / s.value;
  *scale = s;
}

void update_loss_scale(cudaStream_t stream, const loss_scale_constants& constants, const int* not_finite,
                       loss_scale* scale) {
  launch(stream, {1, 1}, update_loss_scale_kernel, constants, not_finite, scale);
}

PUFFERFISH_KERNELS_END
