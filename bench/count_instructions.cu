// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The kernels of bf16, of convolutions and of attention, whose instructions bench/count_instructions counts,
// without their launchers:
//
//     nvcc -std=c++20 -O3 --extended-lambda --expt-relaxed-constexpr -arch=sm_90a -Iinclude -cubin \
//          bench/count_instructions.cu -o kernels.cubin
//     bench/count_instructions kernels.cubin --kernel "correlate|halo_weight"
//     bench/count_instructions kernels.cubin --kernel attention --outer
#define PUFFERFISH_DEVICE_TYPES(use)
#define PUFFERFISH_DEVICE_TYPES_16(use)
#include <pufferfish/gpu/kernels/attention/attention.cuh>
#include <pufferfish/gpu/kernels/conv/conv.cuh>
#include <pufferfish/gpu/kernels/conv/halo_conv.cuh>
#include <pufferfish/gpu/kernels/conv/halo_weight.cuh>
#include <pufferfish/gpu/kernels/conv/low_rank_conv.cuh>

PUFFERFISH_KERNELS_BEGIN

namespace counted {

using T = __nv_bfloat16;
template <int Rows, int Columns>
using block = conv_block<true, T, Rows, Columns, vector_width<T>>;
template <int Rows, int Rank>
using pair = low_rank_block<true, T, Rows, Rank, vector_width<T>>;

// The kernels of warp groups for ResNet-18: blocks of 8 x 8 pixels, then images of 4 x 4 pixels, then
// stride 2.
template <int Side, int Stride, bool Backward, int Kernel = 3>
using kind = halo_kind<Side, Stride, Backward, Kernel>;

template <class... P>
const void* address(void (*kernel)(P...)) {
  return reinterpret_cast<const void*>(kernel);
}

// Taking its address compiles a kernel.
__attribute__((used)) const void* kernels[] = {
    address(correlate<T, block<64, 64>, false>),
    address(correlate<T, block<128, 64>, false>),
    address(correlate<T, block<128, 128>, false>),
    address(correlate<T, block<64, 64>, true>),
    address(correlate<T, block<128, 64>, true>),
    address(correlate<T, block<128, 128>, true>),
    address(correlate_weight<T, block<64, 64>>),
    address(correlate_weight<T, block<128, 128>>),
    address(correlate_low_rank<T, pair<128, 16>>),
    address(correlate_low_rank<T, pair<128, 32>>),
    address(correlate_low_rank<T, pair<128, 64>>),
    address(attention_forward_kernel<T, tensor_block<T>>),
    address(attention_query_gradient_kernel<T, tensor_block<T>>),
    address(attention_key_gradient_kernel<T, tensor_block<T>>),
    address(correlate_halo<T, 64, 32, kind<8, 1, false>, false>),
    address(correlate_halo<T, 64, 32, kind<8, 1, true>, false>),
    address(correlate_halo<T, 16, 16, kind<4, 1, false>, false>),
    address(correlate_halo<T, 64, 16, kind<4, 1, true>, false>),
    address(correlate_halo<T, 32, 16, kind<8, 2, false>, false>),
    address(correlate_halo<T, 32, 16, kind<8, 2, true>, false>),
    address(correlate_halo<T, 64, 64, kind<8, 2, false, 1>, false>),
    address(halo_weight_gradient<T, 64, kind<8, 1, false>>),
    address(halo_weight_gradient<T, 64, kind<4, 1, false>>),
    address(halo_weight_gradient<T, 32, kind<8, 2, false>>),
};

}  // namespace counted

PUFFERFISH_KERNELS_END
