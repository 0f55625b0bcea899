// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `residual`: y = branch(x) + shortcut(x), with or without a ReLU behind the sum.

#include <pufferfish/nn/sequential.hpp>
#include <pufferfish/ops/relu.hpp>
#include <pufferfish/ops/sum.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A residual block (He, Zhang, Ren, Sun: Deep residual learning, CVPR 2016, equations 1 and 2). An empty
/// shortcut is the identity. Names below it: those of the branch without prefix, those of the shortcut behind
/// `shortcut_name`.
template <class T, class Device = device::cpu>
class residual {
 public:
  using value_type = T;

  explicit residual(sequential<T, Device> branch, sequential<T, Device> shortcut = {}, bool relu = true,
                    std::string shortcut_name = "shortcut")
      : branch_(std::move(branch)),
        shortcut_(std::move(shortcut)),
        relu_(relu),
        shortcut_name_(std::move(shortcut_name)) {}

  std::string describe() const { return relu_ ? "residual, ReLU" : "residual"; }

  /// Throws shape_error if branch and shortcut disagree.
  extents<4> output_shape(const extents<4>& input) const {
    const extents<4> branch = branch_.output_shape(input), shortcut = shortcut_.output_shape(input);
    if (branch != shortcut) {
      PUFFERFISH_THROW(shape_error(describe() + ": the branch gives " + to_string<4>(branch) +
                                   ", the shortcut " + to_string<4>(shortcut)));
    }
    return branch;
  }

  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    branch_.forward(ctx, x, y);
    if (shortcut_.empty()) {
      add(ctx, x, y);
    } else {
      scratch_frame frame(ctx.scratch());
      const tensor_view<T, 4> other = frame.template take<T>(y.shape());
      shortcut_.forward(ctx, x, other);
      add(ctx, other, y);
    }
    if (ctx.training()) {
      ctx.tape().push_value(tensor_view<const T, 4>(y));
      ctx.tape().push_value(x.shape());
    }
  }

  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    const auto x_shape = ctx.tape().template pop_value<extents<4>>();
    const auto y = ctx.tape().template pop_value<tensor_view<const T, 4>>();
    scratch_frame frame(ctx.scratch());
    tensor_view<const T, 4> dsum = dy;
    if (relu_) {
      const tensor_view<T, 4> masked = frame.template take<T>(dy.shape());
      ops::relu_backward<T>(ctx, y.flat(), dy.flat(), masked.flat());
      dsum = masked;
    }
    if (shortcut_.empty()) {
      branch_.backward(ctx, dsum, dx);
      if (!dx.is_null()) ops::add<T>(ctx, dsum.flat(), dx.flat());
      return;
    }
    const tensor_view<T, 4> other = dx.is_null() ? dx : frame.template take<T>(x_shape);
    shortcut_.backward(ctx, dsum, other);
    branch_.backward(ctx, dsum, dx);
    if (!dx.is_null()) ops::add<T>(ctx, other.flat(), dx.flat());
  }

  void visit_state(state_visitor<T>& visitor, const std::string& prefix) {
    branch_.visit_state(visitor, prefix);
    shortcut_.visit_state(visitor, detail::join_name(prefix, shortcut_name_));
  }
  void visit_layers(layer_visitor<T, Device>& visitor, const std::string& prefix) {
    branch_.visit_layers(visitor, prefix);
    visitor.enter_shortcut();
    shortcut_.visit_layers(visitor, detail::join_name(prefix, shortcut_name_));
    visitor.leave_shortcut();
  }
  void trace(layer_tracer<T, Device>& tracer, const extents<4>& input, const std::string& prefix) const {
    branch_.trace(tracer, input, prefix);
    shortcut_.trace(tracer, input, detail::join_name(prefix, shortcut_name_));
  }
  void initialize(random_stream random) {
    branch_.initialize(random);
    shortcut_.initialize(random.child(shortcut_name_));
  }
  index_t macs(const extents<4>& input) const { return branch_.macs(input) + shortcut_.macs(input); }

 private:
  void add(context<Device>& ctx, const tensor_view<const T, 4>& from, const tensor_view<T, 4>& to) const {
    relu_ ? ops::add_relu<T>(ctx, from.flat(), to.flat()) : ops::add<T>(ctx, from.flat(), to.flat());
  }

  sequential<T, Device> branch_, shortcut_;
  bool relu_;
  std::string shortcut_name_;
};

PUFFERFISH_NAMESPACE_END
