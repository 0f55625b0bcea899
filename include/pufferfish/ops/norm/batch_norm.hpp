// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Batch normalization over the rows of a matrix (pixels x channels). Each function makes one pass over
/// memory, the gradient two; a residual sum and a ReLU after the normalization are part of these passes.
///
/// A training step calls batch_norm_forward, or its two parts batch_norm_use_batch and batch_norm_apply, and
/// batch_norm_backward; inference calls batch_norm_use_running and batch_norm_apply. Matrices of different
/// shapes fail an assertion; a matrix that is not dense throws shape_error. On a device, sums are in double,
/// in an order that depends on the shape and on whether the addresses are multiples of 16.
///
/// \code
/// std::vector<float> statistics(2 * channels);  // the means, then the inverse deviations
/// ops::batch_norm_use_batch<float>(ctx, x, 1e-5, 0.1, statistics.data(), running_mean.data(),
///                                  running_var.data(), &batches);
/// const float *mean = statistics.data(), *inv_std = mean + channels;
/// ops::batch_norm_apply<float>(ctx, x, mean, inv_std, weight.data(), bias.data(), y);
/// ops::batch_norm_backward<float>(ctx, x, dy, mean, inv_std, weight.data(), {dweight.data()},
///                                 {dbias.data()}, dx);
/// \endcode
///
/// Source: Ioffe, Szegedy: "Batch normalization", ICML 2015, section 3.

#include <algorithm>
#include <cmath>

#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/relu_mask.hpp>
#include <pufferfish/ops/linear/column_sums.hpp>
#include <pufferfish/ops/norm/moments.hpp>
#include <pufferfish/ops/norm/norm_pass.hpp>
#include <pufferfish/ops/norm/reference_batch_norm.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace detail {

/// Means and sums of squared deviations of `count` > 0 dense rows, one split of a matrix. `work`: 2
/// rows.width doubles.
template <class T>
void split_moments(const wide_rows<T>& rows, const T* x, index_t count, double* mean, double* squares,
                   double* work) {
  const index_t channels = rows.channels, repeats = rows.repeats(), wide = count / repeats;
  const index_t rest = count - wide * repeats;
  if (repeats == 1) return block_moments(x, count, channels, channels, 0, mean, squares);
  if (wide > 0) {
    block_moments(x, wide, rows.width, rows.width, 0, work, work + rows.width);
    for (index_t i = 0; i < repeats; ++i) {
      merge_moments(i * wide, mean, squares, wide, work + i * channels, work + rows.width + i * channels,
                    channels);
    }
  }
  if (rest > 0) {
    block_moments(x + wide * rows.width, rest, channels, channels, wide * repeats, mean, squares);
  }
}

}  // namespace detail

/// mean_c = sum_m x_mc / M, variance_c = sum_m (x_mc - mean_c)^2 / M (the biased one), without cancellation;
/// see block_moments. x: M x C dense, M > 0 (asserted); mean, variance: C elements, overwritten.
template <class T>
void batch_norm_statistics(context<device::cpu>& ctx, const tensor_view<const T, 2>& x, double* mean,
                           double* variance) {
  const index_t channels = x.extent(1);
  PUFFERFISH_ASSERT(x.extent(0) > 0, "batch_norm_statistics: no rows");
  const detail::wide_rows<T> rows(x.shape());
  const index_t splits = detail::norm_splits(rows), units = rows.units();
  const T* from = x.flat().data();
  scratch_frame frame(ctx.scratch());
  moment_parts<T> parts(frame);
  parts.start(splits, channels);
  double* work = frame.take<double>(2 * rows.width * ctx.threads());
  ctx.parallel_for(splits, [&](index_t split, int worker) {
    const index_t begin = rows.start_of(units * split / splits);
    const index_t count = (rows.start_of(units * (split + 1) / splits) - begin) / channels;
    if (count == 0) return;
    detail::split_moments(rows, from + begin, count, parts.mean(split), parts.squares(split),
                          work + 2 * rows.width * worker);
    parts.set_count(split, count);
  });
  parts.merge(mean, variance);
}
PUFFERFISH_SEPARATE_FUNCTION(dense, batch_norm_statistics);

namespace detail {

/// The inverse deviation 1 / sqrt(variance + eps), computed in double.
template <class T>
T inverse_deviation(double variance, double eps) {
  return static_cast<T>(1.0 / std::sqrt(variance + eps));
}

/// The running statistic after a batch with the given value: (1 - momentum) running + momentum value.
template <class T>
T moved_towards(T running, double value, double momentum) {
  return static_cast<T>((1.0 - momentum) * static_cast<double>(running) + momentum * value);
}

}  // namespace detail

