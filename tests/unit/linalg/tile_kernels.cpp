// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The kernels of tiles, with tiles in memory, and where a processor has tiles, with these.
#include <pufferfish/linalg/gemm/micro_kernels.hpp>

#include "../support/gradient_check.hpp"

namespace {
using namespace test;
using namespace pufferfish::detail;
using pair_arguments = block_arguments<bf16_pair>;

/// Eight tiles in memory. Sums are in double and rounded at the end of an instruction.
struct memory_tiles {
  std::byte bytes[8][16 * 64] = {};

  template <int Tile>
  void zero() {
    std::fill(std::begin(bytes[Tile]), std::end(bytes[Tile]), std::byte{});
  }
  template <int Tile>
  void load(const void* from, index_t step) {
    for (index_t i = 0; i < 16; ++i) {
      std::memcpy(bytes[Tile] + i * 64, static_cast<const std::byte*>(from) + i * step, 64);
    }
  }
  template <int Tile>
  void store(void* to, index_t step) const {
    for (index_t i = 0; i < 16; ++i) {
      std::memcpy(static_cast<std::byte*>(to) + i * step, bytes[Tile] + i * 64, 64);
    }
  }
  template <int Sum, int Left, int Right>
  void multiply() {
    for (std::size_t i = 0; i < 16; ++i) {
      for (std::size_t j = 0; j < 16; ++j) {
        float old = 0;
        std::memcpy(&old, bytes[Sum] + i * 64 + j * 4, 4);
        double sum = static_cast<double>(old);
        for (std::size_t k = 0; k < 16; ++k) {
          bf16_pair a, b;
          std::memcpy(&a, bytes[Left] + i * 64 + k * 4, 4);
          std::memcpy(&b, bytes[Right] + k * 64 + j * 4, 4);
          sum += static_cast<double>(a.first) * static_cast<double>(b.first) +
                 static_cast<double>(a.second) * static_cast<double>(b.second);
        }
        old = static_cast<float>(sum);
        std::memcpy(bytes[Sum] + i * 64 + j * 4, &old, 4);
      }
    }
  }
};

/// Tiles that forget the products of odd elements.
struct wrong_tiles : memory_tiles {
  template <int Sum, int Left, int Right>
  void multiply() {
    for (std::size_t i = 2; i < sizeof bytes[Left]; i += 4) bytes[Left][i] = bytes[Left][i + 1] = std::byte{};
    memory_tiles::multiply<Sum, Left, Right>();
  }
};

/// A kernel for `Rows` rows by `Width` vectors, by the definition.
template <int Width, int Rows>
void plain_kernel(const pair_arguments& block) {
  for (index_t i = 0; i < Rows; ++i) {
    for (index_t j = 0; j < Width * 16; ++j) {
      float& result = moved(block.result, i * block.result_step)[j];
      double sum = block.accumulate != 0 ? static_cast<double>(result) : 0.0;
      for (const block_tap<bf16_pair>* tap = block.taps; tap != block.taps_end; ++tap) {
        for (index_t k = 0; k < block.depth; ++k) {
          const bf16_pair a = *moved(tap->left, block.left_shift + i * block.row_step + k * block.depth_step);
          const bf16_pair b = moved(tap->right, block.right_shift + k * block.right_step)[j];
          sum += static_cast<double>(a.first) * static_cast<double>(b.first) +
                 static_cast<double>(a.second) * static_cast<double>(b.second);
        }
      }
      result = static_cast<float>(sum);
    }
  }
}
template <int Width>
constexpr kernel_list<bf16_pair> plain_list{{{16, plain_kernel<Width, 16>},
                                             {7, plain_kernel<Width, 7>},
                                             {2, plain_kernel<Width, 2>},
                                             {1, plain_kernel<Width, 1>}}};
constexpr kernel_list<bf16_pair> plain_lists[] = {plain_list<1>, plain_list<2>, plain_list<3>, plain_list<4>};
constexpr kernel_table<bf16_pair> plain_table{16, 4, 0, 0, plain_lists, nullptr, nullptr};

std::vector<bf16_pair> random_pairs(index_t count, std::uint64_t number) {
  std::vector<float> values(static_cast<std::size_t>(2 * count));
  fill_normal<float>(values, 1.0, {number, 3});
  std::vector<bf16_pair> pairs;
  for (std::size_t i = 0; i < values.size(); i += 2) {
    pairs.push_back({static_cast<bfloat16>(values[i]), static_cast<bfloat16>(values[i + 1])});
  }
  return pairs;
}

/// Compares blocks of any number of rows, several taps and any strides with the definition.
void check_table(const kernel_table<bf16_pair>& table) {
  picker pick(1);
  constexpr index_t pair = sizeof(bf16_pair), number = sizeof(float);
  for (std::uint64_t round = 0; round < 120; ++round) {
    const index_t rows = pick(0, 75), depth = pick(1, 50), taps = pick(1, 3), width = pick(1, 4);
    const index_t row = depth * (round % 7 == 0 ? 2 : 1) + pick(0, 3), right = 16 * width + pick(0, 5),
                  result = 16 * width + pick(0, 5), depth_step = round % 7 == 0 ? 2 : 1;
    CAPTURE(rows);
    CAPTURE(depth);
    CAPTURE(width);
    const auto a = random_pairs(taps * (rows + 1) * (row + 1), round),
               b = random_pairs(taps * depth * right, round + 500);
    std::vector<block_tap<bf16_pair>> list;
    for (index_t t = 0; t < taps; ++t)
      list.push_back({a.data() + t * (rows + 1) * (row + 1), b.data() + t * depth * right});
    std::vector<float> got(static_cast<std::size_t>(rows * result + 1), 3.0F), want = got;
    for (const auto& [kernels, to] : {std::pair(&table, &got), std::pair(&plain_table, &want)}) {
      pair_arguments block{list.data(),
                           list.data() + taps,
                           depth,
                           row * pair,
                           depth_step * pair,
                           right * pair,
                           0,
                           to->data(),
                           result * number,
                           static_cast<index_t>(round % 2)};
      run_rows(kernels->strided[width - 1], block, rows);
    }
    CHECK(got.back() == 3.0F);
    double worst = 0.0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      worst = std::max(worst, std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i])));
    }
    CHECK(worst < 1e-5 * std::sqrt(static_cast<double>(depth * taps)) * 10);
  }
}

TEST_CASE("tiles compute blocks of any size") {
  check_table(tile_table<memory_tiles, plain_table>);
  CHECK(table_is_right(tile_table<memory_tiles, plain_table>));
  CHECK(table_is_right(plain_table));
}

TEST_CASE("wrong tiles are noticed") { CHECK(!table_is_right(tile_table<wrong_tiles, plain_table>)); }

#if PUFFERFISH_KERNELS_TILES
TEST_CASE("the processor's tiles") {
  if (!tiles_available()) return;
  check_table(tile_table<pair_tiles, plain_table>);
  CHECK(table_is_right(tile_table<pair_tiles, plain_table>));
}
#endif

}  // namespace
