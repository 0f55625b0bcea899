// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: loops over values and the bits of a mask, compiled for every instruction set.

#include <cstdint>

#include <pufferfish/compress/sign/signum.hpp>
#include <pufferfish/linalg/isa.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Functions compiled for every instruction set.
///
/// keep_marked(words, x, count): sets x_i to +0 where bit i % 64 of word i / 64 is clear, for i <
/// count, also where x_i is NaN.
///
/// mark_nonzero(x, words, count): sets bit i % 64 of word i / 64 where x_i != 0 and clears it elsewhere, for
/// i < count; clears the remaining bits of the last word. NaN counts as nonzero, -0 as zero.
#define PUFFERFISH_KERNELS mask_passes
#define PUFFERFISH_KERNEL_FILE <pufferfish/prune/mask_passes.inc>
#include <pufferfish/linalg/for_each_target.inc>

}  // namespace detail
PUFFERFISH_NAMESPACE_END
