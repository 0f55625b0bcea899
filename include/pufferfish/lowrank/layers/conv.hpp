// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `LowRankConv`: a rank-r convolution as a k x k convolution to r channels followed by a 1x1 convolution.
///
/// Images are NHWC: x is N x H x W x in, y is N x H' x W' x out. Weights are OIHW in all views, as in
/// PyTorch.

#include <pufferfish/lowrank/layers/linear.hpp>
#include <pufferfish/ops/conv/low_rank_conv.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The implementation of LowRankConv for any rank.
///
/// With groups, each group has its own matrix (out / groups) x (in / groups * kernel height * kernel width),
/// and `rank` is the rank of each of these matrices. The factors are the weights of two grouped
/// convolutions, in PyTorch's terms
///
///     down = Conv2d(in, groups * rank, kernel, stride, padding, dilation, groups=groups, bias=False)
///     up = Conv2d(groups * rank, out, 1, groups=groups, bias=bias)
///
/// so `down` has the weight [groups * rank][in / groups][height][width] and `up` has [out][rank][1][1].
template <class T>
class low_rank_conv {
 public:
  using value_type = T;
  static constexpr auto low_rank_kind = layer_kind::conv;
  static constexpr bool reads_output = false;
  /// The backward pass reads the input only through a view on the tape, pushed after the activation.
  static constexpr bool input_may_move = true;
  static constexpr bool takes_pending_norm = true;

  /// Constructs the layer with all factors and the bias zero. Throws shape_error for an invalid shape, and
  /// rank_error unless 1 <= rank <= min(out / groups, patch), patch = in / groups * kernel height * kernel
  /// width.
  low_rank_conv(const conv_shape& shape, index_t rank, bool bias)
      : shape_(shape),
        down_shape_(shape),
        rank_(rank),
        down_(checked(shape, rank), parameter_role::weight),
        up_(logical_layout::kernel(shape.out_channels, rank, 1, 1), parameter_role::weight),
        bias_(logical_layout::vector(bias ? shape.out_channels : 0), parameter_role::bias) {
    down_shape_.out_channels = shape.groups * rank;
  }

  /// Geometry of the dense convolution. `down` has its stride, padding and dilation.
  const conv_shape& shape() const { return shape_; }
  /// The rank of each group's matrix.
  index_t rank() const { return rank_; }
  bool has_bias() const { return bias_.size() > 0; }
  /// True after the parameters were moved to another layer. Passes and the views of the factors then throw
  /// state_error.
  bool is_moved_from() const { return down_.is_moved_from(); }

  /// First factor [groups * rank][in / groups][height][width], a view of the layer's memory. The storage is
  /// HWIO, so output channels have stride 1. Writing to the view changes the layer. It is valid until the
  /// layer is destroyed, moved, or bound to the arena of a network. Throws state_error for a moved-from
  /// layer.
  tensor_view<parameter_t<T>, 4> down() { return down_.logical(); }
  tensor_view<const parameter_t<T>, 4> down() const { return down_.logical(); }
  /// Second factor [out][rank][1][1]; otherwise the contract of down().
  tensor_view<parameter_t<T>, 4> up() { return up_.logical(); }
  tensor_view<const parameter_t<T>, 4> up() const { return up_.logical(); }
  /// Bias of `out` elements, a view of the layer's memory; a null view if the layer has no bias.
  tensor_view<parameter_t<T>, 1> bias() { return {has_bias() ? bias_.data() : nullptr, {bias_.size()}}; }
  tensor_view<const parameter_t<T>, 1> bias() const {
    return {has_bias() ? bias_.data() : nullptr, {bias_.size()}};
  }

