// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Files of tensors of either format, read and written tensor by tensor: .npz if the name has that
/// ending, safetensors otherwise. An npz file is held in memory as a whole, for reading and for
/// writing; of a safetensors file, only the header and the bytes of the current call are held.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/io/npz.hpp>
#include <pufferfish/io/safetensors_stream.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A file of tensors, open for reading.
/// \code
///   const std::unique_ptr<tensor_source> file = open_tensor_source("weights.npz");
///   for (const tensor_place& tensor : file->tensors()) {
///     std::vector<std::uint8_t> bytes(static_cast<std::size_t>(tensor.bytes));
///     file->read(tensor, 0, bytes);
///   }
/// \endcode
class tensor_source {
 public:
  tensor_source() = default;
  tensor_source(const tensor_source&) = delete;
  tensor_source& operator=(const tensor_source&) = delete;
  virtual ~tensor_source() = default;

  virtual const std::string& name() const = 0;
  virtual const std::vector<tensor_place>& tensors() const = 0;
  /// Metadata of a safetensors file; empty for npz.
  virtual const safetensors_metadata& metadata() const = 0;
  /// Copies bytes of a tensor, from its byte `from` on. Any number of threads may read at once. `tensor` is
  /// one of tensors(). Errors as safetensors_reader::read.
  virtual void read(const tensor_place& tensor, std::uint64_t from, std::span<std::uint8_t> out) const = 0;
};

/// A file of tensors to be written: begin() one tensor, write() its bytes,
/// and so on; commit() creates the file. Without commit() there is no file.
class tensor_sink {
 public:
  tensor_sink() = default;
  tensor_sink(const tensor_sink&) = delete;
  tensor_sink& operator=(const tensor_sink&) = delete;
  virtual ~tensor_sink() = default;

  /// As in safetensors_writer. An npz file checks sizes and names only in commit(), but begin() throws
  /// io_error for a dtype that NumPy does not have. write() requires a tensor that has been begun.
  virtual std::size_t begin(std::string name, tensor_dtype dtype, std::vector<index_t> shape) = 0;
  virtual void write(std::span<const std::uint8_t> bytes) = 0;
  virtual void rename(std::size_t tensor, std::string name) = 0;
  /// An npz file cannot hold metadata: they are dropped. Errors as safetensors_writer::commit or write_npz.
  virtual void commit(const safetensors_metadata& metadata) = 0;
};

namespace detail {

inline bool is_npz_name(std::string_view path) {
  constexpr std::string_view ending = ".npz";
  return path.size() >= ending.size() && path.substr(path.size() - ending.size()) == ending;
}

/// Reads from the file in every call.
class safetensors_source final : public tensor_source {
 public:
  explicit safetensors_source(const std::string& path) : reader_(path) {}
  const std::string& name() const override { return reader_.name(); }
  const std::vector<tensor_place>& tensors() const override { return reader_.tensors(); }
  const safetensors_metadata& metadata() const override { return reader_.metadata(); }
  void read(const tensor_place& tensor, std::uint64_t from, std::span<std::uint8_t> out) const override {
    reader_.read(tensor, from, out);
  }

 private:
  safetensors_reader reader_;
};

/// Holds the whole file in memory.
class npz_source final : public tensor_source {
 public:
  explicit npz_source(const std::string& path) : file_(npz_file::read(path)) {
    for (const std::string& tensor : file_.tensor_names()) {
      const tensor_info& info = file_.tensor(tensor);
      places_.push_back({tensor, info.dtype, info.shape, 0, info.bytes.size()});
    }
  }
  const std::string& name() const override { return file_.name(); }
  const std::vector<tensor_place>& tensors() const override { return places_; }
  const safetensors_metadata& metadata() const override { return none_; }
  void read(const tensor_place& tensor, std::uint64_t from, std::span<std::uint8_t> out) const override {
    const std::span<const std::uint8_t> bytes = file_.tensor(tensor.name).bytes;
    if (from > bytes.size() || out.size() > bytes.size() - from) {
      PUFFERFISH_THROW(value_error(file_.name() + ": tensor " + quote_name(tensor.name) + " has " +
                                   std::to_string(bytes.size()) + " bytes; asked for are " +
                                   std::to_string(out.size()) + " from byte " + std::to_string(from)));
    }
    if (!out.empty()) std::memcpy(out.data(), bytes.data() + from, out.size());
  }

 private:
  npz_file file_;
  std::vector<tensor_place> places_;
  safetensors_metadata none_;
};

/// Writes to the file in every call.
class safetensors_sink final : public tensor_sink {
 public:
  safetensors_sink(const std::string& path, std::size_t room) : writer_(path, room) {}
  std::size_t begin(std::string name, tensor_dtype dtype, std::vector<index_t> shape) override {
    return writer_.begin(std::move(name), dtype, std::move(shape));
  }
  void write(std::span<const std::uint8_t> bytes) override { writer_.write(bytes); }
  void rename(std::size_t tensor, std::string name) override { writer_.rename(tensor, std::move(name)); }
  void commit(const safetensors_metadata& metadata) override { writer_.commit(metadata); }

 private:
  safetensors_writer writer_;
};

/// Keeps all bytes in memory until commit().
class npz_sink final : public tensor_sink {
 public:
  explicit npz_sink(const std::string& path) : path_(path) { atomic_writer{path}; }  // fails early
  std::size_t begin(std::string name, tensor_dtype dtype, std::vector<index_t> shape) override {
    (void)npy_header_text(dtype, {}, path_ + ": array " + quote_name(name));  // throws if NumPy lacks it
    entries_.push_back({std::move(name), dtype, std::move(shape), {}});
    bytes_.emplace_back();
    return entries_.size() - 1;
  }
  void write(std::span<const std::uint8_t> bytes) override {
    bytes_.back().insert(bytes_.back().end(), bytes.begin(), bytes.end());
  }
  void rename(std::size_t tensor, std::string name) override { entries_.at(tensor).name = std::move(name); }
  void commit(const safetensors_metadata&) override {
    for (std::size_t i = 0; i < entries_.size(); ++i) entries_[i].bytes = bytes_[i];
    write_npz(path_, entries_);
  }

 private:
  std::string path_;
  std::vector<tensor_entry> entries_;
  std::vector<std::vector<std::uint8_t>> bytes_;
};

}  // namespace detail

/// Opens a file for reading. Throws io_error as npz_file::read or safetensors_reader.
inline std::unique_ptr<tensor_source> open_tensor_source(const std::string& path) {
  if (detail::is_npz_name(path)) return std::make_unique<detail::npz_source>(path);
  return std::make_unique<detail::safetensors_source>(path);
}

/// Begins a file. `header_room`: as for safetensors_writer. Throws io_error if it cannot be written.
inline std::unique_ptr<tensor_sink> open_tensor_sink(const std::string& path, std::size_t header_room) {
  if (detail::is_npz_name(path)) return std::make_unique<detail::npz_sink>(path);
  return std::make_unique<detail::safetensors_sink>(path, header_room);
}

PUFFERFISH_NAMESPACE_END
