// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of <pufferfish/gpu/kernels/embedding/embedding.hpp>. The gradient needs no atomics: positions are
/// sorted by token, windows of positions are summed in parallel, and then the sums of tokens that are in
/// several windows are merged.
///
/// Window w has the positions order[32 w] .. order[32 w + 31]. Row 2 w of `parts` has the window's sum of a
/// token that began in an earlier window, row 2 w + 1 that of a token that continues in the next window.

#include <pufferfish/gpu/kernels/copy/rows.cuh>
#include <pufferfish/gpu/kernels/embedding/embedding.hpp>

PUFFERFISH_KERNELS_BEGIN

inline constexpr int order_threads = 256;

/// Grid: row_grid, one block per row.
template <class T, int Width>
static __global__ void embedding_forward_kernel(grid_dependency earlier, row_array<const T> table,
                                                token_array tokens, index_t columns, row_array<T> y) {
  earlier.wait();
  for_each_row<Width>(tokens.count, columns, [&](index_t n, index_t c) {
    const index_t token = tokens.tokens[n];
    const bool exists = token >= 0 && token < tokens.vocabulary;
    store_row<Width>(y.row(n) + c, exists ? load_row<Width>(table.row(token) + c) : no_row<T, Width>());
  });
}

/// Sort key of position n: its token, or the vocabulary's size if the token adds to no gradient.
__device__ inline index_t token_key(const token_array& tokens, std::int32_t padding, index_t n) {
  const std::int32_t token = tokens.tokens[n];
  return token < 0 || token >= tokens.vocabulary || token == padding ? tokens.vocabulary
                                                                     : static_cast<index_t>(token);
}

/// Thread t of block b has position n = 256 b + t. The thread counts the positions that precede n in the
/// order, 256 keys at a time from shared memory, and writes n to the place with that number.
static __global__ void embedding_order_kernel(grid_dependency earlier, token_array tokens,
                                              std::int32_t padding, index_t* order) {
  earlier.wait();
  __shared__ std::int32_t keys[order_threads];
  const auto key = [&](index_t n) {
    return n < tokens.count ? static_cast<std::int32_t>(token_key(tokens, padding, n)) : INT32_MAX;
  };
  const index_t block = static_cast<index_t>(blockIdx.x) * order_threads;
  const index_t n = block + block_thread();
  const std::int32_t own = key(n);
  index_t place = 0;
  for (index_t first = 0; first < tokens.count; first += order_threads) {
    keys[block_thread()] = key(first + block_thread());
    __syncthreads();
    // Equal keys count if their position is smaller: all keys of a block, none, or those before this
    // thread's.
    const int equal = first < block ? order_threads : first > block ? 0 : block_thread();
    int before = 0;
    for (int i = 0; i < order_threads; ++i) before += keys[i] < own || (keys[i] == own && i < equal) ? 1 : 0;
    place += before;
    __syncthreads();
  }
  if (n < tokens.count) order[place] = n;
}

/// The positions of a window of the order, their keys, and the keys of one neighbour on each side.
struct order_window {
  index_t begin, end;
  index_t keys[embedding_window + 2];  ///< keys[0] is the key before the window, -1 if there is none
  index_t places[embedding_window];

  /// Key of place k of the order, begin - 1 <= k <= end.
  __device__ index_t key(index_t k) const { return keys[k - begin + 1]; }
};

/// Reads window `number` of the order; ends with a barrier.
__device__ inline void read_window(const token_array& tokens, std::int32_t padding, const index_t* order,
                                   index_t number, order_window& window) {
  const index_t begin = number * embedding_window;
  const index_t end = begin + embedding_window < tokens.count ? begin + embedding_window : tokens.count;
  if (block_thread() == 0) {
    window.begin = begin;
    window.end = end;
  }
  for (index_t i = block_thread(); i < embedding_window + 2; i += block_threads()) {
    const index_t k = begin + i - 1;
    const bool exists = k >= 0 && k < tokens.count;
    const index_t place = exists ? order[k] : 0;
    window.keys[i] = exists ? token_key(tokens, padding, place) : -1;
    if (k >= begin && k < end) window.places[k - begin] = place;
  }
  __syncthreads();
}

/// Writes sums to a row of the table, or adds them to the row.
template <int Width, class T>
__device__ inline void store_row_sum(row_values<T, Width> sums, bool add, T* to) {
  if (add) {
    const row_values<T, Width> old = load_row<Width>(to);
    for (int i = 0; i < Width; ++i) sums[i] += old[i];
  }
  store_row<Width>(to, sums);
}

