// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of reductions.hpp.

#include <pufferfish/gpu/kernels/reduce/columns.cuh>
#include <pufferfish/gpu/kernels/reduce/reductions.hpp>

PUFFERFISH_KERNELS_BEGIN

/// The second step of column_sums: stores one sum, or adds it to the old value, rounded once.
template <class T>
struct column_sum_finish {
  accumulate_t<T>* sums;
  bool add;
  __device__ void operator()(index_t column, const column_sum_state<1, 1>& s) const {
    store_sum(s.sums[0][0], add, sums[column]);
  }
};

template <class T>
void column_sums(cudaStream_t stream, const T* x, index_t row_stride, index_t rows, index_t columns, bool add,
                 double* scratch, accumulate_t<T>* sums) {
  constexpr int wide = vector_width<T>;
  const column_sum_finish<T> finish{sums, add};
  if (columns % wide == 0 && row_stride % wide == 0 && aligned16(x)) {
    const column_sum_task<T, wide> task{x, row_stride};
    return sum_columns<column_sum_state<1, 1>>(stream, task, rows, columns, scratch, finish);
  }
  const column_sum_task<T, 1> task{x, row_stride};
  sum_columns<column_sum_state<1, 1>>(stream, task, rows, columns, scratch, finish);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                \
  template void column_sums<T>(cudaStream_t, const T*, index_t, index_t, index_t, bool, double*, \
                               accumulate_t<T>*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
