// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of exchange.hpp. Their speed is limited by the memory bandwidth, which is above that of a network.
///
/// All grids have one dimension and 256 threads a block; threads loop if there are more elements. No kernel
/// uses shared memory. The only atomic operation is a minimum of integers, so results do not depend on the
/// order of threads.

#include <pufferfish/gpu/kernels/comm/exchange.hpp>
#include <pufferfish/gpu/kernels/launch.cuh>
#include <pufferfish/gpu/kernels/narrow.cuh>

PUFFERFISH_KERNELS_BEGIN

inline constexpr unsigned exchange_threads = 256;

/// A grid of 256 threads a block, with per_thread elements for each thread and step.
inline grid exchange_grid(index_t size, index_t per_thread = 1) {
  return {blocks_for(size, per_thread * index_t{exchange_threads}), exchange_threads};
}

/// Grid: exchange_grid with one vector per thread and step.
template <class T>
static __global__ void multiply_kernel(grid_dependency earlier, T* x, index_t size, T factor) {
  earlier.wait();
  for_each_vector<T>(
      size, aligned16(x),
      [&](index_t i) {
        vector<T> values = load_vector(x + i);
        for (int k = 0; k < vector_width<T>; ++k) values[k] *= factor;
        store_vector(x + i, values);
      },
      [&](index_t i) { x[i] *= factor; });
}

template <class T>
void multiply(cudaStream_t stream, T* x, index_t size, T factor) {
  if (factor != T(1))
    launch(stream, exchange_grid(size, vector_width<T>), multiply_kernel<T>, x, size, factor);
}

/// Grid of this kernel and the next two: exchange_grid, one element per thread and step.
template <class Wire, class T>
static __global__ void narrow_kernel(grid_dependency earlier, const T* from, std::uint16_t* to,
                                     index_t size) {
  earlier.wait();
  for (index_t i = grid_thread(); i < size; i += grid_threads()) {
    to[i] = Wire::narrow(static_cast<float>(from[i]));
  }
}
template <class Wire, class T>
static __global__ void widen_kernel(grid_dependency earlier, const std::uint16_t* from, T* to, index_t size,
                                    T factor) {
  earlier.wait();
  for (index_t i = grid_thread(); i < size; i += grid_threads()) {
    to[i] = static_cast<T>(Wire::widen(from[i])) * factor;
  }
}
/// Element i of the sum: own_i + others_i + others_(step + i) + ..., computed in T in this order.
template <class Wire, class T>
static __global__ void add_narrow_kernel(grid_dependency earlier, const std::uint16_t* others, int count,
                                         index_t step, T* own, std::uint16_t* sum, index_t size, T factor) {
  earlier.wait();
  for (index_t i = grid_thread(); i < size; i += grid_threads()) {
    T value = own[i];
    for (int other = 0; other < count; ++other) {
      value += static_cast<T>(Wire::widen(others[other * step + i]));
    }
    const std::uint16_t bits = Wire::narrow(static_cast<float>(value));
    sum[i] = bits;
    own[i] = static_cast<T>(Wire::widen(bits)) * factor;
  }
}

template <class T>
void narrow(cudaStream_t stream, wire_format wire, const T* from, std::uint16_t* to, index_t size) {
  const auto kernel = wire == wire_format::bf16 ? narrow_kernel<bf16_bits, T> : narrow_kernel<fp16_bits, T>;
  launch(stream, exchange_grid(size), kernel, from, to, size);
}
template <class T>
void widen(cudaStream_t stream, wire_format wire, const std::uint16_t* from, T* to, index_t size, T factor) {
  const auto kernel = wire == wire_format::bf16 ? widen_kernel<bf16_bits, T> : widen_kernel<fp16_bits, T>;
  launch(stream, exchange_grid(size), kernel, from, to, size, factor);
}
template <class T>
void add_narrow(cudaStream_t stream, wire_format wire, const std::uint16_t* others, int count, index_t step,
                T* own, std::uint16_t* sum, index_t size, T factor) {
  const auto kernel =
      wire == wire_format::bf16 ? add_narrow_kernel<bf16_bits, T> : add_narrow_kernel<fp16_bits, T>;
  launch(stream, exchange_grid(size), kernel, others, count, step, own, sum, size, factor);
}

/// Grid: exchange_grid. A thread stops at its first element that is not finite; the smallest position of all
/// threads is kept by atomicMin.
template <class T>
static __global__ void find_nonfinite_kernel(grid_dependency earlier, const T* x, index_t size,
                                             std::uint64_t begin, std::uint64_t* first) {
  earlier.wait();
  index_t found = size;
  for (index_t i = grid_thread(); i < size && found == size; i += grid_threads()) {
    if (!isfinite(x[i])) found = i;
  }
  // The minimum of integers does not depend on the order.
  if (found < size) {
    atomicMin(reinterpret_cast<unsigned long long*>(first),
              static_cast<unsigned long long>(begin + static_cast<std::uint64_t>(found)));
  }
}
template <class T>
void find_nonfinite(cudaStream_t stream, const T* x, index_t size, std::uint64_t begin,
                    std::uint64_t* first) {
  launch(stream, exchange_grid(size), find_nonfinite_kernel<T>, x, size, begin, first);
}

/// One thread; likewise the two kernels after this one.
static __global__ void decide_skip_kernel(grid_dependency earlier, const std::uint64_t* found, int count,
                                          int* skip) {
  earlier.wait();
  bool finite = true;
  for (int i = 0; i < count; ++i) finite = finite && found[i] == all_finite;
  *skip = finite ? 0 : 1;
}
void decide_skip(cudaStream_t stream, const std::uint64_t* found, int count, int* skip) {
  launch(stream, {1, 1}, decide_skip_kernel, found, count, skip);
}

static __global__ void join_flag_kernel(grid_dependency earlier, const int* other, int* flag) {
  earlier.wait();
  if (*other != 0) *flag = 1;
}
void join_flag(cudaStream_t stream, const int* other, int* flag) {
  launch(stream, {1, 1}, join_flag_kernel, other, flag);
}

static __global__ void tag_with_rank_kernel(grid_dependency earlier, const std::uint64_t* from,
                                            std::uint64_t rank, std::uint64_t* to) {
  earlier.wait();
  *to = *from == all_finite ? all_finite : (rank << 40) | *from;
}
void tag_with_rank(cudaStream_t stream, const std::uint64_t* from, std::uint64_t rank, std::uint64_t* to) {
  launch(stream, {1, 1}, tag_with_rank_kernel, from, rank, to);
}

template void multiply<float>(cudaStream_t, float*, index_t, float);
template void multiply<double>(cudaStream_t, double*, index_t, double);
template void narrow<float>(cudaStream_t, wire_format, const float*, std::uint16_t*, index_t);
template void narrow<double>(cudaStream_t, wire_format, const double*, std::uint16_t*, index_t);
template void widen<float>(cudaStream_t, wire_format, const std::uint16_t*, float*, index_t, float);
template void widen<double>(cudaStream_t, wire_format, const std::uint16_t*, double*, index_t, double);
template void add_narrow<float>(cudaStream_t, wire_format, const std::uint16_t*, int, index_t, float*,
                                std::uint16_t*, index_t, float);
template void add_narrow<double>(cudaStream_t, wire_format, const std::uint16_t*, int, index_t, double*,
                                 std::uint16_t*, index_t, double);
template void find_nonfinite<float>(cudaStream_t, const float*, index_t, std::uint64_t, std::uint64_t*);
template void find_nonfinite<double>(cudaStream_t, const double*, index_t, std::uint64_t, std::uint64_t*);

PUFFERFISH_KERNELS_END
