// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Building blocks of the convolutional models: checks of options, convolutions with batch norm,
/// residual blocks, and a Sequential whose initial values a model adjusts.

#include <cmath>
#include <string>
#include <utility>

#include <pufferfish/nn/containers/residual.hpp>
#include <pufferfish/nn/init.hpp>
#include <pufferfish/nn/layers/activation.hpp>
#include <pufferfish/nn/layers/low_rank_norm_conv.hpp>
#include <pufferfish/nn/network.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Upper limit of sizes in the options of models.
inline constexpr index_t largest_option = index_t{1} << 20;

/// Throws value_error unless low <= value <= high.
/// The text names the model, the option, its value and the limits.
inline void check_option(const char* model, const char* option, index_t value, index_t low, index_t high) {
  if (value >= low && value <= high) return;
  throw_error<value_error>({std::string(model), ": ", option, " is ", value, ", not in ", low, " .. ", high});
}

/// Appends a convolution called `name`, with a bias, or without one and with a batch norm called `norm_name`.
template <class T, class Device>
void add_conv(Sequential<T, Device>& to, const std::string& name, const std::string& norm_name,
              const conv_shape& shape, bool batch_norm) {
  to.add(name, Conv<T>(shape, !batch_norm));
  if (batch_norm) to.add(norm_name, BatchNorm<T>(shape.out_channels));
}

/// Shortcut of a residual block: the identity or, where the shape changes, a 1x1 convolution, with
/// batch norm if `batch_norm` is set.
template <class T, class Device>
Sequential<T, Device> shortcut_of(index_t in, index_t out, index_t stride, bool batch_norm = true) {
  Sequential<T, Device> shortcut;
  if (stride != 1 || in != out) {
    add_conv(shortcut, "0", "1", conv_shape::square(in, out, 1, stride), batch_norm);
  }
  return shortcut;
}

/// Residual block with two 3x3 convolutions in its branch; for the shortcut see shortcut_of.
/// The branch is conv1, bn1, relu, conv2, bn2; a ReLU follows the sum.
template <class T, class Device>
Residual<T, Device> basic_block(index_t in, index_t out, index_t stride, bool batch_norm,
                                const std::string& shortcut_name = "shortcut") {
  Sequential<T, Device> branch;
  add_conv(branch, "conv1", "bn1", conv_shape::square(in, out, 3, stride, 1), batch_norm);
  branch.add("relu", ReLU<T>());
  add_conv(branch, "conv2", "bn2", conv_shape::square(out, out, 3, 1, 1), batch_norm);
  return Residual<T, Device>(std::move(branch), shortcut_of<T, Device>(in, out, stride, batch_norm), true,
                             shortcut_name);
}

/// A Sequential whose initial values a model adjusts: after the layers' own initialization, `change` is
/// called for each parameter with its name. Factors of a low-rank layer are passed like any other weight.
/// Values depend on the stream and the names only, not on the order of the layers.
template <class T, class Device>
class initialized_sequential : public Sequential<T, Device> {
 public:
  using change = void (*)(const std::string& name, parameter<parameter_t<T>>& p, random_stream random);

  /// `c` is called by initialize().
  initialized_sequential(Sequential<T, Device> layers, change c)
      : Sequential<T, Device>(std::move(layers)), change_(c) {}

  /// Initializes the layers, then calls `change` for each parameter, with the child of `random` for its name.
  void initialize(random_stream random) {
    Sequential<T, Device>::initialize(random);
    for_each_parameter(*this, [&](const std::string& name, parameter<parameter_t<T>>& p) {
      change_(name, p, random.child(name));
    });
  }

 private:
  change change_;
};

/// Draws the weight from N(0, 2 / fan_out) if the parameter belongs to a convolution (four dimensions). Other
/// parameters keep the initial values that their layers have given them.
template <class T>
void kaiming_convolutions(const std::string&, parameter<parameter_t<T>>& p, random_stream random) {
  if (p.layout().dims == 4) init::kaiming_normal_fan_out(p, random);
}

/// Whether `text` ends with `end`.
inline bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