/// State update of a training step from the moments of its batch, `count` > 1 values a channel (not checked;
/// with 1 the unbiased variance is a NaN). statistics_c = mean_c, statistics_(channels + c) = 1 /
/// sqrt(variance_c + eps). The running statistics become (1 - momentum) running + momentum value, with mean_c
/// and the unbiased variance, variance_c count / (count - 1), for `value`. batches[0] += 1. statistics: 2
/// channels elements; mean, variance and the running statistics: `channels` elements each. Computed in
/// double, rounded to T.
template <class T>
void batch_norm_use_batch(context<device::cpu>&, const double* mean, const double* variance, index_t channels,
                          index_t count, double eps, double momentum, T* statistics, T* running_mean,
                          T* running_var, T* batches) {
  const double unbiased = static_cast<double>(count) / static_cast<double>(count - 1);
  for (index_t c = 0; c < channels; ++c) {
    statistics[c] = static_cast<T>(mean[c]);
    statistics[channels + c] = detail::inverse_deviation<T>(variance[c], eps);
    running_mean[c] = detail::moved_towards(running_mean[c], mean[c], momentum);
    running_var[c] = detail::moved_towards(running_var[c], variance[c] * unbiased, momentum);
  }
  *batches += T{1};
}
PUFFERFISH_SEPARATE_FUNCTION(dense, batch_norm_use_batch);

/// Updates the state of a training step on any device; see the form above. The moments are computed from the
/// rows of x, M x C dense; M < 2 fails an assertion.
template <class T, class Device>
void batch_norm_use_batch(context<Device>& ctx, const tensor_view<const T, 2>& x, double eps, double momentum,
                          parameter_t<T>* statistics, parameter_t<T>* running_mean,
                          parameter_t<T>* running_var, parameter_t<T>* batches) {
  PUFFERFISH_ASSERT(x.extent(0) > 1, "batch_norm_use_batch: too few rows");
  if constexpr (!is_cpu<Device>) {
    norm_ops<Device>::batch_norm_use_batch(ctx, x, eps, momentum, statistics, running_mean, running_var,
                                           batches);
  } else {
    const index_t channels = x.extent(1);
    scratch_frame frame(ctx.scratch());
    double* const mean = frame.take<double>(2 * channels);
    batch_norm_statistics<T>(ctx, x, mean, mean + channels);
    batch_norm_use_batch<parameter_t<T>>(ctx, mean, mean + channels, channels, x.extent(0), eps, momentum,
                                         statistics, running_mean, running_var, batches);
  }
}

