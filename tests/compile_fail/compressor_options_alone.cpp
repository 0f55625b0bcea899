// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expected-error: this argument must be a gradient compressor of the network's scalar
// expected-error: with #include <pufferfish/compress/compression.hpp>
#include <pufferfish/compress/power_sgd.hpp>
#include <pufferfish/dist/exchange.hpp>
#include <pufferfish/dist/self.hpp>

namespace pf = pufferfish;

void exchange_with_compressor(pf::parameter_store<float>& store, pf::self& comm) {
#ifdef PUFFERFISH_FAIL
  // The options without the header that makes compressors of options.
  pf::gradient_exchange<float, pf::self> exchange(store, comm, {}, pf::power_sgd_options{4});
#else
  pf::gradient_exchange<float, pf::self> exchange(store, comm, {}, pf::power_sgd<float>(store, {4}));
#endif
}
