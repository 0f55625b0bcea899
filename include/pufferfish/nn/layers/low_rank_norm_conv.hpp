// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `LowRankNormConv`: a convolution of rank r with a batch norm between its factors.

#include <cstddef>
#include <string>

#include <pufferfish/nn/containers/sequential.hpp>
#include <pufferfish/nn/layers/batch_norm.hpp>
#include <pufferfish/nn/layers/conv.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// y = up * BatchNorm(down * x) + b: `down` is the convolution `shape` with groups * `rank` output channels,
/// `up` a 1x1 convolution with the same groups to all output channels. The code of Pufferfish uses it in its
/// pure low-rank ResNet-18 and ResNet-34 for ImageNet; its published networks, and factorize, have nothing
/// between the factors. In training the batch norm depends on the batch, so that the layer is no product of
/// two matrices and cannot be merged or made by an SVD. insert_factor_norms makes it of a LowRankConv.
///
/// Names of its state: down.weight, bn.weight, bn.bias, up.weight, up.bias.
///
/// Passes, aliasing and errors are those of Sequential.
///
/// \code
/// LowRankNormConv<float> layer(conv_shape::square(64, 64, 3, 1, 1), 16);  // rank 16
/// layer.initialize({1, 1});
/// layer.forward(ctx, x.view(), y.view());  // y: layer.output_shape(x.shape())
/// \endcode
template <class T, class Device = device::cpu>
class LowRankNormConv : public Sequential<T, Device> {
 public:
  /// Without b by default, because a batch norm follows. Throws shape_error for an invalid shape,
  /// rank_error unless 1 <= rank <= min(out / groups, in / groups * kernel height * kernel width).
  LowRankNormConv(const conv_shape& shape, index_t rank, bool bias = false)
      : shape_(shape), rank_(rank), has_bias_(bias) {
    shape.validate("LowRankNormConv");
    check_rank(describe(), shape.group_outputs(), shape.patch(), rank);
    conv_shape down = shape;
    down.out_channels = shape.groups * rank;
    conv_shape up = conv_shape::square(down.out_channels, shape.out_channels, 1);
    up.groups = shape.groups;
    this->add("down", Conv<T>(down));
    this->add("bn", BatchNorm<T>(down.out_channels));
    this->add("up", Conv<T>(up, bias));
  }

  /// The geometry of the dense convolution that this layer replaces.
  const conv_shape& shape() const { return shape_; }
  /// Number of channels between the factors, per group.
  index_t rank() const { return rank_; }
  bool has_bias() const { return has_bias_; }
  std::string describe() const override {
    return detail::message({"LowRankNormConv rank ", rank_, ", ", shape_.describe()});
  }

  /// Views of the factors, one pair a group, and of b, in the memory of the two convolutions.
  low_rank_parts<parameter_t<T>> factors() {
    using P = parameter_t<T>;
    low_rank_parts<P> all;
    const layer_weights<P> down = (*this)[0].weights({}), up = (*this)[2].weights({});
    for (std::size_t g = 0; g < down.matrices.size(); ++g) {
      all.factors.push_back({down.matrices[g].name, 0, detail::writable(down.matrices[g].view),
                             detail::writable(up.matrices[g].view)});
    }
    all.biases = {detail::writable(up.biases[0].view)};
    return all;
  }

  /// Visits nothing: the convolutions of this layer are factors already, not layers to factorize.
  void visit_layers(layer_visitor<T, Device>&, const std::string&) {}

 private:
  conv_shape shape_;
  index_t rank_;
  bool has_bias_;
};

PUFFERFISH_NAMESPACE_END