  /// up * down for each group: the weight [out][in / groups][height][width] of the dense convolution.
  /// The result is newly allocated, with OIHW storage; the bias is not part of it. Runs in the calling thread
  /// and needs rank multiply-adds for each of its elements. Throws state_error for a moved-from layer.
  tensor<parameter_t<T>, 4> to_dense() const {
    using P = parameter_t<T>;
    const index_t patch = shape_.patch(), out = shape_.out_channels, columns = shape_.group_outputs();
    const tensor_view<const P, 2> down(down_.data(), {patch, down_shape_.out_channels});
    const tensor_view<const P, 2> up(up_.data(), {rank_, out});
    tensor<P, 2> stored({patch, out});
    stack_arena scratch;
    for (index_t group = 0; group < shape_.groups; ++group) {
      native_gemm(scratch).multiply<P>(down.slice(1, group * rank_, rank_),
                                       up.slice(1, group * columns, columns),
                                       stored.view().slice(1, group * columns, columns));
    }
    const logical_layout layout =
        logical_layout::kernel(out, shape_.group_inputs(), shape_.kernel.height, shape_.kernel.width);
    return tensor<P, 4>(tensor_view<const P, 4>(stored.data(), layout.shape, layout.strides));
  }

  std::string describe() const { return message({"LowRankConv rank ", rank_, ", ", shape_.describe()}); }

  /// NHWC extents of the output: floor((n + 2 padding - dilation (kernel - 1) - 1) / stride) + 1 for each
  /// length n. Throws shape_error, naming the layer, if the channels differ or the kernel does not fit into
  /// the padded image.
  extents<4> output_shape(const extents<4>& input) const { return shape_.output(input, *this); }

  /// Whether the backward pass recomputes the activation t = down * x between the factors. False (the
  /// default): training keeps t on the tape, N H' W' groups rank elements. Recomputing costs one more
  /// convolution `down` per backward pass. Must not change between a forward pass in training and its
  /// backward pass.
  bool recompute() const { return recompute_; }
  void set_recompute(bool on) { recompute_ = on; }

