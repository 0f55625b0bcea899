// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `micro_batches`: a step's gradient from several backward passes.

#include <cstdint>
#include <string>

#include <pufferfish/nn/parameter_store.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// While the object exists, the gradients of `count` backward passes add up: the first pass of a step
/// overwrites, the others add, and a gradient is ready (for the exchange) in the last one.
///
///     micro_batches parts(net.store(), 4);
///     exchange.begin(ctx);                       // or later, up to before the last backward pass
///     for (...) { forward; backward; }           // four times
///     exchange.finish(ctx);
///
/// The sum is not divided: scale each loss gradient by the micro-batch's share of the batch. A step with more
/// or fewer passes makes the count wrong; `restart` begins a step anew. The exchange's begin throws
/// state_error unless every parameter has had the same whole number of passes. After the object's destruction
/// each backward pass is a step again.
/// Objects for one store may be nested; their counts multiply. They must then be destroyed in reverse order.
/// The object is local, but all ranks must have the same number of passes per step. A new layout of the store
/// (a switch to low rank) resets the number of passes to 1.
template <class T>
class micro_batches {
 public:
  /// The object does nothing at its end if the store is gone. Throws value_error unless count >= 1.
  micro_batches(parameter_store<T>& store, int count)
      : store_(&store), layout_(store.shared_generation()), before_(store.passes()) {
    if (count < 1) {
      PUFFERFISH_THROW(
          value_error("micro_batches: " + std::to_string(count) + " backward passes a step; at least 1"));
    }
    store.set_passes(before_ * count);
  }
  micro_batches(const micro_batches&) = delete;
  micro_batches& operator=(const micro_batches&) = delete;
  ~micro_batches() {
    // A store with a new layout has reset its counts, or is gone.
    if (!layout_.changed()) store_->set_passes(before_);
  }

  /// Forgets the passes of a step that will not be finished.
  void restart() {
    for (const auto& entry : store_->parameters()) entry.thing->restart();
  }

 private:
  parameter_store<T>* store_;
  detail::layout_watch layout_;
  int before_;  // passes per step without this object
};

PUFFERFISH_NAMESPACE_END
