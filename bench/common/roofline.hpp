// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The least time of a convolution on this machine: its arithmetic at the measured peak, or the bytes that
/// must be moved at the measured bandwidth, whichever is longer. Multiply-adds with padding do not count,
/// because a good kernel skips them.

#include <algorithm>

#include <pufferfish/ops/conv/conv_shape.hpp>

#include "bandwidth.hpp"

namespace bench {

using pufferfish::conv_shape;
using pufferfish::extents;
using pufferfish::index_t;

/// Floating-point operations (a multiply-add is two) and bytes that must be read or written at least once.
struct work {
  double operations = 0;
  double bytes = 0;
  friend work operator+(const work& a, const work& b) {
    return {a.operations + b.operations, a.bytes + b.bytes};
  }

  /// `peak` in GFLOP/s. The bandwidth of small work is that of the last cache.
  double least_seconds(double peak, const bandwidth& b) const {
    const double bytes_a_second = bytes < 0.5 * last_cache_bytes() ? b.cache : b.memory;
    return std::max(operations / (peak * 1e9), bytes / bytes_a_second);
  }
};

/// Number of pairs (output position, tap) in one direction whose pixel is not padding.
inline index_t real_taps(index_t input, index_t output, index_t kernel, index_t stride, index_t padding,
                         index_t dilation) {
  index_t count = 0;
  for (index_t o = 0; o < output; ++o) {
    for (index_t k = 0; k < kernel; ++k) {
      const index_t i = o * stride - padding + k * dilation;
      count += i >= 0 && i < input ? 1 : 0;
    }
  }
  return count;
}

/// The work of one convolution's passes, dense (rank 0) or as two factors of rank `rank` in each group.
class conv_work {
 public:
  conv_work(const conv_shape& s, index_t rank, const extents<4>& input) : low_rank_(rank > 0) {
    const extents<4> output = s.output(input, "conv_work");
    const index_t taps =
        real_taps(input[1], output[1], s.kernel.height, s.stride.height, s.padding.height,
                  s.dilation.height) *
        real_taps(input[2], output[2], s.kernel.width, s.stride.width, s.padding.width, s.dilation.width);
    const auto bytes = [](index_t elements) { return 4.0 * static_cast<double>(elements); };
    const index_t width = low_rank_ ? s.groups * rank : s.out_channels;
    const index_t pixels = input[0] * output[1] * output[2];
    first_ = 2.0 * static_cast<double>(input[0] * taps * s.group_inputs()) * static_cast<double>(width);
    second_ =
        low_rank_ ? 2.0 * static_cast<double>(pixels * rank) * static_cast<double>(s.out_channels) : 0.0;
    x_ = bytes(pufferfish::volume<4>(input));
    y_ = bytes(pufferfish::volume<4>(output));
    weights_ = bytes(width * s.patch() + (low_rank_ ? rank * s.out_channels : 0));
  }

  work forward() const { return {first_ + second_, x_ + y_ + weights_}; }
  /// Gradients of all weights. For factors that includes the gradient of the rank-channel activation.
  work grad_weight() const { return {first_ + 2 * second_, x_ + y_ + 2 * weights_}; }
  /// The gradient of the input; for factors: its additional cost after grad_weight.
  work grad_input() const {
    if (low_rank_) return {first_, x_};
    return {first_, x_ + y_ + weights_};
  }
  /// Both passes together.
  work backward() const { return {2 * (first_ + second_), 2 * x_ + y_ + 2 * weights_}; }

 private:
  bool low_rank_;
  double first_ = 0, second_ = 0;  // operations of the (first) convolution and of the second one
  double x_ = 0, y_ = 0, weights_ = 0;
};

}  // namespace bench
