// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `LowRankLinear`: y = up (down x) + b, a fully connected layer of rank r.
///
/// Rows are samples: x has M rows of `in` numbers, y has M rows of `out` numbers. Both products of a forward
/// pass need M rank (in + out) multiply-adds; the dense layer needs M in out.

#include <span>
#include <string>
#include <utility>

#include <pufferfish/lowrank/layers/layer_group.hpp>
#include <pufferfish/lowrank/layers/layer_storage.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/lowrank/rank.hpp>
#include <pufferfish/lowrank/traits.hpp>
#include <pufferfish/ops/linear/linear.hpp>
#include <pufferfish/ops/linear/relu_bias.hpp>

PUFFERFISH_NAMESPACE_BEGIN

namespace detail {

/// The implementation of LowRankLinear for any rank. Its public members are those of LowRankLinear.
///
/// Passes are const: they read the factors and write gradients, which are not part of the layer's value.
/// Inference passes in different contexts may run at the same time on the same layer. Backward passes of one
/// layer must not run at the same time, because they write the same gradients.
template <class T>
class low_rank_linear {
 public:
  using value_type = T;
  static constexpr auto low_rank_kind = layer_kind::linear;
  static constexpr bool reads_output = false;

  /// All factors and the bias are zero. Throws rank_error unless 1 <= rank <= min(in, out), and shape_error
  /// if a factor has more elements than index_t counts.
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
  /// True after the parameters were moved to another layer. Passes and the views of the factors then throw
  /// state_error; in_features(), out_features() and rank() keep their values.
  bool is_moved_from() const { return down_.is_moved_from(); }

  /// First factor [rank][in], a view of the layer's own memory, which is stored input-major: down(r, i) has
  /// the strides (1, rank). Writing to the view changes the layer. It is valid until the layer is destroyed,
  /// moved, or bound to the arena of a network. Throws state_error for a moved-from layer.
  tensor_view<parameter_t<T>, 2> down() { return logical_matrix(down_); }
  tensor_view<const parameter_t<T>, 2> down() const { return logical_matrix(down_); }
  /// Second factor [out][rank], with the strides (1, out); otherwise the contract of down().
  tensor_view<parameter_t<T>, 2> up() { return logical_matrix(up_); }
  tensor_view<const parameter_t<T>, 2> up() const { return logical_matrix(up_); }
  /// Bias of `out` elements, a view of the layer's memory; a null view if the layer has no bias.
  tensor_view<parameter_t<T>, 1> bias() { return {has_bias() ? bias_.data() : nullptr, {bias_.size()}}; }
  tensor_view<const parameter_t<T>, 1> bias() const {
    return {has_bias() ? bias_.data() : nullptr, {bias_.size()}};
  }

  /// up * down, the weight [out][in] of the equivalent dense layer.
  /// The result is newly allocated and owned by the caller; the bias is not part of it. Runs in the calling
  /// thread and needs out in rank multiply-adds. Throws state_error for a moved-from layer.
  tensor<parameter_t<T>, 2> to_dense() const {
    tensor<parameter_t<T>, 2> dense({out_, in_});
    stack_arena scratch;
    native_gemm(scratch).multiply<parameter_t<T>>(up(), down(), dense.view());
    return dense;
  }

  std::string describe() const { return message({"LowRankLinear ", in_, " -> ", rank_, " -> ", out_}); }

  /// y = up (down x) + b for each row. x: M x in, y: M x out, both dense; M may be 0. y is overwritten and
  /// must not overlap x. Throws shape_error, naming the layer, for other shapes, null views and views with
  /// gaps, and state_error for a moved-from layer; nothing is written then.
  ///
  /// In inference the M x rank result t = down x is scratch memory. In training t and the view of x are kept
  /// on the tape until the backward pass, so x must not change, move or end before.
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

  /// The backward pass of the last forward pass on the tape, from dy (M x out, dense):
  ///
  ///     dup = dy^T t      db = column sums of dy
  ///     dt = dy up        ddown = dt^T x        dx = dt down
  ///
  /// The gradient of each parameter is overwritten, or added to if parameter::accumulate() is true. dx (M x
  /// in, dense, overlaps no other view) is overwritten; a null view means that dx is not wanted, which saves
  /// the last product.
  ///
  /// Throws state_error without a forward pass in training mode and for a moved-from layer, and shape_error
  /// for views that do not fit x. After an exception the tape still has a part of this pass: clear it
  /// (context::begin_step).
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dx) const {
    run_backward(ctx, dy, dx, false);
  }

  /// Computes the gradients of backward, but adds the gradient of x to dx, for an x that several layers read.
  /// Shapes, aliasing and errors are those of backward.
  template <class Device>
  void backward_add(context<Device>& ctx, const tensor_view<const T, 2>& dy,
                    const tensor_view<T, 2>& dx) const {
    run_backward(ctx, dy, dx, true);
  }

