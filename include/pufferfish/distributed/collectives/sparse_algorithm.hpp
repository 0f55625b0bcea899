// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `sparse_algorithm`: how sparse streams are added over ranks, and the choice by their expected union.

#include <cmath>
#include <cstddef>
#include <cstdint>

#include <pufferfish/distributed/collectives/sparse_stream.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Algorithm that adds sparse streams of n elements, with k entries per rank, over p ranks.
enum class sparse_algorithm {
  automatic,           ///< one of the others, by n, k and p
  recursive_doubling,  ///< log2 p messages of whole streams
  split,               ///< parts go to the ranks that own them, which send the sums to all ranks
  split_dense,         ///< as `split`, but the sums are sent dense: n / p elements per rank
};

/// Name of the algorithm, for reports.
constexpr const char* to_string(sparse_algorithm algorithm) {
  return algorithm == sparse_algorithm::automatic            ? "automatic"
         : algorithm == sparse_algorithm::recursive_doubling ? "recursive doubling"
         : algorithm == sparse_algorithm::split              ? "split"
                                                             : "split, dense";
}

/// Options of sparse_all_reduce; the same on all ranks.
struct sparse_all_reduce_options {
  sparse_algorithm algorithm = sparse_algorithm::automatic;  ///< algorithm, or the choice
  /// automatic: split_dense if the expected number of entries of the sum is above dense_factor delta.
  double dense_factor = 1.0;
  /// automatic: else recursive doubling if the entries of all ranks together have at most this many bytes.
  std::size_t most_doubling_bytes = std::size_t{64} << 10;
};

/// Expected number of elements that at least one of `ranks` ranks has, if each has `count` of `length`
/// elements, drawn independently: n (1 - (1 - k / n)^p).
/// Requires 0 <= count <= length.
inline double expected_union(index_t length, index_t count, int ranks) {
  if (length == 0) return 0.0;
  const double missing = 1.0 - static_cast<double>(count) / static_cast<double>(length);
  return static_cast<double>(length) * (1.0 - std::pow(missing, ranks));
}

/// Chooses the algorithm for a sum of streams of `length` elements with at most `count` entries per rank:
/// `options.algorithm` if it is not automatic. Else, with delta = sparse_stream<T>(length).most_entries():
/// split_dense if expected_union(length, count, ranks) > dense_factor delta; recursive_doubling if count
/// ranks (sizeof(int32) + sizeof(T)) <= most_doubling_bytes; split otherwise. After Renggli et al., SparCML
/// (SC 2019).
template <class T>
sparse_algorithm choose_sparse_algorithm(index_t length, index_t count, int ranks,
                                         const sparse_all_reduce_options& options) {
  if (options.algorithm != sparse_algorithm::automatic) return options.algorithm;
  const auto delta = static_cast<double>(sparse_stream<T>(length).most_entries());
  if (expected_union(length, count, ranks) > options.dense_factor * delta)
    return sparse_algorithm::split_dense;
  const double bytes = static_cast<double>(count) * static_cast<double>(ranks) *
                       static_cast<double>(sizeof(std::int32_t) + sizeof(T));
  return bytes <= static_cast<double>(options.most_doubling_bytes) ? sparse_algorithm::recursive_doubling
                                                                   : sparse_algorithm::split;
}

PUFFERFISH_NAMESPACE_END
