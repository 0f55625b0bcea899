// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The JSON header of safetensors files: parsed token by token, and checked against
/// the data. Internal part of <pufferfish/io/safetensors.hpp>; needs nlohmann-json.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/io/error_text.hpp>
#include <pufferfish/io/tensor_dtype.hpp>
#include <pufferfish/io/tensor_info.hpp>
#include <pufferfish/io/utf8.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Pairs of strings that are stored with the tensors, by key.
using safetensors_metadata = std::map<std::string, std::string>;

namespace detail {

// Limit of the reference implementation, in bytes
inline constexpr std::uint64_t safetensors_max_header = 100'000'000;
/// Name under which a header stores the metadata; no tensor may have this name.
inline constexpr std::string_view metadata_key = "__metadata__";

/// A tensor as its header describes it, before the numbers are checked.
struct safetensors_item {
  std::string name;
  std::optional<tensor_dtype> dtype;
  std::optional<std::vector<index_t>> shape;
  std::optional<std::vector<std::uint64_t>> offsets;
};

/// Receives the header's JSON token by token and accepts exactly the format's structure: no document is
/// built, a fourth nesting level cannot be entered, and memory stays proportional to the header.
class safetensors_header_sax {
 public:
  std::vector<safetensors_item> items;  ///< the tensors read so far, in the order of the header
  safetensors_metadata metadata;
  std::string problem;  ///< why the header was rejected, if it was

  /// Member of nlohmann's SAX interface, like the functions below. A result of false stops the parser;
  /// `problem` then has the reason.
  bool null() { return fail("has a null"); }
  bool boolean(bool) { return fail("has a boolean"); }
  bool binary(nlohmann::json::binary_t&) { return fail("has a binary value"); }
  bool number_integer(std::int64_t value) { return fail("has the negative number " + std::to_string(value)); }
  bool number_float(double, const std::string& text) {
    return fail("has the number " + quote_name(text) + ", which is no integer below 2^64");
  }

  bool number_unsigned(std::uint64_t value) {
    if (where_ == place::shape) {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<index_t>::max())) {
        return fail("has the extent " + std::to_string(value));
      }
      if (items.back().shape->size() == max_tensor_rank) return fail("has more than 64 dimensions");
      items.back().shape->push_back(static_cast<index_t>(value));
      return true;
    }
    if (where_ == place::offsets) {
      if (items.back().offsets->size() == 2) return fail("has more than two data offsets");
      items.back().offsets->push_back(value);
      return true;
    }
    return fail("has a number where none belongs");
  }

  bool string(std::string& value) {
    if (where_ == place::metadata) {
      if (!metadata.emplace(key_, std::move(value)).second)
        return fail("has metadata " + quote_name(key_) + " twice");
      return true;
    }
    if (where_ != place::tensor || key_ != "dtype") return fail("has a string where none belongs");
    if (items.back().dtype) return fail("has two dtypes");
    items.back().dtype = parse_dtype(value);
    return items.back().dtype ? true : fail("has the unknown dtype " + quote_name(value));
  }

  bool key(std::string& value) {
    key_ = std::move(value);
    return true;
  }

  bool start_object(std::size_t) {
    if (where_ == place::nowhere) {
      where_ = place::root;
    } else if (where_ != place::root) {
      return fail("has an object where none belongs");
    } else if (key_ != metadata_key) {
      where_ = place::tensor;
      items.emplace_back().name = key_;
    } else if (std::exchange(metadata_seen_, true)) {
      return fail("has metadata twice");
    } else {
      where_ = place::metadata;
    }
    return true;
  }

  bool end_object() {
    if (where_ == place::tensor) {
      const safetensors_item& item = items.back();
      if (!item.dtype || !item.shape || !item.offsets) return fail("lacks dtype, shape or data_offsets");
      if (item.offsets->size() != 2) return fail("has fewer than two data offsets");
    }
    where_ = where_ == place::root ? place::nowhere : place::root;
    return true;
  }

  bool start_array(std::size_t) {
    if (where_ == place::tensor && key_ == "shape" && !items.back().shape) {
      where_ = place::shape;
      items.back().shape.emplace();
      return true;
    }
    if (where_ == place::tensor && key_ == "data_offsets" && !items.back().offsets) {
      where_ = place::offsets;
      items.back().offsets.emplace();
      return true;
    }
    return fail("has an array where none belongs");
  }

  bool end_array() {
    where_ = place::tensor;
    return true;
  }

  template <class Exception>
  bool parse_error(std::size_t position, const std::string&, const Exception&) {
    problem = "the header is not valid JSON at its byte " + std::to_string(position);
    return false;
  }

 private:
  // Levels of the document: before its object, the object itself, an object of a tensor, a tensor's shape, a
  // tensor's offsets, the metadata.
  enum class place { nowhere, root, tensor, shape, offsets, metadata };

  // Records why the header is rejected, with the tensor's name. Returns false, which stops the parser.
  bool fail(const std::string& what) {
    const bool in_tensor = where_ == place::tensor || where_ == place::shape || where_ == place::offsets;
    problem =
        (in_tensor ? "tensor " + quote_name(items.back().name) : std::string("the header")) + " " + what;
    return false;
  }

  place where_ = place::nowhere;
  std::string key_;
  bool metadata_seen_ = false;
};

