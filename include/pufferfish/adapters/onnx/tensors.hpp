// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: constant tensors of an ONNX graph: dtypes, shapes, and elements that are stored in the model or
/// in a file of external data.

#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include <pufferfish/adapters/onnx/model_file.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/io/tensor_info.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Returns the dtype of a tensor of FLOAT, DOUBLE, FLOAT16 or BFLOAT16; nullopt for all other tensors.
inline std::optional<tensor_dtype> floating_dtype(const onnx::TensorProto& tensor) {
  switch (tensor.data_type()) {
    case onnx::TensorProto::FLOAT:
      return tensor_dtype::f32;
    case onnx::TensorProto::DOUBLE:
      return tensor_dtype::f64;
    case onnx::TensorProto::FLOAT16:
      return tensor_dtype::f16;
    case onnx::TensorProto::BFLOAT16:
      return tensor_dtype::bf16;
    default:
      return std::nullopt;
  }
}

/// Extents of a tensor; empty for a scalar.
inline std::vector<index_t> shape_of(const onnx::TensorProto& tensor) {
  return {tensor.dims().begin(), tensor.dims().end()};
}

/// Number of bytes of the elements of a floating-point tensor. Throws io_error, naming file and tensor, for
/// extents that are negative or too large.
inline std::uint64_t byte_size(const onnx::TensorProto& tensor, tensor_dtype dtype, const std::string& path) {
  const std::vector<index_t> shape = shape_of(tensor);
  const std::optional<std::uint64_t> bytes = tensor_bytes(dtype, shape);
  if (!bytes || shape.size() > max_tensor_rank) {
    throw_error<io_error>(
        {path, ": tensor ", quote_name(tensor.name()), " cannot have shape ", shape_text(shape)});
  }
  return *bytes;
}

/// The file, the first byte and the number of bytes of a tensor that is stored as external data.
struct external_place {
  std::string file;                      ///< path, in the folder of the model
  std::uint64_t offset = 0, length = 0;  ///< in bytes
};

/// Whether the elements of a tensor are stored in a file of external data.
inline bool is_external(const onnx::TensorProto& tensor) {
  return tensor.data_location() == onnx::TensorProto::EXTERNAL;
}

