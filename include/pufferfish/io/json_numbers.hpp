// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Named whole numbers as a line of JSON: {"layer1.0.conv2":16,"fc":4}. Checkpoints store such lines in their
/// metadata.

#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/io/error_text.hpp>
#include <pufferfish/io/safetensors_header.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Names with numbers >= 0, in the order in which they are written and read.
using named_numbers = std::vector<std::pair<std::string, index_t>>;

namespace detail {

/// Receives JSON token by token. Accepts only one flat object whose values are whole numbers of at least 0
/// and whose names differ.
class json_numbers_sax {
 public:
  named_numbers pairs;  ///< the numbers read so far
  std::string problem;  ///< why the text was rejected, if it was

  /// Member of nlohmann's SAX interface, like the functions below. A result of false stops the parser;
  /// `problem` then has the reason.
  bool null() { return fail("has a null"); }
  bool boolean(bool) { return fail("has a boolean"); }
  bool binary(nlohmann::json::binary_t&) { return fail("has a binary value"); }
  bool string(std::string&) { return fail("has a string for a value"); }
  bool number_float(double, const std::string& text) { return fail("has the number " + quote_name(text)); }
  bool number_integer(std::int64_t value) { return fail("has the number " + std::to_string(value)); }
  bool number_unsigned(std::uint64_t value) {
    if (!inside_) return fail("is a number");
    if (value > static_cast<std::uint64_t>(std::numeric_limits<index_t>::max())) {
      return fail("has the number " + std::to_string(value));
    }
    pairs.back().second = static_cast<index_t>(value);
    return true;
  }
  bool key(std::string& name) {
    if (!seen_.insert(name).second) return fail("has the name " + quote_name(name) + " twice");
    pairs.emplace_back(std::move(name), 0);
    return true;
  }
  bool start_object(std::size_t) {
    return std::exchange(inside_, true) ? fail("has an object for a value") : true;
  }
  bool end_object() { return true; }
  bool start_array(std::size_t) { return fail("has an array"); }
  bool end_array() { return true; }
  template <class Exception>
  bool parse_error(std::size_t position, const std::string&, const Exception&) {
    problem = "is not valid JSON at its byte " + std::to_string(position);
    return false;
  }

 private:
  // Records why the text is rejected. Returns false, which stops the parser.
  bool fail(std::string what) {
    problem = std::move(what);
    return false;
  }

  bool inside_ = false;
  std::set<std::string> seen_;
};

}  // namespace detail

/// Encodes the numbers as {"a":1,"b":2}. `where`: name of the text in error messages. Numbers must be at
/// least 0 and names must differ; neither is checked here, but parse_json_numbers rejects such text. Throws
/// io_error for a name that is not UTF-8.
/// \code
///   const std::string text = encode_json_numbers({{"conv1", 16}, {"fc", 4}}, "ranks");
///   const named_numbers again = parse_json_numbers(text, "ranks");
/// \endcode
inline std::string encode_json_numbers(const named_numbers& pairs, const std::string& where) {
  std::string text = "{";
  for (const auto& [name, number] : pairs) {
    text += (text.size() > 1 ? "," : "") + detail::json_string(name, where) + ":" + std::to_string(number);
  }
  return text + "}";
}

/// Decodes a text from encode_json_numbers. `where`: name of the text in error messages. Throws io_error for
/// any other text, including other values, numbers below 0 or beyond index_t, and duplicate names.
inline named_numbers parse_json_numbers(std::string_view text, const std::string& where) {
  detail::json_numbers_sax sax;
  if (text.find('\0') != std::string_view::npos || text.substr(0, 1) != "{") {
    detail::throw_error<io_error>({where, " is not a JSON object"});
  }
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &sax)) {
    detail::throw_error<io_error>({where, " ", sax.problem});
  }
  return std::move(sax.pairs);
}

PUFFERFISH_NAMESPACE_END
