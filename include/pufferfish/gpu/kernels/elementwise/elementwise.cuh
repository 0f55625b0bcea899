// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of elementwise.hpp. Memory bandwidth limits their speed. They use accesses of 16 bytes if all
/// arrays are aligned to 16 bytes.
///
/// Grids have one dimension and 256 threads a block (dropout: two dimensions), at most 65536 blocks along x;
/// threads then loop. No kernel uses shared memory.

#include <pufferfish/gpu/kernels/elementwise/elementwise.hpp>
#include <pufferfish/gpu/kernels/elementwise/relu_mask.hpp>
#include <pufferfish/gpu/kernels/gemm/tile_layout.cuh>
#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/kernels/narrow.cuh>
#include <pufferfish/gpu/kernels/random.hpp>

PUFFERFISH_KERNELS_BEGIN

inline constexpr unsigned element_threads = 256;

/// A grid for passes with one vector per thread: 256 threads a block, at most 65536 blocks, whose threads
/// loop if there are more vectors.
template <class T>
inline grid element_grid(index_t size) {
  return {blocks_for(size, index_t{element_threads} * vector_width<T>), element_threads};
}

// ---------------------------------------------------------------------------------------------------------
// y = f(x...)

/// y_k = f(x_k...) for the elements of one vector, computed in accumulate_t<T>.
template <class F, class T, class... X>
__device__ inline vector<T> map_vectors(const F& f, const vector<X>&... x) {
  vector<T> y;
  for (int k = 0; k < vector_width<T>; ++k) y[k] = static_cast<T>(f(static_cast<accumulate_t<T>>(x[k])...));
  return y;
}

/// Grid: element_grid. Of N threads, thread t computes the vectors that begin at elements t width, (t + N)
/// width, ... Each element is read before it is written, by the same thread, so y may be one of the x.
template <class F, class T, class... X>
static __global__ void map_kernel(grid_dependency earlier, F f, index_t size, bool vectors, T* y,
                                  const X*... x) {
  earlier.wait();
  for_each_vector<T>(
      size, vectors, [&](index_t i) { store_vector(y + i, map_vectors<F, T>(f, load_vector(x + i)...)); },
      [&](index_t i) { y[i] = static_cast<T>(f(static_cast<accumulate_t<T>>(x[i])...)); });
}

/// y_i = f(x_i...) for i < size, computed in accumulate_t<T>. `stream` also names the calling launcher.
template <class T, class F, class... X>
void map(const launch_site& stream, F f, index_t size, T* y, const X*... x) {
  launch(stream, element_grid<T>(size), map_kernel<F, T, X...>, f, size, aligned16(y, x...), y, x...);
}

/// A function without arguments that returns `value`, for fill.
template <class A>
struct constant {
  A value;
  __device__ A operator()() const { return value; }
};

template <class T>
void fill(cudaStream_t stream, T* y, index_t size, T value) {
  using A = accumulate_t<T>;
  map<T>(stream, constant<A>{static_cast<A>(value)}, size, y);
}

template <class T>
void scale(cudaStream_t stream, accumulate_t<T> factor, const T* x, T* y, index_t size) {
  using A = accumulate_t<T>;
  map<T>(stream, product_with<A>{factor}, size, y, x);
}

template <class T>
void relu_forward(cudaStream_t stream, const T* x, T* y, index_t size) {
  map<T>(stream, relu_of(), size, y, x);
}
template <class T>
void relu_backward(cudaStream_t stream, const T* y, const T* dy, T* dx, index_t size) {
  map<T>(stream, relu_gradient_of(), size, dx, y, dy);
}

template <class T>
void activation_forward(cudaStream_t stream, activation kind, const T* x, T* y, index_t size) {
  switch (kind) {
    case activation::gelu:
      return map<T>(stream, activation_of<activation::gelu>(), size, y, x);
    case activation::gelu_tanh:
      return map<T>(stream, activation_of<activation::gelu_tanh>(), size, y, x);
    case activation::tanh:
      return map<T>(stream, activation_of<activation::tanh>(), size, y, x);
    case activation::sigmoid:
      return map<T>(stream, activation_of<activation::sigmoid>(), size, y, x);
  }
}
template <class T>
void activation_backward(cudaStream_t stream, activation kind, const T* kept, const T* dy, T* dx,
                         index_t size) {
  const auto run = [&](auto f) { map<T>(launch_site(stream, "activation_backward"), f, size, dx, kept, dy); };
  switch (kind) {
    case activation::gelu:
      return run(activation_gradient_of<activation::gelu>());
    case activation::gelu_tanh:
      return run(activation_gradient_of<activation::gelu_tanh>());
    case activation::tanh:
      return run(activation_gradient_of<activation::tanh>());
    case activation::sigmoid:
      return run(activation_gradient_of<activation::sigmoid>());
  }
}

template <class T>
void add(cudaStream_t stream, const T* x, T* y, index_t size, bool relu) {
  const T* before = y;
  if (relu) return map<T>(stream, relu_of_sum(), size, y, before, x);
  map<T>(stream, sum_of(), size, y, before, x);
}

