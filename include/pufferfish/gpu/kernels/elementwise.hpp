// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of passes over elements: activations, sums, masks, dropout, conversions. Formulas: the headers
/// of ops/ with the same names. All arrays are in device memory; `size` counts elements; where nothing else
/// is said a result may be one of the inputs.

#include <pufferfish/gpu/kernels/elementwise_functors.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// Rows t batch + b (t < steps, b < batch) of `width` elements and where their dropout masks begin in the
/// stream of random numbers: sequences one after the other, however they lie. A plain span is one row.
struct dropout_rows {
  index_t steps, batch, width;
  std::uint64_t first;         ///< position of the first row's first element
  std::uint32_t threshold;     ///< a random word below it drops
  std::uint64_t layer_number;  ///< what context::next_random_stream() gave as the stream

  PUFFERFISH_HOST_DEVICE std::uint64_t position(index_t row) const {
    return first + static_cast<std::uint64_t>((row % batch * steps + row / batch) * width);
  }
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

template <class T>
void fill(cudaStream_t stream, T* y, index_t size, T value);
/// y = factor x.
template <class T>
void scale(cudaStream_t stream, accumulate_t<T> factor, const T* x, T* y, index_t size);

template <class T>
void relu_forward(cudaStream_t stream, const T* x, T* y, index_t size);
template <class T>
void relu_backward(cudaStream_t stream, const T* y, const T* dy, T* dx, index_t size);
template <class T>
void activation_forward(cudaStream_t stream, activation kind, const T* x, T* y, index_t size);
template <class T>
void activation_backward(cudaStream_t stream, activation kind, const T* kept, const T* dy, T* dx,
                         index_t size);

/// y += x, then with `relu` 0 where that is negative.
template <class T>
void add(cudaStream_t stream, const T* x, T* y, index_t size, bool relu);

/// y = x where the mask (see relu_mask.hpp) has a bit, else 0; with `add`, y += that.
template <class T>
void masked(cudaStream_t stream, const T* x, const std::uint32_t* mask, T* y, index_t size, bool add);

/// y = 0 where dropped, else x scale. The random numbers are the layer's in the step that `values` (in device
/// memory) is about.
template <class T>
void dropout(cudaStream_t stream, const T* x, T* y, accumulate_t<T> scale, const dropout_rows& rows,
             const step_values* values);

/// 16-bit formats by their bits (core/scalar.hpp): rounding to nearest, ties to even; a NaN stays one. The
/// two arrays do not overlap.
void to_bfloat16(cudaStream_t stream, const float* x, std::uint16_t* y, index_t size);
void to_float16(cudaStream_t stream, const float* x, std::uint16_t* y, index_t size);
void from_bfloat16(cudaStream_t stream, const std::uint16_t* x, float* y, index_t size);
void from_float16(cudaStream_t stream, const std::uint16_t* x, float* y, index_t size);

PUFFERFISH_KERNELS_END
