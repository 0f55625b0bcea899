// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: error texts, assembled out of line. Concatenating strings at every throw site costs more compile
/// time than the code around it; an initializer list of parts costs almost nothing.

#include <array>
#include <cstddef>
#include <exception>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

#include <pufferfish/core/config.hpp>
#include <pufferfish/core/error.hpp>
#include <pufferfish/core/number_text.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Text of `count` extents, such as "[2 x 8 x 8 x 64]".
PUFFERFISH_COLD inline std::string shape_text(const std::ptrdiff_t* extents, std::size_t count) {
  std::string text = "[";
  for (std::size_t i = 0; i < count; ++i) {
    if (i > 0) text += " x ";
    text += std::to_string(extents[i]);
  }
  text += ']';
  return text;
}

/// A part of a message: text, any integer, a double (as the shortest text that reads back), or the extents of
/// an array as "[2 x 3]". Refers to its source and owns nothing, so that it is only for use as an argument:
///
///     throw_error<shape_error>({"input ", x.shape(), " has ", x.extent(3), " channels"});
class message_part {
 public:
  // The constructors are implicit, so that parts of different types fit in one initializer list.
  message_part(std::string_view text) : text_(text.data()), count_(text.size()) {}
  message_part(const char* text) : message_part(std::string_view(text)) {}
  message_part(const std::string& text) : text_(text.data()), count_(text.size()) {}
  template <class I, std::enable_if_t<std::is_integral_v<I>, int> = 0>
  message_part(I number)
      : what_(std::is_signed_v<I> ? kind::integer : kind::natural),
        integer_(static_cast<long long>(number)) {}
  message_part(double number) : what_(kind::real), real_(number) {}
  template <std::size_t N>
  message_part(const std::array<std::ptrdiff_t, N>& extents)
      : what_(kind::extents), extents_(extents.data()), count_(N) {}

  /// Appends the part to a text.
  PUFFERFISH_COLD void append_to(std::string& text) const {
    switch (what_) {
      case kind::text:
        text.append(text_, count_);
        break;
      case kind::integer:
        text += std::to_string(integer_);
        break;
      case kind::natural:
        text += std::to_string(static_cast<unsigned long long>(integer_));
        break;
      case kind::real:
        text += shortest_number(real_);
        break;
      case kind::extents:
        text += shape_text(extents_, count_);
        break;
    }
  }

 private:
  // Which member of the union is set.
  enum class kind { text, integer, natural, real, extents };

  kind what_ = kind::text;
  union {
    const char* text_;
    long long integer_;
    double real_;
    const std::ptrdiff_t* extents_;
  };
  // Number of characters of a text, or number of extents.
  std::size_t count_ = 0;
};

/// Concatenates the parts: message({"rank ", 16, " of ", shape}).
PUFFERFISH_COLD inline std::string message(std::initializer_list<message_part> parts) {
  std::string text;
  for (const message_part& part : parts) part.append_to(text);
  return text;
}

/// A number of things: "1 rank", "2 ranks". `thing`: a noun with a regular plural.
template <class I>
std::string counted(I count, const char* thing) {
  return std::to_string(count) + " " + thing + (count == 1 ? "" : "s");
}

/// Throws an E (a class of core/error.hpp) with the text message(parts), by PUFFERFISH_THROW.
template <class E>
[[noreturn]] PUFFERFISH_COLD void throw_error(std::initializer_list<message_part> parts) {
  PUFFERFISH_THROW(E(message(parts)));
  std::terminate();  // a host's own PUFFERFISH_THROW must not return either
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
