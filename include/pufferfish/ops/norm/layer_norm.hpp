// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Layer normalization over rows, y = norm(dropout(x) + residual) weight + bias, with its gradients. The
/// plain form is in reference_layer_norm.hpp.
///
/// \code
/// std::vector<float> statistics(2 * rows);
/// ops::norm_record<float> record;  // without dropout and residual, the sum is x itself
/// record.sum = x.data();
/// record.statistics = statistics.data();
/// ops::layer_norm_forward<float>(ctx, {x, {}, {}, nullptr}, weight.data(), bias.data(), 1e-6, y, record);
/// ops::layer_norm_backward<float>(ctx, record, {}, weight.data(), dy, {dweight.data()}, {dbias.data()},
///                                 {}, dx);
/// \endcode

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <pufferfish/core/message.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/dropout.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>
#include <pufferfish/ops/linear/column_sums.hpp>
#include <pufferfish/ops/norm/reference_layer_norm.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Input of a layer norm, which normalizes s = dropout(x) + residual. Refers to the caller's memory.
template <class T>
struct norm_input {
  tensor_view<const T, 2> x;         ///< input, contiguous rows
  tensor_view<const T, 2> residual;  ///< shape of x, contiguous rows; a null view: no residual
  row_dropout dropout;
  T* sum = nullptr;  ///< receives s if sums(): rows x columns, dense; may be x. nullptr: s is not kept

  /// Whether s differs from x.
  bool sums() const { return dropout.drops() || !residual.is_null(); }
};

/// Data that the backward pass of a layer norm needs. The caller owns the memory (usually on the tape). The
/// caller sets all pointers before the forward pass, which writes the statistics and the mask, but not `sum`:
/// that is norm_input::sum, or the address of a dense x if norm_input::sums() is false.
template <class T>
struct norm_record {
  /// A word of the mask, which has the size of a parameter, and its number of bits.
  using word = std::conditional_t<sizeof(parameter_t<T>) == 4, std::int32_t, std::int64_t>;
  static constexpr index_t word_bits = 8 * static_cast<index_t>(sizeof(word));

  const T* sum = nullptr;                ///< s, rows x columns, dense
  parameter_t<T>* statistics = nullptr;  ///< mean and inverse deviation of each row: 2 rows elements
  word* mask = nullptr;  ///< norm_mask_size() words: bit set where dropout kept; null without dropout

  /// Number of words of a mask: for each word_bits consecutive rows, one word for each column.
  static index_t mask_size(const extents<2>& shape) {
    return (shape[0] + word_bits - 1) / word_bits * shape[1];
  }
};

namespace detail {

template <class T>
using mask_word = typename norm_record<T>::word;

/// Arguments for one row of the forward pass. nullptr: the operand is absent, or the result is not wanted.
template <class T>
struct norm_row {
  index_t columns;
  double eps;
  const parameter_t<T>*weight, *bias;
  const T *x, *residual;
  const std::uint32_t* words;  ///< random words, one for each element: dropped where below the threshold
  std::uint32_t threshold;
  parameter_t<T> scale;
  mask_word<T>*mask, bit;
  bool first_bit;  ///< whether this is the first row of a mask word, which overwrites the words
  const T* sum;    ///< address of s of this row: sum_to, or x
  T *sum_to, *y;
  parameter_t<T>* statistics;
};

/// Arguments for one row of the backward pass. The row's contributions are added to weight_sums and
/// bias_sums.
template <class T>
struct norm_gradient_row {
  index_t columns;
  const parameter_t<T>* weight;
  const T *sum, *dy;
  parameter_t<T> mean, inverse_deviation, scale;
  const mask_word<T>* mask;
  mask_word<T> bit;
  parameter_t<T>*weight_sums, *bias_sums;
  T *dsum, *dx;
};

#define PUFFERFISH_KERNELS layer_norms
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/norm/layer_norm.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// How rows are cut into tasks: into whole words of a mask, and into at most 64 tasks, because each task has
/// its own sums.
template <class T>
struct norm_tasks {
  index_t rows, rows_a_task;

