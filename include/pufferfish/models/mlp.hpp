// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `mlp`: fully connected networks.

#include <string>
#include <utility>
#include <vector>

#include <pufferfish/models/blocks.hpp>
#include <pufferfish/nn/layers/flatten.hpp>
#include <pufferfish/nn/layers/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Sizes of an mlp. The values below are those of MNIST digits.
struct mlp_options {
  index_t inputs = 784;                   ///< values of one image or vector
  std::vector<index_t> hidden{256, 256};  ///< outputs of each hidden layer; empty: one linear layer, fc1
  index_t classes = 10;
};

/// Makes linear layers with ReLU between them, over flattened images: fc1, relu1, fc2, ..., fcN. The logits
/// are N x 1 x 1 x classes, without a softmax. An input needs H W C = inputs; its own height and width do not
/// matter.
///
/// Parameters are zero until network::initialize, which calls Linear::initialize for each layer. Throws
/// value_error for an option out of its range: inputs in 1 .. 2^40, classes and hidden sizes in 1 .. 2^20.
///
/// \code
/// network<float> net = mlp<float>({.inputs = 28 * 28, .hidden = {128}, .classes = 10});
/// net.initialize(1);
/// const tensor<float, 4> logits = net.forward(ctx, images.view());  // images: N x 28 x 28 x 1
/// \endcode
template <class T, class Device = device::cpu>
network<T, Device> mlp(const mlp_options& options) {
  detail::check_option("mlp", "inputs", options.inputs, 1, index_t{1} << 40);
  detail::check_option("mlp", "classes", options.classes, 1, detail::largest_option);
  Sequential<T, Device> net;
  net.add("flatten", Flatten<T>());
  index_t features = options.inputs;
  for (std::size_t i = 0; i < options.hidden.size(); ++i) {
    detail::check_option("mlp", "a hidden layer", options.hidden[i], 1, detail::largest_option);
    net.add("fc" + std::to_string(i + 1), Linear<T>(features, options.hidden[i]));
    net.add("relu" + std::to_string(i + 1), ReLU<T>());
    features = options.hidden[i];
  }
  net.add("fc" + std::to_string(options.hidden.size() + 1), Linear<T>(features, options.classes));
  return network<T, Device>{any_layer<T, Device>(std::move(net))};
}

PUFFERFISH_NAMESPACE_END
