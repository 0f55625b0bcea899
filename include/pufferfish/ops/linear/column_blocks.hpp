// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Matrices that are stored side by side, such as those of the gates of an LSTM.

#include <pufferfish/core/tensor.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Matrices of one shape in one memory: matrix g begins g step elements after the first.
template <class T>
struct column_blocks {
  tensor_view<T, 2> first;
  index_t step;

  /// The blocks of `width` columns of `all`, from the left.
  static column_blocks of(const tensor_view<T, 2>& all, index_t width) {
    return {all.slice(1, 0, width), width};
  }
  operator column_blocks<const T>() const requires(!std::is_const_v<T>) { return {first, step}; }

  /// Matrix g.
  tensor_view<T, 2> operator[](index_t g) const {
    return {first.data() + g * step, first.shape(), first.strides()};
  }
};

/// The transposes of the matrices, without a copy.
template <class T>
column_blocks<T> transpose(const column_blocks<T>& blocks) {
  return {pufferfish::transpose(blocks.first), blocks.step};
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
