// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the loops of the ATOMO codecs, compiled for each instruction set.

#include <cstdint>

#include <pufferfish/compress/codec.hpp>
#include <pufferfish/compress/sign/signum.hpp>
#include <pufferfish/linalg/isa.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The kernels of atomo.inc. A block contains rows of the matrix A, transposed: element (r, c) is block[c
/// rows + r].
///   magnitude_tail(x, count, level, result)     result[0..2] = sum of the |x_i| <= level, number of
///                                               |x_i| > level, number of |x_i| > 0
///   draw_entries(x, words, level, bits, count)  sets bit i unless |x_i| <= words_i 2^-32 level; the
///                                               result is the number of set bits
///   add_gram(block, rows, columns, gram)        gram += A^T A in double, lower triangle
///   project(block, rows, columns, weights, u)   u = A weights, in double, rounded to T
///   combine(left, rows, right, columns, count, block)  A = sum over j < count of left_j right_j^T
#define PUFFERFISH_KERNELS atomo_passes
#define PUFFERFISH_KERNEL_FILE <pufferfish/compress/atomo/atomo.inc>
#include <pufferfish/linalg/for_each_target.inc>

}  // namespace detail
PUFFERFISH_NAMESPACE_END