/// Sums the rows of window w by token. The sum of a token that occurs in no other window is stored in the
/// table; of a token that began in an earlier window, in row 2 w of `parts`; of a token that begins in window
/// w and continues in the next one, in row 2 w + 1. Grid (windows, tiles of columns): a thread has Width
/// columns of all positions of window blockIdx.x.
template <class T, int Width>
static __global__ void embedding_window_kernel(grid_dependency earlier, token_array tokens,
                                               std::int32_t padding, const index_t* order,
                                               row_array<const T> dy, index_t columns, bool add,
                                               accumulate_t<T>* parts, row_array<accumulate_t<T>> dtable) {
  earlier.wait();
  __shared__ order_window window;
  const index_t number = static_cast<index_t>(blockIdx.x);
  read_window(tokens, padding, order, number, window);
  const index_t c =
      (static_cast<index_t>(blockIdx.y) * static_cast<index_t>(blockDim.x) + threadIdx.x) * Width;
  if (c >= columns) return;
  row_values<T, Width> sums = {};
  bool before = window.key(window.begin - 1) == window.key(window.begin);
  for (index_t k = window.begin; k < window.end; ++k) {
    const index_t key = window.key(k);
    if (key == tokens.vocabulary) return;
    const row_values<T, Width> values = load_row<Width>(dy.row(window.places[k - window.begin]) + c);
    for (int i = 0; i < Width; ++i) sums[i] += values[i];
    const bool last = window.key(k + 1) != key;
    if (!last && k + 1 < window.end) continue;
    if (before || !last) {
      store_row<Width>(parts + (2 * number + (before ? 0 : 1)) * columns + c, sums);
    } else {
      store_row_sum<Width, accumulate_t<T>>(sums, add, dtable.row(key) + c);
    }
    before = false;
    sums = {};
  }
}

/// Adds the parts of a window's last token, if the token begins in this window and continues in the next one.
/// The grid is that of embedding_window_kernel, which must have ended. Parts are added in double, in the
/// order of windows.
template <class T, int Width>
static __global__ void embedding_merge_kernel(grid_dependency earlier, token_array tokens,
                                              std::int32_t padding, const index_t* order, index_t columns,
                                              bool add, const accumulate_t<T>* parts,
                                              row_array<accumulate_t<T>> dtable) {
  earlier.wait();
  __shared__ order_window window;
  const index_t number = static_cast<index_t>(blockIdx.x);
  read_window(tokens, padding, order, number, window);
  const index_t key = window.key(window.end - 1);
  const index_t c =
      (static_cast<index_t>(blockIdx.y) * static_cast<index_t>(blockDim.x) + threadIdx.x) * Width;
  if (key == tokens.vocabulary || window.key(window.end) != key || window.key(window.begin - 1) == key ||
      c >= columns) {
    return;
  }
  lanes<double, Width> totals = {};
  const auto take = [&](index_t part) {
    const row_values<T, Width> values = load_row<Width>(parts + part * columns + c);
    for (int i = 0; i < Width; ++i) totals[i] += static_cast<double>(values[i]);
  };
  take(2 * number + 1);
  for (index_t next = number + 1; next * embedding_window < tokens.count &&
                                  token_key(tokens, padding, order[next * embedding_window]) == key;
       ++next) {
    take(2 * next);
  }
  row_values<T, Width> sums;
  for (int i = 0; i < Width; ++i) sums[i] = static_cast<accumulate_t<T>>(totals[i]);
  store_row_sum<Width, accumulate_t<T>>(sums, add, dtable.row(key) + c);
}

template <class T>
void embedding_forward(cudaStream_t stream, row_array<const T> table, const token_array& tokens,
                       index_t columns, row_array<T> y) {
  const launch_site site(stream, "embedding_forward");
  with_width<T>(rows_in_vectors<T>(columns, table, y), [&](auto width) {
    launch(site, row_grid(tokens.count, columns, width), embedding_forward_kernel<T, width>, table, tokens,
           columns, y);
  });
}

void embedding_order(cudaStream_t stream, const token_array& tokens, std::int32_t padding, index_t* order) {
  launch(stream, {dim3(static_cast<unsigned>(ceil_div(tokens.count, order_threads))), dim3(order_threads)},
         embedding_order_kernel, tokens, padding, order);
}

/// Grid: (windows of 32 positions, tiles of columns), up to 128 threads, for both launches.
template <class T>
void embedding_backward(cudaStream_t stream, const token_array& tokens, std::int32_t padding,
                        const index_t* order, row_array<const T> dy, index_t columns, bool add,
                        accumulate_t<T>* parts, row_array<accumulate_t<T>> dtable) {
  const launch_site site(stream, "embedding_backward");
  if (columns == 0) return;
  const row_array<accumulate_t<T>> rows_of_parts{parts, columns};
  with_width<T>(rows_in_vectors<T>(columns, dy, dtable, rows_of_parts), [&](auto width) {
    const unsigned threads = row_threads(columns, width, 128);
    const grid windows{dim3(static_cast<unsigned>(ceil_div(tokens.count, embedding_window)),
                            static_cast<unsigned>(ceil_div(columns, static_cast<index_t>(threads) * width))),
                       dim3(threads)};
    launch(site, windows, embedding_window_kernel<T, width>, tokens, padding, order, dy, columns, add, parts,
           dtable);
    launch(site, windows, embedding_merge_kernel<T, width>, tokens, padding, order, columns, add, parts,
           dtable);
  });
}

#define PUFFERFISH_INSTANTIATE(T)                                                                     \
  template void embedding_forward<T>(cudaStream_t, row_array<const T>, const token_array&, index_t,   \
                                     row_array<T>);                                                   \
  template void embedding_backward<T>(cudaStream_t, const token_array&, std::int32_t, const index_t*, \
                                      row_array<const T>, index_t, bool, accumulate_t<T>*,            \
                                      row_array<accumulate_t<T>>);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
