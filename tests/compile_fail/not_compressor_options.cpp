// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-error: this argument must be a gradient compressor of the network's scalar
// expected-error: for which there is new_compressor(store, options)
#include <pufferfish/compress/low_rank/power_sgd.hpp>
#include <pufferfish/distributed/exchange.hpp>
#include <pufferfish/distributed/self.hpp>

namespace not_compressor_options {
namespace pf = pufferfish;

struct my_options {
  int rank = 4;
};

void exchange_with_compressor(pf::parameter_store<float>& store, pf::self& comm) {
#ifdef PUFFERFISH_FAIL
  // Options, but nothing that makes a compressor of them.
  pf::gradient_exchange<float, pf::self> exchange(store, comm, {}, my_options{4});
#else
  pf::gradient_exchange<float, pf::self> exchange(store, comm, {}, pf::power_sgd_options{4});
#endif
}
}  // namespace not_compressor_options
