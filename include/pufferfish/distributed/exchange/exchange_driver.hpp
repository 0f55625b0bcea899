// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: what gradient_exchange requires of a driver, the class that moves its gradients.

#include <pufferfish/distributed/exchange/host_driver.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Chooses the driver of a gradient_exchange: `type` is the class that moves gradients for a communicator and
/// a device. A specialization chooses another class. A driver has
/// these members, and those of gradient_exchange with the names plan, with_thread, payload_bytes, states,
/// set_epoch, set_rate, arrives_early and, if the static `on_device` is true, skip and can_be_captured:
///   driver(store, comm, options, compressor, failure)  Collective. The exchange owns `failure`. A replay,
///                     which fails after the call that captured it, keeps its failure there
///   option_lines()    text that must be equal on all ranks
///   start()           further checks and the start of threads, after the ranks have agreed. Collective
///   buckets()         the store's buckets (cut_buckets); the same object in every call
///   counts()          results of the steps (exchange_counts)
///   listens()         whether release and progress have anything to do
///   is_captured(ctx)  whether the work of the context is being captured
/// Calls of a step, in this order:
///   prepare(ctx, captured)  waits until the communicator may be used: the ranks then compare their steps
///   begin(ctx, captured)    not collective
///   release(b)              bucket b is complete; buckets in order, during the backward pass
///   progress(released)      after each gradient; `released` buckets have been released
///   zero_unwritten(ctx)     sets gradients that layers have stopped writing to zero, before the last release
///   finish(ctx, take)       makes the means and calls take(b) for each bucket, in order, as soon as
///                           deliver(ctx, b) may be called. Returns whether the step counts (true if it is
///                           captured); if not, it has not called take. take throws nothing
///   deliver(ctx, b)         called by take(b): later work of the context's queue reads the means of bucket b
///   count_times(exposed, updating)  milliseconds in finish without the call-backs, and in the call-backs
/// The destructor waits for all work that uses the driver.
template <class T, class Comm, class Device>
struct exchange_driver {
  using type = host_driver<T, Comm, Device>;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
