// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `PositionalEncoding`: sinusoids that encode the position of a token for a Transformer.

#include <cstdint>
#include <span>

#include <pufferfish/core/context.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/ops/embedding/positions.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// y = x + table row of the position: in column j, sin on even j and cos on odd j of position / 10000^(2
/// floor(j / 2) / width) (Vaswani et al.: "Attention is all you need", NIPS 2017, section 3.5). Nothing
/// is trained or stored in files. The table is on the host; devices compute the sinusoids themselves.
///
/// \code
/// const PositionalEncoding<float> encoding(64, 200);
/// const std::vector<std::int32_t> positions{0, 1, 2, 0, 1};  // two sequences, of 3 and of 2 tokens
/// encoding.add(ctx, positions.data(), x.view());             // x: 5 x 64
/// \endcode
template <class T>
class PositionalEncoding {
 public:
  using value_type = T;
  static constexpr bool gradient_in_place = true;

  /// Throws shape_error unless `width` and `positions` are positive. The table takes positions * width
  /// elements.
  explicit PositionalEncoding(index_t width, index_t positions = 200) : table_(checked(width, positions)) {
    for (index_t p = 0; p < positions; ++p) {
      for (index_t j = 0; j < width; ++j)
        table_(p, j) = static_cast<parameter_t<T>>(ops::sinusoid(p, j, width));
    }
  }

  /// Number of positions, and of elements in a row of the table.
  index_t positions() const { return table_.extent(0); }
  index_t width() const { return table_.extent(1); }
  bool is_moved_from() const { return table_.data() == nullptr; }
  tensor_view<const parameter_t<T>, 2> table() const { return table_; }
  std::string describe() const {
    return detail::message({"PositionalEncoding of ", positions(), " positions, width ", width()});
  }

  /// Throws shape_error, with both lengths in its text, if a sequence of `length` tokens is longer than the
  /// table.
  void require_length(index_t length) const {
    if (length > positions()) {
      detail::throw_error<shape_error>(
          {describe(), ": a sequence of ", length, " tokens is longer than the table"});
    }
  }

  /// Row n of x += the row of positions[n], each in 0 .. positions() - 1, which is not checked. `positions`
  /// has one element per row of x, in the memory of the device. x: rows dense, of width() columns. Throws
  /// shape_error for another number of columns and for rows that are not dense, state_error for an encoding
  /// that was moved from.
  template <class Device>
  void add(context<Device>& ctx, const std::int32_t* positions, const tensor_view<T, 2>& x) const {
    detail::check_not_moved(*this);
    if (x.extent(1) != width()) {
      detail::throw_error<shape_error>({describe(), ": x ", x.shape(), " has vectors of ", x.extent(1)});
    }
    detail::check_dense_rows(*this, "x", x);
    ops::add_positions<T>(ctx, table_, positions, x);
  }

  /// Shape of y for the layer as a layer of images: `input` itself, N x H x W x width. Throws shape_error for
  /// another number of channels, and for more than positions() tokens H W.
  extents<4> output_shape(const extents<4>& input) const {
    if (input[3] != width()) {
      detail::throw_error<shape_error>({describe(), ": input ", input, " has vectors of ", input[3]});
    }
    require_length(input[1] * input[2]);
    return input;
  }
  /// y = x + encoding for the H W tokens of each image, from position 0 on. x, y: N x H x W x width, dense; y
  /// may be x. Throws shape_error.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    detail::check_forward(*this, x, y, true);
    const index_t tokens = x.extent(1) * x.extent(2);
    const extents<2> rows{x.extent(0) * tokens, width()};
    if (!x.empty()) {
      ops::add_positions_in_turn<T>(ctx, table_, tokens, x.reshape(rows), y.reshape(rows));
    }
    if (ctx.training()) ctx.tape().push_value(*this, x.shape());
  }
  /// dx = dy. dx may be dy or a null view. Throws shape_error, and state_error without a forward pass in
  /// training mode.
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    const auto shape = ctx.tape().template pop_value<extents<4>>(*this);
    detail::check_backward(*this, shape, dy, dx);
    if (!dx.is_null() && dx.data() != dy.data()) {
      ops::copy_elements<T>(ctx, dy.flat().data(), dx.flat().data(), dx.size());
    }
  }

 private:
  // Extents of the table. Throws shape_error for a size below 1.
  static extents<2> checked(index_t width, index_t positions) {
    if (width < 1 || positions < 1) {
      detail::throw_error<shape_error>(
          {"PositionalEncoding: ", positions, " positions, width ", width, ": both must be positive"});
    }
    return {positions, width};
  }

  tensor<parameter_t<T>, 2> table_;
};

PUFFERFISH_NAMESPACE_END
