// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Launchers of elementwise passes: activations, sums, masks, dropout, conversions. The formulas are in the
/// headers of ops/ with the same names. All arrays are in device memory. `size` is a number of elements.
/// Unless a comment excludes it, a result may be one of the inputs. Each launcher throws backend_error if its
/// launch fails.

#include <pufferfish/gpu/kernels/elementwise/elementwise_functors.hpp>

PUFFERFISH_KERNEL_TYPES_BEGIN

/// The rows of a sequence batch, and the position of each row in the stream of random numbers. Row t batch +
/// b (t < steps, b < batch) has `width` elements. Positions run through all steps of one sequence b, then
/// through those of the next sequence. A plain span of elements is one row.
struct dropout_rows {
  index_t steps, batch, width;
  std::uint64_t first;         ///< position of the first row's first element
  std::uint32_t threshold;     ///< elements with a smaller random word are dropped
  std::uint64_t layer_number;  ///< number of the layer: the stream of context::next_random_stream()

  /// Position of the first element of a row.
  PUFFERFISH_HOST_DEVICE std::uint64_t position(index_t row) const {
    return first + static_cast<std::uint64_t>((row % batch * steps + row / batch) * width);
  }
};

PUFFERFISH_KERNEL_TYPES_END

PUFFERFISH_KERNELS_BEGIN

/// y_i = value for i < size.
template <class T>
void fill(cudaStream_t stream, T* y, index_t size, T value);
/// y_i = factor x_i for i < size.
template <class T>
void scale(cudaStream_t stream, accumulate_t<T> factor, const T* x, T* y, index_t size);

/// y_i = max(x_i, 0); NaN for a NaN.
template <class T>
void relu_forward(cudaStream_t stream, const T* x, T* y, index_t size);
/// dx_i = dy_i where y_i > 0 or y_i is NaN, else 0.
template <class T>
void relu_backward(cudaStream_t stream, const T* y, const T* dy, T* dx, index_t size);
/// y_i = f(x_i) for the activation f of `kind`.
template <class T>
void activation_forward(cudaStream_t stream, activation kind, const T* x, T* y, index_t size);
/// dx_i = f'(x_i) dy_i, where `kept` is x for gelu and gelu_tanh, and y for tanh and sigmoid.
template <class T>
void activation_backward(cudaStream_t stream, activation kind, const T* kept, const T* dy, T* dx,
                         index_t size);

/// y_i += x_i; with `relu`, negative results become 0.
template <class T>
void add(cudaStream_t stream, const T* x, T* y, index_t size, bool relu);

/// y_i = the sum over t < count of terms[t step + i], or with `add` y_i += that sum. The sum begins with y_i,
/// runs in the order of t in accumulate_t<T>, and is rounded once. y does not overlap the terms.
template <class T>
void add_terms(cudaStream_t stream, const T* terms, index_t step, int count, T* y, index_t size, bool add);

/// y_i = x_i where the mask (see relu_mask.hpp) has a set bit, else 0. With `add`, this value is added to
/// y_i.
template <class T>
void masked(cudaStream_t stream, const T* x, const std::uint32_t* mask, T* y, index_t size, bool add);

/// y_i = 0 where element i is dropped, else x_i scale. The random numbers are those of layer
/// rows.layer_number in the step of `values`, which are in device memory.
template <class T>
void dropout(cudaStream_t stream, const T* x, T* y, accumulate_t<T> scale, const dropout_rows& rows,
             const step_values* values);

/// Rounds floats to the bits of bfloat16 (core/scalar.hpp): to nearest, ties to even; a NaN remains a NaN.
/// The two arrays must not overlap. The same holds for the three functions below.
void to_bfloat16(cudaStream_t stream, const float* x, std::uint16_t* y, index_t size);
void to_float16(cudaStream_t stream, const float* x, std::uint16_t* y, index_t size);
void from_bfloat16(cudaStream_t stream, const std::uint16_t* x, float* y, index_t size);
void from_float16(cudaStream_t stream, const std::uint16_t* x, float* y, index_t size);

PUFFERFISH_KERNELS_END
