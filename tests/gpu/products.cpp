// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "support.hpp"

#include <pufferfish/core/error.hpp>
#include <pufferfish/gpu/ops/products.hpp>

using namespace gpu_test;

namespace {

struct product_shape {
  index_t m, k, n;
};
constexpr product_shape shapes[] = {{0, 3, 4}, {1, 1, 1}, {3, 0, 5}, {5, 7, 3}, {64, 16, 33}, {130, 65, 128}};

// A view of m x n numbers that are stored by rows or by columns, with `gap` elements after each.
template <class T>
pf::tensor_view<T, 2> lying(T* data, index_t m, index_t n, bool transposed, index_t gap) {
  if (transposed) return {data, {m, n}, {1, m + gap}};
  return {data, {m, n}, {n + gap, 1}};
}

}  // namespace

TEST_CASE("gpu products: every transposition, with steps between rows, with and without add") {
  pf::gpu_context& ctx = gpu_context();
  std::uint64_t stream = 0;
  for (const auto& [m, k, n] : shapes) {
    for (int variant = 0; variant < 8; ++variant) {
      const bool ta = variant & 1, tb = variant & 2, add = variant & 4;
      const index_t gap = variant % 3;
      CAPTURE(m);
      CAPTURE(k);
      CAPTURE(n);
      CAPTURE(variant);
      auto a = random_twin<float>((m + gap) * (k + gap) + 1, ++stream);
      auto b = random_twin<float>((k + gap) * (n + gap) + 1, ++stream);
      auto c = random_twin<float>((m + gap) * (n + gap), ++stream);
      // The second and third operand unaligned, as packed parameters are.
      pf::reference_gemm{}.multiply<float>(lying<const float>(a.host_data(), m, k, ta, gap),
                                           lying<const float>(b.host_data() + 1, k, n, tb, gap),
                                           lying(c.host_data(), m, n, false, gap), add);
      pf::gpu::multiply<float>(ctx, lying<const float>(a.device_data(), m, k, ta, gap),
                               lying<const float>(b.device_data() + 1, k, n, tb, gap),
                               lying(c.device_data(), m, n, false, gap), add);
      CHECK(difference(c, 1.0) < 1e-5);
    }
  }
}

TEST_CASE("gpu products: linear layers' forward and backward passes") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  std::uint64_t stream = 100;
  for (const auto& [m, k, n] : shapes) {
    CAPTURE(m);
    CAPTURE(k);
    CAPTURE(n);
    auto x = random_twin<float>(m * k, ++stream), w = random_twin<float>(k * n, ++stream);
    auto bias = random_twin<float>(n, ++stream), y = random_twin<float>(m * n, ++stream);
    auto dx = random_twin<float>(m * k, ++stream), dw = random_twin<float>(k * n, ++stream);
    const pf::extents<2> xs{m, k}, ws{k, n}, ys{m, n};
    for (const bool with_bias : {true, false}) {
      pf::ops::linear_forward<float>(host, x.host_view(xs), w.host_view(ws),
                                     with_bias ? bias.host_data() : nullptr, y.host_view(ys));
      pf::ops::linear_forward<float>(ctx, x.device_view(xs), w.device_view(ws),
                                     with_bias ? bias.device_data() : nullptr, y.device_view(ys));
      CHECK(difference(y, 1.0) < 1e-5);
    }
    for (const bool add : {false, true}) {
      pf::ops::linear_backward_input<float>(host, y.host_view(ys), w.host_view(ws), dx.host_view(xs), add);
      pf::ops::linear_backward_input<float>(ctx, y.device_view(ys), w.device_view(ws), dx.device_view(xs),
                                            add);
      CHECK(difference(dx, 1.0) < 1e-5);
      pf::ops::linear_backward_weight<float>(host, x.host_view(xs), y.host_view(ys), dw.host_view(ws), add);
      pf::ops::linear_backward_weight<float>(ctx, x.device_view(xs), y.device_view(ys), dw.device_view(ws),
                                             add);
      CHECK(difference(dw, 1.0) < 1e-5);
    }
  }
}

TEST_CASE("gpu products: a bias is added to every row, with and without add") {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  std::uint64_t stream = 200;
  for (const auto& [m, k, n] : shapes) {
    for (int variant = 0; variant < 8; ++variant) {
      const bool add = variant & 1, wide = variant & 2;
      // cuBLASLt adds an aligned bias, a kernel adds another.
      const index_t skew = variant / 4;
      CAPTURE(m);
      CAPTURE(k);
      CAPTURE(n);
      CAPTURE(variant);
      auto a = random_twin<float>(m * k, ++stream), b = random_twin<float>(k * n, ++stream);
      auto bias = random_twin<float>(n + skew, ++stream), c = random_twin<float>(m * n, ++stream);
      const auto multiply = [&](auto& where, const pf::tensor_view<const float, 2>& left,
                                const pf::tensor_view<const float, 2>& right,
                                const pf::tensor_view<float, 2>& result, const float* row) {
        wide ? pf::ops::wide_product<float>(where, left, right, result, add, row)
             : pf::ops::row_product<float>(where, left, right, result, add, row);
      };
      const pf::extents<2> as{m, k}, bs{k, n}, cs{m, n};
      multiply(host, a.host_view(as), b.host_view(bs), c.host_view(cs), bias.host_data() + skew);
      multiply(ctx, a.device_view(as), b.device_view(bs), c.device_view(cs), bias.device_data() + skew);
      CHECK(difference(c, 1.0) < 1e-5);
    }
  }
}

TEST_CASE("gpu products: batches") {
  pf::gpu_context& ctx = gpu_context();
  constexpr index_t count = 5, m = 7, k = 9, n = 4;
  auto a = random_twin<float>(count * m * k, 1), b = random_twin<float>(count * k * n, 2);
  auto c = random_twin<float>(count * m * n, 3);
  const auto item = [](float* data, index_t i, index_t rows, index_t columns) {
    return pf::tensor_view<float, 2>(data + i * rows * columns, {rows, columns});
  };
  for (const bool add : {false, true}) {
    for (index_t i = 0; i < count; ++i) {
      pf::reference_gemm{}.multiply<float>(item(a.host_data(), i, m, k), item(b.host_data(), i, k, n),
                                           item(c.host_data(), i, m, n), add);
    }
    pf::gpu::multiply_batch<float>(ctx, count, item(a.device_data(), 0, m, k), m * k,
                                   item(b.device_data(), 0, k, n), k * n, item(c.device_data(), 0, m, n),
                                   m * n, add);
    CHECK(difference(c, 1.0) < 1e-5);
  }
}

TEST_CASE("gpu products: shapes that do not fit, views that no side of is dense") {
  pf::gpu_context& ctx = gpu_context();
  auto a = random_twin<float>(64, 1), c = random_twin<float>(64, 2);
  const auto view = [](float* data, index_t m, index_t n) { return pf::tensor_view<float, 2>(data, {m, n}); };
  CHECK_THROWS_AS(pf::gpu::multiply<float>(ctx, view(a.device_data(), 2, 3), view(a.device_data(), 4, 3),
                                           view(c.device_data(), 2, 3)),
                  pf::shape_error);
  const pf::tensor_view<float, 2> scattered(a.device_data(), {3, 3}, {6, 2});
  CHECK_THROWS_AS(pf::gpu::multiply<float>(ctx, scattered, scattered, view(c.device_data(), 3, 3)),
                  pf::shape_error);
}
