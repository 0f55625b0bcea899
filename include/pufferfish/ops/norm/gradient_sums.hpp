// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gradient_sums`: sums for the backward pass of a batch norm, collected by the operation that computes the
/// gradient of the norm's output.

#include <pufferfish/core/arena.hpp>
#include <pufferfish/ops/elementwise/relu_mask.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Sums over the rows m of a batch norm's output, for each channel c: of g_mc, and of g_mc (x_mc - mean_c).
/// x: rows x channels, the norm's input; mean: the mean of each channel; g: the gradient of the output, with
/// zeros where the mask of the ReLU after the norm blocks it. With these sums batch_norm_backward needs no
/// pass of its own for them.
///
/// An operation (conv_backward_input) that computes the gradient collects the sums only on a device, and only
/// where that costs less than a separate pass; collected() then is not nullptr.
///
/// \code
/// scratch_frame frame(ctx.scratch());
/// ops::gradient_sums<float> sums(frame, rows(x), mean, mask);
/// ops::conv_backward_input<float>(ctx, shape, dz, w, dy, false, &sums);  // dy: gradient of the output
/// const double* known = sums.collected();
/// ops::batch_norm_backward<float>(ctx, rows(x), rows(dy), mean, inv_std, weight, {dweight}, {dbias}, dx,
///                                 mask, {}, known);
/// \endcode
template <class T>
class gradient_sums {
 public:
  /// Memory of the sums comes from `frame`, which must outlive their use. mask: null without a ReLU.
  gradient_sums(scratch_frame& frame, const tensor_view<const T, 2>& x, const parameter_t<T>* mean,
                const relu_mask<T>& mask)
      : x_(x), mean_(mean), mask_(mask), values_(frame.take<double>(2 * x.extent(1))) {}

  const tensor_view<const T, 2>& x() const { return x_; }
  const parameter_t<T>* mean() const { return mean_; }
  const relu_mask<T>& mask() const { return mask_; }

  /// The operation collects the sums: returns where its kernels store the sums of g, then those of
  /// g (x - mean), `channels` numbers each.
  double* collect() {
    collects_ = true;
    return values_;
  }
  /// What collect() returned; nullptr if it was not called.
  const double* collected() const { return collects_ ? values_ : nullptr; }

 private:
  tensor_view<const T, 2> x_;
  const parameter_t<T>* mean_;
  relu_mask<T> mask_;
  double* values_;
  bool collects_ = false;
};

}  // namespace ops
PUFFERFISH_NAMESPACE_END
