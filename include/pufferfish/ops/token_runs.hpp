// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `token_runs`: where the tokens of sequences lie among rows.

#include <pufferfish/ops/rows.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Where the tokens of each sequence lie: rows first[s] .. first[s] + count[s] - 1. A view of arrays in the
/// memory of the device that works on the rows.
struct token_runs {
  index_t sequences = 0;
  const index_t* first = nullptr;
  const index_t* count = nullptr;
  /// Rows of all sequences together, for who cannot read the counts; -1: not told.
  index_t total = -1;

  index_t most() const {
    index_t result = 0;
    for (index_t s = 0; s < sequences; ++s) result = std::max(result, count[s]);
    return result;
  }
};

namespace ops {

/// Runs of sequences of one length, one after the other: first[s] = s length, and count[s] = lengths[s], or
/// `length` where `lengths` is nullptr. Arrays in the memory of the context's device.
inline token_runs make_runs(context<device::cpu>&, index_t sequences, index_t length, const index_t* lengths,
                            index_t* first, index_t* count) {
  for (index_t s = 0; s < sequences; ++s) {
    first[s] = s * length;
    count[s] = lengths == nullptr ? length : lengths[s];
  }
  return {sequences, first, count, lengths == nullptr ? sequences * length : -1};
}
/// The device's form: <pufferfish/gpu.hpp>.
token_runs make_runs(context<device::gpu>& ctx, index_t sequences, index_t length, const index_t* lengths,
                     index_t* first, index_t* count);

/// Zeros in the rows of no run: in front of an operation that leaves those alone. What runs have may be
/// cleared, too.
template <class T>
void clear_rows_outside(context<device::cpu>& ctx, const token_runs& runs, const tensor_view<T, 2>& x) {
  index_t sum = 0;
  for (index_t s = 0; s < runs.sequences; ++s) sum += runs.count[s];
  if (sum != x.extent(0)) clear_rows(ctx, x);
}
/// The device's form: <pufferfish/gpu.hpp>. Costs nothing where runs.total says that every row has one.
template <class T>
void clear_rows_outside(context<device::gpu>& ctx, const token_runs& runs, const tensor_view<T, 2>& x);

}  // namespace ops
PUFFERFISH_NAMESPACE_END
