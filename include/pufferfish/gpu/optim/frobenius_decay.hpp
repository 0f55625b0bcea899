// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Device operations of frobenius_decay (optim/frobenius_decay.hpp). cuBLAS computes its products. Nothing
/// waits for the device, so begin_step and add can be captured into a graph.

#include <span>

#include <pufferfish/gpu/kernels/comm/exchange.hpp>
#include <pufferfish/gpu/ops/copy.hpp>
#include <pufferfish/gpu/ops/products.hpp>
#include <pufferfish/optim/frobenius_decay.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// x *= factor, in memory of the context's device, in its stream. Throws backend_error if the launch fails.
template <class T>
void scale(context<device::gpu>& ctx, std::span<T> x, T factor) {
  gpu::kernels::multiply<T>(ctx.stream(), x.data(), static_cast<index_t>(x.size()), factor);
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
