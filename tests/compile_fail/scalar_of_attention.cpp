// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-first: the scalar of a low-rank layer must be float, double or bfloat16, or on a device

#include <pufferfish/lowrank.hpp>

namespace scalar_of_attention {
#ifdef PUFFERFISH_FAIL
using scalar = int;
#else
using scalar = double;
#endif

const pufferfish::attention_shape shape;
pufferfish::LowRankAttention<scalar, 4> fixed(shape);
pufferfish::LowRankAttention<scalar> dynamic(shape, 4);
}  // namespace scalar_of_attention
