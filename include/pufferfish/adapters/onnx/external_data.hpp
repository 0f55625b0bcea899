// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: files of external data, in which large ONNX models store their tensors.

#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <type_traits>
#include <vector>

#include <pufferfish/adapters/onnx/tensors.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Calls use(tensor) for each initializer of a graph and each tensor that is an attribute of a node. `Graph`
/// may be const. Subgraphs, lists of tensors and sparse tensors are not visited.
template <class Graph, class Use>
void for_each_constant(Graph& graph, Use&& use) {
  constexpr bool reads = std::is_const_v<Graph>;
  for (int i = 0; i < graph.initializer_size(); ++i) {
    if constexpr (reads) use(graph.initializer(i));
    if constexpr (!reads) use(*graph.mutable_initializer(i));
  }
  for (int i = 0; i < graph.node_size(); ++i) {
    for (int a = 0; a < graph.node(i).attribute_size(); ++a) {
      if (!graph.node(i).attribute(a).has_t()) continue;
      if constexpr (reads) use(graph.node(i).attribute(a).t());
      if constexpr (!reads) use(*graph.mutable_node(i)->mutable_attribute(a)->mutable_t());
    }
  }
}

/// Whether a subgraph, a sparse tensor or a list of tensors is in external data, which data_file_writer does
/// not move. `nested`: whether `graph` is itself a subgraph, whose initializers then count.
inline bool nested_external(const onnx::GraphProto& graph, bool nested = false) {
  bool found = false;
  if (nested)
    for_each_constant(graph, [&](const onnx::TensorProto& one) { found = found || is_external(one); });
  const auto sparse = [](const onnx::SparseTensorProto& one) {
    return is_external(one.values()) || is_external(one.indices());
  };
  for (const auto& one : graph.sparse_initializer()) found = found || sparse(one);
  for (const auto& node : graph.node()) {
    for (const auto& attribute : node.attribute()) {
      for (const auto& one : attribute.tensors()) found = found || is_external(one);
      found = found || (attribute.has_sparse_tensor() && sparse(attribute.sparse_tensor()));
      found = found || (attribute.has_g() && nested_external(attribute.g(), true));
      for (const auto& inner : attribute.graphs()) found = found || nested_external(inner, true);
    }
  }
  return found;
}

/// Returns the number of bytes of an external tensor of any type: those that a type of whole bytes needs,
/// else those of its entry "length"; nullopt if neither is known.
inline std::optional<std::uint64_t> external_bytes(const onnx::TensorProto& tensor, const std::string& path) {
  if (const auto dtype = floating_dtype(tensor)) return byte_size(tensor, *dtype, path);
  for (const auto& entry : tensor.external_data()) {
    std::uint64_t value = 0;
    if (entry.key() != "length") continue;
    const std::string& text = entry.value();
    if (std::from_chars(text.data(), text.data() + text.size(), value).ec == std::errc()) return value;
  }
  return std::nullopt;
}

/// Returns file, first byte and length of each external tensor of the main graph. Throws the errors of
/// place_of, and io_error for an external tensor without a known length or in a subgraph.
inline std::vector<external_place> external_places(const onnx::ModelProto& model, const std::string& path) {
  std::vector<external_place> all;
  for_each_constant(model.graph(), [&](const onnx::TensorProto& one) {
    if (!is_external(one)) return;
    const auto bytes = external_bytes(one, path);
    if (!bytes) {
      throw_error<io_error>({path, ": external data of tensor ", quote_name(one.name()), " have no length"});
    }
    all.push_back(place_of(one, *bytes, path));
  });
  if (nested_external(model.graph())) {
    throw_error<io_error>(
        {path, ": a subgraph, a sparse tensor or a list has external data, which are not supported"});
  }
  return all;
}

/// Writes the file of external data of a new model: NAME.data in the folder of the model NAME. The file
/// replaces an earlier one of this name only when commit() is called.
///
///     data_file_writer data("small.onnx", places);  // places: those of the model that is read
///     data.copy(tensor, place);                     // from the old file
///     data.move(other);                             // from the message
///     data.commit();
///
/// Each tensor starts at a multiple of 64 bytes. Without commit() no file is left (atomic_writer).
class data_file_writer {
 public:
  /// Opens the file OUT.data for the new model at the path `out`. Throws the io_error of atomic_writer, and
  /// io_error if the file is one of `sources`.
  data_file_writer(const std::string& out, const std::vector<external_place>& sources)
      : name_(split_path(out).second + ".data"), path_(split_path(out).first + "/" + name_), writer_(path_) {
    struct stat own {
    }, other{};
    for (const external_place& source : sources) {
      const bool same = ::stat(path_.c_str(), &own) == 0 && ::stat(source.file.c_str(), &other) == 0 &&
                        own.st_dev == other.st_dev && own.st_ino == other.st_ino;
      if (!same) continue;
      throw_error<io_error>(
          {path_, ": has external data of the model that is read; give the new model another name"});
    }
  }

  /// Copies the bytes of an external tensor from `place`, in pieces of 16 MiB, and lets the tensor refer to
  /// the copy. Throws io_error if a file cannot be read or written.
  void copy(onnx::TensorProto& tensor, const external_place& place) {
    struct stat status {};
    const file_descriptor file = open_for_reading(place.file, status);
    align();
    const std::uint64_t begin = size_;
    std::vector<std::uint8_t> buffer;
    for (std::uint64_t done = 0; done < place.length; done += buffer.size()) {
      buffer.resize(static_cast<std::size_t>(std::min(std::uint64_t{1} << 24, place.length - done)));
      read_all_at(file.get(), place.offset + done, buffer, place.file);
      append(buffer);
    }
    refer(tensor, begin);
  }

  /// Moves the raw_data of a tensor to the external data file, and lets the tensor refer to that file. Throws
  /// io_error if the file cannot be written.
  void move(onnx::TensorProto& tensor) {
    align();
    const std::uint64_t begin = size_;
    const std::string& raw = tensor.raw_data();
    append({reinterpret_cast<const std::uint8_t*>(raw.data()), raw.size()});
    tensor.clear_raw_data();
    refer(tensor, begin);
  }

  /// Gives the file its final name. Throws io_error if the file cannot be written completely.
  void commit() { writer_.commit(); }

 private:
  // Writes bytes at the end of the file.
  void append(std::span<const std::uint8_t> bytes) {
    writer_.write(bytes);
    size_ += bytes.size();
  }
  // Fills the file up to a multiple of 64 bytes, for readers that map it.
  void align() {
    const std::vector<std::uint8_t> zeros((64 - size_ % 64) % 64);
    append(zeros);
  }
  // Replaces the three entries that say where the data are, and leaves others, such as a checksum, out.
  void refer(onnx::TensorProto& tensor, std::uint64_t begin) {
    tensor.set_data_location(onnx::TensorProto::EXTERNAL);
    tensor.clear_external_data();
    const auto add = [&](const char* key, const std::string& value) {
      onnx::StringStringEntryProto& entry = *tensor.add_external_data();
      entry.set_key(key);
      entry.set_value(value);
    };
    add("location", name_);
    add("offset", std::to_string(begin));
    add("length", std::to_string(size_ - begin));
  }

  std::string name_, path_;
  atomic_writer writer_;
  std::uint64_t size_ = 0;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END
