// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `LowRankLinear`: y = up (down x) + b, a fully connected layer of rank r.

#include <string>

#include <pufferfish/lowrank/layer_storage.hpp>
#include <pufferfish/lowrank/rank.hpp>
#include <pufferfish/lowrank/shape_check.hpp>
#include <pufferfish/lowrank/traits.hpp>
#include <pufferfish/ops/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN

namespace detail {

/// The implementation of LowRankLinear for any rank.
template <class T>
class low_rank_linear {
 public:
  using value_type = T;
  static constexpr auto low_rank_kind = layer_kind::linear;
  static constexpr bool reads_output = false;

  low_rank_linear(index_t in, index_t out, index_t rank, bool bias)
      : in_(in),
        out_(out),
        rank_(rank),
        down_(checked(in, out, rank), parameter_role::weight),
        up_(logical_layout::matrix(out, rank), parameter_role::weight),
        bias_(logical_layout::vector(bias ? out : 0), parameter_role::bias) {}

  index_t in_features() const { return in_; }
  index_t out_features() const { return out_; }
  index_t rank() const { return rank_; }
  bool has_bias() const { return bias_.size() > 0; }
  bool is_moved_from() const { return down_.is_moved_from(); }

  /// The factors in the layout of frameworks: down [rank][in], up [out][rank]. bias: out elements, or a null
  /// view if the layer has no bias.
  tensor_view<parameter_t<T>, 2> down() { return logical_matrix(down_); }
  tensor_view<const parameter_t<T>, 2> down() const { return logical_matrix(down_); }
  tensor_view<parameter_t<T>, 2> up() { return logical_matrix(up_); }
  tensor_view<const parameter_t<T>, 2> up() const { return logical_matrix(up_); }
  tensor_view<parameter_t<T>, 1> bias() { return {has_bias() ? bias_.data() : nullptr, {bias_.size()}}; }
  tensor_view<const parameter_t<T>, 1> bias() const {
    return {has_bias() ? bias_.data() : nullptr, {bias_.size()}};
  }

  /// up * down, the weight [out][in] of the equivalent dense layer.
  tensor<parameter_t<T>, 2> to_dense() const {
    tensor<parameter_t<T>, 2> dense({out_, in_});
    stack_arena scratch;
    native_gemm(scratch).multiply<parameter_t<T>>(up(), down(), dense.view());
    return dense;
  }

  std::string describe() const { return message({"LowRankLinear ", in_, " -> ", rank_, " -> ", out_}); }

  /// y = up (down x) + b for each row. x: M x in, y: M x out, both dense; y must not overlap x. In training,
  /// x must not change until the backward pass. Throws shape_error.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 2>& x, const tensor_view<T, 2>& y) const {
    check_forward(*this, x, y);
    scratch_frame frame(ctx.scratch());
    const extents<2> inner{x.extent(0), rank_};
    const tensor_view<T, 2> t = ctx.training() ? ctx.tape().template push<T>(inner) : frame.take<T>(inner);
    if (ctx.training()) ctx.tape().push_value(*this, x);
    ops::linear_forward<T>(ctx, x, stored(down_), nullptr, t);
    ops::linear_forward<T>(ctx, t, stored(up_), has_bias() ? bias_.template as<T>() : nullptr, y);
  }

