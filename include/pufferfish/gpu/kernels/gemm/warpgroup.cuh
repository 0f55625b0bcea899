// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Products by the tensor cores of a warp group, which is four consecutive warps. The tensor cores read
/// operands directly from shared memory (instruction wgmma.mma_async; PTX ISA: "Asynchronous Warpgroup Level
/// Matrix Multiply-Accumulate Instructions"). Devices of compute capability 9.0 have these instructions, and
/// only code that was compiled for sm_90a may use them.
///
/// Operands in shared memory consist of blocks of 8 x 8 numbers of 16 bits: 8 rows of 16 bytes, stored one
/// after another (128 bytes). The 8 numbers of a row are consecutive along the depth (dense::depth) or across
/// it (dense::width).
///
/// Order of use: write the operands, publish_to_products, a barrier, begin_products, group_sums::add (any
/// number of times), end_products, other work, wait_for_products.

#include <atomic>

#include <pufferfish/gpu/kernels/gemm/tile_product.cuh>
#include <pufferfish/gpu/kernels/launch.cuh>

/// Defined if the code that is being compiled can use warp groups: code for sm_90a, and code for an emulated
/// device.
#if defined(PUFFERFISH_EMULATED_DEVICE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PUFFERFISH_WARP_GROUPS
#endif

PUFFERFISH_KERNELS_BEGIN

/// Number of threads of a warp group.
inline constexpr int group_threads = 128;

/// Whether the current device can execute the kernels that use warp groups. `kernel`: one of them. Kernels
/// are compiled for several architectures; in code for an architecture without warp groups, their body is
/// absent_mark(), which this function recognizes. The first successful call on a device decides for all later
/// calls on it. Returns false if CUDA reports an error, or for device numbers of 64 and more.
#if defined(PUFFERFISH_EMULATED_DEVICE)
inline bool has_warp_groups(const void*) { return true; }
#else
inline bool has_warp_groups(const void* kernel) {
  enum : signed char { unknown, yes, no };
  static std::atomic<signed char> known[64];  // the answer for each device
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

/// Body of a kernel in code for an architecture without warp groups. It declares static shared memory, by
/// which has_warp_groups recognizes the kernel: kernels that use warp groups have only dynamic shared memory.
__device__ inline void absent_mark() {
#if !defined(PUFFERFISH_EMULATED_DEVICE)
  __shared__ volatile int mark;
  mark = 0;
  if (mark != 0) __trap();
#endif
}

/// Describes an operand in shared memory, which consists of blocks of 8 x 8 numbers. `first`: address of the
/// first block. `across`: number of bytes from a block to the adjacent block across the depth (next rows of
/// the left operand, next columns of the right operand). `along`: number of bytes from a block to the
/// adjacent block along the depth. The address and both numbers are multiples of 16,
/// and below 2^18.
class block_matrix {
 public:
#if defined(PUFFERFISH_EMULATED_DEVICE)
  block_matrix(const void* first, int across, int along)
      : first_(static_cast<const unsigned char*>(first)), across_(across), along_(along) {}
  /// The operand that begins `bytes` bytes later, with the same `across` and `along`.
  block_matrix at(int bytes) const { return {first_ + bytes, across_, along_}; }
  /// The operand as the emulated device describes it.
  emulated_device::blocks blocks() const { return {first_, across_, along_}; }

 private:
  const unsigned char* first_;
  int across_, along_;
#else
  __device__ block_matrix(const void* first, int across, int along)
      : bits_(static_cast<std::uint64_t>(__cvta_generic_to_shared(first)) >> 4 |
              static_cast<std::uint64_t>(along) >> 4 << 16 | static_cast<std::uint64_t>(across) >> 4 << 32) {}
  /// The operand that begins `bytes` bytes later, with the same `across` and `along`.
  __device__ block_matrix at(int bytes) const {
    block_matrix moved = *this;
    moved.bits_ += static_cast<std::uint64_t>(static_cast<unsigned>(bytes) >> 4);
    return moved;
  }
  /// The operand's descriptor (PTX ISA: "Matrix Descriptor"), without swizzling: address, leading dimension
  /// byte offset (`along`) and stride dimension byte offset (`across`), each divided by 16.
  __device__ std::uint64_t bits() const { return bits_; }

 private:
  std::uint64_t bits_;
#endif
};

/// Index of the calling thread's warp group in its thread block. All lanes of a warp must call this function.
/// Its value comes from a shuffle, so the compiler knows that all lanes have the same value, and computes it
/// and addresses that depend on it once for the warp.
__device__ inline int warp_group() { return __shfl_sync(all_lanes, block_thread() / group_threads, 0); }

/// Makes writes of the calling thread to shared memory, including finished copies of copy_async, visible to
/// products (PTX ISA: fence.proxy.async). A barrier must follow before other threads start products that read
/// them.
__device__ inline void publish_to_products() {
#if defined(PUFFERFISH_WARP_GROUPS) && !defined(PUFFERFISH_EMULATED_DEVICE)
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// Waits until all threads of warp group `group` have called this function; `group` is the calling thread's
/// own. All groups of a thread block must call it equally often, because an emulated device waits for all
/// threads of the block.
__device__ inline void group_barrier([[maybe_unused]] int group) {
#if defined(PUFFERFISH_EMULATED_DEVICE)
  __syncthreads();
#else
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(group_threads) : "memory");
#endif
}

/// The sums of a product of 64 x Columns elements, in float, distributed over the 128 threads of a warp
/// group. T: __nv_bfloat16 or __half, the type of the operands. Columns: 16, 32 or 64.
///
/// Let g = t / 4 % 8 and q = t % 4 for thread t of warp w. values[4 j + 2 h + i] is the element in column 8
/// j + 2 q + i and row 16 w + 8 h + g, for h, i = 0, 1 (PTX ISA: the register fragments of wgmma.m64nNk16).
template <class T, int Columns>
struct group_sums {
  static_assert(Columns == 16 || Columns == 32 || Columns == 64);
  static_assert(sizeof(T) == 2);
  /// Number of the sums' elements that each thread holds.
  static constexpr int size = Columns / 2;
  float values[static_cast<std::size_t>(size)];

  /// Sets all sums to 0.
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < size; ++i) values[i] = 0.0F;
  }

  /// Adds the matrix product of `left` (64 x 16) and `right` (16 x Columns) to the sums. Must be called by
  /// all threads of the warp group, between begin_products and end_products. Left, Right: direction of the
  /// rows of each operand's blocks. The order of the additions and the rounding of intermediate sums are not
  /// specified.
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

  /// Adds the matrix product of a left operand in registers (64 x 16) and `right` (16 x Columns) to the sums.
  /// `words` holds the 16 rows of the left operand that belong to the calling thread's warp, in the layout of
  /// operand `a` in mma.cuh, and must not change until wait_for_products returns. Otherwise as the function
  /// above.
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

