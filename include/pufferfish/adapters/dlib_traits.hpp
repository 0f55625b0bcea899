// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// layer_traits of dlib's con_ and fc_, for svd_factorize and svd_factors.

// Included first, so that its error message comes before those of dlib's headers.
#include <pufferfish/core/needs_exceptions.hpp>

#include <dlib/dnn.h>

#include <array>

#include <pufferfish/lowrank/factorization/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Traits of any dlib::con_. Its functions throw state_error for a layer that has no parameters yet. Views
/// are of the layer's parameters in dlib's order [out][in][height][width], then the bias; they are valid
/// until the layer's parameters are replaced. The number of input channels follows from the number of
/// parameters.
template <long NumFilters, long Rows, long Cols, int StrideY, int StrideX, int PaddingY, int PaddingX>
struct layer_traits<::dlib::con_<NumFilters, Rows, Cols, StrideY, StrideX, PaddingY, PaddingX>> {
  using layer_type = ::dlib::con_<NumFilters, Rows, Cols, StrideY, StrideX, PaddingY, PaddingX>;
  static constexpr auto kind = layer_kind::conv;
  /// The number of input channels is (parameters - bias) / (filters kernel rows kernel columns).
  static conv_shape shape(const layer_type& layer) {
    const index_t out = layer.num_filters(), cells = layer.nr() * layer.nc();
    const auto size = static_cast<index_t>(layer.get_layer_params().size());
    if (size == 0) PUFFERFISH_THROW(state_error("dlib::con_: no parameters yet: run its network once first"));
    return {(size - (layer.bias_is_disabled() ? 0 : out)) / (out * cells),
            out,
            {layer.nr(), layer.nc()},
            {StrideY, StrideX},
            {layer.padding_y(), layer.padding_x()},
            {1, 1}};
  }
  /// The weight as a list of one view [out][in][height][width], named "filters".
  static auto matrices(const layer_type& layer) {
    const conv_shape s = shape(layer);
    const extents<4> oihw{s.out_channels, s.in_channels, s.kernel.height, s.kernel.width};
    return std::array{named_view<const float, 4>{"filters", {layer.get_layer_params().host(), oihw}}};
  }
  /// The bias, a null view for a layer whose bias is disabled.
  static tensor_view<const float, 1> bias(const layer_type& layer) {
    const conv_shape s = shape(layer);
    if (layer.bias_is_disabled()) return {};
    return {layer.get_layer_params().host() + s.out_channels * s.patch(), {s.out_channels}};
  }
};

/// Traits of any dlib::fc_. Its functions throw state_error for a layer that has no parameters yet. Views are
/// of the layer's parameters, valid until these are replaced. The matrix is out x in, with the strides of
/// dlib's order.
template <unsigned long NumOutputs, ::dlib::fc_bias_mode BiasMode>
struct layer_traits<::dlib::fc_<NumOutputs, BiasMode>> {
  using layer_type = ::dlib::fc_<NumOutputs, BiasMode>;
  static constexpr auto kind = layer_kind::linear;
  /// The weight as a list of one view [out][in], named "weights".
  static auto matrices(const layer_type& layer) {
    const auto out = static_cast<index_t>(layer.get_num_outputs());
    // dlib stores weights as [in][out].
    return std::array{named_view<const float, 2>{
        "weights", {layer.get_layer_params().host(), {out, inputs(layer)}, {1, out}}}};
  }
  /// The bias, a null view for a layer without bias or whose bias is disabled.
  static tensor_view<const float, 1> bias(const layer_type& layer) {
    if (BiasMode == ::dlib::FC_NO_BIAS || layer.bias_is_disabled()) return {};
    const auto out = static_cast<index_t>(layer.get_num_outputs());
    return {layer.get_layer_params().host() + inputs(layer) * out, {out}};
  }

 private:
  // Number of inputs. Throws state_error for a layer without parameters.
  static index_t inputs(const layer_type& layer) {
    if (layer.get_layer_params().size() == 0) {
      PUFFERFISH_THROW(state_error("dlib::fc_: no parameters yet: run its network once first"));
    }
    return static_cast<index_t>(layer.get_weights().get().num_samples());
  }
};

PUFFERFISH_NAMESPACE_END