/// Grid: element_grid. A thread adds the terms of its elements one after another.
template <class T>
static __global__ void add_terms_kernel(grid_dependency earlier, const T* terms, index_t step, int count,
                                        T* y, index_t size, bool add, bool vectors) {
  earlier.wait();
  using A = accumulate_t<T>;
  for_each_vector<T>(
      size, vectors,
      [&](index_t i) {
        array_of<A, vector_width<T>> sum = {};
        const auto take = [&](const T* from) {
          const vector<T> values = load_vector(from);
          for (int k = 0; k < vector_width<T>; ++k) sum[k] += static_cast<A>(values[k]);
        };
        if (add) take(y + i);
        for (int t = 0; t < count; ++t) take(terms + t * step + i);
        vector<T> result;
        for (int k = 0; k < vector_width<T>; ++k) result[k] = static_cast<T>(sum[k]);
        store_vector(y + i, result);
      },
      [&](index_t i) {
        A sum = add ? static_cast<A>(y[i]) : A(0);
        for (int t = 0; t < count; ++t) sum += static_cast<A>(terms[t * step + i]);
        y[i] = static_cast<T>(sum);
      });
}

template <class T>
void add_terms(cudaStream_t stream, const T* terms, index_t step, int count, T* y, index_t size, bool add) {
  launch(stream, element_grid<T>(size), add_terms_kernel<T>, terms, step, count, y, size, add,
         aligned16(y, terms) && step % vector_width<T> == 0);
}

// ---------------------------------------------------------------------------------------------------------
// Masks

/// Grid: element_grid. Bit i % 32 of word i / 32 of the mask belongs to element i. The elements of one vector
/// have their bits in one word.
template <bool Add, class T>
static __global__ void masked_kernel(grid_dependency earlier, const T* x, const std::uint32_t* mask, T* y,
                                     index_t size, bool vectors) {
  earlier.wait();
  for_each_vector<T>(
      size, vectors,
      [&](index_t i) {
        const std::uint32_t bits = mask_bits(mask, i);
        const vector<T> from = load_vector(x + i);
        vector<T> to;
        if constexpr (Add) to = load_vector(y + i);
        for (int k = 0; k < vector_width<T>; ++k) {
          const T value = ((bits >> k) & 1U) != 0 ? from[k] : T(0.0F);
          to[k] = Add ? to[k] + value : value;
        }
        store_vector(y + i, to);
      },
      [&](index_t i) {
        const T value = mask_passes(mask, i) ? x[i] : T(0.0F);
        y[i] = Add ? y[i] + value : value;
      });
}

template <class T>
void masked(cudaStream_t stream, const T* x, const std::uint32_t* mask, T* y, index_t size, bool add) {
  launch(stream, element_grid<T>(size), add ? masked_kernel<true, T> : masked_kernel<false, T>, x, mask, y,
         size, aligned16(x, y));
}

// ---------------------------------------------------------------------------------------------------------
// Dropout

/// Two neighbouring elements that are accessed at once.
template <class T>
struct alignas(2 * sizeof(T)) neighbours {
  T values[2];
};

/// Applies dropout to the four elements of one block of random numbers: two pairs of neighbours, at positions
/// 32 g + 2 i and 16 after that. `at`: column of the first element, which may be negative; `width`: columns
/// of the row. Word 2 h + l of the block belongs to column at + 16 h + l.
template <class T>
__device__ inline void drop_block(const T* x, T* y, accumulate_t<T> scale, std::uint32_t threshold,
                                  const random_block& block, index_t at, index_t width) {
  using A = accumulate_t<T>;
  const auto kept = [&](T value, int word) {
    return block.words[word] < threshold ? T(0.0F) : static_cast<T>(static_cast<A>(value) * scale);
  };
  for (int half = 0; half < 2; ++half) {
    const index_t i = at + 16 * half;
    const auto address = reinterpret_cast<std::uintptr_t>(x + i) | reinterpret_cast<std::uintptr_t>(y + i);
    if (i >= 0 && i + 1 < width && address % sizeof(neighbours<T>) == 0) {
      auto pair = *reinterpret_cast<const neighbours<T>*>(x + i);
      for (int k = 0; k < 2; ++k) pair.values[k] = kept(pair.values[k], 2 * half + k);
      *reinterpret_cast<neighbours<T>*>(y + i) = pair;
    } else {
      for (int k = 0; k < 2; ++k) {
        if (i + k >= 0 && i + k < width) y[i + k] = kept(x[i + k], 2 * half + k);
      }
    }
  }
}

