// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `log_sum_exp`: the logarithm of the sum of the exponentials of each row of logits. A logit minus this
/// number is a log probability. No softmax of the whole row is needed when only a few log probabilities are
/// wanted:
///
/// \code
/// tensor<double, 1> shift({rows});
/// ops::log_sum_exp<float>(ctx, logits, shift.flat());
/// const double log_probability = logits(m, token) - shift(m);
/// \endcode

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include <pufferfish/core/message.hpp>
#include <pufferfish/ops/loss/softmax_cross_entropy.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace reference {

/// result[m] = log sum_k exp(logits(m, k)), computed in double. result has one element per row.
template <class T>
void log_sum_exp(const tensor_view<const T, 2>& logits, std::span<double> result) {
  for (index_t m = 0; m < logits.extent(0); ++m) {
    double largest = -std::numeric_limits<double>::infinity(), sum = 0.0;
    for (index_t k = 0; k < logits.extent(1); ++k) {
      largest = std::max(largest, static_cast<double>(logits(m, k)));
    }
    for (index_t k = 0; k < logits.extent(1); ++k) {
      const double shifted = static_cast<double>(logits(m, k)) - largest;
      sum += std::isinf(largest) ? 0.0 : std::exp(shifted);
    }
    result[static_cast<std::size_t>(m)] = largest + std::log(sum);
  }
}

}  // namespace reference

namespace detail {

/// The logarithm of the sum of the exponentials of one row: largest + log sum_k exp(z_k - largest). -infinity
/// if all elements are -infinity.
template <class T>
double row_log_sum_exp(const T* z, index_t count) {
  using P = parameter_t<T>;
  constexpr P nothing = -std::numeric_limits<P>::infinity();
  if (std::all_of(z, z + count, [](T value) { return value == nothing; })) {
    return -std::numeric_limits<double>::infinity();
  }
  const isa form = widest_isa();
  const P largest = PUFFERFISH_KERNEL(form, softmax, row_maximum<T>)(z, count);
  double sum = 0.0, shifted = 0.0;
  PUFFERFISH_KERNEL(form, softmax, row_exponentials<T>)
  (z, count, largest, static_cast<P*>(nullptr), &sum, &shifted);
  return static_cast<double>(largest) + std::log(sum);
}

/// Throws shape_error unless there is one result per row of logits.
inline void check_log_sum_exp(const extents<2>& logits, std::size_t results) {
  if (static_cast<index_t>(results) != logits[0]) {
    pufferfish::detail::throw_error<shape_error>({"log_sum_exp: ", results, " results for logits ", logits});
  }
}

}  // namespace detail

/// result[m] = log sum_k exp(logits(m, k)). logits: M x K, dense (on a device: rows dense, any row stride);
/// result: M values; both in memory of the context's device. Finite logits of any size are safe. A logit of
/// -infinity adds nothing; a row of only such logits gives -infinity, as does K = 0. A NaN or +infinity gives
/// a NaN. On the CPU, exponentials are in parameter_t<T>, summed in it over short runs, then in double.
/// Throws shape_error if result does not have M values, or the logits are not dense.
template <class T, class Device>
void log_sum_exp(context<Device>& ctx, const tensor_view<const T, 2>& logits, std::span<double> result) {
  detail::check_log_sum_exp(logits.shape(), result.size());
  if constexpr (!is_cpu<Device>) {
    loss_ops<Device>::log_sum_exp(ctx, logits, result);
  } else {
    const index_t rows = logits.extent(0), count = logits.extent(1);
    const T* const z = logits.flat().data();
    for_row_chunks(ctx, rows, 8 * count, [&](index_t begin, index_t end) {
      for (index_t m = begin; m < end; ++m) {
        result[static_cast<std::size_t>(m)] = detail::row_log_sum_exp(z + m * count, count);
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, log_sum_exp);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
