// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The emulated device: it executes the library's kernels on the host, so that their tests run, are debugged
/// and are sanitized where there is no GPU (most developers' machines, all of continuous integration). The
/// compiler includes this file before a unit that has kernels in it (-include), and reads the words of CUDA
/// C++ below as ordinary C++; the files beside it stand in for the CUDA runtime and cuBLAS.
///
/// A block's threads are fibres of one host thread, switched at barriers and warp operations only; blocks run
/// one after the other in a scrambled order, those of a cooperative launch by turns between barriers of the
/// grid. What would hang or be undefined on a device ends the program
/// with a message: a barrier that not all threads reach, a shuffle from a lane that is not there, a write
/// past the end of memory. It shows what a kernel computes, and nothing of how fast. What it cannot show:
/// races that none of its schedules has (PUFFERFISH_EMULATED_ORDER=number chooses others), reads of static
/// shared memory before writes (it holds what the block before left; dynamic memory and the device's are
/// NaNs), and limits that ptxas and the device know: registers, launch bounds, static shared memory.

#define PUFFERFISH_EMULATED_DEVICE 1

#include <cuda_runtime_api.h>
#include <math.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <type_traits>

#include <vector_functions.h>

// ---------------------------------------------------------------------------------------------------------
// Words of the language

#undef __host__
#undef __device__
#undef __global__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __grid_constant__
#define __host__
#define __device__
#define __global__
#define __shared__ static  // one block at a time
#define __constant__ static
#define __launch_bounds__(...)
#define __grid_constant__

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

// ---------------------------------------------------------------------------------------------------------
// What the words below call

namespace emulated_device {

using site = std::source_location;

/// Checks a launch as a device does, then executes `thread` for every thread of it, in the stream's order.
/// `together`: a cooperative launch, whose blocks run at once and may call grid_barrier().
cudaError_t launch(cudaStream_t stream, const char* name, dim3 blocks, dim3 threads, std::size_t shared_bytes,
                   bool together, std::function<void()> thread);

/// Waits for all threads of the grid. Ends the program if not all of them come.
void grid_barrier(const site& where = site::current());

/// The block's; filled with NaNs (0xff) before every block.
void* dynamic_shared_memory();

struct votes {
  int count;    ///< threads whose predicate is not zero
  int threads;  ///< of the block
};
/// Waits for all threads of the block.
votes block_barrier(bool predicate, const site& where);

/// Waits for the lanes of `mask` that have not returned. The last one calls complete(slots), where
/// slots[lane] is that lane's `slot` and null for a lane that does not take part.
void warp_exchange(unsigned mask, void* slot, void (*complete)(void* const* slots), const site& where);

/// The calling thread's lane, and its number in its block, x fastest.
int lane();
int thread_of_block();

/// Ends the program unless the address is a multiple of 16.
void check_aligned16(const void* address, const site& where = site::current());

/// Notes that the calling thread has called it, and ends the program if the calling thread has not.
void wait_for_earlier_work();
void check_waited(const site& where = site::current());

/// Ends the program: the kernel, block and thread at work, and why.
[[noreturn]] void misuse(const char* why, const site& where);

struct shuffle_slot {
  std::uint64_t in, out;
  int from;
  const site* where;
};
void shuffle(void* const* slots);

struct vote_slot {
  bool predicate;
  unsigned ballot;
};
void vote(void* const* slots);

template <class T>
T shuffled(unsigned mask, T value, int from, const site& where) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "a shuffle moves up to 8 bytes");
  shuffle_slot slot{0, 0, from, &where};
  std::memcpy(&slot.in, &value, sizeof(T));
  warp_exchange(mask, &slot, shuffle, where);
  std::memcpy(&value, &slot.out, sizeof(T));
  return value;
}

inline unsigned ballot(unsigned mask, bool predicate, const site& where) {
  vote_slot slot{predicate, 0};
  warp_exchange(mask, &slot, vote, where);
  return slot.ballot;
}

