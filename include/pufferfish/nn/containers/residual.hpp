// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `Residual`: y = branch(x) + shortcut(x), with or without a ReLU after the sum.

#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/nn/containers/sequential.hpp>
#include <pufferfish/ops/elementwise/relu.hpp>
#include <pufferfish/ops/elementwise/sum.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A residual block (He, Zhang, Ren, Sun: Deep residual learning, CVPR 2016, equations 1 and 2). An
/// empty shortcut is the identity. Names of the branch's layers have no prefix, those of the
/// shortcut's layers have the prefix `shortcut_name`.
///
/// If the last layer of the branch fuses (layer_abilities; a batch norm, and in inference a
/// convolution), its pass also computes the sum and the ReLU. In training the sum before the ReLU is then
/// never written, and backward passes read dy under a bit mask instead of a masked copy. The gradient of an
/// identity shortcut can then overwrite dy.
///
/// \code
/// Sequential<float> branch, shortcut;
/// branch.add("conv1", Conv<float>(conv_shape::square(16, 32, 3, 2, 1)))
///     .add("bn1", BatchNorm<float>(32))
///     .add("relu", ReLU<float>())
///     .add("conv2", Conv<float>(conv_shape::square(32, 32, 3, 1, 1)))
///     .add("bn2", BatchNorm<float>(32));
/// shortcut.add(Conv<float>(conv_shape::square(16, 32, 1, 2)));
/// layers.add("block", Residual<float>(std::move(branch), std::move(shortcut)));
/// \endcode
template <class T, class Device = device::cpu>
class Residual {
 public:
  using value_type = T;

  /// Throws value_error if a layer of the branch has the name of the shortcut.
  explicit Residual(Sequential<T, Device> branch, Sequential<T, Device> shortcut = {}, bool relu = true,
                    std::string shortcut_name = "shortcut")
      : branch_(std::move(branch)),
        shortcut_(std::move(shortcut)),
        relu_(relu),
        shortcut_name_(std::move(shortcut_name)) {
    for (std::size_t i = 0; i < branch_.size() && !shortcut_.empty(); ++i) {
      if (branch_.name(i) == shortcut_name_) {
        detail::throw_error<value_error>({describe(), ": layer ", i,
                                          " of the branch and the shortcut are both called \"",
                                          shortcut_name_, "\": give them different names"});
      }
    }
  }

  /// Whether a ReLU follows the sum.
  bool relu() const { return relu_; }
  /// The first summand, branch(x). The reference is valid as long as the block is neither moved nor
  /// destroyed.
  Sequential<T, Device>& branch() { return branch_; }
  /// The second summand, shortcut(x); without layers it is x. The reference is valid as long as branch()'s.
  Sequential<T, Device>& shortcut() { return shortcut_; }
  /// Prefix of the names of the shortcut's layers.
  const std::string& shortcut_name() const { return shortcut_name_; }
  std::string describe() const { return relu_ ? "residual, ReLU" : "residual"; }

  /// Output shape of the branch for `input`. Throws shape_error if the shortcut's output shape differs.
  extents<4> output_shape(const extents<4>& input) const {
    const extents<4> branch = branch_.output_shape(input), shortcut = shortcut_.output_shape(input);
    if (branch != shortcut) {
      PUFFERFISH_THROW(shape_error(describe() + ": the branch gives " + to_string<4>(branch) +
                                   ", the shortcut " + to_string<4>(shortcut)));
    }
    return branch;
  }

