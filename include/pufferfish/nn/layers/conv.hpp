// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `Conv`: the dense two-dimensional convolution.

#include <array>

#include <pufferfish/lowrank/factorization/factorize.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Two-dimensional convolution of NHWC images. With stride s, padding p, dilation d, and c the channels of
/// the group of output channel o (in W counted from the first of them),
///
///     y(n, h, w, o) = b(o) + sum over u, v, c of W(o, c, u, v) x(n, h s - p + u d, w s - p + v d, c)
///
/// where pixels outside the image count as 0, and height and width have their own s, p, d. The channels are
/// cut into shape().groups groups. W is OIHW in names and files, [out][in / groups][height][width] as in
/// PyTorch, and stored [height][width][in / groups][out]. T is the scalar of activations and products;
/// parameters are stored as parameter_t<T>.
///
/// Every pass throws state_error if the layer was moved from. The forward pass keeps a view of x on the tape,
/// no copy.
///
/// \code
/// Conv<float> layer(conv_shape::square(3, 16, 3, 1, 1));  // in, out, kernel, stride, padding
/// layer.initialize({1, 1});
/// cpu_context ctx;
/// tensor<float, 4> x({2, 32, 32, 3}), y(layer.output_shape(x.shape()));
/// layer.forward(ctx, x, y.view());
/// \endcode
template <class T>
class Conv {
 public:
  using value_type = T;
  static constexpr bool reads_output = false;
  static constexpr bool input_may_move = true;
  static constexpr bool takes_pending_norm = true;

  /// Throws shape_error for a shape that conv_shape::validate refuses. Parameters are zero until
  /// initialize().
  explicit Conv(const conv_shape& shape, bool bias = false)
      : shape_(shape),
        weight_(checked(shape), parameter_role::weight),
        bias_(logical_layout::vector(bias ? shape.out_channels : 0), parameter_role::bias) {}

  /// The geometry given to the constructor.
  const conv_shape& shape() const { return shape_; }
  bool has_bias() const { return bias_.size() > 0; }
  bool is_moved_from() const { return weight_.is_moved_from(); }

  /// Weight [out][in / groups][height][width] and bias (a null view if there is no bias), in PyTorch's order.
  tensor_view<parameter_t<T>, 4> weight() { return weight_.logical(); }
  tensor_view<const parameter_t<T>, 4> weight() const { return weight_.logical(); }
  tensor_view<parameter_t<T>, 1> bias() { return {has_bias() ? bias_.data() : nullptr, {bias_.size()}}; }
  tensor_view<const parameter_t<T>, 1> bias() const {
    return {has_bias() ? bias_.data() : nullptr, {bias_.size()}};
  }

  std::string describe() const { return "Conv, " + shape_.describe(); }
  /// floor((in + 2 padding - dilation (kernel - 1) - 1) / stride) + 1 pixels in each direction. Throws
  /// shape_error if the channels differ or the kernel does not fit.
  extents<4> output_shape(const extents<4>& input) const { return shape_.output(input, *this); }

