// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `pending_norm`: a batch norm whose output is computed by the operation that reads the output.

#include <pufferfish/core/arena.hpp>
#include <pufferfish/ops/norm/batch_norm.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// A batch norm in training whose output y has not been computed yet. batch_norm_forward on a device leaves
/// it so, if it is given a pending_norm. The operation that reads y next must be given the same object, and
/// computes y: a convolution on a device as it reads x, or by compute(). Until then y must not be read, and
/// nothing that the batch norm reads may change or end. Results have the same bits in both ways.
///
/// \code
/// scratch_frame frame(ctx.scratch());
/// ops::pending_norm<T> norm(frame, channels);
/// ops::batch_norm_forward<T>(ctx, rows(x), eps, momentum, statistics, running_mean, running_var, batches,
///                            weight, bias, rows(y), {{}, true, mask}, moments, &norm);
/// ops::output_epilogue<T> epilogue;
/// epilogue.norm_of_x = &norm;
/// ops::conv_forward<T>(ctx, shape, y, w, nullptr, z, epilogue);  // computes y, too
/// \endcode
template <class T>
class pending_norm {
 public:
  /// The arguments of batch_norm_forward.
  struct call {
    tensor_view<const T, 2> x;
    double eps, momentum;
    parameter_t<T>*statistics, *running_mean, *running_var, *batches;
    const parameter_t<T>*weight, *bias;
    tensor_view<T, 2> y;
    norm_epilogue<T> epilogue;
    const double* moments;  ///< nullptr: `statistics` are complete, and batch_norm_apply remains to be done
  };

  /// Memory for moments() of `channels` channels comes from `frame`, which must outlive the use of y.
  pending_norm(scratch_frame& frame, index_t channels) : moments_(frame.take<double>(2 * channels)) {}

  /// Memory for the moments of x (moment_parts::start_merged), as long as the norm may be pending.
  double* moments() const { return moments_; }

  /// Notes a norm whose y is to be computed later.
  void set(const call& arguments) {
    call_ = arguments;
    pending_ = true;
  }
  /// Whether y is still to be computed.
  bool is_pending() const { return pending_; }
  /// The noted norm. For the operation that computes y, which then calls done().
  const call& arguments() const { return call_; }
  void done() { pending_ = false; }

  /// Computes y, if it is still to be computed, by an operation of its own.
  template <class Device>
  void compute(context<Device>& ctx) {
    if (!pending_) return;
    done();
    const call& c = call_;
    if (c.moments == nullptr) {
      return batch_norm_apply<T>(ctx, c.x, c.statistics, c.statistics + c.x.extent(1), c.weight, c.bias, c.y,
                                 c.epilogue);
    }
    batch_norm_forward<T>(ctx, c.x, c.eps, c.momentum, c.statistics, c.running_mean, c.running_var, c.batches,
                          c.weight, c.bias, c.y, c.epilogue, c.moments);
  }

 private:
  double* moments_;
  call call_ = {};
  bool pending_ = false;
};

}  // namespace ops
PUFFERFISH_NAMESPACE_END
