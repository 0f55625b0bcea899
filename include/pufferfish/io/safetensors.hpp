// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Safetensors: named tensors in one file, a format that Python libraries read and write as well. Eight bytes
/// (little-endian) hold the length of a JSON header {"name": {"dtype", "shape", "data_offsets": [begin,
/// end]}, "__metadata__": {string: string}}. Raw little-endian data without holes follows the header. Source:
/// the format description of github.com/huggingface/safetensors.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/io/error_text.hpp>
#include <pufferfish/io/file.hpp>
#include <pufferfish/io/safetensors_header.hpp>
#include <pufferfish/io/tensor_dtype.hpp>
#include <pufferfish/io/tensor_info.hpp>

PUFFERFISH_NAMESPACE_BEGIN

static_assert(std::endian::native == std::endian::little, "pufferfish: safetensors data is little-endian");

/// A safetensors file, checked and held in memory. Move-only. Const members may be called by several threads
/// at once. For files that do not fit in memory, use safetensors_reader (io/safetensors_stream.hpp).
/// \code
///   const safetensors_file file = safetensors_file::read("weights.safetensors");
///   std::vector<float> weight(static_cast<std::size_t>(file.tensor("fc.weight").count()));
///   read_tensor<float>(file, "fc.weight", weight);
/// \endcode
class safetensors_file {
 public:
  /// Reads and checks a file. `limit`: largest size accepted, in bytes. Throws io_error for a file that
  /// read_file cannot read and for contents that parse rejects.
  static safetensors_file read(const std::string& path, std::uint64_t limit = default_tensor_file_limit) {
    return parse(read_file(path, limit), path);
  }

  /// Takes ownership of the bytes of a file and checks them. `name`: name of the data in error messages.
  /// Throws io_error, with the tensor's name and the numbers, for a header length beyond the data or above
  /// 100 MB; for a header that is not the format's JSON (unknown dtypes and fields, duplicate names, negative
  /// numbers); and for offsets outside the data, overlaps, holes, and shapes that do not fit their bytes.
  static safetensors_file parse(std::vector<std::uint8_t> bytes, std::string name) {
    const std::size_t length = detail::safetensors_header_length(bytes, bytes.size(), name);
    const std::size_t before = sizeof(std::uint64_t), rest = bytes.size() - before;
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + before, length);
    detail::safetensors_header_sax parsed = detail::parse_safetensors_header(text, name);
    detail::check_safetensors_layout(parsed.items, rest - length, name);

    safetensors_file result(std::move(bytes), std::move(name));
    result.metadata_ = std::move(parsed.metadata);
    const auto data = std::span<const std::uint8_t>(result.bytes_).subspan(before + length);
    for (detail::safetensors_item& item : parsed.items) result.add(item, data);
    return result;
  }

  // The tensors' spans point into bytes_: moving keeps them valid, copying would not.
  safetensors_file(safetensors_file&&) noexcept = default;
  safetensors_file& operator=(safetensors_file&&) noexcept = default;

  /// Path or name, as given.
  const std::string& name() const { return name_; }
  /// Tensor names, in the order of their data.
  const std::vector<std::string>& tensor_names() const { return order_; }
  /// The metadata of the file; empty if there are none.
  const safetensors_metadata& metadata() const { return metadata_; }
  /// Whether the file has a tensor of that name.
  bool contains(std::string_view tensor) const { return tensors_.find(tensor) != tensors_.end(); }

  /// A tensor by name. The reference, and the bytes it refers to, are valid as long as this object. Throws
  /// io_error if there is no tensor of that name.
  const tensor_info& tensor(std::string_view tensor) const {
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end()) {
      detail::throw_error<io_error>(
          {name_, ": has no tensor ", detail::quote_name(tensor), " among its ", tensors_.size()});
    }
    return found->second;
  }

 private:
  // A file without tensors; parse() adds them.
  safetensors_file(std::vector<std::uint8_t> bytes, std::string name)
      : bytes_(std::move(bytes)), name_(std::move(name)) {}

  // `item` has been checked against the data.
  void add(detail::safetensors_item& item, std::span<const std::uint8_t> data) {
    const std::uint64_t begin = (*item.offsets)[0];
    const std::uint64_t end = (*item.offsets)[1];
    tensor_info info{*item.dtype, std::move(*item.shape),
                     data.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin))};
    tensors_.emplace(item.name, std::move(info));
    order_.push_back(std::move(item.name));
  }

  std::vector<std::uint8_t> bytes_;
  std::string name_;
  std::vector<std::string> order_;
  std::map<std::string, tensor_info, std::less<>> tensors_;
  safetensors_metadata metadata_;
};

