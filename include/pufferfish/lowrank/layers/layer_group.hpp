// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: passes of several layers of rows with one input, such as the projections of queries, keys and
/// values.

#include <array>
#include <cstddef>
#include <span>

#include <pufferfish/core/assert.hpp>
#include <pufferfish/core/context.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/ops/linear/linear_maps.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Largest number of layers in a group: queries, keys and values.
inline constexpr std::size_t largest_group = 3;

/// The layers of a group, from one to largest_group.
template <class Layer>
using layer_group = std::span<const Layer* const>;

/// Up to largest_group objects of one type, without an allocation.
template <class V>
class group_array {
 public:
  void push(const V& value) {
    PUFFERFISH_ASSERT(size_ < largest_group, "group_array: full");
    values_[size_++] = value;
  }
  std::span<const V> all() const { return {values_.data(), size_}; }

 private:
  std::array<V, largest_group> values_{};
  std::size_t size_ = 0;
};

/// Several matrices in one block of memory. Matrices of equal shapes begin at equal distances, so that one
/// launch can multiply all of them.
template <class T>
class group_block {
 public:
  /// Adds a matrix to the block.
  void push(index_t rows, index_t columns) {
    places_.push({size_, {rows, columns}});
    constexpr auto run = static_cast<index_t>(memory_alignment / sizeof(T));
    size_ += (rows * columns + run - 1) / run * run;
  }
  /// Number of elements of the block.
  index_t size() const { return size_; }
  /// Matrix i in a block that begins at `block`.
  tensor_view<T, 2> at(T* block, std::size_t i) const {
    return {block + places_.all()[i].offset, places_.all()[i].shape};
  }

 private:
  struct place {
    index_t offset = 0;
    extents<2> shape{};
  };
  group_array<place> places_;
  index_t size_ = 0;
};

/// Where a layer of a group writes the gradient of its input: dx = gradient, or with `add` dx += gradient. A
/// null view: the gradient is not wanted.
template <class T>
struct group_gradient {
  tensor_view<T, 2> dx;
  bool add = false;
};

/// Computes the gradients of the inputs of a group. Neighbours with the same dx are summed at once if `add`
/// is set for all of them but the first.
template <class T, class Device>
void write_input_gradients(context<Device>& ctx, std::span<const ops::input_gradient_map<T>> maps,
                           std::span<const group_gradient<T>> to) {
  for (std::size_t first = 0, count; first < to.size(); first += count) {
    const auto& [dx, add] = to[first];
    count = 1;
    while (first + count < to.size() && to[first + count].add && to[first + count].dx.data() == dx.data()) {
      ++count;
    }
    if (!dx.is_null()) ops::linear_maps_backward_sum<T>(ctx, maps.subspan(first, count), dx, add);
  }
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
