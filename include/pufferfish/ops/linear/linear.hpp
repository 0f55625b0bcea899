// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The linear map y = x w + b of the rows of x, and its gradients: a plain reference and the fast
/// implementation.
///
/// Weights are stored as [in][out] with contiguous rows. The three products and the gradient of the bias are
/// separate calls, since layers need different subsets of them:
///
/// \code
/// tensor<float, 2> x({rows, in}), w({in, out}), y({rows, out}), dx({rows, in}), dw({in, out});
/// ops::linear_forward<float>(ctx, x, w, bias.data(), y);
/// ops::linear_backward_input<float>(ctx, dy, w, dx);
/// ops::linear_backward_weight<float>(ctx, x, dy, dw, false);
/// ops::bias_gradient<float>(ctx, dy, db.data(), false);
/// \endcode

#include <algorithm>

#include <pufferfish/core/message.hpp>
#include <pufferfish/linalg/gemm/native_gemm.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/linear/narrow_product.hpp>
#include <pufferfish/ops/linear/pair_product.hpp>
#include <pufferfish/ops/linear/row_product.hpp>
#include <pufferfish/ops/linear/weight_splits.hpp>
#include <pufferfish/ops/norm/moments.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace reference {

/// The definition: y_mn = sum_k x_mk w_kn + b_n. Each sum is computed in double and rounded; the bias is then
/// added in T. x: M x K, w: K x N, y: M x N, any strides; bias: N elements or nullptr. y overlaps no input.
/// Throws shape_error if the shapes do not fit.
template <class T>
void linear_forward(const tensor_view<const T, 2>& x, const tensor_view<const T, 2>& w, const T* bias,
                    const tensor_view<T, 2>& y) {
  reference_gemm{}.multiply<T>(x, w, y);
  if (bias == nullptr) return;
  for (index_t m = 0; m < y.extent(0); ++m) {
    for (index_t n = 0; n < y.extent(1); ++n) y(m, n) += bias[n];
  }
}

}  // namespace reference

namespace detail {

/// dw = x^T dy, or with `accumulate` dw += x^T dy, for an x of many rows. x: M x K and dy: M x N, contiguous
/// rows; dw: K x N, dense. The rows are split into parts (weight_splits), whose sums are added in order.
///
/// before(first, count, worker) is called before the rows first .. first + count - 1 are multiplied, for
/// other work on these rows while they are in the cache. The rows of different calls are disjoint, and all
/// calls together cover all rows. Calls run in several threads, each with its own `worker`. With M = 0,
/// before() is called once with count = 0. `most`: largest number of rows in a call.
template <class T, class Before>
void multiply_transposed(context<device::cpu>& ctx, const tensor_view<const T, 2>& x,
                         const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dw, bool accumulate,
                         Before&& before, index_t most = 256) {
  const index_t columns = dw.extent(1), rows = dy.extent(0);
  const index_t splits = weight_splits<T>(rows, dw.size());
  const index_t tile = std::min(most, pufferfish::detail::cached_rows<T>(dw.extent(0) + columns));
  scratch_frame frame(ctx.scratch());
  T* partials = frame.take<T>(dw.size() * (splits - 1));
  const index_t storage_size = gemm_operand<T>::storage_size(tile, columns);
  T* storage = frame.take<T>(storage_size * ctx.threads());
  ctx.parallel_for(splits, [&](index_t split, int worker) {
    const index_t begin = rows * split / splits, end = rows * (split + 1) / splits;
    const tensor_view<T, 2> sum =
        split == 0 ? dw : tensor_view<T, 2>(partials + (split - 1) * dw.size(), dw.shape());
    bool add = split == 0 && accumulate;
    for (index_t first = begin; first < end || first == begin; first += tile) {
      const index_t count = std::min(tile, end - first);
      before(first, count, worker);
      const auto right =
          gemm_operand<T>::prepare(dy.slice(0, first, count), storage + worker * storage_size, dw.extent(0));
      right.multiply(transpose(x.slice(0, first, count)), sum, add);
      add = true;
    }
  });
  add_in_order(ctx, partials, splits - 1, dw.data(), dw.size());
}

/// Throws shape_error unless x w has the shape of y. `what`: the operation's name, for the error text.
inline void check_linear(const char* what, const extents<2>& x, const extents<2>& w, const extents<2>& y) {
  if (x[1] != w[0] || w[1] != y[1] || x[0] != y[0]) {
    pufferfish::detail::throw_error<shape_error>(
        {what, ": rows ", x, " and weight ", w, " [in x out] do not fit ", y});
  }
}

}  // namespace detail

