// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Batch normalisation, and sums over the rows of a matrix, on a device. Statistics take one pass over
/// memory, the normalisation with its epilogue another, the gradient two.
///
/// Formulas: ops/norm/batch_norm.hpp. Matrices are rows x channels, dense, in memory of the context's device;
/// parameters and statistics are floats (parameter_t). Functions put their work into the context's stream and
/// return; they may be captured. Sums are in double, in an order that depends on the shape and on whether the
/// addresses are multiples of 16. Scratch memory is the context's. A failed launch throws backend_error.

#include <pufferfish/gpu/kernels/norm/batch_norm.hpp>
#include <pufferfish/gpu/kernels/reduce/reductions.hpp>
#include <pufferfish/gpu/ops/elementwise.hpp>
#include <pufferfish/ops/linear/column_sums.hpp>
#include <pufferfish/ops/norm/batch_norm.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// sums_n = sum_m x_mn, or with `add` sums_n += sum_m x_mn. x: M x N, dense rows with any distance; sums: N
/// elements. At most 16 rows are summed in float before a sum in double.
template <class T>
void column_sums(context<device::gpu>& ctx, const tensor_view<const T, 2>& x, parameter_t<T>* sums,
                 bool add) {
  const index_t rows = x.extent(0), columns = x.extent(1);
  scratch_frame frame(ctx.scratch());
  double* scratch = frame.take<double>(gpu::kernels::column_scratch(rows, columns, 1));
  gpu::kernels::column_sums<T>(ctx.stream(), x.data(), x.stride(0), rows, columns, add, scratch, sums);
}

/// statistics_c = mean of column c, statistics_(channels + c) = 1 / sqrt(variance + eps) with the biased
/// variance; running_mean and running_var become (1 - momentum) running + momentum value, with the unbiased
/// variance for running_var; batches[0] += 1. statistics: 2 channels elements. Needs two rows or more (an
/// assertion).
template <class T>
void batch_norm_use_batch(context<device::gpu>& ctx, const tensor_view<const T, 2>& x, double eps,
                          double momentum, parameter_t<T>* statistics, parameter_t<T>* running_mean,
                          parameter_t<T>* running_var, parameter_t<T>* batches) {
  const index_t rows = x.extent(0), channels = x.extent(1);
  PUFFERFISH_ASSERT(rows > 1, "batch_norm_use_batch: too few rows");
  scratch_frame frame(ctx.scratch());
  double* scratch = frame.take<double>(gpu::kernels::column_scratch(rows, channels, 2));
  gpu::kernels::norm_use_batch<T>(ctx.stream(), x.flat().data(), rows, channels, scratch,
                                  {eps, momentum, statistics, running_mean, running_var, batches});
}

/// statistics_c = running_mean_c, statistics_(channels + c) = 1 / sqrt(running_var_c + eps).
template <class T>
void batch_norm_use_running(context<device::gpu>& ctx, const parameter_t<T>* running_mean,
                            const parameter_t<T>* running_var, index_t channels, double eps,
                            parameter_t<T>* statistics) {
  gpu::kernels::norm_use_running<parameter_t<T>>(ctx.stream(), running_mean, running_var, channels, eps,
                                                 statistics);
}

/// y_mc = (x_mc - mean_c) inv_std_c weight_c + bias_c, then the epilogue: plus addend_mc, then max(., 0) with
/// the mask of positive elements, if it is not null. y may be the addend and overlaps nothing else. The bits
/// of the mask are in the device's order (gpu/kernels/elementwise/relu_mask.hpp).
template <class T>
void batch_norm_apply(context<device::gpu>& ctx, const tensor_view<const T, 2>& x, const parameter_t<T>* mean,
                      const parameter_t<T>* inv_std, const parameter_t<T>* weight, const parameter_t<T>* bias,
                      const tensor_view<T, 2>& y, const norm_epilogue<T>& epilogue) {
  PUFFERFISH_ASSERT(x.shape() == y.shape(), "batch_norm_apply: shapes differ");
  const gpu::kernels::norm_matrix<T> m{x.flat().data(), mean, inv_std, weight, x.extent(0), x.extent(1)};
  const gpu::kernels::norm_tail<T> tail{epilogue.addend.is_null() ? nullptr : epilogue.addend.flat().data(),
                                        epilogue.relu,
                                        epilogue.relu ? gpu::detail::mask_words(epilogue.mask) : nullptr};
  gpu::kernels::norm_apply<T>(ctx.stream(), m, bias, tail, y.flat().data());
}

/// The gradients of batch_norm_apply with statistics of the batch. dy counts as 0 where the mask (null: none)
/// has no bit. dweight, dbias: overwritten or added to, as their `add` says. dx: a null view if not wanted;
/// it may be dy or x and overlaps nothing else. Reads x and dy twice if dx is wanted.
template <class T>
void batch_norm_backward(context<device::gpu>& ctx, const tensor_view<const T, 2>& x,
                         const tensor_view<const T, 2>& dy, const parameter_t<T>* mean,
                         const parameter_t<T>* inv_std, const parameter_t<T>* weight,
                         const sum_target<parameter_t<T>>& dweight, const sum_target<parameter_t<T>>& dbias,
                         const tensor_view<T, 2>& dx, const relu_mask<T>& mask) {
  PUFFERFISH_ASSERT(x.shape() == dy.shape(), "batch_norm_backward: shapes differ");
  const index_t rows = x.extent(0), channels = x.extent(1);
  const gpu::kernels::norm_matrix<T> m{x.flat().data(), mean, inv_std, weight, rows, channels};
  const T* gradient = dy.flat().data();
  const std::uint32_t* words = gpu::detail::mask_words(mask);
  scratch_frame frame(ctx.scratch());
  double* scratch = frame.take<double>(gpu::kernels::column_scratch(rows, channels, 2));
  parameter_t<T>* coefficients = dx.is_null() ? nullptr : frame.take<parameter_t<T>>(3 * channels);
  gpu::kernels::norm_gradient_sums<T>(ctx.stream(), m, gradient, words, scratch,
                                      {dweight.data, dbias.data, dweight.add, dbias.add}, coefficients);
  if (dx.is_null()) return;
  gpu::kernels::norm_input_gradient<T>(ctx.stream(), m, gradient, words, coefficients, dx.flat().data());
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
