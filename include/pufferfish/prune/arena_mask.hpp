// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `arena_mask`: the bits of a weight_mask for a whole arena, in the memory of a device.

#include <cstdint>
#include <span>
#include <vector>

#include <pufferfish/core/memory.hpp>
#include <pufferfish/ops/copy/keep_marked.hpp>
#include <pufferfish/prune/mask.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// One bit for each element of an arena, set where the mask keeps the element or the tensor is not prunable.
/// The constructor copies the bits to the device, so that apply() is one pass in the order of the context's
/// work, which a graph may capture. A later change of the mask needs a new object.
///
/// \code
/// const arena_mask<device::gpu> bits(mask);
/// net.backward(ctx, dy.view());
/// bits.apply(ctx, net.store().gradients());  // before the optimizer's step
/// \endcode
template <class Device = device::cpu>
class arena_mask {
 public:
  /// Copies the bits to the device. Throws backend_error, and std::bad_alloc without memory.
  explicit arena_mask(const weight_mask& mask)
      : words_(memory_of<Device>::source(), static_cast<index_t>(detail::words_for(mask.size())),
               uninitialized),
        size_(mask.size()) {
    std::vector<std::uint64_t> bits(detail::words_for(mask.size()), 0);
    for (std::size_t t = 0; t < mask.tensors().size(); ++t) {
      const masked_tensor& tensor = mask.tensors()[t];
      for (index_t i = 0; i < tensor.size; ++i) {
        const auto bit = static_cast<std::size_t>(tensor.offset + i);
        bits[bit / 64] |= std::uint64_t{mask.keeps(t, i) ? 1U : 0U} << bit % 64;
      }
    }
    words_.from_host(bits);
  }

  /// Sets pruned elements of the arena's elements begin .. begin + size - 1 to +0, also those that are NaN.
  /// `values` is memory of the context's device. Throws value_error if these are not all in the arena.
  template <class T>
  void apply(context<Device>& ctx, std::span<T> values, index_t begin = 0) const {
    if (begin < 0 || begin + static_cast<index_t>(values.size()) > size_) {
      detail::throw_error<value_error>({"arena_mask: elements ", begin, " .. ",
                                        begin + static_cast<index_t>(values.size()), " of ", size_});
    }
    ops::keep_marked(ctx, words_.data(), begin, values);
  }

 private:
  memory_block<std::uint64_t> words_;
  index_t size_;
};

PUFFERFISH_NAMESPACE_END
