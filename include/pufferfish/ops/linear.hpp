// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// y = x W + b over rows, with its gradients: the plain reference and the fast CPU form. The fast form is
/// written over "patches", which give the left operand's rows, so that convolution shares it (ops/conv.hpp).
///
/// Weights are stored [in][out], outputs innermost.

#include <algorithm>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/linalg/native_gemm.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace reference {

/// y_mn = sum_k x_mk w_kn + b_n. x: M x K, w: K x N, bias: N elements or nullptr, y: M x N.
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

/// Rows in a tile of the left operand: a tile of input and output stays in the second-level cache.
template <class T>
index_t tile_rows(index_t depth, index_t columns) {
  constexpr index_t cache = index_t{384} * 1024 / static_cast<index_t>(sizeof(T));
  return std::clamp<index_t>(cache / std::max<index_t>(1, depth + columns) / 24 * 24, 24, 4096);
}

template <class T>
void add_bias(const tensor_view<T, 2>& y, const T* bias) {
  if (bias == nullptr) return;
  for (index_t m = 0; m < y.extent(0); ++m) {
    T* row = y.data() + m * y.stride(0);
    for (index_t n = 0; n < y.extent(1); ++n) row[n] += bias[n];
  }
}

/// Rows of a left operand: either those of a dense matrix where they lie, or rows that `gather` writes into a
/// buffer, tile by tile. Known at run time, so that what multiplies them is compiled once.
template <class T>
struct patch_rows {
  using gather_rows = void (*)(const void* source, index_t first, index_t count, T* buffer);

  const void* source;  ///< of `gather`; the dense rows themselves without it
  index_t depth;
  gather_rows gather = nullptr;

  index_t buffer_size(index_t tile) const { return gather == nullptr ? 0 : tile * depth; }
  tensor_view<const T, 2> operator()(index_t first, index_t count, T* buffer) const {
    if (gather == nullptr) return {static_cast<const T*>(source) + first * depth, {count, depth}};
    gather(source, first, count, buffer);
    return {buffer, {count, depth}};
  }
};

template <class T>
patch_rows<T> dense_rows(const tensor_view<const T, 2>& matrix) {
  return {matrix.flat().data(), matrix.extent(1)};
}

/// y = P w + b with the rows P. w: K x N, any strides.
template <class T>
void patches_forward(context<device::cpu>& ctx, const patch_rows<T>& patches,
                     const tensor_view<const T, 2>& w, const T* bias, const tensor_view<T, 2>& y) {
  if (y.empty()) return;
  const index_t depth = w.extent(0), columns = w.extent(1), rows = y.extent(0);
  const index_t tile = tile_rows<T>(depth, columns);
  scratch_frame frame(ctx.scratch());
  const auto operand =
      gemm_operand<T>::prepare(w, frame.take<T>(gemm_operand<T>::storage_size(depth, columns)));
  const index_t buffer_size = patches.buffer_size(tile);
  T* buffers = frame.take<T>(buffer_size * ctx.threads());
  ctx.parallel_for((rows + tile - 1) / tile, [&](index_t task, int worker) {
    const index_t first = task * tile, count = std::min(tile, rows - first);
    const auto left = patches(first, count, buffers + worker * buffer_size);
    const tensor_view<T, 2> result = y.slice(0, first, count);
    operand.multiply(left, result, false);
    add_bias(result, bias);
  });
}

