// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/linalg/gemm/micro_kernels.hpp>

#include <vector>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;
using namespace pufferfish::detail;

/// The product of two elements of operands, and operands with random elements.
template <class T>
double product(const T& a, const T& b) {
  return static_cast<double>(a) * static_cast<double>(b);
}
double product(const bf16_pair& a, const bf16_pair& b) {
  return product(a.first, b.first) + product(a.second, b.second);
}
template <class T>
void fill_operand(std::vector<T>& to, const random_stream& stream) {
  fill_normal<T>(to, 1.0, stream);
}
void fill_operand(std::vector<bf16_pair>& to, const random_stream& stream) {
  std::vector<float> drawn(2 * to.size());
  fill_normal<float>(drawn, 1.0, stream);
  for (std::size_t i = 0; i < to.size(); ++i) to[i] = {bfloat16(drawn[2 * i]), bfloat16(drawn[2 * i + 1])};
}

/// The tables of T that this machine has: one for each instruction set, at most one for pairs.
template <class T, class Check>
void for_each_table(Check&& check) {
  if constexpr (std::is_same_v<T, bf16_pair>) {
    if (pair_kernels() == nullptr) {
      MESSAGE("skipped: this machine, or this build, has no kernels for pairs of bfloat16");
      return;
    }
    check(*pair_kernels());
  } else {
    for (const isa target : all_isas) {
      if (!isa_available(target)) continue;
      CAPTURE(to_string(target));
      check(kernels_for<T>(target));
    }
  }
}

/// A block's operands in memory of their own, with room between everything, and its result by definition.
template <class T>
struct block_case {
  using result_type = product_result_t<T>;
  static constexpr index_t size = static_cast<index_t>(sizeof(T));
  index_t rows, vectors, lanes, taps, depth, row_step, depth_step, columns;
  std::vector<T> left, right;
  std::vector<result_type> result, expected;
  std::vector<block_tap<T>> tap_list;
  block_arguments<T> arguments{};

  block_case(picker& pick, index_t row_count, index_t vector_count, index_t lane_count, bool adjacent)
      : rows(row_count),
        vectors(vector_count),
        lanes(lane_count),
        taps(pick(1, 4)),
        depth(pick(1, 9)),
        row_step(adjacent ? 1 : pick(0, 12)),
        depth_step(pick(1, 40)),
        columns(vectors * lanes + pick(0, 5)) {
    const index_t left_size = rows * row_step + depth * depth_step + 4, right_size = (depth + 1) * columns;
    left.resize(static_cast<std::size_t>(taps * left_size));
    right.resize(static_cast<std::size_t>(taps * right_size + 8));
    result.resize(static_cast<std::size_t>(rows * columns + 16));
    std::uint64_t stream = static_cast<std::uint64_t>(pick(0, 1 << 20));
    fill_operand(left, {1, stream});
    fill_operand(right, {2, stream});
    fill_normal<result_type>(result, 1.0, {3, stream});
    for (index_t t = 0; t < taps; ++t)
      tap_list.push_back({left.data() + t * left_size, right.data() + t * right_size});
    arguments.taps = tap_list.data();
    arguments.taps_end = tap_list.data() + taps;
    arguments.depth = depth;
    arguments.row_step = row_step * size;
    arguments.depth_step = depth_step * size;
    arguments.right_step = columns * size;
    arguments.result = result.data() + 1;  // not aligned
    arguments.result_step = columns * size;
    arguments.accumulate = pick(0, 1);
    arguments.left_shift = 2 * size;
    arguments.right_shift = 3 * size;
    arguments.prefetch = pick(0, 1) == 0 ? nullptr : left.data();
    arguments.prefetch_step = 64;
    expected = result;
    for (index_t p = 0; p < rows; ++p) {
      for (index_t j = 0; j < vectors * lanes; ++j) {
        result_type& cell = expected[static_cast<std::size_t>(1 + p * columns + j)];
        double sum = arguments.accumulate != 0 ? static_cast<double>(cell) : 0.0;
        for (const block_tap<T>& tap : tap_list) {
          for (index_t k = 0; k < depth; ++k) {
            sum += product(tap.left[2 + p * row_step + k * depth_step], tap.right[3 + k * columns + j]);
          }
        }
        cell = static_cast<result_type>(sum);
      }
    }
  }

  /// Largest error, over all of the memory: what is not the block's must stay as it was.
  double error() const {
    double worst = 0.0;
    for (std::size_t i = 0; i < result.size(); ++i) {
      worst = std::max(worst, std::abs(static_cast<double>(result[i]) - static_cast<double>(expected[i])));
    }
    return worst;
  }
};

template <class T>
constexpr double tolerance() {
  return sizeof(T) == 4 ? 4e-5 : 1e-13;
}