  /// `count`: number of rows.
  explicit norm_tasks(index_t count) : rows(count) {
    constexpr index_t unit = norm_record<T>::word_bits, most = 64;
    const index_t units = (count + unit - 1) / unit;
    rows_a_task = unit * std::max<index_t>(1, (units + most - 1) / most);
  }
  /// Number of tasks.
  index_t count() const { return (rows + rows_a_task - 1) / rows_a_task; }
  /// First row of a task.
  index_t begin(index_t task) const { return task * rows_a_task; }
  /// First row after a task.
  index_t end(index_t task) const { return std::min(rows, begin(task) + rows_a_task); }
};

/// Whether the rows of a view are contiguous.
template <class T>
bool dense_rows(const tensor_view<T, 2>& view) {
  return view.stride(1) == 1 || view.extent(1) <= 1;
}

/// Throws shape_error unless both shapes are equal and the rows are contiguous. `what` and `name`: names of
/// the function and the matrix in errors.
inline void check_norm(const char* what, const char* name, const extents<2>& shape, const extents<2>& other,
                       bool rows_dense) {
  if (shape != other || !rows_dense) {
    pufferfish::detail::throw_error<shape_error>(
        {what, ": x is ", shape, ", ", name, " ", other, rows_dense ? "" : " with rows that are not dense"});
  }
}

/// Computes layer_norm_forward on the CPU.
template <class T>
void normalise_rows(context<device::cpu>& ctx, const norm_input<T>& input, const parameter_t<T>* weight,
                    const parameter_t<T>* bias, double eps, const tensor_view<T, 2>& y,
                    const norm_record<T>& record) {
  const tensor_view<const T, 2>&x = input.x, &residual = input.residual;
  const row_dropout& dropout = input.dropout;
  const index_t columns = x.extent(1);
  const norm_tasks<T> tasks(x.extent(0));
  scratch_frame frame(ctx.scratch());
  auto* words = frame.take<std::uint32_t>(dropout.drops() ? columns * ctx.threads() : 0);
  const auto random_words = PUFFERFISH_KERNEL(widest_isa(), dropouts, random_words);
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), layer_norms, norm_forward<T>);
  norm_row<T> common{};
  common.columns = columns;
  common.eps = eps;
  common.weight = weight;
  common.bias = bias;
  common.threshold = dropout_threshold(dropout.probability);
  common.scale = static_cast<parameter_t<T>>(dropout.scale());
  ctx.parallel_for(tasks.count(), [&](index_t task, int worker) {
    norm_row<T> row = common;
    if (dropout.drops()) row.words = words + worker * columns;
    for (index_t m = tasks.begin(task); m < tasks.end(task); ++m) {
      if (dropout.drops()) {
        random_words(dropout.random.seed(), dropout.random.stream(),
                     dropout.number(m) * static_cast<std::uint64_t>(columns), columns,
                     words + worker * columns);
      }
      const index_t in_word = m % norm_record<T>::word_bits;
      row.first_bit = in_word == 0;
      row.bit = static_cast<mask_word<T>>(std::uint64_t{1} << in_word);
      row.mask = record.mask == nullptr ? nullptr : record.mask + m / norm_record<T>::word_bits * columns;
      row.x = x.data() + m * x.stride(0);
      row.residual = residual.is_null() ? nullptr : residual.data() + m * residual.stride(0);
      row.y = y.data() + m * y.stride(0);
      row.sum_to = !input.sums() ? nullptr : input.sum == nullptr ? row.y : input.sum + m * columns;
      row.sum = input.sums() ? row.sum_to : row.x;
      row.statistics = record.statistics == nullptr ? nullptr : record.statistics + 2 * m;
      kernel(row);
    }
  });
}

/// Computes layer_norm_backward on the CPU.
template <class T>
void row_norm_gradients(context<device::cpu>& ctx, const norm_record<T>& record, const row_dropout& dropout,
                        const parameter_t<T>* weight, const tensor_view<const T, 2>& dy,
                        const sum_target<parameter_t<T>>& dweight, const sum_target<parameter_t<T>>& dbias,
                        const tensor_view<T, 2>& dsum, const tensor_view<T, 2>& dx) {
  using P = parameter_t<T>;
  const index_t columns = dy.extent(1);
  scratch_frame frame(ctx.scratch());
  double* const found = frame.take<double>(2 * columns);  // sums for the weight, then for the bias
  std::fill_n(found, 2 * columns, 0.0);
  if (dy.empty()) {
    store_sums(found, dweight, columns);
    store_sums(found + columns, dbias, columns);
    return;
  }
  const norm_tasks<T> tasks(dy.extent(0));
  double* totals = frame.take<double>(2 * columns * tasks.count());
  P* sums = frame.take<P>(2 * columns * ctx.threads());
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), layer_norms, norm_backward<T>);
  const auto column_sums = PUFFERFISH_KERNEL(widest_isa(), passes, column_sums<P>);
  norm_gradient_row<T> common{};
  common.columns = columns;
  common.weight = weight;
  common.scale = static_cast<parameter_t<T>>(dropout.scale());
  ctx.parallel_for(tasks.count(), [&](index_t task, int worker) {
    norm_gradient_row<T> row = common;
    P* const own = sums + worker * 2 * columns;
    row.weight_sums = own;
    row.bias_sums = own + columns;
    double* const total = totals + task * 2 * columns;
    std::fill_n(total, 2 * columns, 0.0);
    const index_t end = tasks.end(task);
    for (index_t m = tasks.begin(task); m < end; ++m) {
      const index_t in_word = m % norm_record<T>::word_bits;
      if (in_word == 0) std::fill_n(own, 2 * columns, P{});
      row.bit = static_cast<mask_word<T>>(std::uint64_t{1} << in_word);
      row.mask = dropout.drops() ? record.mask + m / norm_record<T>::word_bits * columns : nullptr;
      row.sum = record.sum + m * columns;
      row.mean = record.statistics[2 * m];
      row.inverse_deviation = record.statistics[2 * m + 1];
      row.dy = dy.data() + m * dy.stride(0);
      row.dsum = dsum.is_null() ? nullptr : dsum.data() + m * dsum.stride(0);
      row.dx = dx.is_null() ? nullptr : dx.data() + m * dx.stride(0);
      kernel(row);
      if (in_word == norm_record<T>::word_bits - 1 || m + 1 == end) {
        column_sums(own, 1, 2 * columns, 2 * columns, total);
      }
    }
  });
  const auto merge = PUFFERFISH_KERNEL(widest_isa(), passes, column_sums<double>);
  merge(totals, tasks.count(), 2 * columns, 2 * columns, found);
  store_sums(found, dweight, columns);
  store_sums(found + columns, dbias, columns);
}

}  // namespace detail

