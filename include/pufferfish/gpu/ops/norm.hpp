// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The operations of ops/norm/ on a device. Operands are in memory of the context's device; the functions
/// launch kernels in the context's stream and do not wait. The statistics of a batch need one pass over
/// memory, unless the convolution before has computed its moments; the normalization with its epilogue
/// another pass, and the gradient two, or one if a convolution has collected its sums; few rows are read
/// once. A failed launch throws backend_error.

#include <cstdint>

#include <pufferfish/gpu/kernels/norm/batch_norm.hpp>
#include <pufferfish/gpu/kernels/norm/layer_norm.hpp>
#include <pufferfish/gpu/ops/arguments.hpp>
#include <pufferfish/gpu/ops/elementwise.hpp>
#include <pufferfish/gpu/ops/pending_norm.hpp>
#include <pufferfish/ops/elementwise/relu_mask.hpp>
#include <pufferfish/ops/norm/batch_norm.hpp>
#include <pufferfish/ops/norm/layer_norm.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// Kernel argument for the dropout of rows.
inline kernels::row_dropout_numbers numbers_of(const context<device::gpu>& ctx,
                                               const ops::row_dropout& dropout) {
  return {dropout_of(ctx, dropout.probability, dropout.random), dropout.first_row, dropout.numbers};
}

}  // namespace gpu::detail

namespace ops {

/// Device implementation of the functions of ops/norm/, where formulas, shapes and errors are described.
template <>
struct norm_ops<device::gpu> {
  /// Computes the statistics of the rows of x and updates the running statistics. Scratch: column_scratch()
  /// doubles.
  template <class T>
  static void batch_norm_use_batch(context<device::gpu>& ctx, const tensor_view<const T, 2>& x, double eps,
                                   double momentum, parameter_t<T>* statistics, parameter_t<T>* running_mean,
                                   parameter_t<T>* running_var, parameter_t<T>* batches) {
    const index_t rows = x.extent(0), channels = x.extent(1);
    scratch_frame frame(ctx.scratch());
    gpu::kernels::norm_use_batch<T>(ctx.stream(), x.flat().data(), rows, channels,
                                    gpu::detail::column_workspace_of(ctx, frame, rows, channels, 2),
                                    {eps, momentum, statistics, running_mean, running_var, batches});
  }

  /// Fills `statistics` for inference from the running statistics.
  template <class P>
  static void batch_norm_use_running(context<device::gpu>& ctx, const P* running_mean, const P* running_var,
                                     index_t channels, double eps, P* statistics) {
    gpu::kernels::norm_use_running<P>(ctx.stream(), running_mean, running_var, channels, eps, statistics);
  }

  /// Normalizes x, then adds and rectifies as `epilogue` says. The order of the mask's bits is that of device
  /// kernels (gpu/kernels/elementwise/relu_mask.hpp).
  template <class T>
  static void batch_norm_apply(context<device::gpu>& ctx, const tensor_view<const T, 2>& x,
                               const parameter_t<T>* mean, const parameter_t<T>* inv_std,
                               const parameter_t<T>* weight, const parameter_t<T>* bias,
                               const tensor_view<T, 2>& y, const norm_epilogue<T>& epilogue) {
    const gpu::kernels::norm_matrix<T> m{x.flat().data(), mean, inv_std, weight, x.extent(0), x.extent(1)};
    gpu::kernels::norm_apply<T>(ctx.stream(), m, bias, gpu::detail::tail_of<T>(epilogue), y.flat().data());
  }

  /// batch_norm_use_batch and batch_norm_apply: one launch if there are few rows (block_norm_fits) or if the
  /// moments of x are known, else two. The launch of batch_norm_apply is left to `later`, if that is not
  /// nullptr and elements have 16 bits: the convolutions that take it over have no kernels for float.
  template <class T>
  static void batch_norm_forward(context<device::gpu>& ctx, const tensor_view<const T, 2>& x, double eps,
                                 double momentum, parameter_t<T>* statistics, parameter_t<T>* running_mean,
                                 parameter_t<T>* running_var, parameter_t<T>* batches,
                                 const parameter_t<T>* weight, const parameter_t<T>* bias,
                                 const tensor_view<T, 2>& y, const norm_epilogue<T>& epilogue,
                                 const double* moments, pending_norm<T>* later) {
    const index_t channels = x.extent(1);
    const gpu::kernels::norm_matrix<T> m{x.flat().data(), statistics,  statistics + channels,
                                         weight,          x.extent(0), channels};
    const auto tail = gpu::detail::tail_of<T>(epilogue);
    const gpu::kernels::norm_batch_use use{eps, momentum, statistics, running_mean, running_var, batches};
    if (sizeof(T) != 2) later = nullptr;
    if (moments != nullptr && later == nullptr) {
      return gpu::kernels::norm_apply<T>(ctx.stream(), m, bias, tail, y.flat().data(), {moments, use});
    }
    if (moments == nullptr && gpu::kernels::block_norm_fits<T>(m, tail.addend, y.flat().data())) {
      return gpu::kernels::block_norm_forward<T>(ctx.stream(), m, use, bias, tail, y.flat().data());
    }
    if (moments == nullptr) {
      batch_norm_use_batch<T>(ctx, x, eps, momentum, statistics, running_mean, running_var, batches);
    }
    if (later != nullptr) {
      return later->set({x, eps, momentum, statistics, running_mean, running_var, batches, weight, bias, y,
                         epilogue, moments});
    }
    gpu::kernels::norm_apply<T>(ctx.stream(), m, bias, tail, y.flat().data());
  }

