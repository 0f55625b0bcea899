// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Random initial values for parameters. Each is a pure function of the random stream.
///
/// Fans are those of PyTorch: fan_in is the number of inputs of one output (in * kernel height * kernel
/// width), fan_out the number of outputs of one input (out * kernel height * kernel width).
///
/// All functions overwrite every element of `p`. Element i in stored order depends on the stream and i only.
/// The elements must be in host memory; for a model on a device call the functions within model::on_host.
///
/// \code
/// parameter<float> weight(logical_layout::matrix(10, 8), parameter_role::weight);
/// init::kaiming_uniform(weight, random_stream(1, 2).child("weight"));
/// \endcode

#include <algorithm>
#include <cmath>
#include <string>

#include <pufferfish/core/parameter.hpp>
#include <pufferfish/core/random.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace init {

/// Fan in and fan out of a weight.
struct fans {
  index_t in = 0;
  index_t out = 0;
};

/// Fans of an [out][in] matrix or [out][in][height][width] kernel. Throws value_error for a vector,
/// which has no fans.
inline fans fans_of(const logical_layout& layout) {
  if (layout.dims < 2) {
    PUFFERFISH_THROW(value_error("init: a parameter " + to_string(layout) +
                                 " has no fan in and fan out; it needs at least two dimensions"));
  }
  index_t field = 1;
  for (int d = 2; d < layout.dims; ++d) field *= layout.shape[static_cast<std::size_t>(d)];
  return {layout.shape[1] * field, layout.shape[0] * field};
}

/// Sets every element to `value`.
template <class T>
void constant(parameter<T>& p, double value) {
  std::fill_n(p.data(), p.size(), static_cast<T>(value));
}

/// Uniform in [low, high).
template <class T>
void uniform(parameter<T>& p, double low, double high, random_stream random) {
  fill_uniform(p.values(), low, high, random);
}

/// Normal with mean 0.
template <class T>
void normal(parameter<T>& p, double deviation, random_stream random) {
  fill_normal(p.values(), deviation, random);
}

/// Uniform in +-sqrt(6 / ((1 + a^2) fan_in)) (He, Zhang, Ren, Sun: "Delving deep into rectifiers",
/// ICCV 2015, for a leaky ReLU of slope a). The default a = sqrt(5) is that of PyTorch's layers:
/// +-1 / sqrt(fan_in). Throws value_error for a vector.
template <class T>
void kaiming_uniform(parameter<T>& p, random_stream random, double a = 2.23606797749978969641) {
  const auto fan = static_cast<double>(fans_of(p.layout()).in);
  const double bound = std::sqrt(6.0 / ((1.0 + a * a) * std::max(1.0, fan)));
  uniform(p, -bound, bound, random);
}

/// Normal with deviation sqrt(2 / fan_out) (ibid., for ReLU, keeping the size of gradients). Throws
/// value_error for a vector.
template <class T>
void kaiming_normal_fan_out(parameter<T>& p, random_stream random) {
  const auto fan = static_cast<double>(fans_of(p.layout()).out);
  normal(p, std::sqrt(2.0 / std::max(1.0, fan)), random);
}

/// Uniform in +-gain sqrt(6 / (fan_in + fan_out)) (Glorot, Bengio, AISTATS 2010, equation 16). Throws
/// value_error for a vector.
template <class T>
void xavier_uniform(parameter<T>& p, random_stream random, double gain = 1.0) {
  const fans f = fans_of(p.layout());
  const double bound = gain * std::sqrt(6.0 / std::max(1.0, static_cast<double>(f.in + f.out)));
  uniform(p, -bound, bound, random);
}

}  // namespace init
PUFFERFISH_NAMESPACE_END