/// y = (s - mean) / sqrt(variance + eps) weight + bias, mean and biased variance over each row of s =
/// dropout(x) + residual (Ba, Kiros, Hinton: "Layer normalization", 2016). One pass over memory.
///
/// All matrices are M x C. y has contiguous rows and may be x or the residual, but not input.sum. weight,
/// bias: C elements. Sums of a row are in parameter_t<T>, first of s, then of squared distances to the mean.
/// On the CPU a 16-bit s is rounded before it is summed, also where it is not kept. `record`: in training its
/// statistics are written, mean and inverse deviation of row m at 2 m and 2 m + 1, and on the CPU its mask if
/// there is dropout; in inference its pointers are null. Dropout is applied in any case: in inference pass
/// input.dropout = {}. Throws shape_error for a shape other than that of x and for rows that are not
/// contiguous.
template <class T, class Device>
void layer_norm_forward(context<Device>& ctx, const norm_input<T>& input, const parameter_t<T>* weight,
                        const parameter_t<T>* bias, double eps, const tensor_view<T, 2>& y,
                        const norm_record<T>& record) {
  const tensor_view<const T, 2>&x = input.x, &residual = input.residual;
  detail::check_norm("layer_norm_forward", "y", x.shape(), y.shape(),
                     detail::dense_rows(x) && detail::dense_rows(y));
  if (!residual.is_null()) {
    detail::check_norm("layer_norm_forward", "residual", x.shape(), residual.shape(),
                       detail::dense_rows(residual));
  }
  if (x.empty()) return;
  if constexpr (!is_cpu<Device>) {
    norm_ops<Device>::layer_norm_forward(ctx, input, weight, bias, eps, y, record);
  } else {
    detail::normalise_rows<T>(ctx, input, weight, bias, eps, y, record);
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, layer_norm_forward);

/// Number of mask words of a norm_record for a matrix of this shape, if there is dropout. 0 on the GPU, whose
/// backward pass computes the random numbers again.
template <class T, class Device>
index_t norm_mask_size(context<Device>&, const extents<2>& shape) {
  return is_cpu<Device> ? norm_record<T>::mask_size(shape) : 0;
}

/// Gradients from dy (formulas: reference::layer_norm_backward). dsum: the gradient of s = dropout(x) +
/// residual, which is also that of the residual. dx: the gradient of x, which differs from dsum if there was
/// dropout. dsum, dx: M x C, contiguous rows; each may be a null view, dsum may be dy. dweight, dbias: C
/// elements each. `record`, `dropout`: as in the forward pass, in the same step; record.sum and
/// record.statistics are not null, nor on the CPU is record.mask with dropout. One pass over memory. Sums
/// over rows are on the CPU in parameter_t<T> for up to 64 rows (float: 32), then in double, in a fixed
/// order; on a device in double. Throws shape_error as the forward pass.
template <class T, class Device>
void layer_norm_backward(context<Device>& ctx, const norm_record<T>& record, const row_dropout& dropout,
                         const parameter_t<T>* weight, const tensor_view<const T, 2>& dy,
                         const sum_target<parameter_t<T>>& dweight, const sum_target<parameter_t<T>>& dbias,
                         const tensor_view<T, 2>& dsum, const tensor_view<T, 2>& dx) {
  for (const tensor_view<T, 2>& to : {dsum, dx}) {
    if (to.is_null()) continue;
    detail::check_norm("layer_norm_backward", "gradient", dy.shape(), to.shape(),
                       detail::dense_rows(dy) && detail::dense_rows(to));
  }
  if constexpr (!is_cpu<Device>) {
    norm_ops<Device>::layer_norm_backward(ctx, record, dropout, weight, dy, dweight, dbias, dsum, dx);
  } else {
    detail::row_norm_gradients<T>(ctx, record, dropout, weight, dy, dweight, dbias, dsum, dx);
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, layer_norm_backward);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
