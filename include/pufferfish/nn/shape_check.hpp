// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the check that layers make of the shapes they are given.

#include <string>

#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Throws shape_error, naming the layer and the shapes, unless `layer` turns `input` into `output`.
template <class Layer>
void check_shapes(const Layer& layer, const extents<4>& input, const extents<4>& output) {
  const extents<4> expected = layer.output_shape(input);
  if (output != expected) {
    PUFFERFISH_THROW(shape_error(layer.describe() + ": input " + to_string<4>(input) + " gives output " +
                                 to_string<4>(expected) + ", not " + to_string<4>(output)));
  }
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