namespace detail {

/// The tensor called `name`. Throws io_error, naming file and tensor, unless the tensor exists and has
/// `count` elements.
inline const tensor_info& tensor_of_count(const safetensors_file& file, std::string_view name,
                                          std::size_t count) {
  const tensor_info& info = file.tensor(name);
  if (static_cast<std::size_t>(info.count()) != count) {
    throw_error<io_error>({file.name(), ": tensor ", quote_name(name), " has shape ", shape_text(info.shape),
                           ", that is ", info.count(), " elements; wanted are ", count});
  }
  return info;
}

}  // namespace detail

/// Copies a tensor's elements to `out`, unchanged. `out` must have the tensor's number of elements, in any
/// shape. Throws io_error for a missing tensor, a dtype other than that of `T`, and a number of elements
/// other than out.size() (both numbers are named).
template <class T>
void read_tensor(const safetensors_file& file, std::string_view name, std::span<T> out) {
  const tensor_info& info = detail::tensor_of_count(file, name, out.size());
  if (info.dtype != dtype_of_v<T>) {
    detail::throw_error<io_error>({file.name(), ": tensor ", detail::quote_name(name), " has dtype ",
                                   to_string(info.dtype), "; wanted is ", to_string(dtype_of_v<T>)});
  }
  if (!out.empty()) std::memcpy(out.data(), info.bytes.data(), info.bytes.size());
}

/// Copies a tensor's elements to `out`. If the dtype of the file is not that of T, F32, F64, F16 and BF16 are
/// converted into each other by scalar_cast. Other dtypes are never converted. Throws io_error for a missing
/// tensor, a dtype that cannot be converted, and a number of elements other than out.size().
template <class T>
void read_tensor_converted(const safetensors_file& file, std::string_view name, std::span<T> out) {
  static_assert(is_scalar_v<T>,
                "pufferfish: read_tensor_converted converts to float, double, bfloat16 or float16");
  const tensor_info& info = detail::tensor_of_count(file, name, out.size());
  // If no conversion exists, the dtypes must be equal, which read_tensor checks.
  if (!detail::convert_floating(info.dtype, info.bytes, out)) read_tensor(file, name, out);
}

namespace detail {

/// Pointers to the entries in the order in which they are written: by descending size of the element, so that
/// each tensor is aligned to its element size within the file, then by name. The result does not depend on
/// the caller's order. Throws io_error for duplicate names and for the name "__metadata__", and the errors of
/// check_entry.
inline std::vector<const tensor_entry*> ordered_entries(std::span<const tensor_entry> entries,
                                                        const std::string& file) {
  std::vector<const tensor_entry*> order;
  for (const tensor_entry& entry : entries) order.push_back(&entry);
  const auto by_name = [](const auto* a, const auto* b) { return a->name < b->name; };
  std::sort(order.begin(), order.end(), by_name);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const tensor_entry& entry = *order[i];
    if (entry.name == metadata_key || (i > 0 && order[i - 1]->name == entry.name)) {
      throw_error<io_error>({file, ": tensor name ", quote_name(entry.name), " is taken"});
    }
    check_entry(entry, file);
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const auto* a, const auto* b) { return size_of(a->dtype) > size_of(b->dtype); });
  return order;
}

/// The object itself, for a pointer or a reference to it.
template <class T>
const T& pointed_to(const T* thing) {
  return *thing;
}
template <class T>
const T& pointed_to(const T& thing) {
  return thing;
}

