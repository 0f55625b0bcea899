// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `scale_sparsity`: a term of the loss that makes weights of batch norms small, so that their channels can
/// be removed.

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/nn/parameter_store.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Adds the gradient of s sum |gamma| over the weights gamma of all batch norms, s sign(gamma) with sign(0) =
/// 0, to the gradients of a store (network slimming: Liu et al., ICCV 2017; Early-Bird tickets use s = 1e-4).
/// Call add() in every step after the exchange and before the optimizer; ranks need no communication. A
/// training_run does so with run_options::scale_sparsity.
///
/// The store must outlive the object. One thread at a time.
///
/// \code
/// scale_sparsity<float> sparsity(net.store(), 1e-4);
/// net.backward(ctx, dy.view());
/// sparsity.add();
/// sgd.step(ctx, 0.1);
/// \endcode
template <class T>
class scale_sparsity {
 public:
  /// A batch norm is recognized by its buffer running_mean. Throws value_error unless s >= 0 and finite.
  scale_sparsity(parameter_store<T>& store, double s)
      : store_(&store), layout_(store.shared_generation()), strength_(s) {
    if (!(s >= 0.0) || !std::isfinite(s)) {
      detail::throw_error<value_error>({"scale_sparsity: strength ", s, " is not in 0 .. infinity"});
    }
    for (const auto& entry : store.parameters()) {
      const std::string weight = "weight";
      if (entry.thing->role() != parameter_role::norm || !entry.name.ends_with(weight)) continue;
      const std::string mean = entry.name.substr(0, entry.name.size() - weight.size()) + "running_mean";
      const auto& buffers = store.buffer_entries();
      if (std::any_of(buffers.begin(), buffers.end(), [&](const auto& one) { return one.name == mean; })) {
        scales_.push_back({entry.offset, entry.thing->size()});
      }
    }
  }

  double strength() const { return strength_; }
  /// Number of scales gamma.
  index_t size() const {
    index_t sum = 0;
    for (const range& one : scales_) sum += one.size;
    return sum;
  }

  /// The term of the loss: s sum |gamma| over all batch norm weights gamma.
  double penalty() const {
    double sum = 0.0;
    for (const range& one : scales_) {
      for (index_t i = 0; i < one.size; ++i) {
        sum += std::abs(static_cast<double>(value_at(one.offset + i)));
      }
    }
    return strength_ * sum;
  }

  /// Adds s sign(gamma) to the gradients of all batch norm weights gamma. Throws state_error if the network's
  /// parameters have moved to new memory or are on a device.
  void add() {
    require_current();
    add(0, static_cast<index_t>(store_->gradients().size()));
  }
  /// Adds s sign(gamma) for the batch norms whose weights begin in elements offset .. offset + size - 1 of
  /// the arena. Throws the errors of add().
  void add(index_t offset, index_t size) {
    require_current();
    const std::span<T> gradients = store_->gradients();
    const T s = static_cast<T>(strength_);
    for (const range& one : scales_) {
      if (one.offset < offset || one.offset >= offset + size) continue;
      for (index_t i = one.offset; i < one.offset + one.size; ++i) {
        const T gamma = value_at(i);
        gradients[static_cast<std::size_t>(i)] += gamma > T(0) ? s : gamma < T(0) ? -s : T(0);
      }
    }
  }

 private:
  struct range {
    index_t offset, size;
  };
  // Throws the state_error of add().
  void require_current() const {
    if (layout_.changed() || !store_->on_host()) {
      PUFFERFISH_THROW(state_error("scale_sparsity: the network has new arenas, or is on a device"));
    }
  }
  T value_at(index_t i) const { return store_->values()[static_cast<std::size_t>(i)]; }

  parameter_store<T>* store_;
  detail::layout_watch layout_;
  double strength_;
  std::vector<range> scales_;
};

PUFFERFISH_NAMESPACE_END
