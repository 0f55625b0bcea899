// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `ChannelSelect`: a layer whose output consists of some of its input's channels.

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/nn/containers/layer_concepts.hpp>
#include <pufferfish/ops/copy/columns.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// y(n, h, w, j) = x(n, h, w, channels[j]): N x H x W x C to N x H x W x J. slice_channels puts this layer in
/// front of the first convolution of a residual block, so that the convolution reads fewer channels than the
/// block passes on.
///
/// The list is a buffer of the layer, like the statistics of a batch norm: checkpoints contain it, and copies
/// and devices have their own. A float stores channel numbers exactly up to 2^24. Neither pass keeps x or y.
///
/// \code
/// Sequential<float> branch;
/// branch.add("select", ChannelSelect<float>(16, {0, 3, 7}))
///     .add("conv1", Conv<float>(conv_shape::square(3, 16, 3, 1, 1)));
/// \endcode
template <class T>
class ChannelSelect {
 public:
  using value_type = T;
  static constexpr bool reads_input = false;
  static constexpr bool reads_output = false;

  /// Throws shape_error unless in_channels is in 1 .. 2^24, value_error unless the channels are ascending
  /// numbers in 0 .. in_channels - 1, at least one.
  ChannelSelect(index_t in_channels, const std::vector<index_t>& channels)
      : in_channels_(in_channels), channels_(static_cast<index_t>(channels.size())) {
    if (in_channels < 1 || in_channels > index_t{1} << 24) {
      detail::throw_error<shape_error>({"ChannelSelect: ", in_channels, " channels, not in 1 .. 2^24"});
    }
    const bool ascending =
        std::adjacent_find(channels.begin(), channels.end(), std::greater_equal<>()) == channels.end();
    if (channels.empty() || !ascending || channels.front() < 0 || channels.back() >= in_channels) {
      detail::throw_error<value_error>(
          {describe(), ": the channels are not ascending numbers in 0 .. ", in_channels - 1, ", or none"});
    }
    std::transform(channels.begin(), channels.end(), channels_.data(),
                   [](index_t channel) { return static_cast<parameter_t<T>>(channel); });
  }

  /// Number of channels of the input, and of those that are passed.
  index_t in_channels() const { return in_channels_; }
  index_t out_channels() const { return channels_.size(); }
  bool is_moved_from() const { return channels_.size() == 0; }
  /// The channels that pass; to be called while the host may read the layer's buffers
  /// (model::read_on_host). Throws value_error if the buffer has other values than channel numbers.
  std::vector<index_t> channels() const {
    std::vector<index_t> list;
    for (index_t j = 0; j < out_channels(); ++j) {
      list.push_back(ops::detail::column_number("ChannelSelect", channels_.data(), j, in_channels_));
    }
    return list;
  }
  /// Numbers of output and input channels, such as "ChannelSelect 3 of 16".
  std::string describe() const {
    return detail::message({"ChannelSelect ", out_channels(), " of ", in_channels_});
  }

  /// Throws shape_error if the channels differ.
  extents<4> output_shape(const extents<4>& input) const {
    if (input[3] != in_channels_) {
      detail::throw_error<shape_error>(
          {describe(), ": input ", input, " (NHWC) has ", input[3], " channels, not ", in_channels_});
    }
    return {input[0], input[1], input[2], out_channels()};
  }

  /// x, y: dense; y does not overlap x. Throws shape_error, and value_error if the buffer has other values
  /// than channel numbers. On a device, such values make their channels of y NaN instead.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    detail::check_forward(*this, x, y);
    ops::gather_columns<T>(ctx, detail::rows_of(x), channels_.data(), detail::rows_of(y));
    if (ctx.training()) ctx.tape().push_value(*this, x.shape());
  }

  /// dx = 0, then dx(n, h, w, channels[j]) = dy(n, h, w, j). dx may be a null view and overlaps nothing.
  /// Throws shape_error, and state_error without a forward pass in training mode.
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    scatter(ctx, dy, dx, false);
  }
  /// dx(n, h, w, channels[j]) += dy(n, h, w, j). Shapes, aliasing and errors are those of backward.
  template <class Device>
  void backward_add(context<Device>& ctx, const tensor_view<const T, 4>& dy,
                    const tensor_view<T, 4>& dx) const {
    scatter(ctx, dy, dx, true);
  }

  /// Calls f("channels", buffer) with the list of channels.
  template <class F>
  void visit(F&& f) {
    f("channels", channels_);
  }

 private:
  // The backward pass: dx has dy in the passed channels and 0 elsewhere, or with `add` gets dy added there.
  template <class Device>
  void scatter(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx,
               bool add) const {
    detail::check_backward(*this, ctx.tape().template pop_value<extents<4>>(*this), dy, dx);
    if (dx.is_null()) return;
    ops::scatter_columns<T>(ctx, detail::rows_of(dy), channels_.data(), detail::rows_of(dx), add);
  }

  index_t in_channels_;
  state_buffer<parameter_t<T>> channels_;
};

PUFFERFISH_NAMESPACE_END
