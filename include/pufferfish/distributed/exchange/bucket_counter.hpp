// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: finds out which gradient buckets are complete during a backward pass.

#include <cstddef>
#include <vector>

#include <pufferfish/distributed/exchange/bucket.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Counts the complete gradients of each bucket of a store during a step. Buckets are exchanged in the order
/// of the arena: a bucket that is complete early is exchanged after the buckets before it.
///
///     bucket_counter<float> counter(store, buckets);
///     counter.restart();                               // each step
///     const std::size_t ready = counter.written(&parameter, parameter_id);  // each gradient
///     // buckets 0 .. ready - 1 may be exchanged
template <class T>
class bucket_counter {
 public:
  /// `buckets`: those of cut_buckets. Store and buckets must outlive the object, and the store must keep its
  /// layout while the object is used.
  bucket_counter(const parameter_store<T>& store, const std::vector<gradient_bucket>& buckets)
      : store_(&store), buckets_(&buckets), missing_(buckets.size()), ready_(store.parameters().size()) {
    bucket_of_.reserve(store.parameters().size());
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      bucket_of_.insert(bucket_of_.end(), static_cast<std::size_t>(buckets[b].count), b);
    }
  }

  /// Starts a step, in which no gradient is complete yet. Forgets the writes of a step that was abandoned. If
  /// a step has several passes, some may have been done already; throws state_error, naming the parameter,
  /// unless all parameters have had the same whole number of passes.
  void restart() {
    for (const auto& entry : store_->parameters()) {
      store_->passes() == 1 ? entry.thing->restart() : require_whole_passes(entry);
    }
    for (std::size_t b = 0; b < missing_.size(); ++b) missing_[b] = (*buckets_)[b].count;
    ready_.assign(ready_.size(), false);
    complete_ = 0;
  }

  /// Notes that the gradient of a parameter with this address and id is complete, and returns how many
  /// buckets from the first on are complete. Ignores parameters of other stores or of none. Throws
  /// state_error, naming the parameter, if its gradient was complete already: a second pass has overwritten
  /// it.
  std::size_t written(const void* parameter, int id) {
    const auto number = static_cast<std::size_t>(id);  // -1 becomes larger than every number
    if (number >= ready_.size() || store_->parameters()[number].thing != parameter) return complete_;
    if (ready_[number]) {
      throw_error<state_error>({"gradient_exchange: a second backward pass has overwritten the gradient of ",
                                store_->parameters()[number].name,
                                " between begin and finish; for several passes per step use micro_batches"});
    }
    ready_[number] = true;
    --missing_[bucket_of_[number]];
    while (complete_ < missing_.size() && missing_[complete_] <= 0) ++complete_;
    return complete_;
  }

 private:
  // Throws state_error unless the parameter has had as many passes as the first one, all of them whole.
  template <class Entry>
  void require_whole_passes(const Entry& entry) const {
    const auto& first = store_->parameters().front();
    const int writes = entry.thing->writes(), writers = entry.thing->writers();
    const int passes = first.thing->writes() / first.thing->writers();
    if (writes == passes * writers) return;
    throw_error<state_error>({"gradient_exchange: ", entry.name, " has had ", writes,
                              " writes of this step, where ", first.name, " has had ", passes, " of ",
                              store_->passes(), " passes with ", writers,
                              " each: a step was abandoned or has left out a parameter",
                              "; call micro_batches::restart before a step"});
  }

  const parameter_store<T>* store_;
  const std::vector<gradient_bucket>* buckets_;
  std::vector<std::size_t> bucket_of_;  // of each parameter
  std::vector<int> missing_;            // gradients of each bucket that are not ready
  std::vector<bool> ready_;             // of each parameter
  std::size_t complete_ = 0;            // complete buckets, from the first on
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
