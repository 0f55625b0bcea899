// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `recurrent_layer`: the common interface of recurrent layers for models: sequences in, sequences out, and a
/// state that the caller carries from one segment of a sequence to the next.

#include <string>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Hidden state h and cell state c of a layer, batch x hidden each, with dense rows and any stride between
/// rows. Either both views are null or none; a state with one null view is a shape_error. A null state means
/// zeros where it is read, and "do not compute" where it is written. The views refer to memory of the caller.
///
/// \code
/// tensor<double, 2> h({3, hidden}), c({3, hidden});  // a batch of 3 sequences
/// const recurrent_state<double> state{h, c};
/// for (const tensor<double, 3>& segment : segments) {
///   layer.forward(ctx, segment, state, y.view(), state);  // continues where the last segment ended
/// }
/// \endcode
template <class T>
struct recurrent_state {
  tensor_view<T, 2> h;
  tensor_view<T, 2> c;

  bool is_null() const { return h.is_null(); }
  operator recurrent_state<const T>() const { return {h, c}; }
};

/// A layer that maps sequences steps x batch x input to sequences steps x batch x hidden, all dense. This
/// base class holds the common members. Derived classes add the passes
///
///     void forward(context<Device>&, x, before, y, after) const;
///     void backward(context<Device>&, dy, dx, from_after, to_before) const;
///
/// forward computes y from x and the state `before` the first step, and stores the state after the last step
/// in `after`, which may alias `before`. With zero steps, that is the state `before`. y must not overlap x or
/// a state. In training, x and y must not change until the backward pass; the states may.
///
/// backward computes all parameter gradients, dx (shaped like x; skipped if null) and the gradient
/// `to_before` of the state before the first step (skipped if null). Its inputs are dy (shaped like y) and
/// the gradient `from_after` of the state after the last step (null: zero). `to_before` may alias
/// `from_after`; dx must not overlap anything. Gradients flow through the steps of this segment only, unless
/// the caller passes them from segment to segment through `from_after` and `to_before`.
///
/// Both throw shape_error; backward throws state_error without a forward pass in training mode. Used as a
/// layer of images (see any_layer), the layer takes steps x batch x 1 x input and starts from a zero state.
/// forward and backward throw state_error for a moved-from layer, too. The steps run one after another, each
/// with all sequences of the batch, so a larger batch is cheaper per sequence than more steps.
template <class T>
class recurrent_layer {
 public:
  using value_type = T;

  virtual ~recurrent_layer() = default;

  index_t input_size() const { return input_; }
  index_t hidden_size() const { return hidden_; }
  virtual std::string describe() const = 0;

  /// Extents of y for the layer as a layer of images: steps x batch x 1 x hidden. Throws shape_error, naming
  /// the layer, unless `input` is steps x batch x 1 x input.
  extents<4> output_shape(const extents<4>& input) const {
    if (input[2] != 1 || input[3] != input_) {
      detail::throw_error<shape_error>(
          {describe(), ": input ", input, " is not steps x batch x 1 x ", input_});
    }
    return {input[0], input[1], 1, hidden_};
  }

 protected:
  /// Throws shape_error unless both sizes are positive.
  recurrent_layer(const char* name, index_t input, index_t hidden) : input_(input), hidden_(hidden) {
    if (input < 1 || hidden < 1) {
      detail::throw_error<shape_error>({name, ": ", input, " -> ", hidden, "; both sizes must be positive"});
    }
  }
  recurrent_layer(const recurrent_layer&) = default;
  recurrent_layer(recurrent_layer&&) noexcept = default;
  recurrent_layer& operator=(const recurrent_layer&) = default;
  recurrent_layer& operator=(recurrent_layer&&) noexcept = default;

  /// Throws shape_error, naming the layer and the shapes, unless y has the steps and the batch of x and both
  /// have the layer's widths.
  void check(const extents<3>& x, const extents<3>& y) const {
    if (x[2] != input_ || y[2] != hidden_ || x[0] != y[0] || x[1] != y[1]) {
      detail::throw_error<shape_error>(
          {describe(), ": input ", x, " (steps x batch x features) does not fit output ", y});
    }
  }
  /// Throws shape_error, naming the layer and the shapes, unless the state is null or has two batch x hidden
  /// views with dense rows.
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

  /// Views an image steps x batch x 1 x n as the sequence steps x batch x n, without a copy. Throws
  /// shape_error, naming `what`, unless the view is null or dense.
  template <class U>
  tensor_view<U, 3> sequence(const char* what, const tensor_view<U, 4>& view) const {
    detail::check_dense_if_wanted(*this, what, view);
    return view.reshape(extents<3>{view.extent(0), view.extent(1), view.extent(2) * view.extent(3)});
  }

 private:
  index_t input_, hidden_;
};

PUFFERFISH_NAMESPACE_END