/// y_mn = sum_k x_mk w_kn + b_n. x: M x K, w: K x N, y: M x N, all dense; bias: N elements or nullptr. y is
/// overwritten and overlaps no input. `epilogue`: a summand, a ReLU, or moments of the columns, applied while
/// rows are in the cache (by a device and for 16-bit types, summand and ReLU as a pass of their own). A
/// device collects no moments. M = 0 and K = 0 are allowed (an empty sum is 0). Throws
/// shape_error if the shapes do not fit.
///
/// Sums are computed as in wide_product; those of 16-bit factors are in float. In products of bfloat16,
/// operands or sums whose magnitude is below 2^-126 may count as 0.
template <class T, class Device>
void linear_forward(context<Device>& ctx, const tensor_view<const T, 2>& x, const tensor_view<const T, 2>& w,
                    const T* bias, const tensor_view<T, 2>& y, const output_epilogue<T>& epilogue = {}) {
  detail::check_linear("linear_forward", x.shape(), w.shape(), y.shape());
  if constexpr (!is_cpu<Device>) {
    linear_ops<Device>::product(ctx, x, w, y, false, bias);
  } else if constexpr (detail::is_narrow<T>) {
    if (detail::multiplies_pairs<T>(x.extent(1))) {
      detail::report_product<T>("pairs", x.shape(), w.shape());
      detail::pair_rows(ctx, x, w, bias, y, epilogue.moments, false);
    } else {
      detail::narrow_rows(ctx, x, w, bias, y, epilogue.moments, false,
                          [&](const auto&... block) { detail::multiply_rows<float>(ctx, block...); });
    }
  } else {
    return detail::multiply_rows<T>(ctx, x, w, bias, y, epilogue);
  }
  detail::apply_epilogue(ctx, epilogue, y);
}
PUFFERFISH_SEPARATE_OPERATION(dense, linear_forward);

