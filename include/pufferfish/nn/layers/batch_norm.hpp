// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `BatchNorm`: batch normalisation of NHWC images, one mean and variance a channel.

#include <type_traits>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/number_text.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/nn/containers/layer_fusion.hpp>
#include <pufferfish/ops/norm/batch_norm.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// y = (x - mean) / sqrt(variance + eps) weight + bias for each channel (Ioffe, Szegedy, ICML 2015). Training
/// uses mean and biased variance of the batch, over images and pixels, and moves the running statistics
/// towards them: running = (1 - momentum) running + momentum batch, with the unbiased variance, as PyTorch
/// does. context::norm_momentum, where it is set, replaces the layer's momentum. Inference uses the running
/// statistics. Vectors (N x 1 x 1 x C) are normalised over the batch.
///
/// The buffer num_batches_tracked counts the batches that have gone into the running statistics.
/// This library does not read it; it is part of PyTorch's state of the layer, and so of weight
/// files and published counts. A float counts exactly up to 2^24 and then stays there.
///
/// Every pass throws state_error if the layer was moved from. A forward pass in training writes the running
/// statistics of a const layer: two threads must not train through the same object at once.
///
/// \code
/// BatchNorm<float> layer(16);  // eps 1e-5, momentum 0.1
/// cpu_context ctx;
/// ctx.set_mode(run_mode::training);
/// tensor<float, 4> x({8, 4, 4, 16}), y(x.shape()), dx(x.shape());
/// layer.forward(ctx, x, y.view());    // moves the running statistics
/// layer.backward(ctx, y, dx.view());  // any gradient of the shape of y
/// \endcode
template <class T>
class BatchNorm {
 public:
  using value_type = T;
  static constexpr bool takes_moments = true;
  static constexpr bool takes_gradient_sums = true;
  static constexpr bool gives_pending_norm = true;
  static constexpr bool gradient_in_place = true;
  static constexpr bool gradient_over_input = true;
  static constexpr bool reads_output = false;

  /// Constructs the layer with weight 1, bias 0, running mean 0 and running variance 1. Throws shape_error
  /// unless channels > 0, value_error unless eps > 0 and 0 <= momentum <= 1.
  explicit BatchNorm(index_t channels, double eps = 1e-5, double momentum = 0.1)
      : eps_(eps),
        momentum_(momentum),
        weight_(logical_layout::vector(checked(channels, eps, momentum)), parameter_role::norm),
        bias_(logical_layout::vector(channels), parameter_role::norm),
        running_mean_(channels),
        running_var_(channels),
        batches_(1) {
    reset();
  }

  /// Number of channels.
  index_t channels() const { return weight_.layout().shape[0]; }
  bool is_moved_from() const { return weight_.is_moved_from(); }
  /// Number added to the variance, and the share of a batch in the running statistics.
  double eps() const { return eps_; }
  double momentum() const { return momentum_; }
  /// "BatchNorm 16", followed by eps and momentum if they are not the constructor's defaults.
  std::string describe() const {
    std::string text = "BatchNorm " + std::to_string(channels());
    if (eps_ == 1e-5 && momentum_ == 0.1) return text;
    return text + detail::message({", eps ", eps_, ", momentum ", momentum_});
  }

  /// Throws shape_error if the channels differ.
  extents<4> output_shape(const extents<4>& input) const {
    if (input[3] != channels()) {
      PUFFERFISH_THROW(shape_error(describe() + ": input " + to_string<4>(input) + " (NHWC) has " +
                                   std::to_string(input[3]) + " channels, not " +
                                   std::to_string(channels())));
    }
    return input;
  }

