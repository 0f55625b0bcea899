// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `move_mark`, a member that records whether its object was moved from.

#include <utility>

#include <pufferfish/core/config.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// For classes with default move operations whose empty state does not mean "moved from". Moving an
/// object sets the mark of the source; assigning a new value to the source clears it. A copy of a
/// moved-from object is marked, too.
/// A class holds one as a member; its own moves and assignments then keep the mark without further code.
///
///     class row {
///       std::vector<float> values;
///       move_mark moved;            // moved.is_set() after row b = std::move(a); for a
///     };
class move_mark {
 public:
  move_mark() = default;
  move_mark(const move_mark&) = default;
  move_mark(move_mark&& other) noexcept : is_set_(std::exchange(other.is_set_, true)) {}
  move_mark& operator=(const move_mark&) = default;
  move_mark& operator=(move_mark&& other) noexcept {
    is_set_ = std::exchange(other.is_set_, true);
    return *this;
  }
  ~move_mark() = default;

  /// Whether the object was moved from and has no new value.
  bool is_set() const { return is_set_; }
  /// Notes that the object has a new value.
  void clear() { is_set_ = false; }

 private:
  bool is_set_ = false;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