  /// y = up * (down * x) + b. x, y: NHWC, dense; y has output_shape(x), is overwritten and must not overlap
  /// x. In training, the view of x is kept on the tape, so x must not change, move or end until the backward
  /// pass.
  ///
  /// Throws shape_error, naming the layer, for other shapes, null views and views with gaps, and state_error
  /// for a moved-from layer; nothing is written then.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    run_forward(ctx, x, y, {});
  }

  /// Computes y like forward and applies `epilogue` to it while tiles of y are in the cache: the moments that
  /// a batch norm after this layer needs (a device need not store them, see moment_parts), or, in inference
  /// only, a summand and a ReLU. A device also computes epilogue.norm_of_x, whose output is x, if it is
  /// pending. Throws the errors of forward.
  template <class Device>
  void forward_with_epilogue(context<Device>& ctx, const tensor_view<const T, 4>& x,
                             const tensor_view<T, 4>& y, const ops::output_epilogue<T>& epilogue) const {
    run_forward(ctx, x, y, epilogue);
  }

  /// The backward pass of the last forward pass on the tape, from dy (shaped like y, dense): the gradients of
  /// up, bias and down, and dx (shaped like x, dense, overlaps no other view). Parameter gradients are
  /// overwritten, or added to if parameter::accumulate() is true. dx is overwritten; a null view means that
  /// dx is not wanted.
  ///
  /// Throws state_error without a forward pass in training mode and for a moved-from layer, and shape_error
  /// for views that do not fit x. After an exception the tape still has a part of this pass: clear it
  /// (context::begin_step).
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    run_backward(ctx, dy, dx, false, nullptr);
  }

  /// Computes the gradients of backward, but adds the gradient of x to dx, for an x that several layers read.
  /// Shapes, aliasing and errors are those of backward.
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

  /// Computes forward(ctx, x, y) with a newly allocated y. Throws shape_error; state_error for a moved-from
  /// layer.
  tensor<T, 4> forward(context<device::cpu>& ctx, const tensor_view<const T, 4>& x) const {
    tensor<T, 4> y(output_shape(x.shape()));
    forward(ctx, x, y.view());
    return y;
  }
  /// Computes backward(ctx, dy, dx) with a newly allocated dx of the shape of x. Throws shape_error;
  /// state_error without a forward pass in training mode and, without changing the tape, if the top of the
  /// tape is not from this layer.
  tensor<T, 4> backward(context<device::cpu>& ctx, const tensor_view<const T, 4>& dy) const {
    tensor<T, 4> dx(ctx.tape().template top_value<tensor_view<const T, 4>>(*this).shape());
    backward(ctx, dy, dx.view());
    return dx;
  }

  /// Draws random factors for training from scratch, each factor like a separate convolution in PyTorch,
  /// U(+-1/sqrt(fan in)). The fan in is conv_shape::patch() for `down`, and `rank` for `up` and the bias.
  /// Equal streams give equal bits.
  void initialize(random_stream random) {
    fill_fan_in(down_, shape_.patch(), random.child("down.weight"));
    fill_fan_in(up_, rank_, random.child("up.weight"));
    fill_fan_in(bias_, rank_, random.child("up.bias"));
  }

  /// Multiply-accumulates of a forward pass for an NHWC input: output pixels * rank * (groups * patch + out
  /// channels). Throws shape_error for an input that output_shape rejects.
  index_t macs(const extents<4>& input) const {
    const extents<4> output = output_shape(input);
    return output[0] * output[1] * output[2] * rank_ * (shape_.groups * shape_.patch() + shape_.out_channels);
  }

  /// Calls f(name, parameter) for each parameter, in execution order: "down.weight", "up.weight" and, with a
  /// bias, "up.bias".
  template <class F>
  void visit(F&& f) {
    f("down.weight", down_);
    f("up.weight", up_);
    if (has_bias()) f("up.bias", bias_);
  }

 private:
  template <class Device>
  void run_backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx,
                    bool add, ops::gradient_sums<T>* sums) const {
    const auto x = ctx.tape().template pop_value<tensor_view<const T, 4>>(*this);
    check_backward(*this, x.shape(), dy, dx);
    scratch_frame frame(ctx.scratch());
    const tensor_view<const T, 4> t = inner_activation(ctx, x, inner_shape(dy.shape()), frame);
    const tensor_view<T, 4> dt = frame.take<T>(t.shape());
    // Once dt is there: `complete` computes what is left of the gradients of the factors.
    const auto rest = [&](auto&& complete) {
      const auto parameters = [&] {
        complete();
        ctx.gradient_written(up_);
        if (has_bias()) {
          ops::bias_gradient<T>(ctx, rows(dy), bias_.gradient_data(), bias_.accumulate());
          ctx.gradient_written(bias_);
        }
        ctx.gradient_written(down_);
      };
      if (dx.is_null()) return parameters();
      const auto input = [&] {
        ops::conv_backward_input<T>(ctx, down_shape_, dt, down_.template as<T>(), dx, add, sums);
      };
      ctx.in_parallel(parameters, input, dx.data() != x.data());
    };
    if (shape_.groups > 1) {
      ops::grouped_low_rank_conv_backward_up<T>(ctx, shape_.groups, t, dy, up_.template as<T>(),
                                                up_.gradient_data(), up_.accumulate(), dt);
      rest([&] {
        ops::conv_backward_weight<T>(ctx, down_shape_, x, dt, down_.gradient_data(), down_.accumulate());
      });
    } else {
      ops::low_rank_conv_backward_weights<T>(ctx, down_shape_, x, t, dy, up_matrix(),
                                             {up_.gradient_data(), up_.accumulate()}, dt,
                                             {down_.gradient_data(), down_.accumulate()}, rest);
    }
  }

  // t stays a null view if the tape does not keep it: the product then stores t in scratch memory.
  template <class Device>
  void run_forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y,
                   const ops::output_epilogue<T>& epilogue) const {
    check_forward(*this, x, y);
    tensor_view<T, 4> t;
    if (ctx.training() && !recompute_) t = ctx.tape().template push<T>(inner_shape(y.shape()));
    if (ctx.training()) ctx.tape().push_value(*this, x);
    const T* const bias = has_bias() ? bias_.template as<T>() : nullptr;
    if (shape_.groups > 1) {
      ops::grouped_low_rank_conv_forward<T>(ctx, down_shape_, x, down_.template as<T>(), up_.template as<T>(),
                                            bias, t, y, epilogue);
    } else {
      ops::low_rank_conv_forward<T>(ctx, down_shape_, x, down_.template as<T>(), up_matrix(), bias, t, y,
                                    epilogue);
    }
  }

  // t = down * x for the backward pass: popped from the tape or, with recompute(), computed again into
  // `frame`.
  template <class Device>
  tensor_view<const T, 4> inner_activation(context<Device>& ctx, const tensor_view<const T, 4>& x,
                                           const extents<4>& inner, scratch_frame& frame) const {
    if (!recompute_) return ctx.tape().template pop<T>(inner);
    const tensor_view<T, 4> t = frame.take<T>(inner);
    ops::conv_forward<T>(ctx, down_shape_, x, down_.template as<T>(), nullptr, t);
    return t;
  }

  static logical_layout checked(const conv_shape& shape, index_t rank) {
    shape.validate("LowRankConv");
    check_rank(message({"LowRankConv, ", shape.describe()}), shape.group_outputs(), shape.patch(), rank);
    return logical_layout::kernel(shape.groups * rank, shape.group_inputs(), shape.kernel.height,
                                  shape.kernel.width);
  }
  extents<4> inner_shape(extents<4> output) const {
    output[3] = down_shape_.out_channels;
    return output;
  }
  template <class U>
  static tensor_view<U, 2> rows(const tensor_view<U, 4>& view) {
    return ops::detail::as_rows(view);
  }
  tensor_view<const T, 2> up_matrix() const { return {up_.template as<T>(), {rank_, shape_.out_channels}}; }

  conv_shape shape_, down_shape_;
  index_t rank_;
  bool recompute_ = false;
  parameter<parameter_t<T>> down_, up_, bias_;
};

}  // namespace detail

