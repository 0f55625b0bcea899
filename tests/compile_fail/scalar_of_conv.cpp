// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-first: the scalar of a low-rank layer must be float, double or bfloat16, or on a device

#include <pufferfish/lowrank.hpp>

namespace scalar_of_conv {
#ifdef PUFFERFISH_FAIL
using scalar = int;
#else
using scalar = double;
#endif

const auto shape = pufferfish::conv_shape::square(32, 64, 3);
pufferfish::LowRankConv<scalar, 4> fixed(shape);
pufferfish::LowRankConv<scalar> dynamic(shape, 4);
}  // namespace scalar_of_conv
