// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Batch normalisation over the rows of a matrix (pixels x channels): statistics, normalisation, gradients;
/// the plain reference and the fast CPU form. Every form reads its input once or twice, channels innermost.
///
/// Source: Ioffe, Szegedy: "Batch normalization", ICML 2015, section 3.

#include <algorithm>
#include <cmath>

#include <pufferfish/ops/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace reference {

/// mean_c = sum_m x_mc / M, variance_c = sum_m (x_mc - mean_c)^2 / M. M > 0.
template <class T>
void batch_norm_statistics(const tensor_view<const T, 2>& x, double* mean, double* variance) {
  const auto rows = static_cast<double>(x.extent(0));
  for (index_t c = 0; c < x.extent(1); ++c) {
    double sum = 0.0, squares = 0.0;
    for (index_t m = 0; m < x.extent(0); ++m) sum += static_cast<double>(x(m, c));
    mean[c] = sum / rows;
    for (index_t m = 0; m < x.extent(0); ++m) {
      const double distance = static_cast<double>(x(m, c)) - mean[c];
      squares += distance * distance;
    }
    variance[c] = squares / rows;
  }
}

/// y_mc = (x_mc - mean_c) inv_std_c weight_c + bias_c.
template <class T>
void batch_norm_apply(const tensor_view<const T, 2>& x, const T* mean, const T* inv_std, const T* weight,
                      const T* bias, const tensor_view<T, 2>& y) {
  for (index_t m = 0; m < x.extent(0); ++m) {
    for (index_t c = 0; c < x.extent(1); ++c) {
      y(m, c) = (x(m, c) - mean[c]) * (inv_std[c] * weight[c]) + bias[c];
    }
  }
}

/// With z_mc = (x_mc - mean_c) inv_std_c: dbias_c = sum_m dy_mc, dweight_c = sum_m dy_mc z_mc,
/// dx_mc = weight_c inv_std_c (dy_mc - dbias_c / M - z_mc dweight_c / M).
template <class T>
void batch_norm_backward(const tensor_view<const T, 2>& x, const tensor_view<const T, 2>& dy, const T* mean,
                         const T* inv_std, const T* weight, double* dweight, double* dbias,
                         const tensor_view<T, 2>& dx) {
  const auto rows = static_cast<double>(x.extent(0));
  for (index_t c = 0; c < x.extent(1); ++c) {
    const auto z = [&](index_t m) { return static_cast<double>((x(m, c) - mean[c]) * inv_std[c]); };
    dbias[c] = dweight[c] = 0.0;
    for (index_t m = 0; m < x.extent(0); ++m) {
      dbias[c] += static_cast<double>(dy(m, c));
      dweight[c] += static_cast<double>(dy(m, c)) * z(m);
    }
    if (dx.is_null()) continue;
    for (index_t m = 0; m < x.extent(0); ++m) {
      dx(m, c) = static_cast<T>(static_cast<double>(weight[c] * inv_std[c]) *
                                (static_cast<double>(dy(m, c)) - dbias[c] / rows - z(m) * dweight[c] / rows));
    }
  }
}

}  // namespace reference

namespace detail {

/// Into how many tasks a pass over rows x channels is cut, from the shape alone.
inline index_t norm_splits(index_t rows, index_t channels) {
  return std::clamp<index_t>(rows * channels / 32768, 1, std::clamp<index_t>(rows, 1, 64));
}

/// Mean and sum of squared distances of some rows, two passes over them: they should fit in the first-level
/// cache.
template <class T>
void block_moments(const T* x, index_t rows, index_t channels, double* mean, double* squares) {
  std::fill_n(mean, channels, 0.0);
  std::fill_n(squares, channels, 0.0);
  for (index_t m = 0; m < rows; ++m) {
    const T* row = x + m * channels;
    for (index_t c = 0; c < channels; ++c) mean[c] += static_cast<double>(row[c]);
  }
  const double scale = 1.0 / static_cast<double>(rows);
  for (index_t c = 0; c < channels; ++c) mean[c] *= scale;
  for (index_t m = 0; m < rows; ++m) {
    const T* row = x + m * channels;
    for (index_t c = 0; c < channels; ++c) {
      const double distance = static_cast<double>(row[c]) - mean[c];
      squares[c] += distance * distance;
    }
  }
}

/// Joins the moments of `other_rows` further rows to those of `rows` rows (Chan, Golub, LeVeque: "Updating
/// formulae and a pairwise algorithm for computing sample variances", 1979).
inline void merge_moments(index_t rows, double* mean, double* squares, index_t other_rows,
                          const double* other_mean, const double* other_squares, index_t channels) {
  const auto n = static_cast<double>(rows), k = static_cast<double>(other_rows);
  const double share = k / (n + k), weight = n * share;
  for (index_t c = 0; c < channels; ++c) {
    const double distance = other_mean[c] - mean[c];
    mean[c] += distance * share;
    squares[c] += other_squares[c] + distance * distance * weight;
  }
}

/// Mean and sum of squared distances of any number of rows (at least one), block by block. `work`: 2
/// channels.
template <class T>
void range_moments(const T* x, index_t rows, index_t channels, double* mean, double* squares, double* work) {
  const index_t block = std::clamp<index_t>(4096 / channels, 8, 256);
  block_moments(x, std::min(block, rows), channels, mean, squares);
  for (index_t first = block; first < rows; first += block) {
    const index_t count = std::min(block, rows - first);
    block_moments(x + first * channels, count, channels, work, work + channels);
    merge_moments(first, mean, squares, count, work, work + channels, channels);
  }
}

}  // namespace detail