/// Fills `statistics` for inference from the running statistics: statistics_c = running_mean_c,
/// statistics_(channels + c) = 1 / sqrt(running_var_c + eps). statistics: 2 channels elements; it overlaps no
/// running statistics.
template <class T, class Device>
void batch_norm_use_running(context<Device>& ctx, const parameter_t<T>* running_mean,
                            const parameter_t<T>* running_var, index_t channels, double eps,
                            parameter_t<T>* statistics) {
  if constexpr (!is_cpu<Device>) {
    norm_ops<Device>::batch_norm_use_running(ctx, running_mean, running_var, channels, eps, statistics);
  } else {
    for (index_t c = 0; c < channels; ++c) {
      statistics[c] = running_mean[c];
      statistics[channels + c] =
          detail::inverse_deviation<parameter_t<T>>(static_cast<double>(running_var[c]), eps);
    }
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, batch_norm_use_running);

/// Operations applied after a normalization in the same pass, in the order of the members. The default is
/// none.
///
/// \code
/// // The end of a residual block: y = relu(norm(x) + branch), with the mask for the backward pass.
/// ops::batch_norm_apply<float>(ctx, x, mean, inv_std, weight, bias, y, {branch, true, mask});
/// ops::masked_copy<float>(ctx, dy, mask, dbranch);
/// ops::batch_norm_backward<float>(ctx, x, dy, mean, inv_std, weight, {dweight}, {dbias}, dx, mask);
/// \endcode
template <class T>
struct norm_epilogue {
  tensor_view<const T, 2> addend;  ///< added to the result; a null view: no addend
  bool relu = false;               ///< whether negative values then become 0
  relu_mask<T> mask;               ///< with relu: receives the bits for the backward pass; null: not written
};

/// y_mc = (x_mc - mean_c) inv_std_c weight_c + bias_c, then `epilogue`: plus addend_mc, then 0 where that is
/// negative (a NaN stays). x, y, addend: M x C dense; the other arrays: C elements. y may be the addend and
/// overlaps nothing else: the backward pass needs x. epilogue.mask, if not null: relu_mask::size() words,
/// overwritten if epilogue.relu is set, with the bits of positive results (and of NaNs).
template <class T, class Device>
void batch_norm_apply(context<Device>& ctx, const tensor_view<const T, 2>& x, const parameter_t<T>* mean,
                      const parameter_t<T>* inv_std, const parameter_t<T>* weight, const parameter_t<T>* bias,
                      const tensor_view<T, 2>& y, const norm_epilogue<T>& epilogue = {}) {
  PUFFERFISH_ASSERT(x.shape() == y.shape(), "batch_norm_apply: shapes differ");
  if constexpr (!is_cpu<Device>) {
    norm_ops<Device>::batch_norm_apply(ctx, x, mean, inv_std, weight, bias, y, epilogue);
  } else {
    const detail::wide_rows<T> rows(x.shape());
    scratch_frame frame(ctx.scratch());
    auto* const centre = frame.take<parameter_t<T>>(3 * rows.width);
    auto *const scale = centre + rows.width, *const shift = scale + rows.width;
    for (index_t c = 0; c < rows.channels; ++c) {
      centre[c] = mean[c];
      scale[c] = inv_std[c] * weight[c];
      shift[c] = bias[c];
    }
    for (auto* value : {centre, scale, shift}) rows.repeat(value);
    detail::norm_pass<T> pass;
    pass.x = x.flat().data();
    pass.other = epilogue.addend.is_null() ? nullptr : epilogue.addend.flat().data();
    pass.y = y.flat().data();
    pass.relu = epilogue.relu;
    pass.mask = epilogue.relu ? epilogue.mask.words : nullptr;
    pass.mean = centre;
    pass.scale = scale;
    pass.shift = shift;
    pass.width = rows.width;
    pass.stream = pass.other != pass.y && detail::streams_past_cache(pass.y, y.size(), rows.width);
    const auto kernel = PUFFERFISH_KERNEL(widest_isa(), detail::norms, norm_apply<T>);
    detail::for_unit_chunks(ctx, rows, [&](index_t begin, index_t end) { kernel(pass, begin, end); });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, batch_norm_apply);

/// batch_norm_use_batch for the rows of x, then batch_norm_apply. A device may do both in one pass, takes the
/// statistics from `moments` (merged() of x), and may leave both to `later`, unless these are nullptr.
template <class T, class Device>
void batch_norm_forward(context<Device>& ctx, const tensor_view<const T, 2>& x, double eps, double momentum,
                        parameter_t<T>* statistics, parameter_t<T>* running_mean, parameter_t<T>* running_var,
                        parameter_t<T>* batches, const parameter_t<T>* weight, const parameter_t<T>* bias,
                        const tensor_view<T, 2>& y, const norm_epilogue<T>& epilogue = {},
                        const double* moments = nullptr, [[maybe_unused]] pending_norm<T>* later = nullptr) {
  PUFFERFISH_ASSERT(x.extent(0) > 1, "batch_norm_forward: too few rows");
  PUFFERFISH_ASSERT(x.shape() == y.shape(), "batch_norm_forward: shapes differ");
  if constexpr (!is_cpu<Device>) {
    norm_ops<Device>::batch_norm_forward(ctx, x, eps, momentum, statistics, running_mean, running_var,
                                         batches, weight, bias, y, epilogue, moments, later);
  } else {
    batch_norm_use_batch<T>(ctx, x, eps, momentum, statistics, running_mean, running_var, batches);
    batch_norm_apply<T>(ctx, x, statistics, statistics + x.extent(1), weight, bias, y, epilogue);
  }
}

namespace detail {

/// dbias = sum of g, dweight = sum of g (x - mean), where g is dy with the mask applied. Summed in T within a
/// unit, then in double.
template <class T>
void norm_sums(context<device::cpu>& ctx, const wide_rows<T>& rows, const norm_pass<T>& pass, double* dweight,
               double* dbias) {
  const index_t splits = norm_splits(rows), units = rows.units(), channels = rows.channels,
                width = rows.width;
  scratch_frame frame(ctx.scratch());
  double* parts = frame.take<double>(splits * 2 * channels);
  double* totals = frame.take<double>(2 * width * ctx.threads());
  auto* const sums = frame.take<parameter_t<T>>(2 * width * ctx.threads());
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), norms, norm_gradient_sums<T>);
  ctx.parallel_for(splits, [&](index_t split, int worker) {
    double* total = totals + 2 * width * worker;
    std::fill_n(total, 2 * width, 0.0);
    kernel(pass, rows.start_of(units * split / splits), rows.start_of(units * (split + 1) / splits),
           sums + 2 * width * worker, total);
    double* part = parts + split * 2 * channels;
    std::fill_n(part, 2 * channels, 0.0);
    for (index_t i = 0; i < width; i += channels) {
      for (index_t c = 0; c < channels; ++c) {
        part[c] += total[i + c];
        part[channels + c] += total[width + i + c];
      }
    }
  });
  for (index_t c = 0; c < channels; ++c) {
    dbias[c] = dweight[c] = 0.0;
    for (index_t split = 0; split < splits; ++split) {
      dbias[c] += parts[split * 2 * channels + c];
      dweight[c] += parts[(split * 2 + 1) * channels + c];
    }
  }
}

/// Computes batch_norm_backward on the CPU.
template <class T>
void norm_gradients(context<device::cpu>& ctx, const tensor_view<const T, 2>& x,
                    const tensor_view<const T, 2>& dy, const parameter_t<T>* mean,
                    const parameter_t<T>* inv_std, const parameter_t<T>* weight,
                    const sum_target<parameter_t<T>>& dweight, const sum_target<parameter_t<T>>& dbias,
                    const tensor_view<T, 2>& dx, const relu_mask<T>& mask) {
  using P = parameter_t<T>;
  const wide_rows<T> rows(x.shape());
  scratch_frame frame(ctx.scratch());
  double* const weight_sums = frame.take<double>(2 * rows.channels);
  double* const bias_sums = weight_sums + rows.channels;
  P* values = frame.take<P>(4 * rows.width);
  P *centre = values, *scale = centre + rows.width, *slope = scale + rows.width, *shift = slope + rows.width;
  std::copy_n(mean, rows.channels, centre);
  rows.repeat(centre);
  norm_pass<T> pass;
  pass.x = x.flat().data();
  pass.other = dy.flat().data();
  pass.mask = mask.words;
  pass.mean = centre;
  pass.width = rows.width;
  norm_sums(ctx, rows, pass, weight_sums, bias_sums);
  for (index_t c = 0; c < rows.channels; ++c) weight_sums[c] *= static_cast<double>(inv_std[c]);
  store_sums(weight_sums, dweight, rows.channels);
  store_sums(bias_sums, dbias, rows.channels);
  if (dx.is_null() || rows.size == 0) return;
  // dx = scale g + (x - mean) slope + shift, with one scale, slope and shift for each channel.
  const auto count = static_cast<double>(x.extent(0));
  for (index_t c = 0; c < rows.channels; ++c) {
    const double spread = static_cast<double>(inv_std[c]);
    const double factor = static_cast<double>(weight[c]) * spread;
    scale[c] = static_cast<P>(factor);
    slope[c] = static_cast<P>(-factor * spread * weight_sums[c] / count);
    shift[c] = static_cast<P>(-factor * bias_sums[c] / count);
  }
  for (P* value : {scale, slope, shift}) rows.repeat(value);
  pass.y = dx.flat().data();
  pass.scale = scale;
  pass.slope = slope;
  pass.shift = shift;
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), norms, norm_input_gradient<T>);
  for_unit_chunks(ctx, rows, [&](index_t begin, index_t end) { kernel(pass, begin, end); });
}

}  // namespace detail

