// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the parameters that the ranks of a rare_exchange have in common, and their optimizer.

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/distributed/compressor.hpp>
#include <pufferfish/distributed/rare_exchange_options.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Sum of squares, added in double in the order of the elements, so that the result does not depend on the
/// instruction set.
template <class T>
double squared_norm(std::span<const T> values) {
  double sum = 0.0;
  for (const T x : values) sum += static_cast<double>(x) * static_cast<double>(x);
  return sum;
}

/// The outer parameters theta and their momentum v, which all ranks of a rare_exchange have in common. The
/// outer step with the mean change D is v = mu v + D, theta = theta - rate (D + mu v) with Nesterov momentum,
/// or theta = theta - rate v without (Douillard et al., DiLoCo, arXiv:2311.08105). Spans called `values` are
/// parameters of this rank and have the length of the arena.
template <class T>
class outer_parameters {
 public:
  outer_parameters() = default;
  /// Starts with theta = values, v = 0. v is allocated only if options.outer_momentum is above 0.
  outer_parameters(std::span<const T> values, const rare_exchange_options& options)
      : rate_(static_cast<T>(options.outer_rate)),
        momentum_(static_cast<T>(options.outer_momentum)),
        nesterov_(options.nesterov),
        theta_(static_cast<index_t>(values.size())) {
    if (momentum_ > T(0)) velocity_ = aligned_buffer<T>(theta_.size());
    restart(values);
  }

  /// Sets theta = values, v = 0.
  void restart(std::span<const T> values) {
    std::ranges::copy(values, theta_.data());
    std::fill_n(velocity_.data(), velocity_.size(), T(0));
  }

  /// Computes to = theta - values for the elements of a fragment; `to` has the fragment's length.
  void subtract(context<device::cpu>& ctx, const gradient_bucket& fragment, std::span<const T> values,
                std::span<T> to) const {
    const index_t offset = fragment.offset;
    ops::for_chunks(ctx, fragment.size, [&, offset](index_t begin, index_t end) {
      const T *const theta = theta_.data() + offset, *const local = values.data() + offset;
      T* const change = to.data();
      for (index_t i = begin; i < end; ++i) change[i] = theta[i] - local[i];
    });
  }

  /// Makes the outer step of a fragment with the outer gradient `change`, which has the fragment's length and
  /// is overwritten. Then sets values = mixing values + (1 - mixing) theta for the fragment's elements.
  void step(context<device::cpu>& ctx, const gradient_bucket& fragment, std::span<T> change,
            std::span<T> values, double mixing) {
    const index_t offset = fragment.offset;
    ops::for_chunks(ctx, fragment.size, [&, offset](index_t begin, index_t end) {
      T* const gradient = change.data();
      if (velocity_.size() > 0) add_momentum(gradient, velocity_.data() + offset, begin, end);
      T *const theta = theta_.data() + offset, *const local = values.data() + offset;
      const T rate = rate_;
      for (index_t i = begin; i < end; ++i) theta[i] -= rate * gradient[i];
      mix(theta, local, begin, end, static_cast<T>(mixing));
    });
  }

  /// Sets values = theta for the elements of a fragment.
  void adopt(context<device::cpu>& ctx, const gradient_bucket& fragment, std::span<T> values) const {
    ops::copy_elements(ctx, theta_.data() + fragment.offset, values.data() + fragment.offset, fragment.size);
  }

  /// Views of theta ("outer.parameters") and, if there is one, of v ("outer.momentum"), for checkpoints.
  std::vector<compressor_state<T>> states() {
    std::vector<compressor_state<T>> all{{"outer.parameters", theta_.span(), false}};
    if (velocity_.size() > 0) all.push_back({"outer.momentum", velocity_.span(), false});
    return all;
  }
  /// Sum of the squares of theta.
  double squared_norm() const { return detail::squared_norm<T>(theta_.span()); }
  /// Digest of the outer parameters theta and their momentum v: d(theta) xor (2 d(v) + 1), in which equal
  /// digests of both do not cancel.
  std::uint64_t digest() const {
    return pufferfish::digest(theta_.span()) ^ (2 * pufferfish::digest(velocity_.span()) + 1);
  }

 private:
  // Computes v = mu v + D, then D = D + mu v with Nesterov momentum, else D = v; `gradient` is D, `velocity`
  // v.
  void add_momentum(T* gradient, T* velocity, index_t begin, index_t end) const {
    const T mu = momentum_;
    for (index_t i = begin; i < end; ++i) velocity[i] = mu * velocity[i] + gradient[i];
    if (!nesterov_) {
      std::copy(velocity + begin, velocity + end, gradient + begin);
      return;
    }
    for (index_t i = begin; i < end; ++i) gradient[i] += mu * velocity[i];
  }

  // Computes local = share local + (1 - share) theta; a copy if share is 0.
  static void mix(const T* theta, T* local, index_t begin, index_t end, T share) {
    if (share == T(0)) {
      std::copy(theta + begin, theta + end, local + begin);
      return;
    }
    for (index_t i = begin; i < end; ++i) local[i] = share * local[i] + (T(1) - share) * theta[i];
  }

  T rate_ = 1, momentum_ = 0;
  bool nesterov_ = false;
  aligned_buffer<T> theta_, velocity_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