  /// x, y: NHWC, dense; y does not overlap x. In training, x must stay as it is until backward. Throws
  /// shape_error.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    run_forward(ctx, x, y, {});
  }

  /// Computes y like forward and applies `epilogue` to it while y is in the cache: the moments that a batch
  /// norm after this layer needs (a device need not store them, see moment_parts), or, in inference only, a
  /// summand and a ReLU. A device also computes epilogue.norm_of_x, whose output is x, if it is pending.
  /// Throws the errors of forward.
  template <class Device>
  void forward_with_epilogue(context<Device>& ctx, const tensor_view<const T, 4>& x,
                             const tensor_view<T, 4>& y, const ops::output_epilogue<T>& epilogue) const {
    run_forward(ctx, x, y, epilogue);
  }

  /// Gradients from dy, of the shape of y, for the last forward pass. The gradients of W and b are
  /// overwritten by the first write of a step and added to by later ones (see parameter); dx, of the shape of
  /// x, is overwritten. dx may be a null view, or x, and overlaps nothing else. Throws shape_error, and
  /// state_error without a forward pass in training mode.
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    run_backward(ctx, dy, dx, false, nullptr);
  }

  /// Computes the gradients of backward, but adds the gradient of x to dx. dx must not be x. Shapes and
  /// errors are those of backward.
  template <class Device>
  void backward_add(context<Device>& ctx, const tensor_view<const T, 4>& dy,
                    const tensor_view<T, 4>& dx) const {
    run_backward(ctx, dy, dx, true, nullptr);
  }

  /// Computes the gradients of backward or, if `add` is true, of backward_add. A device may also collect
  /// `sums` over dx for the batch norm whose output is x (gradient_sums). Shapes, aliasing and errors are
  /// those of backward and backward_add.
  template <class Device>
  void backward_summing(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx,
                        bool add, ops::gradient_sums<T>& sums) const {
    run_backward(ctx, dy, dx, add, &sums);
  }

  /// Draws weight and bias from U(+-1/sqrt(in / groups * height * width)), PyTorch's default.
  void initialize(random_stream random) {
    detail::fill_fan_in(weight_, shape_.patch(), random.child("weight"));
    detail::fill_fan_in(bias_, shape_.patch(), random.child("bias"));
  }

  /// Calls f("weight", W), then f("bias", b) if there is a bias.
  template <class F>
  void visit(F&& f) {
    f("weight", weight_);
    if (has_bias()) f("bias", bias_);
  }

  /// Multiply-accumulates of one forward pass: output pixels * shape().patch() * out channels. Throws
  /// shape_error for an input that output_shape rejects.
  index_t macs(const extents<4>& input) const {
    const extents<4> output = output_shape(input);
    return output[0] * output[1] * output[2] * shape_.patch() * shape_.out_channels;
  }

 private:
  template <class Device>
  void run_forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y,
                   const ops::output_epilogue<T>& epilogue) const {
    detail::check_forward(*this, x, y);
    if (ctx.training()) ctx.tape().push_value(*this, x);
    ops::conv_forward<T>(ctx, shape_, x, weight_.template as<T>(),
                         has_bias() ? bias_.template as<T>() : nullptr, y, epilogue);
    show_output(ctx, y);
  }

  // Shows the output's rows to a row_observer of the context.
  template <class Device>
  void show_output(context<Device>& ctx, const tensor_view<T, 4>& y) const {
    if (ctx.training()) ctx.rows()(weight_, row_kind::output, ops::detail::as_rows<const T>(y));
  }

  // Weight gradient first, then the bias, then dx, so that an exchange can send the gradients early.
  template <class Device>
  void run_backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx,
                    bool add, ops::gradient_sums<T>* sums) const {
    const auto x = ctx.tape().template pop_value<tensor_view<const T, 4>>(*this);
    detail::check_backward(*this, x.shape(), dy, dx);
    ctx.rows()(weight_, row_kind::output_gradient, ops::detail::as_rows(dy));
    const auto parameters = [&] {
      ops::conv_backward_weight<T>(ctx, shape_, x, dy, weight_.gradient_data(), weight_.accumulate());
      ctx.gradient_written(weight_);
      if (!has_bias()) return;
      ops::bias_gradient<T>(ctx, ops::detail::as_rows(dy), bias_.gradient_data(), bias_.accumulate());
      ctx.gradient_written(bias_);
    };
    if (dx.is_null()) return parameters();
    const auto input = [&] {
      ops::conv_backward_input<T>(ctx, shape_, dy, weight_.template as<T>(), dx, add, sums);
    };
    ctx.in_parallel(parameters, input, dx.data() != x.data());
  }

  // Layout of the weight. Throws shape_error for an invalid geometry.
  static logical_layout checked(const conv_shape& shape) {
    shape.validate("Conv");
    return logical_layout::kernel(shape.out_channels, shape.group_inputs(), shape.kernel.height,
                                  shape.kernel.width);
  }

  conv_shape shape_;
  parameter<parameter_t<T>> weight_, bias_;
};

/// Gives svd_factorize access to weight and bias of a Conv, as views of the layer's memory.
template <class T>
struct layer_traits<Conv<T>> {
  static constexpr auto kind = layer_kind::conv;
  static const conv_shape& shape(const Conv<T>& layer) { return layer.shape(); }
  static auto matrices(const Conv<T>& layer) {
    return std::array{named_view<const parameter_t<T>, 4>{"weight", layer.weight()}};
  }
  static tensor_view<const parameter_t<T>, 1> bias(const Conv<T>& layer) { return layer.bias(); }
};

PUFFERFISH_NAMESPACE_END