/// Row of the sums that values[4 j + 2 half] and values[4 j + 2 half + 1] of a thread belong to.
__device__ constexpr int group_row(int thread, int half) {
  return thread / warp_threads * 16 + half * 8 + thread / 4 % 8;
}

/// Keeps the compiler from moving uses of sums, or of an array of sums, across this point: it does not know
/// that products write them until they have been waited for.
template <class T, int Columns>
__device__ inline void pin([[maybe_unused]] group_sums<T, Columns>& sums) {
#if !defined(PUFFERFISH_EMULATED_DEVICE)
#pragma unroll
  for (int i = 0; i < sums.size; ++i) asm volatile("" : "+f"(sums.values[i])::"memory");
#endif
}
template <class Sums, std::size_t Count>
__device__ inline void pin(Sums (&all)[Count]) {
#pragma unroll
  for (Sums& sums : all) pin(sums);
}

/// Begins products: orders earlier accesses to the registers of these sums and of operands before the
/// products that follow (PTX ISA: wgmma.fence). All threads of the warp group must call this function.
template <class... Sums>
__device__ inline void begin_products([[maybe_unused]] Sums&... sums) {
#if defined(PUFFERFISH_WARP_GROUPS) && !defined(PUFFERFISH_EMULATED_DEVICE)
  (pin(sums), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
/// Closes the group of the products that were added since the last call (PTX ISA: wgmma.commit_group).
/// Products are computed asynchronously: the thread may do other work until it calls wait_for_products, but
/// must not access the sums.
__device__ inline void end_products() {
#if defined(PUFFERFISH_WARP_GROUPS) && !defined(PUFFERFISH_EMULATED_DEVICE)
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
/// Waits until all products of the warp group have been computed (PTX ISA: wgmma.wait_group). After that,
/// these sums may be read, and the operands in shared memory overwritten.
template <class... Sums>
__device__ inline void wait_for_products([[maybe_unused]] Sums&... sums) {
#if defined(PUFFERFISH_WARP_GROUPS) && !defined(PUFFERFISH_EMULATED_DEVICE)
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  (pin(sums), ...);
#endif
}

PUFFERFISH_KERNELS_END
