// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the .npy format of NumPy, the format of each array in an .npz archive: a magic number,
/// a version, and a Python dictionary {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
/// before the elements. Source: the documentation of numpy.lib.format, versions 1.0, 2.0 and 3.0.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/core/error.hpp>
#include <pufferfish/io/error_text.hpp>
#include <pufferfish/io/tensor_info.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

inline constexpr std::string_view npy_magic = "\x93NUMPY";
/// Limit of the header's length, far above the length for 64 dimensions.
inline constexpr std::uint64_t npy_max_header = 65535;

/// NumPy's type codes (letter and size) of the dtypes that NumPy has.
struct npy_type {
  tensor_dtype dtype;
  std::string_view code;
};
inline constexpr std::array<npy_type, 13> npy_types{{{tensor_dtype::boolean, "b1"},
                                                     {tensor_dtype::u8, "u1"},
                                                     {tensor_dtype::i8, "i1"},
                                                     {tensor_dtype::u16, "u2"},
                                                     {tensor_dtype::i16, "i2"},
                                                     {tensor_dtype::f16, "f2"},
                                                     {tensor_dtype::u32, "u4"},
                                                     {tensor_dtype::i32, "i4"},
                                                     {tensor_dtype::f32, "f4"},
                                                     {tensor_dtype::u64, "u8"},
                                                     {tensor_dtype::i64, "i8"},
                                                     {tensor_dtype::f64, "f8"},
                                                     {tensor_dtype::c64, "c8"}}};

/// Content of the header of an array.
struct npy_header {
  tensor_dtype dtype{};
  bool big_endian = false;
  bool fortran_order = false;
  std::vector<index_t> shape;
  std::size_t data = 0;  ///< offset of the elements
};

/// Parses the dictionary: exactly its three keys, each once, in any
/// order. Expressions are not evaluated, and nesting is rejected.
class npy_header_parser {
 public:
  npy_header_parser(std::string_view text, const std::string& where) : text_(text), where_(where) {}

  /// The header, without `data`. Throws io_error, with the byte, for anything else.
  npy_header operator()() {
    npy_header header;
    bool descr = false, order = false, shape = false;
    expect('{');
    while (!take('}')) {
      const std::string_view key = quoted();
      expect(':');
      if (key == "descr" && !std::exchange(descr, true)) {
        read_type(header);
      } else if (key == "fortran_order" && !std::exchange(order, true)) {
        header.fortran_order = boolean();
      } else if (key == "shape" && !std::exchange(shape, true)) {
        header.shape = tuple();
      } else {
        fail("has the key " + quote_name(key) + " twice, or should not have it");
      }
      if (!take(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (at_ != text_.size()) fail("goes on after its dictionary, at byte " + std::to_string(at_));
    if (!descr || !order || !shape) fail("lacks descr, fortran_order or shape");
    return header;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    PUFFERFISH_THROW(io_error(where_ + ": the npy header " + what));
  }
  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
  }
  bool take(char c) {
    skip_space();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(std::string("has no '") + c + "' at its byte " + std::to_string(at_));
  }
  // A string in single or double quotes, without escapes.
  std::string_view quoted() {
    skip_space();
    if (at_ == text_.size() || (text_[at_] != '\'' && text_[at_] != '"')) {
      fail("has no string at its byte " + std::to_string(at_));
    }
    const std::size_t end = text_.find(text_[at_], at_ + 1);
    if (end == std::string_view::npos) fail("has a string without an end");
    const std::string_view value = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return value;
  }
  bool boolean() {
    skip_space();
    for (const std::string_view word : {"False", "True"}) {
      if (text_.substr(at_, word.size()) != word) continue;
      at_ += word.size();
      return word == "True";
    }
    fail("has neither True nor False at its byte " + std::to_string(at_));
  }

  // "<f4" and the like; sets dtype and byte order.
  void read_type(npy_header& header) {
    skip_space();
    if (at_ < text_.size() && text_[at_] == '[') fail("is of records; arrays of numbers are read");
    const std::string_view type = quoted();
    const std::string_view code = type.substr(std::min<std::size_t>(type.size(), 1));
    for (const npy_type& known : npy_types) {
      if (known.code != code) continue;
      // '|' marks types without a byte order.
      const bool bytes = size_of(known.dtype) == 1;
      if (type[0] != '<' && type[0] != '>' && !(type[0] == '|' && bytes)) break;
      header.dtype = known.dtype;
      header.big_endian = type[0] == '>' && !bytes;
      return;
    }
    fail("has the dtype " + quote_name(type) + ", which is not supported");
  }

  // A number of decimal digits.
  index_t extent() {
    const std::size_t begin = at_;
    index_t value = 0;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      if (__builtin_mul_overflow(value, index_t{10}, &value) ||
          __builtin_add_overflow(value, index_t{text_[at_] - '0'}, &value)) {
        fail("has an extent above 2^63");
      }
    }
    if (at_ == begin) fail("has no extent >= 0 at its byte " + std::to_string(at_));
    return value;
  }

  // "()", "(3,)" or "(3, 4)", with or without a comma at the end from two numbers on.
  std::vector<index_t> tuple() {
    std::vector<index_t> shape;
    expect('(');
    while (!take(')')) {
      skip_space();
      if (shape.size() == max_tensor_rank) fail("has more than 64 dimensions");
      shape.push_back(extent());
      if (take(',')) continue;
      if (shape.size() == 1) fail("has a number in parentheses for a shape");  // (3) is no tuple
      expect(')');
      break;
    }
    return shape;
  }

  std::string_view text_;
  const std::string& where_;
  std::size_t at_ = 0;
};

/// Parses the header of an array and checks that the bytes match it.
/// `where`: the file and array in error messages. Throws io_error.
inline npy_header parse_npy(std::span<const std::uint8_t> bytes, const std::string& where) {
  const auto fail = [&where](const std::string& what) { PUFFERFISH_THROW(io_error(where + ": " + what)); };
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (bytes.size() < 10 || text.substr(0, npy_magic.size()) != npy_magic) {
    fail(std::to_string(bytes.size()) + " bytes that are no npy array");
  }
  const unsigned major = bytes[6], minor = bytes[7];
  if (major < 1 || major > 3 || minor != 0) {
    fail("npy version " + std::to_string(major) + "." + std::to_string(minor) +
         "; known are 1.0, 2.0 and 3.0");
  }
  const std::size_t field = major == 1 ? 2 : 4;
  if (bytes.size() < 8 + field) fail("ends within its npy header");
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data() + 8, field);
  const std::size_t rest = bytes.size() - 8 - field;
  if (length > rest || length > npy_max_header) {
    fail("an npy header of " + std::to_string(length) + " bytes, but there are " + std::to_string(rest) +
         " and " + std::to_string(npy_max_header) + " are allowed");
  }
  npy_header header = npy_header_parser(text.substr(8 + field, static_cast<std::size_t>(length)), where)();
  header.data = 8 + field + static_cast<std::size_t>(length);
  const std::optional<std::uint64_t> wanted = tensor_bytes(header.dtype, header.shape);
  if (!wanted || *wanted != bytes.size() - header.data) {
    fail("dtype " + std::string(to_string(header.dtype)) + " and shape " + shape_text(header.shape) +
         " need " + (wanted ? std::to_string(*wanted) : std::string("too many")) + " bytes, there are " +
         std::to_string(bytes.size() - header.data));
  }
  return header;
}