/// dw (+)= P^T dy for a tall P: split over the rows. The number of splits depends on the shape alone and
/// their sums are added in order, so the result does not depend on the number of threads.
template <class T>
void patches_backward_weight(context<device::cpu>& ctx, const patch_rows<T>& patches,
                             const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dw,
                             bool accumulate) {
  const index_t depth = dw.extent(0), columns = dw.extent(1), rows = dy.extent(0);
  if (dw.empty()) return;
  constexpr index_t partial_bytes = index_t{16} << 20;
  const index_t weight_bytes = dw.size() * static_cast<index_t>(sizeof(T));
  const index_t splits = std::clamp<index_t>(std::clamp<index_t>(partial_bytes / weight_bytes, 4, 16), 1,
                                             std::max<index_t>(1, rows / 256));
  const index_t tile = std::min<index_t>(384, tile_rows<T>(depth, columns));
  scratch_frame frame(ctx.scratch());
  T* partials = frame.take<T>(dw.size() * (splits - 1));
  const index_t buffer_size = patches.buffer_size(tile);
  T* buffers = frame.take<T>(buffer_size * ctx.threads());
  const index_t storage_size = gemm_operand<T>::storage_size(tile, columns);
  T* storage = frame.take<T>(storage_size * ctx.threads());
  ctx.parallel_for(splits, [&](index_t split, int worker) {
    const index_t begin = rows * split / splits, end = rows * (split + 1) / splits;
    const tensor_view<T, 2> sum =
        split == 0 ? dw : tensor_view<T, 2>(partials + (split - 1) * dw.size(), dw.shape());
    bool add = split == 0 && accumulate;
    for (index_t first = begin; first < end || first == begin; first += tile) {
      const index_t count = std::min(tile, end - first);
      const auto left = patches(first, count, buffers + worker * buffer_size);
      const auto right = gemm_operand<T>::prepare(dy.slice(0, first, count), storage + worker * storage_size);
      right.multiply(transpose(left), sum, add);
      add = true;
    }
  });
  constexpr index_t chunk = 4096;
  T* target = dw.data();
  ctx.parallel_for(splits > 1 ? (dw.size() + chunk - 1) / chunk : 0, [&](index_t task, int) {
    const index_t begin = task * chunk, end = std::min(begin + chunk, dw.size());
    for (index_t split = 1; split < splits; ++split) {
      const T* partial = partials + (split - 1) * dw.size();
      for (index_t i = begin; i < end; ++i) target[i] += partial[i];
    }
  });
}

inline void check_linear(const char* what, const extents<2>& x, const extents<2>& w, const extents<2>& y) {
  if (x[1] != w[0] || w[1] != y[1] || x[0] != y[0]) {
    pufferfish::detail::throw_error<shape_error>(
        {what, ": rows ", x, " and weight ", w, " [in x out] do not fit ", y});
  }
}

}  // namespace detail

/// y_mn = sum_k x_mk w_kn + b_n. x: M x K and y: M x N dense, w: K x N dense, bias: N elements or nullptr; y
/// overlaps no input. Throws shape_error if the shapes do not fit.
template <class T>
void linear_forward(context<device::cpu>& ctx, const tensor_view<const T, 2>& x,
                    const tensor_view<const T, 2>& w, const T* bias, const tensor_view<T, 2>& y) {
  detail::check_linear("linear_forward", x.shape(), w.shape(), y.shape());
  detail::patches_forward<T>(ctx, detail::dense_rows(x), w, bias, y);
}

/// dx = dy w^T. Shapes, density and errors as linear_forward; dx overlaps no input.
template <class T>
void linear_backward_input(context<device::cpu>& ctx, const tensor_view<const T, 2>& dy,
                           const tensor_view<const T, 2>& w, const tensor_view<T, 2>& dx) {
  detail::check_linear("linear_backward_input", dx.shape(), w.shape(), dy.shape());
  detail::patches_forward<T>(ctx, detail::dense_rows(dy), transpose(w), static_cast<const T*>(nullptr), dx);
}

/// dw = x^T dy, or dw += x^T dy. Shapes, density and errors as linear_forward; dw overlaps no input.
template <class T>
void linear_backward_weight(context<device::cpu>& ctx, const tensor_view<const T, 2>& x,
                            const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dw, bool accumulate) {
  detail::check_linear("linear_backward_weight", x.shape(), dw.shape(), dy.shape());
  detail::patches_backward_weight<T>(ctx, detail::dense_rows(x), dy, dw, accumulate);
}

/// db_n = sum_m dy_mn, or db_n += that. dy: M x N, rows dense. Summed in fixed order, in double.
template <class T>
void bias_gradient(context<device::cpu>& ctx, const tensor_view<const T, 2>& dy, T* db, bool accumulate) {
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
    db[n] = static_cast<T>(sum);
  }
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
