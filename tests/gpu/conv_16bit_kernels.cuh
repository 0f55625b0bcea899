// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Convolutions of 16-bit numbers: instances of the library's kernels that it does not bring itself.

#include <pufferfish/gpu/kernels/low_rank_conv.cuh>

PUFFERFISH_KERNELS_BEGIN

template void conv_forward<__nv_bfloat16>(cudaStream_t, const conv_geometry&, const conv_plan&,
                                          const __nv_bfloat16*, const __nv_bfloat16*, const __nv_bfloat16*,
                                          __nv_bfloat16*, float*);
template void conv_backward_input<__nv_bfloat16>(cudaStream_t, const conv_geometry&, const conv_plan&,
                                                 const __nv_bfloat16*, const __nv_bfloat16*, __nv_bfloat16*,
                                                 bool, float*);
template void conv_backward_weight<__nv_bfloat16>(cudaStream_t, const conv_geometry&, const conv_plan&,
                                                  const __nv_bfloat16*, const __nv_bfloat16*, __nv_bfloat16*,
                                                  bool, float*);
template void low_rank_conv_forward<__nv_bfloat16>(cudaStream_t, const conv_geometry&, const low_rank_plan&,
                                                   const __nv_bfloat16*, const __nv_bfloat16*,
                                                   const __nv_bfloat16*, int, const __nv_bfloat16*,
                                                   __nv_bfloat16*, __nv_bfloat16*);
template void low_rank_conv_backward_up<__nv_bfloat16>(cudaStream_t, const low_rank_plan&, index_t, int, int,
                                                       const __nv_bfloat16*, const __nv_bfloat16*,
                                                       const __nv_bfloat16*, __nv_bfloat16*, bool,
                                                       __nv_bfloat16*, float*);

PUFFERFISH_KERNELS_END
