// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// NumPy's .npz: named arrays in a zip archive, each as NAME.npy. numpy.savez and
/// numpy.savez_compressed write this format, numpy.load reads it. Needs zlib only.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/core/error.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/io/error_text.hpp>
#include <pufferfish/io/file.hpp>
#include <pufferfish/io/npy.hpp>
#include <pufferfish/io/tensor_info.hpp>
#include <pufferfish/io/zip.hpp>

PUFFERFISH_NAMESPACE_BEGIN

static_assert(std::endian::native == std::endian::little, "pufferfish: tensors are held little-endian");

/// An npz file, checked and held in memory. Its arrays are tensor_info: little-endian and in
/// row-major order, whatever the file's layout. Arrays that are compressed, big-endian or in
/// Fortran order are held a second time. Read them with read_tensor and read_tensor_converted.
/// Move-only. Const members may be called by several threads at once.
/// \code
///   const npz_file file = npz_file::read("weights.npz");
///   std::vector<float> weight(static_cast<std::size_t>(file.tensor("fc.weight").count()));
///   read_tensor_converted<float>(file, "fc.weight", weight);  // the file may have float64
/// \endcode
class npz_file {
 public:
  /// Reads and checks a file. `limit`: largest size accepted, in bytes, of the file and of its arrays
  /// together after decompression. Throws io_error as parse and read_file do.
  static npz_file read(const std::string& path, std::uint64_t limit = default_tensor_file_limit) {
    return parse(read_file(path, limit), path, limit);
  }

  /// Takes ownership of the bytes of a file and checks them. `name`: used in error messages. Throws
  /// io_error, with the entry's name and the numbers, for: no zip archive, a directory or entries beyond
  /// the data, entries that overlap or occur twice, compressions other than deflate, encryption, a
  /// declared size above the entry's content or `limit`, a wrong checksum, an entry that is no .npy array,
  /// a header that is not NumPy's dictionary, dtypes other than booleans and numbers of 1 to 8 bytes, and
  /// shapes that do not fit their bytes. Arrays of Python objects are rejected; nothing is ever unpickled.
  static npz_file parse(std::vector<std::uint8_t> bytes, std::string name,
                        std::uint64_t limit = default_tensor_file_limit) {
    npz_file result(std::move(bytes), std::move(name));
    for (const detail::zip_entry& entry : detail::zip_directory_reader(result.bytes_, result.name_)(limit)) {
      result.add(entry);
    }
    return result;
  }

  // The arrays' spans point into bytes_ and own_: moving keeps them valid, copying would not.
  npz_file(npz_file&&) noexcept = default;
  npz_file& operator=(npz_file&&) noexcept = default;

  /// Path or name, as given.
  const std::string& name() const { return name_; }
  /// Names of the arrays, without ".npy", in the order of the archive's directory.
  const std::vector<std::string>& tensor_names() const { return order_; }
  bool contains(std::string_view tensor) const { return tensors_.find(tensor) != tensors_.end(); }

  /// An array by name. The reference is valid as long as this
  /// object. Throws io_error if there is no array of that name.
  const tensor_info& tensor(std::string_view tensor) const {
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end()) {
      PUFFERFISH_THROW(io_error(name_ + ": has no array " + detail::quote_name(tensor) + " among its " +
                                std::to_string(tensors_.size())));
    }
    return found->second;
  }

 private:
  npz_file(std::vector<std::uint8_t> bytes, std::string name)
      : bytes_(std::move(bytes)), name_(std::move(name)) {}

  // Checks an entry and adds its array. Decompresses it, and converts it to row-major little-endian order, if
  // necessary.
  void add(const detail::zip_entry& entry) {
    constexpr std::string_view ending = ".npy";
    const std::string where = name_ + ": array " + detail::quote_name(entry.name);
    if (entry.name.size() < ending.size() ||
        entry.name.compare(entry.name.size() - ending.size(), ending.size(), ending) != 0) {
      PUFFERFISH_THROW(io_error(where + " is no .npy file" +
                                (entry.name.ends_with("data.pkl") ? detail::foreign_format(bytes_) : "")));
    }
    std::string tensor = entry.name.substr(0, entry.name.size() - ending.size());
    if (contains(tensor)) PUFFERFISH_THROW(io_error(where + " is there twice"));

    const bool packed = entry.method == detail::zip_deflated;
    std::vector<std::uint8_t> unpacked;
    if (packed) unpacked = detail::inflate_zip_entry(entry, name_);
    const std::span<const std::uint8_t> content =
        packed ? std::span<const std::uint8_t>(unpacked) : entry.data;
    detail::check_zip_crc(entry, content, name_);
    detail::npy_header header = detail::parse_npy(content, where);
    std::span<const std::uint8_t> elements = content.subspan(header.data);
    if (header.big_endian || (header.fortran_order && header.shape.size() > 1)) {
      elements = own_.emplace_back(detail::npy_to_row_major(header, elements));
    } else if (packed) {
      elements = std::span<const std::uint8_t>(own_.emplace_back(std::move(unpacked))).subspan(header.data);
    }
    tensors_.emplace(tensor, tensor_info{header.dtype, std::move(header.shape), elements});
    order_.push_back(std::move(tensor));
  }

  std::vector<std::uint8_t> bytes_;
  std::vector<std::vector<std::uint8_t>> own_;
  std::string name_;
  std::vector<std::string> order_;
  std::map<std::string, tensor_info, std::less<>> tensors_;
};

