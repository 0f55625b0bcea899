// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: loops over values and the bits of a mask, compiled for every instruction set.

#include <cstdint>

#include <pufferfish/compress/signum.hpp>
#include <pufferfish/linalg/isa.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// keep_marked(words, x, count): x_i = +0 where bit i % 64 of word i / 64 is clear, for i < count, even if
/// x_i is NaN.
///
/// mark_nonzero(x, words, count): bit i % 64 of word i / 64 is set where x_i != 0, for i < count, and clear
/// for the further bits of the last word. NaN is not zero; -0 is.
#define PUFFERFISH_KERNELS mask_passes
#define PUFFERFISH_KERNEL_FILE <pufferfish/prune/mask_passes.inc>
#include <pufferfish/linalg/for_each_target.inc>

}  // namespace detail
PUFFERFISH_NAMESPACE_END