  /// Computes the gradients of the parameters and, unless dx is a null view, of x: in one launch if there are
  /// few rows (block_norm_fits) or if dx is wanted and `sums` are known; else the kernels read x and dy a
  /// second time for dx. The pass that writes dx also writes the gradient of the addend.
  template <class T>
  static void batch_norm_backward(context<device::gpu>& ctx, const tensor_view<const T, 2>& x,
                                  const tensor_view<const T, 2>& dy, const parameter_t<T>* mean,
                                  const parameter_t<T>* inv_std, const parameter_t<T>* weight,
                                  const sum_target<parameter_t<T>>& dweight,
                                  const sum_target<parameter_t<T>>& dbias, const tensor_view<T, 2>& dx,
                                  const relu_mask<T>& mask, const tensor_view<T, 2>& addend_gradient,
                                  const double* sums) {
    const index_t rows = x.extent(0), channels = x.extent(1);
    const gpu::kernels::norm_matrix<T> m{x.flat().data(), mean, inv_std, weight, rows, channels};
    const T* gradient = dy.flat().data();
    const std::uint32_t* words = gpu::detail::mask_words(mask);
    T* const to = dx.is_null() ? nullptr : dx.flat().data();
    T* const other = addend_gradient.is_null() ? nullptr : addend_gradient.flat().data();
    if (to == nullptr && other != nullptr) masked_copy<T>(ctx, dy, mask, addend_gradient);
    const gpu::kernels::norm_parameter_gradients gradients{dweight.data, dbias.data, dweight.add, dbias.add};
    if (sums != nullptr && to != nullptr) {
      return gpu::kernels::norm_input_gradient<T>(ctx.stream(), m, gradient, words, nullptr, to, other,
                                                  {sums, gradients});
    }
    if (gpu::kernels::block_norm_fits<T>(m, gradient, to, other)) {
      return gpu::kernels::block_norm_backward<T>(ctx.stream(), m, gradient, words, gradients, to, other);
    }
    scratch_frame frame(ctx.scratch());
    const auto work = gpu::detail::column_workspace_of(ctx, frame, rows, channels, 2);
    parameter_t<T>* coefficients = dx.is_null() ? nullptr : frame.take<parameter_t<T>>(3 * channels);
    gpu::kernels::norm_gradient_sums<T>(ctx.stream(), m, gradient, words, work, gradients, coefficients);
    if (dx.is_null()) return;
    gpu::kernels::norm_input_gradient<T>(ctx.stream(), m, gradient, words, coefficients, to, other);
  }

  /// Computes layer normalization. record.mask is not written: the backward pass draws the random numbers of
  /// the dropout again.
  template <class T>
  static void layer_norm_forward(context<device::gpu>& ctx, const norm_input<T>& input,
                                 const parameter_t<T>* weight, const parameter_t<T>* bias, double eps,
                                 const tensor_view<T, 2>& y, const norm_record<T>& record) {
    gpu::kernels::norm_problem<T> problem{};
    problem.rows = y.extent(0);
    problem.columns = y.extent(1);
    problem.x = gpu::detail::rows_of(input.x);
    problem.residual = gpu::detail::rows_of(input.residual);
    problem.weight = weight;
    problem.bias = bias;
    problem.eps = eps;
    problem.y = gpu::detail::rows_of(y);
    if (input.sums()) {
      problem.sum = input.sum == nullptr ? problem.y : gpu::kernels::row_array<T>{input.sum, y.extent(1)};
    }
    problem.statistics = record.statistics;
    problem.dropout = gpu::detail::numbers_of(ctx, input.dropout);
    gpu::kernels::layer_norm_forward(ctx.stream(), problem);
  }

  /// Computes the gradients of the parameters, and those of dsum and dx that are not null views.
  template <class T>
  static void layer_norm_backward(context<device::gpu>& ctx, const norm_record<T>& record,
                                  const row_dropout& dropout, const parameter_t<T>* weight,
                                  const tensor_view<const T, 2>& dy,
                                  const sum_target<parameter_t<T>>& dweight,
                                  const sum_target<parameter_t<T>>& dbias, const tensor_view<T, 2>& dsum,
                                  const tensor_view<T, 2>& dx) {
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
    const auto work = gpu::detail::column_workspace_of(ctx, frame, problem.rows, problem.columns, 2);
    gpu::kernels::layer_norm_gradients(ctx.stream(), problem, work,
                                       {dweight.data, dbias.data, dweight.add, dbias.add});
  }
};

}  // namespace ops
PUFFERFISH_NAMESPACE_END
