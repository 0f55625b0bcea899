// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `bias_solver`: dlib's solvers with the multipliers of low-rank layers' biases.

#include <algorithm>
#include <cstddef>
#include <istream>
#include <ostream>
#include <string>
#include <type_traits>

#include <pufferfish/adapters/dlib_layer.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Wraps one of dlib's solvers (dlib::sgd, dlib::adam) so that the bias multipliers of low-rank layers
/// take effect. dlib's solvers handle the bias of con_ and fc_ only and treat all parameters of other
/// layers as weights. For a trainer:
///
///     dlib::dnn_trainer<small_net, bias_solver<dlib::sgd>> trainer(net,
///     bias_solver<dlib::sgd>(dlib::sgd()));
///
/// The solver is copied twice: the two copies keep the momentum of weights and of biases. Layers that are not
/// of this library are passed to the first copy unchanged.
template <class Solver>
class bias_solver {
 public:
  /// Copies `solver` twice, with the momentum that it has.
  explicit bias_solver(const Solver& solver = Solver()) : weights_(solver), biases_(solver) {}

  /// Computes the step of a layer's parameters, as dlib's solvers do. For the bias, the learning rate
  /// multiplier is the product of the layer's and its bias_learning_rate_multiplier, and likewise for weight
  /// decay. The result refers to memory of this object, valid until the next call.
  template <class Layer>
  const ::dlib::tensor& operator()(float learning_rate, const Layer& layer, const ::dlib::tensor& gradient) {
    if constexpr (std::is_base_of_v<detail::dlib_layer, Layer>) {
      const std::size_t bias = layer.bias_size();
      if (bias > 0) return both(learning_rate, layer, gradient, bias);
    }
    return weights_(learning_rate, layer, gradient);
  }

  /// The solver of the weights.
  const Solver& solver() const { return weights_; }

  /// Files hold both solvers. deserialize throws dlib::serialization_error for a file of another type.
  friend void serialize(const bias_solver& item, std::ostream& out) {
    using ::dlib::serialize;
    serialize(std::string("pufferfish_bias_solver_1"), out);
    serialize(item.weights_, out);
    serialize(item.biases_, out);
  }
  friend void deserialize(bias_solver& item, std::istream& in) {
    using ::dlib::deserialize;
    std::string version;
    deserialize(version, in);
    if (version != "pufferfish_bias_solver_1") {
      throw ::dlib::serialization_error(
          "Unexpected version found while deserializing pufferfish::bias_solver.");
    }
    deserialize(item.weights_, in);
    deserialize(item.biases_, in);
  }
  friend std::ostream& operator<<(std::ostream& out, const bias_solver& item) { return out << item.weights_; }

 private:
  // A part of a layer's parameters, with the interface that solvers use.
  struct part {
    const ::dlib::tensor& params;
    double learning_rate, weight_decay;
    const ::dlib::tensor& get_layer_params() const { return params; }
    double get_learning_rate_multiplier() const { return learning_rate; }
    double get_weight_decay_multiplier() const { return weight_decay; }
  };

  // The last `bias` elements of the gradient are those of the bias.
  const ::dlib::tensor& both(float learning_rate, const detail::dlib_layer& layer,
                             const ::dlib::tensor& gradient, std::size_t bias) {
    const std::size_t weights = gradient.size() - bias;
    step_.copy_size(gradient);
    const auto run = [&](Solver& solver, std::size_t first, std::size_t count, double rate, double decay) {
      const ::dlib::alias_tensor window(static_cast<long long>(count));
      const auto params = window(layer.get_layer_params(), first);
      const auto own = window(gradient, first);
      const part seen{params.get(), rate, decay};
      const ::dlib::tensor& step = solver(learning_rate, seen, own.get());
      std::copy_n(step.host(), count, step_.host() + first);
    };
    const double rate = layer.get_learning_rate_multiplier(), decay = layer.get_weight_decay_multiplier();
    run(weights_, 0, weights, rate, decay);
    run(biases_, weights, bias, rate * layer.get_bias_learning_rate_multiplier(),
        decay * layer.get_bias_weight_decay_multiplier());
    return step_;
  }

  Solver weights_, biases_;
  ::dlib::resizable_tensor step_;
};

PUFFERFISH_NAMESPACE_END