// The twins of what async_copy.cuh and mma.cuh say in PTX. A copy arrives when it is waited for, and its
// target holds NaNs until then.
void copy_async(void* to, const void* from, int bytes, bool inside);
void commit_copies();
void wait_for_copies(int under);

std::uint32_t to_tf32(float value);

struct mma_slot {
  float* c;
  const std::uint32_t *a, *b;
};
template <class T>
void multiply(void* const* slots);  // float, __nv_bfloat16, __half

template <class T>
void mma(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
         const site& where = site::current()) {
  mma_slot slot{c, a, b};
  warp_exchange(0xffffffffU, &slot, multiply<T>, where);
}

void load_matrices(std::uint32_t (&words)[4], const void* row, bool transposed,
                   const site& where = site::current());

/// A matrix of blocks of 8 x 8 numbers in shared memory; see block_matrix in warpgroup.cuh.
struct blocks {
  const unsigned char* first;
  int across, along;
};
struct group_slot {
  float* sums;
  int columns;
  blocks left, right;
  bool left_across, right_across;  ///< whether the rows of the blocks are across the depth
  const std::uint32_t* words;      ///< the left operand in registers, or null
};
template <class T>
void group_multiply(void* const* slots);  // __nv_bfloat16, __half

/// The twin of the products in warpgroup.cuh. Each warp computes its own 16 of the 64 rows.
template <class T>
void group_mma(float* sums, int columns, const blocks& left, bool left_across, const std::uint32_t* words,
               const blocks& right, bool right_across, const site& where = site::current()) {
  group_slot slot{sums, columns, left, right, left_across, right_across, words};
  warp_exchange(0xffffffffU, &slot, group_multiply<T>, where);
}

}  // namespace emulated_device

// ---------------------------------------------------------------------------------------------------------
// Synchronisation

#define PUFFERFISH_SITE const emulated_device::site& where = emulated_device::site::current()

