// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// TernGrad: `tern_grad_options`, `tern_codec` (every rank has its own scalers) and `shared_tern_grad` (all
/// ranks share the scalers).

#include <utility>
#include <vector>

#include <pufferfish/compress/quantize/shared_tern_grad.hpp>
#include <pufferfish/compress/quantize/tern_codec.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Makes TernGrad for the gradients of a store: shared_tern_grad if options.shared_scaler is true, else
/// tern_codec without error memory. Throws value_error for a clip out of range, for the route `sparse`, and
/// for a name in options.skip that is neither a parameter nor a layer.
///
/// \code
/// const tern_grad_options options{.clip = 2.5};
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, options);
/// \endcode
template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const tern_grad_options& options) {
  const std::vector<coded_tensor> tensors = coded_tensors(store);
  if (options.shared_scaler) return shared_tern_grad<T>(tensors, options);
  detail::check_tern_skips(options.skip, tensors);
  return make_coded_compressor<tern_codec<T>>(store, options, code_memory::none, options.route);
}

PUFFERFISH_NAMESPACE_END