/// mean_c = sum_m x_mc / M, variance_c = sum_m (x_mc - mean_c)^2 / M (the biased one), in double, without
/// cancellation. x: M x C dense, M > 0; mean, variance: C elements.
template <class T>
void batch_norm_statistics(context<device::cpu>& ctx, const tensor_view<const T, 2>& x, double* mean,
                           double* variance) {
  const index_t rows = x.extent(0), channels = x.extent(1);
  PUFFERFISH_ASSERT(rows > 0, "batch_norm_statistics: no rows");
  const index_t splits = detail::norm_splits(rows, channels);
  const T* from = x.flat().data();
  scratch_frame frame(ctx.scratch());
  double* parts = frame.take<double>(splits * 4 * channels);
  ctx.parallel_for(splits, [&](index_t split, int) {
    const index_t begin = rows * split / splits, end = rows * (split + 1) / splits;
    double* part = parts + split * 4 * channels;
    detail::range_moments(from + begin * channels, end - begin, channels, part, part + channels,
                          part + 2 * channels);
  });
  std::copy_n(parts, channels, mean);
  std::copy_n(parts + channels, channels, variance);
  for (index_t split = 1; split < splits; ++split) {
    const index_t begin = rows * split / splits, end = rows * (split + 1) / splits;
    const double* part = parts + split * 4 * channels;
    detail::merge_moments(begin, mean, variance, end - begin, part, part + channels, channels);
  }
  for (index_t c = 0; c < channels; ++c) variance[c] /= static_cast<double>(rows);
}

/// y_mc = (x_mc - mean_c) inv_std_c weight_c + bias_c. x, y: M x C dense; the rest C elements; y
/// overlaps nothing.
template <class T>
void batch_norm_apply(context<device::cpu>& ctx, const tensor_view<const T, 2>& x, const T* mean,
                      const T* inv_std, const T* weight, const T* bias, const tensor_view<T, 2>& y) {
  const index_t channels = x.extent(1);
  scratch_frame frame(ctx.scratch());
  T* scale = frame.take<T>(channels);
  for (index_t c = 0; c < channels; ++c) scale[c] = inv_std[c] * weight[c];
  const T* from = x.flat().data();
  T* to = y.flat().data();
  for_row_chunks(ctx, x.extent(0), channels, [&](index_t begin, index_t end) {
    for (index_t m = begin; m < end; ++m) {
      const T* in = from + m * channels;
      T* PUFFERFISH_RESTRICT out = to + m * channels;
      for (index_t c = 0; c < channels; ++c) out[c] = (in[c] - mean[c]) * scale[c] + bias[c];
    }
  });
}

/// The gradients of y = batch_norm_apply(x) with mean and inv_std depending on x (formulas:
/// reference::batch_norm_backward). dweight, dbias: C sums in double, overwritten. dx: a null view where not
/// wanted; it overlaps nothing. x, dy, dx: M x C dense. mean and inv_std as they were given to
/// batch_norm_apply.
template <class T>
void batch_norm_backward(context<device::cpu>& ctx, const tensor_view<const T, 2>& x,
                         const tensor_view<const T, 2>& dy, const T* mean, const T* inv_std, const T* weight,
                         double* dweight, double* dbias, const tensor_view<T, 2>& dx) {
  const index_t rows = x.extent(0), channels = x.extent(1);
  const index_t splits = detail::norm_splits(rows, channels);
  const T* input = x.flat().data();
  const T* gradient = dy.flat().data();
  scratch_frame frame(ctx.scratch());
  double* parts = frame.take<double>(splits * 2 * channels);
  ctx.parallel_for(splits, [&](index_t split, int) {
    double* PUFFERFISH_RESTRICT sum = parts + split * 2 * channels;
    double* PUFFERFISH_RESTRICT product = sum + channels;
    std::fill_n(sum, 2 * channels, 0.0);
    for (index_t m = rows * split / splits; m < rows * (split + 1) / splits; ++m) {
      const T* in = input + m * channels;
      const T* g = gradient + m * channels;
      for (index_t c = 0; c < channels; ++c) {
        sum[c] += static_cast<double>(g[c]);
        product[c] += static_cast<double>(g[c]) * static_cast<double>(in[c] - mean[c]);
      }
    }
  });
  for (index_t c = 0; c < channels; ++c) {
    dbias[c] = dweight[c] = 0.0;
    for (index_t split = 0; split < splits; ++split) {
      dbias[c] += parts[split * 2 * channels + c];
      dweight[c] += parts[(split * 2 + 1) * channels + c];
    }
    dweight[c] *= static_cast<double>(inv_std[c]);
  }
  if (dx.is_null() || rows == 0) return;
  // dx = scale dy + (x - mean) slope + shift, with these three a channel.
  T* scale = frame.take<T>(channels);
  T* slope = frame.take<T>(channels);
  T* shift = frame.take<T>(channels);
  for (index_t c = 0; c < channels; ++c) {
    const double spread = static_cast<double>(inv_std[c]);
    const double factor = static_cast<double>(weight[c]) * spread;
    scale[c] = static_cast<T>(factor);
    slope[c] = static_cast<T>(-factor * spread * dweight[c] / static_cast<double>(rows));
    shift[c] = static_cast<T>(-factor * dbias[c] / static_cast<double>(rows));
  }
  T* result = dx.flat().data();
  for_row_chunks(ctx, rows, channels, [&](index_t begin, index_t end) {
    for (index_t m = begin; m < end; ++m) {
      const T* in = input + m * channels;
      const T* g = gradient + m * channels;
      T* PUFFERFISH_RESTRICT out = result + m * channels;
      for (index_t c = 0; c < channels; ++c) {
        out[c] = scale[c] * g[c] + ((in[c] - mean[c]) * slope[c] + shift[c]);
      }
    }
  });
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
