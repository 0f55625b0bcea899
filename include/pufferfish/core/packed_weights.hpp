// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `packed_weights`: copies of weights in the order in which kernels read them, kept from pass to pass.
/// Without it, each pass packs its weights again into scratch memory, which takes up to a fifth of the time
/// of a pass over a few images. frozen_model (nn/frozen_model.hpp) keeps the packed weights of a whole model.

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/core/assert.hpp>
#include <pufferfish/core/memory.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Identifies a packed form of a weight: address of the weight's first element, name of the form, and numbers
/// that the form depends on. A form is a function of the weight's elements and of these values.
struct packed_form {
  const void* weight;
  std::string_view name;  ///< a string literal
  std::array<index_t, 6> numbers{};
  friend bool operator==(const packed_form&, const packed_form&) = default;
};

/// Packed forms of weights whose elements do not change while this object exists. A form is packed when it is
/// first used, and kept until the end of the object. Only weights within the memory given to the constructor
/// are kept, never temporary operands. Several threads may use one object at the same time.
///
/// Changing a weight while its packed forms exist makes later passes use old numbers. At assert level 2, each
/// use packs the weight again and fails an assertion if the result differs; at lower levels nothing notices.
///
/// \code
/// packed_weights packed(std::as_bytes(std::span(weights)));  // layers' weights are in this array
/// cpu_context ctx;
/// const packed_weights_scope scope(ctx, packed);
/// for (const auto& image : images) layer.forward(ctx, image, y);  // packs in the first pass only
/// \endcode
class packed_weights {
 public:
  /// `memory`: where the weights are. It must outlive this object.
  explicit packed_weights(std::vector<std::span<const std::byte>> memory) : memory_(std::move(memory)) {}
  explicit packed_weights(std::span<const std::byte> memory) : memory_{memory} {}
  packed_weights(const packed_weights&) = delete;
  packed_weights& operator=(const packed_weights&) = delete;

  /// Whether an address is within the memory of the weights.
  bool contains(const void* weight) const {
    const auto* const at = static_cast<const std::byte*>(weight);
    for (const auto& part : memory_) {
      if (!std::less<>()(at, part.data()) && std::less<>()(at, part.data() + part.size())) return true;
    }
    return false;
  }

  /// The packed form, `count` elements. The first call with a form computes it by pack(T* to), where `to` is
  /// filled with zeros; meanwhile, other threads wait. Throws std::bad_alloc and the errors of `pack`;
  /// nothing is kept then. form.weight must satisfy contains(). `pack` must not call get() of this object,
  /// which would wait for ever.
  template <class T, class Pack>
  T* get(const packed_form& form, index_t count, Pack&& pack) {
    const std::lock_guard lock(mutex_);
    for (kept_form& kept : forms_) {
      if (kept.form != form) continue;
      PUFFERFISH_ASSERT_FULL(same(kept.data, packed<T>(count, pack)), "packed_weights: a weight has changed");
      return reinterpret_cast<T*>(kept.data.data());
    }
    forms_.push_back({form, packed<T>(count, pack)});
    return reinterpret_cast<T*>(forms_.back().data.data());
  }

  /// Where the weights are.
  const std::vector<std::span<const std::byte>>& memory() const { return memory_; }

  /// Bytes of all packed forms so far.
  std::size_t bytes() const {
    const std::lock_guard lock(mutex_);
    std::size_t sum = 0;
    for (const kept_form& kept : forms_) sum += static_cast<std::size_t>(kept.data.size());
    return sum;
  }

 private:
  using block = memory_block<std::byte>;
  struct kept_form {
    packed_form form;
    block data;
  };

  // A block of `count` elements of T that pack(T*) has written. Elements that it skips are 0.
  template <class T, class Pack>
  static block packed(index_t count, Pack& pack) {
    block result(host_memory(), static_cast<index_t>(detail::byte_count<T>(count)));
    pack(reinterpret_cast<T*>(result.data()));
    return result;
  }
  static bool same(const block& a, const block& b) {
    return a.size() == b.size() && std::equal(a.data(), a.data() + a.size(), b.data());
  }

  std::vector<std::span<const std::byte>> memory_;
  mutable std::mutex mutex_;
  std::vector<kept_form> forms_;  // a model has about a hundred
};

PUFFERFISH_NAMESPACE_END
