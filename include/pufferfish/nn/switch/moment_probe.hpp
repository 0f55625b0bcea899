// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: a layer that measures mean and variance of its input, and the conversion to a batch norm.

#include <cmath>
#include <string>

#include <pufferfish/core/context.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/nn/layers/batch_norm.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Identity layer y = x whose training passes update running statistics of x with the rules of BatchNorm.
template <class T>
class moment_probe {
 public:
  using value_type = T;
  // The backward pass copies dy, so it needs neither x nor y, and dx may be dy.
  static constexpr bool reads_input = false;
  static constexpr bool reads_output = false;
  static constexpr bool gradient_in_place = true;

  /// Makes a probe for `channels` channels that has seen no batch.
  explicit moment_probe(index_t channels) : running_mean_(channels), running_var_(channels), batches_(1) {}

  /// Number of channels.
  index_t channels() const { return running_mean_.size(); }
  std::string describe() const { return message({"moment probe ", channels()}); }
  /// Returns `input`. Throws shape_error for another number of channels.
  extents<4> output_shape(const extents<4>& input) const {
    if (input[3] != channels()) {
      throw_error<shape_error>({describe(), ": input ", input, " (NHWC) has ", input[3], " channels"});
    }
    return input;
  }

  /// y = x, and in training the running statistics of x are updated. x and y are dense, have one shape and do
  /// not overlap. Throws shape_error for a wrong shape, and value_error in training if there is only one
  /// value per channel.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    check_forward(*this, x, y);
    if (ctx.training() && x.size() == channels()) {
      throw_error<value_error>(
          {describe(), ": training needs more than one value a channel, the input is ", x.shape()});
    }
    if (ctx.training()) ctx.tape().push_value(*this, x.shape());
    if (x.empty()) return;
    ops::copy_elements<T>(ctx, x.data(), y.data(), x.size());
    if (!ctx.training()) return;
    scratch_frame frame(ctx.scratch());
    const extents<2> rows{x.extent(0) * x.extent(1) * x.extent(2), x.extent(3)};
    ops::batch_norm_use_batch<T>(ctx, x.reshape(rows), 1.0, ctx.norm_momentum().value_or(0.1),
                                 frame.template take<parameter_t<T>>(2 * channels()), running_mean_.data(),
                                 running_var_.data(), batches_.data());
  }
  /// dx = dy. dx may be dy, or a null view if it is not wanted. Throws shape_error for a wrong shape.
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    check_backward(*this, ctx.tape().template pop_value<extents<4>>(*this), dy, dx);
    if (!dx.is_null() && dx.data() != dy.data()) ops::copy_elements<T>(ctx, dy.data(), dx.data(), dy.size());
  }

  /// Calls f(name, buffer) with the names that a BatchNorm has for its statistics.
  template <class F>
  void visit(F&& f) {
    f("running_mean", running_mean_);
    f("running_var", running_var_);
    f("num_batches_tracked", batches_);
  }

 private:
  state_buffer<parameter_t<T>> running_mean_, running_var_, batches_;
};

/// Addresses of the buffers and parameters of a batch norm or of a probe; nullptr for those that it lacks.
template <class P>
struct norm_buffers {
  P *mean = nullptr, *variance = nullptr, *batches = nullptr;  ///< of the inputs; number of batches
  P *weight = nullptr, *bias = nullptr;                        ///< parameters, which a probe lacks

  /// Finds the buffers by the names that layer.visit() passes. The addresses are valid until the layer is
  /// moved, bound to an arena or destroyed.
  template <class Layer>
  explicit norm_buffers(Layer& layer) {
    layer.visit([this](const std::string& name, auto& thing) {
      if (name == "running_mean") mean = thing.data();
      if (name == "running_var") variance = thing.data();
      if (name == "num_batches_tracked") batches = thing.data();
      if (name == "weight") weight = thing.data();
      if (name == "bias") bias = thing.data();
    });
  }
};

/// Makes a batch norm that has the statistics of `probe` and is the identity in inference: weight =
/// sqrt(running_var + eps), bias = running_mean, so that the result
/// (x - running_mean) / sqrt(running_var + eps) weight + bias is x up to rounding.
template <class T>
BatchNorm<T> settled_norm(moment_probe<T>& probe) {
  using P = parameter_t<T>;
  BatchNorm<T> norm(probe.channels());
  const norm_buffers<P> from(probe), to(norm);
  for (index_t c = 0; c < probe.channels(); ++c) {
    to.mean[c] = to.bias[c] = from.mean[c];
    to.variance[c] = from.variance[c];
    to.weight[c] = static_cast<P>(std::sqrt(static_cast<double>(from.variance[c]) + norm.eps()));
  }
  *to.batches = *from.batches;
  return norm;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