inline void __syncthreads(PUFFERFISH_SITE) { emulated_device::block_barrier(false, where); }
inline int __syncthreads_count(int predicate, PUFFERFISH_SITE) {
  return emulated_device::block_barrier(predicate != 0, where).count;
}
inline int __syncthreads_or(int predicate, PUFFERFISH_SITE) {
  return emulated_device::block_barrier(predicate != 0, where).count != 0;
}
inline int __syncthreads_and(int predicate, PUFFERFISH_SITE) {
  const emulated_device::votes all = emulated_device::block_barrier(predicate != 0, where);
  return all.count == all.threads;
}
inline void __syncwarp(unsigned mask = 0xffffffffU, PUFFERFISH_SITE) {
  emulated_device::ballot(mask, false, where);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

inline unsigned __ballot_sync(unsigned mask, int predicate, PUFFERFISH_SITE) {
  return emulated_device::ballot(mask, predicate != 0, where);
}
inline int __any_sync(unsigned mask, int predicate, PUFFERFISH_SITE) {
  return emulated_device::ballot(mask, predicate != 0, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, PUFFERFISH_SITE) {
  return emulated_device::ballot(mask, predicate == 0, where) == 0;
}

// `width` cuts the warp into groups of that many lanes; a lane outside the caller's group gives the caller's
// value.
template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = warpSize, PUFFERFISH_SITE) {
  const int lane = emulated_device::lane();
  return emulated_device::shuffled(mask, value, (lane & ~(width - 1)) | (from & (width - 1)), where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = warpSize, PUFFERFISH_SITE) {
  const int lane = emulated_device::lane(), from = lane ^ lanes;
  return emulated_device::shuffled(mask, value, (from | (width - 1)) > (lane | (width - 1)) ? lane : from,
                                   where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = warpSize, PUFFERFISH_SITE) {
  const int lane = emulated_device::lane(), in_group = lane & (width - 1);
  const bool inside = in_group + static_cast<int>(lanes) < width;
  return emulated_device::shuffled(mask, value, inside ? lane + static_cast<int>(lanes) : lane, where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = warpSize, PUFFERFISH_SITE) {
  const int lane = emulated_device::lane(), in_group = lane & (width - 1);
  const bool inside = in_group >= static_cast<int>(lanes);
  return emulated_device::shuffled(mask, value, inside ? lane - static_cast<int>(lanes) : lane, where);
}

#undef PUFFERFISH_SITE

// Integers only: the library's results depend on no order, and a sum of floats would.
template <class T>
requires std::is_integral_v<T> T atomicAdd(T* to, std::type_identity_t<T> value) {
  const T before = *to;
  *to = static_cast<T>(before + value);
  return before;
}
template <class T>
requires std::is_integral_v<T> T atomicMax(T* to, std::type_identity_t<T> value) {
  const T before = *to;
  if (value > before) *to = value;
  return before;
}
template <class T>
requires std::is_integral_v<T> T atomicMin(T* to, std::type_identity_t<T> value) {
  const T before = *to;
  if (value < before) *to = value;
  return before;
}
template <class T>
requires std::is_integral_v<T> T atomicOr(T* to, std::type_identity_t<T> value) {
  const T before = *to;
  *to = before | value;
  return before;
}
template <class T>
requires std::is_integral_v<T> T atomicExch(T* to, std::type_identity_t<T> value) {
  const T before = *to;
  *to = value;
  return before;
}
template <class T>
requires std::is_integral_v<T> T atomicCAS(T* to, std::type_identity_t<T> expected,
                                           std::type_identity_t<T> value) {
  const T before = *to;
  if (before == expected) *to = value;
  return before;
}

// ---------------------------------------------------------------------------------------------------------
// Arithmetic

inline float rsqrtf(float x) { return 1.0F / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0F, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0F / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0F / sqrtf(x); }
// Kept apart by the volatile, as on a device: neither is fused with what stands around it.
inline float __fmul_rn(float x, float y) {
  const volatile float product = x * y;
  return product;
}
inline float __fadd_rn(float x, float y) {
  const volatile float sum = x + y;
  return sum;
}
inline float __fsub_rn(float x, float y) {
  const volatile float difference = x - y;
  return difference;
}
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dmul_rn(double x, double y) {
  const volatile double product = x * y;
  return product;
}
inline double __dadd_rn(double x, double y) {
  const volatile double sum = x + y;
  return sum;
}
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
inline float __saturatef(float x) { return x > 0.0F ? (x < 1.0F ? x : 1.0F) : 0.0F; }

namespace emulated_device {
template <class To, class From>
To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}
}  // namespace emulated_device

inline int __float_as_int(float x) { return emulated_device::bits_of<int>(x); }
inline float __int_as_float(int x) { return emulated_device::bits_of<float>(x); }
inline unsigned __float_as_uint(float x) { return emulated_device::bits_of<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulated_device::bits_of<float>(x); }
inline long long __double_as_longlong(double x) { return emulated_device::bits_of<long long>(x); }
inline double __longlong_as_double(long long x) { return emulated_device::bits_of<double>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>((std::uint64_t{x} * y) >> 32);
}
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  __extension__ using wide = unsigned __int128;
  return static_cast<unsigned long long>((static_cast<wide>(x) * y) >> 64);
}

template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
void __stcs(T* to, const std::type_identity_t<T>& value) {
  *to = value;
}

#define PUFFERFISH_EXTREMES(type)                           \
  inline type min(type a, type b) { return b < a ? b : a; } \
  inline type max(type a, type b) { return a < b ? b : a; }
PUFFERFISH_EXTREMES(int)
PUFFERFISH_EXTREMES(unsigned)
PUFFERFISH_EXTREMES(long)
PUFFERFISH_EXTREMES(unsigned long)
PUFFERFISH_EXTREMES(long long)
PUFFERFISH_EXTREMES(unsigned long long)
#undef PUFFERFISH_EXTREMES
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