/// Length of the JSON header, from the first eight bytes of a file of `size` bytes.
/// `start`: the first bytes of the file, more than eight unless the file is shorter.
/// Throws io_error if the length is impossible, or if the header does not begin with '{'.
inline std::size_t safetensors_header_length(std::span<const std::uint8_t> start, std::uint64_t size,
                                             const std::string& file) {
  std::uint64_t header = 0;
  if (size < sizeof(header) || start.size() < sizeof(header)) {
    throw_error<io_error>({file, ": ", size, " bytes are too few for safetensors", foreign_format(start)});
  }
  std::memcpy(&header, start.data(), sizeof(header));
  const std::uint64_t rest = size - sizeof(header);
  if (header > safetensors_max_header && start.size() > sizeof(header) && start[sizeof(header)] != '{') {
    // Eight bytes of something else, read as a length.
    throw_error<io_error>({file, ": not a safetensors file", foreign_format(start)});
  }
  if (header > rest || header > safetensors_max_header) {
    throw_error<io_error>({file, ": a safetensors header of ", header, " bytes, but the file has ", rest,
                           " after the length and 100000000 are allowed", foreign_format(start)});
  }
  if (header == 0 || start.size() <= sizeof(header) || start[sizeof(header)] != '{') {
    // The parser skips white space, which the format forbids here.
    throw_error<io_error>(
        {file, ": the safetensors header of ", header, " bytes is not a JSON object", foreign_format(start)});
  }
  return static_cast<std::size_t>(header);
}

/// Parses a header, and checks everything that its JSON text alone determines: the structure, known dtypes,
/// at most 64 dimensions, two offsets per tensor. Throws io_error, naming `file`, for other text.
inline safetensors_header_sax parse_safetensors_header(std::string_view text, const std::string& file) {
  // The parser would treat a NUL as the end of the text.
  if (text.find('\0') != std::string_view::npos) {
    throw_error<io_error>({file, ": the safetensors header of ", text.size(), " bytes is not a JSON object"});
  }
  safetensors_header_sax sax;
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &sax)) {
    throw_error<io_error>({file, ": ", sax.problem});
  }
  return sax;
}

/// Sorts the tensors by their offsets and checks them against a data section of `data_size` bytes. Throws
/// io_error unless the tensors cover the data exactly, each tensor has the bytes that its shape needs, and
/// all names differ.
inline void check_safetensors_layout(std::vector<safetensors_item>& items, std::uint64_t data_size,
                                     const std::string& file) {
  std::sort(items.begin(), items.end(), [](const safetensors_item& a, const safetensors_item& b) {
    return *a.offsets != *b.offsets ? *a.offsets < *b.offsets : a.name < b.name;
  });
  std::uint64_t covered = 0;
  for (const safetensors_item& item : items) {
    const std::uint64_t begin = (*item.offsets)[0];
    const std::uint64_t end = (*item.offsets)[1];
    const std::string what = file + ": tensor " + quote_name(item.name) + " at bytes " +
                             std::to_string(begin) + " to " + std::to_string(end);
    if (begin > end || end > data_size) {
      throw_error<io_error>({what, " is not within the data of ", data_size, " bytes"});
    }
    if (begin != covered) {
      throw_error<io_error>({what, begin > covered ? " leaves a hole" : " overlaps another tensor",
                             ": the data before it ends at byte ", covered});
    }
    const std::optional<std::uint64_t> bytes = tensor_bytes(*item.dtype, *item.shape);
    if (!bytes || *bytes != end - begin) {
      throw_error<io_error>({what, " has dtype ", to_string(*item.dtype), " and shape ",
                             shape_text(*item.shape), ", which needs ",
                             bytes ? std::to_string(*bytes) : std::string("too many"), " bytes"});
    }
    covered = end;
  }
  if (covered != data_size) {
    throw_error<io_error>({file, ": the tensors end at byte ", covered, " of ", data_size, " bytes of data"});
  }
  std::vector<std::string_view> names;
  for (const safetensors_item& item : items) names.push_back(item.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    throw_error<io_error>({file, ": tensor ", quote_name(*twice), " is there twice"});
  }
}

/// A string as JSON. `file`: name of the file in errors. Throws io_error for a string that is not UTF-8,
/// because a reader would reject the file.
inline std::string json_string(const std::string& text, const std::string& file) {
  if (first_invalid_utf8(text) != text.size()) {
    throw_error<io_error>({file, ": the name or metadata ", quote_name(text), " is not UTF-8"});
  }
  return nlohmann::json(text).dump();
}

}  // namespace detail

PUFFERFISH_NAMESPACE_END
