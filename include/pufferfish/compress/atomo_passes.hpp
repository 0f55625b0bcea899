// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the loops of the ATOMO codecs, compiled for each instruction set.

#include <cstdint>

#include <pufferfish/compress/codec.hpp>
#include <pufferfish/compress/signum.hpp>
#include <pufferfish/linalg/isa.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

#define PUFFERFISH_KERNELS atomo_passes
#define PUFFERFISH_KERNEL_FILE <pufferfish/compress/atomo.inc>
#include <pufferfish/linalg/for_each_target.inc>

}  // namespace detail
PUFFERFISH_NAMESPACE_END
