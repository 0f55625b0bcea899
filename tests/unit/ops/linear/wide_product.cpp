// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/ops/linear/column_sums.hpp>
#include <pufferfish/ops/linear/row_product.hpp>
#include <pufferfish/ops/linear/wide_product.hpp>
#include <pufferfish/ops/recurrent/step_product.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

std::vector<isa> targets() {
  std::vector<isa> all;
  for (const isa target : all_isas) {
    if (isa_available(target)) all.push_back(target);
  }
  return all;
}

template <class T>
tensor<T, 2> random_matrix(const extents<2>& shape, std::uint64_t stream) {
  tensor<T, 2> m(shape);
  fill_normal<T>(m.flat(), 1.0, {5, stream});
  return m;
}

/// A view of rows x cols in a larger matrix, stored by rows or transposed.
template <class T>
struct placed {
  tensor<T, 2> all;
  tensor_view<T, 2> view;

  placed(const extents<2>& shape, bool transposed, std::uint64_t stream)
      : all(transposed ? random_matrix<T>({shape[1] + 3, shape[0] + 2}, stream)
                       : random_matrix<T>({shape[0] + 3, shape[1] + 2}, stream)),
        view(transposed ? transpose(all.view()) : all.view()) {
    view = view.slice(0, 1, shape[0]).slice(1, 1, shape[1]);
  }
};

/// Largest difference of two views, relative to 1 + |expected|.
template <class T>
double view_error(const tensor_view<T, 2>& got, const tensor_view<T, 2>& expected) {
  return largest_error(tensor<T, 2>(got), tensor<T, 2>(expected));
}

TEST_CASE_TEMPLATE("panels of all instruction sets: copies of any stride", T, float, double) {
  picker pick(1);
  for (isa target : targets()) {
    CAPTURE(to_string(target));
    const auto copy_panel = pufferfish::detail::panel_copier<T>(target);
    for (std::uint64_t round = 0; round < 80; ++round) {
      const index_t steps = pick(0, 40), width = 4 * pick(1, 12), count = pick(0, width);
      const placed<T> source({steps, count}, round % 2 == 0, round);
      tensor_view<T, 2> from = source.view;
      tensor<T, 2> spread({steps, 3 * count});
      if (round % 5 == 0) {
        fill_normal<T>(spread.flat(), 1.0, {6, round});
        from = {spread.data(), {steps, count}, {3 * count, 3}};
      }
      std::vector<T> to(static_cast<std::size_t>(steps * width + 1), T{7});
      copy_panel(from.data(), from.stride(0), from.stride(1), steps, count, to.data(), width);
      bool same = to.back() == T{7};
      for (index_t k = 0; k < steps; ++k) {
        for (index_t j = 0; j < width; ++j) {
          same = same && to[static_cast<std::size_t>(k * width + j)] == (j < count ? from(k, j) : T{});
        }
      }
      CHECK(same);
    }
  }
}

TEST_CASE_TEMPLATE("wide_product, row_product: against the reference, over random shapes and strides", T,
                   float, double) {
  const double tolerance = sizeof(T) == 4 ? 2e-5 : 1e-13;
  cpu_context ctx({2, 0});
  picker pick(2);
  for (std::uint64_t round = 0; round < 80; ++round) {
    const bool large = round % 8 == 0;
    const index_t m = pick(0, large ? 300 : 40), k = pick(0, large ? 2000 : 40),
                  n = pick(0, large ? 150 : 60);
    // The rows of row_product's left operand are dense.
    const bool by_rows = round % 3 == 1;
    const placed<T> a({m, k}, round % 2 == 0 && !by_rows, round), b({k, n}, round % 4 < 2, round + 100);
    placed<T> c({m, n}, false, round + 200);
    const bool add = round % 7 < 3, biased = round % 5 < 2;
    const tensor<T, 2> bias = random_matrix<T>({1, n}, round + 300);
    tensor<T, 2> expected(c.view);
    reference_gemm{}.multiply<T>(a.view, b.view, expected, add);
    for (index_t i = 0; biased && i < m; ++i) {
      for (index_t j = 0; j < n; ++j) expected(i, j) += bias(0, j);
    }
    const tensor<T, 2> around = c.all;
    const T* const added = biased ? bias.data() : nullptr;
    if (by_rows) {
      ops::row_product<T>(ctx, a.view, b.view, c.view, add, added);
    } else {
      ops::wide_product<T>(ctx, a.view, b.view, c.view, add, added);
    }
    CHECK(view_error<T>(c.view, expected.view()) < tolerance * (1.0 + std::sqrt(static_cast<double>(k))));
    copy(tensor_view<const T, 2>(around).slice(0, 1, m).slice(1, 1, n), c.view);
    CHECK(same_bits(std::vector<T>(c.all.flat().begin(), c.all.flat().end()),
                    std::vector<T>(around.flat().begin(), around.flat().end())));
  }
  tensor<T, 2> a({2, 3}), b({4, 5}), c({2, 5});
  CHECK_THROWS_AS(ops::wide_product<T>(ctx, a, b, c), shape_error);
  CHECK_THROWS_AS(ops::row_product<T>(ctx, a, b, c), shape_error);
}

