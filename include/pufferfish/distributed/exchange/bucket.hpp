// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `gradient_bucket`: a range of the gradient arena that is exchanged at once.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/nn/parameter_store.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A range of the gradient arena: elements offset .. offset + size - 1, the gradients of the parameters
/// first .. first + count - 1. `first` is the position in parameter_store::parameters().
struct gradient_bucket {
  index_t offset = 0;  ///< first element, from the start of the arena
  index_t size = 0;    ///< number of elements
  int first = 0;       ///< number of the first parameter
  int count = 0;       ///< number of parameters
  friend bool operator==(const gradient_bucket&, const gradient_bucket&) = default;
};

/// Largest sizes of buckets, in bytes of the gradients' type. The first bucket is small, so that the exchange
/// starts early in the backward pass. A parameter larger than the limit is a bucket of its own.
struct bucket_limits {
  index_t first_bytes = index_t{1} << 20;  ///< limit of the first bucket: 1 MiB
  index_t bytes = index_t{4} << 20;        ///< limit of all other buckets: 4 MiB
  friend bool operator==(const bucket_limits&, const bucket_limits&) = default;
};

/// Cuts gradients of these sizes (numbers of elements, of `element_bytes` bytes each), which follow each
/// other without gaps, into buckets: every gradient is in exactly one bucket, the buckets cover all gradients
/// in order, and each has at least one. Throws value_error for a limit below 1. Local: ranks with equal sizes
/// and limits get equal buckets.
PUFFERFISH_COLD inline std::vector<gradient_bucket> cut_buckets(std::span<const index_t> sizes,
                                                                index_t element_bytes,
                                                                const bucket_limits& limits = {}) {
  if (limits.first_bytes < 1 || limits.bytes < 1) {
    detail::throw_error<value_error>(
        {"cut_buckets: limits of ", limits.first_bytes, " and ", limits.bytes, " bytes; at least 1"});
  }
  std::vector<gradient_bucket> buckets;
  index_t offset = 0;
  int number = 0;
  for (const index_t size : sizes) {
    const index_t limit = (buckets.size() <= 1 ? limits.first_bytes : limits.bytes) / element_bytes;
    if (buckets.empty() || buckets.back().size + size > limit) buckets.push_back({offset, 0, number, 0});
    buckets.back().size += size;
    ++buckets.back().count;
    offset += size;
    ++number;
  }
  return buckets;
}

/// The buckets of a store's gradients, cut at parameter boundaries. The arena has the order in which a
/// backward pass completes gradients, so buckets become ready one after the other. A store without parameters
/// has no buckets. Throws value_error for a limit below 1.
///
/// \code
///   const bucket_limits limits{.first_bytes = 1 << 20, .bytes = 4 << 20};
///   for (const gradient_bucket& b : cut_buckets(net.store(), limits)) sgd.step_range(ctx, b.offset, b.size);
/// \endcode
template <class T>
std::vector<gradient_bucket> cut_buckets(const parameter_store<T>& store, const bucket_limits& limits = {}) {
  std::vector<index_t> sizes;
  for (const auto& entry : store.parameters()) sizes.push_back(entry.thing->size());
  return cut_buckets(sizes, static_cast<index_t>(sizeof(T)), limits);
}

namespace detail {

/// Returns the elements of a bucket in an arena.
template <class T>
std::span<T> span_of(std::span<T> arena, const gradient_bucket& bucket) {
  return arena.subspan(static_cast<std::size_t>(bucket.offset), static_cast<std::size_t>(bucket.size));
}

}  // namespace detail

/// Text of the buckets, in lines "offset size first count", for records and to compare ranks.
inline std::string to_text(const std::vector<gradient_bucket>& buckets) {
  std::string text;
  for (const gradient_bucket& b : buckets) {
    text += detail::message({"bucket of ", b.size, " gradients from ", b.offset, ", ", b.count,
                             " parameters from ", b.first, "\n"});
  }
  return text;
}

PUFFERFISH_NAMESPACE_END
