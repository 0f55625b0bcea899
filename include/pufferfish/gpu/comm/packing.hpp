// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the elements of each bucket that a compressor with pack() sends, gathered on the device.

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/gpu/kernels/copy/elements.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/gpu/runtime/memory.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// Packs the elements of gradient buckets that are sent into one array in device memory, one bucket after the
/// other. Calls submit their work to a stream, and a graph may capture them.
template <class T>
class packed_buckets {
 public:
  /// places[b] lists the positions, in bucket b, of the elements that are packed. Allocates 4 + sizeof(T)
  /// bytes for each packed element on the current device. Throws backend_error.
  explicit packed_buckets(const std::vector<std::vector<std::int32_t>>& places) {
    std::vector<std::int32_t> all;
    for (const std::vector<std::int32_t>& of_bucket : places) {
      firsts_.push_back(static_cast<index_t>(all.size()));
      all.insert(all.end(), of_bucket.begin(), of_bucket.end());
    }
    firsts_.push_back(static_cast<index_t>(all.size()));
    places_ = memory_block<std::int32_t>(device_memory(), size(), uninitialized);
    places_.from_host(all);
    values_ = memory_block<T>(device_memory(), size(), uninitialized);
  }

  /// Number of packed elements of all buckets.
  index_t size() const { return firsts_.back(); }
  /// Number of the first packed element of bucket b among all packed elements.
  index_t first(std::size_t b) const { return firsts_[b]; }
  /// Number of packed elements of bucket b.
  index_t count(std::size_t b) const { return firsts_[b + 1] - firsts_[b]; }

  /// The packed elements of bucket b.
  std::span<T> values(std::size_t b) {
    return values_.span().subspan(static_cast<std::size_t>(first(b)), static_cast<std::size_t>(count(b)));
  }
  /// Copies the elements of bucket b to values(b), and returns them.
  std::span<T> gather(std::size_t b, const T* bucket, cudaStream_t stream) {
    kernels::gather_elements(stream, bucket, places_.data() + first(b), values(b).data(), count(b));
    return values(b);
  }
  /// Copies values(b) back, and sets all other elements of the bucket to +0.
  void scatter(std::size_t b, std::span<T> bucket, cudaStream_t stream) {
    if (bucket.empty()) return;
    check(cudaMemsetAsync(bucket.data(), 0, bucket.size_bytes(), stream), "cudaMemsetAsync of gradients");
    kernels::scatter_elements(stream, std::as_const(values_).data() + first(b), places_.data() + first(b),
                              bucket.data(), count(b));
  }

 private:
  std::vector<index_t> firsts_;
  memory_block<std::int32_t> places_;
  memory_block<T> values_;
};

}  // namespace gpu::detail
PUFFERFISH_NAMESPACE_END
