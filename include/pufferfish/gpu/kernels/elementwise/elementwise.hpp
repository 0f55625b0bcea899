// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of elementwise passes: activations, sums, masks, dropout, conversions. Formulas: the headers of
/// ops/ with the same names. All arrays are in device memory. `size` is a number of elements. Unless said
/// otherwise, a result may be one of the inputs.

#include <pufferfish/gpu/kernels/elementwise/elementwise_functors.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Rows t batch + b (t < steps, b < batch) of `width` elements, and the first position of each row in the
/// stream of random numbers. Positions go through one sequence b after the other. A plain span is one row.
struct dropout_rows {
  index_t steps, batch, width;
  std::uint64_t first;         ///< position of the first row's first element
  std::uint32_t threshold;     ///< elements with a smaller random word are dropped
  std::uint64_t layer_number;  ///< number of the layer: the stream of context::next_random_stream()

  PUFFERFISH_HOST_DEVICE std::uint64_t position(index_t row) const {
    return first + static_cast<std::uint64_t>((row % batch * steps + row / batch) * width);
  }
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// y_i = value.
template <class T>
void fill(cudaStream_t stream, T* y, index_t size, T value);
/// y = factor x.
template <class T>
void scale(cudaStream_t stream, accumulate_t<T> factor, const T* x, T* y, index_t size);

/// y = max(x, 0); dx = dy where y > 0 (or y is NaN), else 0.
template <class T>
void relu_forward(cudaStream_t stream, const T* x, T* y, index_t size);
template <class T>
void relu_backward(cudaStream_t stream, const T* y, const T* dy, T* dx, index_t size);
/// y = f(x); dx = f'(x) dy, where `kept` is x for gelu and gelu_tanh, y for tanh and sigmoid.
template <class T>
void activation_forward(cudaStream_t stream, activation kind, const T* x, T* y, index_t size);
template <class T>
void activation_backward(cudaStream_t stream, activation kind, const T* kept, const T* dy, T* dx,
                         index_t size);

/// y += x; with `relu`, then 0 where y is negative.
template <class T>
void add(cudaStream_t stream, const T* x, T* y, index_t size, bool relu);

/// y = x where the mask (see relu_mask.hpp) has a bit, else 0; with `add`, adds this to y.
template <class T>
void masked(cudaStream_t stream, const T* x, const std::uint32_t* mask, T* y, index_t size, bool add);

/// y = 0 where dropped, else x scale. The random numbers are those of the layer in
/// the step of `values` (in device memory).
template <class T>
void dropout(cudaStream_t stream, const T* x, T* y, accumulate_t<T> scale, const dropout_rows& rows,
             const step_values* values);

/// 16-bit formats as their bits (core/scalar.hpp): rounding to nearest, ties to even; a NaN remains a NaN.
/// The two arrays do not overlap.
void to_bfloat16(cudaStream_t stream, const float* x, std::uint16_t* y, index_t size);
void to_float16(cudaStream_t stream, const float* x, std::uint16_t* y, index_t size);
void from_bfloat16(cudaStream_t stream, const std::uint16_t* x, float* y, index_t size);
void from_float16(cudaStream_t stream, const std::uint16_t* x, float* y, index_t size);

PUFFERFISH_KERNELS_END