/// A thread computes the elements of one block of random numbers at a time. The grid is (blocks of a row /
/// threads, rows up to 32768), with 64 or 256 threads a block. Block j of a row has the four stream positions
/// p, p + 1, p + 16 and p + 17, where p is 32 (first / 32 + j / 8) + 2 (j % 8).
template <class T>
static __global__ void dropout_kernel(grid_dependency earlier, const T* x, T* y, accumulate_t<T> scale,
                                      dropout_rows rows, index_t blocks_in_row, const step_values* values) {
  earlier.wait();
  const random_key key = layer_key(*values, rows.layer_number);
  for (index_t row = blockIdx.y; row < rows.steps * rows.batch; row += gridDim.y) {
    const std::uint64_t first = rows.position(row), group = first / 32;
    const index_t start = row * rows.width;
    for (index_t j = grid_thread(); j < blocks_in_row; j += grid_threads()) {
      const index_t at = 32 * (j / 8) + 2 * (j % 8) - static_cast<index_t>(first % 32);
      if (at + 17 < 0 || at >= rows.width) continue;
      const random_block block = random_block_at(key, group * 8 + static_cast<std::uint64_t>(j));
      drop_block(x + start, y + start, scale, rows.threshold, block, at, rows.width);
    }
  }
}

template <class T>
void dropout(cudaStream_t stream, const T* x, T* y, accumulate_t<T> scale, const dropout_rows& rows,
             const step_values* values) {
  const index_t count = rows.steps * rows.batch;
  if (count == 0 || rows.width == 0) return;
  const index_t blocks_in_row = 8 * (ceil_div(rows.width, 32) + 1);
  const unsigned threads = blocks_in_row < 256 ? 64 : 256;
  const dim3 blocks(blocks_for(blocks_in_row, threads), blocks_for(count, 1, 32768));
  launch(stream, {blocks, threads}, dropout_kernel<T>, x, y, scale, rows, blocks_in_row, values);
}

// ---------------------------------------------------------------------------------------------------------
// Conversions, four elements a thread

/// Rounds a float to the 16-bit format Format.
template <class Format>
struct narrow_element {
  __device__ std::uint16_t operator()(float x) const { return Format::narrow(x); }
};
/// Converts a number of the 16-bit format Format to float.
template <class Format>
struct widen_element {
  __device__ float operator()(std::uint16_t x) const { return Format::widen(x); }
};

/// Four neighbouring elements that are accessed at once.
template <class T>
struct alignas(4 * sizeof(T)) four {
  T values[4];
};

/// y_i = f(x_i) for i < size. Grid: one-dimensional, 256 threads, four neighbouring elements per thread and
/// step. `vectors`: both arrays are aligned to four of their elements.
template <class F, class X, class Y>
static __global__ void convert_kernel(grid_dependency earlier, F f, const X* x, Y* y, index_t size,
                                      bool vectors) {
  earlier.wait();
  const index_t in_vectors = vectors ? size / 4 * 4 : 0;
  for (index_t i = 4 * grid_thread(); i < in_vectors; i += 4 * grid_threads()) {
    const auto from = *reinterpret_cast<const four<X>*>(x + i);
    four<Y> to;
    for (int k = 0; k < 4; ++k) to.values[k] = f(from.values[k]);
    *reinterpret_cast<four<Y>*>(y + i) = to;
  }
  for (index_t i = in_vectors + grid_thread(); i < size; i += grid_threads()) y[i] = f(x[i]);
}

/// y_i = f(x_i) for i < size, by convert_kernel.
template <class F, class X, class Y>
void convert(const launch_site& stream, F f, const X* x, Y* y, index_t size) {
  const bool vectors = reinterpret_cast<std::uintptr_t>(x) % sizeof(four<X>) == 0 &&
                       reinterpret_cast<std::uintptr_t>(y) % sizeof(four<Y>) == 0;
  launch(stream, {blocks_for(size, 4 * index_t{element_threads}), element_threads}, convert_kernel<F, X, Y>,
         f, x, y, size, vectors);
}

void to_bfloat16(cudaStream_t stream, const float* x, std::uint16_t* y, index_t size) {
  convert(stream, narrow_element<bf16_bits>(), x, y, size);
}
void to_float16(cudaStream_t stream, const float* x, std::uint16_t* y, index_t size) {
  convert(stream, narrow_element<fp16_bits>(), x, y, size);
}
void from_bfloat16(cudaStream_t stream, const std::uint16_t* x, float* y, index_t size) {
  convert(stream, widen_element<bf16_bits>(), x, y, size);
}
void from_float16(cudaStream_t stream, const std::uint16_t* x, float* y, index_t size) {
  convert(stream, widen_element<fp16_bits>(), x, y, size);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                  \
  template void fill<T>(cudaStream_t, T*, index_t, T);                                             \
  template void scale<T>(cudaStream_t, accumulate_t<T>, const T*, T*, index_t);                    \
  template void relu_forward<T>(cudaStream_t, const T*, T*, index_t);                              \
  template void relu_backward<T>(cudaStream_t, const T*, const T*, T*, index_t);                   \
  template void activation_forward<T>(cudaStream_t, activation, const T*, T*, index_t);            \
  template void activation_backward<T>(cudaStream_t, activation, const T*, const T*, T*, index_t); \
  template void add_terms<T>(cudaStream_t, const T*, index_t, int, T*, index_t, bool);             \
  template void add<T>(cudaStream_t, const T*, T*, index_t, bool);                                 \
  template void masked<T>(cudaStream_t, const T*, const std::uint32_t*, T*, index_t, bool);        \
  template void dropout<T>(cudaStream_t, const T*, T*, accumulate_t<T>, const dropout_rows&,       \
                           const step_values*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