/// The header as NumPy writes it: version 1.0, padded so that the elements begin at
/// a multiple of 64 bytes. Throws io_error for a dtype that NumPy does not have.
inline std::string npy_header_text(tensor_dtype dtype, const std::vector<index_t>& shape,
                                   const std::string& where) {
  const auto type = std::find_if(npy_types.begin(), npy_types.end(),
                                 [&](const npy_type& known) { return known.dtype == dtype; });
  if (type == npy_types.end()) {
    PUFFERFISH_THROW(io_error(where + ": NumPy has no dtype for " + std::string(to_string(dtype))));
  }
  std::string text(npy_magic);
  text += std::string("\x01\0\0\0", 4);
  text += std::string("{'descr': '") + (size_of(dtype) == 1 ? '|' : '<') + std::string(type->code) +
          "', 'fortran_order': False, 'shape': (";
  for (const index_t extent : shape) {
    text += std::to_string(extent) + (shape.size() == 1 ? "," : &extent == &shape.back() ? "" : ", ");
  }
  text += "), }";
  text.resize((text.size() + 1 + 63) / 64 * 64 - 1, ' ');
  text += '\n';
  const std::size_t length = text.size() - 10;
  text[8] = static_cast<char>(length & 0xff);
  text[9] = static_cast<char>(length >> 8);
  return text;
}

/// The elements in row-major order and little-endian. `elements`: in the layout that the header describes.
inline std::vector<std::uint8_t> npy_to_row_major(const npy_header& header,
                                                  std::span<const std::uint8_t> elements) {
  const std::size_t size = size_of(header.dtype), rank = header.shape.size();
  std::vector<std::uint8_t> result(elements.size());
  if (result.empty()) return result;
  // Source strides in elements: of column-major order, or of row-major.
  std::vector<std::size_t> stride(rank), at(rank, 0);
  std::size_t step = 1;
  for (std::size_t i = 0; i < rank; ++i) {
    const std::size_t d = header.fortran_order ? i : rank - 1 - i;
    stride[d] = step;
    step *= static_cast<std::size_t>(header.shape[d]);
  }
  std::size_t from = 0;
  for (std::size_t to = 0; to < result.size(); to += size) {
    std::memcpy(result.data() + to, elements.data() + from * size, size);
    for (std::size_t d = rank; d-- > 0;) {
      from += stride[d];
      if (++at[d] < static_cast<std::size_t>(header.shape[d])) break;
      from -= at[d] * stride[d];
      at[d] = 0;
    }
  }
  if (header.big_endian) {
    // The two halves of a complex number are reversed separately.
    const std::size_t width = header.dtype == tensor_dtype::c64 ? size / 2 : size;
    for (std::size_t i = 0; i < result.size(); i += width) {
      std::reverse(result.begin() + static_cast<std::ptrdiff_t>(i),
                   result.begin() + static_cast<std::ptrdiff_t>(i + width));
    }
  }
  return result;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