template <class T>
void check_lists(picker& pick, const kernel_table<T>& table, const kernel_list<T>* lists, int widest,
                 bool adjacent) {
  for (int vectors = 1; vectors <= widest; ++vectors) {
    const kernel_list<T>& list = lists[vectors - 1];
    for (const sized_kernel<T>& kernel : list.by_rows) {
      if (kernel.run == nullptr) continue;
      CAPTURE(vectors);
      CAPTURE(kernel.rows);
      for (int round = 0; round < 6; ++round) {
        block_case<T> block(pick, kernel.rows, vectors, table.lanes, adjacent);
        kernel.run(block.arguments);
        CHECK(block.error() < tolerance<T>());
      }
    }
    for (index_t rows = 0; rows < 50; rows += pick(1, 3)) {
      CAPTURE(rows);
      block_case<T> block(pick, rows, vectors, table.lanes, adjacent);
      run_rows(list, block.arguments, rows);
      CHECK(block.error() < tolerance<T>());
    }
  }
}

TEST_CASE_TEMPLATE("micro-kernels: blocks against their definition, on every instruction set", T, float,
                   double, bf16_pair) {
  picker pick(3);
  for_each_table<T>([&](const kernel_table<T>& table) {
    check_lists<T>(pick, table, table.strided, table.widest_strided, false);
    check_lists<T>(pick, table, table.adjacent, table.widest_adjacent, true);
  });
}

/// A row segment under three taps, by definition: pixel p sees columns p - 1, p, p + 1.
template <class T>
void check_segment(picker& pick, const kernel_table<T>& table, index_t vectors, int edges) {
  const segment_kernels<T>& kernel = table.segments[vectors - 1];
  const bool left = (edges & 1) == 0, right = (edges & 2) == 0;
  const index_t size = static_cast<index_t>(sizeof(T)), rows = kernel.rows, channels = pick(1, 20);
  const index_t columns = vectors * table.lanes, lines = pick(1, 3), line = (rows + 2) * channels;
  std::vector<T> x(static_cast<std::size_t>(lines * line)),
      w(static_cast<std::size_t>(lines * 3 * channels * columns));
  using result_type = product_result_t<T>;
  std::vector<result_type> y(static_cast<std::size_t>(rows * columns));
  const auto stream = static_cast<std::uint64_t>(pick(0, 1 << 20));
  fill_operand(x, {1, stream});
  fill_operand(w, {2, stream});
  fill_normal<result_type>(y, 1.0, {3, stream});
  const bool accumulate = pick(0, 1) == 1, mirrored = pick(0, 1) == 1;
  std::vector<block_tap<T>> taps;
  std::vector<result_type> expected = y;
  if (!accumulate) expected.assign(y.size(), result_type{});
  for (index_t l = 0; l < lines; ++l) {
    const T* weight = w.data() + l * 3 * channels * columns;
    taps.push_back({x.data() + l * line + channels, weight + (mirrored ? 2 * channels * columns : 0)});
    for (index_t p = 0; p < rows; ++p) {
      for (index_t t = 0; t < 3; ++t) {
        if ((p == 0 && t == 0 && !left) || (p == rows - 1 && t == 2 && !right)) continue;
        for (index_t k = 0; k < channels; ++k) {
          for (index_t j = 0; j < columns; ++j) {
            expected[static_cast<std::size_t>(p * columns + j)] += static_cast<result_type>(
                product(x[static_cast<std::size_t>(l * line + (p + t) * channels + k)],
                        weight[((mirrored ? 2 - t : t) * channels + k) * columns + j]));
          }
        }
      }
    }
  }
  block_arguments<T> block{};
  block.taps = taps.data();
  block.taps_end = taps.data() + lines;
  block.depth = channels;
  block.row_step = channels * size;
  block.depth_step = -block.row_step;
  block.right_step = columns * size;
  block.column_step = (mirrored ? -1 : 1) * channels * columns * size;
  block.result = y.data();
  block.result_step = columns * size;
  block.accumulate = accumulate ? 1 : 0;
  kernel.run[edges](block);
  double worst = 0.0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    worst = std::max(worst, std::abs(static_cast<double>(y[i]) - static_cast<double>(expected[i])));
  }
  CHECK(worst < (sizeof(T) == 4 ? 1e-4 : 1e-12));
}

TEST_CASE_TEMPLATE("micro-kernels: row segments against their definition, on every instruction set", T, float,
                   double, bf16_pair) {
  picker pick(4);
  for_each_table<T>([&](const kernel_table<T>& table) {
    for (index_t vectors = 1; vectors <= table.widest_segment; ++vectors) {
      for (int edges = 0; edges < 4; ++edges) {
        CAPTURE(vectors);
        CAPTURE(edges);
        for (int round = 0; round < 5; ++round) check_segment<T>(pick, table, vectors, edges);
      }
    }
  });
}

}  // namespace
