// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Convolutions of 16-bit numbers: instances of the library's kernels that it does not bring itself.

#include <pufferfish/gpu/kernels/low_rank_conv.cuh>

PUFFERFISH_KERNELS_BEGIN

#define PUFFERFISH_INSTANTIATE(T)                                                                            \
  template void conv_forward<T>(cudaStream_t, const conv_geometry&, const conv_plan&, const T*, const T*,    \
                                const T*, T*, float*);                                                       \
  template void conv_backward_input<T>(cudaStream_t, const conv_geometry&, const conv_plan&, const T*,       \
                                       const T*, T*, bool, float*);                                          \
  template void conv_backward_weight<T>(cudaStream_t, const conv_geometry&, const conv_plan&, const T*,      \
                                        const T*, T*, bool, float*);                                         \
  template void low_rank_conv_forward<T>(cudaStream_t, const conv_geometry&, const low_rank_plan&, const T*, \
                                         const T*, const T*, int, const T*, T*, T*);                         \
  template void low_rank_conv_backward_up<T>(cudaStream_t, const low_rank_plan&, index_t, int, int,          \
                                             const T*, const T*, const T*, T*, bool, T*, float*);
PUFFERFISH_INSTANTIATE(__nv_bfloat16)
PUFFERFISH_INSTANTIATE(__half)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
