// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <pufferfish/core/random.hpp>
#include <pufferfish/linalg/gemm/native_gemm.hpp>
#include <string>
#include <vector>

#include "../../support/gradient_check.hpp"

namespace {

using namespace pufferfish;

struct draw {
  random_stream stream;
  std::uint64_t at = 0;
  index_t operator()(index_t low, index_t high) {
    return low + static_cast<index_t>(stream.below(at++, static_cast<std::uint64_t>(high - low + 1)));
  }
};

/// A matrix whose storage has the asked order and gaps between its rows (or columns).
template <class T>
struct strided {
  strided(index_t rows, index_t cols, bool by_columns, index_t gap, random_stream random)
      : storage({(by_columns ? cols : rows) * ((by_columns ? rows : cols) + gap)}) {
    fill_normal(storage.flat(), 1.0, random);
    const index_t line = (by_columns ? rows : cols) + gap;
    strides = by_columns ? extents<2>{1, line} : extents<2>{line, 1};
    shape = {rows, cols};
  }
  tensor_view<T, 2> view() { return {storage.data(), shape, strides}; }
  tensor<T, 1> storage;
  extents<2> shape{}, strides{};
};

template <class T>
double largest_difference(const tensor_view<T, 2>& a, const tensor_view<T, 2>& b) {
  double worst = 0.0;
  for (index_t i = 0; i < a.extent(0); ++i) {
    for (index_t j = 0; j < a.extent(1); ++j) {
      worst = std::max(worst, std::abs(static_cast<double>(a(i, j)) - static_cast<double>(b(i, j))));
    }
  }
  return worst;
}

template <class T>
void compare_with_reference(isa target, int cases, index_t largest_depth) {
  stack_arena scratch;
  draw next{random_stream(11, sizeof(T) + static_cast<std::uint64_t>(target))};
  for (int trial = 0; trial < cases; ++trial) {
    const index_t m = next(0, 40), n = next(0, 120), k = next(0, largest_depth);
    const auto seed = static_cast<std::uint64_t>(trial);
    strided<T> a(m, k, next(0, 1) == 1, next(0, 3), {seed, 1});
    strided<T> b(k, n, next(0, 1) == 1, next(0, 3), {seed, 2});
    strided<T> c(m, n, next(0, 1) == 1, next(0, 3), {seed, 3});
    strided<T> expected = c;
    const bool accumulate = next(0, 1) == 1;
    reference_gemm{}.multiply<T>(a.view(), b.view(), expected.view(), accumulate);
    native_gemm(scratch, target).multiply<T>(a.view(), b.view(), c.view(), accumulate);
    const double tolerance = (sizeof(T) == 4 ? 4e-6 : 1e-14) * (1.0 + static_cast<double>(k));
    CAPTURE(m);
    CAPTURE(n);
    CAPTURE(k);
    CAPTURE(accumulate);
    REQUIRE(largest_difference(c.view(), expected.view()) <= tolerance);
    // Elements between the rows keep their values.
    for (index_t i = 0; i < c.storage.size(); ++i) {
      const index_t line = std::max(c.strides[0], c.strides[1]);
      const index_t width = c.strides[0] == 1 && c.strides[1] != 1 ? m : n;
      if (line > 0 && i % line >= width) REQUIRE(c.storage(i) == expected.storage(i));
    }
  }
}

TEST_CASE("native_gemm agrees with the reference on every instruction set, any strides and shapes") {
  int compared = 0;
  for (const isa target : all_isas) {
    if (!isa_available(target)) continue;
    CAPTURE(std::string(to_string(target)));
    compare_with_reference<float>(target, 150, 60);
    compare_with_reference<float>(target, 6, 1200);  // more than one block of depth
    compare_with_reference<double>(target, 100, 60);
    compare_with_reference<double>(target, 4, 900);
    ++compared;
  }
  CHECK(compared > 0);
  CHECK(isa_available(widest_isa()));
}

TEST_CASE("native_gemm: matrices strided in both directions") {
  stack_arena scratch;
  tensor<double, 2> a_all({10, 14}), b_all({14, 12}), c_all({10, 12});
  fill_normal(a_all.flat(), 1.0, {1, 1});
  fill_normal(b_all.flat(), 1.0, {1, 2});
  const tensor_view<const double, 2> a(a_all.data(), {5, 7}, {28, 2}), b(b_all.data(), {7, 6}, {24, 2});
  const tensor_view<double, 2> c(c_all.data(), {5, 6}, {24, 2});
  tensor<double, 2> expected({5, 6});
  native_gemm(scratch).multiply<double>(a, b, c);
  reference_gemm{}.multiply<double>(a, b, expected.view());
  CHECK(largest_difference(c, expected.view()) < 1e-13);
  CHECK(c_all(0, 1) == 0.0);
  CHECK(c_all(1, 0) == 0.0);
}

TEST_CASE("gemm_operand: one layout serves many tiles, bit for bit as one product") {
  stack_arena scratch;
  tensor<float, 2> a({37, 50}), b({50, 23}), whole({37, 23}), tiles({37, 23});
  fill_normal(a.flat(), 1.0, {2, 1});
  fill_normal(b.flat(), 1.0, {2, 2});
  native_gemm(scratch).multiply<float>(a, b, whole.view());
  scratch_frame frame(scratch);
  const auto operand =
      gemm_operand<float>::prepare(b, frame.take<float>(gemm_operand<float>::storage_size(50, 23)));
  for (index_t row = 0; row < 37; row += 5) {
    const index_t count = std::min<index_t>(5, 37 - row);
    operand.multiply(tensor_view<const float, 2>(a).slice(0, row, count), tiles.view().slice(0, row, count),
                     false);
  }
  CHECK(largest_difference(whole.view(), tiles.view()) == 0.0);
}

TEST_CASE("products of shapes that do not fit are refused with all shapes") {
  stack_arena scratch;
  tensor<float, 2> a({2, 3}), b({4, 5}), c({2, 5});
  CHECK_THROWS_WITH_AS(native_gemm(scratch).multiply<float>(a, b, c.view()),
                       "gemm: [2 x 3] times [4 x 5] does not fit the result [2 x 5]", shape_error);
  CHECK_THROWS_AS(reference_gemm{}.multiply<float>(a, b, c.view()), shape_error);
  static_assert(gemm_engine<native_gemm, float> && gemm_engine<reference_gemm, double>);
}

TEST_CASE_TEMPLATE("gemm: products that are packed on both sides", T, float, double) {
  // Larger than a tile of rows and than a block of depth, and ragged in every direction.
  for (const isa target : all_isas) {
    if (!isa_available(target)) continue;
    CAPTURE(to_string(target));
    stack_arena scratch;
    for (const extents<3>& size :
         {extents<3>{131, 203, 777}, extents<3>{64, 256, 64}, extents<3>{97, 193, 65}}) {
      CAPTURE(to_string<3>(size));
      tensor<T, 2> a({size[0], size[2]}), b({size[2], size[1]}), c({size[0], size[1]}), expected(c.shape());
      fill_normal<T>(a.flat(), 1.0, {1, 0});
      fill_normal<T>(b.flat(), 1.0, {2, 0});
      fill_normal<T>(c.flat(), 1.0, {3, 0});
      copy(c.view(), expected.view());
      native_gemm(scratch, target).multiply<T>(a, b, c.view(), true);
      reference_gemm{}.multiply<T>(a, b, expected.view(), true);
      CHECK(test::largest_error(c, expected) < (sizeof(T) == 4 ? 3e-6 : 1e-14) * 40);
      const tensor<T, 2> turned(transpose(a.view()));
      native_gemm(scratch, target).multiply<T>(transpose(turned.view()), b, c.view());
      reference_gemm{}.multiply<T>(a, b, expected.view());
      CHECK(test::largest_error(c, expected) < (sizeof(T) == 4 ? 3e-6 : 1e-14) * 40);
    }
  }
}

// c = a b by panels: b in place, or packed once for all products; a read in place, or packed. c has two
// columns more than the product, which must keep their values.
template <class T>
void compare_panels(isa target, int cases, index_t most, index_t largest_depth) {
  using namespace pufferfish::detail;
  context<device::cpu> ctx({2, 1});
  draw next{random_stream(12, sizeof(T) + static_cast<std::uint64_t>(target))};
  for (int trial = 0; trial < cases; ++trial) {
    const index_t n = next(0, most), k = next(0, largest_depth);
    const auto seed = static_cast<std::uint64_t>(trial);
    strided<T> b(k, n, next(0, 1) == 1, next(0, 3), {seed, 2});
    const panel_shape<T> shape = next(0, 1) == 0 ? panel_shape<T>(n, target) : panel_shape<T>(target);
    scratch_frame frame(ctx.scratch());
    const bool in_place = b.strides[1] == 1 && n % shape.lanes() == 0 && next(0, 1) == 0;
    const tensor_view<const T, 2> right = b.view();
    const packed_b<T> panels =
        in_place ? packed_b<T>::in_place(shape, right) : packed_b<T>::pack(ctx, frame, shape, right);
    REQUIRE(panels.first_column(panels.panels()) == n);
    for (int use = 0; use < 3; ++use) {
      const index_t m = next(0, 60), first = next(0, panels.panels()), last = next(first, panels.panels());
      const index_t column = panels.first_column(first), width = panels.first_column(last) - column;
      strided<T> a(m, k, next(0, 1) == 1, next(0, 3), {seed, 3});
      const tensor_view<const T, 2> left = a.view();
      tensor<T, 2> c({m, width + 2});
      fill_normal(c.flat(), 1.0, {seed, 4});
      tensor<T, 2> expected(c), by_panels(c);
      const bool add = next(0, 1) == 1;
      CAPTURE(m);
      CAPTURE(k);
      CAPTURE(n);
      CAPTURE(column);
      CAPTURE(add);
      reference_gemm{}.multiply<T>(left, right.slice(1, column, width), expected.view().slice(1, 0, width),
                                   add);
      multiply_rows<T>(panels, left, first, last, c.view().slice(1, 0, width), add);
      const double tolerance = (sizeof(T) == 4 ? 4e-6 : 1e-14) * (1.0 + static_cast<double>(k));
      REQUIRE(largest_difference(c.view(), expected.view()) <= tolerance);
      if (k == 0) continue;
      T* const rows = frame.take<T>(packed_a<T>::storage_size(shape, m, k));
      const packed_a<T> packed{shape, rows, m, depth_blocks(k, 100)};
      packed.pack(left, 0, shape.left_panels(m), rows);
      for (index_t panel = first; panel < last; ++panel) {
        const index_t from = panels.first_column(panel) - column;
        const auto part = by_panels.view().slice(1, from, panels.first_column(panel + 1) - column - from);
        for (index_t block = 0; block < packed.blocks.count(); ++block) {
          multiply_panels<T>(packed, block, 0, shape.left_panels(m),
                             panels.at(panel, packed.blocks.begin(block)), panels.row_step, part,
                             add || block > 0);
        }
      }
      REQUIRE(largest_difference(by_panels.view(), expected.view()) <= tolerance);
    }
  }
}

TEST_CASE("packed_b, packed_a: products by panels agree with the reference, over random shapes and strides") {
  for (const isa target : all_isas) {
    if (!isa_available(target)) continue;
    CAPTURE(std::string(to_string(target)));
    compare_panels<float>(target, 100, 130, 150);
    compare_panels<float>(target, 6, 60, 2500);  // more than one block of depth
    compare_panels<double>(target, 60, 70, 150);
    compare_panels<double>(target, 3, 40, 2500);
  }
}

TEST_CASE("packed_b: pairs of bfloat16 are packed from dense rows and from dense columns") {
  using namespace pufferfish::detail;
  if (!has_pairs<bfloat16>()) {
    MESSAGE("this machine has no kernels for pairs of bfloat16");
    return;
  }
  context<device::cpu> ctx({1, 1});
  draw next{random_stream(13, 1)};
  for (int trial = 0; trial < 60; ++trial) {
    const bool by_columns = next(0, 1) == 1;
    const index_t n = next(1, 130), k = by_columns ? 2 * next(1, 20) : next(1, 40);
    strided<float> wide(k, n, by_columns, 2 * next(0, 2), {static_cast<std::uint64_t>(trial), 2});
    tensor<bfloat16, 1> elements({wide.storage.size()});
    std::transform(wide.storage.data(), wide.storage.data() + wide.storage.size(), elements.data(),
                   [](float value) { return bfloat16(value); });
    const tensor_view<const bfloat16, 2> b(elements.data(), wide.shape, wide.strides);
    scratch_frame frame(ctx.scratch());
    const panel_shape<bf16_pair> shape(n);
    const index_t size = packed_b<bf16_pair>::storage_size(shape, (k + 1) / 2, n);
    {
      scratch_frame before(ctx.scratch());  // the memory that pack() takes next is not zero
      std::fill_n(before.take<bf16_pair>(size), size, bf16_pair{bfloat16(7.0F), bfloat16(7.0F)});
    }
    const auto panels = packed_b<bf16_pair>::pack(ctx, frame, shape, b);
    REQUIRE(panels.depth == (k + 1) / 2);
    for (index_t i = 0; i < 2 * panels.depth; ++i) {
      for (index_t j = 0; j < panels.panels() * shape.width(); ++j) {
        const bf16_pair& pair = panels.at(j / shape.width(), i / 2)[j % shape.width()];
        const float expected = i < k && j < n ? static_cast<float>(b(i, j)) : 0.0F;
        REQUIRE(static_cast<float>(i % 2 == 0 ? pair.first : pair.second) == expected);
      }
    }
  }
}

TEST_CASE("run_clipped: only the valid columns of an edge tile are written") {
  using namespace pufferfish::detail;
  constexpr index_t rows = 53, width = 19, full = 32, step = 21;
  for (const index_t accumulate : {0, 1}) {
    std::vector<float> c(rows * step, 1.0F);
    block_arguments<float> block{};
    block.result = c.data();
    block.result_step = step * 4;
    block.row_step = 4;  // left_shift / 4 is the row
    block.accumulate = accumulate;
    run_clipped(block, width, full, rows, [](block_arguments<float>& b, index_t count) {
      for (index_t i = 0; i < count; ++i) {
        for (index_t j = 0; j < full; ++j) {
          float& to = moved(b.result, i * b.result_step)[j];
          const auto value = static_cast<float>(100 * (b.left_shift / 4 + i) + j);
          to = b.accumulate != 0 ? to + value : value;
        }
      }
    });
    for (index_t i = 0; i < rows; ++i) {
      for (index_t j = 0; j < step; ++j) {
        const auto sum = static_cast<float>(100 * i + j + accumulate);
        REQUIRE(c[static_cast<std::size_t>(i * step + j)] == (j < width ? sum : 1.0F));
      }
    }
  }
}

}  // namespace