/// Returns the beginning of a safetensors file: the eight bytes of the header's length and the JSON header,
/// padded with spaces so that the data starts at a multiple of 8, and not before byte `at_least` of the file.
/// `tensors`: objects with name, dtype and shape, in the order of the data. `file`: name for error messages.
/// Throws io_error for duplicate names, strings that are not UTF-8 and headers above 100 MB.
template <class Tensors>
std::string safetensors_header(const Tensors& tensors, const safetensors_metadata& metadata,
                               const std::string& file, std::size_t at_least = 0) {
  std::string text(sizeof(std::uint64_t), '\0');
  text += '{';
  if (!metadata.empty()) {
    text += json_string(std::string(metadata_key), file) + ":{";
    for (const auto& [key, value] : metadata)
      text += json_string(key, file) + ":" + json_string(value, file) + ",";
    text.back() = '}';
    text += ',';
  }
  std::uint64_t offset = 0;
  for (const auto& each : tensors) {
    const auto& tensor = pointed_to(each);
    text += json_string(tensor.name, file) + ":{\"dtype\":\"" + std::string(to_string(tensor.dtype)) +
            "\",\"shape\":[";
    for (const index_t extent : tensor.shape) text += std::to_string(extent) + ",";
    if (!tensor.shape.empty()) text.pop_back();
    text += "],\"data_offsets\":[" + std::to_string(offset) + ",";
    offset += tensor_bytes(tensor.dtype, tensor.shape).value_or(0);
    text += std::to_string(offset) + "]},";
  }
  if (text.back() == ',') text.pop_back();
  text += '}';
  text.resize((std::max(text.size(), at_least) + 7) / 8 * 8, ' ');
  const std::uint64_t length = text.size() - sizeof(length);
  if (length > safetensors_max_header) {
    throw_error<io_error>(
        {file, ": a safetensors header of ", length, " bytes is above the format's 100000000"});
  }
  std::memcpy(text.data(), &length, sizeof(length));
  return text;
}

/// Calls sink(bytes) for each part of the file in order: the header, then the data of each tensor, directly
/// from the tensor's memory. `file`: name of the file in errors.
template <class Sink>
void emit_safetensors(std::span<const tensor_entry> entries, const safetensors_metadata& metadata,
                      const std::string& file, const Sink& sink) {
  const std::vector<const tensor_entry*> order = ordered_entries(entries, file);
  const std::string header = safetensors_header(order, metadata, file);
  sink(std::span(reinterpret_cast<const std::uint8_t*>(header.data()), header.size()));
  for (const tensor_entry* entry : order) sink(entry->bytes);
}

}  // namespace detail

/// The bytes of a safetensors file, for tests and for sending. `name`: name of the data in error messages.
/// Throws shape_error and io_error for entries that write_safetensors rejects.
inline std::vector<std::uint8_t> encode_safetensors(std::span<const tensor_entry> entries,
                                                    const safetensors_metadata& metadata = {},
                                                    const std::string& name = "encode_safetensors") {
  std::vector<std::uint8_t> bytes;
  detail::emit_safetensors(entries, metadata, name, [&](std::span<const std::uint8_t> piece) {
    bytes.insert(bytes.end(), piece.begin(), piece.end());
  });
  return bytes;
}

/// Writes tensors and metadata to `path` in one step (see atomic_writer), directly from the entries' memory.
/// Equal content gives equal files, whatever the order of the entries. Throws shape_error for an entry whose
/// bytes do not fit its shape. Throws io_error for duplicate names, the name "__metadata__", strings that are
/// not UTF-8, a header above 100 MB, and if the file cannot be written. After an error the old file is
/// unchanged, with the exception that atomic_writer::commit describes.
/// \code
///   const std::vector<float> values(6);
///   const std::vector<tensor_entry> entries{make_tensor_entry("w", {2, 3}, std::span(values))};
///   write_safetensors("w.safetensors", entries, {{"made by", "an example"}});
/// \endcode
inline void write_safetensors(const std::string& path, std::span<const tensor_entry> entries,
                              const safetensors_metadata& metadata = {}) {
  std::optional<atomic_writer> writer;  // opened with the first piece: bad entries create no file
  detail::emit_safetensors(entries, metadata, path, [&](std::span<const std::uint8_t> piece) {
    if (!writer) writer.emplace(path);
    writer->write(piece);
  });
  writer->commit();
}

PUFFERFISH_NAMESPACE_END