  /// y = branch(x) + shortcut(x), then max(y, 0) if relu(). x, y: dense; y has output_shape(x.shape()) and
  /// does not overlap x. In training, x must not change until the backward pass if abilities().reads_input is
  /// true, and y must not change if abilities().reads_output is true. A shortcut with layers takes scratch or
  /// tape memory of the size of y. Throws shape_error, also if the branch changes the shape of x and the
  /// shortcut has no layers, and the errors of the layers.
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    forward_fused(ctx, x, y, {});
  }
  /// forward; the branch's last layer fills outer.record (ability takes_gradient_sums) and outer.pending
  /// (gives_pending_norm), and its first one computes outer.norm_of_x (takes_pending_norm). The other members
  /// of `outer` are not used.
  void forward_fused(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y,
                     const forward_fusion<T>& outer) const {
    detail::check_dense(*this, "x", x);
    detail::check_dense(*this, "y", y);
    detail::check_apart(*this, "y", y, "x", x, false);
    detail::check_not_moved(branch_);
    if (shortcut_.empty() && x.shape() != y.shape()) {
      detail::throw_error<shape_error>({describe(), ": the shortcut is the identity, but y ", y.shape(),
                                        " is not shaped as x ", x.shape()});
    }
    if (fuses(ctx.training())) return forward_in_branch(ctx, x, y, outer);
    scratch_frame frame(ctx.scratch());
    if (ctx.training() && keeps_output(branch_)) {
      const tensor_view<T, 4> own = ctx.tape().template push<T>(y.shape());
      branch_.forward(ctx, x, own);
      ops::copy_elements<T>(ctx, own.data(), y.data(), y.size());
    } else {
      branch_.forward(ctx, x, y);
    }
    add(ctx, shortcut_.empty() ? x : run_shortcut(ctx, frame, x, y.shape()), y);
    if (ctx.training()) {
      ctx.tape().push_value(*this, tensor_view<const T, 4>(y));
      ctx.tape().push_value(*this, x.shape());
    }
  }

  /// With g = dy where the ReLU passed its input, else 0 (g = dy without a ReLU): dx is the sum of the
  /// gradients that branch and shortcut compute from g. The gradients of all parameters are overwritten, or
  /// added to if parameter::accumulate() is true. dy, dx: dense; dx, shaped as x, is overwritten. dx may be a
  /// null view, or dy if abilities().gradient_in_place, and overlaps nothing else. Throws shape_error, and
  /// state_error without a forward pass in training mode.
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    backward_fused(ctx, dy, dx, {});
  }
  /// backward; the branch's last layer uses outer.sums_of_dy (ability takes_gradient_sums), and its first one
  /// collects outer.sums_of_dx (gives_gradient_sums). The other members of `outer` are not used.
  void backward_fused(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx,
                      const backward_fusion<T>& outer) const {
    detail::check_dense(*this, "dy", dy);
    detail::check_dense_if_wanted(*this, "dx", dx);
    if (fuses(true)) return backward_in_branch(ctx, dy, dx, outer);
    const auto x_shape = ctx.tape().template pop_value<extents<4>>(*this);
    const auto y = ctx.tape().template pop_value<tensor_view<const T, 4>>(*this);
    check_gradients(x_shape, y.shape(), dy, dx);
    scratch_frame frame(ctx.scratch());
    tensor_view<const T, 4> dsum = dy;
    if (relu_) {
      const tensor_view<T, 4> masked = frame.template take<T>(dy.shape());
      ops::relu_backward<T>(ctx, y.flat(), dy.flat(), masked.flat());
      dsum = masked;
    }
    if (shortcut_.empty()) {
      const bool adds = !dx.is_null() && branch_.abilities().adds_gradient;
      if (adds) ops::copy_elements(ctx, dsum.data(), dx.data(), dx.size());
      adds ? branch_.backward_fused(ctx, dsum, dx, {{}, true}) : branch_.backward(ctx, dsum, dx);
      if (!adds && !dx.is_null()) ops::add<T>(ctx, dsum.flat(), dx.flat());
    } else {
      shortcut_.backward(ctx, dsum, dx);
      if (keeps_output(shortcut_)) ctx.tape().template pop<T>(dy.shape());
      dx.is_null() ? branch_.backward(ctx, dsum, dx) : add_gradient(ctx, branch_, dsum, dx, {}, x_shape);
    }
    if (keeps_output(branch_)) ctx.tape().template pop<T>(dy.shape());
  }

  /// The backward pass reads y only if there is a ReLU without a mask.
  layer_abilities abilities() const {
    const layer_abilities branch = branch_.abilities();
    layer_abilities result;
    result.gradient_in_place = fuses(true) && passes_gradient_on();
    result.gives_gradient_sums = fuses(true) && passes_gradient_on() && branch.gives_gradient_sums;
    result.takes_gradient_sums = fuses(true) && branch.takes_gradient_sums;
    // Until a pending norm is computed, its addend must not change or end. The output of a shortcut with
    // layers ends with the pass; x stays if the branch reads it in the backward pass.
    const bool direct = fuses(true) && shortcut_.empty();
    result.gives_pending_norm = direct && branch.reads_input && branch.gives_pending_norm;
    result.takes_pending_norm = direct && branch_.size() > 1 && branch.takes_pending_norm;
    result.reads_input = branch.reads_input || (!shortcut_.empty() && shortcut_.abilities().reads_input);
    result.reads_output = !fuses(true) && relu_;
    return result;
  }

  /// Shows `visitor` the parameters and buffers of the branch, then those of the shortcut.
  void visit_state(state_visitor<parameter_t<T>>& visitor, const std::string& prefix) {
    branch_.visit_state(visitor, prefix);
    shortcut_.visit_state(visitor, detail::join_name(prefix, shortcut_name_));
  }
  /// Shows `visitor` the layers of the branch, then those of the shortcut.
  void visit_layers(layer_visitor<T, Device>& visitor, const std::string& prefix) {
    branch_.visit_layers(visitor, prefix);
    visitor.enter_shortcut();
    shortcut_.visit_layers(visitor, detail::join_name(prefix, shortcut_name_));
    visitor.leave_shortcut();
  }
  /// Shows `tracer` the layers that compute, of the branch, then of the shortcut. Throws shape_error.
  void trace(layer_tracer<T, Device>& tracer, const extents<4>& input, const std::string& prefix) const {
    branch_.trace(tracer, input, prefix);
    shortcut_.trace(tracer, input, detail::join_name(prefix, shortcut_name_));
  }
  /// Sets all parameters to random values. Each layer draws from the child of `random` with the layer's name.
  void initialize(random_stream random) {
    branch_.initialize(random);
    shortcut_.initialize(random.child(shortcut_name_));
  }
  /// Multiply-accumulates of one forward pass: branch and shortcut, without the sum.
  index_t macs(const extents<4>& input) const { return branch_.macs(input) + shortcut_.macs(input); }

 private:
  using mask_word = typename ops::relu_mask<T>::word;
  // What the forward pass of a block whose branch fuses leaves on the tape.
  struct kept {
    extents<4> x_shape;
    ops::relu_mask<T> mask;
  };

  // Whether the branch's last layer computes the sum and the ReLU in a pass of this mode.
  bool fuses(bool training) const { return branch_.abilities().fuses_when(training); }
  // dx starts as the masked dy; the branch's first layer adds to it after the branch's last has read dy.
  bool passes_gradient_on() const {
    return shortcut_.empty() && branch_.size() > 1 && branch_.abilities().adds_gradient;
  }

  // The sum overwrites the part's output. If the part's last layer needs its output later, a copy is kept.
  static bool keeps_output(const Sequential<T, Device>& part) {
    return !part.empty() && part.abilities().reads_output;
  }

  // Throws shape_error unless dy is shaped as y, and dx, if it is wanted, as x.
  void check_gradients(const extents<4>& x, const extents<4>& y, const tensor_view<const T, 4>& dy,
                       const tensor_view<T, 4>& dx) const {
    if (dy.shape() != y) {
      detail::throw_error<shape_error>({describe(), ": dy ", dy.shape(), " is not shaped as y ", y});
    }
    if (!dx.is_null() && dx.shape() != x) {
      detail::throw_error<shape_error>({describe(), ": dx ", dx.shape(), " is not shaped as x ", x});
    }
  }

  // Runs the shortcut and returns its output: on the tape if a backward pass reads it, else in `frame`.
  tensor_view<const T, 4> run_shortcut(context<Device>& ctx, scratch_frame& frame,
                                       const tensor_view<const T, 4>& x, const extents<4>& shape) const {
    const tensor_view<T, 4> y = ctx.training() && keeps_output(shortcut_) ? ctx.tape().template push<T>(shape)
                                                                          : frame.template take<T>(shape);
    shortcut_.forward(ctx, x, y);
    return y;
  }

  // Number of words of a ReLU mask for an output of this shape.
  static index_t mask_size(const extents<4>& shape) {
    return ops::relu_mask<T>::size({shape[0] * shape[1] * shape[2], shape[3]});
  }

  // The forward pass of a block whose branch fuses: the branch's last layer adds the shortcut and applies the
  // ReLU.
  void forward_in_branch(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y,
                         const forward_fusion<T>& outer) const {
    forward_fusion<T> fusion;
    fusion.record = outer.record;
    fusion.pending = outer.pending;
    fusion.norm_of_x = outer.norm_of_x;
    fusion.relu = relu_;
    if (relu_ && ctx.training())
      fusion.mask.words = ctx.tape().template push<mask_word>(mask_size(y.shape()));
    scratch_frame frame(ctx.scratch());
    fusion.addend = shortcut_.empty() ? x : run_shortcut(ctx, frame, x, y.shape());
    branch_.forward_fused(ctx, x, y, fusion);
    if (ctx.training()) ctx.tape().push_value(*this, kept{x.shape(), fusion.mask});
  }

  // The branch's last layer takes dy under the mask. With an identity shortcut and a branch that can add to
  // dx, dx starts as the masked dy; otherwise the shortcut's gradient is added after the branch's.
  void backward_in_branch(context<Device>& ctx, const tensor_view<const T, 4>& dy,
                          const tensor_view<T, 4>& dx, const backward_fusion<T>& outer) const {
    const auto [x_shape, mask] = ctx.tape().template pop_value<kept>(*this);
    backward_fusion<T> fusion{mask};
    fusion.sums_of_dy = outer.sums_of_dy;
    // With a shortcut, the branch is the first to read dy, and checks its shape.
    check_gradients(x_shape, shortcut_.empty() ? x_shape : dy.shape(), dy, dx);
    if (!shortcut_.empty()) {
      branch_.backward_fused(ctx, dy, dx, fusion);
      backward_shortcut(ctx, dy, dx, mask, x_shape);
      if (keeps_output(shortcut_)) ctx.tape().template pop<T>(dy.shape());
    } else if (dx.is_null() || !branch_.abilities().adds_gradient) {
      branch_.backward_fused(ctx, dy, dx, fusion);
      if (!dx.is_null()) add_masked(ctx, dy, mask, dx);
    } else {
      if (mask.is_null()) copy_masked(ctx, dy, mask, dx);
      fusion.add = true;
      fusion.addend_gradient = mask.is_null() ? tensor_view<T, 4>() : dx;
      fusion.sums_of_dx = outer.sums_of_dx;
      branch_.backward_fused(ctx, dy, dx, fusion);
    }
    if (relu_) ctx.tape().template pop<mask_word>(mask_size(dy.shape()));
  }

  // Adds the shortcut's gradient to dx.
  void backward_shortcut(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx,
                         ops::relu_mask<T> mask, const extents<4>& x_shape) const {
    scratch_frame frame(ctx.scratch());
    tensor_view<const T, 4> dsum = dy;
    if (!mask.is_null() && !shortcut_.abilities().fuses) {
      const tensor_view<T, 4> masked = frame.template take<T>(dy.shape());
      copy_masked(ctx, dy, mask, masked);
      dsum = masked;
      mask = {};
    }
    if (dx.is_null()) return shortcut_.backward_fused(ctx, dsum, dx, {mask, false});
    add_gradient(ctx, shortcut_, dsum, dx, mask, x_shape);
  }

  // dx += the gradient of the input of `part`, from dy.
  static void add_gradient(context<Device>& ctx, const Sequential<T, Device>& part,
                           const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx,
                           const ops::relu_mask<T>& mask, const extents<4>& x_shape) {
    if (part.abilities().adds_gradient) return part.backward_fused(ctx, dy, dx, {mask, true});
    scratch_frame frame(ctx.scratch());
    const tensor_view<T, 4> other = frame.template take<T>(x_shape);
    mask.is_null() ? part.backward(ctx, dy, other) : part.backward_fused(ctx, dy, other, {mask, false});
    ops::add<T>(ctx, std::as_const(other).flat(), dx.flat());
  }

  // to = dy where the mask lets it pass, else 0; without a mask a copy.
  static void copy_masked(context<Device>& ctx, const tensor_view<const T, 4>& dy,
                          const ops::relu_mask<T>& mask, const tensor_view<T, 4>& to) {
    if (!mask.is_null()) return ops::masked_copy<T>(ctx, detail::rows_of(dy), mask, detail::rows_of(to));
    if (dy.data() != to.data()) ops::copy_elements(ctx, dy.data(), to.data(), to.size());
  }
  static void add_masked(context<Device>& ctx, const tensor_view<const T, 4>& dy,
                         const ops::relu_mask<T>& mask, const tensor_view<T, 4>& to) {
    mask.is_null() ? ops::add<T>(ctx, dy.flat(), to.flat())
                   : ops::masked_add<T>(ctx, detail::rows_of(dy), mask, detail::rows_of(to));
  }

  // to = to + from, then max(to, 0) if relu().
  void add(context<Device>& ctx, const tensor_view<const T, 4>& from, const tensor_view<T, 4>& to) const {
    relu_ ? ops::add_relu<T>(ctx, from.flat(), to.flat()) : ops::add<T>(ctx, from.flat(), to.flat());
  }

  Sequential<T, Device> branch_, shortcut_;
  bool relu_;
  std::string shortcut_name_;
};

template <class T, class Device = device::cpu>
using residual [[deprecated("renamed to Residual")]] = Residual<T, Device>;

PUFFERFISH_NAMESPACE_END
