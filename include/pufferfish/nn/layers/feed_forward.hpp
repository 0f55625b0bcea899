// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `FeedForward`: the position-wise block of a Transformer.

#include <pufferfish/nn/containers/slot.hpp>
#include <pufferfish/nn/layers/layer_norm.hpp>
#include <pufferfish/nn/layers/linear.hpp>
#include <pufferfish/ops/elementwise/relu.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Sizes and probabilities of a FeedForward block.
struct feed_forward_options {
  index_t model = 512;    ///< elements of an input and output vector
  index_t hidden = 2048;  ///< elements of the vector after w_1
  double dropout = 0.1;   ///< dropout probability of the output, before the residual sum
  double eps = 1e-6;      ///< eps of the layer norm
};

/// y = norm(x + dropout(w_2 relu(w_1 x))) over vectors of `model` elements, w_1 and w_2 with biases (Vaswani
/// et al.: "Attention is all you need", NIPS 2017, section 3.3; normalisation after the sum).
///
/// w_1 and w_2 are slots: factorize() replaces them by LowRankLinear layers. State: w_1.weight, w_1.bias,
/// w_2.weight, w_2.bias, layer_norm.weight, layer_norm.bias.
///
/// A pass of a block that was moved from throws state_error. In training the tape keeps relu(w_1 x) and the
/// sum before the norm.
///
/// \code
/// FeedForward<float> layer({.model = 64, .hidden = 256});
/// layer.initialize({1, 1});
/// tensor<float, 2> x({8, 64}), y(x.shape());
/// layer.forward(ctx, x, y.view());
/// \endcode
template <class T, class Device = device::cpu>
class FeedForward : public detail::layer_of_parts<FeedForward<T, Device>, T, Device> {
 public:
  using value_type = T;
  using layer_type = any_layer<T, Device>;

  /// Throws shape_error unless both widths are positive, value_error for a probability outside [0, 1) or an
  /// eps that is not positive. Parameters are zero, the layer norm is the identity, until initialize().
  explicit FeedForward(const feed_forward_options& options)
      : options_(checked(options)),
        w_1_(Linear<T>(options.model, options.hidden)),
        w_2_(Linear<T>(options.hidden, options.model)),
        norm_(options.model, options.eps) {}

  /// The options given to the constructor.
  const feed_forward_options& options() const { return options_; }
  bool is_moved_from() const { return norm_.is_moved_from(); }
  std::string describe() const {
    return detail::message({"FeedForward ", options_.model, " -> ", options_.hidden, " -> ", options_.model});
  }

  /// x, y: rows of `model` elements, dense; y overlaps nothing. In training, x must stay as it is
  /// until the backward pass. `numbers`: row numbers for dropout (see ops::row_dropout); nullptr:
  /// consecutive numbers from first_row. Throws shape_error.
  void forward(context<Device>& ctx, const tensor_view<const T, 2>& x, const tensor_view<T, 2>& y,
               const std::uint64_t* numbers = nullptr, std::uint64_t first_row = 0) const {
    detail::check_not_moved(*this);
    check(x.shape(), y.shape());
    detail::check_dense(*this, "x", x);
    detail::check_dense(*this, "y", y);
    scratch_frame frame(ctx.scratch());
    const extents<2> wide{x.extent(0), options_.hidden};
    const tensor_view<T, 2> hidden = ctx.training() ? ctx.tape().template push<T>(wide) : frame.take<T>(wide);
    const tensor_view<T, 2> z = ctx.training() ? ctx.tape().template push<T>(x.shape()) : y;
    detail::projection<layer_type>::template forward<T>(ctx, w_1_, x, hidden);
    ops::relu_forward<T>(ctx, std::as_const(hidden).flat(), hidden.flat());
    detail::projection<layer_type>::template forward<T>(ctx, w_2_, hidden, z);
    if (!ctx.training()) return norm_.forward_sum(ctx, z, x, {}, y);
    norm_.forward_sum(ctx, z, x, {options_.dropout, ctx.next_random_stream(), first_row, numbers}, y);
    ctx.tape().push_value(*this, hidden);
  }

  /// Computes from dy the gradients of all parameters and, unless dx is a null view, of x. Throws
  /// shape_error, and state_error without a forward pass in training mode.
  /// dx, shaped as x, is overwritten and may be dy.
  void backward(context<Device>& ctx, const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dx) const {
    const auto hidden = ctx.tape().template pop_value<tensor_view<T, 2>>(*this);
    detail::check_not_moved(*this);
    detail::check_dense(*this, "dy", dy);
    detail::check_dense_if_wanted(*this, "dx", dx);
    scratch_frame frame(ctx.scratch());
    const tensor_view<T, 2> dz = frame.take<T>(dy.shape()), dhidden = frame.take<T>(hidden.shape());
    norm_.backward_sum(ctx, dy, dx, dz);
    detail::projection<layer_type>::template backward<T>(ctx, w_2_, dz, dhidden, false);
    detail::projection<layer_type>::template backward_after_relu<T>(ctx, w_1_, hidden, dhidden, dx,
                                                                    !dx.is_null());
    ctx.tape().template pop<T>(dy.shape());
    ctx.tape().template pop<T>(hidden.shape());
  }

  /// Shape of y for the layer as a layer of images: `input` itself, N x H x W x model. Throws shape_error for
  /// another number of channels.
  extents<4> output_shape(const extents<4>& input) const {
    check({1, input[3]}, {1, input[3]});
    return input;
  }
  /// The forward pass over the N H W rows of x. x, y: N x H x W x model, dense; y overlaps nothing. Row
  /// numbers for dropout count from the rows of the context's first sample. Throws shape_error.
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    detail::check_forward(*this, x, y);
    const auto first = static_cast<std::uint64_t>(ctx.first_sample() * x.extent(1) * x.extent(2));
    forward(ctx, detail::rows_of(x), detail::rows_of(y), nullptr, first);
  }
  /// Backward pass of forward for images. dy, dx: N x H x W x model, dense; dx may be dy or a null view.
  /// Throws shape_error, and state_error without a forward pass in training mode.
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    detail::check_backward(*this, dy.shape(), dy, dx, true);
    backward(ctx, detail::rows_of(dy), dx.is_null() ? tensor_view<T, 2>() : detail::rows_of(dx));
  }

  /// Calls f(name, slot) for the slots w_1 and w_2, then f("layer_norm", norm).
  template <class F>
  void parts(F&& f) {
    f("w_1", w_1_);
    f("w_2", w_2_);
    f("layer_norm", norm_);
  }

  /// Multiply-accumulates of one forward pass over N x H x W x model: both products, without biases.
  index_t macs(const extents<4>& input) const {
    return w_1_.macs(input) + w_2_.macs({input[0], input[1], input[2], options_.hidden});
  }

 private:
  // Returns the options. Throws value_error for a dropout probability outside [0, 1).
  static const feed_forward_options& checked(const feed_forward_options& options) {
    if (!(options.dropout >= 0.0 && options.dropout < 1.0)) {
      detail::throw_error<value_error>(
          {"FeedForward: dropout probability ", options.dropout, " is not in [0, 1)"});
    }
    return options;
  }
  // Throws shape_error unless x has the model's width and y the shape of x.
  void check(const extents<2>& x, const extents<2>& y) const {
    if (x[1] != options_.model || y != x) {
      detail::throw_error<shape_error>({describe(), ": input ", x, " does not fit output ", y});
    }
  }

  feed_forward_options options_;
  layer_type w_1_, w_2_;
  LayerNorm<T> norm_;
};

PUFFERFISH_NAMESPACE_END