/// Options of write_npz and encode_npz.
struct npz_options {
  /// Compress with deflate, as numpy.savez_compressed does. Trained weights hardly become smaller.
  bool compress = false;
  /// Use the 64-bit forms of zip even if the archive does not need them.
  bool always_zip64 = false;
};

namespace detail {

/// Pointers to the entries, sorted by name, so that the result does not depend on the caller's order.
inline std::vector<const tensor_entry*> ordered_arrays(std::span<const tensor_entry> entries,
                                                       const std::string& file) {
  std::vector<const tensor_entry*> order;
  for (const tensor_entry& entry : entries) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return a->name < b->name; });
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::string& name = order[i]->name;
    check_entry(*order[i], file);
    if (i > 0 && order[i - 1]->name == name) {
      PUFFERFISH_THROW(io_error(file + ": array name " + quote_name(name) + " is taken"));
    }
    if (first_invalid_utf8(name) != name.size() || name.find('\0') != std::string::npos ||
        name.size() > 0xffff - 4) {
      PUFFERFISH_THROW(io_error(file + ": array name " + quote_name(name) + " is not UTF-8 or too long"));
    }
  }
  return order;
}

/// Passes the file to `sink` piece by piece.
template <class Sink>
void emit_npz(std::span<const tensor_entry> entries, const npz_options& options, const std::string& file,
              const Sink& sink) {
  struct array {
    const tensor_entry* entry;
    std::string header;
  };
  std::vector<array> arrays;  // headers first, so that a dtype that NumPy lacks creates no file
  for (const tensor_entry* entry : ordered_arrays(entries, file)) {
    arrays.push_back(
        {entry, npy_header_text(entry->dtype, entry->shape, file + ": array " + quote_name(entry->name))});
  }
  zip_writer<Sink> writer(sink, options.always_zip64);
  for (const array& each : arrays) {
    const std::span<const std::uint8_t> header(reinterpret_cast<const std::uint8_t*>(each.header.data()),
                                               each.header.size());
    const std::span<const std::uint8_t> elements = each.entry->bytes;
    zip_entry entry;
    entry.name = each.entry->name + ".npy";
    entry.crc = zip_crc(zip_crc(0, header), elements);
    entry.size = entry.packed = header.size() + elements.size();
    if (!options.compress) {
      writer.add(std::move(entry), {header, elements});
      continue;
    }
    const std::vector<std::uint8_t> packed = deflate_for_zip(header, elements, file);
    entry.method = zip_deflated;
    entry.packed = packed.size();
    writer.add(std::move(entry), {packed});
  }
  writer.finish();
}

}  // namespace detail

/// The bytes of an npz file, for tests and for sending.
/// `name`: used in error messages. Throws as write_npz does.
inline std::vector<std::uint8_t> encode_npz(std::span<const tensor_entry> entries,
                                            const npz_options& options = {},
                                            const std::string& name = "encode_npz") {
  std::vector<std::uint8_t> bytes;
  detail::emit_npz(entries, options, name, [&](std::span<const std::uint8_t> piece) {
    bytes.insert(bytes.end(), piece.begin(), piece.end());
  });
  return bytes;
}

/// Writes arrays to `path` in one step (see atomic_writer), directly from the entries' memory.
/// Equal content gives equal files, whatever the order of the entries (for one version of zlib if
/// compressed). Throws shape_error for an entry whose bytes do not fit its shape; io_error for
/// duplicate names or names that are not UTF-8, for dtypes that NumPy does not have (BF16 and the
/// 8-bit floating-point types), and if the file cannot be written (the old one is then unchanged, except as
/// atomic_writer::commit says).
/// \code
///   const std::vector<float> values(6);
///   const std::vector<tensor_entry> entries{make_tensor_entry("w", {2, 3}, std::span(values))};
///   write_npz("w.npz", entries);  // in Python: numpy.load("w.npz")["w"]
/// \endcode
inline void write_npz(const std::string& path, std::span<const tensor_entry> entries,
                      const npz_options& options = {}) {
  std::optional<atomic_writer> writer;  // opened with the first piece: bad entries create no file
  detail::emit_npz(entries, options, path, [&](std::span<const std::uint8_t> piece) {
    if (!writer) writer.emplace(path);
    writer->write(piece);
  });
  writer->commit();
}

PUFFERFISH_NAMESPACE_END
