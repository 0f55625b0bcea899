// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `safetensors_reader` and `safetensors_writer`: safetensors files that are too large to hold in memory.
/// Tensors are read one by one from the file, and written one by one.

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/io/file.hpp>
#include <pufferfish/io/safetensors.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The description of a tensor in a file, and the position of its bytes within the file's data section (after
/// the header).
struct tensor_place {
  std::string name;  ///< name of the tensor
  tensor_dtype dtype{};
  std::vector<index_t> shape;
  std::uint64_t offset = 0;  ///< first byte of the tensor within the data
  std::uint64_t bytes = 0;   ///< size of the tensor in bytes

  /// Number of elements: the product of the shape, 1 for an empty shape.
  index_t count() const { return static_cast<index_t>(bytes / size_of(dtype)); }
};

/// An open safetensors file, of which only the header is in memory. The header is checked as by
/// safetensors_file. The file stays open as long as the object exists, and must not change meanwhile.
/// \code
///   const safetensors_reader file("large.safetensors");
///   for (const tensor_place& tensor : file.tensors()) {
///     std::vector<std::uint8_t> bytes(static_cast<std::size_t>(tensor.bytes));
///     file.read(tensor, 0, bytes);
///   }
/// \endcode
class safetensors_reader {
 public:
  /// Opens a file, and reads and checks its header. Throws io_error for a path that is not a regular file,
  /// for a file that cannot be read, and for a header that safetensors_file::parse rejects.
  explicit safetensors_reader(const std::string& path) : name_(path) {
    struct stat status {};
    file_ = detail::open_for_reading(path, status);
    if (!S_ISREG(status.st_mode)) detail::throw_error<io_error>({path, ": not a regular file"});
    size_ = static_cast<std::uint64_t>(status.st_size);

    std::array<std::uint8_t, detail::format_bytes> begin_of_file{};
    const auto start = std::span(begin_of_file).first(std::min<std::uint64_t>(size_, begin_of_file.size()));
    detail::read_all_at(file_.get(), 0, start, name_);
    const std::size_t length = detail::safetensors_header_length(start, size_, name_);
    const std::size_t before = sizeof(std::uint64_t);
    data_ = before + length;
    std::string text(length, '\0');
    detail::read_all_at(file_.get(), before, {reinterpret_cast<std::uint8_t*>(text.data()), length}, name_);
    detail::safetensors_header_sax parsed = detail::parse_safetensors_header(text, name_);
    detail::check_safetensors_layout(parsed.items, size_ - data_, name_);
    metadata_ = std::move(parsed.metadata);
    for (detail::safetensors_item& item : parsed.items) {
      const std::uint64_t begin = (*item.offsets)[0], end = (*item.offsets)[1];
      tensors_.push_back({std::move(item.name), *item.dtype, std::move(*item.shape), begin, end - begin});
    }
  }

  /// Path, as given.
  const std::string& name() const { return name_; }
  /// Size of the whole file, in bytes.
  std::uint64_t size() const { return size_; }
  /// The tensors in the order of their data.
  const std::vector<tensor_place>& tensors() const { return tensors_; }
  /// The metadata of the file; empty if there are none.
  const safetensors_metadata& metadata() const { return metadata_; }

  /// Copies out.size() bytes of a tensor of this file, beginning at byte `from` of the tensor. Several
  /// threads may read at once. Throws value_error for bytes beyond the tensor, and io_error if the file
  /// cannot be read or has become shorter.
  void read(const tensor_place& tensor, std::uint64_t from, std::span<std::uint8_t> out) const {
    if (from > tensor.bytes || out.size() > tensor.bytes - from) {
      detail::throw_error<value_error>({name_, ": tensor ", detail::quote_name(tensor.name), " has ",
                                        tensor.bytes, " bytes; asked for are ", out.size(), " from byte ",
                                        from});
    }
    detail::read_all_at(file_.get(), data_ + tensor.offset + from, out, name_);
  }

 private:
  std::string name_;
  detail::file_descriptor file_;
  std::uint64_t size_ = 0;
  std::uint64_t data_ = 0;
  std::vector<tensor_place> tensors_;
  safetensors_metadata metadata_;
};

