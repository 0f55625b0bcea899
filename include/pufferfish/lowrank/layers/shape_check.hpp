// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: checks that layers apply to their argument views and to themselves. A check that passes builds
/// no text and allocates nothing.

#include <functional>
#include <string>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

[[noreturn]] PUFFERFISH_COLD inline void moved_from(const std::string& who) {
  throw_error<state_error>({who,
                            ": was moved from, so its parameters are gone: use the object that they "
                            "were moved to, or assign a new one"});
}

/// Throws shape_error for a view that is not dense. `written`: the view is an output, so the error advises to
/// copy afterwards instead of passing a dense copy.
[[noreturn]] PUFFERFISH_COLD inline void not_dense(const std::string& who, const char* what, bool is_null,
                                                   bool written, const index_t* shape, const index_t* strides,
                                                   std::size_t dims) {
  const auto list = [dims](auto element) {
    std::string text = "(";
    for (std::size_t d = 0; d < dims; ++d) text += (d == 0 ? "" : ", ") + std::to_string(element(d));
    return text + ")";
  };
  const auto product_behind = [&](std::size_t d) {
    index_t step = 1;
    while (++d < dims) step *= shape[d];
    return step;
  };
  const std::string type = message({"pufferfish::tensor<T, ", dims, ">"});
  if (is_null) {
    throw_error<shape_error>({who, ": ", what, " is a null view of shape ", shape_text(shape, dims)});
  }
  throw_error<shape_error>({who, ": ", what, " ", shape_text(shape, dims), " has strides ",
                            list([&](std::size_t d) { return strides[d]; }),
                            ", layers need dense memory with strides ", list(product_behind),
                            written ? ": pass a dense " + type + " and copy() its view to this one afterwards"
                                    : ": pass a dense copy, " + type + " dense(view)",
                            dims == 4 ? "; images are NHWC" : ""});
}

/// Throws state_error, naming the layer, if it was moved from.
template <class Layer>
void check_not_moved(const Layer& layer) {
  if constexpr (requires { layer.is_moved_from(); }) {
    if (layer.is_moved_from()) moved_from(layer.describe());
  }
}

/// Throws shape_error, naming the layer and `what`, unless the view is dense: last index fastest, no gaps. A
/// view without elements is dense, a null view with elements is not.
template <class Layer, class T, std::size_t N>
void check_dense(const Layer& layer, const char* what, const tensor_view<T, N>& view) {
  if (view.empty() || (!view.is_null() && view.is_contiguous())) return;
  not_dense(layer.describe(), what, view.is_null(), !std::is_const_v<T>, view.shape().data(),
            view.strides().data(), N);
}

/// Throws shape_error unless `view` is dense or a null view; a null view means that the output is not
/// requested.
template <class Layer, class T, std::size_t N>
void check_dense_if_wanted(const Layer& layer, const char* what, const tensor_view<T, N>& view) {
  if (!view.is_null()) check_dense(layer, what, view);
}

/// Throws shape_error unless the rows of the matrix are contiguous; the stride between rows is free.
template <class Layer, class T>
void check_dense_rows(const Layer& layer, const char* what, const tensor_view<T, 2>& view) {
  if (view.empty() || (!view.is_null() && (view.stride(1) == 1 || view.extent(1) == 1))) return;
  not_dense(layer.describe(), what, view.is_null(), !std::is_const_v<T>, view.shape().data(),
            view.strides().data(), 2);
}

/// Throws shape_error, naming the layer, for an input with a negative extent or too many elements to count.
template <class Layer>
void check_extents(const Layer& layer, const extents<4>& input) {
  if (checked_volume(input.data(), input.size()) >= 0) return;
  throw_error<shape_error>(
      {layer.describe(), ": input ", input, " has a negative extent, or more elements than can be counted"});
}

/// Throws shape_error, naming the layer, if two dense arguments share memory; `out` may be a null view.
/// `in_place`: they may be the same memory, but not overlap in part.
template <class Layer, class T, std::size_t N>
void check_apart(const Layer& layer, const char* what, const tensor_view<T, N>& out, const char* from,
                 const tensor_view<const T, N>& in, bool in_place) {
  if (out.is_null()) return;
  const std::less<const T*> before;
  if (!before(out.data(), in.data() + in.size()) || !before(in.data(), out.data() + out.size())) return;
  if (in_place && out.data() == in.data()) return;
  throw_error<shape_error>({layer.describe(), ": ", what, " ", out.shape(), " overlaps ", from, " ",
                            in.shape(), in_place ? " in part" : "", ": pass memory of its own"});
}

/// Whether the output of a layer's forward pass may be its input; `gradient`: dx of the backward pass dy.
template <class Layer>
constexpr bool allows_in_place(bool gradient) {
  bool allowed = false;
  if constexpr (requires { Layer::output_in_place; }) allowed = !gradient && Layer::output_in_place;
  if constexpr (requires { Layer::gradient_in_place; })
    allowed = allowed || (gradient && Layer::gradient_in_place);
  return allowed;
}

/// Throws shape_error, naming the layer and the shapes, unless `output` is the output shape for `input`.
template <class Layer>
void check_shapes(const Layer& layer, const extents<4>& input, const extents<4>& output) {
  const extents<4> expected = layer.output_shape(input);
  if (output != expected) {
    throw_error<shape_error>(
        {layer.describe(), ": input ", input, " gives output ", expected, ", not ", output});
  }
}
/// Throws shape_error unless input and output fit a layer that maps rows of in_features() to rows of
/// out_features() numbers.
template <class Layer>
void check_shapes(const Layer& layer, const extents<2>& input, const extents<2>& output) {
  if (input[1] != layer.in_features() || output[1] != layer.out_features() || input[0] != output[0]) {
    throw_error<shape_error>({layer.describe(), ": input ", input, " does not fit output ", output});
  }
}

/// Checks before the forward pass of a layer of images or rows: the layer was not moved from, x and y fit it,
/// both are dense, and y does not overlap x. `in_place`: y may be x. Throws state_error, shape_error.
template <class Layer, class T, std::size_t N>
void check_forward(const Layer& layer, const tensor_view<const T, N>& x, const tensor_view<T, N>& y,
                   bool in_place = allows_in_place<Layer>(false)) {
  check_not_moved(layer);
  check_shapes(layer, x.shape(), y.shape());
  check_dense(layer, "x", x);
  check_dense(layer, "y", y);
  check_apart(layer, "y", y, "x", x, in_place);
}

/// Throws shape_error unless dy and dx fit the backward pass of a forward pass with an input of shape `x`,
/// and if dx overlaps dy. dx may be a null view. `in_place`: dx may be dy.
template <class Layer, class T, std::size_t N>
void check_backward(const Layer& layer, const extents<N>& x, const tensor_view<const T, N>& dy,
                    const tensor_view<T, N>& dx, bool in_place = allows_in_place<Layer>(true)) {
  check_not_moved(layer);
  check_shapes(layer, x, dy.shape());
  check_dense(layer, "dy", dy);
  if (dx.is_null()) return;
  if (dx.shape() != x) {
    throw_error<shape_error>({layer.describe(), ": dx ", dx.shape(), " is not shaped as x ", x});
  }
  check_dense(layer, "dx", dx);
  check_apart(layer, "dx", dx, "dy", dy, in_place);
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