/// Finds the place of an external tensor of the model at `path`; `bytes` is the size that its shape requires.
/// Entries of the tensor are its location, an offset (default 0) and a length (default: `bytes`). Throws
/// io_error, naming model, tensor and file: for a location that is empty, absolute or outside of the folder
/// of the model, for a file that is missing or too short, and for a length other than `bytes`.
inline external_place place_of(const onnx::TensorProto& tensor, std::uint64_t bytes,
                               const std::string& path) {
  external_place place;
  std::string location;
  std::optional<std::uint64_t> length;
  const auto refuse = [&](const std::string& why) {
    throw_error<io_error>({path, ": external data of tensor ", quote_name(tensor.name()), ": ", why});
  };
  const auto number = [&](const std::string& text) {
    std::uint64_t value = 0;
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (problem != std::errc() || end != text.data() + text.size())
      refuse(quote_name(text) + " is no number");
    return value;
  };
  for (const auto& entry : tensor.external_data()) {
    if (entry.key() == "location") location = entry.value();
    if (entry.key() == "offset") place.offset = number(entry.value());
    if (entry.key() == "length") length = number(entry.value());
  }
  const std::string around = "/" + location + "/";
  if (location.empty() || location.front() == '/' || location.find('\0') != location.npos ||
      around.find("/../") != around.npos) {
    refuse("location " + quote_name(location) + " is not a file in the folder of the model");
  }
  place.file = split_path(path).first + "/" + location;
  place.length = length.value_or(bytes);
  if (place.length != bytes) {
    refuse(message({place.length, " bytes, where shape and type need ", bytes}));
  }
  struct stat status {};
  if (::stat(place.file.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) {
    refuse("there is no file " + quote_name(place.file));
  }
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (place.offset > size || size - place.offset < bytes) {
    refuse(message(
        {quote_name(place.file), " has ", size, " bytes; read are ", bytes, " from byte ", place.offset}));
  }
  return place;
}

/// Calls use(span of bytes) for the elements of a floating-point tensor in order, little-endian as in
/// raw_data: external data in pieces of at most 16 MiB, all others at once. Elements may be stored as
/// raw_data or in the list of their type; both forms are valid in ONNX. Throws io_error, naming model and
/// tensor, if the tensor has another number of elements than its shape, and as byte_size, place_of and read.
template <class Use>
void visit_elements(const onnx::TensorProto& tensor, tensor_dtype dtype, const std::string& path, Use&& use) {
  constexpr std::uint64_t piece = std::uint64_t{1} << 24;
  const std::uint64_t bytes = byte_size(tensor, dtype, path);
  if (is_external(tensor)) {
    const external_place place = place_of(tensor, bytes, path);
    struct stat status {};
    const file_descriptor file = open_for_reading(place.file, status);
    std::vector<std::uint8_t> buffer;
    for (std::uint64_t done = 0; done < bytes; done += buffer.size()) {
      buffer.resize(static_cast<std::size_t>(std::min(piece, bytes - done)));
      read_all_at(file.get(), place.offset + done, buffer, place.file);
      use(std::span<const std::uint8_t>(buffer));
    }
    return;
  }
  const auto check = [&](std::uint64_t have) {
    if (have == bytes) return;
    throw_error<io_error>({path, ": tensor ", quote_name(tensor.name()), " of shape ",
                           shape_text(shape_of(tensor)), " has ", have, " bytes of elements, not ", bytes});
  };
  const auto use_array = [&]<class Element>(const Element* data, int count) {
    const auto size = static_cast<std::size_t>(count) * sizeof(Element);
    check(size);
    use(std::span(reinterpret_cast<const std::uint8_t*>(data), size));
  };
  if (tensor.has_raw_data()) {
    check(tensor.raw_data().size());
    use(std::span(reinterpret_cast<const std::uint8_t*>(tensor.raw_data().data()), tensor.raw_data().size()));
  } else if (dtype == tensor_dtype::f32) {
    use_array(tensor.float_data().data(), tensor.float_data_size());
  } else if (dtype == tensor_dtype::f64) {
    use_array(tensor.double_data().data(), tensor.double_data_size());
  } else {
    // 16-bit floats are stored in the low halves of 32-bit integers.
    std::vector<std::uint16_t> halves;
    for (const std::int32_t bits : tensor.int32_data()) halves.push_back(static_cast<std::uint16_t>(bits));
    use_array(halves.data(), static_cast<int>(halves.size()));
  }
}

/// Returns all elements of a floating-point tensor as bytes, little-endian, in row-major order: a copy of the
/// whole tensor, which visit_elements avoids. Errors are those of visit_elements.
inline std::vector<std::uint8_t> elements_of(const onnx::TensorProto& tensor, tensor_dtype dtype,
                                             const std::string& path) {
  std::vector<std::uint8_t> all;
  visit_elements(tensor, dtype, path, [&](std::span<const std::uint8_t> piece) {
    all.insert(all.end(), piece.begin(), piece.end());
  });
  return all;
}

/// The constants of the main graph by name. The tensors belong to the model.
using constant_map = std::map<std::string, const onnx::TensorProto*>;
/// Returns the constants of the main graph: initializers, and the values of Constant nodes that hold a
/// tensor. If a name exists twice, the initializer counts.
inline constant_map constants_of(const onnx::GraphProto& graph) {
  constant_map all;
  for (const auto& one : graph.initializer()) all.emplace(one.name(), &one);
  for (const auto& node : graph.node()) {
    if (node.op_type() != "Constant" || node.output_size() != 1) continue;
    for (const auto& attribute : node.attribute()) {
      if (attribute.name() == "value" && attribute.has_t()) all.emplace(node.output(0), &attribute.t());
    }
  }
  return all;
}

/// Sets dtype, dims and name of a new tensor; the elements are added by the caller. `type` is a value of
/// onnx::TensorProto::DataType. The extents are appended, so the tensor must not have any yet.
inline void describe_tensor(onnx::TensorProto& tensor, const std::string& name, std::int32_t type,
                            const std::vector<index_t>& shape) {
  tensor.set_name(name);
  tensor.set_data_type(type);
  for (const index_t extent : shape) tensor.add_dims(extent);
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
