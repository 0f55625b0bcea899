// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: micro-kernels for pairs of bfloat16 by the tiles of AMX (AMX_BF16), matrix registers of sixteen
/// rows of 64 bytes. A kernel computes 16 or 32 rows of the result by one to four vectors; the rows that
/// remain are computed by the kernels of AVX512_BF16.
///
/// A step multiplies sixteen pairs of each row: a tile of the left operand, whose rows may be any number of
/// bytes apart, by a tile of the right operand, which is stored in pairs already. The last pairs of a depth
/// that is no multiple of sixteen are copied to tiles filled up with zeros.
///
/// These kernels have not run on a processor with AMX yet: the tests run them with tiles in memory
/// (tests/unit/linalg/tile_kernels.cpp), and a process uses the processor's tiles only after they have
/// computed a few products right. Their speed is unknown. PUFFERFISH_TILES=0 in the environment switches them
/// off.
///
/// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18, and the
/// instruction TDPBF16PS in volume 2.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

#include <pufferfish/linalg/gemm/kernel_table.hpp>
#include <pufferfish/linalg/isa.hpp>

#if PUFFERFISH_KERNELS_AVX512 && defined(__x86_64__) && defined(__linux__)
#define PUFFERFISH_KERNELS_TILES 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define PUFFERFISH_KERNELS_TILES 0
#endif

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Rows of a tile, pairs or floats of one of its rows, and bytes of one of its rows.
inline constexpr index_t amx_rows = 16, amx_columns = 16, amx_row_bytes = 64;

#if PUFFERFISH_KERNELS_TILES
/// True if processor and system have the tiles, and the process may use them. Asks the system for the
/// permission, at the first call.
inline bool tiles_available() {
  static const bool available = [] {
    const char* const wanted = std::getenv("PUFFERFISH_TILES");
    if (wanted != nullptr && std::strcmp(wanted, "0") == 0) return false;
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned bf16 = 1U << 22, tile = 1U << 24;  // leaf 7, edx
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & (bf16 | tile)) != (bf16 | tile)) return false;
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return ::syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  }();
  return available;
}

/// The processor's eight tiles, each of amx_rows x amx_row_bytes. The compiler does not use them, so they
/// need not be declared as changed.
struct pair_tiles {
  struct configuration {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static_assert(sizeof(configuration) == 64);

  pair_tiles() {
    static constexpr configuration whole{};
    asm volatile("ldtilecfg %0" ::"m"(whole));
  }
  ~pair_tiles() { asm volatile("tilerelease"); }
  pair_tiles(const pair_tiles&) = delete;
  pair_tiles& operator=(const pair_tiles&) = delete;

  /// Tile = 0.
  template <int Tile>
  void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
  }
  /// Reads the rows of a tile from, or writes them to, addresses that are `step` bytes apart.
  template <int Tile>
  void load(const void* from, index_t step) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(Tile), "r"(from), "r"(step) : "memory");
  }
  template <int Tile>
  void store(void* to, index_t step) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(Tile), "r"(to), "r"(step) : "memory");
  }
  /// Sum[i][j] += the sum over k of Left[i][k] . Right[k][j], products of pairs.
  template <int Sum, int Left, int Right>
  void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Left), "i"(Right));
  }
};
#else
inline bool tiles_available() { return false; }
#endif

/// The kernels of one kind of tiles: for Down tiles of rows by `Across` tiles of columns.
template <class Tiles, const kernel_table<bf16_pair>& Vectors, int Down, int Across>
struct tile_block {
  static constexpr int sums = Down * Across, left = 6, right = 7;
  static_assert(sums <= left);

  static void run(const block_arguments<bf16_pair>& block) {
    if (block.depth_step != static_cast<index_t>(sizeof(bf16_pair))) {  // a tile holds adjacent pairs
      block_arguments<bf16_pair> own = block;
      return run_rows(Vectors.strided[Across - 1], own, Down * amx_rows);
    }
    Tiles tiles;
    start(tiles, block, std::make_integer_sequence<int, sums>());
    const index_t whole = block.depth / amx_columns, rest = block.depth % amx_columns;
    for (const block_tap<bf16_pair>* tap = block.taps; tap != block.taps_end; ++tap) {
      const bf16_pair* from = moved(tap->left, block.left_shift);
      const bf16_pair* by = moved(tap->right, block.right_shift);
      for (index_t step = 0; step < whole; ++step) {
        add_products(tiles, from, block.row_step, by, block.right_step,
                     std::make_integer_sequence<int, sums>());
        from += amx_columns;
        by = moved(by, amx_rows * block.right_step);
      }
      if (rest > 0) add_rest(tiles, block, from, by, rest);
    }
    finish(tiles, block, std::make_integer_sequence<int, sums>());
  }

