// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Layer normalisation on a device: device versions of ops/norm/layer_norm.hpp.
///
/// Matrices have dense rows with any distance between them, in memory of the context's device; weight, bias
/// and statistics are floats. Work is put into the context's stream. Sums over rows are in double, in a fixed
/// order. A failed launch throws backend_error.

#include <pufferfish/gpu/kernels/norm/layer_norm.hpp>
#include <pufferfish/gpu/ops/arguments.hpp>
#include <pufferfish/ops/norm/layer_norm.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

inline kernels::row_dropout_numbers numbers_of(const context<device::gpu>& ctx,
                                               const ops::row_dropout& dropout) {
  return {dropout_of(ctx, dropout.probability, dropout.random), dropout.first_row, dropout.numbers};
}

}  // namespace gpu::detail

namespace ops {

/// With s = dropout(x) + residual: y = (s - mean) / sqrt(variance + eps) weight + bias, mean and biased
/// variance of each row of s. s is stored in input.sum (rows x columns, dense; it may be x), or in y first if
/// that is nullptr. record.statistics receives mean and inverse deviation of each row: 2 rows elements;
/// nullptr: not stored. record.mask is not written on a device: the backward pass draws the dropout's numbers
/// again. Throws shape_error if shapes differ or rows are not dense.
template <class T>
void layer_norm_forward(context<device::gpu>& ctx, const norm_input<T>& input, const parameter_t<T>* weight,
                        const parameter_t<T>* bias, double eps, const tensor_view<T, 2>& y,
                        const norm_record<T>& record) {
  const extents<2>& shape = input.x.shape();
  detail::check_norm("layer_norm_forward", "y", shape, y.shape(),
                     detail::dense_rows(input.x) && detail::dense_rows(y));
  if (!input.residual.is_null()) {
    detail::check_norm("layer_norm_forward", "residual", shape, input.residual.shape(),
                       detail::dense_rows(input.residual));
  }
  if (y.empty()) return;
  gpu::kernels::norm_problem<T> problem{};
  problem.rows = shape[0];
  problem.columns = shape[1];
  problem.x = gpu::detail::rows_of(input.x);
  problem.residual = gpu::detail::rows_of(input.residual);
  problem.weight = weight;
  problem.bias = bias;
  problem.eps = eps;
  problem.y = gpu::detail::rows_of(y);
  if (input.sums()) {
    problem.sum = input.sum == nullptr ? problem.y : gpu::kernels::row_array<T>{input.sum, shape[1]};
  }
  problem.statistics = record.statistics;
  problem.dropout = gpu::detail::numbers_of(ctx, input.dropout);
  gpu::kernels::layer_norm_forward(ctx.stream(), problem);
}

/// With n = (s - mean) inverse_deviation from the record and g = dy weight: dsum = (g - mean(g) - n mean(g
/// n)) inverse_deviation, means over the row; dx = dropout(dsum) with the mask of the forward pass; dweight =
/// sum of dy n and dbias = sum of dy over rows, overwritten or added to. Null views of dsum and dx are not
/// computed. dsum may be dy. `dropout` is that of the forward pass, in the same step. Throws shape_error if
/// shapes differ or rows are not dense.
template <class T>
void layer_norm_backward(context<device::gpu>& ctx, const norm_record<T>& record, const row_dropout& dropout,
                         const parameter_t<T>* weight, const tensor_view<const T, 2>& dy,
                         const sum_target<parameter_t<T>>& dweight, const sum_target<parameter_t<T>>& dbias,
                         const tensor_view<T, 2>& dsum, const tensor_view<T, 2>& dx) {
  for (const tensor_view<T, 2>& to : {dsum, dx}) {
    if (to.is_null()) continue;
    detail::check_norm("layer_norm_backward", "gradient", dy.shape(), to.shape(),
                       detail::dense_rows(dy) && detail::dense_rows(to));
  }
  gpu::kernels::norm_gradient_problem<T> problem{};
  problem.rows = dy.extent(0);
  problem.columns = dy.extent(1);
  problem.sum = {record.sum, dy.extent(1)};
  problem.dy = gpu::detail::rows_of(dy);
  problem.statistics = record.statistics;
  problem.weight = weight;
  problem.dsum = gpu::detail::rows_of(dsum);
  problem.dx = gpu::detail::rows_of(dx);
  problem.dropout = gpu::detail::numbers_of(ctx, dropout);
  scratch_frame frame(ctx.scratch());
  auto* const sums = frame.take<double>(gpu::kernels::column_scratch(problem.rows, problem.columns, 2));
  gpu::kernels::layer_norm_parameter_gradients(ctx.stream(), problem, sums,
                                               {dweight.data, dbias.data, dweight.add, dbias.add});
  gpu::kernels::layer_norm_input_gradient(ctx.stream(), problem);
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
