// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: which buckets of a backward pass are complete.

#include <cstddef>
#include <vector>

#include <pufferfish/dist/bucket.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Buckets go in the order of the arena: one that is complete early waits for those before it.
class bucket_counter {
 public:
  template <class T>
  bucket_counter(const parameter_store<T>& store, const bucket_limits& limits)
      : buckets_(cut_buckets(store, limits)), missing_(buckets_.size()) {
    bucket_of_.reserve(store.parameters().size());
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      bucket_of_.insert(bucket_of_.end(), static_cast<std::size_t>(buckets_[b].count), b);
    }
  }

  const std::vector<gradient_bucket>& buckets() const { return buckets_; }
  std::size_t size() const { return buckets_.size(); }
  const gradient_bucket& operator[](std::size_t bucket) const { return buckets_[bucket]; }

  /// A backward pass begins: nothing is complete.
  void restart() {
    for (std::size_t b = 0; b < buckets_.size(); ++b) missing_[b] = buckets_[b].count;
    complete_ = 0;
  }

  /// A parameter's gradient is; returns how many buckets from the first on are complete then.
  std::size_t written(int parameter) {
    --missing_[bucket_of_[static_cast<std::size_t>(parameter)]];
    while (complete_ < buckets_.size() && missing_[complete_] <= 0) ++complete_;
    return complete_;
  }

 private:
  std::vector<gradient_bucket> buckets_;
  std::vector<std::size_t> bucket_of_;  // of each parameter
  std::vector<int> missing_;            // gradients of each bucket that are not ready
  std::size_t complete_ = 0;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