  /// The backward pass for y = relu(layer(x)) from dy, the gradient of y, which becomes the gradient of the
  /// layer's output. With `add`, the gradient of x is added to dx. Otherwise the contract of backward.
  template <class Device>
  void backward_after_relu(context<Device>& ctx, const tensor_view<const T, 2>& y,
                           const tensor_view<T, 2>& dy, const tensor_view<T, 2>& dx, bool add) const {
    if (has_bias()) {
      ops::relu_bias_gradient<T>(ctx, y, dy, dy, bias_.gradient_data(), bias_.accumulate());
    } else {
      ops::relu_backward<T>(ctx, y.flat(), std::as_const(dy).flat(), dy.flat());
    }
    run_backward(ctx, dy, dx, add, true);
  }

  /// The forward passes of several layers that read one x: `ys` are their outputs. A device computes the
  /// products with first factors of one rank in one launch, and those with second factors if there are no
  /// biases. Shapes, aliasing and errors are those of forward.
  template <class Device>
  static void forward_group(context<Device>& ctx, layer_group<low_rank_linear> layers,
                            const tensor_view<const T, 2>& x, std::span<const tensor_view<T, 2>> ys) {
    for (std::size_t i = 0; i < layers.size(); ++i) check_forward(*layers[i], x, ys[i]);
    const group_block<T> inner = inner_of(layers, x.extent(0));
    scratch_frame frame(ctx.scratch());
    T* const block = ctx.training() ? ctx.tape().template push<T>(inner.size()) : frame.take<T>(inner.size());
    if (ctx.training()) ctx.tape().push_value(*layers.front(), x);
    group_array<ops::linear_map<T>> first, second;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const low_rank_linear& layer = *layers[i];
      first.push({x, stored(layer.down_), nullptr, inner.at(block, i)});
      second.push({inner.at(block, i), stored(layer.up_),
                   layer.has_bias() ? layer.bias_.template as<T>() : nullptr, ys[i]});
    }
    ops::linear_maps_forward<T>(ctx, first.all());
    ops::linear_maps_forward<T>(ctx, second.all());
  }
  /// The backward passes of forward_group of the same layers. `to`: where the gradients of x are
  /// written, one for each layer. Shapes, aliasing and errors are those of backward. The gradients become
  /// ready in the order of the layers: all up, then all down.
  template <class Device>
  static void backward_group(context<Device>& ctx, layer_group<low_rank_linear> layers,
                             std::span<const tensor_view<const T, 2>> dys,
                             std::span<const group_gradient<T>> to) {
    const auto x = ctx.tape().template pop_value<tensor_view<const T, 2>>(*layers.front());
    for (std::size_t i = 0; i < layers.size(); ++i) {
      check_backward(*layers[i], x.shape(), dys[i], to[i].dx);
    }
    const group_block<T> inner = inner_of(layers, x.extent(0));
    T* const kept = ctx.tape().template pop<T>(inner.size());
    scratch_frame frame(ctx.scratch());
    T* const block = frame.take<T>(inner.size());
    group_array<ops::weight_gradient_map<T>> up, down;
    group_array<ops::input_gradient_map<T>> second, first;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const low_rank_linear& layer = *layers[i];
      const tensor_view<T, 2> dt = inner.at(block, i);
      up.push({inner.at(kept, i), dys[i], gradient(layer.up_), layer.up_.accumulate()});
      second.push({dys[i], stored(layer.up_), dt});
      down.push({x, dt, gradient(layer.down_), layer.down_.accumulate()});
      first.push({dt, stored(layer.down_)});
    }
    const auto second_parameters = [&] {
      ops::linear_maps_backward_weight<T>(ctx, up.all());
      for (std::size_t i = 0; i < layers.size(); ++i) {
        ctx.gradient_written(layers[i]->up_);
        layers[i]->write_bias_gradient(ctx, dys[i]);
      }
    };
    const auto first_parameters = [&] {
      ops::linear_maps_backward_weight<T>(ctx, down.all());
      for (const low_rank_linear* layer : layers) ctx.gradient_written(layer->down_);
    };
    ctx.in_parallel(second_parameters, [&] { ops::linear_maps_backward_input<T>(ctx, second.all()); });
    ctx.in_parallel(first_parameters, [&] { write_input_gradients<T>(ctx, first.all(), to); });
  }

  /// Computes forward(ctx, x, y) with a newly allocated y. Throws shape_error; state_error for a moved-from
  /// layer.
  tensor<T, 2> forward(context<device::cpu>& ctx, const tensor_view<const T, 2>& x) const {
    tensor<T, 2> y({x.extent(0), out_});
    forward(ctx, x, y.view());
    return y;
  }
  /// Computes backward(ctx, dy, dx) with a newly allocated dx of the shape of x. Throws shape_error;
  /// state_error without a forward pass in training mode and, without changing the tape, if the top of the
  /// tape is not from this layer.
  tensor<T, 2> backward(context<device::cpu>& ctx, const tensor_view<const T, 2>& dy) const {
    tensor<T, 2> dx(ctx.tape().template top_value<tensor_view<const T, 2>>(*this).shape());
    backward(ctx, dy, dx.view());
    return dx;
  }

  /// Draws random factors for training from scratch, each factor like a separate linear layer in PyTorch,
  /// U(+-1/sqrt(fan in)). The fan in is `in` for `down`, and `rank` for `up` and the bias. Equal streams give
  /// equal bits.
  void initialize(random_stream random) {
    fill_fan_in(down_, in_, random.child("down.weight"));
    fill_fan_in(up_, rank_, random.child("up.weight"));
    fill_fan_in(bias_, rank_, random.child("up.bias"));
  }

  /// Multiply-accumulates of a forward pass for an NHWC input: N H W rank (in + out). The last dimension of
  /// `input` is assumed to be `in` and is not checked. Throws shape_error for a negative extent.
  index_t macs(const extents<4>& input) const {
    check_extents(*this, input);
    return input[0] * input[1] * input[2] * rank_ * (in_ + out_);
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
  // Pops x, then t. The gradients become ready in the order up, bias, down.
  template <class Device>
  void run_backward(context<Device>& ctx, const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dx,
                    bool add, bool bias_known = false) const {
    const auto x = ctx.tape().template pop_value<tensor_view<const T, 2>>(*this);
    check_backward(*this, x.shape(), dy, dx);
    const tensor_view<const T, 2> t = ctx.tape().template pop<T>(extents<2>{x.extent(0), rank_});
    scratch_frame frame(ctx.scratch());
    const tensor_view<T, 2> dt = frame.take<T>(t.shape());
    const auto second = [&] {
      ops::linear_backward_weight<T>(ctx, t, dy, gradient(up_), up_.accumulate());
      ctx.gradient_written(up_);
      write_bias_gradient(ctx, dy, bias_known);
    };
    ctx.in_parallel(second, [&] { ops::linear_backward_input<T>(ctx, dy, stored(up_), dt); });
    const auto first = [&] {
      ops::linear_backward_weight<T>(ctx, x, dt, gradient(down_), down_.accumulate());
      ctx.gradient_written(down_);
    };
    if (dx.is_null()) return first();
    ctx.in_parallel(first, [&] { ops::linear_backward_input<T>(ctx, dt, stored(down_), dx, add); });
  }

  // Writes the gradient of the bias, if there is one. `known`: it is written already.
  template <class Device>
  void write_bias_gradient(context<Device>& ctx, const tensor_view<const T, 2>& dy,
                           bool known = false) const {
    if (!has_bias()) return;
    if (!known) ops::bias_gradient<T>(ctx, dy, bias_.gradient_data(), bias_.accumulate());
    ctx.gradient_written(bias_);
  }
  // The results of the first factors of a group, rows x rank each.
  static group_block<T> inner_of(layer_group<low_rank_linear> layers, index_t rows) {
    group_block<T> inner;
    for (const low_rank_linear* layer : layers) inner.push(rows, layer->rank_);
    return inner;
  }

  static logical_layout checked(index_t in, index_t out, index_t rank) {
    check_rank(message({"LowRankLinear ", in, " -> ", out}), out, in, rank);
    return logical_layout::matrix(rank, in);
  }
  // A factor, or its gradient, as stored: [in of the factor][out of the factor].
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
/// after `up` (Wang et al., Pufferfish, MLSys 2021, section 2). No nonlinearity between the factors. It has
/// rank (in + out) weights, fewer than in out if rank < in out / (in + out).
///
/// \code
/// cpu_context ctx;
/// LowRankLinear<float> layer(512, 1000, 128);  // in, out, rank; with a bias
/// layer.initialize({1, 1});                    // or svd_factorize(dense, rank_ratio{0.25})
/// tensor<float, 2> x({32, 512}), y({32, 1000});
/// layer.forward(ctx, x, y);
/// \endcode
///
/// `Rank` fixes the rank in the type; with `dynamic_rank` the rank is a constructor argument. Both run the
/// same code, which selects micro-kernels by the rank at run time. T is float, double or bfloat16; on a
/// device also gpu::bf16 and gpu::fp16, with float parameters.
///
/// Copies are deep and belong to no network; gradients are not copied. The layer must not be moved between a
/// forward pass in training and its backward pass, because the tape identifies the layer by its address.
template <class T, index_t Rank = dynamic_rank, class Device = device::cpu>
class LowRankLinear : public detail::stored_layer<detail::low_rank_linear, T, Device> {
  using base = detail::stored_layer<detail::low_rank_linear, T, Device>;
  PUFFERFISH_DETAIL_LOW_RANK_LAYER(LowRankLinear);

  /// The layer with all parameters zero. Throws rank_error unless Rank <= min(in, out).
  LowRankLinear(index_t in, index_t out, bool bias = true) requires(detail::has_rank<T, Rank, Device>)
      : base(in, out, Rank, bias) {}
  /// Constructs the layer with a rank that is known at run time and all parameters zero. Throws rank_error
  /// unless 1 <= rank <= min(in, out), and the errors of the constructor without a rank.
  LowRankLinear(index_t in, index_t out, index_t rank,
                bool bias = true) requires(detail::takes_rank<T, Rank, Device>)
      : base(in, out, rank, bias) {}
};

PUFFERFISH_NAMESPACE_END
