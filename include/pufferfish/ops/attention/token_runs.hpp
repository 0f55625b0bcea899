// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `token_runs`: which rows of a matrix hold the tokens of each sequence. A run is the block of consecutive
/// rows of one sequence.
///
/// \code
/// std::vector<index_t> first(sequences), count(sequences);
/// const token_runs runs =
///     ops::make_runs(ctx, sequences, length, lengths.data(), first.data(), count.data());
/// ops::clear_rows_outside<float>(ctx, runs, y);  // then an operation that writes the rows of the runs
/// \endcode

#include <pufferfish/ops/copy/rows.hpp>
#include <pufferfish/ops/device_ops.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The run (block of consecutive rows) of each sequence: rows first[s] .. first[s] + count[s] - 1. The arrays
/// have `sequences` elements each and are not owned; they are in the memory of the device that works on the
/// rows. A sequence may have no tokens.
struct token_runs {
  index_t sequences = 0;
  const index_t* first = nullptr;
  const index_t* count = nullptr;
  /// Sum of the counts, for code that cannot read the array `count` (in device memory); -1: unknown.
  index_t total = -1;

  /// The largest count; 0 without sequences. Reads `count`: only for arrays in host memory.
  index_t most() const {
    index_t result = 0;
    for (index_t s = 0; s < sequences; ++s) result = std::max(result, count[s]);
    return result;
  }
};

namespace ops {

/// Makes the runs of sequences that start `length` rows apart: first[s] = s * length, and count[s] =
/// lengths[s], or `length` if `lengths` is nullptr. All arrays have `sequences` elements in the memory of the
/// context's device; `first` and `count` are overwritten and must outlive the result, which refers to them.
/// The lengths are not checked. `total` is known only without `lengths`.
template <class Device>
token_runs make_runs(context<Device>& ctx, index_t sequences, index_t length, const index_t* lengths,
                     index_t* first, index_t* count) {
  if constexpr (!is_cpu<Device>) {
    attention_ops<Device>::make_runs(ctx, sequences, length, lengths, first, count);
  } else {
    for (index_t s = 0; s < sequences; ++s) {
      first[s] = s * length;
      count[s] = lengths == nullptr ? length : lengths[s];
    }
  }
  return {sequences, first, count, lengths == nullptr ? sequences * length : -1};
}

/// Sets rows of x that belong to no run to zero. Call it before an operation that does not write these rows:
/// it may clear rows of runs, too. On the CPU, all of x is cleared unless the counts add up to its number of
/// rows, so runs must not share rows. A device clears exactly the rows of no run, and does nothing if
/// runs.total is the number of rows. x has contiguous rows.
template <class T, class Device>
void clear_rows_outside(context<Device>& ctx, const token_runs& runs, const tensor_view<T, 2>& x) {
  if constexpr (!is_cpu<Device>) {
    if (runs.total != x.extent(0)) attention_ops<Device>::clear_rows_outside(ctx, runs, x);
  } else {
    index_t sum = 0;
    for (index_t s = 0; s < runs.sequences; ++s) sum += runs.count[s];
    if (sum != x.extent(0)) clear_rows(ctx, x);
  }
}
PUFFERFISH_SEPARATE_OPERATION(sequence, clear_rows_outside);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