  /// x, y: dense, of one shape; y does not overlap x. In training, x must stay as it is until the backward
  /// pass, and a batch of zero images changes no statistics. Throws shape_error, and value_error in training
  /// with a single value a channel, which has no variance.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    forward_fused(ctx, x, y, {});
  }

  /// forward followed by an optional sum and ReLU, with optional moments of the batch that are known already.
  /// If `fusion` has a mask, the backward pass must be backward_masked. Throws the errors of forward, and
  /// shape_error for moments of other sizes than x. With s = weight / sqrt(variance + eps): y = relu(s (x -
  /// mean) + bias + addend), where sum and ReLU are optional. The addend is dense, of the shape of x, and
  /// does not overlap y. In training on a device, y may be left to fusion.pending (ops::pending_norm).
  template <class Device>
  void forward_fused(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y,
                     const forward_fusion<T>& fusion) const {
    detail::check_forward(*this, x, y);
    if (!fusion.addend.is_null()) {
      detail::check_shapes(*this, x.shape(), fusion.addend.shape());
      detail::check_dense(*this, "the addend", fusion.addend);
    }
    if (ctx.training() && x.size() == channels()) {
      PUFFERFISH_THROW(value_error(describe() +
                                   ": training needs more than one value a channel, the input is " +
                                   to_string<4>(x.shape())));
    }
    scratch_frame frame(ctx.scratch());
    const index_t size = channels();
    parameter_t<T>* statistics = ctx.training() ? ctx.tape().template push<parameter_t<T>>(2 * size)
                                                : frame.take<parameter_t<T>>(2 * size);
    if (ctx.training()) ctx.tape().push_value(*this, x);
    if (fusion.record != nullptr) *fusion.record = {x, statistics, fusion.relu, fusion.mask};
    if (x.empty()) {
      ops::fill<parameter_t<T>>(ctx, {statistics, static_cast<std::size_t>(2 * size)}, {});
      return;
    }
    const ops::norm_epilogue<T> epilogue{
        fusion.addend.is_null() ? tensor_view<const T, 2>() : rows(fusion.addend), fusion.relu, fusion.mask};
    if (!ctx.training()) {
      ops::batch_norm_use_running<T>(ctx, running_mean_.data(), running_var_.data(), size, eps_, statistics);
      return apply(ctx, x, statistics, y, epilogue);
    }
    const double* merged = nullptr;  // moments that a device has computed
    if (fusion.moments != nullptr) {
      if constexpr (ops::is_cpu<Device>) {
        use_moments(ctx, *fusion.moments, x, statistics);
        return apply(ctx, x, statistics, y, epilogue);
      }
      merged = fusion.moments->merged();
      if (merged != nullptr) check_moments(*fusion.moments, fusion.moments->merged_rows(), x);
    }
    ops::batch_norm_forward<T>(ctx, rows(x), eps_, momentum_of(ctx), statistics, running_mean_.data(),
                               running_var_.data(), batches_.data(), weight_.data(), bias_.data(), rows(y),
                               epilogue, merged, fusion.pending);
  }

  /// Writes the output of a forward pass in training again, bit for bit, before the backward pass.
  /// `record` was filled by that forward_fused, which must have had no addend. Changes no
  /// statistics. y: shaped as x, does not overlap x. Throws shape_error.
  template <class Device>
  void recompute(context<Device>& ctx, const forward_record<T>& record, const tensor_view<T, 4>& y) const {
    detail::check_shapes(*this, record.x.shape(), y.shape());
    if (!y.empty()) apply(ctx, record.x, record.statistics, y, {{}, record.relu, {}});
  }

  /// Computes from dy the gradients of weight and bias and, unless dx is a null view, of x; dx may
  /// be dy or x. Throws shape_error, and state_error without a forward pass in training mode.
  /// With z = (x - mean) / sqrt(variance + eps) and M values a channel: dbias = sum dy, dweight = sum dy z,
  /// dx = weight / sqrt(variance + eps) (dy - dbias / M - z dweight / M). Parameter gradients are overwritten
  /// by the first write of a step and added to by later ones (see parameter).
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    backward_masked(ctx, dy, dx, {});
  }

  /// backward with dy taken as 0 where the mask, filled by forward_fused, blocks it. The gradient of an
  /// addend is dy under that mask. It is written to `addend_gradient`, shaped as dy, unless that is a null
  /// view; `addend_gradient` may be dy and overlaps nothing else. `sums`: those of gradient_sums over dy and
  /// the mask, from which a device computes the gradients; nullptr: not known.
  template <class Device>
  void backward_masked(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx,
                       const ops::relu_mask<T>& mask, const tensor_view<T, 4>& addend_gradient = {},
                       const double* sums = nullptr) const {
    const auto x = ctx.tape().template pop_value<tensor_view<const T, 4>>(*this);
    const index_t size = channels();
    const parameter_t<T>* statistics = ctx.tape().template pop<parameter_t<T>>(2 * size);
    detail::check_backward(*this, x.shape(), dy, dx);
    const bool passes_on = !addend_gradient.is_null();
    if (passes_on) detail::check_shapes(*this, dy.shape(), addend_gradient.shape());
    detail::check_dense_if_wanted(*this, "the gradient of the addend", addend_gradient);
    ops::batch_norm_backward<T>(ctx, rows(x), rows(dy), statistics, statistics + size, weight_.data(),
                                {weight_.gradient_data(), weight_.accumulate()},
                                {bias_.gradient_data(), bias_.accumulate()},
                                dx.is_null() ? tensor_view<T, 2>() : rows(dx), mask,
                                passes_on ? rows(addend_gradient) : tensor_view<T, 2>(), sums);
    ctx.gradient_written(bias_);
    ctx.gradient_written(weight_);
  }

  /// Sets weight 1, bias 0, running mean 0 and running variance 1. Draws no random numbers.
  void initialize(random_stream) { reset(); }

  /// Calls f(name, parameter) for "weight" and "bias", then f(name, buffer) for "running_mean", "running_var"
  /// and "num_batches_tracked".
  template <class F>
  void visit(F&& f) {
    f("weight", weight_);
    f("bias", bias_);
    f("running_mean", running_mean_);
    f("running_var", running_var_);
    f("num_batches_tracked", batches_);
  }

 private:
  // Returns the channels. Throws shape_error for less than one, value_error for an eps that is not positive
  // and finite, or a momentum outside 0 .. 1.
  static index_t checked(index_t channels, double eps, double momentum) {
    if (channels < 1) {
      PUFFERFISH_THROW(shape_error("BatchNorm: " + std::to_string(channels) + " channels; at least 1"));
    }
    if (!(eps > 0.0 && std::isfinite(eps)) || !(momentum >= 0.0 && momentum <= 1.0)) {
      PUFFERFISH_THROW(value_error("BatchNorm " + std::to_string(channels) + ": eps " +
                                   detail::shortest_number(eps) + " must be positive and finite, momentum " +
                                   detail::shortest_number(momentum) + " in 0 .. 1"));
    }
    return channels;
  }

  // Initial values: weight 1, bias 0, running mean 0, running variance 1, no batch.
  void reset() {
    std::fill_n(weight_.data(), channels(), parameter_t<T>{1});
    std::fill_n(bias_.data(), channels(), parameter_t<T>{});
    std::fill_n(running_mean_.data(), channels(), parameter_t<T>{});
    std::fill_n(running_var_.data(), channels(), parameter_t<T>{1});
    *batches_.data() = parameter_t<T>{};
  }

  template <class U>
  static tensor_view<U, 2> rows(const tensor_view<U, 4>& view) {
    return view.reshape(extents<2>{view.extent(0) * view.extent(1) * view.extent(2), view.extent(3)});
  }

  // `statistics`: mean and inverse deviation of each channel.
  template <class Device>
  void apply(context<Device>& ctx, const tensor_view<const T, 4>& x, const parameter_t<T>* statistics,
             const tensor_view<T, 4>& y, const ops::norm_epilogue<T>& epilogue) const {
    ops::batch_norm_apply<T>(ctx, rows(x), statistics, statistics + channels(), weight_.data(), bias_.data(),
                             rows(y), epilogue);
  }

  // Share of a batch in the running statistics.
  template <class Device>
  double momentum_of(const context<Device>& ctx) const {
    return ctx.norm_momentum().value_or(momentum_);
  }

  // Merges the moments of x, writes mean and inverse deviation to `statistics`, and updates the running
  // statistics. Throws shape_error if the moments are of another input.
  void use_moments(context<device::cpu>& ctx, const ops::moment_parts<T>& moments,
                   const tensor_view<const T, 4>& x, parameter_t<T>* statistics) const {
    const index_t size = channels();
    scratch_frame frame(ctx.scratch());
    double* const mean = frame.take<double>(2 * size);
    const index_t found = moments.channels() == size ? moments.merge(mean, mean + size) : 0;
    check_moments(moments, found, x);
    ops::batch_norm_use_batch<parameter_t<T>>(ctx, mean, mean + size, size, found, eps_, momentum_of(ctx),
                                              statistics, running_mean_.data(), running_var_.data(),
                                              batches_.data());
  }

  // Throws shape_error unless these moments, which are of `found` rows, are of an input of the shape of x.
  void check_moments(const ops::moment_parts<T>& moments, index_t found,
                     const tensor_view<const T, 4>& x) const {
    if (moments.channels() == channels() && found == rows(x).extent(0)) return;
    PUFFERFISH_THROW(shape_error(describe() + ": given the moments of " + std::to_string(found) +
                                 " values in each of " + std::to_string(moments.channels()) +
                                 " channels, the input has " + std::to_string(rows(x).extent(0))));
  }

  double eps_, momentum_;
  parameter<parameter_t<T>> weight_, bias_;
  state_buffer<parameter_t<T>> running_mean_, running_var_, batches_;
};

PUFFERFISH_NAMESPACE_END
