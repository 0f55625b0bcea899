// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: checks that layers apply to their argument views and to themselves. A check that passes builds
/// no text and allocates nothing.

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
/// and both are dense. Throws state_error, shape_error.
template <class Layer, class T, std::size_t N>
void check_forward(const Layer& layer, const tensor_view<const T, N>& x, const tensor_view<T, N>& y) {
  check_not_moved(layer);
  check_shapes(layer, x.shape(), y.shape());
  check_dense(layer, "x", x);
  check_dense(layer, "y", y);
}

/// Throws shape_error unless dy and dx fit the backward pass of a forward pass with an input of shape `x`. dx
/// may be a null view.
template <class Layer, class T, std::size_t N>
void check_backward(const Layer& layer, const extents<N>& x, const tensor_view<const T, N>& dy,
                    const tensor_view<T, N>& dx) {
  check_not_moved(layer);
  check_shapes(layer, x, dy.shape());
  check_dense(layer, "dy", dy);
  if (dx.is_null()) return;
  if (dx.shape() != x) {
    throw_error<shape_error>({layer.describe(), ": dx ", dx.shape(), " is not shaped as x ", x});
  }
  check_dense(layer, "dx", dx);
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
