// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Products by the tensor cores of a group of four warps, which read operands from shared memory themselves
/// (wgmma, PTX ISA: "Asynchronous warpgroup-level matrix multiply-accumulate"). Devices of compute capability
/// 9.0 have these instructions, and only code that was compiled for sm_90a may use them.
///
/// Operands in shared memory consist of blocks of 8 x 8 numbers of 16 bits: 8 rows of 16 bytes, one after the
/// other (128 bytes). A row of a block is 8 numbers along the depth (dense::depth) or across it
/// (dense::width).

#include <atomic>

#include <pufferfish/gpu/kernels/gemm/tile_product.cuh>
#include <pufferfish/gpu/kernels/launch.cuh>

/// Defined where kernels can use warp groups: in code for sm_90a and on an emulated device.
#if defined(PUFFERFISH_EMULATED_DEVICE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PUFFERFISH_WARP_GROUPS
#endif

PUFFERFISH_KERNELS_BEGIN

/// Number of threads of a warp group.
inline constexpr int group_threads = 128;

/// Whether the current device can run the kernels of warp groups, of which `kernel` is one. Kernels are
/// compiled for several architectures; those for one without such instructions have an empty body with
/// `absent_mark`. The first call on a device decides.
#if defined(PUFFERFISH_EMULATED_DEVICE)
inline bool has_warp_groups(const void*) { return true; }
#else
inline bool has_warp_groups(const void* kernel) {
  enum : signed char { unknown, yes, no };
  static std::atomic<signed char> known[64];  // state of each device
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= 64) return false;
  signed char now = known[device].load(std::memory_order_relaxed);
  if (now == unknown) {
    cudaFuncAttributes of{};
    if (cudaFuncGetAttributes(&of, kernel) != cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
    now = of.binaryVersion == 90 && of.sharedSizeBytes == 0 ? yes : no;
    known[device].store(now, std::memory_order_relaxed);
  }
  return now == yes;
}
#endif

/// The body of a kernel where there are no warp groups: static shared memory, by which has_warp_groups knows
/// it.
__device__ inline void absent_mark() {
#if !defined(PUFFERFISH_EMULATED_DEVICE)
  __shared__ volatile int mark;
  mark = 0;
  if (mark != 0) __trap();
#endif
}

/// A matrix in shared memory for a warp group, below byte 2^18 of it. `across`: bytes from a block to its
/// neighbour across the depth (rows of the left operand, columns of the right one); `along`: to its neighbour
/// along the depth. All three numbers are multiples of 16.
class block_matrix {
 public:
#if defined(PUFFERFISH_EMULATED_DEVICE)
  block_matrix(const void* first, int across, int along)
      : first_(static_cast<const unsigned char*>(first)), across_(across), along_(along) {}
  /// The matrix that begins `bytes` bytes further.
  block_matrix at(int bytes) const { return {first_ + bytes, across_, along_}; }
  emulated_device::blocks blocks() const { return {first_, across_, along_}; }

 private:
  const unsigned char* first_;
  int across_, along_;
#else
  __device__ block_matrix(const void* first, int across, int along)
      : bits_(static_cast<std::uint64_t>(__cvta_generic_to_shared(first)) >> 4 |
              static_cast<std::uint64_t>(along) >> 4 << 16 | static_cast<std::uint64_t>(across) >> 4 << 32) {}
  /// The matrix that begins `bytes` bytes further.
  __device__ block_matrix at(int bytes) const {
    block_matrix moved = *this;
    moved.bits_ += static_cast<std::uint64_t>(static_cast<unsigned>(bytes) >> 4);
    return moved;
  }
  /// The descriptor of the instruction (PTX ISA: "Matrix descriptor"), without swizzling.
  __device__ std::uint64_t bits() const { return bits_; }

 private:
  std::uint64_t bits_;
#endif
};

/// Number of the calling thread's warp group in its block. All lanes of a warp call it: a value that the
/// compiler knows to be the same in a warp is computed once for the warp, as are addresses that follow from
/// it.
__device__ inline int warp_group() { return __shfl_sync(all_lanes, block_thread() / group_threads, 0); }