TEST_CASE_TEMPLATE("row_product with a right operand of 8 MiB: by blocks of the depth", T, float, double) {
  const index_t m = 200, k = 1033, n = (index_t{8} << 20) / (k * index_t{sizeof(T)}) + 9;
  REQUIRE(pufferfish::detail::row_depth<T>(k, n) == 345);  // the last block has 343 steps
  REQUIRE(pufferfish::detail::row_tile<T>(k, n) < m);
  const tensor<T, 2> a = random_matrix<T>({m, k}, 1), b = random_matrix<T>({k, n}, 2),
                     before = random_matrix<T>({m, n}, 3);
  tensor<T, 2> expected({m, n});
  reference_gemm{}.multiply<T>(a, b, expected, false);
  for (const bool add : {false, true}) {
    for (index_t i = 0; add && i < m * n; ++i) expected.data()[i] += before.data()[i];
    tensor<T, 2> whole = before;
    cpu_context ctx;
    scratch_frame frame(ctx.scratch());
    const ops::detail::panel_shape<T> shape(n);
    pufferfish::detail::multiply_rows<T>(ops::detail::packed_b<T>::prepare(ctx, frame, shape, b, m), a, whole,
                                         add);
    CHECK(largest_error(whole, expected) < (sizeof(T) == 4 ? 1e-3 : 1e-12));
    for (const int threads : {1, 3}) {
      cpu_context own({threads, 0});
      tensor<T, 2> tiles = before;
      ops::row_product<T>(own, a, b, tiles, add);
      CHECK(std::equal(tiles.flat().begin(), tiles.flat().end(), whole.flat().begin()));
    }
  }
}

TEST_CASE_TEMPLATE("step_operand: against the reference, few steps and many, groups", T, float, double) {
  const double tolerance = sizeof(T) == 4 ? 2e-5 : 1e-13;
  cpu_context ctx({2, 0});
  picker pick(3);
  for (std::uint64_t round = 0; round < 80; ++round) {
    const index_t groups = round % 2 == 0 ? 1 : pick(2, 4), m = pick(0, 30);
    const index_t k = round % 20 == 3 ? 0 : pick(1, round % 8 == 0 ? 2000 : 40),
                  n = round % 3 == 0 ? 16 * pick(1, 4) : pick(1, 70);
    // Groups side by side, or (transposed) one below the other.
    const bool transposed = round % 4 < 2;
    const tensor<T, 2> all =
        random_matrix<T>(transposed ? extents<2>{groups * n, k} : extents<2>{k, groups * n}, round);
    const tensor_view<const T, 2> first =
        transposed ? transpose(all.view().slice(0, 0, n)) : all.view().slice(1, 0, n);
    const index_t group_step = transposed ? n * k : n;
    const tensor<T, 2> a = random_matrix<T>({m, groups * k}, round + 100);
    tensor<T, 2> c = random_matrix<T>({m, groups * n}, round + 200), expected = c;
    const bool add = round % 5 < 2;
    ops::reference::group_product<T>(a, first, group_step, expected.view(), add);
    scratch_frame frame(ctx.scratch());
    const ops::step_operand<T> b(ctx, frame, first, round % 7 < 3 ? 1 : 35, groups, group_step);
    b.multiply(ctx, a, c, add);
    CHECK(largest_error(c, expected) < tolerance * (1.0 + std::sqrt(static_cast<double>(k))));
  }
}

TEST_CASE("wide_product, row_product, step_operand, column_sums: the same bits for any number of threads") {
  const tensor<float, 2> a = random_matrix<float>({333, 1700}, 1), b = random_matrix<float>({1700, 77}, 2);
  const auto run = [&](int threads) {
    cpu_context ctx({threads, 0});
    tensor<float, 2> c({333, 77}), rows({333, 77}), step({333, 77}), sums({1, 1700});
    ops::wide_product<float>(ctx, a, b, c);
    ops::row_product<float>(ctx, a, b, rows);
    scratch_frame frame(ctx.scratch());
    ops::step_operand<float>(ctx, frame, b, 35).multiply(ctx, a, step, false);
    ops::column_sums<float>(ctx, a, sums.data(), false);
    std::vector<float> all(c.flat().begin(), c.flat().end());
    all.insert(all.end(), rows.flat().begin(), rows.flat().end());
    all.insert(all.end(), step.flat().begin(), step.flat().end());
    all.insert(all.end(), sums.flat().begin(), sums.flat().end());
    return all;
  };
  const auto one = run(1);
  CHECK(same_bits(one, run(2)));
  CHECK(same_bits(one, run(3)));
}

TEST_CASE_TEMPLATE("column_sums: against the reference", T, float, double) {
  cpu_context ctx({2, 0});
  picker pick(4);
  for (std::uint64_t round = 0; round < 30; ++round) {
    const extents<2> shape{pick(0, 60), pick(0, round % 4 == 0 ? 1200 : 40)};
    const placed<T> x(shape, false, round);
    tensor<T, 2> sums = random_matrix<T>({1, shape[1]}, round + 50), expected = sums;
    const bool add = round % 2 == 0;
    ops::column_sums<T>(ctx, x.view, sums.data(), add);
    ops::reference::column_sums<T>(x.view, expected.data(), add);
    CHECK(largest_error(sums, expected) < 1e-12 + (sizeof(T) == 4 ? 1e-6 : 0.0));
  }
}

}  // namespace
