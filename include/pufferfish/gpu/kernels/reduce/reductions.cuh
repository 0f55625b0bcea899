// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of reductions.hpp.

#include <pufferfish/gpu/kernels/reduce/columns.cuh>
#include <pufferfish/gpu/kernels/reduce/reductions.hpp>

PUFFERFISH_KERNELS_BEGIN

/// The last step of column_sums: stores one sum, or adds it to the old value, rounded once.
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
                 const column_workspace& work, accumulate_t<T>* sums) {
  const launch_site site(stream, "column_sums");
  with_width<T>(whole_vectors<T>(columns, x) && whole_vectors<T>(row_stride), [&](auto width) {
    sum_columns<column_sum_state<1, 1>>(site, column_sum_task<T, width>{x, row_stride}, rows, columns, work,
                                        column_sum_finish<T>{sums, add});
  });
}

#define PUFFERFISH_INSTANTIATE(T)                                                       \
  template void column_sums<T>(cudaStream_t, const T*, index_t, index_t, index_t, bool, \
                               const column_workspace&, accumulate_t<T>*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
