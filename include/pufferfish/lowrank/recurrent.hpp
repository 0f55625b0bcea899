// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `recurrent_layer`: what recurrent layers of any kind look like to models: sequences in, sequences out, and
/// a state that a caller carries from one segment of a sequence to the next.

#include <string>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/lowrank/shape_check.hpp>

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

/// A layer from a sequence to a sequence, steps x batch x input to steps x batch x hidden, dense. What all of
/// them have beside their passes, which are
///
///     void forward(context<Device>&, x, before, y, after) const;
///     void backward(context<Device>&, dy, dx, from_after, to_before) const;
///
/// y from x and the state before the first step; the state after the last one to `after`, which may be
/// `before`. Without steps, that is the state before. y overlaps neither x nor a state. In training, x and y
/// must stay as they are until the backward pass; the states need not.
///
/// Then gradients from dy (shaped as y), and from that of the state after the last step (null views: zero),
/// to all parameters, to dx (shaped as x; a null view: not wanted), and to the state before the first step
/// where wanted; `to_before` may be `from_after`, dx overlaps nothing. Passes are truncated at the segment:
/// backward follows the steps of its own segment only, unless it is given the gradient of the state after and
/// asked for that of the state before.
///
/// Both throw shape_error; backward throws state_error without a forward pass in training mode. As a layer of
/// images (see any_layer) it takes steps x batch x 1 x input and starts from zeros.
template <class T>
class recurrent_layer {
 public:
  using value_type = T;

  virtual ~recurrent_layer() = default;

  index_t input_size() const { return input_; }
  index_t hidden_size() const { return hidden_; }
  virtual std::string describe() const = 0;

  extents<4> output_shape(const extents<4>& input) const {
    if (input[2] != 1 || input[3] != input_) {
      detail::throw_error<shape_error>(
          {describe(), ": input ", input, " is not steps x batch x 1 x ", input_});
    }
    return {input[0], input[1], 1, hidden_};
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
    detail::check_dense_rows(*this, "the state h", state.h);
    detail::check_dense_rows(*this, "the state c", state.c);
  }

  template <class U>
  tensor_view<U, 3> sequence(const char* what, const tensor_view<U, 4>& view) const {
    detail::check_dense_if_wanted(*this, what, view);
    return view.reshape(extents<3>{view.extent(0), view.extent(1), view.extent(2) * view.extent(3)});
  }

 private:
  index_t input_, hidden_;
};

PUFFERFISH_NAMESPACE_END