  /// From dy (M x out), computes all parameter gradients and, unless it is a null view, dx (M x in; overlaps
  /// no other view). Throws shape_error, and state_error without a forward pass in training mode.
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dx) const {
    run_backward(ctx, dy, dx, false);
  }

  /// backward with dx += instead of dx =.
  template <class Device>
  void backward_add(context<Device>& ctx, const tensor_view<const T, 2>& dy,
                    const tensor_view<T, 2>& dx) const {
    run_backward(ctx, dy, dx, true);
  }

  /// The same passes, returning a newly allocated result.
  tensor<T, 2> forward(context<device::cpu>& ctx, const tensor_view<const T, 2>& x) const {
    tensor<T, 2> y({x.extent(0), out_});
    forward(ctx, x, y.view());
    return y;
  }
  tensor<T, 2> backward(context<device::cpu>& ctx, const tensor_view<const T, 2>& dy) const {
    tensor<T, 2> dx(ctx.tape().template top_value<tensor_view<const T, 2>>(*this).shape());
    backward(ctx, dy, dx.view());
    return dx;
  }

  /// Random factors for training from scratch: each factor like a separate linear layer in
  /// PyTorch, U(+-1/sqrt(fan in)).
  void initialize(random_stream random) {
    fill_fan_in(down_, in_, random.child("down.weight"));
    fill_fan_in(up_, rank_, random.child("up.weight"));
    fill_fan_in(bias_, rank_, random.child("up.bias"));
  }

  /// Multiply-accumulates for an NHWC input whose last dimension is `in`.
  index_t macs(const extents<4>& input) const {
    return input[0] * input[1] * input[2] * rank_ * (in_ + out_);
  }

  /// f(name, parameter) for each parameter, in execution order.
  template <class F>
  void visit(F&& f) {
    f("down.weight", down_);
    f("up.weight", up_);
    if (has_bias()) f("up.bias", bias_);
  }

 private:
  template <class Device>
  void run_backward(context<Device>& ctx, const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dx,
                    bool add) const {
    const auto x = ctx.tape().template pop_value<tensor_view<const T, 2>>(*this);
    check_backward(*this, x.shape(), dy, dx);
    const tensor_view<const T, 2> t = ctx.tape().template pop<T>(extents<2>{x.extent(0), rank_});
    ops::linear_backward_weight<T>(ctx, t, dy, gradient(up_), up_.accumulate());
    ctx.gradient_written(up_);
    if (has_bias()) {
      ops::bias_gradient<T>(ctx, dy, bias_.gradient_data(), bias_.accumulate());
      ctx.gradient_written(bias_);
    }
    scratch_frame frame(ctx.scratch());
    const tensor_view<T, 2> dt = frame.take<T>(t.shape());
    ops::linear_backward_input<T>(ctx, dy, stored(up_), dt);
    ops::linear_backward_weight<T>(ctx, x, dt, gradient(down_), down_.accumulate());
    ctx.gradient_written(down_);
    if (!dx.is_null()) ops::linear_backward_input<T>(ctx, dt, stored(down_), dx, add);
  }

  static logical_layout checked(index_t in, index_t out, index_t rank) {
    check_rank(message({"LowRankLinear ", in, " -> ", out}), out, in, rank);
    return logical_layout::matrix(rank, in);
  }
  static tensor_view<const T, 2> stored(const parameter<parameter_t<T>>& p) {
    return {p.template as<T>(), {p.layout().shape[1], p.layout().shape[0]}};
  }
  static tensor_view<parameter_t<T>, 2> gradient(const parameter<parameter_t<T>>& p) {
    return {p.gradient_data(), {p.layout().shape[1], p.layout().shape[0]}};
  }

  index_t in_, out_, rank_;
  parameter<parameter_t<T>> down_, up_, bias_;
};

}  // namespace detail

/// A fully connected layer in -> out with the weight up * down (down: rank x in, up: out x rank) and the bias
/// after `up` (Wang et al., Pufferfish, MLSys 2021, section 2). No nonlinearity between the factors.
///
/// `Rank` fixes the rank in the type; with `dynamic_rank` the rank is a constructor argument. Both run the
/// same code, which selects micro-kernels by the rank at run time.
template <class T, index_t Rank = dynamic_rank, class Device = device::cpu>
class LowRankLinear : public detail::stored_layer<detail::low_rank_linear, T, Device> {
  using base = detail::stored_layer<detail::low_rank_linear, T, Device>;
  PUFFERFISH_DETAIL_LOW_RANK_LAYER(LowRankLinear);

  /// Throws rank_error unless Rank <= min(in, out).
  LowRankLinear(index_t in, index_t out, bool bias = true) requires(detail::has_rank<T, Rank, Device>)
      : base(in, out, Rank, bias) {}
  /// Throws rank_error unless 1 <= rank <= min(in, out).
  LowRankLinear(index_t in, index_t out, index_t rank,
                bool bias = true) requires(detail::takes_rank<T, Rank, Device>)
      : base(in, out, rank, bias) {}
};

PUFFERFISH_NAMESPACE_END