/// A convolution whose weight, unrolled to out x (in * kernel height * kernel width), is up * down. `down` is
/// the same convolution to `rank` channels, without bias; `up` is a 1x1 convolution with the bias (Wang et
/// al., Pufferfish, MLSys 2021, section 2). Any kernel size, stride, padding and dilation.
///
/// With g groups, every group has its own factors, all of the same rank: `down` maps to g * rank channels and
/// `up` maps from them, both with g groups. In PyTorch: Conv2d(in, g * rank, k, groups=g, bias=False), then
/// Conv2d(g * rank, out, 1, groups=g).
///
///     LowRankConv<float, 16> layer(conv_shape::square(64, 128, 3, 1, 1));
///     layer.initialize({1, 1});
///     layer.forward(ctx, x, y);  // x: N x H x W x 64, y: N x H x W x 128
///
/// `Rank` fixes the rank in the type; with `dynamic_rank` the rank is a constructor argument. Both run the
/// same code, which selects micro-kernels by the rank at run time.
/// The weights number rank (g patch + out), where patch = in / g * kernel height * kernel width; the dense
/// layer has out patch. T is float, double or bfloat16; on a device also gpu::bf16 and gpu::fp16, with float
/// parameters.
///
/// Copies are deep and belong to no network; gradients are not copied. Passes are const and may share the
/// layer as described at LowRankLinear. The layer must not be moved between a forward pass in training and
/// its backward pass.
template <class T, index_t Rank = dynamic_rank, class Device = device::cpu>
class LowRankConv : public detail::stored_layer<detail::low_rank_conv, T, Device> {
  using base = detail::stored_layer<detail::low_rank_conv, T, Device>;
  PUFFERFISH_DETAIL_LOW_RANK_LAYER(LowRankConv);

  /// The layer with all parameters zero, by default without bias. Throws shape_error for an invalid shape,
  /// rank_error unless Rank fits the matrix of one group: 1 <= Rank <= min(out / groups, patch).
  explicit LowRankConv(const conv_shape& shape, bool bias = false) requires(detail::has_rank<T, Rank, Device>)
      : base(shape, Rank, bias) {}
  /// Constructs the layer with a rank that is known at run time and all parameters zero. Throws shape_error
  /// for an invalid shape, rank_error unless 1 <= rank <= min(out / groups, patch).
  LowRankConv(const conv_shape& shape, index_t rank,
              bool bias = false) requires(detail::takes_rank<T, Rank, Device>)
      : base(shape, rank, bias) {}
};

PUFFERFISH_NAMESPACE_END