 private:
  // Address of the first element of a tile of the result.
  template <int Sum>
  static float* at(const block_arguments<bf16_pair>& block) {
    return moved(block.result, Sum / Across * amx_rows * block.result_step) + Sum % Across * amx_columns;
  }
  template <int... Sum>
  static void start(Tiles& tiles, const block_arguments<bf16_pair>& block,
                    std::integer_sequence<int, Sum...>) {
    if (block.accumulate != 0) {
      (tiles.template load<Sum>(at<Sum>(block), block.result_step), ...);
    } else {
      (tiles.template zero<Sum>(), ...);
    }
  }
  template <int... Sum>
  static void finish(Tiles& tiles, const block_arguments<bf16_pair>& block,
                     std::integer_sequence<int, Sum...>) {
    (tiles.template store<Sum>(at<Sum>(block), block.result_step), ...);
  }
  template <int... Sum>
  static void add_products(Tiles& tiles, const bf16_pair* from, index_t row_step, const bf16_pair* by,
                           index_t right_step, std::integer_sequence<int, Sum...>) {
    (add_product<Sum>(tiles, from, row_step, by, right_step), ...);
  }
  template <int Sum>
  static void add_product(Tiles& tiles, const bf16_pair* from, index_t row_step, const bf16_pair* by,
                          index_t right_step) {
    if constexpr (Sum % Across == 0) {
      tiles.template load<left>(moved(from, Sum / Across * amx_rows * row_step), row_step);
    }
    tiles.template load<right>(by + Sum % Across * amx_columns, right_step);
    tiles.template multiply<Sum, left, right>();
  }
  // The last `rest` < amx_columns pairs of the depth.
  static void add_rest(Tiles& tiles, const block_arguments<bf16_pair>& block, const bf16_pair* from,
                       const bf16_pair* by, index_t rest) {
    constexpr index_t rows = Down * amx_rows, columns = Across * amx_columns;
    alignas(64)
        bf16_pair some[static_cast<std::size_t>(rows * amx_columns)] = {},
                                                       others[static_cast<std::size_t>(amx_rows * columns)] =
                                                           {};
    for (index_t i = 0; i < rows; ++i) {
      std::copy_n(moved(from, i * block.row_step), rest, some + i * amx_columns);
    }
    for (index_t k = 0; k < rest; ++k) {
      std::copy_n(moved(by, k * block.right_step), columns, others + k * columns);
    }
    add_products(tiles, some, amx_row_bytes, others, Across * amx_row_bytes,
                 std::make_integer_sequence<int, sums>());
  }
};

/// `vectors` with tiles for 32 and 16 rows, or where six tiles of sums are too few, for 16.
template <class Tiles, const kernel_table<bf16_pair>& Vectors, int Across>
constexpr kernel_list<bf16_pair> tile_list() {
  kernel_list<bf16_pair> list{};
  std::size_t n = 0;
  if constexpr (2 * Across <= 6)
    list.by_rows[n++] = {2 * amx_rows, tile_block<Tiles, Vectors, 2, Across>::run};
  list.by_rows[n++] = {amx_rows, tile_block<Tiles, Vectors, 1, Across>::run};
  for (const sized_kernel<bf16_pair>& kernel : Vectors.strided[Across - 1].by_rows) {
    if (kernel.rows > 0 && kernel.rows < amx_rows) list.by_rows[n++] = kernel;
  }
  return list;
}

/// The kernels `Vectors` of AVX512_BF16 with tiles in place of the largest ones for rows of any stride.
template <class Tiles, const kernel_table<bf16_pair>& Vectors>
inline constexpr kernel_list<bf16_pair> tile_lists[] = {
    tile_list<Tiles, Vectors, 1>(), tile_list<Tiles, Vectors, 2>(), tile_list<Tiles, Vectors, 3>(),
    tile_list<Tiles, Vectors, 4>()};
template <class Tiles, const kernel_table<bf16_pair>& Vectors>
inline constexpr kernel_table<bf16_pair> tile_table = [] {
  kernel_table<bf16_pair> table = Vectors;
  table.strided = tile_lists<Tiles, Vectors>;
  return table;
}();

/// Whether products by `table` (32 rows, depth 21, every width) and sums with old results agree with plain
/// sums.
PUFFERFISH_COLD inline bool table_is_right(const kernel_table<bf16_pair>& table) {
  constexpr index_t rows = 2 * amx_rows, depth = 21, columns = 4 * amx_columns;
  constexpr index_t pair = sizeof(bf16_pair), number = sizeof(float);
  bf16_pair left[static_cast<std::size_t>(rows * depth)], right[static_cast<std::size_t>(depth * columns)];
  float sums[static_cast<std::size_t>(rows * columns)];
  const auto value = [](index_t i) { return bfloat16(static_cast<float>(i * 37 % 19 - 9) / 8.0F); };
  for (index_t i = 0; i < rows * depth; ++i) left[i] = {value(2 * i), value(2 * i + 1)};
  for (index_t i = 0; i < depth * columns; ++i) right[i] = {value(3 * i + 5), value(5 * i)};
  const auto expected = [&](index_t i, index_t j) {
    double sum = 0.0;
    for (index_t k = 0; k < depth; ++k) {
      const bf16_pair a = left[i * depth + k], b = right[k * columns + j];
      sum += static_cast<double>(a.first) * static_cast<double>(b.first) +
             static_cast<double>(a.second) * static_cast<double>(b.second);
    }
    return sum;
  };
  const block_tap<bf16_pair> tap{left, right};
  for (int width = 1; width <= table.widest_strided; ++width) {
    for (const int accumulate : {0, 1}) {
      block_arguments<bf16_pair> block{&tap,           &tap + 1, depth,    depth * pair,     pair,
                                       columns * pair, 0,        &sums[0], columns * number, accumulate};
      run_rows(table.strided[width - 1], block, rows);
      for (index_t i = 0; i < rows; ++i) {
        for (index_t j = 0; j < width * amx_columns; ++j) {
          const double error = static_cast<double>(sums[i * columns + j]) - (1 + accumulate) * expected(i, j);
          if (!(std::abs(error) < 1e-3)) return false;
        }
      }
    }
  }
  return true;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