/// Gradient of the input of linear_forward: dx = dy w^T, or with `add` dx += dy w^T. dy: M x N, w: K x N, dx:
/// M x K, all dense; dx overlaps no input. Sums are computed as in linear_forward. Throws shape_error if the
/// shapes do not fit.
template <class T, class Device>
void linear_backward_input(context<Device>& ctx, const tensor_view<const T, 2>& dy,
                           const tensor_view<const T, 2>& w, const tensor_view<T, 2>& dx, bool add = false) {
  detail::check_linear("linear_backward_input", dx.shape(), w.shape(), dy.shape());
  const T* const no_bias = nullptr;
  if constexpr (!is_cpu<Device>) {
    linear_ops<Device>::product(ctx, dy, transpose(w), dx, add, no_bias);
  } else if constexpr (detail::is_narrow<T>) {
    moment_parts<T>* const no_moments = nullptr;
    if (detail::multiplies_pairs<T>(dy.extent(1))) {
      detail::report_product<T>("pairs", dy.shape(), transpose(w).shape());
      return detail::pair_rows<T>(ctx, dy, transpose(w), no_bias, dx, no_moments, add);
    }
    detail::narrow_rows<T>(ctx, dy, transpose(w), no_bias, dx, no_moments, add, [&](const auto&... block) {
      detail::multiply_rows<float>(ctx, block..., {}, add);
    });
  } else {
    detail::multiply_rows<T>(ctx, dy, transpose(w), no_bias, dx, {}, add);
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, linear_backward_input);

/// Gradient of the weight of linear_forward: dw = x^T dy, or with `accumulate` dw += x^T dy. x: M x K, dy:
/// M x N, dw: K x N, all dense; dw overlaps no input. M = 0 is an empty sum. Throws shape_error if the shapes
/// do not fit.
///
/// On the CPU, the sum over rows is split into parts whose sums are added in order. Scratch memory holds up
/// to 15 partial sums of the size of dw (3 if dw has 1 MiB or more), or a packed copy of x if N is at least
/// 512 and M at most 8192. If bfloat16 is multiplied in pairs, each thread needs another 128 (K + 48)
/// pairs. A device needs no scratch memory, and does not round sums of 16-bit factors to 16 bits.
template <class T, class Device>
void linear_backward_weight(context<Device>& ctx, const tensor_view<const T, 2>& x,
                            const tensor_view<const T, 2>& dy, const tensor_view<parameter_t<T>, 2>& dw,
                            bool accumulate) {
  detail::check_linear("linear_backward_weight", x.shape(), dw.shape(), dy.shape());
  if (dw.empty()) return;
  if constexpr (!is_cpu<Device>) {
    linear_ops<Device>::weight_gradient(ctx, x, dy, dw, accumulate);
  } else if constexpr (detail::is_narrow<T>) {
    if (detail::has_pairs<T>()) {
      detail::report_product<T>("pairs of rows", transpose(x).shape(), dy.shape());
      return detail::pair_weight_gradient(ctx, x, dy, dw, accumulate);
    }
    detail::narrow_weight_gradient(ctx, x, dy, [&](const auto& from, const auto& gradient, bool first) {
      linear_backward_weight<float>(ctx, from, gradient, dw, accumulate || !first);
    });
  } else {
    // Packing x pays for wide gradients. With very many rows, the packed copy would take too much memory.
    constexpr index_t wide = 512, most_rows = 8192;
    const bool packs = dw.extent(1) >= wide && x.extent(0) > 0 && x.extent(0) <= most_rows;
    detail::report_product<T>(packs ? "both operands in panels" : "sums of parts of the rows",
                              transpose(x).shape(), dy.shape());
    if (packs) {
      return wide_product<T>(ctx, transpose(x), dy, dw, accumulate);
    }
    // Rows of x that are at most a cache line long are multiplied faster than x and dy are read from memory.
    // Unless both fit into most caches, the next of smaller tiles is then prefetched. Longer rows of x are
    // prefetched by the kernels.
    constexpr index_t size = static_cast<index_t>(sizeof(T)), line = 64, large = index_t{32} << 20;
    const bool waits = dw.extent(0) * size <= line && (x.size() + dy.size()) * size >= large;
    const index_t tile = waits ? 64 : 256;
    const auto prefetch = [tile](const tensor_view<const T, 2>& from, index_t first) {
      pufferfish::detail::prefetch_block(from.data() + first * from.stride(0), from.stride(0),
                                         std::min(tile, from.extent(0) - first), from.extent(1));
    };
    const auto prefetch_next = [&](index_t first, index_t count, int) {
      if (!waits) return;
      prefetch(x, first + count);
      prefetch(dy, first + count);
    };
    detail::multiply_transposed<T>(ctx, x, dy, dw, accumulate, prefetch_next, tile);
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, linear_backward_weight);

/// Gradient of the bias of linear_forward: db_n = sum_m dy_mn, or with `accumulate` db_n += sum_m dy_mn. dy:
/// M x N, contiguous rows, any row stride; db: N elements that do not overlap dy. Each sum is computed in
/// double and rounded once. On the CPU it has up to 64 parts of at least 256 rows, which are added in order;
/// their boundaries depend on M alone. On a device, the sum is that of column_sums.
template <class T, class Device>
void bias_gradient(context<Device>& ctx, const tensor_view<const T, 2>& dy, parameter_t<T>* db,
                   bool accumulate) {
  if constexpr (!is_cpu<Device>) {
    linear_ops<Device>::column_sums(ctx, dy, db, accumulate);
  } else {
    const index_t rows = dy.extent(0), columns = dy.extent(1);
    const index_t splits = std::clamp<index_t>(rows / 256, 1, 64);
    scratch_frame frame(ctx.scratch());
    double* sums = frame.take<double>(splits * columns);
    ctx.parallel_for(splits, [&](index_t split, int) {
      double* sum = sums + split * columns;
      std::fill_n(sum, columns, 0.0);
      for (index_t m = rows * split / splits; m < rows * (split + 1) / splits; ++m) {
        const T* row = dy.data() + m * dy.stride(0);
        for (index_t n = 0; n < columns; ++n) sum[n] += static_cast<double>(row[n]);
      }
    });
    for (index_t n = 0; n < columns; ++n) {
      double sum = accumulate ? static_cast<double>(db[n]) : 0.0;
      for (index_t split = 0; split < splits; ++split) sum += sums[split * columns + n];
      db[n] = static_cast<parameter_t<T>>(sum);
    }
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, bias_gradient);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
