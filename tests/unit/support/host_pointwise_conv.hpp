// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// A convolution of a foreign framework, for tests.

#include <array>
#include <cstddef>
#include <string>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/parameter.hpp>
#include <pufferfish/lowrank/traits.hpp>

namespace host {

/// A layer of some other library: 1x1 convolution, weights [in][out] as plain floats.
class PointwiseConv {
 public:
  PointwiseConv(std::ptrdiff_t in, std::ptrdiff_t out)
      : in_(in),
        out_(out),
        weight_(pufferfish::logical_layout::kernel(out, in, 1, 1), pufferfish::parameter_role::weight) {}

  std::string describe() const { return "host::PointwiseConv"; }
  pufferfish::extents<4> output_shape(const pufferfish::extents<4>& x) const {
    return {x[0], x[1], x[2], out_};
  }
  void forward(pufferfish::cpu_context&, const pufferfish::tensor_view<const float, 4>& x,
               const pufferfish::tensor_view<float, 4>& y) const {
    for (std::ptrdiff_t p = 0; p < x.size() / in_; ++p) {
      for (std::ptrdiff_t o = 0; o < out_; ++o) {
        float sum = 0.0F;
        for (std::ptrdiff_t i = 0; i < in_; ++i) sum += x.data()[p * in_ + i] * weight_.data()[i * out_ + o];
        y.data()[p * out_ + o] = sum;
      }
    }
  }
  void backward(pufferfish::cpu_context&, const pufferfish::tensor_view<const float, 4>&,
                const pufferfish::tensor_view<float, 4>&) const {}
  template <class F>
  void visit(F&& f) {
    f("kernel", weight_);
  }
  std::ptrdiff_t in() const { return in_; }
  std::ptrdiff_t out() const { return out_; }
  const pufferfish::parameter<float>& weight() const { return weight_; }
  pufferfish::parameter<float>& weight() { return weight_; }

 private:
  std::ptrdiff_t in_, out_;
  pufferfish::parameter<float> weight_;
};

}  // namespace host

template <>
struct pufferfish::layer_traits<host::PointwiseConv> {
  static constexpr auto kind = layer_kind::conv;
  static conv_shape shape(const host::PointwiseConv& layer) {
    return conv_shape::square(layer.in(), layer.out(), 1);
  }
  static auto matrices(const host::PointwiseConv& layer) {
    return std::array{named_view<const float, 4>{"kernel", layer.weight().logical()}};
  }
};
