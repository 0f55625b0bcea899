// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `recurrent_layer`: what recurrent layers of any kind look like to models: sequences in, sequences out, and
/// a state that a caller carries from one segment of a sequence to the next.

#include <string>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/message.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Hidden state and cell of a layer, batch x hidden each, rows dense. Null views: zeros where a state is
/// read, "not wanted" where one is written. Both or none.
template <class T>
struct recurrent_state {
  tensor_view<T, 2> h;
  tensor_view<T, 2> c;

  bool is_null() const { return h.is_null(); }
  operator recurrent_state<const T>() const { return {h, c}; }
};

/// A layer from a sequence to a sequence, steps x batch x input to steps x batch x hidden, dense. Passes are
/// truncated at the segment: backward follows the steps of its own segment only, unless it is given the
/// gradient of the state after and asked for that of the state before.
///
/// As a layer of images (see any_layer) it takes steps x batch x 1 x input and starts from zeros.
template <class T>
class recurrent_layer {
 public:
  using value_type = T;

  virtual ~recurrent_layer() = default;

  index_t input_size() const { return input_; }
  index_t hidden_size() const { return hidden_; }
  virtual std::string describe() const = 0;

  /// y from x and the state before the first step; the state after the last one to `after`, which may be
  /// `before`. Without steps, that is the state before. y overlaps neither x nor a state. In training, x and
  /// y must stay as they are until the backward pass; the states need not. Throws shape_error.
  void forward(context<device::cpu>& ctx, const tensor_view<const T, 3>& x,
               const recurrent_state<const T>& before, const tensor_view<T, 3>& y,
               const recurrent_state<T>& after = {}) const {
    check(x.shape(), y.shape());
    check_state(x.extent(1), before);
    check_state(x.extent(1), recurrent_state<const T>(after));
    run_forward(ctx, x, before, y, after);
  }

  /// Gradients from dy (shaped as y), and from that of the state after the last step (null views: zero), to
  /// all parameters, to dx (shaped as x; a null view: not wanted), and to the state before the first step
  /// where wanted; `to_before` may be `from_after`, dx overlaps nothing. Throws shape_error, and state_error
  /// without a forward pass in training mode.
  void backward(context<device::cpu>& ctx, const tensor_view<const T, 3>& dy, const tensor_view<T, 3>& dx,
                const recurrent_state<const T>& from_after = {},
                const recurrent_state<T>& to_before = {}) const {
    const extents<3> dx_shape = dx.is_null() ? extents<3>{dy.extent(0), dy.extent(1), input_} : dx.shape();
    check(dx_shape, dy.shape());
    check_state(dy.extent(1), from_after);
    check_state(dy.extent(1), recurrent_state<const T>(to_before));
    run_backward(ctx, dy, dx, from_after, to_before);
  }

  extents<4> output_shape(const extents<4>& input) const {
    if (input[2] != 1 || input[3] != input_) {
      detail::throw_error<shape_error>(
          {describe(), ": input ", input, " is not steps x batch x 1 x ", input_});
    }
    return {input[0], input[1], 1, hidden_};
  }
  void forward(context<device::cpu>& ctx, const tensor_view<const T, 4>& x,
               const tensor_view<T, 4>& y) const {
    forward(ctx, sequence(x), {}, sequence(y));
  }
  void backward(context<device::cpu>& ctx, const tensor_view<const T, 4>& dy,
                const tensor_view<T, 4>& dx) const {
    backward(ctx, sequence(dy), dx.is_null() ? tensor_view<T, 3>() : sequence(dx));
  }

 protected:
  /// Throws shape_error unless both are positive.
  recurrent_layer(const char* name, index_t input, index_t hidden) : input_(input), hidden_(hidden) {
    if (input < 1 || hidden < 1) {
      detail::throw_error<shape_error>({name, ": ", input, " -> ", hidden, "; both sizes must be positive"});
    }
  }
  recurrent_layer(const recurrent_layer&) = default;
  recurrent_layer(recurrent_layer&&) noexcept = default;
  recurrent_layer& operator=(const recurrent_layer&) = default;
  recurrent_layer& operator=(recurrent_layer&&) noexcept = default;

  // Shapes are checked before these are called. dx, and either state, may be null.
  virtual void run_forward(context<device::cpu>& ctx, const tensor_view<const T, 3>& x,
                           const recurrent_state<const T>& before, const tensor_view<T, 3>& y,
                           const recurrent_state<T>& after) const = 0;
  virtual void run_backward(context<device::cpu>& ctx, const tensor_view<const T, 3>& dy,
                            const tensor_view<T, 3>& dx, const recurrent_state<const T>& from_after,
                            const recurrent_state<T>& to_before) const = 0;

  /// Throw shape_error.
  void check(const extents<3>& x, const extents<3>& y) const {
    if (x[2] != input_ || y[2] != hidden_ || x[0] != y[0] || x[1] != y[1]) {
      detail::throw_error<shape_error>(
          {describe(), ": input ", x, " (steps x batch x features) does not fit output ", y});
    }
  }
  void check_state(index_t batch, const recurrent_state<const T>& state) const {
    if (state.h.is_null() && state.c.is_null()) return;
    const extents<2> expected{batch, hidden_};
    if (state.h.shape() != expected || state.c.shape() != expected || state.h.is_null() ||
        state.c.is_null()) {
      detail::throw_error<shape_error>({describe(), ": a state of ", state.h.shape(), " and ",
                                        state.c.shape(), " where both must be ", expected});
    }
  }

 private:
  template <class U>
  static tensor_view<U, 3> sequence(const tensor_view<U, 4>& view) {
    return view.reshape(extents<3>{view.extent(0), view.extent(1), view.extent(2) * view.extent(3)});
  }

  index_t input_, hidden_;
};

PUFFERFISH_NAMESPACE_END
