// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Clipping a gradient by its global norm.

#include <cmath>
#include <span>
#include <string>

#include <pufferfish/core/number_text.hpp>
#include <pufferfish/core/separate.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// sqrt(sum of squares), accumulated in double in an order that does not depend on the number of threads. Not
/// finite if an element is not finite or, for double, has a magnitude above about 1e154.
/// The gradients must not change during the call. A network's are net.store().gradients(); a distributed run
/// clips after the exchange, so that all ranks scale alike.
template <class T>
double gradient_norm(context<device::cpu>& ctx, std::span<const T> gradients) {
  constexpr index_t piece = 16384;
  const auto size = static_cast<index_t>(gradients.size());
  const index_t pieces = (size + piece - 1) / piece;
  scratch_frame frame(ctx.scratch());
  double* sums = frame.take<double>(pieces);
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, sum_of_squares<T>);
  ctx.parallel_for(pieces, [&](index_t task, int) {
    const index_t begin = task * piece;
    sums[task] = kernel(gradients.data() + begin, std::min(size, begin + piece) - begin);
  });
  double sum = 0.0;
  for (index_t task = 0; task < pieces; ++task) sum += sums[task];
  return std::sqrt(sum);
}
PUFFERFISH_SEPARATE_FUNCTION(train, gradient_norm);

/// Result of clip_gradient_norm.
struct clip_result {
  double norm = 0.0;     ///< before clipping
  bool finite = true;    ///< false: the gradient holds a NaN or infinity and was left as it is
  bool clipped = false;  ///< the gradient was scaled
};

/// Scales the gradient by max_norm / norm if its norm is above max_norm. Gradients of an earlier step, of
/// parameters that layers have stopped writing, count in the norm unless an exchange has zeroed them (see
/// parameter). A gradient that is not finite is reported and left unchanged, because scaling would only
/// spread the error. Throws value_error unless max_norm > 0.
///
/// \code
/// const clip_result clipped = clip_gradient_norm<float>(ctx, net.store().gradients(), 0.25);
/// if (clipped.finite) optimizer.step(ctx, lr);
/// \endcode
template <class T>
clip_result clip_gradient_norm(context<device::cpu>& ctx, std::span<T> gradients, double max_norm) {
  if (!(max_norm > 0.0)) {
    PUFFERFISH_THROW(value_error("clip_gradient_norm: maximal norm " + detail::shortest_number(max_norm) +
                                 " is not positive"));
  }
  clip_result result;
  result.norm = gradient_norm<T>(ctx, gradients);
  result.finite = std::isfinite(result.norm);
  result.clipped = result.finite && result.norm > max_norm;
  if (!result.clipped) return result;
  const T scale = static_cast<T>(max_norm / result.norm);
  T* values = gradients.data();
  const auto kernel = PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, scale<T>);
  ops::for_chunks(ctx, static_cast<index_t>(gradients.size()), [=](index_t begin, index_t end) {
    kernel(scale, values + begin, values + begin, end - begin);
  });
  return result;
}
PUFFERFISH_SEPARATE_FUNCTION(train, clip_gradient_norm);

PUFFERFISH_NAMESPACE_END
