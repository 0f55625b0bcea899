// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-first: the scalar of a low-rank layer must be float, double or bfloat16, or on a device

#include <pufferfish/lowrank.hpp>

namespace scalar_of_embedding {
#ifdef PUFFERFISH_FAIL
using scalar = int;
#else
using scalar = double;
#endif

pufferfish::LowRankEmbedding<scalar, 4> fixed(64, 32);
pufferfish::LowRankEmbedding<scalar> dynamic(64, 32, 4);
}  // namespace scalar_of_embedding
