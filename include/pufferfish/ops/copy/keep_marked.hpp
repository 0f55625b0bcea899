// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `keep_marked`: sets those elements of an array to zero whose bit in a mask is clear.

#include <cstdint>
#include <span>

#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// x_i = +0 where bit (first + i) % 64 of words[(first + i) / 64] is clear, also where x_i is NaN; other
/// elements keep their bits. `words` has the bits of all elements first .. first + x.size() - 1, first >= 0,
/// and is in the memory of the context's device.
///
/// \code
/// const std::uint64_t words[] = {0b101};
/// ops::keep_marked<float>(ctx, words, 0, x);  // x has 3 elements, of which x[1] becomes 0
/// \endcode
template <class T, class Device>
void keep_marked(context<Device>& ctx, const std::uint64_t* words, index_t first, std::span<T> x) {
  if constexpr (!is_cpu<Device>) {
    copy_ops<Device>::keep_marked(ctx, words, first, x);
  } else {
    for_chunks(ctx, static_cast<index_t>(x.size()), [=](index_t begin, index_t end) {
      for (index_t i = begin; i < end; ++i) {
        const index_t bit = first + i;
        if ((words[bit / 64] >> bit % 64 & 1U) == 0) x[static_cast<std::size_t>(i)] = T(0);
      }
    });
  }
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END