/// Makes writes of the calling thread to shared memory, also those of copy_async that have arrived, visible
/// to products. A barrier must follow.
__device__ inline void publish_to_products() {
#if defined(PUFFERFISH_WARP_GROUPS) && !defined(PUFFERFISH_EMULATED_DEVICE)
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// Waits for all threads of `group`, the calling thread's warp group. All groups of a block call it equally
/// often.
__device__ inline void group_barrier([[maybe_unused]] int group) {
#if defined(PUFFERFISH_EMULATED_DEVICE)
  __syncthreads();
#else
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(group_threads) : "memory");
#endif
}

/// The sums of a product of 64 x Columns elements, distributed over the 128 threads of a group. Thread t of
/// warp w has, with g = t / 4 % 8 and q = t % 4: values[4 j + 2 h + i] is in row 16 w + g + 8 h and column 8
/// j
/// + 2 q + i (h, i: 0 or 1). Columns: 16, 32 or 64.
template <class T, int Columns>
struct group_sums {
  static_assert(Columns == 16 || Columns == 32 || Columns == 64);
  static_assert(sizeof(T) == 2);
  static constexpr int size = Columns / 2;
  float values[static_cast<std::size_t>(size)];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < size; ++i) values[i] = 0.0F;
  }

  /// Keeps the compiler from moving uses of the values across this point: it does not know that products
  /// write them until they have been waited for.
  __device__ void pin() {
#if !defined(PUFFERFISH_EMULATED_DEVICE)
#pragma unroll
    for (int i = 0; i < size; ++i) asm volatile("" : "+f"(values[i])::"memory");
#endif
  }

  /// Adds a product of 64 x 16 by 16 x Columns elements, between begin_products and end_products. Left,
  /// Right: direction of the rows of the operands' blocks.
  template <dense Left, dense Right>
  __device__ void add(const block_matrix& left, const block_matrix& right) {
#if defined(PUFFERFISH_EMULATED_DEVICE)
    emulated_device::group_mma<T>(values, Columns, left.blocks(), Left == dense::width, nullptr,
                                  right.blocks(), Right == dense::width);
#elif defined(PUFFERFISH_WARP_GROUPS)
    constexpr int turn_left = Left == dense::width ? 1 : 0, turn_right = Right == dense::width ? 1 : 0;
#define PUFFERFISH_GROUP_MMA(shape, types, sums, a, b, ta, tb, ...)                             \
  asm volatile("{ .reg .pred adds; setp.eq.u32 adds, 0, 0; wgmma.mma_async.sync.aligned." shape \
               "k16.f32." types " {" sums "}, " a ", " b ", adds, 1, 1, " ta ", " tb "; }"      \
               : __VA_ARGS__                                                                    \
               : "l"(left.bits()), "l"(right.bits()), "n"(turn_left), "n"(turn_right))
#define PUFFERFISH_GROUP_TYPES(shape, sums, a, b, ta, tb, ...)                 \
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {                            \
    PUFFERFISH_GROUP_MMA(shape, "bf16.bf16", sums, a, b, ta, tb, __VA_ARGS__); \
  } else {                                                                     \
    PUFFERFISH_GROUP_MMA(shape, "f16.f16", sums, a, b, ta, tb, __VA_ARGS__);   \
  }
#define PUFFERFISH_SUMS8(i)                                                                            \
  "+f"(values[i]), "+f"(values[i + 1]), "+f"(values[i + 2]), "+f"(values[i + 3]), "+f"(values[i + 4]), \
      "+f"(values[i + 5]), "+f"(values[i + 6]), "+f"(values[i + 7])
#define PUFFERFISH_PLACES8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PUFFERFISH_PLACES16 PUFFERFISH_PLACES8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PUFFERFISH_PLACES32 \
  PUFFERFISH_PLACES16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
    if constexpr (Columns == 16) {
      PUFFERFISH_GROUP_TYPES("m64n16", PUFFERFISH_PLACES8, "%8", "%9", "%10", "%11", PUFFERFISH_SUMS8(0))
    } else if constexpr (Columns == 32) {
      PUFFERFISH_GROUP_TYPES("m64n32", PUFFERFISH_PLACES16, "%16", "%17", "%18", "%19", PUFFERFISH_SUMS8(0),
                             PUFFERFISH_SUMS8(8))
    } else {
      PUFFERFISH_GROUP_TYPES("m64n64", PUFFERFISH_PLACES32, "%32", "%33", "%34", "%35", PUFFERFISH_SUMS8(0),
                             PUFFERFISH_SUMS8(8), PUFFERFISH_SUMS8(16), PUFFERFISH_SUMS8(24))
    }
#undef PUFFERFISH_GROUP_MMA
#else
    (void)left, (void)right;
#endif
  }

  /// The same with the left operand in registers: words[i] as `a` in mma.cuh, for the 16 rows of the warp.
  template <dense Right>
  __device__ void add(const std::uint32_t (&words)[4], const block_matrix& right) {
#if defined(PUFFERFISH_EMULATED_DEVICE)
    emulated_device::group_mma<T>(values, Columns, right.blocks(), false, words, right.blocks(),
                                  Right == dense::width);
#elif defined(PUFFERFISH_WARP_GROUPS)
    constexpr int turn_right = Right == dense::width ? 1 : 0;
#define PUFFERFISH_GROUP_MMA(shape, types, sums, a, b, ta, tb, ...)                             \
  asm volatile("{ .reg .pred adds; setp.eq.u32 adds, 0, 0; wgmma.mma_async.sync.aligned." shape \
               "k16.f32." types " {" sums "}, {" a "}, " b ", adds, 1, 1, " tb "; }"            \
               : __VA_ARGS__                                                                    \
               : "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "l"(right.bits()), \
                 "n"(turn_right))
    if constexpr (Columns == 16) {
      PUFFERFISH_GROUP_TYPES("m64n16", PUFFERFISH_PLACES8, "%8, %9, %10, %11", "%12", "", "%13",
                             PUFFERFISH_SUMS8(0))
    } else if constexpr (Columns == 32) {
      PUFFERFISH_GROUP_TYPES("m64n32", PUFFERFISH_PLACES16, "%16, %17, %18, %19", "%20", "", "%21",
                             PUFFERFISH_SUMS8(0), PUFFERFISH_SUMS8(8))
    } else {
      PUFFERFISH_GROUP_TYPES("m64n64", PUFFERFISH_PLACES32, "%32, %33, %34, %35", "%36", "", "%37",
                             PUFFERFISH_SUMS8(0), PUFFERFISH_SUMS8(8), PUFFERFISH_SUMS8(16),
                             PUFFERFISH_SUMS8(24))
    }
#undef PUFFERFISH_GROUP_MMA
#undef PUFFERFISH_GROUP_TYPES
#undef PUFFERFISH_SUMS8
#undef PUFFERFISH_PLACES8
#undef PUFFERFISH_PLACES16
#undef PUFFERFISH_PLACES32
#else
    (void)words, (void)right;
#endif
  }
};

/// Begins products with these sums: from now on the tensor cores may use their registers.
template <class... Sums>
__device__ inline void begin_products([[maybe_unused]] Sums&... sums) {
#if defined(PUFFERFISH_WARP_GROUPS) && !defined(PUFFERFISH_EMULATED_DEVICE)
  (sums.pin(), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
/// Ends the products that are to be computed; other work that does not use the sums may follow meanwhile.
__device__ inline void end_products() {
#if defined(PUFFERFISH_WARP_GROUPS) && !defined(PUFFERFISH_EMULATED_DEVICE)
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
/// Waits until all products of the warp group have been computed; these sums may then be used.
template <class... Sums>
__device__ inline void wait_for_products([[maybe_unused]] Sums&... sums) {
#if defined(PUFFERFISH_WARP_GROUPS) && !defined(PUFFERFISH_EMULATED_DEVICE)
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  (sums.pin(), ...);
#endif
}

PUFFERFISH_KERNELS_END
