// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Batch normalisation, and sums over the rows of a matrix, on a device. Statistics take one pass over
/// memory, the normalisation with its epilogue another, the gradient two.

#include <pufferfish/gpu/elementwise.hpp>
#include <pufferfish/gpu/kernels/batch_norm.hpp>
#include <pufferfish/gpu/kernels/reductions.hpp>
#include <pufferfish/ops/batch_norm.hpp>
#include <pufferfish/ops/column_sums.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

template <class T>
void column_sums(context<device::gpu>& ctx, const tensor_view<const T, 2>& x, parameter_t<T>* sums,
                 bool add) {
  const index_t rows = x.extent(0), columns = x.extent(1);
  scratch_frame frame(ctx.scratch());
  double* scratch = frame.take<double>(gpu::kernels::column_scratch(rows, columns, 1));
  gpu::kernels::column_sums<T>(ctx.stream(), x.data(), x.stride(0), rows, columns, add, scratch, sums);
}

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

template <class T>
void batch_norm_use_running(context<device::gpu>& ctx, const parameter_t<T>* running_mean,
                            const parameter_t<T>* running_var, index_t channels, double eps,
                            parameter_t<T>* statistics) {
  gpu::kernels::norm_use_running<parameter_t<T>>(ctx.stream(), running_mean, running_var, channels, eps,
                                                 statistics);
}

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