/// Writes a safetensors file tensor by tensor. The file appears in one step at the end (see atomic_writer);
/// without commit() there is no new file. The header precedes the data but is complete only after them, so
/// room is reserved for the header. Unused room is filled with spaces, as the format allows. A writer may be
/// used by one thread at a time.
/// \code
///   safetensors_writer writer("out.safetensors", safetensors_writer::room_for("w", 2));
///   writer.begin("w", tensor_dtype::f32, {2, 3});
///   writer.write(bytes);  // 24 bytes, in one call or several
///   writer.commit();
/// \endcode
class safetensors_writer {
 public:
  /// Opens the temporary file. `header_room`: upper bound of the header's size in bytes; add up room_for() of
  /// all tensors and metadata. Throws io_error if the file cannot be created.
  safetensors_writer(const std::string& path, std::size_t header_room)
      : name_(path), room_((header_room + 64 + 7) / 8 * 8), writer_(path) {
    const std::vector<std::uint8_t> blank(room_, ' ');
    writer_.write(blank);
  }

  /// Upper bound of the bytes that a tensor of `rank` dimensions takes in the header. For a pair of metadata
  /// use room_for(key + value, 0).
  static std::size_t room_for(const std::string& name, std::size_t rank) {
    // An escaped byte takes up to six bytes; extents and offsets take at most 20 digits each.
    return 6 * name.size() + 21 * rank + 128;
  }

  /// Begins a tensor, whose bytes write() then appends. Returns the number of the tensor: 0, 1, ... Begin
  /// tensors in order of descending element size, so that each tensor is aligned to its elements, as some
  /// readers require. Names are checked by commit(). Throws shape_error if the tensor before is incomplete,
  /// for a negative extent, for more than 64 dimensions, and for sizes beyond index_t.
  std::size_t begin(std::string name, tensor_dtype dtype, std::vector<index_t> shape) {
    check_complete();
    const std::optional<std::uint64_t> bytes = detail::tensor_bytes(dtype, shape);
    if (!bytes || shape.size() > detail::max_tensor_rank) {
      detail::throw_error<shape_error>(
          {name_, ": tensor ", detail::quote_name(name), " cannot have shape ", detail::shape_text(shape)});
    }
    missing_ = *bytes;
    tensors_.push_back({std::move(name), dtype, std::move(shape), offset_, *bytes});
    offset_ += *bytes;
    return tensors_.size() - 1;
  }

  /// Appends bytes of the tensor that was begun last. Throws shape_error for more bytes than the tensor's
  /// shape needs, and io_error if the file cannot be written.
  void write(std::span<const std::uint8_t> bytes) {
    if (bytes.size() > missing_) {
      detail::throw_error<shape_error>(
          {name_, ": ", bytes.size(), " bytes where a tensor has ", missing_, " left"});
    }
    writer_.write(bytes);
    missing_ -= bytes.size();
  }

  /// Renames a tensor that has been begun, for names that are known late. `tensor`: the number that begin()
  /// has returned. Throws std::out_of_range for another number.
  void rename(std::size_t tensor, std::string name) { tensors_.at(tensor).name = std::move(name); }

  /// The tensors begun so far, in the order of their data.
  const std::vector<tensor_place>& tensors() const { return tensors_; }

  /// Writes the header and replaces the file. Throws shape_error for an incomplete tensor. Throws io_error
  /// for duplicate names, the name "__metadata__", strings that are not UTF-8, a header that is larger than
  /// its room, and if the file cannot be written.
  void commit(const safetensors_metadata& metadata = {}) {
    check_complete();
    std::vector<std::string> names{std::string(detail::metadata_key)};
    for (const tensor_place& tensor : tensors_) names.push_back(tensor.name);
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    if (twice != names.end()) {
      detail::throw_error<io_error>({name_, ": tensor name ", detail::quote_name(*twice), " is taken"});
    }
    const std::string header = detail::safetensors_header(tensors_, metadata, name_, room_);
    if (header.size() != room_) {
      detail::throw_error<io_error>(
          {name_, ": a header of ", header.size(), " bytes where room was left for ", room_});
    }
    writer_.overwrite(0, {reinterpret_cast<const std::uint8_t*>(header.data()), header.size()});
    writer_.commit();
  }

 private:
  // Throws shape_error unless all bytes of the last tensor have been written.
  void check_complete() const {
    if (missing_ == 0) return;
    detail::throw_error<shape_error>(
        {name_, ": tensor ", detail::quote_name(tensors_.back().name), " lacks ", missing_, " of its bytes"});
  }

  std::string name_;
  std::size_t room_;
  atomic_writer writer_;
  std::vector<tensor_place> tensors_;
  std::uint64_t offset_ = 0;
  std::uint64_t missing_ = 0;
};

PUFFERFISH_NAMESPACE_END