/// The gradients of y = batch_norm_apply(x), where mean and inv_std depend on x (formulas:
/// reference::batch_norm_backward). dweight, dbias: C elements each, overwritten or added to; summed on the
/// CPU in T over at most 8 sizeof(T) rows (of detail::wide_rows), then in double. dx: a null view if not
/// wanted; it may be dy or x and overlaps nothing else. x, dy, dx: M x C dense. mean, inv_std: as passed to
/// batch_norm_apply. mask: as written by batch_norm_apply if a ReLU was applied; dy is then the gradient of
/// the ReLU's output. addend_gradient: receives the gradient of an addend, dy under the mask; a null view:
/// not wanted. It needs a mask, is M x C dense, may be dy, and overlaps nothing else. sums: for a device,
/// gradient_sums::collected() over dy, or nullptr.
template <class T, class Device>
void batch_norm_backward(context<Device>& ctx, const tensor_view<const T, 2>& x,
                         const tensor_view<const T, 2>& dy, const parameter_t<T>* mean,
                         const parameter_t<T>* inv_std, const parameter_t<T>* weight,
                         const sum_target<parameter_t<T>>& dweight, const sum_target<parameter_t<T>>& dbias,
                         const tensor_view<T, 2>& dx, const relu_mask<T>& mask = {},
                         const tensor_view<T, 2>& addend_gradient = {}, const double* sums = nullptr) {
  PUFFERFISH_ASSERT(x.shape() == dy.shape(), "batch_norm_backward: shapes differ");
  PUFFERFISH_ASSERT(addend_gradient.is_null() || (!mask.is_null() && addend_gradient.shape() == dy.shape()),
                    "batch_norm_backward: the gradient of the addend needs a mask and the shape of dy");
  if constexpr (!is_cpu<Device>) {
    norm_ops<Device>::batch_norm_backward(ctx, x, dy, mean, inv_std, weight, dweight, dbias, dx, mask,
                                          addend_gradient, sums);
  } else {
    if (!addend_gradient.is_null()) masked_copy<T>(ctx, dy, mask, addend_gradient);
    detail::norm_gradients<T>(ctx, x, dy, mean, inv_std, weight, dweight, dbias, dx, mask);
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, batch_norm_backward);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
